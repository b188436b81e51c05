"""The registry of shapes and the index patterns: what a name promises."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparse_mla.benchmarks import inputs, patterns, shapes
from sparse_mla.benchmarks.shapes import REGISTRY, Shape


def small(pattern: str, **changes: int) -> Shape:
    sizes = {"s_q": 40, "s_kv": 300, "h_q": 4, "d_qk": 512, "topk": 64, **changes}
    return Shape("v32", 8, **sizes, pattern=pattern)  # type: ignore[arg-type]


def drawn(shape: Shape, seed: int = 0) -> torch.Tensor:
    return patterns.draw(shape, torch.Generator().manual_seed(seed))


def test_names_say_what_is_in_them() -> None:
    shape = REGISTRY["v32-tp8-q4096-kv32k-topk"]
    assert vars(shape) == {
        "model": "v32", "tp": 8, "s_q": 4096, "s_kv": 32768, "h_q": 16, "d_qk": 576, "topk": 2048,
        "pattern": "topk",
    }  # fmt: skip
    assert all(name == shape.id for name, shape in REGISTRY.items())


@pytest.mark.parametrize(
    ("model", "heads", "d_qk", "topk"),
    [
        ("v32", [128, 64, 32, 16], 576, 2048),
        ("v4flash", [64, 32, 16, 8], 512, 512),
        ("v4pro", [128, 64, 32, 16], 512, 1024),
        ("glm5", [64, 32, 16, 8], 576, 2048),
    ],
)
def test_every_model_is_there_at_every_size(
    model: str, heads: list[int], d_qk: int, topk: int
) -> None:
    of_model = [shape for shape in REGISTRY.values() if shape.model == model]
    assert sorted({shape.h_q for shape in of_model}, reverse=True) == heads
    assert {(shape.d_qk, shape.topk) for shape in of_model} == {(d_qk, topk)}
    assert {shape.s_kv for shape in of_model} >= {4096, 32768, 131072, 524288}
    assert {shape.s_q for shape in of_model} >= {1, 16, 64, 128, 512, 2048, 8192}
    assert {shape.pattern for shape in of_model} == set(shapes.PATTERNS)
    assert all(shape.s_q <= shape.s_kv for shape in of_model)


def test_default_sets_are_in_the_registry_and_cover_what_they_should() -> None:
    for device in ("cuda", "cpu"):
        full, quick = (shapes.select(shapes.default(device, quick)) for quick in (False, True))
        assert len(quick) < len(full)
    gpu = shapes.select(shapes.DEFAULT)
    assert {shape.h_q for shape in gpu} == {8, 16, 32, 64, 128}
    assert {shape.model for shape in gpu} == {model.id for model in shapes.MODELS}
    assert {shape.pattern for shape in gpu} == set(shapes.PATTERNS)
    assert {(shape.s_q, shape.h_q) for shape in gpu} >= {(1, 16), (1, 128), (64, 16), (64, 128)}


def test_globs_pick_in_order_and_once() -> None:
    picked = shapes.select(["v32-tp8-q1-kv32k-*", "v32-*-q1-kv32k-uniform"])
    assert [shape.id for shape in picked[:4]] == [
        f"v32-tp8-q1-kv32k-{pattern}" for pattern in shapes.PATTERNS
    ]
    assert [shape.tp for shape in picked[4:]] == [1, 2, 4]
    with pytest.raises(KeyError, match="v33"):
        shapes.select(["v32-tp8-*", "v33-*"])
    assert shapes.nearest("v32-tp8-q4096-kv32k-unifrom")[0] == "v32-tp8-q4096-kv32k-uniform"


def test_work_is_counted_by_valid_slots() -> None:
    shape = replace(REGISTRY["v32-tp1-q4096-kv32k-uniform"], s_q=3, topk=5)
    assert shape.operations(valid=10) == 2 * 128 * 10 * (576 + 512)
    assert shape.gathered_bytes(valid=10) == 10 * 576


@pytest.mark.parametrize("pattern", shapes.PATTERNS)
def test_rows_are_distinct_in_range_and_as_seeded(pattern: str) -> None:
    shape = small(pattern)
    found = drawn(shape)
    assert (found.dtype, tuple(found.shape)) == (torch.int32, (40, 64))
    assert int(found.min()) >= 0  # each query stands past position 64
    assert int(found.max()) < 300
    assert all(len(set(row.tolist())) == 64 for row in found)
    assert torch.equal(found, drawn(shape))
    if pattern != "window":
        assert not torch.equal(found, drawn(shape, seed=1))


@pytest.mark.parametrize("pattern", ["window", "sink-recent", "topk"])
def test_no_query_sees_the_future(pattern: str) -> None:
    shape = small(pattern, s_q=100, s_kv=100)  # the first queries have fewer rows than slots
    found = drawn(shape)
    at = torch.arange(100)
    assert bool((found <= at[:, None]).all())
    assert torch.equal((found >= 0).sum(dim=1), (at + 1).clamp(max=64))


def test_more_slots_than_rows_are_left_empty() -> None:
    found = drawn(small("uniform", s_kv=50))
    assert torch.equal((found >= 0).sum(dim=1), torch.full((40,), 50))


def test_a_window_holds_the_most_recent_rows() -> None:
    found = drawn(small("window"))
    for t in (0, 17, 39):
        at = 300 - 40 + t
        assert sorted(found[t].tolist()) == list(range(at - 63, at + 1))
    assert patterns.describe(found, 300)["shared_with_neighbour"] == pytest.approx(63 / 64)


def test_sinks_and_recent_rows_are_always_selected() -> None:
    found = drawn(small("sink-recent"))
    for t in (0, 39):
        at = 300 - 40 + t
        assert set(found[t].tolist()) >= {*range(4), *range(at - 31, at + 1)}
    between = [set(row.tolist()) - set(range(4)) for row in found[:2]]
    assert between[0] != between[1]


def test_the_indexers_selection_is_its_scores_top_k() -> None:
    shape = small("topk", s_q=20)
    generator = torch.Generator().manual_seed(3)
    indexer = patterns._Indexer(shape, generator)
    scores = indexer.scores(torch.arange(20) + 280)
    found = drawn(shape, seed=3)
    for t in range(20):
        chosen = torch.zeros(300, dtype=torch.bool)
        chosen[found[t].long()] = True
        assert float(scores[t][chosen].min()) >= float(scores[t][~chosen].max())
    # Topics last, so neighbours select alike: far more than the 64 of 280 that chance would give.
    assert patterns.describe(drawn(small("topk")), 300)["shared_with_neighbour"] > 0.4


def test_a_selection_is_described() -> None:
    indices = torch.tensor([[0, 1, 2], [1, 2, -1], [9, 9, 9]], dtype=torch.int32)
    assert patterns.describe(indices, 10) == {
        "valid_slots": 8, "distinct_rows": 4, "shared_with_neighbour": pytest.approx(0.5),
    }  # fmt: skip


def test_inputs_have_logits_of_standard_deviation_1() -> None:
    shape = small("uniform", s_kv=2000, topk=1000)
    made = inputs.make(shape, torch.device("cpu"))
    given = made.sets[0]
    assert given.q_scale is not None
    assert given.kv_scale is not None
    q, kv = given.q.float() * given.q_scale, given.kv[:, 0].float() * given.kv_scale
    logits = q[0] @ kv.T * given.sm_scale
    assert 0.9 < float(logits.std()) < 1.1
    assert made.operations == 2 * 4 * 40 * 1000 * (512 + 512)


def test_input_sets_rotate_until_twice_the_l2_lies_between() -> None:
    shape = small("uniform")
    one = inputs.touched_by_a_call(shape)
    assert one == 300 * 512 + 40 * (4 * (512 + 1024 + 8) + 4 * 64)
    assert inputs.sets_for(shape, l2_bytes=2 * one) == 4
    assert inputs.sets_for(shape, l2_bytes=one // 4) == 2
    assert inputs.sets_for(shape, l2_bytes=100 * one) == inputs.MAX_SETS
    made = inputs.make(shape, torch.device("cpu"), sets=3)
    assert len({bytes(each.q.view(torch.uint8).numpy()) for each in made.sets}) == 3


def test_the_shapes_that_the_texts_name_are_there_and_not_too_many() -> None:
    root = Path(__file__).parents[1]
    files = [root / "README.md", *root.glob("docs/**/*.md"), root / "sparse_mla/cli/bench.py"]
    named = [text for file in files for text in re.findall(r"--shapes '([^']+)'", file.read_text())]
    assert len(named) >= 3
    for text in named:
        assert 1 <= len(shapes.select(text.split(","))) <= 50, text
