"""Everything that only a Hopper GPU can show, in one go: tests, sanitizers, figures.

    python benchmarks/gpu.py [--skip PART ...] [--sanitizer PROGRAM] -o FILE

runs the tests marked ``gpu``, every kernel on small shapes under compute-sanitizer (memcheck,
racecheck, synccheck), and ``sparse-mla bench``. One JSON holds what each of them said, and a short
table is printed last. Exit codes: 0 all is well, 1 something failed, 2 usage.

    python benchmarks/gpu.py --small

is what runs under the sanitizers: each kernel on shapes of a few blocks, compared with float64.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
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
BENCH = "import sys; from sparse_mla.cli import main; sys.argv[0] = 'sparse-mla'; main()"


def run_tests() -> dict[str, Any]:
    """The tests marked ``gpu``, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
        code = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, check=False).returncode
        return {"ok": code == 0, "exit_code": code, **counted(report)}


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


def run_sanitizers(program: str) -> dict[str, Any]:
    """Each tool over ``--small``; what it said last."""
    found: dict[str, Any] = {}
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", str(SANITIZER_ERRORS)]
        done = subprocess.run(
            [*command, sys.executable, __file__, "--small"],
            cwd=ROOT, check=False, capture_output=True, text=True,
        )  # fmt: skip
        said = [line for line in (done.stdout + done.stderr).splitlines() if "=======" in line]
        found[tool] = {"exit_code": done.returncode, "said": said[-20:] or [done.stderr[-2000:]]}
    return {"ok": all(entry["exit_code"] == 0 for entry in found.values()), **found}


def run_bench(folder: Path) -> dict[str, Any]:
    """``sparse-mla bench``; its results whole."""
    output = folder / "bench.json"
    command = [sys.executable, "-c", BENCH, "bench", "-o", str(output)]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    results = json.loads(output.read_text()) if output.exists() else None
    return {"ok": code == 0, "exit_code": code, "results": results}


def run_small() -> int:
    """Every prefill kernel on small shapes, each compared with the reference."""
    import torch

    from sparse_mla.backends import sm90
    from sparse_mla.backends.sm90_plan import WIDE_HEADS
    from sparse_mla.testing import Tolerance, compare, make_inputs, make_problem

    reason = sm90.available()
    if reason is not None:
        print(f"error: the kernels do not run here: {reason}", file=sys.stderr)
        return 2
    limits = Tolerance(out=0.0625, absolute=1.6e-2, relative=1e-3)
    for case, part in small_problems():
        inputs = make_inputs(case, device="cuda")
        if part.heads_per_item == WIDE_HEADS and inputs.kv_scale is not None:
            inputs = replace(inputs, kv_scale=inputs.kv_scale[:1].clone())  # it takes one
        problem = make_problem(inputs)
        sm90.launch(problem, part)
        torch.cuda.synchronize()
        compare(problem, limits)
        print(f"{case}: {part}")
    return 0


def small_problems() -> Iterator[tuple[Any, Any]]:
    """Cases and launches that between them take every kernel, split and not, through several items
    a CTA, whole blocks, a part of one, and none.
    """
    from sparse_mla.backends.sm90_plan import FEW_HEADS, WIDE_HEADS, Part
    from sparse_mla.testing import Case

    for d_qk in (512, 576):
        for scales in ("tensor", "token-head"):
            heads = 20
            case = Case(
                f"small-d{d_qk}-{scales}", 140, 300, heads, d_qk, topk=330,
                pattern="holes", lengths="ragged", sink="normal", scales=scales,
            )  # fmt: skip
            for size in FEW_HEADS:
                yield case, Part(size, 0, heads)
                yield case, Part(size, 0, heads, 4)
            yield case, Part(WIDE_HEADS, 0, heads)


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
            clean = "clean" if entry["exit_code"] == 0 else f"exit code {entry['exit_code']}"
            lines.append(f"{tool:<11} {clean}; {entry['said'][-1].strip('= ')}")
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


def main(arguments: list[str]) -> int:
    """Run what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="small shapes, for a sanitizer")
    parser.add_argument("--skip", action="append", default=[], choices=PARTS, metavar="PART")
    parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="PROGRAM")
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
                report[part] = run_sanitizers(given.sanitizer)
    write_text(given.output, json.dumps(report, indent=1))
    print(table(report))
    return 0 if all(entry["ok"] for entry in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
