"""Timing: statistics, who takes turns with whom, and a GPU's clock on a card that is arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_results import results, times

from sparse_mla.benchmarks import ceilings, timing

CPU = torch.device("cpu")


def test_a_summary_of_literal_times() -> None:
    found = timing.summary([5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert found == {
        "median_ms": 6.0, "p10_ms": 2.0, "p90_ms": 10.0, "min_ms": 1.0, "max_ms": 11.0, "runs": 11,
        "all_ms": [5.0, 1.0, 2.0, 3.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0],
    }  # fmt: skip
    assert timing.summary([3.0])["p90_ms"] == 3.0


class RecordingClock(timing.CpuClock):
    """Says in which order and groups calls were made; each takes as long as its place."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def times(self, calls: Any, mood: timing.Mood, untimed: Any = ()) -> list[float]:
        self.groups.append(len(calls))
        return [call() for call in calls]


@pytest.mark.parametrize(("mood", "groups"), [("sustained", [20]), ("burst", [16, 4])])
def test_rounds_interleave_what_is_compared(mood: timing.Mood, groups: list[int]) -> None:
    made: list[str] = []

    def call(name: str, number: int) -> timing.Call:
        return lambda: made.append(name) or float(number)

    calls = {name: [call(name, number) for number in range(10)] for name in "ab"}
    clock = RecordingClock()
    found = timing.interleaved(calls, clock, mood)
    assert made == ["a", "b"] * 10
    assert clock.groups == groups
    assert found == {"a": [float(n) for n in range(10)], "b": [float(n) for n in range(10)]}


class Card:
    """A GPU whose queue is a number: when it is done with what it was given, in milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mhz: float = 1500.0) -> None:
        self.host = self.done = 0.0
        self.mhz = mhz
        self.log: list[str] = []
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                card.enqueue(0.002, 0.0)
                self.at = max(card.done, card.host)

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        def synchronize(device: Any) -> None:
            card.host = max(card.host, card.done)

        def spin(cycles: int) -> None:
            card.log.append("spin")
            card.enqueue(0.005, cycles / card.mhz / 1e3)

        def sleep(seconds: float) -> None:
            card.log.append("idle")
            card.host += seconds * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", spin, raising=False)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: card.host / 1e3)
        monkeypatch.setattr(timing.time, "sleep", sleep)

    def enqueue(self, host: float, work: float) -> None:
        self.host += host
        self.done = max(self.done, self.host) + work

    def call(self, name: str, host: float, work: float) -> Callable[[], None]:
        return lambda: (self.log.append(name), self.enqueue(host, work))[-1]


@pytest.mark.parametrize(
    ("mood", "host", "work", "before"),
    [
        ("sustained", 0.05, 0.8, {"work"}),  # as it lasts: no pause between untimed and timed
        ("sustained", 0.2, 0.01, {"work", "spin"}),  # launches that the GPU would wait for
        ("burst", 0.05, 0.8, {"idle", "spin"}),
    ],
)
def test_a_launch_is_never_waited_for(
    monkeypatch: pytest.MonkeyPatch, mood: timing.Mood, host: float, work: float, before: set[str]
) -> None:
    card = Card(monkeypatch)
    clock = timing.GpuClock(CPU)
    timed = [card.call("timed", host, work)] * 40
    spent = clock.times(timed, mood, [card.call("work", host, work)])
    assert spent == pytest.approx([work] * 40)
    assert set(card.log[: card.log.index("timed")]) == before


def test_the_untimed_calls_outlast_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 calls that the host may take 0.3 ms each over: 12 ms of work go before them."""
    card = Card(monkeypatch)
    timing.GpuClock(CPU).times(
        [card.call("timed", 0.05, 0.8)] * 40, "sustained", [card.call("work", 0.05, 0.8)]
    )
    ahead = card.log.count("work") - 1  # the first one is measured
    assert 12 <= ahead * (0.8 - 0.05) < 13


@pytest.mark.parametrize("mood", timing.MOODS)
def test_the_clock_is_counted_right_behind_the_last_call(
    monkeypatch: pytest.MonkeyPatch, mood: timing.Mood
) -> None:
    card = Card(monkeypatch, mhz=1490.0)
    clock = timing.GpuClock(CPU)
    clock.times([card.call("timed", 0.05, 0.8)] * 4, mood, [card.call("work", 0.05, 0.8)])
    assert clock.sm_mhz == pytest.approx(1490.0, rel=0.01)
    assert card.log[-2:] == ["timed", "spin"]


def test_untimed_calls_overwrite_the_l2_as_timed_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    clock = timing.GpuClock(CPU, flush_bytes=4)

    def call() -> None:
        assert not clock.scratch.any()
        clock.scratch.fill_(1)
        card.enqueue(0.05, 0.8)

    clock.scratch.fill_(1)
    clock.times([call] * 3, "sustained", [call])


def test_shares_of_the_ceilings() -> None:
    limits = results()["ceilings"]["burst"]
    found = ceilings.shares(800.0, 3.0, limits)
    assert found == {"of_matmul": 0.5, "of_copy": 0.75, "of_roofline": 0.75}
    assert ceilings.shares(800.0, 3.0, {}) == {
        "of_matmul": None, "of_copy": None, "of_roofline": None
    }  # fmt: skip


class SteadyClock(timing.CpuClock):
    """Each call takes so many milliseconds; remembers how many there were."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds
        self.counts: list[int] = []

    def times(self, calls: Any, mood: timing.Mood, untimed: Any = ()) -> list[float]:
        assert list(untimed) == [calls[0]]  # the same work goes before
        self.counts.append(len(calls))
        return [self.milliseconds] * len(calls)


@pytest.mark.parametrize(
    ("mood", "milliseconds", "counts"),
    [
        ("sustained", 0.8, [16, 500]),  # 16 would be over within 13 ms
        ("sustained", 30.0, [16]),
        ("burst", 0.8, [8, 8]),
    ],
)
def test_a_sustained_ceiling_lasts(
    mood: timing.Mood, milliseconds: float, counts: list[int]
) -> None:
    clock = SteadyClock(milliseconds)
    found = ceilings._sample(lambda: None, clock, mood, 16)
    assert clock.counts == counts
    assert len(found) == (counts[-1] if mood == "sustained" else 16)


def test_a_ceiling_says_whether_it_is_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.MATMUL, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 16)
    for spread, unsteady in ((1.04, False), (1.06, True)):
        monkeypatch.setattr(ceilings, "_sample", lambda *_, spread=spread: [1.0] * 4 + [spread] * 4)
        found = ceilings.measure(CPU, timing.CpuClock(), ("sustained",), 8)["sustained"]
        assert not [entry for entry in found.values() if "sm_mhz" in entry]  # of a CPU
        assert [entry["unsteady"] for entry in found.values()] == [unsteady] * 3
    assert ceilings.unsteady(times(0.740, 0.834, 0.844))  # that of the H200's first files
