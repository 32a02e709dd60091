"""Reads a run directory, whether the run is active or not; what callbacks see of a running one, and how it is stopped. Needs no torch.

run = opd.Run("runs/quickstart")
run.summary["stages"][0]["evals"], run.metrics[-1]["reverse_kl"], run.model
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from opd.common.errors import RESUME_ME, Preempted, RunDirectoryError, Stopped, UserError
from opd.common.files import is_file, json_object, lines_checked, read_lines, reading

if TYPE_CHECKING:
    from opd.loop.parts import StageParts
    from opd.records import Rollout
    from opd.store import RolloutStore

    OnStep = Callable[["LiveRun", dict[str, Any]], object]
    OnRollouts = Callable[["LiveRun", list[Rollout]], object]
    OnCheckpoint = Callable[["LiveRun", Path], object]


def model_named(name: str) -> str:
    """The model of this name. For a run directory, the model in its last checkpoint."""
    directory = Path(name)
    is_run = is_file(directory / "resolved.yaml") and not is_file(directory / "config.json")
    return str(Run(directory).model) if is_run else name


class Run:
    """A run directory, whether the run is active or not."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()  # the program may change its working directory
        with reading(self.directory):
            found = (self.directory / "resolved.yaml").is_file()
        if not found:
            raise RunDirectoryError(f"{self.directory}: not a run directory (it has no resolved.yaml).")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        from opd.report.page import run_html

        return run_html(self.directory)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One object per step, with `eval/DOMAIN` keys if it was evaluated. A damaged line raises an error that names it."""
        return self._lines("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The completions that were written down during the run."""
        return self._lines("samples.jsonl")

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """Some of the samples token by token: log-probs and likeliest tokens of student and teacher, weights, gates, advantages."""
        return self._lines("tokens.jsonl")

    @property
    def answers(self) -> list[dict[str, Any]]:
        """Answers to held-out questions at every evaluation; step 0 is before training."""
        return self._lines("answers.jsonl")

    @property
    def monitors(self) -> list[dict[str, Any]]:
        """Alarms of monitors: step, monitor, value, threshold, text, remedy, and the recipe that applies it."""
        return self._lines("monitors.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        found = read_lines(path, checked=lines_checked(self.directory))
        number = next(iter(found.damaged), None)
        if number is None and found.torn and (self.directory / "summary.json").exists():  # else it is being written
            number = len(found.whole) + 1
        if number is not None:
            raise RunDirectoryError(
                f"{path}, line {number}: the line was altered or cut off (its checksum does not match). Delete it to read the others."
            )
        return found.whole

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`. If the sealed result of a finished stage differs, the result is used, with a warning."""
        from opd.report.facts import checked_stages

        path = self.directory / "summary.json"
        if not path.exists():
            raise RunDirectoryError(f"{self.directory}: no summary.json yet; the run has not ended.")
        found = json_object(path)
        stages, differences = checked_stages(self.directory, found)
        for line in differences:
            warnings.warn(line, stacklevel=2)
        return {**found, "stages": stages}

    @property
    def checkpoints(self) -> list[Path]:
        """All checkpoints, oldest first. Each is a Hugging Face model directory."""
        from opd.recipe.paths import read_resolved
        from opd.runner.checkpoint import steps_in

        order = [stage["name"] for stage in read_resolved(self.directory)["stages"]]
        return [path for name in order for path in steps_in(self.directory / "checkpoints" / name)]

    @property
    def model(self) -> Path:
        """The newest checkpoint: the model that the run trained."""
        if not self.checkpoints:
            raise RunDirectoryError(f"{self.directory}: no checkpoint has been saved.")
        return self.checkpoints[-1]

    @cached_property
    def rollouts(self) -> RolloutStore:
        from opd.store import RolloutStore

        return RolloutStore(self.directory / "rollouts", read_only=True)


# --- A run in this process, as callbacks of `opd.run` and `opd.resume` see it ---


class LiveRun(Run):
    """A run in this process: its directory and its current objects."""

    def __init__(self, directory: Path, ask_to_stop: Callable[[], None]) -> None:
        super().__init__(directory)
        self.stage = ""  # name of the current stage
        self.step = 0  # its newest finished step
        self.rewards: Mapping[str, float | None] = {}  # rewards of the newest rollouts, by id; None: the reward failed
        self.stopping = False
        self._ask_to_stop = ask_to_stop
        self._parts: StageParts | None = None

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
        if self._parts is None:
            raise UserError(f"{self.directory}: no stage is running, so there is no student. Use it inside a callback.")
        return self._parts

    def enter(self, stage: str, step: int, parts: StageParts | None) -> None:
        """For the pipeline: a stage begins or, without a `StageParts`, has ended."""
        self.stage, self.step, self._parts = stage, step, parts


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
                raise UserError(
                    f"{field.name}: expected a function of two arguments, of which the first is the run, got {value!r}."
                )


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
        if self.hooks.on_step is not None:
            self._call("on_step", self.hooks.on_step, dict(metrics))

    def rollouts(self, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> None:
        self.run.rewards = dict(rewards)
        if self.hooks.on_rollouts is not None:
            self._call("on_rollouts", self.hooks.on_rollouts, list(rollouts))

    def checkpoint(self, path: Path) -> None:
        if self.hooks.on_checkpoint is not None:
            self._call("on_checkpoint", self.hooks.on_checkpoint, path)

    def _call(self, name: str, hook: Callable[[LiveRun, Any], object], value: Any) -> None:
        try:
            hook(self.run, value)
        except Stopped:
            raise
        except Exception as error:  # the user's code may raise anything
            error.add_note(f"raised by {name}; to continue the run: opd.resume({str(self.run.directory)!r})")
            raise CallbackRaised(error) from error


# --- Ctrl-C and SIGTERM, turned into a request that the run follows at its next token ---
#
#     Ctrl-C    `Stopped`: a checkpoint is saved; a second Ctrl-C exits at once
#     SIGTERM   `Preempted`: flush and exit within the grace time, with an exit code that means "resume me"
#
# Python runs signal handlers between bytecodes, so a long call into torch delays them. A watchdog thread sees SIGTERM at once and
# ends the process when the grace time is over. The files on disk are consistent at every moment.


MARGIN = 0.9  # usable fraction of the grace time; the rest is for the interpreter's exit


class Interrupts:
    """Use as a context manager. Outside the main thread it does nothing, and the caller keeps its own handlers."""

    def __init__(self, announce: Callable[[str], None], grace: float) -> None:
        self.grace, self._announce = grace, announce
        self._asked: int | None = None  # the first signal
        self._since, self._said = 0.0, False
        self._previous: dict[int, object] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._previous_wakeup = -1

    def check(self) -> None:
        if self._asked == signal.SIGTERM:
            if not self._said:
                self._said = True
                self._announce(
                    f"SIGTERM: saving, and exiting within {self.grace:g} s; `opd resume` continues from here"
                )
            raise Preempted
        if self._asked is not None:
            raise Stopped

    def ask(self) -> None:
        """Request a stop from the program, as Ctrl-C would. A Ctrl-C after it exits at once."""
        if self._asked is None:
            self._asked, self._since = signal.SIGINT, time.monotonic()

    @property
    def asked(self) -> int:
        """The signal that requested a stop; 0 if none did."""
        return self._asked or 0

    def obey(self, number: int) -> None:
        """Follow a signal that another rank received."""
        if self._asked is None or number == signal.SIGTERM:
            self._asked, self._since = number, self._since or time.monotonic()

    @property
    def left(self) -> float:
        """Remaining seconds of the grace time."""
        return self.grace * MARGIN - (time.monotonic() - self._since)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
            reader, writer = self._wakeup = socket.socketpair()
            writer.setblocking(False)
            self._previous_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), name="preemption", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._wakeup is None:
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._wakeup[1].close()  # the watchdog reads the end of the stream and returns
        self._wakeup = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked, self._since = number, time.monotonic()
            if number == signal.SIGINT:
                self._announce("stopping: saving a checkpoint (press Ctrl-C again to quit at once)")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _watch(self, reader: socket.socket) -> None:
        with reader:
            while signal.SIGTERM not in (heard := reader.recv(64)):
                if not heard:
                    return
            deadline = time.monotonic() + self.grace * MARGIN
            try:
                while heard:
                    reader.settimeout(max(deadline - time.monotonic(), 0.001))
                    heard = reader.recv(64)
            except TimeoutError:
                print("opd: the grace time is over; exiting now", file=sys.stderr, flush=True)
                os._exit(RESUME_ME)
