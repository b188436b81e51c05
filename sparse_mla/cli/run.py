"""``sparse-mla run``: a captured call made again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import (
    FAULT,
    Backend,
    CallFile,
    Device,
    Json,
    chosen_device,
    describe,
    guarded,
    say,
    say_json,
    say_row,
    usage,
)

if TYPE_CHECKING:
    from ..callfile import Call
    from .replay import Comparison, Replay


def run(
    file: CallFile,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="OUT", help="Write out, max_logits and lse as safetensors."
        ),
    ] = None,
    device: Device = None,
    backend: Backend = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Compare with the reference, and with results in the file if any."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a captured call again.

    FILE is a call file: written by SPARSE_MLA_DUMP=DIR, by sparse_mla.callfile.save_call, or
    shipped in examples/. Its tensors are on the CPU unless --device says otherwise.

    Examples:
      sparse-mla run call.safetensors --verify
      sparse-mla run call.safetensors --device cuda -o results.safetensors
      sparse-mla run call.safetensors --backend reference --json

    Exit codes: 0 fine, 1 the call breaks the contract or a result is off, 2 usage, an unreadable
    file or a backend that cannot run it.
    """
    with guarded(as_json):
        from ..callfile import load_call, save_results
        from .replay import replay
        from .replay import verify as verified

        place = chosen_device(device)
        if output is not None and output.exists() and file.exists() and output.samefile(file):
            raise usage("it would overwrite FILE", "-o")
        call = load_call(file)
        done = replay(call, place, backend)
        comparisons = verified(call, done) if verify else []
        if output is not None:
            metadata = {"operator": call.operator, "backend": done.backend}
            save_results(output, done.results, metadata)
        if as_json:
            say_json(_as_data(file, output, call, done, comparisons))
        else:
            _say(file, output, call, done, comparisons)
        if not all(comparison.ok for comparison in comparisons):
            raise typer.Exit(FAULT)


def _say(
    file: Path, output: Path | None, call: Call, done: Replay, comparisons: list[Comparison]
) -> None:
    say(f"{file.name}: {call.operator}")
    for name in ("q", "kv", "indices"):
        say_row(name, describe(call.tensors[name]))
    say_row("backend", f"{done.backend}, on device {done.results['out'].device}")
    say_row("time", f"{done.seconds * 1e3:.1f} ms (one call, first use included)")
    for name, result in done.results.items():
        say_row(name, f"{describe(result)}{_not_a_number(result)}")
    for comparison in comparisons:
        say_row("verified", comparison.text())
    if output is not None:
        say_row("written", output)


def _not_a_number(result: Any) -> str:
    count = int(result.isnan().sum())
    return f", {count} NaN" if count else ""


def _as_data(
    file: Path, output: Path | None, call: Call, done: Replay, comparisons: list[Comparison]
) -> dict[str, Any]:
    return {
        "ok": all(comparison.ok for comparison in comparisons),
        "file": os.fspath(file),
        "operator": call.operator,
        "backend": done.backend,
        "device": str(done.results["out"].device),
        "seconds": done.seconds,
        "gflops": done.gflops,
        "results": {
            name: {
                "dtype": str(result.dtype).removeprefix("torch."),
                "shape": list(result.shape),
                "nan": int(result.isnan().sum()),
            }
            for name, result in done.results.items()
        },
        "verified": [comparison.to_dict() for comparison in comparisons],
        "output": None if output is None else os.fspath(output),
        "metadata": call.metadata,
    }
