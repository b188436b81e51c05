"""A results file's contents with literal figures, for the tests of what is made of them."""

from __future__ import annotations

import copy
from typing import Any

SHAPE = {
    "model": "v32", "tp": 1, "s_q": 4096, "s_kv": 32768, "h_q": 128, "d_qk": 576, "topk": 2048,
    "pattern": "uniform",
}  # fmt: skip
OURS, PEER = "sm90", "flash-mla-bf16"


def times(*milliseconds: float) -> dict[str, Any]:
    """As ``timing.summary`` gives them, for times in ascending order with one in the middle."""
    return {
        "median_ms": milliseconds[len(milliseconds) // 2],
        "p10_ms": milliseconds[0],
        "p90_ms": milliseconds[-1],
        "min_ms": milliseconds[0],
        "max_ms": milliseconds[-1],
        "runs": len(milliseconds),
        "all_ms": list(milliseconds),
    }


def figure(tflops: float = 800.0, **changes: Any) -> dict[str, Any]:
    """A right figure at ceilings of 1,600 TFLOPS and 4 TB/s."""
    milliseconds = 2336.0 / tflops
    return {
        **times(milliseconds, milliseconds, milliseconds),
        "tflops": tflops,
        "gathered_tb_per_s": tflops / 500,
        "of_matmul": tflops / 1600,
        "of_copy": tflops / 2000,
        "of_roofline": tflops / 1600,
        "worst_relative_l2": 0.02,
        "fault": None,
        "kernel": None,
        **changes,
    }


def row(tflops: float = 800.0, **shape: Any) -> dict[str, Any]:
    """A shape with ours at ``tflops`` and the peer at half of it, in both moods."""
    from sparse_mla.benchmarks.shapes import Shape

    sizes: dict[str, Any] = {**SHAPE, **shape}
    slots = sizes["s_q"] * sizes["topk"]
    made = Shape(**sizes)
    return {
        "id": made.id,
        "shape": sizes,
        "operations": made.operations(slots),
        "gathered_bytes": made.gathered_bytes(slots),
        "selection": {"valid_slots": slots, "distinct_rows": 32768, "shared_with_neighbour": 0.06},
        "input_sets": 2,
        "touched_bytes": 10**9,
        "l2_overwritten": False,
        "refused": {},
        "moods": {
            mood: {
                "rounds": 3,
                "card": {"clocks.sm": "1755 MHz", "power.draw": "691.30 W"},
                "sm_mhz": 1512.4,
                "peers": {OURS: figure(tflops), PEER: figure(tflops / 2)},
            }
            for mood in ("burst", "sustained")
        },
    }


def results(*rows: dict[str, Any]) -> dict[str, Any]:
    """A whole file, of the rows given or of one."""
    ceiling = {
        "fp8_matmul": {
            "tflops": 1600.0,
            "size": 8192,
            "unsteady": False,
            "sm_mhz": 1623.4,
            **times(0.69, 0.7, 0.71),
        },
        "copy": {
            "tb_per_s": 4.0,
            "size": 1 << 32,
            "unsteady": False,
            "sm_mhz": 1970.0,
            **times(2.0, 2.1, 2.1),
        },
    }
    methods = {
        OURS: {"worst": 0.02, "median": 0.01, "kernels": ["prefill-h64-d576"]},
        f"{OURS}, 16 heads": {
            "worst": 0.03,
            "median": 0.01,
            "kernels": ["prefill-h16-d576"],
            "rows": 128,
        },
        "cpu": {"reason": "tensors are elsewhere"},
    }
    return copy.deepcopy(
        {
            "schema": 1,
            "machine": {
                "date": "2026-12-01T12:00:00+00:00",
                "command": "sparse-mla bench -o results.json",
                "device": "cuda",
                "name": "NVIDIA H200",
                "python": "3.12.3",
                "torch": "2.11.0",
                "sparse_mla": "0.1.0",
                "commit": "0123456789ab",
                "others_share": 0.02,
                "card": {"power.limit": "700.00 W"},
            },
            "settings": {
                "moods": ["burst", "sustained"], "rounds": 3, "cold": True, "host": True
            },
            "ceilings": {mood: copy.deepcopy(ceiling) for mood in ("burst", "sustained")},
            "peers": [
                {"name": OURS, "what": "ours", "ours": True, "reason": None},
                {"name": "cpu", "what": "ours", "ours": True, "reason": "computes on cpu"},
                {"name": PEER, "what": "FlashMLA", "ours": False, "reason": None},
                {"name": "sglang-q8kv8", "what": "SGLang", "ours": False, "reason": "not there"},
            ],
            "prefill": list(rows) or [row()],
            "host": {"outputs_given_us": 46.0, "outputs_allocated_us": 51.0},
            "memory": None,
            "accuracy": {
                "kinds": [{"kind": "sigma <1>", "rows": 512, "methods": methods}],
                "outlier_share": 1 / 64,
                "scales": [
                    {"factor": factor, "rows": 256, "methods": methods} for factor in (1, 256)
                ],
            },
        }
    )  # fmt: skip
