"""Which rows each query selects: four patterns, drawn from a seed on any device.

The chunk is the end of its sequence: query ``t`` stands at position ``s_kv - s_q + t``.

``uniform``      distinct rows of the whole cache in random order, every slot valid: no locality
``window``       the ``topk`` most recent rows, its own the last; neighbours share all but one
``sink-recent``  the first 1/16, the most recent 1/2, the rest drawn from the rows between
``topk``         a true top-k of an indexer's scores over all rows up to the query's own

But for ``uniform`` a query sees no row after its own; slots that it cannot fill are -1.
"""

from __future__ import annotations

from typing import Any

import torch

from .shapes import Shape

BLOCK_ELEMENTS = 1 << 26
"""Scores that exist at a time: bounds the memory of drawing."""
TOPICS = 48
STAY = 100
"""Positions that the text stays with a topic, in the mean."""
INDEX_HEADS = 4
INDEX_DIM = 64


@torch.no_grad()
def draw(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """int32 [s_q, topk] on the generator's device."""
    device = generator.device
    indices = torch.full((shape.s_q, shape.topk), -1, dtype=torch.int32, device=device)
    indexer = _Indexer(shape, generator) if shape.pattern == "topk" else None
    heads = INDEX_HEADS if indexer else 1
    block = max(1, BLOCK_ELEMENTS // (shape.s_kv * heads))
    for start in range(0, shape.s_q, block):
        stop = min(start + block, shape.s_q)
        at = torch.arange(start, stop, device=device) + (shape.s_kv - shape.s_q)
        if indexer is not None:
            scores = indexer.scores(at)
        elif shape.pattern == "uniform":
            scores = torch.rand(len(at), shape.s_kv, generator=generator, device=device)
        elif shape.pattern == "window":
            scores = _recency(shape, at)
        else:
            scores = _sink_and_recent(shape, at, generator)
        best = scores.topk(min(shape.topk, shape.s_kv), dim=1)
        indices[start:stop, : best.indices.shape[1]] = torch.where(
            best.values == -torch.inf, -1, best.indices
        ).to(torch.int32)
    return indices


def _future(scores: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """``scores`` with what stands after each query's position ruled out, in place."""
    rows = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill_(rows > at[:, None], -torch.inf)


def _recency(shape: Shape, at: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(shape.s_kv, device=at.device, dtype=torch.float32)
    return _future(rows.expand(len(at), -1).clone(), at)


def _sink_and_recent(shape: Shape, at: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Scores above 1 for what is always selected, below 1 and random for what lies between."""
    rows = torch.arange(shape.s_kv, device=at.device)
    scores = torch.rand(len(at), shape.s_kv, generator=generator, device=at.device)
    sinks = rows < shape.topk // 16
    recent = rows > at[:, None] - shape.topk // 2
    scores.masked_fill_(recent, 2.0).masked_fill_(sinks, 3.0)
    return _future(scores, at)


class _Indexer:
    """A model of DeepSeek sparse attention's indexer, with synthetic keys and queries.

    Score of row s for query t: ``sum_h relu(q[t,h] . k[s])`` over 4 index heads of 64 dimensions.
    Text stays with one of 48 topics for 100 positions in the mean and comes back to old ones; a
    key is its topic's direction and noise of the same length, a query its topic's, that of an older
    position, and noise. So selections cluster in runs, and neighbours share most of theirs.
    """

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        self.generator = generator
        device = generator.device
        self.topics = _unit(self._normal(TOPICS, INDEX_DIM))
        changes = torch.rand(shape.s_kv, generator=generator, device=device) < 1 / STAY
        spell = changes.long().cumsum(0)
        topics = torch.randint(TOPICS, (shape.s_kv + 1,), generator=generator, device=device)
        self.topic = topics[spell]
        noise = self._normal(shape.s_kv, INDEX_DIM) / INDEX_DIM**0.5
        self.keys = self.topics[self.topic] + noise

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, device=self.generator.device)

    def scores(self, at: torch.Tensor) -> torch.Tensor:
        """Scores of the queries at these positions over all rows; -inf after their own."""
        random = torch.rand(len(at), generator=self.generator, device=at.device)
        older = self.topic[(random * (at + 1)).long()]
        q = self.topics[self.topic[at]] + 0.5 * self.topics[older]
        noise = self._normal(INDEX_HEADS, len(at), INDEX_DIM) / INDEX_DIM**0.5
        products = (q + noise) @ self.keys.T
        return _future(torch.relu(products).sum(dim=0), at)


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


@torch.no_grad()
def describe(indices: torch.Tensor, s_kv: int) -> dict[str, Any]:
    """What a selection is like: valid slots, distinct rows, rows shared with the query before."""
    valid = indices >= 0
    rows = torch.zeros(s_kv, dtype=torch.bool, device=indices.device)
    rows[indices[valid].long()] = True
    pairs = range(1, len(indices), max(1, len(indices) // 8))
    shared = [
        float(torch.isin(indices[t][valid[t]], indices[t - 1][valid[t - 1]]).float().mean())
        for t in pairs
        if bool(valid[t].any())
    ]
    return {
        "valid_slots": int(valid.sum()),
        "distinct_rows": int(rows.sum()),
        "shared_with_neighbour": sum(shared) / len(shared) if shared else None,
    }
