"""Which backend runs, why another does not, and that the user hears of it once."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparse_mla import BackendError, ContractError, SlowBackendWarning, checks, dispatch
from sparse_mla import sparse_mla_prefill as prefill
from sparse_mla import sparse_mla_q8kv8_prefill_fwd as strict
from sparse_mla.params import PrefillProblem

E4M3 = torch.float8_e4m3fn


def call(s_q: int = 1) -> dict[str, Any]:
    return {
        "q": torch.ones(s_q, 64, 576).to(E4M3),
        "kv": torch.ones(3, 1, 576).to(E4M3),
        "indices": torch.zeros(s_q, 1, 128, dtype=torch.int32),
        "sm_scale": 0.1,
        "q_scale": torch.ones(1),
        "kv_scale": torch.ones(1),
    }


def problem(device: str = "cpu") -> PrefillProblem:
    inputs = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in call().items()}
    return checks.check_q8kv8(**inputs)


@pytest.fixture(autouse=True)
def _no_warnings_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_warned", set())


def refuse(monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    monkeypatch.setattr(dispatch.load(name), "refusal", lambda problem: reason)


class TestChoice:
    def test_auto_takes_the_cpu_backend_on_cpu_and_says_nothing(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            strict(**call())
        assert dispatch.last_backend() == "cpu"

    @pytest.mark.parametrize("name", ["cpu", "reference"])
    def test_the_argument_names_one(self, name: str) -> None:
        prefill(**call(), backend=name)
        assert dispatch.last_backend() == name

    @pytest.mark.parametrize("operator", [strict, prefill])
    @pytest.mark.parametrize("name", ["cpu", "reference"])
    def test_the_environment_names_one(
        self, operator: Any, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPARSE_MLA_BACKEND", name)
        operator(**call())
        assert dispatch.last_backend() == name

    def test_the_argument_wins_over_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPARSE_MLA_BACKEND", "cpu")
        prefill(**call(), backend="reference")
        assert dispatch.last_backend() == "reference"

    @pytest.mark.parametrize("value", ["", "auto"])
    def test_an_empty_environment_is_auto(
        self, value: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPARSE_MLA_BACKEND", value)
        strict(**call())
        assert dispatch.last_backend() == "cpu"

    def test_the_custom_op_takes_the_same_choice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPARSE_MLA_BACKEND", "reference")
        torch.ops.sparse_mla.q8kv8_prefill(*call().values(), 512, None, None)
        assert dispatch.last_backend() == "reference"

    def test_each_thread_remembers_its_own(self) -> None:
        seen: dict[str, str] = {}

        def work() -> None:
            seen["before"] = dispatch.last_backend()
            prefill(**call(), backend="reference")
            seen["after"] = dispatch.last_backend()

        prefill(**call(), backend="cpu")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == {"before": "", "after": "reference"}
        assert dispatch.last_backend() == "cpu"

    def test_order_on_a_gpu(self) -> None:
        """Fastest first among those that exist; ``reference`` is always there, and last."""
        names = dispatch.order("cuda")
        wanted = [name for name in ("sm90", "portable", "reference") if name in dispatch.BACKENDS]
        assert list(names) == wanted
        assert names[-1] == "reference"
        assert dispatch.order("cpu") == ("cpu", "reference")
        assert dispatch.order("xpu") == ("reference",)


class TestRefusal:
    @pytest.mark.parametrize("name", ["sm80", "CPU", "", "backends.cpu"])
    def test_an_unknown_name(self, name: str) -> None:
        with pytest.raises(BackendError) as caught:
            prefill(**call(), backend=name)
        assert caught.value.id == "backend-unknown"
        line = str(caught.value).splitlines()[0]
        assert line == f"unknown backend {name}; known: auto, {', '.join(dispatch.BACKENDS)}"

    def test_an_unknown_name_in_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SPARSE_MLA_BACKEND", "gpu")
        with pytest.raises(BackendError, match="unknown backend gpu"):
            strict(**call())

    def test_a_named_backend_that_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is not replaced by another: whoever names one wants that one."""
        refuse(monkeypatch, "cpu", "it is Sunday")
        with pytest.raises(BackendError) as caught:
            prefill(**call(), backend="cpu")
        assert caught.value.id == "backend-refused"
        line = str(caught.value).splitlines()[0]
        assert line == "backend cpu cannot run this problem: it is Sunday"

    def test_nobody_is_left(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refuse(monkeypatch, "cpu", "it is Sunday")
        refuse(monkeypatch, "reference", "out of ink")
        with pytest.raises(BackendError) as caught:
            strict(**call())
        assert caught.value.id == "no-backend"
        assert caught.value.context == {
            "device": "cpu",
            "reasons": "cpu: it is Sunday; reference: out of ink",
        }
        assert str(caught.value).splitlines()[0] == "no backend runs on cpu"
        assert "it is Sunday" in str(caught.value)

    def test_meta_has_no_backend(self) -> None:
        with pytest.raises(BackendError) as caught:
            dispatch.choose(problem("meta"))
        assert caught.value.id == "no-backend"

    def test_backend_errors_are_runtime_errors(self) -> None:
        with pytest.raises(RuntimeError):
            prefill(**call(), backend="nope")

    def test_the_contract_comes_first(self) -> None:
        broken = call() | {"sm_scale": -1.0}
        with pytest.raises(ContractError):
            prefill(**broken, backend="nope")

    def test_refusals_lists_every_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refuse(monkeypatch, "cpu", "it is Sunday")
        reasons = dispatch.refusals(problem())
        assert reasons.keys() == set(dispatch.BACKENDS)
        assert reasons["cpu"] == "it is Sunday"
        assert reasons["reference"] is None


class TestWarning:
    def test_once_with_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refuse(monkeypatch, "cpu", "it is Sunday")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                strict(**call())
        assert dispatch.last_backend() == "reference"
        assert [w.category for w in seen] == [SlowBackendWarning]
        text = str(seen[0].message)
        assert text.splitlines()[0] == "reference runs this problem, slower than cpu would"
        assert "cpu: it is Sunday" in text
        assert "sparse-mla explain slow-backend" in text

    def test_again_for_another_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for reason in ("it is Sunday", "it is Monday", "it is Sunday"):
                refuse(monkeypatch, "cpu", reason)
                strict(**call())
        assert len(seen) == 2

    def test_reasons_without_end_are_not_all_remembered(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for i in range(200):
                refuse(monkeypatch, "cpu", f"it is day {i}")
                dispatch.choose(problem())
        assert len(seen) == len(dispatch._warned) == dispatch._MAX_WARNINGS

    def test_none_where_the_slow_one_was_asked_for(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prefill(**call(), backend="reference")

    def test_it_points_at_the_caller(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refuse(monkeypatch, "cpu", "it is Sunday")
        with pytest.warns(SlowBackendWarning) as seen:
            strict(**call())
        assert seen[0].filename == __file__


class TestProtocol:
    @pytest.mark.parametrize("name", dispatch.BACKENDS)
    def test_every_backend_keeps_it(self, name: str) -> None:
        backend = dispatch.load(name)
        assert name == backend.NAME
        reason = backend.available()
        assert reason is None or (isinstance(reason, str) and reason)
        refusal = backend.refusal(problem())
        assert refusal is None or (isinstance(refusal, str) and refusal)

    def test_importing_the_library_loads_no_backend(self) -> None:
        code = (
            "import sys, sparse_mla\n"
            "names = [n for n in sys.modules if n.startswith('sparse_mla.backends.')]\n"
            "assert not names, names\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_no_gradient_is_recorded(self) -> None:
        """A sink that is a parameter does not make the strict operator's outputs require grad."""
        sink = torch.nn.Parameter(torch.zeros(64))
        for name in ("cpu", "reference"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SPARSE_MLA_BACKEND", name)
                results = strict(**call(), attn_sink=sink)
            assert not any(x.requires_grad for x in results)

    def test_a_backend_sees_the_problem_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[PrefillProblem] = []
        spy = SimpleNamespace(NAME="cpu", refusal=lambda problem: None, run=seen.append)
        monkeypatch.setitem(dispatch._loaded, "cpu", spy)
        out, max_logits, lse = strict(**call())
        assert len(seen) == 1
        assert seen[0].out is out
        assert seen[0].max_logits is max_logits
        assert seen[0].lse is lse
