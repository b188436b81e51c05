"""``sparse-mla demo``: a captured call and a prefill chunk of a real size, computed and checked."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..params import D_QK_SUPPORTED, D_V
from .terminal import (
    FAULT,
    Backend,
    Device,
    Json,
    chosen_device,
    guarded,
    say,
    say_json,
    say_row,
    usage,
)

if TYPE_CHECKING:
    import torch

    from .demo_chunk import Chunk, Sizes
    from .replay import Comparison

CAPTURED = "deepseek_v32_call.safetensors"
VERIFIED = 16
"""Queries of the chunk that are compared with the float64 reference."""

Track = Callable[[str, int], Callable[[int], None]]
"""Starts a bar of so many steps and gives what to call as they are done."""


def demo(
    device: Device = None,
    backend: Backend = None,
    s_q: Annotated[int, typer.Option(min=1, help="Query tokens of the chunk.")] = 512,
    s_kv: Annotated[int, typer.Option(min=1, help="Cached tokens, the chunk included.")] = 8192,
    h_q: Annotated[int, typer.Option(min=1, help="Query heads.")] = 128,
    topk: Annotated[int, typer.Option(min=1, help="Keys that each query selects.")] = 2048,
    d_qk: Annotated[int, typer.Option(help="Columns of a query or key: 512 or 576.")] = 576,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the chunk.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw selection, attention and error (.png, .pdf or .svg)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute FP8 sparse MLA attention here, check it and time it.

    First a call captured from transformers' DeepSeek-V3.2 model class, compared with the results
    in its file; then a prefill chunk of that model's size, whose queries select their keys by a
    real top-k over all earlier ones, compared with the float64 reference.

    Examples:
      sparse-mla demo
      sparse-mla demo --device cuda --s-q 4096 --s-kv 65536
      sparse-mla demo --h-q 16 --topk 512 --plot chunk.png

    Exit codes: 0 the results are right, 1 they are off, 2 usage or a backend that cannot run it.
    """
    with guarded(as_json):
        from .demo_chunk import Sizes

        place = chosen_device(device)
        if s_q > s_kv:
            raise usage(f"{s_q} queries do not fit into {s_kv} cached tokens", "--s-q")
        if d_qk not in D_QK_SUPPORTED:
            raise usage(f"{d_qk} columns are not supported; 512 or 576 are", "--d-qk")
        sizes = Sizes(s_q, s_kv, h_q, topk, d_qk)
        _require_memory(sizes)
        if plot is not None:
            require_plot(plot)
        report: dict[str, Any] = {"ok": True}
        if not as_json:
            say("A call captured from transformers' DeepSeek-V3.2 model class")
        report["captured"] = captured = _captured(place, backend)
        if not as_json:
            _say_captured(captured)
            say(f"\nA prefill chunk: {s_q} queries, {s_kv} cached tokens, {h_q} heads, top {topk}")
        with _progress(as_json) as track:
            done = _chunk(sizes, seed, place, backend, track)
        report["prefill"] = done.to_dict()
        report["ok"] = done.comparison.ok and captured.get("ok", True)
        if plot is not None:
            from .demo_plot import draw

            draw(plot, done)
            report["plot"] = str(plot)
        if as_json:
            say_json(report)
        else:
            done.say(plot)
        if not report["ok"]:
            raise typer.Exit(FAULT)


def captured_file() -> Path | None:
    """The captured call: in an installed package's data, or in examples/ beside the package."""
    package = Path(__file__).resolve().parent.parent
    places = (package / "data" / CAPTURED, package.parent / "examples" / CAPTURED)
    return next((place for place in places if place.is_file()), None)


def _captured(device: torch.device | None, backend: str | None) -> dict[str, Any]:
    """The captured call replayed and verified, as data; without ``ok`` when there is no file."""
    from ..callfile import load_call
    from .replay import replay, verify

    file = captured_file()
    if file is None:
        return {"file": None}
    call = load_call(file)
    done = replay(call, device, backend)
    comparisons = verify(call, done)
    s_q, h_q, d_qk = call.tensors["q"].shape
    return {
        "ok": all(comparison.ok for comparison in comparisons),
        "file": str(file),
        "operator": call.operator,
        "source": call.metadata.get("source"),
        "sizes": {"s_q": s_q, "s_kv": call.tensors["kv"].shape[0], "h_q": h_q, "d_qk": d_qk},
        "backend": done.backend,
        "seconds": done.seconds,
        "verified": [comparison.to_dict() for comparison in comparisons],
        "text": [comparison.text() for comparison in comparisons],
    }


def _say_captured(captured: dict[str, Any]) -> None:
    if captured["file"] is None:
        say_row("file", f"{CAPTURED} is not here: install from a checkout to replay it")
        return
    sizes = ", ".join(f"{name} {size}" for name, size in captured["sizes"].items())
    say_row("sizes", sizes)
    say_row("backend", f"{captured['backend']}, {captured['seconds'] * 1e3:.1f} ms")
    for text in captured["text"]:
        say_row("result", text)


@dataclass
class ChunkRun:
    """What came of the prefill chunk."""

    sizes: Sizes
    chunk: Chunk
    backend: str
    seconds: float
    flop: int
    comparison: Comparison
    row_errors: torch.Tensor  # [verified queries, h_q]
    queries: list[int]
    kept: torch.Tensor  # [verified queries, h_q]
    peak_bytes: int | None

    @property
    def gflops(self) -> float:
        """Billions of floating-point operations a second, masked slots not counted."""
        return self.flop / self.seconds / 1e9

    def to_dict(self) -> dict[str, Any]:
        """The figures as data."""
        return {
            **vars(self.sizes),
            "device": str(self.chunk.q.device),
            "backend": self.backend,
            "seconds": self.seconds,
            "gflops": self.gflops,
            "peak_bytes": self.peak_bytes,
            "kept_share": float(self.kept.mean()),
            "verified": self.comparison.to_dict(),
        }

    def say(self, plot: Path | None) -> None:
        """The figures as lines."""
        say_row("backend", f"{self.backend}, on device {self.chunk.q.device}")
        each = self.seconds / self.sizes.s_q * 1e3
        say_row("time", f"{self.seconds:.3g} s, {each:.3g} ms a query")
        say_row("speed", f"{self.gflops:,.0f} GFLOP/s")
        if self.peak_bytes is not None:
            where = "of the device" if self.chunk.q.is_cuda else "of this process"
            say_row("memory", f"{self.peak_bytes / 2**20:,.0f} MiB at most, {where}")
        kept = f"{float(self.kept.mean()):.1%}"
        say_row("selection", f"holds {kept} of the softmax weight of all keys up to the query")
        say_row("result", self.comparison.text())
        if plot is not None:
            say_row("picture", plot)


def _chunk(
    sizes: Sizes, seed: int, device: torch.device | None, backend: str | None, track: Track
) -> ChunkRun:
    """Make the chunk, compute it, compare some queries with the reference."""
    import torch

    from .. import dispatch
    from .demo_chunk import kept_share, make_chunk
    from .replay import compared, sample, tolerance_of

    place = device or torch.device("cpu")
    chunk = make_chunk(sizes, seed, place, track("top-k over the keys", sizes.s_q))
    seconds, results = _timed(chunk, backend, track("attention", sizes.s_q))
    name = dispatch.last_backend()

    queries = sample(sizes.s_q, VERIFIED)
    advance = track("float64 reference", len(queries))
    wanted = []
    for t in queries:
        wanted.append(_attend(chunk, slice(t, t + 1), "reference"))
        advance(1)
    want = {key: torch.cat([row[key] for row in wanted]) for key in results}
    got = {key: result[queries] for key, result in results.items()}
    comparison = compared("the reference", got, want, sizes.s_q, tolerance_of(name))
    difference = (got["out"].double() - want["out"].double()).norm(dim=-1)
    return ChunkRun(
        sizes=sizes,
        chunk=chunk,
        backend=name,
        seconds=seconds,
        flop=2 * int((chunk.indices >= 0).sum()) * sizes.h_q * (sizes.d_qk + D_V),
        comparison=comparison,
        row_errors=(difference / want["out"].double().norm(dim=-1)).cpu(),
        queries=queries,
        kept=kept_share(chunk, queries).cpu(),
        peak_bytes=_peak_bytes(place),
    )


def _timed(
    chunk: Chunk, backend: str | None, advance: Callable[[int], None]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Seconds of the attention alone, and its results.

    On a GPU the chunk is one call, after one that compiles; on a CPU a few, so that the bar moves.
    """
    import torch

    from .replay import wait

    s_q = chunk.q.shape[0]
    step = s_q if chunk.q.is_cuda else max(64, -(-s_q // 16))
    if chunk.q.is_cuda:
        _attend(chunk, slice(0, s_q), backend)
        torch.cuda.reset_peak_memory_stats(chunk.q.device)
    seconds = 0.0
    parts = []
    for start in range(0, s_q, step):
        rows = slice(start, min(start + step, s_q))
        wait(chunk.q)
        began = time.perf_counter()
        parts.append(_attend(chunk, rows, backend))
        wait(chunk.q)
        seconds += time.perf_counter() - began
        advance(rows.stop - rows.start)
    return seconds, {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _attend(chunk: Chunk, rows: slice, backend: str | None) -> dict[str, torch.Tensor]:
    """The attention of some queries of the chunk."""
    from ..callfile import RESULTS
    from ..interface import sparse_mla_prefill

    results = sparse_mla_prefill(
        chunk.q[rows],
        chunk.kv,
        chunk.indices[rows],
        chunk.sm_scale,
        chunk.q_scale,
        chunk.kv_scale,
        return_stats=True,
        backend=backend or "auto",
    )
    return dict(zip(RESULTS, results, strict=True))


def _peak_bytes(device: torch.device) -> int | None:
    """Most memory in use so far: of the device's tensors, else resident in this process."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def _progress(quiet: bool) -> Iterator[Track]:
    """Bars on stderr, where it is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("  {task.description:<19}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:

        def track(description: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(description, total=total)
            return lambda steps: progress.advance(task, steps)

        yield track


def _require_memory(sizes: Sizes) -> None:
    """Refuse what this machine cannot hold: it might be killed for it rather than told."""
    try:
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return
    need = sizes.bytes
    if need > has:
        gib = 2**30
        raise usage(
            f"the chunk takes about {need / gib:,.0f} GiB, this machine has {has / gib:,.0f}",
            "--s-q, --s-kv, --h-q, --topk",
        )


def require_plot(file: Path) -> None:
    """Refuse before the work what would fail after it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise usage("it needs matplotlib: pip install 'sparse-mla[plot]'", "--plot") from None
    kinds = Figure().canvas.get_supported_filetypes()
    if file.suffix.lower().lstrip(".") not in kinds:
        raise usage(f"{file.name} should end in .png, .pdf or .svg", "--plot")
    if not file.resolve().parent.is_dir():
        raise usage(f"{file.parent} is not a directory", "--plot")
