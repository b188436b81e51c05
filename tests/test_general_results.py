"""What ``sparse_mla_prefill`` returns: statistics on request, given buffers, sinks."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_mla import dispatch, sparse_mla_prefill

BACKENDS = ["reference", "cpu"]


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


def test_under_inference_mode() -> None:
    q, kv, indices = inputs()
    want = sparse_mla_prefill(q, kv, indices)
    with torch.inference_mode():
        assert torch.equal(sparse_mla_prefill(q, kv, indices), want)
