"""``sparse-mla inspect``: figures that arithmetic by hand gives as well."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from callfiles import small_call
from typer.testing import CliRunner

from sparse_mla import quantize_fp8
from sparse_mla.callfile import GENERAL, Call, save_call
from sparse_mla.cli import build

FP8 = torch.float8_e4m3fn


def inspected(tmp_path: Path, call: Call, *options: str) -> dict[str, Any]:
    save_call(tmp_path / "call.safetensors", call)
    file = str(tmp_path / "call.safetensors")
    runner = CliRunner()
    result = runner.invoke(build(), ["inspect", file, "--json", *options])
    assert result.exit_code == 0, result.output
    assert runner.invoke(build(), ["inspect", file]).exit_code == 0
    return json.loads(result.stdout)


def general(
    q: torch.Tensor, kv: torch.Tensor, indices: list[list[int]], **more: torch.Tensor
) -> Call:
    tensors = {"q": q, "kv": kv, "indices": torch.tensor(indices, dtype=torch.int32), **more}
    return Call(GENERAL, tensors, {"sm_scale": 1.0})


def ones(s_q: int, s_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(s_q, 2, 512), torch.ones(s_kv, 512)


def test_slots_by_what_they_are(tmp_path: Path) -> None:
    call = general(
        *ones(3, 6),
        [[0, 1, -1, 9, 2], [5, 5, 5, 1, 2], [-1, -1, 7, -1, -1]],
        topk_length=torch.tensor([5, 4, 5], dtype=torch.int32),
    )
    found = inspected(tmp_path, call)["selection"]
    assert found["slots"] == 15
    assert found["selected"] == 3 + 4 + 0
    assert found["negative"] == 5
    assert found["past_cache"] == 2
    assert found["past_length"] == 1
    assert found["empty_queries"] == 1
    assert (found["rows_used"], found["rows"]) == (4, 6)


def test_overlap_of_neighbours(tmp_path: Path) -> None:
    indices = [[0, 1, 2, 3], [3, 2, 9, -1], [4, 4, 2, 3], [4, 6, 7, 8]]
    found = inspected(tmp_path, general(*ones(4, 9), indices))["selection"]["overlap"]
    # {0 1 2 3} and {2 3}: 2 of 2; {2 3} and {2 3 4}: 2 of 2; {2 3 4} and {4 6 7 8}: 1 of 3.
    assert found["mean"] == pytest.approx(7 / 9)
    assert found["min"] == pytest.approx(1 / 3)
    assert found["max"] == 1.0


def test_no_overlap_of_one_query_or_of_queries_without_rows(tmp_path: Path) -> None:
    assert inspected(tmp_path, general(*ones(1, 3), [[0]]))["selection"]["overlap"] is None
    nothing = inspected(tmp_path, general(*ones(2, 3), [[-1], [-1]]))
    assert nothing["selection"]["overlap"] is None
    assert nothing["logits"] is None


def test_logits_are_those_of_the_formula(tmp_path: Path) -> None:
    q, kv = torch.zeros(1, 1, 512), torch.zeros(3, 512)
    q[0, 0, 0], kv[:, 0] = 1.0, torch.tensor([0.0, 0.0, math.log(2)])
    found = inspected(tmp_path, general(q, kv, [[0, 1, 2, -1]]))["logits"]
    # Weights 1/4, 1/4, 1/2: entropy 1.5 ln 2.
    assert found["effective_keys"]["median"] == pytest.approx(2**1.5)
    assert found["largest"]["max"] == pytest.approx(math.log(2))
    assert found["spread"]["median"] == pytest.approx(math.log(2) / math.sqrt(3))


@pytest.mark.parametrize("per", ["tensor", "token"])
def test_logits_take_the_scales(tmp_path: Path, per: str) -> None:
    g = torch.Generator().manual_seed(2)
    q, kv = torch.randn(2, 3, 512, generator=g), torch.randn(8, 512, generator=g)
    indices = [[0, 1, 2, 3, 4], [7, 6, 5, 4, -1]]
    exact = inspected(tmp_path, general(q, kv, indices))["logits"]
    q8, q_scale = quantize_fp8(q, per="token-head" if per == "token" else per)
    kv8, kv_scale = quantize_fp8(kv, per=per)
    call = general(q8, kv8, indices, q_scale=q_scale, kv_scale=kv_scale)
    found = inspected(tmp_path, call)["logits"]
    for name in ("spread", "largest"):
        for key in ("median", "min", "max"):
            assert found[name][key] == pytest.approx(exact[name][key], rel=0.15)


def stored(values: list[float], scale: float) -> Call:
    """A call whose kv repeats ``values``."""
    row = torch.tensor(values).repeat(512 // len(values))
    return general(
        torch.ones(1, 1, 512).to(FP8), row.repeat(40, 1).to(FP8), [[0, 1]],
        q_scale=torch.ones(1), kv_scale=torch.tensor([scale]),
    )  # fmt: skip


def test_a_scale_that_cuts_values_off(tmp_path: Path) -> None:
    found = inspected(tmp_path, stored([448.0, 1.0, -448.0, 0.0], 0.1))["kv"]
    assert (found["saturated"], found["saturated_count"]) == (0.5, 40 * 256)
    assert found["zero"] == 0.25
    assert "the scale is too small" in found["advice"]
    assert found["better_scale"] is None  # how far beyond, the file cannot tell


def test_a_scale_that_leaves_bits_unused(tmp_path: Path) -> None:
    found = inspected(tmp_path, stored([3.5, 2.0**-7, 2.0**-9, 1.0], 0.1))["kv"]
    assert found["largest"] == 3.5
    assert found["subnormal"] == 0.5
    assert found["better_scale"] == pytest.approx(0.1 * 3.5 / 448)
    assert found["better_subnormal"] == 0.0  # 2**-9 becomes 2**-2
    assert "would leave 0.00% instead of 50.00%" in found["advice"]


def test_rows_that_want_scales_of_their_own(tmp_path: Path) -> None:
    kv = torch.full((9, 512), 2.0**-8)
    kv[0] = 448.0
    kv[0, :500] = 100.0
    call = general(
        torch.ones(1, 1, 512).to(FP8), kv.to(FP8), [[0, 1]],
        q_scale=torch.ones(1), kv_scale=torch.ones(1),
    )  # fmt: skip
    found = inspected(tmp_path, call)["kv"]
    assert found["row_spread"] == 448 * 2**8
    assert found["saturated_count"] == 12
    call.tensors["kv"].view(torch.uint8)[0, 501:] = 0x40  # one value at the limit is as it should
    found = inspected(tmp_path, call)["kv"]
    assert "a scale per token would serve" in found["advice"]


def test_a_scale_that_fits(tmp_path: Path) -> None:
    fp8, scale = quantize_fp8(torch.randn(40, 512, generator=torch.Generator().manual_seed(0)))
    call = stored([1.0], 1.0)
    call.tensors.update(kv=fp8, kv_scale=scale)
    found = inspected(tmp_path, call)["kv"]
    assert found["saturated_count"] < 4
    assert found["advice"] == "the scale fits"


def test_nan_in_fp8(tmp_path: Path) -> None:
    found = inspected(tmp_path, stored([math.nan, 1.0], 0.1))["kv"]
    assert found["not_finite"] == 40 * 256
    assert "cast without being clamped" in found["advice"]


def test_what_fp8_would_cost(tmp_path: Path) -> None:
    kv = torch.randn(60, 512, generator=torch.Generator().manual_seed(4))
    kv[30:] *= 2.0**-13  # below what one scale for all can hold
    found = inspected(tmp_path, general(torch.ones(1, 1, 512), kv, [[0, 1]]))["kv"]
    assert found["scale"] is None
    assert found["better_scale"] == pytest.approx(float(kv.abs().max()) / 448)
    assert 0.02 < found["error_per_token"] < 0.03  # 3 bits behind the leading one
    small = kv.abs() * 448 / kv.abs().max() < 2.0**-6
    assert found["subnormal"] == pytest.approx(float(small.float().mean()), abs=1e-4)
    fp8, scale = quantize_fp8(kv)
    error = (fp8.float() * scale - kv).norm() / kv.norm()
    assert found["error_per_tensor"] == pytest.approx(float(error), rel=1e-4)


def test_the_time_of_a_captured_call(tmp_path: Path) -> None:
    call = small_call()
    call.metadata["seconds"] = "0.0125"
    save_call(tmp_path / "call.safetensors", call)
    result = CliRunner().invoke(build(), ["inspect", str(tmp_path / "call.safetensors")])
    assert "0.0125 s when it was captured" in result.output


@pytest.mark.parametrize("seconds", ["soon", "1\n2", "\x1b[31m1"])
def test_a_time_that_is_none_is_left_out(tmp_path: Path, seconds: str) -> None:
    call = small_call()
    call.metadata["seconds"] = seconds
    save_call(tmp_path / "call.safetensors", call)
    result = CliRunner().invoke(build(), ["inspect", str(tmp_path / "call.safetensors")])
    assert result.exit_code == 0
    assert "captured" not in result.output


def test_infinite_values_are_counted_and_kept_out_of_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [plot]")
    q, kv = torch.ones(2, 3, 512), torch.ones(5, 512)
    q[0, 1, 7], kv[4] = math.inf, math.nan
    call = general(q, kv, [[0, 1, 2], [2, 3, 4]])
    found = inspected(tmp_path, call, "--plot", str(tmp_path / "call.png"))
    assert found["logits"]["not_finite"] == 1 + 3  # one head of one query, and all that meet row 4
    assert found["logits"]["largest"] == {"median": 512.0, "min": 512.0, "max": 512.0}
    assert (found["q"]["largest"], found["q"]["not_finite"]) == (1.0, 1)
    assert (found["kv"]["largest"], found["kv"]["not_finite"]) == (1.0, 512)
    assert found["kv"]["advice"] == "holds NaN or infinite values"
    call.tensors["kv"][:] = math.nan  # no figure is left to draw
    found = inspected(tmp_path, call, "--plot", str(tmp_path / "call.png"))
    assert found["logits"]["spread"] is None


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_scale_that_gives_nan_is_said(tmp_path: Path, scale: float) -> None:
    found = inspected(tmp_path, stored([448.0, 1.0], scale))["kv"]
    assert found["advice"] == "a scale that is not a finite positive number makes the results NaN"
    assert found["better_scale"] is None


def test_values_near_the_end_of_float32(tmp_path: Path) -> None:
    call = general(torch.full((1, 1, 512), 1e-38), torch.full((3, 512), 3e38), [[0, 1]])
    for name, largest in (("q", 1e-38), ("kv", 3e38)):
        found = inspected(tmp_path, call)[name]
        assert found["largest"] == pytest.approx(largest)
        assert (found["not_finite"], found["subnormal"]) == (0, 0.0)


def test_a_call_without_queries(tmp_path: Path) -> None:
    q, kv = torch.ones(0, 2, 512).to(FP8), torch.ones(3, 512).to(FP8)
    indices = torch.zeros(0, 4, dtype=torch.int32)
    tensors = {"q": q, "kv": kv, "indices": indices, "q_scale": torch.ones(0)}
    call = Call(GENERAL, tensors | {"kv_scale": torch.ones(3)}, {"sm_scale": 1.0})
    found = inspected(tmp_path, call)
    assert found["q"]["scale"] is None
    assert found["selection"]["slots"] == 0


def test_a_broken_contract_is_said_and_exits_1(tmp_path: Path) -> None:
    save_call(tmp_path / "call.safetensors", small_call(kv=torch.ones(5, 8, 576).to(FP8)))
    result = CliRunner().invoke(build(), ["inspect", str(tmp_path / "call.safetensors"), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["id"] == "h-kv-not-one"


@pytest.mark.parametrize("call", [small_call(), general(*ones(1, 3), [[-1]])], ids=["small", "one"])
def test_the_picture_is_drawn(tmp_path: Path, call: Call) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [plot]")
    found = inspected(tmp_path, call, "--plot", str(tmp_path / "call.png"))
    assert found["plot"] == str(tmp_path / "call.png")
    picture = (tmp_path / "call.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(picture[16:20], "big") == 1950


def test_a_picture_that_cannot_be_is_refused_first(tmp_path: Path) -> None:
    result = CliRunner().invoke(build(), ["inspect", "nothing", "--plot", "picture.txt"])
    assert result.exit_code == 2
    assert "should end in .png, .pdf or .svg" in result.output
