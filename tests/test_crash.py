"""Minutes of killing: `make test-crash`, with COUNT=n for more. Every run ends as the one that nobody interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import opd
from tests.crash import RECIPE, durable, ended, interrupt, kept, same_run, start, written

pytestmark = pytest.mark.crash
COUNT = int(os.environ.get("COUNT", "0")) or 40  # interruptions
WORKERS = 2
STAGES: dict[str, Any] = {
    "stages": [
        {"name": "warm", "rollout": {"data_share": 0.5, "teacher_share": 0.3}, "objective": [{"form": "cross_entropy", "on": ["data", "teacher"]}, {"form": "direct"}]},
        {"name": "distil"},
    ],
    "train": {"steps": 4, "lr": 1e-3},
    "checkpoint": {"every": 3, "keep": 1, "resume": "exact"},
}  # fmt: skip
RECIPES = {"one": RECIPE, "two": RECIPE | STAGES}


def write(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(json.dumps(recipe))
    return path


@pytest.mark.parametrize("share", range(WORKERS))
def test_kills_and_preemptions_at_random_moments(share: int, tmp_path: Path) -> None:
    name = list(RECIPES)[share % len(RECIPES)]
    draw = random.Random(os.environ.get("SEED", f"{share}"))
    reference = opd.run(RECIPES[name], out=tmp_path / "reference")
    recipe, total, left, trial = (
        write(tmp_path / "recipe.yaml", RECIPES[name]),
        written(reference.directory),
        COUNT // WORKERS,
        0,
    )
    while left > 0:
        trial += 1
        directory, log = tmp_path / f"run{trial}", tmp_path / f"log{trial}.txt"
        command: tuple[str | Path, ...] = ("run", recipe, "--out", directory)
        for _ in range(min(left, draw.randint(1, 6))):
            number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            before = durable(directory) if (directory / "resolved.yaml").exists() else {}
            process = start(log, *command)
            sent = interrupt(process, directory, total, draw, number)
            code = ended(process)
            wanted = {signal.SIGKILL: -9, signal.SIGTERM: 75, signal.SIGINT: 130}[number]
            assert code in ((wanted, 0) if sent else (0,)), (code, log.read_text())
            assert "Traceback" not in log.read_text(), log.read_text()
            kept(before, durable(directory))
            command, left = ("resume", directory), left - 1
        process = start(log, *command)
        assert ended(process) == 0, log.read_text()
        same_run(opd.Run(directory), reference)
