"""A small call for the tests of call files and of the commands that read them."""

from __future__ import annotations

from typing import Any

import torch

from sparse_mla.callfile import STRICT, Call

FP8 = torch.float8_e4m3fn


def small_call(**changes: Any) -> Call:
    """A call of the strict operator that meets its contract; ``changes`` replace tensors."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "q": torch.randn(2, 64, 576, generator=generator).to(FP8),
        "kv": torch.randn(5, 1, 576, generator=generator).to(FP8),
        "indices": torch.randint(-1, 5, (2, 1, 128), generator=generator, dtype=torch.int32),
        "q_scale": torch.tensor([0.5]),
        "kv_scale": torch.tensor([0.25]),
        "attn_sink": torch.randn(64, generator=generator),
        "topk_length": torch.tensor([100, 128], dtype=torch.int32),
    }
    tensors.update(changes)
    arguments = {"sm_scale": 0.1147213867929261, "d_v": 512}
    return Call(STRICT, tensors, arguments, {"model": "DeepSeek-V3.2", "layer": "3"})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
