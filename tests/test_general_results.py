"""What ``sparse_mla_prefill`` returns: statistics on request, given buffers, sinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from sparse_mla import dispatch, sparse_mla_prefill, sparse_mla_q8kv8_prefill_fwd

BACKENDS = ["reference", "cpu"]
UNDISTURBED = ["reference", "cpu"]
E4M3 = torch.float8_e4m3fn


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DISTURBANCES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def inputs(s_q: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unquantised q [s_q, 2, 512] and kv [3, 512], and indices with one invalid slot."""
    g = torch.Generator().manual_seed(s_q)
    q, kv = torch.randn(s_q, 2, 512, generator=g), torch.randn(3, 512, generator=g)
    return q, kv, torch.tensor([[0, 2, -1, 1]] * s_q, dtype=torch.int32)


def test_stats_only_where_asked_for() -> None:
    q, kv, indices = inputs()
    out = sparse_mla_prefill(q, kv, indices)
    with_stats = sparse_mla_prefill(q, kv, indices, return_stats=True)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, with_stats[0])
    assert [x.dtype for x in with_stats] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("s_q", [1, 3])
def test_a_float32_out_keeps_what_bfloat16_rounds_away(backend: str, s_q: int) -> None:
    q, kv, indices = inputs(s_q)
    out = torch.full((s_q, 2, 512), math.nan)
    rounded = sparse_mla_prefill(q, kv, indices, backend=backend)
    assert sparse_mla_prefill(q, kv, indices, backend=backend, out=out) is out
    assert torch.equal(out.bfloat16(), rounded)
    rows = kv[[0, 2, 1]].double()
    p = torch.softmax((q.double() @ rows.T) * 512**-0.5, dim=-1)
    torch.testing.assert_close(out.double(), p @ rows, rtol=1e-5, atol=1e-6)


def test_a_float32_out_through_the_op_is_the_same() -> None:
    q, kv, indices = inputs(2)
    out, compiled = torch.empty(2, 2, 512), torch.empty(2, 2, 512)
    sparse_mla_prefill(q, kv, indices, out=out)
    torch.compile(sparse_mla_prefill, fullgraph=True, backend="eager")(q, kv, indices, out=compiled)
    assert torch.equal(compiled, out)


def test_given_outputs_are_written_and_returned() -> None:
    q, kv, indices = inputs()
    given = (
        torch.full((1, 2, 512), math.nan, dtype=torch.bfloat16),
        torch.full((1, 2), math.nan),
        torch.full((1, 2), math.nan),
    )
    names = dict(zip(("out", "max_logits", "lse"), given, strict=True))
    results = sparse_mla_prefill(q, kv, indices, return_stats=True, **names)
    want = sparse_mla_prefill(q, kv, indices, return_stats=True)
    assert all(a is b for a, b in zip(results, given, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(results, want, strict=True))
    assert sparse_mla_prefill(q, kv, indices, **names) is given[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sink_weighs_on_out_alone(backend: str) -> None:
    """One slot with logit 0: sink 0 halves out, -inf leaves it, +inf empties it."""
    kv = torch.full((1, 512), 3.0)
    q, indices = torch.zeros(1, 5, 512), torch.zeros(1, 1, dtype=torch.int32)
    sink = torch.tensor([-math.inf, -1e30, 0.0, 1e30, math.inf])
    out, max_logits, lse = sparse_mla_prefill(
        q, kv, indices, attn_sink=sink, backend=backend, return_stats=True
    )
    assert dispatch.last_backend() == backend
    assert out[0, :, 0].tolist() == [3.0, 3.0, 1.5, 0.0, 0.0]
    assert bool((max_logits == 0).all())
    assert bool((lse == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_on_an_empty_row_changes_nothing(backend: str) -> None:
    q, kv = torch.zeros(1, 3, 512), torch.ones(2, 512)
    indices = torch.full((1, 4), -1, dtype=torch.int32)
    sink = torch.tensor([-math.inf, 0.0, math.inf])
    out, max_logits, lse = sparse_mla_prefill(
        q, kv, indices, attn_sink=sink, backend=backend, return_stats=True
    )
    assert dispatch.last_backend() == backend
    assert bool((out == 0).all())
    assert bool((max_logits == -math.inf).all())
    assert bool((lse == math.inf).all())


def test_no_gradient_is_recorded_where_grad_mode_is_off() -> None:
    q, kv, indices = inputs()
    with torch.no_grad():
        out = sparse_mla_prefill(q.requires_grad_(), kv, indices)
    assert not out.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q_scale", "kv_scale", "attn_sink", "out", "max_logits", "lse"])
def test_strict_results_record_no_gradient(name: str, backend: str, monkeypatch: Any) -> None:
    """Whatever requires one: the results are leaves of no graph, given ones too."""
    monkeypatch.setenv("SPARSE_MLA_BACKEND", backend)
    q, kv = torch.ones(1, 64, 512).to(E4M3), torch.ones(3, 1, 512).to(E4M3)
    more = {"q_scale": torch.ones(1), "kv_scale": torch.ones(1), "attn_sink": torch.zeros(64)}
    shapes = {"out": (1, 64, 512), "max_logits": (1, 64), "lse": (1, 64)}
    if name in shapes:
        dtype = torch.bfloat16 if name == "out" else torch.float32
        more[name] = torch.empty(shapes[name], dtype=dtype)
    more[name].requires_grad_()
    results = sparse_mla_q8kv8_prefill_fwd(
        q, kv, torch.zeros(1, 1, 128, dtype=torch.int32), 1.0, **more
    )
    assert dispatch.last_backend() == backend
    assert all(result.grad_fn is None for result in results)


def test_under_inference_mode() -> None:
    q, kv, indices = inputs()
    want = sparse_mla_prefill(q, kv, indices)
    with torch.inference_mode():
        assert torch.equal(sparse_mla_prefill(q, kv, indices), want)


@pytest.mark.parametrize("backend", UNDISTURBED)
@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_process_wide_defaults_do_not_matter(disturb: str, backend: str) -> None:
    """Model loaders set default dtypes and devices, and forget to set them back."""
    g = torch.Generator().manual_seed(4)
    q, kv = (torch.randn(*shape, generator=g).to(E4M3) for shape in ((3, 64, 576), (90, 576)))
    indices = torch.randint(-2, 92, (3, 128), dtype=torch.int32, generator=g)
    lengths, scale = torch.tensor([128, 50, 0], dtype=torch.int32), torch.rand(90) + 0.5

    def call() -> tuple[torch.Tensor, ...]:
        return sparse_mla_prefill(
            q, kv, indices, None, 0.5, scale,
            topk_length=lengths, attn_sink=sink, backend=backend, return_stats=True,
        )  # fmt: skip

    sink = torch.zeros(64)
    want = call()
    with DISTURBANCES[disturb]():
        got = call()
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))
