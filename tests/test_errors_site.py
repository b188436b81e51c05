"""The built error reference: complete, valid, escaped, and the same as the records."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from site_pages import Page

from sparse_mla.errors import RECORDS, ErrorRecord, Solution
from sparse_mla.errors import site as site_module
from sparse_mla.errors.explain import changed_lines, record_dict
from sparse_mla.errors.site import (
    NotASite,
    Release,
    build,
    by_symptom,
    files,
    index,
    published,
    revision_of,
)
from sparse_mla.errors.where import PACKAGE, raised_at
from sparse_mla.version import __version__

pytest.importorskip("jinja2", reason="needs Jinja2: pip install 'sparse-mla[site]'")

EACH = pytest.mark.parametrize("record", RECORDS.values(), ids=lambda record: record.id)
RELEASE = Release("0.1.0", "v0.1.0")
LARGEST = 100_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "out"
    built = build(out, RELEASE)
    paths = [path for path in out.rglob("*") if path.is_file()]
    assert built.files == len(paths)
    assert built.bytes == sum(path.stat().st_size for path in paths)
    assert built.pages == len(list(out.rglob("*.html"))) == len(RECORDS) + 2
    assert built.largest_bytes == max(path.stat().st_size for path in out.rglob("*.html"))
    assert (out / built.largest).stat().st_size == built.largest_bytes
    return out


def pages(site: Path) -> list[Page]:
    return [Page(path) for path in sorted(site.rglob("*.html"))]


def squeezed(text: str) -> str:
    return " ".join(text.replace("`", "").split())


def page_of(site: Path, id: str) -> Page:
    return Page(site / "errors" / id / "index.html")


@EACH
def test_a_page_shows_the_whole_record(site: Path, record: ErrorRecord) -> None:
    page = page_of(site, record.id)
    text = squeezed(page.text)
    for part in (
        record.id,
        record.title,
        record.message,
        record.detail,
        record.fix,
        record.meaning,
        record.trigger,
        record.guard,
        record.since,
        record.type_name,
        *record.operators,
        *record.situations,
        *(way.text for way in record.solutions),
        *(way.code for way in record.solutions),
        *record.related,
        *(RECORDS[id].title for id in record.related),
        *record.before.splitlines(),
        *record.after.splitlines(),
    ):
        assert squeezed(part) in text, part
    assert page.within["h1"] == [record.title]


@EACH
def test_the_lines_that_differ_are_marked(site: Path, record: ErrorRecord) -> None:
    lost, gained = changed_lines(record.before, record.after)
    page = page_of(site, record.id)
    before, after = record.before.splitlines(), record.after.splitlines()
    assert page.within.get("del", []) == [f"{before[n]}\n" for n in sorted(lost)]
    assert page.within.get("ins", []) == [f"{after[n]}\n" for n in sorted(gained)]


@EACH
def test_the_source_is_shown_around_the_call(site: Path, record: ErrorRecord) -> None:
    page = page_of(site, record.id)
    if record.reported_as:
        assert "No code of sparse-mla raises it" in page.text
        assert "mark" not in page.within
        return
    (place,) = raised_at()[record.id]
    assert f"{place.file}:{place.line}" in page.text
    assert f'"{record.id}"' in "".join(page.within["mark"])
    numbers = [int(n) for tag in ("span", "mark") for n in page.attributes(tag, "data-line")]
    assert sorted(numbers) == [*range(place.first_line, place.first_line + len(place.excerpt))]
    assert place.permalink("v0.1.0") in page.attributes("a", "href")


@EACH
def test_json_is_the_record(site: Path, record: ErrorRecord) -> None:
    data = json.loads((site / f"api/errors/{record.id}.json").read_text(encoding="utf-8"))
    assert data == json.loads(json.dumps(published(record, RELEASE)))
    links = [place.pop("permalink") for place in data["raised_at"]]
    assert data == json.loads(json.dumps(record_dict(record)))
    assert len(links) == (0 if record.reported_as else 1)
    for field in dataclasses.fields(record):
        if field.name in ("exception", "solutions", "reported_as"):
            continue
        value = getattr(record, field.name)
        assert data[field.name] == (list(value) if isinstance(value, tuple) else value)


def test_the_json_index_names_every_error(site: Path) -> None:
    data = json.loads((site / "api/errors/index.json").read_text(encoding="utf-8"))
    assert data == json.loads(json.dumps(index(RELEASE)))
    assert [entry["id"] for entry in data["errors"]] == list(RECORDS)
    assert (data["version"], data["revision"], data["schema_version"]) == ("0.1.0", "v0.1.0", 1)
    assert {path.stem for path in (site / "api/errors").iterdir()} == {*RECORDS, "index"}


def _schema(site: Path, name: str) -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    schema = json.loads((site / "api/schema" / name).read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator
    validator.check_schema(schema)
    return validator(schema)


def test_json_keeps_its_schema(site: Path) -> None:
    _schema(site, "index.json").validate(index(RELEASE))
    schema = _schema(site, "error.json")
    for id in RECORDS:
        schema.validate(json.loads((site / f"api/errors/{id}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", "Not A Slug"),
        ("schema_version", 2),
        ("solutions", []),
        ("solutions", [{"text": "x"}]),
        ("since", "soon"),
        ("raised_at", [{"file": "x.py", "line": 0, "end_line": 1, "permalink": "https://x#L0"}]),
        ("unheard_of", 1),
        ("guard", None),
    ],
)
def test_the_schema_refuses(site: Path, name: str, value: Any) -> None:
    data = {**published(RECORDS["q-ndim"], RELEASE), name: value}
    assert not _schema(site, "error.json").is_valid(data)


def test_the_schema_wants_every_field(site: Path) -> None:
    schema = _schema(site, "error.json")
    data = published(RECORDS["q-ndim"], RELEASE)
    for name in data:
        assert not schema.is_valid({key: value for key, value in data.items() if key != name})


def test_pages_are_valid_html(site: Path) -> None:
    html5lib = pytest.importorskip("html5lib", reason="needs html5lib")
    for path in site.rglob("*.html"):
        html5lib.HTMLParser(strict=True).parse(path.read_text(encoding="utf-8"))
    for page in pages(site):
        assert len(page.ids) == len(set(page.ids)), page.path
        levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(below - above <= 1 for above, below in itertools.pairwise(levels))
        for name in ("aria-labelledby", "aria-describedby", "for"):
            for _, given in page.elements:
                assert given.get(name, page.ids[0]) in page.ids
        assert page.attributes("html", "lang") == ["en"]
        assert len(page.within["title"][0]) > 5


def test_what_scrolls_can_be_reached_by_keyboard(site: Path) -> None:
    for page in pages(site):
        blocks = [given for tag, given in page.elements if tag == "pre"]
        assert all(given.get("tabindex") == "0" for given in blocks)


def test_links_resolve(site: Path) -> None:
    targets = {page.path.resolve(): set(page.ids) for page in pages(site)}
    for page in pages(site):
        for link in page.attributes("a", "href") + page.attributes("link", "href"):
            if link.startswith(("https://", "data:")):
                continue
            address, _, fragment = link.partition("#")
            base = site if address.startswith("/") else page.path.parent
            target = (base / address.lstrip("/")).resolve() if address else page.path.resolve()
            assert target.is_file(), f"{page.path}: {link}"
            assert not fragment or fragment in targets[target], f"{page.path}: {link}"
        for source in page.attributes("script", "src"):
            assert (page.path.parent / source).is_file()


def test_every_error_is_linked_by_operator_and_by_symptom(site: Path) -> None:
    links = Page(site / "index.html").attributes("a", "href")
    for id, record in RECORDS.items():
        assert links.count(f"errors/{id}/index.html") == 1 + len(record.symptoms), id


def test_symptoms_of_several_errors_stand_once() -> None:
    entries = [entry for _, group in by_symptom(RECORDS) for entry in group]
    names = [name for name, _ in entries]
    assert len(names) == len(set(names))
    for _, group in by_symptom(RECORDS):
        assert group == sorted(group, key=lambda entry: (entry[0].casefold(), entry[0]))
    assert any(len(ids) > 1 for _, ids in entries)


def test_nothing_is_fetched_from_outside(site: Path) -> None:
    for page in pages(site):
        loaded = [
            value
            for tag, given in page.elements
            for name, value in given.items()
            if name in ("src", "srcset", "action", "data", "poster", "ping")
            or (name == "href" and tag != "a")
        ]
        assert loaded
        assert not [url for url in loaded if "//" in url]
        assert not page.attributes("a", "target")
        assert not [name for _, given in page.elements for name in given if name.startswith("on")]
    for path in (site / "assets").iterdir():
        text = path.read_text(encoding="utf-8")
        if path.name != "records.js":  # texts of errors, which name addresses
            assert "//" not in re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)
        for word in ("@import", "url(", "fetch(", "XMLHttpRequest", "innerHTML", "eval("):
            assert word not in text or path.name == "records.js"


def test_pages_are_small(site: Path) -> None:
    sizes = {path: path.stat().st_size for path in site.rglob("*") if path.is_file()}
    assert not {path.name: size for path, size in sizes.items() if size > LARGEST}
    shared = sizes[site / "assets/style.css"] + sizes[site / "assets/site.js"]
    assert max(sizes[path] for path in (site / "errors").rglob("*.html")) + shared < LARGEST


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;</pre>{{ 7*7 }}\u2028"


def _hostile() -> ErrorRecord:
    record = RECORDS["h-kv-not-one"]
    texts: dict[str, Any] = {
        field.name: getattr(record, field.name).replace("{{", "") + HOSTILE.replace("{{ 7*7 }}", "")
        for field in dataclasses.fields(record)
        if isinstance(getattr(record, field.name), str) and field.name not in ("id", "reported_as")
    }
    lists = {
        name: (*getattr(record, name), HOSTILE)
        for name in ("situations", "operators", "symptoms", "foreign", "needs")
    }
    return dataclasses.replace(
        record, **texts, **lists, solutions=(Solution(HOSTILE, HOSTILE),), related=()
    )


def test_markup_in_a_record_stays_text(tmp_path: Path) -> None:
    out = tmp_path / "site"
    build(out, RELEASE, {"h-kv-not-one": _hostile()})
    for page in pages(out):
        assert "img" not in page.within
        assert page.within.get("script", [""]) == [""] * len(page.within.get("script", [""]))
        assert all(page.attributes("script", "src"))
        assert len(page.attributes("script", "src")) == len(page.within.get("script", []))
    page = page_of(out, "h-kv-not-one")
    assert page.text.count("<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;") > 10
    assert "{{ 7*7 }}" in page.text
    assert "49" not in page.text
    script = (out / "assets/records.js").read_text(encoding="utf-8")
    assert "<" not in script
    assert "\u2028" not in script
    data = json.loads(script.removeprefix("const records = ").rstrip(";\n"))
    assert data["records"][0]["title"].endswith("</pre>\u2028")
    published_text = (out / "api/errors/h-kv-not-one.json").read_text(encoding="utf-8")
    assert json.loads(published_text)["symptoms"][-1] == HOSTILE


def test_permalinks_lead_to_lines_of_that_commit() -> None:
    revision = revision_of(__version__)
    known: dict[str, list[str]] = {}
    for id, record in RECORDS.items():
        for place in published(record, Release(__version__, revision))["raised_at"]:
            found = re.fullmatch(
                r"https://[^#]+/blob/([^/]+)/([^#]+)#L(\d+)(?:-L(\d+))?", place["permalink"]
            )
            assert found
            assert found[1] == revision
            if found[2] not in known:
                known[found[2]] = _file_at(revision, found[2]).splitlines()
            lines = known[found[2]][int(found[3]) - 1 : int(found[4] or found[3])]
            assert f'"{id}"' in "\n".join(lines)


def _file_at(revision: str, file: str) -> str:
    root = PACKAGE.parent
    if not re.fullmatch("[0-9a-f]{40}", revision):  # changed since the commit, or no checkout
        return (root / file).read_text(encoding="utf-8")
    command = ["git", "-C", str(root), "show", f"{revision}:{file}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_without_a_checkout_links_name_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "sparse_mla"
    package.mkdir()
    monkeypatch.setattr(site_module, "PACKAGE", package)
    assert revision_of("1.2.3") == "v1.2.3"

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("init")
    except FileNotFoundError:
        pytest.skip("git is not installed")
    (package / "a.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    assert revision_of("1.2.3") == git("rev-parse", "HEAD")
    (package / "a.py").write_text("\nx = 1\n")
    assert revision_of("1.2.3") == "v1.2.3"


def test_an_earlier_site_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "site"
    build(out, RELEASE)
    build(out, Release("0.2.0", "abc"))
    assert "sparse-mla 0.2.0" in (out / "index.html").read_text(encoding="utf-8")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    for other in ("mine", "file"):
        with pytest.raises(NotASite, match="holds something else"):
            build(tmp_path / other, RELEASE)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_page_that_cannot_be_made_leaves_no_half_of_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no data")

    monkeypatch.setattr(site_module, "search_data", fails)
    with pytest.raises(RuntimeError, match="no data"):
        build(tmp_path / "site", RELEASE)
    assert not (tmp_path / "site").exists()


def test_two_builds_are_the_same_bytes() -> None:
    assert dict(files(RELEASE)) == dict(files(RELEASE))
