"""Reading the pages of the built error reference."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.path = path
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.within: dict[str, list[str]] = {}  # the text of each element, by tag
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}))
        self.within.setdefault(tag, []).append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open
        assert self._open.pop() == tag, f"{self.path}: </{tag}>"

    def handle_data(self, data: str) -> None:
        self.text += data
        for tag in set(self._open):
            self.within[tag][-1] += data

    def attributes(self, tag: str, name: str) -> list[str]:
        """The values of an attribute of all elements of one kind."""
        return [given[name] for kind, given in self.elements if kind == tag and name in given]

    @property
    def ids(self) -> list[str]:
        return [given["id"] for _, given in self.elements if "id" in given]
