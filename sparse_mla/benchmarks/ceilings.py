"""What the machine does at best, measured in the run that it is a ceiling for.

On a GPU: a matmul of 8192^3 in FP8 and one in bfloat16, and a copy of 4 GiB. On a CPU: a matmul of
4096^3 in bfloat16 and one in float32, and a copy of 256 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .timing import Call, Clock, Mood, interleaved, summary

MATMUL = {"cuda": 8192, "cpu": 4096}
COPY_BYTES = {"cuda": 1 << 32, "cpu": 1 << 28}
SUSTAINED_MS = 400.0
"""A sustained sample lasts as long at least: clocks move within tens of milliseconds."""
UNSTEADY = 1.05
"""p90 over p10 of a sample whose median says little."""


def measure(
    device: torch.device, clock: Clock, moods: Sequence[Mood], rounds: int
) -> dict[str, Any]:
    """By mood and ceiling: ``tflops`` or ``tb_per_s``, and the times behind it.

    ``rounds`` are the calls of each; sustained ones are more where those end too soon.
    """
    n, size = MATMUL[device.type], COPY_BYTES[device.type]
    generator = torch.Generator(device).manual_seed(0)
    square = torch.randn(n, n, generator=generator, device=device)
    source, target = torch.zeros(2, size, dtype=torch.uint8, device=device)
    work: dict[str, tuple[Callable[[], Any], str, int]] = {}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        work["fp8_matmul"] = (_fp8_matmul(square), "tflops", 2 * n**3)
    if device.type == "cpu":
        work["float32_matmul"] = (_matmul(square), "tflops", 2 * n**3)
    work["bf16_matmul"] = (_matmul(square.bfloat16()), "tflops", 2 * n**3)
    work["copy"] = (lambda: target.copy_(source), "tb_per_s", 2 * size)
    found: dict[str, Any] = {}
    for mood in moods:
        found[mood] = {}
        for name, (call, unit, amount) in work.items():
            call()
            if mood == "sustained":
                clock.settle([call])
            times = summary(_sample(call, clock, mood, rounds))
            found[mood][name] = {
                unit: amount / times["median_ms"] / 1e9,
                "size": n if unit == "tflops" else size,
                "unsteady": unsteady(times),
                **({} if clock.sm_mhz is None else {"sm_mhz": clock.sm_mhz}),
                **times,
            }
    return found


def _sample(call: Call, clock: Clock, mood: Mood, rounds: int) -> list[float]:
    """Milliseconds of so many calls, or of as many as fill ``SUSTAINED_MS``."""

    def timed(count: int) -> list[float]:
        return interleaved({"": [call] * count}, clock, mood, [call])[""]

    found = timed(rounds)
    if mood == "sustained" and sum(found) < SUSTAINED_MS:
        found = timed(math.ceil(SUSTAINED_MS / (sum(found) / rounds)))
    return found


def unsteady(times: dict[str, Any]) -> bool:
    """Whether the times of a ceiling spread so far that shares of its median say little."""
    return bool(times["p90_ms"] > UNSTEADY * times["p10_ms"])


def spread(times: dict[str, Any]) -> str:
    """What stands behind a ceiling that is unsteady, else nothing."""
    if not unsteady(times):
        return ""
    return f" (unsteady: p90 is {times['p90_ms'] / times['p10_ms']:.2f} times p10)"


def _fp8_matmul(square: torch.Tensor) -> Callable[[], Any]:
    a, b = square.to(torch.float8_e4m3fn), square.flip(0).to(torch.float8_e4m3fn)
    one = torch.ones((), device=square.device)
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _matmul(square: torch.Tensor) -> Callable[[], Any]:
    product = torch.empty_like(square)
    return lambda: torch.mm(square, square, out=product)


def compute(of_mood: dict[str, Any]) -> float | None:
    """TFLOPS of the fastest matmul there is a figure for: FP8 on a GPU, bfloat16 on a CPU."""
    rates = [entry["tflops"] for entry in of_mood.values() if "tflops" in entry]
    return max(rates, default=None)


def matmul(of_mood: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The matmul behind ``compute``: what it is called, ``FP8 matmul``, and its entry."""
    name = max((n for n in of_mood if "tflops" in of_mood[n]), key=lambda n: of_mood[n]["tflops"])
    label = str(name).replace("_", " ").replace("fp8", "FP8").replace("bf16", "bfloat16")
    return label, of_mood[name]


def bandwidth(of_mood: dict[str, Any]) -> float | None:
    """TB/s of the copy, bytes read plus bytes written."""
    entry = of_mood.get("copy")
    return None if entry is None else float(entry["tb_per_s"])


def shares(tflops: float, tb_per_s: float, of_mood: dict[str, Any]) -> dict[str, float | None]:
    """What a figure is of the ceilings, 1 being all.

    ``of_roofline`` is the least time that the larger of the two demands could take, over the
    time taken: the larger of both shares. Rows that the L2 serves can bring it past 1.
    """
    matmul, copy = compute(of_mood), bandwidth(of_mood)
    of_matmul = None if matmul is None else tflops / matmul
    of_copy = None if copy is None else tb_per_s / copy
    known = [share for share in (of_matmul, of_copy) if share is not None]
    return {
        "of_matmul": of_matmul,
        "of_copy": of_copy,
        "of_roofline": max(known, default=None),
    }


def text(of_mood: dict[str, Any]) -> str:
    """One line on the ceilings of a mood."""
    return ", ".join(
        f"{name.replace('_', ' ')} {rate(entry['tflops'])}"
        if "tflops" in entry
        else f"{name} {width(entry['tb_per_s'])}"
        for name, entry in of_mood.items()
    )


def rate(tflops: float) -> str:
    """A rate in the unit that suits it."""
    return f"{tflops:,.0f} TFLOPS" if tflops >= 10 else f"{tflops * 1e3:,.0f} GFLOP/s"


def width(tb_per_s: float) -> str:
    """A bandwidth in the unit that suits it."""
    return f"{tb_per_s:.3g} TB/s" if tb_per_s >= 1 else f"{tb_per_s * 1e3:.3g} GB/s"
