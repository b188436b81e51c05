"""Each record's example fails with exactly that id, and its mended form runs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from sparse_mla.errors import RECORDS, ErrorRecord, SparseMLAError
from sparse_mla.errors.explain import find

NEED_HARDWARE = {
    "slow-backend",
    "kernel-load-failed",
    "kernel-launch-failed",
    "illegal-memory-access",
    "out-of-memory",
}
OURS = [record for record in RECORDS.values() if not record.reported_as]
OBSERVED = [record for record in RECORDS.values() if record.reported_as]


def _why_not(record: ErrorRecord) -> str | None:
    """What this machine lacks for the record's examples."""
    for need in record.needs:
        if need == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if need == "hopper" and (
            not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0)
        ):
            return "there is no Hopper GPU"
        if need == "nvrtc" and not _has_nvrtc():
            return "cuda.bindings.nvrtc is not installed"
    return None


def _has_nvrtc() -> bool:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError):
        return False
    return True


@pytest.fixture
def own_environment() -> Iterator[None]:
    """What an example puts into the environment or among the modules ends with it."""
    importlib.import_module("sparse_mla.interface")  # what an example imports first is dropped
    with mock.patch.dict(os.environ), mock.patch.dict(sys.modules), warnings.catch_warnings():
        yield


def _run(program: str, name: str) -> None:
    exec(compile(program, f"<{name}>", "exec"), {"__name__": "__main__"})


def _run_alone(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )


def _id(fault: BaseException) -> str:
    """The id of one of our exceptions, or of a warning made an error, which quotes its record."""
    if isinstance(fault, SparseMLAError):
        return fault.id
    assert isinstance(fault, Warning), repr(fault)
    return str(fault).rpartition("sparse-mla explain ")[2]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("record", OURS, ids=lambda record: record.id)
def test_before_fails_with_this_id(record: ErrorRecord) -> None:
    reason = _why_not(record)
    if reason is not None:
        pytest.skip(reason)
    with pytest.raises((SparseMLAError, Warning)) as caught:
        _run(record.before, f"{record.id}-before")
    assert _id(caught.value) == record.id
    if isinstance(caught.value, SparseMLAError):
        assert type(caught.value) is record.exception
        assert all(_is_plain(value) for value in caught.value.context.values())
        assert "?" not in str(caught.value)


@pytest.mark.parametrize("record", OBSERVED, ids=lambda record: record.id)
def test_before_ends_in_a_text_that_is_explained(record: ErrorRecord) -> None:
    reason = _why_not(record)
    if reason is not None:
        pytest.skip(reason)
    done = _run_alone(record.before)  # a crash on the GPU would spoil the tests that follow
    assert done.returncode != 0
    assert find(done.stderr)[0].record.id == record.id


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)
def test_after_runs(record: ErrorRecord) -> None:
    reason = _why_not(record)
    if reason is not None:
        pytest.skip(reason)
    _run(record.after, f"{record.id}-after")


def test_few_examples_need_hardware() -> None:
    assert {r.id for r in RECORDS.values() if {"cuda", "hopper"} & {*r.needs}} == NEED_HARDWARE


def test_an_example_runs_as_a_file_of_its_own() -> None:
    record = RECORDS["h-kv-not-one"]
    done = [_run_alone(program) for program in (record.before, record.after)]
    assert "requires h_kv=1, got 8" in done[0].stderr
    assert [run.returncode for run in done] == [1, 0]
