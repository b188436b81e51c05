"""Arguments of kinds that no check of shape or dtype expects: an error of ours, nothing written."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from sparse_mla import (
    BackendError,
    ContractError,
    merge_attention_states,
    quantize_fp8,
    sparse_mla_prefill,
    sparse_mla_q8kv8_prefill_fwd,
)

E4M3 = torch.float8_e4m3fn
OPERATORS = {"strict": sparse_mla_q8kv8_prefill_fwd, "general": sparse_mla_prefill}
RESULTS = ("out", "max_logits", "lse")
TENSORS = ("q", "kv", "indices", "q_scale", "kv_scale", "attn_sink", "topk_length", *RESULTS)


def call(**changes: Any) -> dict[str, Any]:
    """A call that both operators take, its outputs filled with 7."""
    return {
        "q": torch.ones(3, 64, 512).to(E4M3),
        "kv": torch.ones(20, 1, 512).to(E4M3),
        "indices": torch.zeros(3, 1, 128, dtype=torch.int32),
        "sm_scale": 0.1,
        "q_scale": torch.ones(1),
        "kv_scale": torch.ones(1),
        "attn_sink": torch.zeros(64),
        "topk_length": torch.full((3,), 128, dtype=torch.int32),
        "out": torch.full((3, 64, 512), 7.0, dtype=torch.bfloat16),
        "max_logits": torch.full((3, 64), 7.0),
        "lse": torch.full((3, 64), 7.0),
        **changes,
    }


def csr(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is in beta
        return torch.eye(3).to_sparse_csr()


def nested(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        parts = [torch.zeros(2, 3), torch.zeros(1, 3)]
        return torch.nested.nested_tensor(parts, layout=torch.strided)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse_coo": lambda x: x.float().to_sparse(),
    "sparse_csr": csr,
    "_mkldnn": lambda x: x.float().to_mkldnn(),
    "nested": nested,
}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_without_strides_is_named(name: str, layout: str, operator: str) -> None:
    arguments = call()
    arguments[name] = LAYOUTS[layout](arguments[name])
    with pytest.raises(ContractError) as caught:
        OPERATORS[operator](**arguments)
    line = str(caught.value).splitlines()[0]
    if operator == "strict" and name.endswith("_scale"):
        got = f"{layout} tensor"
        assert line == f"{name} must be a one-element float32 tensor on q's device, got {got}"
    else:
        assert line == f"{name} must be a strided tensor, got layout {layout}"
    assert all(bool((arguments[other] == 7).all()) for other in RESULTS if other != name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantising_a_tensor_without_strides(layout: str) -> None:
    x = LAYOUTS[layout](torch.ones(2, 4))
    with pytest.raises(ContractError) as caught:
        quantize_fp8(x)
    assert caught.value.id == "quantize-input"
    assert layout in str(caught.value).splitlines()[0]
    with pytest.raises(ContractError) as caught:
        quantize_fp8(torch.ones(2, 4), scale=x)
    assert caught.value.id == "quantize-scale"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merging_tensors_without_strides(layout: str) -> None:
    outs, lses = [torch.ones(2, 4)] * 2, [torch.zeros(2)] * 2
    odd_outs, odd_lses = [LAYOUTS[layout](outs[0]), outs[1]], [lses[0], LAYOUTS[layout](lses[1])]
    for parts in ((odd_outs, lses), (outs, odd_lses)):
        with pytest.raises(ContractError) as caught:
            merge_attention_states(*parts)
        assert caught.value.id == "merge-shapes"
        assert f"a {layout} tensor" in str(caught.value)


@pytest.mark.parametrize("d_v", [np.array([512, 512]), [512], "512", 512.0, torch.tensor(512)])
def test_d_v_of_another_kind(d_v: Any) -> None:
    with pytest.raises(ContractError) as caught:
        sparse_mla_q8kv8_prefill_fwd(**call(d_v=d_v))
    assert caught.value.id == "d-v-unsupported"


def test_d_v_may_be_any_integer_type() -> None:
    sparse_mla_q8kv8_prefill_fwd(**call(d_v=np.int64(512)))


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("value", [10**400, Fraction(1, 10**400), 1j, "0.1", [0.1]])
def test_sm_scale_that_no_float_holds(value: Any, operator: str) -> None:
    with pytest.raises(ContractError) as caught:
        OPERATORS[operator](**call(sm_scale=value))
    assert caught.value.id == "sm-scale-invalid"


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
@pytest.mark.parametrize("value", [1e39, 10**400, 1e-46, Fraction(1, 10**60), 5e-324])
def test_a_scale_that_float32_does_not_hold(value: Any, name: str) -> None:
    """It would become infinity or 0, hence NaN in every result."""
    with pytest.raises(ContractError) as caught:
        sparse_mla_prefill(**call(**{name: value}))
    assert caught.value.id == "scale-not-positive-number"


@pytest.mark.parametrize("value", [2.0**-149, torch.finfo(torch.float32).max])
def test_the_outermost_scales_of_float32_are_taken(value: float) -> None:
    sparse_mla_prefill(**call(q_scale=value, sm_scale=0.5))
    _, scale = quantize_fp8(torch.ones(2, 4), scale=value)
    assert scale.item() == value


@pytest.mark.parametrize("name", ["scale", "absmax"])
@pytest.mark.parametrize("value", [1e39, 10**400, 1e-46])
def test_quantising_by_a_number_that_float32_does_not_hold(value: Any, name: str) -> None:
    with pytest.raises(ContractError) as caught:
        quantize_fp8(torch.ones(2, 4), **{name: value})
    assert caught.value.id == "quantize-scale"


@pytest.mark.parametrize("backend", [None, 1, ["cpu"], np.array(["cpu", "auto"]), {}])
def test_a_backend_that_is_no_name(backend: Any) -> None:
    arguments = call()
    with pytest.raises(BackendError) as caught:
        sparse_mla_prefill(**arguments, backend=backend)
    assert caught.value.id == "backend-unknown"
    assert all(bool((arguments[name] == 7).all()) for name in RESULTS)


@pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
def test_a_gradient_wanted_through_a_scale_is_refused(name: str) -> None:
    with pytest.raises(ContractError) as caught:
        sparse_mla_prefill(**call(**{name: torch.ones(1, requires_grad=True)}))
    assert caught.value.id == "no-backward"


def test_a_list_is_named_by_its_type_not_by_its_tensors() -> None:
    """Their values would be fetched from the device, and be in a log."""
    with pytest.raises(ContractError) as caught:
        sparse_mla_q8kv8_prefill_fwd(**call(q_scale=[torch.ones(1)]))
    assert str(caught.value).splitlines()[0].endswith("got list")
