"""The README's programs run and mean what the text beside them says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sparse_mla

README = (Path(__file__).parents[1] / "README.md").read_text()


PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the README's programs leave behind, run one after the other as a reader would."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    assert len(PROGRAMS) == 5
    for program in PROGRAMS:
        exec(compile(program, "README.md", "exec"), names)
    return names


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    error = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)
    return error.max().item()


def test_four_lines_of_torch_mean_the_operator():
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(PROGRAMS[0], names)
    q8, q_scale = sparse_mla.quantize_fp8(names["q"], per="token-head")
    names["q"] = (
        q8.float() * q_scale[..., None]
    )  # what the operator makes of q, so that all else shows
    exec(PROGRAMS[1], names)
    assert worst_row(names["out"], names["expected_out"]) < 0.02  # weights and out in bfloat16
    assert (names["lse"] - names["expected_lse"]).abs().max() < 1e-2


def test_merged_halves_are_the_whole(names: dict[str, Any]):
    assert worst_row(names["merged_out"], names["out"]) < 0.02  # each half was rounded to bfloat16
    # Halves and whole are each within what the backend states: 4e-3 + 2e-3 |lse|.
    assert torch.allclose(names["merged_lse"], names["lse"], rtol=4e-3, atol=8e-3)


def test_cached_rows_are_ready_for_the_operators(names: dict[str, Any]):
    kv, kv_scale = names["kv"], names["kv_scale"]
    assert kv.shape == (1000, 576)
    out = sparse_mla.sparse_mla_prefill(
        names["q"][:1], kv, torch.zeros(1, 1, dtype=torch.int32), kv_scale=kv_scale
    )
    assert worst_row(out, (kv[:1, :512].float() * kv_scale).expand(16, 512)) < 0.01


def test_the_error_shown_is_the_error_raised(names: dict[str, Any]):
    kv = torch.zeros(4096, 8, 576).to(torch.float8_e4m3fn)
    with pytest.raises(sparse_mla.ContractError) as caught:
        sparse_mla.sparse_mla_q8kv8_prefill_fwd(
            names["q8"], kv, names["indices"][:, None], 0.07, names["q_scale"], names["q_scale"]
        )
    shown = "ContractError: " + str(caught.value)
    assert shown in re.sub(r"^    ", "", README, flags=re.MULTILINE)


def test_what_is_linked_is_there():
    links = re.findall(r"\]\(([^)]+)\)", README)
    here = [link for link in links if "://" not in link]
    assert "docs/error-page.png" in here
    assert not [link for link in here if not (Path(__file__).parents[1] / link).is_file()]


def test_every_backend_has_a_row():
    from sparse_mla import dispatch

    listed = README.split("## Backends")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", listed, re.MULTILINE)) == set(dispatch.BACKENDS)
