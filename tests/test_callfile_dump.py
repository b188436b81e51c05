"""``SPARSE_MLA_DUMP``: a call that fails or takes the process with it leaves its inputs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from callfiles import same_bits, small_call
from torch._subclasses.fake_tensor import FakeTensorMode

import sparse_mla
from sparse_mla.callfile import STRICT, dump, dump_call, load_call
from sparse_mla.errors import ContractError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSE_MLA_DUMP", str(tmp_path / "dumps"))
    monkeypatch.setattr(dump, "_warned", set())
    return tmp_path / "dumps"


def dumps(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def operator(**arguments: Any) -> Any:
    return sparse_mla.sparse_mla_q8kv8_prefill_fwd(**arguments)


def test_a_call_that_fails_leaves_its_inputs(folder: Path) -> None:
    arguments = small_call().keywords()
    arguments["kv"] = arguments["kv"].expand(5, 8, 576)
    with pytest.raises(ContractError) as caught:
        operator(**arguments)
    (file,) = dumps(folder)
    call = load_call(file)
    assert call.operator == STRICT
    assert same_bits(call.tensors["q"], arguments["q"])
    assert call.tensors["kv"].stride() == arguments["kv"].stride()
    with pytest.raises(ContractError) as again:
        call.run()
    assert str(again.value) == str(caught.value)


def test_the_exception_says_where_the_inputs_are(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught, dump_call(STRICT, small_call().keywords()):
        raise ZeroDivisionError
    if sys.version_info >= (3, 11):
        assert str(dumps(folder)[0]) in caught.value.__notes__[0]


def test_a_call_that_returns_leaves_nothing(folder: Path) -> None:
    operator(**small_call().keywords())
    assert dumps(folder) == []


def test_the_file_is_there_before_the_call_runs(folder: Path) -> None:
    with dump_call(STRICT, small_call().keywords()):
        (file,) = dumps(folder)
        assert load_call(file).arguments["d_v"] == 512
    assert dumps(folder) == []


def test_all_calls_are_kept_when_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MLA_DUMP_ALL", "1")
    for _ in range(3):
        operator(**small_call().keywords())
    assert len(dumps(folder)) == 3
    load_call(dumps(folder)[0]).run()


def test_a_process_that_dies_leaves_its_inputs(folder: Path) -> None:
    program = (
        "import os\n"
        "from sparse_mla.callfile import dump_call, load_call\n"
        f"call = load_call({str(folder.parent / 'in.safetensors')!r})\n"
        "with dump_call(call.operator, call.keywords()):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    call = small_call()
    sparse_mla.callfile.save_call(folder.parent / "in.safetensors", call)
    result = subprocess.run([sys.executable, "-c", program], timeout=120, check=False)
    assert result.returncode == -9
    (file,) = dumps(folder)
    assert same_bits(load_call(file).tensors["kv"], call.tensors["kv"])


def test_name_and_mode(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), dump_call(STRICT, small_call().keywords()):
        raise ZeroDivisionError
    (file,) = dumps(folder)
    assert re.fullmatch(
        rf"{STRICT}-\d{{8}}T\d{{6}}-{os.getpid()}-[0-9a-f]{{6}}-\d{{4}}\.safetensors", file.name
    )
    assert file.stat().st_mode & 0o777 == 0o600  # prompts are nobody else's business
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("broken", ["file-in-its-place", "strange-dtype"])
def test_a_dump_that_fails_warns_once_and_lets_the_call_go_on(folder: Path, broken: str) -> None:
    arguments = small_call().keywords()
    if broken == "file-in-its-place":
        folder.write_bytes(b"")
    else:
        arguments["q_scale"] = torch.zeros(1, dtype=torch.complex128)
    ran = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with dump_call(STRICT, arguments):
                ran += 1
    assert ran == 2
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert warning.filename == __file__
    assert "sparse-mla explain dump-failed" in str(warning.message)
    assert not folder.is_dir() or dumps(folder) == []


def test_nothing_is_written_without_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSE_MLA_DUMP_ALL", "1")
    operator(**small_call().keywords())
    assert os.listdir(tmp_path) == []


def test_traced_calls_have_no_data_to_write(folder: Path) -> None:
    arguments = small_call().keywords()
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with dump_call(STRICT, fake):
                assert dumps(folder) == []


def test_graph_capture_is_said_once_and_skipped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with dump_call(STRICT, small_call().keywords()):
                assert dumps(folder) == []
    (warning,) = caught
    assert "graph capture" in str(warning.message)


@pytest.mark.gpu
def test_a_fault_that_comes_later_still_leaves_its_file(folder: Path) -> None:
    program = (
        "import torch\n"
        "from sparse_mla.callfile import dump_call\n"
        "q = torch.zeros(4, device='cuda')\n"
        "with dump_call('sparse_mla_prefill', {'q': q, 'kv': q, 'indices': q}):\n"
        "    torch._assert_async(q[0])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], timeout=300, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    (file,) = dumps(folder)
    assert load_call(file).metadata["device"] == "cuda:0"
    if sys.version_info >= (3, 11):
        assert str(file) in result.stderr
