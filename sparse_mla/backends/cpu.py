"""The CPU backend: every needed KV row converted once, then matrix products query by query.

What a query costs at h_q=128, d_qk=576, topk=2048 is two products (128 x 576 x 2048 and
128 x 2048 x 512), and the rest has to stay small beside them:

- A KV row is converted once into a table row of bfloat16, in which e4m3 values are exact, so that a
  query only gathers. The conversion moves bits (``convert``), four times faster than a cast.
- A table row has 32 more columns. One makes masked slots cost nothing: they gather the table's
  last row, whose logit is -inf and whose value is 0. Five subtract a centre from every logit
  *inside* the product: its float32 sums are rounded to bfloat16 on the way out, with an error that
  is relative to the result, so what comes out must be small where the weight is. The centre is
  predicted from the queries before, and a head whose maximum comes out too far from it is computed
  again with the right one. No other way found here gives bfloat16 speed with usable logits.
- Queries are ordered by their number of valid slots, so that short ones share a batched product.

Probabilities are rounded to bfloat16 and the denominator is the sum of what was rounded. Where the
CPU has no fast bfloat16, or an input is float16 or float32, the same steps run in float32.

Memory beyond inputs and outputs is bounded by ``TABLE_BYTES`` plus the buffers of one batch. A
cache too large for the table is converted anew for each chunk of queries, only the rows selected.
``docs/kernels/cpu.md`` has the measurements, and what was tried and dropped.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..params import D_V
from .cpu_table import EXTRA, FLOAT8, Rows, RowTable, convert, split, take, usable

if TYPE_CHECKING:
    from ..params import PrefillProblem

NAME = "cpu"

BATCH_SLOTS = 2048
"""Queries with few valid slots share a product up to this many slots."""

BLOCK_ROWS = 2048
"""Queries are converted together up to this many (query, head) rows."""


def available() -> str | None:
    """``None``: torch alone is enough."""
    return None


def refusal(problem: PrefillProblem) -> str | None:
    """Why this backend does not run ``problem``, or ``None``."""
    device = problem.q.device.type
    return None if device == "cpu" else f"tensors are on {device}, not on the CPU"


@torch.no_grad()
def run(problem: PrefillProblem) -> None:
    """Fill ``out``, ``max_logits`` and ``lse`` of the problem."""
    if problem.s_q == 0:
        return
    with torch.autocast("cpu", enabled=False):
        dtype = compute_dtype(problem)
        table = RowTable(problem, dtype)
        attention = _Attention(problem, dtype)
        step = max(1, table.chunk_slots // problem.topk)
        for start in range(0, problem.s_q, step):
            queries = torch.arange(start, min(start + step, problem.s_q), device="cpu")
            slots, counts = _valid_slots(problem, queries)
            slots = table.prepare(slots)
            _write_empty(problem, queries[counts == 0])
            log_counts = counts.log()
            for group, width in _batches(counts, problem.h_q):
                attention.attend(
                    _shifted(group, start), slots[group, :width], log_counts[group], table
                )


def compute_dtype(problem: PrefillProblem) -> torch.dtype:
    """bfloat16 where inputs are exact in it and the CPU multiplies it fast, else float32.

    ``SPARSE_MLA_CPU_COMPUTE=float32`` or ``bfloat16`` overrides what is known about the CPU.
    """
    exact = all(x.dtype in (FLOAT8, torch.bfloat16) for x in (problem.q, problem.kv))
    forced = os.environ.get("SPARSE_MLA_CPU_COMPUTE")
    known = forced in ("bfloat16", "float32")
    fast = forced == "bfloat16" if known else has_fast_bfloat16()
    return torch.bfloat16 if exact and fast else torch.float32


def has_fast_bfloat16() -> bool:
    """Whether torch multiplies bfloat16 matrices with instructions made for it."""
    if not (torch._C._has_mkldnn and torch.backends.mkldnn.enabled):
        return False
    if platform.machine().lower() in ("x86_64", "amd64"):
        names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, name, bool)() for name in names)
    try:  # elsewhere oneDNN's own test; on x86 it is content with emulation
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False


class _Scores(NamedTuple):
    """Softmax of a batch; logits are relative to the centre of their (query, head) row."""

    p: torch.Tensor  # float32 [n, h_q, slots], rows sum to 1
    max: torch.Tensor  # float32 [n, h_q]
    log_total: torch.Tensor  # float32 [n, h_q], ln sum_j exp(logit - max)
    centre: torch.Tensor  # float32 [n, h_q]
    target: torch.Tensor  # float32 [n, h_q], what the centre should have been


class _Batch(NamedTuple):
    """What a batch of n queries with equally many slots multiplies."""

    q: torch.Tensor  # [n, h_q, d_qk + 32], compute dtype
    rows: torch.Tensor  # [n, slots, d_qk + 32], compute dtype
    scale: torch.Tensor  # float32 [n, h_q]: logit = scale * row_scale * dot
    row_scale: torch.Tensor | None  # float32 [n, 1, slots], where each token has its own
    log_counts: torch.Tensor  # float32 [n], ln of the number of valid slots


class _Attention:
    """The steps of a batch, the buffers they share, and the centres predicted for the next one."""

    def __init__(self, problem: PrefillProblem, dtype: torch.dtype) -> None:
        self.problem = problem
        self.dtype = dtype
        self.predicted = torch.zeros(problem.h_q, dtype=torch.float32, device="cpu")  # [h_q]
        self.predictions = 0
        self.buffers: dict[str, torch.Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        kv_scale = problem.kv_scale
        token_scale = kv_scale is not None and kv_scale.numel() != 1
        self.value_scale = 1.0 if kv_scale is None or token_scale else float(usable(kv_scale))
        product = problem.sm_scale * self.value_scale
        scale = torch.tensor(product, dtype=torch.float64, device="cpu")
        if problem.q_scale is not None:
            scale = scale * usable(problem.q_scale).double()
        scale = scale.reshape(1, 1) if scale.numel() == 1 else scale.view(problem.s_q, -1)
        # Never 0 or inf: the -inf of a masked slot must stay what it is.
        scale = scale.clamp(1e-37, 1e37).float()
        self.scale = scale.expand(problem.s_q, problem.h_q)

    def attend(
        self, queries: Rows, slots: torch.Tensor, log_counts: torch.Tensor, table: RowTable
    ) -> None:
        """Write the results of ``queries``, which read table rows ``slots`` [n, width].

        They are converted together and share a predicted centre; a product takes as many of them
        as their slots allow, often one.
        """
        n, width = slots.shape
        q, scale = self._queries(queries, n), self.scale[queries]
        centre = self._set_centre(q, scale, self.predicted.expand(n, -1))
        together = max(1, BATCH_SLOTS // width)
        targets = []
        for start in range(0, n, together):
            part = slice(start, min(start + together, n))
            places = slots[part].reshape(-1)
            rows = self._buffer("rows", self.dtype, len(places), table.width)
            torch.index_select(table.rows, 0, places, out=rows)
            shape = (part.stop - start, -1, width)
            row_scale = None if table.scale is None else table.scale[places].view(shape)
            rows = rows.view(shape[0], width, table.width)
            batch = _Batch(q[part], rows, scale[part], row_scale, log_counts[part])
            scores = self._scores(batch, centre[part])
            targets.append(scores.target)
            self._write(_some(queries, part), batch, scores)
        self._predict(torch.cat(targets))

    def _queries(self, queries: Rows, n: int) -> torch.Tensor:
        """[n, h_q, d_qk + 32] in the compute dtype, the centre's columns to be set."""
        d_qk, h_q = self.problem.d_qk, self.problem.h_q
        buffer = self.buffers.get("q")
        if buffer is None or buffer.shape[0] < n:
            buffer = torch.zeros(n, h_q, d_qk + EXTRA, dtype=self.dtype, device="cpu")
            buffer[..., d_qk] = 1
            self.buffers["q"] = buffer
        q = buffer[:n]
        convert(q[..., :d_qk], take(self.problem.q, queries))
        return q

    def _scores(self, batch: _Batch, centre: torch.Tensor, attempt: int = 0) -> _Scores:
        """Scores whose maxima lie close to their centres, those in q's columns or new ones.

        ``spread`` is how far the maximum lies above the logarithm of the mean weight: 0 for equal
        logits, at most ln(count). Each attempt divides the distance that is left by 100 or more.
        """
        scores = self._softmax(batch, centre, attempt)
        if self.dtype != torch.bfloat16:
            return scores
        spread = batch.log_counts[:, None] - scores.log_total
        distance = torch.sub(scores.max, spread, alpha=1 / 6)
        scores = scores._replace(target=centre + distance)
        far = distance.abs_() > spread.div_(3).add_(0.4)
        if attempt == 4 or not far.any():
            return scores
        far &= scores.target.isfinite()
        if far.shape[0] > 1:
            centre = torch.where(far, scores.target, centre)
            centre = self._set_centre(batch.q, batch.scale, centre)
            return self._scores(batch, centre, attempt + 1 if far.any() else 4)
        heads = far[0].nonzero().view(-1)
        if len(heads):
            some = batch._replace(q=batch.q[:, heads], scale=batch.scale[:, heads])
            centre = self._set_centre(some.q, some.scale, scores.target[:, heads])
            again = self._scores(some, centre, attempt + 1)
            for whole, part in zip(scores, again, strict=True):
                whole.index_copy_(1, heads, part)
        return scores

    def _set_centre(
        self, q: torch.Tensor, scale: torch.Tensor, centre: torch.Tensor
    ) -> torch.Tensor:
        """Put the centre into q's columns, in units of the raw products; return it as stored.

        Three bfloat16 parts hold all 24 bits; a row's columns hold -1 (or minus the inverse of its
        scale, in two parts) to go with them.
        """
        raw = (centre / scale).nan_to_num_(0.0, 0.0, 0.0)
        high, middle, low = split(raw, self.dtype, 3)
        first = self.problem.d_qk + 1
        torch.stack([high, middle, low, high, middle], -1, out=q[..., first : first + 5])
        return raw.mul_(scale)

    def _predict(self, target: torch.Tensor) -> None:
        """Move the predicted centres towards what this batch's should have been."""
        weight = 0.2 if self.predictions else 1.0
        self.predictions += 1
        mean = target.mean(dim=0)
        if not math.isfinite(float(mean.sum())):
            mean = mean.where(mean.isfinite(), self.predicted)
        self.predicted.lerp_(mean, weight)

    def _softmax(self, batch: _Batch, centre: torch.Tensor, attempt: int) -> _Scores:
        """softmax(scale * row_scale * q @ rows^T), in one buffer that stays in the core's cache."""
        shape = (*batch.scale.shape, batch.rows.shape[1])
        raw = self._buffer("raw", self.dtype, *shape)
        if shape[0] == 1:
            torch.mm(batch.q[0], batch.rows[0].T, out=raw[0])
        else:
            torch.bmm(batch.q, batch.rows.transpose(1, 2), out=raw)
        p = self._buffer(f"p{attempt}", torch.float32, *shape)
        torch.mul(raw, batch.scale[..., None], out=p)
        if batch.row_scale is not None:
            p *= batch.row_scale
        top = p.amax(dim=-1)
        torch.softmax(p, dim=-1, out=p)
        # The largest probability is exp(0) / total.
        return _Scores(p, top, p.amax(dim=-1).log_().neg_(), centre, centre)

    def _write(self, queries: Rows, batch: _Batch, scores: _Scores) -> None:
        """``max_logits``, ``lse`` and ``out`` = (p rounded) @ V over the sum of what was rounded."""
        max_logits = scores.max + scores.centre
        lse = max_logits + scores.log_total
        self.problem.max_logits[queries] = max_logits
        self.problem.lse[queries] = lse
        p, row_scale, sink = scores.p, batch.row_scale, self.problem.attn_sink
        if row_scale is not None:
            p *= row_scale
        rounded = self._buffer("rounded", self.dtype, *p.shape).copy_(p)
        if row_scale is None:
            factor = self.value_scale / rounded.sum(dim=-1, dtype=torch.float32)
        else:
            factor = 1.0 / (rounded / row_scale).sum(dim=-1, dtype=torch.float32)
        if sink is not None:
            factor *= torch.sigmoid(lse - sink)
        values = batch.rows[..., :D_V]
        out = self.problem.out
        if p.shape[0] == 1 and out.dtype == self.dtype:
            out = out[queries][0]
            torch.mm(rounded[0], values[0], out=out)
            out.mul_(factor[0, :, None])
        else:
            product = torch.bmm(rounded, values).mul_(factor[..., None])
            out[queries] = product.to(out.dtype)

    def _buffer(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A dense tensor of ``shape`` in memory that batches share; its contents are undefined."""
        view = self.views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            buffer = self.buffers.get(name)
            if buffer is None or buffer.numel() < size:
                buffer = self.buffers[name] = torch.empty(size, dtype=dtype, device="cpu")
                self.views.clear()  # they may hold on to the smaller one
            view = self.views[name, shape] = buffer[:size].view(shape)
        return view


def _valid_slots(
    problem: PrefillProblem, queries: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n, padded topk], each query's valid indices in front and s_kv behind; their counts."""
    indices = problem.index_rows[queries]
    n, topk = indices.shape
    valid = (indices >= 0) & (indices < problem.s_kv)
    if problem.topk_length is not None:
        valid &= torch.arange(topk, device="cpu") < problem.topk_length[queries, None]
    counts = valid.sum(dim=1)
    width = _padded(topk)
    if width == topk and bool(valid.all()):
        return indices.long(), counts
    slots = torch.full((n, width), problem.s_kv, dtype=torch.int64, device="cpu")
    places = valid.cumsum(dim=1).sub_(1).add_(torch.arange(n, device="cpu")[:, None] * width)
    slots.view(-1)[places[valid]] = indices[valid].long()
    return slots, counts


def _padded(count: int) -> int:
    """The width that ``count`` slots are computed with: few widths, so that kernels are reused."""
    return 16 if count <= 16 else 32 if count <= 32 else -(-count // 64) * 64


def _batches(counts: torch.Tensor, h_q: int) -> Iterator[tuple[Rows, int]]:
    """Positions of queries that are computed together, and their width; no query without slots."""
    widths = torch.where(counts > 32, (counts + 63) // 64 * 64, torch.where(counts > 16, 32, 16))
    widths[counts == 0] = 0
    for width in sorted(set(widths.tolist())):
        if width:
            together = max(1, BLOCK_ROWS // h_q)
            for group in (widths == width).nonzero().view(-1).split(together):
                first, last = int(group[0]), int(group[-1])
                yield slice(first, last + 1) if last - first + 1 == len(group) else group, width


def _shifted(rows: Rows, by: int) -> Rows:
    return slice(rows.start + by, rows.stop + by) if isinstance(rows, slice) else rows + by


def _some(rows: Rows, part: slice) -> Rows:
    if isinstance(rows, slice):
        return slice(rows.start + part.start, rows.start + part.stop)
    return rows[part]


def _write_empty(problem: PrefillProblem, queries: torch.Tensor) -> None:
    problem.out.index_fill_(0, queries, 0.0)
    problem.max_logits.index_fill_(0, queries, -math.inf)
    problem.lse.index_fill_(0, queries, math.inf)
