"""The table of the documentation that says which kernels run a shape is the plan's own."""

from __future__ import annotations

from pathlib import Path

from sparse_mla.backends.sm90_plan import Part, plan

PAGE = Path(__file__).parent.parent / "docs/kernels/sm90-few-heads.md"
HEADS = (8, 16, 20, 32, 48, 64, 80, 96, 128)
QUERIES = (1, 16, 64, 4096)
H200 = 132


def cell(parts: tuple[Part, ...]) -> str:
    return " + ".join(
        f"{part.heads_per_item}" + (f" x {part.ctas_per_item}" if part.ctas_per_item > 1 else "")
        for part in parts
    )


def test_the_table_is_the_plans() -> None:
    head, _, *rows = PAGE.read_text().split("<!-- plan -->\n")[1].split("<!--")[0].splitlines()
    assert head == "| h_q | " + " | ".join(f"s_q = {s_q}" for s_q in QUERIES) + " |"
    assert rows == [
        f"| {h_q} | " + " | ".join(cell(plan(s_q, h_q, 2048, H200)) for s_q in QUERIES) + " |"
        for h_q in HEADS
    ]
