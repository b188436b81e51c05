"""``benchmarks/gpu.py``: what it makes of what tests, sanitizers and the benchmark say."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sparse_mla.backends import sm90

SCRIPT = Path(__file__).parent.parent / "benchmarks/gpu.py"
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="x"/></testcase>
<testcase classname="tests.a" name="three"><error message="x"/></testcase>
<testcase classname="tests.a" name="four"><skipped message="x"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("gpu_script", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tests_are_counted(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(JUNIT)
    assert script.counted(tmp_path / "tests.xml") == {
        "passed": 1,
        "failed": ["tests.a::two", "tests.a::three"],
        "skipped": 1,
    }
    assert script.counted(tmp_path / "none.xml") == {"passed": 0, "failed": [], "skipped": 0}


def test_the_small_problems_take_every_kernel(script: ModuleType) -> None:
    taken = set()
    for case, part in script.small_problems():
        several = case.scales != "tensor"
        taken.add((part.heads_per_item, case.d_qk, several))
        assert case.s_q > 132  # so that a CTA has more than one item
    assert taken == set(sm90.KERNELS)


def stand_in(tmp_path: Path, code: int) -> Path:
    """A program in the place of compute-sanitizer: says which tool it was asked for, and fails."""
    program = tmp_path / "sanitizer"
    program.write_text(f'#!/bin/sh\necho "========= $2 SUMMARY: {code} errors"\nexit {code}\n')
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (99, 1)])
def test_what_a_sanitizer_finds(
    code: int, expected: int, script: ModuleType, tmp_path: Path, capsys: Any
) -> None:
    output = tmp_path / "out.json"
    given = ["--skip", "tests", "--skip", "bench", "-o", str(output)]
    assert script.main([*given, "--sanitizer", str(stand_in(tmp_path, code))]) == expected
    report = json.loads(output.read_text())["sanitizers"]
    assert report["ok"] is (code == 0)
    assert report["racecheck"]["said"] == [f"========= racecheck SUMMARY: {code} errors"]
    assert f"SUMMARY: {code} errors" in capsys.readouterr().out


def test_a_sanitizer_that_is_not_there(script: ModuleType, tmp_path: Path, capsys: Any) -> None:
    given = ["--skip", "tests", "--skip", "bench", "--sanitizer", "no-such-program"]
    assert script.main([*given, "-o", str(tmp_path / "out.json")]) == 1
    assert "no program 'no-such-program' on PATH" in capsys.readouterr().out


def test_the_output_has_to_be_named(script: ModuleType, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        script.main(["--skip", "tests"])
    assert caught.value.code == 2
    assert "-o FILE is wanted" in capsys.readouterr().err


def test_small_shapes_want_a_hopper_gpu(script: ModuleType, capsys: Any) -> None:
    if sm90.available() is None:
        pytest.skip("there is one here, and tests/gpu compares these kernels")
    assert script.main(["--small"]) == 2
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
