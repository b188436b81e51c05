"""Each record's guard meets the fault of its example, and lets the mended example pass."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import sparse_mla
from sparse_mla import callfile
from sparse_mla.errors import RECORDS, ErrorRecord, SparseMLAError
from sparse_mla.errors.records.guards import GUARDS

# What the examples write straight into the call, and the guards take from a variable:
# the value that fails, and one that works.
VALUES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "d-v-unsupported": ({"d_v": 128}, {"d_v": 512}),
    "scale-missing": ({"kv_scale": None}, {"kv_scale": 1.0}),
    "scale-not-positive-number": ({"kv_scale": 0.0}, {"kv_scale": 0.5}),
    "quantize-per": ({"per": "block"}, {"per": "token"}),
    "backend-unknown": ({"backend": "flashmla_sparse"}, {"backend": "auto"}),
    "nan-in-output": ({"out": torch.full((1,), torch.nan)}, {"out": torch.zeros(1)}),
}

# Guards that mend: these variables, run through the guard, make the example's call succeed.
MENDED: dict[str, str] = {
    "not-a-tensor": "",
    "not-strided": "",
    "q-ndim": "",
    "kv-ndim": "",
    "indices-ndim": "",
    "topk-not-multiple-of-128": "",
    "not-contiguous": "",
    "indices-not-int32": "",
    "output-invalid": "out = buffer",
    "outputs-overlap": "max_logits = lse = stats",
    "topk-length-invalid": "",
    "attn-sink-invalid": "attn_sink = sink",
    "scale-invalid": "",
    "last-dim-not-dense": "",
    "q-dtype-unsupported": "",
    "kv-dtype-unsupported": "",
    "no-backward": "",
    "scale-without-fp8": "kv_scale = 0.5",
    "q-scale-shape": "",
    "kv-scale-shape": "",
    "topk-length-out-of-range": "topk_length = lengths",
    "quantize-input": "x = torch.arange(576).reshape(1, 576)",
    "quantize-scale": "scale = 0.0",
    "file-not-written": "",
}
FAULTS = (ValueError, TypeError, LookupError, ArithmeticError, OSError, SystemExit)
STRICT_OPTIONS = ("out", "max_logits", "lse", "topk_length", "attn_sink")

REFUSED = [
    "indices-shape",
    "d-qk-mismatch",
    "h-kv-not-one",
    "d-qk-unsupported",
    "d-v-unsupported",
    "device-mismatch",
    "not-e4m3fn",
    "sm-scale-invalid",
    "kv-shape",
    "indices-shape-general",
    "d-qk-unsupported-general",
    "no-heads",
    "unquantised-kv-with-fp8-q",
    "scale-missing",
    "scale-not-positive-number",
    "index-out-of-range",
    "scale-data-invalid",
    "nan-in-input",
    "quantize-per",
    "merge-shapes",
    "backend-unknown",
    "no-backend",
    "nan-in-output",
    "file-unreadable",
    "file-not-safetensors",
    "file-not-a-call",
    "file-tensor-missing",
    "dump-failed",
]
"""Guards that raise where the example fails, and do nothing where it is mended."""


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    importlib.import_module("sparse_mla.interface")  # what an example imports first is dropped
    with mock.patch.dict(os.environ), mock.patch.dict(sys.modules), warnings.catch_warnings():
        yield


def _names() -> dict[str, Any]:
    public = {name: getattr(sparse_mla, name) for name in sparse_mla.__all__}
    return {**public, "torch": torch, "os": os, "tempfile": tempfile, "__name__": "__main__"}


def _after_running(program: str) -> dict[str, Any]:
    """The variables of an example when it has run, or failed."""
    names = {**_names(), "load_call": callfile.load_call}
    with contextlib.suppress(SparseMLAError, Warning, FloatingPointError):
        exec(compile(program, "<example>", "exec"), names)
    return names


def test_every_record_has_a_guard() -> None:
    assert GUARDS.keys() == RECORDS.keys()


@pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)
def test_a_guard_is_short_and_is_python(record: ErrorRecord) -> None:
    assert record.guard == GUARDS[record.id]
    ast.parse(record.guard)
    lines = record.guard.splitlines()
    assert 1 <= len(lines) <= 8
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.parametrize("id", REFUSED)
def test_a_guard_refuses_what_fails_and_nothing_else(id: str) -> None:
    record = RECORDS[id]
    bad, good = VALUES.get(id, ({}, {}))
    names = {**_after_running(record.before), **bad}
    with pytest.raises(FAULTS):
        exec(record.guard, names)
    names = {**_after_running(record.after), **good}
    exec(record.guard, names)


@pytest.mark.parametrize("id", MENDED)
def test_a_guard_mends_what_fails(id: str) -> None:
    record = RECORDS[id]
    names = _after_running(record.before)
    exec(MENDED[id], names)
    exec(record.guard, names)
    if "SPARSE_MLA_DEBUG" in record.before:
        os.environ["SPARSE_MLA_DEBUG"] = "1"
    _call(record, names)


def _call(record: ErrorRecord, names: dict[str, Any]) -> None:
    """The example's call with the mended variables."""
    if "quantize_fp8" in record.operators:
        sparse_mla.quantize_fp8(names.get("x", torch.ones(4, 576)), scale=names.get("scale"))
    elif record.id == "file-not-written":
        callfile.save_call(names["path"], names["call"])
    elif "sparse_mla_q8kv8_prefill_fwd(" in record.before:
        wanted = MENDED[record.id] + record.guard
        sparse_mla.sparse_mla_q8kv8_prefill_fwd(
            names["q"],
            names["kv"],
            names["indices"],
            names["sm_scale"],
            q_scale=names["scale"],
            kv_scale=names["scale"],
            **{name: names[name] for name in STRICT_OPTIONS if f"{name} = " in wanted},
        )
    else:
        is_fp8 = names["kv"].dtype == torch.float8_e4m3fn
        sparse_mla.sparse_mla_prefill(
            names["q"],
            names["kv"],
            names["indices"],
            q_scale=names.get("q_scale"),
            kv_scale=names.get("kv_scale", 1.0 if is_fp8 else None),
        )


def test_few_guards_are_only_read() -> None:
    """These need a GPU, a driver or a cache to meet their fault."""
    assert RECORDS.keys() - {*REFUSED} - MENDED.keys() == {
        "h-q-not-multiple-of-64",
        "backend-refused",
        "slow-backend",
        "nvrtc-missing",
        "cuda-driver-missing",
        "kernel-compile-failed",
        "kernel-load-failed",
        "kernel-launch-failed",
        "cache-unwritable",
        "cache-untrusted",
        "cache-corrupt",
        "illegal-memory-access",
        "gpu-unsupported",
        "driver-too-old",
        "out-of-memory",
        "file-too-large",
    }


def test_the_guard_for_head_counts_chooses_the_operator() -> None:
    names = _after_running(RECORDS["h-q-not-multiple-of-64"].before)
    exec(RECORDS["h-q-not-multiple-of-64"].guard, names)
    assert names["call"] is sparse_mla.sparse_mla_prefill
    names["q"] = torch.zeros(4, 128, 576)
    exec(RECORDS["h-q-not-multiple-of-64"].guard, names)
    assert names["call"] is sparse_mla.sparse_mla_q8kv8_prefill_fwd


@pytest.mark.parametrize(
    ("dtype", "scale", "bound"), [(torch.float64, 1.0, 2**-8), (torch.float8_e5m2, 0.5, 2**-4)]
)
def test_the_guard_for_the_dtype_of_q_keeps_its_values(
    dtype: torch.dtype, scale: float, bound: float
) -> None:
    """Within what bfloat16 and e4m3 round, of the largest value where those below are subnormal."""
    q = torch.randn(4, 16, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    names = {**_names(), "q": q, "q_scale": scale}
    exec(RECORDS["q-dtype-unsupported"].guard, names)
    assert names["q"].dtype in (torch.bfloat16, torch.float8_e4m3fn)
    values, wanted = names["q"].double() * names["q_scale"], q.double() * scale
    slack = wanted.abs().max() * 2**-17
    assert ((values - wanted).abs() <= bound * wanted.abs() + slack).all()
