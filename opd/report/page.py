"""One self-contained HTML file with its script, style and data. It may not load or send anything.

Text from models is data: JSON without any `<`, shown as text nodes. The content security policy has the checksums of the
page's script and style, so no other code runs. A live page may only talk to its own server.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from opd.common.errors import UserError
from opd.common.files import json_text, write_atomic
from opd.common.text import plain
from opd.report.facts import run_facts

FILES = Path(__file__).parent / "page"
SCRIPTS = ("uplot.min.js", "core.js", "charts.js", "heat.js", "samples.js", "results.js", "browse.js", "main.js")
OF_DIAGNOSIS = ("uplot.min.js", "core.js", "charts.js", "diagnosis.js")
STYLES = ("uplot.min.css", "page.css")
SELF, NONE = "'self'", "'none'"
ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def page(runs: Sequence[Mapping[str, Any]], *, live: bool = False, stamp: str = "") -> str:
    """The page as text. `live`: it asks its server for newer data."""
    data = {"live": live, "stamp": stamp, "runs": list(runs)}
    return _html(", ".join(str(run["name"]) for run in runs), data, SCRIPTS, live=live)


def diagnosis_page(diagnosis: Mapping[str, Any]) -> str:
    """The page of a diagnosis."""
    return _html(f"diagnosis of {diagnosis['student']}", diagnosis, OF_DIAGNOSIS)


def _html(title: str, data: Mapping[str, Any], scripts: Sequence[str], *, live: bool = False) -> str:
    script, style = (
        "\n".join((FILES / name).read_text(encoding="utf-8") for name in names) for names in (scripts, STYLES)
    )
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        f"connect-src {SELF if live else NONE}; base-uri 'none'; form-action 'none'"
    )
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">\n'
        f'<title>{html.escape(plain(title))} · opd</title><link rel="icon" href="data:,">\n<style>{style}</style></head>\n'
        "<body><noscript>This page draws itself with JavaScript, from data inside the file; it loads nothing.</noscript>\n"
        f'<main id="page"></main>\n<script id="data" type="application/json">{embedded(data)}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def embedded(value: Any) -> str:
    """JSON that is safe inside HTML, in ASCII only."""
    text = json.dumps(json.loads(json_text(value)), separators=(",", ":"))
    for letter, code in ESCAPED.items():
        text = text.replace(letter, code)
    return text


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def write_report(directories: Sequence[str | Path], to: Path | None = None) -> Path:
    """Write the page of one run into its directory, or of several runs, side by side, to a file."""
    if to is None and len(directories) != 1:
        raise UserError("several runs on one page: give the output file with -o FILE.")
    target = Path(directories[0]) / "report.html" if to is None else to
    text = page([run_facts(directory) for directory in directories])
    try:
        write_atomic(target, text)
    except OSError as error:
        raise UserError(f"{str(target)!r} cannot be written: {error.strerror or error}.") from None
    return target


# A run in Jupyter: the paragraph and a table with bars, as escaped HTML without a script


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
