"""``sparse-mla bench``: what it prints, what it refuses, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_results import OURS, results, row
from typer.testing import CliRunner

from sparse_mla.benchmarks import accuracy, ceilings, memory, runner, shapes
from sparse_mla.benchmarks import results as files
from sparse_mla.cli import build

TINY = "v32-tp8-q1-kv4k-uniform"


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(build(), ["bench", *map(str, arguments)])


@pytest.fixture
def quick_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceilings.MATMUL, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run measures is what the test says, and it is remembered what was asked for."""
    from sparse_mla.benchmarks import machine

    asked: dict[str, Any] = {"results": results()}

    def run(device: Any, chosen: Any, names: Any, settings: Any, tell: Any) -> dict[str, Any]:
        asked.update(shapes=[shape.id for shape in chosen], names=names, settings=settings)
        found: dict[str, Any] = asked["results"]
        return found

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(accuracy, "measure", lambda *_, **__: None)
    monkeypatch.setattr(memory, "measure", lambda *_: None)
    monkeypatch.setattr(machine, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("sparse_mla.cli.bench._place", lambda device: torch.device("cuda", 0))
    return asked


@pytest.mark.usefixtures("quick_cpu")
def test_a_run_on_a_cpu_written_and_reported(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "r.json"
    result = invoke("--shapes", TINY, "--only", "speed", "--rounds", "2", "-o", file, "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["prefill"][0]["id"] == TINY
    assert f"written to {file}" in result.stderr
    assert files.load(file) == answer
    again = invoke("--from", file, "--report", tmp_path / "report")
    assert again.exit_code == 0
    assert f"{TINY}  sustained  cpu" in again.stdout
    assert TINY in (tmp_path / "report" / "report.html").read_text()
    check = invoke("--check", file, "--tolerance", "1", "--rounds", "2")
    assert check.exit_code == 0, check.stdout + check.stderr
    assert "1 of 1 sustained figures held" in check.stdout


def test_the_defaults(replayed: dict[str, Any]) -> None:
    result = invoke()
    assert result.exit_code == 0
    assert replayed["shapes"] == list(shapes.DEFAULT)
    assert replayed["names"] is None
    assert vars(replayed["settings"]) == {
        "moods": ("burst", "sustained"), "rounds": 32, "cold": True, "host": True
    }  # fmt: skip
    assert "v32-tp1-q4096-kv32k-uniform  burst" in result.stdout
    invoke("--quick", "--warm-cache")
    assert replayed["shapes"] == list(shapes.QUICK)
    assert (replayed["settings"].rounds, replayed["settings"].cold) == (8, False)
    invoke("--only", "accuracy")
    assert replayed["shapes"] == []


def test_shapes_and_peers_by_name_or_glob(replayed: dict[str, Any]) -> None:
    invoke("--shapes", "v32-tp8-q1-kv32k-*,glm5-tp1-q1-kv4k-topk", "--against", "reference")
    assert len(replayed["shapes"]) == 5
    assert "reference" in replayed["names"]
    assert "torch-gather-bmm" not in replayed["names"]
    invoke("--against", "none")
    assert set(replayed["names"]) == {"sm90", "cpu"} | ({"portable"} & set(replayed["names"]))


def test_a_wrong_output_exits_with_1(replayed: dict[str, Any]) -> None:
    peers = replayed["results"]["prefill"][0]["moods"]["burst"]["peers"]
    peers[OURS]["fault"] = "out column 3 of query 0, head 5"
    result = invoke()
    assert result.exit_code == 1
    assert "WRONG: out column 3 of query 0, head 5" in result.stdout


def checked(tmp_path: Path, before: dict[str, Any], *arguments: str) -> Any:
    return invoke("--check", files.write(tmp_path / "before.json", before), *arguments)


def test_the_gate_passes_and_measures_as_the_file_says(
    tmp_path: Path, replayed: dict[str, Any]
) -> None:
    before = results()
    before["settings"]["rounds"] = 11
    result = checked(tmp_path, before)
    assert result.exit_code == 0
    assert "1 of 1 burst figures held" in result.stdout
    assert replayed["shapes"] == ["v32-tp1-q4096-kv32k-uniform"]
    assert replayed["settings"].rounds == 11


def test_the_gate_names_what_fell(tmp_path: Path, replayed: dict[str, Any]) -> None:
    replayed["results"] = results(row(720.0))
    result = checked(tmp_path, results())
    assert result.exit_code == 1
    assert (
        "fell: v32-tp1-q4096-kv32k-uniform, burst, sm90: 50.0% of the roofline then, "
        "45.0% now (-10.0%)" in result.stdout
    )
    assert "noted: v32-tp1-q4096-kv32k-uniform, sustained, sm90: 50.0%" in result.stdout
    assert "1 sustained figures fell as much, which does not decide" in result.stdout
    assert checked(tmp_path, results(), "--tolerance", "0.2").exit_code == 0
    answer = json.loads(checked(tmp_path, results(), "--json").stdout)
    assert answer["check"]["ok"] is False
    assert len(answer["check"]["fell"]) == len(answer["check"]["noted"]) == 1


def test_a_sustained_figure_alone_does_not_fail_the_gate(
    tmp_path: Path, replayed: dict[str, Any]
) -> None:
    sustained = replayed["results"]["prefill"][0]["moods"]["sustained"]["peers"]
    sustained[OURS]["of_roofline"] = 0.3
    result = checked(tmp_path, results())
    assert result.exit_code == 0
    assert "noted: v32-tp1-q4096-kv32k-uniform, sustained, sm90" in result.stdout
    sustained[OURS]["fault"] = "lse of query 3 is off"  # right or wrong is no matter of clocks
    result = checked(tmp_path, results())
    assert result.exit_code == 1
    assert "lost: v32-tp1-q4096-kv32k-uniform, sustained, sm90: wrong: lse" in result.stdout


def test_the_gate_measures_a_subset_and_says_what_it_left_out(
    tmp_path: Path, replayed: dict[str, Any]
) -> None:
    before = results(row(), row(s_kv=8192))
    result = checked(tmp_path, before, "--shapes", "v32-*-kv32k-*")
    assert result.exit_code == 0
    assert replayed["shapes"] == ["v32-tp1-q4096-kv32k-uniform"]
    assert "not compared: v32-tp1-q4096-kv8k-uniform: not among --shapes" in result.stdout


def test_another_card_is_refused_before_anything_is_measured(
    tmp_path: Path, replayed: dict[str, Any]
) -> None:
    before = results()
    before["machine"]["name"] = "NVIDIA H100"
    result = checked(tmp_path, before)
    assert result.exit_code == 2
    assert "nothing to compare: the file is of NVIDIA H100 (cuda)" in result.stderr
    assert "shapes" not in replayed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "v32-tp8-q4096-kv32k-unifrom"), "did you mean v32-tp8-q4096-kv32k-uniform"),
        (("--shapes", "zz"), "no shape is called 'zz'; --list shows them"),
        (("--against", "flashmla"), "no peer is called 'flashmla'; there are sm90"),
        (("--only", "memory"), "'memory' is no part; speed or accuracy"),
        (("--rounds", "1"), "1 give no spread; 2 at least"),
        (("--device", "tpu"), "'tpu' is no device"),
        (("--from", "a", "--check", "b"), "give one of them"),
        (("--from", "a", "--shapes", "v32-*"), "leave --shapes out"),
        (("--from", "a", "--against", "none"), "leave --against out"),
        (("--from", "a", "--device", "cpu"), "leave --device out"),
        (("--from", "a", "--only", "speed"), "leave --only out"),
        (("--from", "a", "--rounds", "3"), "leave --rounds out"),
        (("--from", "a", "--quick"), "leave --quick out"),
        (("--from", "a", "--warm-cache"), "leave --warm-cache out"),
        (("--from", "a", "-o", "b.json"), "leave -o out"),
        (("--only", "accuracy", "--shapes", "v32-*"), "has inputs of its own; leave --shapes out"),
        (("--check", "a", "--quick"), "measures as its file says; leave --quick out"),
        (("--check", "a", "--warm-cache"), "leave --warm-cache out"),
        (("--shapes", ""), "'' names nothing"),
        (("--against", " , "), "' , ' names nothing"),
        (("-o", "/proc/r.json"), "cannot write to /proc: "),
        (("--report", "/proc/report"), "cannot write to /proc/report: "),
        (("--check", "a", "--only", "accuracy"), "it compares speed"),
        (("--tolerance", "1.5"), "1.5 is not between 0 and 1"),
    ],
)
def test_usage_errors_name_the_value(arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""  # nothing was measured
    text = " ".join(result.stderr.replace("│", " ").split())
    assert message in text


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    assert "No such file" in invoke("--from", tmp_path / "nothing.json").stderr
    (tmp_path / "old.json").write_text('{"tests": null}')
    for option in ("--from", "--check"):
        result = invoke(option, tmp_path / "old.json")
        assert result.exit_code == 2
        assert "has schema None" in " ".join(result.stderr.split())
    result = invoke("--from", tmp_path / "old.json", "--report", tmp_path / "old.json")
    assert "is a file, not a" in " ".join(result.stderr.split())
    result = invoke("-o", tmp_path / "missing" / "r.json")
    assert result.exit_code == 2
    assert "is not a directory" in " ".join(result.stderr.split())


def test_a_file_without_speed_is_nothing_to_check(tmp_path: Path, replayed: dict[str, Any]) -> None:
    before = {**results(), "prefill": []}
    result = checked(tmp_path, before)
    assert result.exit_code == 2
    assert "this file has no speed to compare, only accuracy" in " ".join(result.stderr.split())
    assert "shapes" not in replayed


@pytest.mark.parametrize("option", ["--from", "--check"])
def test_a_file_that_lacks_what_it_should_hold_is_named(tmp_path: Path, option: str) -> None:
    before = results()
    del before["prefill"][0]["moods"]["burst"]["peers"][OURS]["tflops"]
    result = invoke(option, files.write(tmp_path / "before.json", before))
    assert result.exit_code == 2
    assert "before.json: prefill[0].moods.burst.peers.sm90 lacks tflops" in " ".join(
        result.stderr.split()
    )


@pytest.mark.parametrize(
    ("device", "marked"),
    [("cuda", "v32-tp1-q4096-kv8k-uniform"), ("cpu", "v32-tp1-q256-kv8k-uniform")],
)
def test_the_list_marks_what_is_measured_by_default(
    monkeypatch: pytest.MonkeyPatch, device: str, marked: str
) -> None:
    monkeypatch.setattr("sparse_mla.cli.bench._place", lambda device: torch.device(device or "cpu"))
    globs = ("--shapes", "v32-tp1-q4096-kv8k-*,v32-tp1-q256-kv8k-*")
    result = invoke("--list", "--device", device, *globs)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("*")] == [marked]
    legend = lines.index(f"8 shapes; * is measured by default on {device}:")
    assert lines[0] == "peers:"
    assert any("flash-mla-bf16" in line for line in lines[:legend])
    assert len(lines) == legend + 1 + 8
    answer = json.loads(invoke("--list", "--device", device, *globs, "--json").stdout)
    assert answer["default"] == list(shapes.default(device, False))


def test_the_list_has_every_shape() -> None:
    answer = json.loads(invoke("--list", "--json").stdout)
    assert len(answer["shapes"]) == len(shapes.REGISTRY)
