"""Timing: events on a GPU, the clock on a CPU, rounds that interleave what is compared.

Moods of a card:

    burst       8 rounds back to back after 0.25 s of idle, mostly before the power limit acts
    sustained   rounds back to back, once the card has settled under load

A CPU has the one mood ``sustained``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

Mood = Literal["burst", "sustained"]
MOODS: tuple[Mood, ...] = ("burst", "sustained")

Call = Callable[[], Any]

IDLE_SECONDS = 0.25
BURST_ROUNDS = 8
SETTLE_SECONDS = 1.0
WARM_CALLS = 3
CYCLES_A_CALL = 600_000
"""The GPU is kept busy for as long before the first timed call as the host may take to enqueue
all of them (300 us a call), so that no launch is waited for."""
FEWEST_CYCLES, MOST_CYCLES = 20_000_000, 100_000_000
"""10 to 50 ms: one call of plain torch is dozens of launches."""


def summary(milliseconds: Sequence[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile, extremes, the count, and every time in order."""
    if len(milliseconds) < 2:
        tenths = [milliseconds[0]] * 9
    else:
        tenths = statistics.quantiles(milliseconds, n=10, method="inclusive")
    return {
        "median_ms": statistics.median(milliseconds),
        "p10_ms": tenths[0],
        "p90_ms": tenths[-1],
        "min_ms": min(milliseconds),
        "max_ms": max(milliseconds),
        "runs": len(milliseconds),
        "all_ms": list(milliseconds),
    }


class GpuClock:
    """Times calls on a CUDA device; with ``flush_bytes`` the L2 is overwritten before each."""

    def __init__(self, device: torch.device, flush_bytes: int = 0) -> None:
        self.device = device
        self.scratch = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def settle(self, calls: Sequence[Call]) -> None:
        """Run the calls in turn for a while: clocks and temperature reach what lasts."""
        until = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < until:
            for call in calls:
                call()
            torch.cuda.synchronize(self.device)

    def times(self, calls: Sequence[Call], mood: Mood) -> list[float]:
        """Milliseconds of each call on the GPU, one after the other."""

        def event() -> torch.cuda.Event:
            return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

        events = [(event(), event()) for _ in calls]
        torch.cuda.synchronize(self.device)
        if mood == "burst":
            time.sleep(IDLE_SECONDS)
        torch.cuda._sleep(min(max(CYCLES_A_CALL * len(calls), FEWEST_CYCLES), MOST_CYCLES))  # type: ignore[no-untyped-call]
        for call, (start, stop) in zip(calls, events, strict=True):
            if self.scratch.numel():
                self.scratch.zero_()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) for start, stop in events]


class CpuClock:
    """Times calls by the clock."""

    def settle(self, calls: Sequence[Call]) -> None:
        """Nothing: a CPU's first call warms it up."""

    def times(self, calls: Sequence[Call], mood: Mood) -> list[float]:
        """Milliseconds of each call."""
        spent = []
        for call in calls:
            start = time.perf_counter()
            call()
            spent.append((time.perf_counter() - start) * 1e3)
        return spent


Clock = GpuClock | CpuClock


def interleaved(calls: dict[str, list[Call]], clock: Clock, mood: Mood) -> dict[str, list[float]]:
    """Milliseconds of each name's calls, which take turns: one round, a call of each name.

    Names have equally many calls. In bursts, so many rounds follow each other after each pause as
    mostly stay before the power limit.
    """
    rounds = list(zip(*calls.values(), strict=True))
    together = BURST_ROUNDS if mood == "burst" else max(1, len(rounds))
    spent: list[float] = []
    for start in range(0, len(rounds), together):
        part = [call for each in rounds[start : start + together] for call in each]
        spent += clock.times(part, mood)
    return {name: spent[number :: len(calls)] for number, name in enumerate(calls)}
