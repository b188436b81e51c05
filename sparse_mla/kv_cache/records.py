"""A token's record: its fields bit for bit, and real numbers to records and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

E4M3_MAX = 448.0
_SMALLEST_SCALE = 2.0**-126  # float32's smallest normal number: some devices flush smaller ones
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Layout:
    """One way to store a token; the byte ranges are ``(start, stop)`` within its record."""

    name: str
    d_qk: int  # columns of the row, as numbers
    token_bytes: int  # bytes of a token, scales and padding included
    latent: tuple[int, int]  # e4m3
    tile: int = 0  # latent columns that share a scale; 0: the scale is outside the cache
    scales: tuple[int, int] = (0, 0)
    rope: tuple[int, int] = (0, 0)  # bfloat16; empty where rope columns are e4m3 or absent
    first_part: int = 0  # bytes of each record that a page stores before all others; 0: all

    @property
    def d_latent(self) -> int:
        """Columns stored as e4m3."""
        return self.latent[1] - self.latent[0]

    @property
    def tiles(self) -> int:
        """Scales a token."""
        return self.d_latent // self.tile if self.tile else 0


FLAT_512 = Layout("flat-512", 512, 512, (0, 512))
FLAT_576 = Layout("flat-576", 576, 576, (0, 576))
V32 = Layout("v32-656", 576, 656, (0, 512), tile=128, scales=(512, 528), rope=(528, 656))
V4 = Layout(
    "v4-584", 512, 584, (0, 448), tile=64, scales=(576, 583), rope=(448, 576), first_part=576
)
LAYOUTS = {layout.name: layout for layout in (FLAT_512, FLAT_576, V32, V4)}


class Fields(NamedTuple):
    """What the bytes of records say, before any arithmetic."""

    latent: Tensor  # float8_e4m3fn [..., d_latent]
    scales: Tensor | None  # V32: float32 [..., 4]; V4: uint8 [..., 7], UE8M0; flat: None
    rope: Tensor | None  # bfloat16 [..., 64]; flat: None


def split(records: Tensor, layout: Layout) -> Fields:
    """The fields of ``records``, uint8 ``[..., token_bytes]``, bit for bit.

    ``latent`` is a view of them, the other fields are copies.
    """
    check_records(records, layout)
    latent = records[..., slice(*layout.latent)].view(torch.float8_e4m3fn)
    if not layout.tile:
        return Fields(latent, None, None)
    # A view of wider numbers would need records that start at a multiple of their width.
    scales = records[..., slice(*layout.scales)].clone(memory_format=torch.contiguous_format)
    rope = records[..., slice(*layout.rope)].clone(memory_format=torch.contiguous_format)
    if layout is not V4:
        scales = scales.view(torch.float32)
    return Fields(latent, scales, rope.view(torch.bfloat16))


def join(fields: Fields, layout: Layout) -> Tensor:
    """Records, uint8 ``[..., token_bytes]``, from their fields, bit for bit; padding is 0."""
    latent, scales, rope = fields
    lead = tuple(latent.shape[:-1])
    _check_field("latent", latent, (*lead, layout.d_latent), torch.float8_e4m3fn, layout)
    records = torch.zeros((*lead, layout.token_bytes), dtype=torch.uint8, device=latent.device)
    records[..., slice(*layout.latent)] = latent.view(torch.uint8)
    if layout.tile:
        scale_dtype = torch.uint8 if layout is V4 else torch.float32
        scales = _check_field("scales", scales, (*lead, layout.tiles), scale_dtype, layout)
        rope = _check_field("rope", rope, (*lead, 64), torch.bfloat16, layout)
        records[..., slice(*layout.scales)] = scales.contiguous().view(torch.uint8)
        records[..., slice(*layout.rope)] = rope.contiguous().view(torch.uint8)
    return records


def pack(kv: Tensor, layout: Layout, kv_scale: float | Tensor | None = None) -> Tensor:
    """Quantise real KV rows into records, uint8 ``[..., token_bytes]``.

    ``kv``: float32, bfloat16, float16 or float64 ``[..., d_qk]``. ``kv_scale``: required by the
    flat layouts, which keep no scale, and taken by them alone: a positive float, or a float32
    tensor of one element.

    The scale of a tile is ``amax / 448`` (V32) or the smallest power of two not below that (V4),
    over the tile's finite values; a tile of zeros has scale 1. Values are rounded to nearest even.
    No finite value becomes NaN. In latent columns, what is past the range, infinities included,
    becomes the largest number of its sign; NaN stays NaN, and leaves the rest of its tile alone.
    From 2^127 on, rounding up may give a row that unpacks to an infinity.
    """
    if kv.dtype not in _FLOATS:
        raise ValueError(f"kv must be float32, bfloat16, float16 or float64, got {kv.dtype}")
    if kv.ndim < 1 or kv.shape[-1] != layout.d_qk:
        raise ValueError(
            f"layout {layout.name} has rows of {layout.d_qk} columns, got shape {tuple(kv.shape)}"
        )
    scale = _outside_scale(layout, kv_scale, kv.device)
    x = kv.to(torch.float32)
    if scale is not None:
        return join(Fields(to_e4m3(x / scale), None, None), layout)
    latent, rope = x[..., : layout.d_latent], x[..., layout.d_latent :]
    tiles = latent.reshape(*latent.shape[:-1], layout.tiles, layout.tile)
    amax = finite_amax(tiles)
    scales = ue8m0_at_least(amax / E4M3_MAX) if layout is V4 else scale_of(amax)
    factor = ue8m0_to_float(scales) if layout is V4 else scales
    quantised = to_e4m3(tiles / factor.unsqueeze(-1)).flatten(-2)
    return join(Fields(quantised, scales, rope.to(torch.bfloat16)), layout)


def unpack(records: Tensor, layout: Layout, kv_scale: float | Tensor | None = None) -> Tensor:
    """The real values of ``records``: float32 ``[..., d_qk]``; ``kv_scale`` as in ``pack``."""
    scale = _outside_scale(layout, kv_scale, records.device)
    latent, scales, rope = split(records, layout)
    x = latent.to(torch.float32)
    if scale is not None:
        return x * scale
    assert scales is not None
    assert rope is not None
    factor = ue8m0_to_float(scales) if layout is V4 else scales
    tiles = x.reshape(*x.shape[:-1], layout.tiles, layout.tile) * factor.unsqueeze(-1)
    return torch.cat([tiles.flatten(-2), rope.to(torch.float32)], dim=-1)


def ue8m0_to_float(code: Tensor) -> Tensor:
    """UE8M0 bytes as float32, exactly: byte b is ``2^(b - 127)``, so 127 is 1.0; 255 is NaN."""
    if code.dtype != torch.uint8:
        raise ValueError(f"UE8M0 scales must be uint8, got {code.dtype}")
    bits = code.to(torch.int32) << 23
    bits = torch.where(code == 0, 0x00400000, bits)  # 2^-127 is below float32's normal numbers
    bits = torch.where(code == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


def ue8m0_at_least(value: Tensor) -> Tensor:
    """The UE8M0 byte of the smallest power of two not below ``value`` (float32); 127 for 0.

    Rounded up, so that ``x / scale`` stays within e4m3's range. Never below 2^-126.
    """
    mantissa, exponent = torch.frexp(value)  # value = mantissa * 2^exponent, 0.5 <= mantissa < 1
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return (exponent + 127).clamp(1, 254).to(torch.uint8)  # frexp(0) is (0, 0)


def scale_of(amax: Tensor) -> Tensor:
    """The float32 scale that puts ``amax`` at e4m3's largest number; 1 where ``amax`` is 0."""
    scale = (amax / E4M3_MAX).clamp_min(_SMALLEST_SCALE)
    return torch.where(amax == 0, 1.0, scale)


def finite_amax(x: Tensor) -> Tensor:
    """The largest magnitude among the finite values along the last dimension; 0 if none is."""
    if x.shape[-1] == 0:
        return torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
    return torch.where(torch.isfinite(x), x.abs(), 0.0).amax(-1)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to float8_e4m3fn, nearest even. Clamped, as some casts make NaN of what is past 464."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def one_scale(kv_scale: float | Tensor, device: torch.device) -> Tensor:
    """``kv_scale`` as float32 ``[1]``. A tensor's value is not looked at: no wait for the GPU."""
    if isinstance(kv_scale, Tensor):
        if kv_scale.dtype != torch.float32 or kv_scale.numel() != 1:
            raise ValueError(
                "kv_scale must be a float or a float32 tensor of one element, "
                f"got {tuple(kv_scale.shape)}/{kv_scale.dtype}"
            )
        return kv_scale.reshape(1)
    if not (math.isfinite(kv_scale) and kv_scale > 0):
        raise ValueError(f"kv_scale must be a finite positive number, got {kv_scale}")
    return torch.full((1,), kv_scale, dtype=torch.float32, device=device)


def check_records(records: Tensor, layout: Layout) -> None:
    """Raise ``ValueError`` unless ``records`` is uint8 ``[..., token_bytes]``."""
    if records.dtype != torch.uint8:
        raise ValueError(f"records must be uint8, got {records.dtype}")
    if records.ndim < 1 or records.shape[-1] != layout.token_bytes:
        raise ValueError(
            f"layout {layout.name} has records of {layout.token_bytes} bytes, "
            f"got shape {tuple(records.shape)}"
        )


def _check_field(
    name: str, field: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout
) -> Tensor:
    if field is None or tuple(field.shape) != shape or field.dtype != dtype:
        got = "None" if field is None else f"{tuple(field.shape)}/{field.dtype}"
        raise ValueError(f"{name} of layout {layout.name} must be {shape}/{dtype}, got {got}")
    return field


def _outside_scale(
    layout: Layout, kv_scale: float | Tensor | None, device: torch.device
) -> Tensor | None:
    """The scale of a flat layout; a layout that keeps its scales takes none."""
    if layout.tile:
        if kv_scale is not None:
            raise ValueError(f"layout {layout.name} keeps its own scales, but kv_scale was given")
        return None
    if kv_scale is None:
        raise ValueError(f"layout {layout.name} keeps no scale: kv_scale is required, got None")
    return one_scale(kv_scale, device)
