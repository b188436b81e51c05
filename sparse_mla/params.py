"""The problem a backend is handed: one frozen object a call, each field with its shape and dtype.

Only ``checks`` builds these. A backend may rely on everything written here without looking again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

D_V = 512
"""Columns of a KV row that serve as the value (the latent part)."""

D_QK_SUPPORTED = (512, 576)
"""Columns of a query or KV row: 512 latent, with or without 64 rotary."""

Addresses = tuple[int, int, int, int, int, int, int, int, int, int]
"""Where q, kv, indices, q_scale, kv_scale, attn_sink, topk_length, out, max_logits and lse start; 0
for one that is empty or left out."""


@dataclass(frozen=True, eq=False)
class PrefillProblem:
    """One sparse MLA prefill: the formula of ``backends/reference.py`` over these tensors.

    Symbols: s_q query tokens, s_kv cached tokens, h_q query heads, d_qk 512 or 576, topk slots per
        query. All tensors live on ``q.device``. ``q`` and ``kv`` are both ``float8_e4m3fn`` with
        scales, or both unquantised (bfloat16, float16 or float32, each its own) with both scales
        ``None``.
    """

    q: torch.Tensor  # [s_q, h_q, d_qk], last dim dense, other strides free
    kv: torch.Tensor  # [s_kv, d_qk] or [s_kv, 1, d_qk], last dim dense, row stride free
    indices: torch.Tensor  # int32 [s_q, topk] or [s_q, 1, topk], last dim dense, row stride free
    sm_scale: float  # finite, > 0; multiplies the dequantised dot product
    q_scale: torch.Tensor | None  # float32, one element, [s_q] or [s_q, h_q], dense
    kv_scale: torch.Tensor | None  # float32, one element or [s_kv], dense
    attn_sink: torch.Tensor | None  # float32 [h_q], dense, natural-log logits
    topk_length: torch.Tensor | None  # int32 [s_q], dense
    out: torch.Tensor  # [s_q, h_q, 512], dense, all written; bfloat16, unquantised also float32
    max_logits: torch.Tensor  # float32 [s_q, h_q], dense, natural units
    lse: torch.Tensor  # float32 [s_q, h_q], dense, natural log
    s_q: int
    s_kv: int
    h_q: int
    d_qk: int
    topk: int

    @property
    def quantised(self) -> bool:
        """Whether q and kv are FP8 with scales."""
        return self.q_scale is not None

    @property
    def kv_rows(self) -> torch.Tensor:
        """``kv`` as [s_kv, d_qk], a view."""
        return self.kv if self.kv.ndim == 2 else self.kv[:, 0]

    @property
    def index_rows(self) -> torch.Tensor:
        """``indices`` as [s_q, topk], a view."""
        return self.indices if self.indices.ndim == 2 else self.indices[:, 0]

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Every tensor, in the order of ``Addresses``."""
        return (
            self.q,
            self.kv,
            self.indices,
            self.q_scale,
            self.kv_scale,
            self.attn_sink,
            self.topk_length,
            self.out,
            self.max_logits,
            self.lse,
        )

    @property
    def addresses(self) -> Addresses:
        """Where the tensors lie."""
        found = (0 if tensor is None else tensor.data_ptr() for tensor in self.tensors)
        return cast(Addresses, tuple(found))


def prefill_problem(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    q_scale: torch.Tensor | None,
    kv_scale: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor,
    max_logits: torch.Tensor,
    lse: torch.Tensor,
    s_q: int,
    s_kv: int,
    h_q: int,
    d_qk: int,
    topk: int,
) -> PrefillProblem:
    """What ``PrefillProblem(...)`` gives, 1 us sooner.

    A frozen dataclass sets each field through ``object.__setattr__``; one is built at every call,
    where microseconds count.
    """
    problem = object.__new__(PrefillProblem)
    problem.__dict__.update(
        q=q,
        kv=kv,
        indices=indices,
        sm_scale=sm_scale,
        q_scale=q_scale,
        kv_scale=kv_scale,
        attn_sink=attn_sink,
        topk_length=topk_length,
        out=out,
        max_logits=max_logits,
        lse=lse,
        s_q=s_q,
        s_kv=s_kv,
        h_q=h_q,
        d_qk=d_qk,
        topk=topk,
    )
    return problem
