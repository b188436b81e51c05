"""What FP8 probabilities cost at best: a yardstick in torch for backends that round P to e4m3."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..backends import reference
from ..params import D_V, PrefillProblem


def fp8_p_emulation(
    problem: PrefillProblem, t: int, *, p_max: float = 256.0, rounded_denominator: bool = False
) -> reference.Attention:
    """Query ``t`` as in the reference, but with P rounded to e4m3 before it meets V.

    P is ``p_max * exp(logit - max_logits)``, to use the range of e4m3: with 256, P is normal
    down to exp(logit - max_logits) = 2**-14. The denominator is the unrounded sum, or with
    ``rounded_denominator`` the sum of what was rounded. Logits, sums and the product with V are
    exact, so that the rounding of P is the only error. A kernel is as good as FP8 probabilities
    allow when its worst row is within 1.1 times this one.
    """
    exact = reference.attend(replace(problem, attn_sink=None), t)
    q = problem.q[t].double() * reference._query_scale(problem, t)
    kv, valid = reference._selected_rows(problem, t)
    logits = ((q @ kv.T) * problem.sm_scale).masked_fill(~valid, -torch.inf)
    p = torch.exp(logits - exact.max_logits[:, None]) * p_max
    rounded = p.float().to(torch.float8_e4m3fn).double()

    total = (rounded if rounded_denominator else p).sum(dim=1)
    if problem.attn_sink is not None:
        total = total + p_max * torch.exp(problem.attn_sink.double() - exact.max_logits)
    out = (rounded @ kv[:, :D_V]) / total[:, None]
    empty = ~valid.any()
    return reference.Attention(out.masked_fill(empty, 0.0), exact.max_logits, exact.lse)
