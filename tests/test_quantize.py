"""``quantize_fp8``: exact rounding, no NaN that was not there, scales of every granularity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_mla import ContractError
from sparse_mla.quantize import SMALLEST_SCALE, quantize_fp8, quantize_queries

E4M3 = torch.float8_e4m3fn
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def test_rounding_is_to_nearest_even_up_to_448() -> None:
    x = torch.tensor([260.0, 288.0, 300.0, 304.0, 1.0625, 1.1875, 447.0, 448.0, 449.0, 480.0, 1e30])
    stored, scale = quantize_fp8(x, scale=1.0)
    expected = [256.0, 288.0, 288.0, 320.0, 1.0, 1.25, 448.0, 448.0, 448.0, 448.0, 448.0]
    assert stored.dtype == E4M3
    assert stored.float().tolist() == expected
    assert scale.tolist() == [1.0]
    negative, _ = quantize_fp8(-x, scale=1.0)
    assert negative.float().tolist() == [-v for v in expected]


@pytest.mark.parametrize(
    ("per", "shape", "scale_shape"),
    [
        ("tensor", (5, 3, 8), (1,)),
        ("token", (5, 3, 8), (5,)),
        ("token-head", (5, 3, 8), (5, 3)),
        ("token", (5, 8), (5,)),
        ("token-head", (5, 8), (5,)),
        ("tensor", (8,), (1,)),
        ("token-head", (8,), ()),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_group_uses_the_whole_range(
    per: Any, shape: tuple[int, ...], scale_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    stored, scale = quantize_fp8(x, per=per)
    assert (stored.shape, stored.dtype, stored.is_contiguous()) == (x.shape, E4M3, True)
    assert (scale.shape, scale.dtype) == (scale_shape, torch.float32)
    kept = 0 if per == "tensor" else len(scale_shape)
    largest = x.float().abs().flatten(kept).amax(dim=-1)
    torch.testing.assert_close(scale.reshape(largest.shape), largest / 448)
    assert (stored.float().abs().flatten(kept).amax(dim=-1) == 448).all()
    back = stored.float() * scale.reshape(*scale_shape, *[1] * (x.ndim - len(scale_shape)))
    assert ((back - x.float()).abs() <= x.float().abs() / 16 + largest.max() / 448 * 2**-9).all()


def test_zeros_get_scale_one_in_their_group_alone() -> None:
    x = torch.ones(3, 2, 4)
    x[1] = 0
    stored, scale = quantize_fp8(x, per="token")
    assert scale.tolist() == pytest.approx([1 / 448, 1.0, 1 / 448])
    assert not stored[1].float().any()
    assert quantize_fp8(torch.zeros(2, 4))[1].tolist() == [1.0]


def test_infinity_saturates_nan_stays_and_neither_sets_the_scale() -> None:
    x = torch.tensor([[1.0, -2.0, math.inf, -math.inf, math.nan]])
    stored, scale = quantize_fp8(x)
    assert scale.tolist() == pytest.approx([2 / 448])
    assert stored.float()[0, :4].tolist() == [224.0, -448.0, 448.0, -448.0]
    assert stored.float()[0, 4].isnan()
    nothing_finite, scale = quantize_fp8(torch.tensor([math.inf, math.nan]))
    assert scale.tolist() == [1.0]
    assert nothing_finite.float()[0] == 448
    assert nothing_finite.float()[1].isnan()


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30), st.booleans())
def test_no_number_becomes_nan(values: list[float], per_row: bool) -> None:
    x = torch.tensor(values).reshape(-1, 1)
    stored, scale = quantize_fp8(x, per="token-head" if per_row else "tensor")
    assert not stored.float().isnan().any()
    assert scale.isfinite().all()
    assert (scale >= SMALLEST_SCALE).all()
    signs = stored.float().sign() * x.sign()
    assert (signs >= 0).all()


@pytest.mark.parametrize("value", [1e-45, 1e-40, 3.4e38, 1e-300, 1e300])
def test_the_ends_of_the_range(value: float) -> None:
    x = torch.tensor([value, 0.0], dtype=torch.float64)
    stored, scale = quantize_fp8(x)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert stored.float().isfinite().all()
    if SMALLEST_SCALE * 448 <= value <= 3.4e38:
        assert float(stored[0]) * float(scale) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("per", ["tensor", "token", "token-head"])
def test_no_rows(per: Any) -> None:
    stored, scale = quantize_fp8(torch.empty(0, 3, 8), per=per)
    assert stored.shape == (0, 3, 8)
    assert scale.shape == {"tensor": (1,), "token": (0,), "token-head": (0, 3)}[per]
    assert per != "tensor" or scale.tolist() == [1.0]


def test_a_given_scale_or_largest_magnitude_is_used() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 1000.0]])
    for given_scale in (0.5, torch.tensor([0.5]), torch.tensor(0.5)):
        stored, scale = quantize_fp8(x, scale=given_scale)
        assert scale.tolist() == [0.5]
        assert stored.float().tolist() == [[2.0, 4.0], [6.0, 448.0]]
    stored, scale = quantize_fp8(x, per="token", scale=torch.tensor([0.5, 4.0]))
    assert stored.float().tolist() == [[2.0, 4.0], [0.75, 256.0]]
    stored, scale = quantize_fp8(x, absmax=896.0)
    assert scale.tolist() == [2.0]
    assert stored.float().tolist() == [[0.5, 1.0], [1.5, 448.0]]
    _, scale = quantize_fp8(x, per="token-head", absmax=torch.tensor([448.0, 0.0]))
    assert scale.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_tensor_that_means_nothing_gives_nan(value: float) -> None:
    stored, scale = quantize_fp8(torch.ones(2, 4), per="token", scale=torch.tensor([value, 1.0]))
    assert stored[0].float().isnan().all()
    assert (stored[1].float() == 1).all()
    assert scale[1] == 1


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(4),
        torch.ones(4).to(E4M3),
        torch.ones(4, dtype=torch.bool),
        torch.tensor(1.0),
        torch.empty(3, 0),
        [1.0],
        None,
    ],
    ids=["int64", "fp8", "bool", "0-d", "no-columns", "list", "none"],
)
def test_what_cannot_be_quantised(x: Any) -> None:
    with pytest.raises(ContractError) as caught:
        quantize_fp8(x)
    assert caught.value.id == "quantize-input"


@pytest.mark.parametrize(
    "given_scale",
    [
        {"scale": 0.0},
        {"scale": -1.0},
        {"scale": math.nan},
        {"scale": math.inf},
        {"scale": True},
        {"scale": "1"},
        {"scale": torch.ones(3)},
        {"scale": torch.ones(1, dtype=torch.float64)},
        {"scale": torch.ones(1, device="meta")},
        {"absmax": 0.0},
        {"absmax": torch.ones(2, dtype=torch.bfloat16)},
        {"scale": 1.0, "absmax": 1.0},
    ],
    ids=str,
)
def test_what_cannot_be_a_scale(given_scale: dict[str, Any]) -> None:
    with pytest.raises(ContractError) as caught:
        quantize_fp8(torch.ones(2, 4), **given_scale)
    assert caught.value.id == "quantize-scale"


def test_an_unknown_granularity() -> None:
    with pytest.raises(ContractError) as caught:
        quantize_fp8(torch.ones(2, 4), per="block")  # type: ignore[arg-type]
    assert caught.value.id == "quantize-per"


def test_queries_by_their_own_or_a_given_scale() -> None:
    q = torch.randn(3, 5, 576)
    stored, scale = quantize_queries(q, None)
    assert scale.shape == (3, 5)
    assert (stored.float().abs().amax(dim=-1) == 448).all()
    for given_scale in (torch.tensor(0.1), torch.full((3,), 0.1), torch.full((3, 5), 0.1)):
        again, scale = quantize_queries(q, given_scale)
        assert torch.equal(again.float(), (q / 0.1).clamp(-448, 448).to(E4M3).float())
        assert scale.numel() == given_scale.numel()


def test_it_compiles_into_one_graph() -> None:
    x = torch.randn(4, 64)
    compiled = torch.compile(quantize_fp8, fullgraph=True, backend="eager")
    for a, b in zip(compiled(x, per="token"), quantize_fp8(x, per="token"), strict=True):
        assert torch.equal(a.float(), b.float())
