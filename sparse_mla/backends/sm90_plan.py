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
SPLITS = (1, 2, 4, 8, 16)
"""CTAs that may share the slots of a query: sizes of a cluster."""
WIDE_HEADS = 64
FEW_HEADS = (8, 16, 32)


@dataclass(frozen=True)
class Family:
    """Kernels of one source, and what they take."""

    name: str
    source: str
    entry: str
    threads: int

    def variant(self, heads: int, d_qk: int, scales: bool, define: str) -> jit.Variant:
        """The kernel of so many heads a CTA; ``scales``: with what ``define`` asks for."""
        suffix = f"-{define.lower().replace('_', '-')}" if scales else ""
        return jit.Variant(
            name=f"prefill-h{heads}-d{d_qk}{suffix}",
            source=self.source,
            entry=self.entry,
            defines={"HEADS": heads, "D_QK": d_qk, define: int(scales)},
        )


WIDE = Family("wide", "sm90/prefill.cuh", "sparse_mla_prefill", 512)
FEW = Family("few", "sm90/prefill_few_heads.cuh", "sparse_mla_prefill_few_heads", 384)

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

# Microseconds, seen on an H200 (docs/kernels): a block of 64 slots in each kernel, when all CTAs
# are at work; an item, however short; a launch; a split. Only their ratios decide anything.
BLOCK_US = {8: 0.72, 16: 0.75, 32: 0.85, 64: 1.32}
ITEM_US = {8: 1.0, 16: 1.0, 32: 1.3, 64: 1.0}
LAUNCH_US = 3.0
SPLIT_US = 1.5


@dataclass(frozen=True)
class Part:
    """One launch: heads ``first_head`` on of every query, by one kernel."""

    heads_per_cta: int
    first_head: int
    heads: int
    splits: int  # CTAs that share the slots of a query

    @property
    def groups(self) -> int:
        """CTAs for the heads of one query, the last one perhaps not full; times ``splits``."""
        return -(-self.heads // self.heads_per_cta)

    def microseconds(self, s_q: int, blocks: int, multiprocessors: int) -> float:
        """How long it should take."""
        items = s_q * self.groups
        at_once = max(1, multiprocessors // self.splits)
        waves = -(-items // at_once)
        if waves > 4:  # then the last, not full, is short against the rest
            waves_taken = items / at_once + 0.5
        else:
            waves_taken = float(waves)
        block, item = BLOCK_US[self.heads_per_cta], ITEM_US[self.heads_per_cta]
        each = -(-blocks // self.splits) * block + item
        return LAUNCH_US + waves_taken * each + (SPLIT_US if self.splits > 1 else 0.0)


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
    splits = [count for count in SPLITS if count == 1 or count <= blocks]
    if not kv_scales:
        yield (Part(WIDE_HEADS, 0, h_q, 1),)
    for split in splits:
        for rest in _few(0, h_q, split):
            yield rest
        wide = h_q // WIDE_HEADS * WIDE_HEADS
        if 0 < wide < h_q and not kv_scales:
            for rest in _few(wide, h_q - wide, split):
                yield (Part(WIDE_HEADS, 0, wide, 1), *rest)


def _few(first: int, heads: int, splits: int) -> Iterator[tuple[Part, ...]]:
    """Ways of computing these heads by the kernels for few."""
    for size in FEW_HEADS:
        yield (Part(size, first, heads, splits),)
        full = heads // size * size
        for smaller in FEW_HEADS:
            if smaller < size and 0 < full < heads <= full + smaller:
                yield (
                    Part(size, first, full, splits),
                    Part(smaller, first + full, heads - full, splits),
                )
