"""``sparse-mla explain``: the page of an error, from its id or from a pasted message."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TextIO

import typer

from .terminal import UNUSABLE, Json, plain, say, say_json

if TYPE_CHECKING:
    from ..errors import ErrorRecord
    from ..errors.explain import Match

_KEPT_BYTES = 4_000_000
"""Of each end of standard input: a log may be long, and the error is near its end."""

_READ_BYTES = 1 << 20
_MOST_READS = 4096  # a stream without an end is not read for ever
_SHOWN = 10


def explain(
    text: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID or MESSAGE]", help="An id, a message, or - for stdin."),
    ] = None,
    search: Annotated[
        str, typer.Option("--search", "-s", metavar="WORDS", help="Rank the errors by words.")
    ] = "",
    all_errors: Annotated[bool, typer.Option("--all", "-a", help="List every error.")] = False,
    as_json: Json = False,
) -> None:
    """Explain an error: what it means, why people meet it, and what to do.

    Takes an id, or a message as it stands in a log, with a traceback around it if that is what
    you have. Messages of SGLang, vLLM, FlashMLA and FlashInfer about the same situation are
    recognised too. Without an argument, or with -, the text is read from standard input.

    Examples:
      sparse-mla explain h-kv-not-one
      sparse-mla explain "ValueError: q must be contiguous"
      sparse-mla explain < server.log
      sparse-mla explain --search "tensor parallel heads"
      sparse-mla explain --all

    Exit codes: 0 explained, 2 nothing explains it (the nearest are suggested) or wrong usage.
    """
    from ..errors import RECORDS
    from ..errors.explain import find
    from ..errors.explain import search as search_records

    if all_errors:
        _list(list(RECORDS.values()), as_json)
        return
    if search:
        _list([match.record for match in search_records(search)][:_SHOWN], as_json, search)
        return
    pasted = _pasted(text)
    matches = find(pasted)
    if not matches:
        _unknown(pasted, as_json)
    elif as_json:
        say_json(_as_data(matches))
    else:
        _show(matches)


def _pasted(text: Sequence[str] | None) -> str:
    """The text to explain; of standard input only as much as holds any message is kept."""
    words = " ".join(text or ())
    if words.strip() not in ("", "-"):
        return words
    if not words.strip() and _is_terminal(sys.stdin):
        raise typer.BadParameter("give an id or a message, or --all, or --search WORDS")
    pasted = _both_ends(sys.stdin.buffer).decode("utf-8", "replace")
    if not pasted.strip():
        raise typer.BadParameter("standard input is empty; give an id or a message, or --all")
    return pasted


def _both_ends(stream: BinaryIO) -> bytes:
    """All of a stream, or its first and its last part."""
    head = stream.read(_KEPT_BYTES)
    tail: deque[bytes] = deque(maxlen=_KEPT_BYTES // _READ_BYTES + 1)
    dropped = False
    for part in itertools.islice(iter(lambda: stream.read(_READ_BYTES), b""), _MOST_READS):
        dropped = dropped or len(tail) == tail.maxlen
        tail.append(part)
    return (b"\n" if dropped else b"").join((head, b"".join(tail)))


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def _as_data(matches: Sequence[Match]) -> dict[str, Any]:
    from ..errors.explain import explanation

    return {
        "found": True,
        **explanation(matches[0]),
        "others": [{"id": match.record.id, "score": match.score} for match in matches[1:4]],
    }


def _unknown(pasted: str, as_json: bool) -> None:
    """Nothing explains the text: name the nearest records."""
    from ..errors.explain import suggest

    nearest = suggest(pasted)
    if as_json:
        say_json({"found": False, "suggestions": [_brief(record) for record in nearest]})
        raise typer.Exit(UNUSABLE)
    line = plain(" ".join(pasted[:200].split()), sys.stderr)
    say(f"No error matches: {line[:80]}{'...' if len(line) > 80 else ''}", err=True)
    if nearest:
        say("Nearest:", err=True)
        for record in nearest:
            say(f"  {record.id:<28} {record.title}", err=True)
    say("sparse-mla explain --all lists every error.", err=True)
    raise typer.Exit(UNUSABLE)


def _brief(record: ErrorRecord) -> dict[str, str]:
    return {
        "id": record.id,
        "type": record.type_name,
        "title": record.title,
        "message": record.message,
    }


def _list(records: Sequence[ErrorRecord], as_json: bool, words: str = "") -> None:
    if as_json:
        say_json({"errors": [_brief(record) for record in records]})
    else:
        for record in records:
            say(f"{record.id:<28} {record.title}")
        if not records:
            say(f"No error mentions: {words[:80]}", err=True)
    if not records:
        raise typer.Exit(UNUSABLE)


def _show(matches: Sequence[Match]) -> None:
    """The page of the best match, and the ids of the others."""
    from ..errors.explain import changed_lines, explanation

    page = explanation(matches[0])
    record = page["record"]
    pen = _Pen()
    pen.line(f"{record['id']}: {record['title']}", "bold")
    pen.line(f"{record['type']}: {page['message']}", "red")
    for sentence in (page["yours"], page["detail"]):
        pen.part("", sentence)
    pen.part("What it means", record["meaning"])
    pen.part("Raised when", record["trigger"])
    pen.title("When it happens")
    for point in record["situations"]:
        pen.paragraph(point, "  - ")
    pen.title("What to do")
    if page["fix"]:
        pen.paragraph(f"Fix: {page['fix']}")
    for number, way in enumerate(record["solutions"], 1):
        pen.paragraph(way["text"], f"{number:>3}. ")
        pen.code(way["code"], 7)
    lost, gained = changed_lines(record["before"], record["after"])
    pen.title("Fails")
    pen.code(record["before"], 2, lost)
    pen.title("Works")
    pen.code(record["after"], 2, gained)
    pen.title("Guard")
    pen.code(record["guard"], 2)
    pen.part("Operators", ", ".join(record["operators"]))
    pen.part("Related", ", ".join(record["related"]))
    sites = [f"{site['file']}:{site['line']}" for site in record["raised_at"]]
    pen.part("Raised in", ", ".join(sites))
    pen.part("Since", f"version {record['since']}")
    pen.part("Page", record["url"])
    pen.part("Also possible", ", ".join(match.record.id for match in matches[1:4]))


class _Pen:
    """Writes a page: in colours on a terminal, else plain; nothing in it is markup or an escape."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, emoji=False, markup=False)

    def line(self, text: str, style: str = "") -> None:
        """One line, left to the terminal to wrap."""
        from rich.text import Text

        self._console.print(Text(plain(text), style=style), soft_wrap=True)

    def title(self, text: str) -> None:
        """A heading after an empty line."""
        self.line("")
        self.line(text, "bold")

    def part(self, title: str, text: str) -> None:
        """A heading and a paragraph; nothing without text."""
        if text:
            self.title(title) if title else self.line("")
            self.paragraph(text)

    def paragraph(self, text: str, mark: str = "") -> None:
        """Text wrapped to the width of the terminal, its first line behind ``mark``."""
        for number, line in enumerate(plain(text).split("\n")):
            indent = " " * len(mark)
            first = mark if number == 0 else indent
            self.line(
                textwrap.fill(
                    line,
                    max(40, min(self._console.width, 100)),
                    initial_indent=first,
                    subsequent_indent=indent,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )

    def code(self, code: str, indent: int, changed: Collection[int] = ()) -> None:
        """Code that can be copied: never wrapped, the lines that matter marked by a comment."""
        for number, line in enumerate(plain(code).rstrip("\n").split("\n") if code else ()):
            mark = "  # <- here" if number in changed and line and not line.endswith("\\") else ""
            self.line(f"{' ' * indent}{line}{mark}" if line else "", "bold" if mark else "cyan")
