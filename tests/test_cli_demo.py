"""``sparse-mla demo``: a real selection, an honest verdict, a picture that is one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from callfiles import small_call
from typer.testing import CliRunner

from sparse_mla.callfile import RESULTS, save_call
from sparse_mla.cli import build, demo, demo_chunk
from sparse_mla.cli.demo_chunk import Chunk, Sizes, kept_share, make_chunk, mass_by_rank
from sparse_mla.cli.demo_plot import selection_density

SMALL = ("--s-q", "6", "--s-kv", "40", "--h-q", "3", "--topk", "8", "--d-qk", "512")


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(build(), ["demo", *SMALL, *map(str, arguments)])


def small_chunk(sizes: Sizes | None = None, seed: int = 0) -> Chunk:
    sizes = sizes or Sizes(s_q=70, s_kv=300, h_q=8, topk=32, d_qk=512)
    return make_chunk(sizes, seed, torch.device("cpu"), lambda steps: None)


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small captured call in place of the shipped one."""
    call = small_call()
    call.tensors.update(zip(RESULTS, call.run(backend="reference"), strict=True))
    file = tmp_path / "captured.safetensors"
    save_call(file, call)
    monkeypatch.setattr(demo, "captured_file", lambda: file)
    return file


def test_the_captured_call_is_found_and_right() -> None:
    file = demo.captured_file()
    assert file is not None
    found = demo._captured(None, None)
    assert found["ok"]
    assert found["sizes"] == {"s_q": 6, "s_kv": 3356, "h_q": 128, "d_qk": 576}
    assert [entry["against"] for entry in found["verified"]] == [
        "the reference",
        "the results in the file",
    ]


def test_an_installed_packages_own_copy_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "sparse_mla"
    monkeypatch.setattr(demo, "__file__", str(package / "cli" / "demo.py"))
    assert demo.captured_file() is None
    for folder in (package.parent / "examples", package / "data"):
        folder.mkdir(parents=True)
        (folder / demo.CAPTURED).write_bytes(b"")
        assert demo.captured_file() == folder / demo.CAPTURED


def test_without_the_captured_file_the_rest_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "captured_file", lambda: None)
    result = invoke()
    assert result.exit_code == 0
    assert "deepseek_v32_call.safetensors is not here" in result.stdout


@pytest.mark.usefixtures("captured")
def test_the_figures_as_json() -> None:
    result = invoke("--json", "--backend", "reference")
    assert result.exit_code == 0
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    assert answer["ok"] is True
    assert answer["captured"]["backend"] == "reference"
    figures = answer["prefill"]
    assert (figures["s_q"], figures["s_kv"], figures["topk"]) == (6, 40, 8)
    assert figures["backend"] == "reference"
    assert figures["verified"]["out_relative_l2"] == 0.0
    assert figures["seconds"] > 0
    assert figures["gflops"] == pytest.approx(
        2 * 6 * 8 * 3 * (512 + 512) / figures["seconds"] / 1e9
    )
    assert figures["peak_bytes"] > 1 << 20
    assert 0 < figures["kept_share"] <= 1


@pytest.mark.usefixtures("captured")
def test_the_figures_as_text() -> None:
    result = invoke()
    assert result.exit_code == 0
    assert result.stderr == ""  # no progress bar into a pipe
    for words in ("GFLOP/s", "MiB at most", "agrees with the reference", "of the softmax weight"):
        assert words in result.stdout
    assert "DIFFERS" not in result.stdout


@pytest.mark.usefixtures("captured")
def test_a_backend_that_is_off_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_mla.backends import cpu

    right = cpu.run

    def wrong(problem: Any) -> None:
        right(problem)
        problem.out.mul_(1.02)

    monkeypatch.setattr(cpu, "run", wrong)
    result = invoke("--json", "--backend", "cpu")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    assert answer["captured"]["ok"] is False
    assert answer["prefill"]["verified"]["ok"] is False


def test_a_captured_call_that_is_off_fails_the_demo(captured: Path) -> None:
    call = small_call()
    call.tensors.update(zip(RESULTS, call.run(backend="reference"), strict=True))
    call.tensors["lse"] += 1
    save_call(captured, call)
    result = invoke("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["prefill"]["verified"]["ok"] is True


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    ("name", "starts"), [("a.png", b"\x89PNG"), ("a.pdf", b"%PDF"), ("a.svg", b"<?xml")]
)
def test_the_picture(tmp_path: Path, name: str, starts: bytes) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    result = invoke("--plot", tmp_path / name)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / name).read_bytes().startswith(starts)
    assert str(tmp_path / name) in result.stdout


def test_a_picture_without_matplotlib_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = invoke("--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "pip install 'sparse-mla[plot]'" in result.stderr
    assert result.stdout == ""


# The chunk


def test_a_picture_that_cannot_be_written_exits_2_and_leaves_nothing(
    tmp_path: Path, captured: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    (tmp_path / "taken.png").mkdir()
    result = invoke("--plot", tmp_path / "taken.png", "--json")
    assert result.exit_code == 2
    assert "taken.png" in json.loads(result.stdout)["error"]["message"]
    assert {path.name for path in tmp_path.iterdir()} == {"taken.png", captured.name}


@pytest.mark.parametrize("size", ["--s-kv", "--h-q", "--topk"])
def test_a_size_past_this_machine_is_refused_before_memory_is_taken(size: str) -> None:
    result = invoke(size, str(10**9))
    assert result.exit_code == 2
    assert re.search(
        r"takes about [\d,]+ GiB, this machine has \d", " ".join(result.stderr.split())
    )


def test_a_seed_past_64_bits_is_wrong_usage() -> None:
    assert invoke("--seed", str(2**63)).exit_code == 2


def test_a_seed_is_a_chunk() -> None:
    first, again, other = small_chunk(), small_chunk(), small_chunk(seed=1)
    assert torch.equal(first.q.view(torch.uint8), again.q.view(torch.uint8))
    assert torch.equal(first.indices, again.indices)
    assert not torch.equal(first.indices, other.indices)


def test_indices_are_causal_and_distinct() -> None:
    chunk = small_chunk(Sizes(s_q=64, s_kv=80, h_q=2, topk=32, d_qk=576))
    for t, row in enumerate(chunk.indices):
        position = 16 + t
        valid = row[row >= 0]
        assert len(valid) == min(32, position + 1)
        assert len(valid.unique()) == len(valid)
        assert int(valid.max()) <= position


def test_indices_are_the_top_scores() -> None:
    random = torch.Generator().manual_seed(3)
    block = torch.randn(5, 8, 512, generator=random)
    project = torch.randn(512, 64, generator=random)
    index_keys = torch.randn(50, 64, generator=random)
    at = torch.arange(30, 35)
    indices = torch.full((5, 7), -1, dtype=torch.int32)
    demo_chunk._select(block, at, project, index_keys, indices)
    for t in range(5):
        scores = []
        for key in range(int(at[t]) + 1):
            groups = block[t].reshape(4, 2, 512).mean(dim=1)
            scores.append(float(((groups @ project) @ index_keys[key]).clamp_min(0).sum()))
        best = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[:7]
        assert set(indices[t].tolist()) == set(best)


def test_the_selection_keeps_attention_that_chance_would_not() -> None:
    chunk = small_chunk(Sizes(s_q=16, s_kv=1024, h_q=16, topk=128, d_qk=576))
    kept = float(kept_share(chunk, [0, 7, 15]).mean())
    assert kept > 3 * 128 / 1024


def test_kept_share_of_everything_is_one() -> None:
    chunk = small_chunk(Sizes(s_q=4, s_kv=20, h_q=3, topk=20, d_qk=512))
    assert torch.allclose(kept_share(chunk, [0, 3]), torch.ones(2, 3))
    mass = mass_by_rank(chunk, 3)
    assert mass.shape == (3, 20)
    assert torch.allclose(mass[:, -1], torch.ones(3))
    assert bool((mass.diff(dim=1) >= 0).all())


def test_selection_density_counts_every_slot() -> None:
    indices = torch.tensor([[0, 1, -1], [3, 3, 2]], dtype=torch.int32)
    density = selection_density(indices, s_kv=4)
    assert density.tolist() == [[1, 1, 0, 0], [0, 0, 1, 2]]
    full = torch.arange(3000, dtype=torch.int32).expand(1000, 3000)
    assert torch.allclose(selection_density(full, s_kv=3000), torch.ones(256, 512))
