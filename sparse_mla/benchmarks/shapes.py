"""The shapes that are measured, as data: models, tensor parallelism, chunks, contexts, patterns.

A shape is named ``MODEL-tpN-qS_Q-kvS_KV-PATTERN``, as in ``v32-tp8-q4096-kv32k-uniform``:
DeepSeek-V3.2 on 8 GPUs, 4,096 queries over 32,768 cached rows. The registry is every combination
whose chunk fits into its context; names and globs pick from it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..params import D_V

Pattern = Literal["uniform", "window", "sink-recent", "topk"]


@dataclass(frozen=True)
class Model:
    """What a model's attention looks like before it is split over GPUs."""

    id: str
    name: str
    h_q: int
    d_qk: int
    topk: int
    """Rows that its indexer selects for a query."""


MODELS = (
    Model("v32", "DeepSeek-V3.2", h_q=128, d_qk=576, topk=2048),
    Model("v4flash", "DeepSeek-V4-Flash", h_q=64, d_qk=512, topk=512),
    Model("v4pro", "DeepSeek-V4-Pro", h_q=128, d_qk=512, topk=1024),
    Model("glm5", "GLM-5", h_q=64, d_qk=576, topk=2048),
)
"""DeepSeek-V4's cache holds one row for four tokens, and its sliding window of 128 rows is not
counted: ``topk`` and ``s_kv`` are rows that are there to select from."""

TENSOR_PARALLEL = (1, 2, 4, 8)
CHUNKS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Queries of a call: prefill chunks from 128 on; 1, 16 and 64 are like decode."""
CONTEXTS = {"4k": 4096, "8k": 8192, "32k": 32768, "128k": 131072, "512k": 524288}
PATTERNS: tuple[Pattern, ...] = ("uniform", "window", "sink-recent", "topk")


@dataclass(frozen=True)
class Shape:
    """One problem to measure."""

    model: str
    tp: int
    s_q: int
    s_kv: int
    h_q: int
    d_qk: int
    topk: int
    pattern: Pattern

    @property
    def id(self) -> str:
        """The name in the registry."""
        label = next((k for k, rows in CONTEXTS.items() if rows == self.s_kv), str(self.s_kv))
        return f"{self.model}-tp{self.tp}-q{self.s_q}-kv{label}-{self.pattern}"

    def operations(self, valid: int) -> int:
        """Multiplications and additions of QK and PV over ``valid`` slots of all queries."""
        return 2 * self.h_q * valid * (self.d_qk + D_V)

    def gathered_bytes(self, valid: int) -> int:
        """FP8 bytes of the rows that the queries select, each row once a query.

        That is what a query must read at least once, whatever caches spare or a kernel repeats.
        """
        return valid * self.d_qk


def _registry() -> dict[str, Shape]:
    shapes = [
        Shape(m.id, tp, s_q, s_kv, m.h_q // tp, m.d_qk, m.topk, pattern)
        for m in MODELS
        for tp in TENSOR_PARALLEL
        for s_q in CHUNKS
        for s_kv in CONTEXTS.values()
        for pattern in PATTERNS
        if s_q <= s_kv
    ]
    return {shape.id: shape for shape in shapes}


REGISTRY = _registry()

DEFAULT = (
    "v32-tp1-q4096-kv8k-uniform",
    "v32-tp1-q4096-kv32k-uniform",
    "v32-tp1-q4096-kv128k-uniform",
    "v32-tp1-q4096-kv512k-uniform",
    "v32-tp1-q4096-kv32k-topk",
    "v32-tp1-q4096-kv32k-window",
    "v32-tp1-q4096-kv32k-sink-recent",
    "v32-tp2-q4096-kv32k-uniform",
    "v32-tp4-q4096-kv32k-uniform",
    "v32-tp8-q4096-kv32k-uniform",
    "v32-tp1-q128-kv32k-uniform",
    "v32-tp1-q1024-kv32k-uniform",
    "glm5-tp1-q1024-kv32k-uniform",
    "glm5-tp8-q4096-kv32k-uniform",
    "v4flash-tp1-q4096-kv32k-uniform",
    "v4pro-tp1-q4096-kv32k-uniform",
    "v32-tp1-q1-kv32k-uniform",
    "v32-tp1-q64-kv32k-uniform",
    "v32-tp8-q1-kv32k-uniform",
    "v32-tp8-q16-kv32k-uniform",
    "v32-tp8-q64-kv32k-uniform",
)
"""What a GPU run measures unless told otherwise: context, heads, patterns, models, few queries."""

QUICK = (
    "v32-tp1-q4096-kv32k-uniform",
    "v32-tp8-q4096-kv32k-uniform",
    "v4flash-tp1-q4096-kv32k-uniform",
    "v32-tp8-q16-kv32k-uniform",
)

CPU_DEFAULT = (
    "v32-tp1-q256-kv8k-uniform",
    "v32-tp8-q256-kv8k-uniform",
    "v4flash-tp1-q256-kv8k-uniform",
)
CPU_QUICK = ("v32-tp8-q16-kv4k-uniform",)


def default(device_type: str, quick: bool) -> tuple[str, ...]:
    """Names of the shapes that a run on such a device measures."""
    if device_type == "cpu":
        return CPU_QUICK if quick else CPU_DEFAULT
    return QUICK if quick else DEFAULT


def select(patterns: Sequence[str]) -> list[Shape]:
    """The registered shapes that the names and globs pick, in the order of the patterns.

    Raises:
        KeyError: a pattern picks nothing; its argument is that pattern.
    """
    picked: dict[str, Shape] = {}
    for pattern in patterns:
        found = fnmatch.filter(REGISTRY, pattern)
        if not found:
            raise KeyError(pattern)
        picked.update({name: REGISTRY[name] for name in found})
    return list(picked.values())


def nearest(pattern: str) -> list[str]:
    """Names like ``pattern``, to offer in place of one that picks nothing."""
    import difflib

    return difflib.get_close_matches(pattern, REGISTRY, n=3, cutoff=0.6)
