"""What the tests of the Hopper kernel share: the device, random inputs made on it, checked calls.

Every call goes through a public operator, into outputs filled with NaN, and asserts which backend
ran it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from sparse_mla import dispatch, prepared, sparse_mla_prefill, sparse_mla_q8kv8_prefill_fwd
from sparse_mla.backends import sm90
from sparse_mla.backends.sm90_plan import WIDE_HEADS, Part
from sparse_mla.params import PrefillProblem
from sparse_mla.testing import Inputs, Tolerance, make_problem

DEVICE = os.environ.get("SPARSE_MLA_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
BACKEND = "sm90" if ON_GPU else "cpu"

E4M3 = torch.float8_e4m3fn
NAN_BYTE = 0xFF

LIMITS = Tolerance(out=0.0625, absolute=1.6e-2, relative=1e-3)
"""Of any row. FP8 wgmma keeps about 14 bits while it sums: logits of standard deviation 1 were seen
to be off by 8e-3, those of 4 by 1.1e-2 + 1e-3 relative; where the sums are exact, EXACT_SUMS is the
limit. And half a step of e4m3 is 2**-4 of the smallest number of a binade: where one slot holds
nearly all of the mass, its rounding may show in full. What many slots average out to is in
test_sm90_accuracy."""

EXACT_STATISTICS = Tolerance(out=0.0625, absolute=2e-3, relative=1e-3)
"""What the kernels for few heads reach, which sum QK in three parts."""

EXACT_SUMS = Tolerance(out=0.0625, absolute=2e-5, relative=2e-6)
"""Where q and kv are such that 14 bits hold every partial sum of QK."""

INVALID = (-1, -2, -(2**31), 2147480000, 2143289344, 2**31 - 1)
"""Indices that select nothing in any cache used here; so does ``s_kv`` of each."""

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed e4m3 numbers."""
    return torch.randn(shape, generator=generator(seed), device=DEVICE).to(E4M3)


def scalar(value: float) -> torch.Tensor:
    """A scale, as the strict operator takes it."""
    return torch.full((1,), value, dtype=torch.float32, device=DEVICE)


def drawn(
    s_q: int,
    s_kv: int,
    h_q: int = 64,
    d_qk: int = 576,
    topk: int = 128,
    *,
    seed: int = 0,
    sigma: float = 1.0,
) -> Inputs:
    """Random rows and valid random slots; no scale is 1 or a power of two."""
    q_scale, kv_scale = 0.7, 0.3
    slots = torch.randint(
        s_kv, (s_q, 1, topk), generator=generator(seed), device=DEVICE, dtype=torch.int32
    )
    return Inputs(
        q=fp8(s_q, h_q, d_qk, seed=seed + 1),
        kv=fp8(s_kv, 1, d_qk, seed=seed + 2),
        indices=slots,
        sm_scale=sigma / (math.sqrt(d_qk) * q_scale * kv_scale),
        q_scale=scalar(q_scale),
        kv_scale=scalar(kv_scale),
    )


def strict(inputs: Inputs, outputs: Results | None = None, **changes: Any) -> PrefillProblem:
    """One call of the strict operator; the problem it solved, to be compared."""
    inputs = replace(inputs, **changes)
    problem = make_problem(inputs, outputs)
    returned = sparse_mla_q8kv8_prefill_fwd(
        **vars(inputs), out=problem.out, max_logits=problem.max_logits, lse=problem.lse
    )
    assert dispatch.last_backend() == BACKEND
    assert returned[0] is problem.out
    assert returned[1] is problem.max_logits
    assert returned[2] is problem.lse
    return problem


def general(inputs: Inputs, outputs: Results | None = None, **changes: Any) -> PrefillProblem:
    """One call of the general operator; the problem it solved, to be compared."""
    inputs = replace(inputs, **changes)
    problem = make_problem(inputs, outputs)
    sparse_mla_prefill(
        **vars(inputs), out=problem.out, max_logits=problem.max_logits, lse=problem.lse
    )
    assert dispatch.last_backend() == BACKEND
    return problem


def either(inputs: Inputs, outputs: Results | None = None) -> PrefillProblem:
    """The strict operator where it takes the problem, else the general one."""
    takes = inputs.q.shape[1] % 64 == 0 and inputs.indices.shape[-1] % 128 == 0
    return (strict if takes else general)(inputs, outputs)


@contextmanager
def forced(heads_per_item: int, ctas_per_item: int = 1) -> Iterator[None]:
    """All heads by one kernel, whatever the plan would say; asserts that it was launched."""
    if not ON_GPU:
        yield
        return

    def plan(problem: PrefillProblem) -> tuple[Part, ...]:
        return (Part(heads_per_item, 0, problem.h_q, ctas_per_item),)

    with mock.patch.object(sm90, "plan", plan), launches() as parts:
        yield
    assert parts
    assert {(part.heads_per_item, part.ctas_per_item) for part in parts} == {
        (heads_per_item, ctas_per_item)
    }


@contextmanager
def wide() -> Iterator[None]:
    """All heads by the kernel for 64."""

    def plan(problem: PrefillProblem) -> tuple[Part, ...]:
        return (Part(WIDE_HEADS, 0, problem.h_q),)

    with mock.patch.object(sm90, "plan", plan), none_prepared():
        yield


@contextmanager
def launches() -> Iterator[list[Part]]:
    """The parts that are launched within."""
    found: list[Part] = []
    real = sm90.prepare_part

    def prepare_part(problem: PrefillProblem, part: Part) -> Any:
        found.append(part)
        return real(problem, part)

    with mock.patch.object(sm90, "prepare_part", prepare_part), none_prepared():
        yield found


@contextmanager
def none_prepared() -> Iterator[None]:
    """Each call within is checked and planned, and none is remembered."""
    with (
        mock.patch.object(prepared, "run", return_value=None),
        mock.patch.object(prepared, "remember"),
    ):
        yield


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the GPU is an error in here."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def at_once(works: dict[str, Callable[[], None]]) -> None:
    """Each in a thread and on a stream of its own, all let go together; none may fail."""
    if ON_GPU:
        torch.cuda.synchronize()
    start = threading.Barrier(len(works))
    failures: list[str] = []

    def run(name: str) -> None:
        try:
            start.wait()
            works[name]()
        except Exception as failure:
            failures.append(f"{name}: {failure!r}")

    def on_a_stream(name: str) -> None:
        if not ON_GPU:
            return run(name)
        with torch.cuda.stream(torch.cuda.Stream()):
            return run(name)

    threads = [threading.Thread(target=on_a_stream, args=(name,)) for name in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@contextmanager
def busy_stream() -> Iterator[Callable[[int], None]]:
    """A second stream that multiplies and copies while the calls run, in pieces of uneven size."""
    stream = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    copies = torch.empty(2, 1 << 26, dtype=torch.uint8, device=DEVICE)

    def more(run: int) -> None:
        with torch.cuda.stream(stream):
            n = 128 * (1 + run % 16)
            torch.mm(a[:n], a)
            copies[1, : 1 << (20 + run % 7)] = copies[0, : 1 << (20 + run % 7)]

    yield more
    torch.cuda.synchronize()


def results(problem: PrefillProblem) -> Results:
    return problem.out, problem.max_logits, problem.lse


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: equal even where it is NaN, different where zeros differ in sign."""
    return x.contiguous().view(torch.uint8)


def assert_equal_bits(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    equal = torch.equal(bits(got), bits(want))  # not in the assert: its tensors would be printed
    assert equal, f"{name}: {int((bits(got) != bits(want)).sum())} bytes differ"


def assert_same_bits(got: PrefillProblem, want: PrefillProblem) -> None:
    for name in ("out", "max_logits", "lse"):
        assert_equal_bits(getattr(got, name), getattr(want, name), name)


def assert_empty(problem: PrefillProblem, queries: Any = slice(None)) -> None:
    """These queries have no valid slot, and give what such queries give."""
    assert (problem.out[queries] == 0).all()
    assert (problem.max_logits[queries] == -math.inf).all()
    assert (problem.lse[queries] == math.inf).all()
