"""The guides of docs/guides: every program runs, every command does what the text says."""

from __future__ import annotations

import re
import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sparse_mla
from sparse_mla.cli import build

GUIDES = Path(__file__).parents[1] / "docs" / "guides"


def text_of(guide: str) -> str:
    return (GUIDES / f"{guide}.md").read_text(encoding="utf-8")


def run_programs(guide: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a guide's programs leave behind, run one after the other as a reader would."""
    names = {} if names is None else names
    programs = re.findall(r"```python\n(.*?)```", text_of(guide), re.DOTALL)
    assert programs
    for program in programs:
        exec(compile(program, f"{guide}.md", "exec"), names)
    return names


def commands_of(guide: str) -> list[list[str]]:
    return [
        shlex.split(line, comments=True)[1:]
        for line in re.findall(r"^    (sparse-mla .*)$", text_of(guide), re.MULTILINE)
    ]


def test_every_guide_is_tested() -> None:
    assert {path.stem for path in GUIDES.glob("*.md")} == {"transformers", "sglang", "capture"}


def test_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [transformers]")
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this transformers has no deepseek_v32")
    names = run_programs("transformers")
    logits, expected = names["logits"], names["expected"]
    assert (logits - expected).abs().max() < 5e-6 * expected.abs().max()
    assert torch.equal(names["tokens"], names["same"])
    error = (names["logits_fp8"] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 0 < error.median() < 0.1


def test_sglang(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def sparse_mla_q8kv8_prefill_fwd(
        q, kv, indices, sm_scale, q_scale, kv_scale, d_v=512, attn_sink=None, topk_length=None
    ): ...  # fmt: skip

    text = text_of("sglang")
    [home] = re.findall(r"`(sglang\.kernels[\w.]+)`", text)
    parts = home.split(".")
    for n in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:n]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.sparse_mla_q8kv8_prefill_fwd = sparse_mla_q8kv8_prefill_fwd
    done = run_programs("sglang")["done"]
    assert done.module == home
    assert capsys.readouterr().out.startswith(
        f"sparse_mla runs sparse_mla_q8kv8_prefill_fwd of {home} (sglang "
    )
    assert module.sparse_mla_q8kv8_prefill_fwd is sparse_mla_q8kv8_prefill_fwd  # put back


def test_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_programs("capture")
    want = sparse_mla.sparse_mla_q8kv8_prefill_fwd(
        *(names[key] for key in ("q", "kv", "indices")), 0.1, names["q_scale"], names["kv_scale"]
    )
    assert torch.equal(names["out"], want[0])
    assert "requires h_kv=1, got 8" in capsys.readouterr().out

    (tmp_path / "fine.safetensors").symlink_to(names["fine"])
    (tmp_path / "failing.safetensors").symlink_to(names["failing"])
    results = {}
    for command in commands_of("capture"):
        if "--plot" in command:
            pytest.importorskip("matplotlib", reason="needs the extra [plot]")
        results[command[0]] = CliRunner().invoke(build(), command)
    assert set(results) == {"check", "run", "inspect"}
    assert results["check"].exit_code == 1
    assert "\n1. sparse_mla_q8kv8_prefill_fwd requires h_kv=1, got 8\n" in results["check"].output
    assert results["run"].exit_code == 0
    assert "agrees with the reference" in results["run"].output
    assert results["inspect"].exit_code == 0
    assert (tmp_path / "fine.png").stat().st_size > 10_000
    for line in re.findall(r"^    ((?:slots|overlap|logit|kv in) .*)$", text_of("capture"), re.M):
        pattern = re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*")
        shown = "\n".join(" ".join(row.split()) for row in results["inspect"].output.splitlines())
        assert re.search(pattern, shown), (line, shown)
