"""``benchmarks/gpu.py`` and ``gpu_small.py``: what they make of what tests, sanitizers and the
benchmark say, and what runs under the sanitizers."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparse_mla import jit, quantize
from sparse_mla.backends import cpu, sm90, sm90_quantize
from sparse_mla.backends.sm90_plan import WIDE_HEADS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="x"/></testcase>
<testcase classname="tests.a" name="three"><error message="x"/></testcase>
<testcase classname="tests.a" name="four"><skipped message="x"/></testcase>
</testsuite></testsuites>"""


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])  # as when it is run
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("gpu", monkeypatch)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return loaded("gpu_small", monkeypatch)


def test_tests_are_counted(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(JUNIT)
    assert script.counted(tmp_path / "tests.xml") == {
        "passed": 1,
        "failed": ["tests.a::two", "tests.a::three"],
        "skipped": 1,
    }
    assert script.counted(tmp_path / "none.xml") == {"passed": 0, "failed": [], "skipped": 0}


@pytest.mark.parametrize(("cores", "wanted"), [(3, 3), (99, 8)])
def test_tests_run_side_by_side_where_they_can(
    cores: int, wanted: int, script: ModuleType, monkeypatch: Any
) -> None:
    commands = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=5)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert script.run_tests()["ok"] is False
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "xdist")
    script.run_tests()
    assert "-n" not in commands[0]
    assert commands[1][commands[1].index("-n") + 1] == str(wanted)


def test_the_small_problems_take_every_kernel_split_and_not(small: ModuleType) -> None:
    taken = set()
    for case, parts in small.problems():
        rows = case.scales != "tensor"
        tokens = rows and not case.id.endswith(small.ROWS)
        for part in parts:
            taken.add((part.variant(case.d_qk, rows, tokens), part.ctas_per_item > 1))
            assert part.groups * part.heads_per_item > part.heads  # the last group is not full
            if part.ctas_per_item == 1:
                assert case.s_q * part.groups > 2 * small.GRID  # several items to a CTA
    every = itertools.product(sm90.KERNELS.items(), (False, True))
    assert taken == {
        (kernel, split)
        for ((heads, *_), kernel), split in every
        if not (heads == WIDE_HEADS and split)
    }


@pytest.fixture
def on_a_cpu(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The CPU in the place of the GPU: which variants and parts are asked for."""
    asked: dict[str, Any] = {"variants": {}, "parts": []}

    def load(variant: Any, device: int) -> Any:
        return asked["variants"].setdefault(variant, SimpleNamespace(multiprocessors=132))

    def launch(problem: Any, part: Any) -> None:
        asked["parts"].append((problem.d_qk, part))
        cpu.run(problem)

    monkeypatch.setenv("SPARSE_MLA_CPU_COMPUTE", "float32")
    monkeypatch.setattr(small, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(sm90, "available", lambda: None)
    monkeypatch.setattr(sm90, "launch", launch)
    monkeypatch.setattr(sm90_quantize, "quantize_queries", quantize.quantize_queries)
    return asked


def test_small_shapes_of_every_kernel(
    on_a_cpu: dict[str, Any], small: ModuleType, capsys: Any
) -> None:
    assert small.main([]) == 0
    assert set(on_a_cpu["variants"]) == set(sm90.KERNELS.values())
    assert {k.multiprocessors for k in on_a_cpu["variants"].values()} == {small.GRID}
    parts = [(case.d_qk, part) for case, parts in small.problems() for part in parts]
    assert on_a_cpu["parts"] == parts
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("launch: ")]
    assert len(said) == len(set(said)) == len(parts) + 4 * len(sm90_quantize.KERNELS)


def test_small_shapes_end_between_launches_when_their_time_is_up(
    on_a_cpu: dict[str, Any], small: ModuleType, capsys: Any
) -> None:
    assert small.main(["--limit", "-1"]) == small.UNFINISHED
    said = capsys.readouterr().out
    assert said.startswith("stopped: before launch 1 of 62, quantize d512 torch.bfloat16, 0 ")
    assert on_a_cpu["parts"] == []


def test_a_kernel_that_writes_nothing_is_found(
    on_a_cpu: Any, small: ModuleType, monkeypatch: Any
) -> None:
    monkeypatch.setattr(sm90, "launch", lambda problem, part: None)
    with pytest.raises(AssertionError, match="out column 0 of query 0"):
        small.main([])


def test_a_quantiser_that_is_off_is_found(
    on_a_cpu: Any, small: ModuleType, monkeypatch: Any
) -> None:
    def off(q: torch.Tensor, q_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        stored, scale = quantize.quantize_queries(q, q_scale)
        stored.view(torch.uint8)[-1, -1, -1] ^= 1
        return stored, scale

    monkeypatch.setattr(sm90_quantize, "quantize_queries", off)
    with pytest.raises(AssertionError, match="other bytes"):
        small.main([])


RACES = """========= COMPUTE-SANITIZER
launch: quantize one
took: 0.25
launch: few heads
========= Error: Race reported between Write access at sparse_mla_prefill_few_heads+0x10
=========     and Read access at sparse_mla_prefill_few_heads+0x20 [508 hazards]
=========
========= Error: Race reported between Write access at sparse_mla_prefill_few_heads+0x10
=========     and Write access at sparse_mla_prefill_few_heads+0x30 [8 hazards]
========= Warning: Race reported between Write access at sparse_mla_prefill+0x40
=========     and Read access at sparse_mla_prefill+0x50 [1 hazards]
=========
launch: wide
========= Program hit an error
=========     Saved host backtrace
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""


def test_findings_are_told_apart_by_kernel_and_launch(script: ModuleType) -> None:
    found = script.judged(RACES)
    assert found["by_kernel"] == {
        "sparse_mla_prefill_few_heads": 2,
        "sparse_mla_prefill": 1,
        "elsewhere": 1,
    }
    assert [(f["launch"], f["count"]) for f in found["findings"]] == [
        ("few heads", 2),
        ("few heads", 1),
        ("wide", 1),
    ]
    assert found["findings"][0]["text"].endswith("+0x20 [508 hazards]")
    assert found["findings"][2]["text"] == "Program hit an error\n    Saved host backtrace"
    assert (found["launches"], found["last_launch"]) == (3, "wide")
    assert (found["seconds_of_launches"], found["stopped"]) == ([0.25], None)
    assert found["summary"] == "RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)"
    cut_off = script.judged(RACES.partition("=========\n")[0])  # of a tool that was killed
    assert (cut_off["by_kernel"], cut_off["summary"]) == ({"sparse_mla_prefill_few_heads": 1}, None)


def stand_in(tmp_path: Path, last: str) -> Path:
    """A program in the place of compute-sanitizer: what it was asked for, then ``last``."""
    program = tmp_path / "sanitizer"
    lines = (
        'echo "launch: $*"',
        'echo "launch: caching $PYTORCH_NO_CUDA_MEMORY_CACHING"',
        'echo "========= $2 SUMMARY: some errors"',
        last,
    )
    program.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    program.chmod(0o755)
    return program


def sanitized(script: ModuleType, tmp_path: Path, last: str, *more: str) -> tuple[int, Any]:
    """Exit code, and the sanitizers' part of the JSON."""
    output = tmp_path / "out.json"
    given = ["--skip", "tests", "--skip", "bench", "-o", str(output), *more]
    code = script.main([*given, "--sanitizer", str(stand_in(tmp_path, last))])
    return code, json.loads(output.read_text())["sanitizers"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (99, 1)])
def test_what_a_sanitizer_finds(
    code: int, expected: int, script: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    found, report = sanitized(script, tmp_path, f"exit {code}")
    assert (found, report["ok"]) == (expected, code == 0)
    assert report["racecheck"]["summary"] == "racecheck SUMMARY: some errors"
    assert report["racecheck"]["last_launch"] == "caching 1"
    verdict = "clean" if code == 0 else "exit code 99"
    table = capsys.readouterr().out
    assert f"racecheck   {verdict}; 2 launches in 0 s; racecheck SUMMARY: some errors\n" in table


def test_what_a_sanitizer_is_asked_for(script: ModuleType, tmp_path: Path) -> None:
    _, report = sanitized(script, tmp_path, "exit 0")
    asked = {tool: report[tool]["said_last"].splitlines()[0] for tool in script.TOOLS}
    ports = {text.partition("--port ")[2].partition(" ")[0] for text in asked.values()}
    assert len(ports) == 3  # side by side, each by its own
    for tool, text in asked.items():
        assert text.startswith(f"launch: --tool {tool} ")
        assert " --kernel-name kernel_substring=sparse_mla " in text
        assert text.endswith(f"{BENCHMARKS / 'gpu_small.py'} --limit {script.LIMIT_SECONDS}")
    for variant in (*sm90.KERNELS.values(), *sm90_quantize.KERNELS.values()):
        assert "sparse_mla" in variant.entry


def test_a_sanitizer_whose_process_stops_at_the_limit(
    script: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    last = 'echo "stopped: before launch 3 of 9, wide"\nexit 3'
    code, report = sanitized(script, tmp_path, last, "--limit", "60")
    assert code == 1
    assert report["memcheck"]["stopped"] == "before launch 3 of 9, wide"
    said = (
        "stopped after 60 s (--limit) before launch 3 of 9, wide; 2 launches in 0 s; memcheck SUM"
    )
    assert f"memcheck    {said}" in capsys.readouterr().out


def test_a_sanitizer_that_does_not_end(
    script: ModuleType, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed with what it has started, and what it found until then is kept."""
    left = tmp_path / "left"
    monkeypatch.setattr(script, "GRACE_SECONDS", 0.5)
    last = f"(sleep 3; touch {left}) &\nwait"
    code, report = sanitized(script, tmp_path, last, "--limit", "0.5")
    assert code == 1
    assert report["memcheck"]["exit_code"] is None
    assert report["memcheck"]["summary"] == "memcheck SUMMARY: some errors"
    said = "killed 0.5 s after its 0.5 s (--limit), in launch 2, caching 1"
    assert f"memcheck    {said}" in capsys.readouterr().out
    time.sleep(2.5)
    assert not left.exists()


def test_a_sanitizer_that_is_not_there(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    given = ["--skip", "tests", "--skip", "bench", "--sanitizer", "no-such-program"]
    assert script.main([*given, "-o", str(tmp_path / "out.json")]) == 1
    assert "no program 'no-such-program' on PATH" in capsys.readouterr().out


def test_the_output_has_to_be_named(script: ModuleType, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(["--skip", "tests"])
    assert caught.value.code == 2
    assert "-o FILE is wanted" in capsys.readouterr().err


def test_small_shapes_want_a_hopper_gpu(small: ModuleType, capsys: Any) -> None:
    if sm90.available() is None:
        pytest.skip("there is one here, and tests/gpu compares these kernels")
    assert small.main([]) == 2
    assert "the kernels do not run here: " in capsys.readouterr().err


def test_the_table_has_the_figures_of_ours(script: ModuleType) -> None:
    figure = {"median_ms": 2.5, "tflops": 900.0, "fault": None}
    results = {
        "peers": [{"name": "sm90", "ours": True}, {"name": "other", "ours": False}],
        "prefill": [
            {
                "id": "shape-a",
                "shape": {},
                "moods": {"burst": {"peers": {"sm90": figure, "other": figure}}},
            }
        ],
    }
    report = {
        "tests": {"passed": 3, "failed": ["x::y"], "skipped": 1},
        "bench": {"exit_code": 0, "results": results},
    }
    lines = script.table(report).splitlines()
    assert lines[:2] == ["tests       3 passed, 1 failed, 1 skipped", "            failed: x::y"]
    assert [line.split() for line in lines[3:]] == [
        ["shape-a", "burst", "2500.0", "us", "900", "TFLOPS"]
    ]
