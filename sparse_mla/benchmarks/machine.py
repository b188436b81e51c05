"""What a figure depends on beside the code: card, clocks, power, versions, the exact command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .. import environment
from ..version import __version__

SMI_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw",
    "power.limit", "temperature.gpu", "clocks_event_reasons.active",
)  # fmt: skip
DISTRIBUTIONS = ("triton", "cuda-core", "cuda-bindings", "sgl-flash-mla", "sglang")


def describe(device: torch.device, argv: list[str] | None = None) -> dict[str, Any]:
    """The machine and the command, as data."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command(sys.argv if argv is None else argv),
        "device": device.type,
        "name": device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sparse_mla": __version__,
        "commit": commit(),
        **{name: version for name in DISTRIBUTIONS if (version := _version(name))},
    }
    if device.type == "cuda":
        from .. import jit

        properties = torch.cuda.get_device_properties(device)
        found |= {
            "card": card(device),
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "compiler": jit.compiler_version() if jit.available() is None else jit.available(),
        }
    else:
        found |= {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "load_average": list(os.getloadavg()),
        }
    return found


def others_seconds(stat: Path = Path("/proc/stat")) -> float | None:
    """Processor time that other programs have used so far; ``None`` where no Linux tells it."""
    try:
        ticks = [int(word) for word in stat.read_text(encoding="ascii").split("\n")[0].split()[1:9]]
        _, _, _, idle, waiting, *_ = ticks
    except (OSError, ValueError):
        return None
    mine = os.times()
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK") - mine.user - mine.system


def command(argv: list[str]) -> str:
    """The command line as somebody else would type it: the program by its name, no folders."""
    program = "sparse-mla" if Path(argv[0]).name in ("sparse-mla", "__main__.py", "-c") else argv[0]
    words = [Path(word).name if Path(word).is_absolute() else word for word in argv[1:]]
    return shlex.join([Path(program).name, *words])


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as facts:
            names = [line.partition(":")[2].strip() for line in facts if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """The checkout's commit, marked where files differ from it, or ``SPARSE_MLA_COMMIT``.

    ``None`` where neither is there; the variable is for copies that left their history behind.
    """
    told = environment.read("SPARSE_MLA_COMMIT")
    if told:
        return told
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "sparse_mla")
    except OSError:
        return None
    return f"{head}{' with changes' if changed else ''}" if head else None


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def card(device: torch.device, busy: Callable[[], Any] | None = None) -> dict[str, str]:
    """What ``nvidia-smi`` says of the card; with ``busy``, while that runs over and over.

    Clocks and power are those of one instant: under load they differ from one to the next.
    """
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = f"GPU-{uuid}" if uuid else str(device.index or 0)
    words = ["nvidia-smi", f"--id={which}", "--format=csv,noheader"]
    words.append("--query-gpu=" + ",".join(SMI_FIELDS))
    try:
        asked = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as fault:
        return {"unknown": str(fault)}
    while busy is not None and asked.poll() is None:
        for _ in range(10):
            busy()
        torch.cuda.synchronize(device)
    return parse_card(asked.communicate()[0], asked.returncode)


def parse_card(answer: str, returncode: int) -> dict[str, str]:
    """The fields of ``nvidia-smi``'s answer; what it said instead, where it did not answer."""
    lines = answer.strip().splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    if returncode or len(values) != len(SMI_FIELDS):
        return {"unknown": answer.strip()}
    return dict(zip(SMI_FIELDS, values, strict=True))
