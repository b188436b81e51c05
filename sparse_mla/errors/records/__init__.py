"""The records of every error, by id: one module an operator family, joined here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..record import ErrorRecord
from . import (
    data,
    dispatch,
    files,
    general_dtypes,
    general_scales,
    general_shapes,
    helpers,
    jit,
    jit_cache,
    observed,
    prefill_arguments,
    prefill_geometry,
    prefill_shapes,
    prefill_tensors,
)
from .guards import GUARDS

FAMILIES = (
    prefill_shapes,
    prefill_geometry,
    prefill_tensors,
    prefill_arguments,
    general_shapes,
    general_dtypes,
    general_scales,
    data,
    helpers,
    dispatch,
    jit,
    jit_cache,
    observed,
    files,
)


def joined(families: Iterable[Iterable[ErrorRecord]]) -> dict[str, ErrorRecord]:
    """All records by id; an id is declared once, or users land on the wrong page."""
    records: dict[str, ErrorRecord] = {}
    for family in families:
        for record in family:
            if record.id in records:
                raise ValueError(f"two records have the id {record.id}")
            records[record.id] = replace(record, guard=GUARDS.get(record.id, ""))
    return records


RECORDS = joined(family.RECORDS for family in FAMILIES)
