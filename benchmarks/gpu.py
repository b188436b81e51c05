"""How fast the Hopper kernel is, and whether what was timed is right.

    python benchmarks/gpu.py [--tests] [--output FILE]

With ``--tests`` the GPU tests run first. Then each shape is timed in two moods of the card:

    burst       calls back to back after 0.25 s of idle, mostly before the card's power limit acts
    sustained   calls back to back, once the card has settled under load

A figure is the median of ``--runs`` calls over rotated input sets, with the 10th and 90th
percentile. Every timed call writes outputs of its own that held NaN; afterwards sampled queries of
each input set are compared with float64, and every other output of the set must have the same bits.
Beside them: what one call costs the host, an FP8 matmul and a copy as ceilings. All of it goes into
one JSON, and a table is printed last.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from shapes import HOST, PREFILL, Shape  # noqa: E402

from sparse_mla import dispatch, jit, sparse_mla_q8kv8_prefill_fwd  # noqa: E402
from sparse_mla.params import PrefillProblem  # noqa: E402
from sparse_mla.testing import Inputs, Tolerance, compare, make_problem  # noqa: E402
from sparse_mla.version import __version__  # noqa: E402

DEVICE = "cuda"
E4M3 = torch.float8_e4m3fn
LIMITS = Tolerance(out=0.04, absolute=1.6e-2, relative=1e-3)
"""At logits of standard deviation 1: FP8 probabilities leave a relative L2 of 0.03 at most, and the
14 bits of FP8 wgmma's sums 8e-3 of a logit."""

OUTPUTS = ("out", "max_logits", "lse")
INPUT_SETS = 4
SAMPLED_QUERIES = 8
IDLE_SECONDS = 0.25
WARM_CALLS = 5
SETTLE_SECONDS = 1.0
HEAD_START = 400_000
"""Cycles that the GPU is kept busy before a timed call, so that no launch is waited for."""
HOST_CALLS = 200
HOST_BATCHES = 11
MATMUL = 8192
COPY_BYTES = 1 << 32
SMI_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw",
    "power.limit", "temperature.gpu", "clocks_event_reasons.active",
)  # fmt: skip


def make(shape: Shape, seed: int) -> Inputs:
    """Normally distributed rows; the slots of a query are distinct, in random order."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def fp8(*sizes: int) -> torch.Tensor:
        rows = torch.empty(sizes, dtype=E4M3, device=DEVICE)
        for part in rows.split(1024):
            part.copy_(torch.randn(part.shape, generator=generator, device=DEVICE))
        return rows

    indices = torch.empty(shape.s_q, 1, shape.topk, dtype=torch.int32, device=DEVICE)
    for part in indices.split(128):
        order = torch.rand(len(part), shape.s_kv, generator=generator, device=DEVICE)
        part[:, 0] = order.topk(shape.topk).indices
    scale = torch.full((1,), 0.5, device=DEVICE)
    return Inputs(
        q=fp8(shape.s_q, shape.h_q, shape.d_qk),
        kv=fp8(shape.s_kv, 1, shape.d_qk),
        indices=indices,
        sm_scale=4 / math.sqrt(shape.d_qk),
        q_scale=scale,
        kv_scale=scale.clone(),
    )


def call_of(inputs: Inputs, outputs: PrefillProblem | None = None) -> Callable[[], Any]:
    """The strict operator on ``inputs``, into the outputs of a problem or into new ones."""
    given = {name: getattr(outputs, name) for name in OUTPUTS} if outputs else {}
    return functools.partial(
        sparse_mla_q8kv8_prefill_fwd, *list(vars(inputs).values())[:6], **given
    )


def timed(runs: list[Callable[[], Any]], *, idle: float) -> list[float]:
    """Milliseconds of each run on the GPU, back to back after so many idle seconds."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in runs
    ]
    torch.cuda.synchronize()
    time.sleep(idle)
    torch.cuda._sleep(HEAD_START)
    for _ in range(WARM_CALLS):
        runs[0]()
    for run, (start, stop) in zip(runs, events, strict=True):
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def settle(run: Callable[[], Any]) -> None:
    """Back to back for a while: clocks and temperature reach what a long prefill sees."""
    until = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < until:
        for _ in range(10):
            run()
        torch.cuda.synchronize()


def summary(milliseconds: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, and the spread that a bimodal timing would show."""
    tenths = statistics.quantiles(milliseconds, n=10, method="inclusive")
    return {
        "median_ms": statistics.median(milliseconds),
        "p10_ms": tenths[0],
        "p90_ms": tenths[-1],
        "min_ms": min(milliseconds),
        "max_ms": max(milliseconds),
        "runs": len(milliseconds),
    }


def check(problems: list[PrefillProblem], sets: int) -> float:
    """The worst relative L2 of ``out``; AssertionError unless every output of every run is right.

    ``problems[k]`` has the inputs of set ``k % sets``.
    """
    worst = 0.0
    for number, problem in enumerate(problems):
        first = problems[number % sets]
        if problem is first:
            step = -(-problem.s_q // SAMPLED_QUERIES)
            queries = sorted({*range(0, problem.s_q, step), problem.s_q - 1})
            worst = max(worst, compare(problem, LIMITS, queries=queries).out)
            assert problem.out.isfinite().all(), "an element was not written"
            continue
        for name in OUTPUTS:
            got, want = (getattr(p, name).view(torch.uint8) for p in (problem, first))
            equal = torch.equal(got, want)
            assert equal, f"{name} of run {number} differs from that of run {number % sets}"
    return worst


def measure(shape: Shape, mood: str, runs: int) -> dict[str, Any]:
    """One shape in one mood of the card."""
    sets = [make(shape, seed) for seed in range(INPUT_SETS)]
    problems = [make_problem(sets[number % INPUT_SETS]) for number in range(runs)]
    warm = call_of(sets[0], make_problem(sets[0]))
    warm()
    assert dispatch.last_backend() == "sm90"
    sustained = mood == "sustained"
    if sustained:
        settle(warm)
    calls = [call_of(sets[number % INPUT_SETS], problem) for number, problem in enumerate(problems)]
    milliseconds = timed(calls, idle=0.0 if sustained else IDLE_SECONDS)
    result = summary(milliseconds)
    seconds = result["median_ms"] / 1e3
    state = card(busy=warm if sustained else None)
    worst, fault = math.nan, None
    try:
        worst = check(problems, INPUT_SETS)
    except AssertionError as failure:
        fault = str(failure)
    return {
        **result,
        "tflops": shape.operations / seconds / 1e12,
        "gathered_tb_per_s": shape.gathered_bytes / seconds / 1e12,
        "worst_relative_l2": worst,
        "fault": fault,
        "card": state,
        "all_ms": milliseconds,
    }


def host_cost() -> dict[str, float]:
    """Microseconds of host time a call, while the GPU has nothing else to do."""
    inputs = make(HOST, 0)

    def median(run: Callable[[], Any]) -> float:
        spent = []
        for _ in range(HOST_BATCHES):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(HOST_CALLS):
                run()
            spent.append((time.perf_counter() - begin) / HOST_CALLS)
        return statistics.median(spent[1:]) * 1e6

    return {
        "outputs_given_us": median(call_of(inputs, make_problem(inputs))),
        "outputs_allocated_us": median(call_of(inputs)),
    }


def ceilings(runs: int) -> dict[str, Any]:
    """What the card does at best: a large FP8 matmul, and a copy, both sustained."""
    a, b = (torch.randn(MATMUL, MATMUL, device=DEVICE).to(E4M3) for _ in range(2))
    one = torch.ones((), device=DEVICE)

    def matmul() -> torch.Tensor:
        return torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    source, target = torch.zeros(2, COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    found: dict[str, Any] = {}
    for name, run, amount in (
        ("fp8_matmul_tflops", matmul, 2 * MATMUL**3),
        ("copy_tb_per_s", lambda: target.copy_(source), 2 * COPY_BYTES),
    ):
        settle(run)
        result = summary(timed([run] * runs, idle=0.0))
        found[name] = amount / (result["median_ms"] / 1e3) / 1e12
        found[name + "_times"] = result
    return found


def card(busy: Callable[[], Any] | None = None) -> dict[str, str]:
    """What ``nvidia-smi`` says of the card; with ``busy``, while that runs over and over."""
    index = torch.cuda.current_device()
    command = ["nvidia-smi", f"--id={index}", "--format=csv,noheader"]
    command.append("--query-gpu=" + ",".join(SMI_FIELDS))
    try:
        asked = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as failure:
        return {"unknown": str(failure)}
    while busy is not None and asked.poll() is None:
        for _ in range(10):
            busy()
        torch.cuda.synchronize()
    answer = asked.communicate()[0].strip()
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer else []
    if asked.returncode or len(values) != len(SMI_FIELDS):
        return {"unknown": answer}
    return dict(zip(SMI_FIELDS, values, strict=True))


def machine() -> dict[str, Any]:
    """Everything a figure depends on, but for the figures themselves."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(
            ["python", *(Path(a).name if Path(a).is_absolute() else a for a in sys.argv)]
        ),
        "card": card(),
        "multiprocessors": torch.cuda.get_device_properties(DEVICE).multi_processor_count,
        "compiler": jit.compiler_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "sparse_mla": __version__,
        "commit": commit.stdout.strip() or None,
    }


def run_tests() -> dict[str, Any]:
    """The GPU tests, in a process of their own."""
    arguments = ["-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-p", "no:cacheprovider"]
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = done.stdout.strip().splitlines()
    passed = done.returncode == 0 and " passed" in lines[-1]
    if not passed:
        print(done.stdout, done.stderr, sep="\n", flush=True)
    return {
        "command": shlex.join(["python", *arguments]),
        "passed": passed,
        "summary": lines[-1] if lines else done.stderr.strip(),
        "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))],
        "seconds": time.perf_counter() - begin,
    }


def table(report: dict[str, Any]) -> str:
    """One line a shape and mood."""
    head = f"{'s_q':>6}{'s_kv':>8}{'h_q':>5}{'d_qk':>6}{'topk':>6}  {'mood':<10}"
    head += f"{'us':>9}{'p10':>9}{'p90':>9}{'TFLOPS':>8}{'TB/s':>7}{'error':>8}"
    lines = [head]
    for row in report["prefill"]:
        shape = row["shape"]
        sizes = "".join(f"{shape[n]:>{w}}" for n, w in zip(SIZES, (6, 8, 5, 6, 6), strict=True))
        for mood, result in row["moods"].items():
            times = "".join(f"{result[n + '_ms'] * 1e3:>9.1f}" for n in ("median", "p10", "p90"))
            figures = f"{result['tflops']:>8.0f}{result['gathered_tb_per_s']:>7.2f}"
            error = f"{result['worst_relative_l2']:>8.4f}"
            fault = f"  WRONG: {result['fault']}" if result["fault"] else ""
            lines.append(f"{sizes}  {mood:<10}{times}{figures}{error}{fault}")
            sizes = " " * 31
    limit, host = report["ceilings"], report["host"]
    lines.append(
        f"ceilings: FP8 matmul {MATMUL}^3 {limit['fp8_matmul_tflops']:.0f} TFLOPS, "
        f"copy {limit['copy_tb_per_s']:.2f} TB/s"
    )
    lines.append(
        f"host: {host['outputs_given_us']:.1f} us a call, "
        f"{host['outputs_allocated_us']:.1f} us with outputs to allocate"
    )
    if report["tests"]:
        lines.append(f"tests: {report['tests']['summary']}")
    return "\n".join(lines)


SIZES = ("s_q", "s_kv", "h_q", "d_qk", "topk")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="run the GPU tests first")
    parser.add_argument("--runs", type=int, default=32, help="timed calls a figure")
    parser.add_argument("--shapes", default="", help="only shapes whose id holds this text")
    parser.add_argument(
        "--moods", nargs="+", default=["burst", "sustained"], choices=["burst", "sustained"]
    )
    parser.add_argument("--output", type=Path, help="the JSON; results/ beside this file if absent")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    report: dict[str, Any] = {"tests": run_tests() if args.tests else None, "machine": machine()}
    report["prefill"] = []
    for shape in PREFILL:
        if args.shapes in shape.id:
            moods = {mood: measure(shape, mood, args.runs) for mood in args.moods}
            row = {"id": shape.id, "shape": vars(shape), "moods": moods}
            report["prefill"].append(row)
            torch.cuda.empty_cache()
            print(shape.id, *(f"{m} {moods[m]['tflops']:.0f}" for m in moods), flush=True)
    report["host"] = host_cost()
    report["ceilings"] = ceilings(args.runs)
    output = args.output
    if output is None:
        name = report["machine"]["card"].get("name", "unknown").replace(" ", "-")
        output = ROOT / "benchmarks/results" / f"{name}-{report['machine']['date'][:10]}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    faults = [m["fault"] for row in report["prefill"] for m in row["moods"].values() if m["fault"]]
    return 1 if faults or (report["tests"] and not report["tests"]["passed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
