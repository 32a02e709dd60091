"""The live panel on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from opd.training.progress import Progress, sparkline

METRICS = {
    "step": 1, "loss": 0.5, "reverse_kl": 0.25, "kl/maths": 0.25, "response_length": 4.0, "truncated": 0.5, "tokens": 100,
    "time/sample": 0.1, "time/score": 0.1, "time/update": 0.1,
}  # fmt: skip


def shown(terminal: bool, directory: Path) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with Progress(console, directory / "log.txt") as progress:
        progress.phase("loading")
        progress.start_stage("main", 3)
        for step in (1, 2, 3):
            progress.phase("sample")
            progress.token()
            progress.step(METRICS | {"step": step})
        if progress._live is not None:
            progress._live.refresh()
        progress.say("done [really]")
    return out.getvalue()


def test_the_panel_on_a_terminal(tmp_path: Path) -> None:
    text = shown(True, tmp_path)
    for words in ("step 3/3", "reverse KL", "maths", "truncated", "tokens/s", "left", "done [really]"):
        assert words in text


def test_plain_lines_elsewhere(tmp_path: Path) -> None:
    text = shown(False, tmp_path)
    assert "main 1/3" in text
    assert "main 3/3" in text
    assert "kl/maths 0.2500" in text
    assert "\x1b" not in text
    assert (tmp_path / "log.txt").read_text().count("main ") == 3


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert len(sparkline([float(value) for value in range(1000)])) <= 40
