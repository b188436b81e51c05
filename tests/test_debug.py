"""``SPARSE_MLA_DEBUG=1``: the data-dependent checks, and that they are off otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparse_mla import ContractError, checks, debug, sparse_mla_prefill
from sparse_mla import sparse_mla_q8kv8_prefill_fwd as strict

E4M3 = torch.float8_e4m3fn
S_Q, S_KV, TOPK = 3, 10, 128

Call = dict[str, Any]


def good_call() -> Call:
    """Padding, duplicates, and stale slots past a length: nothing here is wrong."""
    indices = torch.arange(TOPK, dtype=torch.int32).remainder(S_KV).repeat(S_Q, 1, 1)
    indices[0, 0, 5:9] = -1
    indices[1, 0, 64:] = 999
    return {
        "q": torch.ones(S_Q, 64, 576).to(E4M3),
        "kv": torch.ones(S_KV, 1, 576).to(E4M3),
        "indices": indices,
        "sm_scale": 0.01,
        "q_scale": torch.ones(1),
        "kv_scale": torch.ones(1),
        "attn_sink": torch.tensor([-math.inf, math.inf] * 32),
        "topk_length": torch.tensor([TOPK, 64, 0], dtype=torch.int32),
        "out": torch.full((S_Q, 64, 512), 7, dtype=torch.bfloat16),
        "max_logits": torch.full((S_Q, 64), 7.0),
        "lse": torch.full((S_Q, 64), 7.0),
    }


def nan_at(x: torch.Tensor, *where: int) -> None:
    x.view(torch.uint8)[where] = 0xFF


FAULTS: dict[str, tuple[Callable[[Call], Any], str, dict[str, Any]]] = {
    "too large": (
        lambda c: c["indices"][1, 0, 3:5].fill_(S_KV),
        "index-out-of-range",
        {"query": 1, "slot": 3, "index": S_KV, "s_kv": S_KV, "count": 2},
    ),
    "negative": (
        lambda c: c["indices"][0, 0, 127:].fill_(-2),
        "index-out-of-range",
        {"query": 0, "slot": 127, "index": -2, "s_kv": S_KV, "count": 1},
    ),
    "a float's bits": (
        lambda c: c["indices"][0, 0, 0:1].fill_(2143289344),
        "index-out-of-range",
        {"query": 0, "slot": 0, "index": 2143289344, "s_kv": S_KV, "count": 1},
    ),
    "length too large": (
        lambda c: c["topk_length"].fill_(TOPK + 1),
        "topk-length-out-of-range",
        {"query": 0, "length": TOPK + 1, "topk": TOPK, "count": 3},
    ),
    "length negative": (
        lambda c: c["topk_length"][2:].fill_(-1),
        "topk-length-out-of-range",
        {"query": 2, "length": -1, "topk": TOPK, "count": 1},
    ),
    "q_scale zero": (
        lambda c: c["q_scale"].zero_(),
        "scale-data-invalid",
        {"name": "q_scale", "value": 0.0, "count": 1},
    ),
    "kv_scale inf": (
        lambda c: c["kv_scale"].fill_(math.inf),
        "scale-data-invalid",
        {"name": "kv_scale", "value": math.inf, "count": 1},
    ),
    "NaN in q": (
        lambda c: nan_at(c["q"], 2, 63, 575),
        "nan-in-input",
        {"name": "q", "row": 2, "count": 1},
    ),
    "NaN in a selected row": (
        lambda c: nan_at(c["kv"], 9, 0, 575),
        "nan-in-input",
        {"name": "kv", "row": 9, "count": 1},
    ),
    "NaN in the sink": (
        lambda c: c["attn_sink"][7:9].fill_(math.nan),
        "nan-in-input",
        {"name": "attn_sink", "row": 7, "count": 2},
    ),
}


@pytest.fixture
def debug_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_MLA_DEBUG", "1")


@pytest.mark.usefixtures("debug_on")
class TestOn:
    def test_a_good_call_passes(self) -> None:
        strict(**good_call())

    @pytest.mark.parametrize("fault", FAULTS)
    def test_each_fault_is_named_before_anything_is_written(self, fault: str) -> None:
        break_it, id, context = FAULTS[fault]
        call = good_call()
        break_it(call)
        with pytest.raises(ContractError) as caught:
            strict(**call)
        assert caught.value.id == id
        assert caught.value.context == context
        assert all(bool((call[name] == 7).all()) for name in ("out", "max_logits", "lse"))

    def test_nan_in_a_row_nobody_selects_is_fine(self) -> None:
        call = good_call()
        call["indices"].clamp_(max=8)
        nan_at(call["kv"], 9, 0, 0)
        strict(**call)

    def test_the_general_operator_too(self) -> None:
        q, kv = torch.ones(2, 3, 512), torch.ones(4, 512)
        indices = torch.tensor([[0, 3], [4, -1]], dtype=torch.int32)
        with pytest.raises(ContractError) as caught:
            sparse_mla_prefill(q, kv, indices)
        assert caught.value.context == {"query": 1, "slot": 0, "index": 4, "s_kv": 4, "count": 1}
        kv[3, 511] = math.nan
        with pytest.raises(ContractError, match="kv"):
            sparse_mla_prefill(q, kv, indices.clamp(max=3))

    def test_scales_per_token(self) -> None:
        scale = torch.tensor([1.0, -1.0, math.nan, 2.0])
        indices = torch.zeros(2, 2, dtype=torch.int32)
        with pytest.raises(ContractError) as caught:
            sparse_mla_prefill(
                torch.ones(2, 3, 512), torch.ones(4, 512).to(E4M3), indices, kv_scale=scale
            )
        assert caught.value.context == {"name": "kv_scale", "value": -1.0, "count": 2}

    def test_the_contract_comes_first(self) -> None:
        call = good_call() | {"d_v": 64}
        call["q_scale"].zero_()
        with pytest.raises(ContractError) as caught:
            strict(**call)
        assert caught.value.id == "d-v-unsupported"

    def test_no_queries_and_no_cache(self) -> None:
        sparse_mla_prefill(
            torch.ones(0, 3, 512), torch.ones(0, 512), torch.ones(0, 2, dtype=torch.int32)
        )
        indices = torch.full((1, 2), -1, dtype=torch.int32)
        sparse_mla_prefill(torch.ones(1, 3, 512), torch.ones(0, 512), indices)

    def test_through_the_custom_op(self) -> None:
        call = good_call()
        call["kv_scale"].zero_()
        names = ("out", "max_logits", "lse")
        arguments = [call["q"], call["kv"], call["indices"], 0.01, call["q_scale"]]
        arguments += [call["kv_scale"], 512, None, call["topk_length"]]
        with pytest.raises(ContractError, match="kv_scale"):
            torch.ops.sparse_mla.q8kv8_prefill_out(*arguments, *(call[name] for name in names))


@pytest.mark.parametrize("value", [None, "", "0"])
@pytest.mark.parametrize("fault", FAULTS)
def test_off_the_data_is_not_looked_at(
    fault: str, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("SPARSE_MLA_DEBUG", value)
    call = good_call()
    FAULTS[fault][0](call)
    strict(**call)
    assert not bool((call["out"] == 7).any())


def test_everything_is_listed() -> None:
    call = good_call()
    for fault in ("too large", "length negative", "kv_scale inf", "NaN in q", "NaN in the sink"):
        FAULTS[fault][0](call)
    found = [violation.id for violation in debug.data_violations(checks.check_q8kv8(**call))]
    assert found == [
        "topk-length-out-of-range",
        "index-out-of-range",
        "scale-data-invalid",
        "nan-in-input",
        "nan-in-input",
    ]


def test_rows_are_looked_at_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "_CHUNK_ELEMENTS", 600)
    kv = torch.zeros(7, 512)
    kv[[2, 6], 100] = math.nan
    problem = checks.check_prefill(
        torch.zeros(1, 1, 512), kv, torch.arange(7, dtype=torch.int32)[None]
    )
    (violation,) = debug.data_violations(problem)
    assert violation.context == {"name": "kv", "row": 2, "count": 2}


class TestDump:
    """``SPARSE_MLA_DUMP``: the operators hand their inputs over before anything else happens."""

    def test_a_refused_call_leaves_its_inputs(
        self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from sparse_mla.callfile import load_call

        monkeypatch.setenv("SPARSE_MLA_DUMP", str(tmp_path))
        call = good_call() | {"sm_scale": -1.0}
        with pytest.raises(ContractError):
            strict(**call)
        (path,) = tmp_path.iterdir()
        dumped = load_call(path)
        assert dumped.operator == "sparse_mla_q8kv8_prefill_fwd"
        assert dumped.arguments["sm_scale"] == -1.0
        for name in ("q", "kv", "indices", "q_scale", "kv_scale", "attn_sink", "topk_length"):
            got, given = dumped.tensors[name], call[name]
            assert torch.equal(got.view(torch.uint8), given.view(torch.uint8)), name

    def test_a_call_whose_data_is_wrong_leaves_its_inputs(
        self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPARSE_MLA_DUMP", str(tmp_path))
        monkeypatch.setenv("SPARSE_MLA_DEBUG", "1")
        with pytest.raises(ContractError):
            sparse_mla_prefill(
                torch.ones(1, 3, 512), torch.ones(4, 512), torch.full((1, 2), 9, dtype=torch.int32)
            )
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_call_that_returns_leaves_nothing(
        self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        want = strict(**good_call())
        monkeypatch.setenv("SPARSE_MLA_DUMP", str(tmp_path))
        got = strict(**good_call())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert list(tmp_path.iterdir()) == []
