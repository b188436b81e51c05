"""FP8 sparse MLA attention for DeepSeek sparse attention models.

The operators, and with them torch and the ``torch.ops.sparse_mla`` that they register, are imported
when one is first asked for: errors can be read and the command line answers without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import BackendError, ContractError, FileError, SlowBackendWarning, SparseMLAError
from .version import __version__

if TYPE_CHECKING:
    from .interface import (
        merge_attention_states,
        quantize_fp8,
        sparse_mla_prefill,
        sparse_mla_q8kv8_prefill_fwd,
    )

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(".interface", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
