"""The Hopper backend: host side of ``kernels/sm90``, which kernel runs a problem and its launch.

A launch is one struct of pointers, strides and sizes, packed into a buffer of the calling thread.
Nothing here reads a tensor's values, waits, allocates or changes the current device; the kernel
runs on the current stream of the tensors' device.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import TYPE_CHECKING

import torch

from .. import jit
from ..params import D_V
from . import sm90_plan, sm90_quantize
from .sm90_plan import KERNELS, Part

if TYPE_CHECKING:
    from ..params import PrefillProblem

NAME = "sm90"

CAPABILITY = (9, 0)
SHARED_BYTES = 232448
"""Dynamic shared memory of a launch: all a CTA can have, as one CTA has a multiprocessor."""

FLOAT32_MAX = torch.finfo(torch.float32).max

# struct PrefillParams of problem.cuh: ten pointers, four strides, four sizes, sm_scale, two strides
# of q_scale, heads of the outputs, CTAs that share an item, padding.
PARAMS = struct.Struct("<10Q4q4if4i4x")

_thread = threading.local()


def variants() -> tuple[jit.Variant, ...]:
    """Every kernel of this backend, for who compiles them ahead."""
    return (*KERNELS.values(), *sm90_quantize.KERNELS.values())


def available() -> str | None:
    """Why this backend can run nothing on this machine; ``None``: it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    reasons = [device_reason(index) for index in range(torch.cuda.device_count())]
    return None if None in reasons else "; ".join(str(reason) for reason in reasons)


@functools.cache
def device_reason(index: int) -> str | None:
    """Why the kernels cannot run on a CUDA device; ``None``: they can."""
    capability = torch.cuda.get_device_capability(index)
    if capability != CAPABILITY:
        found, needed = (f"{major}.{minor}" for major, minor in (capability, CAPABILITY))
        return f"cuda:{index} has compute capability {found}, the kernels need {needed} (Hopper)"
    return jit.available()


def refusal(problem: PrefillProblem) -> str | None:
    """Why this backend does not run ``problem``, or ``None``."""
    q, kv, q_scale, kv_scale = problem.q, problem.kv, problem.q_scale, problem.kv_scale
    if not q.is_cuda:
        return f"tensors are on {q.device}, not on a CUDA device"
    reason = device_reason(q.get_device())
    if reason is not None:
        return reason
    if q_scale is None or kv_scale is None:
        return f"q is {q.dtype} and kv {kv.dtype}: the kernels multiply FP8 with scales"
    kv_stride = _kv_stride(problem)
    if (q.data_ptr() | kv.data_ptr() | q.stride(0) | q.stride(1) | kv_stride) & 15:
        return (
            "rows of q and kv must start at multiples of 16 bytes, got addresses "
            f"{q.data_ptr():#x} and {kv.data_ptr():#x}, strides {q.stride()} and {kv.stride()}"
        )
    if problem.out.data_ptr() & 3:
        return f"out must start at a multiple of 4 bytes, got {problem.out.data_ptr():#x}"
    if kv_stride >= 2**32:
        return f"rows of kv are {kv_stride} bytes apart, the kernels count them in 32 bits"
    return sm90_plan.past_range(problem.s_q, problem.h_q, problem.s_kv, problem.topk)


def quantize_queries(
    q: torch.Tensor, q_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What ``quantize.quantize_queries`` gives, in one launch; ``None`` where no kernel runs."""
    if not q.is_cuda or device_reason(q.get_device()) is not None:
        return None
    return sm90_quantize.quantize_queries(q, q_scale)


def plan(problem: PrefillProblem) -> tuple[Part, ...]:
    """The launches that compute ``problem`` on its device."""
    kv_scale = problem.kv_scale
    assert kv_scale is not None  # by `refusal`
    device = problem.q.get_device()
    return sm90_plan.plan(
        problem.s_q, problem.h_q, problem.topk, _multiprocessors(device), kv_scale.numel() != 1
    )


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(problem: PrefillProblem) -> None:
    """Launch the kernels that fill the problem's outputs, on the current stream."""
    if problem.s_q:
        for part in plan(problem):
            launch(problem, part)


def launch(problem: PrefillProblem, part: Part) -> None:
    """Launch the kernel that computes one part of the heads."""
    q, q_scale, kv_scale = problem.q, problem.q_scale, problem.kv_scale
    assert q_scale is not None  # both by `refusal`
    assert kv_scale is not None
    device = q.get_device()
    variant = part.variant(problem.d_qk, q_scale.numel() != 1, kv_scale.numel() != 1)
    kernel = jit.load(variant, device)
    try:
        buffer, address = _thread.params
    except AttributeError:
        buffer = ctypes.create_string_buffer(PARAMS.size)
        address = ctypes.addressof(buffer)
        _thread.params = buffer, address
    sink, length = problem.attn_sink, problem.topk_length
    first = part.first_head
    scale_strides = sm90_quantize.scale_strides(q_scale)
    PARAMS.pack_into(
        buffer,
        0,
        q.data_ptr() + first * q.stride(1),
        problem.kv.data_ptr(),
        problem.indices.data_ptr(),
        q_scale.data_ptr() + 4 * first * scale_strides[1],
        kv_scale.data_ptr(),
        0 if sink is None else sink.data_ptr() + 4 * first,
        0 if length is None else length.data_ptr(),
        problem.out.data_ptr() + 2 * D_V * first,
        problem.max_logits.data_ptr() + 4 * first,
        problem.lse.data_ptr() + 4 * first,
        q.stride(0),
        q.stride(1),
        _kv_stride(problem),
        problem.indices.stride(0),
        problem.s_q,
        problem.s_kv,
        part.heads,
        problem.topk,
        min(problem.sm_scale, FLOAT32_MAX),
        *scale_strides,
        problem.h_q,
        part.ctas_per_item,
    )
    grid = (part.ctas(problem.s_q, kernel.multiprocessors), 1, 1)
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernel.launch(grid, (part.threads, 1, 1), SHARED_BYTES, stream, address, part.ctas_per_item)


def _kv_stride(problem: PrefillProblem) -> int:
    """Bytes from a KV row to the next; that of a single row has no meaning."""
    return problem.kv.stride(0) if problem.s_kv > 1 else problem.d_qk
