"""The live panel on a terminal, and plain lines elsewhere."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from opd.runner.progress import Estimate, Progress, sparkline
from tests.support.reports import METRICS


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
    for words in ("step 3/3", "KL to teacher, nats", "maths", "truncated", "tokens/s", "left", "done [really]"):
        assert words in text
    assert "pass@1" not in text  # nothing was evaluated: the numbers beside domains are divergences


def test_plain_lines_elsewhere(tmp_path: Path) -> None:
    text = shown(False, tmp_path)
    assert "main 1/3" in text
    assert "main 3/3" in text
    assert "KL to teacher 0.2500 nats (maths 0.2500)" in text
    assert "\x1b" not in text
    assert (tmp_path / "log.txt").read_text().count("main ") == 3


def test_scores_and_divergences_have_separate_columns(tmp_path: Path) -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=100), tmp_path / "log.txt") as progress:
        progress.start_stage("main", 30)
        progress.phase("sample")
        progress.evaluated(0, {"maths": 0.5})
        progress.step(METRICS)
        assert progress._live is not None
        progress._live.refresh()
        assert "pass@1, held out, before" in out.getvalue()
        progress.step(METRICS | {"step": 10, "eval/maths": 0.75})
        progress._live.refresh()
    assert "pass@1, held out, step 10" in out.getvalue()
    assert "75.0%" in out.getvalue()
    assert "held-out pass@1 (maths 75.0%)" in (tmp_path / "log.txt").read_text()


def test_the_panel_is_away_while_models_are_loaded(tmp_path: Path) -> None:
    with Progress(Console(file=io.StringIO(), force_terminal=True), tmp_path / "log.txt") as progress:
        seen = []
        for phase in ("loading", "evaluate", "sample", "loading"):
            progress.phase(phase)
            assert progress._live is not None
            seen.append(progress._live.is_started)
    assert seen == [False, True, True, False]


def test_the_time_left_comes_from_steps_like_those_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step compiles and warms up; evaluations and saves are rarer than steps, and counted apart."""
    monkeypatch.setattr("opd.runner.progress.time", SimpleNamespace(monotonic=lambda: 0.0))
    estimate = Estimate(100, {"evaluate": 20, "save": 0})
    for step, seconds in enumerate([60.0, 1.0, 1.0, 5.0, 1.0], start=1):
        estimate.step({"step": step, "time/sample": seconds / 2, "time/update": seconds / 2})
        if step == 1:
            assert math.isnan(estimate.left())
    assert estimate.left() == 95
    estimate.others = {"evaluate": [10.0], "save": [2.0]}
    assert estimate.left() == 95 + 5 * 10 + 2  # after 20, 40, 60, 80 and at the end


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert len(sparkline([float(value) for value in range(1000)])) <= 40
