"""``capture`` and ``SPARSE_MLA_CAPTURE``: a sample of real calls as files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from callfiles import same_bits, small_call

import sparse_mla
from sparse_mla import environment
from sparse_mla.callfile import (
    GENERAL,
    STRICT,
    capture,
    capture_call,
    captures,
    dump,
    load_call,
)
from sparse_mla.errors import ContractError


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_warned", set())


def operators(count: int) -> None:
    for _ in range(count):
        operator()


def operator(**changes: Any) -> Any:
    return sparse_mla.sparse_mla_q8kv8_prefill_fwd(**(small_call().keywords() | changes))


def size_of_one(tmp_path: Path) -> int:
    with capture(tmp_path / "one") as log:
        operator()
    return log.bytes


def test_calls_are_recorded_and_run_again_to_the_same_bits(tmp_path: Path) -> None:
    with capture(tmp_path / "new") as log:
        want = operator()
        sparse_mla.sparse_mla_prefill(
            torch.ones(1, 3, 512), torch.ones(2, 512), torch.zeros(1, 4, dtype=torch.int32)
        )
    assert log.seen == 2
    first, second = map(load_call, log.files)
    assert second.operator == "sparse_mla_prefill"
    assert all(same_bits(a, b) for a, b in zip(first.run(), want, strict=True))
    assert same_bits(first.tensors["kv"], small_call().tensors["kv"])
    assert first.metadata["created_by"] == "capture"
    assert first.metadata["call"] == "1"
    assert first.metadata["backend"] == "cpu"
    assert 0 < float(first.metadata["seconds"]) < 60
    assert log.bytes == sum(Path(file).stat().st_size for file in log.files)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_nothing_is_recorded_outside(tmp_path: Path) -> None:
    with capture(tmp_path / "new") as log:
        assert environment.any_diagnostics()
    assert not environment.any_diagnostics()
    operator()
    assert log.seen == 0
    assert not (tmp_path / "new").exists()


def test_a_share_of_the_calls(tmp_path: Path) -> None:
    numbers = []
    for seed in (0, 0, 1):
        with capture(tmp_path, rate=0.25, seed=seed) as log:
            for _ in range(80):
                operator()
        assert log.seen == 80
        assert 10 <= len(log.files) <= 30
        numbers.append([load_call(file).metadata["call"] for file in log.files])
    assert numbers[0] == numbers[1] != numbers[2]


def test_files_stay_under_max_bytes(tmp_path: Path) -> None:
    one = size_of_one(tmp_path)
    with (
        capture(tmp_path / "two", max_bytes=2 * one + one // 2) as log,
        pytest.warns(RuntimeWarning, match=f"of {2 * one + one // 2} are left") as said,
    ):
        operators(5)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert len(log.files) == 2
    assert log.too_large == 3
    assert log.bytes <= 2 * one + one // 2


def test_a_call_that_raises_is_recorded_whatever_the_rate(tmp_path: Path) -> None:
    wrong = small_call().tensors["kv"].expand(5, 8, 576)
    with capture(tmp_path, rate=0.0) as log:
        operator()
        with pytest.raises(ContractError, match="requires h_kv=1, got 8") as caught:
            operator(kv=wrong.contiguous())
    (file,) = log.files
    call = load_call(file)
    assert call.metadata["error"].startswith("ContractError: sparse_mla_q8kv8_prefill_fwd requires")
    assert "seconds" not in call.metadata
    with pytest.raises(ContractError) as again:
        call.run()
    assert str(again.value) == str(caught.value)


def test_every_open_capture_sees_a_call_of_any_thread(tmp_path: Path) -> None:
    with capture(tmp_path / "a") as outer, capture(tmp_path / "b") as inner:
        thread = threading.Thread(target=operator)
        thread.start()
        thread.join()
    assert (outer.seen, inner.seen) == (1, 1)
    assert len(outer.files) == len(inner.files) == 1


def test_the_environment_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = size_of_one(tmp_path)
    folder = tmp_path / "env"
    monkeypatch.setenv("SPARSE_MLA_CAPTURE", str(folder))
    monkeypatch.setenv("SPARSE_MLA_CAPTURE_MAX_BYTES", str(3 * one + one // 2))
    with pytest.warns(RuntimeWarning, match="calls without room are not recorded"):
        operators(6)
    assert len(list(folder.iterdir())) == 3
    monkeypatch.setenv("SPARSE_MLA_CAPTURE", str(tmp_path / "never"))
    monkeypatch.setenv("SPARSE_MLA_CAPTURE_RATE", "0")
    operator()
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RATE", "often", "SPARSE_MLA_CAPTURE_RATE is no number: 'often'"),
        ("RATE", "2", "rate must lie between 0 and 1, got 2.0"),
        ("MAX_BYTES", "nan", "SPARSE_MLA_CAPTURE_MAX_BYTES is no number: 'nan'"),
    ],
)
def test_a_setting_that_makes_no_sense_warns_and_the_call_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv("SPARSE_MLA_CAPTURE", str(tmp_path))
    monkeypatch.setenv(f"SPARSE_MLA_CAPTURE_{name}", value)
    with pytest.warns(RuntimeWarning, match=words):
        operator()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator()  # said once


def test_a_folder_that_cannot_be_written_warns_and_the_call_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        capture(tmp_path / "file" / "below") as log,
        pytest.warns(RuntimeWarning, match="Not a directory") as said,
    ):
        out, _, _ = operator()
    assert said[0].filename == __file__
    assert out.shape == (2, 64, 512)
    assert log.files == []


def test_a_call_without_data_is_left_alone(tmp_path: Path) -> None:
    """Fake tensors never come here; meta tensors and a compiler's own could."""
    with warnings.catch_warnings(), capture(tmp_path / "never") as log:
        warnings.simplefilter("error")
        with capture_call(STRICT, {"q": torch.ones(1, device="meta")}):
            pass
    assert log.seen == 1
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("given", [{"rate": 1.5}, {"rate": -0.1}, {"max_bytes": -1}])
def test_impossible_settings(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"), capture(tmp_path, **given):
        pass
    assert not environment.any_diagnostics()


def test_a_limit_below_one_call_says_so_and_writes_nothing(tmp_path: Path) -> None:
    with (
        capture(tmp_path / "new", max_bytes=1000) as log,
        pytest.warns(RuntimeWarning, match="bytes and 1000 of 1000 are left"),
    ):
        operator()
    assert (log.files, log.bytes, log.too_large) == ([], 0, 1)
    assert not (tmp_path / "new").exists()


def test_the_time_is_the_calls_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of writing another capture's file."""
    fast = captures.written

    def slow(*arguments: Any) -> str | None:
        time.sleep(0.5)
        return fast(*arguments)

    monkeypatch.setattr(captures, "written", slow)
    with capture(tmp_path / "a") as outer, capture(tmp_path / "b") as inner:
        operator()
    for log in (outer, inner):
        assert float(load_call(log.files[0]).metadata["seconds"]) < 0.5


def test_a_call_does_not_wait_for_the_file_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def stuck(*_: Any) -> None:
        writing.set()
        assert go_on.wait(60)

    monkeypatch.setattr(captures, "written", stuck)
    with capture(tmp_path) as log:
        thread = threading.Thread(target=operator)
        thread.start()
        assert writing.wait(60)
        log.rate = 0.0
        operator()  # on a lock it would wait for ever
        go_on.set()
        thread.join()
    assert log.seen == 2


def test_threads_at_once_stay_under_max_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = size_of_one(tmp_path)
    fast = captures.written

    def slow(*arguments: Any) -> str | None:
        time.sleep(0.1)  # all have asked for room before the first file is there
        return fast(*arguments)

    monkeypatch.setattr(captures, "written", slow)
    limit = 5 * one + one // 2
    with warnings.catch_warnings(), capture(tmp_path / "many", max_bytes=limit) as log:
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=lambda: operators(5)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (log.seen, len(log.files), log.too_large) == (20, 5, 15)
    on_disk = [file.stat().st_size for file in (tmp_path / "many").iterdir()]
    assert sum(on_disk) == log.bytes <= limit
    assert {load_call(file).operator for file in log.files} == {STRICT}


def test_two_that_are_alike_are_two(tmp_path: Path) -> None:
    first, second = capture(tmp_path), capture(tmp_path)
    one, two = first.__enter__(), second.__enter__()
    second.__exit__(None, None, None)
    operator()
    first.__exit__(None, None, None)
    assert (one.seen, two.seen) == (1, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_a_lock_that_nobody_will_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_MLA_CAPTURE", str(tmp_path / "env"))
    q = torch.ones(1, 1, 512)
    arguments = {"q": q, "kv": q[0], "indices": torch.zeros(1, 1, dtype=torch.int32)}

    def child() -> None:
        with capture_call(GENERAL, arguments):  # torch's own threads do not survive a fork
            pass

    with capture(tmp_path / "open") as log:
        with capture_call(GENERAL, arguments):
            pass
        given = captures.environment_capture()
        assert given is not None
        with captures._change, log._lock, given._lock:
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
        process.join(60)
        alive = process.is_alive()
        process.kill()
    assert not alive
    assert process.exitcode == 0
    for folder in ("env", "open"):
        numbers = [load_call(file).metadata["call"] for file in (tmp_path / folder).iterdir()]
        assert sorted(numbers) == (["1", "1"] if folder == "env" else ["1", "2"])


def test_a_process_killed_leaves_whole_files(tmp_path: Path) -> None:
    program = (
        "import sys, torch, sparse_mla\n"
        "q = torch.ones(1, 3, 512)\n"
        "while True:\n"
        "    sparse_mla.sparse_mla_prefill(q, q[0], torch.zeros(1, 4, dtype=torch.int32))\n"
        "    print(flush=True)\n"
    )
    environment = {**os.environ, "SPARSE_MLA_CAPTURE": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) >= 5
    for file in files:
        load_call(file).run()


def test_a_long_error_is_cut_and_its_file_can_be_read(tmp_path: Path) -> None:
    arguments = small_call().keywords()
    with (
        capture(tmp_path) as log,
        pytest.raises(ZeroDivisionError),
        capture_call(STRICT, arguments),
    ):
        raise ZeroDivisionError("\x1b" * 2_000_000)
    assert len(load_call(log.files[0]).metadata["error"]) == captures.ERROR_LENGTH


def test_compiled_calls_are_recorded(tmp_path: Path) -> None:
    compiled = torch.compile(
        lambda *arguments: sparse_mla.sparse_mla_prefill(*arguments)[0] + 1,
        backend="aot_eager",
        fullgraph=True,
    )
    q, kv = torch.ones(1, 3, 512), torch.ones(2, 512)
    with capture(tmp_path) as log, torch.no_grad():
        for _ in range(2):
            compiled(q, kv, torch.zeros(1, 4, dtype=torch.int32))
    assert log.seen == len(log.files) == 2  # and none of the trace
    out, _, _ = load_call(log.files[1]).run()
    assert torch.equal(out, torch.ones(1, 3, 512, dtype=torch.bfloat16))
