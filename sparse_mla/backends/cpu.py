"""The CPU backend: every needed KV row converted once, then matrix products query by query.

What a query costs at h_q=128, d_qk=576, topk=2048 is two products (128 x 576 x 2048 and
128 x 2048 x 512), and the rest has to stay small beside them:

- A KV row is converted once into a table row of bfloat16, in which e4m3 values are exact, so that a
  query only gathers. The conversion moves bits (``convert``), four times faster than a cast.
- A table row has 32 more columns. One makes masked slots cost nothing: they gather the table's
  last row, whose logit is -inf and whose value is 0. Five subtract a centre from every logit
  *inside* the product: its float32 sums are rounded to bfloat16 on the way out, with an error that
  is relative to the result, so what comes out must be small where the weight is. The centre is
  predicted from the queries before, and a head that proves to lie too far from it is computed
  again with the right one. Few logits far above the others (attention sinks) are computed again
  one by one in float32. No other way found here gives bfloat16 speed with usable logits.
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
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..params import D_V
from . import cpu_workers
from .cpu_centre import BELOW, Stats
from .cpu_slots import query_blocks, shifted, some, valid_slots
from .cpu_table import EXTRA, FLOAT8, Rows, RowTable, convert, split, take, usable

if TYPE_CHECKING:
    from ..params import PrefillProblem

NAME = "cpu"

BATCH_SLOTS = 2048
"""Queries with few valid slots share a product up to this many slots."""

SOFTMAX_ELEMENTS = 1 << 17
"""Logits that go through the softmax together: 512 KiB of float32."""

WORTH_WORKERS = 2e9
"""Floating-point operations, some 10 ms, from which starting threads pays."""

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
    dtype = compute_dtype(problem)
    flops = 2 * problem.s_q * problem.h_q * problem.topk * (problem.d_qk + D_V)
    count = min(cpu_workers.count(), problem.s_q) if flops >= WORTH_WORKERS else 1
    table = RowTable(problem, dtype)
    workers = [_Attention(problem, dtype, table) for _ in range(count)]
    step = max(1, table.chunk_slots // problem.topk)
    with torch.autocast("cpu", enabled=False), cpu_workers.started(count) as run_tasks:
        for start in range(0, problem.s_q, step):
            queries = torch.arange(start, min(start + step, problem.s_q), device="cpu")
            slots, counts = valid_slots(problem, queries)
            slots = table.prepare(slots)
            _write_empty(problem, queries[counts == 0])
            log_others = (counts - 1).to(torch.float32).log()  # integers' log: the default dtype
            most = max(1, min(BLOCK_ROWS // problem.h_q, len(queries) // (2 * count)))
            blocks = [
                (shifted(group, start), slots[group, :width], log_others[group])
                for group, width in query_blocks(counts, most)
            ]
            # Who computes what is fixed: predictions, hence bits, are the same each time.
            run_tasks([partial(w.attend_all, blocks[i::count]) for i, w in enumerate(workers)])


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


class _Batch(NamedTuple):
    """What a batch of n queries with equally many slots multiplies."""

    q: torch.Tensor  # [n, h_q, d_qk + 32], compute dtype
    rows: torch.Tensor  # [n, slots, d_qk + 32], compute dtype
    scale: torch.Tensor  # float32 [n, h_q]: logit = scale * row_scale * dot
    row_scale: torch.Tensor | None  # float32 [n, 1, slots], where each token has its own
    log_others: torch.Tensor  # float32 [n, 1], ln of the number of valid slots less one


class _Attention:
    """The steps of a worker's batches, the buffers they share, and the predicted centres."""

    def __init__(self, problem: PrefillProblem, dtype: torch.dtype, table: RowTable) -> None:
        self.problem = problem
        self.dtype = dtype
        self.table = table
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

    @torch.no_grad()
    def attend_all(self, blocks: list[tuple[Rows, torch.Tensor, torch.Tensor]]) -> None:
        """Write the results of all ``blocks``, the first query by itself to learn the centre."""
        for queries, slots, log_others in blocks:
            if not self.predictions:
                for part in (slice(0, 1), slice(1, len(slots))):
                    if len(slots[part]):
                        self.attend(some(queries, part), slots[part], log_others[part])
            else:
                self.attend(queries, slots, log_others)

    def attend(self, queries: Rows, slots: torch.Tensor, log_others: torch.Tensor) -> None:
        """Write the results of ``queries``, which read table rows ``slots`` [n, width].

        They are converted together and share a predicted centre; a product takes as many of them
        as their slots allow, often one.
        """
        (n, width), table = slots.shape, self.table
        q, scale = self._queries(queries, n), self.scale[queries]
        stats = torch.empty(5, n, self.problem.h_q, dtype=torch.float32, device="cpu")
        stats[4] = self._set_centre(q, scale, self.predicted.expand(n, -1))
        together = max(1, BATCH_SLOTS // width)
        for start in range(0, n, together):
            part = slice(start, min(start + together, n))
            places = slots[part].reshape(-1)
            rows = self._buffer("rows", self.dtype, len(places), table.width)
            torch.index_select(table.rows, 0, places, out=rows)
            rows = rows.view(-1, width, table.width)
            row_scale = None
            if table.scale is not None:
                row_scale = table.scale[places].view(-1, 1, width)
            batch = _Batch(q[part], rows, scale[part], row_scale, log_others[part, None])
            p = self._scores(batch, stats[:, part])
            self._write_out(some(queries, part), batch, p, Stats(*stats[:, part]))
        done = Stats(*stats)
        self.problem.max_logits[queries] = done.top + done.centre
        self.problem.lse[queries] = done.lse()
        if self.dtype == torch.bfloat16:
            target = done.target(done.bulk(log_others[:, None]))
            self._predict(target + done.centre)

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

    def _scores(self, batch: _Batch, stats: torch.Tensor, attempt: int = 0) -> torch.Tensor:
        """P of a batch whose logits lie close to their centres, moved where they did not.

        ``stats`` [5, n, h_q] holds the fields of ``Stats``, on entry the centre in q's columns.
        A centre is good if the maximum is not below it by more than ``near``, the bulk not by more
        than ``BELOW`` (logits that matter are then off by 2**-6 at most), and few logits lie
        further than ``near`` above it, all computed exactly. Each attempt divides the distance
        that is left by 100 or more.
        """
        p = self._softmax(batch, stats, attempt)
        if self.dtype != torch.bfloat16 or attempt == 4:
            return p
        found = Stats(*stats)
        bulk = found.bulk(batch.log_others)
        far = (found.top < -found.near()) | (bulk < -BELOW) | (found.exact < 0)
        if not far.any():
            return p
        move = found.target(bulk)
        far &= move.isfinite()
        target = found.centre.where(~far, found.centre + move)
        if len(target) > 1:
            stats[4] = self._set_centre(batch.q, batch.scale, target)
            return self._scores(batch, stats, attempt + 1 if far.any() else 4)
        heads = far[0].nonzero().view(-1)
        if len(heads):
            again = batch._replace(q=batch.q[:, heads], scale=batch.scale[:, heads])
            part = stats[:, :, heads]
            part[4] = self._set_centre(again.q, again.scale, target[:, heads])
            p.index_copy_(1, heads, self._scores(again, part, attempt + 1))
            stats.index_copy_(2, heads, part)
        return p

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

    def _softmax(self, batch: _Batch, stats: torch.Tensor, attempt: int) -> torch.Tensor:
        """softmax(scale * row_scale * q @ rows^T), a few heads at a time to stay in the cache."""
        n, h_q, width = *batch.scale.shape, batch.rows.shape[1]
        raw = self._buffer("raw", self.dtype, n, h_q, width)
        if n == 1:
            torch.mm(batch.q[0], batch.rows[0].T, out=raw[0])
        else:
            torch.bmm(batch.q, batch.rows.transpose(1, 2), out=raw)
        rounded = self._buffer(f"rounded{attempt}", self.dtype, n, h_q, width)
        step = max(1, SOFTMAX_ELEMENTS // (n * width))
        for first in range(0, h_q, step):
            heads = slice(first, min(first + step, h_q))
            p = self._buffer("p", torch.float32, n, heads.stop - first, width)
            self._round(raw[:, heads], batch, heads, p, rounded[:, heads], stats[:, :, heads])
        return rounded

    def _round(
        self,
        raw: torch.Tensor,
        batch: _Batch,
        heads: slice,
        p: torch.Tensor,
        rounded: torch.Tensor,
        stats: torch.Tensor,
    ) -> None:
        """Softmax of some heads into ``rounded``, times row_scale; ``stats`` but the centre."""
        p.copy_(raw).mul_(batch.scale[:, heads, None])
        if batch.row_scale is not None:
            p *= batch.row_scale
        torch.amax(p, dim=-1, out=stats[0])
        stats[3] = 0
        places = None
        if self.dtype == torch.bfloat16:
            places = self._recompute(batch, heads, p, Stats(*stats))
        torch.softmax(p, dim=-1, out=p)
        torch.amax(p, dim=-1, out=stats[1])
        if places is not None:
            stats[3].index_put_(places[:2], p[places], accumulate=True)
        if batch.row_scale is not None:
            p *= batch.row_scale
        rounded.copy_(p)
        p.copy_(rounded)
        if batch.row_scale is not None:
            p /= batch.row_scale
        torch.sum(p, dim=-1, out=stats[2])

    def _recompute(
        self, batch: _Batch, heads: slice, p: torch.Tensor, stats: Stats
    ) -> tuple[torch.Tensor, ...] | None:
        """Logits in ``p`` far above their centre, anew in float32; their (query, head, slot).

        A head with too many of them has the wrong centre: they stay as they are.
        """
        near = stats.near()
        if not (stats.top > near).any():
            return None
        n, h_q, width = p.shape
        blocks = p.view(n, h_q, -1, min(width, 64))  # few hold a large logit: look only into those
        query, head, block = (blocks.amax(dim=-1) > near[..., None]).nonzero(as_tuple=True)
        logits = blocks[query, head, block]
        row, column = (logits > near[query, head, None]).nonzero(as_tuple=True)
        query, head, slot = query[row], head[row], block[row] * blocks.shape[-1] + column
        numbers = query * h_q + head
        crowded = torch.bincount(numbers, minlength=n * h_q) > width // 64 + 1
        if crowded.any():
            stats.exact[crowded.view(n, h_q)] = -1
            few = ~crowded[numbers]
            query, head, slot = query[few], head[few], slot[few]
        terms = batch.q[query, head + heads.start].float().mul_(batch.rows[query, slot])
        exact = terms.sum(dim=-1).mul_(batch.scale[query, head + heads.start])
        if batch.row_scale is not None:
            exact *= batch.row_scale[query, 0, slot]
        p[query, head, slot] = exact
        torch.amax(p, dim=-1, out=stats.top)
        return query, head, slot

    def _write_out(self, queries: Rows, batch: _Batch, p: torch.Tensor, stats: Stats) -> None:
        """``out``: p @ V over the sum of the rounded p, scaled for the sink."""
        factor = (self.value_scale if batch.row_scale is None else 1.0) / stats.total
        if self.problem.attn_sink is not None:
            factor *= torch.sigmoid(stats.lse() - self.problem.attn_sink)
        out, values = self.problem.out, batch.rows[..., :D_V]
        if len(factor) == 1 and out.dtype == self.dtype:
            out = out[queries.start if isinstance(queries, slice) else int(queries)]
            torch.mm(p[0], values[0], out=out)
            out.mul_(factor[0, :, None])
        else:
            out[queries] = torch.bmm(p, values).mul_(factor[..., None]).to(out.dtype)

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


def _write_empty(problem: PrefillProblem, queries: torch.Tensor) -> None:
    problem.out.index_fill_(0, queries, 0.0)
    problem.max_logits.index_fill_(0, queries, -math.inf)
    problem.lse.index_fill_(0, queries, math.inf)
