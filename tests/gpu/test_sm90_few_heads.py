"""The kernels for few heads and few queries: every one of them, and the mixes that a plan makes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hopper import (
    DEVICE,
    EXACT_STATISTICS,
    LIMITS,
    ON_GPU,
    assert_equal_bits,
    assert_same_bits,
    bits,
    drawn,
    forced,
    general,
    launches,
    results,
    strict,
)

from sparse_mla.backends.reference import Attention
from sparse_mla.backends.sm90_plan import FEW_HEADS
from sparse_mla.testing import (
    Case,
    Inputs,
    compare,
    expected,
    guarded_like,
    make_inputs,
    poison_unselected,
)

RUNS = 100 if ON_GPU else 2

KERNELS = [
    pytest.param(heads, ctas, id=f"{heads} heads" + f", {ctas} CTAs" * (ctas > 1))
    for heads, splits in ((8, (1, 2, 8)), (16, (1, 4)), (24, (1, 4)), (32, (1, 2, 8)))
    for ctas in splits
]
WITH_64 = [*KERNELS, pytest.param(64, 1, id="64 heads")]

CASES = (
    Case("plain", 5, 2500, 16, 576, 512),
    Case("plain-d512", 5, 2500, 16, 512, 512),
    Case("holes", 7, 2500, 20, 576, 300, pattern="holes", lengths="beyond", sink="normal"),
    Case("ragged-d512", 7, 2500, 33, 512, 2051, pattern="holes", lengths="ragged", sink="extreme"),
    Case("one-slot", 3, 40, 1, 576, 1),
    Case("empty-rows", 7, 500, 8, 576, 128, pattern="empty-rows", sink="extreme"),
    Case("all-empty", 3, 500, 8, 576, 128, pattern="all-empty"),
    Case("lengths-zero", 3, 300, 8, 576, 128, lengths="zero", sink="normal"),
    Case("no-tokens", 3, 0, 8, 576, 128),
    Case("scales-token", 5, 900, 20, 576, 500, scales="token", pattern="holes"),
    Case("scales-token-head-d512", 300, 900, 40, 512, 200, scales="token-head", pattern="holes"),
    Case("sigma4", 4, 3000, 32, 576, 2048, sigma=4.0),
    Case("more-queries-than-CTAs", 700, 900, 24, 576, 130, lengths="ragged"),
)


@pytest.mark.parametrize(("heads", "ctas"), WITH_64)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_gives_what_the_reference_does(case: Case, heads: int, ctas: int) -> None:
    """Nothing that no valid slot selects is read, nothing outside the outputs is written."""
    case = case if ON_GPU else replace(case, s_q=min(case.s_q, 7))
    inputs = poison_unselected(make_inputs(case, device=DEVICE))
    with forced(heads, ctas):
        guards = [guarded_like(x) for x in results(general(inputs))]
        for guard in guards:
            guard.tensor.fill_(torch.nan)
        out, max_logits, lse = (guard.tensor for guard in guards)
        problem = general(inputs, (out, max_logits, lse))
    queries = range(0, case.s_q, -(-case.s_q // 16))
    limits = EXACT_STATISTICS if ON_GPU and heads < 64 else LIMITS
    compare(problem, limits, queries=queries)
    for guard in guards:
        guard.check()


@pytest.mark.cuda_only
@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[10], CASES[12]], ids=str)
def test_a_head_has_the_same_bits_in_items_of_any_size(case: Case) -> None:
    inputs = make_inputs(case, device=DEVICE)
    found = []
    for heads in FEW_HEADS:
        with forced(heads):
            found.append(general(inputs))
    for other in found[1:]:
        assert_same_bits(found[0], other)


@pytest.mark.cuda_only
@pytest.mark.parametrize("several", [False, True], ids=["one scale", "scales"])
@pytest.mark.parametrize(("heads", "ctas"), WITH_64)
def test_a_head_has_the_same_bits_in_a_batch_of_8_or_of_128(
    heads: int, ctas: int, several: bool
) -> None:
    """Wherever it lies in either: its neighbours in an item, and its place there, do not matter."""
    inputs = drawn(9, 900, 128, topk=700, sigma=3.0)
    inputs.indices[:, :, 5::11] = -1
    sink = torch.linspace(-2.0, 6.0, 128, device=DEVICE)
    if several:
        inputs = replace(inputs, q_scale=torch.rand(9, 128, device=DEVICE) + 0.2)
        inputs = replace(inputs, kv_scale=torch.rand(900, device=DEVICE) * 0.4 + 0.1)
    with forced(heads, ctas):
        whole = general(inputs, attn_sink=sink)
        for first, count in ((0, 8), (40, 8), (61, 8), (120, 8), (7, 1), (55, 20)):
            part = slice(first, first + count)
            some = replace(inputs, q=inputs.q[:, part], attn_sink=sink[part].clone())
            if several:
                some = replace(some, q_scale=inputs.q_scale[:, part].clone())
            for a, b, name in zip(
                results(general(some)), results(whole), ("out", "max", "lse"), strict=True
            ):
                assert_equal_bits(a, b[:, part], f"{name} of heads {first} to {first + count - 1}")


@pytest.mark.cuda_only
def test_other_kernels_give_a_head_the_same_within_rounding() -> None:
    inputs = drawn(9, 3000, 64, topk=2048)
    with forced(8):
        first = general(inputs)
    against = Attention(*(x.double() for x in results(first)))
    for heads, ctas in ((8, 2), (8, 8), (16, 4), (32, 8), (64, 1)):
        with forced(heads, ctas):
            compare(general(inputs), LIMITS, against=against)


@pytest.mark.cuda_only
@pytest.mark.parametrize(("heads", "ctas"), KERNELS)
def test_runs_are_equal(heads: int, ctas: int) -> None:
    inputs = drawn(67, 4000, 20, topk=640, sigma=3.0)
    lengths = torch.arange(67, dtype=torch.int32, device=DEVICE) * 37 % 640
    inputs = replace(inputs, topk_length=lengths)
    wrong = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with forced(heads, ctas):
        first = general(inputs)
        for _ in range(RUNS):
            for k, (a, b) in enumerate(zip(results(general(inputs)), results(first), strict=True)):
                wrong[k] += (bits(a) != bits(b)).any()
    assert wrong.tolist() == [0, 0, 0], f"runs that differ, of {RUNS}"


@pytest.mark.cuda_only
@pytest.mark.parametrize(("heads", "ctas"), KERNELS)
def test_a_graph_replays_with_changed_values(heads: int, ctas: int) -> None:
    first, second = (drawn(9, 900, 24, topk=300, seed=seed) for seed in (1, 50))
    second = replace(second, q_scale=second.q_scale * 1.5)
    with forced(heads, ctas):
        want = general(second)
        got = general(first)  # loads the kernel
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            general(first, results(got))
    for name in ("q", "kv", "indices", "q_scale", "kv_scale"):
        getattr(first, name).copy_(getattr(second, name))
    for x in results(got):
        x.fill_(torch.nan)
    graph.replay()
    assert_same_bits(got, want)


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("h_q", "parts"), [(80, [(64, 64), (16, 16)]), (96, [(64, 64), (32, 32)]), (20, [(24, 20)])]
)
def test_heads_are_cut_into_the_mix_of_the_plan(h_q: int, parts: list[tuple[int, int]]) -> None:
    """4,096 queries, on any Hopper GPU: which kernels ran, and that each wrote its heads."""
    inputs = drawn(4096, 2000, h_q, topk=512)  # of 128 slots the plan would make one launch
    sink = torch.linspace(-2.0, 6.0, h_q, device=DEVICE)
    with launches() as found:
        problem = general(inputs, attn_sink=sink)
    assert [(part.heads_per_item, part.heads) for part in found] == parts
    compare(problem, LIMITS, queries=range(0, 4096, 511))


@pytest.mark.cuda_only
def test_few_queries_of_the_strict_operator_are_split() -> None:
    inputs = drawn(1, 4000, 128, topk=2048)
    with launches() as found:
        problem = strict(inputs)
    assert found
    assert all(part.ctas_per_item > 1 for part in found)
    compare(problem, EXACT_STATISTICS)


def with_kv_scales(scales: torch.Tensor) -> Inputs:
    inputs = drawn(6, len(scales), 20, topk=200)
    return replace(inputs, kv_scale=scales, sm_scale=inputs.sm_scale * 0.3)


@pytest.mark.parametrize(("heads", "ctas"), WITH_64)
def test_each_token_has_its_own_scale(heads: int, ctas: int) -> None:
    """From a hundredth of the usual to a hundred times it: what a large one adds, a small one
    must not lose.
    """
    scales = torch.logspace(-2, 2, 700, device=DEVICE)[torch.randperm(700).to(DEVICE)]
    with forced(heads, ctas):
        compare(general(with_kv_scales(scales)), LIMITS)


@pytest.mark.parametrize(("heads", "ctas"), WITH_64)
def test_scales_of_tokens_may_be_tiny(heads: int, ctas: int) -> None:
    """The first query selects such tokens only: its denominator sums P over their scales."""
    scales = torch.full((700,), 0.3, device=DEVICE)
    scales[:300] = 1e-38
    scales[100:200] = 1e-42  # subnormal
    scales[200:300] = 1e-28
    inputs = with_kv_scales(scales)
    inputs.indices[0] %= 200
    with forced(heads, ctas):
        problem = general(inputs)
    compare(problem, LIMITS, queries=range(1, 6))
    want = expected(problem, [0])
    torch.testing.assert_close(problem.lse[:1], want.lse.float(), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(problem.max_logits[:1], want.max_logits.float(), rtol=0, atol=1e-4)
    assert (problem.out[0].abs() < 1e-27).all()


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("h_q", [1, 16, 64, 100])
def test_scales_of_tokens_that_are_equal_are_one_scale(h_q: int, d_qk: int) -> None:
    inputs = drawn(5, 300, h_q, d_qk, topk=130)
    each = general(inputs, kv_scale=torch.full((300,), 0.3, device=DEVICE))
    compare(each, LIMITS)
    one = general(inputs)
    torch.testing.assert_close(each.lse, one.lse, rtol=1e-3, atol=4e-3)


@pytest.mark.cuda_only
@pytest.mark.parametrize(("heads", "ctas"), WITH_64)
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_scale_of_a_token_spoils_the_queries_that_select_it(
    bad: float, heads: int, ctas: int
) -> None:
    scales = torch.full((700,), 0.3, device=DEVICE)
    inputs = with_kv_scales(scales)
    inputs.indices[:, 0, 0] = 5
    inputs.indices[inputs.indices == 7] = 6
    inputs.indices[2, 0, 17] = 7
    spoilt = scales.clone()
    spoilt[7] = bad
    with forced(heads, ctas):
        want = general(inputs)
        got = general(inputs, kv_scale=spoilt)
    for a, b, name in zip(results(got), results(want), ("out", "max", "lse"), strict=True):
        assert a[2].isnan().all()
        a[2] = b[2]
        assert_equal_bits(a, b, name)
