"""The Hopper backend: host side of ``kernels/sm90``, which kernel runs a problem and its launch.

A launch is one struct of pointers, strides and sizes. The pointers come first: all that follows is
decided by the metadata, and packed once for problems that differ in addresses alone (`prepare`).
Nothing here reads a tensor's values, waits, allocates on the device or changes the current device;
the kernel runs on the current stream of the tensors' device.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable
from ctypes import c_char_p
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import jit
from ..jit_driver import Launch
from ..params import D_V
from . import sm90_plan, sm90_quantize
from .sm90_plan import KERNELS, Part

if TYPE_CHECKING:
    from ..params import Addresses, PrefillProblem

NAME = "sm90"

CAPABILITY = (9, 0)
SHARED_BYTES = 232448
"""Dynamic shared memory of a launch: all a CTA can have, as one CTA has a multiprocessor."""

FLOAT32_MAX = torch.finfo(torch.float32).max

# struct PrefillParams of problem.cuh: ten pointers; four strides, four sizes, sm_scale, two strides
# of q_scale, heads of the outputs, CTAs that share an item, padding.
POINTERS = struct.Struct("<10Q")
SIZES = struct.Struct("<4q4if4i4x")


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
    if any(x is not None and x.is_neg() for x in problem.tensors):
        return "a tensor is a view that negates (is_neg()): the kernels read memory as it lies"
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


def kernels(problem: PrefillProblem) -> list[str]:
    """Names of the kernels that `run` launches."""
    return [_variant(problem, part).name for part in plan(problem)]


def _variant(problem: PrefillProblem, part: Part) -> jit.Variant:
    q_scale, kv_scale = problem.q_scale, problem.kv_scale
    assert q_scale is not None  # both by `refusal`
    assert kv_scale is not None
    return part.variant(problem.d_qk, q_scale.numel() != 1, kv_scale.numel() != 1)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(problem: PrefillProblem) -> None:
    """Launch the kernels that fill the problem's outputs, on the current stream."""
    if problem.s_q:
        launched = prepare(problem).launch(problem.addresses)
        assert launched  # by `refusal`


def launch(problem: PrefillProblem, part: Part) -> None:
    """Launch the kernel that computes one part of the heads."""
    one = Prepared(problem.q.get_device(), (prepare_part(problem, part),))
    launched = one.launch(problem.addresses)
    assert launched  # by `refusal`


def prepare(problem: PrefillProblem) -> Prepared:
    """What launches every problem that differs from this one in its addresses alone."""
    parts = tuple(prepare_part(problem, part) for part in plan(problem))
    return Prepared(problem.q.get_device(), parts)


class PreparedPart(NamedTuple):
    """The launch of one part of a problem's heads."""

    put: Callable[[int, c_char_p], None]  # of its `Launch`
    first: tuple[int, ...]  # bytes from each address to what the part reads; empty: it starts there
    sizes: bytes  # of the struct, what follows the addresses


class Prepared:
    """The launches of a problem, which wait for its addresses."""

    __slots__ = ("_device", "_parts")

    def __init__(self, device: int, parts: tuple[PreparedPart, ...]) -> None:
        self._device, self._parts = device, parts

    def launch(self, addresses: Addresses) -> bool:
        """Launch on the current stream, for tensors that lie at ``addresses``; false, and nothing
        is launched, where `refusal` has something against them.
        """
        if (addresses[0] | addresses[1]) & 15 or addresses[7] & 3:  # q, kv; out
            return False
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        for put, first, sizes in self._parts:
            starts = map(operator.add, addresses, first) if first else addresses
            put(stream, c_char_p(POINTERS.pack(*starts) + sizes))
        return True


def prepare_part(problem: PrefillProblem, part: Part) -> PreparedPart:
    """The launch of the kernel that computes one part of the heads."""
    q, q_scale = problem.q, problem.q_scale
    assert q_scale is not None  # by `refusal`
    kernel = jit.load(_variant(problem, part), q.get_device())
    grid = (part.ctas(problem.s_q, kernel.multiprocessors), 1, 1)
    configured = Launch(kernel, grid, (part.threads, 1, 1), SHARED_BYTES, part.ctas_per_item)
    scale_strides = sm90_quantize.scale_strides(q_scale)
    head = part.first_head
    sink = 0 if problem.attn_sink is None else 4 * head
    first = (
        head * q.stride(1), 0, 0, 4 * head * scale_strides[1], 0, sink, 0,
        2 * D_V * head, 4 * head, 4 * head,
    )  # fmt: skip
    sizes = SIZES.pack(
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
    return PreparedPart(configured.put, first if head else (), sizes)


def _kv_stride(problem: PrefillProblem) -> int:
    """Bytes from a KV row to the next; that of a single row has no meaning."""
    return problem.kv.stride(0) if problem.s_kv > 1 else problem.d_qk
