"""How fast float queries become FP8 on Hopper, beside the memory's speed and the torch path.

    python benchmarks/quantize.py

A figure is the median of 32 calls, back to back, over input sets that no cache holds together.
GB/s counts q read once and its bytes and scales written once. The results of every timed input set
are compared with the torch path's, bit for bit. *Copy* moves as many bytes as the kernel reads and
writes. Host time is that of a call with little to do.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from sparse_mla import quantize  # noqa: E402
from sparse_mla.backends import sm90  # noqa: E402

RUNS = 32
WARM_CALLS = 5
CACHES = 1 << 28
"""Bytes of inputs that are more than the L2 cache holds, several times."""
HEAD_START = 4_000_000
"""Cycles that the GPU is kept busy before the first timed call, so that no launch is waited for."""
HOST_CALLS = 500


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    s_q: int
    h_q: int
    d_qk: int
    dtype: torch.dtype
    scale: str = "own"  # or "given", one a token and head
    rows: str = "aligned"  # or "odd": they start an element past 16 bytes

    @property
    def bytes(self) -> int:
        """Read and written: q, its FP8, a scale a row."""
        return self.s_q * self.h_q * (self.d_qk * (self.dtype.itemsize + 1) + 4)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS = (
    Row(4096, 128, 576, BF16),
    Row(4096, 128, 512, BF16),
    Row(4096, 128, 576, FP16),
    Row(4096, 128, 576, FP32),
    Row(4096, 128, 512, FP32),
    Row(4096, 128, 576, BF16, scale="given"),
    Row(4096, 128, 576, BF16, rows="odd"),
    Row(4096, 128, 576, FP32, rows="odd"),
    Row(1024, 64, 576, BF16),
    Row(128, 128, 576, BF16),
)


def queries(row: Row) -> torch.Tensor:
    """Normal numbers, heads of different size."""
    gap = 1 if row.rows == "odd" else 0
    q = torch.empty(row.s_q, row.h_q, row.d_qk + 8 * gap, dtype=row.dtype, device="cuda").normal_()
    q *= torch.linspace(0.1, 30, row.h_q, device="cuda").to(row.dtype)[:, None]
    return q[..., gap : gap + row.d_qk]


def median_ms(calls: list[Callable[[], Any]]) -> float:
    """Of one call on the GPU."""
    for call in calls[:WARM_CALLS]:
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(RUNS + 1)]
    torch.cuda._sleep(HEAD_START)
    marks[0].record()
    for number, mark in enumerate(marks[1:]):
        calls[number % len(calls)]()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in pairwise(marks))


def measure(row: Row) -> str:
    """One line of the table; AssertionError unless every result is right."""
    size = row.s_q * row.h_q * row.d_qk * row.dtype.itemsize
    sets = [queries(row) for _ in range(max(2, min(RUNS, -(-CACHES // size))))]
    scale = torch.rand(row.s_q, row.h_q, device="cuda") if row.scale == "given" else None
    for q in sets:
        for got, want in zip(by_kernel(q, scale), by_torch(q, scale), strict=True):
            same = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
            assert same, f"{row}: the bytes differ from the torch path's"
    kernel = median_ms([lambda q=q: by_kernel(q, scale) for q in sets])
    plain = median_ms([lambda q=q: by_torch(q, scale) for q in sets])
    moved = row.bytes // 2
    sources = [torch.ones(moved, dtype=torch.uint8, device="cuda") for _ in sets]
    target = torch.empty_like(sources[0])
    copy = median_ms([lambda x=x: target.copy_(x) for x in sources])
    name = (
        f"{row.s_q:5} {row.h_q:4} {row.d_qk:4}  {str(row.dtype)[6:]:9} {row.scale:6} {row.rows:8}"
    )
    return (
        f"{name} {kernel * 1e3:8.1f} {row.bytes / kernel / 1e6:7.0f} "
        f"{2 * moved / copy / 1e6:10.0f} {plain * 1e3:9.1f} {plain / kernel:7.1f}"
    )


def by_kernel(q: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch."""
    found = sm90.quantize_queries(q, scale)
    assert found is not None, "no Hopper GPU"
    return found


by_torch = quantize.quantize_queries


def host_us(call: Callable[[], Any]) -> float:
    """Of one call, while the GPU keeps up."""
    spent = []
    for _ in range(HOST_CALLS):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(spent) * 1e6


def main() -> None:
    """Check each case, time it, print a table."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(
        "  s_q  h_q d_qk  q         scale  rows           us    GB/s  copy GB/s  torch us  faster"
    )
    for row in ROWS:
        print(measure(row))
    q = torch.ones(1, 64, 576, dtype=BF16, device="cuda")
    kernel, plain = (host_us(lambda call=call: call(q, None)) for call in (by_kernel, by_torch))
    print(f"host: {kernel:.1f} us a call, the torch path {plain:.1f} us")


if __name__ == "__main__":
    main()
