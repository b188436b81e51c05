"""Results as lines of text, and as rows for whoever draws them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import ceilings
from .results import is_right

SPREAD = 2.0
"""p90 over p10 of times that something else had a part in."""
OTHERS = 0.1
"""Of the cores' time that other programs used: beside two that never wait, on two cores, ours was
0.36 times as fast as plain torch, and no time spread twofold."""


class Row(NamedTuple):
    """One peer's figure in one mood of a shape."""

    id: str
    shape: dict[str, Any]
    mood: str
    peer: str
    figure: dict[str, Any]


def rows(results: dict[str, Any]) -> Iterator[Row]:
    """Every figure, in the order measured."""
    for row in results["prefill"]:
        for mood, entry in row["moods"].items():
            for peer, figure in entry["peers"].items():
                yield Row(row["id"], row["shape"], mood, peer, figure)


def ours(results: dict[str, Any]) -> list[str]:
    """Names of our backends in the results."""
    return [peer["name"] for peer in results["peers"] if peer["ours"]]


def lead(results: dict[str, Any]) -> str | None:
    """Our backend that the plots are about: the first with a right figure."""
    right = {row.peer for row in rows(results) if is_right(row.figure)}
    return next((name for name in ours(results) if name in right), None)


def moods(results: dict[str, Any]) -> list[str]:
    """Moods in the results, the one that lasts first."""
    found = {row.mood for row in rows(results)}
    return [mood for mood in ("sustained", "burst") if mood in found]


def speedup(mine: dict[str, Any], other: dict[str, Any]) -> float:
    """How many times as fast mine is: the median over the rounds, which both took part in.

    A peer with rounds of its own has fewer, at another time: there the ratio of the medians.
    """
    if len(other["all_ms"]) != len(mine["all_ms"]):
        return float(other["median_ms"] / mine["median_ms"])
    pairs = zip(other["all_ms"], mine["all_ms"], strict=True)
    return float(statistics.median(theirs / own for theirs, own in pairs))


def rate_unit(results: dict[str, Any]) -> tuple[str, float]:
    """The unit of rates that suits the results, and what to multiply TFLOPS by."""
    return ("GFLOP/s", 1e3) if results["machine"]["device"] == "cpu" else ("TFLOPS", 1.0)


def bandwidth_unit(results: dict[str, Any]) -> tuple[str, float]:
    """The unit of bandwidth that suits the results, and what to multiply TB/s by."""
    return ("GB/s", 1e3) if results["machine"]["device"] == "cpu" else ("TB/s", 1.0)


def text(results: dict[str, Any]) -> str:
    """A table of the speed figures, the ceilings and what did not run."""
    unit, factor = rate_unit(results)
    wide_unit, wide = bandwidth_unit(results)
    lines = []
    if results["prefill"]:
        width = max(len(row["id"]) for row in results["prefill"])
        lines.append(
            f"{'shape':<{width}}  {'mood':<9}  {'peer':<16}{'us':>11}{'p10':>11}{'p90':>11}"
            f"{unit:>9}{wide_unit:>7}{'roofline':>10}{'error':>8}{_mhz(results, 'MHz')}  ours is"
        )
    for row in results["prefill"]:
        lines += _lines(results, row, width)
    for mood, entries in results["ceilings"].items():
        parts = ", ".join(
            (
                f"{name.replace('_', ' ')} {entry['tflops'] * factor:,.0f} {unit}"
                if "tflops" in entry
                else f"{name} {entry['tb_per_s'] * wide:.3g} {wide_unit}"
            )
            + ceilings.spread(entry)
            for name, entry in entries.items()
        )
        lines.append(f"ceilings, {mood}: {parts}")
    if results["host"]:
        cost = results["host"]
        lines.append(
            f"host: {cost['outputs_given_us']:.1f} us a call, "
            f"{cost['outputs_allocated_us']:.1f} us with outputs to allocate"
        )
    if results["memory"]:
        lines.append(f"memory: {memory_text(results['memory'])}")
    lines += [f"not run: {p['name']}: {p['reason']}" for p in results["peers"] if p["reason"]]
    lines += _disturbed(results)
    return "\n".join(lines)


def _disturbed(results: dict[str, Any]) -> list[str]:
    """A line where other programs had a part in a CPU's figures, also in the ratios to peers."""
    advice = "other programs use these cores; OMP_WAIT_POLICY=passive helps then"
    if results["machine"]["device"] != "cpu":
        return []
    share = results["machine"].get("others_share", 0.0)
    if share > OTHERS:
        return [f"figures mislead, {share:.0%} of the cores' time went elsewhere: {advice}"]
    figures = [row.figure for row in rows(results)]
    spreads = any(figure["p90_ms"] > SPREAD * figure["p10_ms"] for figure in figures)
    return [f"times spread: {advice}"] if spreads else []


def _mhz(results: dict[str, Any], text: str) -> str:
    """A cell of the column that results with counted clocks have."""
    entries = (entry for row in results["prefill"] for entry in row["moods"].values())
    return f"{text:>6}" if any("sm_mhz" in entry for entry in entries) else ""


def _lines(results: dict[str, Any], row: dict[str, Any], width: int) -> list[str]:
    lines, label = [], row["id"]
    factor, wide = rate_unit(results)[1], bandwidth_unit(results)[1]
    mine = lead(results)
    for mood, entry in row["moods"].items():
        own = entry["peers"].get(mine) if mine else None
        for name, figure in entry["peers"].items():
            times = "".join(f" {figure[k + '_ms'] * 1e3:>10.1f}" for k in ("median", "p10", "p90"))
            share = figure["of_roofline"]
            error = figure["worst_relative_l2"]
            line = f"{label:<{width}}  {mood:<9}  {name:<16}{times}"
            line += f"{figure['tflops'] * factor:>9.0f}{figure['gathered_tb_per_s'] * wide:>7.2f}"
            line += f"{share:>10.1%}" if share is not None else f"{'':>10}"
            line += f"{error:>8.4f}" if error is not None else f"{'':>8}"
            line += _mhz(results, f"{entry['sm_mhz']:.0f}" if "sm_mhz" in entry else "")
            if figure["fault"]:
                line += f"  WRONG: {figure['fault']}"
            elif own is not None and name != mine and is_right(own):
                line += f"  {speedup(own, figure):.2f} x as fast"
            lines.append(line)
            label = ""
    lines += [f"{label:<{width}}  {name}: {why}" for name, why in row["refused"].items()]
    return lines


def memory_text(memory: dict[str, Any]) -> str:
    """One line on the peak memory of the CPU backend."""
    if "reason" in memory:
        return f"{memory['id']} gave no figure: {memory['reason']}"
    return f"{memory['extra_mib']:.0f} MiB beyond inputs and outputs at the peak of {memory['id']}"


def accuracy_text(accuracy: dict[str, Any]) -> str:
    """Both accuracy tables as text."""
    lines = ["worst relative L2 of a row of out, against float64 on the same FP8 inputs"]
    for kind in accuracy["kinds"]:
        lines.append(f"  {kind['kind']} ({kind['rows']} rows): {_methods(kind['methods'])}")
    lines.append("the same against the data before quantisation, outlier tokens in kv")
    for entry in accuracy["scales"]:
        lines.append(f"  outliers x {entry['factor']}: {_methods(entry['methods'])}")
    return "\n".join(lines)


def _methods(methods: dict[str, Any]) -> str:
    return "; ".join(
        f"{name}{ran(entry)} {entry['worst']:.4f}" if "worst" in entry else f"{name} not run"
        for name, entry in methods.items()
    )


def ran(method: dict[str, Any]) -> str:
    """Behind the name of a method of the accuracy tables: its kernels, and rows of its own."""
    facts = [*method.get("kernels", ())]
    if "rows" in method:
        facts.append(f"{method['rows']} rows")
    return f" ({', '.join(facts)})" if facts else ""
