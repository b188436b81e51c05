"""Calls like an earlier one: when they skip the checks, and that nothing else ever does.

A stand-in for a backend that prepares takes CPU tensors. It writes down what it ran, and whether it
ran it as a problem that was checked or as addresses.
"""

from __future__ import annotations

import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_contract
import test_contract_kinds
import test_general_contract
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_mla import ContractError, callfile, checks, dispatch, prepared, sparse_mla_prefill
from sparse_mla import sparse_mla_q8kv8_prefill_fwd as strict
from sparse_mla.params import Addresses, PrefillProblem

Call = dict[str, Any]
NAMES = (
    "q", "kv", "indices", "q_scale", "kv_scale", "attn_sink", "topk_length",
    "out", "max_logits", "lse",
)  # fmt: skip
OUTPUTS = NAMES[-3:]
OPERATORS = {"strict": strict, "general": sparse_mla_prefill}


class StandIn:
    """A backend that writes nothing and takes q at multiples of 4 bytes."""

    NAME = "stand-in"

    def __init__(self) -> None:
        self.log: list[tuple[str, Addresses]] = []

    def refusal(self, problem: PrefillProblem) -> str | None:
        return "q lies badly" if problem.q.data_ptr() % 4 else None

    def prepare(self, problem: PrefillProblem) -> Any:
        self.log.append(("prepared", problem.addresses))

        def launch(addresses: Addresses) -> bool:
            if addresses[0] % 4:
                return False
            self.log.append(("launched", addresses))
            return True

        return SimpleNamespace(launch=launch)

    def ran(self, act: Callable[[], Any]) -> str:
        """How the one call that ``act`` makes was run."""
        self.log.clear()
        act()
        kinds = [kind for kind, _ in self.log]
        return {
            ("prepared", "launched"): "checked",
            ("launched",): "prepared",
            (): "elsewhere",
        }[tuple(kinds)]


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in, before the ``cpu`` backend; nothing is remembered before and after."""
    stand_in = StandIn()
    monkeypatch.setattr(dispatch, "BACKENDS", (stand_in.NAME, *dispatch.BACKENDS))
    monkeypatch.setitem(dispatch._FASTEST_FIRST, "cpu", (stand_in.NAME, "cpu"))
    monkeypatch.setitem(dispatch._loaded, stand_in.NAME, stand_in)
    monkeypatch.setattr(dispatch, "_warned", set())
    prepared.forget()
    yield stand_in
    prepared.forget()


def good_call(**changes: Any) -> Call:
    """A call of the strict operator with every tensor; the general one has no d_v."""
    return test_contract.good_call(**changes)


def general(call: Call) -> Call:
    return {name: x for name, x in call.items() if name != "d_v"}


def without(call: Call, *names: str) -> Call:
    return {name: x for name, x in call.items() if name not in names}


def remembered(call: Call, operator: Any = strict) -> None:
    operator(**call)
    assert len(prepared._calls.newest) == 1


def address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@pytest.mark.parametrize("left_out", [(), OUTPUTS, ("attn_sink",), ("topk_length", "lse")], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_the_second_call_is_run_by_addresses(
    operator: str, left_out: tuple[str, ...], backend: StandIn
) -> None:
    """With tensors of its own, and into outputs of its own."""
    function = OPERATORS[operator]
    more = {} if operator == "strict" else {"return_stats": True}
    for want in ("checked", "prepared", "prepared"):
        call = without(good_call(), *left_out)
        call = call if operator == "strict" else general(call)
        results: Any = None

        def act(call: Call = call) -> None:
            nonlocal results
            results = function(**call, **more)

        assert backend.ran(act) == want
        assert dispatch.last_backend() == "stand-in"
        tensors = call | dict(zip(OUTPUTS, results, strict=True))
        assert backend.log[-1][1] == tuple(address(tensors.get(name)) for name in NAMES)
        assert [results[i] is call[n] for i, n in enumerate(OUTPUTS) if n in call] == [True] * (
            3 - len(set(left_out) & set(OUTPUTS))
        )
        for x, y in zip(results, good_call().values(), strict=False):
            assert x.device == y.device
        assert [(tuple(x.shape), x.dtype) for x in results] == [
            ((3, 64, 512), torch.bfloat16),
            ((3, 64), torch.float32),
            ((3, 64), torch.float32),
        ]


def test_the_backend_of_the_latest_call(backend: StandIn) -> None:
    call = general(good_call())
    remembered(call, sparse_mla_prefill)
    sparse_mla_prefill(**call, backend="cpu")
    assert dispatch.last_backend() == "cpu"
    assert backend.ran(lambda: sparse_mla_prefill(**call)) == "prepared"
    assert dispatch.last_backend() == "stand-in"


def test_general_gives_out_alone_unless_asked(backend: StandIn) -> None:
    call = general(good_call())
    remembered(call, sparse_mla_prefill)
    assert backend.ran(lambda: sparse_mla_prefill(**call)) == "prepared"
    assert sparse_mla_prefill(**call) is call["out"]


class TestContract:
    """Whatever is wrong is found after a good call as it is without one."""

    @pytest.mark.parametrize(("violate", "line"), test_contract.identified(test_contract.ROWS))
    def test_strict(self, violate: Callable[[Call], None], line: str, backend: StandIn) -> None:
        remembered(good_call())
        call = good_call()
        violate(call)
        backend.log.clear()
        assert test_contract.first_line(call) == line
        assert backend.log == []

    @pytest.mark.parametrize("left_out", OUTPUTS)
    def test_strict_with_one_output_left_out(self, left_out: str) -> None:
        remembered(without(good_call(), left_out))
        for _, _, violate, line in test_contract.ROWS:
            call = good_call()
            violate(call)
            broken = left_out not in line and "overlap" not in line
            if broken and call[left_out] is not None:
                assert test_contract.first_line(without(call, left_out)) == line

    @pytest.mark.parametrize(
        ("id", "violate", "line"),
        test_general_contract.VIOLATIONS,
        ids=test_general_contract.IDS,
    )
    def test_general(
        self, id: str, violate: Callable[[Call], None], line: str, backend: StandIn
    ) -> None:
        remembered(test_general_contract.good_call(), sparse_mla_prefill)
        call = test_general_contract.good_call()
        violate(call)
        backend.log.clear()
        with pytest.raises(ContractError) as caught:
            sparse_mla_prefill(**call)
        assert caught.value.id == id
        assert str(caught.value).splitlines()[0] == line
        assert backend.log == []

    @pytest.mark.parametrize("operator", OPERATORS)
    @pytest.mark.parametrize("layout", test_contract_kinds.LAYOUTS)
    @pytest.mark.parametrize("name", NAMES)
    def test_layouts_without_strides(self, name: str, layout: str, operator: str) -> None:
        call = test_contract_kinds.call()
        remembered(call, OPERATORS[operator])
        call[name] = test_contract_kinds.LAYOUTS[layout](call[name])
        with pytest.raises(ContractError, match=f"{name} must be a strided tensor|one-element"):
            OPERATORS[operator](**call)

    @pytest.mark.parametrize("name", ["q", "kv", "attn_sink", "q_scale", "kv_scale"])
    def test_a_gradient_wanted_later(self, name: str, backend: StandIn) -> None:
        """The call without grad mode is no precedent for the one with it."""
        call = general(good_call())
        dtype = torch.float32 if "scale" in name or name == "attn_sink" else call[name].dtype
        call[name] = call[name].to(dtype).requires_grad_()
        with torch.no_grad():
            assert backend.ran(lambda: sparse_mla_prefill(**call)) == "checked"
            assert backend.ran(lambda: sparse_mla_prefill(**call)) == "checked"
        with pytest.raises(ContractError, match="gradient") as caught:
            sparse_mla_prefill(**call)
        assert caught.value.id == "no-backward"
        call[name] = call[name].detach()
        remembered(call, sparse_mla_prefill)
        call[name] = call[name].detach().requires_grad_()
        with pytest.raises(ContractError, match="gradient"):
            sparse_mla_prefill(**call)
        with torch.no_grad():
            sparse_mla_prefill(**call)

    def test_overlap_is_looked_at_with_every_new_address(self, backend: StandIn) -> None:
        buffer = torch.empty(4 * 3 * 64)
        call = good_call()
        for start, ok in ((0, True), (3 * 64, True), (2 * 3 * 64, False), (0, True)):
            call["max_logits"] = buffer[start : start + 3 * 64].view(3, 64)
            call["lse"] = buffer[2 * 3 * 64 + 64 :][: 3 * 64].view(3, 64)
            if ok:
                strict(**call)
            else:
                with pytest.raises(ContractError, match="must not overlap"):
                    strict(**call)
        assert backend.ran(lambda: strict(**call)) == "prepared"


class TestKind:
    """Each thing that a check or a choice reads: with it changed, a call is not like the other."""

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda x: x.as_subclass(Subclass), id="class"),
            pytest.param(torch.nn.Parameter, id="parameter"),
            pytest.param(lambda x: x.clone().requires_grad_(), id="gradient"),
            pytest.param(torch._neg_view, id="negated"),
            pytest.param(lambda x: inference_copy(x), id="inference"),
            pytest.param(lambda x: None, id="left out"),
        ],
    )
    def test_tensor(self, name: str, change: Callable[[Any], Any], backend: StandIn) -> None:
        """What all checks of the strict operator allow, or not: it is up to them."""
        call = good_call()
        remembered(call)
        try:
            call[name] = change(call[name])
        except RuntimeError as unable:
            pytest.skip(str(unable).splitlines()[0])
        try:
            assert backend.ran(lambda: strict(**call)) == "checked"
        except ContractError:
            assert backend.log == []

    @pytest.mark.parametrize(
        ("operator", "change"),
        [
            ("strict", lambda c: c | {"sm_scale": 0.2}),
            ("strict", lambda c: c | {"sm_scale": np.float64(0.1)}),
            ("strict", lambda c: c | {"d_v": np.int64(512)}),
            ("strict", lambda c: c | {"kv": c["kv"][:-1]}),
            ("strict", lambda c: c | {"indices": c["indices"].repeat(1, 1, 2)}),
            ("strict", lambda c: c | {"kv_scale": c["q_scale"]}),
            ("strict", lambda c: c | {"kv_scale": torch.ones(1, 1)}),
            ("general", lambda c: c | {"sm_scale": None}),
            ("general", lambda c: c | {"q": c["q"][:, :33], "attn_sink": None}),
            ("general", lambda c: c | {"q": c["q"].transpose(0, 1).contiguous().transpose(0, 1)}),
            ("general", lambda c: c | {"kv": torch.cat([c["kv"]] * 2)[::2]}),
            ("general", lambda c: c | {"kv": c["kv"][:, 0]}),
            ("general", lambda c: c | {"indices": c["indices"][:, 0]}),
            ("general", lambda c: c | {"indices": c["indices"][..., :100]}),
            ("general", lambda c: c | {"kv_scale": torch.ones(20)}),
            ("general", lambda c: c | {"q_scale": torch.ones(3, 64)}),
            ("general", lambda c: c | {"backend": "stand-in"}),
        ],
    )
    def test_change(self, operator: str, change: Callable[[Call], Call], backend: StandIn) -> None:
        call = without(good_call(), *OUTPUTS, "d_v")
        function = OPERATORS[operator]
        remembered(call, function)
        assert backend.ran(lambda: function(**change(call))) == "checked"
        assert backend.ran(lambda: function(**call)) == "prepared"

    def test_operator(self, backend: StandIn) -> None:
        call = without(good_call(), "d_v")
        remembered(call)
        assert backend.ran(lambda: sparse_mla_prefill(**call)) == "checked"
        assert backend.ran(lambda: strict(**call)) == "prepared"

    @pytest.mark.parametrize(
        "value", [1, True, Decimal(1), 1 + 0j, np.float32(1), torch.tensor(1.0)]
    )
    def test_sm_scale_that_equals_the_number(self, value: Any, backend: StandIn) -> None:
        remembered(good_call(sm_scale=1.0))
        try:
            assert backend.ran(lambda: strict(**good_call(sm_scale=value))) == "checked"
        except ContractError as refused:
            assert refused.id == "sm-scale-invalid"  # noqa: PT017 - either is right
            assert backend.log == []

    @pytest.mark.parametrize("value", [512.0, Decimal(512), torch.tensor(512)])
    def test_d_v_that_equals_the_number(self, value: Any) -> None:
        remembered(good_call())
        with pytest.raises(ContractError, match="only supports d_v=512"):
            strict(**good_call(d_v=value))

    @pytest.mark.parametrize("value", [np.array(["auto"]), None, ["auto"]])
    def test_backend_that_is_no_name(self, value: Any) -> None:
        call = general(good_call())
        remembered(call, sparse_mla_prefill)
        with pytest.raises(RuntimeError, match="unknown backend"):
            sparse_mla_prefill(**call, backend=value)

    @pytest.mark.parametrize("name", NAMES[5:])
    def test_a_tensor_left_out_before(self, name: str, backend: StandIn) -> None:
        """What it is has been compared with nothing."""
        call = good_call()
        remembered(without(call, name))
        assert backend.ran(lambda: strict(**call)) == "checked"
        call[name] = call[name].double()
        with pytest.raises(ContractError, match=f"{name} must"):
            strict(**call)

    def test_scales_that_were_one_tensor(self, backend: StandIn) -> None:
        call = good_call()
        call["kv_scale"] = call["q_scale"]
        remembered(call)
        assert backend.ran(lambda: strict(**good_call())) == "checked"
        assert backend.ran(lambda: strict(**call)) == "prepared"
        prepared.forget()
        remembered(call)
        with pytest.raises(ContractError, match="kv_scale must be a one-element float32 tensor"):
            strict(**call | {"kv_scale": torch.ones(2)})

    def test_which_of_two_outputs_is_given(self, backend: StandIn) -> None:
        """Both have the same shape and dtype."""
        call = good_call()
        remembered(without(call, "lse"))
        assert backend.ran(lambda: strict(**without(call, "max_logits"))) == "checked"
        assert backend.ran(lambda: strict(**without(call, "lse"))) == "prepared"

    def test_a_backend_that_the_environment_names(
        self, backend: StandIn, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call = good_call()
        remembered(call)
        monkeypatch.setenv("SPARSE_MLA_BACKEND", "cpu")
        assert backend.ran(lambda: strict(**call)) == "elsewhere"
        assert dispatch.last_backend() == "cpu"
        monkeypatch.setenv("SPARSE_MLA_BACKEND", "stand-in")
        assert backend.ran(lambda: strict(**call)) == "checked"
        assert backend.ran(lambda: strict(**call)) == "prepared"
        monkeypatch.delenv("SPARSE_MLA_BACKEND")
        assert backend.ran(lambda: strict(**call)) == "prepared"

    def test_addresses_that_the_backend_does_not_take(self, backend: StandIn) -> None:
        call = good_call()
        remembered(call)
        shifted = torch.empty(call["q"].numel() + 1, dtype=torch.uint8)[1:]
        call["q"] = shifted.view(call["q"].dtype).view(call["q"].shape)
        with pytest.warns(match="q lies badly"):
            assert backend.ran(lambda: strict(**call)) == "elsewhere"
        assert dispatch.last_backend() == "cpu"

    def test_without_queries(self, backend: StandIn) -> None:
        call = without(good_call(), *OUTPUTS, "d_v")
        for name in ("q", "indices", "topk_length"):
            call[name] = call[name][:0]
        for _ in range(2):
            assert backend.ran(lambda: strict(**call)) == "elsewhere"
            assert dispatch.last_backend() == "stand-in"
        assert prepared._calls.newest == ()


class Subclass(torch.Tensor):
    """A tensor in all but name."""


def inference_copy(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


class TestNotRemembered:
    def test_tensors_of_another_class(self, backend: StandIn) -> None:
        call = good_call()
        call["attn_sink"] = call["attn_sink"].as_subclass(Subclass)
        for _ in range(2):
            assert backend.ran(lambda: strict(**call)) == "checked"

    def test_numbers_as_scales_and_queries_to_quantise(self, backend: StandIn) -> None:
        """They become tensors of their own at each call."""
        call = general(good_call())
        for changes in ({"q_scale": 0.5}, {"kv_scale": 0.5}, {"q": call["q"].bfloat16()}):
            for _ in range(2):
                act = lambda changes=changes: sparse_mla_prefill(**call | changes)  # noqa: E731
                assert backend.ran(act) == "checked"

    def test_inputs_that_share_memory_beside_given_outputs(self, backend: StandIn) -> None:
        """One tensor may be both scales; for others the checks look at every pair."""
        call = good_call()
        call["kv_scale"] = call["q_scale"]
        remembered(call)
        assert backend.ran(lambda: strict(**call)) == "prepared"
        call["lse"] = call["q_scale"].expand(3, 64)
        with pytest.raises(ContractError, match="lse must be contiguous"):
            strict(**call)
        call = good_call()
        call["kv_scale"] = call["attn_sink"][:1]
        prepared.forget()
        for _ in range(2):
            assert backend.ran(lambda: strict(**call)) == "checked"
        assert prepared._calls.newest == ()
        for want in ("checked", "prepared"):
            assert backend.ran(lambda: strict(**without(call, *OUTPUTS))) == want

    def test_without_torchs_guards(self, backend: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prepared, "guards", None)
        for _ in range(2):
            assert backend.ran(lambda: strict(**good_call())) == "checked"

    def test_backends_that_prepare_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPARSE_MLA_BACKEND", "cpu")
        strict(**good_call())
        assert prepared._calls.newest == ()


class TestWhoLooksAtCalls:
    """What sees calls sees the prepared ones as well."""

    def test_debug(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call = good_call(topk_length=torch.full((3,), 1000, dtype=torch.int32))
        remembered(call)
        monkeypatch.setenv("SPARSE_MLA_DEBUG", "1")
        with pytest.raises(ContractError) as caught:
            strict(**call)
        assert caught.value.id == "topk-length-out-of-range"

    @pytest.mark.parametrize("operator", OPERATORS)
    def test_capture(self, operator: str, tmp_path: Any, backend: StandIn) -> None:
        call = without(good_call(), "d_v")
        remembered(call, OPERATORS[operator])
        with callfile.capture(tmp_path) as log:
            assert backend.ran(lambda: OPERATORS[operator](**call)) == "checked"
        assert (log.seen, len(log.files)) == (1, 1)
        assert backend.ran(lambda: OPERATORS[operator](**call)) == "prepared"

    @pytest.mark.parametrize("variable", ["SPARSE_MLA_DUMP", "SPARSE_MLA_CAPTURE"])
    def test_variable(self, variable: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        remembered(good_call())
        monkeypatch.setenv(variable, str(tmp_path))
        monkeypatch.setenv("SPARSE_MLA_DUMP_ALL", "1")
        strict(**good_call())
        assert len(list(tmp_path.iterdir())) == 1


class TestTracing:
    """What traces, batches or fakes an operation gets the op."""

    def test_compiled(self, backend: StandIn) -> None:
        call = without(good_call(), *OUTPUTS)
        remembered(call)
        torch._dynamo.reset()
        targets: list[Any] = []

        def record(graph: torch.fx.GraphModule, _: Any) -> Any:
            targets.extend(node.target for node in graph.graph.nodes)
            return graph.forward

        torch.compile(strict, fullgraph=True, backend=record)(**call)
        op = torch.ops.sparse_mla.q8kv8_prefill
        assert op in targets or op.default in targets

    def test_fake_mode(self, backend: StandIn) -> None:
        call = without(good_call(), *OUTPUTS)
        remembered(call)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert backend.ran(lambda: strict(**call)) == "elsewhere"

    def test_dispatch_mode(self, backend: StandIn) -> None:
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None):
                seen.append(op)
                return op(*args, **(kwargs or {}))

        seen: list[Any] = []
        call = without(good_call(), *OUTPUTS)
        remembered(call)
        with Mode():
            strict(**call)
        assert torch.ops.sparse_mla.q8kv8_prefill.default in seen

    @pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
    def test_vmap(self, backend: StandIn) -> None:
        call = without(general(good_call()), *OUTPUTS)
        remembered(call, sparse_mla_prefill)
        q = torch.stack([call["q"].float()] * 2)
        rest = without(call, "q", "q_scale")
        got = torch.vmap(lambda x: sparse_mla_prefill(x, **rest))(q)
        assert got.shape == (2, 3, 64, 512)

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    def test_jit_trace_remembers_nothing(self) -> None:
        call = without(good_call(), *OUTPUTS)
        graph = torch.jit.trace(
            lambda q: strict(**call | {"q": q}), call["q"], check_trace=False
        ).graph
        assert prepared._calls.newest == ()
        assert "sparse_mla::q8kv8_prefill" in str(graph)

    @pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
    def test_jit_trace_finds_the_op_of_a_remembered_call(self) -> None:
        call = without(good_call(), *OUTPUTS)
        remembered(call)
        graph = torch.jit.trace(
            lambda q: strict(**call | {"q": q}), call["q"], check_trace=False
        ).graph
        assert "sparse_mla::q8kv8_prefill" in str(graph)


class TestMemory:
    def test_no_tensor_is_kept(self) -> None:
        call = good_call()
        remembered(call)
        strict(**call)
        kept = [weakref.ref(x) for x in call.values() if isinstance(x, torch.Tensor)]
        del call
        gc.collect()
        assert [ref() for ref in kept] == [None] * len(NAMES)

    def test_a_thread_remembers_so_many_and_the_newest(self, backend: StandIn) -> None:
        scales = [1.0 + i for i in range(prepared.MOST + 3)]
        for scale in scales:
            assert backend.ran(lambda s=scale: strict(**good_call(sm_scale=s))) == "checked"
        assert len(prepared._calls.newest) == prepared.MOST
        for scale in scales[3:]:
            assert backend.ran(lambda s=scale: strict(**good_call(sm_scale=s))) == "prepared"
        assert backend.ran(lambda: strict(**good_call(sm_scale=1.0))) == "checked"

    def test_a_call_that_is_used_is_not_given_up(self, backend: StandIn) -> None:
        usual = good_call()
        remembered(usual)
        for i in range(4 * prepared.MOST):
            assert backend.ran(lambda s=1.0 + i: strict(**good_call(sm_scale=s))) == "checked"
            assert backend.ran(lambda: strict(**usual)) == "prepared"
            assert len(prepared._calls.newest) <= prepared.MOST

    def test_threads_remember_for_themselves(self, backend: StandIn) -> None:
        call = good_call()
        remembered(call)
        seen: list[str] = []

        def work() -> None:
            seen.append(dispatch.last_backend())
            seen.extend(backend.ran(lambda: strict(**call)) for _ in range(2))
            seen.append(dispatch.last_backend())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == ["", "checked", "prepared", "stand-in"]
        assert backend.ran(lambda: strict(**call)) == "prepared"

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.timeout(60)
    def test_a_forked_child_forgets(self) -> None:
        """The kernels of its parent are of no use to it."""
        remembered(good_call())
        child = os.fork()
        if child == 0:
            os._exit(0 if prepared._calls.newest == () else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len(prepared._calls.newest) == 1


def test_what_is_no_tensor_gets_its_own_error() -> None:
    """Whatever it raises when it is asked for an attribute."""

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    remembered(good_call())
    for name in ("q", "kv_scale", "lse"):
        with pytest.raises(ContractError):
            strict(**good_call(**{name: Odd()}))


def test_a_torch_whose_guards_are_asked_otherwise(
    backend: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def guards(*tensors: Any) -> None:
        raise AssertionError("takes no keyword")

    monkeypatch.setattr(prepared, "TensorGuards", guards)
    for _ in range(2):
        assert backend.ran(lambda: strict(**good_call())) == "checked"


def test_a_backend_takes_the_addresses_that_it_did_not_refuse(
    backend: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would be written, and nobody would know."""
    monkeypatch.setattr(backend, "prepare", lambda p: SimpleNamespace(launch=lambda a: False))
    with pytest.raises(AssertionError, match="stand-in refuses addresses"):
        strict(**good_call())


def test_tensors_that_are_apart() -> None:
    apart = prepared._apart
    assert apart((0, 100, 40), (0, 8, 60))
    assert apart((0, 0, 100), (0, 0, 1))
    assert not apart((40, 100), (61, 8))
    assert not apart((40, 44), (100, 8))
    assert not apart((40, 40), (4, 4))
    assert apart((40, 40), (4, 0))


def test_every_check_passes_where_a_call_is_remembered() -> None:
    """`good_call` is a call without violations, or the tests above would show nothing."""
    assert list(checks.q8kv8_violations(**good_call())) == []
    assert math.isfinite(good_call()["sm_scale"])
