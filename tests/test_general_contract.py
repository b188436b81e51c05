"""The contract of ``sparse_mla_prefill``: each message, and that nothing else is refused."""

# ruff: noqa: E501 - the table of violations has one a line

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparse_mla import ContractError, checks, sparse_mla_prefill

E4M3 = torch.float8_e4m3fn
S_Q, S_KV, H_Q, D_QK, TOPK = 3, 20, 5, 576, 7

Call = dict[str, Any]


def good_call(**changes: Any) -> Call:
    """FP8 q and kv with every optional argument given."""
    call: Call = {
        "q": torch.ones(S_Q, H_Q, D_QK).to(E4M3),
        "kv": torch.ones(S_KV, D_QK).to(E4M3),
        "indices": torch.zeros(S_Q, TOPK, dtype=torch.int32),
        "sm_scale": 0.1,
        "q_scale": torch.ones(S_Q, H_Q),
        "kv_scale": torch.ones(S_KV),
        "attn_sink": torch.zeros(H_Q),
        "topk_length": torch.full((S_Q,), TOPK, dtype=torch.int32),
        "out": torch.full((S_Q, H_Q, 512), 7, dtype=torch.bfloat16),
        "max_logits": torch.full((S_Q, H_Q), 7.0),
        "lse": torch.full((S_Q, H_Q), 7.0),
    }
    return call | changes


def unquantised(**changes: Any) -> Call:
    floats = {"q": torch.ones(S_Q, H_Q, D_QK), "kv": torch.ones(S_KV, D_QK)}
    return good_call(**floats, q_scale=None, kv_scale=None) | changes


def meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def gappy(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(*x.shape, 2, dtype=x.dtype)[..., 0]


def put(name: str, change: Callable[[Any], Any]) -> Callable[[Call], None]:
    def violate(call: Call) -> None:
        call[name] = change(call[name])

    return violate


def no_heads(call: Call) -> None:
    call["q"], call["q_scale"] = call["q"][:, :0], torch.ones(1)
    call["attn_sink"] = call["attn_sink"][:0]
    for name in ("out", "max_logits", "lse"):
        call[name] = call[name][:, :0].contiguous()


def narrow(call: Call) -> None:
    for name in ("q", "kv"):
        call[name] = torch.ones(*call[name].shape[:-1], 192).to(E4M3)


# In the order of the checks: (id, what breaks, the first line).
VIOLATIONS: list[tuple[str, Callable[[Call], None], str]] = [
    ("not-a-tensor", put("q", lambda _: 1), "q must be a torch.Tensor, got int"),
    ("not-a-tensor", put("kv", lambda _: None), "kv must be a torch.Tensor, got NoneType"),
    ("not-a-tensor", put("indices", lambda _: [0]), "indices must be a torch.Tensor, got list"),
    ("not-strided", put("indices", lambda i: i.to_sparse()), "indices must be a strided tensor, got layout sparse_coo"),
    ("q-ndim", put("q", lambda q: q[:, 0]), "q must have shape (s_q, h_q, d_qk), got (3, 576)"),
    ("kv-shape", put("kv", lambda kv: kv[0]), "kv must have shape (s_kv, d_qk) or (s_kv, 1, d_qk), got (576,)"),
    ("kv-shape", put("kv", lambda kv: kv[:, None].expand(-1, 8, -1)), "kv must have shape (s_kv, d_qk) or (s_kv, 1, d_qk), got (20, 8, 576)"),
    ("kv-shape", put("kv", lambda kv: kv[None, :, None]), "kv must have shape (s_kv, d_qk) or (s_kv, 1, d_qk), got (1, 20, 1, 576)"),
    ("device-mismatch", put("kv", meta), "kv must be on q's device cpu, got meta"),
    ("device-mismatch", put("indices", meta), "indices must be on q's device cpu, got meta"),
    ("q-dtype-unsupported", put("q", lambda q: q.view(torch.float8_e5m2)), "q must be float8_e4m3fn, bfloat16, float16 or float32, got torch.float8_e5m2"),
    ("q-dtype-unsupported", put("q", lambda q: q.double()), "q must be float8_e4m3fn, bfloat16, float16 or float32, got torch.float64"),
    ("kv-dtype-unsupported", put("kv", lambda kv: kv.view(torch.float8_e4m3fnuz)), "kv must be float8_e4m3fn, bfloat16, float16 or float32, got torch.float8_e4m3fnuz"),
    ("kv-dtype-unsupported", put("kv", lambda kv: kv.view(torch.uint8)), "kv must be float8_e4m3fn, bfloat16, float16 or float32, got torch.uint8"),
    ("unquantised-kv-with-fp8-q", put("kv", lambda kv: kv.bfloat16()), "q must be of a float type when kv is torch.bfloat16, got torch.float8_e4m3fn"),
    ("last-dim-not-dense", put("q", gappy), "q must be dense in its last dimension, got strides (5760, 1152, 2)"),
    ("last-dim-not-dense", put("kv", lambda kv: kv.mT.contiguous().mT), "kv must be dense in its last dimension, got strides (1, 20)"),
    ("last-dim-not-dense", put("indices", gappy), "indices must be dense in its last dimension, got strides (14, 2)"),
    ("d-qk-mismatch", put("kv", lambda kv: kv[:, :512]), "kv d_qk must match q d_qk=576, got 512"),
    ("no-heads", no_heads, "q must have at least one head, got shape (3, 0, 576)"),
    ("d-qk-unsupported-general", narrow, "sparse_mla_prefill supports d_qk=512/576, got 192"),
    ("indices-shape-general", put("indices", lambda i: i[:2]), "indices must have shape (3, topk) or (3, 1, topk) with topk >= 1, got (2, 7)"),
    ("indices-shape-general", put("indices", lambda i: i[:, :0]), "indices must have shape (3, topk) or (3, 1, topk) with topk >= 1, got (3, 0)"),
    ("indices-shape-general", put("indices", lambda i: i[:, None].expand(-1, 2, -1)), "indices must have shape (3, topk) or (3, 1, topk) with topk >= 1, got (3, 2, 7)"),
    ("indices-shape-general", put("indices", lambda i: i.flatten()), "indices must have shape (3, topk) or (3, 1, topk) with topk >= 1, got (21,)"),
    ("indices-not-int32", put("indices", lambda i: i.long()), "indices must be int32, got torch.int64"),
    ("not-a-tensor", put("topk_length", lambda _: 3), "topk_length must be a torch.Tensor, got int"),
    ("device-mismatch", put("topk_length", meta), "topk_length must be on q's device cpu, got meta"),
    ("not-contiguous", put("topk_length", gappy), "topk_length must be contiguous"),
    ("topk-length-invalid", put("topk_length", lambda x: x[:1]), "topk_length must be int32 with shape (3,), got (1,)/torch.int32"),
    ("not-a-tensor", put("attn_sink", lambda _: 0.0), "attn_sink must be a torch.Tensor, got float"),
    ("device-mismatch", put("attn_sink", meta), "attn_sink must be on q's device cpu, got meta"),
    ("not-contiguous", put("attn_sink", gappy), "attn_sink must be contiguous"),
    ("attn-sink-invalid", put("attn_sink", lambda x: x.half()), "attn_sink must be float32 with shape (5,), got (5,)/torch.float16"),
    ("device-mismatch", put("q_scale", meta), "q_scale must be on q's device cpu, got meta"),
    ("not-contiguous", put("q_scale", gappy), "q_scale must be contiguous"),
    ("q-scale-shape", put("q_scale", lambda x: x[:2]), "q_scale must be a float, or float32 of one element, (3,) or (3, 5), got (2, 5)/torch.float32"),
    ("q-scale-shape", put("q_scale", lambda x: x.half()), "q_scale must be a float, or float32 of one element, (3,) or (3, 5), got (3, 5)/torch.float16"),
    ("q-scale-shape", put("q_scale", lambda _: torch.ones(H_Q)), "q_scale must be a float, or float32 of one element, (3,) or (3, 5), got (5,)/torch.float32"),
    ("scale-missing", put("q_scale", lambda _: None), "q_scale is required when q is torch.float8_e4m3fn"),
    ("scale-not-positive-number", put("q_scale", lambda _: 0.0), "q_scale must be a finite positive number, got 0.0"),
    ("scale-not-positive-number", put("q_scale", lambda _: math.nan), "q_scale must be a finite positive number, got nan"),
    ("scale-not-positive-number", put("q_scale", lambda _: "1"), "q_scale must be a finite positive number, got '1'"),
    ("scale-missing", put("kv_scale", lambda _: None), "kv_scale is required when kv is torch.float8_e4m3fn"),
    ("kv-scale-shape", put("kv_scale", lambda x: x[:, None]), "kv_scale must be a float, or float32 of one element or (20,), got (20, 1)/torch.float32"),
    ("kv-scale-shape", put("kv_scale", lambda x: x.double()), "kv_scale must be a float, or float32 of one element or (20,), got (20,)/torch.float64"),
    ("scale-not-positive-number", put("kv_scale", lambda _: -1), "kv_scale must be a finite positive number, got -1"),
    ("scale-not-positive-number", put("kv_scale", lambda _: math.inf), "kv_scale must be a finite positive number, got inf"),
    ("not-a-tensor", put("out", lambda _: 0), "out must be a torch.Tensor, got int"),
    ("output-invalid", put("out", lambda x: x.float()), "out must have shape (3, 5, 512) and dtype torch.bfloat16, got (3, 5, 512)/torch.float32"),
    ("not-contiguous", put("max_logits", gappy), "max_logits must be contiguous"),
    ("device-mismatch", put("lse", meta), "lse must be on q's device cpu, got meta"),
    ("outputs-overlap", lambda c: c.update(lse=c["max_logits"]), "out, max_logits and lse must not overlap each other or an input"),
    ("sm-scale-invalid", put("sm_scale", lambda _: 0), "sm_scale must be a finite positive number, got 0"),
    ("sm-scale-invalid", put("sm_scale", lambda _: "auto"), "sm_scale must be a finite positive number, got auto"),
    ("no-backward", put("attn_sink", lambda x: x.requires_grad_()), "attn_sink requires grad, but sparse MLA attention here has no backward"),
]  # fmt: skip
IDS = [f"{i:02}-{id}" for i, (id, _, _) in enumerate(VIOLATIONS)]


@pytest.mark.parametrize(("id", "violate", "line"), VIOLATIONS, ids=IDS)
def test_each_violation_says_exactly_this_first_and_writes_nothing(
    id: str, violate: Callable[[Call], None], line: str
) -> None:
    call = good_call()
    outputs = [call[name] for name in ("out", "max_logits", "lse")]
    violate(call)
    with pytest.raises(ContractError) as caught:
        sparse_mla_prefill(**call)
    assert caught.value.id == id
    assert str(caught.value).splitlines()[0] == line
    assert all(bool((x == 7).all()) for x in outputs)


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
def test_a_scale_beside_an_unquantised_tensor(name: str) -> None:
    tensor = name.split("_")[0]
    with pytest.raises(ContractError) as caught:
        sparse_mla_prefill(**unquantised(**{name: 1.0}))
    assert caught.value.id == "scale-without-fp8"
    line = str(caught.value).splitlines()[0]
    assert line == f"{name} was given, but {tensor} is torch.float32 and is not quantised"


@pytest.mark.parametrize("name", ["q", "kv", "attn_sink"])
def test_a_wanted_gradient_is_refused_rather_than_dropped(name: str) -> None:
    call = unquantised()
    call[name].requires_grad_()
    with pytest.raises(ContractError) as caught:
        sparse_mla_prefill(**call)
    assert caught.value.id == "no-backward"
    with torch.no_grad():
        sparse_mla_prefill(**call)


def test_every_check_of_this_operator_is_tried_here() -> None:
    """The ids that ``checks`` and ``violations`` can raise for it, read from the records."""
    from sparse_mla.errors import RECORDS

    tried = {id for id, _, _ in VIOLATIONS} | {"scale-without-fp8"}
    data = {"index-out-of-range", "topk-length-out-of-range", "scale-data-invalid", "nan-in-input"}
    declared = {
        id
        for id, record in RECORDS.items()
        if issubclass(record.exception, ContractError) and "sparse_mla_prefill" in record.operators
    }
    assert declared - data <= tried


def both_broken(first: int, second: int) -> Call | None:
    """A call that breaks these two, or ``None`` where one hides or replaces what the other needs."""
    call = good_call()
    for at in (second, first):
        try:
            VIOLATIONS[at][1](call)
        except (AttributeError, IndexError, RuntimeError, TypeError):
            return None
    found = {violation.id for violation in checks.prefill_violations(**call)}
    return call if {VIOLATIONS[first][0], VIOLATIONS[second][0]} <= found else None


def test_the_first_of_two_violations_is_raised() -> None:
    tried = 0
    for first, second in itertools.combinations(range(len(VIOLATIONS)), 2):
        if VIOLATIONS[first][0] == VIOLATIONS[second][0]:
            continue
        call = both_broken(first, second)
        if call is not None:
            tried += 1
            with pytest.raises(ContractError) as caught:
                sparse_mla_prefill(**call)
            assert caught.value.id == VIOLATIONS[first][0], VIOLATIONS[second]
    assert tried > 700, tried


@pytest.mark.parametrize("seed", range(40))
def test_listing_never_crashes_whatever_is_broken(seed: int) -> None:
    import random

    call = good_call()
    for _, violate, _ in random.Random(seed).sample(VIOLATIONS, 6):
        try:
            violate(call)
        except (AttributeError, IndexError, RuntimeError, TypeError):
            continue
    with torch.no_grad():
        assert all(isinstance(v, ContractError) for v in checks.prefill_violations(**call))


class TestAccepted:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"q_scale": 1.0, "kv_scale": 2},
            {"q_scale": torch.tensor(1.0), "kv_scale": torch.ones(1, 1)},
            {"q_scale": torch.ones(S_Q)},
            {"sm_scale": None},
            {"attn_sink": None},
            {"topk_length": None},
            {"kv": torch.ones(0, D_QK).to(E4M3), "kv_scale": torch.ones(0)},
            {"kv": torch.ones(S_KV, 1, D_QK).to(E4M3)},
            {"indices": torch.zeros(S_Q, 1, 1, dtype=torch.int32)},
            {"indices": torch.zeros(S_Q, 9, 2, dtype=torch.int32)[..., :1, 0]},
            {"indices": torch.zeros(1, 1, dtype=torch.int32).expand(S_Q, TOPK)[:, :1]},
            {"q": torch.ones(S_Q, H_Q, D_QK).half(), "q_scale": None},
        ],
        ids=range(13),
    )
    def test_each_form(self, changes: Call) -> None:
        assert list(checks.prefill_violations(**good_call(**changes))) == []
        sparse_mla_prefill(**good_call(**changes))

    def test_on_meta_tensors_no_data_is_read(self) -> None:
        call = {k: meta(x) if isinstance(x, torch.Tensor) else x for k, x in good_call().items()}
        assert list(checks.prefill_violations(**call)) == []

    def test_no_queries(self) -> None:
        empty: dict[str, Any] = {
            name: x[:0] if name not in ("kv", "kv_scale", "attn_sink", "sm_scale") else x
            for name, x in good_call().items()
        }
        out, max_logits, lse = sparse_mla_prefill(**empty, return_stats=True)
        assert tuple(out.shape) == (0, H_Q, 512)
        assert tuple(max_logits.shape) == tuple(lse.shape) == (0, H_Q)
