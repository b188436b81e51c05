"""The report's plots, each made of one results file's figures where it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import ceilings, table
from .drawing import INK, MARKERS, SERIES, SIZE, SOFT, Plot, dots, ticks
from .results import is_right
from .shapes import CONTEXTS
from .table import Row


def plots(results: dict[str, Any]) -> list[Plot]:
    """Every plot that these results have the figures for."""
    found = [
        maker(results)
        for maker in (
            by_context, by_heads, roofline, speedups, few_queries, by_pattern, accuracy, outliers
        )
    ]  # fmt: skip
    return [plot for plot in found if plot is not None]


def label(results: dict[str, Any], peer: str) -> str:
    """What a series is called."""
    return f"sparse-mla ({peer})" if peer in table.ours(results) else peer


def series(results: dict[str, Any]) -> list[str]:
    """Peers with right figures, ours first."""
    right = {row.peer for row in table.rows(results) if is_right(row.figure)}
    ordered = [peer["name"] for peer in results["peers"] if peer["name"] in right]
    return [name for name in ordered if name != "reference"]


def machine(results: dict[str, Any]) -> str:
    """The conditions that all captions share."""
    facts = results["machine"]
    card = facts.get("card", {})
    power = f", {card['power.limit']} limit" if "power.limit" in card else ""
    return f"{facts['name']}{power}, {facts['date'][:10]}"


def _largest_family(
    rows: Iterable[Row], vary: str, keys: Sequence[str]
) -> tuple[dict[str, Any], list[Row]]:
    """The rows that differ in ``vary`` alone, of whichever setting of ``keys`` has most of them."""
    families: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        families.setdefault(tuple(row.shape[key] for key in keys), []).append(row)
    best = max(
        families.items(),
        key=lambda item: (len({row.shape[vary] for row in item[1]}), item[0][0]),
        default=((), []),
    )
    return dict(zip(keys, best[0], strict=False)), best[1]


def _lines(
    results: dict[str, Any],
    axes: Any,
    rows: list[Row],
    vary: str,
    value: Callable[[Row], float],
    labels: tuple[str, str],
) -> None:
    """A line a peer in the mood that lasts, and ours in a burst, dashed; ``vary`` in octaves."""
    names, moods = series(results), table.moods(results)
    mine = table.lead(results)
    wanted = [(name, moods[0]) for name in names]
    if len(moods) > 1 and mine:
        wanted.insert(1, (mine, moods[1]))
    for name, mood in wanted:
        points = sorted(
            {
                row.shape[vary]: value(row) for row in rows if (row.peer, row.mood) == (name, mood)
            }.items()
        )
        if not points:
            continue
        number = names.index(name)
        dashed = mood != moods[0]
        axes.plot(
            *zip(*points, strict=True),
            color=SERIES[number % len(SERIES)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle="--" if dashed else "-",
            alpha=0.6 if dashed else 1.0,
            label=f"{label(results, name)}{', burst' if dashed else ''}",
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    _legend(axes)


def _legend(axes: Any, columns: int = 2) -> None:
    """Above the axes, where no line runs."""
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.3)


def _right(results: dict[str, Any]) -> list[Row]:
    return [row for row in table.rows(results) if is_right(row.figure)]


def by_context(results: dict[str, Any]) -> Plot | None:
    """Rate by cached rows."""
    keys = ("s_q", "h_q", "d_qk", "topk", "pattern")
    fixed, rows = _largest_family(_right(results), "s_kv", keys)
    contexts = {row.shape["s_kv"] for row in rows}
    if len(contexts) < 2:
        return None
    unit, factor = table.rate_unit(results)

    def draw(axes: Any) -> None:
        labels = ("cached rows (s_kv)", unit)
        _lines(results, axes, rows, "s_kv", lambda row: row.figure["tflops"] * factor, labels)
        ticks(axes.xaxis, contexts, {rows: name for name, rows in CONTEXTS.items()})
        axes.set_ylim(bottom=0)

    return Plot("context", f"{unit} by context", _conditions(results, fixed), draw)


def by_heads(results: dict[str, Any]) -> Plot | None:
    """Rate by query heads of a GPU."""
    keys = ("s_q", "s_kv", "d_qk", "topk", "pattern")
    fixed, rows = _largest_family(_right(results), "h_q", keys)
    heads = {row.shape["h_q"] for row in rows}
    if len(heads) < 2:
        return None
    unit, factor = table.rate_unit(results)

    def draw(axes: Any) -> None:
        labels = ("query heads (h_q)", unit)
        _lines(results, axes, rows, "h_q", lambda row: row.figure["tflops"] * factor, labels)
        ticks(axes.xaxis, heads)
        axes.set_ylim(bottom=0)

    caption = _conditions(results, fixed)
    caption += " Fewer heads reuse a gathered row less often. Padded heads are not counted as work."
    return Plot("heads", f"{unit} by query heads", caption, draw)


def few_queries(results: dict[str, Any]) -> Plot | None:
    """Time by number of queries."""
    keys = ("h_q", "s_kv", "d_qk", "topk", "pattern")
    rows = [row for row in _right(results) if row.shape["s_q"] <= 4096]
    fixed, rows = _largest_family(rows, "s_q", keys)
    counts = {row.shape["s_q"] for row in rows}
    if len(counts) < 3:
        return None

    def draw(axes: Any) -> None:
        labels = ("query tokens (s_q)", "time of a call [µs]")
        _lines(results, axes, rows, "s_q", lambda row: row.figure["median_ms"] * 1e3, labels)
        axes.set_yscale("log")
        ticks(axes.xaxis, counts)

    return Plot("queries", "Time by number of queries", _conditions(results, fixed), draw)


def by_pattern(results: dict[str, Any]) -> Plot | None:
    """Rate by index pattern."""
    keys = ("s_q", "h_q", "s_kv", "d_qk", "topk")
    fixed, rows = _largest_family(_right(results), "pattern", keys)
    mood = table.moods(results)[0] if rows else ""
    patterns = list(dict.fromkeys(row.shape["pattern"] for row in rows))
    if len(patterns) < 2:
        return None
    unit, factor = table.rate_unit(results)
    names = [name for name in series(results) if any(row.peer == name for row in rows)]
    width = 0.8 / len(names)

    def draw(axes: Any) -> None:
        for number, name in enumerate(names):
            rates = {
                row.shape["pattern"]: row.figure["tflops"] * factor
                for row in rows
                if (row.peer, row.mood) == (name, mood)
            }
            places = [
                place + (number - (len(names) - 1) / 2) * width
                for place, pattern in enumerate(patterns)
                if pattern in rates
            ]
            heights = [rates[pattern] for pattern in patterns if pattern in rates]
            colour = SERIES[series(results).index(name) % len(SERIES)]
            bars = axes.bar(places, heights, width * 0.92, color=colour, label=label(results, name))
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=9, color=INK, padding=2)
        axes.set_xticks(range(len(patterns)), patterns)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(unit)
        _legend(axes, 3)

    return Plot("patterns", f"{unit} by index pattern", _conditions(results, fixed), draw)


def roofline(results: dict[str, Any]) -> Plot | None:
    """Rate by operations a gathered byte, under the measured ceilings."""
    moods = table.moods(results)
    if not moods or not results["ceilings"].get(moods[0]):
        return None
    mood = moods[0]
    limits = results["ceilings"][mood]
    matmul, copy = ceilings.compute(limits), ceilings.bandwidth(limits)
    if matmul is None or copy is None:
        return None
    unit, factor = table.rate_unit(results)
    wide_unit, wide = table.bandwidth_unit(results)
    rows = [row for row in _right(results) if row.mood == mood]
    intensity = {row["id"]: row["operations"] / row["gathered_bytes"] for row in results["prefill"]}
    names = series(results)

    def draw(axes: Any) -> None:
        low = min(min(intensity.values()) / 1.6, matmul / copy / 1.6)
        high = max(max(intensity.values()) * 1.6, matmul / copy * 1.6)
        ridge = matmul / copy
        axes.plot(
            [low, ridge, high],
            [low * copy * factor, matmul * factor, matmul * factor],
            color=SOFT,
            label=f"{ceilings.matmul(limits)[0]} {matmul * factor:,.0f} {unit}, "
            f"copy {copy * wide:.3g} {wide_unit}",
        )
        for number, name in enumerate(names):
            points = [
                (intensity[r.id], r.figure["tflops"] * factor) for r in rows if r.peer == name
            ]
            dots(axes, points, number, label(results, name))
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks(axes.xaxis, [2**power for power in range(12) if low <= 2**power <= high])
        axes.set_xlabel("operations a gathered byte")
        axes.set_ylabel(unit)
        _legend(axes)

    caption = (
        f"{machine(results)}, {mood}. Each mark is a shape. A gathered byte is a byte of the FP8 "
        "rows that a query selects, counted once a query: the sloped ceiling is what a copy of "
        "memory reaches, so shapes whose rows come from a cache can lie above it."
    )
    if results["machine"]["device"] == "cuda":
        caption += " Few queries cannot fill the card."
    return Plot("roofline", "Roofline with the measured ceilings", caption, draw)


def speedups(results: dict[str, Any]) -> Plot | None:
    """How many times as fast ours is, by shape and peer."""
    mine, moods = table.lead(results), table.moods(results)
    others = [name for name in series(results) if name not in table.ours(results)]
    if mine is None or not others:
        return None
    found: dict[str, dict[str, float]] = {name: {} for name in others}
    for row in results["prefill"]:
        peers = row["moods"][moods[0]]["peers"]
        own = peers.get(mine)
        if own is None or not is_right(own):
            continue
        for name in others:
            if name in peers and is_right(peers[name]):
                found[name][row["id"]] = table.speedup(own, peers[name])
    ids = [row["id"] for row in results["prefill"] if any(row["id"] in f for f in found.values())]
    if not ids:
        return None

    def draw(axes: Any) -> None:
        places = {id: len(ids) - 1 - number for number, id in enumerate(ids)}
        for name in others:
            number = series(results).index(name)
            values = found[name]
            points = [(value, float(places[id])) for id, value in values.items()]
            dots(axes, points, number, f"over {name}")
            for id, value in values.items():
                axes.annotate(
                    f"{value:.2f}" if value < 10 else f"{value:.0f}",
                    (value, places[id]),
                    xytext=(7, -3.5),
                    textcoords="offset points",
                    fontsize=8.5,
                )
        axes.axvline(1, color=SOFT, linewidth=1.2)
        axes.set_xscale("log")
        everything = [value for values in found.values() for value in values.values()]
        low, high = min([1.0, *everything]) / 1.25, max(everything) * 1.6
        axes.set_xlim(low, high)
        ticks(axes.xaxis, [t for t in (1, 2, 3, 5, 10, 20, 50, 100) if low <= t <= high])
        axes.set_yticks(list(places.values()), list(places), fontsize=9)
        axes.set_ylim(-0.7, len(ids) - 0.3)
        axes.set_xlabel("times as fast as the peer (1: equal)")
        _legend(axes)

    caption = (
        f"{machine(results)}, {moods[0]}: median over rounds of the peer's time over ours; of "
        "medians for a peer with rounds of its own. The peers compute in another precision (see "
        "the table of peers): FP8 operands are half the bytes of bfloat16, and cost accuracy."
    )
    height = max(SIZE[1], 1.6 + 0.3 * len(ids))
    return Plot("speedup", "Speed-up over peers", caption, draw, height)


def accuracy(results: dict[str, Any]) -> Plot | None:
    """Error by kind of input and method."""
    if not results["accuracy"]:
        return None
    kinds = results["accuracy"]["kinds"]
    methods = list(dict.fromkeys(name for kind in kinds for name in kind["methods"]))

    def beside(number: int) -> float:
        return 0.22 * (number - (len(methods) - 1) / 2)

    def draw(axes: Any) -> None:
        for number, name in enumerate(methods):
            points = [
                (max(kind["methods"][name]["worst"], 1e-5), len(kinds) - 1 - place - beside(number))
                for place, kind in enumerate(kinds)
                if "worst" in kind["methods"].get(name, {})
            ]
            dots(axes, points, number, label(results, name))
        axes.set_xscale("log")
        axes.set_yticks(range(len(kinds)), [kind["kind"] for kind in reversed(kinds)])
        axes.set_ylim(-0.6, len(kinds) - 0.4)
        axes.set_xlabel("relative L2 of the worst row of out")
        _legend(axes, 1)

    caption = (
        "Against float64 on the same FP8 inputs; a row is one query and head. Logits by standard "
        "deviation, then one large logit before 2,047 small ones. The emulations round nothing but "
        "P: scaled to use e4m3's range, and as softmax gives it. Errors below 1e-5 are drawn there."
    )
    return Plot("accuracy", "Accuracy by kind of input", caption, draw, 4.8)


def outliers(results: dict[str, Any]) -> Plot | None:
    """Error by size of outlier tokens, per-tensor against per-token scales."""
    if not results["accuracy"]:
        return None
    scales = results["accuracy"]["scales"]
    methods = list(dict.fromkeys(name for entry in scales for name in entry["methods"]))

    def draw(axes: Any) -> None:
        for number, name in enumerate(methods):
            points = [
                (entry["factor"], entry["methods"][name]["median"])
                for entry in scales
                if "worst" in entry["methods"].get(name, {})
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker=MARKERS[number % len(MARKERS)],
                          linestyle="--" if name.startswith("reference") else "-",
                          color=SERIES[number % len(SERIES)], label=name)  # fmt: skip
        axes.set_xscale("log", base=2)
        ticks(axes.xaxis, [entry["factor"] for entry in scales])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("size of outlier rows over the others")
        axes.set_ylabel("relative L2 of the median row of out")
        _legend(axes, 1)

    share = results["accuracy"]["outlier_share"]
    caption = (
        f"Against float64 on the data before quantisation, logits of standard deviation 1; "
        f"{share:.1%} of the tokens are outliers that no query selects. e4m3 keeps three bits over "
        "its range of 2^15, so one scale for all loses little until outliers use that range up."
    )
    return Plot("outliers", "One scale for all of kv, or one a token", caption, draw)


def _conditions(results: dict[str, Any], fixed: dict[str, Any]) -> str:
    named = ", ".join(
        f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}"
        for key, value in fixed.items()
    )
    moods = table.moods(results)
    return f"{machine(results)}, {moods[0]} unless said otherwise; {named}."
