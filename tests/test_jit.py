"""Compiling kernels with NVRTC, on any machine; and their way into the cache."""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sparse_mla import jit, jit_cache
from sparse_mla.errors import BackendError
from sparse_mla.jit import Variant, compile_variant

MAIN = """\
#include "common/scale.cuh"

struct Params {
  float* x;  // [blockDim.x]
  float factor;
};

extern "C" __global__ void reverse(const __grid_constant__ Params params) {
  extern __shared__ float staged[];
  __shared__ float fixed[100];
  fixed[threadIdx.x % 100] = params.factor;
  staged[threadIdx.x] = params.x[threadIdx.x];
  __syncthreads();
  params.x[threadIdx.x] = scaled(staged[blockDim.x - 1 - threadIdx.x], fixed[threadIdx.x % 100]);
}
"""
SCALE = """\
#pragma once
#include "factor.cuh"
#include "../common/factor.cuh"
__device__ inline float scaled(float x, float factor) { return x * factor * FACTOR * WIDTH; }
"""
FACTOR = "#pragma once\n#define FACTOR 3.0f\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernels, laid out as the package's, and an empty cache."""
    monkeypatch.setenv("SPARSE_MLA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit_cache, "_said", set())
    for name, text in {
        "sm90/reverse.cu": MAIN,
        "common/scale.cuh": SCALE,
        "common/factor.cuh": FACTOR,
        "common/unused.cuh": "#error never included\n",
    }.items():
        path = tmp_path / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "kernels"


def variant(root: Path, **changes: object) -> Variant:
    fields = {
        "name": "reverse_w2",
        "source": "sm90/reverse.cu",
        "entry": "reverse",
        "defines": {"WIDTH": 2},
        "root": root,
    }
    return Variant(**(fields | changes))


def failed(**changes: object) -> BackendError:
    with pytest.raises(BackendError) as caught:
        compile_variant(variant(**changes))
    assert caught.value.id == "kernel-compile-failed"
    return caught.value


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the package cuda-bindings."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)


@pytest.fixture
def no_compiler_after_first(monkeypatch: pytest.MonkeyPatch):
    def run_twice(function):
        first = function()
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
        return first, function()

    return run_twice


needs_nvrtc = pytest.mark.skipif(
    subprocess.run(
        [sys.executable, "-c", "from cuda.bindings import nvrtc; nvrtc.nvrtcVersion()"],
        check=False,
        capture_output=True,
    ).returncode
    != 0,
    reason="needs NVRTC: pip install 'sparse-mla[cuda]'",
)


@needs_nvrtc
def test_compiles_without_a_gpu(root: Path) -> None:
    compiled = compile_variant(variant(root))
    assert compiled.cubin.startswith(b"\x7fELF")
    assert b"reverse" in compiled.cubin
    assert compiled.arch == "sm_90a"
    assert compiled.resources.smem == 400
    assert compiled.resources.barriers == 1
    assert 0 < compiled.resources.registers < 64
    assert compiled.resources.spill_stores == compiled.resources.spill_loads == 0
    assert compiled.wgmma_messages == ()


@needs_nvrtc
def test_second_compile_is_the_stored_one(root: Path, no_compiler_after_first) -> None:
    first, second = no_compiler_after_first(lambda: compile_variant(variant(root)))
    assert second == first


@needs_nvrtc
@pytest.mark.parametrize(
    ("change", "recompiled"),
    [
        ({"defines": {"WIDTH": 3}}, True),
        ({"defines": {"WIDTH": 2, "MORE": 1}}, True),
        ({"options": ("--use_fast_math",)}, True),
        ({"name": "another name"}, False),
    ],
    ids=["define-value", "define-name", "options", "name-is-for-people"],
)
def test_key_of_a_changed_variant(change, recompiled: bool, root: Path) -> None:
    before = compile_variant(variant(root))
    after = compile_variant(variant(root, **change))
    assert (after.key != before.key) == recompiled


@needs_nvrtc
@pytest.mark.parametrize(
    ("file", "recompiled"),
    [
        ("sm90/reverse.cu", True),
        ("common/scale.cuh", True),
        ("common/factor.cuh", True),
        ("common/unused.cuh", False),
    ],
)
def test_key_of_a_changed_file(file: str, recompiled: bool, root: Path) -> None:
    before = compile_variant(variant(root))
    with open(root / file, "a") as appended:
        appended.write("// changed\n")
    after = compile_variant(variant(root))
    assert (after.key != before.key) == recompiled


@needs_nvrtc
def test_key_of_another_architecture_or_compiler(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {compile_variant(variant(root)).key, compile_variant(variant(root), "sm_80").key}
    monkeypatch.setattr(jit, "compiler_version", lambda: "nvrtc 99.1.2")
    keys.add(compile_variant(variant(root)).key)
    assert len(keys) == 3


@needs_nvrtc
def test_work_of_another_compiler_is_not_stored(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed package says 99.1; the library that was loaded is another one."""
    monkeypatch.setattr(jit, "compiler_version", lambda: "nvrtc 99.1.2")
    assert compile_variant(variant(root)).cubin
    assert not (root.parent / "cache").exists()


@needs_nvrtc
@pytest.mark.parametrize("known", [True, False], ids=["knows --no-cache", "does not know it"])
def test_the_compilers_own_cache_is_passed_by(
    known: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a driver NVRTC 13 keeps cubins without their reports; older ones have no cache."""
    nvrtc = jit._nvrtc()
    real, asked = nvrtc.nvrtcCompileProgram, []

    def compile_(program: object, count: int, options: list[bytes]) -> tuple[object]:
        asked.append(options[-1])
        if b"--no-cache" not in options:
            return real(program, count, options)
        if known:
            return real(program, count - 1, options[:-1])
        return (nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION,)

    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", compile_)
    assert compile_variant(variant(root)).resources.registers > 0
    assert asked[0] == b"--no-cache"
    assert len(asked) == (1 if known else 2)


@needs_nvrtc
def test_a_stored_cubin_without_its_report_is_compiled_again(root: Path) -> None:
    first = compile_variant(variant(root))
    jit.jit_cache.write(first.key, first.cubin, "")
    again = compile_variant(variant(root))
    assert (again.cubin, again.resources) == (first.cubin, first.resources)
    assert jit.jit_cache.read(first.key) == (again.cubin, again.log)


@needs_nvrtc
def test_sixteen_processes_on_an_empty_cache(root: Path) -> None:
    """All start at once, each with a compiler of its own, and all get the same kernel."""
    program = """
import hashlib, multiprocessing, sys, warnings
from pathlib import Path
from sparse_mla.jit import Variant, compile_variant

def work(start, answers):
    warnings.simplefilter("error")
    variant = Variant("reverse", "sm90/reverse.cu", "reverse", {"WIDTH": 2}, root=Path(sys.argv[1]))
    start.wait(60)
    for _ in range(3):
        compiled = compile_variant(variant)
        answers.put((compiled.key, hashlib.sha256(compiled.cubin).hexdigest()))

processes = multiprocessing.get_context("fork")
start, answers = processes.Barrier(16), processes.Queue()
children = [processes.Process(target=work, args=(start, answers)) for _ in range(16)]
for child in children:
    child.start()
for _ in range(48):
    print(*answers.get(timeout=60))
for child in children:
    child.join()
print([child.exitcode for child in children])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    *answers, codes = done.stdout.splitlines()
    assert codes == str([0] * 16)
    assert len(answers) == 48
    assert len(set(answers)) == 1
    key = answers[0].split()[0]
    assert [path.name for path in (root.parent / "cache").iterdir()] == [f"{key}.cubin"]


@needs_nvrtc
@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:-9] + b"123456789"])
def test_damaged_entry_is_compiled_again(damage, root: Path) -> None:
    first = compile_variant(variant(root))
    path = root.parent / "cache" / f"{first.key}.cubin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(jit_cache.KernelCacheWarning, match=r"damaged and is compiled again"):
        second = compile_variant(variant(root))
    assert second.cubin == first.cubin
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_variant(variant(root))


@needs_nvrtc
def test_unwritable_cache_compiles_in_memory(root: Path) -> None:
    (root.parent / "cache").write_text("a file")
    with pytest.warns(jit_cache.KernelCacheWarning, match="cannot be written") as caught:
        compiled = [compile_variant(variant(root)) for _ in range(2)]
    assert len(caught) == 1
    assert compiled[0].cubin == compiled[1].cubin


@needs_nvrtc
def test_source_that_does_not_parse(root: Path) -> None:
    with open(root / "common/factor.cuh", "a") as header:
        header.write("int f() { return undefined_name; }\n")
    failure = failed(root=root)
    message, *rest = str(failure).splitlines()
    assert message == (
        "kernel reverse_w2 did not compile for sm_90a: "
        'common/factor.cuh(3): error: identifier "undefined_name" is undefined'
    )
    assert any("return undefined_name;" in line for line in rest)
    assert any(line.strip() == "^" for line in rest)
    assert "nvrtc" in failure.context["compiler"]
    assert not (root.parent / "cache").exists(), "a failure must not be stored"


@needs_nvrtc
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"entry": "revers"}, 'no extern "C" __global__ function revers; found: reverse'),
        ({"options": ("--no-such-option",)}, "unrecognized option --no-such-option found"),
        ({"options": ("--ptxas-options=--no-such",)}, "Unknown option"),
        ({"source": "sm90/missing.cu"}, "No such file or directory"),
    ],
    ids=["entry", "nvrtc-option", "ptxas-option", "source"],
)
def test_variant_that_asks_for_what_is_not_there(changes, text: str, root: Path) -> None:
    assert text in failed(root=root, **changes).context["first"]


@needs_nvrtc
def test_missing_header_is_named_where_it_is_included(root: Path) -> None:
    (root / "common/factor.cuh").unlink()
    assert failed(root=root).context["first"] == (
        'common/scale.cuh(2): catastrophic error: cannot open source file "factor.cuh"'
    )


@needs_nvrtc
def test_long_logs_are_cut(root: Path) -> None:
    source = root / "sm90/reverse.cu"
    source.write_text("".join(f"int a{n} = undefined{n};\n" for n in range(90)))
    log = failed(root=root).context["log"].splitlines()
    assert len(log) == jit.LOG_LINES + 1
    assert log[-1].startswith("... ")
    assert log[-1].endswith(" more lines")


@needs_nvrtc
def test_wgmma_that_ptxas_serialises(root: Path) -> None:
    """The accumulator is read between two wgmma: ptxas must say so, and we must see it."""
    (root / "serial.cu").write_text(
        """\
extern "C" __global__ void serial(float* out, unsigned long long a, unsigned long long b) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 4; ++i) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
                 "{%0,%1,%2,%3}, %4, %5, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    d[0] *= 2.f;
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}
"""
    )
    compiled = compile_variant(variant(root, source="serial.cu", entry="serial"))
    assert compiled.serialized
    assert set(compiled.serialized) < set(compiled.wgmma_messages)


def test_missing_nvrtc(root: Path, no_compiler: None) -> None:
    with pytest.raises(BackendError, match="^NVRTC is not usable: ") as caught:
        compile_variant(variant(root))
    assert caught.value.id == "nvrtc-missing"
    assert "pip install 'sparse-mla[cuda]'" in str(caught.value)
    assert jit.available() == str(caught.value).splitlines()[0]


def test_library_behind_the_bindings_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_found() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so"\nlong list of places')

    bindings = type(sys)("cuda.bindings.nvrtc")
    bindings.nvrtcVersion = not_found
    monkeypatch.setattr(jit.importlib, "import_module", lambda name: bindings)
    assert jit.available() == 'NVRTC is not usable: Failure finding "libnvrtc.so"'


def test_threads_may_compile_at_once(root: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs sparse-mla[cuda]")
    with ThreadPoolExecutor(4) as pool:
        cubins = {c.cubin for c in pool.map(compile_variant, [variant(root) for _ in range(4)])}
    assert len(cubins) == 1


def test_importing_loads_no_cuda() -> None:
    """Torch imports what it likes; ours must add nothing of CUDA to it."""
    program = """
import sys
import torch

def loaded():
    maps = open("/proc/self/maps").read().split()
    names = [name for name in sys.modules if name.partition(".")[0] in ("cuda", "triton")]
    return {*names, *(word for word in maps if "/libnvrtc" in word or "/libcuda." in word)}

before = loaded()
import sparse_mla.jit
print(loaded() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "set()"


@needs_nvrtc
def test_warm_start_loads_no_compiler(root: Path) -> None:
    compile_variant(variant(root))
    program = """
import sys
from pathlib import Path
from sparse_mla.jit import Variant, compile_variant
variant = Variant("reverse", "sm90/reverse.cu", "reverse", {"WIDTH": 2}, root=Path(sys.argv[1]))
assert compile_variant(variant).cubin
print([line for line in open("/proc/self/maps") if "libnvrtc" in line])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[]"
