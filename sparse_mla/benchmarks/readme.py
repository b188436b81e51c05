"""The README's figures, generated from the newest results file of a GPU.

    python -m sparse_mla.benchmarks.readme [--check]

writes the block between the markers in README.md of this checkout and the plot it shows; with
``--check`` it only says whether the block is what it would write, and the plot of these figures.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from . import ceilings, drawing, plots, report, results, table
from .shapes import MODELS

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "<!-- figures: python -m sparse_mla.benchmarks.readme -->"
END = "<!-- end of figures -->"
FOLDER = "benchmarks/results"
PLOT, PICTURE = "context", "docs/benchmark-context.png"
SHAPES = (
    "v32-tp1-q4096-kv32k-uniform",
    "v32-tp8-q4096-kv32k-uniform",
    "glm5-tp1-q1024-kv32k-uniform",
    "v4pro-tp1-q4096-kv32k-uniform",
)
"""Rows of the table, where the results have them: few, as it stands on the first screen; all are in
the results file and its report."""
PEER = "flash-mla-bf16"


def block(file_name: str, found: dict[str, Any]) -> str:
    """What stands between the markers, markers included."""
    machine = found["machine"]
    mine = table.lead(found)
    mood = table.moods(found)[0]
    lines = [
        BEGIN,
        f"{_where(machine)}: {report.lead(found)}",
        "",
        f"| {mood} | µs | TFLOPS | gathered TB/s | speed over {PEER} | relative L2, ours and its |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    rows = {row["id"]: row for row in found["prefill"]}
    for id in SHAPES:
        entry = rows[id]["moods"][mood]["peers"] if id in rows else {}
        figure = entry.get(mine)
        if figure is None or not results.is_right(figure):
            continue
        peer = entry.get(PEER)
        ratio, errors = "", f"{figure['worst_relative_l2']:.4f}"
        if peer is not None and results.is_right(peer):
            ratio = f"{table.speedup(figure, peer):.2f} ×"
            errors += f", {peer['worst_relative_l2']:.4f}"
        lines.append(
            f"| {_described(rows[id]['shape'])} | {figure['median_ms'] * 1e3:,.0f} "
            f"| {figure['tflops']:,.0f} | {figure['gathered_tb_per_s']:.2f} | {ratio} "
            f"| {errors} |"
        )
    lines += [
        "",
        f"![{_plot(found).title}, with peers]({PICTURE})",
        "",
        f"Made by `{machine['command']}`{_version(machine)} ([all figures]({FOLDER}/{file_name}), "
        "which `sparse-mla bench --from FILE --report DIR` makes a page of; "
        "[how they are measured](docs/benchmarks.md)). Sustained: calls back to back, at the "
        f"clocks that the power limit leaves.{_unsteady(found, mood)} TP: GPUs that share the "
        "model's heads. Gathered TB/s: bytes of the rows that queries select, once a query. "
        "Relative L2: the worst sampled row of `out` against float64. `sm90`: our Hopper backend. "
        "`flash-mla-bf16` is FlashMLA's kernel for Hopper, in bfloat16: the same values, twice the "
        "bytes, a tenth of the error; `torch-gather-bmm` is plain torch.",
        END,
    ]
    return "\n".join(lines)


def _where(machine: dict[str, Any]) -> str:
    return f"On one {machine['name']}, {machine['date'][:10]}"


def _version(machine: dict[str, Any]) -> str:
    """Of what was measured: the repository may have gone on since."""
    commit = machine.get("commit")
    return f" at commit {commit[:7]}" if commit else ""


def _unsteady(found: dict[str, Any], mood: str) -> str:
    """What the word means, where the first line says it."""
    _, entry = ceilings.matmul(found["ceilings"][mood])
    if not ceilings.unsteady(entry):
        return ""
    return " Unsteady: the matmul's times spread, and the share of it is a rough one."


def _described(shape: dict[str, Any]) -> str:
    model = next((m.name for m in MODELS if m.id == shape["model"]), shape["model"])
    pattern = "" if shape["pattern"] == "uniform" else f", pattern {shape['pattern']}"
    return (
        f"{model}, TP {shape['tp']}: {shape['s_q']:,} queries, {shape['h_q']} heads, "
        f"topk {shape['topk']:,} of {shape['s_kv']:,} rows{pattern}"
    )


def _plot(found: dict[str, Any]) -> drawing.Plot:
    drawn = plots.plots(found)
    return next((plot for plot in drawn if plot.id == PLOT), drawn[0])


def replaced(text: str, new: str) -> str:
    """``text`` with what stands between the markers replaced.

    Raises:
        ValueError: the markers are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after + old:
        raise ValueError(f"README.md wants one {BEGIN!r} before one {END!r}")
    return before + new + after


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    if arguments not in ([], ["--check"]):
        print(f"only --check is known, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    readme = ROOT / "README.md"
    try:
        file, found = results.newest(ROOT / FOLDER)
        text = readme.read_text(encoding="utf-8")
        new = replaced(text, block(file.name, found))
        drawn = (ROOT / PICTURE).read_bytes() if arguments else b""
    except (OSError, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    source = results.source(found)
    if arguments:
        same = {"README.md": new == text, PICTURE: source.encode() in drawn}
        stale = [name for name in same if not same[name]]
        print(f"{' and '.join(stale)}: not of {file.name}" if stale else "as generated")
        return int(bool(stale))
    report.write_bytes(ROOT / PICTURE, drawing.png(_plot(found), source))
    results.write_text(readme, new)
    print(f"README.md and {PICTURE} written from {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
