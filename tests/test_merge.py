"""``merge_attention_states``: parts of a cache give what the whole gives."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla import ContractError
from sparse_mla.backends import reference
from sparse_mla.errors.explain import find
from sparse_mla.merge import merge_attention_states
from sparse_mla.testing import Case, make_inputs, make_problem

INF = math.inf


def solved(inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unrounded results over all queries, float64."""
    problem = make_problem(inputs)
    rows = [reference.attend(problem, t) for t in range(problem.s_q)]
    out, max_logits, lse = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return out, max_logits, lse


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("pattern", ["distinct", "holes", "empty-rows", "duplicates"])
def test_shards_of_a_cache_give_what_the_whole_gives(parts: int, pattern: Any) -> None:
    inputs = make_inputs(Case("shards", 4, 60, 6, topk=40, sigma=3.0, pattern=pattern))
    size = 60 // parts + 1
    states = []
    for start in range(0, 60, size):
        index = inputs.indices
        mine = (index >= start) & (index < start + size)
        states.append(solved(replace(inputs, indices=torch.where(mine, index, -1))))
    outs, maxima, lses = zip(*states, strict=True)
    whole = solved(inputs)
    out, lse, max_logits = merge_attention_states(outs, lses, maxima)
    torch.testing.assert_close(out, whole[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(max_logits, whole[1], rtol=0, atol=0)
    torch.testing.assert_close(lse, whole[2], rtol=1e-12, atol=0)
    stacked = merge_attention_states(torch.stack(outs), torch.stack(lses))
    assert torch.equal(stacked[0], out)
    assert torch.equal(stacked[1], lse)


def part(value: float, lse: float, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    return torch.full((1, 1, 4), value, dtype=dtype), torch.full((1, 1), lse)


def test_weights_are_the_exponentials_of_the_lse() -> None:
    (a, la), (b, lb) = part(1.0, 0.0), part(5.0, math.log(3))
    out, lse = merge_attention_states([a, b], [la, lb])
    torch.testing.assert_close(out, torch.full_like(out, 4.0))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)))


@pytest.mark.parametrize("garbage", [7.0, INF, math.nan])
@pytest.mark.parametrize("empty", [INF, -INF, math.nan])
@pytest.mark.parametrize("first", [True, False])
def test_an_empty_part_adds_nothing_whatever_it_holds(
    empty: float, garbage: float, first: bool
) -> None:
    (a, la), (b, lb) = part(garbage, empty), part(2.5, 3.0)
    order = [(a, la), (b, lb)] if first else [(b, lb), (a, la)]
    outs, lses = zip(*order, strict=True)
    maxima = [torch.full_like(x, 9.0 if x is la else 1.0) for x in lses]
    out, lse, max_logits = merge_attention_states(outs, lses, maxima)
    assert torch.equal(out, b)
    assert torch.equal(lse, lb)
    assert max_logits.item() == 1.0


@pytest.mark.parametrize("empties", list(itertools.product([INF, -INF], repeat=2)), ids=str)
def test_parts_that_are_all_empty_give_an_empty_row(empties: tuple[float, float]) -> None:
    outs, lses = zip(*(part(math.nan, lse) for lse in empties), strict=True)
    out, lse, max_logits = merge_attention_states(outs, lses, lses)
    assert torch.equal(out, torch.zeros(1, 1, 4))
    assert lse.item() == INF
    assert max_logits.item() == -INF


@pytest.mark.parametrize("lse", [-1e30, -1000.0, 0.0, 1000.0, 1e30])
def test_any_finite_lse_is_a_weight(lse: float) -> None:
    outs, lses = zip(part(1.0, lse), part(3.0, lse), strict=True)
    out, merged = merge_attention_states(outs, lses)
    assert torch.equal(out, torch.full_like(out, 2.0))
    torch.testing.assert_close(merged, torch.full_like(merged, lse + math.log(2)))


def test_a_nan_in_a_part_that_counts_is_kept() -> None:
    outs, lses = zip(part(math.nan, 1.0), part(3.0, 1.0), strict=True)
    assert merge_attention_states(outs, lses)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_out_keeps_its_dtype_and_is_rounded_once(dtype: torch.dtype) -> None:
    outs, lses = zip(*(part(1 / 3, 0.0, dtype) for _ in range(7)), strict=True)
    out, lse = merge_attention_states(outs, lses)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out, outs[0], rtol=2**-22, atol=0)


@given(
    st.lists(st.tuples(st.floats(-50, 50), st.floats(-5, 5)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_the_order_of_the_parts_does_not_matter(states: list[Any], random: Any) -> None:
    outs, lses = zip(*(part(value, lse) for lse, value in states), strict=True)
    shuffled = list(zip(outs, lses, strict=True))
    random.shuffle(shuffled)
    others = merge_attention_states(*map(list, zip(*shuffled, strict=True)))
    for a, b in zip(merge_attention_states(outs, lses), others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_no_queries() -> None:
    out, lse = merge_attention_states(torch.empty(3, 0, 4, 512), torch.empty(3, 0, 4))
    assert (out.shape, lse.shape) == ((0, 4, 512), (0, 4))


OUT, LSE = torch.zeros(2, 3, 4), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("outs", "lses", "maxima", "name"),
    [
        ([OUT], [LSE.T], None, "lses[0]"),
        ([OUT, OUT], [LSE], None, "lses"),
        ([OUT, OUT[:1]], [LSE, LSE], None, "outs[1]"),
        ([OUT, OUT.bfloat16()], [LSE, LSE], None, "outs[1]"),
        ([OUT, OUT], [LSE, LSE.double()], None, "lses[1]"),
        ([OUT], [LSE.bfloat16()], None, "lses[0]"),
        ([OUT.int()], [LSE], None, "outs[0]"),
        ([OUT, OUT.to("meta")], [LSE, LSE], None, "outs[1]"),
        ([OUT], [LSE.to("meta")], None, "lses[0]"),
        ([OUT], [LSE], [LSE[:1]], "max_logits[0]"),
        ([OUT], [LSE], [], "max_logits"),
        ([], [], None, "outs"),
        (None, [LSE], None, "outs"),
        ([OUT], 1.0, None, "lses"),
        ([None], [LSE], None, "outs[0]"),
        ([OUT], [None], None, "lses[0]"),
        (torch.tensor(1.0), [LSE], None, "outs"),
    ],
)
def test_parts_that_do_not_belong_together(outs: Any, lses: Any, maxima: Any, name: str) -> None:
    with pytest.raises(ContractError) as caught:
        merge_attention_states(outs, lses, maxima)
    assert caught.value.id == "merge-shapes"
    first_line = str(caught.value).partition("\n")[0]
    assert first_line.startswith(f"merge_attention_states: {name} must be ")
    explained = find(first_line)[0]
    assert (explained.record.id, explained.values) == ("merge-shapes", caught.value.context)


def test_it_compiles_into_one_graph() -> None:
    outs, lses = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)
    compiled = torch.compile(merge_attention_states, fullgraph=True, backend="eager")
    for a, b in zip(compiled(outs, lses), merge_attention_states(outs, lses), strict=True):
        assert torch.equal(a, b)
