"""What an error record is, and the exceptions that carry one."""

from __future__ import annotations

import math
import os
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DOCS_URL = "https://sparse-mla.github.io"
"""Where the built error reference is published; ``SPARSE_MLA_DOCS_URL`` overrides it."""

_LONGEST_VALUE = 4000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Solution:
    """One way out, in the order to try them."""

    text: str
    code: str = ""


@dataclass(frozen=True)
class ErrorRecord:
    """One error, declared once; the exception's text, the pages and the JSON come from it.

    ``message``, ``detail`` and ``fix`` are ``str.format`` templates over the context of the raising
    site; ``yours`` is one over the fields of ``message`` alone, which a pasted first line fills.
    """

    id: str  # slug, never reused
    exception: type[SparseMLAError]
    title: str
    message: str  # the first line, the text that users paste into a search box
    detail: str  # one sentence or two: what these values mean
    fix: str  # what to change, first thing to try
    meaning: str
    trigger: str  # the exact condition
    situations: tuple[str, ...]
    solutions: tuple[Solution, ...]
    before: str  # a program that raises exactly this id
    after: str  # the same program mended
    related: tuple[str, ...]
    operators: tuple[str, ...]
    since: str
    symptoms: tuple[str, ...] = ()  # words people search for that are not in the text
    foreign: tuple[str, ...] = ()  # regular expressions for other projects' messages
    needs: tuple[str, ...] = ()  # what the examples need: "cuda", "hopper", ...
    yours: str = ""  # what the values of a pasted message say about the reader's call
    guard: str = ""  # a few lines for the caller's code that meet the fault before the call does
    reported_as: str = ""  # what others raise: set where no code of this package raises the record

    @property
    def type_name(self) -> str:
        """The exception that a user sees."""
        return self.reported_as or self.exception.__name__


class SparseMLAError(Exception):
    """Base of every error of this library: ``id``, ``context``, ``url``, ``to_dict()``."""

    record: ErrorRecord
    context: dict[str, Any]

    def __init__(self, record: ErrorRecord, context: Mapping[str, Any]) -> None:
        self.record = record
        self.context = {key: _plain(value) for key, value in context.items()}
        lines = (
            fill(record.message, self.context).replace("\n", " "),
            fill(record.detail, self.context).replace("\n", "\n  "),
            "Fix: " + fill(record.fix, self.context).replace("\n", "\n  "),
            f"More: sparse-mla explain {record.id}",
        )
        super().__init__("\n  ".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.record, self.context)

    @property
    def id(self) -> str:
        """The slug of the record, for programs and for ``sparse-mla explain``."""
        return self.record.id

    @property
    def url(self) -> str:
        """The page of this error in the published reference."""
        return url_of(self.record.id)

    def to_dict(self) -> dict[str, Any]:
        """The error as plain data that any JSON reader takes, for logs and dashboards."""
        text = str(self)
        return {
            "id": self.id,
            "type": type(self).__name__,
            "message": text.partition("\n")[0],
            "text": text,
            "context": {key: _jsonable(value) for key, value in self.context.items()},
            "url": self.url,
        }


class ContractError(SparseMLAError, ValueError):
    """An input does not meet an operator's contract."""


class BackendError(SparseMLAError, RuntimeError):
    """A backend cannot run here or cannot run this problem."""


class FileError(SparseMLAError, ValueError):
    """A file is not what it should be."""


class SlowBackendWarning(UserWarning):
    """A call ran on a slower backend than the user may expect; the text is that of its record."""

    id = "slow-backend"


def url_of(id: str) -> str:
    """The page of record ``id`` in the published reference."""
    base = os.environ.get("SPARSE_MLA_DOCS_URL", DOCS_URL).rstrip("/")
    return f"{base}/errors/{id}/"


class _Values(dict[str, str]):
    """Shows a value that the raising site forgot as ``?``: a gap must not hide the error itself."""

    def __missing__(self, key: str) -> str:
        return "?"


def fill(template: str, values: Mapping[str, Any]) -> str:
    """``template`` with its fields filled; control characters in them are shown, not obeyed."""
    shown = _Values((key, visible(str(value))) for key, value in values.items())
    return string.Formatter().vformat(template, (), shown)


def visible(text: str) -> str:
    """``text`` cut to length; control and direction characters escaped, not line feed and tab."""
    if len(text) > _LONGEST_VALUE:
        text = f"{text[:_LONGEST_VALUE]} ... ({len(text)} characters)"
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _plain(value: Any) -> Any:
    """Context holds shapes, dtypes, devices and numbers, never a tensor."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    try:
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"a tensor of shape {_plain(tuple(value.shape))} and dtype {value.dtype}"
        return visible(str(value))
    except Exception:  # an error about a strange value must not become another error
        return f"a {type(value).__name__}"


def _jsonable(value: Any) -> Any:
    """JSON has neither NaN nor infinities, and a tuple is a list there."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return value
