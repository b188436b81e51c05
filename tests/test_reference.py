"""The reference against the formula written a second time, slot by slot, in Python numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparse_mla.backends import reference
from sparse_mla.params import PrefillProblem
from sparse_mla.testing import (
    CASES,
    EXACT,
    Case,
    Inputs,
    compare,
    make_inputs,
    make_problem,
    poison_unselected,
)

E4M3 = torch.float8_e4m3fn


def solve(inputs: Inputs) -> PrefillProblem:
    problem = make_problem(inputs)
    assert reference.refusal(problem) is None
    reference.run(problem)
    return problem


def row_by_hand(inputs: Inputs, t: int, h: int, columns: int) -> tuple[list[float], float, float]:
    """The formula for one row: sums of Python floats over the valid slots, one by one."""

    def scale(x: torch.Tensor | None, *place: int) -> float:
        if x is None:
            return 1.0
        return float(x[place[: x.ndim]]) if x.numel() > 1 else float(x)

    q = [float(x) for x in inputs.q[t, h]]
    length = inputs.indices.shape[-1]
    if inputs.topk_length is not None:
        length = min(max(int(inputs.topk_length[t]), 0), length)
    logits, values = [], []
    for i in inputs.indices[t, 0, :length].tolist():
        if not 0 <= i < len(inputs.kv):
            continue
        row = [float(x) for x in inputs.kv[i, 0]]
        factor = scale(inputs.q_scale, t, h) * scale(inputs.kv_scale, i)
        logits.append(
            inputs.sm_scale * factor * math.fsum(a * b for a, b in zip(q, row, strict=True))
        )
        values.append([scale(inputs.kv_scale, i) * x for x in row[:columns]])
    if not logits:
        return [0.0] * columns, -math.inf, math.inf
    weights = [math.exp(x) for x in logits]
    total = math.fsum(weights)
    sink = 0.0 if inputs.attn_sink is None else math.exp(float(inputs.attn_sink[h]))
    out = [
        math.fsum(w * v[c] for w, v in zip(weights, values, strict=True)) / (total + sink)
        for c in range(columns)
    ]
    return out, max(logits), math.log(total)


@pytest.mark.parametrize("scales", ["tensor", "token", "token-head"])
@pytest.mark.parametrize("pattern", ["holes", "duplicates", "empty-rows"])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_it_is_the_formula(scales: Any, pattern: Any, d_qk: int) -> None:
    case = Case(
        "by-hand",
        4,
        12,
        3,
        d_qk,
        topk=9,
        pattern=pattern,
        lengths="ragged",
        sink="normal",
        scales=scales,
    )
    inputs = make_inputs(case, seed=5)
    problem = make_problem(inputs)
    for t in range(4):
        result = reference.attend(problem, t)
        for h in range(3):
            out, top, lse = row_by_hand(inputs, t, h, columns=5)
            assert result.out[h, :5].tolist() == pytest.approx(out, rel=1e-12, abs=1e-15)
            assert float(result.max_logits[h]) == pytest.approx(top, rel=1e-12)
            assert float(result.lse[h]) == pytest.approx(lse, rel=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_run_writes_what_attend_computes_over_every_element(case: Case) -> None:
    problem = solve(make_inputs(case))
    compare(problem, EXACT)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_no_valid_slot_selects_changes_no_bit(case: Case) -> None:
    inputs = make_inputs(replace(case, scales="token"))
    clean, poisoned = solve(inputs), solve(poison_unselected(inputs))
    assert torch.equal(clean.out, poisoned.out)
    assert torch.equal(clean.max_logits, poisoned.max_logits)
    assert torch.equal(clean.lse, poisoned.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unquantised_inputs_are_taken_as_they_are(dtype: torch.dtype) -> None:
    inputs = make_inputs(Case("plain", 2, 20, 4, topk=8, dtype=dtype))
    out, top, lse = row_by_hand(inputs, 1, 2, columns=5)
    result = reference.attend(make_problem(inputs), 1)
    assert result.out[2, :5].tolist() == pytest.approx(out, rel=1e-12, abs=1e-15)
    assert float(result.max_logits[2]) == pytest.approx(top, rel=1e-12)
    assert float(result.lse[2]) == pytest.approx(lse, rel=1e-12)


def test_a_nan_in_a_selected_row_reaches_the_queries_that_select_it_and_no_other() -> None:
    inputs = make_inputs(Case("nan", 3, 30, 4, topk=8))
    inputs.indices[0, 0, 0] = 29
    inputs.indices[1:][inputs.indices[1:] == 29] = 28
    inputs.kv[29].view(torch.uint8)[0, 570] = 0x7F
    problem = solve(inputs)
    assert problem.out[0].isnan().all()
    assert problem.lse[0].isnan().all()
    assert problem.out[1:].isfinite().all()


def test_it_names_the_devices_it_cannot_use() -> None:
    problem = make_problem(make_inputs(Case("meta", 1, 4, 1, topk=4), device="meta"))
    assert reference.refusal(problem) == "device meta cannot compute in float64"
