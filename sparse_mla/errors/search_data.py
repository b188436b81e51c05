"""What the search of the site needs, as plain data for a page."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from .explain import WEIGHTS, word_weights
from .match import ANYTHING, FIELD_PATTERNS, PATH_WITH_SPACES
from .record import ErrorRecord

_LEAST_WEIGHT = 2.0
"""Words that stand only in the long texts of a record are left out: a page has a size."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def pieces(template: str) -> list[str]:
    """A template as literal, field, literal, field, ...: nothing that a page must parse."""
    parts = [""]
    for literal, field, _, _ in string.Formatter().parse(template):
        parts[-1] += literal
        if field is not None:
            parts += [field, ""]
    return parts


def search_data(records: Mapping[str, ErrorRecord]) -> dict[str, Any]:
    """The templates, the patterns and the words of the records."""
    return {
        "fields": {name: javascript(pattern) for name, pattern in FIELD_PATTERNS.items()},
        "anything": javascript(ANYTHING),
        "pathWithSpaces": javascript(PATH_WITH_SPACES),
        "weights": sorted({*WEIGHTS.values()}, reverse=True),
        "words": _words(records),
        "records": [
            {
                "id": record.id,
                "type": "" if record.reported_as else record.type_name,
                "title": record.title,
                "message": pieces(record.message),
                "detail": pieces(record.detail),
                "fix": pieces(record.fix),
                "yours": pieces(record.yours),
                "foreign": [javascript(pattern) for pattern in record.foreign],
            }
            for record in records.values()
        ],
    }


def javascript(pattern: str) -> str:
    """A regular expression of Python's re as JavaScript writes it."""
    return pattern.replace("(?P<", "(?<")


def _words(records: Mapping[str, ErrorRecord]) -> dict[str, str]:
    """For each word its records and weights: three characters each, two of them the record."""
    weights = sorted({*WEIGHTS.values()}, reverse=True)
    found: defaultdict[str, str] = defaultdict(str)
    for number, record in enumerate(records.values()):
        for word, weight in word_weights(record).items():
            if weight >= _LEAST_WEIGHT:
                place = _DIGITS[number // 36] + _DIGITS[number % 36]
                found[word] += place + _DIGITS[weights.index(weight)]
    return dict(sorted(found.items()))
