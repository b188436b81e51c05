"""Outputs and memory: what may overlap, what is refused, and that every element is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_mla import (
    ContractError,
    checks,
    dispatch,
    sparse_mla_prefill,
    sparse_mla_q8kv8_prefill_fwd,
)
from sparse_mla.params import prefill_problem

E4M3 = torch.float8_e4m3fn
OUTPUTS = ("out", "max_logits", "lse")


class Arena:
    """One buffer from which tensors are cut at chosen bytes."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.bytes = torch.zeros(size, dtype=torch.uint8)

    def take(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = dtype.itemsize
        for n in shape:
            count *= n
        return self.bytes[start : start + count].view(dtype).view(shape)


S_Q, S_KV, H_Q, D_QK, TOPK = 2, 4, 64, 576, 128
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "q": ((S_Q, H_Q, D_QK), E4M3),
    "kv": ((S_KV, 1, D_QK), E4M3),
    "indices": ((S_Q, 1, TOPK), torch.int32),
    "q_scale": ((1,), torch.float32),
    "kv_scale": ((1,), torch.float32),
    "attn_sink": ((H_Q,), torch.float32),
    "topk_length": ((S_Q,), torch.int32),
    "out": ((S_Q, H_Q, 512), torch.bfloat16),
    "max_logits": ((S_Q, H_Q), torch.float32),
    "lse": ((S_Q, H_Q), torch.float32),
}


def layout() -> dict[str, int]:
    """A first byte for each tensor, without gaps between them; each size is a multiple of 4."""
    starts, at = {}, 0
    for name in SHAPES:
        starts[name] = at
        at += size_of(name)
    return starts


def size_of(name: str) -> int:
    shape, dtype = SHAPES[name]
    return torch.Size(shape).numel() * dtype.itemsize


def cut(starts: dict[str, int]) -> dict[str, Any]:
    arena = Arena()
    call: dict[str, Any] = {
        name: arena.take(starts[name], shape, dtype) for name, (shape, dtype) in SHAPES.items()
    }
    return call | {"sm_scale": 0.1}


def found(call: dict[str, Any]) -> list[dict[str, Any]]:
    return [v.context for v in checks.q8kv8_violations(**call) if v.id == "outputs-overlap"]


def test_neighbours_in_memory_do_not_overlap() -> None:
    assert found(cut(layout())) == []


@pytest.mark.parametrize("other", SHAPES)
@pytest.mark.parametrize("output", OUTPUTS)
def test_any_shared_byte_is_refused(output: str, other: str) -> None:
    """The last bytes of one on the first of the other, in both directions, and the same place."""
    if output == other:
        return
    far = 1 << 19  # past the whole layout
    edge = 4  # smallest step that keeps every dtype aligned
    for shift in (size_of(other) - edge, 0, edge - size_of(output)):
        starts = layout()
        starts[other] = far
        starts[output] = far + shift
        pairs = found(cut(starts))
        assert pairs, shift
        assert {pairs[0]["first"], pairs[0]["second"]} == {output, other}
        assert pairs[0]["first"] in OUTPUTS


@pytest.mark.parametrize("output", OUTPUTS)
def test_inputs_may_share_memory(output: str) -> None:
    starts = layout()
    starts["kv_scale"] = starts["q_scale"]
    starts["attn_sink"] = starts["kv"]
    assert found(cut(starts)) == []


def test_an_overlap_behind_a_long_tensor_is_seen() -> None:
    """lse inside q, with other tensors starting between: comparing neighbours would miss it."""
    starts = layout()
    starts["kv_scale"] = starts["q"] + 64
    starts["lse"] = starts["q"] + size_of("q") - 512
    assert found(cut(starts)) == [{"first": "lse", "second": "q"}]


def test_a_strided_input_counts_with_its_gaps() -> None:
    storage = torch.zeros(4, 2048, dtype=torch.bfloat16)
    q = storage[:, None, :576]
    out = storage[1, 700:1212].view(1, 1, 512)
    call: dict[str, Any] = {
        "q": q,
        "kv": torch.zeros(3, 576),
        "indices": torch.zeros(4, 1, dtype=torch.int32),
        "out": out.expand(4, 1, 512).contiguous(),
    }
    assert list(checks.prefill_violations(**call)) == []
    call["q"], call["indices"], call["out"] = (
        q[:1],
        call["indices"][:1],
        storage[0, 576:1088].view(1, 1, 512),
    )
    assert list(checks.prefill_violations(**call)) == []
    call["q"], call["indices"] = q[:2], torch.zeros(2, 1, dtype=torch.int32)
    call["out"] = storage.view(-1)[1300 : 1300 + 1024].view(2, 1, 512)
    assert [v.id for v in checks.prefill_violations(**call)] == ["outputs-overlap"]


def test_two_tensors_of_one_memory_overlap_whatever_their_storage() -> None:
    """Memory shared through NumPy has two storages with one address."""
    call = cut(layout())
    alias = torch.from_numpy(call["lse"].numpy())
    assert alias.untyped_storage()._cdata != call["lse"].untyped_storage()._cdata
    assert found(call | {"max_logits": alias}) == [{"first": "max_logits", "second": "lse"}]


def test_empty_tensors_have_address_zero_and_overlap_nothing() -> None:
    """The alias check of a pointer comparison would refuse s_q = 0."""
    results = sparse_mla_q8kv8_prefill_fwd(**empty_call(), **empty_outputs())
    assert [tuple(x.shape) for x in results] == [(0, 64, 512), (0, 64), (0, 64)]


def empty_call() -> dict[str, Any]:
    return {
        "q": torch.zeros(0, 64, 576).to(E4M3),
        "kv": torch.zeros(5, 1, 576).to(E4M3),
        "indices": torch.zeros(0, 1, 128, dtype=torch.int32),
        "sm_scale": 0.1,
        "q_scale": torch.ones(1),
        "kv_scale": torch.ones(1),
        "topk_length": torch.zeros(0, dtype=torch.int32),
    }


def empty_outputs() -> dict[str, torch.Tensor]:
    return {
        "out": torch.empty(0, 64, 512, dtype=torch.bfloat16),
        "max_logits": torch.empty(0, 64),
        "lse": torch.empty(0, 64),
    }


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_empty_cache_inside_an_outputs_memory_overlaps_nothing(output: str) -> None:
    call = cut(layout())
    rows = call[output].view(torch.uint8).view(-1)[64:64]
    call["kv"] = rows.view(E4M3).view(0, 1, D_QK)
    assert found(call) == []


def test_no_queries_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(problem: Any) -> None:
        raise AssertionError("ran")

    monkeypatch.setattr(dispatch.load("reference"), "run", refuse)
    monkeypatch.setenv("SPARSE_MLA_BACKEND", "reference")
    results = sparse_mla_q8kv8_prefill_fwd(**empty_call())
    assert [tuple(x.shape) for x in results] == [(0, 64, 512), (0, 64), (0, 64)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_an_empty_cache_gives_empty_rows(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MLA_BACKEND", backend)
    call = empty_call() | {
        "q": torch.ones(2, 64, 576).to(E4M3),
        "kv": torch.zeros(0, 1, 576).to(E4M3),
        "indices": torch.zeros(2, 1, 128, dtype=torch.int32),
        "topk_length": None,
    }
    out, max_logits, lse = sparse_mla_q8kv8_prefill_fwd(**call)
    assert dispatch.last_backend() == backend
    assert bool((out == 0).all())
    assert bool((max_logits == -torch.inf).all())
    assert bool((lse == torch.inf).all())


@pytest.mark.parametrize("given", OUTPUTS)
def test_one_given_output_is_used_and_the_others_allocated(given: str) -> None:
    call = cut(layout())
    poisoned = call[given].fill_(torch.nan)
    for name in OUTPUTS:
        if name != given:
            del call[name]
    call["q"].fill_(1)
    call["kv"].fill_(1)
    call["q_scale"].fill_(1)
    call["kv_scale"].fill_(1)
    call["topk_length"].fill_(TOPK)
    results = dict(zip(OUTPUTS, sparse_mla_q8kv8_prefill_fwd(**call), strict=True))
    assert results[given] is poisoned
    assert not bool(torch.isnan(poisoned).any())


def test_every_row_past_a_grid_limit_is_written() -> None:
    """65,537 queries: a grid dimension of 65,535 would leave the last rows as they were."""
    s_q, h_q = 65537, 1
    out = torch.full((s_q, h_q, 512), torch.nan, dtype=torch.bfloat16)
    kv = torch.arange(4, dtype=torch.float32)[:, None].expand(4, 512).contiguous()
    indices = (torch.arange(s_q, dtype=torch.int32) % 4)[:, None]
    _, max_logits, lse = sparse_mla_prefill(
        torch.zeros(s_q, h_q, 512), kv, indices, out=out, return_stats=True
    )
    assert torch.equal(out[:, 0, 0].float(), indices[:, 0].float())
    assert torch.equal(out.float().amin(-1), out.float().amax(-1))
    assert bool((max_logits == 0).all())
    assert bool((lse == 0).all())


def test_a_problem_is_frozen_and_complete() -> None:
    """``prefill_problem`` must set the very fields that the dataclass declares."""
    from dataclasses import FrozenInstanceError, fields

    problem = checks.check_q8kv8(**cut(layout()))
    assert set(vars(problem)) == {field.name for field in fields(problem)}
    assert (problem.s_q, problem.s_kv, problem.h_q, problem.d_qk, problem.topk) == (
        2,
        4,
        64,
        576,
        128,
    )
    with pytest.raises(FrozenInstanceError):
        problem.s_q = 3  # type: ignore[misc]
    assert prefill_problem.__annotations__.keys() - {"return"} == vars(problem).keys()


def test_a_refusing_backend_leaves_the_outputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    call = cut(layout())
    before = call["out"].fill_(3).clone()
    monkeypatch.setattr(dispatch.load("reference"), "refusal", lambda problem: "not today")
    monkeypatch.setenv("SPARSE_MLA_BACKEND", "reference")
    with pytest.raises(RuntimeError, match="not today") as caught:
        sparse_mla_q8kv8_prefill_fwd(**call)
    assert not isinstance(caught.value, ContractError)
    assert torch.equal(call["out"], before)
