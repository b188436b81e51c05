"""The custom ops: opcheck, fake tensors, ``torch.compile(fullgraph=True)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sparse_mla
from sparse_mla import ContractError, merge_attention_states, quantize_fp8, sparse_mla_prefill
from sparse_mla import sparse_mla_q8kv8_prefill_fwd as strict

OPS = torch.ops.sparse_mla
E4M3 = torch.float8_e4m3fn

Tensors = tuple[torch.Tensor, ...]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def strict_inputs(s_q: int = 3) -> dict[str, Any]:
    g = generator(s_q)
    return {
        "q": torch.randn(s_q, 64, 576, generator=g).to(E4M3),
        "kv": torch.randn(40, 1, 576, generator=g).to(E4M3),
        "indices": torch.randint(-3, 43, (s_q, 1, 128), generator=g, dtype=torch.int32),
        "sm_scale": 0.05,
        "q_scale": torch.tensor([0.5]),
        "kv_scale": torch.tensor([0.25]),
        "d_v": 512,
        "attn_sink": torch.randn(64, generator=g),
        "topk_length": torch.randint(0, 129, (s_q,), generator=g, dtype=torch.int32),
    }


def general_inputs(s_q: int = 3, *, q_dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    g = generator(s_q)
    return {
        "q": torch.randn(s_q, 5, 600, generator=g).to(q_dtype)[..., :512],
        "kv": torch.randn(40, 512, generator=g).to(E4M3),
        "indices": torch.randint(-3, 43, (s_q, 33), generator=g, dtype=torch.int32),
        "sm_scale": 0.05,
        "q_scale": None,
        "kv_scale": torch.rand(40, generator=g) + 0.5,
        "attn_sink": torch.randn(5, generator=g),
        "topk_length": torch.randint(0, 34, (s_q,), generator=g, dtype=torch.int32),
    }


def buffers(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    s_q, h_q, _ = call["q"].shape
    nan = torch.nan
    return {
        "out": torch.full((s_q, h_q, 512), nan, dtype=torch.bfloat16),
        "max_logits": torch.full((s_q, h_q), nan),
        "lse": torch.full((s_q, h_q), nan),
    }


def equal(a: Tensors, b: Tensors) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.fixture
def _fp8_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opcheck compares inputs by ``torch.allclose``, which has no FP8: compare the bytes."""
    allclose = torch.allclose

    def by_bytes(a: torch.Tensor, b: torch.Tensor, **options: Any) -> bool:
        if a.dtype is E4M3:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, **options)

    monkeypatch.setattr(torch, "allclose", by_bytes)


@pytest.mark.usefixtures("_fp8_can_be_compared")
class TestOpcheck:
    """Schema, aliasing, fake results and tracing of every op, by torch's own tests."""

    @pytest.mark.parametrize("optional", [True, False], ids=["all", "required"])
    def test_q8kv8_prefill(self, optional: bool) -> None:
        call = strict_inputs()
        if not optional:
            call |= {"attn_sink": None, "topk_length": None}
        torch.library.opcheck(OPS.q8kv8_prefill.default, tuple(call.values()))
        torch.library.opcheck(
            OPS.q8kv8_prefill_out.default, (*call.values(), *buffers(call).values())
        )

    @pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_prefill(self, q_dtype: torch.dtype) -> None:
        call = general_inputs(q_dtype=q_dtype)
        torch.library.opcheck(OPS.prefill.default, (*call.values(), "auto"))
        torch.library.opcheck(
            OPS.prefill_out.default, (*call.values(), "reference", *buffers(call).values())
        )

    def test_prefill_unquantised(self) -> None:
        q, kv = torch.randn(2, 3, 512), torch.randn(9, 512)
        indices = torch.zeros(2, 4, dtype=torch.int32)
        call = (q, kv, indices, None, None, None, None, None, "auto")
        torch.library.opcheck(OPS.prefill.default, call)

    @pytest.mark.parametrize("per", ["tensor", "token", "token-head"])
    def test_quantize_fp8(self, per: str) -> None:
        x = torch.randn(4, 3, 512, generator=generator())
        torch.library.opcheck(OPS.quantize_fp8.default, (x, per, None, None))

    def test_quantize_fp8_by_given_scale(self) -> None:
        x = torch.randn(4, 512, generator=generator())
        torch.library.opcheck(OPS.quantize_fp8.default, (x, "token", torch.rand(4), None))
        torch.library.opcheck(OPS.quantize_fp8.default, (x, "tensor", None, torch.ones(1)))

    @pytest.mark.parametrize("with_max", [True, False])
    def test_merge_attention_states(self, with_max: bool) -> None:
        outs = [torch.randn(4, 3, 512).bfloat16() for _ in range(2)]
        lses = [torch.randn(4, 3) for _ in range(2)]
        maxima = [torch.randn(4, 3) for _ in range(2)] if with_max else None
        torch.library.opcheck(OPS.merge_attention_states.default, (outs, lses, maxima))


class TestCompile:
    """Compiled in one graph equals eager, bit for bit."""

    def test_strict(self) -> None:
        call = strict_inputs()
        assert equal(compiled(strict)(**call), strict(**call))

    def test_strict_into_given_outputs(self) -> None:
        call = strict_inputs()
        given = buffers(call)
        results = compiled(strict)(**call, **given)
        assert equal(results, strict(**call))
        assert equal(tuple(given.values()), results)

    def test_strict_into_one_given_output(self) -> None:
        call = strict_inputs()
        lse = buffers(call)["lse"]
        results = compiled(strict)(**call, lse=lse)
        assert equal(results, strict(**call))
        assert torch.equal(lse, results[2])

    def test_strict_with_dynamic_tokens(self) -> None:
        function = compiled(strict, dynamic=True)
        for s_q in (3, 5, 8):
            call = strict_inputs(s_q)
            assert equal(function(**call), strict(**call))

    @pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_general(self, q_dtype: torch.dtype) -> None:
        call = general_inputs(q_dtype=q_dtype)
        function = compiled(sparse_mla_prefill)
        assert equal(
            function(**call, return_stats=True), sparse_mla_prefill(**call, return_stats=True)
        )
        assert torch.equal(function(**call), sparse_mla_prefill(**call))

    def test_general_with_numbers_for_scales(self) -> None:
        call = general_inputs() | {"q_scale": 0.5, "kv_scale": 0.25, "sm_scale": None}
        assert torch.equal(compiled(sparse_mla_prefill)(**call), sparse_mla_prefill(**call))

    def test_general_into_given_outputs(self) -> None:
        call = general_inputs()
        given = buffers(call)
        out = compiled(sparse_mla_prefill)(**call, **given, backend="reference")
        assert torch.equal(out, sparse_mla_prefill(**call, backend="reference"))
        assert torch.equal(given["out"], out)

    def test_general_with_dynamic_tokens(self) -> None:
        function = compiled(sparse_mla_prefill, dynamic=True)
        for s_q in (3, 5, 8):
            call = general_inputs(s_q)
            assert torch.equal(function(**call), sparse_mla_prefill(**call))

    @pytest.mark.parametrize(
        "scale", [None, 0.5, torch.tensor([0.5])], ids=["own", "0.5", "tensor"]
    )
    def test_quantize_fp8(self, scale: Any) -> None:
        x = torch.randn(6, 3, 512, generator=generator())
        eager = quantize_fp8(x, scale=scale)
        traced = compiled(quantize_fp8)(x, scale=scale)
        assert torch.equal(traced[0].view(torch.uint8), eager[0].view(torch.uint8))
        assert torch.equal(traced[1], eager[1])

    @pytest.mark.parametrize("stacked", [True, False])
    @pytest.mark.parametrize("with_max", [True, False])
    def test_merge_attention_states(self, stacked: bool, with_max: bool) -> None:
        outs, lses, maxima = torch.randn(2, 4, 512), torch.randn(2, 4), torch.randn(2, 4)
        lses[0, 0] = lses[1, 1] = torch.inf
        parts = [outs, lses, maxima] if stacked else [list(outs), list(lses), list(maxima)]
        arguments = parts if with_max else parts[:2]
        assert equal(
            compiled(merge_attention_states)(*arguments), merge_attention_states(*arguments)
        )

    def test_the_graph_holds_the_op(self) -> None:
        """Compiled for real: one opaque call, not the arithmetic of a backend."""
        targets: list[Any] = []

        def record(graph: torch.fx.GraphModule, _: Any) -> Any:
            targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        torch._dynamo.reset()
        torch.compile(strict, fullgraph=True, backend=record)(**strict_inputs())
        assert OPS.q8kv8_prefill.default in targets or OPS.q8kv8_prefill in targets

    def test_inside_a_model_with_parameters(self) -> None:
        class Layer(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.sink = torch.nn.Parameter(torch.zeros(64))

            def forward(self, call: dict[str, Any]) -> torch.Tensor:
                return strict(**(call | {"attn_sink": self.sink}))[0] * 2

        layer, call = Layer(), strict_inputs()
        with torch.no_grad():
            assert torch.equal(compiled(layer)(call), layer(call))


class TestFake:
    """Without data: shapes and dtypes come out, and a broken call fails while it is traced."""

    def test_meta_tensors(self) -> None:
        call = on_meta(strict_inputs())
        out, max_logits, lse = strict(**call)
        assert (out.device.type, tuple(out.shape), out.dtype) == (
            "meta",
            (3, 64, 512),
            torch.bfloat16,
        )
        assert tuple(max_logits.shape) == tuple(lse.shape) == (3, 64)

    def test_meta_tensors_general(self) -> None:
        call = on_meta(general_inputs())
        assert tuple(sparse_mla_prefill(**call).shape) == (3, 5, 512)

    def test_meta_tensors_meet_the_contract_too(self) -> None:
        call = on_meta(strict_inputs())
        call["q"] = call["q"][:, :60]
        with pytest.raises(ContractError) as caught:
            strict(**call)
        assert caught.value.id == "not-contiguous"

    def test_fake_tensors_with_given_outputs(self) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            call = strict_inputs()
            call |= buffers(call)
            call = {
                name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
                for name, x in call.items()
            }
            results = strict(**call)
        assert results[0] is call["out"]

    @pytest.mark.parametrize("scale", [0.5, None])
    def test_a_number_for_a_scale_is_a_contract_error_on_the_op_path(self, scale: Any) -> None:
        call = on_meta(strict_inputs()) | {"q_scale": scale}
        with pytest.raises(ContractError) as caught:
            strict(**call)
        assert caught.value.id == "scale-invalid"

    def test_a_broken_call_fails_at_trace_time(self) -> None:
        call = strict_inputs()
        call["indices"] = call["indices"][..., :100].contiguous()
        with pytest.raises(Exception, match="positive multiple of 128, got 100"):
            compiled(strict)(**call)

    def test_the_op_itself_checks(self) -> None:
        call = strict_inputs() | {"d_v": 128}
        with pytest.raises(ContractError) as caught:
            OPS.q8kv8_prefill(*call.values())
        assert caught.value.id == "d-v-unsupported"

    @pytest.mark.parametrize("op", ["q8kv8_prefill_out", "prefill_out"])
    def test_the_ops_that_write_check_while_traced(self, op: str) -> None:
        call = on_meta(strict_inputs() if op.startswith("q8") else general_inputs())
        given = on_meta(buffers(call))
        more = () if op.startswith("q8") else ("auto",)
        write = getattr(OPS, op)
        assert write(*call.values(), *more, *given.values()) is None
        given["lse"] = given["lse"].double()
        with pytest.raises(ContractError, match="lse must have shape"):
            write(*call.values(), *more, *given.values())


def on_meta(call: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}


def test_vmap_takes_the_op_path() -> None:
    """Under a function transform a plain-looking tensor has a hidden dimension."""
    calls = [general_inputs(), general_inputs()]
    q = torch.stack([call["q"] for call in calls])
    rest = {name: x for name, x in calls[0].items() if name != "q"}
    batched = torch.vmap(lambda x: sparse_mla_prefill(x, **rest))(q)
    assert torch.equal(batched[0], sparse_mla_prefill(q[0], **rest))


def test_make_fx_records_the_op() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    call = strict_inputs()
    names = [name for name, x in call.items() if isinstance(x, torch.Tensor)]
    rest = {name: x for name, x in call.items() if name not in names}

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return strict(**dict(zip(names, tensors, strict=True)), **rest)[0]

    traced = make_fx(function)(*(call[name] for name in names))
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert OPS.q8kv8_prefill.default in targets


def test_every_public_operator_is_a_custom_op() -> None:
    names = {
        "sparse_mla_q8kv8_prefill_fwd": ("q8kv8_prefill", "q8kv8_prefill_out"),
        "sparse_mla_prefill": ("prefill", "prefill_out"),
        "quantize_fp8": ("quantize_fp8",),
        "merge_attention_states": ("merge_attention_states",),
    }
    public = {name for name in sparse_mla.__all__ if name[0].islower()}
    assert public == names.keys()
    for ops in names.values():
        for op in ops:
            assert hasattr(OPS, op)
