"""What ``attn_sink`` and the two scales do, at values from ordinary to absurd."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hopper import (
    DEVICE,
    LIMITS,
    assert_empty,
    assert_equal_bits,
    drawn,
    forced,
    general,
    scalar,
    strict,
)

from sparse_mla.testing import Inputs, compare

BAD_SCALES = (0.0, -0.0, -1.0, -1e-30, -3e38, math.nan, math.inf, -math.inf)


def with_empty_rows(d_qk: int = 576) -> Inputs:
    """Six queries: the second has no valid slot, the fourth has length 0."""
    inputs = drawn(6, 400, d_qk=d_qk, topk=256)
    inputs.indices[1] = -1
    lengths = torch.tensor([256, 256, 100, 0, 1, 64], dtype=torch.int32, device=DEVICE)
    return replace(inputs, topk_length=lengths)


def sinks(value: float, h_q: int = 64) -> torch.Tensor:
    return torch.full((h_q,), value, device=DEVICE)


@pytest.mark.parametrize("sink", [-math.inf, -1e30, -3e38, -90.0, 0.0, 5.5, 1e30, 3e38, math.inf])
def test_a_sink_only_scales_the_output(sink: float) -> None:
    inputs = with_empty_rows()
    without = strict(inputs)
    problem = strict(inputs, attn_sink=sinks(sink))
    compare(problem, LIMITS)
    assert_equal_bits(problem.lse, without.lse, "lse")
    assert_equal_bits(problem.max_logits, without.max_logits, "max_logits")
    if sink < -80:  # exp(sink) is nothing beside one logit
        assert_equal_bits(problem.out, without.out, "out")
    if sink > 1e29:
        assert not problem.out.any()
    assert_empty(problem, [1, 3])


def test_each_head_has_its_own_sink() -> None:
    """exp(lse + ln 3) is three times the sum: the output becomes a quarter."""
    inputs = drawn(1, 400, h_q=128, topk=256)
    without = strict(inputs)
    sink = without.lse[0] + math.log(3.0)
    sink[64:] = -math.inf
    problem = strict(inputs, attn_sink=sink)
    torch.testing.assert_close(
        problem.out[0, :64].float(), without.out[0, :64].float() / 4, rtol=0.02, atol=1e-5
    )
    assert_equal_bits(problem.out[0, 64:], without.out[0, 64:], "out without a sink")


def test_one_slot_beside_a_sink_of_the_same_logit() -> None:
    inputs = drawn(1, 40)
    inputs.q.view(torch.uint8).zero_()
    inputs.indices[:, :, 1:] = -1
    problem = strict(inputs, attn_sink=sinks(0.0), kv_scale=scalar(1.0))
    half = inputs.kv[int(inputs.indices[0, 0, 0]), 0, :512].float() / 2
    assert torch.equal(problem.out.float(), half.expand(1, 64, 512))


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
@pytest.mark.parametrize("value", BAD_SCALES)
def test_a_scale_that_is_no_scale_gives_nan(value: float, name: str) -> None:
    problem = strict(with_empty_rows(), **{name: scalar(value)}, attn_sink=sinks(1.0))
    filled = [0, 2, 4, 5]
    assert problem.out[filled].isnan().all()
    assert problem.max_logits[filled].isnan().all()
    assert problem.lse[filled].isnan().all()
    assert_empty(problem, [1, 3])


@pytest.mark.parametrize(
    ("q_scale", "kv_scale"),
    [(0.0123, 3.0), (1.7e-5, 260.0), (3e-38, 1.0), (1e-3, 1e20)],
)
def test_scales_are_used_as_they_are(q_scale: float, kv_scale: float) -> None:
    """Not rounded to powers of two, in QK and in PV."""
    inputs = with_empty_rows()
    sm_scale = 1 / (math.sqrt(576) * q_scale * kv_scale)
    problem = strict(inputs, sm_scale=sm_scale, q_scale=scalar(q_scale), kv_scale=scalar(kv_scale))
    compare(problem, LIMITS)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize(
    ("sm_scale", "q_scale", "kv_scale"),
    [(0.04, 1e-30, 1e-30), (1e-60, 1.0, 1.0), (0.04, 1e-44, 1.0)],
)
def test_good_scales_of_a_product_below_float32_give_flat_logits(
    sm_scale: float, q_scale: float, kv_scale: float, heads: int
) -> None:
    """Masked slots included: 0 times their -inf would be NaN."""
    inputs = replace(with_empty_rows(), sm_scale=sm_scale)
    with forced(heads):
        problem = general(inputs, q_scale=scalar(q_scale), kv_scale=scalar(kv_scale))
    compare(problem, LIMITS)
    assert_empty(problem, [1, 3])


def test_sm_scale_is_the_one_given() -> None:
    inputs = with_empty_rows()
    once, twice = strict(inputs), strict(inputs, sm_scale=2 * inputs.sm_scale)
    compare(twice, LIMITS)
    filled = [0, 2, 4, 5]
    torch.testing.assert_close(
        twice.max_logits[filled], 2 * once.max_logits[filled], rtol=1e-3, atol=2e-3
    )
    assert (twice.lse[filled] >= twice.max_logits[filled] - 1e-4).all()
    assert (twice.lse[filled] <= twice.max_logits[filled] + math.log(256) + 1e-4).all()
