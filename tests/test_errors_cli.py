"""``sparse-mla errors``: what it writes and serves, and how it exits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from error_samples import context, first_line, traceback_around
from typer.testing import CliRunner, Result

from sparse_mla.cli import build as command_line
from sparse_mla.errors import RECORDS
from sparse_mla.errors.explain import explanation, find

pytest.importorskip("jinja2", reason="needs Jinja2: pip install 'sparse-mla[site]'")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command_line(), ["errors", *arguments])


def test_build_says_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "site"
    result = run("build", "--out", str(out), "--revision", "abc123")
    assert result.exit_code == 0
    assert f"{len(RECORDS) + 2} pages" in result.output
    assert "/blob/abc123/" in (out / "errors/q-ndim/index.html").read_text(encoding="utf-8")
    result = run("build", "-o", str(out), "--json")
    assert result.exit_code == 0
    data = json.loads(result.output)
    assert data["ok"] is True
    assert data["pages"] == len(RECORDS) + 2
    assert data["largest_bytes"] < 100_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("build",), "--out"),
        (("build", "--out", "{tmp}"), "holds something else"),
        (("build", "--out", "{tmp}/notes.txt/site"), "Not a directory"),
        (("build", "--out", "{tmp}", "--json"), "holds something else"),
        (("serve", "--port", "99999"), "--port"),
        (("serve", "--site", "{tmp}"), "holds no error reference"),
        (("serve", "--site", "{tmp}/missing"), "holds no error reference"),
        (("unheard-of",), "unheard-of"),
        ((), "build"),
    ],
)
def test_what_cannot_be_done_exits_with_2(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'sparse-mla[site]'")
    (tmp_path / "notes.txt").write_text("x")
    result = run(*(part.replace("{tmp}", str(tmp_path)) for part in arguments))
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
    if "--json" in arguments:
        assert json.loads(result.output)["ok"] is False


@pytest.mark.parametrize("missing", ["jinja2", "uvicorn", "starlette"])
def test_a_missing_package_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "sparse_mla.errors.serve", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    out = tmp_path / "site"
    result = run(*(("build", "--out", str(out)) if missing == "jinja2" else ("serve",)))
    assert result.exit_code == 2
    assert "pip install 'sparse-mla[site]'" in result.output
    assert not out.exists()


def test_a_port_in_use_is_said() -> None:
    pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'sparse-mla[site]'")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert result.exit_code == 2
    assert f"port {port}: Address already in use" in result.output


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server in a process of its own, which Ctrl-C stops with exit code 0."""
    for name in ("uvicorn", "starlette"):
        pytest.importorskip(name, reason=f"needs {name}: pip install 'sparse-mla[site]'")
    program = "from sparse_mla.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", program, "errors", "serve", "--port", "0", "--revision", "abc"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    try:
        assert line.startswith("http://127.0.0.1:"), line
        yield line.split("/ ")[0]
        child.send_signal(signal.SIGINT)
        _, complaints = child.communicate(timeout=30)
        assert complaints == ""
        assert child.returncode == 0
    finally:
        child.kill()


def get(server: str, path: str, method: str = "GET") -> tuple[int, str, bytes, Any]:
    request = urllib.request.Request(server + path, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            status, headers, body = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as fault:
        status, headers, body = fault.code, fault.headers, fault.read()
    return status, headers.get_content_type(), body, headers


def get_json(server: str, path: str, method: str = "GET") -> tuple[int, Any]:
    status, kind, body, _ = get(server, path, method)
    assert kind == "application/json"
    return status, json.loads(body)


def test_the_site_is_served(server: str) -> None:
    for path in (
        "/",
        "/index.html",
        "/errors/q-ndim/",
        "/errors/q-ndim",
        "/errors/q-ndim/index.html",
    ):
        status, kind, body, headers = get(server, path)
        assert (status, kind) == (200, "text/html")
        assert b"<!DOCTYPE html>" in body
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-content-type-options"] == "nosniff"
    assert get(server, "/assets/site.js")[0] == 200
    assert get_json(server, "/api/schema/error.json")[1]["title"] == "An error of sparse-mla"
    status, kind, body, _ = get(server, "/nothing/here")
    assert (status, kind) == (404, "text/html")
    assert b"no such page" in body
    for path in ("/../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd"):
        assert b"root:" not in get(server, path)[2]


def test_one_error_and_all_errors(server: str) -> None:
    status, data = get_json(server, "/api/errors/h-kv-not-one")
    assert status == 200
    assert data["id"] == "h-kv-not-one"
    assert "/blob/abc/" in data["raised_at"][0]["permalink"]
    assert get_json(server, "/api/errors/h-kv-not-one.json") == (200, data)
    status, everything = get_json(server, "/api/errors")
    assert [entry["id"] for entry in everything["errors"]] == list(RECORDS)
    assert get_json(server, "/api/errors/index.json") == (200, everything)


@pytest.mark.parametrize("id", ["h-kv-not-one", "backend-refused", "illegal-memory-access"])
def test_a_message_is_explained(server: str, id: str) -> None:
    log = traceback_around(first_line(RECORDS[id], context(RECORDS[id], 1)))
    status, data = get_json(server, "/api/errors?" + urllib.parse.urlencode({"message": log}))
    assert status == 200
    assert data["found"] is True
    assert data["id"] == id
    page = json.loads(json.dumps(explanation(find(log)[0])))
    assert {name: data[name] for name in ("values", "yours", "detail", "fix")} == {
        name: page[name] for name in ("values", "yours", "detail", "fix")
    }
    assert data["record"]["id"] == id


def test_a_message_that_nothing_explains(server: str) -> None:
    status, data = get_json(server, "/api/errors?message=not+contigous")
    assert status == 200
    assert data["found"] is False
    assert "not-contiguous" in data["suggestions"]


@pytest.mark.parametrize(
    ("path", "method", "status", "code"),
    [
        ("/api/errors/unheard-of", "GET", 404, "unknown-id"),
        ("/api/errors/..%2f..%2fetc%2fpasswd", "GET", 404, "not-found"),
        ("/api/errors/%3Cscript%3E", "GET", 404, "unknown-id"),
        ("/api/errors?message=", "GET", 400, "empty-message"),
        ("/api/errors?message=%20%0a", "GET", 400, "empty-message"),
        ("/api/errors?message=a&message=b", "GET", 400, "repeated-parameter"),
        ("/api/errors?msg=a", "GET", 400, "unknown-parameter"),
        ("/api/errors?message=a&x=1", "GET", 400, "unknown-parameter"),
        ("/api/errors?message=" + "a" * 60_000, "GET", 413, "message-too-long"),
        ("/api/errors", "POST", 405, "method-not-allowed"),
        ("/api/errors/q-ndim", "DELETE", 405, "method-not-allowed"),
        ("/api/unheard-of", "GET", 404, "not-found"),
        ("/api", "GET", 404, "not-found"),
        ("/api/schema", "GET", 404, "not-found"),
    ],
)
def test_a_bad_request_gets_an_error_in_json(
    server: str, path: str, method: str, status: int, code: str
) -> None:
    got, data = get_json(server, path, method)
    assert (got, data["error"]["code"]) == (status, code)
    assert data["schema_version"] == 1
    assert len(data["error"]["message"]) < 200


def test_an_unknown_id_suggests_the_nearest(server: str) -> None:
    _, data = get_json(server, "/api/errors/h-kv-no-one")
    assert data["error"]["suggestions"][0] == "h-kv-not-one"


def test_a_long_traceback_fits_into_an_address(server: str) -> None:
    log = traceback_around("q must be contiguous") + "\n│" * 15_000
    status, data = get_json(server, "/api/errors?" + urllib.parse.urlencode({"message": log}))
    assert (status, data["id"]) == (200, "not-contiguous")
