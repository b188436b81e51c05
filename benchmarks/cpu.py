"""How fast and how small the CPU backend is: ``python benchmarks/cpu.py [--json]``.

Four figures, all from one process so that they share the machine's mood: GFLOP/s, that over the
GFLOP/s of a large bfloat16 matmul, the speed-up over gather + bmm in float32, and the peak memory
beyond inputs and outputs, in a process of its own. Rounds interleave the three computations; a
ratio is the median of the rounds' ratios. The output is checked against the reference first.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from sparse_mla.backends import cpu
from sparse_mla.params import PrefillProblem
from sparse_mla.testing import CPU_BFLOAT16, CPU_FLOAT32, Inputs, compare, make_problem

E4M3 = torch.float8_e4m3fn
D_V = 512
MATMUL = 4096


def make(args: argparse.Namespace) -> PrefillProblem:
    """Random FP8 data, written block by block so that making it needs no memory of its own."""
    generator = torch.Generator().manual_seed(0)

    def filled(*shape: int) -> torch.Tensor:
        data = torch.empty(shape, dtype=E4M3)
        for start in range(0, shape[0], 64):
            part = data[start : start + 64]
            part.copy_(torch.randn(part.shape, generator=generator))
        return data

    indices = torch.full((args.s_q, 1, args.topk), -1, dtype=torch.int32)
    for row in indices[:, 0]:
        chosen = torch.randperm(args.s_kv, generator=generator)[: args.topk]
        row[: len(chosen)] = chosen
    inputs = Inputs(
        q=filled(args.s_q, args.h_q, args.d_qk),
        kv=filled(args.s_kv, 1, args.d_qk),
        indices=indices,
        sm_scale=args.sigma / math.sqrt(args.d_qk),
        q_scale=torch.ones(1),
        kv_scale=torch.ones(1),
    )
    return make_problem(inputs)


def gather_and_bmm(problem: PrefillProblem, block: int = 8) -> torch.Tensor:
    """What one writes first: dequantise the cache to float32, gather each query's rows, two bmm."""
    assert problem.q_scale is not None
    assert problem.kv_scale is not None
    kv = problem.kv_rows.float() * problem.kv_scale
    out = torch.empty_like(problem.out)
    for start in range(0, problem.s_q, block):
        part = slice(start, start + block)
        rows = kv[problem.index_rows[part].clamp(min=0).long()]
        q = problem.q[part].float() * problem.q_scale
        p = torch.softmax(torch.bmm(q, rows.transpose(1, 2)) * problem.sm_scale, dim=-1)
        out[part] = torch.bmm(p, rows[:, :, :D_V])
    return out


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> dict[str, Any]:
    problem = make(args)
    cpu.run(problem)
    compute = cpu.compute_dtype(problem)
    tolerance = CPU_BFLOAT16 if compute == torch.bfloat16 else CPU_FLOAT32
    picked = sorted({0, args.s_q // 3, args.s_q - 1})
    errors = compare(problem, tolerance, queries=picked)

    square = torch.randn(MATMUL, MATMUL).bfloat16()
    product = torch.empty_like(square)
    rounds = []
    for _ in range(args.rounds + 1):
        rounds.append(
            (
                seconds(lambda: torch.mm(square, square, out=product)),
                seconds(lambda: cpu.run(problem)),
                seconds(lambda: gather_and_bmm(problem)),
            )
        )
    rounds = rounds[1:]  # the first one warms up
    flops = 2 * args.s_q * args.h_q * args.topk * (args.d_qk + D_V)
    median = statistics.median
    return {
        "compute": str(compute).removeprefix("torch."),
        "error": errors.out,
        "seconds": median(ours for _, ours, _ in rounds),
        "gflops": flops / median(ours for _, ours, _ in rounds) / 1e9,
        "matmul_gflops": 2 * MATMUL**3 / median(matmul for matmul, _, _ in rounds) / 1e9,
        "of_matmul": median(flops / ours / (2 * MATMUL**3 / matmul) for matmul, ours, _ in rounds),
        "bmm_seconds": median(bmm for _, _, bmm in rounds),
        "over_bmm": median(bmm / ours for _, ours, bmm in rounds),
    }


def peak_mib() -> float:
    """The most resident memory this process has had; Linux counts it anew for a new program."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure_memory(args: argparse.Namespace) -> dict[str, Any]:
    """In this process: what a run adds to the peak once inputs and outputs are there, touched."""
    problem = make(args)
    before = peak_mib()
    cpu.run(problem)
    return {
        "s_q": args.s_q,
        "before_mib": before,
        "extra_mib": peak_mib() - before,
    }


def memory_in_a_new_process(args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only-memory", "--s-q", str(args.memory_s_q)]
    for name in ("s_kv", "h_q", "d_qk", "topk", "sigma"):
        command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--s-q", type=int, default=256)
    parser.add_argument("--s-kv", type=int, default=8192)
    parser.add_argument("--h-q", type=int, default=128)
    parser.add_argument("--d-qk", type=int, default=576, choices=(512, 576))
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logits")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-s-q", type=int, default=4096, help="0 leaves the memory out")
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.only_memory:
        print(json.dumps(measure_memory(args)))
        return
    shape = {name: getattr(args, name) for name in ("s_q", "s_kv", "h_q", "d_qk", "topk", "sigma")}
    machine = {
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    result = measure(args)
    memory = memory_in_a_new_process(args) if args.memory_s_q else None
    if args.json:
        print(
            json.dumps({"shape": shape, "machine": machine, **result, "memory": memory}, indent=2)
        )
        return
    print(" ".join(f"{name}={value}" for name, value in {**shape, **machine}.items()))
    print(f"{'cpu backend':<28}{result['gflops']:8.0f} GFLOP/s  in {result['compute']},", end=" ")
    print(f"{result['seconds'] * 1e3:.0f} ms, relative L2 of the worst row {result['error']:.4f}")
    print(f"{'bfloat16 matmul ' + str(MATMUL):<28}{result['matmul_gflops']:8.0f} GFLOP/s", end="  ")
    print(f"cpu backend / matmul = {result['of_matmul']:.2f}")
    print(f"{'gather + bmm in float32':<28}{result['bmm_seconds'] * 1e3:8.0f} ms", end="       ")
    print(f"cpu backend is {result['over_bmm']:.1f} x as fast")
    if memory:
        print(
            f"{'memory at s_q=' + str(memory['s_q']):<28}{memory['extra_mib']:8.0f} MiB",
            end="      ",
        )
        print("beyond inputs and outputs, at the peak")


if __name__ == "__main__":
    main()
