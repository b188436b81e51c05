"""Which Hopper kernels run a prefill of a given shape, and how it is cut up for them.

Two families of kernels compute the same thing. ``wide`` takes 64 heads a CTA and is bound by the
tensor cores; ``few`` takes 8, 16, 24 or 32 and is bound by the way of KV rows through shared
memory, and with few queries it splits the slots of each over the CTAs of a cluster. `plan` cuts
heads and slots into the mix that should take the least time, by the figures below. It sees sizes
only, never data: equal shapes run the same kernels and give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .. import jit
from ..params import D_QK_SUPPORTED

BLOCK = 64
"""Slots that a kernel takes at a time (``kBlock``)."""
CLUSTERS = (1, 2, 4, 8)
"""CTAs that may share the slots of a query and a group of heads. Sixteen were no faster."""
SMALLEST_SHARE = 16
"""Multiprocessors for each CTA of a cluster: on a slice of a GPU a large cluster may find no room.
"""
WIDE_HEADS = 64
FEW_HEADS = (8, 16, 24, 32)

Scales = Literal["one", "rows", "tokens"]
SUFFIX: dict[Scales, str] = {"one": "", "rows": "-row-scales", "tokens": "-kv-scales"}
"""Of a kernel's name, by the scales that it takes: one of q and one of kv; one a row of q (a kernel
for few heads takes those in any case); one a row of q and one a KV token."""


def _variant(heads: int, d_qk: int, scales: Scales) -> jit.Variant:
    wide = heads == WIDE_HEADS
    defines: dict[str, str | int] = {"HEADS": heads, "D_QK": d_qk}
    if wide:
        defines["ROW_SCALES"] = int(scales != "one")
    defines["KV_SCALES"] = int(scales == "tokens")
    return jit.Variant(
        name=f"prefill-h{heads}-d{d_qk}{SUFFIX[scales]}",
        source="sm90/prefill.cuh" if wide else "sm90/prefill_few_heads.cuh",
        entry="sparse_mla_prefill" if wide else "sparse_mla_prefill_few_heads",
        defines=defines,
    )


KERNELS: dict[tuple[int, int, Scales], jit.Variant] = {
    (heads, d_qk, scales): _variant(heads, d_qk, scales)
    for heads in (WIDE_HEADS, *FEW_HEADS)
    for d_qk in D_QK_SUPPORTED
    for scales in SUFFIX
    if heads == WIDE_HEADS or scales != "rows"
}
"""By heads an item, d_qk and scales. Kernels of more scales are slower."""

# Microseconds, measured on an H200 (docs/kernels/sm90-few-heads.md): what a CTA takes for a block
# of 64 slots when all are at work, for an item beside that, to add up the parts of one, and for a
# launch. Only their ratios decide anything.
BLOCK_US = {8: 0.67, 16: 0.78, 24: 0.94, 32: 1.01, 64: 1.27}
KV_SCALES_COST = {8: 1.08, 16: 1.06, 24: 1.06, 32: 1.12, 64: 1.36}
"""Times as long a block takes where KV tokens have scales of their own."""
ITEM_US = {8: 1.0, 16: 1.3, 24: 1.5, 32: 1.8, 64: 1.5}
PARTS_US = 4.0
LAUNCH_US = 4.0


@dataclass(frozen=True)
class Part:
    """One launch: heads ``first_head`` on of every query, by one kernel."""

    heads_per_item: int
    first_head: int
    heads: int
    ctas_per_item: int = 1  # a cluster that shares the slots of a query and a group of heads

    @property
    def groups(self) -> int:
        """Items of a query: its heads in groups, the last one perhaps not full."""
        return -(-self.heads // self.heads_per_item)

    @property
    def threads(self) -> int:
        """Threads of a CTA (``kThreads``)."""
        return 512 if self.heads_per_item == WIDE_HEADS else 384

    def variant(self, d_qk: int, q_scales: bool, kv_scales: bool) -> jit.Variant:
        """The kernel, where q or KV tokens have more than one scale or not."""
        wide = self.heads_per_item == WIDE_HEADS
        scales: Scales = "tokens" if kv_scales else "rows" if q_scales and wide else "one"
        return KERNELS[self.heads_per_item, d_qk, scales]

    def ctas(self, s_q: int, multiprocessors: int) -> int:
        """CTAs of the launch: those that share items have one each, others go on to the next."""
        items = s_q * self.groups
        if self.ctas_per_item > 1:
            return items * self.ctas_per_item
        return min(items, multiprocessors)

    def microseconds(
        self, s_q: int, blocks: int, multiprocessors: int, kv_scales: bool = False
    ) -> float:
        """How long it should take."""
        items, ctas = s_q * self.groups, self.ctas_per_item
        # A cluster lies within a part of the chip: of four and of eight, two fewer than the count
        # allows. 32 clusters of four took twice the time of 16 on 132 multiprocessors.
        at_once = multiprocessors // ctas - (2 if ctas >= 4 else 0)
        waves = -(-items // max(1, at_once))
        block = BLOCK_US[self.heads_per_item]
        if kv_scales:
            block *= KV_SCALES_COST[self.heads_per_item]
        item = -(-blocks // ctas) * block + ITEM_US[self.heads_per_item]
        return LAUNCH_US + waves * (item + (PARTS_US if ctas > 1 else 0.0))

    def __str__(self) -> str:
        heads = f"heads {self.first_head} to {self.first_head + self.heads - 1}"
        shared = f", slots over {self.ctas_per_item} CTAs" if self.ctas_per_item > 1 else ""
        return f"{heads} in items of {self.heads_per_item}{shared}"


def past_range(s_q: int, h_q: int, s_kv: int, topk: int) -> str | None:
    """Why the kernels, which count in 32 bits, cannot count so much; ``None``: they can."""
    if s_q * -(-h_q // FEW_HEADS[0]) * CLUSTERS[-1] >= 2**31:
        return f"{s_q} queries of {h_q} heads are more than the kernels count in 32 bits"
    if s_kv >= 2**31 or topk > 2**31 - 2 * BLOCK:  # slots are rounded up to two blocks
        return f"{s_kv} rows or {topk} slots are more than the kernels count in 32 bits"
    return None


@functools.lru_cache(maxsize=4096)
def plan(
    s_q: int, h_q: int, topk: int, multiprocessors: int, kv_scales: bool = False
) -> tuple[Part, ...]:
    """The launches that compute ``h_q`` heads of ``s_q`` queries over ``topk`` slots.

    Args:
        s_q: queries, at least 1.
        h_q: heads of each.
        topk: slots of each; what a ``topk_length`` takes off is not known here.
        multiprocessors: of the device.
        kv_scales: KV tokens have scales of their own.
    """
    blocks = -(-topk // BLOCK)

    def cost(parts: tuple[Part, ...]) -> float:
        return sum(part.microseconds(s_q, blocks, multiprocessors, kv_scales) for part in parts)

    most = max(1, multiprocessors // SMALLEST_SHARE)
    return min(_candidates(h_q, blocks, most), key=cost)


def _candidates(h_q: int, blocks: int, most_ctas: int) -> Iterator[tuple[Part, ...]]:
    yield (Part(WIDE_HEADS, 0, h_q),)
    wide = h_q // WIDE_HEADS * WIDE_HEADS
    for ctas in CLUSTERS:
        if ctas > 1 and (2 * ctas > blocks or ctas > most_ctas):
            break  # a CTA works on two blocks at a time
        yield from _few(0, h_q, ctas)
        if 0 < wide < h_q:
            for rest in _few(wide, h_q - wide, ctas):
                yield (Part(WIDE_HEADS, 0, wide), *rest)


def _few(first: int, heads: int, ctas: int) -> Iterator[tuple[Part, ...]]:
    """Ways of computing these heads by the kernels for few."""
    for size in FEW_HEADS:
        yield (Part(size, first, heads, ctas),)
        full = heads // size * size
        for smaller in FEW_HEADS:
            if smaller < size and 0 < full < heads <= full + smaller:
                yield (
                    Part(size, first, full, ctas),
                    Part(smaller, first + full, heads - full, ctas),
                )
