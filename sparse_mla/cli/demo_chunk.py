"""A prefill chunk as a serving engine would hand it over, made from a seed.

Text stays with a topic for a while and comes back to it. So does this sequence: position after
position it wanders between topics (directions in the latent space), keys carry their position's
topic and noise, and the heads of a query look for their own topic and for one older one. The
indices come from a real top-k: an indexer in the manner of DeepSeek-V3.2's (a few index heads of
low dimension, scores summed after a ReLU) scores every earlier key for every query.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

TOPICS = 48
STAY = 1 / 100  # chance that the topic changes at a position
INDEX_HEADS = 4
INDEX_DIM = 64
BLOCK = 64  # queries made and scored together: bounds the memory of this module
FLAT = 448.0  # the largest e4m3


@dataclass
class Chunk:
    """The inputs of one call of ``sparse_mla_prefill`` and the unit of its logits."""

    q: torch.Tensor  # float8_e4m3fn [s_q, h_q, d_qk]
    kv: torch.Tensor  # float8_e4m3fn [s_kv, d_qk]
    indices: torch.Tensor  # int32 [s_q, topk], -1 where fewer keys come before
    q_scale: torch.Tensor  # float32 [1]
    kv_scale: torch.Tensor  # float32 [1]
    sm_scale: float

    @property
    def first_position(self) -> int:
        """Position of query 0: the chunk is the end of the sequence."""
        return self.kv.shape[0] - self.q.shape[0]


@dataclass(frozen=True)
class Sizes:
    """What the chunk's tensors measure."""

    s_q: int
    s_kv: int
    h_q: int
    topk: int
    d_qk: int

    @property
    def bytes(self) -> int:
        """Memory that the chunk, its results and the reference take at least."""
        from ..params import D_V

        queries = self.s_q * (self.h_q * (self.d_qk + 2 * D_V) + 4 * self.topk)
        keys = self.s_kv * self.d_qk * 9  # FP8, and twice float32 while they are made
        reference = 8 * self.d_qk * self.topk
        return queries + keys + reference


@torch.no_grad()
def make_chunk(
    sizes: Sizes, seed: int, device: torch.device, advance: Callable[[int], None]
) -> Chunk:
    """Draw the chunk on the CPU, so that a seed means the same everywhere; ``advance`` hears of
    queries done.
    """
    random = torch.Generator().manual_seed(seed)
    topics = _unit(torch.randn(TOPICS, sizes.d_qk, generator=random))
    topic = _wander(sizes.s_kv, random)
    keys = 1.2 * topics[topic] + _noise(random, sizes.s_kv, sizes.d_qk)
    kv, kv_scale = _quantised(keys)

    project = torch.randn(sizes.d_qk, INDEX_DIM, generator=random) / sizes.d_qk**0.5
    index_keys = keys @ project
    q = torch.empty(sizes.s_q, sizes.h_q, sizes.d_qk, dtype=torch.float8_e4m3fn)
    indices = torch.full((sizes.s_q, sizes.topk), -1, dtype=torch.int32)
    q_scale = torch.tensor([8.0 / FLAT])  # queries stay below 8
    own = 0.5 + 4.5 * torch.rand(sizes.h_q, 1, generator=random)
    older = 3.0 * torch.rand(sizes.h_q, 1, generator=random)
    for start in range(0, sizes.s_q, BLOCK):
        stop = min(start + BLOCK, sizes.s_q)
        at = torch.arange(start, stop) + sizes.s_kv - sizes.s_q
        back = (torch.rand(len(at), generator=random) * (at + 1)).long()
        block = own * topics[topic[at]][:, None] + older * topics[topic[back]][:, None]
        block += _noise(random, len(at), sizes.h_q, sizes.d_qk)
        q[start:stop] = (block / q_scale).clamp_(-FLAT, FLAT).to(q.dtype)
        _select(block, at, project, index_keys, indices[start:stop])
        advance(stop - start)
    sm_scale = 2.0  # 2 * 1.2 * own: keys of a head's own topic stand 1 to 12 above the others
    q, kv, indices, q_scale, kv_scale = (t.to(device) for t in (q, kv, indices, q_scale, kv_scale))
    return Chunk(q, kv, indices, q_scale, kv_scale, sm_scale)


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


def _noise(random: torch.Generator, *shape: int) -> torch.Tensor:
    """Noise whose rows have a length of about 1."""
    return torch.randn(*shape, generator=random).div_(shape[-1] ** 0.5)


def _wander(s_kv: int, random: torch.Generator) -> torch.Tensor:
    """The topic of each position: it stays for a while, and old topics come back."""
    changes = (torch.rand(s_kv, generator=random) < STAY).long().cumsum(0)
    return torch.randint(TOPICS, (int(changes[-1]) + 1,), generator=random)[changes]


def _quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in FP8 with one scale for all."""
    from ..quantize import quantize_fp8

    stored, scale = quantize_fp8(rows)
    return stored, scale.reshape(1)


def _select(
    block: torch.Tensor,
    at: torch.Tensor,
    project: torch.Tensor,
    index_keys: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Top-k of the index scores over the keys up to each query's own position."""
    heads = block.shape[1]
    groups = [part.mean(dim=1) for part in block.chunk(min(INDEX_HEADS, heads), dim=1)]
    index_queries = torch.stack(groups) @ project  # [index heads, queries, INDEX_DIM]
    scores = torch.relu(index_queries @ index_keys.T).sum(dim=0)
    causal = torch.arange(index_keys.shape[0]) <= at[:, None]
    scores.masked_fill_(~causal, -torch.inf)
    best = scores.topk(min(indices.shape[1], scores.shape[1]), dim=1)
    indices[:, : best.indices.shape[1]] = torch.where(best.values == -torch.inf, -1, best.indices)


@torch.no_grad()
def kept_share(chunk: Chunk, queries: list[int]) -> torch.Tensor:
    """The share of full causal attention that falls on selected keys, [queries, h_q]."""
    kv = chunk.kv.float()
    scale = chunk.sm_scale * chunk.q_scale * chunk.kv_scale
    shares = []
    for t in queries:
        visible = chunk.first_position + t + 1
        p = torch.softmax(chunk.q[t].float() @ kv[:visible].T * scale, dim=-1)
        rows = chunk.indices[t]
        shares.append(p[:, rows[rows >= 0].long()].sum(dim=-1))
    return torch.stack(shares)


@torch.no_grad()
def mass_by_rank(chunk: Chunk, query: int) -> torch.Tensor:
    """Each head's probabilities over the selected keys, largest first, summed up: [h_q, valid]."""
    rows = chunk.indices[query]
    kv = chunk.kv[rows[rows >= 0].long()].float()
    scale = chunk.sm_scale * chunk.q_scale * chunk.kv_scale
    p = torch.softmax(chunk.q[query].float() @ kv.T * scale, dim=-1)
    return p.sort(dim=-1, descending=True).values.cumsum(dim=-1)
