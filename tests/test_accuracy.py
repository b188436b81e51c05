"""Accuracy from flat to peaked logits at topk=2048, the worst row of many, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparse_mla import dispatch
from sparse_mla.params import PrefillProblem
from sparse_mla.testing import (
    ACCURACY_CASES,
    CPU_BFLOAT16,
    CPU_FLOAT32,
    EXACT,
    VALUE_ONE_CASES,
    Case,
    Inputs,
    Tolerance,
    compare,
    expected,
    fp8_p_emulation,
    make_inputs,
    make_problem,
    measure,
)

BACKENDS = {
    "reference": ("reference", "", EXACT),
    "cpu-bfloat16": ("cpu", "bfloat16", CPU_BFLOAT16),
    "cpu-float32": ("cpu", "float32", CPU_FLOAT32),
}


@pytest.fixture(params=BACKENDS)
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Tolerance]:
    name, compute, tolerance = BACKENDS[request.param]
    monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", compute)
    return name, tolerance


def solve(case: Case, backend: str) -> PrefillProblem:
    problem = make_problem(make_inputs(case))
    assert dispatch.run(problem, backend) == backend
    return problem


@pytest.mark.parametrize("case", ACCURACY_CASES, ids=str)
def test_the_worst_row_is_within_the_tolerance(case: Case, backend: tuple[str, Tolerance]) -> None:
    name, tolerance = backend
    compare(solve(case, name), tolerance)


def with_sinks(count: int, gap: float, sigma: float) -> Inputs:
    """Rows 0 to ``count`` have zero values and a logit of ``gap``; the others' logits are normal.

    ``out`` comes from the others alone, however little weight they have.
    """
    inputs = make_inputs(Case("sinks", 6, 2048, 16, topk=2048, sigma=sigma, dtype=torch.bfloat16))
    q, kv = inputs.q, inputs.kv
    kv[:, 0, 575], q[..., 575] = 0.0, 64.0
    kv[:count] = 0.0
    kv[:count, 0, 575] = gap / (64.0 * inputs.sm_scale)
    return inputs


@pytest.mark.parametrize("gap", [4.0, 8.0, 12.0, 16.0])
@pytest.mark.parametrize("sigma", [0.05, 1.0, 2.0])
@pytest.mark.parametrize("count", [1, 4])
def test_attention_sinks(
    count: int, sigma: float, gap: float, backend: tuple[str, Tolerance]
) -> None:
    """Weights of 0.03 to 0.9998 on tokens without values; half of what is allowed elsewhere."""
    name, tolerance = backend
    problem = make_problem(with_sinks(count, gap, sigma))
    assert dispatch.run(problem, name) == name
    compare(problem, replace(tolerance, out=min(tolerance.out, 0.007)))


def test_an_attention_sink_that_some_queries_do_not_see(backend: tuple[str, Tolerance]) -> None:
    """Whether the query before had one tells nothing about the next."""
    name, tolerance = backend
    inputs = with_sinks(1, 14.0, 1.0)
    inputs.indices[::2][inputs.indices[::2] == 0] = -1
    problem = make_problem(inputs)
    assert dispatch.run(problem, name) == name
    compare(problem, replace(tolerance, out=min(tolerance.out, 0.007)))


def test_attention_sinks_of_short_queries(backend: tuple[str, Tolerance]) -> None:
    """Several queries share a product, the tokens' scales differ, heads have sinks or none."""
    name, tolerance = backend
    inputs = make_inputs(Case("short", 40, 300, 16, topk=200, lengths="ragged", scales="token"))
    inputs.q[:, ::2, 575] = inputs.q[:, ::2, 575].float().abs().clamp(min=200).to(inputs.q.dtype)
    codes = inputs.kv.view(torch.uint8)
    codes[0] = 0
    codes[0, 0, 575] = 0x7E  # 448
    assert inputs.kv_scale is not None
    assert inputs.q_scale is not None
    per_code = float((448 * 200 * inputs.q_scale).mean()) * inputs.sm_scale
    inputs.kv_scale[0] = 14.0 / per_code
    inputs.indices[:, 0, 0] = 0
    problem = make_problem(inputs)
    assert dispatch.run(problem, name) == name
    compare(problem, tolerance)


@pytest.mark.parametrize("case", VALUE_ONE_CASES, ids=str)
def test_no_probability_mass_is_lost(case: Case, backend: tuple[str, Tolerance]) -> None:
    name, tolerance = backend
    problem = solve(case, name)
    assert (problem.out.float() - 1.0).abs().max() < 0.005
    compare(problem, tolerance)


def test_the_denominator_is_the_sum_of_what_was_rounded(backend: tuple[str, Tolerance]) -> None:
    """Equal probabilities round the same way: over an unrounded sum every output would shrink."""

    def rounding(count: int) -> float:
        return count * float(torch.tensor(1 / count).bfloat16()) - 1

    topk = min(range(1025, 1400), key=rounding)
    assert rounding(topk) < -0.002
    name, _ = backend
    inputs = make_inputs(Case("equal", 1, topk, 2, topk=topk, logits="flat"))
    inputs.kv[:, 0, :512] = torch.linspace(1, 400, 512).to(inputs.kv.dtype)
    problem = make_problem(inputs)
    assert dispatch.run(problem, name) == name
    ratio = problem.out.float() / inputs.kv[0, 0, :512].float()
    assert abs(float(ratio.mean()) - 1) < 5e-4


@pytest.mark.parametrize("sigma", [0.05, 1.0, 2.0, 4.0])
def test_bfloat16_is_better_than_fp8_probabilities_allow(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the error of a computation whose only rounding is that of P to e4m3."""
    monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", "bfloat16")
    case = Case("yardstick", s_q=4, s_kv=4096, h_q=64, topk=2048, sigma=sigma)
    problem = solve(case, "cpu")
    want = expected(problem)
    ours = measure(problem, CPU_BFLOAT16, want)
    emulated = torch.stack([fp8_p_emulation(problem, t).out for t in range(4)])
    worst = ((emulated - want.out).norm(dim=-1) / want.out.norm(dim=-1)).max()
    assert ours.out < 0.5 * float(worst)


@pytest.mark.parametrize(
    ("p_max", "low", "high"), [(1.0, 0.345, 0.353), (256.0, 0.995, 1.005), (448.0, 0.995, 1.005)]
)
def test_the_yardstick_shows_what_an_unscaled_cast_loses(
    p_max: float, low: float, high: float
) -> None:
    """One logit at 0 and 2047 at -7: e4m3 keeps e**-7 only where P uses its range."""
    problem = make_problem(make_inputs(VALUE_ONE_CASES[0]))
    out = fp8_p_emulation(problem, 0, p_max=p_max).out
    assert low < float(out.min()) <= float(out.max()) < high
    rounded = fp8_p_emulation(problem, 0, p_max=256.0, rounded_denominator=True).out
    torch.testing.assert_close(rounded, torch.ones_like(rounded))


def test_a_wrong_result_is_found_and_located() -> None:
    """The comparison itself: each output changed in one element."""
    case = Case("wrong", s_q=3, s_kv=50, h_q=4, topk=20, pattern="empty-rows")
    for name, place, value in (
        ("out", (2, 3, 17), 9.0),
        ("out", (0, 1, 5), 1e-30),
        ("out", (1, 0, 0), float("nan")),
        ("max_logits", (1, 2), 0.1),
        ("lse", (0, 0), -float("inf")),
    ):
        problem = solve(case, "reference")
        compare(problem, EXACT)
        getattr(problem, name)[place] = value
        with pytest.raises(AssertionError, match=rf"{name}.* of query {place[0]}, head {place[1]}"):
            compare(problem, EXACT)
