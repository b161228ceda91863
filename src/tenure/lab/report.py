"""The explanation as one HTML page that needs nothing beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tenure.lab.plots import Chart, svg

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2937;--soft:#6b7280;--line:#e5e7eb;--paper:#fff}
@media (prefers-color-scheme:dark){:root{--ink:#e5e7eb;--soft:#9ca3af;--line:#374151;--paper:#111827}}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);
 max-width:46rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.7rem;margin-bottom:.2rem}h2{font-size:1.2rem;margin-top:2.4rem}p.lead,small{color:var(--soft)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.93rem}
th,td{padding:.35rem .6rem;border-bottom:1px solid var(--line);text-align:right}
th:first-child,td:first-child{text-align:left}svg{width:100%;height:auto}
"""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a few sentences, and what shows it."""

    title: str
    words: tuple[str, ...]
    charts: tuple[Chart, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    """Its head first."""


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(lead)}</p>',
    ]
    for section in sections:
        parts.append(f"<section><h2>{escape(section.title)}</h2>")
        parts += [f"<p>{escape(words)}</p>" for words in section.words]
        parts += [f"<figure>{svg(chart)}</figure>" for chart in section.charts]
        parts += [_table(section.table)] if section.table else []
        parts.append("</section>")
    return "\n".join([*parts, "</body></html>"])


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = (
        "".join(f"<{'td' if n else 'th'}>{escape(cell)}</{'td' if n else 'th'}>" for cell in row)
        for n, row in enumerate(rows)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in body)}</tbody></table>"
