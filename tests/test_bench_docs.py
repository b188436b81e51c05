"""docs/benchmarks.md says what the code does: its peers, sizes and limits."""

from __future__ import annotations

import re
from pathlib import Path

from sparse_mla import dispatch
from sparse_mla.benchmarks import accuracy, ceilings, runner, timing
from sparse_mla.benchmarks.peers import everything

TEXT = (Path(__file__).parents[1] / "docs/benchmarks.md").read_text()
WORDS = " ".join(TEXT.split())


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_peer_is_listed_and_no_other() -> None:
    names = [
        name
        for cell in re.findall(r"^\| (`.+?`) \|", section("Peers"), re.MULTILINE)
        for name in re.findall(r"`([\w-]+)`", cell)
    ]
    assert sorted(names) == sorted(everything())
    assert set(dispatch.BACKENDS) < set(names)


def test_sizes_and_limits_are_those_of_the_code() -> None:
    rows = accuracy.SAMPLED * 64, accuracy.SAMPLED * accuracy.FEW_HEADS
    sustained_s, copies = ceilings.SUSTAINED_MS / 1e3, ceilings.COPY_BYTES
    for text in (
        f"a copy of {copies['cuda'] >> 30} GiB, on a CPU {copies['cpu'] >> 20} MiB",
        f"half as many as the shapes and at least {runner.FEWEST_ROUNDS}",
        f"so many that they last {sustained_s} s",
        f"p90 is over {ceilings.UNSTEADY} times its p10",
        f"a spin of {timing.COUNTED_CYCLES:,} cycles",
        f"the worst row of {rows[0]}, a row being",
        f"The call has {accuracy.QUERIES} queries of 64 heads",
        f"{accuracy.SAMPLED} of the queries are compared",
        f"a call of {accuracy.FEW_HEADS} of those heads, {rows[1]} rows",
        f"of {accuracy.SAMPLED_OF_SCALES} of {accuracy.QUERIES} queries",
    ):
        assert text in WORDS, text
