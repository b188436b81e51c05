"""What a run of the ``cpu`` backend adds to this process's memory at its peak.

    python -m sparse_mla.benchmarks.memory v32-tp1-q4096-kv8k-uniform

prints JSON; ``measure`` runs that in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

SHAPE = "v32-tp1-q4096-kv8k-uniform"


def measure(shape: str = SHAPE) -> dict[str, Any]:
    """Peak memory beyond inputs and outputs, in MiB, or the reason why there is no figure."""
    command = [sys.executable, "-m", "sparse_mla.benchmarks.memory", shape]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"id": shape, "reason": last}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def in_this_process(shape: str) -> dict[str, Any]:
    """What a run adds to the peak once inputs and outputs are there, touched."""
    import torch

    from ..backends import cpu
    from ..testing import make_problem
    from .inputs import make_set
    from .shapes import REGISTRY

    problem = make_problem(make_set(REGISTRY[shape], torch.device("cpu"), 0))
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")  # the peak is counted anew from what is resident now
    before = peak_mib()
    cpu.run(problem)
    return {"id": shape, "before_mib": before, "extra_mib": peak_mib() - before}


def peak_mib() -> float:
    """The most resident memory this process has had since the count began."""
    with open("/proc/self/status", encoding="utf-8") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    print(json.dumps(in_this_process(sys.argv[1])))
