"""What the report's page is made of: its frame, style and tables."""

from __future__ import annotations

import html
from collections.abc import Iterable

from .drawing import COLOURS


def escape(text: object) -> str:
    """Text for HTML, whoever wrote it."""
    return html.escape(str(text))


def page(title: str, body: str) -> str:
    """The whole page around ``body``."""
    return _PAGE.format(title=escape(title), style=_style(), body=body)


def table_of(
    head: Iterable[str], rows: Iterable[Iterable[object]], texts: int = 1, keep: bool = True
) -> str:
    """A table; the first ``texts`` columns are text, the others numbers. ``Raw`` is not escaped."""
    names = "".join(
        f"<th scope=col{'' if number < texts else ' class=n'}>{escape(name)}</th>"
        for number, name in enumerate(head)
    )
    lines = []
    for row in rows:
        cells = "".join(
            f"<td{'' if number < texts else ' class=n'}>"
            f"{cell if isinstance(cell, Raw) else escape(cell)}</td>"
            for number, cell in enumerate(row)
        )
        lines.append(f"<tr>{cells}</tr>")
    kind = " class=keep" if keep else ""
    return (
        f'<div class="wide" tabindex="0"><table{kind}><thead><tr>{names}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


class Raw(str):
    """Markup that this module wrote."""

    __slots__ = ()


def _style() -> str:
    light = "; ".join(f"--{name}: {pair[0]}" for name, pair in COLOURS.items())
    dark = "; ".join(f"--{name}: {pair[1]}" for name, pair in COLOURS.items())
    return _STYLE.replace("LIGHT", light).replace("DARK", dark)


_STYLE = """
:root { color-scheme: light dark; LIGHT; --paper: #ffffff; --raised: #f6f7f9;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { :root { DARK; --paper: #0f1318; --raised: #171c23; } }
*, *::before, *::after { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.55 var(--sans); }
main { max-width: 66rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0.5rem 0; letter-spacing: -0.01em; }
h2 { font-size: 1.2rem; margin: 0 0 0.6rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.3rem; }
h1, h2, h3, p, li, figcaption, dt { overflow-wrap: anywhere; }
.lead { font-size: 1.1rem; max-width: 48rem; }
.tiles { display: grid; gap: 0.8rem; margin: 1.5rem 0;
  grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.tiles div { background: var(--raised); border: 1px solid var(--grid); border-radius: 8px;
  padding: 0.8rem 1rem; }
.tiles dd { margin: 0; font-size: 1.7rem; font-weight: 650; line-height: 1.2; color: var(--one); }
.tiles dt { color: var(--soft); font-size: 0.9rem; }
figure, section { margin: 2.2rem 0 0; padding-top: 1.4rem; border-top: 1px solid var(--grid); }
.wide { overflow-x: auto; }
.wide:focus-visible { outline: 2px solid var(--one); outline-offset: 2px; }
svg { display: block; width: 100%; min-width: 27rem; max-width: 48rem; height: auto; }
figcaption { color: var(--soft); font-size: 0.92rem; max-width: 48rem; margin-top: 0.4rem; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.25rem 0.9rem 0.25rem 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
th.n, td.n { text-align: right; }
td:first-child, td.n, .keep td { white-space: nowrap; }
li { margin: 0.25rem 0; max-width: 48rem; }
pre { background: var(--raised); border: 1px solid var(--grid); border-radius: 6px;
  padding: 0.7rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { figure, section { break-inside: avoid; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body><main>
{body}
</main></body>
</html>
"""
