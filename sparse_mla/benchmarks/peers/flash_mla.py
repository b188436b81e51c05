"""FlashMLA's sparse prefill in bfloat16, from the wheel ``sgl-flash-mla`` (module ``flash_mla``).

Its Hopper kernels are called with ``use_legacy=True``. It takes bfloat16 q and kv: the same values
as ours, dequantised before the timing starts, so it reads twice the bytes. It takes 64 or 128
heads; fewer are padded with zeros to 64, as a caller would have to, and counted as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...testing import Inputs, Tolerance
from . import Outputs, Peer, reason

HEADS = (64, 128)


class FlashMLA(Peer):
    """``flash_mla.flash_mla_sparse_fwd(..., use_legacy=True)``."""

    name = "flash-mla-bf16"
    what = "FlashMLA sparse prefill, bfloat16, from the wheel sgl-flash-mla"
    tolerance = Tolerance(out=0.012, absolute=4e-3, relative=2e-3)

    def unavailable(self, device: torch.device) -> str | None:
        """Whether the wheel is there, loads, and has kernels for this card."""
        if device.type != "cuda":
            return f"computes on cuda, this run is on {device.type}"
        try:
            import flash_mla
        except Exception as fault:  # a missing library of the wheel's is an answer too
            return f"cannot import flash_mla: {reason(fault)}"
        if not hasattr(flash_mla, "flash_mla_sparse_fwd"):
            return "flash_mla has no flash_mla_sparse_fwd"
        if not getattr(flash_mla, "has_legacy", lambda: False)():
            return "this flash_mla has no kernels for Hopper: they are in the wheel sgl-flash-mla"
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"its legacy kernels are for compute capability 9.0, this is {capability}"
        return None

    def refusal(self, inputs: Inputs) -> str | None:
        """More heads than it has kernels for."""
        heads = inputs.q.shape[1]
        return f"takes 64 or 128 heads, got {heads}" if heads > max(HEADS) else None

    def prepare(self, inputs: Inputs, buffers: int) -> Callable[[], Outputs]:
        """The operator on bfloat16 copies, made here."""
        from flash_mla import flash_mla_sparse_fwd as operator

        assert inputs.q_scale is not None
        assert inputs.kv_scale is not None
        heads = inputs.q.shape[1]
        padded = next(count for count in HEADS if count >= heads)
        q = inputs.q.new_zeros(len(inputs.q), padded, inputs.q.shape[2], dtype=torch.bfloat16)
        q[:, :heads] = dequantised(inputs.q, inputs.q_scale)
        kv = dequantised(inputs.kv, inputs.kv_scale)

        def call() -> Outputs:
            out, max_logits, lse = operator(q, kv, inputs.indices, inputs.sm_scale, use_legacy=True)
            return Outputs(out[:, :heads], max_logits[:, :heads], lse[:, :heads])

        return call


def dequantised(stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 rows in bfloat16, exactly where the scale is a power of two; converted in parts."""
    found = torch.empty(stored.shape, dtype=torch.bfloat16, device=stored.device)
    for part, into in zip(torch.split(stored, 1024), torch.split(found, 1024), strict=True):
        into.copy_(part.float() * scale)
    return found
