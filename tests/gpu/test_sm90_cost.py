"""A call takes the time of the work that it asks for: measured beside another in the same rounds.

Limits are generous, as other processes may use the GPU: what counts is the fastest of many calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hopper import DEVICE, LIMITS, drawn, launches, results, scalar

from sparse_mla import sparse_mla_prefill, sparse_mla_q8kv8_prefill_fwd
from sparse_mla.params import PrefillProblem
from sparse_mla.testing import Inputs, compare, make_problem

pytestmark = [pytest.mark.cuda_only]

ROUNDS = 40
S_Q, S_KV = 2048, 32768


class Call:
    """One call of an operator into outputs of its own, which are NaN before the first."""

    def __init__(self, inputs: Inputs, operator: Callable[..., object] = sparse_mla_prefill):
        self.problem: PrefillProblem = make_problem(inputs)
        self.operator = operator
        out, max_logits, lse = results(self.problem)
        self.arguments = {**vars(inputs), "out": out, "max_logits": max_logits, "lse": lse}

    def __call__(self) -> None:
        self.operator(**self.arguments)


def milliseconds(*calls: Call) -> list[float]:
    """The shortest time of each; rounds have one call of each, and all results are checked."""
    for call in calls:
        call()
        compare(call.problem, LIMITS, queries=(0, S_Q // 2, S_Q - 1))
    events = [
        [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in calls
        ]
        for _ in range(ROUNDS)
    ]
    torch.cuda._sleep(50_000_000)  # so that no launch is waited for
    for row in events:
        for call, (start, end) in zip(calls, row, strict=True):
            start.record()
            call()
            end.record()
    torch.cuda.synchronize()
    return [min(row[k][0].elapsed_time(row[k][1]) for row in events) for k in range(len(calls))]


HEADS = (8, 16, 32, 64, 128)


@pytest.mark.parametrize("h_q", HEADS)
def test_100_slots_cost_no_more_than_128(h_q: int) -> None:
    narrow, wide = milliseconds(
        Call(drawn(S_Q, S_KV, h_q, topk=100)), Call(drawn(S_Q, S_KV, h_q, topk=128))
    )
    assert narrow <= 1.1 * wide


@pytest.mark.parametrize("h_q", HEADS)
def test_slots_past_a_length_cost_little(h_q: int) -> None:
    """An eighth of 2,048 slots takes about what 256 do, and not half of what all take."""
    inputs = drawn(S_Q, S_KV, h_q, topk=2048)
    lengths = torch.full((S_Q,), 256, dtype=torch.int32, device=DEVICE)
    cut, few, whole = milliseconds(
        Call(replace(inputs, topk_length=lengths)),
        Call(replace(inputs, indices=inputs.indices[:, :, :256])),
        Call(inputs),
    )
    assert cut <= 1.25 * few
    assert cut <= 0.5 * whole


@pytest.mark.parametrize(("h_q", "most"), [(8, 0.85), (16, 0.85), (32, 1.0)])
def test_few_heads_take_less_than_the_same_padded(h_q: int, most: float) -> None:
    inputs = drawn(S_Q, S_KV, h_q, topk=2048)
    q = torch.zeros(S_Q, 64, 576, dtype=torch.uint8, device=DEVICE)
    q[:, :h_q] = inputs.q.view(torch.uint8)
    padded = replace(inputs, q=q.view(inputs.q.dtype))
    with launches() as parts:
        native, wide = milliseconds(Call(inputs), Call(padded, sparse_mla_q8kv8_prefill_fwd))
    assert {part.heads_per_item for part in parts} == {h_q, 64}
    assert native <= most * wide


@pytest.mark.parametrize(
    ("h_q", "scales", "most"), [(16, "kv", 1.2), (16, "q", 1.2), (128, "kv", 1.5), (128, "q", 1.2)]
)
def test_scales_a_token_cost_little(h_q: int, scales: str, most: float) -> None:
    inputs = drawn(S_Q, S_KV, h_q, topk=2048)
    many = torch.full((S_KV,) if scales == "kv" else (S_Q, h_q), 0.5, device=DEVICE)
    each, one = milliseconds(
        Call(replace(inputs, **{f"{scales}_scale": many})),
        Call(replace(inputs, **{f"{scales}_scale": scalar(0.5)})),
    )
    assert each <= most * one
