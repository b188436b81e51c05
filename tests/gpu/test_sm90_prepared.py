"""Calls like an earlier one on the GPU: launched without checks or a plan, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hopper import (
    DEVICE,
    LIMITS,
    assert_equal_bits,
    assert_same_bits,
    drawn,
    general,
    no_waiting,
    none_prepared,
    results,
    scalar,
    strict,
)

from sparse_mla import checks, dispatch, prepared, sparse_mla_q8kv8_prefill_fwd
from sparse_mla.backends import sm90
from sparse_mla.backends.sm90_plan import Part
from sparse_mla.params import PrefillProblem
from sparse_mla.testing import Inputs, compare

pytestmark = pytest.mark.cuda_only


def inputs_of(seed: int, h_q: int = 64, d_qk: int = 576, optional: bool = True) -> Inputs:
    """Tensors that lie elsewhere and hold something else for each seed."""
    inputs = drawn(40, 900, h_q, d_qk, topk=256, seed=100 * seed, sigma=2.0)
    inputs = replace(inputs, q_scale=scalar(0.7 + 0.01 * seed), sm_scale=0.03)
    if not optional:
        return inputs
    lengths = (torch.arange(40, device=DEVICE, dtype=torch.int32) * (17 + seed)) % 257
    sink = torch.linspace(-3.0, 3.0 + seed, h_q, device=DEVICE)
    return replace(inputs, attn_sink=sink, topk_length=lengths)


def token_scales(inputs: Inputs, seed: int) -> Inputs:
    """A scale for each head of each query."""
    s_q, h_q, _ = inputs.q.shape
    scales = torch.rand(
        s_q, h_q, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)
    )
    return replace(inputs, q_scale=scales + 0.5)


def checked(call: Any, inputs: Inputs) -> PrefillProblem:
    """What the call gives when nothing is prepared."""
    with none_prepared():
        problem: PrefillProblem = call(inputs)
    return problem


def only_prepared(call: Any, inputs: Inputs) -> PrefillProblem:
    """The call, which must not be checked."""
    with mock.patch.object(checks, "q8kv8_violations"), mock.patch.object(dispatch, "choose") as no:
        problem: PrefillProblem = call(inputs)
    no.assert_not_called()
    return problem


@pytest.mark.parametrize("optional", [True, False], ids=["all", "required"])
@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("h_q", [64, 128])
def test_strict(h_q: int, d_qk: int, optional: bool) -> None:
    wanted = [checked(strict, inputs_of(seed, h_q, d_qk, optional)) for seed in range(3)]
    strict(inputs_of(0, h_q, d_qk, optional))
    for seed in (1, 2, 0):
        with no_waiting():
            got = only_prepared(strict, inputs_of(seed, h_q, d_qk, optional))
        assert_same_bits(got, wanted[seed])
    compare(got, LIMITS)


@pytest.mark.parametrize("optional", [True, False], ids=["all", "required"])
@pytest.mark.parametrize(
    "parts",
    [
        (Part(8, 0, 20),),
        (Part(16, 0, 16, 2), Part(8, 16, 4, 2)),
        (Part(32, 0, 12), Part(8, 12, 8)),
    ],
    ids=str,
)
def test_general_in_parts(parts: tuple[Part, ...], optional: bool) -> None:
    """The second part starts at a head of its own in every tensor that has heads."""
    seeds = [token_scales(inputs_of(seed, 20, optional=optional), seed) for seed in range(3)]
    with mock.patch.object(sm90, "plan", return_value=parts):
        wanted = [checked(general, inputs) for inputs in seeds]
        general(seeds[0])
        for seed in (1, 2, 0):
            got = only_prepared(general, seeds[seed])
            assert_same_bits(got, wanted[seed])
            compare(got, LIMITS)
    prepared.forget()


def test_outputs_of_its_own() -> None:
    """Allocated by another function than those of the first call: as torch.empty would."""
    inputs = inputs_of(0)
    want = strict(inputs)
    first = sparse_mla_q8kv8_prefill_fwd(**vars(inputs))
    with torch.inference_mode():
        inside = sparse_mla_q8kv8_prefill_fwd(**vars(inputs))
    got = only_prepared(lambda x: sparse_mla_q8kv8_prefill_fwd(**vars(x)), inputs)
    for x, y, z, name in zip(first, got, results(want), ("out", "max_logits", "lse"), strict=True):
        assert (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device)
        assert not x.is_inference()
        assert not y.is_inference()
        assert not y.requires_grad
        assert_equal_bits(y, z, name)
    for x, z in zip(inside, results(want), strict=True):
        assert_equal_bits(x, z, "within inference mode")


def test_graph_and_stream() -> None:
    """Captured on a stream of its own after the call was prepared on another one."""
    static, new = inputs_of(0), inputs_of(1)
    want = checked(strict, new)
    call = lambda x: sparse_mla_q8kv8_prefill_fwd(**vars(x))  # noqa: E731
    call(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = only_prepared(call, static)
    for name, tensor in vars(static).items():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(getattr(new, name))
    graph.replay()
    for x, y, name in zip(got, results(want), ("out", "max_logits", "lse"), strict=True):
        assert_equal_bits(x, y, name)


def test_addresses_that_the_kernel_cannot_load_from() -> None:
    inputs = inputs_of(0)
    strict(inputs)
    shifted = torch.empty(inputs.q.numel() + 4, dtype=torch.uint8, device=DEVICE)[4:]
    q = shifted.view(inputs.q.dtype).view(inputs.q.shape).copy_(inputs.q)
    out = sparse_mla_q8kv8_prefill_fwd(**{**vars(inputs), "q": q})[0]
    assert dispatch.last_backend() != "sm90"
    assert (out.float() - strict(inputs).out.float()).abs().max() < 0.1
