"""The same inputs give the same bits, whatever else the GPU does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hopper import BACKEND, DEVICE, LIMITS, ON_GPU, bits, busy_stream, drawn, results, strict

from sparse_mla import dispatch, sparse_mla_q8kv8_prefill_fwd
from sparse_mla.testing import Inputs, allocate_outputs, compare

RUNS = 100 if ON_GPU else 3

SHAPES = {
    "many-queries-few-slots": (512, 3000, 64, 576, 256),
    "one-wave": (66, 8000, 128, 576, 2048),
    "one-query": (1, 4000, 64, 512, 2048),
    "one-block-each": (700, 500, 64, 512, 128),
}


def inputs_of(shape: tuple[int, int, int, int, int]) -> Inputs:
    """Ragged lengths, holes and peaked logits: everything that could take another path."""
    s_q, s_kv, h_q, d_qk, topk = shape if ON_GPU else (min(shape[0], 8), *shape[1:])
    inputs = drawn(s_q, s_kv, h_q, d_qk, topk, sigma=3.0)
    inputs.indices[:, :, 5::11] = -1
    lengths = torch.arange(s_q, dtype=torch.int32, device=DEVICE) * 37 % topk + 1
    lengths[::3] = topk
    return replace(inputs, topk_length=lengths)


def assert_equal_over_runs(
    inputs: Inputs, between: Callable[[int], None] = lambda run: None
) -> None:
    """``RUNS`` calls, each result counted for itself: a race often shows in one of them only."""
    first = strict(inputs)
    wrong = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    outputs = allocate_outputs(inputs)
    for run in range(RUNS):
        between(run)
        for x in outputs:
            x.fill_(torch.nan)
        out, max_logits, lse = outputs
        sparse_mla_q8kv8_prefill_fwd(**vars(inputs), out=out, max_logits=max_logits, lse=lse)
        assert dispatch.last_backend() == BACKEND
        for k, (got, want) in enumerate(zip(outputs, results(first), strict=True)):
            wrong[k] += (bits(got) != bits(want)).any()
    found = dict(zip(("out", "max_logits", "lse"), wrong.tolist(), strict=True))
    assert found == {"out": 0, "max_logits": 0, "lse": 0}, f"runs that differ, of {RUNS}"
    compare(first, LIMITS, queries=range(0, first.s_q, -(-first.s_q // 16)))


@pytest.mark.parametrize("shape", SHAPES)
def test_runs_are_equal(shape: str) -> None:
    assert_equal_over_runs(inputs_of(SHAPES[shape]))


@pytest.mark.cuda_only
@pytest.mark.parametrize("shape", ["many-queries-few-slots", "one-wave"])
def test_runs_are_equal_while_another_stream_is_busy(shape: str) -> None:
    inputs = inputs_of(SHAPES[shape])
    with busy_stream() as more:
        assert_equal_over_runs(inputs, more)


@pytest.mark.cuda_only
def test_calls_on_several_streams_at_once() -> None:
    """Small launches that share the GPU: each has its own shared memory, and no global scratch."""
    inputs = [drawn(20, 2000, seed=10 * k) for k in range(4)]
    wanted = [strict(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[] for _ in inputs]
    for _ in range(25):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[k].append(sparse_mla_q8kv8_prefill_fwd(**vars(inputs[k]))[0])
    torch.cuda.synchronize()
    for want, outs in zip(wanted, got, strict=True):
        assert all(torch.equal(bits(out), bits(want.out)) for out in outs)


def test_a_query_does_not_depend_on_the_others() -> None:
    """Alone, or in another place of another call: a query's bits are the same."""
    inputs = inputs_of((300, 2000, 64, 576, 512))
    assert inputs.topk_length is not None
    s_q = len(inputs.q)
    whole = strict(inputs)
    order = torch.randperm(s_q, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    moved = strict(
        inputs,
        q=inputs.q.view(torch.uint8)[order].view(inputs.q.dtype),
        indices=inputs.indices[order],
        topk_length=inputs.topk_length[order],
    )
    if ON_GPU:  # the CPU backend's sums depend on which queries share a block
        for got, want in zip(results(moved), results(whole), strict=True):
            assert torch.equal(bits(got), bits(want[order]))
    compare(moved, LIMITS, queries=range(0, s_q, -(-s_q // 8)))
