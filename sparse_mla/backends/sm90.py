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
from ..params import D_QK_SUPPORTED
from . import sm90_quantize

if TYPE_CHECKING:
    from ..jit_driver import Kernel
    from ..params import PrefillProblem

NAME = "sm90"

PREFILL = {
    (d_qk, row_scales): jit.Variant(
        name=f"prefill-h64-d{d_qk}" + "-row-scales" * row_scales,
        source="sm90/prefill.cuh",
        entry="sparse_mla_prefill",
        defines={"D_QK": d_qk, "ROW_SCALES": int(row_scales)},
    )
    for d_qk in D_QK_SUPPORTED
    for row_scales in (False, True)
}
"""Kernels by d_qk and whether q has more than one scale, which costs 5% at d_qk 576."""

CAPABILITY = (9, 0)
HEADS = 64
"""Heads that one CTA computes (``kHeads``)."""
THREADS = 512
SHARED_BYTES = 232448
"""Dynamic shared memory of a launch: all a CTA can have, as one CTA has a multiprocessor."""

FLOAT32_MAX = torch.finfo(torch.float32).max

# struct PrefillParams of prefill.cuh: ten pointers, four strides, four sizes, sm_scale, two strides
# of q_scale, padding.
PARAMS = struct.Struct("<10Q4q4if2i4x")

_thread = threading.local()


def variants() -> tuple[jit.Variant, ...]:
    """Every kernel of this backend, for who compiles them ahead."""
    return (*PREFILL.values(), *sm90_quantize.KERNELS.values())


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
    if kv_scale.numel() != 1:
        return f"kv_scale has shape {tuple(kv_scale.shape)}: the kernels take one for all of kv"
    kv_stride = _kv_stride(problem)
    if (q.data_ptr() | kv.data_ptr() | q.stride(0) | q.stride(1) | kv_stride) & 15:
        return (
            "rows of q and kv must start at multiples of 16 bytes, got addresses "
            f"{q.data_ptr():#x} and {kv.data_ptr():#x}, strides {q.stride()} and {kv.stride()}"
        )
    if problem.out.data_ptr() & 3:
        return f"out must start at a multiple of 4 bytes, got {problem.out.data_ptr():#x}"
    if kv_stride >= 2**32 or problem.s_q * _groups(problem) >= 2**31:
        return f"kv stride {kv_stride} or s_q {problem.s_q} is past the kernels' range"
    return None


def quantize_queries(
    q: torch.Tensor, q_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What ``quantize.quantize_queries`` gives, in one launch; ``None`` where no kernel runs."""
    if not q.is_cuda or device_reason(q.get_device()) is not None:
        return None
    return sm90_quantize.quantize_queries(q, q_scale)


def run(problem: PrefillProblem) -> None:
    """Launch the kernel that fills the problem's outputs, on the current stream."""
    device = problem.q.get_device()
    assert problem.q_scale is not None  # by `refusal`
    kernel = jit.load(PREFILL[problem.d_qk, problem.q_scale.numel() != 1], device)
    grid = min(problem.s_q * _groups(problem), kernel.multiprocessors)
    if grid:
        _launch(kernel, grid, problem, device)


def _launch(kernel: Kernel, grid: int, problem: PrefillProblem, device: int) -> None:
    try:
        buffer, address = _thread.params
    except AttributeError:
        buffer = ctypes.create_string_buffer(PARAMS.size)
        address = ctypes.addressof(buffer)
        _thread.params = buffer, address
    q, sink, length = problem.q, problem.attn_sink, problem.topk_length
    assert problem.q_scale is not None  # both by `refusal`
    assert problem.kv_scale is not None
    PARAMS.pack_into(
        buffer,
        0,
        q.data_ptr(),
        problem.kv.data_ptr(),
        problem.indices.data_ptr(),
        problem.q_scale.data_ptr(),
        problem.kv_scale.data_ptr(),
        0 if sink is None else sink.data_ptr(),
        0 if length is None else length.data_ptr(),
        problem.out.data_ptr(),
        problem.max_logits.data_ptr(),
        problem.lse.data_ptr(),
        q.stride(0),
        q.stride(1),
        _kv_stride(problem),
        problem.indices.stride(0),
        problem.s_q,
        problem.s_kv,
        problem.h_q,
        problem.topk,
        min(problem.sm_scale, FLOAT32_MAX),
        *_q_scale_strides(problem.q_scale),
    )
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernel.launch((grid, 1, 1), (THREADS, 1, 1), SHARED_BYTES, stream, address)


def _q_scale_strides(q_scale: torch.Tensor) -> tuple[int, int]:
    """Elements from a token's scale to the next, and from a head's: 0 where they share one."""
    if q_scale.numel() == 1:
        return 0, 0
    return q_scale.stride(0), 0 if q_scale.ndim == 1 else 1


def _groups(problem: PrefillProblem) -> int:
    """Groups of 64 heads, the last perhaps not full."""
    return -(-problem.h_q // HEADS)


def _kv_stride(problem: PrefillProblem) -> int:
    """Bytes from a KV row to the next; that of a single row has no meaning."""
    return problem.kv.stride(0) if problem.s_kv > 1 else problem.d_qk
