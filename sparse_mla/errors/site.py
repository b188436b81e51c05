"""The error reference as a folder of files: pages, a search that needs no server, JSON.

Everything comes from the records and from the source that raises them. Texts are escaped by the
templates; nothing here puts HTML together.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from .explain import SCHEMA_VERSION, changed_lines, record_dict
from .record import DOCS_URL, ErrorRecord
from .records import RECORDS
from .search_data import pieces, search_data
from .where import PACKAGE, SOURCE_URL, Site, raised_at

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).with_name("templates")
ASSETS = ("style.css", "site.js")
SCHEMAS = ("error.json", "index.json")
INDEX = "api/errors/index.json"


class NotASite(Exception):
    """The folder to write to holds something else than an error reference."""


@dataclass(frozen=True)
class Release:
    """What the pages say of the package they were built from."""

    version: str
    revision: str  # the commit or tag that permalinks name
    repository: str = SOURCE_URL


@dataclass(frozen=True)
class Built:
    """What was written."""

    pages: int
    files: int
    bytes: int
    largest: str  # the page of most bytes
    largest_bytes: int


def revision_of(version: str) -> str:
    """The commit of an unchanged checkout around the package, else the tag of the release."""
    root = PACKAGE.parent
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", PACKAGE.name)
        if commit and changed == "":
            return commit
    return f"v{version}"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def build(out: Path, release: Release, records: Mapping[str, ErrorRecord] = RECORDS) -> Built:
    """Write the site into ``out``, a new or empty folder or one that holds an earlier site."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / INDEX).is_file())):
        raise NotASite(f"{out} holds something else than an error reference")
    sizes: dict[str, int] = {}
    for name, text in list(files(release, records)):  # all of it, before anything is written
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode("utf-8")
        path.write_bytes(data)
        sizes[name] = len(data)
    pages = {name: size for name, size in sizes.items() if name.endswith(".html")}
    largest = max(pages, key=lambda name: pages[name])
    return Built(len(pages), len(sizes), sum(sizes.values()), largest, pages[largest])


def files(
    release: Release, records: Mapping[str, ErrorRecord] = RECORDS
) -> Iterator[tuple[str, str]]:
    """Path and text of every file of the site; the index of the JSON comes last."""
    environment = _environment()
    shared = {"release": release, "docs_url": DOCS_URL, "count": len(records)}
    for name in ASSETS:
        yield f"assets/{name}", (TEMPLATES / name).read_text(encoding="utf-8")
    for name in SCHEMAS:
        yield f"api/schema/{name}", (TEMPLATES / "schema" / name).read_text(encoding="utf-8")
    page = environment.get_template("error.html")
    for record in records.values():
        values = _page_values(record, release, records)
        text = page.render(**shared, root="../../", **values)
        yield f"errors/{record.id}/index.html", text
        yield f"api/errors/{record.id}.json", as_json(published(record, release))
    yield (
        "index.html",
        environment.get_template("index.html").render(
            **shared,
            root="",
            operators=by_operator(records),
            symptoms=by_symptom(records),
        ),
    )
    yield "assets/records.js", f"const records = {compact(search_data(records))};\n"
    yield "404.html", environment.get_template("missing.html").render(**shared, root="/")
    yield INDEX, as_json(index(release, records))


def published(record: ErrorRecord, release: Release) -> dict[str, Any]:
    """A record as JSON publishes it: with links to the lines that raise it."""
    data = record_dict(record)
    for place, site in zip(data["raised_at"], raised_at().get(record.id, ()), strict=True):
        place["permalink"] = site.permalink(release.revision, release.repository)
    return data


def index(release: Release, records: Mapping[str, ErrorRecord] = RECORDS) -> dict[str, Any]:
    """Every error in brief."""
    return {
        "schema_version": SCHEMA_VERSION,
        "version": release.version,
        "revision": release.revision,
        "errors": [
            {
                name: value
                for name, value in record_dict(record).items()
                if name in ("id", "type", "title", "message", "operators", "symptoms", "url")
            }
            for record in records.values()
        ],
    }


def as_json(value: Mapping[str, Any]) -> str:
    """JSON as it is published."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def compact(value: Mapping[str, Any]) -> str:
    """JSON that a script can hold: no closing tag and no line separator within it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def by_operator(records: Mapping[str, ErrorRecord]) -> list[tuple[str, list[ErrorRecord]]]:
    """The records of each operator or set of operators, those with most records first."""
    groups: defaultdict[tuple[str, ...], list[ErrorRecord]] = defaultdict(list)
    for record in records.values():
        groups[record.operators].append(record)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [(" and ".join(operators), members) for operators, members in ordered]


def by_symptom(records: Mapping[str, ErrorRecord]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """Under each letter the symptoms, each with the ids of its records."""
    ids: defaultdict[str, list[str]] = defaultdict(list)
    for record in records.values():
        for symptom in record.symptoms:
            ids[symptom].append(record.id)
    letters: defaultdict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for symptom in sorted(ids, key=lambda symptom: (symptom.casefold(), symptom)):
        first = next((char for char in symptom if char.isalnum()), "0").upper()
        letters[first if first.isalpha() else "0-9"].append((symptom, ids[symptom]))
    return sorted(letters.items())


def _page_values(
    record: ErrorRecord, release: Release, records: Mapping[str, ErrorRecord]
) -> dict[str, Any]:
    lost, gained = changed_lines(record.before, record.after)
    title = f"Error page: {record.id}"
    return {
        "record": record,
        "texts": [pieces(text) for text in (record.message, record.detail, record.fix)],
        "filled": {name: pieces(getattr(record, name)) for name in ("yours", "detail", "fix")},
        "before": _marked(record.before, lost),
        "after": _marked(record.after, gained),
        "places": [
            _place(site, release) for site in raised_at().get(record.id, ()) if site.excerpt
        ],
        "related": [records[id] for id in record.related if id in records],
        "report": f"{release.repository}/issues/new?{urlencode({'title': title})}",
    }


def _marked(code: str, changed: set[int]) -> list[tuple[str, bool]]:
    """The lines of an example, and whether each is one of those that differ."""
    return [(line, number in changed) for number, line in enumerate(code.splitlines())]


def _place(site: Site, release: Release) -> dict[str, Any]:
    numbered: Sequence[tuple[int, str]] = list(enumerate(site.excerpt, site.first_line))
    return {
        "file": site.file,
        "line": site.line,
        "link": site.permalink(release.revision, release.repository),
        "lines": [(n, line, site.line <= n <= site.end_line) for n, line in numbered],
    }


def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["prose"] = _prose
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment


def _prose(text: str) -> list[tuple[str, bool]]:
    """The parts of a sentence, and whether each stands between backticks."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner is a character like any other
        return [(text, False)]
    return [(part, number % 2 == 1) for number, part in enumerate(parts) if part]
