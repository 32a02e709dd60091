"""Runs that are interrupted and go on: with real kills, and with every way a run can stand still."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

import opd
from tests.crash import RECIPE, ended, interrupt, same_run, start, written


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> opd.Run:
    """The run that nobody interrupts."""
    return opd.run(RECIPE, out=tmp_path_factory.mktemp("reference") / "run")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(json.dumps(RECIPE))
    return path


def test_three_kills_leave_no_trace(reference: opd.Run, recipe: Path, tmp_path: Path) -> None:
    draw, total, directory = random.Random(str(tmp_path)), written(reference.directory), tmp_path / "run"
    command: tuple[str | Path, ...] = ("run", recipe, "--out", directory)
    for _ in range(3):
        process = start(tmp_path / "out.txt", *command)
        killed = interrupt(process, directory, total, draw, signal.SIGKILL)
        assert ended(process) == (-signal.SIGKILL if killed else 0), (tmp_path / "out.txt").read_text()
        command = ("resume", directory)
    run = opd.resume(directory)
    same_run(run, reference)
