"""The accuracy benchmark: what is compared with what, and which kernels it is about."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparse_mla.backends import cpu, sm90, sm90_plan
from sparse_mla.benchmarks import accuracy

CPU = torch.device("cpu")
H200_MULTIPROCESSORS = 132


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``sm90`` plans as on an H200 and computes as ``cpu``; the problems that it was given."""
    ran: list[Any] = []
    monkeypatch.setattr(sm90, "_multiprocessors", lambda device: H200_MULTIPROCESSORS)
    monkeypatch.setattr(sm90, "refusal", lambda problem: None)
    monkeypatch.setattr(sm90, "run", lambda problem: (ran.append(problem), cpu.run(problem)))
    return ran


def test_64_heads_run_on_the_kernel_that_the_headline_is_about(hopper: list[Any]) -> None:
    """And some of them on a kernel for few, each with its errors, on the same sampled queries."""
    found = accuracy._kind(accuracy.KINDS["sigma 1"], CPU, ["sm90"], [3, 60])
    assert [problem.q.shape for problem in hopper] == [(132, 64, 576), (132, 16, 576)]
    assert all(problem.q.is_contiguous() for problem in hopper)
    wide, few = found["methods"]["sm90"], found["methods"]["sm90, 16 heads"]
    assert wide["kernels"] == ["prefill-h64-d576"]
    assert few["kernels"] == ["prefill-h16-d576"]
    assert (found["rows"], few["rows"]) == (2 * 64, 2 * 16)
    assert all(0 < entry["worst"] < 0.012 for entry in (wide, few))  # what `cpu` states


def test_what_is_wrong_in_a_sampled_query_shows(
    hopper: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_wrong(problem: Any) -> None:
        cpu.run(problem)
        problem.out[60, 5] = 0

    monkeypatch.setattr(sm90, "run", one_wrong)
    found = accuracy._kind(accuracy.KINDS["sigma 1"], CPU, ["sm90"], [3, 60])["methods"]
    assert found["sm90"]["worst"] == found["sm90, 16 heads"]["worst"] == 1.0


def test_scales_of_tokens_run_on_the_kernel_for_64_heads_too(hopper: list[Any]) -> None:
    found = accuracy._scales(CPU, ["sm90"], [7], 1)
    assert found["rows"] == 64
    assert {
        name: entry["kernels"] for name, entry in found["methods"].items() if "kernels" in entry
    } == {
        "sm90, kv_scale per tensor": ["prefill-h64-d576"],
        "sm90, kv_scale per token": ["prefill-h64-d576-kv-scales"],
    }
    assert [problem.s_q for problem in hopper] == [132, 132]


@pytest.mark.parametrize("kind", accuracy.KINDS)
@pytest.mark.parametrize("multiprocessors", [H200_MULTIPROCESSORS, 114])  # H200; H100 with PCIe
def test_every_kind_is_large_enough(kind: str, multiprocessors: int) -> None:
    case = accuracy.KINDS[kind]
    (part,) = sm90_plan.plan(case.s_q, case.h_q, case.topk, multiprocessors)
    assert (part.heads_per_item, part.ctas_per_item) == (64, 1)
    (part,) = sm90_plan.plan(case.s_q, accuracy.FEW_HEADS, case.topk, multiprocessors)
    assert part.heads_per_item == 16


def test_sampled_queries_are_spread() -> None:
    assert accuracy.sampled(8) == [0, 16, 33, 49, 66, 82, 99, 115]
    assert accuracy.sampled(1) == [0]


def test_errors_of_rows() -> None:
    want = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])
    got = torch.tensor([[3.0, 4.5], [0.0, 2.0], [0.8, 0.0]])
    found = accuracy.errors(got, want)
    assert found == {"worst": pytest.approx(0.2), "median": pytest.approx(0.1)}
    assert "NaN" in accuracy.errors(got * torch.nan, want)["reason"]


def test_accuracy_of_every_kind_of_input() -> None:
    found = accuracy.measure(CPU, queries=1)
    by_kind = {kind["kind"]: kind["methods"] for kind in found["kinds"]}
    assert list(by_kind) == list(accuracy.KINDS)
    scaled, unscaled = accuracy.EMULATED
    for kind, methods in by_kind.items():
        assert methods["cpu"]["worst"] < 0.012, kind  # the backend's stated limit
    tail = by_kind["0 and 2,047 at -7, V = 1"]
    assert 0.64 < tail[unscaled]["worst"] < 0.66  # e4m3 flushes most of e**-7
    assert tail[scaled]["worst"] < 0.005
    worst = found["scales"][-1]["methods"]
    for name in ("reference", "cpu"):  # one scale loses what outliers leave no room for
        per_tensor, per_token = (
            worst[f"{name}, kv_scale per {per}"]["median"] for per in ("tensor", "token")
        )
        assert per_tensor > 2 * per_token


def test_a_backend_that_refuses_is_reported_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "refusal", lambda problem: "one scale for all of kv only")
    found = accuracy._scales(CPU, ["cpu"], [0], 1)
    assert found["methods"]["cpu, kv_scale per token"] == {"reason": "one scale for all of kv only"}


def test_outliers_are_never_selected() -> None:
    _, kv, indices, _ = accuracy.outliers(1000.0, 2, s_kv=640, h_q=1, topk=256)
    large = kv.abs().amax(dim=1) > 100
    assert int(large.sum()) == 10
    assert not large[indices.long()].any()
