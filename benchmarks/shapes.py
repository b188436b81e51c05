"""The shapes that are measured, with what each is compared to, as data."""

from __future__ import annotations

from dataclasses import dataclass

D_V = 512


@dataclass(frozen=True)
class Shape:
    """One prefill, and TFLOPS on one H200: the fastest other kernel's, the least, the aim."""

    s_q: int
    s_kv: int
    h_q: int
    d_qk: int
    topk: int
    other: int | None = None
    least: int | None = None
    aim: int | None = None

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
    Shape(4096, 8192, 128, 576, 2048, other=698, least=1000, aim=1150),
    Shape(4096, 32768, 128, 576, 2048, other=684, least=1000, aim=1100),
    Shape(4096, 131072, 128, 576, 2048, other=617, least=880, aim=950),
    Shape(1024, 32768, 64, 576, 2048, other=659, least=960, aim=1050),
    Shape(4096, 32768, 64, 512, 512, other=520, least=800, aim=900),
    Shape(4096, 32768, 128, 512, 1024, other=616, least=930, aim=1050),
    Shape(128, 32768, 128, 576, 2048, other=616, least=900, aim=1000),
)

HOST = Shape(1, 1024, 64, 576, 128)
"""So little work that a call costs the host more than the GPU."""
