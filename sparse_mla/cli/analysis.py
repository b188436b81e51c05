"""What a captured call is like: its selection, its logits, and how well its FP8 fits the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .replay import only, sample, slots, valid_slots

if TYPE_CHECKING:
    from ..callfile import Call

LOGIT_QUERIES = 64
"""Queries whose logits are computed; of a longer call, evenly spread ones."""
ERROR_ROWS = 4096
"""Rows that are quantised to see what FP8 would cost."""
FP8_MAX = 448.0
SMALLEST_NORMAL = 2.0**-6
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Selection:
    """Which slots select a row, and which rows neighbouring queries share."""

    queries: int
    slots: int
    selected: int
    negative: int
    past_cache: int
    past_length: int
    empty_queries: int
    rows_used: int
    rows: int
    per_query: torch.Tensor  # int64 [queries], slots that select
    overlap: torch.Tensor  # float32 [queries - 1]; NaN where one of the two selects nothing

    def to_dict(self) -> dict[str, Any]:
        """Counts, and the overlap in three numbers."""
        known = self.overlap[~self.overlap.isnan()]
        shares = [float(known.mean()), float(known.min()), float(known.max())] if len(known) else []
        return {
            "queries": self.queries,
            "slots": self.slots,
            "selected": self.selected,
            "negative": self.negative,
            "past_cache": self.past_cache,
            "past_length": self.past_length,
            "empty_queries": self.empty_queries,
            "rows_used": self.rows_used,
            "rows": self.rows,
            "overlap": dict(zip(("mean", "min", "max"), shares, strict=False)) or None,
        }


@dataclass(frozen=True)
class Logits:
    """Of each (query, head) with at least two slots, all logits finite: spread, maximum, keys."""

    queries: int
    not_finite: int  # (query, head) pairs left out: a logit of theirs is NaN or infinite
    spread: torch.Tensor  # float64 [n], standard deviation over the slots
    largest: torch.Tensor  # float64 [n]
    keys: torch.Tensor  # float64 [n], exp of the entropy: how many equal keys would weigh the same

    def to_dict(self) -> dict[str, Any] | None:
        """Median and range of each; ``None`` where no query selects two rows."""
        if not self.queries:
            return None
        return {
            "queries": self.queries,
            "not_finite": self.not_finite,
            "spread": _three(self.spread),
            "largest": _three(self.largest),
            "effective_keys": _three(self.keys),
        }


@dataclass(frozen=True)
class Fit:
    """How the values of q or kv lie in FP8: as stored, or as they would be with the best scale."""

    name: str
    dtype: str
    scale: float | None  # the largest where there are several
    scales: int
    largest: float  # of the stored values
    saturated: float  # share at +-448
    saturated_count: int
    subnormal: float  # share below 2**-6 and not 0: fewer than 4 significant bits
    zero: float
    not_finite: int  # NaN or infinite; the other figures leave them out
    row_spread: float  # largest over median of the rows' largest values
    better_scale: float | None
    better_subnormal: float | None
    error_per_tensor: float | None  # relative L2 of FP8, of values that are not quantised yet
    error_per_token: float | None
    advice: str
    histogram: torch.Tensor  # int64 [n], values by floor(log2 |stored|)
    first_power: int

    def to_dict(self) -> dict[str, Any]:
        """All but the histogram."""
        return {
            key: value
            for key, value in vars(self).items()
            if key not in ("histogram", "first_power")
        }


@dataclass(frozen=True)
class Analysis:
    """One call, looked at from all three sides."""

    selection: Selection
    logits: Logits
    fits: tuple[Fit, Fit]


def analyse(call: Call) -> Analysis:
    """Look into a call whose contract is met."""
    return Analysis(
        selection_of(call),
        logits_of(call),
        (fit_of("q", call), fit_of("kv", call)),
    )


def _three(values: torch.Tensor) -> dict[str, float] | None:
    if not len(values):
        return None
    return {
        "median": float(values.median()),
        "min": float(values.min()),
        "max": float(values.max()),
    }


def selection_of(call: Call) -> Selection:
    """Slots by what they are, and the rows that queries side by side share."""
    index, valid = slots(call), valid_slots(call)
    s_kv = call.tensors["kv"].shape[0]
    in_range = (index >= 0) & (index < s_kv)
    usable = torch.where(valid, index, -1)
    used = torch.zeros(s_kv, dtype=torch.bool)
    used[index[valid].long()] = True
    return Selection(
        queries=index.shape[0],
        slots=index.numel(),
        selected=int(valid.sum()),
        negative=int((index < 0).sum()),
        past_cache=int((index >= s_kv).sum()),
        past_length=int((in_range & ~valid).sum()),
        empty_queries=int((~valid.any(dim=1)).sum()),
        rows_used=int(used.sum()),
        rows=s_kv,
        per_query=valid.sum(dim=1),
        overlap=_overlap(usable),
    )


def _overlap(usable: torch.Tensor) -> torch.Tensor:
    """Rows that a query shares with the next, over the smaller of their two selections."""
    ordered = usable.long().sort(dim=1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first &= ordered >= 0  # a row selected twice counts once
    here, there = ordered[:-1], ordered[1:].contiguous()
    place = torch.searchsorted(there, here.contiguous()).clamp_max(there.shape[1] - 1)
    shared = ((there.gather(1, place) == here) & first[:-1]).sum(dim=1)
    sizes = first.sum(dim=1)
    return shared / torch.minimum(sizes[:-1], sizes[1:])  # 0 / 0 is NaN


def logits_of(call: Call) -> Logits:
    """The logits of some queries over the rows they select, in float64."""
    from .check import problem

    queries = sample(call.tensors["q"].shape[0], LOGIT_QUERIES)
    part = only(call, queries)
    given, valid = problem(part), valid_slots(part)
    spread, largest, keys = [], [], []
    queries_seen = not_finite = 0
    for t in range(len(valid)):
        rows = slots(part)[t][valid[t]].long()
        if len(rows) < 2:
            continue
        q = given.q[t].double() * _of_query(given.q_scale, t)
        kv = given.kv_rows[rows].double() * _of_rows(given.kv_scale, rows)
        every = (q @ kv.T) * given.sm_scale  # [h_q, slots]
        logits = every[every.isfinite().all(dim=1)]
        queries_seen += 1
        not_finite += len(every) - len(logits)
        log_p = torch.log_softmax(logits, dim=1)
        spread.append(logits.std(dim=1))
        largest.append(logits.amax(dim=1))
        keys.append(-(log_p.exp() * log_p).nan_to_num(0.0).sum(dim=1))
    joined = [torch.cat(x) if x else torch.zeros(0) for x in (spread, largest, keys)]
    return Logits(queries_seen, not_finite, joined[0], joined[1], joined[2].exp())


def _of_query(scale: torch.Tensor | None, t: int) -> Any:
    if scale is None:
        return 1.0
    scale = scale.double()
    if scale.numel() == 1:
        return scale.reshape(())
    return scale[t, :, None] if scale.ndim == 2 else scale[t]


def _of_rows(scale: torch.Tensor | None, rows: torch.Tensor) -> Any:
    if scale is None:
        return 1.0
    return scale.double().reshape(()) if scale.numel() == 1 else scale.double()[rows, None]


def fit_of(name: str, call: Call) -> Fit:
    """How q or kv fits into FP8."""
    tensor = call.tensors[name]
    scale = call.tensors.get(f"{name}_scale", call.arguments.get(f"{name}_scale"))
    scale = None if scale is None else torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
    stored = tensor.reshape(-1, tensor.shape[-1])
    values = stored.float().abs()
    finite = values.nan_to_num(nan=0.0, posinf=0.0)
    not_finite = int((~values.isfinite()).sum())
    row_largest = finite.amax(dim=1) if values.numel() else values.new_zeros(1)
    largest = float(row_largest.max())
    quantised = tensor.dtype == E4M3
    if not quantised and largest > 0:
        values = values / largest * FP8_MAX  # as they would be stored with the best scale
    number = values.numel()
    share = 1.0 / max(1, number)
    nonzero = values[(values > 0) & values.isfinite()]
    counts, first_power = _powers(nonzero)
    saturated = int((values == FP8_MAX).sum()) if quantised else 0
    known: dict[str, Any] = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "scale": float(scale.max()) if scale is not None and len(scale) else None,
        "scales": 0 if scale is None else scale.numel(),
        "largest": largest,
        "saturated": saturated * share,
        "saturated_count": saturated,
        "subnormal": int((nonzero < SMALLEST_NORMAL).sum()) * share,
        "zero": int((values == 0).sum()) * share,
        "not_finite": not_finite,
        "row_spread": float(row_largest.max() / row_largest.median().clamp_min(1e-30)),
        "histogram": counts,
        "first_power": first_power,
        "better_scale": None,
        "better_subnormal": None,
        "error_per_tensor": None,
        "error_per_token": None,
    }
    if scale is not None and not bool(((scale > 0) & scale.isfinite()).all()):
        known["advice"] = "a scale that is not a finite positive number makes the results NaN"
    else:
        add = _stored_advice if quantised else _coming_advice
        known.update(add(known, nonzero, stored, share))
    return Fit(**known)


def _powers(nonzero: torch.Tensor) -> tuple[torch.Tensor, int]:
    """How many values lie in each power of two, and the first power."""
    if not nonzero.numel():
        return torch.zeros(1, dtype=torch.int64), 0
    powers = (torch.frexp(nonzero).exponent - 1).clamp_min(-24).long()
    first = int(powers.min())
    return torch.bincount(powers - first), first


def _stored_advice(
    known: dict[str, Any], nonzero: torch.Tensor, stored: torch.Tensor, share: float
) -> dict[str, Any]:
    """What another scale would do for values that are FP8 already."""
    largest, scale = known["largest"], known["scale"]
    if known["not_finite"]:
        return {"advice": "holds NaN: values were cast without being clamped to +-448 first"}
    if scale is None or largest == 0:
        return {"advice": "all zero"}
    if known["saturated_count"] > max(8, 4 * known["scales"]) and known["saturated"] > 1e-5:
        return {
            "advice": (
                f"{known['saturated']:.2%} of the values are at the limit: the scale is too small "
                "and larger ones were cut off; take the largest value over 448"
            )
        }
    better = scale * largest / FP8_MAX
    after = int((nonzero < SMALLEST_NORMAL * largest / FP8_MAX).sum()) * share
    changed: dict[str, Any] = {"better_scale": better, "better_subnormal": after}
    if known["subnormal"] - after > 1e-3:
        changed["advice"] = (
            f"the largest value is {largest:g} of 448: a scale of {better:.3g} would leave "
            f"{after:.2%} instead of {known['subnormal']:.2%} of the values with fewer than 4 bits"
        )
    elif known["subnormal"] > 0.01 and known["row_spread"] > 8 and known["scales"] == 1:
        changed["advice"] = (
            f"{known['subnormal']:.2%} of the values have fewer than 4 bits, and the largest row "
            f"is {known['row_spread']:.3g} times the median one: a scale per token would serve"
        )
    else:
        changed["advice"] = "the scale fits"
    return changed


def _coming_advice(
    known: dict[str, Any], nonzero: torch.Tensor, stored: torch.Tensor, share: float
) -> dict[str, Any]:
    """What FP8 would cost values that are not quantised."""
    from .. import quantize_fp8

    if known["not_finite"]:
        return {"advice": "holds NaN or infinite values"}
    if known["largest"] == 0:
        return {"advice": "all zero"}
    better = known["largest"] / FP8_MAX
    rows = stored[sample(len(stored), ERROR_ROWS)].float()
    errors = []
    for fp8, scale in (quantize_fp8(rows, scale=better), quantize_fp8(rows, per="token")):
        back = fp8.double() * (scale.double() if scale.numel() == 1 else scale.double()[:, None])
        errors.append(float((back - rows.double()).norm() / rows.double().norm()))
    return {
        "better_scale": better,
        "better_subnormal": known["subnormal"],
        "error_per_tensor": errors[0],
        "error_per_token": errors[1],
        "advice": (
            f"not quantised; FP8 with one scale, {better:.3g}, would be off by {errors[0]:.2%} "
            f"(relative L2), with one a token by {errors[1]:.2%}"
        ),
    }
