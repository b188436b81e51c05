"""Float tensors to FP8 e4m3 with the scale that gives their values back."""

from __future__ import annotations

import math
from typing import Literal

import torch

from .errors import SparseMLAError, error

E4M3 = torch.float8_e4m3fn

E4M3_MAX = 448.0
"""The largest finite e4m3fn value."""

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: a scale below it would lose its own precision or become 0."""

FLOAT32_SMALLEST, FLOAT32_LARGEST = 2.0**-149, torch.finfo(torch.float32).max

Per = Literal["tensor", "token", "token-head"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def quantize_fp8(
    x: torch.Tensor,
    *,
    per: Per = "tensor",
    scale: float | torch.Tensor | None = None,
    absmax: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``x`` to ``float8_e4m3fn``: ``x_fp8 = round(clamp(x / scale, -448, 448))``.

    The real value is ``x_fp8 * scale``. Rounding is to nearest, ties to even. Clamping comes before
    the cast, so no finite value becomes NaN; infinities become +-448, NaN stays NaN. Neither counts
    towards the largest magnitude. Where that is 0 (all zeros, or nothing there) the scale is 1.
    Nothing here waits for a GPU.

    Args:
        x: bfloat16, float16, float32 or float64, at least one dimension, the last not empty; a
            query ``[s_q, h_q, d_qk]`` or latent rows ``[s_kv, d_qk]`` or ``[s_kv, 1, d_qk]``.
        per: what shares a scale. ``"tensor"``: everything, scale of shape ``(1,)``; ``"token"``:
            what has the same first index, scale ``(x.shape[0],)``; ``"token-head"``: each row of
            the last dimension, scale ``x.shape[:-1]``.
        scale: use this scale, a finite positive number or a float32 tensor of the shape above (one
            element does for all). Where a tensor is not finite and positive the result is NaN.
        absmax: use this largest magnitude (scale = absmax / 448), a number or a tensor likewise.

    Returns:
        ``(x_fp8, scale)``: x's shape, contiguous; float32.

    Raises:
        ContractError: ``quantize-input``, ``quantize-per``, ``quantize-scale``.
    """
    if not isinstance(x, torch.Tensor):
        raise _not_quantisable(type(x).__name__, ())
    if x.layout is not torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else x.layout
        raise _not_quantisable(f"{x.dtype} ({kind})", () if x.is_nested else tuple(x.shape))
    if x.dtype not in _FLOATS or not x.ndim or not x.shape[-1]:
        raise _not_quantisable(x.dtype, tuple(x.shape))
    if per not in ("tensor", "token", "token-head"):
        raise error("quantize-per", per=repr(per))
    x = x.detach()
    shape = _scale_shape(x, per)
    if scale is None and absmax is None:
        found = _scale_of(_largest(x, per).reshape(shape))
    else:
        found = _given(x, shape, scale, absmax)
    usable = torch.where((found > 0) & (found < math.inf), found, math.nan)
    divisor = usable.reshape(shape + (1,) * (x.ndim - len(shape)))
    scaled = x.to(torch.float32) / divisor
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3).contiguous(), found


def _not_quantisable(dtype: object, shape: tuple[int, ...]) -> SparseMLAError:
    return error("quantize-input", dtype=dtype, shape=shape)


def quantize_queries(
    q: torch.Tensor, q_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A float ``q`` [s_q, h_q, d_qk] in FP8, by ``q_scale`` or else per (token, head).

    ``q_scale`` is float32 of one element, ``[s_q]`` or ``[s_q, h_q]``.
    """
    if q_scale is None:
        return quantize_fp8(q, per="token-head")
    if q_scale.numel() == 1:
        return quantize_fp8(q, scale=q_scale.reshape(1))
    return quantize_fp8(q, per="token" if q_scale.ndim == 1 else "token-head", scale=q_scale)


def _scale_shape(x: torch.Tensor, per: Per) -> tuple[int, ...]:
    if per == "tensor":
        return (1,)
    return tuple(x.shape[:-1]) if per == "token-head" else tuple(x.shape[:1])


def _largest(x: torch.Tensor, per: Per) -> torch.Tensor:
    """The largest finite magnitude of each group, float32."""
    kept = {"tensor": 0, "token": 1, "token-head": x.ndim - 1}[per]
    if x.ndim == 1 and per == "token":  # every element is its own token
        return _finite_magnitudes(x)
    if not x.numel():
        return x.new_zeros(_scale_shape(x, per), dtype=torch.float32)
    return _finite_magnitudes(x).flatten(kept).amax(dim=-1)


def _finite_magnitudes(x: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.float32).max
    return torch.where(x.isfinite(), x.abs(), 0.0).to(torch.float32).clamp(max=largest)


def _scale_of(largest: torch.Tensor) -> torch.Tensor:
    # On a GPU torch multiplies by the reciprocal of a number: a tensor is divided by everywhere,
    # so that a scale does not depend on the device.
    scale = (largest / largest.new_full((), E4M3_MAX)).clamp(min=SMALLEST_SCALE)
    return torch.where(largest == 0, 1.0, scale)


def _given(
    x: torch.Tensor,
    shape: tuple[int, ...],
    scale: float | torch.Tensor | None,
    absmax: float | torch.Tensor | None,
) -> torch.Tensor:
    """The scale that the caller chose, float32 of ``shape`` on x's device."""
    value, name = (scale, "") if absmax is None else (absmax, "absmax ")
    what = None
    if scale is not None and absmax is not None:
        what = "both scale and absmax"
    elif isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            what = f"{name}tensor without strides"
        elif value.dtype != torch.float32 or (value.numel() != 1 and tuple(value.shape) != shape):
            what = f"{name}{value.dtype} tensor of shape {tuple(value.shape)}"
        elif value.device != x.device:
            what = f"{name}tensor on {value.device}, x is on {x.device}"
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        what = f"{name}{type(value).__name__}"
    elif not FLOAT32_SMALLEST <= value <= FLOAT32_LARGEST:
        what = f"{name}{value}"
    if what is not None:
        raise error("quantize-scale", expected=shape, what=what)
    if isinstance(value, torch.Tensor):
        found = value.detach().expand(shape) if value.numel() != 1 else value.reshape(1)
        found = found.expand(shape).contiguous()
    else:
        found = torch.full(shape, float(value or 0), dtype=torch.float32, device=x.device)
    return found if absmax is None else _scale_of(found)
