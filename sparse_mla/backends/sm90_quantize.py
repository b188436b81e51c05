"""Float queries to FP8 on Hopper in one launch: host side of ``kernels/sm90/quantize.cuh``.

The results are those of ``quantize.quantize_queries``, bit for bit. Nothing here reads a tensor's
values, waits or changes the current device; what is allocated is what is returned.
"""

from __future__ import annotations

import ctypes
import struct

import torch

from .. import jit
from ..params import D_QK_SUPPORTED
from ..quantize import E4M3

ELEMENTS = {
    torch.bfloat16: "Bfloat16",
    torch.float16: "Float16",
    torch.float32: "Float32",
}
"""What quantize.cuh calls each dtype."""

KERNELS = {
    (d_qk, dtype): jit.Variant(
        name=f"quantize-d{d_qk}-{element.lower()}",
        source="sm90/quantize.cuh",
        entry="sparse_mla_quantize",
        defines={"D_QK": d_qk, "Q_ELEMENT": element},
    )
    for d_qk in D_QK_SUPPORTED
    for dtype, element in ELEMENTS.items()
}
"""Kernels by d_qk and dtype of q."""

THREADS = 256

# struct QuantizeParams of quantize.cuh: four pointers, two strides of q, two sizes, two strides of
# the given scales.
PARAMS = struct.Struct("<4Q2q2I2i")


def quantize_queries(
    q: torch.Tensor, q_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``q`` in FP8, contiguous, and the scales that give its values back.

    q is bfloat16, float16 or float32 [s_q, h_q, 512 or 576] on a Hopper GPU, rows dense, other
    strides free. ``q_scale`` is float32, one element, [s_q] or [s_q, h_q], dense; it is returned,
    one element as [1]. Where it is ``None`` each row gets its own: float32 [s_q, h_q].
    """
    s_q, h_q, d_qk = q.shape
    q = q.resolve_neg()
    stored = torch.empty((s_q, h_q, d_qk), dtype=E4M3, device=q.device)
    if q_scale is None:
        scale = torch.empty((s_q, h_q), dtype=torch.float32, device=q.device)
    else:
        scale = q_scale.detach().resolve_neg()
        scale = scale.reshape(1) if scale.numel() == 1 else scale
    if s_q and h_q:
        _launch(q, stored, scale, given=q_scale is not None)
    return stored, scale


def rows_of_a_cta(dtype: torch.dtype) -> int:
    """``kRows``: a row is read by 8 lanes where elements have two bytes, by 16 where four."""
    return THREADS // (4 * dtype.itemsize)


def _launch(q: torch.Tensor, stored: torch.Tensor, scale: torch.Tensor, given: bool) -> None:
    s_q, h_q, d_qk = q.shape
    device, size, address = q.get_device(), q.element_size(), scale.data_ptr()
    kernel = jit.load(KERNELS[d_qk, q.dtype], device)
    params = ctypes.create_string_buffer(
        PARAMS.pack(
            q.data_ptr(),
            address if given else 0,
            stored.data_ptr(),
            0 if given else address,
            # The stride of a single token or head has no meaning, and must not spoil the alignment.
            q.stride(0) * size if s_q > 1 else 0,
            q.stride(1) * size if h_q > 1 else 0,
            s_q * h_q,
            h_q,
            *scale_strides(scale),
        ),
        PARAMS.size,
    )
    grid = -(-s_q * h_q // rows_of_a_cta(q.dtype))
    stream = torch._C._cuda_getCurrentRawStream(device)
    kernel.launch((grid, 1, 1), (THREADS, 1, 1), 0, stream, ctypes.addressof(params))


def scale_strides(scale: torch.Tensor) -> tuple[int, int]:
    """Elements from a token's scale to the next, and from a head's: 0 where they share one."""
    if scale.numel() == 1:
        return 0, 0
    return (1, 0) if scale.ndim == 1 else (scale.shape[1], 1)
