"""The error reference in a real browser: Debian's Chromium, driven by Playwright, from file://."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from error_samples import context, first_line, rich_frame, traceback_around

from sparse_mla.errors import RECORDS, error
from sparse_mla.errors.explain import find, search
from sparse_mla.errors.site import Release, build

pytest.importorskip("jinja2", reason="needs Jinja2: pip install 'sparse-mla[site]'")

MESSAGE = """\
Traceback (most recent call last):
  File "serve.py", line 8, in <module>
ValueError: sparse_mla_q8kv8_prefill_fwd requires h_kv=1, got 8
  kv has shape (4096, 8, 576): MLA keeps one latent head that all query heads share.
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("browsed")
    build(out, Release("0.1.0", "v0.1.0"))
    return out


@pytest.fixture
def open_page(browser: Any, site: Path) -> Iterator[Any]:
    """Opens a page of the site; what it complains of or asks for elsewhere fails the test."""
    complaints: list[str] = []
    windows = []

    def opened(address: str = "index.html", **options: Any) -> Any:
        windows.append(browser.new_context(**options))
        page = windows[-1].new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda fault: complaints.append(f"error: {fault}"))
        page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
        page.on(
            "request",
            lambda request: (
                None
                if request.url.startswith(("file://", "data:"))
                else complaints.append(f"asked for {request.url}")
            ),
        )
        page.goto(f"{site.as_uri()}/{address}")
        return page

    yield opened
    for window in windows:
        window.close()
    assert complaints == []


def _found_here(texts: list[str]) -> list[Any]:
    return [
        [found[0].record.id, dict(sorted(found[0].values.items()))] if found else None
        for found in map(find, texts)
    ]


FIND = """(texts) => texts.map((text) => {
  const found = search.find(text)[0];
  return found ? [found.record.id, found.values] : null;
})"""


@pytest.mark.parametrize(
    "dress",
    [
        lambda record: first_line(record, context(record, 11)),
        lambda record: traceback_around(first_line(record, context(record, 12))),
        lambda record: str(error(record.id, **context(record, 13))),
        lambda record: rich_frame(first_line(record, context(record, 14))),
        lambda record: "\x1b[31mValueError\x1b[0m: " + first_line(record, context(record, 15)),
        lambda record: record.title,
        lambda record: f" {record.id}\n",
    ],
    ids=["message", "traceback", "whole text", "frame", "coloured", "title", "id"],
)
def test_the_search_finds_what_the_terminal_finds(open_page: Any, dress: Any) -> None:
    texts = [dress(record) for record in RECORDS.values()]
    found = open_page().evaluate(FIND, texts)
    assert [match[0] for match in found] == list(RECORDS)
    assert [[id, dict(sorted(values.items()))] for id, values in found] == _found_here(texts)


OTHERS = [
    "RuntimeError: num_kv_heads must be 1, got 4",
    "Unsupported sparse-MLA prefill configuration: model=DSV4 num_heads=16 topk=512",
    "Unsupported sparse-MLA prefill configuration:\n  model=DSV4 num_heads=64 topk=192 page=64",
    "Assertion failed (prefill.cu:12): params.h_kv == 1",
    "RuntimeError: topk_indices_offset must be a CUDA tensor",
    "ValueError: block_table must be a CUDA tensor",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices",
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "IndexError: indexing is out of bounds",
    "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
    "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has",
    "ValueError: query and key must have the same dtype",
    "q must be contiguous\nkv must be contiguous\nindices must be int32, got torch.int64\n",
    # The second stands by itself, the longer first one within other words.
    "see topk_length must be int32 with shape (4,), got (3,)/torch.int64\n"
    "ValueError: q must be contiguous",
    "cannot read /srv/my calls/of today: No such file or directory",
    "hello world",
    "KeyError: 'x'",
    "",
    "(" * 100_000,
    "{0.__class__} %s [bold] \\g<0>",
    "constructor",
    "__proto__",
]


def test_messages_of_other_projects_and_nonsense(open_page: Any) -> None:
    found = open_page().evaluate(FIND, OTHERS)
    here = _found_here(OTHERS)
    assert [match and [match[0], dict(sorted(match[1].items()))] for match in found] == here
    assert sum(match is not None for match in here) == 17


def test_megabytes_take_a_moment(open_page: Any) -> None:
    page = open_page()
    for text in ("q must be contiguous\n" * 200_000, "x" * 3_000_000, "a must be , got " * 200_000):
        milliseconds = page.evaluate(
            "(text) => { const start = performance.now(); search.find(text); search.byWords(text);"
            " return performance.now() - start; }",
            text,
        )
        assert milliseconds < 10_000


@pytest.mark.parametrize(
    ("words", "id"),
    [
        ("tensor parallel 16 heads", "h-q-not-multiple-of-64"),
        ("GQA", "h-kv-not-one"),
        ("contigous", "not-contiguous"),
        ("git lfs pointer", "file-not-safetensors"),
        ("slow", "slow-backend"),
        ("bisect nan", "nan-in-output"),
        ("unsupported gpu", "gpu-unsupported"),
    ],
)
def test_words_find_records(open_page: Any, words: str, id: str) -> None:
    found = open_page().evaluate("(text) => search.byWords(text).map((m) => m.record.id)", words)
    assert id in found[:2]
    assert id in [match.record.id for match in search(words)[:2]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_pasted_traceback_is_explained_with_its_numbers(open_page: Any, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    page.get_by_label("Paste a message or a whole traceback").fill(MESSAGE)
    card = page.locator(".found")
    card.wait_for()
    assert "Your kv has 8 KV heads." in card.inner_text()
    assert "kv has shape (4096, 8, 576):" in card.inner_text()
    assert page.get_by_role("status").inner_text() == "Explained: kv has more than one head."
    assert len(page.screenshot()) > 10_000
    card.get_by_role("link", name="kv has more than one head").click()
    address, _, told = page.url.partition("#")
    assert address.endswith("/errors/h-kv-not-one/index.html")
    assert dict(parse_qsl(told)) == {"h_kv": "8", "shape": "(4096, 8, 576)"}
    assert page.locator("#yours").is_visible()
    assert "Your kv has 8 KV heads." in page.locator("#yours").inner_text()
    assert "requires h_kv=1, got 8" in page.locator(".message").inner_text()
    assert len(page.screenshot(full_page=True)) > 10_000


def test_typed_words_list_errors_and_a_click_opens_one(open_page: Any) -> None:
    page = open_page()
    page.locator("#text").press_sequentially("sliced cache stride")
    page.locator("#results li").first.wait_for()
    assert "errors mention this" in page.get_by_role("status").inner_text()
    page.locator("#results").get_by_role("link").first.click()
    assert "/errors/" in page.url
    assert page.locator("#yours").is_hidden()


def test_the_button_explains_and_nonsense_is_said_to_be_unknown(open_page: Any) -> None:
    page = open_page()
    page.locator("#text").fill("zzzzqqqq")
    page.get_by_role("button", name="Explain").click()
    assert page.get_by_role("status").inner_text().startswith("No error matches.")
    assert page.locator("#results").is_hidden()
    page.locator("#text").fill("")
    page.get_by_role("button", name="Explain").click()
    assert page.get_by_role("status").inner_text() == ""


def test_pasted_markup_stays_text(open_page: Any) -> None:
    page = open_page()
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    page.locator("#text").fill(f"backend sm90 cannot run this problem: {hostile}")
    page.locator(".found").wait_for()
    assert hostile in page.locator(".found .told").inner_text()
    assert page.locator("main img, main script").count() == 0
    page.locator(".found h2 a").click()
    assert hostile in page.locator("#yours").inner_text()
    assert page.locator("main img, main script").count() == 0


def test_every_page_opens_without_a_complaint(open_page: Any, site: Path) -> None:
    page = open_page(viewport={"width": 360, "height": 640})
    for path in sorted(site.rglob("index.html")):
        page.goto(path.as_uri())
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360, f"{path} is {width} pixels wide"


CONTRAST = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = channels(color).slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (channels(color)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  let worst = [99, ""];
  for (const node of document.querySelectorAll("body *")) {
    const says = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!says) continue;
    const [one, other] = [light(getComputedStyle(node).color), light(paper(node))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.outerHTML.slice(0, 200)];
  }
  return worst;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(open_page: Any, site: Path, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    page.locator("#text").fill(MESSAGE)
    page.locator(".found").wait_for()
    papers = "getComputedStyle(document.body).backgroundColor"
    assert (
        page.evaluate(papers) == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 19, 24)"}[scheme]
    )
    for address in ("", "errors/h-kv-not-one/index.html#h_kv=8"):
        if address:
            page.goto(f"{site.as_uri()}/{address}")
        ratio, where = page.evaluate(CONTRAST)
        assert ratio >= 4.5, where


def test_the_keyboard_reaches_everything(open_page: Any) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.type("q must be contiguous")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".found").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.found') !== null")
    page.keyboard.press("Enter")
    page.wait_for_url("**/errors/not-contiguous/index.html*")


def test_what_a_screen_reader_is_told(open_page: Any) -> None:
    page = open_page()
    for role, name in (
        ("textbox", "Paste a message or a whole traceback, or type a few words"),
        ("button", "Explain"),
        ("heading", "By operator"),
        ("heading", "By symptom"),
    ):
        assert page.get_by_role(role, name=name, exact=True).count() == 1
    for role in ("main", "banner", "contentinfo", "search", "navigation", "status"):
        assert page.get_by_role(role).count() == 1, role
    page = open_page("errors/h-kv-not-one/index.html")
    for name in ("The program that fails", "The program mended", "What to do", "Guard"):
        assert page.get_by_role("region", name=name, exact=True).count() == 1, name
    assert page.get_by_role("deletion").count() == 1
    assert page.get_by_role("insertion").count() == 1


def test_readable_without_javascript(open_page: Any) -> None:
    page = open_page(java_script_enabled=False)
    assert page.locator("form").is_hidden()
    assert "The search box needs JavaScript" in page.locator("main").inner_text()
    page.get_by_role("link", name="kv has more than one head").first.click()
    text = page.locator("main").inner_text()
    record = RECORDS["h-kv-not-one"]
    assert record.meaning in text
    assert record.guard.splitlines()[0] in text
    assert page.locator("#yours").is_hidden()
    assert page.get_by_role("button").count() == 0


def test_the_guard_is_copied(open_page: Any) -> None:
    page = open_page("errors/h-kv-not-one/index.html")
    page.evaluate("() => { navigator.clipboard.writeText = async (text) => { copied = text; }; }")
    page.evaluate("() => { window.copied = ''; }")
    button = page.get_by_role("region", name="Guard").get_by_role("button", name="Copy")
    button.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("copied") == RECORDS["h-kv-not-one"].guard
    page.locator("figure").first.get_by_role("button", name="Copy").click()
    assert page.evaluate("copied") == RECORDS["h-kv-not-one"].before


def test_the_served_site_works_under_its_policy(browser: Any) -> None:
    """The server's headers allow the site's own script and style, and nothing else."""
    for name in ("uvicorn", "starlette"):
        pytest.importorskip(name, reason=f"needs {name}: pip install 'sparse-mla[site]'")
    program = "from sparse_mla.cli import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", program, "errors", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    window = browser.new_context()
    try:
        assert child.stdout is not None
        server = child.stdout.readline().split(" ")[0]
        complaints: list[str] = []
        page = window.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(server)
        page.locator("#text").fill(MESSAGE)
        page.locator(".found h2 a").click()
        page.wait_for_url("**/errors/h-kv-not-one/index.html*")
        assert "Your kv has 8 KV heads." in page.locator("#yours").inner_text()
        assert page.evaluate("getComputedStyle(document.body).marginTop") == "0px"
        assert complaints == []
        page.evaluate("document.body.append(Object.assign(new Image(), { src: '/x.png' }))")
        page.wait_for_timeout(200)
        assert any("Content Security Policy" in text for text in complaints)
    finally:
        window.close()
        child.kill()
        child.wait()
