"""``sparse-mla bench``: measure, compare, report, and find out what fell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import FAULT, UNUSABLE, Device, Json, chosen_device, guarded, say, say_json, usage

if TYPE_CHECKING:
    import torch

    from ..benchmarks.gate import Verdict
    from ..benchmarks.runner import Settings
    from ..benchmarks.shapes import Shape

Words = Annotated[
    list[str] | None,
    typer.Option("--shapes", metavar="GLOB", help="Shapes by name or glob; may be repeated."),
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--against", metavar="PEER", help="Peers beside ours, or none; may be repeated."),
]
ONLY = ("speed", "accuracy")


def bench(
    shapes: Words = None,
    against: Peers = None,
    device: Device = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few shapes, few rounds.")] = False,
    only: Annotated[
        str | None, typer.Option("--only", metavar="PART", help="speed or accuracy.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Timed calls of each peer: 32, on a CPU 5.")
    ] = None,
    warm_cache: Annotated[
        bool, typer.Option("--warm-cache", help="One input set, rows stay in the L2.")
    ] = False,
    list_shapes: Annotated[
        bool, typer.Option("--list", help="List shapes and peers; measure nothing.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="Results as JSON: a file or a folder."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write report.html and its plots as PNG there."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="RESULTS", help="Report on this file; measure nothing."),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(
            metavar="RESULTS",
            help="Measure its shapes again; name what fell. On a GPU bursts decide.",
        ),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="What --check lets a share fall by.")] = 0.05,
    as_json: Json = False,
) -> None:
    """Measure speed and accuracy, with peers and ceilings in the same run.

    Rounds interleave the peers, every timed output is compared with the float64 reference, and a
    matmul and a copy are measured as ceilings. Without --shapes a set that takes a GPU about two
    minutes, or a CPU about one. --check compares shares of the roofline: on a GPU those in bursts
    decide, and of sustained ones, which move with power and temperature, it names what fell.

    Examples:
      sparse-mla bench --quick
      sparse-mla bench --shapes 'v32-tp8-*-kv32k-topk' --against none
      sparse-mla bench -o results.json --report report
      sparse-mla bench --from results.json --report report
      sparse-mla bench --check results.json

    Exit codes: 0 fine, 1 an output is wrong or a figure fell, 2 usage, or nothing to compare.
    """
    with guarded(as_json):
        _refuse_values(only, rounds, tolerance)
        given = {
            "--shapes": shapes, "--against": against, "--device": device, "--only": only,
            "--rounds": rounds, "--quick": quick, "--warm-cache": warm_cache, "-o": output,
        }  # fmt: skip
        _refuse_contradictions(given, source, check)
        _refuse_places(output, report)
        if report is not None:
            _require_plot()
        if list_shapes:
            _list(shapes, _place(device), as_json)
            return
        if source is not None:
            _report(_load(source, "--from"), report, as_json)
            return
        place = _place(device)
        before = None if check is None else _load(check, "--check")
        chosen, left_out = _chosen(shapes, before, place, quick, only)
        names = _names(against)
        settings = _settings(place, quick, rounds, warm_cache, before)
        results = _measure(place, chosen, names, settings, quick, only, as_json)
        if output is not None:
            from ..benchmarks.results import write

            file = write(output, results)
            say(f"written to {file}", err=True)
        if report is not None:
            _write_report(results, report)
        _say(results, as_json, before, tolerance, left_out)


def _refuse_values(only: str | None, rounds: int | None, tolerance: float) -> None:
    if only is not None and only not in ONLY:
        raise usage(f"{only!r} is no part; speed or accuracy", "--only")
    if rounds is not None and rounds < 2:
        raise usage(f"{rounds} give no spread; 2 at least", "--rounds")
    if not 0 <= tolerance <= 1:
        raise usage(f"{tolerance} is not between 0 and 1", "--tolerance")


def _refuse_places(output: Path | None, report: Path | None) -> None:
    """Refuse before the work what could not be written after it."""
    if output is not None:
        if not output.resolve().parent.is_dir():
            raise usage(f"{output.parent} is not a directory", "-o")
        _refuse_unwritable(output if output.is_dir() else output.parent, "-o")
    if report is not None:
        if report.exists() and not report.is_dir():
            raise usage(f"{report} is a file, not a directory", "--report")
        _refuse_unwritable(report, "--report")


def _refuse_unwritable(directory: Path, option: str) -> None:
    """Make the directory and a file in it, as the permissions alone do not say whether one can."""
    import tempfile

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as fault:
        raise usage(f"cannot write to {directory}: {fault.strerror or fault}", option) from None


def _refuse_contradictions(given: dict[str, Any], source: Path | None, check: Path | None) -> None:
    """Refuse options that would have no effect beside --from or --check."""
    if source is not None and check is not None:
        raise usage("it measures again, --from measures nothing; give one of them", "--check")
    for option, value in given.items():
        if source is not None and value:
            raise usage(f"--from measures nothing; leave {option} out", option)
        if check is not None and value and option in ("--quick", "--warm-cache"):
            raise usage(f"--check measures as its file says; leave {option} out", option)
    if given["--only"] == "accuracy" and given["--shapes"]:
        raise usage("--only accuracy has inputs of its own; leave --shapes out", "--shapes")
    if check is not None and given["--only"] == "accuracy":
        raise usage("it compares speed; leave --only accuracy out", "--check")


def _require_plot() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise usage("it needs matplotlib: pip install 'sparse-mla[plot]'", "--report") from None


def _place(device: str | None) -> torch.device:
    """The device to measure: the one asked for, else a GPU if there is one."""
    import torch

    place = chosen_device(device)
    if place is None:
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if place.type not in ("cuda", "cpu"):
        raise usage(f"{place} is neither cuda nor cpu", "--device")
    if place.type == "cuda":
        place = torch.device("cuda", place.index or 0)
        torch.cuda.set_device(place)
    return place


def _load(file: Path, option: str) -> dict[str, Any]:
    from ..benchmarks.results import ResultsError, load

    try:
        return load(file)
    except ResultsError as fault:
        raise usage(str(fault), option) from None


def _words(given: list[str], option: str) -> list[str]:
    """Repeated or separated by commas."""
    words = [word.strip() for text in given for word in text.split(",") if word.strip()]
    if not words:
        raise usage(f"{', '.join(given)!r} names nothing", option)
    return words


def _selected(patterns: list[str]) -> list[Shape]:
    from ..benchmarks.shapes import nearest, select

    try:
        return select(patterns)
    except KeyError as fault:
        pattern = str(fault.args[0])
        close = nearest(pattern)
        hint = f"did you mean {', '.join(close)}?" if close else "--list shows them"
        raise usage(f"no shape is called {pattern!r}; {hint}", "--shapes") from None


def _chosen(
    shapes: list[str] | None,
    before: dict[str, Any] | None,
    place: torch.device,
    quick: bool,
    only: str | None,
) -> tuple[list[Shape], list[str]]:
    """Shapes to measure, and those of the file to check that are not among them."""
    from ..benchmarks import gate, machine
    from ..benchmarks.shapes import REGISTRY, default

    wanted = _selected(_words(shapes, "--shapes")) if shapes else None
    if before is None:
        if only == "accuracy":
            return [], []
        return wanted or _selected(list(default(place.type, quick))), []
    reason = gate.other_machine(before, machine.device_name(place), place.type)
    if reason is not None:
        say(f"nothing to compare: {reason}", err=True)
        raise typer.Exit(UNUSABLE)
    in_file = [row["id"] for row in before["prefill"]]
    if not in_file:
        raise usage("this file has no speed to compare, only accuracy", "--check")
    ids = in_file if wanted is None else [shape.id for shape in wanted if shape.id in in_file]
    if not ids:
        raise usage("none of these shapes is in the file to check", "--shapes")
    known = [REGISTRY[id] for id in ids if id in REGISTRY]
    return known, [id for id in in_file if id not in ids]


def _names(against: list[str] | None) -> list[str] | None:
    """Peers to run: ours and those asked for; ``None`` for all that are not on request."""
    if against is None:
        return None
    from ..benchmarks.peers import everything

    known = everything()
    asked = _words(against, "--against")
    for name in asked:
        if name not in known and name != "none":
            raise usage(f"no peer is called {name!r}; there are {', '.join(known)}", "--against")
    return [name for name, p in known.items() if (p.ours and not p.on_request) or name in asked]


def _settings(
    place: torch.device,
    quick: bool,
    rounds: int | None,
    warm_cache: bool,
    before: dict[str, Any] | None,
) -> Settings:
    from ..benchmarks.runner import Settings

    on_cpu = place.type == "cpu"
    usual = (3 if quick else 5) if on_cpu else (8 if quick else 32)
    settings = Settings(rounds=rounds or usual, cold=not warm_cache, host=before is None)
    if before is None:
        return settings
    then = before["settings"]
    cold = bool(then["cold"]) if not on_cpu else settings.cold
    return Settings(tuple(then["moods"]), rounds or then["rounds"], cold, host=False)


def _measure(
    place: torch.device,
    chosen: list[Shape],
    names: list[str] | None,
    settings: Settings,
    quick: bool,
    only: str | None,
    as_json: bool,
) -> dict[str, Any]:
    from ..benchmarks import accuracy, memory, runner

    tell: Callable[[str], None] = lambda line: say(line, err=True)  # noqa: E731
    results = runner.run(place, chosen, names, settings, tell)
    checking = not settings.host
    if only != "speed" and not checking:
        results["accuracy"] = accuracy.measure(place, names, tell, queries=2 if quick else None)
    if place.type == "cpu" and only is None and not quick and not checking:
        results["memory"] = memory.measure()
    return results


def _say(
    results: dict[str, Any],
    as_json: bool,
    before: dict[str, Any] | None,
    tolerance: float,
    left_out: list[str],
) -> None:
    """The results or the verdict, and the exit code that goes with it."""
    from ..benchmarks import table
    from ..benchmarks.gate import as_data, judge

    wrong = [row for row in table.rows(results) if row.figure["fault"]]
    verdict = None if before is None else judge(before, results, tolerance, left_out)
    if as_json:
        say_json(results if verdict is None else {**results, "check": as_data(verdict)})
    else:
        say(table.text(results))
        if results["accuracy"]:
            say(table.accuracy_text(results["accuracy"]))
        if verdict is not None:
            _say_verdict(verdict)
    if verdict is not None and not verdict.compared and not verdict.lost:
        raise typer.Exit(UNUSABLE)
    if wrong or (verdict is not None and not verdict.ok):
        raise typer.Exit(FAULT)


def _say_verdict(verdict: Verdict) -> None:
    for entry in verdict.fell:
        say(f"fell: {entry}")
    for line in verdict.lost:
        say(f"lost: {line}")
    for entry in verdict.noted:
        say(f"noted: {entry}")
    for line in verdict.not_compared:
        say(f"not compared: {line}")
    say(
        f"{len(verdict.held)} of {verdict.compared} {verdict.mood} figures held, "
        f"{len(verdict.fell)} fell by more than {verdict.tolerance:.1%} of their share of the "
        f"roofline, {len(verdict.lost)} lost, {len(verdict.not_compared)} not compared"
    )
    if verdict.noted:
        say(f"{len(verdict.noted)} sustained figures fell as much, which does not decide")


def _report(results: dict[str, Any], report: Path | None, as_json: bool) -> None:
    if report is not None:
        _write_report(results, report)
    _say(results, as_json, None, 0.0, [])


def _write_report(results: dict[str, Any], report: Path) -> None:
    from ..benchmarks.report import write

    for file in write(results, report):
        say(f"written to {file}", err=True)


def _list(shapes: list[str] | None, place: torch.device, as_json: bool) -> None:
    from ..benchmarks.peers import everything
    from ..benchmarks.shapes import REGISTRY, default

    usual = default(place.type, False)
    chosen = _selected(_words(shapes, "--shapes")) if shapes else list(REGISTRY.values())
    peers = everything()
    if as_json:
        say_json(
            {
                "shapes": [{"id": shape.id, **vars(shape)} for shape in chosen],
                "default": list(usual),
                "peers": [{"name": peer.name, "what": peer.what} for peer in peers.values()],
            }
        )
        return
    say("peers:")
    for peer in peers.values():
        say(f"  {peer.name:<17} {peer.what}")
    say(f"{len(chosen)} shapes; * is measured by default on {place.type}:")
    for shape in chosen:
        mark = "*" if shape.id in usual else " "
        say(f"{mark} {shape.id:<38} h_q {shape.h_q:>3}  d_qk {shape.d_qk}  topk {shape.topk}")
