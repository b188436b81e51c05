"""From text that a user pastes to the record that explains it.

The text may be an id, one message, a traceback or a log of many lines, with numbers of its own;
ours or another project's. It is untrusted: cut to size, freed of control characters, and never a
format string or a pattern itself.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

from .record import ErrorRecord
from .records import RECORDS

_HEAD, _TAIL = 500_000, 1_500_000
_LONGEST_LINE = 2_000
_MOST_LINES = 20
"""Lines of a log tried against one template, the last ones; a log repeats itself."""

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;?]{0,32}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?|[@-Z\\-_])"
)
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]")
_FRAMES = str.maketrans(dict.fromkeys("│┃|╭╮╰╯─━❱", " "))
_HINT = re.compile(r"sparse-mla explain ([a-z0-9]+(?:-[a-z0-9]+)*)")
_BEFORE_MESSAGE = re.compile(r"(?:^|[\w.]*(?:Error|Exception|Warning): ?|[\"'(])$")

_SHAPE = r"(?:torch\.Size\()?[\[(][^()\[\]\n]{0,200}[\])]\)?|[^\s,()/]{1,60}"
_TOKEN = r"[^\s,()/]{1,60}"
_PATTERNS = {
    **dict.fromkeys(("shape", "got_shape", "strides", "expected"), _SHAPE),
    **dict.fromkeys(("name", "tensor", "backend", "chosen", "kernel"), r"[\w.\-\[\]]{1,60}"),
    **dict.fromkeys(("dtype", "got_dtype", "q_dtype", "kv_dtype", "type"), r"[\w.]{1,60}"),
    **dict.fromkeys(("device", "got"), r"[^\n]{1,80}?"),
    **dict.fromkeys(("h_q", "h_kv", "s_q", "s_kv", "d_qk", "kv_d_qk", "topk", "count"), _TOKEN),
    **dict.fromkeys(("query", "slot", "index", "length", "row", "bytes", "limit"), _TOKEN),
    "path": r"'[^'\n]{1,300}'|\"[^\"\n]{1,300}\"|[^\s'\"]{1,300}",
}
_PATH_WITH_SPACES = r"(?:\.{0,2}/|~)[^'\"\n]{1,300}?|[^\s'\"][^'\"\n]{0,300}?\.safetensors"
_ANYTHING = r"[^\n]{1,400}?"

_FOREIGN_SCORE = 22
"""Another project's pattern beats a template of ours with fewer literal characters than this."""
_WHOLE_LINE = 100
_HINTED = 1000
_SIMILAR = 0.75


@dataclass(frozen=True)
class Match:
    """A record that explains a text, and the values that were read from the text."""

    record: ErrorRecord
    values: dict[str, str]
    score: float


@dataclass(frozen=True)
class _Template:
    pattern: re.Pattern[str]
    anchor: str  # its longest literal piece, found by a plain search before the pattern is tried
    weight: int  # literal characters


def find(text: str) -> list[Match]:
    """The records that explain ``text``, best first; empty when none does."""
    id = text.strip()
    if id in RECORDS:
        return [Match(RECORDS[id], {}, _HINTED)]
    cleaned = clean(text)
    matches = [match for record in RECORDS.values() for match in _in_text(record, cleaned)]
    if not matches:
        matches = list(_similar(cleaned))
    best: dict[str, Match] = {}
    for match in matches:
        known = best.get(match.record.id)
        if known is None or match.score > known.score:
            best[match.record.id] = match
    return sorted(best.values(), key=lambda match: -match.score)


def clean(text: str) -> str:
    """``text`` cut to size, without escape sequences, control characters and frames."""
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]}\n{text[-_TAIL:]}"
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _UNPRINTABLE.sub(" ", _ESCAPES.sub("", text))
    return text.replace("\\n", "\n").replace('\\"', '"').translate(_FRAMES)


def _in_text(record: ErrorRecord, text: str) -> Iterator[Match]:
    hinted = any(found[1] == record.id for found in _HINT.finditer(text, max(0, len(text) - _TAIL)))
    template = _compiled(record.message)
    found = _last_line(template, text) or _wrapped(template, text)
    score = 0.0
    values: dict[str, str] = {}
    if found is not None:
        values, whole = found
        score = template.weight + whole * _WHOLE_LINE
    elif record.title.lower() in text[:_LONGEST_LINE].lower():
        score = len(record.title)
    if score == 0:
        foreign = _foreign(record, text)
        if foreign is not None:
            values, score = foreign, _FOREIGN_SCORE
    if hinted:
        score += _HINTED
    if score:
        yield Match(record, _with_detail(record, values, text), score)


def _last_line(template: _Template, text: str) -> tuple[dict[str, str], bool] | None:
    """The values in the last line that matches, and whether the message stands there by itself."""
    for line in _lines_with(template.anchor, text):
        found = template.pattern.search(line)
        if found is not None:
            whole = _BEFORE_MESSAGE.search(line[: found.start()].rstrip(" ")) is not None
            return _values(found), whole
    return None


def _lines_with(anchor: str, text: str) -> Iterator[str]:
    """The last lines that hold ``anchor``, latest first, each cut around it."""
    end = len(text)
    for _ in range(_MOST_LINES):
        at = text.rfind(anchor, 0, end)
        if at < 0:
            return
        start = max(text.rfind("\n", 0, at) + 1, at - _LONGEST_LINE)
        stop = text.find("\n", at, at + _LONGEST_LINE)
        yield text[start : at + _LONGEST_LINE if stop < 0 else stop].strip()
        end = at


def _wrapped(template: _Template, text: str) -> tuple[dict[str, str], bool] | None:
    """As `_last_line`, in a short text whose lines a terminal or a frame has wrapped."""
    if len(text) > 100_000:
        return None
    flat = " ".join(text.split())
    if template.anchor not in flat:
        return None
    return _last_line(template, flat)


def _foreign(record: ErrorRecord, text: str) -> dict[str, str] | None:
    """The values of another project's message, in the last lines of the text."""
    if not record.foreign:
        return None
    lines = _last_lines(text)
    pairs = [f"{first} {second}" for second, first in itertools.pairwise(lines)]
    for line in (*lines, *pairs):
        for pattern in record.foreign:
            found = _compiled_foreign(pattern).search(line)
            if found is not None:
                return _values(found)
    return None


@functools.lru_cache(maxsize=2)
def _last_lines(text: str, most: int = 200) -> tuple[str, ...]:
    lines = text[-most * _LONGEST_LINE :].splitlines()[-most:]
    return tuple(line[:500] for line in reversed(lines) if line and not line.isspace())


def _with_detail(record: ErrorRecord, values: dict[str, str], text: str) -> dict[str, str]:
    """``values`` and those that the lines after our own message hold."""
    detail = _compiled(record.detail)
    if len(detail.anchor) < 8:
        return values
    found = _last_line(detail, text) or _wrapped(detail, text)
    return values if found is None else {**found[0], **values}


def _values(found: re.Match[str]) -> dict[str, str]:
    return {
        name: value.strip().strip("'\"").strip()
        for name, value in found.groupdict().items()
        if value
    }


@functools.lru_cache(maxsize=512)
def _compiled(template: str) -> _Template:
    """A template as a pattern: its text with any spacing, its fields by the kind of value."""
    parts, literals, seen = [], [""], set()
    pieces = list(string.Formatter().parse(template))
    for number, (literal, field, _, _) in enumerate(pieces):
        parts.append(r"\s+".join(re.escape(word) for word in re.split(r"\s+", literal)))
        literals.append(literal)
        if field is None:
            continue
        pattern = _PATTERNS.get(field, _ANYTHING)
        if field == "path" and literal:  # it begins where the words before it end
            pattern += f"|{_PATH_WITH_SPACES}"
        last = number == len(pieces) - 1
        if last and pattern.endswith("}?"):
            pattern = pattern[:-1] + r"(?=\s|$)"
        parts.append(f"(?P={field})" if field in seen else f"(?P<{field}>{pattern})")
        seen.add(field)
    return _Template(
        pattern=re.compile("".join(parts)),
        anchor=max((literal.strip() for literal in literals), key=len),
        weight=sum(len(literal.strip()) for literal in literals),
    )


@functools.lru_cache(maxsize=512)
def _compiled_foreign(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _similar(text: str) -> Iterator[Match]:
    """Records whose message is nearly a line of the text, as when a version words it otherwise."""
    lines = [line for line in _last_lines(text, 60) if 20 <= len(line) <= 400]
    for record in RECORDS.values():
        plain = _without_fields(record.message)
        for line in lines:
            message = re.sub(r"^.*?\b\w*(?:Error|Exception|Warning): ", "", line)
            matcher = difflib.SequenceMatcher(None, plain, message, autojunk=False)
            if matcher.real_quick_ratio() >= _SIMILAR and matcher.quick_ratio() >= _SIMILAR:
                ratio = matcher.ratio()
                if ratio >= _SIMILAR:
                    yield Match(record, {}, ratio)


def _without_fields(template: str) -> str:
    return "".join(
        literal + ("0" if field else "")
        for literal, field, _, _ in string.Formatter().parse(template)
    )
