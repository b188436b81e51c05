"""Problems as data: a ``Case`` says what is in one, ``make_inputs`` draws its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..params import D_V, PrefillProblem

Pattern = Literal[
    "distinct", "duplicates", "holes", "leading", "trailing", "empty-rows", "all-empty"
]
Lengths = Literal["none", "full", "ragged", "beyond", "zero"]
Sink = Literal["none", "normal", "extreme"]
Scales = Literal["tensor", "token", "token-head"]
Logits = Literal["normal", "dominant", "one-and-tail", "flat"]

OUT_OF_RANGE = (-1, -2, -(2**31), 2147480000, 2143289344)
"""Indices that select nothing in any buffer; ``s_kv`` itself joins them in each case."""

EXTREME_SINKS = (-math.inf, -1e30, -1.0, 0.0, 1.0, 3e38, math.inf)


@dataclass(frozen=True)
class Case:
    """One input: sizes, where the logits lie, what index rows look like, the optional tensors."""

    id: str
    s_q: int
    s_kv: int
    h_q: int
    d_qk: int = 576
    topk: int = 128
    sigma: float = 1.0  # standard deviation of the logits
    logits: Logits = "normal"
    pattern: Pattern = "distinct"
    lengths: Lengths = "none"
    sink: Sink = "none"
    scales: Scales = "tensor"
    dtype: torch.dtype = torch.float8_e4m3fn

    def __str__(self) -> str:
        return self.id


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case, as the strict operator takes them."""

    q: torch.Tensor  # [s_q, h_q, d_qk]
    kv: torch.Tensor  # [s_kv, 1, d_qk]
    indices: torch.Tensor  # int32 [s_q, 1, topk]
    sm_scale: float
    q_scale: torch.Tensor | None
    kv_scale: torch.Tensor | None
    attn_sink: torch.Tensor | None = None
    topk_length: torch.Tensor | None = None


def make_inputs(case: Case, seed: int = 0, device: torch.device | str = "cpu") -> Inputs:
    """Draw the tensors of ``case`` on the CPU, so that a seed means the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    q, kv, sm_scale = _rows(case, generator)
    q_stored, q_scale = _stored(q, case, per="token" if case.scales == "token" else case.scales)
    kv_stored, kv_scale = _stored(kv, case, per="tensor" if case.scales == "tensor" else "token")
    inputs = Inputs(
        q=q_stored,
        kv=kv_stored[:, None],
        indices=_indices(case, generator)[:, None],
        sm_scale=sm_scale,
        q_scale=q_scale,
        kv_scale=kv_scale,
        attn_sink=_sink(case, generator),
        topk_length=_lengths(case, generator),
    )
    return to_device(inputs, device)


def to_device(inputs: Inputs, device: torch.device | str) -> Inputs:
    """The same inputs on ``device``."""
    moved: dict[str, Any] = {
        name: value.to(device)
        for name, value in vars(inputs).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(inputs, **moved)


def allocate_outputs(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``out``, ``max_logits``, ``lse`` filled with NaN, so that an element never written shows."""
    s_q, h_q, _ = inputs.q.shape
    device = inputs.q.device
    return (
        torch.full((s_q, h_q, D_V), math.nan, dtype=torch.bfloat16, device=device),
        torch.full((s_q, h_q), math.nan, dtype=torch.float32, device=device),
        torch.full((s_q, h_q), math.nan, dtype=torch.float32, device=device),
    )


def make_problem(
    inputs: Inputs, outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
) -> PrefillProblem:
    """The problem a backend is handed for these inputs, with NaN-filled outputs unless given."""
    out, max_logits, lse = outputs or allocate_outputs(inputs)
    s_q, h_q, d_qk = inputs.q.shape
    return PrefillProblem(
        **vars(inputs),
        out=out,
        max_logits=max_logits,
        lse=lse,
        s_q=s_q,
        s_kv=inputs.kv.shape[0],
        h_q=h_q,
        d_qk=d_qk,
        topk=inputs.indices.shape[-1],
    )


def _rows(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Real-valued q and kv, and the sm_scale that gives the logits their standard deviation."""
    q = torch.randn(case.s_q, case.h_q, case.d_qk, generator=generator)
    kv = torch.randn(case.s_kv, case.d_qk, generator=generator)
    sm_scale = case.sigma / math.sqrt(case.d_qk)
    if case.logits == "dominant":
        # Every query leans towards one direction and row 0 lies along it: its logit is 10 sigma.
        direction = torch.randn(case.d_qk, generator=generator).sign()
        q += 0.5 * direction
        kv[0] = direction * (20.0 / math.sqrt(case.d_qk))
    elif case.logits == "one-and-tail":
        # V is 1 everywhere; the first rotary column alone makes the logits: row 0 has 0, others -7.
        q, kv = torch.zeros_like(q), torch.ones_like(kv)
        q[:, :, D_V] = 1.0
        kv[:, D_V] = -7.0
        kv[0, D_V] = 0.0
        sm_scale = 1.0
    elif case.logits == "flat":
        q, kv = torch.zeros_like(q), torch.ones_like(kv)
    return q, kv, sm_scale


def _stored(x: torch.Tensor, case: Case, per: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``x`` as it lies in memory, with the scale that gives its values back."""
    if case.dtype != torch.float8_e4m3fn:
        return x.to(case.dtype), None
    if case.logits in ("one-and-tail", "flat"):  # the values are exact in e4m3: keep them so
        stored, shape = x.to(case.dtype), _scale_shape(x, per)
        return stored, torch.ones(shape)
    if not x.numel():
        return x.to(case.dtype), torch.ones(_scale_shape(x, per))
    dims = tuple(range(x.ndim)) if per == "tensor" else tuple(range(_kept(x, per), x.ndim))
    scale = x.abs().amax(dim=dims, keepdim=True) / 448.0
    return (x / scale).clamp(-448, 448).to(case.dtype), scale.reshape(_scale_shape(x, per))


def _kept(x: torch.Tensor, per: str) -> int:
    return x.ndim - 1 if per == "token-head" else 1


def _scale_shape(x: torch.Tensor, per: str) -> tuple[int, ...]:
    return (1,) if per == "tensor" else tuple(x.shape[: _kept(x, per)])


def _indices(case: Case, generator: torch.Generator) -> torch.Tensor:
    """int32 [s_q, topk] in the case's pattern; where ``s_kv < topk`` the rest of a row is -1."""
    indices = torch.full((case.s_q, case.topk), -1, dtype=torch.int32)
    outside = torch.tensor([*OUT_OF_RANGE, case.s_kv], dtype=torch.int32)
    for t in range(case.s_q):
        if case.pattern == "all-empty" or (case.pattern == "empty-rows" and t % 3 == 0):
            picks = torch.randint(len(outside), (case.topk,), generator=generator)
            indices[t] = outside[picks]
            continue
        if case.pattern == "duplicates" and case.s_kv:
            few = min(case.s_kv, max(1, case.topk // 4))
            indices[t] = torch.randint(few, (case.topk,), generator=generator).to(torch.int32)
            continue
        count = min(case.topk, case.s_kv)
        chosen = torch.randperm(case.s_kv, generator=generator)[:count].to(torch.int32)
        if case.logits in ("dominant", "one-and-tail") and count and not (chosen == 0).any():
            chosen[int(torch.randint(count, (1,), generator=generator))] = 0
        indices[t, :count] = chosen
        _mask_some(indices[t], case.pattern, outside, generator)
    return indices


def _mask_some(
    row: torch.Tensor, pattern: Pattern, outside: torch.Tensor, generator: torch.Generator
) -> None:
    """Overwrite slots of one index row, in place, with indices that select nothing."""
    topk = len(row)
    if pattern == "holes":
        holes = torch.rand(topk, generator=generator) < 0.4
    elif pattern in ("leading", "trailing"):
        slots = torch.arange(topk)
        holes = slots < topk // 2 if pattern == "leading" else slots >= (topk + 1) // 2
    else:
        return
    picks = torch.randint(len(outside), (topk,), generator=generator)
    row[holes] = outside[picks][holes]


def _lengths(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if case.lengths == "none":
        return None
    if case.lengths == "ragged":
        lengths = torch.randint(0, case.topk + 1, (case.s_q,), generator=generator)
    elif case.lengths == "beyond":  # to be clamped to [0, topk]
        lengths = torch.randint(-3, 2 * case.topk, (case.s_q,), generator=generator)
    else:
        lengths = torch.full((case.s_q,), case.topk if case.lengths == "full" else 0)
    return lengths.to(torch.int32)


def _sink(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if case.sink == "none":
        return None
    if case.sink == "normal":
        return torch.randn(case.h_q, generator=generator) + math.log(max(case.topk, 1))
    return torch.tensor([EXTREME_SINKS[h % len(EXTREME_SINKS)] for h in range(case.h_q)])


CASES: tuple[Case, ...] = (
    Case("one-query-one-slot", s_q=1, s_kv=1, h_q=64, topk=128),
    Case("few-heads", s_q=3, s_kv=300, h_q=1, topk=128),
    Case("odd-heads", s_q=2, s_kv=300, h_q=33, topk=65),
    Case("h64-d576", s_q=5, s_kv=700, h_q=64, topk=256),
    Case("h64-d512", s_q=5, s_kv=700, h_q=64, d_qk=512, topk=256),
    Case("h128-sigma4", s_q=3, s_kv=900, h_q=128, topk=512, sigma=4.0),
    Case("topk-above-s_kv", s_q=4, s_kv=10, h_q=64, topk=2048),
    Case("topk-1", s_q=7, s_kv=40, h_q=8, topk=1),
    Case("duplicates", s_q=4, s_kv=500, h_q=64, topk=128, pattern="duplicates"),
    Case("holes", s_q=4, s_kv=500, h_q=64, topk=256, pattern="holes", sink="normal"),
    Case("leading-masked", s_q=4, s_kv=500, h_q=64, topk=256, pattern="leading"),
    Case("trailing-masked", s_q=4, s_kv=500, h_q=64, topk=256, pattern="trailing"),
    Case("empty-rows", s_q=7, s_kv=500, h_q=64, topk=128, pattern="empty-rows", sink="extreme"),
    Case("all-empty", s_q=3, s_kv=500, h_q=64, topk=128, pattern="all-empty"),
    Case("lengths-65-queries", s_q=65, s_kv=300, h_q=64, topk=128, lengths="ragged"),
    Case("lengths-beyond", s_q=9, s_kv=300, h_q=64, topk=128, lengths="beyond"),
    Case("lengths-zero", s_q=3, s_kv=300, h_q=64, topk=128, lengths="zero", sink="normal"),
    Case("sinks-extreme", s_q=3, s_kv=400, h_q=64, topk=128, sink="extreme"),
    Case("no-queries", s_q=0, s_kv=64, h_q=64, topk=128),
    Case("no-tokens", s_q=3, s_kv=0, h_q=64, topk=128, sink="normal"),
)
"""What any backend that takes the strict operator must get right; small enough for a CPU."""

ACCURACY_CASES: tuple[Case, ...] = (
    Case("flat-sigma0.05", s_q=8, s_kv=4096, h_q=64, topk=2048, sigma=0.05),
    Case("sigma1", s_q=8, s_kv=4096, h_q=64, topk=2048, sigma=1.0),
    Case("sigma2", s_q=8, s_kv=4096, h_q=64, topk=2048, sigma=2.0),
    Case("sigma4", s_q=8, s_kv=4096, h_q=64, topk=2048, sigma=4.0),
    Case("dominant", s_q=8, s_kv=4096, h_q=64, topk=2048, logits="dominant"),
    Case("sigma2-d512", s_q=8, s_kv=4096, h_q=64, d_qk=512, topk=2048, sigma=2.0),
)
"""From flat to peaked, at the width that DeepSeek-V3.2 uses."""

VALUE_ONE_CASES: tuple[Case, ...] = (
    Case("one-and-tail-at-minus-7", s_q=2, s_kv=2048, h_q=64, topk=2048, logits="one-and-tail"),
    Case("flat-256", s_q=2, s_kv=256, h_q=64, topk=256, logits="flat"),
    Case("flat-2048", s_q=2, s_kv=2048, h_q=64, topk=2048, logits="flat"),
)
"""V is 1 everywhere, so ``out`` is the mass that the probabilities kept: 1."""
