"""The demo's picture: what was selected, where attention lies, how far off the result is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .demo_chunk import Chunk, mass_by_rank

if TYPE_CHECKING:
    from .demo import ChunkRun

INK = "#22303c"
ACCENT = "#c2410c"
COOL = "#2563a8"
GRID = 256  # cells of the selection map in each direction, at most


def draw(file: Path, done: ChunkRun) -> None:
    """Write the picture to ``file``; its ending chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), dpi=150, layout="constrained")
    selection, mass, error = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    _draw_selection(figure, selection, done.chunk)
    _draw_mass(mass, done)
    _draw_error(error, done)
    for axes in (selection, mass, error):
        axes.title.set_color(INK)
        axes.tick_params(colors=INK, labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    sizes = done.sizes
    figure.suptitle(
        f"FP8 sparse MLA prefill: s_q {sizes.s_q}, s_kv {sizes.s_kv}, h_q {sizes.h_q}, "
        f"d_qk {sizes.d_qk}, topk {sizes.topk}; {done.backend} backend, "
        f"{done.seconds:.3g} s, {done.gflops:,.0f} GFLOP/s",
        color=INK,
        fontsize=10,
    )
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Write a figure by rename: on a fault nothing is left there."""
    picture = io.BytesIO()
    figure.savefig(picture, format=file.suffix.lstrip(".").lower())
    scratch = file.with_name(f".{file.name}.tmp")
    try:
        scratch.write_bytes(picture.getvalue())
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def _draw_selection(figure: Any, axes: Any, chunk: Chunk) -> None:
    """Share of the keys of each cell that its queries select; a line where the future begins."""
    s_q, s_kv = chunk.q.shape[0], chunk.kv.shape[0]
    density = selection_density(chunk.indices.cpu(), s_kv)
    first = chunk.first_position
    image = axes.imshow(
        density.numpy(),
        origin="upper",
        aspect="auto",
        extent=(0, s_kv, first + s_q, first),
        cmap="magma_r",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    axes.plot([first, s_kv], [first, s_kv], color=COOL, linewidth=1.5, label="the query itself")
    axes.set_xlim(0, s_kv)
    axes.set_ylim(first + s_q, first)
    legend = axes.legend(loc="lower left", fontsize=8, labelcolor=INK)
    legend.get_frame().set(facecolor="white", alpha=0.9, linewidth=0)
    axes.set_title("Keys that the indexer selects", fontsize=10)
    axes.set_xlabel("key position", color=INK, fontsize=9)
    axes.set_ylabel("query position", color=INK, fontsize=9)
    bar = figure.colorbar(image, ax=axes, pad=0.01, aspect=30)
    bar.set_label("share selected", color=INK, fontsize=8)
    bar.ax.tick_params(colors=INK, labelsize=7)
    bar.outline.set_visible(False)


def selection_density(indices: torch.Tensor, s_kv: int) -> torch.Tensor:
    """Selected share of each cell of (queries, keys), at most ``GRID`` cells a side."""
    s_q = indices.shape[0]
    rows, columns = min(GRID, s_q), min(2 * GRID, s_kv)
    row = (torch.arange(s_q) * rows // s_q)[:, None].expand_as(indices)
    valid = indices >= 0
    column = indices[valid].long() * columns // s_kv
    cell = row[valid] * columns + column
    count = torch.bincount(cell, minlength=rows * columns).reshape(rows, columns).float()
    queries = torch.bincount(torch.arange(s_q) * rows // s_q, minlength=rows)
    keys = torch.bincount(torch.arange(s_kv) * columns // s_kv, minlength=columns)
    return count / (queries[:, None] * keys)


def _draw_mass(axes: Any, done: ChunkRun) -> None:
    """How many of the selected keys hold how much of a head's attention, last query."""
    mass = mass_by_rank(done.chunk, done.sizes.s_q - 1).cpu()
    rank = torch.arange(1, mass.shape[1] + 1)
    levels = torch.tensor([0.1, 0.5, 0.9])
    low, middle, high = torch.quantile(mass, levels, dim=0)
    axes.fill_between(rank, low, high, color=COOL, alpha=0.2, linewidth=0, label="10 % to 90 %")
    axes.plot(rank, middle, color=COOL, linewidth=1.8, label="median head")
    axes.set_xscale("log")
    axes.set_xlim(1, max(2, mass.shape[1]))
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", frameon=False, fontsize=8, labelcolor=INK)
    axes.set_title("Attention of the last query's heads", fontsize=10)
    axes.set_xlabel("selected keys, largest first", color=INK, fontsize=9)
    axes.set_ylabel("share of the softmax", color=INK, fontsize=9)


def _draw_error(axes: Any, done: ChunkRun) -> None:
    """Every verified row's relative error, and the limit."""
    errors = done.row_errors.flatten().clamp_min(1e-6)
    limit = done.comparison.tolerance.out
    low = float(torch.minimum(errors.min() * 0.8, torch.tensor(limit / 20)))
    high = max(float(errors.max()), limit) * 1.3
    edges = torch.logspace(
        float(torch.log10(torch.tensor(low))), float(torch.log10(torch.tensor(high))), 49
    )
    axes.hist(errors.numpy(), bins=edges.numpy(), color=COOL, alpha=0.8)
    axes.axvline(limit, color=ACCENT, linewidth=1.5, label=f"limit {limit:.1%}")
    axes.set_xscale("log")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper left", frameon=False, fontsize=8, labelcolor=INK)
    axes.set_title(f"Error of {errors.numel():,} rows against float64", fontsize=10)
    axes.set_xlabel("relative L2 of a row of out", color=INK, fontsize=9)
    axes.set_ylabel("rows", color=INK, fontsize=9)
