"""Everything that only a Hopper GPU can show, in one go: tests, sanitizers, figures.

    python benchmarks/gpu.py [--skip PART ...] [--sanitizer PROGRAM] [--limit SECONDS] -o FILE

runs the tests marked ``gpu`` (several at a time where pytest-xdist is installed), every kernel on
small shapes (``gpu_small.py``) under compute-sanitizer (memcheck, racecheck and synccheck side by
side), and ``sparse-mla bench``. One JSON holds what each of them said, and a short table is printed
last. Exit codes: 0 all is well, 1 something failed, 2 usage.
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
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu_small import LAUNCH, STOPPED, TOOK

HERE = Path(__file__).resolve().parent
ROOT, SMALL = HERE.parent, HERE / "gpu_small.py"
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
SANITIZER_ENVIRONMENT = {
    # Each tensor is an allocation of its own: in torch's large blocks memcheck sees no end of one.
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "OMP_NUM_THREADS": "2",  # of three processes that compare side by side
}
FIRST_PORT = 49152
"""Each tool gets ports of its own to talk to its process."""
LIMIT_SECONDS = 240.0
GRACE_SECONDS = 60.0
"""After the limit a process ends by itself with its launch, so that its tool reports; or not."""
KEPT = 40
"""Different findings of a tool that are kept whole."""

MOST_PROCESSES = 8
"""Of tests, at a time; they share one GPU."""


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
    """Every tool over ``gpu_small.py``, side by side; what each found within ``limit`` seconds."""
    small = [sys.executable, str(SMALL), "--limit", str(limit)]
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        running = {}
        for number, tool in enumerate(TOOLS):
            command = [program, "--tool", tool, *SANITIZER_OPTIONS]
            command += ["--port", str(FIRST_PORT + 100 * number)]
            with (Path(folder) / tool).open("w") as output:
                running[tool] = subprocess.Popen(
                    [*command, *small],
                    cwd=ROOT,
                    env={**os.environ, **SANITIZER_ENVIRONMENT},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # so that what it started can be stopped with it
                )
        codes = ended(running, start, limit + GRACE_SECONDS)
        found = {
            tool: {
                "exit_code": codes[tool][0],
                "seconds": codes[tool][1],
                "limit_seconds": limit,
                **judged((Path(folder) / tool).read_text(errors="replace")),
            }
            for tool in TOOLS
        }
    return {"ok": all(entry["exit_code"] == 0 for entry in found.values()), **found}


def ended(
    running: dict[str, subprocess.Popen[bytes]], start: float, limit: float
) -> dict[str, tuple[int | None, float]]:
    """Exit code and seconds of each process; ``None`` of those stopped at the limit."""
    found: dict[str, tuple[int | None, float]] = {}
    while len(found) < len(running):
        seconds = time.monotonic() - start
        for name, process in running.items():
            if name not in found and process.poll() is not None:
                found[name] = process.returncode, seconds
            elif name not in found and seconds > limit:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                found[name] = None, seconds
        time.sleep(0.05)
    return found


def judged(said: str) -> dict[str, Any]:
    """What a tool's output says: launches, findings by kernel, the first of each kind whole."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    counts: dict[str, int] = {}
    launches = said_behind(LAUNCH, said)
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
        "seconds_of_launches": [float(text) for text in said_behind(TOOK, said)],
        "stopped": (said_behind(STOPPED, said) or [None])[0],
        "summary": summary[-1] if summary else None,
        "by_kernel": counts,
        "findings": list(found.values())[:KEPT],
        "said_last": said[-2000:],
    }


def said_behind(word: str, said: str) -> list[str]:
    """What follows ``word`` in the lines that begin with it."""
    return [line.removeprefix(word) for line in said.splitlines() if line.startswith(word)]


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
    command = [sys.executable, "-m", "sparse_mla", "bench", "-o", str(output)]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    results = json.loads(output.read_text()) if output.exists() else None
    return {"ok": code == 0, "exit_code": code, "results": results}


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
    code = entry["exit_code"]
    if code is None:
        return (
            f"killed {GRACE_SECONDS:g} s after its {entry['limit_seconds']:g} s (--limit), "
            f"in launch {entry['launches']}, {entry['last_launch']}"
        )
    said = entry["summary"] or "".join(entry["said_last"].strip().splitlines()[-1:])
    if entry["stopped"] is not None:
        found = f"stopped after {entry['limit_seconds']:g} s (--limit) {entry['stopped']}"
    else:
        found = "clean" if code == 0 else f"exit code {code}"
    return f"{found}; {entry['launches']} launches in {entry['seconds']:.0f} s; {said}"


def main(arguments: list[str]) -> int:
    """Run what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--skip", action="append", default=[], choices=PARTS, metavar="PART")
    parser.add_argument("--sanitizer", default="compute-sanitizer", metavar="PROGRAM")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="of the sanitizers"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="the JSON")
    given = parser.parse_args(arguments)
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
