"""Ours on each backend: the strict operator where its contract allows, else the general one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ... import dispatch, interface
from ...testing import CPU_BFLOAT16, EXACT, Inputs, Tolerance, allocate_outputs, make_problem
from . import Outputs, Peer, reason

FP8_P = Tolerance(out=0.04, absolute=1.6e-2, relative=1e-3)
"""Probabilities in FP8 leave a relative L2 of 0.03 at most at logits of standard deviation 1, and
the 14 bits of FP8 wgmma's sums 8e-3 of a logit."""

WHAT = {
    "sm90": ("FP8 q, kv and probabilities, Hopper kernel", FP8_P),
    "portable": ("FP8 q and kv, Triton kernel", FP8_P),
    "cpu": ("FP8 q and kv, products in bfloat16 or float32", CPU_BFLOAT16),
    "reference": ("float64, one query at a time", EXACT),
}
DEVICES = {"sm90": "cuda", "portable": "cuda", "cpu": "cpu"}
STRICT_HEADS, STRICT_SLOTS = 64, 128


class Ours(Peer):
    """One of our backends, called through the public operators."""

    ours = True

    def __init__(self, backend: str) -> None:
        self.name = backend
        self.what, self.tolerance = WHAT.get(backend, ("FP8 q and kv", FP8_P))
        self.slow = self.on_request = backend == "reference"

    def unavailable(self, device: torch.device) -> str | None:
        """The backend's own reason, or that it computes elsewhere."""
        wanted = DEVICES.get(self.name, device.type)
        if wanted != device.type:
            return f"computes on {wanted}, this run is on {device.type}"
        try:
            return dispatch.load(self.name).available()
        except Exception as fault:  # a broken installation of what it needs is an answer too
            return reason(fault)

    def refusal(self, inputs: Inputs) -> str | None:
        """The backend's own reason."""
        return dispatch.load(self.name).refusal(make_problem(inputs))

    def prepare(self, inputs: Inputs, buffers: int) -> Callable[[], Outputs]:
        """The public operator, into buffers that hold NaN."""
        strict = is_strict(inputs) and self._is_first(inputs.q.device)
        ring = itertools.cycle([allocate_outputs(inputs) for _ in range(buffers)])  # full of NaN
        call = self._strict if strict else self._general
        return lambda: Outputs(*call(inputs, next(ring)))

    def _is_first(self, device: torch.device) -> bool:
        """Whether the strict operator, which takes no backend's name, picks this one."""
        return dispatch.order(device.type)[0] == self.name

    def _strict(self, inputs: Inputs, outputs: Any) -> Any:
        out, max_logits, lse = outputs
        return interface.sparse_mla_q8kv8_prefill_fwd(
            **vars(inputs), out=out, max_logits=max_logits, lse=lse
        )

    def _general(self, inputs: Inputs, outputs: Any) -> Any:
        out, max_logits, lse = outputs
        return interface.sparse_mla_prefill(
            **vars(inputs),
            return_stats=True, out=out, max_logits=max_logits, lse=lse, backend=self.name,
        )  # fmt: skip

    def kernel(self, inputs: Inputs) -> str | None:
        """Which kernels run it, where the backend has a ``plan`` that says so."""
        plan = getattr(dispatch.load(self.name), "plan", None)
        return None if plan is None else "; ".join(map(str, plan(make_problem(inputs))))


def is_strict(inputs: Inputs) -> bool:
    """Whether the strict operator takes these sizes."""
    h_q, topk = inputs.q.shape[1], inputs.indices.shape[-1]
    return h_q % STRICT_HEADS == 0 and topk % STRICT_SLOTS == 0


def backends() -> Iterator[Ours]:
    """A peer for each of our backends, fastest first."""
    return map(Ours, dispatch.BACKENDS)
