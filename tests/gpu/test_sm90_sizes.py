"""Sizes past grid limits and past 2**31 bytes, and none at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hopper import (
    DEVICE,
    E4M3,
    LIMITS,
    NAN_BYTE,
    ON_GPU,
    assert_empty,
    assert_equal_bits,
    drawn,
    either,
    fp8,
    general,
    results,
    scalar,
    strict,
)

from sparse_mla.testing import compare

SHRINK = 1 if ON_GPU else 512
"""A CPU tries the same logic on sizes that prove nothing."""


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    yield
    if ON_GPU:
        torch.cuda.empty_cache()


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("s_q", [0, 1, 2, 65, 131, 132, 133, 264, 265])
def test_queries(s_q: int, d_qk: int) -> None:
    problem = strict(drawn(s_q, 500, d_qk=d_qk))
    assert problem.out.shape == (s_q, 64, 512)
    compare(problem, LIMITS)


@pytest.mark.parametrize(
    ("s_q", "h_q"), [(65535, 64), (65536, 64), (65537, 64), (65537, 8), (65537, 20)]
)
def test_queries_past_a_grid_limit(s_q: int, h_q: int) -> None:
    """Query t repeats query t - 1021, so that every row has another to be equal to.

    65537 queries of 64 heads are also more than 2**31 bytes of q and 2**31 elements of out. The
    plan gives them to the kernel for 64, and fewer to the others.
    """
    s_q, period = s_q // SHRINK, 1021 // SHRINK
    first = drawn(period, 3000, h_q)
    turn = torch.arange(s_q, device=DEVICE) % period
    q, indices = first.q.view(torch.uint8)[turn].view(E4M3), first.indices[turn]
    problem = either(replace(first, q=q, indices=indices))
    compare(problem, LIMITS, queries=[0, 1, period - 1, s_q - 2, s_q - 1])
    if ON_GPU:  # the CPU backend's sums depend on which queries share a block
        for name, result in zip(("out", "max_logits", "lse"), results(problem), strict=True):
            assert_equal_bits(result[period:], result[: s_q - period], name)
    assert problem.lse.isfinite().all()


@pytest.mark.parametrize("d_qk", [512, 576])
def test_a_cache_past_2_to_the_31_bytes(d_qk: int) -> None:
    """Rows that end, straddle and begin at the limit; every other row is NaN."""
    last = 2**31 // d_qk // SHRINK
    rows = torch.tensor([0, 1, last - 2, last - 1, last, last + 1, last + 28], device=DEVICE)
    kv = torch.full((last + 30, 1, d_qk), NAN_BYTE, dtype=torch.uint8, device=DEVICE).view(E4M3)
    kv.view(torch.uint8)[rows] = fp8(len(rows), 1, d_qk, seed=9).view(torch.uint8)
    picks = torch.randint(len(rows), (8, 1, 128), device=DEVICE)
    picks[:7] = torch.arange(7, device=DEVICE)[:, None, None]  # each row by itself, then all
    problem = strict(drawn(8, 100, d_qk=d_qk), kv=kv, indices=rows[picks].int())
    compare(problem, LIMITS)
    assert problem.out.isfinite().all()


def test_far_apart_rows_past_2_to_the_31_bytes() -> None:
    """A cache whose row stride is larger than a row: the offset overflows, the index does not."""
    stride = 1 << 16
    s_kv = 2**31 // stride // SHRINK + 3
    big = torch.full((s_kv, stride), NAN_BYTE, dtype=torch.uint8, device=DEVICE)
    big[:, 64 : 64 + 576] = fp8(s_kv, 576, seed=4).view(torch.uint8)
    kv = big[:, 64 : 64 + 576].view(E4M3)
    problem = general(drawn(5, s_kv), kv=kv)
    compare(problem, LIMITS)


@pytest.mark.parametrize("h_q", [64, 128])
def test_a_cache_of_262209_rows(h_q: int) -> None:
    s_q, s_kv = 4096 // SHRINK, 262209 // SHRINK
    problem = strict(drawn(s_q, s_kv, h_q, topk=2048))
    compare(problem, LIMITS, queries=[0, 1, s_q // 2, s_q - 1])
    assert problem.out.isfinite().all()


def test_no_rows_in_the_cache() -> None:
    inputs = drawn(70, 10)
    assert_empty(strict(inputs, kv=inputs.kv[:0]))


def test_one_row_in_the_cache() -> None:
    inputs = drawn(3, 1, topk=256)
    problem = strict(replace(inputs, kv_scale=scalar(2.0)))
    row = (inputs.kv[0, 0, :512].float() * 2.0).to(torch.bfloat16)
    torch.testing.assert_close(problem.out, row.expand(3, 64, 512), rtol=0.01, atol=0.01)
    compare(problem, LIMITS)
