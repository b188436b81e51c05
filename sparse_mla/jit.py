"""CUDA C++ to a kernel that can be launched: NVRTC, the cubin cache (`jit_cache`), the driver
(`jit_driver`).

`compile_variant` needs no GPU and no driver, so any machine can check every kernel. `load` gives
the kernel on one device, compiled and loaded once, and `Kernel.launch` puts it on a stream for
about a microsecond of host time.

NVRTC is reached through ``cuda.bindings``, the driver through ctypes. That is on purpose: a warm
start then imports no package and loads no compiler (NVRTC is a library of 100 MB), and for the two
driver calls of a launch ctypes costs no more. Nothing is imported or opened before the first use.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
import posixpath
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import jit_cache
from .errors import BackendError, error
from .jit_driver import Kernel, driver

KERNELS = Path(__file__).parent / "kernels"
DEFAULT_ARCH = "sm_90a"
OPTIONS = ("--std=c++20", "--device-as-default-execution-space", "--ptxas-options=-v")
NVRTC_DISTRIBUTIONS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
LOG_LINES = 40
_INCLUDE = re.compile(r'^(\s*#\s*include\s*")([^"]+)(")', re.MULTILINE)


@dataclass(frozen=True, eq=False)
class Variant:
    """One kernel to compile. Declare each once: two are equal only when they are the same object,
    which keeps `load` cheap.

    A source includes headers by their path from the file they are included in, or from ``root``.
    """

    name: str  # for people: in messages and reports
    source: str  # path under root, "sm90/prefill.cu"
    entry: str  # name of an extern "C" __global__ function
    defines: Mapping[str, int | str] = field(default_factory=dict)
    # Further NVRTC options, but none that reads files: the cache's key would not see them.
    options: tuple[str, ...] = ()
    root: Path = KERNELS


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel: bytes, and spills of the functions it calls too."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int  # static shared memory
    barriers: int


@dataclass(frozen=True)
class Compiled:
    """A compiled variant, with what the compiler said about it."""

    cubin: bytes
    log: str
    resources: Resources
    key: str  # name in the cache
    arch: str

    @property
    def wgmma_messages(self) -> tuple[str, ...]:
        """The messages C7510 to C7519: what ptxas did to the wgmma pipeline."""
        return tuple(line for line in self.log.splitlines() if re.search(r"\(C751\d\)", line))

    @property
    def serialized(self) -> tuple[str, ...]:
        """Those among them that cost speed: waits put between wgmma, or wgmma one at a time."""
        return tuple(line for line in self.wgmma_messages if re.search(r"C751[014-8]", line))


def compile_variant(variant: Variant, arch: str = DEFAULT_ARCH) -> Compiled:
    """Compile ``variant``, or take it from the cache. Raises ``nvrtc-missing`` or
    ``kernel-compile-failed``.
    """
    try:
        sources = _sources(variant)
    except OSError as failure:
        raise _compile_failed(variant, arch, f"error: {failure}") from failure
    options = _options(variant, arch)
    compiler = compiler_version()
    key = cache_key(variant.source, sources, options, compiler)
    entry = jit_cache.read(key)
    if entry is None:
        cubin, log, ran = _compile(variant, arch, sources, options)
        if not log:
            # NVRTC has a cache too where there is a driver, and what comes from there comes
            # without the report of ptxas.
            cubin, log, ran = _compile(variant, arch, sources, (*options, "--no-cache"))
        # Another NVRTC than the installed package's was loaded first: its work does not belong
        # under this key.
        if f"nvrtc {ran}." in compiler:
            jit_cache.write(key, cubin, log)
    else:
        cubin, log = entry
    resources = parse_resources(log, variant.entry)
    if resources is None:
        found = ", ".join(_entries(log)) or "none"
        raise _compile_failed(
            variant, arch, f'no extern "C" __global__ function {variant.entry}; found: {found}'
        )
    return Compiled(cubin, log, resources, key, arch)


def load(variant: Variant, device_index: int, arch: str = DEFAULT_ARCH) -> Kernel:
    """The kernel on one device; made on the first call, afterwards the cost of a dictionary
    look-up.

    Raises ``cuda-driver-missing``, ``kernel-load-failed``, and what `compile_variant` raises.
    """
    where = (variant, device_index, arch)
    kernel = _kernels.get(where)
    if kernel is None:
        with _loading:
            kernel = _kernels.get(where)
            if kernel is None:
                library = driver()
                cubin = compile_variant(variant, arch).cubin
                kernel = Kernel(library, variant.name, variant.entry, arch, cubin, device_index)
                _kernels[where] = kernel
    return kernel


def available() -> str | None:
    """Why kernels cannot be compiled and loaded on this machine, or None when they can."""
    try:
        _nvrtc()
        driver()
    except BackendError as failure:
        return str(failure).splitlines()[0]
    return None


_kernels: dict[tuple[Variant, int, str], Kernel] = {}
_loading = threading.Lock()


def _after_fork() -> None:
    """A child has none of its parent's CUDA state, and must not wait for a thread that exists only
    in the parent.
    """
    global _loading
    _loading = threading.Lock()
    _kernels.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def cache_key(
    source: str, sources: Mapping[str, str], options: tuple[str, ...], compiler: str
) -> str:
    """Hash of everything that decides the cubin: which source, all texts with their names, options
    (architecture included), compiler.
    """
    digest = hashlib.sha256()
    for part in (
        source,
        compiler,
        *options,
        "",
        *(t for pair in sorted(sources.items()) for t in pair),
    ):
        data = part.encode()
        # With its length before it, no part can pose as the end of its neighbour.
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@functools.lru_cache(maxsize=1)
def compiler_version() -> str:
    """Which NVRTC compiles here: from the installed packages where it comes from one, else asked of
    the library itself.
    """
    found = []
    for name in (*NVRTC_DISTRIBUTIONS, "cuda-bindings"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(f"nvrtc {version}" if name in NVRTC_DISTRIBUTIONS else f"{name} {version}")
    if not any(text.startswith("nvrtc") for text in found):
        found.append(f"nvrtc {_nvrtc_version(_nvrtc())}.")
    return ", ".join(found)


def parse_resources(log: str, entry: str) -> Resources | None:
    """The report of ``entry`` in the output of ``ptxas -v``, or None when the log has no such
    kernel.
    """
    # A report goes from its heading to the next kernel's; functions that are called and not inlined
    # come after their caller.
    _, found, rest = log.partition(f"Compiling entry function '{entry}'")
    if not found:
        return None
    report = rest.partition("Compiling entry function")[0]

    def numbers(pattern: str) -> list[int]:
        return [int(text) for text in re.findall(pattern, report)]

    return Resources(
        registers=sum(numbers(r"Used (\d+) registers")[:1]),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        stack=max(numbers(r"(\d+) bytes (?:stack frame|cumulative stack size)"), default=0),
        smem=sum(numbers(r"(\d+) bytes smem")[:1]),
        barriers=sum(numbers(r"used (\d+) barriers")[:1]),
    )


def _entries(log: str) -> list[str]:
    return re.findall(r"Compiling entry function '([^']+)'", log)


def _sources(variant: Variant) -> dict[str, str]:
    """The variant's source and the headers it reaches, by path under the root.

    NVRTC gets them as texts with names, and finds a header only by exactly its name. So an include,
    which is relative to the file it stands in or to the root, is written out as the path under the
    root.
    """
    texts: dict[str, str] = {}
    pending = [variant.source]
    while pending:
        name = pending.pop()
        if name not in texts:
            text = (variant.root / name).read_text(encoding="utf-8")
            texts[name] = _INCLUDE.sub(functools.partial(_rooted, variant.root, name), text)
            pending += (found[2] for found in _INCLUDE.finditer(texts[name]))
            pending = [name for name in pending if (variant.root / name).is_file()]
    return texts


def _rooted(root: Path, name: str, include: re.Match[str]) -> str:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(name), include[2]))
    # Otherwise it is a path under the root already, or NVRTC says where it is missing.
    return f"{include[1]}{path}{include[3]}" if (root / path).is_file() else include[0]


def _options(variant: Variant, arch: str) -> tuple[str, ...]:
    defines = (f"-D{name}={value}" for name, value in sorted(variant.defines.items()))
    return (f"--gpu-architecture={arch}", *OPTIONS, *defines, *variant.options)


def _nvrtc() -> Any:
    """The bindings of NVRTC, with the library behind them found."""
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as failure:
        reason = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
        raise error("nvrtc-missing", reason=reason) from failure
    return nvrtc


def _nvrtc_version(nvrtc: Any) -> str:
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _compile(
    variant: Variant, arch: str, sources: dict[str, str], options: tuple[str, ...]
) -> tuple[bytes, str, str]:
    """Cubin, log, and the version of the NVRTC that made them."""
    nvrtc = _nvrtc()
    headers = {name: text for name, text in sources.items() if name != variant.source}
    _, program = nvrtc.nvrtcCreateProgram(
        sources[variant.source].encode(),
        variant.source.encode(),
        len(headers),
        [text.encode() for text in headers.values()],
        [name.encode() for name in headers],
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        buffer = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, buffer)
        log = buffer.decode(errors="replace").rstrip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _compile_failed(variant, arch, log or status.name)
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), log, _nvrtc_version(nvrtc)


def _compile_failed(variant: Variant, arch: str, log: str) -> BackendError:
    lines = log.splitlines()
    shown = [*lines[:LOG_LINES], f"... {len(lines) - LOG_LINES} more lines"]
    failure = error(
        "kernel-compile-failed",
        kernel=variant.name,
        arch=arch,
        source=variant.source,
        compiler=compiler_version(),
        first=next((line for line in lines if "error" in line), lines[0]),
        log="\n".join(shown if len(lines) > LOG_LINES else lines),
    )
    assert isinstance(failure, BackendError)
    return failure
