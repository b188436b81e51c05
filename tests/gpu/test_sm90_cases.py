"""The cases every backend must get right, in memory where any stray read or write shows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hopper import (
    BACKEND,
    DEVICE,
    E4M3,
    INVALID,
    LIMITS,
    assert_empty,
    assert_same_bits,
    drawn,
    either,
    scalar,
    strict,
)

from sparse_mla import dispatch, sparse_mla_q8kv8_prefill_fwd
from sparse_mla.testing import (
    CASES,
    Case,
    Inputs,
    allocate_outputs,
    compare,
    guarded_like,
    make_inputs,
    poison_unselected,
)

WIDTHS = (512, 576)


def surrounded(inputs: Inputs) -> Inputs:
    """The same inputs, NaN in every KV row not selected and around q and kv."""
    inputs = poison_unselected(inputs)
    return replace(inputs, q=guarded_like(inputs.q).tensor, kv=guarded_like(inputs.kv).tensor)


@pytest.mark.parametrize("d_qk", WIDTHS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, d_qk: int) -> None:
    inputs = surrounded(make_inputs(replace(case, d_qk=d_qk), device=DEVICE))
    guards = [guarded_like(x) for x in allocate_outputs(inputs)]
    out, max_logits, lse = (guard.tensor for guard in guards)
    compare(either(inputs, (out, max_logits, lse)), LIMITS)
    for guard in guards:
        guard.check()


@pytest.mark.parametrize("d_qk", WIDTHS)
@pytest.mark.parametrize("h_q", [64, 128, 192])
@pytest.mark.parametrize("topk", [128, 256, 384, 640, 2048])
def test_heads_and_slots(h_q: int, topk: int, d_qk: int) -> None:
    case = Case(
        "grid", s_q=7, s_kv=2500, h_q=h_q, d_qk=d_qk, topk=topk, sigma=2.0,
        pattern="holes", lengths="ragged", sink="normal",
    )  # fmt: skip
    compare(strict(surrounded(make_inputs(case, device=DEVICE))), LIMITS)


@pytest.mark.parametrize("place", ["leading", "interior", "trailing", "all"])
@pytest.mark.parametrize("invalid", [*INVALID, "s_kv"], ids=str)
def test_indices_that_select_nothing(invalid: int | str, place: str) -> None:
    """A call whose valid slots lie at the front answers alike, wherever they lie in this one."""
    s_kv, topk = 300, 256
    inputs = surrounded(drawn(3, s_kv, topk=topk))
    slots = torch.arange(topk, device=DEVICE)
    nothing = {
        "leading": slots < 130,
        "interior": (slots >= 50) & (slots < 200) & (slots != 64),
        "trailing": slots >= 65,
        "all": slots >= 0,
    }[place]
    indices = inputs.indices.clone()
    indices[:, :, nothing] = s_kv if invalid == "s_kv" else invalid
    problem = strict(inputs, indices=indices)
    if place == "all":
        assert_empty(problem)
    compare(problem, LIMITS)


def test_only_the_valid_slot_counts() -> None:
    """One valid slot has weight 1: the output is its row, bit by bit."""
    kv = guarded_like(torch.randn(8, 1, 576, device=DEVICE).to(E4M3)).tensor
    indices = torch.tensor(INVALID, dtype=torch.int32, device=DEVICE).repeat(22)[:128]
    indices[77] = 3
    inputs = replace(drawn(1, 8), kv=kv, kv_scale=scalar(0.5), indices=indices.reshape(1, 1, 128))
    problem = strict(inputs)
    row = (kv[3, 0, :512].float() * 0.5).to(torch.bfloat16)
    assert torch.equal(problem.out, row.expand(1, 64, 512))
    torch.testing.assert_close(problem.lse, problem.max_logits)


def test_duplicates_count_each_time() -> None:
    inputs = drawn(2, 50, topk=384)
    once = strict(inputs, indices=inputs.indices.clone().fill_(-1).index_fill_(2, at(5), 17))
    often = strict(inputs, indices=torch.full_like(inputs.indices, 17))
    compare(often, LIMITS)
    torch.testing.assert_close(often.lse, once.lse + torch.tensor(384.0).log().item())
    torch.testing.assert_close(often.max_logits, once.max_logits)
    torch.testing.assert_close(often.out.float(), once.out.float(), rtol=0.01, atol=0.001)


def at(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, device=DEVICE)


LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 2**31 - 1, -1, -64, -(2**31))


def test_lengths_around_every_edge() -> None:
    inputs = drawn(len(LENGTHS), 700, topk=256)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    problem = strict(surrounded(replace(inputs, topk_length=lengths)))
    compare(problem, LIMITS)
    assert_empty(problem, lengths <= 0)
    clamped = strict(inputs, topk_length=lengths.clamp(0, 256))
    assert_same_bits(problem, clamped)


@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
def test_every_length_at_once(order: str, h_q: int) -> None:
    """From 0 to 2048 slots, neighbours of any lengths in one CTA: always returns."""
    inputs = drawn(2049, 4000, h_q, topk=2048)
    lengths = torch.arange(2049, dtype=torch.int32)
    if order == "falling":
        lengths = lengths.flip(0)
    elif order == "shuffled":
        lengths = lengths[torch.randperm(2049, generator=torch.Generator().manual_seed(0))]
    problem = strict(inputs, topk_length=lengths.to(DEVICE))
    edges = [t for t in range(2049) if int(lengths[t]) % 64 in (0, 1, 63)]
    compare(problem, LIMITS, queries=sorted({*edges[::4], *range(0, 2049, 97), 2048}))
    assert problem.out.isfinite().all()


def test_lengths_hide_what_lies_behind_them() -> None:
    """More than 64 queries whose slots past the length are valid, and lead to NaN."""
    inputs = drawn(65, 200)
    inputs.indices[:, :, 5:] = 199
    inputs.kv.view(torch.uint8)[199] = 0x7F
    lengths = torch.full((65,), 5, dtype=torch.int32, device=DEVICE)
    inputs.indices[:, :, :5].clamp_(max=198)
    problem = strict(inputs, topk_length=lengths)
    compare(problem, LIMITS)
    assert problem.out.isfinite().all()


def test_nan_that_is_selected_stays_where_it_belongs() -> None:
    inputs = drawn(4, 200)
    inputs.indices.clamp_(min=1)
    inputs.indices[2, 0, 100] = 0
    inputs.kv.view(torch.uint8)[0] = 0x7F
    inputs.q.view(torch.uint8)[1, 33, 570] = 0x7F
    problem = strict(inputs)
    compare(problem, LIMITS)
    nan = torch.zeros(4, 64, dtype=torch.bool, device=DEVICE)
    nan[2] = nan[1, 33] = True
    for result in (problem.out[:, :, 0], problem.max_logits, problem.lse):
        assert torch.equal(result.isnan(), nan)


def test_nothing_is_left_of_what_the_outputs_held() -> None:
    inputs = make_inputs(
        Case("held", 9, 300, 64, topk=256, pattern="empty-rows", lengths="ragged"), device=DEVICE
    )
    outputs = allocate_outputs(inputs)
    nan = strict(inputs, outputs)
    zeros = strict(inputs, tuple(torch.zeros_like(x) for x in outputs))  # type: ignore[arg-type]
    assert_same_bits(nan, zeros)
    allocated = sparse_mla_q8kv8_prefill_fwd(**vars(inputs))
    assert dispatch.last_backend() == BACKEND
    assert all(torch.equal(a, b) for a, b in zip(allocated, outputs, strict=True))
