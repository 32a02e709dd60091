"""A run as Jupyter shows it: the paragraph and a table with bars. Plain HTML, everything escaped, no script."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from opd.report.facts import run_facts
from opd.text import plain

CELL = "padding:2px 12px 2px 0;text-align:left;border:0"
SIDES = (("before", "#a9b1bd"), ("after", "#0a72b5"), ("teacher", "#d98200"))


def run_html(directory: Path) -> str:
    facts = run_facts(directory)
    parts = [f"<b>{_text(facts['recipe'])}</b> · {_text(facts['status'])}", _text(facts["words"])]
    for stage in facts["stages"]:
        if stage["evals"]:
            title = f"<b>{_text(stage['name'])}</b><br>" if len(facts["stages"]) > 1 else ""
            parts.append(title + _table(stage["evals"]))
    return "".join(f'<div style="margin:6px 0;max-width:76ch">{part}</div>' for part in parts)


def _table(evals: dict[str, Any]) -> str:
    head = "".join(f'<th style="{CELL}">{name}</th>' for name in ("domain", *(side for side, _ in SIDES)))
    rows = "".join(
        f'<tr><td style="{CELL}">{_text(domain)}</td>'
        + "".join(_cell(found.get(side), colour) for side, colour in SIDES)
        + "</tr>"
        for domain, found in evals.items()
    )
    return f'<table style="border-collapse:collapse"><tr>{head}</tr>{rows}</table>'


def _cell(value: float | None, colour: str) -> str:
    if value is None:
        return f'<td style="{CELL}">–</td>'
    bar = f'<div style="width:{60 * min(max(value, 0.0), 1.0):.0f}px;height:8px;background:{colour};display:inline-block"></div>'
    return f'<td style="{CELL}">{bar} {value:.1%}</td>'


def _text(text: object) -> str:
    return escape(plain(text))
