"""Memory that shows when it is read or written by mistake."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .cases import Inputs

GUARD_BYTES = 4096
"""On either side of a guarded tensor; a multiple of every alignment in use."""

NAN_BYTE = 0xFF
"""NaN in e4m3, and in bfloat16, float16 and float32 when repeated."""


def poisoned_(x: torch.Tensor) -> torch.Tensor:
    """Fill ``x`` in place with NaN, whatever float type it has, and return it."""
    x.view(torch.uint8).fill_(NAN_BYTE)
    return x


@dataclass(frozen=True)
class Guarded:
    """A tensor with NaN bytes before and after it in one allocation."""

    tensor: torch.Tensor
    buffer: torch.Tensor  # uint8: guard, the tensor's bytes, guard

    def check(self) -> None:
        """Raise AssertionError when a guard byte was overwritten."""
        for name, part in (
            ("before", self.buffer[:GUARD_BYTES]),
            ("after", self.buffer[-GUARD_BYTES:]),
        ):
            changed = int((part != NAN_BYTE).sum())
            if changed:
                raise AssertionError(f"{changed} guard bytes {name} the tensor were overwritten")


def guarded_like(x: torch.Tensor, *, offset: int = 0) -> Guarded:
    """A contiguous copy of ``x`` between guards; ``offset`` elements shift it off its alignment."""
    size = x.numel() * x.element_size()
    shift = offset * x.element_size()
    buffer = torch.full(
        (2 * GUARD_BYTES + shift + size,), NAN_BYTE, dtype=torch.uint8, device=x.device
    )
    start = GUARD_BYTES + shift
    tensor = buffer[start : start + size].view(x.dtype).view(x.shape)
    tensor.copy_(x)
    return Guarded(tensor, buffer)


def poison_unselected(inputs: Inputs) -> Inputs:
    """The same inputs with NaN in every KV row, and token scale, that no valid slot selects."""
    s_kv, topk = inputs.kv.shape[0], inputs.indices.shape[-1]
    index = inputs.indices.reshape(-1, topk).long()
    valid = (index >= 0) & (index < s_kv)
    if inputs.topk_length is not None:
        valid &= torch.arange(topk, device=index.device) < inputs.topk_length[:, None]
    unselected = torch.ones(s_kv, dtype=torch.bool, device=index.device)
    unselected[index[valid]] = False

    kv = inputs.kv.clone()
    kv.view(torch.uint8)[unselected] = NAN_BYTE
    kv_scale = inputs.kv_scale
    if kv_scale is not None and kv_scale.numel() == s_kv > 1:
        kv_scale = kv_scale.masked_fill(unselected, torch.nan)
    return replace(inputs, kv=kv, kv_scale=kv_scale)
