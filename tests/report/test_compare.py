"""Runs side by side: `opd compare`."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from opd import cli
from opd.common.errors import OpdError
from opd.common.files import line_of
from opd.report.compare import compare_runs, differing
from tests.support.reports import make_run


def run_with(root: Path, right: str, keys: dict[str, Any], score: float) -> Path:
    """`right`: the marks of prompts 0, 1, … after training, 1 or 0."""
    make_run(root)
    resolved = yaml.safe_load((root / "resolved.yaml").read_text(encoding="utf-8"))
    resolved["stages"][0] |= keys
    (root / "resolved.yaml").write_text(yaml.safe_dump(resolved), encoding="utf-8")
    summary = json.loads((root / "summary.json").read_text(encoding="utf-8"))
    summary["stages"][0]["evals"]["a"]["after"] = score
    (root / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    lines = [
        {"step": step, "stage": "main", "who": "student", "domain": "a", "prompt_id": f"q/{number}", "question": f"{number}",
         "prompt": "", "response": "", "right": step > 0 and mark == "1"}
        for step in (0, 12)
        for number, mark in enumerate(right)
    ]  # fmt: skip
    (root / "answers.jsonl").write_text("".join(map(line_of, lines)), encoding="utf-8")
    return root


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        run_with(tmp_path / "low", "11000000", {"lr": 1e-4, "seed": 0}, 0.25),
        run_with(tmp_path / "high", "1011111100", {"lr": 3e-4, "seed": 0}, 0.8),
        run_with(tmp_path / "again", "10111111", {"lr": 3e-4, "seed": 1}, 0.9),
    ]


def test_scores_and_keys_that_differ(runs: list[Path]) -> None:
    found = compare_runs(runs)
    low, high, _ = found["runs"]
    assert found["keys"] == {"lr": [1e-4, 3e-4, 3e-4], "seed": [0, 0, 1]}
    assert (low["name"], low["status"], low["scores"]["a"]["score"], low["scores"]["a"]["stderr"]) == (
        "low",
        "done",
        0.25,
        0.02,
    )
    assert "flips" not in low["scores"]["a"]
    flips = {"kept": 1, "gained": 6, "lost": 1, "missed": 0, "p": 0.125}  # of eight prompts that both answered
    assert high["scores"]["a"]["flips"] == flips
    assert "flips" not in high["scores"]["b"]  # nobody kept its answers
    (group,) = found["seeds"]
    assert group["runs"] == ["high", "again"]
    assert group["keys"] == {"lr": 3e-4}
    assert group["scores"]["a"] == {
        "mean": pytest.approx(0.85),
        "deviation": pytest.approx(statistics.stdev([0.8, 0.9])),
        "n": 2,
    }


def test_keys_of_lists_and_of_pipelines() -> None:
    one = {"stages": [{"name": "x", "prompts": [{"source": "p"}, {"source": "q"}], "gate": {}}]}
    two = {"stages": [{"name": "y", "prompts": [{"source": "p"}], "gate": {}}]}
    assert differing([one, two]) == {"prompts.1.source": ["q", None]}
    three = {"stages": [{"name": "x", "lr": 1}, {"name": "y", "lr": 2}]}
    assert differing([three, {"stages": [{"name": "x", "lr": 1}, {"name": "y", "lr": 3}]}]) == {"y.lr": [2, 3]}


def test_command(runs: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["opd", "compare", *map(str, runs)])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    out = capsys.readouterr().out
    assert not leaving.value.code
    assert "80.0% ± 2.0%  +6 −1 (p 0.12)" in out
    assert "85.0% ± 7.1%" in out
    assert "right only in low" in out


def test_mistakes_and_unfinished_runs(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(OpdError, match="given twice"):
        compare_runs([*runs, runs[0]])
    with pytest.raises(OpdError, match="no such directory"):
        compare_runs([runs[0], tmp_path / "no"])
    live = make_run(tmp_path / "live", ended=False)
    last = compare_runs([runs[0], live])["runs"][1]
    assert (last["status"], last["scores"]) == ("running", {})
    (live / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(OpdError, match=r"summary\.json"):
        compare_runs([runs[0], live])
