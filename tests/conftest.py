"""What every test gets: a clean environment, reproducible properties, a reason for skipping."""

from __future__ import annotations

import os
import sys
from functools import lru_cache

import pytest
from hypothesis import settings

# Examples run as long as they need on a shared machine; in CI they are the same ones each time.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SPARSE_MLA_ variable of the developer's shell must not change what a test means."""
    for name in [name for name in os.environ if name.startswith("SPARSE_MLA_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    """What a test draws does not depend on the tests before it."""
    torch = sys.modules.get("torch")  # tests of the command line's start do without it
    if torch is not None:
        torch.manual_seed(0)


@lru_cache(maxsize=1)
def _why_no_hopper() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "needs a Hopper GPU: torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        name = torch.cuda.get_device_name()
        return f"needs a Hopper GPU (9.0): {name} is {capability[0]}.{capability[1]}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` where there is no Hopper GPU, and say why."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_hopper() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
