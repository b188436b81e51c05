"""Every kernel once or more on small shapes: what ``gpu.py`` runs under the sanitizers.

    python benchmarks/gpu_small.py [--limit SECONDS]

Nothing but these kernels runs on the GPU: inputs are drawn, and results compared with float64, on
the CPU. Exit codes: 0 all is well, 1 a result is wrong, 2 no kernel runs here, 3 time is up.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

DEVICE = "cuda"
LAUNCH, TOOK, STOPPED = "launch: ", "took: ", "stopped: "
"""What the script says before each launch (a finding belongs to the last one), after it (seconds),
and where its time is up."""
UNFINISHED = 3
"""Exit code then."""
GRID = 8
"""CTAs of a launch: few queries are then several items to each of them."""
LENGTHS = (710, 0, 64, 330, 1, 129, 450)
"""Slots of the queries: no block, whole ones, parts of one, and more than a kernel has stages."""
ROWS = "a scale a row of q"
SCALES = {"one scale": "tensor", ROWS: "token-head", "a scale a row of q and of kv": "token-head"}
CTAS = {8: 2, 16: 4, 24: 4, 32: 8}
"""CTAs that share an item, by its heads."""


def run(limit: float) -> int:
    """Every launch, until ``limit`` seconds are over; the exit code."""
    import torch

    from sparse_mla import jit
    from sparse_mla.backends import sm90

    reason = sm90.available()
    if reason is not None:
        print(f"error: the kernels do not run here: {reason}", file=sys.stderr)
        return 2
    start = time.monotonic()
    for variant in sm90.KERNELS.values():
        jit.load(variant, torch.cuda.current_device()).multiprocessors = GRID
    launches = [*queries(), *prefills()]
    for number, (name, launch) in enumerate(launches):
        before = time.monotonic()
        if before - start > limit:
            print(f"{STOPPED}before launch {number + 1} of {len(launches)}, {name}")
            return UNFINISHED
        print(f"{LAUNCH}{name}", flush=True)
        launch()
        print(f"{TOOK}{time.monotonic() - before:.2f}", flush=True)
    return 0


def queries() -> Iterator[tuple[str, Callable[[], None]]]:
    """Launches of the quantiser: each dtype and width, rows that start aligned and not, both kinds
    of scales.
    """
    from sparse_mla.backends import sm90_quantize

    for d_qk, dtype in sm90_quantize.KERNELS:
        for before in (0, 1):
            for given in (False, True):
                scales = "given scales" if given else "scales of its own"
                name = f"quantize d{d_qk} {dtype}, {before} elements before a row, {scales}"
                yield name, partial(compare_queries, d_qk, dtype, before, given)


def compare_queries(d_qk: int, dtype: Any, before: int, given: bool) -> None:
    """Thirty-five rows, which leave the last CTA and warp with some to spare; bytes are equal."""
    import torch

    from sparse_mla import quantize
    from sparse_mla.backends import sm90_quantize

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 7, before + d_qk, generator=generator).to(dtype)
    rows[2, 3] = 0.0
    scales = torch.rand(5, 7, generator=generator) + 0.01 if given else None
    q = rows.to(DEVICE)[..., before:]
    got = sm90_quantize.quantize_queries(q, None if scales is None else scales.to(DEVICE))
    want = quantize.quantize_queries(rows[..., before:], scales)
    for a, b in zip(got, want, strict=True):
        if not torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)):
            raise AssertionError("other bytes than the CPU's")


def prefills() -> Iterator[tuple[str, Callable[[], None]]]:
    """Launches of the prefill kernels."""
    for case, parts in problems():
        for part in parts:
            yield f"{case}, {part}", partial(compare_prefill, case, part)


def compare_prefill(case: Any, part: Any) -> None:
    """One launch, compared with float64 on the CPU."""
    from sparse_mla.backends import sm90
    from sparse_mla.testing import Tolerance, allocate_outputs, compare, make_problem
    from sparse_mla.testing.cases import to_device

    limits = Tolerance(out=0.0625, absolute=1.6e-2, relative=1e-3)
    inputs, want = drawn(case)
    outputs = tuple(x.to(DEVICE) for x in allocate_outputs(inputs))
    problem = make_problem(to_device(inputs, DEVICE), outputs)
    sm90.launch(problem, part)
    results = tuple(x.cpu() for x in (problem.out, problem.max_logits, problem.lse))
    compare(make_problem(inputs, results), limits, against=want)


@lru_cache(maxsize=1)
def drawn(case: Any) -> tuple[Any, Any]:
    """The inputs of a case, and what they give."""
    import torch

    from sparse_mla.testing import expected, make_inputs, make_problem

    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    inputs = replace(make_inputs(case), topk_length=lengths)
    if case.id.endswith(ROWS):
        inputs = replace(inputs, kv_scale=inputs.kv_scale[:1].clone())
    return inputs, expected(make_problem(inputs))


def problems() -> Iterator[tuple[Any, list[Any]]]:
    """Cases, and launches of each, that between them take every kernel, split and not: three groups
    of heads, the last not full, both widths, one scale and many.
    """
    from sparse_mla.backends.sm90_plan import FEW_HEADS, WIDE_HEADS, Part
    from sparse_mla.params import D_QK_SUPPORTED
    from sparse_mla.testing import Case

    for size in (WIDE_HEADS, *FEW_HEADS):
        for d_qk in D_QK_SUPPORTED:
            for scales in SCALES:
                if scales == ROWS and size != WIDE_HEADS:
                    continue  # the kernel of the scales of tokens
                heads = 2 * size + 4
                case = Case(
                    f"prefill h{heads} d{d_qk} {scales}", len(LENGTHS), 900, heads, d_qk,
                    topk=max(LENGTHS), pattern="holes", sink="normal", scales=SCALES[scales],
                )  # fmt: skip
                parts = [Part(size, 0, heads)]
                if size != WIDE_HEADS:
                    parts.append(Part(size, 0, heads, CTAS[size]))
                yield case, parts


def main(arguments: list[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS")
    return run(parser.parse_args(arguments).limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
