"""``sparse-mla inspect``: what a captured call is like."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import CallFile, Json, describe, guarded, say, say_json, say_row

if TYPE_CHECKING:
    from ..callfile import Call
    from .analysis import Analysis, Fit


def inspect_call(
    file: CallFile,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw selection, overlap, logits and FP8 fit (.png, .pdf or .svg)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what a captured call is like: selection, logits, FP8 fit.

    Which slots select a row and how many rows neighbouring queries share; how far the logits of a
    head spread and how many keys matter to it; how much of q and kv lies at FP8's limits, and
    which scale would serve better. The call is not made. Logits are those of at most 64 queries,
    evenly spread.

    Examples:
      sparse-mla inspect call.safetensors
      sparse-mla inspect call.safetensors --plot call.png --json

    Exit codes: 0 fine, 1 the call breaks the contract, 2 usage or an unreadable file.
    """
    with guarded(as_json):
        from ..callfile import load_call
        from .analysis import analyse
        from .check import violations
        from .demo import require_plot

        if plot is not None:
            require_plot(plot)
        call = load_call(file)
        for fault in violations(call):
            raise fault
        found = analyse(call)
        if plot is not None:
            from .inspect_plot import draw

            draw(plot, found, call.operator)
        if as_json:
            say_json(_as_data(file, plot, call, found))
        else:
            _say(file, plot, call, found)


def _say(file: Path, plot: Path | None, call: Call, found: Analysis) -> None:
    say(f"{file.name}: {call.operator}")
    for name in ("q", "kv", "indices"):
        say_row(name, describe(call.tensors[name]))
    with contextlib.suppress(KeyError, ValueError):
        say_row("time", f"{float(call.metadata['seconds']):.6g} s when it was captured")
    _say_selection(found)
    logits = found.logits.to_dict()
    if logits is None:
        say_row("logits", "no query selects two rows")
    else:
        spread, largest, keys = (logits[x] for x in ("spread", "largest", "effective_keys"))
        if spread is not None:
            say_row("logit spread", f"{_range(spread)} (standard deviation over a head's slots)")
            say_row("largest logit", _range(largest))
            say_row("keys that count", f"{_range(keys)} (exp of the entropy)")
        if logits["not_finite"]:
            pairs = "(query, head) pairs have NaN or infinite logits"
            say_row("not finite", f"{logits['not_finite']:,} {pairs}")
    for fit in found.fits:
        _say_fit(fit)
    if plot is not None:
        say_row("picture", plot)


def _say_selection(found: Analysis) -> None:
    selection = found.selection
    text = f"{selection.selected:,} of {selection.slots:,} slots select a row"
    reasons = [
        f"{count:,} {what}"
        for count, what in (
            (selection.negative, "negative"),
            (selection.past_cache, "past the cache"),
            (selection.past_length, "past topk_length"),
        )
        if count
    ]
    say_row("slots", f"{text}; {', '.join(reasons)}" if reasons else text)
    if selection.empty_queries:
        say_row("", f"{selection.empty_queries:,} of {selection.queries:,} queries select nothing")
    say_row("rows used", f"{selection.rows_used:,} of {selection.rows:,}")
    overlap = selection.to_dict()["overlap"]
    if overlap is not None:
        say_row(
            "overlap",
            f"{overlap['mean']:.1%} of a query's rows are the next one's too "
            f"({overlap['min']:.1%} to {overlap['max']:.1%})",
        )


def _say_fit(fit: Fit) -> None:
    parts = [f"largest {fit.largest:.4g}"]
    if fit.scale is not None:
        many = f", the largest of {fit.scales}" if fit.scales > 1 else ""
        parts[0] += f" of 448, scale {fit.scale:.3g}{many}"
        parts.append(f"{fit.saturated_count:,} at the limit")
    parts += [f"{fit.subnormal:.2%} with fewer than 4 bits", f"{fit.zero:.2%} zero"]
    if fit.not_finite:
        parts.append(f"{fit.not_finite:,} NaN or infinite")
    say_row(f"{fit.name} in FP8", ", ".join(parts))
    say_row("", fit.advice)


def _range(values: dict[str, float]) -> str:
    return f"{values['median']:.3g} median, {values['min']:.3g} to {values['max']:.3g}"


def _as_data(file: Path, plot: Path | None, call: Call, found: Analysis) -> dict[str, Any]:
    return {
        "ok": True,
        "file": os.fspath(file),
        "operator": call.operator,
        "selection": found.selection.to_dict(),
        "logits": found.logits.to_dict(),
        "q": found.fits[0].to_dict(),
        "kv": found.fits[1].to_dict(),
        "plot": None if plot is None else os.fspath(plot),
        "metadata": call.metadata,
    }
