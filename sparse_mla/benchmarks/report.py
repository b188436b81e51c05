"""The report: one HTML file that needs no network, and the plots as PNG files.

Everything in it comes from one results file: figures, ceilings, peers and why they did not run,
accuracy, the machine, the versions and the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import ceilings, drawing, plots, table
from .furniture import Raw, escape, table_of
from .furniture import page as frame
from .results import is_right, source, write_text

HEADLINE = "v32-tp1-q4096-kv32k-uniform"
"""The shape that the first lines are about, where the results have it."""


def write(results: dict[str, Any], directory: Path) -> list[Path]:
    """Write ``report.html`` and a PNG of each plot into ``directory``, made where missing."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / "report.html"]
    write_text(files[0], page(results))
    for plot in plots.plots(results):
        file = directory / f"{plot.id}.png"
        write_bytes(file, drawing.png(plot, source(results)))
        files.append(file)
    return files


def write_bytes(file: Path, data: bytes) -> None:
    """Write by rename: on a fault nothing is left there."""
    scratch = file.with_name(f".{file.name}.tmp")
    try:
        scratch.write_bytes(data)
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def page(results: dict[str, Any]) -> str:
    """The whole page."""
    machine = results["machine"]
    title = f"sparse-mla on {machine['name']}, {machine['date'][:10]}"
    drawn = plots.plots(results)
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(lead(results))}</p>',
        _tiles(results),
        *(_figure(plot) for plot in drawn),
        _section("Every figure", _speed(results)),
        _section("Ceilings", _ceilings(results)),
        _section("Peers", _peers(results)),
        _section("Selections", _selections(results)) if results["prefill"] else "",
        _section("Accuracy", _accuracy(results["accuracy"])) if results["accuracy"] else "",
        _section("How it was measured", _method(results)),
        _section("Machine", _machine(results)),
    ]
    return frame(title, "\n".join(body))


def headline(results: dict[str, Any]) -> tuple[str, str, dict[str, Any]] | None:
    """Shape, mood and entry that the first lines are about; ``None`` where nothing is right."""
    mine = table.lead(results)
    rows = [r for r in table.rows(results) if r.peer == mine and is_right(r.figure)]
    if not rows:
        return None
    row = next((r for r in rows if r.id == HEADLINE), rows[0])
    mood = table.moods(results)[0]
    entry = next(r["moods"] for r in results["prefill"] if r["id"] == row.id)[mood]
    return row.id, mood, entry


def lead(results: dict[str, Any]) -> str:
    """The headline in one sentence."""
    found = headline(results)
    if found is None:
        return "No backend gave a right figure in this run; see the tables."
    id, mood, entry = found
    shape = next(row["shape"] for row in results["prefill"] if row["id"] == id)
    unit, factor = table.rate_unit(results)
    mine = table.lead(results)
    figure = entry["peers"][mine]
    words = (
        f"{shape['s_q']:,} queries of {shape['h_q']} heads over {shape['s_kv']:,} cached rows "
        f"(d_qk {shape['d_qk']}, topk {shape['topk']:,}) take {figure['median_ms']:.2f} ms with "
        f"{mine}, {mood}: {figure['tflops'] * factor:,.0f} {unit}"
    )
    if figure["of_matmul"] is not None:
        matmul, ceiling = ceilings.matmul(results["ceilings"][mood])
        words += f", {figure['of_matmul']:.0%} of the {matmul} in the same run"
        if results["machine"]["device"] == "cuda":  # on a CPU each round has a matmul of its own
            words += ceilings.spread(ceiling)
    ratios = [
        f"{_times(table.speedup(figure, other))} times as fast as {name}"
        for name, other in entry["peers"].items()
        if name not in table.ours(results) and is_right(other)
    ]
    return words + (f"; {', '.join(ratios)}." if ratios else ".")


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _tiles(results: dict[str, Any]) -> str:
    """Four numbers to see first."""
    found = headline(results)
    if found is None:
        return ""
    _, mood, entry = found
    unit, factor = table.rate_unit(results)
    figure = entry["peers"][table.lead(results)]
    tiles = [(f"{figure['tflops'] * factor:,.0f}", f"{unit}, {mood}")]
    others = [
        (name, other)
        for name, other in entry["peers"].items()
        if name not in table.ours(results) and is_right(other)
    ]
    for name, other in others[:1]:
        tiles.append((f"{table.speedup(figure, other):.2f} ×", f"as fast as {name}"))
    if figure["of_roofline"] is not None:
        tiles.append((f"{figure['of_roofline']:.0%}", "of the measured roofline"))
    tiles.append((f"{figure['worst_relative_l2']:.4f}", "relative L2 of the worst sampled row"))
    cells = "".join(
        f"<div><dd>{escape(number)}</dd><dt>{escape(text)}</dt></div>" for number, text in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _figure(plot: drawing.Plot) -> str:
    return (
        f'<figure id="{plot.id}"><h2>{escape(plot.title)}</h2>'
        f'<div class="wide" tabindex="0">{drawing.svg(plot)}</div>'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _speed(results: dict[str, Any]) -> str:
    unit, factor = table.rate_unit(results)
    wide_unit, wide = table.bandwidth_unit(results)
    if not results["prefill"]:
        return "<p>Speed was not measured in this run.</p>"
    mine = set(table.ours(results))
    rows = []
    for row in table.rows(results):
        figure = row.figure
        name = Raw(f"<b>{escape(row.peer)}</b>") if row.peer in mine else row.peer
        kernel = f" ({figure['kernel']})" if figure["kernel"] else ""
        rows.append(
            (
                row.id,
                row.mood,
                Raw(f"{name if isinstance(name, Raw) else escape(name)}{escape(kernel)}"),
                _us(figure["median_ms"]),
                f"{_us(figure['p10_ms'])}–{_us(figure['p90_ms'])}",
                f"{figure['tflops'] * factor:,.0f}",
                f"{figure['gathered_tb_per_s'] * wide:.2f}",
                _share(figure["of_matmul"]),
                _share(figure["of_roofline"]),
                "wrong" if figure["fault"] else f"{figure['worst_relative_l2']:.4f}",
            )
        )
    head = ("shape", "mood", "peer", "median µs", "p10–p90", unit, f"gathered {wide_unit}",
            "of matmul", "of roofline", "rel. L2")  # fmt: skip
    faults = [
        f"<li>{escape(row.id)}, {escape(row.mood)}, {escape(row.peer)}: "
        f"{escape(row.figure['fault'])}</li>"
        for row in table.rows(results)
        if row.figure["fault"]
    ]
    refused = [
        f"<li>{escape(row['id'])}: {escape(name)}: {escape(why)}</li>"
        for row in results["prefill"]
        for name, why in row["refused"].items()
    ]
    text = table_of(head, rows, texts=3)
    if faults:
        text += f"<p>Wrong outputs, left out of the plots:</p><ul>{''.join(faults)}</ul>"
    if refused:
        text += f"<p>Not taken:</p><ul>{''.join(refused)}</ul>"
    return text


def _us(milliseconds: float) -> str:
    return f"{milliseconds * 1e3:,.1f}" if milliseconds < 1 else f"{milliseconds * 1e3:,.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def _ceilings(results: dict[str, Any]) -> str:
    unit, factor = table.rate_unit(results)
    wide_unit, wide = table.bandwidth_unit(results)
    rows = [
        (
            mood,
            name.replace("_", " "),
            f"{entry['size']:,}³" if "tflops" in entry else f"{entry['size'] / 2**30:.3g} GiB",
            f"{entry['tflops'] * factor:,.0f} {unit}"
            if "tflops" in entry
            else f"{entry['tb_per_s'] * wide:.3g} {wide_unit}",
            f"{entry['p10_ms'] * 1e3:,.0f}–{entry['p90_ms'] * 1e3:,.0f}",
            entry["runs"],
            f"{entry['sm_mhz']:,.0f}" if "sm_mhz" in entry else "",
            "unsteady" if ceilings.unsteady(entry) else "",
        )
        for mood, entries in results["ceilings"].items()
        for name, entry in entries.items()
    ]
    text = (
        "<p>Measured in this run, on random numbers, with torch. Unsteady: p90 is over "
        f"{ceilings.UNSTEADY} times p10, and shares of it say little"
    )
    if results["machine"]["device"] == "cpu":
        text += "; those of the matmul are of one in the same round"
    text += ".</p>"
    head = ("mood", "what", "size", "median", "p10–p90 µs", "calls", "SM MHz", "spread")
    return text + table_of(head, rows, texts=3)


def _peers(results: dict[str, Any]) -> str:
    rows = [
        (peer["name"], peer["what"], "ran" if peer["reason"] is None else peer["reason"])
        for peer in results["peers"]
    ]
    return table_of(("peer", "what it is", "here"), rows, texts=3, keep=False)


def _selections(results: dict[str, Any]) -> str:
    rows = [
        (
            row["id"],
            f"{row['selection']['valid_slots'] / (row['shape']['s_q'] * row['shape']['topk']):.1%}",
            f"{row['selection']['distinct_rows']:,}",
            _share(row["selection"]["shared_with_neighbour"]),
            row["input_sets"],
            "yes" if row["l2_overwritten"] else "no",
        )
        for row in results["prefill"]
    ]
    head = ("shape", "valid slots", "distinct rows", "shared with neighbour", "input sets",
            "L2 overwritten")  # fmt: skip
    return table_of(head, rows)


def _accuracy(found: dict[str, Any]) -> str:
    text = "<p>Relative L2 of the rows of out, worst (median), on the same FP8 inputs.</p>"
    methods = list(dict.fromkeys(name for kind in found["kinds"] for name in kind["methods"]))
    rows: list[tuple[object, ...]] = [
        (kind["kind"], kind["rows"], *(_error(kind["methods"].get(name)) for name in methods))
        for kind in found["kinds"]
    ]
    text += table_of(("input", "rows", *methods), rows)
    text += (
        "<p>The same against the data before quantisation, where some rows of kv are outliers, "
        "so many times larger.</p>"
    )
    methods = list(dict.fromkeys(name for entry in found["scales"] for name in entry["methods"]))
    rows = [
        (f"× {entry['factor']:,}", *(_error(entry["methods"].get(name)) for name in methods))
        for entry in found["scales"]
    ]
    text += table_of(("outliers", *methods), rows)
    kernels = {
        f"{name}{table.ran(entry)}": None
        for part in (*found["kinds"], *found["scales"])
        for name, entry in part["methods"].items()
        if "kernels" in entry
    }
    items = "".join(f"<li>{escape(line)}</li>" for line in kernels)
    if items:
        text += f"<p>Kernels that ran, by the plan of these sizes:</p><ul>{items}</ul>"
    reasons = {
        name: entry["reason"]
        for part in (*found["kinds"], *found["scales"])
        for name, entry in part["methods"].items()
        if "reason" in entry
    }
    items = "".join(f"<li>{escape(name)}: {escape(why)}</li>" for name, why in reasons.items())
    return text + (f"<p>Not run:</p><ul>{items}</ul>" if items else "")


def _error(entry: dict[str, Any] | None) -> str:
    if entry is None or "reason" in entry:
        return "not run"
    return f"{entry['worst']:.4f} ({entry['median']:.4f})"


def _method(results: dict[str, Any]) -> str:
    settings = results["settings"]
    gpu = results["machine"]["device"] == "cuda"
    lines = [
        f"Rounds: {settings['rounds']}, fewer for slow peers and where memory does not hold the "
        "outputs. A round makes one call of each peer. Figures are medians; p10 and p90 are the "
        "10th and 90th percentile of the rounds.",
        "TFLOPS: 2 h_q (d_qk + 512) operations a valid slot, over the time. Gathered TB/s: the FP8 "
        "bytes of the rows that the queries select, each row once a query, over the time, also "
        "where a peer reads bfloat16.",
        "Of roofline: the larger of the shares of the fastest matmul and of the copy of the same "
        "run.",
        "Every timed output is compared with float64 on sampled queries; ours must also have the "
        "same bits in every round on the same inputs. What is wrong is named and not plotted.",
    ]
    if gpu:
        lines += [
            "Times are of CUDA events around the call. The GPU is kept busy before the first one, "
            "so that no launch is waited for. Burst: after 0.25 s of idle. Sustained: after a "
            "second under load, where the power limit holds the clocks.",
            "Input sets rotate, and where they are smaller than twice the L2 it is overwritten "
            "before each call."
            if settings["cold"]
            else "One input set: rows stay in the L2.",
        ]
    if results["host"]:
        cost = results["host"]
        lines.append(
            f"Host time of a call: {cost['outputs_given_us']:.1f} µs, with outputs to allocate "
            f"{cost['outputs_allocated_us']:.1f} µs."
        )
    if results["memory"]:
        lines.append(f"Memory of the CPU backend: {table.memory_text(results['memory'])}.")
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _machine(results: dict[str, Any]) -> str:
    facts = results["machine"]
    rows = [(name, value) for name, value in facts.items() if name not in ("card", "command")]
    rows += [(f"card at the start: {name}", value) for name, value in facts.get("card", {}).items()]
    text = f"<pre><code>{escape(facts['command'])}</code></pre>"
    text += table_of(("what", "value"), rows, texts=2, keep=False)
    cards = [
        (
            row["id"],
            mood,
            f"{entry['sm_mhz']:,.0f}" if "sm_mhz" in entry else "",
            *(_of_card(entry["card"], field) for field in _CARD_FIELDS),
        )
        for row in results["prefill"]
        for mood, entry in row["moods"].items()
        if "card" in entry
    ]
    if cards:
        text += (
            "<h3>The card beside each measurement</h3><p>SM MHz: the clock, from cycles counted "
            "right behind the last timed call. The others are what nvidia-smi says of one instant "
            "afterwards, when sustained while calls run.</p>"
        )
        text += table_of(("shape", "mood", "SM MHz", *_CARD_FIELDS), cards, texts=2)
    return text


_CARD_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu",
                "clocks_event_reasons.active")  # fmt: skip


def _of_card(card: dict[str, str], field: str) -> str:
    return card.get(field, card.get("unknown", ""))
