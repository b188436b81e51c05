"""The environment variables this library reads, and a cheap way to read them at every call.

    SPARSE_MLA_BACKEND   the backend of every call that does not name one itself
    SPARSE_MLA_DEBUG     1: look into the data as well (indices, lengths, scales, NaN); waits
    SPARSE_MLA_DUMP      a directory: the inputs of a call go there before it runs (``callfile``)
    SPARSE_MLA_CAPTURE   a directory: a sample of the calls goes there (``callfile.capture``)
    SPARSE_MLA_COMMIT    what benchmark results name as the commit, outside a checkout

The first four are read at each call, so that setting one takes effect at once. ``os.environ.get``
of a variable that is not set costs 0.7 us, as it raises and catches twice; looking into its
dictionary costs a twentieth of that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def read(name: str) -> str:
    """The value of variable ``name``, or ``""``."""
    return os.environ.get(name, "")


def is_set(name: str) -> bool:
    """Whether ``name`` is set to something other than nothing or ``0``."""
    return read(name) not in ("", "0")


def _encoded(name: str) -> Any:
    encode: Callable[[str], Any] | None = getattr(os.environ, "encodekey", None)
    return name if encode is None else encode(name)


_WATCHED = ("SPARSE_MLA_DUMP", "SPARSE_MLA_DEBUG", "SPARSE_MLA_CAPTURE")
_DUMP, _DEBUG, _CAPTURE = (_encoded(name) for name in _WATCHED)
_BACKEND = _encoded("SPARSE_MLA_BACKEND")


captures_open = 0
"""``callfile.capture`` contexts that are open, in any thread; they count them here."""


def untouched() -> bool:
    """Whether nothing is set that `any_diagnostics` and `forced_backend` look for."""
    data = getattr(os.environ, "_data", None)
    return data is not None and not (
        captures_open or _BACKEND in data or _DUMP in data or _DEBUG in data or _CAPTURE in data
    )


def any_diagnostics() -> bool:
    """Whether a variable that looks at calls is set, whatever its value, or a capture is open."""
    if captures_open:
        return True
    data = getattr(os.environ, "_data", None)
    if data is None:
        return any(name in os.environ for name in _WATCHED)
    return _DUMP in data or _DEBUG in data or _CAPTURE in data


def forced_backend() -> str:
    """The backend ``SPARSE_MLA_BACKEND`` names, or ``"auto"``."""
    data = getattr(os.environ, "_data", None)
    if data is not None and _BACKEND not in data:
        return "auto"
    return read("SPARSE_MLA_BACKEND") or "auto"
