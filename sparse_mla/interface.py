"""The public attention operators: what they compute, checked and dispatched.

Plain tensors in eager mode go straight to the checks and the backend, or, where an earlier call was
like this one, to its launch (``prepared``). Everything else (``torch.compile``, fake and meta
tensors, tensor subclasses, tracing) goes through the custom ops of ``ops``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast, overload

import torch

from . import checks, merge, ops, prepared, quantize
from .params import D_V

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_Tensor = torch.Tensor
_F = TypeVar("_F", bound=Callable[..., Any])
_op = torch.ops.sparse_mla


def sparse_mla_q8kv8_prefill_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    q_scale: torch.Tensor,
    kv_scale: torch.Tensor,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Outputs:
    """FP8 sparse MLA prefill with SGLang's signature and contract.

        i            = indices[t,0,j]
        logit[t,h,j] = sm_scale * q_scale * kv_scale * dot(q[t,h,:], kv[i,:])
        p            = softmax over the valid slots j
        out[t,h,:]   = sum_j p[j] * kv_scale * kv[i,:512]
        max_logits   = max_j logit
        lse          = ln sum_j exp(logit)

    Slot j of query t is valid when ``0 <= i < s_kv`` and ``j < topk_length[t]``; any other slot
    contributes nothing, whatever it points to. A query without a valid slot gives out 0, max_logits
    -inf, lse +inf. A length outside ``[0, topk]`` is clamped; a scale that is not finite and
    positive gives NaN.

    Args:
        q: float8_e4m3fn [s_q, h_q, d_qk], contiguous; h_q a multiple of 64, d_qk 512 or 576.
        kv: float8_e4m3fn [s_kv, 1, d_qk], contiguous; the first 512 columns are the value too.
        indices: int32 [s_q, 1, topk], contiguous; topk a multiple of 128; -1 pads.
        sm_scale: multiplies every logit; finite, positive.
        q_scale: float32, one element, on q's device: real q = stored q * q_scale.
        kv_scale: likewise for kv. Both are read on the device.
        d_v: 512.
        attn_sink: float32 [h_q], natural-log logits; adds exp(sink) to the denominator of ``out``
            only.
        topk_length: int32 [s_q].
        out: bfloat16 [s_q, h_q, 512] to write into, contiguous; allocated where left out.
        max_logits: float32 [s_q, h_q], likewise.
        lse: float32 [s_q, h_q], likewise.

    Returns:
        ``(out, max_logits, lse)``; the statistics in natural units and natural log, the sink
        excluded. They record no gradient.

    Raises:
        ContractError: an argument breaks the contract; no output was written. Metadata alone
            decides it, so nothing waits for the GPU; ``SPARSE_MLA_DEBUG=1`` checks the data as
            well.
        BackendError: ``SPARSE_MLA_BACKEND`` names a backend that is unknown or refuses, or none
            runs here.

    The formula is that of DeepSeek sparse attention (DeepSeek-V3.2) over absorbed multi-head latent
    attention.
    """
    if type(d_v) is int and d_v == D_V and _is_eager():
        tensors = q, kv, indices, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse
        known = prepared.run("q8kv8", "auto", sm_scale, tensors)
        if known is not None:
            return known
    if _is_plain(q, kv, indices):
        return ops.run_q8kv8(
            q, kv, indices, sm_scale, q_scale, kv_scale, d_v, attn_sink, topk_length,
            out, max_logits, lse, keep=True,
        )  # fmt: skip
    given = (q, kv, indices, sm_scale, q_scale, kv_scale, d_v, attn_sink, topk_length)
    if not torch.compiler.is_compiling():
        found = checks.q8kv8_violations(*given, out, max_logits, lse, compare_memory=False)
        checks.require(found)
    if out is None and max_logits is None and lse is None:
        results: Outputs = _op.q8kv8_prefill(*given)
        return results
    buffers = checks.allocate_outputs(q, q.shape[0], q.shape[1], out, max_logits, lse)
    _op.q8kv8_prefill_out(*given, *buffers)
    return buffers


@overload
def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float | None = None,
    q_scale: float | torch.Tensor | None = None,
    kv_scale: float | torch.Tensor | None = None,
    *,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    return_stats: Literal[False] = False,
    backend: str = "auto",
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float | None = None,
    q_scale: float | torch.Tensor | None = None,
    kv_scale: float | torch.Tensor | None = None,
    *,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    return_stats: Literal[True],
    backend: str = "auto",
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Outputs: ...


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float | None = None,
    q_scale: float | torch.Tensor | None = None,
    kv_scale: float | torch.Tensor | None = None,
    *,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    return_stats: bool = False,
    backend: str = "auto",
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor | Outputs:
    """Sparse MLA prefill for any number of heads and slots, FP8 or not.

        i            = indices[t,j]
        logit[t,h,j] = sm_scale * dot(Q[t,h,:], K[i,:])
        p            = softmax over the valid slots j
        out[t,h,:]   = sum_j p[j] * K[i,:512]
        max_logits   = max_j logit
        lse          = ln sum_j exp(logit)

    where Q and K are q and kv times their scales. Which slots are valid, what a query without one
    gives, and what the sink does: as in :func:`sparse_mla_q8kv8_prefill_fwd`.

    Args:
        q: [s_q, h_q, d_qk] with any h_q >= 1, d_qk 512 or 576; float8_e4m3fn, bfloat16, float16 or
            float32. Beside an FP8 kv, a q of a float type is quantised to FP8 on its device (on
            Hopper in one launch), with the bytes that :func:`quantize_fp8` gives.
        kv: [s_kv, d_qk] or [s_kv, 1, d_qk], the same dtypes. One of a float type is computed
            unquantised, and wants a q of a float type and no scales.
        indices: int32 [s_q, topk] or [s_q, 1, topk] with any topk >= 1; -1 pads.
        sm_scale: multiplies every logit; finite, positive; ``1/sqrt(d_qk)`` where left out. Models
            that absorb their projections want the width before absorption (192 in DeepSeek-V3), so
            pass theirs.
        q_scale: real q = stored q * q_scale: a number, or float32 of one element, [s_q] or [s_q,
            h_q]. Beside a q of a float type, the scale to quantise it with; left out, each token
            and head has its own.
        kv_scale: likewise for kv: a number, or float32 of one element or [s_kv]. Wanted by an FP8
            kv.
        attn_sink: float32 [h_q], natural-log logits; adds exp(sink) to the denominator of ``out``
            only.
        topk_length: int32 [s_q]: slots of a query from its length on do not count.
        return_stats: return ``(out, max_logits, lse)``.
        backend: ``"auto"``, or the name of the one that must run it.
        out: bfloat16 [s_q, h_q, 512] to write into, contiguous; allocated where left out. Beside an
            unquantised kv also float32, which keeps what bfloat16 rounds away.
        max_logits: float32 [s_q, h_q], likewise.
        lse: float32 [s_q, h_q], likewise.

    The rows of q, kv and indices may lie apart (a slice of a larger buffer, a cache with gaps), as
    long as the elements of a row lie side by side. Scales, lengths and sinks are contiguous.

    Returns:
        ``out``, or ``(out, max_logits, lse)``; the statistics in natural units and natural log, the
        sink excluded.

    Raises:
        ContractError: an argument breaks the contract, or wants a gradient; no output was written.
        BackendError: the backend asked for is unknown or refuses, or none runs here.

    The formula is that of DeepSeek sparse attention (DeepSeek-V3.2) over absorbed multi-head latent
    attention.
    """
    if _is_eager():
        tensors = q, kv, indices, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse
        known = prepared.run("prefill", backend, sm_scale, tensors)
        if known is not None:
            return known if return_stats else known[0]
    if _is_plain(q, kv, indices):
        results = ops.run_prefill(
            q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length, backend,
            out, max_logits, lse, keep=True,
        )  # fmt: skip
        return results if return_stats else results[0]
    given = (q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length)
    if not torch.compiler.is_compiling():
        found = checks.prefill_violations(*given, out, max_logits, lse, compare_memory=False)
        checks.require(found)
    q_scale, kv_scale = checks.scale_tensor(q_scale, q), checks.scale_tensor(kv_scale, q)
    given = (q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length)
    if out is None and max_logits is None and lse is None:
        results = _op.prefill(*given, backend)
    else:
        results = checks.allocate_outputs(q, q.shape[0], q.shape[1], out, max_logits, lse)
        _op.prefill_out(*given, backend, *results)
    return results if return_stats else results[0]


def _through_quantize_op(
    x: torch.Tensor,
    *,
    per: str = "tensor",
    scale: float | torch.Tensor | None = None,
    absmax: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    results: tuple[torch.Tensor, torch.Tensor] = _op.quantize_fp8(
        x, per, checks.scale_tensor(scale, x), checks.scale_tensor(absmax, x)
    )
    return results


def _through_merge_op(outs: Any, lses: Any, max_logits: Any = None) -> tuple[torch.Tensor, ...]:
    maxima = None if max_logits is None else list(max_logits)
    results: Outputs = _op.merge_attention_states(list(outs), list(lses), maxima)
    return results[:2] if max_logits is None else results


def _or_op(eager: _F, op: Callable[..., Any]) -> _F:
    """``eager`` as a public function; traced or compiled, the opaque op, which gives the same bits.

    A compiler that saw the arithmetic might fuse it and round otherwise.
    """

    @functools.wraps(eager)
    def function(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        one = first[0] if isinstance(first, (list, tuple)) and first else first
        if isinstance(one, _Tensor) and not _is_plain(one, one, one):
            return op(*args, **kwargs)
        return eager(*args, **kwargs)

    return cast(_F, function)


quantize_fp8 = _or_op(quantize.quantize_fp8, _through_quantize_op)
merge_attention_states = _or_op(merge.merge_attention_states, _through_merge_op)


def _is_plain(q: Any, kv: Any, indices: Any) -> bool:
    """Whether nothing but eager execution on real tensors looks at this call."""
    return (
        _is_eager()
        and type(q) is _Tensor
        and type(kv) is _Tensor
        and type(indices) is _Tensor
        and not q.is_meta
    )


def _is_eager() -> bool:
    """Whether nothing traces, transforms or fakes what this thread does."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )
