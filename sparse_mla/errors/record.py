"""What an error record is, and the exceptions that carry one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DOCS_URL = "https://sparse-mla.github.io"
"""Where the built error reference is published; ``SPARSE_MLA_DOCS_URL`` overrides it."""


@dataclass(frozen=True)
class Solution:
    """One way out, in the order to try them."""

    text: str
    code: str = ""


@dataclass(frozen=True)
class ErrorRecord:
    """One error, declared once: the exception text, the terminal page, the web page and the JSON come from it.

    ``message``, ``detail`` and ``fix`` are ``str.format`` templates over the context of the raising site.
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
    foreign: tuple[str, ...] = ()  # regular expressions for other projects' messages of the same situation
    needs: tuple[str, ...] = field(default=())  # what the examples need: "cuda", "hopper", ...


class SparseMLAError(Exception):
    """Base of every error of this library: ``id``, ``context``, ``url``, ``to_dict()``."""

    record: ErrorRecord
    context: dict[str, Any]

    def __init__(self, record: ErrorRecord, context: Mapping[str, Any]) -> None:
        self.record = record
        self.context = {key: _plain(value) for key, value in context.items()}
        lines = (record.message, record.detail, "Fix: " + record.fix)
        first, *rest = (line.format(**self.context) for line in lines)
        text = "\n  ".join([first, *rest, f"More: sparse-mla explain {record.id}"])
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.record, self.context)

    @property
    def id(self) -> str:
        """The slug of the record, for programs and for ``sparse-mla explain``."""
        return self.record.id

    @property
    def url(self) -> str:
        """The page of this error in the published reference."""
        base = os.environ.get("SPARSE_MLA_DOCS_URL", DOCS_URL).rstrip("/")
        return f"{base}/errors/{self.record.id}/"

    def to_dict(self) -> dict[str, Any]:
        """The error as plain data, for logs and dashboards."""
        return {
            "id": self.id,
            "type": type(self).__name__,
            "message": str(self).splitlines()[0],
            "text": str(self),
            "context": dict(self.context),
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


def _plain(value: Any) -> Any:
    """Context holds shapes, dtypes, devices and numbers, never a tensor."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item) for item in value)
    return str(value)
