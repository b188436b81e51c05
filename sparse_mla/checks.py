"""Tensor metadata in, ``PrefillProblem`` or ``ContractError`` out.

Each operator has one generator of violations, in the order of its contract. The operator raises the
first; ``sparse-mla check`` lists all, so a check that needs what an earlier one found missing is
skipped. Nothing here reads data: no check waits for a GPU, and all of them run on fake tensors.

These run at every call, which is why attributes are read once and nothing is built while all is
well.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from . import violations as find
from .errors import SparseMLAError, error
from .params import D_QK_SUPPORTED, D_V, PrefillProblem, prefill_problem
from .violations import E4M3, UNQUANTISED, Violations

_Tensor = torch.Tensor
_FLOAT32 = torch.float32
_INT32 = torch.int32
_STRIDED = torch.strided
_INF = math.inf


def require(found: Violations) -> None:
    """Raise the first violation, if there is one."""
    for violation in found:
        raise violation


def check_q8kv8(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any,
    q_scale: Any,
    kv_scale: Any,
    d_v: Any = D_V,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
    max_logits: Any = None,
    lse: Any = None,
    *,
    compare_memory: bool = True,
) -> PrefillProblem:
    """The problem of the strict operator, outputs allocated; raises the first violation."""
    try:
        for violation in q8kv8_violations(
            q, kv, indices, sm_scale, q_scale, kv_scale, d_v, attn_sink, topk_length,
            out, max_logits, lse, compare_memory=compare_memory,
        ):  # fmt: skip
            raise violation
    except RuntimeError:  # a nested tensor has no shape to ask for
        rest = (q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse)
        require(find.none_strided(q, kv, indices, *rest))
        raise
    s_q, h_q, d_qk = q.shape
    out, max_logits, lse = allocate_outputs(q, s_q, h_q, out, max_logits, lse)
    return prefill_problem(
        q, kv, indices, float(sm_scale), q_scale, kv_scale, attn_sink, topk_length,
        out, max_logits, lse,
        s_q, kv.shape[0], h_q, d_qk, indices.shape[2],
    )  # fmt: skip


def q8kv8_violations(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any,
    q_scale: Any,
    kv_scale: Any,
    d_v: Any = D_V,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
    max_logits: Any = None,
    lse: Any = None,
    *,
    compare_memory: bool = True,
) -> Violations:
    """Everything wrong with a call of the strict operator, in the contract's order.

    ``compare_memory=False`` leaves out the overlap of outputs: fake tensors have no addresses.
    """
    if not (isinstance(q, _Tensor) and isinstance(kv, _Tensor) and isinstance(indices, _Tensor)):
        yield from find.no_tensors(q=q, kv=kv, indices=indices)
        return
    if not q.layout is kv.layout is indices.layout is _STRIDED:
        yield from find.none_strided(q, kv, indices)
        return
    s_q, h_q, d_qk = q.shape if q.ndim == 3 else (None, None, None)
    device = q.device
    yield from _q8kv8_main_tensors(q, kv, indices, s_q, h_q, d_qk, device)
    if topk_length is not None:
        yield from find.topk_length(topk_length, device, s_q)
    if (type(d_v) is not int or d_v != D_V) and not find.is_d_v(d_v):
        yield error("d-v-unsupported", d_v=find.plain(d_v))
    if attn_sink is not None:
        yield from find.attn_sink(attn_sink, device, h_q)
    for name, scale in (("q_scale", q_scale), ("kv_scale", kv_scale)):
        if not (
            isinstance(scale, _Tensor)
            and scale.layout is _STRIDED
            and scale.dtype is _FLOAT32
            and scale.numel() == 1
            and scale.device == device
        ):
            yield find.scale_invalid(name, scale, device)
    if out is not None or max_logits is not None or lse is not None:
        inputs = (q, kv, indices, q_scale, kv_scale, attn_sink, topk_length)
        yield from find.outputs(
            (out, max_logits, lse), device, s_q, h_q, inputs if compare_memory else None
        )
    if type(sm_scale) is not float or not 0.0 < sm_scale < _INF:
        yield from find.sm_scale(sm_scale)


def _q8kv8_main_tensors(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    s_q: int | None,
    h_q: int | None,
    d_qk: int | None,
    device: torch.device,
) -> Violations:
    """Rows 1 to 13: q, kv and indices."""
    h_kv = kv_d_qk = None
    kv_shape, index_shape = kv.shape, indices.shape
    if s_q is None:
        yield find.q_ndim(q)
    if len(kv_shape) == 3:
        _, h_kv, kv_d_qk = kv_shape
    else:
        yield error("kv-ndim", shape=tuple(kv_shape))
    if len(index_shape) != 3:
        yield error("indices-ndim", shape=tuple(index_shape))
    if kv.device != device:
        yield find.device_mismatch("kv", kv, device)
    if indices.device != device:
        yield find.device_mismatch("indices", indices, device)
    if q.dtype is not E4M3:
        yield _not_e4m3fn("q", q)
    if kv.dtype is not E4M3:
        yield _not_e4m3fn("kv", kv)
    if not (q.is_contiguous() and kv.is_contiguous() and indices.is_contiguous()):
        for name, tensor in (("q", q), ("kv", kv), ("indices", indices)):
            if not tensor.is_contiguous():
                yield find.not_contiguous(name, tensor)
    if d_qk != kv_d_qk and d_qk is not None and kv_d_qk is not None:
        yield find.d_qk_mismatch(d_qk, kv_d_qk)
    if h_q is not None and (h_q == 0 or h_q % 64 != 0):
        yield error("h-q-not-multiple-of-64", h_q=h_q)
    if h_kv is not None and h_kv != 1:
        yield error("h-kv-not-one", h_kv=h_kv, shape=tuple(kv_shape))
    if d_qk is not None and d_qk not in D_QK_SUPPORTED:
        yield error("d-qk-unsupported", d_qk=d_qk)
    indices_3d = len(index_shape) == 3
    if indices_3d and s_q is not None and (index_shape[0] != s_q or index_shape[1] != 1):
        yield error("indices-shape", s_q=s_q, h_kv=1, shape=tuple(index_shape))
    if indices.dtype is not _INT32:
        yield find.not_int32(indices)
    if indices_3d and (index_shape[2] == 0 or index_shape[2] % 128 != 0):
        yield error("topk-not-multiple-of-128", topk=index_shape[2])


def _not_e4m3fn(name: str, tensor: torch.Tensor) -> SparseMLAError:
    return error("not-e4m3fn", name=name, dtype=tensor.dtype)


def check_prefill(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any = None,
    q_scale: Any = None,
    kv_scale: Any = None,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
    max_logits: Any = None,
    lse: Any = None,
    *,
    compare_memory: bool = True,
) -> PrefillProblem:
    """The problem of ``sparse_mla_prefill``, outputs allocated; raises the first violation.

    Where q is of a float type and kv is FP8, q is still to be quantised: ``q_scale`` is what was
    given.
    """
    try:
        for violation in prefill_violations(
            q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length,
            out, max_logits, lse, compare_memory=compare_memory,
        ):  # fmt: skip
            raise violation
    except RuntimeError:  # as above
        rest = (q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse)
        require(find.none_strided(q, kv, indices, *rest))
        raise
    s_q, h_q, d_qk = q.shape
    out, max_logits, lse = allocate_outputs(q, s_q, h_q, out, max_logits, lse)
    return prefill_problem(
        q, kv, indices, d_qk**-0.5 if sm_scale is None else float(sm_scale),
        scale_tensor(q_scale, q), scale_tensor(kv_scale, q), attn_sink, topk_length,
        out, max_logits, lse,
        s_q, kv.shape[0], h_q, d_qk, indices.shape[-1],
    )  # fmt: skip


def prefill_violations(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any = None,
    q_scale: Any = None,
    kv_scale: Any = None,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
    max_logits: Any = None,
    lse: Any = None,
    *,
    compare_memory: bool = True,
) -> Violations:
    """Everything wrong with a call of the general operator; ``compare_memory`` as above."""
    if not (isinstance(q, _Tensor) and isinstance(kv, _Tensor) and isinstance(indices, _Tensor)):
        yield from find.no_tensors(q=q, kv=kv, indices=indices)
        return
    if not q.layout is kv.layout is indices.layout is _STRIDED:
        yield from find.none_strided(q, kv, indices)
        return
    s_q, h_q, d_qk = q.shape if q.ndim == 3 else (None, None, None)
    device = q.device
    yield from _prefill_main_tensors(q, kv, indices, s_q, h_q, d_qk, device)
    if topk_length is not None:
        yield from find.topk_length(topk_length, device, s_q)
    if attn_sink is not None:
        yield from find.attn_sink(attn_sink, device, h_q)
    if kv.dtype is E4M3:
        yield from _prefill_scales(q, kv, q_scale, kv_scale, s_q, h_q)
    elif q_scale is not None or kv_scale is not None:
        yield from _scales_without_fp8(q, kv, q_scale, kv_scale)
    if out is not None or max_logits is not None or lse is not None:
        inputs = (q, kv, indices, q_scale, kv_scale, attn_sink, topk_length)
        yield from find.outputs(
            (out, max_logits, lse), device, s_q, h_q, inputs if compare_memory else None,
            float32_out=kv.dtype in UNQUANTISED,
        )  # fmt: skip
    if sm_scale is not None and (type(sm_scale) is not float or not 0.0 < sm_scale < _INF):
        yield from find.sm_scale(sm_scale)
    if torch.is_grad_enabled():
        for name, tensor in (
            ("q", q),
            ("kv", kv),
            ("attn_sink", attn_sink),
            ("q_scale", q_scale),
            ("kv_scale", kv_scale),
        ):
            if tensor is not None and getattr(tensor, "requires_grad", False):
                yield error("no-backward", name=name)


def _prefill_main_tensors(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    s_q: int | None,
    h_q: int | None,
    d_qk: int | None,
    device: torch.device,
) -> Violations:
    """q, kv and indices of the general operator."""
    kv_shape, index_shape = kv.shape, indices.shape
    if s_q is None:
        yield find.q_ndim(q)
    kv_d_qk = kv_shape[-1] if _is_rows(kv_shape) else None
    if kv_d_qk is None:
        yield error("kv-shape", shape=tuple(kv_shape))
    if kv.device != device:
        yield find.device_mismatch("kv", kv, device)
    if indices.device != device:
        yield find.device_mismatch("indices", indices, device)
    q_dtype, kv_dtype = q.dtype, kv.dtype
    if q_dtype is not E4M3 and q_dtype not in UNQUANTISED:
        yield error("q-dtype-unsupported", dtype=q_dtype)
    if kv_dtype is not E4M3 and kv_dtype not in UNQUANTISED:
        yield error("kv-dtype-unsupported", dtype=kv_dtype)
    elif kv_dtype is not E4M3 and q_dtype is E4M3:
        yield error("unquantised-kv-with-fp8-q", q_dtype=q_dtype, kv_dtype=kv_dtype)
    if not (q.is_contiguous() and kv.is_contiguous() and indices.is_contiguous()):
        yield from find.dense_last("q", q)
        yield from find.dense_last("kv", kv)
        yield from find.dense_last("indices", indices)
    if d_qk != kv_d_qk and d_qk is not None and kv_d_qk is not None:
        yield find.d_qk_mismatch(d_qk, kv_d_qk)
    if h_q == 0:
        yield error("no-heads", shape=tuple(q.shape))
    if d_qk is not None and d_qk not in D_QK_SUPPORTED:
        yield error("d-qk-unsupported-general", d_qk=d_qk)
    if s_q is not None:
        rows = _is_rows(index_shape) and index_shape[0] == s_q
        if not rows or index_shape[-1] == 0:
            yield error("indices-shape-general", s_q=s_q, shape=tuple(index_shape))
    if indices.dtype is not _INT32:
        yield find.not_int32(indices)


def _is_rows(shape: torch.Size) -> bool:
    """Whether a shape is (rows, columns) or (rows, 1, columns)."""
    return len(shape) == 2 or (len(shape) == 3 and shape[1] == 1)


def _prefill_scales(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_scale: Any,
    kv_scale: Any,
    s_q: int | None,
    h_q: int | None,
) -> Violations:
    """Scales beside an FP8 kv: q's may be left out where q is still to be quantised."""
    device = q.device
    if q_scale is not None:
        yield from _scale_kind("q_scale", q_scale, device)
        if isinstance(q_scale, _Tensor) and s_q is not None and q_scale.layout is _STRIDED:
            shape, dtype = tuple(q_scale.shape), q_scale.dtype
            fits = q_scale.numel() == 1 or shape == (s_q,) or shape == (s_q, h_q)
            if dtype is not _FLOAT32 or not fits:
                yield error("q-scale-shape", s_q=s_q, h_q=h_q, shape=shape, dtype=dtype)
    elif q.dtype is E4M3:
        yield _scale_missing("q_scale", "q", q)
    if kv_scale is None:
        yield _scale_missing("kv_scale", "kv", kv)
        return
    yield from _scale_kind("kv_scale", kv_scale, device)
    if isinstance(kv_scale, _Tensor) and kv.ndim > 0 and kv_scale.layout is _STRIDED:
        shape, s_kv = tuple(kv_scale.shape), kv.shape[0]
        if kv_scale.dtype is not _FLOAT32 or (kv_scale.numel() != 1 and shape != (s_kv,)):
            yield error("kv-scale-shape", s_kv=s_kv, shape=shape, dtype=kv_scale.dtype)


def _scale_kind(name: str, scale: Any, device: torch.device) -> Violations:
    """A positive number, or a tensor in its place."""
    if isinstance(scale, _Tensor):
        if scale.layout is not _STRIDED:
            yield find.not_strided(name, scale)
            return
        yield from find.place(name, scale, device)
    elif not find.is_float32_positive(scale):
        shown = repr(scale) if isinstance(scale, str) else scale  # '1' is no number
        yield error("scale-not-positive-number", name=name, value=shown)


def _scale_missing(name: str, tensor: str, scaled: torch.Tensor) -> SparseMLAError:
    return error("scale-missing", name=name, tensor=tensor, dtype=scaled.dtype)


def _scales_without_fp8(
    q: torch.Tensor, kv: torch.Tensor, q_scale: Any, kv_scale: Any
) -> Violations:
    """Scales beside a kv that has none: what they would multiply is not quantised."""
    for name, scale, tensor, scaled in (
        ("q_scale", q_scale, "q", q),
        ("kv_scale", kv_scale, "kv", kv),
    ):
        if scale is not None and scaled.dtype is not E4M3:
            yield error("scale-without-fp8", name=name, tensor=tensor, dtype=scaled.dtype)


def scale_tensor(scale: Any, q: torch.Tensor) -> torch.Tensor | None:
    """A number as a one-element tensor beside q; filled on the device, without waiting for it."""
    if scale is None or isinstance(scale, _Tensor):
        return scale
    return torch.full((1,), float(scale), dtype=torch.float32, device=q.device)


def allocate_outputs(
    q: torch.Tensor, s_q: int, h_q: int, out: Any, max_logits: Any, lse: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The outputs, those that the caller left out freshly allocated.

    Sizes as separate arguments and ``empty_like`` for the second array of a shape: each halves the
    price.
    """
    if out is None:
        out = torch.empty(s_q, h_q, D_V, dtype=torch.bfloat16, device=q.device)
    if max_logits is None:
        max_logits = torch.empty(s_q, h_q, dtype=torch.float32, device=q.device)
    if lse is None:
        lse = torch.empty_like(max_logits)
    return out, max_logits, lse
