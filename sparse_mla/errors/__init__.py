"""Errors that explain themselves: ``error(id, **context)`` builds the exception of a record."""

from __future__ import annotations

from typing import Any

from .record import (
    BackendError,
    ContractError,
    ErrorRecord,
    FileError,
    SlowBackendWarning,
    Solution,
    SparseMLAError,
)
from .records import RECORDS
from .warn import warn

__all__ = [
    "RECORDS",
    "BackendError",
    "ContractError",
    "ErrorRecord",
    "FileError",
    "SlowBackendWarning",
    "Solution",
    "SparseMLAError",
    "error",
    "warn",
]

for _shown in (SparseMLAError, ContractError, BackendError, FileError, SlowBackendWarning):
    _shown.__module__ = __name__  # the name to import it by is the one that tracebacks show


def error(id: str, **context: Any) -> SparseMLAError:
    """The exception of record ``id``, its texts filled from ``context``; the caller raises it."""
    record = RECORDS[id]
    return record.exception(record, context)
