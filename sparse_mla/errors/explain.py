"""Explanations as data: search by words, the nearest ids, a record's page filled with values."""

from __future__ import annotations

import difflib
import functools
import math
import re
import string
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from .match import Match, find
from .record import ErrorRecord, fill, url_of
from .records import RECORDS
from .where import raised_at

__all__ = [
    "Match",
    "changed_lines",
    "explanation",
    "find",
    "record_dict",
    "search",
    "suggest",
]

SCHEMA_VERSION = 1
_LONGEST_QUERY = 2_000
_WORD = re.compile(r"[a-z0-9_]+")
WEIGHTS: Mapping[str, float] = {
    "id": 6,
    "title": 5,
    "symptoms": 5,
    "message": 4,
    "operators": 2,
    "situations": 2,
    "trigger": 2,
    "fix": 1.5,
    "detail": 1.5,
    "meaning": 1.5,
    "solutions": 1,
}


def search(words: str) -> list[Match]:
    """Records that mention ``words``, best first; a misspelt word counts as the nearest one."""
    index = _index()
    frequency = Counter(word for scores in index.values() for word in scores)
    totals: defaultdict[str, float] = defaultdict(float)
    for word in dict.fromkeys(_words(words[:_LONGEST_QUERY])):
        for known, certainty in _known(word, frequency):
            rarity = math.log(1 + len(index) / frequency[known])
            for id, scores in index.items():
                totals[id] += certainty * rarity * scores.get(known, 0.0)
    ranked = sorted(((score, id) for id, score in totals.items() if score > 0), reverse=True)
    if not ranked:
        return []
    floor = ranked[0][0] / 10
    return [Match(RECORDS[id], {}, round(score, 3)) for score, id in ranked if score >= floor]


def suggest(text: str, most: int = 3) -> list[ErrorRecord]:
    """The records nearest to a text that none explains."""
    ids = difflib.get_close_matches(text.strip().lower()[:200], RECORDS, n=most, cutoff=0.5)
    ids += [match.record.id for match in search(text)]
    return [RECORDS[id] for id in dict.fromkeys(ids)][:most]


def explanation(match: Match) -> dict[str, Any]:
    """A match as plain data: the record, and its sentences filled with what the text told."""
    record, values = match.record, match.values
    return {
        "id": record.id,
        "score": match.score,
        "values": dict(values),
        "message": _filled(record.message, values) or record.message,
        "yours": _filled(record.yours, values),
        "detail": _filled(record.detail, values),
        "fix": _filled(record.fix, values),
        "record": record_dict(record),
    }


def changed_lines(before: str, after: str) -> tuple[set[int], set[int]]:
    """The numbers, from 0, of the lines in which an example and its mended form differ."""
    old, new = before.splitlines(), after.splitlines()
    lost: set[int] = set()
    gained: set[int] = set()
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            lost.update(range(i, j))
            gained.update(range(k, m))
    return lost, gained


def record_dict(record: ErrorRecord) -> dict[str, Any]:
    """A record as plain data, as it is published."""
    return {
        "schema_version": SCHEMA_VERSION,
        "id": record.id,
        "type": record.type_name,
        "title": record.title,
        "message": record.message,
        "detail": record.detail,
        "fix": record.fix,
        "yours": record.yours,
        "meaning": record.meaning,
        "trigger": record.trigger,
        "situations": list(record.situations),
        "solutions": [{"text": way.text, "code": way.code} for way in record.solutions],
        "guard": record.guard,
        "before": record.before,
        "after": record.after,
        "related": list(record.related),
        "operators": list(record.operators),
        "since": record.since,
        "symptoms": list(record.symptoms),
        "foreign": list(record.foreign),
        "needs": list(record.needs),
        "raised_here": not record.reported_as,
        "raised_at": [
            {"file": site.file, "line": site.line, "end_line": site.end_line}
            for site in raised_at().get(record.id, ())
        ],
        "url": url_of(record.id),
    }


def _filled(template: str, values: Mapping[str, str]) -> str:
    """``template`` with its values, or "" where one of them is not known."""
    if _fields(template) <= values.keys():
        return fill(template, values)
    return ""


def _fields(template: str) -> set[str]:
    return {field for _, field, _, _ in string.Formatter().parse(template) if field}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _known(word: str, frequency: Counter[str]) -> list[tuple[str, float]]:
    """Words of the records that ``word`` may mean, with the certainty of each."""
    if word in frequency:
        return [(word, 1.0)]
    longer = [known for known in frequency if len(word) > 2 and known.startswith(word)]
    if longer:
        return [(known, 0.7) for known in longer]
    near = difflib.get_close_matches(word[:40], frequency, n=2, cutoff=0.8)
    return [(known, 0.5) for known in near]


@functools.lru_cache(maxsize=1)
def _index() -> Mapping[str, Mapping[str, float]]:
    """For each id, the weight of each word of its record."""
    return {id: word_weights(record) for id, record in RECORDS.items()}


def word_weights(record: ErrorRecord) -> Mapping[str, float]:
    """The words of a record, each with the weight of the best place where it stands."""
    scores: dict[str, float] = {}
    for name, weight in WEIGHTS.items():
        for word in _words(_text(getattr(record, name))):
            scores[word] = max(scores.get(word, 0.0), weight)
    return scores


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(item if isinstance(item, str) else item.text for item in value)
    return str(value)
