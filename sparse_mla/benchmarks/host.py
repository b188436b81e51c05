"""What one call costs the host, while the GPU has nothing else to do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import interface
from ..testing import allocate_outputs
from .inputs import make_set
from .shapes import Shape

SHAPE = Shape("none", 1, 1, 1024, 64, 576, 128, "uniform")
"""So little work that a call costs the host more than the GPU."""
CALLS, BATCHES = 200, 11


def cost(device: torch.device) -> dict[str, float]:
    """Microseconds of host time a call of the strict operator, by who allocates the outputs.

    The calls are alike, as those of a model's layers are: all but the first are `prepared`.
    """
    given = make_set(SHAPE, device, 0)
    names = ("q", "kv", "indices", "sm_scale", "q_scale", "kv_scale")
    arguments = [getattr(given, name) for name in names]
    out, max_logits, lse = allocate_outputs(given)

    def into() -> Any:
        return interface.sparse_mla_q8kv8_prefill_fwd(
            *arguments, out=out, max_logits=max_logits, lse=lse
        )

    return {
        "outputs_given_us": _median(into, device),
        "outputs_allocated_us": _median(
            lambda: interface.sparse_mla_q8kv8_prefill_fwd(*arguments), device
        ),
    }


def _median(call: Callable[[], Any], device: torch.device) -> float:
    spent = []
    for _ in range(BATCHES):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        spent.append((time.perf_counter() - begin) / CALLS)
    return statistics.median(spent[1:]) * 1e6
