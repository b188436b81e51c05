"""The one runner: shapes times peers, interleaved, every timed output compared with the reference.

What is timed is timed in rounds: each round makes one call of every peer, so that all of them see
the same clocks, temperature and neighbours. Peers that take many times the others' time have rounds
of their own after the others'. Input sets rotate from round to round. Outputs of all
timed calls are kept (ours are buffers that held NaN) and compared afterwards with float64 on
sampled queries; all of ours on one input set must have the same bits.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .. import dispatch
from ..backends.reference import Attention
from ..params import D_V
from ..testing import Inputs, Tolerance, compare, expected, make_problem
from . import ceilings, host, inputs, machine
from .inputs import Workload
from .peers import Outputs, Peer, describe, everything, reason
from .results import SCHEMA
from .shapes import Shape
from .timing import MOODS, Call, Clock, CpuClock, GpuClock, Mood, interleaved, summary

SAMPLED_QUERIES = 8
SLOW_ROUNDS = 3
FEWEST_ROUNDS = 4
KEPT_SHARE = 0.5
"""Of the free memory that timed outputs may take; rounds are fewer where they would take more."""
KEPT_BYTES_ON_CPU = 1 << 31

Report = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure."""

    moods: tuple[Mood, ...] = MOODS
    rounds: int = 32
    cold: bool = True
    """Rotate input sets, and overwrite the L2 between calls where these are smaller than it."""
    host: bool = True


def run(
    device: torch.device,
    shapes: Sequence[Shape],
    names: Sequence[str] | None = None,
    settings: Settings | None = None,
    report: Report = lambda line: None,
    argv: list[str] | None = None,
) -> dict[str, Any]:
    """Measure ``shapes`` on ``device``; the results, as ``results.schema.json`` describes them.

    ``names`` are the peers to run, all that are not on request unless given.
    """
    settings = settings or Settings()
    if device.type == "cpu":
        settings = replace(settings, moods=("sustained",), cold=False)
    known = everything()
    chosen = [
        peer
        for peer in known.values()
        if (not peer.on_request if names is None else peer.name in names)
    ]
    available = [peer for peer in chosen if peer.unavailable(device) is None]
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "machine": machine.describe(device, argv),
        "settings": {**asdict(settings), "moods": list(settings.moods)},
        "ceilings": {},
        "peers": [describe(peer, device) for peer in chosen],
        "prefill": [],
        "host": None,
        "memory": None,
        "accuracy": None,
    }
    report(f"peers: {', '.join(peer.name for peer in available) or 'none runs here'}")
    begin, others = time.perf_counter(), machine.others_seconds()
    if shapes:
        clock = CpuClock() if device.type == "cpu" else GpuClock(device)
        rounds = max(FEWEST_ROUNDS, settings.rounds // 2)
        found["ceilings"] = ceilings.measure(device, clock, settings.moods, rounds)
        for mood, entries in found["ceilings"].items():
            report(f"ceilings, {mood}: {ceilings.text(entries)}")
    for shape in shapes:
        row = measure(shape, device, available, settings, found["ceilings"])
        found["prefill"].append(row)
        report(f"{shape.id}: {text(row)}")
    if shapes and device.type == "cpu" and others is not None:
        seconds = (machine.others_seconds() or others) - others
        cores = os.cpu_count() or 1
        share = max(0.0, seconds / (time.perf_counter() - begin) / cores)
        found["machine"]["others_share"] = share
    if settings.host and device.type == "cuda" and dispatch.load("sm90").available() is None:
        found["host"] = host.cost(device)
    return found


def measure(
    shape: Shape,
    device: torch.device,
    peers: Sequence[Peer],
    settings: Settings,
    limits: dict[str, Any],
) -> dict[str, Any]:
    """One shape in every mood, as data."""
    l2 = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
    sets = inputs.sets_for(shape, l2) if settings.cold else 1
    workload = inputs.make(shape, device, sets=sets)
    flush = 2 * l2 if settings.cold and workload.touched_bytes < 2 * l2 else 0
    clock: Clock = CpuClock() if device.type == "cpu" else GpuClock(device, flush)
    row: dict[str, Any] = {
        "id": shape.id,
        "shape": asdict(shape),
        "operations": workload.operations,
        "gathered_bytes": workload.gathered_bytes,
        "selection": workload.selection,
        "input_sets": sets,
        "touched_bytes": workload.touched_bytes,
        "l2_overwritten": flush > 0,
        "refused": {},
        "moods": {},
    }
    warm, row["refused"] = _warmed(workload, peers)
    wants = [_wanted(each) for each in workload.sets]
    for mood in settings.moods:
        runnable = [peer for peer in peers if peer.name in warm]
        try:
            row["moods"][mood] = _timed(
                workload, runnable, warm, wants, clock, mood, settings, limits[mood]
            )
        except torch.OutOfMemoryError as fault:  # the next shape may fit
            row["refused"] |= {peer.name: f"failed: {reason(fault)}" for peer in runnable}
    return row


def _warmed(workload: Workload, peers: Sequence[Peer]) -> tuple[dict[str, Call], dict[str, str]]:
    """A call of each peer that takes the shape and has been made once; why the others do not."""
    calls: dict[str, Call] = {}
    refused: dict[str, str] = {}
    first = workload.sets[0]
    for peer in peers:
        why = peer.refusal(first)
        if why is None:
            try:
                call = peer.prepare(first, 1)
                call()
                if first.q.is_cuda:
                    torch.cuda.synchronize(first.q.device)
                if peer.ours and dispatch.last_backend() != peer.name:
                    why = f"the call was run by {dispatch.last_backend()}"
                calls[peer.name] = call
            except Exception as fault:  # another project's operator may fail in any way
                why = f"failed: {reason(fault)}"
        if why is not None:
            refused[peer.name] = why
            calls.pop(peer.name, None)
    return calls, refused


def _wanted(each: Inputs) -> tuple[list[int], Attention]:
    """Sampled queries of an input set and their float64 results."""
    problem = make_problem(each)
    step = max(1, problem.s_q // SAMPLED_QUERIES)
    queries = sorted({*range(0, problem.s_q, step), problem.s_q - 1})
    return queries, expected(problem, queries)


def _timed(
    workload: Workload,
    peers: Sequence[Peer],
    warm: dict[str, Call],
    wants: list[tuple[list[int], Attention]],
    clock: Clock,
    mood: Mood,
    settings: Settings,
    limits: dict[str, Any],
) -> dict[str, Any]:
    """All peers in one mood: times, shares of the ceilings, and whether what was timed is right."""
    rounds = _rounds(workload, peers, settings.rounds)
    kept: dict[str, list[tuple[int, Outputs]]] = {peer.name: [] for peer in peers}
    on_gpu = isinstance(clock, GpuClock)
    slow = [peer.name for peer in peers if peer.slow and on_gpu]
    calls = {
        peer.name: _calls(
            peer, workload, min(rounds, SLOW_ROUNDS) if peer.name in slow else rounds, kept
        )
        for peer in peers
    }
    for peer in peers:
        _reserve(peer, workload, len(calls[peer.name]))
    fast = {name: each for name, each in calls.items() if name not in slow}
    together, apart = ([warm[name] for name in part] for part in (fast, slow))
    if mood == "sustained":
        clock.settle(together or apart)
    companions = _companions(workload, rounds)
    spent = interleaved({**companions, **fast}, clock, mood, together)
    sm_mhz = clock.sm_mhz
    spent |= interleaved({name: calls[name] for name in slow}, clock, mood, apart)
    found: dict[str, Any] = {"rounds": rounds, "peers": {}}
    if isinstance(clock, GpuClock):
        busy = next((warm[name] for name in fast), None) if mood == "sustained" else None
        found["card"] = machine.card(clock.device, busy)
        found["sm_mhz"] = sm_mhz if fast else clock.sm_mhz
    for peer in peers:
        figure = _figure(workload, spent[peer.name], limits)
        if companions:
            share = _of_companion(workload, spent[peer.name], spent["bf16_matmul"])
            figure |= {"of_matmul": share, "of_roofline": max(share, figure["of_copy"])}
        worst, fault = _verdict(workload, peer, kept.pop(peer.name), wants)
        figure |= {
            "worst_relative_l2": worst,
            "fault": fault,
            "kernel": peer.kernel(workload.sets[0]),
        }
        found["peers"][peer.name] = figure
    return found


def _rounds(workload: Workload, peers: Sequence[Peer], wanted: int) -> int:
    """Rounds whose outputs the memory holds."""
    device = workload.sets[0].q.device
    shape = workload.shape
    output = shape.s_q * max(shape.h_q, 64) * (2 * D_V + 8)
    if device.type == "cuda":
        free = KEPT_SHARE * torch.cuda.mem_get_info(device)[0]
    else:
        free = KEPT_BYTES_ON_CPU
    each = output * max(1, sum(not peer.slow for peer in peers))
    return max(FEWEST_ROUNDS, min(wanted, int(free // each)))


def _calls(
    peer: Peer, workload: Workload, rounds: int, kept: dict[str, list[tuple[int, Outputs]]]
) -> list[Call]:
    """The peer's call of each round, on rotating sets, its outputs kept."""
    sets = len(workload.sets)
    prepared = [
        peer.prepare(each, max(1, -(-(rounds - number) // sets)))
        for number, each in enumerate(workload.sets)
    ]

    def call_of(number: int) -> Call:
        which = number % sets
        return lambda: kept[peer.name].append((which, prepared[which]()))

    return [call_of(number) for number in range(rounds)]


def _reserve(peer: Peer, workload: Workload, rounds: int) -> None:
    """Have the allocator hold what a peer that allocates its outputs will ask for while timed."""
    first = workload.sets[0]
    if peer.ours or not first.q.is_cuda:
        return
    s_q, h_q = first.q.shape[0], max(first.q.shape[1], 64)
    held = [
        first.q.new_empty(s_q, h_q, width, dtype=dtype)
        for _ in range(rounds)
        for width, dtype in ((D_V, torch.bfloat16), (1, torch.float32), (1, torch.float32))
    ]
    del held


def _companions(workload: Workload, rounds: int) -> dict[str, list[Call]]:
    """On a CPU the matmul that figures are shares of takes part in each round."""
    if workload.sets[0].q.is_cuda:
        return {}
    n = ceilings.MATMUL["cpu"]
    square = torch.randn(n, n, generator=torch.Generator().manual_seed(0)).bfloat16()
    product = torch.empty_like(square)
    return {"bf16_matmul": [lambda: torch.mm(square, square, out=product)] * rounds}


def _of_companion(workload: Workload, ours: list[float], matmul: list[float]) -> float:
    """The median over rounds of the share of the matmul's rate in the same round."""
    amount = 2 * ceilings.MATMUL["cpu"] ** 3
    pairs = zip(ours, matmul, strict=True)
    return statistics.median(workload.operations / a / (amount / b) for a, b in pairs)


def _figure(
    workload: Workload, milliseconds: list[float], limits: dict[str, Any]
) -> dict[str, Any]:
    """Times, rates and shares of the ceilings."""
    times = summary(milliseconds)
    tflops = workload.operations / times["median_ms"] / 1e9
    tb_per_s = workload.gathered_bytes / times["median_ms"] / 1e9
    return {
        **times,
        "tflops": tflops,
        "gathered_tb_per_s": tb_per_s,
        **ceilings.shares(tflops, tb_per_s, limits),
    }


def _verdict(
    workload: Workload,
    peer: Peer,
    kept: list[tuple[int, Outputs]],
    wants: list[tuple[list[int], Attention]],
) -> tuple[float | None, str | None]:
    """The worst relative L2 of ``out`` over all timed calls, and what is wrong if anything is."""
    worst = 0.0
    first: dict[int, Outputs] = {}
    nothing = torch.empty(0)  # `compare_outputs` puts each call's outputs there
    problems = [make_problem(each, (nothing, nothing, nothing)) for each in workload.sets]
    try:
        for number, (which, outputs) in enumerate(kept):
            queries, want = wants[which]
            error = compare_outputs(problems[which], outputs, peer.tolerance, queries, want)
            worst = max(worst, error)
            if peer.ours:
                _same_bits(number, outputs, first.setdefault(which, outputs))
    except AssertionError as fault:
        return (worst if math.isfinite(worst) else None), str(fault)
    return worst, None


def compare_outputs(
    problem: Any, outputs: Outputs, tolerance: Tolerance, queries: list[int], want: Attention
) -> float:
    """Relative L2 of the worst sampled row of ``out``; AssertionError where outputs are wrong."""
    out, max_logits, lse = outputs
    assert bool(out.isfinite().all()), "out has an element that is not finite or was not written"
    full = replace(
        problem,
        out=out,
        max_logits=_or_wanted(max_logits, want.max_logits, queries, out),
        lse=_or_wanted(lse, want.lse, queries, out),
    )
    return compare(full, tolerance, queries=queries, against=want).out


def _or_wanted(
    given: torch.Tensor | None, want: torch.Tensor, queries: list[int], out: torch.Tensor
) -> torch.Tensor:
    """A peer without statistics is not judged by them."""
    if given is not None:
        return given
    filled = out.new_zeros(out.shape[:2], dtype=torch.float32)
    filled[queries] = want.float()
    return filled


def _same_bits(number: int, outputs: Outputs, first: Outputs) -> None:
    for name, got, want in zip(outputs._fields, outputs, first, strict=True):
        if got is None or want is None:
            continue
        equal = torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        assert equal, f"{name} of round {number} has other bits than the first on the same inputs"


def text(row: dict[str, Any]) -> str:
    """One short line on a measured shape: its last mood, and who was wrong in any."""
    peers: dict[str, Any] = {}
    wrong = set()
    for entry in row["moods"].values():
        peers = entry["peers"]
        wrong |= {name for name, figure in peers.items() if figure["fault"]}
    parts = [
        f"{name} {'WRONG' if name in wrong else ceilings.rate(figure['tflops'])}"
        for name, figure in peers.items()
    ]
    return ", ".join(parts) or "nothing runs it"
