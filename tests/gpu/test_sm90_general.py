"""The general operator on the kernel: any heads, any slots, strided rows, floats quantised."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from hopper import (
    BACKEND,
    DEVICE,
    LIMITS,
    NAN_BYTE,
    ON_GPU,
    assert_equal_bits,
    assert_same_bits,
    drawn,
    forced,
    general,
    results,
    strict,
)

from sparse_mla import SlowBackendWarning, dispatch, quantize_fp8, sparse_mla_prefill
from sparse_mla.testing import Case, compare, guarded_like, make_inputs, poison_unselected

SLOTS = (1, 63, 100, 2051)
HEADS = (1, 8, 20, 33, 128)


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("topk", SLOTS)
@pytest.mark.parametrize("h_q", HEADS)
def test_any_heads_and_slots(h_q: int, topk: int, d_qk: int) -> None:
    case = Case("any", 5, 2500, h_q, d_qk, topk, pattern="holes", lengths="beyond", sink="normal")
    inputs = poison_unselected(make_inputs(case, device=DEVICE))
    inputs = replace(inputs, q=guarded_like(inputs.q).tensor)
    guards = [guarded_like(x) for x in results(general(inputs))]
    for guard in guards:
        guard.tensor.fill_(torch.nan)
    out, max_logits, lse = (guard.tensor for guard in guards)
    compare(general(inputs, (out, max_logits, lse)), LIMITS)
    for guard in guards:
        guard.check()


@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64])
def test_fewer_heads_are_the_first_of_more(heads: int) -> None:
    """Heads past the last are padding: they change nothing."""
    inputs = drawn(4, 300, h_q=64)
    with forced(heads):
        all_heads = strict(inputs)
        for h_q in (1, 12, 16, 24, 31, 32, 63):
            some = general(inputs, q=inputs.q[:, :h_q])
            assert_equal_bits(some.out, all_heads.out[:, :h_q], f"out of {h_q} heads")
            assert_equal_bits(some.lse, all_heads.lse[:, :h_q], f"lse of {h_q} heads")


@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("topk", [1, 65, 192, 2051])
def test_fewer_slots_are_more_padded_with_minus_one(topk: int, heads: int) -> None:
    inputs = drawn(4, 3000, topk=topk)
    padded = torch.full((4, 1, -(-topk // 128) * 128), -1, dtype=torch.int32, device=DEVICE)
    padded[:, :, :topk] = inputs.indices
    with forced(heads):
        assert_same_bits(general(inputs), strict(inputs, indices=padded))


def gapped(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """The same rows with ``before`` and ``after`` elements around each, full of NaN bytes."""
    *rows, width = x.shape
    buffer = torch.empty(*rows, before + width + after, dtype=x.dtype, device=x.device)
    buffer.view(torch.uint8).fill_(NAN_BYTE)
    view = buffer[..., before : before + width]
    view.copy_(x)
    return view


def strided_forms(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of ``x`` where they lie differently in memory."""
    double = torch.zeros(2 * len(x), *x.shape[1:], dtype=x.dtype, device=x.device)
    every_second = double[::2]
    every_second.copy_(x)
    forms = {"every-second": every_second, "gaps": gapped(x, 16, 48)}
    if name == "q":
        forms["heads-first"] = x.transpose(0, 1).contiguous().transpose(0, 1)
        forms["one-head-apart"] = gapped(x[:, :, None], 64, 0)[:, :, 0]
    if name == "kv":
        forms["2-d"] = x[:, 0]
        forms["656-byte rows"] = gapped(x[:, 0], 0, 656 - x.shape[-1])
    if name == "indices":
        forms["2-d"] = x[:, 0]
        forms["odd-start"] = gapped(x[:, 0], 1, 2)
    return forms


@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("name", ["q", "kv", "indices"])
def test_rows_may_lie_apart(name: str, d_qk: int) -> None:
    inputs = drawn(6, 300, h_q=33, d_qk=d_qk, topk=100)
    inputs.indices[:, :, 7] = -1
    want = general(inputs)
    for form, x in strided_forms(name, getattr(inputs, name)).items():
        got = general(inputs, **{name: x})
        for a, b, result in zip(results(got), results(want), ("out", "max", "lse"), strict=True):
            assert_equal_bits(a, b, f"{result} of {name}, {form}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_float_q_is_quantised_with_the_scale_given(dtype: torch.dtype) -> None:
    inputs = drawn(4, 300, h_q=20, topk=100)
    q = torch.randn(4, 20, 576, device=DEVICE).to(dtype)
    stored, _ = quantize_fp8(q, scale=inputs.q_scale)
    assert_same_bits(general(inputs, q=q), general(inputs, q=stored))


@pytest.mark.parametrize("h_q", [20, 128])
@pytest.mark.parametrize("shape", ["a token", "a token and head"])
def test_q_scales_of_their_own(shape: str, h_q: int) -> None:
    """Each row gives what it gives where all rows have its scale."""
    inputs = drawn(5, 300, h_q=h_q, topk=100)
    count = 5 if shape == "a token" else 5 * h_q
    scales = torch.linspace(0.1, 1.5, count, device=DEVICE).view(5, -1)
    got = general(inputs, q_scale=scales[:, 0].contiguous() if shape == "a token" else scales)
    compare(got, LIMITS)
    if not ON_GPU:
        return
    for t, head in ((0, 0), (2, h_q - 1), (4, 7)):
        alone = general(
            inputs, q_scale=scales[t, head if shape != "a token" else 0].view(1).clone()
        )
        for a, b, name in zip(results(got), results(alone), ("out", "max", "lse"), strict=True):
            assert_equal_bits(a[t, head : head + 1], b[t, head : head + 1], name)


@pytest.mark.cuda_only
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_bad_q_scale_spoils_its_own_row(bad: float) -> None:
    inputs = drawn(3, 300, h_q=64, topk=128)
    scales = torch.full((3, 64), 0.7, device=DEVICE)
    want = general(inputs, q_scale=scales)
    spoilt = scales.clone()
    spoilt[1, 9] = bad
    got = general(inputs, q_scale=spoilt)
    for a, b, name in zip(results(got), results(want), ("out", "max", "lse"), strict=True):
        assert a[1, 9].isnan().all()
        a[1, 9] = b[1, 9]
        assert_equal_bits(a, b, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_float_q_without_a_scale(dtype: torch.dtype) -> None:
    """The simplest call: q is quantised a token and head, and the kernel takes that."""
    inputs = drawn(4, 300, h_q=20, topk=100)
    q = torch.randn(4, 20, 576, device=DEVICE).to(dtype)
    stored, scales = quantize_fp8(q, per="token-head")
    got = general(inputs, q=q, q_scale=None)
    assert_same_bits(got, general(inputs, q=stored, q_scale=scales))


def test_numbers_for_scales() -> None:
    inputs = drawn(4, 300, h_q=20, topk=100)
    with_numbers = sparse_mla_prefill(
        inputs.q, inputs.kv, inputs.indices, inputs.sm_scale, 0.7, 0.3, return_stats=True
    )
    assert dispatch.last_backend() == BACKEND
    for a, b in zip(with_numbers, results(general(inputs)), strict=True):
        assert_equal_bits(a, b, "result")


def test_sm_scale_left_out() -> None:
    inputs = drawn(2, 300, topk=100)
    out = sparse_mla_prefill(inputs.q, inputs.kv, inputs.indices, None, 0.7, 0.3)
    assert dispatch.last_backend() == BACKEND
    assert_equal_bits(out, general(inputs, sm_scale=576**-0.5).out, "out")


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("q off its alignment", "rows of q and kv must start at multiples of 16 bytes"),
        ("kv of odd stride", "rows of q and kv must start at multiples of 16 bytes"),
    ],
)
def test_what_the_kernel_refuses_is_answered_all_the_same(change: str, reason: str) -> None:
    """By a backend that takes longer, which is said once, with the kernel's reason."""
    inputs = drawn(3, 200, h_q=8, topk=100)
    if change == "q off its alignment":
        inputs = replace(inputs, q=guarded_like(inputs.q, offset=1).tensor)
    else:
        inputs = replace(inputs, kv=gapped(inputs.kv, 0, 8))
    dispatch._warned.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = sparse_mla_prefill(**vars(inputs))
        sparse_mla_prefill(**vars(inputs))
    assert dispatch.last_backend() not in ("", "sm90")
    texts = [str(w.message) for w in said if issubclass(w.category, SlowBackendWarning)]
    assert len(texts) == 1
    assert reason in texts[0]
    want = sparse_mla_prefill(**vars(inputs), backend="reference")
    torch.testing.assert_close(out.float(), want.float(), rtol=0.02, atol=0.002)


def test_the_kernel_can_be_asked_for_by_name() -> None:
    inputs = drawn(3, 200, h_q=8, topk=100)
    out = sparse_mla_prefill(**vars(inputs), backend=BACKEND)
    assert_equal_bits(out, general(inputs).out, "out")
