"""The shapes that are measured, as data."""

from __future__ import annotations

from dataclasses import dataclass

D_V = 512


@dataclass(frozen=True)
class Shape:
    """One prefill."""

    s_q: int
    s_kv: int
    h_q: int
    d_qk: int
    topk: int

    @property
    def id(self) -> str:
        return f"q{self.s_q}-kv{self.s_kv}-h{self.h_q}-d{self.d_qk}-k{self.topk}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of QK and PV, every slot valid."""
        return 2 * self.s_q * self.h_q * self.topk * (self.d_qk + D_V)

    @property
    def gathered_bytes(self) -> int:
        """The FP8 rows that the queries select, each once a query, whatever caches spare."""
        return self.s_q * self.topk * self.d_qk


PREFILL = (
    Shape(4096, 8192, 128, 576, 2048),
    Shape(4096, 32768, 128, 576, 2048),
    Shape(4096, 131072, 128, 576, 2048),
    Shape(1024, 32768, 64, 576, 2048),
    Shape(4096, 32768, 64, 512, 512),
    Shape(4096, 32768, 128, 512, 1024),
    Shape(128, 32768, 128, 576, 2048),
)

HOST = Shape(1, 1024, 64, 576, 128)
"""So little work that a call costs the host more than the GPU."""
