"""Caches in pages: what a slot holds, positions to slots, rows for the operators."""

from __future__ import annotations

import pytest
import torch

from sparse_mla import kv_cache
from sparse_mla.kv_cache import FLAT_512, FLAT_576, V4, V32, Fields, Layout

ALL = [pytest.param(layout, id=layout.name) for layout in (FLAT_512, FLAT_576, V32, V4)]
TILED = [pytest.param(layout, id=layout.name) for layout in (V32, V4)]


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def test_v4_page_keeps_the_data_of_all_its_tokens_before_their_scales():
    cache = kv_cache.empty_cache(V4, pages=2, page_size=3, page_bytes=2304)
    records = random_bytes(6, 584)
    kv_cache.write(cache, torch.arange(6), records, V4)
    storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    second_page = storage[2304:]
    for token in range(3):
        assert torch.equal(second_page[token * 576 :][:576], records[3 + token, :576])
        assert torch.equal(second_page[3 * 576 + token * 8 :][:8], records[3 + token, 576:])
    assert not second_page[3 * 584 :].any()


@pytest.mark.parametrize("layout", ALL)
def test_pages_may_lie_any_distance_apart(layout: Layout):
    """G1: the distance between pages is the tensor's, not page_size * token_bytes."""
    used = 16 * layout.token_bytes
    cache = kv_cache.empty_cache(layout, 5, 16, page_bytes=-(-used // 576) * 576 + 576)
    every_second = cache[::2]
    assert every_second.stride(0) == 2 * cache.stride(0)
    records = random_bytes(48, layout.token_bytes)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))
    kv_cache.write(every_second, slots, records, layout)
    assert torch.equal(kv_cache.read(every_second, slots, layout), records)
    dense = kv_cache.empty_cache(layout, 3, 16)
    kv_cache.write(dense, slots, records, layout)
    assert torch.equal(every_second, dense)
    assert not cache[1::2].any()


@pytest.mark.parametrize("layout", ALL)
def test_page_size_does_not_change_what_a_slot_holds(layout: Layout):
    records = random_bytes(64, layout.token_bytes)
    for page_size in (1, 2, 64):
        cache = kv_cache.empty_cache(layout, 64 // page_size, page_size)
        kv_cache.write(cache, torch.arange(64), records, layout)
        assert torch.equal(kv_cache.read(cache, torch.arange(64), layout), records)


def test_a_cache_may_have_a_head_dimension_an_fp8_dtype_or_no_pages():
    records = random_bytes(6, 656)
    slots = torch.tensor([5, 0, 3])
    same = [
        records,
        records.view(3, 2, 656),
        records.view(3, 2, 1, 656),
        records.view(torch.float8_e4m3fn),
    ]
    for cache in same:
        assert torch.equal(kv_cache.read(cache, slots, V32), records[slots])


def test_the_operators_kv_is_a_flat_cache():
    kv = random_bytes(7, 1, 576).view(torch.float8_e4m3fn)
    slots = torch.tensor([6, 2])
    got = kv_cache.read(kv, slots, FLAT_576)
    assert torch.equal(got, kv[slots, 0].view(torch.uint8))


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("slot", [-1, -9, 8, 2**31 - 1, -(2**31)])
def test_a_slot_outside_the_cache_reads_as_zeros(layout: Layout, slot: int):
    """A2, B1: neither -1 nor a number past the end is ever an address."""
    around = random_bytes(4, 4, layout.token_bytes)
    cache = around[1:3]
    got = kv_cache.read(cache, torch.tensor([[3, slot]], dtype=torch.int32), layout)
    assert got.shape == (1, 2, layout.token_bytes)
    assert got[0, 0].any()
    assert not got[0, 1].any()
    if layout.tile:
        rows = kv_cache.gather_float(cache, torch.tensor([slot]), layout)
        assert torch.equal(rows, torch.zeros(1, layout.d_qk))


@pytest.mark.parametrize("layout", ALL)
def test_nothing_can_be_read_from_a_cache_of_no_pages(layout: Layout):
    cache = kv_cache.empty_cache(layout, 0, 4)
    assert not kv_cache.read(cache, torch.tensor([0, -1]), layout).any()


def test_write_leaves_padding_out_and_everything_else_alone():
    cache = random_bytes(2, 4, 656)
    before = cache.clone()
    records = random_bytes(3, 656, seed=1)
    kv_cache.write(cache, torch.tensor([6, -1, 1]), records, V32)
    before[1, 2], before[0, 1] = records[0], records[2]
    assert torch.equal(cache, before)


def test_write_past_the_end_is_refused_and_writes_nothing():
    cache = random_bytes(2, 4, 656)
    before = cache.clone()
    with pytest.raises(ValueError, match="slot 8 is past the end of a cache of 8 slots"):
        kv_cache.write(cache, torch.tensor([0, 8]), random_bytes(2, 656, seed=1), V32)
    assert torch.equal(cache, before)


def test_write_refuses_as_many_slots_as_there_are_no_records():
    """B6: eight requests, six rows."""
    cache = kv_cache.empty_cache(V32, 2, 8)
    with pytest.raises(ValueError, match=r"got \(8,\) and \(6, 656\)"):
        kv_cache.write(cache, torch.arange(8), random_bytes(6, 656), V32)


def test_a_v4_page_with_gaps_between_tokens_is_refused():
    cache = torch.zeros(2, 4, 600, dtype=torch.uint8)[:, :, :584]
    with pytest.raises(ValueError, match=r"dense within a page, got strides \(2400, 600, 1\)"):
        kv_cache.read(cache, torch.tensor([0]), V4)


def test_slots_must_be_whole_numbers():
    with pytest.raises(ValueError, match=r"slots must be int32 or int64, got torch.float32"):
        kv_cache.read(kv_cache.empty_cache(V32, 1, 1), torch.tensor([0.0]), V32)


@pytest.mark.parametrize(
    ("pages", "page_size", "page_bytes"), [(-1, 4, None), (1, 0, None), (1, 4, 4 * 584 - 1)]
)
def test_a_cache_that_cannot_be_is_refused(pages: int, page_size: int, page_bytes: int | None):
    with pytest.raises(ValueError, match=f"{pages} pages of {page_size} tokens"):
        kv_cache.empty_cache(V4, pages, page_size, page_bytes=page_bytes)


# Positions to slots.


def test_page_slots_follow_the_block_table():
    table = torch.tensor([[7, 3], [0, 9]], dtype=torch.int32)
    requests = torch.tensor([0, 1])
    positions = torch.tensor([[0, 3, 4, 5], [7, 4, 1, 0]])
    assert kv_cache.page_slots(table, requests, positions, 4).tolist() == [
        [28, 31, 12, 13],
        [39, 36, 1, 0],
    ]
    assert kv_cache.page_slots(table, requests, positions[:, 2], 4).tolist() == [12, 1]


def test_page_slots_of_what_is_not_there_are_minus_one():
    """B5: padded requests have no row in the table; B12: a position may be past its width."""
    table = torch.tensor([[0, 1, -1, 3], [4, 5, 6, 7]], dtype=torch.int32)
    requests = torch.tensor([0, 1, 5, -1])
    positions = torch.tensor([[2, 4, -1], [3, 8, 7], [0, 1, 2], [0, 1, 2]])
    assert kv_cache.page_slots(table, requests, positions, 2).tolist() == [
        [2, -1, -1],
        [11, -1, 15],
        [-1, -1, -1],
        [-1, -1, -1],
    ]


def test_page_slots_do_not_wrap_around():
    """F2: page * page_size past 2^31 is no slot, rather than a negative or a small one."""
    table = torch.tensor([[2**25 - 1, 2**25, 2**62]])
    positions = torch.tensor([[63, 64, 128]])
    got = kv_cache.page_slots(table, torch.tensor([0]), positions, 64)
    assert got.dtype == torch.int32
    assert got.tolist() == [[2**31 - 1, -1, -1]]


def test_page_slots_refuse_rows_that_do_not_belong_together():
    table = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"got \(8,\) and \(6, 3\)"):
        kv_cache.page_slots(table, torch.zeros(8).int(), torch.zeros(6, 3).int(), 4)
    with pytest.raises(ValueError, match=r"n_requests, pages_per_request\), got \(8,\)"):
        kv_cache.page_slots(table.flatten(), torch.zeros(1).int(), torch.zeros(1).int(), 4)
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        kv_cache.page_slots(table, torch.zeros(1).int(), torch.zeros(1).int(), 0)


def test_page_slots_of_an_empty_table():
    table = torch.zeros(0, 4, dtype=torch.int32)
    assert kv_cache.page_slots(table, torch.tensor([0]), torch.tensor([3]), 4).tolist() == [-1]


# Rows for the operators.


@pytest.mark.parametrize("layout", TILED)
def test_gather_float_gives_the_rows_in_the_order_of_the_slots(layout: Layout):
    rows = torch.randn(12, layout.d_qk, generator=torch.Generator().manual_seed(0))
    records = kv_cache.pack(rows, layout)
    cache = kv_cache.empty_cache(layout, 3, 4)
    kv_cache.write(cache, torch.arange(12), records, layout)
    slots = torch.tensor([[11, 0, 5], [5, 5, 2]])
    got = kv_cache.gather_float(cache, slots, layout)
    assert torch.equal(got, kv_cache.unpack(records, layout)[slots])


@pytest.mark.parametrize("layout", TILED)
def test_gather_fp8_changes_no_code_where_the_scales_are_the_given_one(layout: Layout):
    codes = random_bytes(6, layout.d_latent)
    codes[(codes & 0x7F) == 0x7F] = 0
    latent = codes.view(torch.float8_e4m3fn)
    eighth = torch.full((6, layout.tiles), 124, dtype=torch.uint8)
    scales = eighth if layout is V4 else torch.full((6, 4), 0.125)
    rope = torch.full((6, 64), 0.75).bfloat16()
    cache = kv_cache.join(Fields(latent, scales, rope), layout).unsqueeze(1)
    kv, scale = kv_cache.gather_fp8(cache, torch.arange(6), layout, kv_scale=0.125)
    assert scale.tolist() == [0.125]
    assert torch.equal(kv[:, : layout.d_latent].view(torch.uint8), codes)
    assert kv[:, layout.d_latent :].float().unique().tolist() == [6.0]


@pytest.mark.parametrize("layout", TILED)
def test_gather_fp8_scales_by_the_largest_gathered_value(layout: Layout):
    rows = torch.ones(4, layout.d_qk)
    rows[1, 0], rows[2, -1], rows[3, 0] = 224.0, -896.0, 3584.0
    cache = kv_cache.pack(rows, layout).unsqueeze(1)
    kv, scale = kv_cache.gather_fp8(cache, torch.tensor([0, 1, 2, -1]), layout)
    assert kv.dtype == torch.float8_e4m3fn
    assert kv.shape == (4, layout.d_qk)
    assert scale.tolist() == [2.0]
    assert kv[2, -1].item() == -448.0
    assert not kv[3].view(torch.uint8).any()
    _, per_token = kv_cache.gather_fp8(cache, torch.tensor([3, 1, -1]), layout, per_token=True)
    assert per_token.tolist() == [8.0, 0.5, 1.0]


def test_gather_fp8_of_no_rows():
    cache = kv_cache.empty_cache(V32, 1, 1)
    kv, scale = kv_cache.gather_fp8(cache, torch.zeros(0, dtype=torch.int64), V32)
    assert kv.shape == (0, 576)
    assert scale.tolist() == [1.0]


def test_gather_fp8_refuses_what_has_no_meaning():
    flat = torch.zeros(1, 1, 576, dtype=torch.uint8)
    with pytest.raises(ValueError, match="flat-576 is flat FP8 already"):
        kv_cache.gather_fp8(flat, torch.tensor([0]), FLAT_576)
    cache = kv_cache.empty_cache(V32, 1, 1)
    with pytest.raises(ValueError, match=r"slots must have shape \(n,\), got \(1, 1\)"):
        kv_cache.gather_fp8(cache, torch.tensor([[0]]), V32)
    with pytest.raises(ValueError, match="kv_scale was given, and per_token"):
        kv_cache.gather_fp8(cache, torch.tensor([0]), V32, kv_scale=1.0, per_token=True)


@pytest.mark.parametrize("layout", ALL)
def test_rows_on_both_sides_of_2_to_the_31_bytes(layout: Layout):
    """F1, F2: an offset of slot * row width in 32 bits is negative from here on."""
    page_size = 64
    straddles = 2**31 // layout.token_bytes
    pages = straddles // page_size + 2
    # Memory that nothing touches costs nothing, so this takes a few pages and not two gigabytes.
    cache = torch.empty(pages, page_size, layout.token_bytes, dtype=torch.uint8)
    assert cache.numel() > 2**31
    slots = torch.tensor([straddles - 1, straddles, straddles + 1, pages * page_size - 1, 0])
    records = random_bytes(5, layout.token_bytes)
    kv_cache.write(cache, slots, records, layout)
    assert torch.equal(kv_cache.read(cache, slots, layout), records)
    assert torch.equal(kv_cache.read(cache, slots.to(torch.int32), layout), records)
    if layout is not V4:
        assert torch.equal(cache[straddles // page_size, straddles % page_size], records[1])


@pytest.mark.parametrize("layout", ALL)
def test_a_cache_of_another_layout_is_refused(layout: Layout):
    """B6: the 656-byte cache read with the wrong layout."""
    for other in (FLAT_512, FLAT_576, V32, V4):
        if other is not layout:
            cache = torch.zeros(2, 4, other.token_bytes, dtype=torch.uint8)
            with pytest.raises(ValueError, match=rf"{layout.name} must have shape .*got \(2, 4, "):
                kv_cache.read(cache, torch.tensor([0]), layout)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2, torch.int8, torch.bfloat16]
)
def test_a_cache_of_another_dtype_is_refused(dtype: torch.dtype):
    cache = torch.empty(4, 1, 576, dtype=dtype)
    with pytest.raises(ValueError, match=f"must be uint8 or float8_e4m3fn, got {dtype}"):
        kv_cache.read(cache, torch.tensor([0]), FLAT_576)
