"""How a plot of the report looks, and its rendering: for the page (SVG) and for files (PNG).

In the page's SVG the colours are CSS variables, so that a plot follows the reader's light or dark
scheme; in a PNG they are the light ones on white.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

COLOURS = {
    "ink": ("#1b1f24", "#e4e8ed"),
    "soft": ("#5a6470", "#a0abb8"),
    "grid": ("#dfe3e8", "#2a323c"),
    "one": ("#0b57c4", "#7fb2ff"),
    "two": ("#c2410c", "#ff9d6b"),
    "three": ("#6b7683", "#98a4b3"),
    "four": ("#0f7b4f", "#5fd3a0"),
    "five": ("#7d3cb5", "#cf9cff"),
}
"""Light and dark of each colour."""
INK, SOFT, GRID, ONE, TWO, THREE, FOUR, FIVE = (light for light, _ in COLOURS.values())
SERIES = (ONE, TWO, FOUR, FIVE, THREE)
MARKERS = ("o", "s", "^", "D", "v")
STYLE: Any = {
    "font.size": 11,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2.0,
    "lines.markersize": 7,
    "text.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "sparse-mla",
}
SIZE = (7.6, 4.4)


@dataclass(frozen=True)
class Plot:
    """One plot of some results."""

    id: str
    title: str
    caption: str
    """The conditions, and what to read from it."""
    draw: Callable[[Any], None]
    """Draws into matplotlib axes."""
    height: float = SIZE[1]


def svg(plot: Plot) -> str:
    """The plot as an ``<svg>`` element whose colours are CSS variables."""
    text = _rendered(plot, "svg", transparent=True).decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for name, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{name})")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{plot.id}-", text)
    text = re.sub(r"font: ([\d.]+)px[^;\"]*", r"font: \1px var(--sans)", text)
    label = f'role="img" aria-label="{plot.title}"'
    return re.sub(
        r'<svg[^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" {label}>', text, count=1
    )


def png(plot: Plot, source: str) -> bytes:
    """The plot as a PNG on white; ``source``, what it was drawn from, is in its metadata."""
    return _rendered(plot, "png", metadata={"Source": source}, facecolor="white", dpi=160)


def _rendered(plot: Plot, kind: str, **options: Any) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    if kind == "svg":
        options["metadata"] = {"Date": None}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], plot.height), layout="constrained")
        axes = figure.subplots()
        plot.draw(axes)
        if kind == "png":
            figure.suptitle(plot.title, fontsize=12, x=0.01, ha="left", color=INK)
            conditions = textwrap.fill(plot.caption.partition(". ")[0].rstrip(".") + ".", 115)
            figure.supxlabel(conditions, fontsize=7.5, x=0.01, ha="left", color=SOFT)
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, **options)
    return picture.getvalue()


def dots(axes: Any, points: Sequence[tuple[float, float]], number: int, name: str) -> None:
    """Marks of the series with this number, without a line."""
    if points:
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            linestyle="",
            alpha=0.9,
            marker=MARKERS[number % len(MARKERS)],
            color=SERIES[number % len(SERIES)],
            label=name,
        )


def ticks(axis: Any, values: Iterable[int], labels: dict[int, str] | None = None) -> None:
    """Ticks at these values and nowhere else, written out."""
    from matplotlib.ticker import NullFormatter, NullLocator

    ordered = sorted(set(values))
    axis.set_ticks(ordered, [(labels or {}).get(value, f"{value:,}") for value in ordered])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
