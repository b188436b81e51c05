"""Everything that only a Hopper GPU can show, in one go: tests, sanitizers, figures.

    python benchmarks/gpu.py [--skip PART ...] [--sanitizer PROGRAM] [--limit SECONDS] -o FILE

runs the tests marked ``gpu`` (several at a time where pytest-xdist is installed), every kernel on
small shapes under compute-sanitizer (memcheck, racecheck and synccheck side by side), and
``sparse-mla bench``. One JSON holds what each of them said, and a short table is printed last. Exit
codes: 0 all is well, 1 something failed, 2 usage.

    python benchmarks/gpu.py --small

is what runs under the sanitizers: each kernel on shapes of a few blocks. Nothing but these kernels
runs on the GPU: inputs are drawn and results compared with float64 on the CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

PARTS = ("tests", "sanitizers", "bench")
TOOLS = ("memcheck", "racecheck", "synccheck")
SANITIZER_ERRORS = 99
"""Exit code of a sanitizer that found something."""
SANITIZER_OPTIONS = (
    "--error-exitcode", str(SANITIZER_ERRORS),
    "--kernel-name", "kernel_substring=sparse_mla",
    "--show-backtrace", "device",  # the host's frames are Python's
    "--print-limit", "0",  # else the findings in one kernel hide those in the next
)  # fmt: skip
SANITIZER_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Each tensor is an allocation of its own: in torch's large blocks memcheck sees no end of one."""
FIRST_PORT = 49152
"""Each tool gets ports of its own to talk to its process."""
LIMIT_SECONDS = 240.0
KEPT = 40
"""Different findings of a tool that are kept whole."""

BENCH = "import sys; from sparse_mla.cli import main; sys.argv[0] = 'sparse-mla'; main()"
MOST_PROCESSES = 8
"""Of tests, at a time; they share one GPU."""

DEVICE = "cuda"
LAUNCH = "launch: "
"""What ``--small`` says before each launch, so that a finding can be told apart from others."""
SMALL_GRID = 8
"""CTAs of a launch there: few queries are then several items to each of them."""
SMALL_LENGTHS = (710, 0, 64, 330, 1, 129, 450)
"""Slots of the queries: no block, whole ones, parts of one, and more than a kernel has stages."""
SMALL_CTAS = {8: 2, 16: 4, 32: 8}
"""CTAs that share an item, by its heads."""


def run_tests() -> dict[str, Any]:
    """The tests marked ``gpu``, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        command += ["-n", str(processes())] if processes() > 1 else []
        code = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, check=False).returncode
        return {"ok": code == 0, "exit_code": code, **counted(report)}


def processes() -> int:
    """How many run tests at a time: one where pytest-xdist is not installed."""
    if importlib.util.find_spec("xdist") is None:
        return 1
    return min(MOST_PROCESSES, os.cpu_count() or 1)


def counted(report: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and which failed, by a JUnit file."""
    if not report.exists():
        return {"passed": 0, "failed": [], "skipped": 0}
    passed, failed, skipped = 0, [], 0
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": skipped}


def run_sanitizers(program: str, limit: float) -> dict[str, Any]:
    """Every tool over ``--small``, side by side; what each found within ``limit`` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        running = {}
        for number, tool in enumerate(TOOLS):
            command = [program, "--tool", tool, *SANITIZER_OPTIONS]
            command += ["--port", str(FIRST_PORT + 100 * number)]
            with (Path(folder) / tool).open("w") as output:
                running[tool] = subprocess.Popen(
                    [*command, sys.executable, __file__, "--small"],
                    cwd=ROOT,
                    env={**os.environ, **SANITIZER_ENVIRONMENT},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that what it started can be stopped with it
                )
        codes = dict.fromkeys(TOOLS) | ended(running, start + limit)
        found = {
            tool: {
                "exit_code": codes[tool],
                "limit_seconds": limit,
                **judged((Path(folder) / tool).read_text(errors="replace")),
            }
            for tool in TOOLS
        }
    return {"ok": all(entry["exit_code"] == 0 for entry in found.values()), **found}


def ended(running: dict[str, subprocess.Popen[bytes]], deadline: float) -> dict[str, int]:
    """Exit codes of the processes that end before ``deadline``; the others are stopped."""
    codes = {}
    for name, process in running.items():
        try:
            codes[name] = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return codes


def judged(said: str) -> dict[str, Any]:
    """What a tool's output says: launches, findings by kernel, the first of each kind whole."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    counts: dict[str, int] = {}
    launches = [line.removeprefix(LAUNCH) for line in said.splitlines() if line.startswith(LAUNCH)]
    for launch, text in findings(said):
        name = re.search(r"\bsparse_mla_\w+", text)
        kernel = name[0] if name else "elsewhere"
        counts[kernel] = counts.get(kernel, 0) + 1
        entry = found.setdefault(
            (kernel, text.partition("\n")[0]),
            {"kernel": kernel, "launch": launch, "count": 0, "text": text},
        )
        entry["count"] += 1
    summary = re.findall(r"^=+ (.*SUMMARY: .*)$", said, re.MULTILINE)
    return {
        "launches": len(launches),
        "last_launch": launches[-1] if launches else None,
        "summary": summary[-1] if summary else None,
        "by_kernel": counts,
        "findings": list(found.values())[:KEPT],
        "said_last": said[-2000:],
    }


def findings(said: str) -> Iterator[tuple[str | None, str]]:
    """Each report in a tool's output, and the launch it follows.

    A report is a line ``========= text`` and the indented ones behind it.
    """
    launch, lines = None, []
    for line in said.splitlines():
        if line.startswith("=========     "):
            lines.append(line[10:].rstrip())
            continue
        if lines:
            yield launch, "\n".join(lines)
        opens = line.startswith("========= ") and line[10:].strip()
        report = opens and line[10:] != "COMPUTE-SANITIZER" and " SUMMARY: " not in line
        lines = [line[10:].rstrip()] if report else []
        if line.startswith(LAUNCH):
            launch = line.removeprefix(LAUNCH)
    if lines:
        yield launch, "\n".join(lines)


def run_bench(folder: Path) -> dict[str, Any]:
    """``sparse-mla bench``; its results whole."""
    output = folder / "bench.json"
    command = [sys.executable, "-c", BENCH, "bench", "-o", str(output)]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    results = json.loads(output.read_text()) if output.exists() else None
    return {"ok": code == 0, "exit_code": code, "results": results}


def run_small() -> int:
    """Every kernel on small shapes, each compared with what the CPU computes."""
    import torch

    from sparse_mla import jit
    from sparse_mla.backends import sm90

    reason = sm90.available()
    if reason is not None:
        print(f"error: the kernels do not run here: {reason}", file=sys.stderr)
        return 2
    for variant in sm90.KERNELS.values():
        jit.load(variant, torch.cuda.current_device()).multiprocessors = SMALL_GRID
    run_small_queries()
    for case, parts in small_problems():
        run_small_prefills(case, parts)
    return 0


def run_small_queries() -> None:
    """The quantiser: each dtype and width, rows of aligned starts and others, scales of both kinds.

    Thirty-five rows leave its last CTA and warp with some to spare.
    """
    import torch

    from sparse_mla import quantize
    from sparse_mla.backends import sm90_quantize

    s_q, h_q = 5, 7
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(s_q, h_q, generator=generator) + 0.01
    for d_qk, dtype in sm90_quantize.KERNELS:
        for before in (0, 1):
            rows = torch.randn(s_q, h_q, before + d_qk, generator=generator).to(dtype)
            rows[2, 3] = 0.0
            for given in (None, scales):
                print(f"{LAUNCH}quantize d{d_qk} {dtype}, {before} elements before a row, ", end="")
                print("scales of its own" if given is None else "scales given", flush=True)
                q, q_scale = rows.to(DEVICE), None if given is None else given.to(DEVICE)
                got = sm90_quantize.quantize_queries(q[..., before:], q_scale)
                want = quantize.quantize_queries(rows[..., before:], given)
                for a, b in zip(got, want, strict=True):
                    if not torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)):
                        raise AssertionError("other bytes than the CPU's")


def run_small_prefills(case: Any, parts: list[Any]) -> None:
    """Launches of one case, compared with float64 on the CPU."""
    import torch

    from sparse_mla.backends import sm90
    from sparse_mla.backends.sm90_plan import WIDE_HEADS
    from sparse_mla.testing import (
        Tolerance,
        allocate_outputs,
        compare,
        expected,
        make_inputs,
        make_problem,
    )
    from sparse_mla.testing.cases import to_device

    limits = Tolerance(out=0.0625, absolute=1.6e-2, relative=1e-3)
    lengths = torch.tensor(SMALL_LENGTHS, dtype=torch.int32)
    inputs = replace(make_inputs(case), topk_length=lengths)
    if parts[0].heads_per_item == WIDE_HEADS and inputs.kv_scale is not None:
        inputs = replace(inputs, kv_scale=inputs.kv_scale[:1].clone())  # it takes one
    want = expected(make_problem(inputs))
    for part in parts:
        print(f"{LAUNCH}{case}, {part}", flush=True)
        outputs = tuple(x.to(DEVICE) for x in allocate_outputs(inputs))
        problem = make_problem(to_device(inputs, DEVICE), outputs)
        sm90.launch(problem, part)
        results = tuple(x.cpu() for x in (problem.out, problem.max_logits, problem.lse))
        compare(make_problem(inputs, results), limits, against=want)


def small_problems() -> Iterator[tuple[Any, list[Any]]]:
    """Cases, and launches of each, that between them take every kernel, split and not: three groups
    of heads, the last not full, both widths, one scale and many.
    """
    from sparse_mla.backends.sm90_plan import FEW_HEADS, WIDE_HEADS, Part
    from sparse_mla.params import D_QK_SUPPORTED
    from sparse_mla.testing import Case

    for size in (WIDE_HEADS, *FEW_HEADS):
        for d_qk in D_QK_SUPPORTED:
            for scales in ("tensor", "token-head"):
                heads = 2 * size + 4
                case = Case(
                    f"prefill h{heads} d{d_qk} {scales} scales", len(SMALL_LENGTHS), 900, heads,
                    d_qk, topk=max(SMALL_LENGTHS), pattern="holes", sink="normal", scales=scales,
                )  # fmt: skip
                parts = [Part(size, 0, heads)]
                if size != WIDE_HEADS:
                    parts.append(Part(size, 0, heads, SMALL_CTAS[size]))
                yield case, parts


def table(report: dict[str, Any]) -> str:
    """What was found, a line a part, and the figures of ours."""
    lines = []
    if "tests" in report:
        found = report["tests"]
        lines.append(
            f"tests       {found['passed']} passed, {len(found['failed'])} failed, "
            f"{found['skipped']} skipped"
        )
        lines += [f"            failed: {name}" for name in found["failed"]]
    for tool in TOOLS if "sanitizers" in report else ():
        entry = report["sanitizers"].get(tool)
        if entry is not None:
            lines.append(f"{tool:<11} {verdict(entry)}")
            lines += [
                f"            {count} findings in {kernel}"
                for kernel, count in entry["by_kernel"].items()
            ]
    if report.get("sanitizers", {}).get("reason"):
        lines.append(f"sanitizers  {report['sanitizers']['reason']}")
    if "bench" in report:
        from sparse_mla.benchmarks import table as bench_table

        results = report["bench"]["results"]
        lines.append(f"bench       exit code {report['bench']['exit_code']}")
        mine = bench_table.ours(results) if results else []
        for row in bench_table.rows(results) if results else ():
            if row.peer in mine:
                us, tflops = row.figure["median_ms"] * 1e3, row.figure["tflops"]
                lines.append(f"  {row.id:<36} {row.mood:<10} {us:>9.1f} us {tflops:>6.0f} TFLOPS")
    return "\n".join(lines)


def verdict(entry: dict[str, Any]) -> str:
    """A tool's result in a line."""
    if entry["exit_code"] is None:
        return (
            f"did not end within {entry['limit_seconds']:g} s (--limit), in launch "
            f"{entry['launches']}: {entry['last_launch']}"
        )
    said = f"{entry['launches']} launches; {entry['summary'] or entry['said_last'].strip()}"
    return (
        f"clean, {said}" if entry["exit_code"] == 0 else f"exit code {entry['exit_code']}, {said}"
    )


def main(arguments: list[str]) -> int:
    """Run what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small shapes, for a sanitizer")
    parser.add_argument("--skip", action="append", default=[], choices=PARTS, metavar="PART")
    parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="PROGRAM")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="of the sanitizers"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the JSON")
    given = parser.parse_args(arguments)
    if given.small:
        return run_small()
    if given.output is None:
        parser.error("-o FILE is wanted: where the JSON goes")
    from sparse_mla.benchmarks.results import write_text

    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in PARTS:
            if part in given.skip:
                continue
            if part == "tests":
                report[part] = run_tests()
            elif part == "bench":
                report[part] = run_bench(Path(folder))
            elif shutil.which(given.sanitizer) is None:
                report[part] = {"ok": False, "reason": f"no program {given.sanitizer!r} on PATH"}
            else:
                report[part] = run_sanitizers(given.sanitizer, given.limit)
    write_text(given.output, json.dumps(report, indent=1))
    print(table(report))
    return 0 if all(entry["ok"] for entry in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
