"""``sparse-mla doctor``: the truth about this machine, without touching what it reports on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sparse_mla import __version__, dispatch
from sparse_mla.cli import build, doctor


def report(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(build(), ["doctor", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout)


def test_versions_are_those_installed() -> None:
    code, found = report()
    assert code == 0
    assert found["versions"]["sparse-mla"] == __version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["safetensors"] == metadata.version("safetensors")


def test_what_is_not_installed_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", {"abacus": ("abacus-of-nobody", "abacus-2")})
    assert doctor.versions()["abacus"] is None
    text = CliRunner().invoke(build(), ["doctor"]).stdout
    assert "abacus         not installed" in text.replace("  abacus        ", "  abacus         ")


def test_another_name_of_a_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", {"nvrtc": ("nobody-has-this", "torch")})
    assert doctor.versions()["nvrtc"] == metadata.version("torch")


def test_devices_are_those_torch_sees() -> None:
    _, found = report()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert [device["device"] for device in found["devices"]] == [f"cuda:{i}" for i in range(count)]
    assert found["cpu"]["threads"] == torch.get_num_threads()
    if count == 0:
        assert "\n  cuda          none\n" in CliRunner().invoke(build(), ["doctor"]).stdout


def test_every_backend_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_mla.backends import cpu

    monkeypatch.setattr(cpu, "available", lambda: "its abacus is missing")
    code, found = report()
    assert code == 0  # the reference still runs
    reasons = {entry["name"]: entry["reason"] for entry in found["backends"]}
    assert reasons.keys() == set(dispatch.BACKENDS)
    assert reasons["cpu"] == "its abacus is missing"
    assert reasons["reference"] is None
    text = CliRunner().invoke(build(), ["doctor"]).stdout
    assert "\n  cpu           no: its abacus is missing\n" in text
    assert "\n  reference     ready\n" in text


def test_a_backend_that_cannot_be_imported_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("libcuda.so.1: cannot open\nsecond line")

    monkeypatch.setattr(dispatch, "load", broken)
    code, found = report()
    assert code == 1  # nothing runs here
    assert found["ok"] is False
    assert found["backends"][0]["reason"] == "ImportError: libcuda.so.1: cannot open"


def test_the_cache_is_where_the_variable_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path / "cubins"))
    _, found = report()
    assert found["cache"] == {"directory": str(tmp_path / "cubins"), "files": 0, "bytes": 0}
    assert found["environment"]["SPARSE_MLA_CACHE_DIR"] == str(tmp_path / "cubins")
    assert not (tmp_path / "cubins").exists()
    (tmp_path / "cubins").mkdir()
    (tmp_path / "cubins" / "a.cubin").write_bytes(b"12345")
    _, found = report()
    assert (found["cache"]["files"], found["cache"]["bytes"]) == (1, 5)


def test_nothing_is_imported_for_a_version_and_nothing_is_fetched() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import torch\n"
        "before = set(sys.modules)\n"  # torch itself imports cuda.bindings where it is installed
        "from sparse_mla.cli import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    rooms = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "    print('LOADED', sorted({'triton', 'matplotlib', 'cuda'} & rooms))\n"
        "    print('CUDA', torch.cuda.is_initialized())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "doctor"],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    if not torch.cuda.is_available():
        assert "LOADED []" in result.stdout
        assert "CUDA False" in result.stdout


def test_which_kernels_run_a_shape() -> None:
    """Without a Hopper GPU the answer is that of an H200, which has 132 multiprocessors."""
    code, found = report("--shape", "h_q=16", "--shape", "s_q=1,h_q=16,d_qk=512")
    kernels = found["kernels"]
    assert code == 0
    assert kernels["multiprocessors"] == 132 or kernels["device"]
    long, single = kernels["shapes"]
    assert (long["s_q"], long["h_q"], long["topk"], long["d_qk"]) == (4096, 16, 2048, 576)
    if kernels["multiprocessors"] == 132:
        assert long["launches"] == [
            {
                "kernel": "prefill-h16-d576",
                "heads": [0, 15],
                "heads_per_item": 16,
                "ctas_per_item": 1,
                "ctas": 132,
            }
        ]
        assert [launch["ctas_per_item"] for launch in single["launches"]] == [8]
        text = CliRunner().invoke(build(), ["doctor", "--shape", "h_q=80"]).stdout
        assert "  s_q=4096 h_q=80 topk=2048 d_qk=576\n" in text
        assert "    prefill-h64-d576   heads 0 to 63, 132 CTAs\n" in text
        assert "    prefill-h16-d576   heads 64 to 79, 132 CTAs\n" in text
        text = CliRunner().invoke(build(), ["doctor", "--shape", "s_q=1,h_q=1"]).stdout
        assert "head 0, 8 CTAs, each query's slots over 8 of them\n" in text


def test_scales_of_tokens_have_kernels_of_their_own() -> None:
    _, found = report(
        "--shape", "kv_scale=token", "--shape", "h_q=64,q_scale=token", "--shape", "h_q=8,d_qk=512"
    )
    kv, q, neither = found["kernels"]["shapes"]
    assert [launch["kernel"] for launch in kv["launches"]] == ["prefill-h64-d576-kv-scales"]
    assert [launch["kernel"] for launch in q["launches"]] == ["prefill-h64-d576-row-scales"]
    assert [launch["kernel"] for launch in neither["launches"]] == ["prefill-h8-d512"]
    assert (kv["q_scale"], kv["kv_scale"], q["q_scale"]) == ("tensor", "token", "token")
    text = CliRunner().invoke(build(), ["doctor", "--shape", "kv_scale=token"]).stdout
    shape = "  s_q=4096 h_q=128 topk=2048 d_qk=576 kv_scale=token\n"
    assert shape + "    prefill-h64-d576-kv-scales" in text


def test_a_shape_that_the_kernels_refuse() -> None:
    text = CliRunner().invoke(build(), ["doctor", "--shape", "s_q=2147483647"]).stdout
    reason = "2147483647 queries of 128 heads are more than the kernels count in 32 bits"
    assert f"  s_q=2147483647 h_q=128 topk=2048 d_qk=576\n    none: {reason}\n" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' says nothing"),
        ("kv_scale=head", "kv_scale must be tensor or token, got 'head'"),
        (
            "heads=16",
            "'heads=16' is not NAME=NUMBER with a name among s_q, h_q, topk, d_qk, "
            "or q_scale=token, kv_scale=token",
        ),
        ("16", "'16' is not NAME=NUMBER"),
        ("h_q=0", "h_q must be a number from 1 to 2**31 - 1, got '0'"),
        ("h_q=-3", "h_q must be a number from 1 to 2**31 - 1, got '-3'"),
        ("h_q=4294967296", "h_q must be a number from 1 to 2**31 - 1, got '4294967296'"),
        ("d_qk=640", "d_qk must be 512 or 576, got 640"),
    ],
)
def test_a_shape_that_is_none(text: str, message: str) -> None:
    result = CliRunner().invoke(build(), ["doctor", "--shape", text])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
