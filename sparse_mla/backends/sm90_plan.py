"""Which Hopper kernels run a prefill of a given shape, and how it is cut up for them.

Three kernels compute the same thing. ``wide`` takes 64 heads a CTA and is bound by the tensor
cores; ``few`` takes 8, 16 or 32 and is bound by the gather of KV rows; and with few queries the
slots of each are split over the CTAs of a cluster. `plan` cuts heads and slots into the mix that
should take the least time, by the figures below. It sees sizes only, never data: equal shapes run
the same kernels and give the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from .. import jit
from ..params import D_QK_SUPPORTED

BLOCK = 64
"""Slots that a kernel takes at a time (``kBlock``)."""
CLUSTERS = (1, 2, 4, 8, 16)
"""CTAs that may share the slots of a query and a group of heads."""
WIDE_HEADS = 64
FEW_HEADS = (8, 16, 32)


@dataclass(frozen=True)
class Family:
    """Kernels of one source, and what they take."""

    name: str
    source: str
    entry: str

    def variant(self, heads: int, d_qk: int, scales: bool, define: str) -> jit.Variant:
        """The kernel of so many heads a CTA; ``scales``: with what ``define`` asks for."""
        suffix = f"-{define.lower().replace('_', '-')}" if scales else ""
        return jit.Variant(
            name=f"prefill-h{heads}-d{d_qk}{suffix}",
            source=self.source,
            entry=self.entry,
            defines={"HEADS": heads, "D_QK": d_qk, define: int(scales)},
        )


WIDE = Family("wide", "sm90/prefill.cuh", "sparse_mla_prefill")
FEW = Family("few", "sm90/prefill_few_heads.cuh", "sparse_mla_prefill_few_heads")

KERNELS: dict[tuple[int, int, bool], jit.Variant] = {
    **{
        (WIDE_HEADS, d_qk, scales): WIDE.variant(WIDE_HEADS, d_qk, scales, "ROW_SCALES")
        for d_qk in D_QK_SUPPORTED
        for scales in (False, True)
    },
    **{
        (heads, d_qk, scales): FEW.variant(heads, d_qk, scales, "KV_SCALES")
        for heads in FEW_HEADS
        for d_qk in D_QK_SUPPORTED
        for scales in (False, True)
    },
}
"""By heads a CTA, d_qk, and whether there are further scales: with 64 heads, more than one of q
(which costs 5%); with fewer, those of KV tokens."""

# Microseconds, measured on an H200 (docs/kernels/sm90-few-heads.md). A block of 64 slots takes a CTA
# so long when all its warpgroups are at work, and one of them alone at least so long; then what an
# item, a launch and the sum over parts cost. Only their ratios decide anything.
BLOCK_US = {8: 0.70, 16: 0.75, 32: 0.92, 64: 1.32}
ALONE_US = {8: 1.3, 16: 1.4, 32: 1.75, 64: 1.32}
ITEM_US = {8: 1.0, 16: 1.0, 32: 1.3, 64: 1.0}
LAUNCH_US = 3.0
PARTS_US = 3.0


@dataclass(frozen=True)
class Part:
    """One launch: heads ``first_head`` on of every query, by one kernel."""

    heads_per_item: int
    first_head: int
    heads: int
    ctas_per_item: int  # that share the slots of a query; 0: an item is one CTA's or warpgroup's

    @property
    def groups(self) -> int:
        """Items of a query: its heads in groups, the last one perhaps not full."""
        return -(-self.heads // self.heads_per_item)

    @property
    def warpgroups(self) -> int:
        """Of a CTA, that compute items of their own, or parts of one (``kWarpgroups``)."""
        return 1 if self.heads_per_item == WIDE_HEADS else 2

    @property
    def threads(self) -> int:
        """Threads of a CTA (``kThreads``)."""
        return 512 if self.heads_per_item == WIDE_HEADS else 128 * (self.warpgroups + 1)

    def ctas(self, s_q: int, multiprocessors: int) -> int:
        """CTAs of the launch: one a multiprocessor, or as many as the items want."""
        items = s_q * self.groups
        if self.ctas_per_item:
            return items * self.ctas_per_item
        return min(-(-items // self.warpgroups), multiprocessors)

    def microseconds(self, s_q: int, blocks: int, multiprocessors: int) -> float:
        """How long it should take."""
        items = s_q * self.groups
        block, item = BLOCK_US[self.heads_per_item], ITEM_US[self.heads_per_item]
        alone = ALONE_US[self.heads_per_item]
        if self.ctas_per_item:
            waves = -(-items // max(1, multiprocessors // self.ctas_per_item))
            parts = self.ctas_per_item * self.warpgroups
            each = -(-blocks // parts) * max(alone, block * self.warpgroups) + item
            return LAUNCH_US + waves * (each + PARTS_US)
        rounds, rest = divmod(items, multiprocessors * self.warpgroups)
        time = rounds * (blocks * max(alone, block * self.warpgroups) + item)
        if rest:
            time += blocks * max(alone, block * -(-rest // multiprocessors)) + item
        return LAUNCH_US + time


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
        kv_scales: KV tokens have scales of their own, which only ``few`` takes.
    """
    blocks = -(-topk // BLOCK)

    def cost(parts: tuple[Part, ...]) -> float:
        return sum(part.microseconds(s_q, blocks, multiprocessors) for part in parts)

    return min(_candidates(h_q, blocks, kv_scales), key=cost)


def _candidates(h_q: int, blocks: int, kv_scales: bool) -> Iterator[tuple[Part, ...]]:
    if not kv_scales:
        yield (Part(WIDE_HEADS, 0, h_q, 0),)
    wide = 0 if kv_scales else h_q // WIDE_HEADS * WIDE_HEADS
    for ctas in (0, *(count for count in CLUSTERS if count == 1 or 2 * count <= blocks)):
        yield from _few(0, h_q, ctas)
        if 0 < wide < h_q:
            for rest in _few(wide, h_q - wide, ctas):
                yield (Part(WIDE_HEADS, 0, wide, 0), *rest)


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
