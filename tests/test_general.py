"""``sparse_mla_prefill``: what it accepts, and the same formula whichever way it is asked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparse_mla import dispatch, quantize_fp8, sparse_mla_prefill
from sparse_mla import sparse_mla_q8kv8_prefill_fwd as strict
from sparse_mla.testing import CPU_BFLOAT16

E4M3 = torch.float8_e4m3fn
BACKENDS = ["reference", "cpu"]

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    *,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> Outputs:
    """The formula over real (dequantised) values, slot by slot, written without the library."""
    s_q, h_q, _ = q.shape
    out = torch.zeros(s_q, h_q, 512, dtype=torch.float64)
    max_logits = torch.full((s_q, h_q), -math.inf, dtype=torch.float64)
    lse = torch.full((s_q, h_q), math.inf, dtype=torch.float64)
    for t in range(s_q):
        row = indices[t].tolist()
        if topk_length is not None:
            row = row[: max(int(topk_length[t]), 0)]
        keys = kv[[i for i in row if 0 <= i < len(kv)]].double()
        if not len(keys):
            continue
        logits = q[t].double() @ keys.T * sm_scale
        max_logits[t] = logits.amax(1)
        lse[t] = logits.logsumexp(1)
        total = lse[t] if attn_sink is None else torch.logaddexp(lse[t], attn_sink.double())
        out[t] = torch.exp(logits - total[:, None]) @ keys[:, :512]
    return out, max_logits, lse


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(E4M3)


def some_indices(s_q: int, s_kv: int, topk: int, seed: int = 0) -> torch.Tensor:
    """Valid, negative and too large ones, with duplicates."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-4, s_kv + 4, (s_q, topk), generator=g, dtype=torch.int32)


def assert_close(got: Outputs, want: Outputs, rtol: float = CPU_BFLOAT16.out) -> None:
    """Within what the cpu backend states in bfloat16, ``CPU_BFLOAT16``."""
    (out, max_logits, lse), exact = [[x.double() for x in xs] for xs in (got, want)]
    limits = {"rtol": CPU_BFLOAT16.relative, "atol": CPU_BFLOAT16.absolute}
    torch.testing.assert_close(max_logits, exact[1], **limits)
    torch.testing.assert_close(lse, exact[2], **limits)
    error = (out - exact[0]).norm(dim=-1)
    assert bool((error <= rtol * exact[0].norm(dim=-1)).all()), float(error.max())


def prefill(*args: Any, backend: str, **kwargs: Any) -> Outputs:
    results = sparse_mla_prefill(*args, backend=backend, return_stats=True, **kwargs)
    assert dispatch.last_backend() == backend
    return results


@pytest.mark.parametrize("backend", BACKENDS)
class TestShapes:
    @pytest.mark.parametrize("h_q", [1, 8, 12, 16, 20, 24, 31, 33, 63, 65, 128])
    def test_any_number_of_heads(self, h_q: int, backend: str) -> None:
        q, kv = fp8(2, h_q, 576), fp8(30, 576, seed=1)
        indices, sink = some_indices(2, 30, 40), torch.linspace(-1, 1, h_q)
        got = prefill(q, kv, indices, 0.05, 0.5, 0.25, attn_sink=sink, backend=backend)
        real_q, real_kv = q.double() * 0.5, kv.double() * 0.25
        assert tuple(got[0].shape) == (2, h_q, 512)
        assert_close(got, attention(real_q, real_kv, indices, 0.05, attn_sink=sink))

    @pytest.mark.parametrize("h_q", [16, 33])
    def test_heads_are_independent_of_padding(self, h_q: int, backend: str) -> None:
        """The same heads inside a padded call, beside heads of NaN, give the same numbers."""
        q, kv, indices = fp8(2, h_q, 576), fp8(30, 576, seed=1), some_indices(2, 30, 128)
        sink = torch.zeros(h_q)
        padded_q = torch.full((2, 64, 576), math.nan).to(E4M3)
        padded_q.view(torch.uint8)[:, :h_q] = q.view(torch.uint8)
        padded_sink = torch.full((64,), -1e30)
        padded_sink[:h_q] = sink
        got = prefill(q, kv, indices, 0.05, 1.0, 1.0, attn_sink=sink, backend=backend)
        padded = prefill(
            padded_q, kv, indices, 0.05, 1.0, 1.0, attn_sink=padded_sink, backend=backend
        )
        assert_close(got, tuple(x[:, :h_q] for x in padded))

    @pytest.mark.parametrize("topk", [1, 63, 64, 65, 100, 192, 2051])
    def test_any_number_of_slots(self, topk: int, backend: str) -> None:
        """More slots than rows included, and the same as padded with -1 to a multiple of 128."""
        q, kv, indices = fp8(2, 3, 576), fp8(10, 576, seed=1), some_indices(2, 10, topk)
        got = prefill(q, kv, indices, 0.05, 1.0, 1.0, backend=backend)
        padded = torch.full((2, -(-topk // 128) * 128), -1, dtype=torch.int32)
        padded[:, :topk] = indices
        assert_close(got, attention(q.double(), kv.double(), padded, 0.05))
        assert_close(got, prefill(q, kv, padded, 0.05, 1.0, 1.0, backend=backend))

    @pytest.mark.parametrize("s_q", [0, 1, 60, 65, 66])
    def test_any_number_of_tokens(self, s_q: int, backend: str) -> None:
        q, kv, indices = fp8(s_q, 3, 512), fp8(30, 512, seed=1), some_indices(s_q, 30, 20)
        lengths = torch.full((s_q,), 5, dtype=torch.int32)
        got = prefill(q, kv, indices, 0.05, 1.0, 1.0, topk_length=lengths, backend=backend)
        want = attention(q.double(), kv.double(), indices, 0.05, topk_length=lengths)
        assert_close(got, want)
        cut = indices.clone()
        cut[:, 5:] = -1
        assert_close(got, prefill(q, kv, cut, 0.05, 1.0, 1.0, backend=backend))

    def test_kv_and_indices_of_two_or_three_dimensions(self, backend: str) -> None:
        q, kv, indices = fp8(3, 2, 576), fp8(9, 576, seed=1), some_indices(3, 9, 7)
        results = [
            prefill(q, k, i, 0.05, 1.0, 1.0, backend=backend)
            for k in (kv, kv[:, None])
            for i in (indices, indices[:, None])
        ]
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))

    def test_same_as_the_strict_operator(
        self, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPARSE_MLA_BACKEND", backend)
        q, kv, indices = fp8(2, 64, 576), fp8(30, 1, 576, seed=1), some_indices(2, 30, 128)[:, None]
        scale = torch.tensor([0.5])
        got = prefill(q, kv, indices, 0.05, scale, scale, backend=backend)
        want = strict(q, kv, indices, 0.05, scale, scale)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
class TestStrides:
    """Rows may lie anywhere; the same numbers as from a dense copy, bit for bit."""

    @pytest.fixture
    def dense(self) -> dict[str, torch.Tensor]:
        return {
            "q": fp8(5, 3, 576),
            "kv": fp8(12, 576, seed=1),
            "indices": some_indices(5, 12, 9),
        }

    @pytest.mark.parametrize(
        "spread",
        [
            pytest.param({"kv": "every other row"}, id="kv_every_other_row"),
            pytest.param({"kv": "padded row"}, id="kv_rows_with_padding"),
            pytest.param({"kv": "odd offset"}, id="kv_one_byte_into_a_buffer"),
            pytest.param({"q": "transposed"}, id="q_heads_first"),
            pytest.param({"q": "padded row"}, id="q_rows_with_padding"),
            pytest.param({"indices": "padded row"}, id="indices_rows_with_padding"),
            pytest.param({"indices": "every other row"}, id="indices_every_other_row"),
            pytest.param(
                {"q": "padded row", "kv": "padded row", "indices": "padded row"}, id="all_at_once"
            ),
        ],
    )
    def test_spread_rows(
        self, spread: dict[str, str], dense: dict[str, torch.Tensor], backend: str
    ) -> None:
        call = dense | {name: SPREAD[how](dense[name]) for name, how in spread.items()}
        for name in spread:
            assert call[name].dtype is dense[name].dtype
            assert torch.equal(bits(call[name]), bits(dense[name]))
            assert spread[name] == "odd offset" or not call[name].is_contiguous()
        got = prefill(**call, sm_scale=0.05, q_scale=0.5, kv_scale=0.25, backend=backend)
        want = prefill(**dense, sm_scale=0.05, q_scale=0.5, kv_scale=0.25, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def test_one_query_row_for_all_tokens(
        self, dense: dict[str, torch.Tensor], backend: str
    ) -> None:
        expanded = dense | {"q": dense["q"][:1].expand(5, 3, 576)}
        copied = dense | {"q": expanded["q"].contiguous()}
        got = prefill(**expanded, q_scale=1.0, kv_scale=1.0, backend=backend)
        want = prefill(**copied, q_scale=1.0, kv_scale=1.0, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def test_spread_float_queries(self, dense: dict[str, torch.Tensor], backend: str) -> None:
        q = torch.randn(3, 5, 700, generator=torch.Generator().manual_seed(2)).bfloat16()
        spread = dense | {"q": q.transpose(0, 1)[..., 10:586]}
        copied = dense | {"q": spread["q"].contiguous()}
        got = prefill(**spread, kv_scale=1.0, backend=backend)
        want = prefill(**copied, kv_scale=1.0, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def every_other_row(x: torch.Tensor) -> torch.Tensor:
    wide = torch.full((2 * len(x), *x.shape[1:]), 0x7F, dtype=torch.int32).to(torch.uint8)
    buffer = wide.view(x.dtype) if x.element_size() == 1 else torch.zeros(wide.shape, dtype=x.dtype)
    view = buffer[::2]
    view.copy_(x)
    return view


def padded_row(x: torch.Tensor) -> torch.Tensor:
    """Rows with 80 elements of NaN bytes (or of valid-looking indices) after each."""
    shape = (*x.shape[:-1], x.shape[-1] + 80)
    if x.element_size() == 1:
        buffer = torch.full(shape, 0x7F, dtype=torch.uint8).view(x.dtype)
    else:
        buffer = torch.ones(shape, dtype=x.dtype)
    view = buffer[..., : x.shape[-1]]
    view.copy_(x)
    return view


def odd_offset(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.full((x.numel() + 1,), 0x7F, dtype=torch.uint8)
    view = buffer[1:].view(x.dtype).view(x.shape)
    view.copy_(x)
    return view


SPREAD = {
    "every other row": every_other_row,
    "padded row": padded_row,
    "odd offset": odd_offset,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("backend", BACKENDS)
class TestScales:
    @pytest.mark.parametrize("q_kind", ["number", "0-d", "one", "token", "token and head"])
    @pytest.mark.parametrize("kv_kind", ["number", "one", "token"])
    def test_every_form(self, q_kind: str, kv_kind: str, backend: str) -> None:
        q, kv, indices = fp8(4, 3, 576), fp8(11, 576, seed=1), some_indices(4, 11, 13)
        g = torch.Generator().manual_seed(3)
        q_scale: Any = {
            "number": 0.37,
            "0-d": torch.tensor(0.37),
            "one": torch.tensor([0.37]),
            "token": torch.rand(4, generator=g) + 0.2,
            "token and head": torch.rand(4, 3, generator=g) + 0.2,
        }[q_kind]
        kv_scale: Any = {
            "number": 0.0123,
            "one": torch.tensor([0.0123]),
            "token": torch.rand(11, generator=g) + 0.2,
        }[kv_kind]
        got = prefill(q, kv, indices, 0.05, q_scale, kv_scale, backend=backend)
        per_row = torch.as_tensor(q_scale).double()
        per_row = per_row.reshape(per_row.shape + (1,) * (3 - per_row.ndim))
        real_kv = kv.double() * torch.as_tensor(kv_scale).double().reshape(-1, 1)
        assert_close(got, attention(q.double() * per_row, real_kv, indices, 0.05))

    def test_kv_scale_reaches_the_value(self, backend: str) -> None:
        """One valid slot has weight 1: out is the dequantised row, 0.5 and not 1.0."""
        kv = torch.ones(1, 512).to(E4M3)
        indices = torch.zeros(1, 1, dtype=torch.int32)
        out, _, _ = prefill(fp8(1, 2, 512), kv, indices, 1.0, 1.0, 0.5, backend=backend)
        assert bool((out == 0.5).all())

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
    @pytest.mark.parametrize("name", ["q_scale", "kv_scale"])
    def test_a_bad_scale_in_the_data_gives_nan(self, name: str, value: float, backend: str) -> None:
        """Only the data can tell, so the answer must not look like one."""
        q, kv, indices = fp8(2, 2, 512), fp8(4, 512, seed=1), some_indices(2, 4, 6).clamp(0, 3)
        scales = {"q_scale": torch.ones(1), "kv_scale": torch.ones(1)} | {
            name: torch.tensor([value])
        }
        out, _, _ = prefill(q, kv, indices, 0.05, **scales, backend=backend)
        assert bool(torch.isnan(out).all())

    def test_sm_scale_defaults_to_one_over_the_root_of_the_width(self, backend: str) -> None:
        for d_qk in (512, 576):
            q, kv, indices = fp8(2, 2, d_qk), fp8(4, d_qk, seed=1), some_indices(2, 4, 6)
            got = prefill(q, kv, indices, q_scale=1.0, kv_scale=1.0, backend=backend)
            want = attention(q.double(), kv.double(), indices, 1 / math.sqrt(d_qk))
            assert_close(got, want)

    def test_a_given_sm_scale_is_honoured_in_every_output(self, backend: str) -> None:
        q, kv, indices = fp8(2, 2, 576), fp8(40, 576, seed=1), some_indices(2, 40, 33)
        for sm_scale in (2 / math.sqrt(576), 192**-0.5):
            got = prefill(q, kv, indices, sm_scale, 1.0, 1.0, backend=backend)
            assert_close(got, attention(q.double(), kv.double(), indices, sm_scale))
            assert bool((got[2] >= got[1]).all())
            assert bool((got[2] <= got[1] + math.log(33)).all())


@pytest.mark.parametrize("backend", BACKENDS)
class TestFloatInputs:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_float_queries_are_quantised_per_token_and_head(
        self, dtype: torch.dtype, backend: str
    ) -> None:
        g = torch.Generator().manual_seed(4)
        q = torch.randn(3, 4, 576, generator=g) * torch.tensor([1.0, 10.0, 100.0, 0.01])[:, None]
        kv, indices = fp8(20, 576, seed=1), some_indices(3, 20, 15)
        got = prefill(q.to(dtype), kv, indices, 0.002, kv_scale=0.5, backend=backend)
        stored, scale = quantize_fp8(q.to(dtype), per="token-head")
        assert tuple(scale.shape) == (3, 4)
        want = prefill(stored, kv, indices, 0.002, scale, 0.5, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    @pytest.mark.parametrize(
        "q_scale",
        [0.05, torch.tensor(0.05), torch.rand(3) + 0.01, torch.rand(3, 4) + 0.01],
        ids=["number", "one", "token", "token_and_head"],
    )
    def test_float_queries_are_quantised_by_a_given_scale(self, q_scale: Any, backend: str) -> None:
        q = torch.randn(3, 4, 576, generator=torch.Generator().manual_seed(4)).bfloat16()
        kv, indices = fp8(20, 576, seed=1), some_indices(3, 20, 15)
        got = prefill(q, kv, indices, 0.05, q_scale, 1.0, backend=backend)
        scale = torch.as_tensor(q_scale, dtype=torch.float32)
        scale_3d = scale.reshape(scale.shape + (1,) * (3 - scale.ndim))
        stored = (q.float() / scale_3d).clamp(-448, 448).to(E4M3)
        assert_close(got, attention(stored.double() * scale_3d, kv.double(), indices, 0.05))

    @pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_float_kv_is_computed_unquantised(
        self, q_dtype: torch.dtype, kv_dtype: torch.dtype, backend: str
    ) -> None:
        g = torch.Generator().manual_seed(5)
        q = torch.randn(3, 4, 576, generator=g).to(q_dtype)
        kv = torch.randn(20, 576, generator=g).to(kv_dtype)
        indices = some_indices(3, 20, 15)
        got = prefill(q, kv, indices, 0.02, backend=backend)
        assert_close(got, attention(q.double(), kv.double(), indices, 0.02))

    def test_inputs_are_left_as_they_are(self, backend: str) -> None:
        q = torch.randn(3, 4, 576).bfloat16()
        kv, indices = fp8(20, 576, seed=1), some_indices(3, 20, 15)
        scale, sink = torch.rand(20), torch.zeros(4)
        lengths = torch.tensor([99, -1, 3], dtype=torch.int32)
        given = [q, kv, indices, scale, sink, lengths]
        before = [bits(x).clone() for x in given]
        prefill(
            q, kv, indices, kv_scale=scale, attn_sink=sink, topk_length=lengths, backend=backend
        )
        assert all(torch.equal(bits(x), y) for x, y in zip(given, before, strict=True))
