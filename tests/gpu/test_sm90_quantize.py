"""Float queries to FP8 in one launch: the bytes of the torch path, whatever q and scales are.

Expected values are those of ``quantize.quantize_queries`` on the same device. NaN included: torch
there computes the canonical NaN, whose byte is 0x7F; a CPU keeps the sign that a NaN came with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hopper import (
    BACKEND,
    DEVICE,
    E4M3,
    ON_GPU,
    assert_equal_bits,
    bits,
    drawn,
    generator,
    no_waiting,
)

from sparse_mla import dispatch, jit, quantize, sparse_mla_prefill
from sparse_mla.backends import sm90, sm90_quantize
from sparse_mla.testing import Guarded, guarded_like

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = {2: torch.int16, 4: torch.int32}
SHRINK = 1 if ON_GPU else 512
"""A CPU tries the same logic on sizes that prove nothing."""

ODD_SCALES = (
    0.0, -0.0, -1.0, math.nan, -math.nan, math.inf, -math.inf,
    2.0**-149, 1e-44, 2.0**-127, 2.0**-126, 1.5 * 2.0**-126, 2.0**-91, 1.999 * 2.0**-91, 2.0**-90,
    1.1 * 2.0**-90, 1e-20, 0.0123, 1 / 3, 1.0, 0.7, 2.0, 448.0, 1e5, 1e20, 1.999 * 2.0**99,
    2.0**100, 1.1 * 2.0**100, 2.0**120, 3.4e38,
)  # fmt: skip
"""Scales that mean nothing, that are subnormal, at the limits of the quick division, and usual."""

Pair = tuple[torch.Tensor, torch.Tensor]


def by_kernel(q: torch.Tensor, q_scale: torch.Tensor | None = None) -> Pair:
    if not ON_GPU:
        return quantize.quantize_queries(q, q_scale)
    found = sm90.quantize_queries(q, q_scale)
    assert found is not None
    return found


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> list[Guarded]:
    """What the host side allocates lies between guards and holds NaN bytes at first."""
    made: list[Guarded] = []
    empty = torch.empty

    def guarded(*args: Any, **kwargs: Any) -> torch.Tensor:
        guard = guarded_like(empty(*args, **kwargs))
        guard.buffer.fill_(0xFF)
        made.append(guard)
        return guard.tensor

    class Torch:
        empty = staticmethod(guarded)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(sm90_quantize, "torch", Torch())
    return made


def assert_same(got: Pair, want: Pair, what: object = "") -> None:
    for name, a, b in zip(("stored", "scale"), got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name} {what}"
        assert a.is_contiguous()
        assert_equal_bits(a, b, f"{name} {what}")


def check(q: torch.Tensor, q_scale: torch.Tensor | None = None, what: object = "") -> Pair:
    got = by_kernel(q, q_scale)
    assert_same(got, quantize.quantize_queries(q, q_scale), what)
    return got


def odd_queries(s_q: int, h_q: int, d_qk: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, and rows of all that is not."""
    q = torch.randn(s_q, h_q, d_qk, generator=generator(3), device=DEVICE).to(dtype)
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    rows = q.view(-1, d_qk)
    fillings: list[Callable[[torch.Tensor], Any]] = [
        lambda row: row.zero_(),
        lambda row: row.zero_().neg_(),
        lambda row: row.fill_(math.nan),
        lambda row: row.fill_(-math.inf),
        lambda row: row[::7].fill_(math.nan),
        lambda row: row[1::5].fill_(math.inf),
        lambda row: row[-1:].fill_(-math.inf),
        lambda row: row.zero_()[d_qk // 2 :].fill_(-least),
        lambda row: row.mul_(info.smallest_normal / 4),
        lambda row: row.mul_(info.max / 8),
        lambda row: row[:1].fill_(-info.max),
        lambda row: row[-1:].fill_(info.max),
        lambda row: row.fill_(448.0),
        lambda row: row.zero_()[:1].fill_(448.0),
        lambda row: row.mul_(2.0**-120 if dtype != torch.float16 else 2.0**-10),
    ]
    for number, fill in enumerate(fillings):
        if number < len(rows):
            fill(rows[number])
    return q


def scales_of(kind: str, s_q: int, h_q: int) -> torch.Tensor | None:
    usual = torch.linspace(0.001, 0.9, s_q * h_q, device=DEVICE).view(s_q, h_q)
    one = torch.tensor(0.0123, device=DEVICE)
    forms = {"0-d": one, "one": one.view(1), "token": usual[:, -1].clone(), "row": usual}
    return forms.get(kind)


def forms_of(q: torch.Tensor) -> dict[str, torch.Tensor]:
    """The values of ``q`` where they lie differently in memory, NaN around them."""

    def within(before: int, after: int) -> torch.Tensor:
        *rows, width = q.shape
        buffer = torch.full((*rows, before + width + after), math.nan, dtype=q.dtype, device=DEVICE)
        view = buffer[..., before : before + width]
        return view.copy_(q)

    s_q, h_q, d_qk = q.shape
    size = s_q * (h_q * d_qk + 1)
    apart = torch.full((size,), math.nan, dtype=q.dtype, device=DEVICE)
    tokens_apart = apart.as_strided(q.shape, (h_q * d_qk + 1, d_qk, 1))
    heads = torch.full((s_q, 16, d_qk + 1), math.nan, dtype=q.dtype, device=DEVICE)
    sparse = torch.full((2 * len(q), *q.shape[1:]), math.nan, dtype=q.dtype, device=DEVICE)[1::2]
    return {
        "dense": q,
        "heads first": q.transpose(0, 1).contiguous().transpose(0, 1),
        "every second token": sparse.copy_(q),
        "gaps of 16 bytes": within(32 // q.element_size(), 16 // q.element_size()),
        "gaps of an element": within(1, 0),
        "4-byte gaps": within(4 // q.element_size(), 4 // q.element_size()),
        "an element after each token": tokens_apart.copy_(q),
        "an element after each head of an aligned token": heads[:, :h_q, :d_qk].copy_(q),
        "an element off": guarded_like(q, offset=1).tensor,
    }


@pytest.mark.parametrize("given", ["none", "0-d", "one", "token", "row"])
@pytest.mark.parametrize("d_qk", [512, 576])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_wherever_they_lie(
    dtype: torch.dtype, d_qk: int, given: str, guards: list[Guarded]
) -> None:
    s_q, h_q = 7, 5
    q, q_scale = odd_queries(s_q, h_q, d_qk, dtype), scales_of(given, s_q, h_q)
    for form, x in forms_of(q).items():
        assert_equal_bits(x.nan_to_num(), q.nan_to_num(), form)
        stored, scale = check(x, q_scale, form)
        assert scale.shape == {"none": (s_q, h_q), "token": (s_q,), "row": (s_q, h_q)}.get(
            given, (1,)
        )
        nan = x.isnan()
        assert torch.equal(stored.float().isnan(), nan)
        assert not ON_GPU or (bits(stored).view(nan.shape)[nan] == 0x7F).all()
    for guard in guards:
        guard.check()
    assert not ON_GPU or len(guards) == len(forms_of(q)) * (2 if given == "none" else 1)


@pytest.mark.parametrize(("s_q", "h_q"), [(1, 1), (1, 3), (3, 1), (2, 33), (31, 1), (65, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_fill_no_warp(
    dtype: torch.dtype, s_q: int, h_q: int, guards: list[Guarded]
) -> None:
    wide = odd_queries(s_q + 1, h_q + 1, 576, dtype)
    for q in (wide[1:, 1:], wide[:-1, :-1], wide[1:, :-1].contiguous()):
        check(q)
        check(q, scales_of("row", s_q, h_q))
    for guard in guards:
        guard.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_by_many_scales(dtype: torch.dtype) -> None:
    """65,536 numbers in 128 rows, each row once for each scale: heads that are one in memory."""
    every = torch.arange(-(2**15), 2**15, device=DEVICE, dtype=torch.int32).to(torch.int16)
    rows = every.view(dtype).view(128, 1, 512)
    scales = torch.tensor(ODD_SCALES, device=DEVICE)
    own = (torch.rand(34, generator=generator(), device=DEVICE) * 20 - 10).exp()
    scales = torch.cat([scales, own]).expand(128, 64).contiguous()
    check(rows.expand(128, 64, 512), scales)
    check(rows)
    scattered = every[torch.randperm(2**16, generator=generator(1), device=DEVICE)]
    check(scattered.view(dtype).view(8, 16, 512))


@pytest.mark.parametrize("odd_start", [False, True])
def test_float32_of_any_bits_by_any_scale(odd_start: bool) -> None:
    """With every row its scale: of any bits too, of ODD_SCALES, and found in the row."""
    s_q, h_q = 512 // SHRINK, 64
    shape = (s_q, h_q, 576)
    g = generator(5)
    q = torch.randint(-(2**31), 2**31, shape, generator=g, device=DEVICE).int().view(torch.float32)
    q = guarded_like(q, offset=1).tensor if odd_start else q
    check(q)
    scales = torch.randint(0, 2**31, shape[:2], generator=g, device=DEVICE).int()
    check(q, scales.view(torch.float32))
    odd = torch.tensor(ODD_SCALES, device=DEVICE).repeat(s_q * 3)[: s_q * h_q].view(s_q, h_q)
    check(q, odd)
    # Rows whose largest number is anywhere in float32's range.
    exponents = torch.randint(-149, 128, (s_q, h_q, 1), generator=g, device=DEVICE)
    check(torch.ldexp(torch.rand(shape, generator=g, device=DEVICE) - 0.5, exponents))


@pytest.mark.parametrize("low", [-126.0, -105.0, -90.0, -10.0, 70.0, 90.0])
def test_quotients_beside_ties(low: float) -> None:
    """Within two float32 steps of halfway between neighbours of e4m3, scales of 30 binades: those
    that the quick division takes, and those that are too small or too large for it."""
    s_q, h_q = 256 // SHRINK + 1, 64
    g = generator(7)
    shape = (s_q, h_q, 512)
    scale = (torch.rand(shape[:2], generator=g, device=DEVICE) * 30 + low).exp2()
    scale = scale.clamp(2.0**-126, 2.0**117)
    halfway = torch.randint(16, 32, shape, generator=g, device=DEVICE).float() + 0.5
    halfway = torch.ldexp(halfway, torch.randint(-15, 6, shape, generator=g, device=DEVICE))
    step = torch.randint(-2, 3, shape, generator=g, device=DEVICE, dtype=torch.int32)
    near = (halfway * scale[..., None]).view(torch.int32) + step
    sign = torch.randint(0, 2, shape, generator=g, device=DEVICE) * 2.0 - 1
    check(near.view(torch.float32) * sign, scale)


def test_a_cpu_computes_the_same() -> None:
    """But for the sign of a NaN: scales do not depend on the device."""
    for dtype in DTYPES:
        q = odd_queries(60, 33, 576, dtype)
        q[20:] *= torch.rand(40, 33, 1, generator=generator(2), device=DEVICE).to(dtype)
        (stored, scale), (wanted, exact) = by_kernel(q), quantize.quantize_queries(q.cpu(), None)
        assert_equal_bits(scale.cpu(), exact, f"scale of {dtype}")
        number = ~wanted.float().isnan()
        assert torch.equal(stored.cpu().view(torch.uint8)[number], bits(wanted)[number])
        assert stored.cpu().float().isnan().equal(~number)


@pytest.mark.parametrize("given", ["none", "0-d", "token", "row"])
def test_no_queries(given: str) -> None:
    q = torch.empty(0, 5, 576, dtype=torch.bfloat16, device=DEVICE)
    shape = {"token": (0,), "row": (0, 5), "0-d": ()}
    check(q, None if given == "none" else torch.ones(shape[given], device=DEVICE))


def test_more_than_2_to_the_31_elements() -> None:
    """And more rows than a grid's second dimension could have."""
    s_q, h_q = 65600 // SHRINK, 64
    q = torch.empty(s_q, h_q, 512, dtype=torch.bfloat16, device=DEVICE).normal_()
    stored, scale = by_kernel(q)
    for part in range(0, s_q, 8200):
        chunk = slice(part, part + 8200)
        wanted = quantize.quantize_queries(q[chunk], None)
        assert_same((stored[chunk], scale[chunk]), wanted, chunk)


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("far", ["tokens", "heads"])
def test_rows_more_than_2_to_the_31_bytes_apart(far: str, offset: int) -> None:
    stride = 2**31 // SHRINK // 2 + 8  # elements of two bytes
    buffer = torch.zeros(2 * stride + 1024 + offset, dtype=torch.bfloat16, device=DEVICE)
    strides = (stride, 0, 1) if far == "tokens" else (0, stride, 1)
    q = buffer.as_strided((3, 3, 576), strides, offset)
    for i in range(3):
        row = q[i, 0] if far == "tokens" else q[0, i]
        row.normal_()
    check(q)


def test_a_view_that_negates() -> None:
    """The sign is in the tensor's metadata, not in its memory."""
    q = torch.randn(3, 4, 512, device=DEVICE)
    stored, _ = check(torch._neg_view(q))
    assert torch.equal(stored.float(), -by_kernel(q)[0].float())


# Through the operator


def inputs_of(seed: int = 0, h_q: int = 20, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    inputs = drawn(40, 300, h_q=h_q, topk=100)
    q = torch.randn(40, h_q, 576, generator=generator(50 + seed), device=DEVICE).to(dtype)
    return {**vars(inputs), "q": q, "q_scale": None, "attn_sink": None, "topk_length": None}


def prefill(call: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, ...]:
    results = sparse_mla_prefill(**{**call, **changes}, return_stats=True)
    assert dispatch.last_backend() == changes.get("backend", BACKEND)
    return results


def assert_equal_results(got: Any, want: Any) -> None:
    for name, a, b in zip(("out", "max_logits", "lse"), got, want, strict=True):
        assert_equal_bits(a, b, name)


@pytest.fixture
def torch_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the operators: what quantises is the kernel or nothing."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("q was quantised by torch")

    monkeypatch.setattr(quantize, "quantize_fp8", refuse)


@pytest.mark.cuda_only
@pytest.mark.parametrize("backend", ["auto", "sm90"])
@pytest.mark.parametrize("given", ["none", "number", "one", "token", "row"])
def test_the_operator_launches_it(given: str, backend: str, monkeypatch: Any) -> None:
    call = inputs_of()
    q_scale: Any = 0.0123 if given == "number" else scales_of(given, 40, 20)
    tensor = torch.tensor([q_scale], device=DEVICE) if given == "number" else q_scale
    stored, scale = quantize.quantize_queries(call["q"], tensor)
    want = prefill(call, q=stored, q_scale=scale)
    monkeypatch.setattr(quantize, "quantize_fp8", None)
    got = sparse_mla_prefill(**{**call, "q_scale": q_scale}, backend=backend, return_stats=True)
    assert dispatch.last_backend() == "sm90"
    assert_equal_results(got, want)


@pytest.mark.cuda_only
def test_another_backend_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_quantize, "quantize_queries", None)
    prefill(inputs_of(h_q=2), backend="reference")
    monkeypatch.setenv("SPARSE_MLA_BACKEND", "reference")
    sparse_mla_prefill(**inputs_of(h_q=2))
    assert dispatch.last_backend() == "reference"


@pytest.mark.cuda_only
@pytest.mark.parametrize(("given", "expected"), [("none", 2), ("one", 1), ("row", 1)])
def test_it_does_not_wait_and_allocates_its_results_alone(given: str, expected: int) -> None:
    q, q_scale = inputs_of()["q"], scales_of(given, 40, 20)
    by_kernel(q, q_scale)
    before, after = torch.cuda.Event(), torch.cuda.Event()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(200_000_000)
    before.record()
    with no_waiting():
        got = by_kernel(q, q_scale)
    after.record()
    assert not before.query(), "the GPU was not busy any more: nothing is shown"
    assert not after.query()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - allocated == expected
    assert_same(got, quantize.quantize_queries(q, q_scale))


@pytest.mark.cuda_only
@pytest.mark.parametrize("given", ["none", "one", "token", "row"])
def test_a_graph_replayed_with_other_values(
    given: str, monkeypatch: pytest.MonkeyPatch, torch_never: None
) -> None:
    """Captured by the first call, which loads the kernels; q and its scales change in place."""
    call, q_scale = inputs_of(), scales_of(given, 40, 20)
    monkeypatch.setattr(jit, "_kernels", {})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = prefill(call, q_scale=q_scale)
    for seed in (1, 2):
        call["q"].copy_(inputs_of(seed)["q"])
        if q_scale is not None:
            q_scale.mul_(1.5)
        graph.replay()
        replayed = [x.clone() for x in got]
        assert_equal_results(replayed, prefill(call, q_scale=q_scale))


@pytest.mark.cuda_only
def test_queries_made_on_a_side_stream(torch_never: None) -> None:
    call, new = inputs_of(), inputs_of(1)
    want = prefill(new)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        call["q"].copy_(new["q"])
        got = prefill(call)
        call["q"].zero_()
    stream.synchronize()
    assert_equal_results(got, want)


@pytest.mark.cuda_only
def test_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q = odd_queries(40, 20, 576, torch.bfloat16)
    want = by_kernel(q)
    got = by_kernel(q.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert got[0].device == torch.device("cuda:1")
    assert_same((got[0].to("cuda:0"), got[1].to("cuda:0")), want)


def test_compiled_with_fullgraph() -> None:
    call = inputs_of()
    others = {name: x for name, x in call.items() if name != "q"}

    def layer(q: torch.Tensor) -> Any:
        out, max_logits, lse = sparse_mla_prefill(q, **others, return_stats=True)
        return out * 2, max_logits, lse

    torch._dynamo.reset()
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(call["q"])
    assert dispatch.last_backend() == BACKEND
    out, max_logits, lse = prefill(call)
    assert_equal_results(got, (out * 2, max_logits, lse))


def test_what_is_returned_is_e4m3_beside_q() -> None:
    stored, scale = by_kernel(inputs_of()["q"])
    assert stored.dtype == E4M3
    assert stored.device == scale.device == inputs_of()["q"].device
