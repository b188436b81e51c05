"""SGLang's own ``sparse_mla_q8kv8_prefill_fwd``, whose name and contract our operator has."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ...integrations import sglang
from ...testing import Inputs
from . import Outputs, Peer, reason
from .ours import FP8_P, STRICT_HEADS, STRICT_SLOTS, is_strict


class SGLang(Peer):
    """The operator from an installed sglang, wherever its release keeps it."""

    name = "sglang-q8kv8"
    what = f"SGLang's {sglang.NAME}, FP8 q, kv and probabilities"
    tolerance = FP8_P

    def unavailable(self, device: torch.device) -> str | None:
        """Whether sglang is there and its operator still its own."""
        if device.type != "cuda":
            return f"computes on cuda, this run is on {device.type}"
        if sglang.installed() is not None:
            return "our operator stands in its place: sparse_mla.integrations.sglang.uninstall()"
        try:
            self._operator()
        except Exception as fault:  # a missing library of sglang's is an answer too
            return f"cannot import it from sglang: {reason(fault)}"
        return None

    def _operator(self) -> Any:
        faults: list[Exception] = []
        for module in sglang.MODULES:
            try:
                operator = getattr(
                    importlib.import_module(f"sglang.{module.removeprefix('sglang.')}"), sglang.NAME
                )
            except Exception as fault:
                faults.append(fault)
                continue
            return operator
        raise faults[0]

    def refusal(self, inputs: Inputs) -> str | None:
        """Sizes that its contract refuses."""
        if is_strict(inputs):
            return None
        return (
            f"takes heads in multiples of {STRICT_HEADS} and topk in multiples of "
            f"{STRICT_SLOTS}, got {inputs.q.shape[1]} and {inputs.indices.shape[-1]}"
        )

    def prepare(self, inputs: Inputs, buffers: int) -> Callable[[], Outputs]:
        """The operator as it is; it allocates its outputs."""
        operator = self._operator()
        return lambda: Outputs(
            *operator(
                inputs.q, inputs.kv, inputs.indices, inputs.sm_scale,
                inputs.q_scale, inputs.kv_scale,
            )
        )  # fmt: skip
