"""What is read from the compiler's log, and what names a kernel in the cache."""

from __future__ import annotations

import pytest

from sparse_mla import jit
from sparse_mla.jit import Resources, cache_key, parse_resources


def test_which_messages_cost_speed() -> None:
    """C7519 only adds a fence at the start, and C7512, C7513 are other remarks."""
    lines = [f"ptxas info    : (C{code}) text in function 'f'" for code in range(7509, 7521)]
    compiled = jit.Compiled(b"", "\n".join(lines), Resources(0, 0, 0, 0, 0, 0), "", "sm_90a")
    assert compiled.wgmma_messages == tuple(lines[1:11])
    codes = [line.partition("(C")[2][:4] for line in compiled.serialized]
    assert codes == ["7510", "7511", "7514", "7515", "7516", "7517", "7518"]


REPORT = """\
ptxas info    : (C7517) warpgroup.wait is injected in around line 994 by compiler in function 'a'
ptxas info    : 16 bytes gmem
ptxas info    : Compiling entry function 'spilly' for 'sm_90a'
ptxas info    : Function properties for spilly
ptxas         .     1288 bytes stack frame, 1192 bytes spill stores, 1244 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 1288 bytes cumulative stack size
ptxas info    : Compile time = 81.094 ms
ptxas info    : Compiling entry function 'caller' for 'sm_90a'
ptxas info    : Function properties for caller
ptxas         .     256 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 34 registers, used 0 barriers, 272 bytes cumulative stack size
ptxas info    : Compile time = 8.996 ms
ptxas info    : Function properties for _Z3fooPfi
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
ptxas info    : Function properties for plain
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 400 bytes smem, 560 bytes cmem[0]
ptxas info    : Compile time = 1.839 ms
"""


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("spilly", Resources(64, 1192, 1244, 1288, 0, 1)),
        ("caller", Resources(34, 8, 12, 272, 0, 0)),
        ("plain", Resources(168, 0, 0, 0, 400, 16)),
        ("spill", None),
        ("absent", None),
    ],
)
def test_resource_report(entry: str, expected: Resources | None) -> None:
    assert parse_resources(REPORT, entry) == expected


def test_key_takes_each_part_for_itself() -> None:
    texts = {"a.cu": "x", "b.cuh": "y"}
    keys = [
        cache_key("a.cu", texts, ("-1", "-2"), "nvrtc 1"),
        cache_key("b.cuh", texts, ("-1", "-2"), "nvrtc 1"),
        cache_key("a.cu", texts, ("-1", "-2"), "nvrtc 2"),
        cache_key("a.cu", texts, ("-2", "-1"), "nvrtc 1"),
        cache_key("a.cu", texts, ("-1-2",), "nvrtc 1"),
        cache_key("a.cu", {"a.cu": "y", "b.cuh": "x"}, ("-1", "-2"), "nvrtc 1"),
        cache_key("a.cu", {"a.cu": "xb.cuh", "": "y"}, ("-1", "-2"), "nvrtc 1"),
        cache_key("a.cu", {"a.cu": "x"}, ("-1", "-2"), "nvrtc 1"),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == cache_key("a.cu", dict(reversed(texts.items())), ("-1", "-2"), "nvrtc 1")


def test_compiler_version_names_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"nvidia-cuda-nvrtc": "13.0.88", "cuda-bindings": "13.3.1"}

    def version(name: str) -> str:
        if name in installed:
            return installed[name]
        raise jit.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(jit.importlib.metadata, "version", version)
    assert jit.compiler_version.__wrapped__() == "nvrtc 13.0.88, cuda-bindings 13.3.1"

    # NVRTC from a toolkit: only the library itself can say what it is.
    del installed["nvidia-cuda-nvrtc"]
    monkeypatch.setattr(jit, "_nvrtc", lambda: type("N", (), {"nvrtcVersion": lambda: (0, 12, 9)}))
    assert jit.compiler_version.__wrapped__() == "cuda-bindings 13.3.1, nvrtc 12.9."
