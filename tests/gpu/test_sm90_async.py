"""Nothing waits, nothing allocates: CUDA graphs, streams, threads, devices, ``torch.compile``."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hopper import (
    BACKEND,
    DEVICE,
    LIMITS,
    ON_GPU,
    assert_equal_bits,
    assert_same_bits,
    at_once,
    bits,
    drawn,
    general,
    no_waiting,
    results,
    scalar,
    strict,
)

from sparse_mla import dispatch, jit, sparse_mla_prefill, sparse_mla_q8kv8_prefill_fwd
from sparse_mla.testing import Inputs, allocate_outputs, compare

NAMES = ("out", "max_logits", "lse")
TRIALS = 8


def complete(seed: int = 0, s_q: int = 40, h_q: int = 64, topk: int = 256) -> Inputs:
    """Inputs with every optional tensor, all of them different from seed to seed."""
    inputs = drawn(s_q, 900, h_q, topk=topk, seed=100 * seed, sigma=2.0)
    lengths = (torch.arange(s_q, device=DEVICE, dtype=torch.int32) * (17 + seed)) % (topk + 1)
    return replace(
        inputs,
        q_scale=scalar(0.7 + 0.01 * seed),
        kv_scale=scalar(0.3 + 0.01 * seed),
        attn_sink=torch.linspace(-3.0, 3.0 + seed, h_q, device=DEVICE),
        topk_length=lengths,
    )


def buffers(inputs: Inputs) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES, allocate_outputs(inputs), strict=True))


def overwrite(static: Inputs, new: Inputs) -> None:
    """The values of ``new`` into the tensors of ``static``, on the current stream."""
    for name, tensor in vars(static).items():
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(getattr(new, name))


@pytest.mark.cuda_only
@pytest.mark.parametrize("given", [True, False], ids=["outputs-given", "outputs-allocated"])
def test_a_call_does_not_wait(given: bool) -> None:
    inputs = complete()
    want = strict(inputs)
    outputs = buffers(inputs) if given else {}
    bf16 = torch.randn(40, 64, 576, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with no_waiting():
        got = sparse_mla_q8kv8_prefill_fwd(**vars(inputs), **outputs)
        sparse_mla_prefill(**vars(inputs), **outputs)
        sparse_mla_prefill(**{**vars(inputs), "q": bf16, "q_scale": 0.02, "kv_scale": 0.3})
        assert dispatch.last_backend() == BACKEND
    if not given:
        for a, b in zip(got, results(want), strict=True):
            assert_equal_bits(a, b, "result")


@pytest.mark.cuda_only
def test_a_call_returns_while_the_gpu_is_busy() -> None:
    inputs = complete()
    strict(inputs)
    before, after = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(400_000_000)
    before.record()
    got = sparse_mla_q8kv8_prefill_fwd(**vars(inputs))
    after.record()
    assert not before.query(), "the GPU was not busy any more: nothing is shown"
    assert not after.query()
    assert_equal_bits(got[0], strict(inputs).out, "out")


@pytest.mark.cuda_only
@pytest.mark.parametrize(("given", "expected"), [(True, 0), (False, 3)])
@pytest.mark.parametrize("call", [sparse_mla_q8kv8_prefill_fwd, sparse_mla_prefill])
def test_nothing_but_the_outputs_is_allocated(call: Any, given: bool, expected: int) -> None:
    inputs = complete()
    outputs = buffers(inputs) if given else {}
    call(**vars(inputs), **outputs)

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = allocations()
    returned = call(**vars(inputs), **outputs)
    assert allocations() - before == expected
    assert dispatch.last_backend() == BACKEND
    del returned


def captured(inputs: Inputs, outputs: dict[str, torch.Tensor]) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla_q8kv8_prefill_fwd(**vars(inputs), **outputs)
    assert dispatch.last_backend() == BACKEND
    return graph


@pytest.mark.cuda_only
def test_a_graph_replayed_with_other_values() -> None:
    """q, kv, indices, lengths, sinks and scales change in place; the graph answers for the new."""
    static = complete()
    outputs = buffers(static)
    strict(static)
    graph = captured(static, outputs)
    assert all(x.isnan().all() for x in outputs.values()), "capturing must not run anything"
    for seed in (0, 1, 2, 3):
        overwrite(static, complete(seed))
        for x in outputs.values():
            x.fill_(torch.nan)
        graph.replay()
        want = strict(complete(seed))
        for name in NAMES:
            assert_equal_bits(outputs[name], getattr(want, name), name)
    compare(want, LIMITS)


@pytest.mark.cuda_only
def test_each_value_that_a_replay_reads_anew() -> None:
    """One at a time, so that a value that was baked in cannot hide behind another."""
    for name in ("q", "kv", "indices", "q_scale", "kv_scale", "attn_sink", "topk_length"):
        static, other = complete(), complete(5)
        outputs = buffers(static)
        graph = captured(static, outputs)
        graph.replay()
        old = outputs["out"].clone()
        getattr(static, name).copy_(getattr(other, name))
        graph.replay()
        assert not torch.equal(bits(outputs["out"]), bits(old)), name
        want = strict(complete(), **{name: getattr(other, name)})
        for result in NAMES:
            assert_equal_bits(outputs[result], getattr(want, result), f"{result}, new {name}")


@pytest.mark.cuda_only
def test_a_replay_with_bad_scales_and_without_slots() -> None:
    static = complete()
    outputs = buffers(static)
    graph = captured(static, outputs)
    static.q_scale.fill_(0.0)  # type: ignore[union-attr]
    graph.replay()
    assert static.topk_length is not None
    assert outputs["out"][static.topk_length > 0].isnan().all()
    static.topk_length.zero_()
    graph.replay()
    assert (outputs["out"] == 0).all()
    assert outputs["lse"].isposinf().all()


@pytest.mark.cuda_only
def test_a_graph_captured_by_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is loaded while the capture runs."""
    monkeypatch.setattr(jit, "_kernels", {})
    static = complete()
    outputs = buffers(static)
    graph = captured(static, outputs)
    graph.replay()
    for name, want in zip(NAMES, results(strict(complete())), strict=True):
        assert_equal_bits(outputs[name], want, name)


@pytest.mark.cuda_only
def test_a_graph_that_holds_its_outputs() -> None:
    """Outputs allocated under capture belong to the graph's pool."""
    static = complete()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sparse_mla_q8kv8_prefill_fwd(**vars(static))
        doubled = got[0] * 2
    overwrite(static, complete(2))
    graph.replay()
    want = strict(complete(2))
    assert_equal_bits(got[0], want.out, "out")
    assert_equal_bits(doubled, want.out * 2, "what follows the call in the graph")


@pytest.mark.cuda_only
@pytest.mark.parametrize("trial", range(TRIALS))
def test_inputs_made_on_a_side_stream(trial: int) -> None:
    """The call must run behind what makes its inputs, and before what reads its outputs."""
    static, new = complete(), complete(trial + 1)
    want = strict(new)
    outputs = buffers(static)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        overwrite(static, new)
        sparse_mla_q8kv8_prefill_fwd(**vars(static), **outputs)
        copies = {name: x.clone() for name, x in outputs.items()}
        for x in outputs.values():
            x.zero_()
    stream.synchronize()
    for name in NAMES:
        assert_equal_bits(copies[name], getattr(want, name), name)
        assert not outputs[name].any(), f"{name} was written after the call's turn"


def test_several_threads() -> None:
    """Each with a stream and inputs of its own; the first calls of all of them at once."""
    count, calls = 8, 20 if ON_GPU else 2
    inputs = [complete(k, s_q=10 + k, h_q=64 * (1 + k % 2)) for k in range(count)]
    wanted = [strict(x) for x in inputs]

    def work(k: int) -> None:
        assert dispatch.last_backend() == ""
        for _ in range(calls):
            problem = strict(inputs[k])
            assert_same_bits(problem, wanted[k])

    at_once({f"thread {k}": partial(work, k) for k in range(count)})


@pytest.mark.cuda_only
def test_threads_that_need_the_kernel_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded once, and each thread's first CUDA call may be this one."""
    inputs = complete()
    want = strict(inputs)
    torch.cuda.synchronize()
    monkeypatch.setattr(jit, "_kernels", {})
    outputs = [buffers(inputs) for _ in range(8)]
    threads = [
        threading.Thread(target=sparse_mla_q8kv8_prefill_fwd, kwargs={**vars(inputs), **given})
        for given in outputs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(jit._kernels) == 1
    for given in outputs:
        for name in NAMES:
            assert_equal_bits(given[name], getattr(want, name), name)


def on_device(inputs: Inputs, device: str) -> Inputs:
    moved = {n: x.to(device) for n, x in vars(inputs).items() if isinstance(x, torch.Tensor)}
    return replace(inputs, **moved)


@pytest.mark.cuda_only
@pytest.mark.parametrize("order", [("cuda:1", "cuda:0"), ("cuda:0", "cuda:1")], ids=str)
def test_a_device_that_is_not_the_current_one(
    order: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    want = strict(complete())
    monkeypatch.setattr(jit, "_kernels", {})
    assert torch.cuda.current_device() == 0
    for device in order:
        problem = strict(on_device(complete(), device))
        assert torch.cuda.current_device() == 0
        for got, expected in zip(results(problem), results(want), strict=True):
            assert got.device == torch.device(device)
            assert_equal_bits(got.to("cuda:0"), expected, device)


@pytest.mark.parametrize("operator", ["strict", "general"])
def test_compiled_with_fullgraph(operator: str) -> None:
    call = sparse_mla_q8kv8_prefill_fwd if operator == "strict" else sparse_mla_prefill
    inputs = complete()
    q = inputs.q if operator == "strict" else inputs.q[:, :33]
    sink = inputs.attn_sink if operator == "strict" else None
    inputs = replace(inputs, q=q, attn_sink=sink)
    more = {} if operator == "strict" else {"return_stats": True}

    others = {name: x for name, x in vars(inputs).items() if name not in ("q", "kv", "indices")}

    def layer(q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor) -> Any:
        out, max_logits, lse = call(q, kv, indices, **others, **more)
        return out * 2, max_logits, lse

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = compiled(inputs.q, inputs.kv, inputs.indices)
    assert dispatch.last_backend() == BACKEND
    want = (strict if operator == "strict" else general)(inputs)
    for a, b in zip(got, (want.out * 2, want.max_logits, want.lse), strict=True):
        assert_equal_bits(a, b, "result")


@pytest.mark.cuda_only
def test_compiled_into_given_outputs_under_a_graph() -> None:
    static = complete()
    outputs = buffers(static)
    strict(static)
    others = {name: x for name, x in vars(static).items() if name != "q"}
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q: torch.Tensor) -> None:
        sparse_mla_q8kv8_prefill_fwd(q, **others, **outputs)

    layer(static.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(static.q)
    overwrite(static, complete(3))
    for x in outputs.values():
        x.fill_(torch.nan)
    graph.replay()
    for name, want in zip(NAMES, results(strict(complete(3))), strict=True):
        assert_equal_bits(outputs[name], want, name)


def test_a_default_device_does_not_matter() -> None:
    inputs = complete()
    want = strict(inputs)
    torch.set_default_device("meta")
    try:
        got = sparse_mla_q8kv8_prefill_fwd(**vars(inputs))
    finally:
        torch.set_default_device(None)
    for a, b in zip(got, results(want), strict=True):
        assert_equal_bits(a, b, "result")
