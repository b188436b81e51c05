"""Comparison against the reference: worst row, stated tolerance, an error that says where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..backends import reference
from ..params import PrefillProblem


@dataclass(frozen=True)
class Tolerance:
    """What a result may differ by; a row is one (query, head)."""

    out: float  # worst row's relative L2 of out
    absolute: float  # of max_logits and lse
    relative: float  # of max_logits and lse, added to ``absolute``


EXACT = Tolerance(out=0.003, absolute=1e-5, relative=1e-6)
"""Nothing but the bfloat16 rounding of ``out`` and the float32 rounding of the rest."""

CPU_FLOAT32 = Tolerance(out=0.003, absolute=2e-5, relative=2e-6)
"""The ``cpu`` backend in float32: sums in another precision, nothing else."""

CPU_BFLOAT16 = Tolerance(out=0.012, absolute=4e-3, relative=2e-3)
"""The ``cpu`` backend in bfloat16: logits and probabilities of 8 bits, ``out`` rounded twice."""


@dataclass(frozen=True)
class Errors:
    """The worst differences found, and the (query, head) they were found at."""

    out: float
    max_logits: float  # divided by absolute + relative * |expected|: 1 is the limit
    lse: float  # likewise
    out_at: tuple[int, int]
    max_logits_at: tuple[int, int]
    lse_at: tuple[int, int]


def expected(problem: PrefillProblem, queries: Sequence[int] | None = None) -> reference.Attention:
    """The reference's float64 results of ``queries`` (all unless given), unrounded."""
    chosen = range(problem.s_q) if queries is None else queries
    rows = [reference.attend(problem, t) for t in chosen]
    if not rows:
        float64 = torch.float64
        return reference.Attention(
            problem.out.to(float64), problem.max_logits.to(float64), problem.lse.to(float64)
        )
    return reference.Attention(*(torch.stack(parts) for parts in zip(*rows, strict=True)))


def compare(
    problem: PrefillProblem,
    tolerance: Tolerance,
    *,
    queries: Sequence[int] | None = None,
    against: reference.Attention | None = None,
) -> Errors:
    """Raise AssertionError unless the outputs in ``problem`` agree with the reference.

    NaN must stand exactly where the reference has NaN, infinities must be equal, and a row of zeros
    must be zeros. ``queries`` limits the comparison to some queries of a large problem. Returns the
    errors found.
    """
    want = against if against is not None else expected(problem, queries)
    errors = measure(problem, tolerance, want, queries)
    checks = (
        ("out", errors.out, tolerance.out, errors.out_at),
        ("max_logits", errors.max_logits, 1.0, errors.max_logits_at),
        ("lse", errors.lse, 1.0, errors.lse_at),
    )
    for name, value, limit, (row, head) in checks:
        if not value <= limit:
            t = row if queries is None else queries[row]
            got = getattr(problem, name)[t, head]
            wanted = getattr(want, name)[row, head]
            if name == "out":
                worst = int((got.double() - wanted).abs().nan_to_num(torch.inf).argmax())
                got, wanted = got[worst], wanted[worst]
                name = f"out column {worst}"
            raise AssertionError(
                f"{name} of query {t}, head {head}: got {float(got)!r}, "
                f"expected {float(wanted)!r}; error {value:.4g}, limit {limit:.4g} ({tolerance})"
            )
    return errors


def measure(
    problem: PrefillProblem,
    tolerance: Tolerance,
    want: reference.Attention,
    queries: Sequence[int] | None = None,
) -> Errors:
    """The worst differences between the outputs in ``problem`` and ``want``, whatever they are."""
    if want.lse.numel() == 0:
        return Errors(0.0, 0.0, 0.0, (0, 0), (0, 0), (0, 0))
    pick = slice(None) if queries is None else list(queries)
    out, out_at = _worst(_relative_l2(problem.out[pick].double(), want.out))
    stats = []
    for name in ("max_logits", "lse"):
        got, wanted = getattr(problem, name)[pick].double(), getattr(want, name)
        allowed = tolerance.absolute + tolerance.relative * wanted.abs().nan_to_num(0.0, 0.0, 0.0)
        stats.append(_worst(_difference(got, wanted) / allowed))
    (max_logits, max_at), (lse, lse_at) = stats
    return Errors(out, max_logits, lse, out_at, max_at, lse_at)


def _difference(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """|got - want|; 0 where both are the same infinity or both NaN, infinite where only one is."""
    same = (got == want) | (got.isnan() & want.isnan())
    return torch.where(same, 0.0, (got - want).abs().nan_to_num(torch.inf))


def _relative_l2(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative L2 of each row over the last dim; any difference from a row of zeros is infinite."""
    difference = _difference(got, want)
    norm = want.nan_to_num(0.0, 0.0, 0.0).norm(dim=-1)
    error = difference.norm(dim=-1)
    return torch.where(error == 0, 0.0, error / norm)


def _worst(errors: torch.Tensor) -> tuple[float, tuple[int, int]]:
    at = int(errors.argmax())
    row, head = divmod(at, errors.shape[1])
    return float(errors.reshape(-1)[at]), (row, head)
