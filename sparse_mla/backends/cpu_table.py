"""The CPU backend's table of KV rows: each needed row converted once into the compute dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..params import PrefillProblem

TABLE_BYTES = 192 << 20
"""The most that converted KV rows may take, unless a single query selects more."""

CHUNK_SLOTS = 1 << 20
"""Slots whose indices are looked at together."""

TOKEN_SCALES = (1e-30, 1e30)
"""Scales of single tokens are taken within these, so that P times a scale keeps P's precision."""

FILL_ROWS = 2048
"""Rows converted at a time."""

EXTRA = 32
"""Table columns beyond d_qk: 0 masks, 1 to 5 centre, the others are zero and keep rows aligned."""

Rows = slice | torch.Tensor
"""Which rows: a range, or their numbers."""

FLOAT8 = torch.float8_e4m3fn


class RowTable:
    """KV rows in the compute dtype with the extra columns; the last row stands for masked slots."""

    def __init__(self, problem: PrefillProblem, dtype: torch.dtype) -> None:
        self.kv = problem.kv_rows
        self.width = problem.d_qk + EXTRA
        self.dtype = dtype
        most = max(TABLE_BYTES // (self.width * dtype.itemsize), problem.topk + 1)
        self.whole = problem.s_kv < most
        self.chunk_slots = CHUNK_SLOTS if self.whole else min(CHUNK_SLOTS, most - 1)
        self.scale: torch.Tensor | None = None  # float32 [rows], where each token has its own
        scale = problem.kv_scale
        self.token_scale: torch.Tensor | None = None
        if scale is not None and scale.numel() != 1:
            self.token_scale = usable(scale).clamp(*TOKEN_SCALES)
        self.rows = torch.empty(0, self.width, dtype=dtype, device="cpu")
        if self.whole:
            self.done = torch.zeros(problem.s_kv + 1, dtype=torch.bool, device="cpu")
            self._allocate(problem.s_kv)
            if self.token_scale is not None:
                self.scale = torch.cat([self.token_scale, self.token_scale.new_ones(1)])

    def prepare(self, slots: torch.Tensor) -> torch.Tensor:
        """Convert the rows that ``slots`` select and return the table rows they are in."""
        if self.whole:
            wanted = torch.zeros_like(self.done).index_fill_(0, slots.reshape(-1), True)
            wanted[-1] = False
            new = (wanted & ~self.done).nonzero().view(-1)
            self.done |= wanted
            self._fill(new, new)
            return slots
        tokens: torch.Tensor
        places: torch.Tensor
        tokens, places = torch.unique(slots, return_inverse=True)
        if int(tokens[-1]) == len(self.kv):  # masked slots come last, as the table wants them
            tokens = tokens[:-1]
        self._allocate(len(tokens))
        self._fill(tokens, torch.arange(len(tokens), device="cpu"))
        if self.token_scale is not None:
            self.scale = torch.cat([self.token_scale[tokens], self.token_scale.new_ones(1)])
        return places

    def _allocate(self, tokens: int) -> None:
        if len(self.rows) != tokens + 1:
            self.rows = torch.empty(0, device="cpu")  # give the old table back before there are two
            self.rows = torch.empty(tokens + 1, self.width, dtype=self.dtype, device="cpu")
        self.rows[-1] = 0
        self.rows[-1, self.width - EXTRA] = -math.inf

    def _fill(self, tokens: torch.Tensor, places: torch.Tensor) -> None:
        """Convert ``tokens`` (ascending) into table rows ``places``, block by block."""
        d_qk = self.width - EXTRA
        for start in range(0, len(tokens), FILL_ROWS):
            token, place = (x[start : start + FILL_ROWS] for x in (tokens, places))
            block = self.rows.new_empty(len(token), self.width)
            convert(block[:, :d_qk], take(self.kv, token))
            block[:, d_qk:] = 0
            inverse = torch.ones(len(token), dtype=torch.float32, device="cpu")
            if self.token_scale is not None:
                inverse = self.token_scale[token].reciprocal().nan_to_num(0.0)
            high, low = split(inverse, self.dtype, 2)
            block[:, d_qk + 1 : d_qk + 4] = -high[:, None]
            block[:, d_qk + 4 : d_qk + 6] = -low[:, None]
            self.rows.index_copy_(0, place, block)


def usable(scale: torch.Tensor) -> torch.Tensor:
    """Scales, NaN where they are not finite positive numbers."""
    return torch.where((scale > 0) & (scale < math.inf), scale, math.nan)


def split(x: torch.Tensor, dtype: torch.dtype, parts: int) -> list[torch.Tensor]:
    """``x`` as a sum of ``parts`` tensors, each the rounding of what the ones before leave."""
    pieces = []
    for _ in range(parts):
        pieces.append(x.to(dtype))
        x = x - pieces[-1]
    return pieces


def take(x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """``x[rows]`` for any dtype, a view for a slice."""
    if isinstance(rows, slice) or x.dtype != FLOAT8:
        return x[rows]
    return x.view(torch.uint8)[rows].view(FLOAT8)


def convert(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, exactly; e4m3 by moving bits.

    Sign, exponent and mantissa of e4m3 at the places of a wider float mean 2**-120 of its value,
    for subnormals too. NaN would become 480, and where subnormals are flushed to zero small values
    would be lost: then the slow copy is right.
    """
    if source.dtype != FLOAT8 or not source.numel() or _flushes_subnormals() or _has_nan(source):
        target.copy_(source)
        return
    bits, shift, mask = {
        torch.bfloat16: (torch.int16, 4, -(1 << 15) | (0x7F << 4)),
        torch.float32: (torch.int32, 20, -(1 << 31) | (0x7F << 20)),
    }[target.dtype]
    moved = target.view(bits)
    moved.copy_(source.view(torch.int8))
    moved.bitwise_left_shift_(shift).bitwise_and_(mask)
    target.mul_(2.0**120)


def _has_nan(x: torch.Tensor) -> bool:
    """Whether e4m3 ``x`` holds 0x7f or 0xff, the largest signed and the largest unsigned byte."""
    return int(x.view(torch.int8).max()) == 127 or int(x.view(torch.uint8).max()) == 255


def _flushes_subnormals() -> bool:
    return float(torch.tensor(2.0**-126, dtype=torch.float32, device="cpu").mul_(0.5)) == 0.0
