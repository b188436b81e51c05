"""``install`` against a stand-in for SGLang: same module paths, same signature."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sparse_mla
from sparse_mla import dispatch, quantize_fp8
from sparse_mla.integrations import sglang as ours

NEWER, OLDER = ours.MODULES
CALLER = "sglang.srt.layers.attention.stand_in_backend"


def with_outputs(
    q, kv, indices, sm_scale, q_scale, kv_scale, d_v=512, attn_sink=None, topk_length=None,
    *, out=None, max_logits=None, lse=None,
):  # fmt: skip
    return "SGLang ran"


def without_outputs(
    q, kv, indices, sm_scale, q_scale, kv_scale, d_v=512, attn_sink=None, topk_length=None
):  # fmt: skip
    return "SGLang ran"


def of_sglang() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "sglang"]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = {name: sys.modules.pop(name) for name in of_sglang()}
    yield
    ours.uninstall()
    for name in of_sglang():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def stand_in() -> Callable[..., types.ModuleType]:
    """Put an ``sglang`` in ``sys.modules`` whose operator is ``function``, and a caller of it."""

    def put(function: Any, path: str = NEWER) -> types.ModuleType:
        for dotted in (path, CALLER):
            parts = dotted.split(".")
            for n in range(1, len(parts) + 1):
                name = ".".join(parts[:n])
                if name not in sys.modules:
                    sys.modules[name] = types.ModuleType(name)
                    sys.modules[name].__path__ = []
        home = sys.modules[path]
        home.sparse_mla_q8kv8_prefill_fwd = function
        sys.modules[CALLER].prefill = function  # `from ... import ... as prefill`
        return home

    return put


def call() -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)
    q, q_scale = quantize_fp8(torch.randn(2, 64, 576, generator=g))
    kv, kv_scale = quantize_fp8(torch.randn(40, 1, 576, generator=g))
    indices = torch.randint(0, 40, (2, 1, 128), generator=g, dtype=torch.int32)
    return {
        "q": q, "kv": kv, "indices": indices, "sm_scale": 0.1, "q_scale": q_scale,
        "kv_scale": kv_scale, "d_v": 512, "attn_sink": None, "topk_length": None,
    }  # fmt: skip


@pytest.mark.parametrize("path", ours.MODULES)
@pytest.mark.parametrize("function", [with_outputs, without_outputs])
def test_installed_ours_runs_wherever_theirs_was_imported(stand_in, path, function) -> None:
    home = stand_in(function, path)
    done = ours.install()
    assert done.module == path
    assert done.holders == tuple(
        sorted([f"{path}.sparse_mla_q8kv8_prefill_fwd", f"{CALLER}.prefill"])
    )
    assert home.sparse_mla_q8kv8_prefill_fwd is sparse_mla.sparse_mla_q8kv8_prefill_fwd
    out, max_logits, lse = sys.modules[CALLER].prefill(**call())
    want = sparse_mla.sparse_mla_q8kv8_prefill_fwd(**call())
    assert torch.equal(out, want[0])
    assert torch.equal(max_logits, want[1])
    assert torch.equal(lse, want[2])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_calls_that_sglang_makes(stand_in, device) -> None:
    """All by name; parts of larger buffers to write into, and a scale without a dimension."""
    stand_in(with_outputs)
    ours.install()
    prefill = sys.modules[CALLER].prefill
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call().items()}
    want = prefill(**given)
    buffers = (
        torch.empty(5, 64, 512, dtype=torch.bfloat16, device=device),
        torch.empty(5, 64, device=device),
        torch.empty(5, 64, device=device),
    )
    out, max_logits, lse = (buffer[:2] for buffer in buffers)
    got = prefill(**given, out=out, max_logits=max_logits, lse=lse)
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(got, buffers, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert dispatch.last_backend() == ("sm90" if device == "cuda" else "cpu")

    one = torch.ones((), device=device)
    want = prefill(**given | {"q_scale": one.reshape(1), "kv_scale": one.reshape(1)})
    got = prefill(**given | {"q_scale": one, "kv_scale": one})
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_it_says_what_it_did_and_prints_nothing(stand_in, capsys) -> None:
    stand_in(with_outputs)
    done = ours.install()
    assert capsys.readouterr() == ("", "")
    assert done.signature.startswith("(q, kv, indices, sm_scale, ")
    assert str(done).startswith(f"sparse_mla runs sparse_mla_q8kv8_prefill_fwd of {NEWER} (sglang ")
    assert f"replaced in 2 places: {NEWER}.sparse_mla_q8kv8_prefill_fwd, {CALLER}" in str(done)
    assert ours.installed() is done


def test_uninstall_puts_theirs_back_everywhere(stand_in) -> None:
    home = stand_in(with_outputs)
    done = ours.install()
    later = sys.modules["sglang.later"] = types.ModuleType("sglang.later")
    later.fn = home.sparse_mla_q8kv8_prefill_fwd  # imported while ours was there
    assert ours.uninstall() is done
    assert home.sparse_mla_q8kv8_prefill_fwd is with_outputs
    assert sys.modules[CALLER].prefill is with_outputs
    assert later.fn is with_outputs
    assert ours.installed() is None
    assert ours.uninstall() is None


def test_uninstall_leaves_alone_what_another_put_there(stand_in) -> None:
    home = stand_in(with_outputs)
    ours.install()
    home.sparse_mla_q8kv8_prefill_fwd = "another's"
    ours.uninstall()
    assert home.sparse_mla_q8kv8_prefill_fwd == "another's"
    assert sys.modules[CALLER].prefill is with_outputs


def test_installed_twice_is_installed_once(stand_in) -> None:
    stand_in(with_outputs)
    first = ours.install()
    assert ours.install() is first
    ours.uninstall()
    assert sys.modules[CALLER].prefill is with_outputs


def more(q, kv, indices, sm_scale, q_scale, kv_scale, window, d_v=512, attn_sink=None, topk_length=None): ...  # fmt: skip # noqa: E501
def swapped(q, kv, indices, q_scale, sm_scale, kv_scale, d_v=512, attn_sink=None, topk_length=None): ...  # fmt: skip # noqa: E501
def by_name(q, kv, indices, sm_scale, q_scale, kv_scale, *, d_v=512, attn_sink=None, topk_length=None): ...  # fmt: skip # noqa: E501
def other_default(q, kv, indices, sm_scale, q_scale, kv_scale, d_v=256, attn_sink=None, topk_length=None): ...  # fmt: skip # noqa: E501
def no_sink(q, kv, indices, sm_scale, q_scale, kv_scale, d_v=512, topk_length=None): ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (more, "it takes 'window', ours does not"),
        (swapped, "its arguments come in another order"),
        (by_name, "'d_v' is keyword-only"),
        (other_default, "'d_v' has another default"),
        (no_sink, "it does not take 'attn_sink'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_another_signature_is_refused_and_left_alone(stand_in, function, words) -> None:
    home = stand_in(function)
    with pytest.raises(TypeError, match=words):
        ours.install()
    assert home.sparse_mla_q8kv8_prefill_fwd is function
    assert ours.installed() is None


def test_an_operator_of_your_own_around_ours(stand_in) -> None:
    home = stand_in(with_outputs)
    ours.install(operator=without_outputs)
    assert home.sparse_mla_q8kv8_prefill_fwd is without_outputs


def test_without_sglang(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(ModuleNotFoundError, match="is an SGLang with .* installed"):
        ours.install()


def test_a_module_without_the_operator(stand_in) -> None:
    home = stand_in(with_outputs)
    del home.sparse_mla_q8kv8_prefill_fwd
    with pytest.raises(AttributeError, match="has no function"):
        ours.install()


def test_what_sglang_itself_lacks_is_not_hidden(monkeypatch, tmp_path) -> None:
    package = tmp_path / "sglang" / "jit_kernel"
    package.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()  # before an installed one
    (package / "sparse_mla_q8kv8_prefill_sm90.py").write_text("import a_compiler_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_compiler_not_installed"):
        ours.install("sglang.jit_kernel.sparse_mla_q8kv8_prefill_sm90")


def test_importing_the_module_imports_nothing_of_sglang() -> None:
    program = (
        "import sys, sparse_mla.integrations.sglang\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'sglang']"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.fixture
def real_module(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the installed SGLang's module, ready to be imported from its own file.

    Its packages are there without their ``__init__``, and three modules that it imports from, by
    name only: theirs ask for a server, a compiler and Triton.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed (make sglang)")
    root = Path(next(iter(spec.submodule_search_locations))).parent
    found = [name for name in ours.MODULES if (root / f"{name.replace('.', '/')}.py").exists()]
    if not found:
        pytest.skip("this sglang has no sparse_mla_q8kv8_prefill_sm90")
    parts = found[0].split(".")[:-1]
    for n in range(1, len(parts) + 1):
        package = types.ModuleType(".".join(parts[:n]))
        package.__path__ = [str(root.joinpath(*parts[:n]))]
        sys.modules[package.__name__] = package
    by_name: dict[str, dict[str, Any]] = {
        "sglang.kernels.jit.utils": {"cache_once": lambda f: f, "load_jit": None},
        "sglang.kernels.ops.attention.dsv4.dequant_k_cache": {
            "DIM_NOPE": 448, "DIM_ROPE": 64, "fp8_dtype": torch.float8_e4m3fn,
        },
        "sglang.srt.utils.custom_op": {"register_custom_op": lambda **_: lambda f: f},
    }  # fmt: skip
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):  # a torch without CUDA
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    for name, values in by_name.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    return found[0]


@pytest.mark.parametrize("log_level", ["0", "1"])  # 1 puts a wrapper around it
def test_the_real_operator_is_replaced_and_put_back(real_module, monkeypatch, log_level) -> None:
    monkeypatch.setenv("SGLANG_KERNEL_API_LOGLEVEL", log_level)
    home = importlib.import_module(real_module)
    theirs = home.sparse_mla_q8kv8_prefill_fwd
    assert hasattr(theirs, "__wrapped__") == (log_level == "1")
    done = ours.install()
    assert done.holders == (f"{real_module}.{ours.NAME}",)
    assert done.signature == str(inspect.signature(theirs))
    out, _, _ = home.sparse_mla_q8kv8_prefill_fwd(**call())
    assert torch.equal(out, sparse_mla.sparse_mla_q8kv8_prefill_fwd(**call())[0])
    ours.uninstall()
    assert home.sparse_mla_q8kv8_prefill_fwd is theirs


FP8 = torch.float8_e4m3fn
BROKEN: dict[str, dict[str, Any]] = {
    "q.ndim": {"q": torch.zeros(64, 576).to(FP8)},
    "kv.ndim": {"kv": torch.zeros(40, 576).to(FP8)},
    "indices.ndim": {"indices": torch.zeros(2, 128, dtype=torch.int32)},
    "d_qk": {"kv": torch.zeros(40, 1, 512).to(FP8)},
    "h_q": {"q": torch.zeros(2, 16, 576).to(FP8)},
    "h_kv": {
        "kv": torch.zeros(40, 2, 576).to(FP8), "indices": torch.zeros(2, 2, 128, dtype=torch.int32),
    },
    "topk": {"indices": torch.zeros(2, 1, 100, dtype=torch.int32)},
    "indices.dtype": {"indices": torch.zeros(2, 1, 128, dtype=torch.int64)},
    "d_v": {"d_v": 256},
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_what_breaks_the_contract_breaks_theirs_with_the_same_words(real_module, broken) -> None:
    """On tensors that say they are on a GPU, as theirs takes no others."""
    theirs = importlib.import_module(real_module).sparse_mla_q8kv8_prefill_fwd
    words = []
    broken_call = call() | BROKEN[broken]
    with FakeTensorMode():
        arguments = {
            name: torch.empty(value.shape, dtype=value.dtype, device="cuda")
            if isinstance(value, torch.Tensor)
            else value
            for name, value in broken_call.items()
        }
    for operator in (theirs, sparse_mla.sparse_mla_q8kv8_prefill_fwd):
        with pytest.raises(Exception, match=r"\w") as caught:
            operator(**arguments)
        words.append(str(caught.value).splitlines()[0])
    assert words[0] == words[1]
