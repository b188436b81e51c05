"""The version, in this one place; the distribution's metadata reads it from here."""

from __future__ import annotations

__version__ = "0.1.0"
