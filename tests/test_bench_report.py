"""The report, the results files and the README's figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench_results import OURS, PEER, results, row, times

from sparse_mla.benchmarks import furniture, plots, readme, report, table
from sparse_mla.benchmarks import results as files
from sparse_mla.benchmarks.results import ResultsError

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))


def many() -> dict[str, Any]:
    return results(
        row(),
        row(870.0, s_kv=8192),
        row(400.0, tp=4, h_q=32),
        row(900.0, pattern="topk"),
        row(700.0, s_q=128),
        row(20.0, s_q=1),
    )


@pytest.fixture(scope="module")
def page() -> str:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-mla[plot]'")
    return report.page(many())


def test_the_page_holds_every_plot_and_table(page: str) -> None:
    plots = re.findall(r'<figure id="(\w+)">', page)
    assert plots == [
        "context", "heads", "roofline", "speedup", "queries", "patterns", "accuracy", "outliers",
    ]  # fmt: skip
    for heading in ("Every figure", "Ceilings", "Peers", "Selections", "How it was measured"):
        assert f"<h2>{heading}</h2>" in page
    for text in (
        "sparse-mla bench -o results.json", "0123456789ab", "not there", "1755 MHz", "691.30 W",
        "800 TFLOPS, 50% of the FP8 matmul in the same run",
        "2.00 times as fast as flash-mla-bf16", "46.0 µs",
    ):  # fmt: skip
        assert text in page, text


def test_the_page_needs_nothing_from_elsewhere(page: str) -> None:
    for address in re.findall(r'(?:src|href)="?([^"\s>]+)', page):
        assert address.startswith("#"), address
    assert "<script" not in page
    assert "@import" not in page
    assert set(re.findall(r"url\(([^)]{0,9})", page)) <= {
        address[:9] for address in re.findall(r"url\((#[^)]*)", page)
    }


def test_every_id_is_there_once_and_every_reference_meets_one(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert wanted <= set(ids)


def test_the_page_is_valid_html(page: str) -> None:
    html5lib = pytest.importorskip("html5lib", reason="needs html5lib, from pip")
    parser = html5lib.HTMLParser(strict=True)
    parser.parse(page)


def test_plots_follow_the_readers_scheme(page: str) -> None:
    from sparse_mla.benchmarks.drawing import COLOURS

    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert "var(--one)" in drawn
    assert not [light for light, _ in COLOURS.values() if light in drawn]
    assert set(re.findall(r"#[0-9a-fA-F]{6}\b", drawn)) == set()
    assert "prefers-color-scheme: dark" in page


def test_text_of_others_is_escaped(page: str) -> None:
    assert "sigma &lt;1&gt;" in page
    assert "<1>" not in page


def test_a_wrong_figure_is_named_and_not_plotted() -> None:
    pytest.importorskip("matplotlib")
    found = results(row(), row(870.0, s_kv=8192))
    for entry in found["prefill"][1]["moods"].values():
        entry["peers"][OURS]["fault"] = "lse of query 3 is off"
        entry["peers"][PEER]["fault"] = "lse of query 3 is off"
    page = report.page(found)
    assert "lse of query 3 is off" in page
    assert '<figure id="context">' not in page  # one right context is no line
    assert "WRONG: lse of query 3 is off" in table.text(found)


def test_results_without_a_right_figure_still_make_a_page() -> None:
    pytest.importorskip("matplotlib")
    found = results()
    found["prefill"], found["accuracy"] = [], None
    assert "No backend gave a right figure" in report.page(found)


def test_the_report_is_written_with_its_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = report.write(results(row(), row(s_kv=8192)), tmp_path / "new" / "report")
    names = {file.name for file in written}
    assert names >= {"report.html", "context.png", "speedup.png", "accuracy.png", "roofline.png"}
    assert {file.name for file in written[0].parent.iterdir()} == names
    assert all(file.read_bytes()[:4] == b"\x89PNG" for file in written[1:])
    assert b"2026-12-01-nvidia-h200.json sha256 " in (written[1]).read_bytes()


def test_speed_up_is_the_median_of_the_rounds_ratios() -> None:
    mine, other = times(1.0, 2.0, 4.0), times(3.0, 4.0, 4.0)
    assert table.speedup(mine, other) == 2.0  # 3, 2 and 1


def test_of_a_peer_with_rounds_of_its_own_it_is_the_ratio_of_medians() -> None:
    """Its rounds are not the last of ours: 8 over 2, and not 8 over 2 and over 4."""
    pytest.importorskip("matplotlib")
    assert table.speedup(times(1.0, 2.0, 4.0), times(8.0, 8.0)) == 4.0
    (plot,) = (plot for plot in plots.plots(many()) if plot.id == "speedup")
    assert "over ours; of medians for a peer with rounds of its own" in plot.caption


def test_the_table_as_text() -> None:
    lines = table.text(results()).splitlines()
    assert lines[1].split() == [
        "v32-tp1-q4096-kv32k-uniform", "burst", "sm90", "2920.0", "2920.0", "2920.0", "800", "1.60",
        "50.0%", "0.0200", "1512",
    ]  # fmt: skip
    assert lines[2].endswith("0.0200  1512  2.00 x as fast")
    assert "ceilings, burst: fp8 matmul 1,600 TFLOPS, copy 4 TB/s" in lines
    assert "not run: sglang-q8kv8: not there" in lines


def test_a_ceiling_that_is_unsteady_is_marked_wherever_it_counts() -> None:
    pytest.importorskip("matplotlib")
    found = results()
    found["ceilings"]["sustained"]["fp8_matmul"] |= times(0.740, 0.834, 0.844)
    mark = "(unsteady: p90 is 1.14 times p10)"
    assert f"ceilings, sustained: fp8 matmul 1,600 TFLOPS {mark}, copy 4 TB/s" in table.text(found)
    assert "ceilings, burst: fp8 matmul 1,600 TFLOPS, copy 4 TB/s" in table.text(found)
    block = readme.block("x.json", found)
    assert f"50% of the FP8 matmul in the same run {mark};" in block
    assert "Unsteady: the matmul's times spread" in block
    assert "nsteady" not in readme.block("x.json", results())
    assert report.page(found).count("<td class=n>unsteady</td>") == 1
    found["machine"]["device"] = "cpu"  # where shares are of a matmul in the same round
    assert mark not in report.lead(found)


def test_kernels_of_the_accuracy_tables_are_named() -> None:
    pytest.importorskip("matplotlib")
    found = results()
    shown = "sm90 (prefill-h64-d576) 0.0200; sm90, 16 heads (prefill-h16-d576, 128 rows) 0.0300"
    assert shown in table.accuracy_text(found["accuracy"])
    page = report.page(found)
    assert "<li>sm90 (prefill-h64-d576)</li>" in page
    assert "<li>sm90, 16 heads (prefill-h16-d576, 128 rows)</li>" in page
    for part in (*found["accuracy"]["kinds"], *found["accuracy"]["scales"]):
        for entry in part["methods"].values():  # as in files of before
            entry.pop("kernels", None)
            entry.pop("rows", None)
    assert "sm90 0.0200; sm90, 16 heads 0.0300" in table.accuracy_text(found["accuracy"])
    assert "Kernels that ran" not in report.page(found)


def test_clocks_are_those_counted_and_files_without_them_have_no_column() -> None:
    pytest.importorskip("matplotlib")
    found = results()
    page = report.page(found)
    assert page.count("<td class=n>1,512</td>") == 2  # both moods
    assert page.count("<td class=n>1,623</td>") == 2  # and of their matmuls
    for entry in found["prefill"][0]["moods"].values():
        del entry["sm_mhz"]
    for entries in found["ceilings"].values():
        for entry in entries.values():
            del entry["sm_mhz"], entry["unsteady"]
    assert files.schema.first_fault(found) is None
    assert "MHz" not in table.text(found)
    assert "1,512" not in report.page(found)


def test_a_cpus_rates_are_in_its_units() -> None:
    found = results(row(0.2))
    found["machine"]["device"] = "cpu"
    lines = table.text(found).splitlines()
    assert "GFLOP/s" in lines[0]
    assert lines[1].split()[6:8] == ["200", "0.40"]
    assert "ceilings, burst: fp8 matmul 1,600,000 GFLOP/s, copy 4e+03 GB/s" in lines


def test_a_cpus_times_that_spread_are_warned_of() -> None:
    found = results(row(0.2))
    found["machine"]["device"] = "cpu"
    warning = "times spread: other programs use these cores; OMP_WAIT_POLICY=passive helps then"
    peers = found["prefill"][0]["moods"]["sustained"]["peers"]
    peers[OURS] |= times(151.0, 200.0, 302.0)
    assert warning not in table.text(found).splitlines()
    peers[OURS] |= times(151.0, 200.0, 302.1)
    assert table.text(found).splitlines().count(warning) == 1
    found["machine"]["others_share"] = 0.48
    (line,) = (line for line in table.text(found).splitlines() if "other programs" in line)
    assert line.startswith("figures mislead, 48% of the cores' time went elsewhere")
    found["machine"]["others_share"] = 0.02
    peers[OURS] |= times(151.0, 200.0, 302.0)
    assert "other programs" not in table.text(found)
    peers[OURS] |= times(151.0, 200.0, 302.1)
    found["machine"]["others_share"] = 0.48
    found["machine"]["device"] = "cuda"
    assert "other programs" not in table.text(found)


def test_tables_right_align_numbers_and_escape() -> None:
    text = furniture.table_of(("a", "b"), [("<x>", 1), (furniture.Raw("<b>y</b>"), 2)])
    assert "<td>&lt;x&gt;</td><td class=n>1</td>" in text
    assert "<td><b>y</b></td>" in text


def test_a_file_is_named_by_day_and_card_and_read_back(tmp_path: Path) -> None:
    written = files.write(tmp_path, results())
    assert written == tmp_path / "2026-12-01-nvidia-h200.json"
    assert files.load(written) == results()
    assert [file.name for file in tmp_path.iterdir()] == [written.name]
    assert "[2.0, 2.1, 2.1]" in written.read_text()
    on_cpu = results()
    on_cpu["machine"] |= {"device": "cpu", "name": "AMD EPYC 9R14"}
    assert files.file_name(on_cpu) == "2026-12-01-cpu-amd-epyc-9r14.json"


def test_a_fault_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.write(tmp_path / "r.json", results())
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write(file, {**results(), "host": float("nan")})

    def full(self: Path, *_: Any, **__: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    for step in ("write_text", "replace"):  # the old file is touched by the rename alone
        monkeypatch.setattr(Path, step, full)
        with pytest.raises(OSError, match="No space"):
            files.write(file, results(row(1.0)))
        monkeypatch.undo()
    assert files.load(file) == results()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list, not an object"),
        ('{"schema": 7}', "has schema 7, this version reads 1"),
        ('{"tests": null}', "has schema None"),
        ('{"schema": 1, "machine": {}}', "lacks settings, ceilings, peers"),
        (json.dumps({**results(), "machine": {}}), "machine lacks date, command, device"),
        (json.dumps({**results(), "prefill": {}}), "prefill is not array"),
        (json.dumps({**results(), "peers": [7]}), r"peers\[0\] is not object"),
        (json.dumps({**results(), "more": 1}), 'has "more", which is not known'),
    ],
)
def test_an_unusable_file_says_why(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(ResultsError, match=reason):
        files.load(file)


def test_the_newest_is_by_the_date_inside(tmp_path: Path) -> None:
    for name, date, device in (
        ("a.json", "2026-12-03", "cuda"), ("b.json", "2026-12-02", "cuda"),
        ("c.json", "2026-12-09", "cpu"),
    ):  # fmt: skip
        found = results()
        found["machine"] |= {"date": f"{date}T00:00:00+00:00", "device": device}
        files.write(tmp_path / name, found)
    assert files.newest(tmp_path)[0].name == "a.json"
    assert files.newest(tmp_path, "cpu")[0].name == "c.json"
    with pytest.raises(ResultsError, match="no results of a cuda device"):
        files.newest(tmp_path / "nowhere")


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_results_kept_here_are_whole_and_right(file: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema, from pip")
    schema = ROOT / "sparse_mla/benchmarks/results.schema.json"
    found = files.load(file)
    jsonschema.validate(found, json.loads(schema.read_text()))
    assert file.name == files.file_name(found)
    assert found["machine"]["commit"]
    assert [row for row in table.rows(found) if row.figure["fault"]] == []


def test_the_readmes_figures_are_those_of_the_newest_file() -> None:
    file, found = files.newest(ROOT / readme.FOLDER)
    text = (ROOT / "README.md").read_text()
    assert readme.replaced(text, readme.block(file.name, found)) == text, (
        "run python -m sparse_mla.benchmarks.readme"
    )
    assert files.source(found).encode() in (ROOT / readme.PICTURE).read_bytes()


def test_a_picture_of_other_results_of_the_same_day_and_card_is_told_apart(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    old, new = many(), many()
    new["prefill"][0]["moods"]["burst"]["peers"][OURS]["tflops"] = 801.0
    assert files.file_name(old) == files.file_name(new)
    picture = report.write(old, tmp_path)[1].read_bytes()
    assert files.source(old).encode() in picture
    assert files.source(new).encode() not in picture
    assert files.source(files.load(files.write(tmp_path, old))) == files.source(old)


def test_the_picture_and_the_block_are_written_from_the_same_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / readme.FOLDER).mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"{readme.BEGIN}\n{readme.END}\n")
    file = files.write(tmp_path / readme.FOLDER, many())
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0
    assert files.source(many()).encode() in (tmp_path / readme.PICTURE).read_bytes()
    (tmp_path / readme.PICTURE).write_bytes(report.drawing.png(readme._plot(many()), file.name))
    assert readme.main(["--check"]) == 1
    assert f"{readme.PICTURE}: not of {file.name}" in capsys.readouterr().out
    files.write(file, results(row(801.0), row(870.0, s_kv=8192)))
    assert readme.main(["--check"]) == 1
    assert f"README.md and {readme.PICTURE}: not of" in capsys.readouterr().out


def test_the_block_follows_the_figures() -> None:
    block = readme.block("x.json", results())
    assert "| DeepSeek-V3.2, TP 1: 4,096 queries, 128 heads, topk 2,048 of 32,768 rows |" in block
    assert "| 2,920 | 800 | 1.60 | 2.00 × | 0.0200, 0.0200 |" in block
    assert "(benchmarks/results/x.json)" in block
    assert "`sm90`: our Hopper backend" in block
    assert "Gathered TB/s: bytes of the rows that queries select, once a query" in block
    assert readme.block("x.json", results(row(801.0))) != block
    wrong = results()
    wrong["prefill"][0]["moods"]["sustained"]["peers"][PEER]["fault"] = "off"
    assert "| 800 | 1.60 |  | 0.0200 |" in readme.block("x.json", wrong)


def test_the_block_is_replaced_between_its_markers() -> None:
    text = f"a\n{readme.BEGIN}\nold\n{readme.END}\nb"
    assert readme.replaced(text, "new") == "a\nnew\nb"
    for broken in ("a", readme.BEGIN, f"{readme.END}{readme.BEGIN}", text + text):
        with pytest.raises(ValueError, match="wants one"):
            readme.replaced(broken, "new")


def test_the_readme_command_checks_and_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert readme.main(["--check"]) == 0
    assert readme.main(["--chekc"]) == 2
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    assert readme.main([]) == 2
    assert "has no results of a cuda device" in capsys.readouterr().err
