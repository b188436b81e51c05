"""Which slots each query of the CPU backend has, and which queries are computed together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .cpu_table import Rows

if TYPE_CHECKING:
    from ..params import PrefillProblem


def valid_slots(
    problem: PrefillProblem, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n, padded topk], each query's valid indices in front and s_kv behind; their counts."""
    indices = problem.index_rows[queries]
    n, topk = indices.shape
    valid = (indices >= 0) & (indices < problem.s_kv)
    if problem.topk_length is not None:
        valid &= torch.arange(topk, device="cpu") < problem.topk_length[queries, None]
    counts = valid.sum(dim=1)
    width = _padded(topk)
    if width == topk and bool(valid.all()):
        return indices.long(), counts
    slots = torch.full((n, width), problem.s_kv, dtype=torch.int64, device="cpu")
    places = valid.cumsum(dim=1).sub_(1).add_(torch.arange(n, device="cpu")[:, None] * width)
    slots.view(-1)[places[valid]] = indices[valid].long()
    return slots, counts


def _padded(count: int) -> int:
    """The width that ``count`` slots are computed with: few widths, so that kernels are reused."""
    return 16 if count <= 16 else 32 if count <= 32 else -(-count // 64) * 64


def query_blocks(counts: torch.Tensor, most: int) -> Iterator[tuple[Rows, int]]:
    """Positions of queries that are computed together, and their width; no query without slots."""
    widths = torch.where(counts > 32, (counts + 63) // 64 * 64, torch.where(counts > 16, 32, 16))
    widths[counts == 0] = 0
    for width in sorted(set(widths.tolist())):
        if width:
            for group in (widths == width).nonzero().view(-1).split(most):
                first, last = int(group[0]), int(group[-1])
                yield slice(first, last + 1) if last - first + 1 == len(group) else group, width


def shifted(rows: Rows, by: int) -> Rows:
    """All of ``rows``, ``by`` further on."""
    return slice(rows.start + by, rows.stop + by) if isinstance(rows, slice) else rows + by


def some(rows: Rows, part: slice) -> Rows:
    """``rows[part]``, for a range too."""
    if isinstance(rows, slice):
        return slice(rows.start + part.start, rows.start + part.stop)
    return rows[part]
