"""The strict operator's contract: every row's message, their order, and what they read: metadata only."""

# ruff: noqa: E501 - the table of rows has one a line

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparse_mla import ContractError, checks, sparse_mla_q8kv8_prefill_fwd

E4M3 = torch.float8_e4m3fn
NAME = "sparse_mla_q8kv8_prefill_fwd"
S_Q, S_KV, H_Q, D_QK, TOPK = 3, 20, 64, 576, 128

Call = dict[str, Any]


def good_call(**changes: Any) -> Call:
    """A call that meets the contract, with every optional argument given."""
    call: Call = {
        "q": torch.ones(S_Q, H_Q, D_QK).to(E4M3),
        "kv": torch.ones(S_KV, 1, D_QK).to(E4M3),
        "indices": torch.zeros(S_Q, 1, TOPK, dtype=torch.int32),
        "sm_scale": 0.1,
        "q_scale": torch.ones(1),
        "kv_scale": torch.ones(1),
        "d_v": 512,
        "attn_sink": torch.zeros(H_Q),
        "topk_length": torch.full((S_Q,), TOPK, dtype=torch.int32),
        "out": torch.empty(S_Q, H_Q, 512, dtype=torch.bfloat16),
        "max_logits": torch.empty(S_Q, H_Q),
        "lse": torch.empty(S_Q, H_Q),
    }
    return call | changes


def overlapping(call: Call) -> None:
    call["lse"] = call["max_logits"]


def first_line(call: Call) -> str:
    with pytest.raises(ContractError) as caught:
        sparse_mla_q8kv8_prefill_fwd(**call)
    return str(caught.value).splitlines()[0]


def meta(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


def gappy(x: torch.Tensor) -> torch.Tensor:
    """The same shape and dtype with a gap after every element."""
    return torch.empty(*x.shape, 2, dtype=x.dtype)[..., 0]


def put(name: str, change: Callable[[Any], Any]) -> Callable[[Call], None]:
    """A violation: one argument changed."""

    def violate(call: Call) -> None:
        call[name] = change(call[name])

    return violate


# Violations in the contract's order: (row, case, what breaks, the first line). Each breaks its row alone.
ROWS: list[tuple[int, str, Callable[[Call], None], str]] = [
    (0, "q None", put("q", lambda _: None), "q must be a torch.Tensor, got NoneType"),
    (0, "kv list", put("kv", lambda _: [1]), "kv must be a torch.Tensor, got list"),
    (0, "indices None", put("indices", lambda _: None), "indices must be a torch.Tensor, got NoneType"),
    (1, "q 2-D", put("q", lambda q: q[:, 0].contiguous()), "q must have shape (s_q, h_q, d_qk), got (3, 576)"),
    (2, "kv 2-D", put("kv", lambda kv: kv[:, 0]), "kv must have shape (s_kv, h_kv, d_qk), got (20, 576)"),
    (3, "indices 2-D", put("indices", lambda i: i[:, 0]), "indices must have shape (s_q, h_kv, topk), got (3, 128)"),
    (4, "kv elsewhere", put("kv", meta), "kv must be on q's device cpu, got meta"),
    (4, "indices elsewhere", put("indices", meta), "indices must be on q's device cpu, got meta"),
    (5, "q bf16", put("q", lambda q: q.to(torch.bfloat16)), "q must be torch.float8_e4m3fn, got torch.bfloat16"),
    (5, "q e5m2", put("q", lambda q: q.view(torch.float8_e5m2)), "q must be torch.float8_e4m3fn, got torch.float8_e5m2"),
    (5, "kv fnuz", put("kv", lambda kv: kv.view(torch.float8_e4m3fnuz)), "kv must be torch.float8_e4m3fn, got torch.float8_e4m3fnuz"),
    (5, "kv bytes", put("kv", lambda kv: kv.view(torch.uint8)), "kv must be torch.float8_e4m3fn, got torch.uint8"),
    (6, "q gappy", put("q", gappy), "q must be contiguous"),
    (6, "q transposed", put("q", lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)), "q must be contiguous"),
    (6, "kv every other row", put("kv", lambda kv: torch.cat([kv, kv])[::2]), "kv must be contiguous"),
    (6, "indices gappy", put("indices", gappy), "indices must be contiguous"),
    (7, "kv 512 wide", put("kv", lambda kv: kv[..., :512].contiguous()), "kv d_qk must match q d_qk=576, got 512"),
    (8, "h_q 63", lambda c: heads(c, 63), f"{NAME} requires h_q padded to a positive multiple of 64, got 63"),
    (8, "h_q 0", lambda c: heads(c, 0), f"{NAME} requires h_q padded to a positive multiple of 64, got 0"),
    (9, "h_kv 8", put("kv", lambda kv: kv.expand(-1, 8, -1).contiguous()), f"{NAME} requires h_kv=1, got 8"),
    (9, "h_kv 0", put("kv", lambda kv: kv[:, :0]), f"{NAME} requires h_kv=1, got 0"),
    (10, "d_qk 192", lambda c: width(c, 192), f"{NAME} supports d_qk=512/576, got 192"),
    (11, "indices of other tokens", put("indices", lambda i: i[:2]), "indices must have shape (3, 1, topk), got (2, 1, 128)"),
    (11, "indices for 2 KV heads", put("indices", lambda i: i.expand(-1, 2, -1).contiguous()), "indices must have shape (3, 1, topk), got (3, 2, 128)"),
    (12, "indices int64", put("indices", lambda i: i.long()), "indices must be int32, got torch.int64"),
    (13, "topk 64", put("indices", lambda i: i[..., :64].contiguous()), "Q8KV8 sparse-prefill topk width must be a positive multiple of 128, got 64"),
    (13, "topk 0", put("indices", lambda i: i[..., :0]), "Q8KV8 sparse-prefill topk width must be a positive multiple of 128, got 0"),
    (13, "topk 192", put("indices", lambda i: i.repeat(1, 1, 2)[..., :192].contiguous()), "Q8KV8 sparse-prefill topk width must be a positive multiple of 128, got 192"),
    (14, "length a list", put("topk_length", lambda _: [1, 2, 3]), "topk_length must be a torch.Tensor, got list"),
    (14, "length elsewhere", put("topk_length", meta), "topk_length must be on q's device cpu, got meta"),
    (14, "length a column", put("topk_length", lambda x: torch.stack([x, x], 1)[:, 0]), "topk_length must be contiguous"),
    (14, "length int64", put("topk_length", lambda x: x.long()), "topk_length must be int32 with shape (3,), got (3,)/torch.int64"),
    (14, "length 2-D", put("topk_length", lambda x: x[:, None]), "topk_length must be int32 with shape (3,), got (3, 1)/torch.int32"),
    (14, "length short", put("topk_length", lambda x: x[:2]), "topk_length must be int32 with shape (3,), got (2,)/torch.int32"),
    (15, "d_v 128", put("d_v", lambda _: 128), f"{NAME} only supports d_v=512, got 128"),
    (15, "d_v None", put("d_v", lambda _: None), f"{NAME} only supports d_v=512, got None"),
    (16, "sink a float", put("attn_sink", lambda _: 0.0), "attn_sink must be a torch.Tensor, got float"),
    (16, "sink elsewhere", put("attn_sink", meta), "attn_sink must be on q's device cpu, got meta"),
    (16, "sink gappy", put("attn_sink", gappy), "attn_sink must be contiguous"),
    (16, "sink bf16", put("attn_sink", lambda x: x.bfloat16()), "attn_sink must be float32 with shape (64,), got (64,)/torch.bfloat16"),
    (16, "sink of fewer heads", put("attn_sink", lambda x: x[:16]), "attn_sink must be float32 with shape (64,), got (16,)/torch.float32"),
    (17, "q_scale float", put("q_scale", lambda _: 0.5), "q_scale must be a one-element float32 tensor on q's device, got float 0.5"),
    (17, "q_scale None", put("q_scale", lambda _: None), "q_scale must be a one-element float32 tensor on q's device, got None"),
    (17, "q_scale elsewhere", put("q_scale", meta), "q_scale must be a one-element float32 tensor on q's device, got float32 tensor on meta"),
    (17, "kv_scale float16", put("kv_scale", lambda x: x.half()), "kv_scale must be a one-element float32 tensor on q's device, got float16 tensor of shape (1,)"),
    (17, "kv_scale of two", put("kv_scale", lambda x: x.repeat(2)), "kv_scale must be a one-element float32 tensor on q's device, got float32 tensor of shape (2,)"),
    (17, "kv_scale empty", put("kv_scale", lambda x: x[:0]), "kv_scale must be a one-element float32 tensor on q's device, got float32 tensor of shape (0,)"),
    (18, "out a list", put("out", lambda _: []), "out must be a torch.Tensor, got list"),
    (18, "out elsewhere", put("out", meta), "out must be on q's device cpu, got meta"),
    (18, "lse gappy", put("lse", gappy), "lse must be contiguous"),
    (18, "out float32", put("out", lambda x: x.float()), "out must have shape (3, 64, 512) and dtype torch.bfloat16, got (3, 64, 512)/torch.float32"),
    (18, "max_logits 3-D", put("max_logits", lambda x: x[..., None]), "max_logits must have shape (3, 64) and dtype torch.float32, got (3, 64, 1)/torch.float32"),
    (18, "lse bf16", put("lse", lambda x: x.bfloat16()), "lse must have shape (3, 64) and dtype torch.float32, got (3, 64)/torch.bfloat16"),
    (19, "lse is max_logits", overlapping, "out, max_logits and lse must not overlap each other or an input"),
    (20, "sm_scale 0", put("sm_scale", lambda _: 0.0), "sm_scale must be a finite positive number, got 0.0"),
    (20, "sm_scale -1", put("sm_scale", lambda _: -1), "sm_scale must be a finite positive number, got -1"),
    (20, "sm_scale nan", put("sm_scale", lambda _: math.nan), "sm_scale must be a finite positive number, got nan"),
    (20, "sm_scale inf", put("sm_scale", lambda _: math.inf), "sm_scale must be a finite positive number, got inf"),
    (20, "sm_scale None", put("sm_scale", lambda _: None), "sm_scale must be a finite positive number, got None"),
    (20, "sm_scale a tensor", put("sm_scale", lambda _: torch.tensor(0.1)), "sm_scale must be a finite positive number, got float32 tensor of shape ()"),
]  # fmt: skip


def heads(call: Call, h_q: int) -> None:
    """Another number of heads, in all that depend on it."""
    for name in ("q", "out"):
        x = call[name]
        call[name] = torch.ones(*x.shape[:-2], h_q, x.shape[-1]).to(x.dtype)
    shared = call["lse"] is call["max_logits"]
    for name in ("attn_sink", "max_logits", "lse"):
        x = call[name]
        call[name] = torch.zeros(*x.shape[:-1], h_q, dtype=x.dtype)
    if shared:
        call["lse"] = call["max_logits"]


def width(call: Call, d_qk: int) -> None:
    """Another row width, in q and kv."""
    for name in ("q", "kv"):
        x = call[name]
        call[name] = torch.ones(*x.shape[:-1], d_qk).to(x.dtype)


def identified(rows: list[tuple[int, str, Any, str]]) -> list[Any]:
    return [
        pytest.param(violate, line, id=f"row{row}-{case.replace(' ', '_')}")
        for row, case, violate, line in rows
    ]


def test_the_good_call_is_good() -> None:
    assert list(checks.q8kv8_violations(**good_call())) == []


@pytest.mark.parametrize(("violate", "line"), identified(ROWS))
def test_each_row_says_exactly_this_first(violate: Callable[[Call], None], line: str) -> None:
    call = good_call()
    violate(call)
    assert first_line(call) == line


@pytest.mark.parametrize(("violate", "line"), identified(ROWS))
def test_nothing_is_written_when_a_call_is_refused(
    violate: Callable[[Call], None], line: str
) -> None:
    call = good_call()
    outputs = {name: call[name].fill_(7) for name in ("out", "max_logits", "lse")}
    violate(call)
    with pytest.raises(ContractError):
        sparse_mla_q8kv8_prefill_fwd(**call)
    for name, buffer in outputs.items():
        assert bool((buffer == 7).all()), name


# One violation a row that leaves the arguments of every other row as they are, so that any two combine.
ONE_EACH: dict[int, Callable[[Call], None]] = {
    1: put("q", lambda q: q[None]),
    2: put("kv", lambda kv: kv[None]),
    3: put("indices", lambda i: i[None]),
    4: put("indices", meta),
    5: put("kv", lambda kv: kv.view(torch.uint8)),
    6: put("q", gappy),
    7: put("kv", lambda kv: kv[..., :512].contiguous()),
    8: lambda c: heads(c, 80),
    9: put("kv", lambda kv: torch.cat([kv, kv], -2)),
    10: lambda c: width(c, 640),
    11: put("indices", lambda i: torch.cat([i, i])),
    12: put("indices", lambda i: torch.empty(i.shape, dtype=torch.int16, device=i.device)),
    13: put("indices", lambda i: i[..., :100].contiguous()),
    14: put("topk_length", lambda x: x.long()),
    15: put("d_v", lambda _: 64),
    16: put("attn_sink", lambda x: x.double()),
    17: put("kv_scale", lambda _: 1.0),
    18: put("out", lambda x: x.half()),
    19: overlapping,
    20: put("sm_scale", lambda _: -0.5),
}
ROW_OF_ID = {
    "q-ndim": 1, "kv-ndim": 2, "indices-ndim": 3, "device-mismatch": 4, "not-e4m3fn": 5, "not-contiguous": 6,
    "d-qk-mismatch": 7, "h-q-not-multiple-of-64": 8, "h-kv-not-one": 9, "d-qk-unsupported": 10,
    "indices-shape": 11, "indices-not-int32": 12, "topk-not-multiple-of-128": 13, "topk-length-invalid": 14,
    "d-v-unsupported": 15, "attn-sink-invalid": 16, "scale-invalid": 17, "output-invalid": 18,
    "outputs-overlap": 19, "sm-scale-invalid": 20,
}  # fmt: skip


def broken(*rows: int) -> Call:
    """The good call with these rows broken; the earliest row's violation is applied last."""
    call = good_call()
    for row in sorted(rows, reverse=True):
        ONE_EACH[row](call)
    return call


def raised_row(call: Call) -> int:
    with pytest.raises(ContractError) as caught:
        sparse_mla_q8kv8_prefill_fwd(**call)
    return ROW_OF_ID[caught.value.id]


PAIRS = [(first, second) for first in range(1, 20) for second in range(first + 1, 21)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_of_two_broken_rows_the_first_is_raised(first: int, second: int) -> None:
    assert raised_row(broken(second)) == second
    assert raised_row(broken(first, second)) == first


def test_everything_broken_is_listed_in_order() -> None:
    call = broken(5, 6, 13, 14, 15, 16, 17, 18, 19, 20)
    rows = [ROW_OF_ID[violation.id] for violation in checks.q8kv8_violations(**call)]
    assert rows == [5, 6, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.mark.parametrize("seed", range(40))
def test_listing_never_crashes_whatever_is_broken(seed: int) -> None:
    """``sparse-mla check`` goes on after a violation: later checks must cope with what it left."""
    import random

    chosen = random.Random(seed).sample(ROWS, 6)
    call = good_call()
    for _, _, violate, _ in chosen:
        try:
            violate(call)
        except (AttributeError, IndexError, RuntimeError, TypeError):
            continue  # this violation needs what an earlier one replaced
    found = list(checks.q8kv8_violations(**call))
    assert found
    assert all(isinstance(violation, ContractError) for violation in found)


def test_optional_arguments_are_optional() -> None:
    call = good_call(attn_sink=None, topk_length=None, out=None, max_logits=None, lse=None)
    del call["d_v"]
    out, max_logits, lse = sparse_mla_q8kv8_prefill_fwd(**call)
    assert (out.shape, out.dtype) == ((S_Q, H_Q, 512), torch.bfloat16)
    assert (max_logits.shape, max_logits.dtype) == ((S_Q, H_Q), torch.float32)
    assert (lse.shape, lse.dtype) == ((S_Q, H_Q), torch.float32)


@pytest.mark.parametrize("missing", ["attn_sink", "topk_length"])
def test_sink_and_length_go_without_each_other(missing: str) -> None:
    sparse_mla_q8kv8_prefill_fwd(**good_call(**{missing: None}))


def test_arguments_come_in_sglangs_order() -> None:
    call = good_call()
    names = [
        "q",
        "kv",
        "indices",
        "sm_scale",
        "q_scale",
        "kv_scale",
        "d_v",
        "attn_sink",
        "topk_length",
    ]
    positional = sparse_mla_q8kv8_prefill_fwd(*(call[name] for name in names))
    named = sparse_mla_q8kv8_prefill_fwd(**call)
    assert all(torch.equal(a, b) for a, b in zip(positional, named, strict=True))


def test_given_outputs_are_the_ones_returned() -> None:
    call = good_call()
    out, max_logits, lse = sparse_mla_q8kv8_prefill_fwd(**call)
    assert out is call["out"]
    assert max_logits is call["max_logits"]
    assert lse is call["lse"]


def test_scale_of_any_one_element_shape() -> None:
    call = good_call(q_scale=torch.tensor(1.0), kv_scale=torch.ones(1, 1))
    sparse_mla_q8kv8_prefill_fwd(**call)


@pytest.mark.parametrize("sm_scale", [1, torch.tensor(0.1).item(), 1e-30])
def test_sm_scale_may_be_any_positive_number(sm_scale: float) -> None:
    assert list(checks.q8kv8_violations(**good_call(sm_scale=sm_scale))) == []


class TestMetadataOnly:
    """No check reads data: all of them pass on tensors that have none."""

    @pytest.mark.parametrize("rows", [(), *((row,) for row in ONE_EACH if row not in (4, 19))])
    def test_on_meta_tensors(self, rows: tuple[int, ...]) -> None:
        call = broken(*rows)
        for name, x in call.items():
            if isinstance(x, torch.Tensor):
                call[name] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        found = [violation.id for violation in checks.q8kv8_violations(**call)]
        assert [ROW_OF_ID[id] for id in found] == list(rows)

    def test_no_operation_is_dispatched(self) -> None:
        """Reading a value on the host is an operation: a mode that sees all of them sees none."""
        from torch.utils._python_dispatch import TorchDispatchMode

        class Refuse(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                raise AssertionError(f"a check ran {func}")

        call = good_call()
        with Refuse():
            assert list(checks.q8kv8_violations(**call)) == []


def test_the_error_is_a_value_error_with_its_facts() -> None:
    call = good_call(kv=torch.ones(S_KV, 8, D_QK).to(E4M3))
    with pytest.raises(ValueError, match="h_kv=1") as caught:
        sparse_mla_q8kv8_prefill_fwd(**call)
    error = caught.value
    assert isinstance(error, ContractError)
    assert error.id == "h-kv-not-one"
    assert error.context == {"h_kv": 8, "shape": (20, 8, 576)}
