"""The tensors of a shape, and enough sets of them that no timed call finds its rows in the L2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..params import D_V
from ..testing import Inputs
from . import patterns
from .shapes import Shape

E4M3 = torch.float8_e4m3fn
MAX_SETS = 8
SCALE = 0.5
"""q_scale and kv_scale: a power of two, so that bfloat16 holds the same values exactly."""


@dataclass(frozen=True)
class Workload:
    """A shape's inputs, several sets of them."""

    shape: Shape
    sets: tuple[Inputs, ...]
    selection: dict[str, Any]
    """What the first set's selection is like; see ``patterns.describe``."""
    touched_bytes: int
    """Bytes that the calls of all sets read and write."""

    @property
    def operations(self) -> int:
        """Of one call, valid slots only."""
        return self.shape.operations(self.selection["valid_slots"])

    @property
    def gathered_bytes(self) -> int:
        """Of one call, see ``Shape.gathered_bytes``."""
        return self.shape.gathered_bytes(self.selection["valid_slots"])


def make(shape: Shape, device: torch.device, *, sets: int = 1, seed: int = 0) -> Workload:
    """Draw ``sets`` sets of inputs, each from its own seed."""
    made = tuple(make_set(shape, device, seed + number) for number in range(sets))
    selection = patterns.describe(made[0].indices[:, 0], shape.s_kv)
    touched = touched_by_a_call(shape, selection["distinct_rows"])
    return Workload(shape, made, selection, sets * touched)


def make_set(shape: Shape, device: torch.device, seed: int) -> Inputs:
    """Normally distributed FP8 rows, logits of standard deviation 1, per-tensor scales."""
    generator = torch.Generator(device).manual_seed(seed)

    def rows(*sizes: int) -> torch.Tensor:
        stored = torch.empty(sizes, dtype=E4M3, device=device)
        for part in torch.split(stored, 1024):
            part.copy_(torch.randn(part.shape, generator=generator, device=device))
        return stored

    return Inputs(
        q=rows(shape.s_q, shape.h_q, shape.d_qk),
        kv=rows(shape.s_kv, 1, shape.d_qk),
        indices=patterns.draw(shape, generator)[:, None],
        sm_scale=1 / (SCALE * SCALE * math.sqrt(shape.d_qk)),
        q_scale=torch.full((1,), SCALE, device=device),
        kv_scale=torch.full((1,), SCALE, device=device),
    )


def touched_by_a_call(shape: Shape, distinct_rows: int | None = None) -> int:
    """Bytes that one call reads or writes: its KV rows once, queries, indices, results."""
    if distinct_rows is None:
        distinct_rows = min(shape.s_kv, shape.s_q * shape.topk)
    queries = shape.s_q * (shape.h_q * (shape.d_qk + 2 * D_V + 8) + 4 * shape.topk)
    return distinct_rows * shape.d_qk + queries


def sets_for(shape: Shape, l2_bytes: int) -> int:
    """How many sets to rotate, so that twice the L2 lies between two uses of one; 8 at most."""
    return max(2, min(MAX_SETS, math.ceil(2 * l2_bytes / touched_by_a_call(shape))))
