"""Faults that people met in other sparse MLA kernels, each kind kept out of both CPU paths.

A name says what went wrong elsewhere. Every test goes through the public operator and asserts which
backend answered.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparse_mla import dispatch, sparse_mla_prefill
from sparse_mla.testing import CPU_BFLOAT16, Case, Inputs, guarded_like, make_inputs

E4M3 = torch.float8_e4m3fn
ONE = torch.ones(1)
INVALID = (-1, -2, -(2**31), 2147480000, 2143289344, 2**31 - 1)

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(params=["reference", "cpu", "cpu-float32"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, compute = request.param.partition("-")
    if name == "cpu":
        monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", compute or "bfloat16")
    return name


def attend(backend: str, inputs: Inputs, **changes: Any) -> Results:
    arguments = {**vars(inputs), **changes}
    results = sparse_mla_prefill(**arguments, backend=backend, return_stats=True)
    assert dispatch.last_backend() == backend
    return results


def drawn(s_q: int = 3, s_kv: int = 40, h_q: int = 5, **more: Any) -> Inputs:
    return make_inputs(Case("drawn", s_q, s_kv, h_q, **{"topk": 32, **more}))


def same(a: Results, b: Results) -> None:
    """Equal up to what the backends state, on both sides."""
    out, want = a[0].double(), b[0].double()
    assert torch.equal(out.isnan(), want.isnan())
    error = (out - want).nan_to_num().norm(dim=-1)
    assert (error <= 2 * CPU_BFLOAT16.out * want.nan_to_num().norm(dim=-1)).all()
    limits = {"rtol": 2 * CPU_BFLOAT16.relative, "atol": 2 * CPU_BFLOAT16.absolute}
    torch.testing.assert_close(a[1], b[1], **limits, equal_nan=True)
    torch.testing.assert_close(a[2], b[2], **limits, equal_nan=True)


def rows(*slots: Any, topk: int = 16) -> torch.Tensor:
    """Index rows: each list padded with -1."""
    filled = [[*row, *[-1] * (topk - len(row))] for row in slots]
    return torch.tensor(filled, dtype=torch.int32)


# A: rows without a valid index, garbage through masked slots


@pytest.mark.parametrize("masked", INVALID)
def test_a_first_block_of_masked_slots_does_not_make_nan(backend: str, masked: int) -> None:
    inputs = drawn(s_q=2)
    valid = torch.arange(16, dtype=torch.int32)
    nothing = torch.full((16,), masked, dtype=torch.int32)
    indices = torch.stack([torch.cat([nothing, valid]), torch.cat([nothing, nothing])])
    first = torch.stack([torch.cat([valid, nothing])] * 2)
    got, expected = attend(backend, inputs, indices=indices), attend(backend, inputs, indices=first)
    same(tuple(x[:1] for x in got), tuple(x[:1] for x in expected))  # type: ignore[arg-type]
    assert not got[0][1].any()
    assert (got[1][1] == -math.inf).all()
    assert (got[2][1] == math.inf).all()


@pytest.mark.parametrize("poison", [0x7F, 0xFF], ids=["nan", "minus-nan"])
def test_a_masked_slot_does_not_read_the_row_before_the_buffer(backend: str, poison: int) -> None:
    big = torch.randn(10, 576).to(E4M3)
    big.view(torch.uint8)[[0, 9]] = poison
    kv = big[1:9]
    q = torch.randn(1, 4, 576).to(E4M3)
    out = sparse_mla_prefill(q, kv, rows([0, -1, 8, -1]), 0.1, ONE, ONE, backend=backend)
    assert dispatch.last_backend() == backend
    assert torch.equal(out, kv[0, :512].to(torch.bfloat16).expand(1, 4, 512))


def test_a_row_of_length_zero_is_empty_beside_a_normal_one(backend: str) -> None:
    inputs = drawn(s_q=2)
    lengths = torch.tensor([32, 0], dtype=torch.int32)
    sink = torch.tensor([-math.inf, -1.0, 0.0, 3e38, math.inf])
    out, max_logits, lse = attend(backend, inputs, topk_length=lengths, attn_sink=sink)
    assert out[0, :3].abs().sum() > 0
    assert torch.equal(out[1], torch.zeros(5, 512, dtype=torch.bfloat16))
    assert (max_logits[1] == -math.inf).all()
    assert (lse[1] == math.inf).all()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 0.0])
def test_results_do_not_depend_on_what_the_outputs_held(backend: str, garbage: float) -> None:
    inputs = drawn(pattern="holes", lengths="ragged")
    expected = attend(backend, inputs)
    outputs = [torch.full_like(x, garbage) for x in expected]
    got = attend(backend, inputs, out=outputs[0], max_logits=outputs[1], lse=outputs[2])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_nothing_is_written_outside_the_outputs(backend: str) -> None:
    inputs = drawn(s_q=5, h_q=3, pattern="empty-rows")
    guards = [guarded_like(x) for x in attend(backend, inputs)]
    expected = [guard.tensor.clone() for guard in guards]
    for guard in guards:
        guard.tensor.fill_(math.nan)
    out, max_logits, lse = (guard.tensor for guard in guards)
    attend(backend, inputs, out=out, max_logits=max_logits, lse=lse)
    for guard, want in zip(guards, expected, strict=True):
        guard.check()
        assert torch.equal(guard.tensor, want)


# B: indices


@pytest.mark.parametrize("outside", [*INVALID, 8, 9])
def test_only_indices_within_the_cache_count(backend: str, outside: int) -> None:
    kv = torch.randn(8, 576).to(E4M3)
    q = torch.randn(1, 4, 576).to(E4M3)
    out, max_logits, lse = sparse_mla_prefill(
        q, kv, rows([outside, 0, outside]), 0.1, ONE, ONE, backend=backend, return_stats=True
    )
    assert torch.equal(out, kv[0, :512].to(torch.bfloat16).expand(1, 4, 512))
    logit = 0.1 * (q.double() @ kv[0].double())
    limits = {"rtol": CPU_BFLOAT16.relative, "atol": CPU_BFLOAT16.absolute}
    torch.testing.assert_close(max_logits.double(), logit, **limits)
    torch.testing.assert_close(lse, max_logits)


@pytest.mark.parametrize("order", [[3, -1, 7, -1], [-1, -1, 3, 7], [3, 7], [7, 99, 3]])
def test_masked_slots_may_stand_anywhere(backend: str, order: list[int]) -> None:
    inputs = drawn(s_q=1)
    same(
        attend(backend, inputs, indices=rows(order)),
        attend(backend, inputs, indices=rows([3, 7])),
    )


# C: numbers


@pytest.mark.parametrize("topk", [1024, 2048])
def test_a_long_tail_keeps_its_mass(backend: str, topk: int) -> None:
    kv = torch.ones(topk, 576)
    kv[:, 512:] = 0
    kv[:, 512] = -7
    kv[0, 512] = 0
    q = torch.zeros(1, 2, 576)
    q[..., 512] = 1
    indices = torch.arange(topk, dtype=torch.int32)[None]
    out, max_logits, lse = sparse_mla_prefill(
        q.to(E4M3), kv.to(E4M3), indices, 1.0, ONE, ONE, backend=backend, return_stats=True
    )
    assert (out - 1.0).abs().max() < 0.005
    assert max_logits.abs().max() < 0.004
    assert (lse - math.log(1 + (topk - 1) * math.exp(-7))).abs().max() < 0.004


@pytest.mark.parametrize("scale", [0.0123, 0.5, 3.0, 1e-30, 1e30])
def test_a_kv_scale_is_used_as_it_is_in_both_products(backend: str, scale: float) -> None:
    kv, q = torch.ones(4, 576).to(E4M3), torch.ones(1, 2, 576).to(E4M3)
    out, max_logits, _ = sparse_mla_prefill(
        q, kv, rows([1]), 0.01 / scale, 1.0, scale, backend=backend, return_stats=True
    )
    torch.testing.assert_close(out.float(), torch.full_like(out, scale).float(), rtol=0, atol=0)
    torch.testing.assert_close(max_logits, torch.full_like(max_logits, 5.76), rtol=1e-3, atol=0)


@pytest.mark.parametrize("sm_scale", [2 / math.sqrt(576), 192**-0.5, 1e-6, 3.0])
def test_the_exported_maximum_and_lse_use_the_scale_of_the_softmax(
    backend: str, sm_scale: float
) -> None:
    inputs = drawn()
    _, max_logits, lse = attend(backend, inputs, sm_scale=sm_scale)
    q = inputs.q.double() * inputs.q_scale
    kv = (inputs.kv[:, 0].double() * inputs.kv_scale)[inputs.indices[:, 0].long()]
    expected = (q @ kv.transpose(1, 2)).amax(dim=-1) * sm_scale
    limits = {"rtol": CPU_BFLOAT16.relative, "atol": CPU_BFLOAT16.absolute}
    torch.testing.assert_close(max_logits.double(), expected, **limits)
    assert (lse >= max_logits - 1e-5 * max_logits.abs()).all()
    assert (lse <= max_logits + math.log(32) + 1e-5 * max_logits.abs()).all()


# D: topk


@pytest.mark.parametrize("topk", [1, 2, 15, 63, 64, 65, 192, 2051])
@pytest.mark.parametrize("s_kv", [10, 300])
def test_any_topk_equals_the_padded_one(backend: str, topk: int, s_kv: int) -> None:
    inputs = drawn(s_kv=s_kv, topk=topk)
    padded = torch.full((3, 1, 2176), -1, dtype=torch.int32)
    padded[:, :, :topk] = inputs.indices
    same(attend(backend, inputs), attend(backend, inputs, indices=padded))


def test_a_cache_shorter_than_topk_is_dense_attention(backend: str) -> None:
    inputs = drawn(s_q=1, s_kv=10, topk=2048)
    same(
        attend(backend, inputs),
        attend(backend, inputs, indices=rows(range(10), topk=10)),
    )


def test_lengths_bound_every_query_past_the_64th(backend: str) -> None:
    inputs = drawn(s_q=65, h_q=2)
    cut = inputs.indices.clone()
    cut[:, :, 5:] = -1
    lengths = torch.full((65,), 5, dtype=torch.int32)
    got = attend(backend, inputs, topk_length=lengths)
    expected = attend(backend, inputs, indices=cut)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("length", "used"), [(-5, 0), (33, 32), (2**31 - 1, 32), (-(2**31), 0)])
def test_lengths_outside_the_row_are_clamped(backend: str, length: int, used: int) -> None:
    inputs = drawn(s_q=1)
    got, expected = (
        attend(backend, inputs, topk_length=torch.tensor([n], dtype=torch.int32))
        for n in (length, used)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_every_length_returns(backend: str) -> None:
    s_q = 130
    inputs = drawn(s_q=s_q, h_q=1, s_kv=140, topk=129)
    lengths = torch.arange(s_q, dtype=torch.int32)
    out, _, lse = attend(backend, inputs, topk_length=lengths)
    assert out.isfinite().all()
    assert lse.isfinite().sum() == s_q - 1


# E: heads


@pytest.mark.parametrize("h_q", [1, 8, 12, 16, 20, 24, 31, 33, 65, 128])
def test_any_number_of_heads_equals_the_padded_call(backend: str, h_q: int) -> None:
    inputs = drawn(h_q=h_q, sink="extreme")
    q = torch.zeros(3, 192, 576).to(E4M3)
    q[:, :h_q] = inputs.q
    sink = torch.full((192,), -1e30)
    sink[:h_q] = inputs.attn_sink
    padded = attend(backend, inputs, q=q, attn_sink=sink)
    got = attend(backend, inputs)
    assert got[0].shape == (3, h_q, 512)
    same(got, tuple(x[:, :h_q] for x in padded))  # type: ignore[arg-type]


def test_what_pad_heads_hold_does_not_change_the_real_ones(backend: str) -> None:
    inputs = drawn(h_q=64)
    zeros, nans = inputs.q.clone(), inputs.q.clone()
    zeros.view(torch.uint8)[:, 16:] = 0
    nans.view(torch.uint8)[:, 16:] = 0x7F
    for a, b in zip(attend(backend, inputs, q=zeros), attend(backend, inputs, q=nans), strict=True):
        assert torch.equal(a[:, :16], b[:, :16])
        assert b[:, 16:].isnan().all()


# F: sizes


def test_no_queries_give_empty_tensors(backend: str) -> None:
    out, max_logits, lse = attend(backend, drawn(s_q=0, h_q=64))
    assert (out.shape, max_logits.shape, lse.shape) == ((0, 64, 512), (0, 64), (0, 64))


def test_an_empty_cache_gives_empty_rows(backend: str) -> None:
    out, max_logits, lse = attend(backend, drawn(s_kv=0))
    assert not out.any()
    assert (max_logits == -math.inf).all()
    assert (lse == math.inf).all()


def test_rows_of_512_columns_are_not_read_as_576(backend: str) -> None:
    inputs = drawn(d_qk=512)
    guard = guarded_like(inputs.kv)
    got = attend(backend, inputs, kv=guard.tensor)
    expected = attend(backend, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# G: strides


@pytest.mark.parametrize("ndim", [2, 3])
def test_every_other_row_of_a_larger_cache(backend: str, ndim: int) -> None:
    inputs = drawn()
    big = torch.full((80, 1, 640), 0x7F, dtype=torch.uint8).view(E4M3)
    kv = big[::2, :, :576]
    kv.copy_(inputs.kv)
    kv = kv if ndim == 3 else kv[:, 0]
    got, expected = attend(backend, inputs, kv=kv), attend(backend, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_transposed_query(backend: str) -> None:
    inputs = drawn()
    q = inputs.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not q.is_contiguous()
    got, expected = attend(backend, inputs, q=q), attend(backend, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_cache_that_starts_off_its_alignment(backend: str) -> None:
    inputs = drawn()
    kv = guarded_like(inputs.kv, offset=1).tensor
    got, expected = attend(backend, inputs, kv=kv), attend(backend, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# H: scales


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_scale_that_means_nothing_gives_nan_where_there_is_a_row(
    backend: str, name: str, value: float
) -> None:
    inputs = drawn(s_q=4, pattern="empty-rows")
    results = attend(backend, inputs, **{name: torch.tensor([value])})
    for x, empty in zip(results, (0.0, -math.inf, math.inf), strict=True):
        assert (x[[0, 3]] == empty).all()
        assert x[1:3].isnan().all()


def test_scales_whose_product_is_below_float32_leave_masked_slots_masked(backend: str) -> None:
    inputs = drawn(pattern="holes")
    tiny = torch.tensor([1e-30])
    out, max_logits, lse = attend(backend, inputs, q_scale=tiny, kv_scale=tiny)
    valid = ((inputs.indices >= 0) & (inputs.indices < 40)).sum(dim=-1)  # [s_q, 1]
    assert out.isfinite().all()
    assert (max_logits.abs() < 1e-6).all()
    torch.testing.assert_close(lse, valid.float().log().expand(-1, 5), rtol=0, atol=1e-5)


def test_a_subnormal_token_scale_is_a_scale(backend: str) -> None:
    inputs = drawn(scales="token")
    scale = inputs.kv_scale.clone()
    scale[::2] = 1e-40
    got = attend(backend, inputs, kv_scale=scale)
    same(got, attend("reference", inputs, kv_scale=scale))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_token_scale_that_means_nothing_spoils_only_what_selects_it(
    backend: str, value: float
) -> None:
    inputs = drawn(scales="token")
    scale = inputs.kv_scale.clone()
    scale[7] = value
    got = attend(backend, inputs, kv_scale=scale, indices=rows([1, 2], [1, 7], [3, -1, 40]))
    for x in got:
        assert x[1].isnan().all()
        assert x[[0, 2]].isfinite().all()


def test_a_query_scale_that_means_nothing_spoils_only_its_row(backend: str) -> None:
    inputs = drawn(scales="token-head")
    scale = inputs.q_scale.clone()
    scale[1, 2] = 0.0
    for x in attend(backend, inputs, q_scale=scale):
        nan = x.isnan().reshape(3, 5, -1)
        assert nan[1, 2].all()
        assert nan.sum() == nan[1, 2].sum()


# I: the sink


@pytest.mark.parametrize(
    ("above", "weight"),
    [(-math.inf, 1.0), (-1e30, 1.0), (0.0, 0.5), (math.log(3), 0.25), (3e38, 0.0), (math.inf, 0.0)],
)
def test_the_sink_scales_the_output_alone(backend: str, above: float, weight: float) -> None:
    inputs = drawn(s_q=2)
    q = inputs.q[:1].expand(2, -1, -1)  # one query twice: one lse a head
    indices = inputs.indices[:1].expand(2, -1, -1).contiguous()
    out, max_logits, lse = attend(backend, inputs, q=q, indices=indices)
    sunk = attend(backend, inputs, q=q, indices=indices, attn_sink=lse[0] + above)
    torch.testing.assert_close(sunk[0].float(), out.float() * weight, rtol=0.01, atol=1e-6)
    assert torch.equal(sunk[1], max_logits)
    assert torch.equal(sunk[2], lse)


# P, Q: repetition and duplicates


def test_twenty_calls_give_the_same_bits(backend: str) -> None:
    inputs = drawn(s_q=6, h_q=16, s_kv=300, topk=200, pattern="holes", lengths="ragged")
    first = attend(backend, inputs)
    for _ in range(20):
        again = attend(backend, inputs)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_duplicate_counts_as_often_as_it_appears(backend: str) -> None:
    kv, q = torch.ones(2, 576), torch.zeros(1, 2, 576)
    kv[1] = 3
    out, _, lse = sparse_mla_prefill(
        q.to(E4M3),
        kv.to(E4M3),
        rows([0, 1, 1, 1]),
        1.0,
        ONE,
        ONE,
        backend=backend,
        return_stats=True,
    )
    assert torch.equal(out, torch.full_like(out, 2.5))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)))


def test_masked_slots_are_not_index_zero(backend: str) -> None:
    inputs = drawn(s_q=1)
    kv = inputs.kv.clone()
    kv.view(torch.uint8)[0] = 0x7F
    indices = torch.full((1, 100), -1, dtype=torch.int32)
    indices[0, ::10] = torch.arange(1, 11, dtype=torch.int32)
    assert attend(backend, inputs, kv=kv, indices=indices)[0].isfinite().all()
