"""FP8 sparse MLA attention for DeepSeek sparse attention models."""

from __future__ import annotations

from .errors import BackendError, ContractError, FileError, SlowBackendWarning, SparseMLAError
from .interface import (
    merge_attention_states,
    quantize_fp8,
    sparse_mla_prefill,
    sparse_mla_q8kv8_prefill_fwd,
)
from .version import __version__

__all__ = [
    "BackendError",
    "ContractError",
    "FileError",
    "SlowBackendWarning",
    "SparseMLAError",
    "__version__",
    "merge_attention_states",
    "quantize_fp8",
    "sparse_mla_prefill",
    "sparse_mla_q8kv8_prefill_fwd",
]
