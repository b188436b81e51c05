"""The captured call in ``examples/``: a sound call, a selection by a model, results that hold.

What is said of the selection is checked against the text that the model read.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparse_mla import checks, dispatch
from sparse_mla.callfile import STRICT, Call, load_call
from sparse_mla.testing import EXACT, Inputs, Tolerance, compare, make_problem

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
FILE = EXAMPLES / "deepseek_v32_call.safetensors"
SCRIPT = EXAMPLES / "capture_deepseek_v32.py"
TEXT = EXAMPLES / "alice_chapter_1.txt"
TOPK = 2048

CPU = Tolerance(out=0.005, absolute=1e-3, relative=2**-8)
"""``out`` and probabilities rounded to bfloat16, max_logits taken from a bfloat16 product."""


@pytest.fixture(scope="module")
def call() -> Call:
    return load_call(FILE)


@pytest.fixture(scope="module")
def inputs(call: Call) -> Inputs:
    return inputs_of(call)


def inputs_of(call: Call) -> Inputs:
    tensors = {name: call.tensors[name] for name in ("q", "kv", "indices", "q_scale", "kv_scale")}
    return Inputs(**tensors, sm_scale=call.arguments["sm_scale"])


def positions(call: Call) -> list[int]:
    return [int(text) for text in call.metadata["query_positions"].split()]


def selected(call: Call) -> list[torch.Tensor]:
    """The valid indices of each query, in the indexer's order."""
    return [row[row >= 0] for row in call.tensors["indices"][:, 0]]


def words(call: Call) -> list[str]:
    """The passage as the model read it, one piece a KV row."""
    text = TEXT.read_text(encoding="utf-8")
    return re.findall(call.metadata["token_pattern"], text, re.DOTALL)


def test_file_is_at_most_4_megabytes() -> None:
    assert FILE.stat().st_size <= 4_000_000


def test_call_has_the_real_attention_geometry(call: Call) -> None:
    assert call.operator == STRICT
    assert {name: tuple(tensor.shape) for name, tensor in call.tensors.items()} == {
        "q": (6, 128, 576),
        "kv": (3356, 1, 576),
        "indices": (6, 1, TOPK),
        "q_scale": (1,),
        "kv_scale": (1,),
        "out": (6, 128, 512),
        "max_logits": (6, 128),
        "lse": (6, 128),
    }
    # 1/sqrt(128 + 64), times the square of yarn's 0.1 ln(40) + 1, as DeepSeek-V3.2 has it.
    assert call.arguments == {"sm_scale": pytest.approx(0.13523378, abs=1e-8), "d_v": 512}


def test_call_meets_the_contract_without_one_violation(call: Call) -> None:
    assert list(checks.q8kv8_violations(**call.keywords())) == []


def test_metadata_says_where_the_call_comes_from(call: Call) -> None:
    text = call.metadata
    assert set(text) == {
        "model",
        "transformers",
        "torch",
        "layer",
        "seed",
        "initializer_range",
        "source",
        "tokenizer",
        "token_pattern",
        "vocab_size",
        "query_positions",
        "created_by",
    }
    assert "DeepseekV32Model" in text["model"]
    assert "random weights" in text["model"]
    assert "Lewis Carroll" in text["source"]
    assert "public domain" in text["source"]
    assert re.fullmatch(r"5\.\d+\.\d+", text["transformers"])
    assert text["created_by"].startswith("python examples/capture_deepseek_v32.py")
    assert SCRIPT.is_file()
    assert "/" not in text["created_by"].replace("examples/", "")


def test_every_kv_row_is_a_piece_of_the_passage(call: Call) -> None:
    pieces = words(call)
    assert "".join(pieces) == TEXT.read_text(encoding="utf-8")
    assert len(pieces) == call.tensors["kv"].shape[0]
    assert len(set(pieces)) == int(call.metadata["vocab_size"])


def test_queries_are_two_early_tokens_and_the_last_four(call: Call) -> None:
    assert positions(call) == [511, 1499, 3352, 3353, 3354, 3355]


def test_values_use_the_range_of_fp8_and_hold_no_nan(inputs: Inputs) -> None:
    for tensor in (inputs.q, inputs.kv):
        real = tensor.float()
        assert real.isfinite().all()
        assert (
            real.abs().max() == 448
        )  # the scale is per tensor: its largest value lands on the end


def test_latent_rows_are_what_kv_a_layernorm_gives(inputs: Inputs) -> None:
    latent = inputs.kv[:, 0, :512].float() * inputs.kv_scale
    mean_square = latent.square().mean(dim=-1)
    assert torch.allclose(mean_square, torch.ones(3356), atol=0.02)


def test_selection_is_causal_distinct_and_as_long_as_it_can_be(call: Call) -> None:
    for position, row in zip(positions(call), selected(call), strict=True):
        assert row.numel() == min(position + 1, TOPK)
        assert row.max() <= position
        assert row.unique().numel() == row.numel()


def test_masked_slots_are_minus_one_and_follow_the_valid_ones(call: Call) -> None:
    rows = call.tensors["indices"][:, 0]
    assert [int((row == -1).sum()) for row in rows] == [TOPK - 512, TOPK - 1500, 0, 0, 0, 0]
    for row, valid in zip(rows, selected(call), strict=True):
        assert (row[valid.numel() :] == -1).all()


def test_selection_is_neither_sorted_nor_the_most_recent_keys(call: Call) -> None:
    late = list(zip(positions(call), selected(call), strict=True))[2:]
    for position, row in late:
        assert not torch.equal(row, row.sort().values)
        recent = int((row > position - TOPK).sum())
        assert 0.4 * TOPK < recent < 0.8 * TOPK


def test_selection_follows_the_words_as_no_random_generator_would(call: Call) -> None:
    pieces = words(call)
    generator = torch.Generator().manual_seed(0)
    for position, row in list(zip(positions(call), selected(call), strict=True))[2:]:
        seen = pieces[: position + 1]
        random = torch.randperm(position + 1, generator=generator)[:TOPK]
        assert by_word(seen, row.tolist()) > 5
        assert by_word(seen, random.tolist()) < 2
        assert by_word(seen, range(position + 1 - TOPK, position + 1)) < 3


def by_word(pieces: list[str], chosen: Iterable[int]) -> float:
    """How far the share of each frequent piece that was chosen is from the share of all pieces.

    Chi squared over the number of frequent pieces: about 1 when the choice ignores the words.
    """
    picked = Counter(pieces[i] for i in chosen)
    share = picked.total() / len(pieces)
    frequent = {piece: n for piece, n in Counter(pieces).items() if n >= 10}
    deviations = [
        (picked[piece] - n * share) ** 2 / (n * share * (1 - share))
        for piece, n in frequent.items()
    ]
    return sum(deviations) / len(deviations)


def test_stored_results_are_the_reference_s(call: Call, inputs: Inputs) -> None:
    expected = call.expected
    stored = make_problem(inputs, (expected["out"], expected["max_logits"], expected["lse"]))
    compare(stored, EXACT)


def test_cpu_backend_agrees_with_the_reference(inputs: Inputs) -> None:
    problem = make_problem(inputs)
    assert dispatch.run(problem) == "cpu"
    compare(problem, CPU)


def test_replaying_the_call_gives_the_stored_results(call: Call) -> None:
    out, max_logits, lse = call.run()
    assert dispatch.last_backend() == "cpu"
    expected = call.expected
    difference = (out.double() - expected["out"].double()).norm(dim=-1)
    assert (difference / expected["out"].double().norm(dim=-1)).max() < CPU.out
    for got, want in ((max_logits, expected["max_logits"]), (lse, expected["lse"])):
        torch.testing.assert_close(got, want, rtol=CPU.relative, atol=CPU.absolute)


def test_attention_is_not_flat(call: Call) -> None:
    """lse - max_logits is ln(keys) for a flat row; here some keys matter much more than others."""
    excess = call.tensors["lse"] - call.tensors["max_logits"]
    keys = torch.tensor([row.numel() for row in selected(call)]).log()[:, None]
    assert (excess < keys - 1).all()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The capture script as a module, where transformers has the model class."""
    pytest.importorskip(
        "transformers.models.deepseek_v32", reason="transformers >= 5.17 is missing"
    )
    spec = importlib.util.spec_from_file_location("capture_deepseek_v32", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_capturing_again_gives_the_same_call(
    script: ModuleType, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again_file = tmp_path / "again.safetensors"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--output", str(again_file)])
    script.main()
    again = load_call(again_file)

    # Another CPU may add in another order: a value may take the next e4m3 step, a key at the
    # border of the selection may change.
    for name in ("q", "kv"):
        scale = call.tensors[f"{name}_scale"]
        torch.testing.assert_close(again.tensors[f"{name}_scale"], scale, rtol=1e-4, atol=0)
        got, want = again.tensors[name].float(), call.tensors[name].float()
        torch.testing.assert_close(got, want, rtol=0.126, atol=2**-8)
        assert (got == want).float().mean() > 0.99
    for got, want in zip(selected(again), selected(call), strict=True):
        assert len(set(got.tolist()) & set(want.tolist())) >= 0.99 * want.numel()
    torch.testing.assert_close(again.tensors["lse"], call.tensors["lse"], rtol=0, atol=0.02)
