"""Our strict operator on heads padded to 64: what few heads cost a caller who has to pad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ... import dispatch
from ...testing import Inputs
from . import Outputs, Peer
from .ours import STRICT_HEADS, STRICT_SLOTS, Ours


class Padded(Peer):
    """``sparse_mla_q8kv8_prefill_fwd`` on a q with heads of zeros, which are not counted.

    On the backend that the strict operator tries first, in whichever kernels suit so many heads.
    """

    name = "strict-padded"
    what = "our strict operator, heads padded to multiples of 64"
    on_request = True

    def _first(self, device: torch.device) -> Ours:
        return Ours(dispatch.order(device.type)[0])

    def unavailable(self, device: torch.device) -> str | None:
        """What the backend behind it says."""
        return self._first(device).unavailable(device)

    def refusal(self, inputs: Inputs) -> str | None:
        """Heads that need no padding, slots that the strict operator refuses, or the backend's."""
        h_q, topk = inputs.q.shape[1], inputs.indices.shape[-1]
        if h_q % STRICT_HEADS == 0:
            return f"there is nothing to pad: {h_q} heads"
        if topk % STRICT_SLOTS:
            return f"takes topk in multiples of {STRICT_SLOTS}, got {topk}"
        return self._first(inputs.q.device).refusal(padded(inputs))

    def prepare(self, inputs: Inputs, buffers: int) -> Callable[[], Outputs]:
        """The operator on a padded copy of q, made here; what it gives for the heads there are."""
        first, h_q = self._first(inputs.q.device), inputs.q.shape[1]
        self.tolerance = first.tolerance
        call = first.prepare(padded(inputs), buffers)

        def cut() -> Outputs:
            out, max_logits, lse = call()
            assert max_logits is not None  # both: ours have statistics
            assert lse is not None
            return Outputs(out[:, :h_q], max_logits[:, :h_q], lse[:, :h_q])

        return cut

    def kernel(self, inputs: Inputs) -> str | None:
        """Those that run the padded heads."""
        return self._first(inputs.q.device).kernel(padded(inputs))


def padded(inputs: Inputs) -> Inputs:
    """The same inputs with heads of zeros up to the next multiple of 64."""
    s_q, h_q, d_qk = inputs.q.shape
    full = -(-h_q // STRICT_HEADS) * STRICT_HEADS
    q = inputs.q.new_zeros(s_q, full, d_qk)
    q[:, :h_q] = inputs.q
    return replace(inputs, q=q)
