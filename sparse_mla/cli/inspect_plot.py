"""The picture of ``sparse-mla inspect``: slots, overlap, logits, FP8 fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .analysis import FP8_MAX, SMALLEST_NORMAL
from .demo_plot import ACCENT, COOL, INK, save

if TYPE_CHECKING:
    from .analysis import Analysis, Fit


def draw(file: Path, found: Analysis, operator: str) -> None:
    """Write the picture to ``file``; its ending chooses the format."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 7.4), dpi=150, layout="constrained")
    (selected, overlap), (logits, fit) = figure.subplots(2, 2)
    _draw_selected(selected, found)
    _draw_overlap(overlap, found)
    _draw_logits(logits, found)
    _draw_fit(fit, found.fits)
    for axes in (selected, overlap, logits, fit):
        axes.title.set_color(INK)
        axes.tick_params(colors=INK, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    for axes in (selected, overlap):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    selection = found.selection
    figure.suptitle(
        f"{operator}: {selection.queries:,} queries, {selection.rows:,} rows",
        color=INK,
        fontsize=10,
    )
    save(figure, file)


def _draw_selected(axes: Any, found: Analysis) -> None:
    """Slots of each query that select a row, and those that do not."""
    selection = found.selection
    query, counts = torch.arange(selection.queries), selection.per_query
    topk = selection.slots // max(1, selection.queries)
    axes.fill_between(query, counts, step="mid", color=COOL, alpha=0.6, label="select a row")
    axes.fill_between(
        query, counts, topk, step="mid", color=ACCENT, alpha=0.3, label="invalid", linewidth=0
    )
    if selection.queries == 1:
        axes.scatter(query, counts, color=COOL)
    axes.set_ylim(0, topk * 1.05)
    axes.legend(loc="lower right", fontsize=8, labelcolor=INK)
    _label(axes, "Slots of a query", "query", "slots")


def _draw_overlap(axes: Any, found: Analysis) -> None:
    """Share of a query's rows that the next one selects too."""
    overlap = found.selection.overlap
    axes.plot(torch.arange(len(overlap)), overlap, color=COOL, marker=".", linewidth=0.8)
    axes.set_ylim(0, 1.05)
    if not len(overlap):
        axes.text(0.5, 0.5, "one query", ha="center", transform=axes.transAxes, color=INK)
    _label(axes, "Rows shared with the next query", "query", "share of the smaller selection")


def _draw_logits(axes: Any, found: Analysis) -> None:
    """How far the logits of each (query, head) spread."""
    spread = found.logits.spread
    if len(spread):
        axes.hist(spread.numpy(), bins=40, color=COOL, alpha=0.8)
        axes.axvline(float(spread.median()), color=ACCENT, label=f"median {spread.median():.3g}")
        axes.legend(loc="upper right", frameon=False, fontsize=8, labelcolor=INK)
    title = f"Logit spread, {len(spread):,} (query, head) pairs"
    _label(axes, title, "standard deviation over the slots", "pairs")


def _draw_fit(axes: Any, fits: tuple[Fit, Fit]) -> None:
    """Values by magnitude, between where FP8 loses bits and where it ends."""
    for fit, colour in zip(fits, (COOL, "#2f855a"), strict=True):
        powers = torch.arange(len(fit.histogram)) + fit.first_power
        share = fit.histogram / fit.histogram.sum().clamp_min(1)
        note = "" if fit.scale is not None else ", once quantised"
        axes.step(powers + 0.5, share, where="mid", color=colour, label=f"{fit.name}{note}")
    low, high = (float(torch.tensor(x).log2()) for x in (SMALLEST_NORMAL, FP8_MAX))
    axes.axvline(low, color=ACCENT, linewidth=1, linestyle="--", label="fewer than 4 bits below")
    axes.axvline(high, color=ACCENT, linewidth=1, label="448")
    legend = axes.legend(loc="upper left", fontsize=8, labelcolor=INK)
    legend.get_frame().set(facecolor="white", alpha=1.0, linewidth=0)
    _label(axes, "Stored values in FP8", "log2 of the magnitude", "share of the values")


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
