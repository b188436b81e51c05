"""Both operators against the reference over whatever hypothesis draws, in poisoned memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sparse_mla import dispatch, sparse_mla_prefill, sparse_mla_q8kv8_prefill_fwd
from sparse_mla.backends import reference
from sparse_mla.testing import (
    CPU_BFLOAT16,
    CPU_FLOAT32,
    Case,
    Inputs,
    Tolerance,
    allocate_outputs,
    compare,
    guarded_like,
    make_inputs,
    make_problem,
    poison_unselected,
)

TOLERANCES = {"bfloat16": CPU_BFLOAT16, "float32": CPU_FLOAT32}
PATTERNS = ("distinct", "duplicates", "holes", "leading", "trailing", "empty-rows", "all-empty")

drawn = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(params=TOLERANCES)
def tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tolerance:
    monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", request.param)
    return TOLERANCES[request.param]


def cases(h_q: Any, topk: Any, s_kv: Any, scales: Any, dtypes: Any) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        id=st.just("drawn"),
        s_q=st.integers(0, 5),
        s_kv=s_kv,
        h_q=h_q,
        d_qk=st.sampled_from((512, 576)),
        topk=topk,
        sigma=st.sampled_from((0.05, 1.0, 2.0, 4.0)),
        pattern=st.sampled_from(PATTERNS),
        lengths=st.sampled_from(("none", "full", "ragged", "beyond", "zero")),
        sink=st.sampled_from(("none", "normal", "extreme")),
        scales=scales,
        dtype=dtypes,
    )


strict_cases = cases(
    h_q=st.sampled_from((64, 128)),
    topk=st.sampled_from((128, 256)),
    s_kv=st.one_of(st.integers(1, 8), st.integers(100, 400)),
    scales=st.just("tensor"),
    dtypes=st.just(torch.float8_e4m3fn),
)
general_cases = cases(
    h_q=st.integers(1, 40),
    topk=st.integers(1, 140),
    s_kv=st.one_of(st.integers(0, 8), st.integers(100, 300)),
    scales=st.sampled_from(("tensor", "token", "token-head")),
    dtypes=st.sampled_from((torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)),
)


@drawn
@given(case=strict_cases, seed=st.integers(0, 2**31))
def test_the_strict_operator(case: Case, seed: int, tolerance: Tolerance) -> None:
    inputs = poison_unselected(make_inputs(case, seed))
    guards = [guarded_like(x) for x in allocate_outputs(inputs)]
    outputs = tuple(guard.tensor for guard in guards)
    names = ("out", "max_logits", "lse")
    results = sparse_mla_q8kv8_prefill_fwd(**vars(inputs), **dict(zip(names, outputs, strict=True)))
    assert dispatch.last_backend() == "cpu"
    for result, output, guard in zip(results, outputs, guards, strict=True):
        assert result is output
        guard.check()
    compare(make_problem(inputs, outputs), tolerance)


@drawn
@given(case=general_cases, seed=st.integers(0, 2**31), flat=st.booleans())
def test_the_general_operator(case: Case, seed: int, flat: bool, tolerance: Tolerance) -> None:
    inputs = poison_unselected(make_inputs(case, seed))
    arguments = vars(inputs)
    if flat:
        arguments = {**arguments, "kv": inputs.kv[:, 0], "indices": inputs.indices[:, 0]}
    results = sparse_mla_prefill(**arguments, return_stats=True)
    assert dispatch.last_backend() == "cpu"
    if case.dtype in (torch.float16, torch.float32):
        tolerance = CPU_FLOAT32
    compare(make_problem(inputs, results), tolerance)


@drawn
@given(case=general_cases, seed=st.integers(0, 2**31), cut=st.floats(0, 1))
def test_a_query_depends_on_nothing_but_itself(case: Case, seed: int, cut: float) -> None:
    """The reference, bit for bit: any part of the queries alone gives the same rows."""
    inputs = make_inputs(case, seed)
    first = math.floor(cut * case.s_q)
    names = ["q", "indices"] + ["topk_length"] * (inputs.topk_length is not None)
    if inputs.q_scale is not None and inputs.q_scale.numel() > 1:
        names.append("q_scale")
    part = replace(inputs, **{name: getattr(inputs, name)[first:] for name in names})
    whole, tail = make_problem(inputs), make_problem(part)
    reference.run(whole)
    reference.run(tail)
    assert torch.equal(whole.out[first:], tail.out)
    assert torch.equal(whole.lse[first:], tail.lse)


@drawn
@example(codes=[0, 84, 3, 0, 0, 0, 0], q_codes=[0, 0, 70, 247, 0, 0, 118, 0], slots=[2], scale=43.0)
@given(
    codes=st.lists(st.integers(0, 255), min_size=1, max_size=8),
    q_codes=st.lists(st.integers(0, 255), min_size=1, max_size=8),
    slots=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-1, 9), min_size=1, max_size=20),
    scale=st.floats(1e-6, 1e3),
)
@example(codes=[0, 0, 0, 0, 105], q_codes=[165, 0, 0, 0, 97], slots=[0], scale=14.0)
def test_any_bytes_and_any_indices(
    codes: list[int], q_codes: list[int], slots: list[int], scale: float, tolerance: Tolerance
) -> None:
    """All 256 e4m3 codes, NaN among them, any int32 as an index, logits up to 1e8."""

    def filled(rows: int, values: list[int]) -> torch.Tensor:
        row = torch.tensor(values, dtype=torch.uint8).repeat(-(-576 // len(values)))[:576]
        return row.repeat(rows, 1, 1).view(torch.float8_e4m3fn)

    inputs = Inputs(
        q=filled(2, q_codes),
        kv=filled(8, codes),
        indices=torch.tensor([slots, slots[::-1]], dtype=torch.int32)[:, None],
        sm_scale=scale,
        q_scale=torch.tensor([0.25]),
        kv_scale=torch.tensor([0.5]),
    )
    results = sparse_mla_prefill(**vars(inputs), return_stats=True)
    assert dispatch.last_backend() == "cpu"
    # One row repeated: every selected slot has the same logit, whatever its size. Terms that cancel
    # leave the rounding of float32 sums as large as they were.
    terms = inputs.q.float().nan_to_num(0).abs() @ inputs.kv[:, 0].float().nan_to_num(0).abs().T
    rounding = float(terms.max()) * scale * 0.25 * 0.5 * 2.0**-22
    compare(make_problem(inputs, results), replace(tolerance, absolute=0.02 + rounding))
