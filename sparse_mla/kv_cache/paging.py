"""Caches of records in pages: by slot, in and out; positions of a request to slots."""

from __future__ import annotations

import torch
from torch import Tensor

from .records import (
    Layout,
    check_records,
    finite_amax,
    one_scale,
    scale_of,
    to_e4m3,
    unpack,
)


def empty_cache(
    layout: Layout,
    pages: int,
    page_size: int,
    *,
    page_bytes: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """A cache of zeros, uint8 ``[pages, page_size, token_bytes]``.

    ``page_bytes``: distance between pages, where an engine rounds it up; else they touch.
    """
    used = page_size * layout.token_bytes
    page_bytes = used if page_bytes is None else page_bytes
    if pages < 0 or page_size < 1 or page_bytes < used:
        raise ValueError(
            f"{pages} pages of {page_size} tokens need page_size >= 1 and {used} bytes a page, "
            f"got page_bytes={page_bytes}"
        )
    storage = torch.zeros((pages, page_bytes), dtype=torch.uint8, device=device)
    return storage[:, :used].view(pages, page_size, layout.token_bytes)


def read(cache: Tensor, slots: Tensor, layout: Layout) -> Tensor:
    """The records at ``slots`` (int32 or int64, any shape): uint8 ``[*slots.shape, token_bytes]``.

    A slot outside the cache, -1 included, gives a record of zeros, which unpacks to zeros. Nothing
    outside the cache is read, and the GPU is not waited for.
    """
    parts, page_size, count = _parts(cache, layout)
    slot = _check_ints("slots", slots).to(torch.int64)
    if count == 0:
        shape = (*slots.shape, layout.token_bytes)
        return torch.zeros(shape, dtype=torch.uint8, device=cache.device)
    inside = (slot >= 0) & (slot < count)
    slot = torch.where(inside, slot, 0)
    page, token = slot // page_size, slot % page_size
    records = torch.cat([part[page, token] for part in parts], dim=-1)
    return records.masked_fill_(~inside.unsqueeze(-1), 0)


def write(cache: Tensor, slots: Tensor, records: Tensor, layout: Layout) -> None:
    """Store ``records``, uint8 ``[n, token_bytes]``, at ``slots`` ``[n]``, in place.

    No slot may come twice. A negative slot is padding, and its record is left out; one past the
    end of the cache is a ``ValueError``, and then nothing is written. Waits for the GPU, to look.
    """
    parts, page_size, count = _parts(cache, layout)
    check_records(records, layout)
    slot = _check_ints("slots", slots).to(torch.int64)
    if slot.ndim != 1 or records.shape[:-1] != slot.shape:
        raise ValueError(
            f"slots must have shape (n,) and records (n, {layout.token_bytes}), "
            f"got {tuple(slots.shape)} and {tuple(records.shape)}"
        )
    if slot.numel() and int(slot.max()) >= count:
        raise ValueError(f"slot {int(slot.max())} is past the end of a cache of {count} slots")
    kept = slot >= 0
    slot, records = slot[kept], records[kept]
    page, token = slot // page_size, slot % page_size
    start = 0
    for part in parts:
        stop = start + part.shape[-1]
        part[page, token] = records[:, start:stop]
        start = stop


def page_slots(block_table: Tensor, requests: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Cache slots of token ``positions`` of ``requests``: int32, of the shape of ``positions``.

    ``block_table``: ``[n_requests, pages_per_request]``, page numbers. ``positions``: ``[n]`` or
    ``[n, topk]``, within the request. ``requests``: ``[n]``, the row of the table for each row of
    positions. All int32 or int64.

    The result is -1, which the operators skip, where a request, position or page number is
    negative, the request or the position is outside the table, or an int32 cannot hold the slot.
    """
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    if block_table.ndim != 2:
        raise ValueError(
            "block_table must have shape (n_requests, pages_per_request), "
            f"got {tuple(block_table.shape)}"
        )
    if requests.ndim != 1 or positions.shape[:1] != requests.shape or positions.ndim > 2:
        raise ValueError(
            "requests must have shape (n,) and positions (n,) or (n, topk), "
            f"got {tuple(requests.shape)} and {tuple(positions.shape)}"
        )
    _check_ints("block_table", block_table)
    request = _check_ints("requests", requests).to(torch.int64)
    position = _check_ints("positions", positions).to(torch.int64)
    if block_table.numel() == 0:
        return torch.full_like(positions, -1, dtype=torch.int32)
    n_requests, width = block_table.shape
    if position.ndim == 2:
        request = request.unsqueeze(1)
    column = position // page_size
    inside = (request >= 0) & (request < n_requests) & (column >= 0) & (column < width)
    row, column = torch.where(inside, request, 0), torch.where(inside, column, 0)
    page = block_table[row, column].to(torch.int64)
    inside = inside & (page >= 0) & (page < 2**31)
    slot = page * page_size + position % page_size
    return torch.where(inside & (slot < 2**31), slot, -1).to(torch.int32)


def gather_float(
    cache: Tensor, slots: Tensor, layout: Layout, kv_scale: float | Tensor | None = None
) -> Tensor:
    """The real rows at ``slots``: float32 ``[*slots.shape, d_qk]``; zeros outside the cache."""
    return unpack(read(cache, slots, layout), layout, kv_scale)


def gather_fp8(
    cache: Tensor,
    slots: Tensor,
    layout: Layout,
    *,
    kv_scale: float | Tensor | None = None,
    per_token: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows of a V32 or V4 cache as the operators take them: flat FP8 with a scale outside.

    ``slots``: int32 or int64 ``[n]``. Returns ``(kv, kv_scale)``: float8_e4m3fn ``[n, d_qk]`` and
    float32 ``[1]``, or ``[n]`` with ``per_token`` (which ``sparse_mla_prefill`` takes). The scale
    is ``amax / 448`` over the rows, rope columns included, unless ``kv_scale`` is given; rounding
    and non-finite values as in ``pack``.

    Row ``n`` of the result is the token in slot ``slots[n]``: the operators' ``indices`` count
    these rows, not slots of the cache. A slot outside the cache, -1 included, gives a row of zeros.
    This rounds a second time: tiles that had a scale each now share one.
    """
    if not layout.tile:
        raise ValueError(f"a cache of layout {layout.name} is flat FP8 already: use it as it is")
    if slots.ndim != 1:
        raise ValueError(f"slots must have shape (n,), got {tuple(slots.shape)}")
    if per_token and kv_scale is not None:
        raise ValueError("kv_scale was given, and per_token=True asks for another")
    rows = gather_float(cache, slots, layout)
    if kv_scale is not None:
        scale = one_scale(kv_scale, rows.device)
    elif per_token:
        scale = scale_of(finite_amax(rows))
    else:
        scale = scale_of(finite_amax(rows.flatten())).reshape(1)
    return to_e4m3(rows / scale.unsqueeze(-1)), scale


def _parts(cache: Tensor, layout: Layout) -> tuple[list[Tensor], int, int]:
    """Views ``[pages, page_size, bytes]`` that side by side make records; page size; slots."""
    if cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(f"a cache must be uint8 or float8_e4m3fn, got {cache.dtype}")
    shape, strides = tuple(cache.shape), cache.stride()
    if cache.ndim == 4 and shape[2] == 1:
        cache = cache.squeeze(2)
    if cache.ndim == 2 and not layout.first_part:
        cache = cache.unsqueeze(1)
    if cache.ndim != 3 or cache.shape[2] != layout.token_bytes:
        raise ValueError(
            f"a cache of layout {layout.name} must have shape "
            f"(pages, page_size, {layout.token_bytes}), got {shape}"
        )
    pages, page_size, token_bytes = cache.shape
    dense_page = page_size == 1 or cache.stride(1) == token_bytes
    if cache.stride(2) != 1 or (layout.first_part and not dense_page):
        raise ValueError(
            f"a cache of layout {layout.name} must be dense within a page, got strides {strides}"
        )
    cache = cache.view(torch.uint8)
    if not layout.first_part:
        return [cache], page_size, pages * page_size
    page = cache.view(pages, page_size * token_bytes)
    border = page_size * layout.first_part
    first = page[:, :border].view(pages, page_size, layout.first_part)
    second = page[:, border:].view(pages, page_size, token_bytes - layout.first_part)
    return [first, second], page_size, pages * page_size


def _check_ints(name: str, ints: Tensor) -> Tensor:
    if ints.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {ints.dtype}")
    return ints
