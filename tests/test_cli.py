"""What every command keeps to: exit codes, one JSON object, quick help, harmless text."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from callfiles import small_call
from typer.testing import CliRunner

from sparse_mla import __version__
from sparse_mla.callfile import save_call
from sparse_mla.cli import build
from sparse_mla.cli.terminal import plain, say_json

COMMANDS = ("demo", "run", "check", "inspect", "bench", "doctor", "explain", "errors")
PROGRAM = (sys.executable, "-c", "from sparse_mla.cli import main; main()")


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(build(), [str(argument) for argument in arguments])


def program(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True, text=True, timeout=300, check=False, **options,
    )  # fmt: skip


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


@pytest.mark.parametrize("arguments", [("doctor",), ("explain", "--all"), ("doctor", "--json")])
def test_no_standard_output_is_no_traceback(arguments: tuple[str, ...]) -> None:
    """Closed, as under some process managers, or a file on a full disk."""
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, *arguments],
        stderr=subprocess.PIPE, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (closed.returncode, closed.stderr) == (0, "")
    if not os.path.exists("/dev/full"):
        return
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*PROGRAM, *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr == "error: No space left on device\n"


@pytest.fixture
def call_file(tmp_path: Path) -> Path:
    save_call(tmp_path / "call.safetensors", small_call())
    return tmp_path / "call.safetensors"


@pytest.mark.parametrize("command", [*COMMANDS[:-1], "errors build", "errors serve"])
def test_help_has_examples_and_exit_codes(command: str) -> None:
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert f"\n    sparse-mla {command}" in result.stdout  # a line of its own, not joined
    assert "Exit codes: 0 " in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_help_lists_the_commands_in_whole_sentences() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command}" in result.stdout
    assert "..." not in result.stdout.partition("Commands:")[2]


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"sparse-mla {__version__}\n")


def test_without_an_installed_script() -> None:
    command = [sys.executable, "-m", "sparse_mla", "run", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "Usage: sparse-mla run " in done.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("--version",), ("run",)])
def test_help_does_not_wait_for_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "from sparse_mla.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "AssertionError" not in result.stderr, result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("run",),
        ("run", "a", "b"),
        ("run", "--backend"),
        ("demo", "--s-q", "zero"),
        ("demo", "--s-q", "0"),
        ("demo", "--s-q", "9", "--s-kv", "8"),
        ("demo", "--d-qk", "513"),
        ("demo", "--device", "abacus"),
        ("demo", "--plot", "picture.txt"),
        ("demo", "--plot", "nowhere/picture.png"),
    ],
    ids=" ".join,
)
def test_usage_errors_exit_2_before_any_work(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error: " in result.stderr or "error: " in result.stderr
    assert "No such option" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04" * 20])
def test_an_unreadable_file_exits_2_in_a_few_lines(
    tmp_path: Path, command: str, content: bytes | None
) -> None:
    file = tmp_path / "call.safetensors"
    if content is not None:
        file.write_bytes(content)
    result = invoke(command, file)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert str(file) in result.stderr.split("\n")[0]
    assert "sparse-mla explain file-" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["run", "check"])
def test_an_unreadable_file_is_one_json_object(tmp_path: Path, command: str) -> None:
    result = invoke(command, tmp_path / "nowhere", "--json")
    assert result.exit_code == 2
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    assert answer["error"]["id"] == "file-unreadable"


def test_a_real_process_ends_like_this(call_file: Path, tmp_path: Path) -> None:
    fine = program("check", call_file, env=environment())
    assert (fine.returncode, fine.stderr) == (0, "")
    save_call(tmp_path / "broken", small_call(q_scale=small_call().tensors["kv"]))
    broken = program("check", tmp_path / "broken", env=environment())
    assert broken.returncode == 1
    missing = program("run", tmp_path / "nowhere", env=environment())
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ")
    assert "Traceback" not in missing.stderr + broken.stderr


def test_a_file_does_not_reach_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[red]rich[/red]\u202e\r"
    call = small_call()
    call.metadata["source"] = evil
    call.metadata["device"] = f"cuda:0, kv on {evil}"
    call.arguments["sm_scale"] = evil
    file = tmp_path / "[bold]\x1b[31m.safetensors"
    save_call(file, call)
    for command in ("check", "run"):
        result = invoke(command, file)
        assert result.exit_code == 1
        output = result.stdout + result.stderr
        assert not set(output) & set("\x1b\x07\r\u202e\x9b")
        assert "[red]rich[/red]" in output  # shown as it is, not as markup


def test_output_survives_an_ascii_pipe(tmp_path: Path) -> None:
    call = small_call()
    call.arguments["sm_scale"] = "例"
    file = tmp_path / "приклад.safetensors"
    save_call(file, call)
    env = environment(PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
    result = program("check", file, env=env)
    assert result.returncode == 1, result.stderr
    assert result.stdout.isascii()
    assert r"sm_scale      '\u4f8b'" in result.stdout


def test_a_pipe_that_closes_early_is_no_traceback(call_file: Path) -> None:
    with subprocess.Popen(
        [*PROGRAM, "check", str(call_file), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def on_a_terminal(*arguments: str | Path, columns: int = 80) -> str:
    """What a command prints on a terminal."""
    leader, follower = pty.openpty()
    env = environment(COLUMNS=str(columns), TERM="xterm-256color")
    process = subprocess.Popen(
        [*PROGRAM, *map(str, arguments)], stdout=follower, stderr=follower, env=env
    )
    os.close(follower)
    chunks = []
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(leader)
    assert process.wait(timeout=300) == 0
    return b"".join(chunks).decode().replace("\r\n", "\n")


@pytest.mark.parametrize("command", ["check", "run", "doctor"])
def test_eighty_columns_are_enough(call_file: Path, command: str) -> None:
    arguments = () if command == "doctor" else (call_file,)
    options = ("--verify",) if command == "run" else ()
    text = on_a_terminal(command, *arguments, *options)
    assert text.strip()
    assert max(map(len, text.splitlines())) <= 80, text


def test_a_pipe_gets_one_line_a_fact(call_file: Path) -> None:
    result = program("run", call_file, "--verify", env=environment())
    assert result.returncode == 0
    (line,) = [line for line in result.stdout.splitlines() if "agrees with" in line]
    assert line.startswith("  verified ")
    assert line.endswith("within limits")


def test_plain_keeps_lines_and_escapes_the_rest() -> None:
    assert plain("a\n\tb\x1b[0m") == "a\n    b\\x1b[0m"


def test_json_is_json_whatever_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"a": float("nan"), "b": [float("-inf"), 1.5], "c": Path("x"), "d": (1, None)})
    assert json.loads(capsys.readouterr().out) == {
        "a": "nan",
        "b": ["-inf", 1.5],
        "c": "x",
        "d": [1, None],
    }


def test_memory_that_is_not_there_is_one_line(
    call_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparse_mla.callfile import Call

    def run_out(*_: Any, **__: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes\nat")

    monkeypatch.setattr(Call, "run", run_out)
    result = invoke("run", call_file)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: not enough memory")
    assert len(result.stderr.splitlines()) == 1


def test_a_fault_of_ours_keeps_its_traceback(
    call_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparse_mla.callfile import Call

    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Call, "run", break_down)
    assert isinstance(invoke("run", call_file).exception, RuntimeError)


def test_a_warning_is_a_line_on_stderr(call_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    from sparse_mla.callfile import Call

    plain_run = Call.run

    def warn(self: Call, **options: Any) -> Any:
        warnings.warn("slow \x1b[31m", UserWarning, stacklevel=1)
        return plain_run(self, **options)

    monkeypatch.setattr(Call, "run", warn)
    result = invoke("run", call_file, "--json")
    assert result.stderr == "warning: slow \\x1b[31m\n"
    assert json.loads(result.stdout)["ok"]
