"""Where the errors are raised is read from the source, and each is raised in one place."""

from __future__ import annotations

from pathlib import Path

import pytest
from error_samples import fields

from sparse_mla.errors import RECORDS
from sparse_mla.errors.where import PACKAGE, raised_at, sites_under


@pytest.mark.parametrize("id", RECORDS)
def test_raised_in_exactly_one_place(id: str) -> None:
    sites = raised_at().get(id, ())
    assert len(sites) == (0 if RECORDS[id].reported_as else 1), [
        f"{site.file}:{site.line}" for site in sites
    ]


def test_what_others_report_is_marked() -> None:
    assert {id for id, record in RECORDS.items() if record.reported_as} == {
        "illegal-memory-access",
        "nan-in-output",
        "gpu-unsupported",
        "driver-too-old",
        "out-of-memory",
    }


def test_every_raised_id_has_a_record() -> None:
    assert raised_at().keys() <= RECORDS.keys()


@pytest.mark.parametrize("id", RECORDS)
def test_the_site_gives_every_value_of_the_texts(id: str) -> None:
    record = RECORDS[id]
    needed = set(fields(f"{record.message} {record.detail} {record.fix}"))
    for site in raised_at().get(id, ()):
        if "**" not in site.keywords:
            assert needed <= set(site.keywords)


@pytest.mark.parametrize("id", RECORDS)
def test_lines_and_links_lead_to_the_call(id: str) -> None:
    for site in raised_at().get(id, ()):
        lines = (PACKAGE.parent / site.file).read_text(encoding="utf-8").splitlines()
        call = lines[site.line - 1 : site.end_line]
        assert f'"{id}"' in "\n".join(call)
        assert list(site.excerpt) == lines[site.first_line - 1 :][: len(site.excerpt)]
        assert set(call) <= set(site.excerpt)
        link = site.permalink("v0.1.0", "https://example.org/repo")
        assert link.startswith(f"https://example.org/repo/blob/v0.1.0/{site.file}#L{site.line}")


def test_reads_calls_and_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text(
        "# error('in-a-comment')\n"
        "def f(parser, id):\n"
        "    parser.error('not-ours')\n"
        "    error(id)\n"
        "    text = \"error('in-a-string')\"\n"
        "    raise error(\n"
        "        'the-one', a=1,\n"
        "        **more)\n"
    )
    (package / "broken.py").write_text("def (")
    sites = sites_under(package)
    assert list(sites) == ["the-one"]
    (site,) = sites["the-one"]
    assert (site.file, site.line, site.end_line) == ("package/a.py", 6, 8)
    assert site.keywords == ("a", "**")
    assert site.permalink("main", "R") == "R/blob/main/package/a.py#L6-L8"


def test_without_sources_there_are_no_sites(tmp_path: Path) -> None:
    assert sites_under(tmp_path / "missing") == {}
