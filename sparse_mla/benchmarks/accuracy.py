"""Accuracy as a benchmark: what each way of computing costs, from flat to peaked logits.

Two questions, two tables:

``kinds``   the error against float64 on the same FP8 inputs, by kind of input: our backends; P
            rounded to e4m3 as ours is (times 256, so that it uses the range), with one reference
            for a whole row; P rounded as softmax gives it, unscaled.
``scales``  the error against float64 on the data before quantisation, where some tokens are
            outliers: one scale for all of kv, or one for each token.

An error is the relative L2 of a row of ``out``, a row being one query and head: the worst, and the
median, of sampled queries. On a GPU there are more queries than are sampled: as many as a chunk of
prefill has at least, as the kernels for few queries, or few heads, are others. They are measured
beside it on some of the same heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import dispatch
from ..backends.reference import Attention
from ..quantize import Per, quantize_fp8
from ..testing import Case, Inputs, expected, fp8_p_emulation, make_inputs, make_problem

QUERIES = 132
"""An item of 64 heads for each multiprocessor of an H200, so that the kernel for 64 heads runs."""
SAMPLED, SAMPLED_OF_SCALES = 8, 4
"""Queries that are compared, spread over all of them."""
FEW_HEADS = 16
"""Of the 64, for the kernels that only run few heads."""

KINDS = {
    "sigma 0.05": Case("sigma0.05", s_q=QUERIES, s_kv=4096, h_q=64, topk=2048, sigma=0.05),
    "sigma 1": Case("sigma1", s_q=QUERIES, s_kv=4096, h_q=64, topk=2048, sigma=1.0),
    "sigma 2": Case("sigma2", s_q=QUERIES, s_kv=4096, h_q=64, topk=2048, sigma=2.0),
    "sigma 4": Case("sigma4", s_q=QUERIES, s_kv=4096, h_q=64, topk=2048, sigma=4.0),
    "one dominant": Case("dominant", s_q=QUERIES, s_kv=4096, h_q=64, topk=2048, logits="dominant"),
    "0 and 2,047 at -7, V = 1": Case(
        "tail", s_q=QUERIES, s_kv=2048, h_q=64, topk=2048, logits="one-and-tail"
    ),
}
"""The contract's inputs: logits by standard deviation, and two with one large logit."""

EMULATED = {
    "FP8 P, scaled by 256 (emulated)": 256.0,
    "FP8 P, unscaled (emulated)": 1.0,
}
"""What P is multiplied by before it is rounded to e4m3."""

OUTLIER_SHARE = 1 / 64
OUTLIER_FACTORS = (1, 256, 4096, 16384)
"""How many of the tokens are outliers, and how much larger their rows are. The queries do not
select them, as they would take all the attention: they only widen what one scale has to span."""

Report = Callable[[str], None]


def measure(
    device: torch.device,
    backends: Sequence[str] | None = None,
    report: Report = lambda line: None,
    *,
    queries: int | None = None,
) -> dict[str, Any]:
    """Both tables as data; ``queries`` are sampled in place of 8 and 4, for a quick look."""
    names = [
        name
        for name in dispatch.order(device.type)
        if name != "reference" and (backends is None or name in backends)
    ]
    kinds = []
    for kind, case in KINDS.items():
        report(f"accuracy, {kind}")
        kinds.append({"kind": kind, **_kind(case, device, names, sampled(queries or SAMPLED))})
    scales = []
    for factor in OUTLIER_FACTORS:
        report(f"accuracy, outliers x {factor}")
        chosen = sampled(queries or SAMPLED_OF_SCALES)
        scales.append(_scales(device, names, chosen, factor))
    return {"kinds": kinds, "outlier_share": OUTLIER_SHARE, "scales": scales}


def sampled(count: int) -> list[int]:
    """So many of the queries, evenly spread."""
    return [number * QUERIES // count for number in range(count)]


def _kind(
    case: Case, device: torch.device, names: Sequence[str], chosen: list[int]
) -> dict[str, Any]:
    inputs = make_inputs(case, device=device)
    compared = _of(inputs, chosen)
    problem = make_problem(compared)
    want = expected(problem)
    methods = {}
    for name in names:
        methods[name] = _by_backend(name, inputs, chosen, want)
        if "kernels" in methods[name]:  # which they are depends on the heads
            few = replace(inputs, q=inputs.q[:, :FEW_HEADS].contiguous())
            part = Attention(*(each[:, :FEW_HEADS] for each in want))
            methods[f"{name}, {FEW_HEADS} heads"] = {
                **_by_backend(name, few, chosen, part),
                "rows": part.lse.numel(),
            }
    for label, p_max in EMULATED.items():
        out = torch.stack(
            [fp8_p_emulation(problem, t, p_max=p_max).out for t in range(problem.s_q)]
        )
        methods[label] = errors(out, want.out)
    return {"rows": want.lse.numel(), "methods": methods}


def _of(inputs: Inputs, queries: list[int]) -> Inputs:
    """Some of the queries; q is FP8, which not every device can index, and has one scale."""
    q = inputs.q.view(torch.uint8)[queries].view(inputs.q.dtype)
    return replace(inputs, q=q, indices=inputs.indices[queries])


def _by_backend(name: str, inputs: Inputs, chosen: list[int], want: Attention) -> dict[str, Any]:
    """The backend's errors on the chosen queries, or its reason for not running this.

    Only where it picks its kernels by the sizes does it compute the other queries too.
    """
    try:
        backend = dispatch.load(name)
        kernels = getattr(backend, "kernels", None)
        problem = make_problem(inputs if kernels else _of(inputs, chosen))
        why = backend.refusal(problem)
    except Exception as fault:  # a broken installation of what it needs
        why = f"{type(fault).__name__}: {fault}".partition("\n")[0]
    if why is not None:
        return {"reason": why}
    backend.run(problem)
    if kernels is None:
        return errors(problem.out.double(), want.out)
    found = errors(problem.out[chosen].double(), want.out)
    return {**found, "kernels": kernels(problem)}


def errors(got: torch.Tensor, want: torch.Tensor) -> dict[str, Any]:
    """Worst and median relative L2 over the rows of ``out``; a NaN is an infinite error."""
    difference = (got - want).norm(dim=-1) / want.norm(dim=-1)
    each = difference.flatten().nan_to_num(math.inf, math.inf)
    worst, median = float(each.max()), float(each.median())
    if not math.isfinite(worst):
        return {"reason": "the result holds NaN or infinity"}
    return {"worst": worst, "median": median}


def _scales(
    device: torch.device, names: Sequence[str], chosen: list[int], factor: int
) -> dict[str, Any]:
    """Per-tensor against per-token scales of kv, on data with outlier tokens."""
    q, kv, indices, sm_scale = outliers(factor, QUERIES)
    exact = Inputs(q, kv[:, None], indices[:, None], sm_scale, None, None)
    want = expected(make_problem(exact), chosen)
    q8, q_scale = quantize_fp8(q)
    want = Attention(*(part.to(device) for part in want))
    methods: dict[str, Any] = {}
    pers: tuple[Per, ...] = ("tensor", "token")
    for per in pers:
        kv8, kv_scale = quantize_fp8(kv, per=per)
        given = (q8, kv8[:, None], indices[:, None], q_scale, kv_scale)
        q_, kv_, indices_, q_scale_, kv_scale_ = (tensor.to(device) for tensor in given)
        inputs = Inputs(q_, kv_, indices_, sm_scale, q_scale_, kv_scale_)
        for name in ("reference", *names):
            methods[f"{name}, kv_scale per {per}"] = _by_backend(name, inputs, chosen, want)
    return {"factor": factor, "rows": want.lse.numel(), "methods": methods}


def outliers(
    factor: float, s_q: int, s_kv: int = 4096, h_q: int = 64, d_qk: int = 576, topk: int = 2048
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """float32 q, kv, int32 indices that select no outlier, and sm_scale for logits of sigma 1."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(s_q, h_q, d_qk, generator=random)
    kv = torch.randn(s_kv, d_qk, generator=random)
    count = max(1, round(OUTLIER_SHARE * s_kv))
    outlying = torch.randperm(s_kv, generator=random)[:count]
    kv[outlying] *= factor
    ordinary = torch.ones(s_kv)
    ordinary[outlying] = 0.0
    indices = torch.stack([torch.multinomial(ordinary, topk, generator=random) for _ in range(s_q)])
    return q, kv, indices.int(), 1 / math.sqrt(d_qk)
