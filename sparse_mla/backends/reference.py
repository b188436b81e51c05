"""The definition of correct: float64, one query at a time, on any torch device.

    logit[t,h,j] = sm_scale * q_scale * kv_scale * dot(q[t,h,:], kv[i,:])      i = indices[t,j]
    p            = softmax over the valid slots j
    out[t,h,:]   = sum_j p[j] * kv_scale * kv[i,:d_v]
    max_logits   = max_j logit            lse = ln sum_j exp(logit)

A masked slot reads row 0 in place of what it points to, and that copy is overwritten with zeros
before any arithmetic: nothing that no valid slot selects can reach a result. Masking selects by
value, never by shape, so that nothing here waits for a GPU. Results are rounded once, into the
output dtypes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..params import D_V

if TYPE_CHECKING:
    from ..params import PrefillProblem

NAME = "reference"


class Attention(NamedTuple):
    """Results of some queries before rounding, all float64."""

    out: torch.Tensor  # [..., h_q, 512]
    max_logits: torch.Tensor  # [..., h_q]
    lse: torch.Tensor  # [..., h_q]


def available() -> str | None:
    """``None``: torch alone is enough."""
    return None


def refusal(problem: PrefillProblem) -> str | None:
    """``None`` for every problem on a device that has float64 and data."""
    device = problem.q.device.type
    if device in ("meta", "mps"):
        return f"device {device} cannot compute in float64"
    return None


def run(problem: PrefillProblem) -> None:
    """Fill ``out``, ``max_logits`` and ``lse`` of the problem."""
    for t in range(problem.s_q):
        result = attend(problem, t)
        problem.out[t].copy_(result.out)
        problem.max_logits[t].copy_(result.max_logits)
        problem.lse[t].copy_(result.lse)


def attend(problem: PrefillProblem, t: int) -> Attention:
    """Query ``t`` in float64: the formula above, every edge case included."""
    q = problem.q[t].to(torch.float64) * _query_scale(problem, t)  # [h_q, d_qk]
    kv, valid = _selected_rows(problem, t)  # [topk, d_qk], [topk]
    empty = ~valid.any()

    logits = (q @ kv.T) * problem.sm_scale  # [h_q, topk]
    logits = logits.masked_fill(~valid, -math.inf)
    max_logits = logits.amax(dim=1)
    p = torch.exp(logits - max_logits[:, None])
    total = p.sum(dim=1)
    denominator = total
    if problem.attn_sink is not None:
        denominator = total + torch.exp(problem.attn_sink.to(torch.float64) - max_logits)
    out = (p @ kv[:, :D_V]) / denominator[:, None]

    return Attention(
        out.masked_fill(empty, 0.0),
        max_logits.masked_fill(empty, -math.inf),
        (max_logits + total.log()).masked_fill(empty, math.inf),
    )


def _selected_rows(problem: PrefillProblem, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The dequantised row of each slot of query ``t``, zeros where masked, and what is valid."""
    index = problem.index_rows[t]  # [topk]
    valid = (index >= 0) & (index < problem.s_kv)
    if problem.topk_length is not None:
        slots = torch.arange(problem.topk, device=index.device)
        valid &= slots < problem.topk_length[t]
    if problem.s_kv == 0:
        zeros = torch.zeros(problem.topk, problem.d_qk, dtype=torch.float64, device=index.device)
        return zeros, valid

    safe = torch.where(valid, index, 0).to(torch.int64)
    rows = problem.kv_rows
    if rows.element_size() == 1:  # float8 has no index_select on some devices: move the bytes
        kv = rows.view(torch.uint8).index_select(0, safe).view(rows.dtype).to(torch.float64)
    else:
        kv = rows.index_select(0, safe).to(torch.float64)
    if problem.kv_scale is not None:
        scale = _usable(problem.kv_scale)
        kv = kv * (scale if scale.numel() == 1 else scale[safe, None])
    return kv.masked_fill(~valid[:, None], 0.0), valid


def _query_scale(problem: PrefillProblem, t: int) -> torch.Tensor | float:
    """The multiplier of query ``t``: one element, or [h_q, 1] where each head has its own."""
    if problem.q_scale is None:
        return 1.0
    scale = _usable(problem.q_scale)
    if scale.numel() == 1:
        return scale.reshape(())
    return scale[t, :, None] if scale.ndim == 2 else scale[t]


def _usable(scale: torch.Tensor) -> torch.Tensor:
    """Scales in float64; one that is not a finite positive number becomes NaN."""
    scale = scale.to(torch.float64)
    return scale.masked_fill(~((scale > 0) & (scale < math.inf)), math.nan)
