"""The regression gate: today's shares of today's ceilings against those of a results file.

Absolute times are not compared: another machine of the kind, its clocks and its temperature move
them. The share of the roofline, of ceilings measured in the same run, is what stays; in bursts,
that is. What a card keeps up under load depends on its power and temperature, of a matmul in
another way than of attention: two runs of the same kernel were 10% apart. So bursts decide where
the file has them, and of sustained figures it is only said what fell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .results import is_right

TOLERANCE = 0.05


@dataclass(frozen=True)
class Compared:
    """One figure in both runs."""

    what: str
    """Shape, mood and backend."""
    before: float
    now: float

    @property
    def change(self) -> float:
        """-0.1: a tenth less of the roofline than before."""
        return self.now / self.before - 1

    def __str__(self) -> str:
        return f"{self.what}: {self.before:.1%} of the roofline then, {self.now:.1%} now " + (
            f"({self.change:+.1%})"
        )


@dataclass(frozen=True)
class Verdict:
    """What became of every figure of the file."""

    tolerance: float
    fell: list[Compared]
    held: list[Compared]
    lost: list[str]
    """Ran then and gives no right figure now, in any mood; each with its reason."""
    not_compared: list[str]
    """Each with its reason."""
    mood: str
    """The mood that decides."""
    noted: list[Compared]
    """Figures of the other mood that fell, which decide nothing."""

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing fell or was lost."""
        return bool(self.held) and not self.fell and not self.lost

    @property
    def compared(self) -> int:
        """Figures of the mood that decides that both runs have."""
        return len(self.fell) + len(self.held)


def other_machine(before: dict[str, Any], name: str, device: str) -> str | None:
    """Why results of another machine cannot be compared with this one; ``None``: they can."""
    then = before["machine"]
    if (then["device"], then["name"]) == (device, name):
        return None
    return f"the file is of {then['name']} ({then['device']}), this run is on {name} ({device})"


def judge(
    before: dict[str, Any],
    now: dict[str, Any],
    tolerance: float = TOLERANCE,
    left_out: Sequence[str] = (),
) -> Verdict:
    """Compare each figure of ours in ``before`` with the same one of ``now``.

    ``left_out`` names shapes of the file that were not to be measured; they are listed as not
    compared. A figure falls where its share of the roofline is more than ``tolerance`` less.
    """
    deciding = deciding_mood(before)
    fell: list[Compared] = []
    held: list[Compared] = []
    noted: list[Compared] = []
    lost: list[str] = []
    skipped = [f"{shape}: not among --shapes" for shape in left_out]
    machine = now["machine"]
    reason = other_machine(before, machine["name"], machine["device"])
    for shape, mood, name, old in _figures(before):
        if shape in left_out:
            continue
        what = f"{shape}, {mood}, {name}"
        if reason is not None:
            skipped.append(f"{what}: {reason}")
            continue
        if old["of_roofline"] is None:
            skipped.append(f"{what}: the file has no ceiling for it")
            continue
        new, why = _find(now, shape, mood, name)
        if new is None:
            (lost if why.startswith("!") else skipped).append(f"{what}: {why.lstrip('!')}")
            continue
        entry = Compared(what, old["of_roofline"], new["of_roofline"])
        if entry.change < -tolerance:
            (fell if mood == deciding else noted).append(entry)
        elif mood == deciding:
            held.append(entry)
    for entries in (fell, noted):
        entries.sort(key=lambda entry: entry.change)
    return Verdict(tolerance, fell, held, lost, skipped, deciding, noted)


def deciding_mood(before: dict[str, Any]) -> str:
    """``burst`` where the file has figures of it; a CPU's has none."""
    return "burst" if any(mood == "burst" for _, mood, *_ in _figures(before)) else "sustained"


def _figures(results: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Every right figure of ours: shape, mood, backend, entry."""
    ours = {peer["name"] for peer in results["peers"] if peer["ours"]}
    for row in results["prefill"]:
        for mood, entry in row["moods"].items():
            for name, figure in entry["peers"].items():
                if name in ours and is_right(figure):
                    yield row["id"], mood, name, figure


def _find(
    results: dict[str, Any], shape: str, mood: str, name: str
) -> tuple[dict[str, Any] | None, str]:
    """The same figure in another run, or why there is none; ``!`` before what counts as lost."""
    row = next((row for row in results["prefill"] if row["id"] == shape), None)
    if row is None:
        return None, "this version has no such shape"
    if mood not in row["moods"]:
        return None, f"this run has no mood {mood}"
    figure = row["moods"][mood]["peers"].get(name)
    if figure is None:
        why = next((p["reason"] for p in results["peers"] if p["name"] == name), None)
        return None, "!" + (row["refused"].get(name) or why or "did not run")
    if figure["fault"] is not None:
        return None, f"!wrong: {figure['fault']}"
    if figure["of_roofline"] is None:
        return None, "this run has no ceiling for it"
    return figure, ""


def as_data(verdict: Verdict) -> dict[str, Any]:
    """The verdict for JSON."""

    def rows(entries: list[Compared]) -> list[dict[str, Any]]:
        return [
            {"what": e.what, "before": e.before, "now": e.now, "change": e.change} for e in entries
        ]

    return {
        "ok": verdict.ok,
        "tolerance": verdict.tolerance,
        "mood": verdict.mood,
        "fell": rows(verdict.fell),
        "held": rows(verdict.held),
        "lost": verdict.lost,
        "not_compared": verdict.not_compared,
        "noted": rows(verdict.noted),
    }
