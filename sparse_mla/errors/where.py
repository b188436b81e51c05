"""Where each error is raised: read from the source of this package, never typed."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE_URL = "https://github.com/sparse-mla/sparse-mla"
_AROUND = 3


@dataclass(frozen=True)
class Site:
    """One call of ``error(id, ...)``."""

    file: str  # from the root of the repository, with forward slashes
    line: int  # of the call
    end_line: int
    keywords: tuple[str, ...]  # names of the context values; "**" where some are not spelled out
    first_line: int  # of the excerpt
    excerpt: tuple[str, ...]  # the lines around it

    def permalink(self, revision: str, repository: str = SOURCE_URL) -> str:
        """The lines of the call at one commit or tag of the repository."""
        lines = f"L{self.line}"
        if self.end_line != self.line:
            lines += f"-L{self.end_line}"
        return f"{repository}/blob/{revision}/{self.file}#{lines}"


@functools.lru_cache(maxsize=1)
def raised_at() -> Mapping[str, tuple[Site, ...]]:
    """The sites of every id; an installation without sources has none."""
    return sites_under(PACKAGE)


def sites_under(package: Path) -> Mapping[str, tuple[Site, ...]]:
    """The sites in one package directory, by id."""
    found: defaultdict[str, list[Site]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError):
            continue
        file = path.relative_to(package.parent).as_posix()
        for id, call in _calls(tree):
            found[id].append(_site(file, call, source.splitlines()))
    return {id: tuple(sites) for id, sites in found.items()}


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls of ``error`` with a literal id."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and _is_error(node.func)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            yield node.args[0].value, node


def _is_error(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        module = function.value
        return function.attr == "error" and isinstance(module, ast.Name) and module.id == "errors"
    return isinstance(function, ast.Name) and function.id == "error"


def _site(file: str, call: ast.Call, lines: list[str]) -> Site:
    end = call.end_lineno or call.lineno
    first = max(1, call.lineno - _AROUND)
    return Site(
        file=file,
        line=call.lineno,
        end_line=end,
        keywords=tuple(keyword.arg or "**" for keyword in call.keywords),
        first_line=first,
        excerpt=tuple(lines[first - 1 : end + _AROUND]),
    )
