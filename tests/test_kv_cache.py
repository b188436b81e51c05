"""KV-cache layouts: the bytes themselves, round trips, pages, and the faults met elsewhere."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla import kv_cache
from sparse_mla.kv_cache import FLAT_512, FLAT_576, V4, V32, Fields, Layout

ALL = [pytest.param(layout, id=layout.name) for layout in (FLAT_512, FLAT_576, V32, V4)]
TILED = [pytest.param(layout, id=layout.name) for layout in (V32, V4)]
FLAT = [pytest.param(layout, id=layout.name) for layout in (FLAT_512, FLAT_576)]

# e4m3 has 3 mantissa bits: half a step is 1/16 of the value where numbers are normal, and below
# 2^-6 (of 448 at most) the step is 2^-9 whatever the value.
E4M3_RELATIVE = 1 / 16
E4M3_ABSOLUTE = 2.0**-10


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def random_rows(n: int, layout: Layout, seed: int = 0) -> torch.Tensor:
    """Rows whose tiles have very different magnitudes, so that a swapped scale shows."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, layout.d_qk, generator=generator)
    if layout.tile:
        for k in range(layout.tiles):
            rows[:, k * layout.tile : (k + 1) * layout.tile] *= 10.0 ** (3 - 2 * (k % 4))
    return rows


def scale_for(layout: Layout) -> float | None:
    return None if layout.tile else 1 / 64


def within_fp8_error(got: torch.Tensor, want: torch.Tensor, layout: Layout) -> bool:
    """Half a step of e4m3 under the scale that the tile's largest value asks for (V4: doubled)."""
    latent = slice(0, layout.d_latent)
    width = layout.tile or layout.d_latent
    tiles = want[:, latent].reshape(want.shape[0], -1, width)
    scale = tiles.abs().amax(-1, keepdim=True) / 448 * (2 if layout is V4 else 1)
    if not layout.tile:
        scale = torch.full_like(scale, 1 / 64)
    bound = torch.maximum(tiles.abs() * E4M3_RELATIVE, scale * E4M3_ABSOLUTE) * (1 + 1e-6)
    error = (got[:, latent].reshape(tiles.shape) - tiles).abs()
    return bool((error <= bound).all())


# The bytes.


def test_v32_row_is_512_codes_then_4_float32_scales_then_64_bfloat16():
    row = torch.zeros(1, 576)
    row[0, 0:128] = 448.0  # scale 1: code 0x7e
    row[0, 128:256] = -1.0  # scale 1/448: code 0xfe
    row[0, 256:384] = torch.tensor([896.0] + [2.0] * 127)  # scale 2: 896 is 0x7e, 2 is 1.0 = 0x38
    row[0, 512:576] = torch.tensor([1.0, -2.0] * 32)
    expected = (
        b"\x7e" * 128
        + b"\xfe" * 128
        + b"\x7e"
        + b"\x38" * 127
        + b"\x00" * 128
        + struct.pack("<4f", 1.0, 1 / 448, 2.0, 1.0)
        + b"\x80\x3f\x00\xc0" * 32
    )
    assert bytes(kv_cache.pack(row, V32)[0].tolist()) == expected


def test_v4_record_is_448_codes_then_64_bfloat16_then_7_ue8m0_scales_and_a_zero():
    row = torch.ones(1, 512)
    row[0, 64:128] = 448.0
    row[0, 128:192] = 449.0
    row[0, 192:256] = 0.0
    # 1 / 448 is above 2^-9, so the scale is 2^-8 (byte 119) and the code that of 256: 0x78.
    # 448 needs 2^0 (127) and is 0x7e; 449 needs 2^1 (128), and 224.5 rounds to 224: 0x76.
    expected = (
        b"\x78" * 64
        + b"\x7e" * 64
        + b"\x76" * 64
        + b"\x00" * 64
        + b"\x78" * 192
        + b"\x80\x3f" * 64
        + bytes([119, 127, 128, 127, 119, 119, 119])
        + b"\x00"
    )
    assert bytes(kv_cache.pack(row, V4)[0].tolist()) == expected


@pytest.mark.parametrize("layout", FLAT)
def test_flat_rows_are_e4m3_codes_and_nothing_else(layout: Layout):
    row = torch.full((1, layout.d_qk), 0.5)
    assert bytes(kv_cache.pack(row, layout, 0.5)[0].tolist()) == b"\x38" * layout.d_qk


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0, 2.0**-127),
        (1, 2.0**-126),
        (119, 2.0**-8),
        (126, 0.5),
        (127, 1.0),
        (128, 2.0),
        (254, 2.0**127),
    ],
)
def test_ue8m0_byte_is_a_power_of_two(code: int, value: float):
    assert kv_cache.ue8m0_to_float(torch.tensor([code], dtype=torch.uint8)).tolist() == [value]


def test_ue8m0_255_is_nan():
    assert kv_cache.ue8m0_to_float(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 127),
        (1.0, 127),
        (1.0 + 2**-23, 128),
        (1.0 - 2**-24, 127),
        (0.5, 126),
        (2.0**-126, 1),
        (2.0**-140, 1),
        (2.0**127, 254),
    ],
)
def test_ue8m0_scale_is_the_next_power_of_two_up(value: float, code: int):
    assert kv_cache.ue8m0_at_least(torch.tensor([value])).tolist() == [code]


# Round trips.


@pytest.mark.parametrize("layout", ALL)
def test_split_and_join_give_back_every_bit(layout: Layout):
    records = random_bytes(50, layout.token_bytes)
    if layout is V4:
        records[:, 583] = 0  # the padding is not a field
    assert torch.equal(kv_cache.join(kv_cache.split(records, layout), layout), records)


@pytest.mark.parametrize("layout", TILED)
def test_split_reads_records_that_start_at_an_odd_byte(layout: Layout):
    records = random_bytes(3, layout.token_bytes)
    odd = torch.cat([torch.zeros(1, dtype=torch.uint8), records.flatten()])[1:].view(3, -1)
    for got, want in zip(kv_cache.split(odd, layout), kv_cache.split(records, layout), strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("layout", ALL)
def test_values_that_the_layout_can_hold_come_back_exactly(layout: Layout):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    finite = codes[codes.isfinite()]
    row = finite.repeat(3)[: layout.d_qk].clone()
    if layout.tile:
        row[:: layout.tile // 2] = 448.0  # each tile's scale is 1 before its factor
        for k in range(layout.tiles):
            row[k * layout.tile : (k + 1) * layout.tile] *= 2.0 ** (k - 3)
    row[-64:] = torch.linspace(-3, 3, 64).to(torch.float8_e4m3fn).to(torch.float32)
    back = kv_cache.unpack(
        kv_cache.pack(row[None], layout, scale_one(layout)), layout, scale_one(layout)
    )
    assert torch.equal(back[0], row)


def scale_one(layout: Layout) -> float | None:
    return None if layout.tile else 1.0


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_row_comes_back_within_fp8_rounding(layout: Layout, dtype: torch.dtype):
    rows = random_rows(40, layout).clamp(-6e3, 6e3) if layout.tile else random_rows(40, layout)
    rows = rows.to(dtype)
    scale = scale_for(layout)
    got = kv_cache.unpack(kv_cache.pack(rows, layout, scale), layout, scale)
    assert got.dtype == torch.float32
    assert within_fp8_error(got, rows.to(torch.float32), layout)
    if layout.tile:
        rope = slice(layout.d_latent, None)
        assert torch.equal(got[:, rope], rows[:, rope].float().bfloat16().float())


@given(st.lists(st.floats(width=32), min_size=64, max_size=64))
def test_no_finite_value_becomes_nan_and_nan_stays_where_it_is(values: list[float]):
    row = torch.zeros(1, 512)
    row[0, :64] = torch.tensor(values)
    back = kv_cache.unpack(kv_cache.pack(row, V4), V4)
    assert torch.equal(back.isnan(), row.isnan())
    assert not back[row.abs() < 2.0**127].isinf().any()


@pytest.mark.parametrize("layout", TILED)
def test_one_infinite_value_does_not_change_the_rest_of_its_tile(layout: Layout):
    row = random_rows(1, layout)
    row[0, 1] = row[0].abs().max()
    spoilt = row.clone()
    spoilt[0, 0] = float("inf")
    clean = row.clone()
    clean[0, 0] = 0.0
    with_inf, without = (kv_cache.pack(x, layout)[0] for x in (spoilt, clean))
    assert with_inf[0] == 0x7E
    assert torch.equal(with_inf[1:], without[1:])


@pytest.mark.parametrize("layout", ALL)
def test_zero_rows_are_zero_and_empty_input_is_empty(layout: Layout):
    scale = scale_for(layout)
    zeros = kv_cache.unpack(
        kv_cache.pack(torch.zeros(2, layout.d_qk), layout, scale), layout, scale
    )
    assert torch.equal(zeros, torch.zeros(2, layout.d_qk))
    empty = kv_cache.pack(torch.zeros(0, layout.d_qk), layout, scale)
    assert empty.shape == (0, layout.token_bytes)
    assert kv_cache.unpack(empty, layout, scale).shape == (0, layout.d_qk)


@pytest.mark.parametrize("layout", TILED)
@pytest.mark.parametrize("exponent", [-110, -130])
def test_a_tiny_tile_keeps_its_values(layout: Layout, exponent: int):
    """A scale below float32's normal numbers has too few bits, and is 0 on some devices."""
    row = torch.full((1, layout.d_qk), 1.625 * 2.0**exponent)
    got = kv_cache.unpack(kv_cache.pack(row, layout), layout)[0, 0].item()
    assert got == pytest.approx(row[0, 0].item(), rel=2**-22, abs=0)


@pytest.mark.parametrize("value", [464.0, 465.0, 480.0, 1e6, float("inf")])
def test_what_is_past_the_range_becomes_the_largest_number(value: float):
    row = torch.full((1, 512), value)
    row[0, 1::2] *= -1
    back = kv_cache.unpack(kv_cache.pack(row, FLAT_512, 2.0**-3), FLAT_512, 2.0**-3)
    assert back[0, :2].tolist() == [56.0, -56.0]


# Faults met elsewhere.


def test_float32_scales_are_not_rounded_to_a_power_of_two():
    """C2: 0.0123 is neither 0.0078 (2^-7) nor 0.0156 (2^-6)."""
    latent = torch.ones(1, 512).to(torch.float8_e4m3fn)
    scales = torch.full((1, 4), 0.0123)
    records = kv_cache.join(Fields(latent, scales, torch.zeros(1, 64).bfloat16()), V32)
    assert kv_cache.unpack(records, V32)[0, :512].unique().tolist() == [scales[0, 0].item()]
    row = torch.full((1, 576), 448 * 0.0123)
    assert struct.unpack("<4f", bytes(kv_cache.pack(row, V32)[0, 512:528].tolist())) == (
        pytest.approx((0.0123,) * 4, rel=1e-6)
    )


@pytest.mark.parametrize(
    ("layout", "tile"),
    [
        pytest.param(layout, tile, id=f"{layout.name}-tile{tile}")
        for layout in (V32, V4)
        for tile in range(layout.tiles)
    ],
)
def test_a_tile_touches_its_own_codes_and_scale_alone(layout: Layout, tile: int):
    """C13: a block that runs on past the codes writes into the scales."""
    row = torch.ones(1, layout.d_qk)
    changed = row.clone()
    changed[0, tile * layout.tile : (tile + 1) * layout.tile] = 3000.0
    differs = (kv_cache.pack(row, layout) != kv_cache.pack(changed, layout))[0].nonzero()
    width = 4 if layout is V32 else 1
    start = layout.scales[0] + tile * width
    own = set(range(tile * layout.tile, (tile + 1) * layout.tile)) | set(
        range(start, start + width)
    )
    assert set(differs.flatten().tolist()) <= own
    assert set(differs.flatten().tolist()) & set(range(start, start + width))


@pytest.mark.parametrize("layout", ALL)
def test_a_row_of_another_width_is_refused(layout: Layout):
    """F6: rows without rope are 512 wide; taking them for 576 reads past the row."""
    wrong = 512 if layout.d_qk == 576 else 576
    with pytest.raises(
        ValueError, match=rf"rows of {layout.d_qk} columns, got shape \(3, {wrong}\)"
    ):
        kv_cache.pack(torch.zeros(3, wrong), layout, scale_for(layout))


def test_codes_are_e4m3fn_where_0x38_is_one_and_0x80_is_zero():
    """H1: taken for e4m3fnuz, 0x38 would be 0.5 and 0x80 NaN."""
    records = torch.zeros(1, 576, dtype=torch.uint8)
    records[0, 0], records[0, 1] = 0x38, 0x80
    assert kv_cache.unpack(records, FLAT_576, 1.0)[0, :3].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int32])
def test_rows_that_are_no_real_numbers_are_refused(dtype: torch.dtype):
    with pytest.raises(ValueError, match=f"kv must be float32.*got {dtype}"):
        kv_cache.pack(torch.zeros(1, 576, dtype=dtype), V32)


@pytest.mark.parametrize("layout", FLAT)
def test_a_missing_scale_is_an_error_and_not_1(layout: Layout):
    """H6: no scale must not reach the arithmetic."""
    with pytest.raises(ValueError, match="kv_scale is required, got None"):
        kv_cache.pack(torch.zeros(1, layout.d_qk), layout)


@pytest.mark.parametrize("layout", TILED)
def test_a_scale_beside_the_layouts_own_is_an_error(layout: Layout):
    with pytest.raises(ValueError, match="keeps its own scales, but kv_scale was given"):
        kv_cache.unpack(torch.zeros(1, layout.token_bytes, dtype=torch.uint8), layout, 1.0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_must_be_a_finite_positive_number(value: float):
    with pytest.raises(ValueError, match=f"finite positive number, got {value}"):
        kv_cache.pack(torch.zeros(1, 576), FLAT_576, value)


def test_a_scale_tensor_has_one_float32():
    with pytest.raises(ValueError, match=r"got \(2,\)/torch.float32"):
        kv_cache.pack(torch.zeros(1, 576), FLAT_576, torch.ones(2))
    with pytest.raises(ValueError, match=r"got \(1,\)/torch.float16"):
        kv_cache.pack(torch.zeros(1, 576), FLAT_576, torch.ones(1).half())


@pytest.mark.parametrize("layout", ALL)
def test_fields_that_do_not_fit_are_refused(layout: Layout):
    records = torch.zeros(2, layout.token_bytes, dtype=torch.uint8)
    fields = kv_cache.split(records, layout)
    with pytest.raises(ValueError, match=rf"latent of layout {layout.name} must be"):
        kv_cache.join(fields._replace(latent=fields.latent[:, 1:]), layout)
    with pytest.raises(ValueError, match="records must be uint8, got torch.int8"):
        kv_cache.split(records.view(torch.int8), layout)
    with pytest.raises(ValueError, match=rf"{layout.token_bytes} bytes, got shape \(2, 100\)"):
        kv_cache.split(records[:, :100], layout)
    if layout.tile:
        with pytest.raises(ValueError, match="scales of layout .* got None"):
            kv_cache.join(fields._replace(scales=None), layout)
        with pytest.raises(ValueError, match=r"rope of layout .* got \(2, 64\)/torch.float16"):
            kv_cache.join(fields._replace(rope=torch.zeros(2, 64).half()), layout)
