"""A running run, as callbacks of `opd.run` and `opd.resume` see it. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.common.errors import Stopped, UserError
from opd.runner.directory import Run

if TYPE_CHECKING:
    from opd.loop.parts import StageParts
    from opd.records import Rollout

    OnStep = Callable[["LiveRun", dict[str, Any]], object]
    OnRollouts = Callable[["LiveRun", list[Rollout]], object]
    OnCheckpoint = Callable[["LiveRun", Path], object]


class LiveRun(Run):
    """A run in this process: its directory and its current objects."""

    def __init__(self, directory: Path, ask_to_stop: Callable[[], None]) -> None:
        super().__init__(directory)
        self.stage = ""  # name of the current stage
        self.step = 0  # its newest finished step
        self.rewards: Mapping[str, float | None] = {}  # rewards of the newest rollouts, by id; None: the reward failed
        self.stopping = False
        self._ask_to_stop = ask_to_stop
        self._at_work: StageParts | None = None

    @property
    def student(self) -> Any:
        """The `LanguageModel` being trained."""
        return self._stage_run.student

    def text(self, rollout: Rollout) -> str:
        """A rollout's response, decoded, without its stop token."""
        return self._stage_run.text(rollout)

    def stop(self) -> None:
        """Stop at the next safe moment. A checkpoint is saved, the call that started the run returns, and `opd.resume` can continue."""
        self.stopping = True
        self._ask_to_stop()

    @property
    def _stage_run(self) -> StageParts:
        if self._at_work is None:
            raise UserError(f"{self.directory}: no stage is at work, so there is no student. Use it inside a callback.")
        return self._at_work

    def enter(self, stage: str, step: int, at_work: StageParts | None) -> None:
        """For the pipeline: a stage begins or, without a `StageParts`, has ended."""
        self.stage, self.step, self._at_work = stage, step, at_work


@dataclass(frozen=True)
class Hooks:
    """What a Python program adds to a recipe. It is not saved: `opd.resume` needs it again."""

    on_step: OnStep | None = None
    on_rollouts: OnRollouts | None = None
    on_checkpoint: OnCheckpoint | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("on_") and value is not None and not callable(value):
                raise UserError(f"{field.name}: expected a function of the run and one thing more, got {value!r}.")


class CallbackRaised(Exception):
    """Carries an exception of a callback past all handlers of opd's own errors."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


@dataclass(frozen=True)
class Callbacks:
    """Calls the callbacks with the run."""

    hooks: Hooks
    run: LiveRun

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._call("on_step", self.hooks.on_step, dict(metrics))

    def rollouts(self, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> None:
        self.run.rewards = dict(rewards)
        self._call("on_rollouts", self.hooks.on_rollouts, list(rollouts))

    def checkpoint(self, path: Path) -> None:
        self._call("on_checkpoint", self.hooks.on_checkpoint, path)

    def _call(self, name: str, hook: Callable[[LiveRun, Any], object] | None, value: Any) -> None:
        if hook is None:
            return
        try:
            hook(self.run, value)
        except Stopped:
            raise
        except Exception as error:  # the user's code may raise anything
            error.add_note(f"raised by {name}; to continue the run: opd.resume({str(self.run.directory)!r})")
            raise CallbackRaised(error) from error
