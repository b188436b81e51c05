"""Timing: events on a GPU, the clock on a CPU, rounds that interleave what is compared.

Moods of a card:

    burst       8 rounds back to back after 0.25 s of idle, mostly before the power limit acts
    sustained   rounds back to back, once the card has settled under load

A CPU has the one mood ``sustained``.
"""

from __future__ import annotations

import math
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
AHEAD_MS_A_CALL = 0.3
"""The GPU is kept busy for as long before the first timed call as the host may take to enqueue
all of them, so that no launch is waited for."""
FEWEST_AHEAD_MS, MOST_AHEAD_MS = 10.0, 50.0
"""One call of plain torch is dozens of launches."""
SPIN_CYCLES_A_MS = 2_000_000
"""Of the GPU's clock at its highest; at a lower one a spin lasts longer."""
COUNTED_CYCLES = 2_000_000
"""Of the spin that tells the clock: a millisecond, in which the GPU hardly recovers."""


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
        self.sm_mhz: float | None = None
        """The clock of the multiprocessors right behind the last timed call."""
        self.scratch = torch.empty(flush_bytes, dtype=torch.uint8, device=device)

    def settle(self, calls: Sequence[Call]) -> None:
        """Run the calls in turn for a while: clocks and temperature reach what lasts."""
        until = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < until:
            for call in calls:
                call()
            torch.cuda.synchronize(self.device)

    def times(self, calls: Sequence[Call], mood: Mood, untimed: Sequence[Call] = ()) -> list[float]:
        """Milliseconds of each call on the GPU, one after the other.

        ``untimed`` are calls of the same work, which go before when ``sustained``: the GPU should
        not rest there. In the 8 ms after a spin an FP8 matmul took 0.82 to 0.86 ms, then 0.74.
        """
        events = [(_event(), _event()) for _ in calls]
        torch.cuda.synchronize(self.device)
        if mood == "burst":
            time.sleep(IDLE_SECONDS)
        ahead = min(max(AHEAD_MS_A_CALL * len(calls), FEWEST_AHEAD_MS), MOST_AHEAD_MS)
        if mood == "burst" or not self._work_ahead(untimed, ahead):
            torch.cuda._sleep(int(SPIN_CYCLES_A_MS * ahead))  # type: ignore[no-untyped-call]
        for call, (start, stop) in zip(calls, events, strict=True):
            self._overwrite_l2()
            start.record()
            call()
            stop.record()
        start, stop = _event(), _event()
        start.record()
        torch.cuda._sleep(COUNTED_CYCLES)  # type: ignore[no-untyped-call]
        stop.record()
        torch.cuda.synchronize(self.device)
        self.sm_mhz = COUNTED_CYCLES / start.elapsed_time(stop) / 1e3
        return [start.elapsed_time(stop) for start, stop in events]

    def _work_ahead(self, calls: Sequence[Call], milliseconds: float) -> bool:
        """Have the GPU work on these calls for so long after the host is done with them.

        False where the host takes about as long over them as the GPU: it would never get ahead.
        """
        start, stop = _event(), _event()
        begin = time.perf_counter()
        start.record()
        self._enqueue(calls)
        stop.record()
        enqueued = (time.perf_counter() - begin) * 1e3
        torch.cuda.synchronize(self.device)
        gain = start.elapsed_time(stop) - 2 * enqueued  # once more for the launch it waited for
        if gain <= enqueued:
            return False
        for _ in range(math.ceil(milliseconds / gain)):
            self._enqueue(calls)
        return True

    def _enqueue(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._overwrite_l2()
            call()

    def _overwrite_l2(self) -> None:
        if self.scratch.numel():
            self.scratch.zero_()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class CpuClock:
    """Times calls by the clock."""

    sm_mhz: float | None = None

    def settle(self, calls: Sequence[Call]) -> None:
        """Nothing: a CPU's first call warms it up."""

    def times(self, calls: Sequence[Call], mood: Mood, untimed: Sequence[Call] = ()) -> list[float]:
        """Milliseconds of each call; there is nothing to get ahead of."""
        spent = []
        for call in calls:
            start = time.perf_counter()
            call()
            spent.append((time.perf_counter() - start) * 1e3)
        return spent


Clock = GpuClock | CpuClock


def interleaved(
    calls: dict[str, list[Call]], clock: Clock, mood: Mood, untimed: Sequence[Call] = ()
) -> dict[str, list[float]]:
    """Milliseconds of each name's calls, which take turns: one round, a call of each name.

    Names have equally many calls. In bursts, so many rounds follow each other after each pause as
    mostly stay before the power limit. ``untimed``: see ``GpuClock.times``.
    """
    rounds = list(zip(*calls.values(), strict=True))
    together = BURST_ROUNDS if mood == "burst" else max(1, len(rounds))
    spent: list[float] = []
    for start in range(0, len(rounds), together):
        part = [call for each in rounds[start : start + together] for call in each]
        spent += clock.times(part, mood, untimed)
    return {name: spent[number :: len(calls)] for number, name in enumerate(calls)}
