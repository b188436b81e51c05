"""Every kernel variant compiled for Hopper and held against what the machine has; needs no GPU.

A kernel that spills, whose wgmma are serialised or that asks for more than a multiprocessor has is
slow or does not launch. The compiler knows that much.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_mla import BackendError, jit
from sparse_mla.backends import sm90
from sparse_mla.params import PrefillProblem
from sparse_mla.testing import Case, make_inputs, make_problem

REGISTERS = 65536
"""32-bit registers of a multiprocessor."""
SHARED = 232448
"""Bytes of shared memory that a CTA of compute capability 9.0 can have."""
LINES = 800

SOURCES = sorted(p for p in jit.KERNELS.rglob("*") if p.suffix in (".cu", ".cuh"))
PREFILL = (jit.KERNELS / "sm90/prefill.cuh").read_text()
VARIANTS = {variant.name: variant for variant in sm90.PREFILL.values()}


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def compiled(variant: jit.Variant) -> jit.Compiled:
    try:
        return jit.compile_variant(variant)
    except BackendError as failure:
        if failure.id == "nvrtc-missing":
            pytest.skip(str(failure).splitlines()[0])
        raise


def register_budgets(source: str) -> dict[str, int]:
    """What each role of the kernel sets its registers to, by role."""
    found = dict(re.findall(r"\bk(Producer|Score|Value)Registers = (\d+)", source))
    assert set(found) == {"Producer", "Score", "Value"}, "the kernel's roles changed: see here"
    return {role: int(count) for role, count in found.items()}


def faults(variant: jit.Variant) -> list[str]:
    """What would make a compiled variant slow, or keep it from launching."""
    result = compiled(variant)
    used = result.resources
    found = list(result.wgmma_messages)
    if used.spill_stores or used.spill_loads or used.stack:
        found.append(f"spills: {used}")
    if used.registers * sm90.THREADS > REGISTERS:
        found.append(f"{used.registers} registers a thread do not launch")
    if used.smem + sm90.SHARED_BYTES > SHARED:
        found.append(f"{used.smem} + {sm90.SHARED_BYTES} bytes of shared memory do not launch")
    budgets = register_budgets((variant.root / variant.source).read_text())
    warpgroups = 2 * budgets["Value"] + budgets["Score"] + budgets["Producer"]
    launched = -(-used.registers // 8) * 8 * sm90.THREADS
    if 128 * warpgroups > launched:
        found.append(f"roles want {128 * warpgroups} registers of {launched}: setmaxnreg hangs")
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str) -> None:
    assert faults(VARIANTS[name]) == []


def changed(variant: jit.Variant, old: str, new: str, folder: Path) -> jit.Variant:
    """The variant with every match of a pattern in its source replaced."""
    shutil.copytree(variant.root / "sm90", folder / "sm90")
    source = folder / variant.source
    text, count = re.subn(old, new, source.read_text())
    assert count, f"{old} is not in the source any more"
    source.write_text(text)
    return replace(variant, root=folder)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        pytest.param(r"kScoreRegisters = \d+", "kScoreRegisters = 88", "spills", id="spills"),
        pytest.param(r"kScoreRegisters = \d+", "kScoreRegisters = 88", "C7511", id="no-pipeline"),
        pytest.param(r"\bwgmma_wait<\d>\(\);", "", "C751", id="no-wait-for-wgmma"),
        pytest.param(
            r"kValueRegisters = \d+", "kValueRegisters = 232", "setmaxnreg hangs", id="over-budget"
        ),
    ],
)
def test_a_fault_is_found(old: str, new: str, fault: str, tmp_path: Path) -> None:
    """The kernel, spoilt."""
    found = faults(changed(VARIANTS["prefill-h64-d576"], old, new, tmp_path))
    assert any(fault in text for text in found), found


def test_more_shared_memory_than_there_is_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "SHARED_BYTES", SHARED + 16)
    assert any("shared memory" in text for text in faults(VARIANTS["prefill-h64-d512"]))


def test_both_widths_have_a_variant() -> None:
    assert {v.defines["D_QK"] for v in sm90.PREFILL.values()} == {512, 576}


# The struct of a launch

SIZES = {"i64": 8, "int": 4, "float": 4}
CTYPES = {"i64": ctypes.c_int64, "int": ctypes.c_int32, "float": ctypes.c_float}
Field = tuple[str, str, int]  # name, type ("pointer" for any pointer), offset


def struct_layout(source: str) -> tuple[list[Field], int]:
    """Fields of ``PrefillParams`` where C puts them, and the size of the whole."""
    body = re.search(r"^struct PrefillParams \{\n(.*?)^\};", source, re.MULTILINE | re.DOTALL)
    assert body, "struct PrefillParams is not where it was"
    fields: list[Field] = []
    offset, widest = 0, 1
    for declaration in re.sub(r"//.*", "", body[1]).split(";"):
        if not declaration.strip():
            continue
        parsed = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) ([\w, ]+)\s*", declaration)
        assert parsed, declaration
        kind = "pointer" if parsed[2] else parsed[1]
        size = SIZES.get(kind, 8)
        assert kind == "pointer" or kind in SIZES, declaration
        for name in parsed[3].split(","):
            offset = -(-offset // size) * size
            fields.append((name.strip(), kind, offset))
            offset += size
            widest = max(widest, size)
    return fields, -(-offset // widest) * widest


def packed(problem: PrefillProblem, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The struct that a launch of ``problem`` hands to the driver."""
    seen: list[bytes] = []

    class Launch:
        name = "none"

        def launch(self, grid: Any, block: Any, smem: int, stream: int, address: int) -> None:
            assert (block, smem) == ((sm90.THREADS, 1, 1), sm90.SHARED_BYTES)
            seen.append(ctypes.string_at(address, sm90.PARAMS.size))

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    launch: Any = Launch()
    sm90._launch(launch, 1, problem, 0)
    return seen[0]


@pytest.mark.parametrize("optional", [True, False], ids=["all", "required"])
def test_each_field_is_packed_where_the_kernel_reads_it(
    optional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        "packed", s_q=3, s_kv=70, h_q=5, topk=9, sigma=3.0,
        lengths="ragged" if optional else "none", sink="normal" if optional else "none",
    )  # fmt: skip
    problem = make_problem(make_inputs(case))
    tensors = {n: v for n, v in vars(problem).items() if isinstance(v, torch.Tensor)}
    expected: dict[str, Any] = {
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        "q_stride_token": 5 * 576,
        "q_stride_head": 576,
        "kv_stride": 576,
        "indices_stride": 9,
        "s_q": 3,
        "s_kv": 70,
        "h_q": 5,
        "topk": 9,
        "sm_scale": ctypes.c_float(problem.sm_scale).value,
    }
    data = packed(problem, monkeypatch)
    fields, size = struct_layout(PREFILL)
    assert len(data) == size
    got = {
        name: CTYPES.get(kind, ctypes.c_uint64).from_buffer_copy(data, offset).value
        for name, kind, offset in fields
    }
    assert got == {name: expected.get(name, 0) for name in got}
    assert set(expected) <= set(got)


def test_the_kernel_has_the_sizes_of_its_launch(tmp_path: Path) -> None:
    _, size = struct_layout(PREFILL)
    claims = [
        f"sizeof(PrefillParams) == {size}",
        f"kThreads == {sm90.THREADS}",
        f"kHeads == {sm90.HEADS}",
        f"kSharedBytes <= {sm90.SHARED_BYTES}",
    ]
    shutil.copytree(jit.KERNELS / "sm90", tmp_path / "sm90")
    asserts = "".join(f"static_assert({claim});\n" for claim in claims)
    (tmp_path / "probe.cu").write_text(f'#include "sm90/prefill.cuh"\n{asserts}')
    for variant in sm90.PREFILL.values():
        compiled(replace(variant, root=tmp_path, source="probe.cu"))


# The sources


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(jit.KERNELS).as_posix())
def test_source(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") < LINES
    assert "\t" not in text
    for name in re.findall(r"#\s*include\s*(.*)", text):
        header = re.fullmatch(r'"([\w./]+)"', name)
        assert header, f"{name}: NVRTC ships no CUDA headers, and none is needed"
        assert (path.parent / header[1]).is_file()
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)


def test_there_are_sources() -> None:
    assert jit.KERNELS / "sm90/prefill.cuh" in SOURCES
