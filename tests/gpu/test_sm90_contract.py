"""The contract where it needs a second device, or memory of the GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hopper import BACKEND, DEVICE, ON_GPU, assert_equal_bits, drawn, general, results, strict

from sparse_mla import (
    ContractError,
    dispatch,
    sparse_mla_prefill,
    sparse_mla_q8kv8_prefill_fwd,
)
from sparse_mla.testing import Inputs, allocate_outputs

ELSEWHERE = "cpu" if ON_GPU else "meta"

OPERATORS = {"strict": sparse_mla_q8kv8_prefill_fwd, "general": sparse_mla_prefill}


def complete() -> Inputs:
    return replace(
        drawn(3, 200),
        attn_sink=torch.zeros(64, device=DEVICE),
        topk_length=torch.full((3,), 100, dtype=torch.int32, device=DEVICE),
    )


def outputs(inputs: Inputs) -> dict[str, torch.Tensor]:
    return dict(zip(("out", "max_logits", "lse"), allocate_outputs(inputs), strict=True))


def refused(operator: str, call: dict[str, Any]) -> ContractError:
    """The error of a call, which has written nothing."""
    with pytest.raises(ContractError) as caught:
        OPERATORS[operator](**call)
    for name in ("out", "max_logits", "lse"):
        given = call.get(name)
        if given is not None and given.device.type == DEVICE:
            assert given.isnan().all(), name
    return caught.value


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    "name", ["kv", "indices", "topk_length", "attn_sink", "out", "max_logits", "lse"]
)
def test_a_tensor_on_another_device(name: str, operator: str) -> None:
    inputs = complete()
    call = {**vars(inputs), **outputs(inputs)}
    call[name] = call[name].to(ELSEWHERE)
    failure = refused(operator, call)
    assert failure.id == "device-mismatch"
    assert failure.context["name"] == name


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
def test_a_scale_on_another_device(name: str) -> None:
    """The usual mistake: ``torch.tensor(0.5)`` beside CUDA tensors."""
    inputs = complete()
    call = {**vars(inputs), **outputs(inputs), name: torch.ones(1, device=ELSEWHERE)}
    failure = refused("strict", call)
    assert failure.id == "scale-invalid"
    assert failure.context["name"] == name
    assert f"float32 tensor on {ELSEWHERE}" in str(failure)
    assert refused("general", call).id == "device-mismatch"


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
@pytest.mark.parametrize("what", ["number", "none", "float16", "float64", "two"])
def test_a_scale_of_another_kind(what: str, name: str) -> None:
    scale = {
        "number": 0.5,
        "none": None,
        "float16": torch.ones(1, dtype=torch.float16, device=DEVICE),
        "float64": torch.ones(1, dtype=torch.float64, device=DEVICE),
        "two": torch.ones(2, device=DEVICE),
    }[what]
    inputs = complete()
    assert refused("strict", {**vars(inputs), **outputs(inputs), name: scale}).id == "scale-invalid"


@pytest.mark.parametrize(
    ("name", "value", "id"),
    [
        ("q", torch.zeros(3, 64, 576, dtype=torch.bfloat16), "not-e4m3fn"),
        ("kv", torch.zeros(200, 1, 576, dtype=torch.float8_e5m2), "not-e4m3fn"),
        ("kv", torch.zeros(200, 8, 576, dtype=torch.float8_e4m3fn), "h-kv-not-one"),
        ("q", torch.zeros(3, 60, 576, dtype=torch.float8_e4m3fn), "h-q-not-multiple-of-64"),
        ("indices", torch.zeros(3, 1, 128, dtype=torch.int64), "indices-not-int32"),
        ("indices", torch.zeros(3, 1, 100, dtype=torch.int32), "topk-not-multiple-of-128"),
        ("topk_length", torch.zeros(2, dtype=torch.int32), "topk-length-invalid"),
        ("attn_sink", torch.zeros(64, dtype=torch.bfloat16), "attn-sink-invalid"),
    ],
)
def test_metadata_is_checked_before_anything_runs(name: str, value: Any, id: str) -> None:
    inputs = complete()
    call = {**vars(inputs), **outputs(inputs), name: value.to(DEVICE)}
    assert refused("strict", call).id == id


@pytest.mark.parametrize("sm_scale", [0.0, -1.0, math.nan, math.inf])
def test_sm_scale(sm_scale: float) -> None:
    inputs = complete()
    call = {**vars(inputs), **outputs(inputs), "sm_scale": sm_scale}
    assert refused("strict", call).id == "sm-scale-invalid"


@pytest.mark.parametrize("operator", OPERATORS)
def test_outputs_that_overlap(operator: str) -> None:
    inputs = complete()
    buffer = torch.full((2 * 3 * 64 - 1,), math.nan, device=DEVICE)
    max_logits, lse = buffer[: 3 * 64].view(3, 64), buffer[3 * 64 - 1 :].view(3, 64)
    call = {**vars(inputs), **outputs(inputs), "max_logits": max_logits, "lse": lse}
    assert refused(operator, call).id == "outputs-overlap"


def test_an_output_over_an_input() -> None:
    inputs = complete()
    whole = torch.full((3 * 64 * 512 * 2 + 4096,), 0xFF, dtype=torch.uint8, device=DEVICE)
    out = whole[: 3 * 64 * 512 * 2].view(torch.bfloat16).view(3, 64, 512)
    kv = whole[-8 * 576 :].view(inputs.kv.dtype).view(8, 1, 576)
    call = {**vars(inputs), **outputs(inputs), "kv": kv, "out": out}
    assert refused("strict", call).id == "outputs-overlap"


def test_neighbours_in_one_buffer() -> None:
    """Outputs cut from one allocation without a gap are written as given."""
    inputs = complete()
    want = strict(inputs)
    rows = 3 * 64
    buffer = torch.full((rows * 1024 + 8 * rows,), 0xFF, dtype=torch.uint8, device=DEVICE)
    out = buffer[: rows * 1024].view(torch.bfloat16).view(3, 64, 512)
    max_logits, lse = (
        part.view(torch.float32).view(3, 64) for part in buffer[rows * 1024 :].chunk(2)
    )
    got = strict(inputs, (out, max_logits, lse))
    for a, b in zip(results(got), results(want), strict=True):
        assert_equal_bits(a, b, "result")


@pytest.mark.parametrize("given", ["out", "max_logits", "lse"])
def test_some_outputs_given(given: str) -> None:
    inputs = complete()
    want = dict(zip(("out", "max_logits", "lse"), results(strict(inputs)), strict=True))
    buffer = outputs(inputs)[given]
    returned = sparse_mla_q8kv8_prefill_fwd(**vars(inputs), **{given: buffer})
    assert dispatch.last_backend() == BACKEND
    got = dict(zip(want, returned, strict=True))
    assert got[given] is buffer
    for name in want:
        assert_equal_bits(got[name], want[name], name)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_statistics_at_any_address(shift: int) -> None:
    """Outputs need no alignment beyond that of their elements."""
    inputs = complete()
    want = strict(inputs)
    out = torch.empty(3 * 64 * 512 + shift * 2, dtype=torch.bfloat16, device=DEVICE)
    stats = torch.empty(2, 3 * 64 + shift, device=DEVICE)
    got = strict(
        inputs,
        (
            out[shift * 2 :].view(3, 64, 512),
            stats[0, shift:].view(3, 64),
            stats[1, shift:].view(3, 64),
        ),
    )
    for a, b in zip(results(got), results(want), strict=True):
        assert_equal_bits(a, b, "result")


def test_an_out_at_an_odd_element() -> None:
    """The kernel stores pairs, at multiples of four bytes: another backend answers."""
    inputs = complete()
    want = strict(inputs)
    max_logits, lse = (torch.empty_like(x) for x in (want.max_logits, want.lse))
    out = torch.empty(3 * 64 * 512 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(3, 64, 512)
    got = sparse_mla_q8kv8_prefill_fwd(**vars(inputs), out=out, max_logits=max_logits, lse=lse)
    assert (dispatch.last_backend() != BACKEND) == ON_GPU
    torch.testing.assert_close(got[0], want.out, rtol=0.0625, atol=0.02)  # FP8 probabilities


def test_nothing_changes_the_inputs() -> None:
    inputs = complete()
    tensors = {k: v for k, v in vars(inputs).items() if isinstance(v, torch.Tensor)}
    copies = {name: x.clone() for name, x in tensors.items()}
    strict(inputs)
    general(inputs)
    for name, x in tensors.items():
        assert_equal_bits(x, copies[name], name)
