"""The CPU backend: every case against the reference, in both arithmetics, and its own machinery."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_mla import dispatch
from sparse_mla.backends import cpu, cpu_slots, cpu_table, cpu_workers
from sparse_mla.params import PrefillProblem
from sparse_mla.testing import (
    CASES,
    CPU_BFLOAT16,
    CPU_FLOAT32,
    Case,
    Inputs,
    Tolerance,
    compare,
    make_inputs,
    make_problem,
    poison_unselected,
)

TOLERANCES = {"bfloat16": CPU_BFLOAT16, "float32": CPU_FLOAT32}


@pytest.fixture(params=TOLERANCES)
def tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tolerance:
    """What the arithmetic of this run may differ by."""
    monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", request.param)
    return TOLERANCES[request.param]


def solve(inputs: Inputs) -> PrefillProblem:
    problem = make_problem(inputs)
    assert dispatch.run(problem) == dispatch.last_backend() == "cpu"
    return problem


def bits(problem: PrefillProblem) -> tuple[torch.Tensor, ...]:
    out = problem.out.view(torch.int16)
    return out, problem.max_logits.view(torch.int32), problem.lse.view(torch.int32)


def same_bits(a: PrefillProblem, b: PrefillProblem) -> bool:
    return all(torch.equal(x, y) for x, y in zip(bits(a), bits(b), strict=True))


@pytest.mark.parametrize("scales", ["tensor", "token", "token-head"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_the_reference(case: Case, scales: Any, tolerance: Tolerance) -> None:
    inputs = poison_unselected(make_inputs(replace(case, scales=scales)))
    compare(solve(inputs), tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_no_valid_slot_selects_changes_no_bit(case: Case, tolerance: Tolerance) -> None:
    inputs = make_inputs(replace(case, scales="token"))
    assert same_bits(solve(inputs), solve(poison_unselected(inputs)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_unquantised_inputs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", "bfloat16")
    inputs = make_inputs(Case("plain", 3, 200, 20, topk=100, pattern="holes", dtype=dtype))
    exact = dtype != torch.bfloat16  # float16 and float32 are computed in float32 whatever is asked
    compare(solve(inputs), CPU_FLOAT32 if exact else CPU_BFLOAT16)


def test_a_query_and_a_cache_of_two_float_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", "bfloat16")
    inputs = make_inputs(Case("mixed", 2, 50, 4, topk=30, dtype=torch.float32))
    compare(solve(replace(inputs, kv=inputs.kv.bfloat16())), CPU_FLOAT32)
    compare(solve(replace(inputs, q=inputs.q.bfloat16())), CPU_FLOAT32)


@pytest.mark.parametrize("offset", [-3e4, -500.0, -20.0, 20.0, 500.0, 3e4])
def test_large_logits_lose_nothing_to_rounding(offset: float, tolerance: Tolerance) -> None:
    """All logits lie ``offset`` away from 0, where bfloat16 could not tell them apart."""
    inputs = make_inputs(Case("offset", 6, 300, 16, topk=256, sigma=1.0, dtype=torch.bfloat16))
    inputs.q[..., 575] = 8.0
    inputs.kv[..., 575] = offset / (8.0 * inputs.sm_scale)
    problem = solve(inputs)
    compare(problem, replace(tolerance, absolute=0.008, relative=2**-20))


def test_queries_whose_logits_jump_about(tolerance: Tolerance) -> None:
    """The centre predicted from the queries before is wrong every time."""
    inputs = make_inputs(Case("jumps", 12, 300, 16, topk=256, sigma=1.0, dtype=torch.bfloat16))
    inputs.q[..., 575] = torch.tensor([0.0, 60.0, -60.0] * 4)[:, None]
    inputs.q[..., 575] *= torch.linspace(-1, 1, 16)
    inputs.kv[..., 575] = 16.0
    compare(solve(inputs), tolerance)


@pytest.mark.parametrize("pattern", ["distinct", "holes", "empty-rows", "all-empty"])
@pytest.mark.parametrize("scales", ["tensor", "token"])
def test_a_cache_too_large_for_the_table(
    pattern: Any, scales: Any, tolerance: Tolerance, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("large", 9, 900, 8, topk=100, pattern=pattern, scales=scales)
    inputs = poison_unselected(make_inputs(case))
    monkeypatch.setattr(cpu_table, "TABLE_BYTES", 250 * 608 * 2)  # 250 rows: two queries a chunk
    problem = make_problem(inputs)
    assert not cpu_table.RowTable(problem, torch.bfloat16).whole
    cpu.run(problem)
    compare(problem, tolerance)


def test_a_topk_larger_than_the_table(
    tolerance: Tolerance, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(Case("wide", 3, 900, 4, topk=800))
    monkeypatch.setattr(cpu_table, "TABLE_BYTES", 0)
    compare(solve(inputs), tolerance)


def test_indices_are_looked_at_in_chunks(
    tolerance: Tolerance, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(Case("chunks", 11, 90, 4, topk=60, pattern="holes", lengths="ragged"))
    monkeypatch.setattr(cpu_table, "CHUNK_SLOTS", 200)
    compare(solve(inputs), tolerance)


def test_short_queries_share_products(tolerance: Tolerance) -> None:
    case = Case("short", 400, 90, 4, topk=64, lengths="ragged", sink="normal")
    problem = solve(make_inputs(case))
    compare(problem, tolerance, queries=range(0, 400, 7))
    _, counts = cpu_slots.valid_slots(problem, torch.arange(400))
    blocks = list(cpu_slots.query_blocks(counts, 100))
    assert len(blocks) < 12
    members = torch.cat([torch.arange(400)[group] for group, _ in blocks]).sort().values
    assert torch.equal(members, counts.nonzero().view(-1))


def test_long_queries_of_alternating_lengths(tolerance: Tolerance) -> None:
    """Queries of one width are not neighbours, and each has a product of its own."""
    inputs = make_inputs(Case("alternating", 9, 1500, 4, topk=1400))
    lengths = torch.tensor([1400, 1300, 0] * 3, dtype=torch.int32)
    compare(solve(replace(inputs, topk_length=lengths)), tolerance)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("s_q", [1, 2, 3, 20])
def test_any_number_of_workers(
    workers: int, s_q: int, tolerance: Tolerance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "WORTH_WORKERS", 0)
    monkeypatch.setattr(cpu_workers, "count", lambda: workers)
    case = Case("workers", s_q, 300, 8, topk=200, pattern="holes", lengths="ragged")
    inputs = poison_unselected(make_inputs(case))
    problem = solve(inputs)
    compare(problem, tolerance)
    assert all(same_bits(solve(inputs), problem) for _ in range(5))


def test_a_worker_has_its_own_number_of_threads_and_leaves_all_others_alone() -> None:
    if torch.get_num_threads() == 1:
        pytest.skip("this process has one OpenMP thread, nothing to divide")
    before, seen = torch.get_num_threads(), []
    assert cpu_workers.count() > 1
    with cpu_workers.started(2) as run:
        run([lambda: seen.append(torch.get_num_threads())] * 2)
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [before // 2] * 2
    assert elsewhere == [before]
    assert torch.get_num_threads() == before


def test_without_an_openmp_runtime_there_are_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_workers, "_openmp_libraries", lambda: ["/nowhere/libgomp.so"])
    cpu_workers._set_own_threads.cache_clear()
    try:
        assert cpu_workers.count() == 1
    finally:
        cpu_workers._set_own_threads.cache_clear()


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_worker_raises_reaches_the_caller(workers: int) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), cpu_workers.started(workers) as run:
        run([fail, lambda: None])


def test_every_one_of_65537_queries_is_written(tolerance: Tolerance) -> None:
    inputs = make_inputs(Case("many", 1, 20, 1, d_qk=512, topk=4))
    s_q = 65537
    q = inputs.q.expand(s_q, 1, 512)
    indices = inputs.indices.expand(s_q, 1, 4).clone()
    indices[1::3] = -1
    problem = solve(replace(inputs, q=q, indices=indices))
    assert problem.out[1::3].float().abs().sum() == 0
    assert (problem.lse[1::3] == math.inf).all()
    rest = torch.arange(s_q) % 3 != 1
    first = problem.out[0].float()
    torch.testing.assert_close(
        problem.out[rest].float(), first.expand(int(rest.sum()), 1, 512), rtol=0.01, atol=0.005
    )


def test_nan_codes_take_the_slow_conversion() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    for source in (codes, finite):
        for dtype in (torch.bfloat16, torch.float32):
            target = torch.full((2, len(source) + 3), 7.0, dtype=dtype)
            cpu_table.convert(target[:, : len(source)], source.expand(2, -1))
            expected = source.to(dtype).expand(2, -1)
            torch.testing.assert_close(
                target[:, : len(source)], expected, rtol=0, atol=0, equal_nan=True
            )
            assert (target[:, len(source) :] == 7).all()
            zero = target[:, : len(source)] == 0
            assert torch.equal(zero, expected == 0)


def test_subnormals_survive_flush_to_zero(tolerance: Tolerance) -> None:
    inputs = make_inputs(Case("tiny", 2, 30, 2, topk=20))
    kv = torch.full((30, 1, 576), 2.0**-9).to(torch.float8_e4m3fn)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals to zero")
    try:
        problem = solve(replace(inputs, kv=kv, kv_scale=torch.ones(1)))
    finally:
        torch.set_flush_denormal(False)
    assert (problem.out == 2.0**-9).all()


def test_autocast_does_not_change_a_bit(tolerance: Tolerance) -> None:
    inputs = make_inputs(Case("autocast", 3, 90, 8, topk=64))
    expected = solve(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(solve(inputs), expected)


def test_an_input_that_requires_grad_records_nothing() -> None:
    inputs = make_inputs(Case("grad", 2, 30, 2, topk=20, dtype=torch.float32))
    problem = make_problem(replace(inputs, q=inputs.q.requires_grad_()))
    cpu.run(problem)
    assert not problem.out.requires_grad


def test_calls_from_four_threads_give_the_same_bits(tolerance: Tolerance) -> None:
    inputs = make_inputs(Case("threads", 8, 200, 16, topk=128, pattern="holes"))
    expected, results = solve(inputs), []

    def work() -> None:
        results.extend(same_bits(solve(inputs), expected) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20


def test_no_torch_setting_is_left_changed(tolerance: Tolerance) -> None:
    def settings() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
        )

    before = settings()
    solve(make_inputs(Case("settings", 2, 30, 2, topk=20)))
    assert settings() == before


@pytest.mark.parametrize(("flag", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_without_fast_bfloat16_computes_in_float32(
    flag: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "has_fast_bfloat16", lambda: flag)
    problem = make_problem(make_inputs(Case("any", 1, 8, 1, topk=4)))
    assert cpu.compute_dtype(problem) == dtype
    monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", "bfloat16")
    assert cpu.compute_dtype(problem) == torch.bfloat16
    monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", "float32")
    assert cpu.compute_dtype(problem) == torch.float32


@pytest.mark.parametrize(
    ("machine", "supported", "expected"),
    [
        ("x86_64", {"_is_avx512_bf16_supported": True, "_is_amx_tile_supported": False}, True),
        ("x86_64", {"_is_avx512_bf16_supported": False, "_is_amx_tile_supported": True}, True),
        ("AMD64", {"_is_avx512_bf16_supported": False, "_is_amx_tile_supported": False}, False),
    ],
)
def test_what_fast_bfloat16_means(
    machine: str, supported: dict[str, bool], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    for name, value in supported.items():
        monkeypatch.setattr(torch.cpu, name, lambda value=value: value)
    assert cpu.has_fast_bfloat16() == expected
    with torch.backends.mkldnn.flags(enabled=False):
        assert not cpu.has_fast_bfloat16()


def test_it_refuses_other_devices() -> None:
    problem = make_problem(make_inputs(Case("meta", 1, 4, 1, topk=4), device="meta"))
    assert cpu.refusal(problem) == "tensors are on meta, not on the CPU"
    assert cpu.available() is None


@pytest.mark.slow
def test_rows_beyond_two_to_the_31_elements() -> None:
    """Row 3,728,270 straddles element 2**31 and the next one starts beyond it (2.2 GB)."""
    s_kv = 3_728_300
    kv = torch.zeros(s_kv, 576, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for value, row in enumerate((3_728_269, 3_728_270, 3_728_271), start=1):
        kv[row] = float(value)
    inputs = make_inputs(Case("far", 3, 8, 2, topk=4))
    indices = torch.tensor([[3_728_269], [3_728_270], [3_728_271]], dtype=torch.int32)
    problem = solve(
        replace(inputs, kv=kv[:, None], indices=indices[:, None], kv_scale=torch.ones(1))
    )
    for t in range(3):
        assert (problem.out[t] == t + 1).all()
