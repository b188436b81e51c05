"""``sparse-mla explain``: what it prints, in which form, and how it exits."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from error_samples import traceback_around
from typer.testing import CliRunner, Result

from sparse_mla.backends import sm90
from sparse_mla.cli.explain import explain
from sparse_mla.errors import RECORDS, error, match

MESSAGE = "ValueError: sparse_mla_q8kv8_prefill_fwd requires h_kv=1, got 8"

app = typer.Typer(rich_markup_mode=None)
app.command()(explain)


def run(*arguments: str, stdin: str | bytes | None = None, width: int = 80) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin, env={"COLUMNS": str(width)})


def test_the_page_of_an_id_has_every_part() -> None:
    result = run("h-kv-not-one", width=100)
    record = RECORDS["h-kv-not-one"]
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    for part in (
        record.title,
        record.message,
        record.meaning,
        record.trigger,
        *record.situations,
        *(way.text for way in record.solutions),
        *record.related,
        *record.operators,
        f"version {record.since}",
        "https://sparse-mla.github.io/errors/h-kv-not-one/",
    ):
        assert " ".join(part.split()) in text
    assert re.search(r"Raised in sparse_mla/\w+\.py:\d+", text)


def test_the_examples_can_be_copied() -> None:
    record = RECORDS["h-kv-not-one"]
    lines = [line.strip() for line in run("h-kv-not-one", width=40).output.splitlines()]
    for line in (*record.before.splitlines(), *record.after.splitlines()):
        assert line.strip() in lines or f"{line.strip()}  # <- here" in lines
    changed = [line for line in lines if line.endswith("  # <- here")]
    assert [line.split("(")[1] for line in changed] == ["300, 8, 576).to", "300, 1, 576).to"]


def test_text_is_wrapped_to_the_width() -> None:
    output = run("not-contiguous", width=60).output
    prose = output.partition("Fails")[0].splitlines()
    assert all(len(line) <= 60 for line in prose if "=" not in line)
    assert not any(line.endswith(" ") for line in output.splitlines())
    points = output.partition("When it happens\n")[2].partition("\n\n")[0].splitlines()
    assert {line[:4] for line in points} == {"  - ", "    "}


def test_a_message_is_explained_with_its_numbers() -> None:
    result = run(f"[2026-12-01 12:00:00 TP0] {MESSAGE}")
    assert result.exit_code == 0
    assert "Your kv has 8 KV heads." in result.output
    assert "requires h_kv=1, got 8" in result.output


def test_words_need_no_quotes() -> None:
    assert run(*["q", "must", "be", "contiguous"]).output.startswith("not-contiguous: ")


@pytest.mark.parametrize("arguments", [(), ("-",)], ids=["no argument", "dash"])
def test_reads_standard_input(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, stdin=traceback_around("indices must be int32, got torch.int64"))
    assert result.exit_code == 0
    assert result.output.startswith("indices-not-int32: ")
    assert "Your indices are torch.int64." in result.output


def test_standard_input_of_any_bytes() -> None:
    result = run("-", stdin=b"\xff\xfe\x00\x80 q must be contiguous\n\xc3\x28")
    assert result.exit_code == 0
    assert result.output.startswith("not-contiguous: ")


@pytest.mark.parametrize("megabytes", [1, 3, 9, 30])
def test_a_long_log_is_read_to_its_end(megabytes: int) -> None:
    """A server logs for days, then falls over."""
    line = "[2026-12-01 12:00:00 TP3] Decode batch. #running-req: 1, token usage: 0.01\n"
    log = line * (megabytes * 1_000_000 // len(line)) + "ValueError: kv must be contiguous\n" + line
    result = run(stdin=log)
    assert result.exit_code == 0
    assert result.stdout.startswith("not-contiguous:")


@pytest.mark.parametrize("kept", [8, 20, 33])
def test_what_is_kept_is_kept_whole(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that lies across both parts is not cut in two; where bytes are dropped it is."""
    module = sys.modules["sparse_mla.cli.explain"]
    monkeypatch.setattr(module, "_KEPT_BYTES", kept)
    monkeypatch.setattr(module, "_READ_BYTES", 4)
    whole = bytes(range(97, 97 + 26))[: kept + 4 * (kept // 4 + 1)]
    assert module._both_ends(io.BytesIO(whole)) == whole
    longer = b"x" * (kept + 160)
    assert module._both_ends(io.BytesIO(longer)) == b"x" * kept + b"\n" + b"x" * 4 * (kept // 4 + 1)


def test_a_stream_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["sparse_mla.cli.explain"]
    monkeypatch.setattr(module, "_MOST_READS", 3)
    monkeypatch.setattr(module, "_READ_BYTES", 10)
    monkeypatch.setattr(module, "_KEPT_BYTES", 100)
    with open("/dev/zero", "rb") as stream:
        assert module._both_ends(stream) == b"\0" * 130


@pytest.mark.parametrize("stdin", ["", " \n\n"])
def test_empty_input_is_wrong_usage(stdin: str) -> None:
    result = run(stdin=stdin)
    assert result.exit_code == 2
    assert "standard input is empty" in result.output


def test_a_terminal_without_argument_is_wrong_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparse_mla.cli.explain._is_terminal", lambda stream: True)
    result = run()
    assert result.exit_code == 2
    assert "give an id or a message" in result.output


def test_unknown_text_names_the_nearest_and_exits_2() -> None:
    result = run("h-kv-no-one")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "No error matches: h-kv-no-one" in result.stderr
    assert "h-kv-not-one" in result.stderr


def test_unknown_text_as_json() -> None:
    result = run("h-kv-no-one", "--json")
    assert result.exit_code == 2
    data = json.loads(result.stdout)
    assert data["found"] is False
    assert data["suggestions"][0]["id"] == "h-kv-not-one"


def test_a_match_as_json() -> None:
    text = str(error("h-kv-not-one", h_kv=8, shape=(4096, 8, 576)))
    data = json.loads(run(text, "--json").stdout)
    assert data["found"] is True
    assert data["id"] == "h-kv-not-one"
    assert data["values"] == {"h_kv": "8", "shape": "(4096, 8, 576)"}
    assert data["yours"] == "Your kv has 8 KV heads."
    assert data["record"]["situations"] == list(RECORDS["h-kv-not-one"].situations)
    assert data["record"]["raised_at"][0]["file"].startswith("sparse_mla/")


def test_all_lists_every_record() -> None:
    result = run("--all")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == list(RECORDS)
    listed = json.loads(run("--all", "--json").stdout)["errors"]
    assert [entry["id"] for entry in listed] == list(RECORDS)
    assert listed[0].keys() == {"id", "type", "title", "message"}


def test_search_ranks_by_words() -> None:
    result = run("--search", "GQA heads")
    assert result.exit_code == 0
    assert "h-kv-not-one" in [line.split()[0] for line in result.output.splitlines()][:2]
    found = json.loads(run("--search", "GQA heads", "--json").stdout)["errors"]
    assert 1 < len(found) <= 10


def test_search_without_a_result_exits_2() -> None:
    result = run("--search", "zzzzqqqq")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert json.loads(run("--search", "zzzzqqqq", "--json").stdout) == {"errors": []}


HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]x[/bold red] [link=http://x]y[/] {0.__class__} \u202e"


@pytest.mark.parametrize(
    "text",
    [
        f"cannot read {HOSTILE}: {HOSTILE}",
        f"backend sm90 cannot run this problem: {HOSTILE}",
        f"nothing of ours {HOSTILE}",
    ],
    ids=["path", "reason", "unknown"],
)
@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_pasted_text_commands_no_terminal(text: str, options: tuple[str, ...]) -> None:
    result = run(text, *options)
    assert result.exit_code in (0, 2)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", result.output)


def test_pasted_markup_stays_text() -> None:
    result = run("backend sm90 cannot run this problem: [bold]no[/bold] :smile:", width=100)
    assert "[bold]no[/bold] :smile:" in result.output


def _in_a_terminal(*arguments: str) -> str:
    """What the command writes to a terminal."""
    pty = pytest.importorskip("pty", reason="needs a pseudo-terminal")
    program = "import sys, typer; from sparse_mla.cli.explain import explain; typer.run(explain)"
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    os.close(slave)
    output = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:
            break
        if not chunk:
            break
        output += chunk
    os.close(master)
    assert child.wait(timeout=60) == 0
    return output.decode()


def test_colours_on_a_terminal_only() -> None:
    coloured = _in_a_terminal("backend sm90 cannot run this problem: \x1b]0;owned\x07 [red]x[/red]")
    assert "\x1b[1m" in coloured
    assert "\x1b]" not in coloured
    assert "\x07" not in coloured
    assert "[red]x[/red]" in coloured
    assert "\x1b" not in run("h-kv-not-one").output


def test_a_reason_of_the_hopper_backend_alone_finds_the_warning_that_holds_it() -> None:
    """Logs are often cut down to the line that says why."""
    source = Path(sm90.__file__).read_text()
    assert '"rows of q and kv must start at multiples of 16 bytes, got addresses "' in source
    text = "sm90: rows of q and kv must start at multiples of 16 bytes, got addresses 0x7f and 0x80"
    assert match.find(text)[0].record.id == "slow-backend"
