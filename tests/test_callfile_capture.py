"""``capture`` and ``SPARSE_MLA_CAPTURE``: a sample of real calls as files."""

from __future__ import annotations

import stat
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from callfiles import same_bits, small_call

import sparse_mla
from sparse_mla import environment
from sparse_mla.callfile import STRICT, Capture, capture, dump, load_call
from sparse_mla.callfile.captures import call_seconds
from sparse_mla.errors import ContractError


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump, "_warned", set())


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
    assert 0 < call_seconds(first) < 60
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
    with capture(tmp_path / "two", max_bytes=2 * one + one // 2) as log:
        for _ in range(5):
            operator()
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
    assert call_seconds(call) is None
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
    for _ in range(6):
        operator()
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
        pytest.warns(RuntimeWarning, match="Not a directory"),
    ):
        out, _, _ = operator()
    assert out.shape == (2, 64, 512)
    assert log.files == []


def test_a_call_without_data_is_left_alone(tmp_path: Path) -> None:
    """Fake tensors never come here; meta tensors and a compiler's own could."""
    log = Capture(str(tmp_path / "never"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with log.around(STRICT, {"q": torch.ones(1, device="meta")}):
            pass
    assert log.seen == 1
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("given", [{"rate": 1.5}, {"rate": -0.1}, {"max_bytes": -1}])
def test_impossible_settings(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="got"), capture(tmp_path, **given):
        pass
    assert not environment.any_diagnostics()
