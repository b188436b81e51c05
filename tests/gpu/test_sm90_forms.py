"""What the strict operator promises, for calls that only the general one takes.

Few heads, few queries over clusters of CTAs, mixes of kernels, scales a token, float queries, rows
that lie apart: none of them waits, allocates, pads or copies, all can be captured, run on any
stream, thread and device, and give the same bits each time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hopper import (
    BACKEND,
    DEVICE,
    E4M3,
    LIMITS,
    NAN_BYTE,
    ON_GPU,
    Results,
    assert_equal_bits,
    at_once,
    bits,
    busy_stream,
    drawn,
    generator,
    launches,
    no_waiting,
    scalar,
)

from sparse_mla import dispatch, jit, quantize, sparse_mla_prefill
from sparse_mla.backends import sm90_plan
from sparse_mla.jit_driver import check, driver
from sparse_mla.testing import Inputs, allocate_outputs, compare, make_problem

NAMES = ("out", "max_logits", "lse")
RUNS = 50


@dataclass(frozen=True)
class Form:
    """A call, and what it should run."""

    s_q: int
    h_q: int
    topk: int
    d_qk: int = 576
    q_dtype: torch.dtype = E4M3
    q_scales: bool = False  # a token and head; else one
    kv_scales: bool = False  # a token; else one
    q_scale_left_out: bool = False
    apart: bool = False  # rows of q, kv and indices are parts of larger rows
    parts: int = 1  # launches of prefill kernels
    split: bool = False  # over clusters, on a whole GPU

    @property
    def quantised(self) -> bool:
        return self.q_dtype != E4M3


FORMS = {
    "16-heads": Form(150, 16, 256),
    "one-query": Form(1, 16, 2048, split=True),
    "one-query-128-heads": Form(1, 128, 2048, d_qk=512, split=True),
    "two-kernels": Form(600, 80, 512, parts=2),
    "kv-scales": Form(150, 20, 256, q_scales=True, kv_scales=True),
    "kv-scales-one-query": Form(1, 100, 2048, kv_scales=True, split=True),
    "q-scales-64-heads": Form(700, 64, 512, q_scales=True),
    "bfloat16-q": Form(150, 20, 100, q_dtype=torch.bfloat16, q_scale_left_out=True),
    "float32-q-given-scales": Form(3, 8, 1000, q_dtype=torch.float32, q_scales=True, split=True),
    "rows-apart": Form(150, 33, 100, apart=True),
    "bfloat16-q-rows-apart": Form(
        5, 12, 1000, q_dtype=torch.bfloat16, q_scale_left_out=True, kv_scales=True, apart=True,
        split=True,
    ),
}  # fmt: skip

each_form = pytest.mark.parametrize("form", list(FORMS.values()), ids=list(FORMS))


def spread(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """The same rows as parts of longer ones, whose other bytes are NaN."""
    *rows, width = x.shape
    buffer = torch.empty(*rows, before + width + after, dtype=x.dtype, device=x.device)
    buffer.view(torch.uint8).fill_(NAN_BYTE)
    view = buffer[..., before : before + width]
    return view.copy_(x)


def inputs_of(form: Form, seed: int = 0) -> Inputs:
    """Every optional tensor is there, and different from seed to seed."""
    s_q, h_q, topk, s_kv = form.s_q, form.h_q, form.topk, 3000
    random = generator(1000 + seed)
    inputs = drawn(s_q, s_kv, h_q, form.d_qk, topk, seed=10 * seed, sigma=2.0)
    lengths = (torch.arange(s_q, device=DEVICE, dtype=torch.int32) * (17 + seed)) % (topk + 1)
    lengths[::4] = topk - seed
    inputs = replace(
        inputs,
        q_scale=scalar(0.7 + 0.01 * seed),
        kv_scale=scalar(0.3 + 0.01 * seed),
        attn_sink=torch.linspace(-3.0, 3.0 + seed, h_q, device=DEVICE),
        topk_length=lengths,
    )
    usual = inputs.sm_scale  # for scales of 0.7 and 0.3
    if form.kv_scales:
        scales = torch.rand(s_kv, generator=random, device=DEVICE) * 0.5 + 0.1
        inputs = replace(inputs, kv_scale=scales)
    if form.quantised:
        q = torch.randn(s_q, h_q, form.d_qk, generator=random, device=DEVICE).to(form.q_dtype)
        inputs = replace(inputs, q=q, sm_scale=usual * 0.7)
    if form.q_scales:
        size = 0.005 if form.quantised else 0.5
        scales = torch.rand(s_q, h_q, generator=random, device=DEVICE) * size + size
        inputs = replace(inputs, q_scale=scales)
    if form.q_scale_left_out:
        inputs = replace(inputs, q_scale=None)
    if form.apart:
        inputs = replace(
            inputs,
            q=spread(inputs.q, 64, 16),
            kv=spread(inputs.kv, 0, 656 - form.d_qk),
            indices=spread(inputs.indices, 1, 2),
        )
    return inputs


def run(inputs: Inputs, outputs: Results | None = None) -> Results:
    """One call of the operator, on the kernels."""
    given = {} if outputs is None else dict(zip(NAMES, outputs, strict=True))
    got = sparse_mla_prefill(**vars(inputs), **given, return_stats=True)
    assert dispatch.last_backend() == BACKEND
    return got


def tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: x for name, x in vars(inputs).items() if isinstance(x, torch.Tensor)}


def overwrite(static: Inputs, new: Inputs) -> None:
    for name, tensor in tensors(static).items():
        tensor.copy_(getattr(new, name))


def assert_same(got: Results, want: Results, what: object = "") -> None:
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert_equal_bits(a, b, f"{name} {what}")


@pytest.mark.parametrize("multiprocessors", [132, 114])
@each_form
def test_which_kernels_a_form_runs(form: Form, multiprocessors: int) -> None:
    """By the plan alone; `test_results_are_right` sees that the kernels launched are these."""
    parts = sm90_plan.plan(form.s_q, form.h_q, form.topk, multiprocessors, form.kv_scales)
    assert len(parts) == form.parts
    assert {part.ctas_per_item > 1 for part in parts} == {form.split}


@each_form
def test_results_are_right(form: Form) -> None:
    inputs = inputs_of(form)
    outputs = allocate_outputs(inputs)
    with launches() as parts:
        run(inputs, outputs)
    if ON_GPU:
        assert len(parts) == form.parts
        assert {part.ctas_per_item > 1 for part in parts} == {form.split}
    if form.quantised:
        q, q_scale = quantize.quantize_queries(inputs.q, inputs.q_scale)
        inputs = replace(inputs, q=q, q_scale=q_scale)
    compare(make_problem(inputs, outputs), LIMITS, queries=range(0, form.s_q, -(-form.s_q // 8)))


@pytest.mark.cuda_only
@each_form
def test_a_call_does_not_wait(form: Form) -> None:
    inputs = inputs_of(form)
    want = run(inputs)
    before, after = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    before.record()
    with no_waiting():
        got = run(inputs)
    after.record()
    assert not before.query(), "the GPU was not busy any more: nothing is shown"
    assert not after.query()
    assert_same(got, want)


@pytest.mark.cuda_only
@each_form
def test_nothing_is_padded_or_copied(form: Form) -> None:
    """With outputs given a call allocates the FP8 q of a float one, and its scales where it finds
    them: their bytes and no more.
    """
    inputs = inputs_of(form)
    outputs = allocate_outputs(inputs)
    run(inputs, outputs)
    before = torch.cuda.memory_stats()
    run(inputs, outputs)
    after = torch.cuda.memory_stats()
    made = [form.s_q * form.h_q * form.d_qk] if form.quantised else []
    made += [form.s_q * form.h_q * 4] if form.q_scale_left_out else []

    def grown(what: str) -> int:
        return int(after[f"{what}.all.allocated"] - before[f"{what}.all.allocated"])

    assert grown("allocation") == len(made)
    assert grown("requested_bytes") == sum(made)


def nodes(call: Callable[[], object]) -> int:
    """What a call puts on the GPU: kernels, copies, fills."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    count = ctypes.c_size_t()
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    library = driver()
    check(library, library.cuGraphGetNodes(raw, None, ctypes.byref(count)))
    return count.value


@pytest.mark.cuda_only
@each_form
def test_a_call_is_its_kernels_and_nothing_else(form: Form) -> None:
    """A launch for each part of the plan, one before them for a float q: no combining, no fill."""
    inputs = inputs_of(form)
    outputs = allocate_outputs(inputs)
    run(inputs, outputs)

    def twice() -> None:
        run(inputs, outputs)
        run(inputs, outputs)

    assert nodes(twice) == 2 * nodes(lambda: run(inputs, outputs))
    assert nodes(lambda: run(inputs, outputs)) == form.parts + form.quantised


@pytest.mark.cuda_only
@each_form
def test_a_graph_of_the_first_call_replayed_with_other_values(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are loaded while the capture runs; then every tensor changes in place."""
    monkeypatch.setattr(jit, "_kernels", {})
    static = inputs_of(form)
    outputs = allocate_outputs(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(static, outputs)
    assert all(x.isnan().all() for x in outputs), "capturing must not run anything"
    for seed in (0, 1, 2):
        new = inputs_of(form, seed)
        overwrite(static, new)
        for x in outputs:
            x.fill_(math.nan)
        graph.replay()
        assert_same(outputs, run(replace(new, sm_scale=static.sm_scale)), seed)


@pytest.mark.cuda_only
@each_form
def test_each_value_that_a_replay_reads_anew(form: Form) -> None:
    """One at a time, so that a value that was baked in cannot hide behind another."""
    for name in tensors(inputs_of(form)):
        static, other = inputs_of(form), inputs_of(form, 3)
        outputs = allocate_outputs(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(static, outputs)
        graph.replay()
        old = outputs[0].clone()
        getattr(static, name).copy_(getattr(other, name))
        graph.replay()
        assert not torch.equal(bits(outputs[0]), bits(old)), name
        assert_same(outputs, run(static), f"with another {name}")


@pytest.mark.cuda_only
@each_form
def test_inputs_made_on_a_side_stream(form: Form) -> None:
    """The call runs behind what makes its inputs, and before what reads and reuses its outputs."""
    static, new = inputs_of(form), inputs_of(form, 1)
    want = run(new)
    outputs = allocate_outputs(static)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        overwrite(static, new)
        run(static, outputs)
        copies = tuple(x.clone() for x in outputs)
        for x in outputs:
            x.zero_()
    stream.synchronize()
    assert_same(copies, want)  # type: ignore[arg-type]
    assert not any(x.any() for x in outputs), "written after the call's turn"


@pytest.mark.cuda_only
@each_form
def test_runs_are_equal_while_another_stream_is_busy(form: Form) -> None:
    inputs = inputs_of(form)
    want = run(inputs)
    outputs = allocate_outputs(inputs)
    wrong = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with busy_stream() as more:
        for turn in range(RUNS):
            more(turn)
            for x in outputs:
                x.fill_(math.nan)
            run(inputs, outputs)
            for k, (a, b) in enumerate(zip(outputs, want, strict=True)):
                wrong[k] += (bits(a) != bits(b)).any()
    assert wrong.tolist() == [0, 0, 0], f"runs that differ, of {RUNS}"


ON_A_CPU = ("one-query", "rows-apart")


def test_threads_of_different_forms() -> None:
    """Each with a stream of its own, all at once: no launch takes another's arguments."""
    calls = 20 if ON_GPU else 1
    inputs = {name: inputs_of(FORMS[name]) for name in (FORMS if ON_GPU else ON_A_CPU)}
    wanted = {name: run(x) for name, x in inputs.items()}

    def work(name: str) -> None:
        for _ in range(calls):
            assert_same(run(inputs[name]), wanted[name])

    at_once({name: partial(work, name) for name in inputs})


@pytest.mark.cuda_only
@each_form
def test_a_device_that_is_not_the_current_one(form: Form) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    inputs = inputs_of(form)
    want = run(inputs)
    moved: dict[str, Any] = {name: x.to("cuda:1") for name, x in tensors(inputs).items()}
    got = run(replace(inputs, **moved))
    assert torch.cuda.current_device() == 0
    assert {x.device for x in got} == {torch.device("cuda:1")}
    assert_same(tuple(x.to("cuda:0") for x in got), want)  # type: ignore[arg-type]


@each_form
def test_a_query_does_not_depend_on_the_others(form: Form) -> None:
    """In another place of a call with as many queries: a query's bits are the same."""
    inputs = inputs_of(form)
    whole = run(inputs)
    order = torch.randperm(form.s_q, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    by_query = {"q": inputs.q, "indices": inputs.indices, "topk_length": inputs.topk_length}
    if form.q_scales:
        by_query["q_scale"] = inputs.q_scale
    moved: dict[str, Any] = {}
    for name, x in by_query.items():
        assert x is not None
        moved[name] = x.view(torch.uint8)[order].view(E4M3) if x.dtype == E4M3 else x[order]
    got = run(replace(inputs, **moved))
    if ON_GPU:  # the CPU backend's sums depend on which queries share a block
        assert_same(got, tuple(x[order] for x in whole))  # type: ignore[arg-type]
    torch.testing.assert_close(got[2], whole[2][order], rtol=1e-4, atol=1e-4)


def test_one_row_for_every_query() -> None:
    """Strides of 0: tokens that share q, or that select the same rows."""
    inputs = drawn(6, 300, h_q=20, topk=100)
    for name in ("q", "indices"):
        shared = getattr(inputs, name)[2:3].expand(6, -1, -1)
        dense = shared.clone(memory_format=torch.contiguous_format)
        assert shared.stride(0) == 0
        assert_same(run(replace(inputs, **{name: shared})), run(replace(inputs, **{name: dense})))
