"""What one writes first in torch: gather each query's rows, two batched products and a softmax.

In bfloat16 on a GPU, in float32 on a CPU. The cache is dequantised before the timing starts on a
GPU; on a CPU that is timed, as the ``cpu`` backend converts it too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...params import D_V
from ...testing import EXACT, Inputs, Tolerance
from . import Outputs, Peer
from .flash_mla import dequantised

BLOCK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""Of gathered rows that exist at a time."""


class GatherBmm(Peer):
    """Plain torch."""

    name = "torch-gather-bmm"
    what = "plain torch: gather, two bmm, softmax; bfloat16 on a GPU, float32 on a CPU"
    slow = True
    tolerance = Tolerance(out=0.02, absolute=0.05, relative=0.01)

    def prepare(self, inputs: Inputs, buffers: int) -> Callable[[], Outputs]:
        """The whole computation; on a GPU on bfloat16 copies, made here."""
        assert inputs.q_scale is not None
        assert inputs.kv_scale is not None
        if inputs.q.device.type == "cpu":
            self.tolerance = EXACT
            return lambda: _cpu(inputs)
        q = dequantised(inputs.q, inputs.q_scale)
        kv = dequantised(inputs.kv[:, 0], inputs.kv_scale)
        return lambda: _attend(q, kv, inputs, BLOCK_BYTES["cuda"])


def _cpu(inputs: Inputs) -> Outputs:
    assert inputs.q_scale is not None
    assert inputs.kv_scale is not None
    q = inputs.q.float() * inputs.q_scale
    kv = inputs.kv[:, 0].float() * inputs.kv_scale
    return _attend(q, kv, inputs, BLOCK_BYTES["cpu"])


def _attend(q: torch.Tensor, kv: torch.Tensor, inputs: Inputs, block_bytes: int) -> Outputs:
    indices = inputs.indices[:, 0]
    s_q, topk = indices.shape
    out = q.new_empty(s_q, q.shape[1], D_V, dtype=torch.bfloat16)
    lse = q.new_empty(s_q, q.shape[1], dtype=torch.float32)
    max_logits = torch.empty_like(lse)
    block = max(1, block_bytes // (topk * kv.shape[1] * kv.element_size()))
    for start in range(0, s_q, block):
        part = slice(start, min(start + block, s_q))
        chosen = indices[part]
        rows = kv[chosen.clamp(min=0).long()]
        logits = torch.bmm(q[part], rows.transpose(1, 2)).float() * inputs.sm_scale
        logits.masked_fill_((chosen < 0)[:, None], -torch.inf)
        max_logits[part] = logits.amax(dim=-1)
        lse[part] = logits.logsumexp(dim=-1)
        out[part] = torch.bmm(logits.softmax(dim=-1).to(rows.dtype), rows[:, :, :D_V])
    return Outputs(out, max_logits, lse)
