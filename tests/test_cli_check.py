"""``sparse-mla check``: every violation at once, and what only the data shows as notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from callfiles import small_call
from typer.testing import CliRunner

from sparse_mla.callfile import GENERAL, Buffer, Call, save_call
from sparse_mla.cli import build


def checked(tmp_path: Path, call: Call) -> tuple[int, dict[str, Any]]:
    save_call(tmp_path / "call.safetensors", call)
    runner, file = CliRunner(), str(tmp_path / "call.safetensors")
    result = runner.invoke(build(), ["check", file, "--json"])
    assert runner.invoke(build(), ["check", file]).exit_code == result.exit_code
    return result.exit_code, json.loads(result.stdout)


def ids(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["id"] for entry in entries]


def test_a_sound_call(tmp_path: Path) -> None:
    code, answer = checked(tmp_path, small_call())
    assert code == 0
    assert answer["ok"] is True
    assert answer["violations"] == []
    assert answer["tensors"]["q"] == {
        "dtype": "float8_e4m3fn",
        "shape": [2, 64, 576],
        "stride": [64 * 576, 576, 1],
    }


def test_every_violation_is_listed_in_the_contracts_order(tmp_path: Path) -> None:
    call = small_call(
        q=torch.zeros(2, 8, 576, dtype=torch.bfloat16),
        indices=torch.zeros(2, 1, 100, dtype=torch.int64),
        attn_sink=torch.zeros(3),
    )
    del call.tensors["kv_scale"]
    call.arguments.update(kv_scale=0.5, d_v=128, sm_scale=-1.0)
    code, answer = checked(tmp_path, call)
    assert code == 1
    assert ids(answer["violations"]) == [
        "not-e4m3fn",
        "h-q-not-multiple-of-64",
        "indices-not-int32",
        "topk-not-multiple-of-128",
        "d-v-unsupported",
        "attn-sink-invalid",
        "scale-invalid",
        "sm-scale-invalid",
    ]
    text = CliRunner().invoke(build(), ["check", str(tmp_path / "call.safetensors")]).stdout
    assert "\n8. sm_scale must be a finite positive number, got -1.0\n" in text
    assert "broken in 8 places" in text


def test_a_call_without_scales_breaks_the_contract_not_python(tmp_path: Path) -> None:
    call = small_call()
    del call.tensors["q_scale"], call.arguments["sm_scale"]
    code, answer = checked(tmp_path, call)
    assert code == 1
    assert ids(answer["violations"]) == ["scale-invalid", "sm-scale-invalid"]


def test_the_general_operator_has_its_own_contract(tmp_path: Path) -> None:
    tensors = {
        "q": torch.randn(2, 3, 512),
        "kv": torch.randn(4, 512),
        "indices": torch.zeros(2, 5, dtype=torch.int32),
    }
    code, answer = checked(tmp_path, Call(GENERAL, tensors))
    assert code == 0
    code, answer = checked(tmp_path, Call(GENERAL, tensors, {"kv_scale": 0.5}))
    assert code == 1
    assert ids(answer["violations"]) == ["scale-without-fp8"]


def test_strides_and_given_outputs_are_checked_as_recorded(tmp_path: Path) -> None:
    call = small_call()
    call.tensors["kv"] = (
        call.tensors["kv"].expand(5, 1, 576).as_strided((2, 1, 576), (1152, 576, 1))
    )
    call.arguments["lse"] = Buffer(torch.float64, (2, 64), (64, 1))
    code, answer = checked(tmp_path, call)
    assert code == 1
    assert ids(answer["violations"]) == ["not-contiguous", "output-invalid"]


def test_what_only_the_data_shows_is_a_note(tmp_path: Path) -> None:
    call = small_call()
    call.tensors["indices"][1, 0, 7] = 5
    call.tensors["topk_length"][0] = 129
    call.tensors["kv_scale"][0] = 0.0
    code, answer = checked(tmp_path, call)
    assert code == 0
    named = [name for name in ids(answer["notes"]) if name]
    assert named == ["topk-length-out-of-range", "index-out-of-range", "scale-data-invalid"]


def test_slots_are_counted(tmp_path: Path) -> None:
    indices = torch.full((2, 1, 128), -1, dtype=torch.int32)
    indices[0, 0, :3] = torch.tensor([4, 2, 4])
    call = small_call(indices=indices)
    del call.tensors["topk_length"]
    _, answer = checked(tmp_path, call)
    texts = [note["text"] for note in answer["notes"]]
    assert texts == [
        "3 of 256 slots select a row",
        "1 of 2 queries select nothing: out 0, lse +inf",
        "1 of 2 queries select a row twice: it counts twice",
    ]


def test_a_call_that_was_spread_over_devices_says_so(tmp_path: Path) -> None:
    call = small_call()
    call.metadata["device"] = "cuda:0, kv on cpu"
    _, answer = checked(tmp_path, call)
    assert answer["notes"][0]["id"] == "device-mismatch"
    assert "kv on cpu" in answer["notes"][0]["text"]


def test_nothing_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_mla import dispatch

    def ran(*_: Any, **__: Any) -> str:
        raise AssertionError("the call was made")

    monkeypatch.setattr(dispatch, "run", ran)
    assert checked(tmp_path, small_call())[0] == 0
