"""Kernels compiled for tests."""

from __future__ import annotations

import pytest

from sparse_mla import BackendError, jit


def compiled(variant: jit.Variant) -> jit.Compiled:
    """The variant, compiled; where there is no NVRTC the test is skipped."""
    try:
        return jit.compile_variant(variant)
    except BackendError as failure:
        if failure.id == "nvrtc-missing":
            pytest.skip(str(failure).splitlines()[0])
        raise
