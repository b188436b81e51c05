"""Which Hopper kernels run a shape. What the plan says is arithmetic on sizes; needs no GPU."""

from __future__ import annotations

import itertools

import pytest

from sparse_mla.backends.sm90_plan import CLUSTERS, KERNELS, Part, past_range, plan

H200 = 132
"""Multiprocessors."""


def covered(parts: tuple[Part, ...]) -> list[int]:
    """The heads that the parts compute, in their order."""
    return [head for part in parts for head in range(part.first_head, part.first_head + part.heads)]


@pytest.mark.parametrize("multiprocessors", [H200, 114, 8])
def test_every_head_is_computed_once_by_a_kernel_there_is(multiprocessors: int) -> None:
    shapes = itertools.product((1, 17, 4096), range(1, 140), (1, 64, 100, 2048), (False, True))
    for s_q, h_q, topk, kv_scales in shapes:
        parts = plan(s_q, h_q, topk, multiprocessors, kv_scales)
        assert covered(parts) == list(range(h_q))
        for part in parts:
            assert (part.heads_per_item, 576, "tokens" if kv_scales else "one") in KERNELS
            assert part.ctas_per_item in CLUSTERS
            assert part.heads_per_item != 64 or part.ctas_per_item == 1
            assert part.ctas(s_q, multiprocessors) % part.ctas_per_item == 0


@pytest.mark.parametrize(
    ("h_q", "parts"),
    [
        (1, [(8, 1)]),
        (8, [(8, 8)]),
        (16, [(16, 16)]),
        (20, [(24, 20)]),
        (32, [(32, 32)]),
        (48, [(64, 48)]),
        (64, [(64, 64)]),
        (80, [(64, 64), (16, 16)]),
        (96, [(64, 64), (32, 32)]),
        (112, [(64, 112)]),
        (128, [(64, 128)]),
    ],
)
def test_a_long_prefill(h_q: int, parts: list[tuple[int, int]]) -> None:
    """4,096 queries: heads an item, and heads, of each launch."""
    found = plan(4096, h_q, 2048, H200)
    assert [(part.heads_per_item, part.heads) for part in found] == parts
    assert all(part.ctas_per_item == 1 for part in found)


@pytest.mark.parametrize("multiprocessors", [H200, 114, 78])
def test_mixes_that_the_gpu_tests_count_on(multiprocessors: int) -> None:
    """In tests/gpu/test_sm90_few_heads.py: the same on any Hopper GPU, and two launches of some."""
    mixes = {80: [(64, 64), (16, 16)], 96: [(64, 64), (32, 32)], 20: [(24, 20)]}
    for h_q, parts in mixes.items():
        found = plan(4096, h_q, 512, multiprocessors)
        assert [(part.heads_per_item, part.heads) for part in found] == parts
    assert all(part.ctas_per_item > 1 for part in plan(1, 128, 2048, multiprocessors))


@pytest.mark.parametrize(
    ("s_q", "h_q", "ctas"), [(1, 16, 8), (16, 16, 4), (64, 16, 2), (128, 16, 1), (16, 128, 2)]
)
def test_slots_are_split_where_queries_are_few(s_q: int, h_q: int, ctas: int) -> None:
    parts = plan(s_q, h_q, 2048, H200)
    assert [part.ctas_per_item for part in parts] == [ctas]
    assert s_q * parts[0].groups * ctas <= H200


def test_clusters_that_the_chip_has_no_room_for_at_once_are_avoided() -> None:
    """32 clusters of four CTAs did not run at the same time on 132 multiprocessors."""
    (part,) = plan(16, 16, 2048, H200)
    assert (part.heads_per_item, part.ctas_per_item) == (16, 4)


@pytest.mark.parametrize(
    ("multiprocessors", "ctas"), [(132, 8), (114, 4), (32, 2), (16, 1), (8, 1)]
)
def test_a_slice_of_a_gpu_has_smaller_clusters(multiprocessors: int, ctas: int) -> None:
    assert plan(1, 8, 2048, multiprocessors)[0].ctas_per_item == ctas


def test_a_single_block_is_not_split() -> None:
    assert [part.ctas_per_item for part in plan(1, 16, 64, H200)] == [1]


@pytest.mark.parametrize("h_q", [8, 16, 32, 64, 96, 128])
def test_scales_of_kv_tokens_run_on_the_kernels_that_one_scale_does(h_q: int) -> None:
    assert plan(4096, h_q, 2048, H200, True) == plan(4096, h_q, 2048, H200)


def test_a_slot_count_costs_what_its_blocks_do() -> None:
    """100 slots are two blocks of 64, like 128."""
    part = Part(16, 0, 16)
    assert plan(4096, 16, 100, H200) == plan(4096, 16, 128, H200)
    assert part.microseconds(4096, 2, H200) < part.microseconds(4096, 3, H200)


def test_ctas_of_a_launch() -> None:
    assert Part(16, 0, 33).groups == 3
    assert Part(16, 0, 33).ctas(10, H200) == 30
    assert Part(16, 0, 33).ctas(1000, H200) == H200
    assert Part(16, 0, 33, 4).ctas(10, H200) == 120
    assert Part(64, 0, 128).threads == 512
    assert Part(32, 0, 32).threads == 384


def test_a_part_says_what_it_is() -> None:
    assert str(Part(64, 0, 64)) == "heads 0 to 63 in items of 64"
    assert str(Part(16, 64, 20, 2)) == "heads 64 to 83 in items of 16, slots over 2 CTAs"


def test_sizes_that_do_not_fit_32_bits_are_refused() -> None:
    """Items times CTAs of a cluster, in the smallest items and the largest clusters."""
    assert past_range(65536, 128, 2**31 - 1, 2**31 - 128) is None
    assert past_range(2**24 - 1, 128, 1, 1) is None
    for shape in ((2**24, 128, 1, 1), (1, 2**31, 1, 1), (1, 1, 2**31, 1), (1, 1, 1, 2**31 - 127)):
        reason = past_range(*shape)
        assert reason is not None
        assert all(str(size) in reason for size in shape if size > 128), reason


def test_the_kernel_of_a_part_follows_the_scales_that_it_takes() -> None:
    wide, few = Part(64, 0, 64), Part(8, 0, 8)
    for q_scales, kv_scales in itertools.product((False, True), repeat=2):
        tokens = "tokens" if kv_scales else "one"
        rows = "rows" if q_scales and not kv_scales else tokens
        assert wide.variant(576, q_scales, kv_scales) is KERNELS[64, 576, rows]
        assert few.variant(512, q_scales, kv_scales) is KERNELS[8, 512, tokens]
