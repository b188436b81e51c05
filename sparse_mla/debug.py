"""Checks of the data, made only with ``SPARSE_MLA_DEBUG=1``.

The operators mask a bad index or length and turn a bad scale into NaN, as looking at the data would
make every call wait for the GPU. These checks do look, and name the first offender. Like the ones
of metadata they come before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .errors import SparseMLAError, error
from .params import PrefillProblem

_CHUNK_ELEMENTS = 1 << 24
"""Elements of q or kv looked at in one go: what bounds the memory these checks need."""


def check_data(problem: PrefillProblem) -> None:
    """Raise the first fault in the problem's data; waits for the device.

    A call inside a CUDA-graph capture is left alone: there the data is not there yet.

    Raises:
        ContractError: ``topk-length-out-of-range``, ``index-out-of-range``, ``scale-data-invalid``,
            ``nan-in-input``.
    """
    if problem.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    for violation in data_violations(problem):
        raise violation


def data_violations(problem: PrefillProblem) -> Iterator[SparseMLAError]:
    """Everything wrong with the data, at most one violation a kind and tensor."""
    with torch.no_grad():
        yield from _lengths(problem)
        yield from _indices(problem)
        yield from _scale("q_scale", problem.q_scale)
        yield from _scale("kv_scale", problem.kv_scale)
        yield from _nan_rows(problem)


def _lengths(problem: PrefillProblem) -> Iterator[SparseMLAError]:
    lengths = problem.topk_length
    if lengths is None:
        return
    bad = ((lengths < 0) | (lengths > problem.topk)).nonzero()
    if len(bad):
        query = int(bad[0, 0])
        yield error(
            "topk-length-out-of-range",
            query=query,
            length=int(lengths[query]),
            topk=problem.topk,
            count=len(bad),
        )


def _indices(problem: PrefillProblem) -> Iterator[SparseMLAError]:
    """-1 is padding, and a slot past the length may hold anything; any other index names a row."""
    indices = problem.index_rows
    bad = _within_length(problem) & ((indices < -1) | (indices >= problem.s_kv))
    if not bool(bad.any()):
        return
    query, slot = (int(i) for i in bad.nonzero()[0])
    yield error(
        "index-out-of-range",
        query=query,
        slot=slot,
        index=int(indices[query, slot]),
        s_kv=problem.s_kv,
        count=int(bad.sum()),
    )


def _within_length(problem: PrefillProblem) -> torch.Tensor:
    """Slots before their query's length, bool [s_q, topk]."""
    indices = problem.index_rows
    if problem.topk_length is None:
        return torch.ones_like(indices, dtype=torch.bool)
    slots = torch.arange(problem.topk, device=indices.device)
    return slots < problem.topk_length[:, None]


def _scale(name: str, scale: torch.Tensor | None) -> Iterator[SparseMLAError]:
    if scale is None:
        return
    values = scale.flatten()
    bad = values[~((values > 0) & torch.isfinite(values))]
    if len(bad):
        yield error("scale-data-invalid", name=name, value=float(bad[0]), count=len(bad))


def _nan_rows(problem: PrefillProblem) -> Iterator[SparseMLAError]:
    """NaN in q, in a KV row that a valid slot selects, or in the sink."""
    queries = torch.arange(problem.s_q, device=problem.q.device)
    indices = problem.index_rows
    valid = _within_length(problem) & (indices >= 0) & (indices < problem.s_kv)
    selected = torch.zeros(problem.s_kv, dtype=torch.bool, device=indices.device)
    selected[indices[valid].to(torch.int64)] = True
    found = [
        ("q", _rows_with_nan(problem.q, queries)),
        ("kv", _rows_with_nan(problem.kv_rows, selected.nonzero()[:, 0])),
    ]
    if problem.attn_sink is not None:
        found.append(("attn_sink", torch.isnan(problem.attn_sink).nonzero()[:, 0]))
    for name, bad in found:
        if len(bad):
            yield error("nan-in-input", name=name, row=int(bad[0]), count=len(bad))


def _rows_with_nan(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Those of ``rows`` in which ``tensor`` holds a NaN."""
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)  # e4m3fn has no comparisons; its NaN are 0x7f and 0xff
    step = max(1, _CHUNK_ELEMENTS // max(1, tensor[0].numel())) if len(tensor) else 1
    found = []
    for chunk in torch.split(rows, step):
        taken = tensor.index_select(0, chunk.to(torch.int64)).flatten(1)
        nan = (taken & 0x7F) == 0x7F if taken.dtype is torch.uint8 else torch.isnan(taken)
        found.append(chunk[nan.any(dim=1)])
    return torch.cat(found) if found else rows[:0]
