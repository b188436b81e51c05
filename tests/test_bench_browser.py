"""The report in a real browser: nothing asked for elsewhere, readable in light, dark and small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_results import results, row

from sparse_mla.benchmarks import report

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'sparse-mla[plot]'")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(report.page(results(row(), row(870.0, s_kv=8192), row(400.0, tp=4, h_q=32))))
    return file.as_uri()


# Contrast of each text with the paper behind it, of the SVG's text by its fill.
CONTRAST = """() => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if (color.match(/[\\d.]+/g).map(Number)[3] !== 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  let worst = [99, ""];
  for (const node of document.querySelectorAll("body *")) {
    const says = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!says || node.tagName === "style") continue;
    const style = getComputedStyle(node);
    const color = node instanceof SVGElement ? style.fill : style.color;
    const [one, other] = [light(color), light(paper(node))];
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < worst[0]) worst = [ratio, node.outerHTML.slice(0, 200)];
  }
  return worst;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_readable_in_light_and_dark_on_a_phone_and_a_desk(
    browser: Any, address: str, scheme: str, width: int
) -> None:
    window = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = window.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda fault: complaints.append(str(fault)))
    page.on("request", lambda request: complaints.append(request.url))
    page.goto(address)
    assert [text for text in complaints if text != address] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ratio, where = page.evaluate(CONTRAST)
    assert ratio >= 4.5, where
    papers = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert papers == {"light": "rgb(255, 255, 255)", "dark": "rgb(15, 19, 24)"}[scheme]
    assert page.get_by_role("img", name="TFLOPS by context").count() == 1
    assert page.locator("figure svg").first.bounding_box()["height"] > 150
    window.close()
