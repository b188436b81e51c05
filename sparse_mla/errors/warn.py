"""Warnings that point at the line which called this package."""

from __future__ import annotations

import sys
import warnings

_PASSED_OVER = (__name__.partition(".")[0], "contextlib")
"""Packages a warning is never blamed on: ours, and what runs our context managers."""


def warn(message: str | Warning, category: type[Warning] | None = None) -> None:
    """``warnings.warn`` at the nearest frame outside this package, however deep the call is."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
