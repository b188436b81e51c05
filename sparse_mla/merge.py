"""Exact merge of attention over disjoint parts of a cache: split-KV, context parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch

from .errors import error

_LSE_DTYPES = (torch.float32, torch.float64)

Parts = torch.Tensor | Sequence[torch.Tensor]


@overload
def merge_attention_states(
    outs: Parts, lses: Parts, max_logits: None = None
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def merge_attention_states(
    outs: Parts, lses: Parts, max_logits: Parts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def merge_attention_states(
    outs: Parts, lses: Parts, max_logits: Parts | None = None
) -> tuple[torch.Tensor, ...]:
    """Attention over all parts, from the results of the same queries over each part of the cache.

        lse = ln sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) * out_i

    Part i was computed without ``attn_sink``, whose weight belongs into the denominator once; to
    apply it afterwards multiply ``out`` by ``sigmoid(lse - sink)``. A part whose lse is not finite
    is empty in that row, in both conventions for a row without keys (+inf here and in FlashMLA,
    -inf elsewhere; NaN too), and its ``out`` is not read. A row that is empty in every part gives
    out 0, lse +inf and max_logits -inf. Parts are added in the order given, in float32 (float64
    where an input is), with weights computed in float64.

    Args:
        outs: parts ``[..., d_v]`` of one shape, dtype and device; a sequence, or one tensor with
            the parts along dim 0.
        lses: their natural-log lse, float32 (or float64) ``[...]``; a sequence or stacked likewise.
        max_logits: their largest logits, like ``lses``; if given, the merged ones are returned too.

    Returns:
        ``(out, lse)`` or ``(out, lse, max_logits)``; ``out`` in the dtype of the parts.

    Raises:
        ContractError: ``merge-shapes``.
    """
    states = _checked(outs, lses, max_logits)
    out_dtype, lse_dtype = states[0][0].dtype, states[0][1].dtype
    compute = torch.float64 if torch.float64 in (out_dtype, lse_dtype) else torch.float32

    top = torch.full_like(states[0][1], -math.inf, dtype=torch.float64)
    for _, lse, _ in states:
        top = torch.maximum(top, torch.where(lse.isfinite(), lse.double(), -math.inf))
    empty = top == -math.inf
    base = top.masked_fill(empty, 0.0)

    total = torch.zeros_like(base)
    for _, lse, _ in states:
        total = total + _weight(lse, base)
    denominator = total.masked_fill(empty, 1.0)

    merged = torch.zeros_like(states[0][0], dtype=compute)
    largest = torch.full_like(states[0][1], -math.inf)
    for out, lse, part_max in states:
        share = (_weight(lse, base) / denominator).to(compute)[..., None]
        read = lse.isfinite()
        merged = merged + torch.where(read[..., None], out.to(compute) * share, 0.0)
        if part_max is not None:
            largest = torch.maximum(largest, part_max.masked_fill(~read, -math.inf))
    lse = (base + denominator.log()).masked_fill(empty, math.inf).to(lse_dtype)
    if max_logits is None:
        return merged.to(out_dtype), lse
    return merged.to(out_dtype), lse, largest


def _weight(lse: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """exp(lse - base) in float64, 0 for an empty part."""
    return torch.where(lse.isfinite(), (lse.double() - base).exp(), 0.0)


def _checked(
    outs: Any, lses: Any, max_logits: Any
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """The parts as (out, lse, max_logits) triples; raises for the first that does not fit."""
    fault = _fault(outs, lses, max_logits)
    if fault is not None:
        name, wanted, got = fault
        raise error("merge-shapes", name=name, wanted=wanted, got=got)
    maxima = [None] * len(outs) if max_logits is None else list(max_logits)
    return [
        (out.detach(), lse.detach(), None if part is None else part.detach())
        for out, lse, part in zip(outs, lses, maxima, strict=True)
    ]


def _fault(outs: Any, lses: Any, max_logits: Any) -> tuple[str, str, str] | None:
    """What does not fit: its name, what was expected, what came."""
    groups = [("outs", outs), ("lses", lses)]
    if max_logits is not None:
        groups.append(("max_logits", max_logits))
    for name, parts in groups:
        if not isinstance(parts, (torch.Tensor, list, tuple)):
            return name, "a sequence of tensors or one stacked tensor", type(parts).__name__
        if isinstance(parts, torch.Tensor) and not parts.ndim:
            return name, "a sequence of tensors or one stacked tensor", _text(parts)
        if not len(parts):
            return name, "at least one part", "none"
        if len(parts) != len(outs):
            return name, f"{len(outs)} parts, as outs", f"{len(parts)}"
    first = outs[0]
    for name, parts in groups:
        for i, part in enumerate(parts):
            fault = _part_fault(part, first, is_out=name == "outs", lse=lses[0])
            if fault is not None:
                return f"{name}[{i}]", fault, _text(part)
    return None


def _part_fault(part: Any, first: Any, *, is_out: bool, lse: Any) -> str | None:
    """What ``part`` had to be, ``None`` where it is."""
    if is_out:
        fits = _is_strided(part) and part.ndim >= 1 and part.is_floating_point()
        if not fits:
            return "a float tensor (..., d_v)"
        if (part.shape, part.dtype, part.device) != (first.shape, first.dtype, first.device):
            return f"as outs[0], {_text(first)}"
        return None
    dtype = getattr(lse, "dtype", None)
    dtype = dtype if dtype in _LSE_DTYPES else torch.float32
    shape = tuple(first.shape[:-1])
    if (
        _is_strided(part)
        and tuple(part.shape) == shape
        and part.dtype == dtype
        and part.device == first.device
    ):
        return None
    return f"{str(dtype).removeprefix('torch.')} {shape} on {first.device}"


def _is_strided(part: Any) -> bool:
    """Whether ``part`` is a tensor, and not a sparse or nested one."""
    return isinstance(part, torch.Tensor) and part.layout is torch.strided and not part.is_nested


def _text(part: Any) -> str:
    if not isinstance(part, torch.Tensor):
        return type(part).__name__
    kind = str(part.dtype).removeprefix("torch.")
    if not _is_strided(part):
        layout = "nested" if part.is_nested else str(part.layout).removeprefix("torch.")
        return f"a {layout} tensor of {kind}"
    return f"{kind} {tuple(part.shape)} on {part.device}"
