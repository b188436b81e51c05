"""``sparse-mla doctor``: what this machine has, and what each backend makes of it."""

from __future__ import annotations

import os
import platform
from typing import Annotated, Any

import typer

from . import shapes
from .terminal import FAULT, Json, guarded, say, say_json, say_row

PACKAGES = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton"),
    "cuda-core": ("cuda-core",),
    "cuda-bindings": ("cuda-bindings",),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12"),
    "safetensors": ("safetensors",),
    "typer": ("typer",),
    "rich": ("rich",),
    "matplotlib": ("matplotlib",),
}
"""What is asked of the installed packages, and the distributions that may bring it."""

VARIABLES = (
    "SPARSE_MLA_BACKEND",
    "SPARSE_MLA_CACHE_DIR",
    "SPARSE_MLA_DEBUG",
    "SPARSE_MLA_DUMP",
    "SPARSE_MLA_DUMP_ALL",
    "SPARSE_MLA_CAPTURE",
    "SPARSE_MLA_CAPTURE_RATE",
    "SPARSE_MLA_CAPTURE_MAX_BYTES",
    "SPARSE_MLA_DOCS_URL",
    "CUDA_VISIBLE_DEVICES",
)


def doctor(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="NAME=N,...",
            help="Also say which Hopper kernels run this shape: any of s_q, h_q, topk, d_qk "
            "(4096, 128, 2048, 576 where left out), and q_scale=token or kv_scale=token where each "
            "has its own. May be given again.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what this machine has, and what each backend makes of it.

    Versions come from the installed packages' metadata: nothing is imported for them, nothing is
    fetched and nothing is run on a GPU.

    Examples:
      sparse-mla doctor
      sparse-mla doctor --shape h_q=16 --shape s_q=1,h_q=128
      sparse-mla doctor --json

    Exit codes: 0 some backend runs here, 1 none does.
    """
    with guarded(as_json):
        report = examine()
        if shape:
            report["kernels"] = shapes.examine(shape, report["devices"])
        if as_json:
            say_json(report)
        else:
            _say(report)
        if not report["ok"]:
            raise typer.Exit(FAULT)


def examine() -> dict[str, Any]:
    """The report, as data."""
    backends = examined_backends()
    return {
        "ok": any(entry["reason"] is None for entry in backends),
        "versions": versions(),
        "cpu": cpu(),
        "devices": devices(),
        "backends": backends,
        "cache": cache(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def versions() -> dict[str, str | None]:
    """Version of each thing that matters here; ``None`` where it is not installed."""
    from ..version import __version__

    found: dict[str, str | None] = {"sparse-mla": __version__, "python": platform.python_version()}
    for label, names in PACKAGES.items():
        found[label] = next(filter(None, map(_version, names)), None)
    found["driver"] = driver()
    return found


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Version of the loaded NVIDIA kernel driver, as the kernel tells it."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8", errors="replace") as file:
            words = file.readline().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def cpu() -> dict[str, Any]:
    """The processor as torch uses it."""
    import torch

    return {
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
    }


def devices() -> list[dict[str, Any]]:
    """CUDA devices, with their compute capability and memory."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def examined_backends() -> list[dict[str, Any]]:
    """Each backend's name and why it can run nothing here, ``None`` where it can."""
    from .. import dispatch

    found = []
    for name in dispatch.BACKENDS:
        try:
            reason = dispatch.load(name).available()
        except Exception as fault:  # a broken installation of what it needs is what is asked for
            reason = f"{type(fault).__name__}: {fault}".partition("\n")[0]
        found.append({"name": name, "reason": reason})
    return found


def cache() -> dict[str, Any]:
    """Where compiled kernels are kept, and how much there is."""
    from .. import jit_cache

    directory = jit_cache.directory()
    if directory is None:
        return {"directory": None, "files": 0, "bytes": 0}
    files = [path for path in directory.rglob("*") if path.is_file()] if directory.is_dir() else []
    return {
        "directory": os.fspath(directory),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
    }


def _say(report: dict[str, Any]) -> None:
    say("versions")
    for name, version in report["versions"].items():
        say_row(name, version or "not installed" if name != "driver" else version or "not loaded")
    say("\ndevices")
    cpu_facts = report["cpu"]
    say_row(
        "cpu", "{machine}, {capability}, {threads} threads on {cores} cores".format(**cpu_facts)
    )
    for device in report["devices"]:
        memory = device["memory_bytes"] / 2**30
        say_row(device["device"], f"{device['name']}, {device['capability']}, {memory:.0f} GiB")
    if not report["devices"]:
        say_row("cuda", "none")
    say("\nbackends")
    for backend in report["backends"]:
        say_row(
            backend["name"], "ready" if backend["reason"] is None else f"no: {backend['reason']}"
        )
    say("\nkernel cache")
    kept = report["cache"]
    say_row("directory", kept["directory"] or "none: this user has no home directory")
    say_row("holds", f"{kept['files']} files, {kept['bytes'] / 2**20:.1f} MiB")
    if report["environment"]:
        say("\nenvironment")
        for name, value in report["environment"].items():
            say_row(name, value)
    if "kernels" in report:
        shapes.say_shapes(report["kernels"])
