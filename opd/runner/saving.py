"""When a stage saves: at the end of a step, and when the run has to end early."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from opd.config import Recipe, Stage
from opd.errors import Preempted, Stopped
from opd.runner.checkpoint import (
    Saver,
    checkpoint_directory,
    point_latest,
    read_state,
    retain,
    save_checkpoint,
    steps_in,
)
from opd.runner.live import Callbacks
from opd.runner.results import StageResult
from opd.runner.resume import RESULT, Boundary, drop_before, sync_lines
from opd.runner.stage import StageRun
from opd.teachers.pool import teacher_tensors
from opd.text import inline_code

SAVE_RATE = 50e6  # bytes per second a save is trusted to reach before one has been timed


class StageCheckpoints:
    """The checkpoints of one stage. `started`: when it would have begun, had it run in one go.

    Another stage of the recipe may be halfway, and what it has in the store is its own.
    """

    def __init__(
        self,
        run: StageRun,
        result: StageResult,
        root: Path,
        saver: Saver,
        callbacks: Callbacks,
        started: float,
        recipe: Recipe,
    ) -> None:
        self._run, self._result, self._root, self._saver = run, result, root, saver
        self._callbacks, self._started = callbacks, started
        self._recipe = recipe
        self._boundary = Boundary.of(run)
        self._untold: list[Path] = []  # saved or being saved, and not yet announced
        self.metrics: dict[str, Any] = {}  # of the newest step
        self.unreported: dict[str, Any] | None = None  # the same, until it is evaluated and written
        self.lines: Callable[[int], dict[str, int]] = lambda _: {}  # file -> lines of the stage up to a step

    def step_ended(self, metrics: dict[str, Any]) -> None:
        self._boundary = Boundary.of(self._run)
        self.metrics = self.unreported = metrics

    def check(self) -> None:
        """Raise what a save in the background has run into, and announce one that is over."""
        self._saver.check()
        self.announce()

    def wait(self) -> None:
        self._saver.wait()
        self.announce()

    def announce(self) -> None:
        """Checkpoints are announced once they are durable, in the thread that trains."""
        if self._saver.busy:
            return
        untold, self._untold = self._untold, []
        for path in untold:
            if path.is_dir():
                self._callbacks.checkpoint(path)

    def keep(self, better: bool) -> Path:
        """A checkpoint of the step that has just ended, unless there is one; it replaces older ones."""
        where = self._directory(self._result.steps)
        self._result.best = where if better else self._result.best
        if self._result.saved != self._result.steps:
            self.wait()
            self._save(background=self._run.spec.checkpoint.background)
            self.announce()
        return where

    def rescue(self, stop: BaseException, grace_left: Callable[[], float]) -> str:
        """Save what is there when a run ends early, where that makes sense; says where the weights are."""
        run, result = self._run, self._result
        run.store.commit(sync=True)
        preempted, world = isinstance(stop, Preempted), run.world
        self._saver.wait(grace_left() / 2 if preempted else None)
        last = "no checkpoint had been saved"
        if result.saved is not None:
            last = f"the last checkpoint is {self._directory(result.saved)}"
        alone = world.sharded and not isinstance(stop, Stopped)  # an error may be this rank's, and a save takes all
        if alone or world.share(lambda: result.saved == result.steps and not self._saver.busy):
            return last
        if not result.steps:
            return "no step was finished, so the student is unchanged; what was sampled is in the store"
        if run.optimiser.updates != self._boundary.updates:
            return f"step {result.steps + 1} was only half done, so it is not saved; {last}"
        if not all(world.gather(run.student.finite())):
            return f"the weights are not finite; {last}"
        seconds = self._save_seconds()
        if preempted and world.share(lambda: self._saver.busy or seconds > grace_left() / 2):
            return (
                f"a save would take longer than the grace time leaves; {last}, and the rollouts since are in the store"
            )
        return f"the weights of step {result.steps} are in {self._save(background=False)}"

    def _save(self, background: bool) -> Path:
        run, result, spec = self._run, self._result, self._run.spec.checkpoint
        run.on_phase("save")
        self._saver.wait()
        where = self._directory(result.steps)
        if run.world.leads:
            where.parent.mkdir(parents=True, exist_ok=True)
        result.saved, result.seconds = result.steps, time.monotonic() - self._started
        copied = background or run.world.sharded
        student = run.student.snapshot() if copied else run.student
        tensors, teachers = run.world.whole(run.optimiser.tensors()), teacher_tensors(run.teachers)
        if not run.world.leads:
            return where
        state = {
            "step": result.steps,
            "stage": run.spec.name,
            "seed": run.spec.seed,
            **vars(self._boundary),
            "store": run.store.position.to_json(),
            "unreported": self.unreported,
            "lines": self.lines(result.steps - (self.unreported is not None)),
            "newest": run.trajectories.newest if self.unreported else [],  # whose samples are not written yet
            "result": result.state(),
            "teachers": {name: teacher.version for name, teacher in run.teachers.items()},
        }
        if copied:
            teachers, tensors = _copied(teachers), tensors if run.world.sharded else _copied(tensors)
        card, best = model_card(run.spec, result.steps, self.metrics), result.best

        def write() -> None:
            sync_lines(self._root)
            save_checkpoint(where, student, run.stop_ids, card, tensors, state, teachers)
            point_latest(where)
            drop_before(where.parent)
            retain(where.parent, spec.keep, spec.keep_every, best)
            self._give_back(where.parent)

        self._untold.append(where)
        self._saver.save(write, background=background)
        return where

    def _give_back(self, folder: Path) -> None:
        """Segments of the store that no checkpoint needs to go on from, and that the recipe does not ask to keep."""
        spec, kept = self._run.spec, self._run.spec.store.retain
        if kept is None:
            return
        others = [folder.with_name(stage.name) for stage in self._recipe.stages if stage.name != spec.name]
        halfway = {path.name: steps_in(path) for path in others if not (path / RESULT).exists()}
        if any(not saved and self._has_begun(name) for name, saved in halfway.items()):
            return  # it goes on from its first rollout
        states = [read_state(path) for path in chain(steps_in(folder), *halfway.values())]
        counts = [state["rollouts"] for state in states]
        if counts and None not in counts:  # else the log was repaired, and nobody knows
            until = min(state["store"]["segment"] for state in states)  # where their resuming looks for a frame
            self._run.store.reclaim(min(counts) - kept * spec.rollout.prompts * spec.rollout.samples, until)

    def _has_begun(self, stage: str) -> bool:
        return any(id.startswith(f"{stage}/") for id in self._run.store.entries)

    def _directory(self, step: int) -> Path:
        return checkpoint_directory(self._root, self._run.spec.name, step)

    def _save_seconds(self) -> float:
        if self._saver.seconds is not None:
            return self._saver.seconds
        run = self._run
        beside = (*run.optimiser.tensors().values(), *teacher_tensors(run.teachers).values())
        return sum(tensor.nbytes for tensor in (*run.student.module.parameters(), *beside)) / SAVE_RATE


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def model_card(spec: Stage, step: int, metrics: Mapping[str, Any]) -> str:
    """README.md of a saved model: where it came from, in the hub's format."""
    teachers = "\n".join(f"- {inline_code(name)}: {inline_code(kind.title)}" for name, kind in spec.teachers.items())
    terms = "\n".join(f"- {inline_code(term.model_dump_json(exclude_defaults=True))}" for term in spec.objective)
    divergence = metrics.get("reverse_kl")
    known = (
        f"Reverse KL to the teachers at this step: {divergence:.4f} nats per token.\n" if divergence is not None else ""
    )
    return (
        f"---\nlibrary_name: transformers\ntags: [on-policy-distillation, opd]\n---\n"
        f"# {inline_code(spec.name)}, step {step}\n\nTrained with opd from {', '.join(map(inline_code, spec.starts))}.\n\n"
        f"Teachers:\n{teachers or '- none'}\n\nObjective:\n{terms}\n\n{known}"
    )
