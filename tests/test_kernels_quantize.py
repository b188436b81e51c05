"""The kernel that quantises queries, compiled for Hopper, and the struct of its launch."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels import compiled

from sparse_mla import BackendError, dispatch, jit, quantize, sparse_mla_prefill
from sparse_mla.backends import sm90, sm90_plan, sm90_quantize

pytestmark = pytest.mark.usefixtures("kernel_cache")

REGISTERS = 80
"""A thread: three CTAs of 256 threads on a multiprocessor, whose loads keep its memory busy."""

VARIANTS = {variant.name: variant for variant in sm90_quantize.KERNELS.values()}
FIELDS = (
    "q", "given", "stored", "scale", "q_stride_token", "q_stride_head", "rows", "h_q",
    "given_stride_token", "given_stride_head",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str) -> None:
    used = compiled(VARIANTS[name]).resources
    assert (used.spill_stores, used.spill_loads, used.stack, used.smem) == (0, 0, 0, 0)
    assert used.registers <= REGISTERS


def test_the_backend_lists_every_variant() -> None:
    listed = sm90.variants()
    assert {*listed} == {*sm90_plan.KERNELS.values(), *VARIANTS.values()}
    assert len({variant.name for variant in listed}) == len(listed)


def test_the_struct_is_packed_as_the_kernel_reads_it() -> None:
    """Field by field: all of eight bytes before all of four, so that C leaves no gaps."""
    source = (jit.KERNELS / "sm90/quantize.cuh").read_text()
    body = re.search(r"^struct QuantizeParams \{\n(.*?)^\};", source, re.MULTILINE | re.DOTALL)
    assert body
    fields = re.findall(r"^  (?:const )?(\w+)(\*?) (\w+);", body[1], re.MULTILINE)
    letters = {"i64": "q", "u32": "I", "int": "i"}
    packed = ["Q" if pointer else letters[kind] for kind, pointer, _ in fields]
    assert [name for _, _, name in fields] == list(FIELDS)
    spelled = re.sub(r"(\d)(\w)", lambda m: int(m[1]) * m[2], sm90_quantize.PARAMS.format)
    assert "<" + "".join(packed) == spelled
    assert "".join(packed).lower().startswith("qqqqqqi")


@pytest.mark.parametrize("dtype", sm90_quantize.ELEMENTS, ids=str)
def test_the_kernel_has_the_sizes_of_its_launch(dtype: torch.dtype, tmp_path: Path) -> None:
    claims = [
        f"sizeof(QuantizeParams) == {sm90_quantize.PARAMS.size}",
        f"kThreads == {sm90_quantize.THREADS}",
        f"kRows == {sm90_quantize.rows_of_a_cta(dtype)}",
        f"kElementBytes == {dtype.itemsize}",
    ]
    shutil.copytree(jit.KERNELS / "sm90", tmp_path / "sm90")
    asserts = "".join(f"static_assert({claim});\n" for claim in claims)
    (tmp_path / "probe.cu").write_text(f'#include "sm90/quantize.cuh"\n{asserts}')
    compiled(replace(sm90_quantize.KERNELS[576, dtype], root=tmp_path, source="probe.cu"))


# The host side, with a driver that writes down what it is asked for


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []

    def load(variant: jit.Variant, device: int) -> Any:
        class Kernel:
            def launch(self, grid: Any, block: Any, smem: int, stream: int, address: int) -> None:
                assert (block, smem, grid[1:]) == ((256, 1, 1), 0, (1, 1))
                data = ctypes.string_at(address, sm90_quantize.PARAMS.size)
                values = sm90_quantize.PARAMS.unpack(data)
                seen.append(
                    dict(zip(FIELDS, values, strict=True))
                    | {"kernel": variant.name, "grid": grid[0], "stream": stream}
                )

        return Kernel()

    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return seen


@pytest.mark.parametrize("dtype", sm90_quantize.ELEMENTS, ids=str)
@pytest.mark.parametrize(
    ("given", "strides"),
    [(None, None), ((), (0, 0)), ((1,), (0, 0)), ((5,), (1, 0)), ((5, 13), (13, 1))],
    ids=str,
)
def test_what_a_launch_is_told(
    given: tuple[int, ...] | None,
    strides: tuple[int, int] | None,
    dtype: torch.dtype,
    launches: list[dict[str, Any]],
) -> None:
    q = torch.zeros(5, 20, 600, dtype=dtype)[:, 3:16, 8:584]
    q_scale = None if given is None else torch.ones(given)
    stored, scale = sm90_quantize.quantize_queries(q, q_scale)
    assert (stored.shape, stored.dtype) == ((5, 13, 576), torch.float8_e4m3fn)
    assert scale.shape == ((5, 13) if given is None else given or (1,))
    (launch,) = launches
    assert launch["grid"] == (math.ceil(65 / 32) if dtype.itemsize == 2 else math.ceil(65 / 16))
    assert launch["stream"] == 77
    assert launch["kernel"] == f"quantize-d576-{str(dtype).removeprefix('torch.')}"
    expected = {
        "q": q.data_ptr(),
        "given": 0 if q_scale is None else q_scale.data_ptr(),
        "stored": stored.data_ptr(),
        "scale": scale.data_ptr() if q_scale is None else 0,
        "q_stride_token": 20 * 600 * dtype.itemsize,
        "q_stride_head": 600 * dtype.itemsize,
        "rows": 65,
        "h_q": 13,
    }
    assert {name: launch[name] for name in expected} == expected
    if strides is not None:
        assert (launch["given_stride_token"], launch["given_stride_head"]) == strides


def test_the_stride_of_a_single_token_or_head_does_not_spoil_the_alignment(
    launches: list[dict[str, Any]],
) -> None:
    wide = torch.zeros(9, 9, 515, dtype=torch.bfloat16)
    sm90_quantize.quantize_queries(wide[:1, :1, :512], None)
    (launch,) = launches
    assert (launch["q_stride_token"], launch["q_stride_head"]) == (0, 0)


def test_nothing_is_launched_without_queries(launches: list[dict[str, Any]]) -> None:
    stored, scale = sm90_quantize.quantize_queries(torch.empty(0, 4, 512), None)
    assert (stored.shape, scale.shape, launches) == ((0, 4, 512), (0, 4), [])


# Who quantises


def call() -> dict[str, Any]:
    return {
        "q": torch.randn(2, 3, 512),
        "kv": torch.ones(4, 512).to(torch.float8_e4m3fn),
        "indices": torch.zeros(2, 1, dtype=torch.int32),
        "kv_scale": 0.5,
    }


def test_on_a_cpu_torch_does() -> None:
    q = torch.randn(2, 3, 512)
    assert dispatch.quantize_queries(q, None) is None
    assert dispatch.quantize_queries(q, None, "sm90") is None
    assert dispatch.quantize_queries(q, None, "reference") is None
    assert sm90.quantize_queries(q, None) is None


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("named_by", ["argument", "environment"])
def test_the_backend_that_is_tried_first_does(
    backend: str, named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cpu`` is given a way of its own here, which scales by 2."""
    seen: list[tuple[torch.Tensor, Any]] = []

    def quantise(q: torch.Tensor, q_scale: Any) -> Any:
        seen.append((q, q_scale))
        return quantize.quantize_queries(q, torch.tensor([2.0]))

    monkeypatch.setattr(dispatch.load("cpu"), "quantize_queries", quantise, raising=False)
    inputs = call()
    if named_by == "environment":
        monkeypatch.setenv("SPARSE_MLA_BACKEND", backend)
        got = sparse_mla_prefill(**inputs)
    else:
        got = sparse_mla_prefill(**inputs, backend=backend)
    assert dispatch.last_backend() == ("cpu" if backend == "auto" else backend)
    if backend == "reference":
        assert seen == []
    else:
        ((q, q_scale),) = seen
        assert q is inputs["q"]
        assert q_scale is None
        stored, _ = quantize.quantize_fp8(inputs["q"], scale=2.0)
        want = sparse_mla_prefill(**inputs | {"q": stored, "q_scale": 2.0})
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["sm80", 3])
def test_a_backend_that_does_not_exist_is_refused_as_ever(backend: Any) -> None:
    with pytest.raises(BackendError) as caught:
        sparse_mla_prefill(**call(), backend=backend)
    assert caught.value.id == "backend-unknown"
