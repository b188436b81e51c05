"""Every error record, by id."""

from __future__ import annotations

from ..record import ErrorRecord

RECORDS: dict[str, ErrorRecord] = {}
