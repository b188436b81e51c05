"""Calls that are like an earlier one: what metadata decides is worked out once.

A call that was checked and run leaves its launch behind, ready but for the addresses, where the
backend that ran it can give one (``Backend.prepare``). A later call takes it when everything agrees
that a check or the choice of a backend reads. What is left to look at are the addresses: whether
outputs overlap anything, and whether the backend takes them. Any doubt sends the call through all
checks again, which find what is wrong and say it.

The metadata of the tensors are compared by `TensorGuards`, with which ``torch.compile`` finds out
whether a graph that it compiled fits a call: class, dispatch keys (kind of device, layout, views
that negate or conjugate, inference tensors), dtype, device, sizes and strides. To read as much from
Python takes as long as a launch. Where torch has no such class, or one that is asked otherwise,
nothing is prepared.

Only for plain eager calls: what traces, transforms or fakes operations must find the op.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from operator import add, attrgetter, itemgetter, le
from typing import Any, NamedTuple

import torch

from . import dispatch, environment
from .checks import allocate_outputs
from .params import D_V, PrefillProblem
from .violations import size

guards: Any
try:
    from torch._C._dynamo import guards

    TensorGuards, empty_strided_cuda = guards.TensorGuards, guards._empty_strided_cuda
except (ImportError, AttributeError):
    guards = None

MOST = 16
"""Calls that a thread remembers. For a new one the last is given up; one that is used while in the
latter half goes to the front, so that those in use stay."""

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Tensors = tuple[Any, Any, Any, Any, Any, Any, Any, Any, Any, Any]
"""What a call was given, in the order of ``params.Addresses``."""
Q_SCALE, KV_SCALE, OUT = 3, 4, 7
"""Places in that order; all outputs come last."""

_CLASSES = (torch.Tensor, torch.nn.Parameter)
"""A tensor of another class may answer otherwise than its metadata say."""

_is_nested = attrgetter("is_nested")


class _Call(NamedTuple):
    """What is kept of a call; no tensor is."""

    kind: tuple[Any, ...]  # what is no tensor, and which tensors there are
    given: Callable[[Tensors], tuple[Any, ...]]  # those that there are
    alike: Callable[..., bool]  # whether their metadata are those of the call's
    sizes: tuple[int, ...]  # bytes of each, gaps included; empty where no output is given
    new_out: tuple[Any, ...]  # size, strides and dtype of outputs to allocate
    new_statistic: tuple[Any, ...]
    prepared: dispatch.Prepared
    backend: str
    apart: list[tuple[int, ...]]  # one item: the latest addresses at which nothing overlapped


class _Calls(threading.local):
    """New ones first. Each thread has its own, which no other can delay or drive out."""

    newest: tuple[_Call, ...] = ()

    def to_front(self, place: int) -> None:
        """Make the call at a place the newest."""
        before, call, behind = self.newest[:place], self.newest[place], self.newest[place + 1 :]
        self.newest = (call, *before, *behind)


_calls = _Calls()


def run(operator: str, backend: str, sm_scale: Any, tensors: Tensors) -> Outputs | None:
    """Run a call that is like a remembered one; ``None``, with nothing written, where none is."""
    kind = _kind(operator, backend, sm_scale, tensors)
    given: tuple[Any, ...] = ()
    for place, call in enumerate(_calls.newest):
        if call.kind == kind:
            if not given:  # the same for every call of a kind
                given = call.given(tensors)
                if not _all_tensors(given):
                    return None
            if call.alike(*given):
                if place >= MOST // 2:
                    _calls.to_front(place)
                break
    else:
        return None
    q, kv, indices, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse = tensors
    if out is None or max_logits is None or lse is None:
        out, max_logits, lse = _outputs(call, q, out, max_logits, lse)
    addresses = (
        q.data_ptr(),
        kv.data_ptr(),
        indices.data_ptr(),
        q_scale.data_ptr(),
        kv_scale.data_ptr(),
        0 if attn_sink is None else attn_sink.data_ptr(),
        0 if topk_length is None else topk_length.data_ptr(),
        out.data_ptr(),
        max_logits.data_ptr(),
        lse.data_ptr(),
    )
    if call.sizes and addresses != call.apart[0]:
        if not _apart(addresses, call.sizes):
            return None
        call.apart[0] = addresses
    if not call.prepared.launch(addresses):
        return None
    dispatch.ran(call.backend)
    return out, max_logits, lse


def _kind(operator: str, backend: str, sm_scale: Any, tensors: Tensors) -> tuple[Any, ...] | None:
    """What of a call is no tensor, and which tensors there are; ``None``: of no remembered kind."""
    _, _, _, q_scale, kv_scale, attn_sink, topk_length, out, max_logits, lse = tensors
    if not ((type(sm_scale) is float or sm_scale is None) and type(backend) is str):
        return None  # what equals a number or a name need not be one
    if not environment.untouched():
        if environment.any_diagnostics():
            return None
        backend = environment.forced_backend() if backend == "auto" else backend
    return (
        operator,
        backend,
        sm_scale,
        q_scale is kv_scale,
        attn_sink is None,
        topk_length is None,
        out is None,
        max_logits is None,
        lse is None,
    )


def _all_tensors(given: tuple[Any, ...]) -> bool:
    """Whether the guards can be asked: at a nested tensor, which has no strides, they abort."""
    try:
        return True not in map(_is_nested, given)
    except Exception:  # whatever stands in a tensor's place: the checks say what is wrong with it
        return False


def _outputs(call: _Call, q: torch.Tensor, out: Any, max_logits: Any, lse: Any) -> Outputs:
    """``checks.allocate_outputs``, on a GPU at half the price.

    The function is the one with which compiled graphs allocate; it knows the current device only.
    """
    if not q.is_cuda or torch._C._cuda_getDevice() != q.get_device():
        s_q, h_q = call.new_statistic[0]
        return allocate_outputs(q, s_q, h_q, out, max_logits, lse)
    if out is None:
        out = empty_strided_cuda(*call.new_out)
    if max_logits is None:
        max_logits = empty_strided_cuda(*call.new_statistic)
    if lse is None:
        lse = empty_strided_cuda(*call.new_statistic)
    return out, max_logits, lse


def _apart(addresses: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Whether no two tensors share a byte: each ends before the next one starts."""
    ends = sorted(map(add, addresses, sizes))
    return all(map(le, ends, sorted(addresses)[1:]))


def remember(
    operator: str,
    backend: str,
    sm_scale: Any,
    tensors: Tensors,
    problem: PrefillProblem,
    name: str,
    prepared: dispatch.Prepared,
) -> None:
    """Keep what backend ``name`` prepared for a call, where one like it may follow."""
    kind = _kind(operator, backend, sm_scale, tensors)
    s_q, h_q = problem.s_q, problem.h_q
    if kind is None or guards is None:
        return
    places, sizes = [], []
    for i, (x, used) in enumerate(zip(tensors, problem.tensors, strict=True)):
        # A tensor that is both scales is compared once: the guards take no tensor twice.
        if x is None or (i == KV_SCALE and x is tensors[Q_SCALE]):
            sizes.append(0)
        elif used is x and type(x) in _CLASSES:
            places.append(i)
            sizes.append(size(tensors[i]))
        else:
            return  # made for this call: q in FP8, a number as a tensor; or of a class of its own
    given = itemgetter(*places)
    present = given(tensors)
    if places[-1] < OUT:
        sizes.clear()
    try:
        alike = TensorGuards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    except (TypeError, RuntimeError):  # of a torch newer than this
        return
    if not alike(*present) or (sizes and not _apart(problem.addresses, tuple(sizes))):
        return  # inputs share memory: whether outputs do as well is looked at each time
    call = _Call(
        kind,
        given,
        alike,
        tuple(sizes),
        ((s_q, h_q, D_V), (h_q * D_V, D_V, 1), torch.bfloat16),
        ((s_q, h_q), (h_q, 1), torch.float32),
        prepared,
        name,
        [()],
    )
    _calls.newest = (call, *_calls.newest[: MOST - 1])


def forget() -> None:
    """Remember no call of this thread."""
    _calls.newest = ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)  # where kernels must be loaded anew
