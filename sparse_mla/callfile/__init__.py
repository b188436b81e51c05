"""A call as a file: the inputs of one operator call, to be replayed, checked and passed on.

The container is safetensors; nothing else is read. A call file holds

- tensors ``q``, ``kv``, ``indices`` and, where the call had them, ``q_scale``, ``kv_scale``,
  ``attn_sink``, ``topk_length``; optionally what the call is expected to give: ``out``,
  ``max_logits``, ``lse``;
- metadata ``format="sparse-mla-call"``, ``version="1"``, ``operator``, and every argument that is
  no tensor under its own name as JSON (``sm_scale="0.1147"``, ``d_v="512"``, ``q_scale="0.5"``);
- metadata ``stride.<name>`` for a tensor that was not contiguous (the file holds it packed) and
  ``buffer.<name>`` for an output that the caller gave, so that a replay meets the same contract
  violation;
- any other metadata key, kept as text: ``model``, ``source``, ``layer``, ``created_by``.

A file may come from anyone: see ``container`` for what is checked before memory is taken.
"""

from __future__ import annotations

from .call import (
    ARGUMENTS,
    GENERAL,
    INPUTS,
    MAX_BYTES,
    RESULTS,
    STRICT,
    Buffer,
    Call,
    load_call,
    save_call,
    save_results,
)
from .captures import Capture, capture, capture_call
from .container import shown
from .dump import dump_call, recorded_call

__all__ = [
    "ARGUMENTS",
    "GENERAL",
    "INPUTS",
    "MAX_BYTES",
    "RESULTS",
    "STRICT",
    "Buffer",
    "Call",
    "Capture",
    "capture",
    "capture_call",
    "dump_call",
    "load_call",
    "recorded_call",
    "save_call",
    "save_results",
    "shown",
]
