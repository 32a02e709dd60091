"""Callbacks of `opd.run` and `opd.resume`: what they see, how they stop a run, and what becomes of what they raise."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import opd
from opd.common.errors import Stopped, UserError
from tests.support.crash import same_run
from tests.support.helpers import save_tiny
from tests.support.interrupted import small


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}


def spec(models: dict[str, str], **changes: Any) -> dict[str, Any]:
    steps: dict[str, Any] = {
        "train": {"steps": 3, "lr": 1e-3},
        "checkpoint": {"every": 2, "keep": 9, "background": False},
    }
    return small(models, eval={"prompts": 0}, **steps) | changes


@pytest.fixture(scope="module")
def reference(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> opd.Run:
    return opd.run(spec(models), out=tmp_path_factory.mktemp("reference") / "run")


def test_they_see_the_run_at_work_and_change_nothing(
    models: dict[str, str], reference: opd.Run, tmp_path: Path
) -> None:
    steps, batches, saved = [], [], []

    def on_step(run: Any, metrics: dict[str, Any]) -> None:
        assert metrics == run.metrics[-1]
        assert (run.stage, run.step) == ("main", metrics["step"])
        assert sum(parameter.numel() for parameter in run.student.module.parameters()) > 0
        metrics.clear()  # a copy
        steps.append(run.step)

    def on_rollouts(run: Any, rollouts: list[opd.Rollout]) -> None:
        assert {rollout.id for rollout in rollouts} <= set(run.rollouts.entries)
        assert set(run.rewards) <= {rollout.id for rollout in rollouts}
        assert all(isinstance(run.text(rollout), str) for rollout in rollouts)
        batches.append((run.step, len(rollouts)))

    def on_checkpoint(run: Any, path: Path) -> None:
        assert (path / "manifest.json").is_file()
        saved.append(path)

    background = {"checkpoint": {"every": 2, "keep": 9}}
    run = opd.run(
        spec(models, **background),
        out=tmp_path / "run",
        on_step=on_step,
        on_rollouts=on_rollouts,
        on_checkpoint=on_checkpoint,
    )
    assert steps == [1, 2, 3]
    assert [step for step, _ in batches] == [0, 1, 2]
    assert sum(count for _, count in batches) == len(run.rollouts)
    assert saved == run.checkpoints
    assert type(run) is opd.Run
    same_run(run, reference)


@pytest.mark.parametrize("hook", ["on_step", "on_rollouts", "on_checkpoint"])
def test_stop_ends_the_run_as_ctrl_c_would(
    models: dict[str, str], reference: opd.Run, tmp_path: Path, hook: str
) -> None:
    calls = []

    def stop(run: Any, what: Any) -> None:
        calls.append(run.step)
        if len(calls) == (1 if hook == "on_checkpoint" else 2):
            run.stop()

    run = opd.run(spec(models), out=tmp_path / "run", **{hook: stop})
    assert run.summary["status"] == "stopped"
    (stage,) = run.summary["stages"]
    assert stage["steps"] == (1 if hook == "on_rollouts" else 2)
    later: list[int] = []
    same_run(opd.resume(run.directory, on_step=lambda run, metrics: later.append(run.step)), reference)
    assert later == list(range(stage["steps"] + 1, 4))


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("on_step", OSError(28, "No space left on device")),  # ours would be a DiskError
        ("on_rollouts", MemoryError("mine")),  # and ours a TrainingError
        ("on_checkpoint", KeyError("mine")),
    ],
)
def test_what_they_raise_comes_out_as_it_was(
    models: dict[str, str], reference: opd.Run, tmp_path: Path, hook: str, error: Exception
) -> None:
    def broken(run: Any, what: Any) -> None:
        if run.step == (1 if hook == "on_rollouts" else 2):
            raise error

    with pytest.raises(type(error)) as caught:
        opd.run(spec(models), out=tmp_path / "run", **{hook: broken})
    assert caught.value is error
    assert error.__context__ is error.__cause__ is None
    assert traceback.extract_tb(error.__traceback__)[-1].name == "broken"
    assert any("opd.resume" in note for note in error.__notes__)
    run = opd.Run(tmp_path / "run")
    assert (run.summary["status"], len(run.metrics)) == ("failed", 1 if hook == "on_rollouts" else 2)
    assert run.model.name == ("step-000001" if hook == "on_rollouts" else "step-000002")
    if hook != "on_checkpoint":
        same_run(opd.resume(run.directory), reference)


def test_stopping_by_an_exception_is_a_stop(models: dict[str, str], tmp_path: Path) -> None:
    def leave(run: Any, metrics: Any) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        opd.run(spec(models), out=tmp_path / "run", on_step=leave)
    assert opd.Run(tmp_path / "run").summary["status"] == "stopped"


def test_values_that_are_not_functions_are_rejected_before_anything_is_written(
    models: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"on_step: expected a function.*got 3"):
        opd.run(spec(models), out=tmp_path / "run", on_step=3)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
