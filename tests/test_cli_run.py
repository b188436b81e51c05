"""``sparse-mla run``: a captured call made again, its results written, its verdict honest."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from callfiles import same_bits, small_call
from typer.testing import CliRunner

import sparse_mla
from sparse_mla.callfile import GENERAL, RESULTS, Call, capture, load_call, save_call
from sparse_mla.cli import build
from sparse_mla.cli.replay import only, operations, sample


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(build(), [str(argument) for argument in arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    call = small_call()
    call.tensors.update(zip(RESULTS, call.run(backend="reference"), strict=True))
    save_call(tmp_path / "call.safetensors", call)
    return tmp_path / "call.safetensors"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_named_backend_runs_it(file: Path, backend: str) -> None:
    result = invoke("run", file, "--backend", backend, "--verify", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["backend"] == backend
    assert [entry["against"] for entry in answer["verified"]] == [
        "the reference",
        "the results in the file",
    ]
    assert all(entry["ok"] for entry in answer["verified"])
    if backend == "reference":
        assert answer["verified"][1]["out_relative_l2"] == 0.0


def test_an_unknown_backend_exits_2(file: Path) -> None:
    result = invoke("run", file, "--backend", "abacus")
    assert result.exit_code == 2
    assert "sparse-mla explain backend-unknown" in result.stderr


def test_cuda_where_there_is_none_exits_2(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("run", file, "--device", "cuda")
    assert result.exit_code == 2
    assert "no CUDA device" in result.stderr


@pytest.mark.parametrize("device", ["meta", "xpu", "vulkan", "privateuseone"])
def test_a_device_that_torch_knows_by_name_only_exits_2(file: Path, device: str) -> None:
    result = invoke("run", file, "--device", device)
    assert result.exit_code == 2
    assert f"torch cannot compute on {device} here" in " ".join(result.stderr.split())


def test_a_broken_contract_exits_1_with_its_text(tmp_path: Path) -> None:
    call = small_call(indices=small_call().tensors["indices"].long())
    save_call(tmp_path / "call.safetensors", call)
    result = invoke("run", tmp_path / "call.safetensors")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: indices must be int32, got torch.int64\n")
    answer = json.loads(invoke("run", tmp_path / "call.safetensors", "--json").stdout)
    assert answer["error"]["id"] == "indices-not-int32"


def test_results_are_written(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.safetensors"
    result = invoke("run", file, "--backend", "reference", "-o", output)
    assert result.exit_code == 0
    written = safetensors.torch.load_file(output)
    expected = load_call(file).expected
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same_bits(written[name], tensor), name
    with safetensors.safe_open(output, framework="pt") as opened:
        assert opened.metadata()["backend"] == "reference"


def test_the_call_is_not_overwritten_by_its_results(file: Path) -> None:
    before = file.read_bytes()
    result = invoke("run", file, "-o", file)
    assert result.exit_code == 2
    assert file.read_bytes() == before


@pytest.mark.parametrize("where", ["nowhere/out.safetensors", "."])
def test_a_place_that_takes_no_results_exits_2(file: Path, tmp_path: Path, where: str) -> None:
    before = sorted(os.listdir(tmp_path))
    result = invoke("run", file, "-o", tmp_path / where)
    assert result.exit_code == 2
    assert "sparse-mla explain file-not-written" in result.stderr
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_are_off_exit_1(file: Path, tmp_path: Path, name: str) -> None:
    call = load_call(file)
    call.tensors[name] = call.tensors[name].clone()
    call.tensors[name].view(-1)[-1] += 1.0
    save_call(tmp_path / "off.safetensors", call)
    result = invoke("run", tmp_path / "off.safetensors", "--verify", "--json")
    assert result.exit_code == 1
    reference, in_file = json.loads(result.stdout)["verified"]
    assert reference["ok"]
    assert not in_file["ok"]
    assert "DIFFERS" in invoke("run", tmp_path / "off.safetensors", "--verify").stdout


def test_results_of_another_shape_are_off(file: Path, tmp_path: Path) -> None:
    call = load_call(file)
    call.tensors["lse"] = call.tensors["lse"][:, :1].contiguous()
    save_call(tmp_path / "off.safetensors", call)
    result = invoke("run", tmp_path / "off.safetensors", "--verify", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verified"][1]["out_relative_l2"] == "inf"


def test_a_backend_that_is_off_is_found_by_the_reference(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparse_mla.backends import cpu

    right = cpu.run

    def wrong(problem: Any) -> None:
        right(problem)
        problem.out[-1, -1] *= 1.02

    monkeypatch.setattr(cpu, "run", wrong)
    result = invoke("run", file, "--backend", "cpu", "--verify", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["verified"][0]["ok"]


def test_results_in_float32_are_compared_as_such(tmp_path: Path) -> None:
    """A model of transformers asks for them; the reference rounded to bfloat16 is 0.2% off."""
    generator = torch.Generator().manual_seed(3)
    q, kv = torch.randn(90, 3, 512, generator=generator), torch.randn(9, 512, generator=generator)
    indices = torch.randint(0, 9, (90, 5), generator=generator, dtype=torch.int32)
    with capture(tmp_path) as log:
        sparse_mla.sparse_mla_prefill(q, kv, indices, out=torch.empty(90, 3, 512))
    answer = json.loads(invoke("run", log.files[0], "--verify", "--json").stdout)
    assert answer["results"]["out"]["dtype"] == "float32"
    assert answer["verified"][0]["queries"] == 64
    assert answer["verified"][0]["out_relative_l2"] < 1e-5


def test_without_verify_nothing_is_compared(file: Path) -> None:
    answer = json.loads(invoke("run", file, "--json").stdout)
    assert answer["verified"] == []


def test_the_general_operator_with_token_scales_verifies(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "q": torch.randn(70, 3, 512, generator=generator).to(torch.float8_e4m3fn),
        "kv": torch.randn(9, 512, generator=generator).to(torch.float8_e4m3fn),
        "indices": torch.randint(-1, 9, (70, 5), generator=generator, dtype=torch.int32),
        "q_scale": torch.rand(70, 3, generator=generator) + 0.5,
        "kv_scale": torch.rand(9, generator=generator) + 0.5,
        "topk_length": torch.randint(0, 6, (70,), generator=generator, dtype=torch.int32),
    }
    save_call(tmp_path / "call.safetensors", Call(GENERAL, tensors))
    result = invoke("run", tmp_path / "call.safetensors", "--verify", "--json")
    assert result.exit_code == 0, result.stdout
    (verified,) = json.loads(result.stdout)["verified"]
    assert (verified["queries"], verified["of"]) == (64, 70)


def test_a_query_alone_gives_what_it_gave_among_others() -> None:
    call = small_call()
    whole = call.run(backend="reference")
    alone = only(call, [1]).run(backend="reference")
    assert all(same_bits(a[1:2], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize(("count", "at_most"), [(0, 4), (3, 4), (4, 4), (5, 4), (1000, 64)])
def test_sampled_queries_are_spread(count: int, at_most: int) -> None:
    found = sample(count, at_most)
    assert len(found) == min(count, at_most) == len(set(found))
    assert found == sorted(found)
    if count:
        assert (found[0], found[-1]) == (0, count - 1)


def test_only_valid_slots_count_as_work() -> None:
    indices = torch.tensor([[[0, 4, -1, 5] * 32], [[1] * 128]], dtype=torch.int32)
    call = small_call(indices=indices, topk_length=torch.tensor([4, 3], dtype=torch.int32))
    # Query 0 has slots 0 and 1 valid within its length of 4 (-1 and 5 are not), query 1 three.
    assert operations(call) == 2 * (2 + 3) * 64 * (576 + 512)


def test_no_query_is_a_call_too(tmp_path: Path) -> None:
    call = small_call()
    for name in ("q", "indices", "topk_length"):
        call.tensors[name] = call.tensors[name][:0].clone()
    save_call(tmp_path / "call.safetensors", call)
    result = invoke("run", tmp_path / "call.safetensors", "--verify")
    assert result.exit_code == 0, result.stdout
