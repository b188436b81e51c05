"""Every kernel variant compiled for Hopper and held against what the machine has; needs no GPU.

A kernel that spills, whose wgmma are serialised or that asks for more than a multiprocessor has is
slow or does not launch. The compiler knows that much.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels import compiled

from sparse_mla import BackendError, jit
from sparse_mla.backends import sm90, sm90_plan
from sparse_mla.params import PrefillProblem
from sparse_mla.testing import Case, make_inputs, make_problem

pytestmark = pytest.mark.usefixtures("kernel_cache")

REGISTERS = 65536
"""32-bit registers of a multiprocessor."""
SHARED = 232448
"""Bytes of shared memory that a CTA of compute capability 9.0 can have."""
LINES = 800

SOURCES = sorted(p for p in jit.KERNELS.rglob("*") if p.suffix in (".cu", ".cuh"))
PROBLEM = (jit.KERNELS / "sm90/common/problem.cuh").read_text()
VARIANTS = {variant.name: variant for variant in sm90_plan.KERNELS.values()}


ROLES = {
    "sm90/prefill.cuh": "kProducerRegisters + kScoreRegisters + 2 * kValueRegisters",
    "sm90/prefill_few_heads.cuh": "kProducerRegisters + 2 * kAttendRegisters",
}
"""Registers a lane of all warpgroups of a CTA, by source."""


def claims(variant: jit.Variant) -> list[str]:
    """What the host side takes for granted about a kernel, as C++."""
    part = sm90_plan.Part(int(variant.defines["HEADS"]), 0, 1)
    # A launch gives each thread the same number of registers, a multiple of eight. What
    # setmaxnreg asks for beyond their sum never comes: the kernel hangs.
    launched = REGISTERS // part.threads // 8 * 8 * part.threads
    _, size = struct_layout(PROBLEM)
    return [
        f"sizeof(PrefillParams) == {size}",
        f"kThreads == {part.threads}",
        f"kHeads == {part.heads_per_item}",
        f"kSharedBytes <= {sm90.SHARED_BYTES}",
        f"128 * ({ROLES[variant.source]}) <= {launched}",
    ]


def faults(variant: jit.Variant, folder: Path) -> list[str]:
    """What would make a variant slow, or keep it from launching, found by compiling it."""
    if not (folder / "sm90").exists():
        shutil.copytree(variant.root / "sm90", folder / "sm90")
    asserts = "".join(f"static_assert({claim});\n" for claim in claims(variant))
    (folder / "probe.cu").write_text(f'#include "{variant.source}"\n{asserts}')
    try:
        result = compiled(replace(variant, root=folder, source="probe.cu"))
    except BackendError as failure:
        return [line for line in str(failure).splitlines() if "error" in line or "assert" in line]
    used = result.resources
    found = list(result.wgmma_messages)
    if used.spill_stores or used.spill_loads or used.stack:
        found.append(f"spills: {used}")
    threads = sm90_plan.Part(int(variant.defines["HEADS"]), 0, 1).threads
    if used.registers != REGISTERS // threads // 8 * 8:
        found.append(f"{used.registers} registers a thread are not what the roles count on")
    if used.smem + sm90.SHARED_BYTES > SHARED:
        found.append(f"{used.smem} + {sm90.SHARED_BYTES} bytes of shared memory do not launch")
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name: str, tmp_path: Path) -> None:
    assert faults(VARIANTS[name], tmp_path) == []


def spoilt(variant: jit.Variant, old: str, new: str, folder: Path) -> None:
    """The sources in ``folder``, with every match of a pattern in the variant's replaced."""
    shutil.copytree(variant.root / "sm90", folder / "sm90")
    source = folder / variant.source
    text, count = re.subn(old, new, source.read_text())
    assert count, f"{old} is not in the source any more"
    source.write_text(text)


WIDE, FEW = "prefill-h64-d576", "prefill-h16-d576"


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [
        pytest.param(WIDE, r"kScoreRegisters = \d+", "kScoreRegisters = 88", "spills", id="spills"),
        pytest.param(
            WIDE, r"kScoreRegisters = \d+", "kScoreRegisters = 88", "C7512", id="no-pipeline"
        ),
        pytest.param(WIDE, r"\bwgmma_wait<\d>\(\);", "", "C751", id="no-wait-for-wgmma"),
        pytest.param(
            WIDE, r"kValueRegisters = \d+", "kValueRegisters = 232", "Registers", id="over-budget"
        ),
        pytest.param(
            FEW,
            r"kProducerRegisters = [^;]+;",
            "kProducerRegisters = 96;",
            "Registers",
            id="few-heads-over-budget",
        ),
        pytest.param(
            FEW, r"kThreads = 384", "kThreads = 512", "kThreads", id="few-heads-other-threads"
        ),
        pytest.param(
            "prefill-h32-d576",
            r"kAttendRegisters = [^;]+;",
            "kAttendRegisters = 168;",
            "spills",
            id="few-heads-spills",
        ),
    ],
)
def test_a_fault_is_found(name: str, old: str, new: str, fault: str, tmp_path: Path) -> None:
    """The kernel, spoilt."""
    spoilt(VARIANTS[name], old, new, tmp_path)
    found = faults(VARIANTS[name], tmp_path)
    assert any(fault in text for text in found), found


def test_more_shared_memory_than_there_is_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sm90, "SHARED_BYTES", SHARED + 16)
    assert any("shared memory" in text for text in faults(VARIANTS["prefill-h64-d512"], tmp_path))


def test_there_is_a_variant_for_every_item_and_width() -> None:
    assert {(v.defines["HEADS"], v.defines["D_QK"]) for v in VARIANTS.values()} == {
        (heads, d_qk) for heads in (8, 16, 24, 32, 64) for d_qk in (512, 576)
    }
    assert len(VARIANTS) == len(sm90_plan.KERNELS)


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


def packed(problem: PrefillProblem, part: sm90_plan.Part, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The struct that a launch of one part of ``problem`` hands to the driver."""
    seen: list[bytes] = []

    def configured(kernel: Any, grid: Any, block: Any, smem: int, cluster: int) -> Any:
        assert grid == (part.ctas(problem.s_q, 132), 1, 1)
        assert (block, smem) == ((part.threads, 1, 1), sm90.SHARED_BYTES)
        assert cluster == part.ctas_per_item
        size = sm90.POINTERS.size + sm90.SIZES.size
        return SimpleNamespace(put=lambda _, params: seen.append(ctypes.string_at(params, size)))

    kernel = SimpleNamespace(multiprocessors=132)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(sm90.jit, "load", lambda variant, device: kernel)
    monkeypatch.setattr(sm90, "Launch", configured)
    sm90.launch(problem, part)
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
        "out_heads": 5,
        "ctas_per_item": 1,
    }
    data = packed(problem, sm90_plan.Part(8, 0, 5), monkeypatch)
    fields, size = struct_layout(PROBLEM)
    assert len(data) == size
    got = {
        name: CTYPES.get(kind, ctypes.c_uint64).from_buffer_copy(data, offset).value
        for name, kind, offset in fields
    }
    assert got == {name: expected.get(name, 0) for name in got}
    assert set(expected) <= set(got)


def test_a_part_starts_at_its_first_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs between the launch of all 5 heads and that of the last two."""
    case = Case("part", s_q=3, s_kv=70, h_q=5, topk=640, sink="normal", scales="token-head")
    problem = make_problem(make_inputs(case))
    fields, _ = struct_layout(PROBLEM)
    everything = packed(problem, sm90_plan.Part(8, 0, 5), monkeypatch)
    part = packed(problem, sm90_plan.Part(8, 3, 2, 4), monkeypatch)

    def values(data: bytes) -> dict[str, int]:
        return {
            name: ctypes.c_int32.from_buffer_copy(data, offset).value
            if kind == "int"
            else ctypes.c_int64.from_buffer_copy(data, offset).value
            for name, kind, offset in fields
            if kind != "float"
        }

    before, after = values(everything), values(part)
    changed = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert changed == {
        "q": 3 * 576,
        "q_scale": 3 * 4,
        "attn_sink": 3 * 4,
        "out": 3 * 512 * 2,
        "max_logits": 3 * 4,
        "lse": 3 * 4,
        "h_q": -3,
        "ctas_per_item": 3,
    }


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
    assert {jit.KERNELS / name for name in ROLES} <= set(SOURCES)


@pytest.mark.parametrize(
    ("place", "off"), [(0, 8), (1, 8), (7, 2)], ids=["q", "kv", "out"]
)  # places of `params.Addresses`
def test_addresses_that_no_kernel_loads_from_are_not_launched(
    place: int, off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    prepared = sm90.Prepared(0, ())
    addresses = [4096] * 10
    assert prepared.launch(tuple(addresses))  # type: ignore[arg-type]
    addresses[place] += off
    assert not prepared.launch(tuple(addresses))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["q_scale", "attn_sink", "lse"])
def test_views_that_negate_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory holds the other sign."""
    monkeypatch.setattr(sm90, "device_reason", lambda index: None)
    problem = make_problem(make_inputs(Case("negated", s_q=2, s_kv=9, h_q=8, sink="normal")))
    negated = replace(problem, **{name: torch._neg_view(getattr(problem, name))})
    for given, reason in ((problem, None), (negated, "a tensor is a view that negates")):
        on_gpu = _OnGpu(given)
        found = sm90.refusal(on_gpu)  # type: ignore[arg-type]
        assert found is None if reason is None else found is not None and found.startswith(reason)


class _OnGpu:
    """A problem whose q says that it lies on a CUDA device."""

    def __init__(self, problem: PrefillProblem) -> None:
        self._problem = problem
        self.q = _CudaTensor(problem.q)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._problem, name)


class _CudaTensor:
    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_device(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)
