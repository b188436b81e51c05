"""The operators as ``torch.library`` custom ops, and the one path that every call takes.

A call: record it (only with ``SPARSE_MLA_DUMP`` or a capture), check it, check its data (only with
``SPARSE_MLA_DEBUG=1``), run it on the backend that ``dispatch`` chooses.

Each attention operator is two ops: a functional one, and ``_out`` which writes into given buffers.
Their fake implementations make the same checks of metadata, so that a broken call fails while it is
traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from . import dispatch, environment, merge, prepared, quantize
from .checks import check_prefill, check_q8kv8
from .params import PrefillProblem
from .violations import E4M3

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_library = torch.library.Library("sparse_mla", "DEF")  # type: ignore[no-untyped-call]


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register ``sparse_mla::name``: one implementation for every device, one for fake tensors."""
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"sparse_mla::{name}", fake, lib=_library)


def run_q8kv8(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any,
    q_scale: Any,
    kv_scale: Any,
    d_v: Any,
    attn_sink: Any,
    topk_length: Any,
    out: Any = None,
    max_logits: Any = None,
    lse: Any = None,
    *,
    keep: bool = False,
) -> Outputs:
    """Check and run one call of ``sparse_mla_q8kv8_prefill_fwd``; ``keep``: for `prepared`."""
    if environment.any_diagnostics():
        arguments = {
            "q": q, "kv": kv, "indices": indices, "sm_scale": sm_scale, "q_scale": q_scale,
            "kv_scale": kv_scale, "d_v": d_v, "attn_sink": attn_sink, "topk_length": topk_length,
        }  # fmt: skip
        outputs = {"out": out, "max_logits": max_logits, "lse": lse}
        with _dumped("sparse_mla_q8kv8_prefill_fwd", arguments | outputs):
            problem = _with_debug(check_q8kv8(**arguments, **outputs))
            dispatch.run(problem)
            return _results(problem)
    problem = check_q8kv8(
        q, kv, indices, sm_scale, q_scale, kv_scale, d_v, attn_sink, topk_length,
        out, max_logits, lse,
    )  # fmt: skip
    name, launch = dispatch.run_prepared(problem)
    if keep and launch is not None:
        tensors = q, kv, indices, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse
        prepared.remember("q8kv8", "auto", sm_scale, tensors, problem, name, launch)
    return _results(problem)


def run_prefill(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: Any,
    q_scale: Any,
    kv_scale: Any,
    attn_sink: Any,
    topk_length: Any,
    backend: str,
    out: Any = None,
    max_logits: Any = None,
    lse: Any = None,
    *,
    keep: bool = False,
) -> Outputs:
    """Check and run one call of ``sparse_mla_prefill``; ``keep``: for `prepared`."""
    if environment.any_diagnostics():
        arguments = {
            "q": q, "kv": kv, "indices": indices, "sm_scale": sm_scale, "q_scale": q_scale,
            "kv_scale": kv_scale, "attn_sink": attn_sink, "topk_length": topk_length,
        }  # fmt: skip
        outputs = {"out": out, "max_logits": max_logits, "lse": lse}
        with _dumped("sparse_mla_prefill", arguments | outputs):
            problem = _with_quantised_q(check_prefill(**arguments, **outputs), backend)
            dispatch.run(_with_debug(problem), backend)
            return _results(problem)
    problem = check_prefill(
        q, kv, indices, sm_scale, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse
    )
    problem = _with_quantised_q(problem, backend)
    name, launch = dispatch.run_prepared(problem, backend)
    # What requires a gradient is refused or not by the thread's mode: it is asked each time.
    if keep and launch is not None and not dispatch.requires_grad(problem):
        tensors = q, kv, indices, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse
        prepared.remember("prefill", backend, sm_scale, tensors, problem, name, launch)
    return _results(problem)


def _results(problem: PrefillProblem) -> Outputs:
    return problem.out, problem.max_logits, problem.lse


def _with_debug(problem: PrefillProblem) -> PrefillProblem:
    if environment.is_set("SPARSE_MLA_DEBUG"):
        from .debug import check_data

        check_data(problem)
    return problem


@contextmanager
def _dumped(operator: str, arguments: dict[str, Any]) -> Iterator[None]:
    """Within ``callfile.dump_call`` and ``callfile.capture_call`` where they are asked for."""
    capturing = environment.captures_open or environment.read("SPARSE_MLA_CAPTURE")
    if not capturing and not environment.read("SPARSE_MLA_DUMP"):
        yield
        return
    from .callfile import capture_call, dump_call

    with dump_call(operator, arguments), capture_call(operator, arguments):
        yield


def _with_quantised_q(problem: PrefillProblem, backend: str) -> PrefillProblem:
    """The problem with an FP8 q: one of a float type is quantised where kv is FP8."""
    if problem.kv_scale is None or problem.q.dtype is E4M3:
        return problem
    given = problem.q, problem.q_scale
    quantised = dispatch.quantize_queries(*given, backend)
    q, q_scale = quantize.quantize_queries(*given) if quantised is None else quantised
    return replace(problem, q=q, q_scale=q_scale)


def _q8kv8_fake(*arguments: Any) -> Outputs:
    problem = check_q8kv8(*arguments, compare_memory=False)
    return problem.out, problem.max_logits, problem.lse


def _q8kv8_out(*arguments: Any) -> None:
    run_q8kv8(*arguments)


def _q8kv8_out_fake(*arguments: Any) -> None:
    check_q8kv8(*arguments, compare_memory=False)


def _prefill_fake(*arguments: Any) -> Outputs:
    problem = check_prefill(*arguments[:8], compare_memory=False)
    return problem.out, problem.max_logits, problem.lse


def _prefill_out(*arguments: Any) -> None:
    run_prefill(*arguments)


def _prefill_out_fake(*arguments: Any) -> None:
    check_prefill(*arguments[:8], *arguments[9:], compare_memory=False)


def _quantize_fp8(
    x: torch.Tensor, per: Any, scale: torch.Tensor | None, absmax: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    quantised, used = quantize.quantize_fp8(x, per=per, scale=scale, absmax=absmax)
    return quantised, used if scale is None else used.clone()  # an op never returns its input


def _merge(
    outs: list[torch.Tensor], lses: list[torch.Tensor], max_logits: list[torch.Tensor] | None
) -> Outputs:
    if max_logits is None:
        return *merge.merge_attention_states(outs, lses), lses[0].new_empty(0)
    return merge.merge_attention_states(outs, lses, max_logits)


_Q8KV8 = (
    "Tensor q, Tensor kv, Tensor indices, float sm_scale, Tensor q_scale, Tensor kv_scale, "
    "int d_v, Tensor? attn_sink, Tensor? topk_length"
)
_PREFILL = (
    "Tensor q, Tensor kv, Tensor indices, float? sm_scale, Tensor? q_scale, Tensor? kv_scale, "
    "Tensor? attn_sink, Tensor? topk_length, str backend"
)
_BUFFERS = "Tensor(a!) out, Tensor(b!) max_logits, Tensor(c!) lse"
_RESULTS = "(Tensor out, Tensor max_logits, Tensor lse)"

_define("q8kv8_prefill", f"({_Q8KV8}) -> {_RESULTS}", run_q8kv8, _q8kv8_fake)
_define("q8kv8_prefill_out", f"({_Q8KV8}, {_BUFFERS}) -> ()", _q8kv8_out, _q8kv8_out_fake)
_define("prefill", f"({_PREFILL}) -> {_RESULTS}", run_prefill, _prefill_fake)
_define("prefill_out", f"({_PREFILL}, {_BUFFERS}) -> ()", _prefill_out, _prefill_out_fake)

# These two are plain torch that reads no data: they are their own fake implementation.
_define(
    "quantize_fp8",
    "(Tensor x, str per, Tensor? scale, Tensor? absmax) -> (Tensor x_fp8, Tensor scale_used)",
    _quantize_fp8,
    _quantize_fp8,
)
_define(
    "merge_attention_states",
    "(Tensor[] outs, Tensor[] lses, Tensor[]? max_logits) -> "
    "(Tensor out, Tensor lse, Tensor max_logits)",
    _merge,
    _merge,
)
