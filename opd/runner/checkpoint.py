"""Checkpoints: a Hugging Face model directory with the trainer's state and a manifest. Each one is complete or absent.

checkpoints/STAGE/step-000100/   model, optimiser.safetensors, trainer.json, manifest.json with the sha256 of every file;
                                                                  teachers/weights.safetensors, if teachers follow the student;
                                                                  modules/NAME/{weights,optimiser}.safetensors of trainable modules
                                 checkpoints/latest               a link to the newest checkpoint, replaced atomically
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from opd.common.errors import Preempted, RecipeError, RunDirectoryError, Stopped, StoreError
from opd.common.files import (
    fresh_directory,
    json_text,
    line_of,
    partial_of,
    read_lines,
    read_sealed,
    reading,
    sha256,
    sync,
    write_atomic,
    write_sealed,
)
from opd.common.http import hub_errors
from opd.common.text import first_line, inline_code
from opd.loop.learner import Optimiser
from opd.loop.metrics import StepReport
from opd.loop.parts import StageParts
from opd.models.optimisers import OPTIMISERS
from opd.recipe import Hub, Recipe, Stage
from opd.recipe.paths import RESULT, output_of
from opd.recipe.run_changes import changes_of, parts_of
from opd.runner.directory import Callbacks
from opd.runner.results import StageResult
from opd.store import Position, RolloutStore
from opd.teachers.pool import restore_teachers, teacher_tensors

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel


NAME = re.compile(r"step-(?:[0-9]{6}|[1-9][0-9]{6,})")
MANIFEST, STATE, TENSORS = "manifest.json", "trainer.json", "optimiser.safetensors"
TEACHERS = "teachers/weights.safetensors"  # weights of teachers that follow the student
MODULES, WEIGHTS = "modules", "weights.safetensors"  # each module has a folder with its weights and its optimiser


def checkpoint_directory(root: Path, stage: str, step: int) -> Path:
    return root / "checkpoints" / stage / f"step-{step:06d}"


def save_checkpoint(
    directory: Path,
    student: LanguageModel,
    stop_ids: tuple[int, ...],
    card: str,
    tensors: Mapping[str, Any],
    state: dict[str, Any],
    further: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Write under a temporary name, sync, then rename, so that a half-written checkpoint never has its final name.

    `further`: file -> tensors. These files go into subfolders because other programs read the model's folder.
    """
    from safetensors.torch import save_file

    partial = fresh_directory(directory.with_name(f".{directory.name}.partial"))
    student.save(partial, stop_ids)
    (partial / "README.md").write_text(card, encoding="utf-8")
    for file, held in {TENSORS: tensors, **(further or {})}.items():
        (partial / file).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, partial / file)
    (partial / STATE).write_text(json_text(state), encoding="utf-8")
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    for path in [*files, *(path for path in partial.rglob("*") if path.is_dir())]:
        sync(path)
    write_sealed(partial / MANIFEST, {"files": {str(path.relative_to(partial)): sha256(path) for path in files}})
    if directory.is_dir():  # the step was repeated because its checkpoint or a newer one was damaged
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    sync(directory.parent)
    shutil.rmtree(directory.with_name(f".{directory.name}.old"), ignore_errors=True)
    return directory


def verify_checkpoint(directory: Path) -> None:
    """Check that every file of the manifest exists and is unaltered."""
    if not (directory / MANIFEST).is_file():
        raise RunDirectoryError(
            f"checkpoint {directory}: no {MANIFEST}, so it was not written by a run or is incomplete."
        )
    for name, expected in read_sealed(directory / MANIFEST)["files"].items():
        path = directory / name
        if not path.is_file():
            raise RunDirectoryError(f"checkpoint {directory}: {name} is missing.")
        if sha256(path) != expected:
            raise RunDirectoryError(f"checkpoint {directory}: {name} was altered (its sha256 does not match).")


def read_state(directory: Path) -> dict[str, Any]:
    """Verify a checkpoint and return the trainer's state."""
    with reading(directory / STATE):
        return json.loads((directory / STATE).read_text(encoding="utf-8"))


def steps_in(directory: Path) -> list[Path]:
    """The checkpoints of a stage, oldest first. Entries with other names are ignored."""
    if not directory.is_dir():
        return []
    with reading(directory):
        found = [path for path in directory.iterdir() if NAME.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def retain(directory: Path, keep: int, keep_every: int, best: Path | None) -> None:
    """Delete old step checkpoints. The newest `keep`, the best and every `keep_every`-th step stay.

    Only directories with our manifest are deleted.
    """
    ours = [path for path in steps_in(directory) if (path / MANIFEST).is_file()]
    for path in ours[:-keep]:
        if path != best and not (keep_every and step_of(path) % keep_every == 0):
            gone = path.with_name(f".{path.name}.old")
            path.rename(gone)  # rename first, so that a half-deleted directory never looks like a checkpoint
            shutil.rmtree(gone)


def point_latest(checkpoint: Path) -> None:
    """Make `checkpoints/latest` point to this checkpoint."""
    link = checkpoint.parent.parent / "latest"
    partial = link.with_name(".latest.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(checkpoint.relative_to(link.parent), target_is_directory=True)
    os.replace(partial, link)
    sync(link.parent)


class Saver:
    """Writes one checkpoint at a time, on request in a thread. The next call raises an error of that thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.seconds: float | None = None  # duration of the newest save

    def save(self, write: Callable[[], None], *, background: bool) -> None:
        self.wait()

        def work() -> None:
            start = time.monotonic()
            try:
                write()
            except BaseException as error:  # raised again by `check`, in the trainer's thread
                self._error = error
            self.seconds = time.monotonic() - start

        if background:
            self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            work()
            self.check()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of a finished save, if it had one."""
        if not self.busy and self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Wait for a save after the run has failed. Its error is ignored, so that it does not hide the first one."""
        if self._thread is not None:
            self._thread.join()

    def wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
        self.check()


# --- When a stage saves: at the end of a step, and when the run ends early ---


SAVE_RATE = 50e6  # bytes per second, assumed until a save has been timed


class StageCheckpoints:
    """The checkpoints of one stage. `started`: when the stage would have begun if it had run without interruption.

    Another stage of the recipe may be unfinished; its rollouts in the store are kept.
    """

    def __init__(
        self,
        parts: StageParts,
        result: StageResult,
        root: Path,
        saver: Saver,
        callbacks: Callbacks,
        started: float,
        recipe: Recipe,
    ) -> None:
        self._parts, self._result, self._root, self._saver = parts, result, root, saver
        self._callbacks, self._started = callbacks, started
        self._recipe = recipe
        self._durable = durable_parts(parts)
        self._boundary = self._states()
        self._untold: list[Path] = []  # saved or being saved, not yet announced
        self.metrics: dict[str, Any] = {}  # metrics of the newest step
        self.unreported: StepReport | None = None  # report of the newest step, until it is evaluated and written
        self.lines: Callable[[int], dict[str, int]] = lambda _: {}  # file -> number of the stage's lines up to a step

    def _states(self) -> dict[str, Any]:
        """The state after a complete step, without tensors. The next step can start from it."""
        return {key: value for part in self._durable for key, value in part.state().items()}

    def step_ended(self, report: StepReport) -> None:
        self._boundary = self._states()
        self.metrics, self.unreported = report.metrics, report

    def check(self) -> None:
        """Raise the error of a background save, and announce saves that have finished."""
        self._saver.check()
        self.announce()

    def wait(self) -> None:
        self._saver.wait()
        self.announce()

    def announce(self) -> None:
        """Announce checkpoints once they are durable, from the training thread."""
        if self._saver.busy:
            return
        untold, self._untold = self._untold, []
        for path in untold:
            if path.is_dir():
                self._callbacks.checkpoint(path)

    def keep(self, better: bool) -> Path:
        """Save the step that has just ended, unless it is saved already, and delete older checkpoints."""
        where = self._directory(self._result.steps)
        self._result.best = where if better else self._result.best
        if self._result.saved != self._result.steps:
            self.wait()
            self._save(background=self._parts.spec.checkpoint.background)
            self.announce()
        return where

    def rescue(self, stop: BaseException, grace_left: Callable[[], float]) -> str:
        """Save when a run ends early, if possible. Returns a sentence that says where the weights are."""
        parts, result = self._parts, self._result
        parts.store.commit(sync=True)
        preempted, ranks = isinstance(stop, Preempted), parts.ranks
        self._saver.wait(grace_left() / 2 if preempted else None)
        last = "no checkpoint had been saved"
        if result.saved is not None:
            last = f"the last checkpoint is {self._directory(result.saved)}"
        alone = ranks.sharded and not isinstance(stop, Stopped)  # the error may be local; a save needs all ranks
        if alone or ranks.share(lambda: result.saved == result.steps and not self._saver.busy):
            return last
        if not result.steps:
            return "no step was finished, so the student is unchanged; what was sampled is in the store"
        if parts.optimiser.updates != self._boundary["updates"]:
            return f"step {result.steps + 1} was only half done, so it is not saved; {last}"
        if not all(ranks.gather(parts.student.finite() and parts.trainer.learner.finite())):
            return f"the weights are not finite; {last}"
        seconds = self._save_seconds()
        if preempted and ranks.share(lambda: self._saver.busy or seconds > grace_left() / 2):
            return (
                f"a save would take longer than the grace time leaves; {last}, and the rollouts since are in the store"
            )
        return f"the weights of step {result.steps} are in {self._save(background=False)}"

    def _save(self, background: bool) -> Path:
        parts, result, spec = self._parts, self._result, self._parts.spec.checkpoint
        parts.context.on_phase("save")
        self._saver.wait()
        where = self._directory(result.steps)
        if parts.ranks.leads:
            where.parent.mkdir(parents=True, exist_ok=True)
        result.saved, result.seconds = result.steps, time.monotonic() - self._started
        copied = background or parts.ranks.sharded
        student = parts.student.snapshot() if copied else parts.student
        files = {file: tensors for part in self._durable for file, tensors in part.files().items()}
        if not parts.ranks.leads:
            return where
        state = {
            "step": result.steps,
            "stage": parts.spec.name,
            "seed": parts.spec.seed,
            **{key: self._boundary[key] for key in FIRST},
            "store": parts.store.position.to_json(),
            "unreported": None if self.unreported is None else self.unreported.metrics,
            "lines": self.lines(result.steps - (self.unreported is not None)),
            "newest": self.unreported.written.ids if self.unreported else [],  # their samples are not written yet
            "result": result.state(),
            **{key: value for key, value in self._boundary.items() if key not in FIRST},
        }
        if copied:
            files = {file: _copied(tensors) for file, tensors in files.items()}
        own = files.pop(TENSORS)
        card, best = model_card(parts.spec, result.steps, self.metrics), result.best

        def write() -> None:
            sync_lines(self._root)
            save_checkpoint(where, student, parts.stop_ids, card, own, state, files)
            point_latest(where)
            drop_before(where.parent)
            retain(where.parent, spec.keep, spec.keep_every, best)
            self._delete_segments(where.parent)

        self._untold.append(where)
        self._saver.save(write, background=background)
        return where

    def _delete_segments(self, folder: Path) -> None:
        """Delete segments of the store that no checkpoint needs to resume and that the recipe does not keep."""
        spec, kept = self._parts.spec, self._parts.spec.store.retain
        if kept is None:
            return
        others = [folder.with_name(stage.name) for stage in self._recipe.stages if stage.name != spec.name]
        halfway = {path.name: steps_in(path) for path in others if not (path / RESULT).exists()}
        if any(not saved and self._has_begun(name) for name, saved in halfway.items()):
            return  # that stage resumes from its first rollout
        states = [read_state(path) for path in chain(steps_in(folder), *halfway.values())]
        counts = [state["rollouts"] for state in states]
        if counts and None not in counts:  # otherwise the log was repaired, and the counts are unknown
            until = min(state["store"]["segment"] for state in states)  # the first segment that they need to resume
            self._parts.store.reclaim(min(counts) - kept * spec.rollout.prompts * spec.rollout.samples, until)

    def _has_begun(self, stage: str) -> bool:
        return any(id.startswith(f"{stage}/") for id in self._parts.store.entries)

    def _directory(self, step: int) -> Path:
        return checkpoint_directory(self._root, self._parts.spec.name, step)

    def _save_seconds(self) -> float:
        if self._saver.seconds is not None:
            return self._saver.seconds
        parts = self._parts
        others = [*parts.optimiser.tensors().values(), *teacher_tensors(parts.teachers).values()]
        others += [
            tensor for module in parts.trainer.learner.modules.values() for tensor in module.module.state().values()
        ]
        return sum(tensor.nbytes for tensor in (*parts.student.module.parameters(), *others)) / SAVE_RATE


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


# --- What a checkpoint holds: parts, each with state, files and a way to restore them ---


FIRST = ("stream", "updates", "version", "rollouts", "random")  # first keys of the trainer's state, in order


@dataclass(frozen=True)
class DurablePart:
    """A part of a stage that is saved in checkpoints. `state` is recorded after every step, `files` when a checkpoint is saved."""

    parts: StageParts

    def state(self) -> dict[str, Any]:
        """This part's keys in the trainer's state: numbers and strings."""
        return {}

    def files(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """File -> tensors. All ranks must call this; the leader's files are written."""
        return {}

    def restore(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        raise NotImplementedError


class StudentPart(DurablePart):
    """The student's optimiser. `LanguageModel.save` writes the weights as a separate model."""

    def state(self) -> dict[str, Any]:
        kind = self.parts.optimiser.kind
        named = {} if kind.by_default else {"optimiser": kind.name}  # older checkpoints name no optimiser
        return {"updates": self.parts.optimiser.updates, **named}

    def files(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return {TENSORS: self.parts.ranks.whole(self.parts.optimiser.tensors())}

    def restore(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        require_optimiser(self.parts.optimiser, state.get("optimiser"), f"checkpoint {checkpoint}", "train.optimiser")
        self.parts.student.restore(checkpoint)
        with safe_open(checkpoint / TENSORS, "pt") as stored:
            self.parts.optimiser.restore(StoredTensors(stored), state["updates"])


class ModulesPart(DurablePart):
    """Trainable modules: the weights and optimiser of each."""

    def state(self) -> dict[str, Any]:
        modules = self.parts.trainer.learner.modules
        return {"modules": {name: module.optimiser.updates for name, module in modules.items()}} if modules else {}

    def files(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        found = {}
        for name, module in self.parts.trainer.learner.modules.items():
            found[f"{MODULES}/{name}/{WEIGHTS}"] = self.parts.ranks.whole(module.module.state())
            found[f"{MODULES}/{name}/{TENSORS}"] = self.parts.ranks.whole(module.optimiser.tensors())
        return found

    def restore(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        for name, module in self.parts.trainer.learner.modules.items():
            folder = checkpoint / MODULES / name
            module.module.restore(load_file(folder / WEIGHTS))
            module.optimiser.restore(load_file(folder / TENSORS), state["modules"][name])


class TeachersPart(DurablePart):
    """Teachers that follow the student."""

    def state(self) -> dict[str, Any]:
        return {"teachers": {name: teacher.version for name, teacher in self.parts.teachers.items()}}

    def files(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        tensors = teacher_tensors(self.parts.teachers)
        return {TEACHERS: tensors} if tensors else {}

    def restore(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        followed = load_file(checkpoint / TEACHERS) if (checkpoint / TEACHERS).exists() else {}
        restore_teachers(self.parts.teachers, state.get("teachers", {}), followed)  # older checkpoints have no teachers


class StreamPart(DurablePart):
    """The prompt stream, the number of rollouts begun so far, including earlier stages, and those that wait for their next segment."""

    def state(self) -> dict[str, Any]:
        pace = {} if self.parts.rollouter.pace is None else {"pace": self.parts.rollouter.pace.state()}
        segments = self.parts.rollouter.segments
        waiting = {} if segments is None else {"waiting": segments.state()}
        return {"stream": self.parts.stream.state(), "rollouts": self.parts.rollouter.consumed, **pace, **waiting}

    def restore(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        self.parts.stream.restore(state["stream"])
        if self.parts.rollouter.pace is not None:
            self.parts.rollouter.pace.restore(state["pace"])
        if self.parts.rollouter.segments is not None:
            self.parts.rollouter.segments.restore(state["waiting"])
        if self.parts.rollouter.consumed is not None:
            self.parts.rollouter.consumed = min(state["rollouts"], len(self.parts.store))


class SamplersPart(DurablePart):
    """The samplers. They take the student's weights, which are restored before them."""

    def state(self) -> dict[str, Any]:
        return {"version": self.parts.samplers.version}

    def restore(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        self.parts.publish(version=state["version"])


class RandomPart(DurablePart):
    def state(self) -> dict[str, Any]:
        return {"random": random_state(self.parts.device)}

    def restore(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        set_random_state(state["random"], self.parts.device)


DURABLE = (StudentPart, ModulesPart, TeachersPart, StreamPart, SamplersPart, RandomPart)  # in the order of restoring


def durable_parts(parts: StageParts) -> list[DurablePart]:
    return [kind(parts) for kind in DURABLE]


def require_optimiser(optimiser: Optimiser, saved: str | None, where: str, key: str) -> None:
    """Reject a checkpoint of another kind of optimiser. Checkpoints of the default kind do not name it."""
    own, saved = optimiser.kind.name, saved or OPTIMISERS.default
    if own != saved:
        raise RunDirectoryError(
            f"{where} was saved with {key} {saved}, and the recipe has {own}: moments of one are not valid for the other. Set "
            f"{key}: {saved}, or start a new run from this model."
        )


def model_card(spec: Stage, step: int, metrics: Mapping[str, Any]) -> str:
    """README.md of a saved model in the hub's format: where the model came from."""
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


# --- Where an interrupted run stands, and how each stage continues ---
#
# finished stage     its result.json, and the checkpoint that it names
# unfinished stage   its newest intact checkpoint, or else its first step
# extended stage     a finished stage that a change continues (`runner/extend.py`): the same, plus the result it had
# after that step    the store: finished rollouts are used, unfinished ones are continued (`rollouts/rollouter.py`)
#
# A damaged checkpoint is reported, renamed and never used again. The one before it takes its place.


BEFORE = "before.json"
TEMPORARY = re.compile(rf"\.{NAME.pattern}\.(partial|old)")


@dataclass
class ResumePoint:
    """How far a stage has come. With the defaults, the stage starts from the beginning."""

    output: Path | None = None  # the stage's final checkpoint; None until it is finished
    checkpoint: Path | None = None  # the newest intact checkpoint
    result: StageResult | None = None  # the result at that checkpoint
    unreported: dict[str, Any] | None = None  # metrics of the last step, if it was not yet evaluated and written
    lines: Mapping[str, int] = field(default_factory=dict)  # file -> number of lines when the checkpoint was saved
    ended: Sequence[int] = ()  # steps at which the stage had finished before a change continued it

    def to_plain(self) -> list[Any]:
        """A form that can be sent to other ranks."""
        paths = [None if path is None else str(path) for path in (self.output, self.checkpoint)]
        return [*paths, None if self.result is None else self.result.state(), self.unreported]

    @classmethod
    def of_plain(cls, values: Sequence[Any], folder: Path) -> ResumePoint:
        output, checkpoint, result, unreported = values
        return cls(
            None if output is None else Path(output),
            None if checkpoint is None else Path(checkpoint),
            None if result is None else StageResult.restored(result, folder),
            unreported,
        )

    @property
    def reported(self) -> int:
        """The last step that belongs in metrics.jsonl."""
        return 0 if self.result is None else self.result.steps - (self.unreported is not None)

    @property
    def evaluates_last(self) -> bool:
        """Whether the evaluation after the last step is still due. Some of its answers may be written already."""
        return self.output is None and self.result is not None and not self.result.after

    @property
    def answered(self) -> int:
        """The last step that belongs in answers.jsonl; -1 is before step 0. An evaluation without a durable result is repeated."""
        if self.result is None:
            return -1
        known = self.reported in (*self.ended, *(line["step"] for line in self.result.history))
        return self.reported - (self.evaluates_last and self.reported > 0 and not known)


def find_resume_points(directory: Path, recipe: Recipe, say: Callable[[str], None]) -> list[ResumePoint]:
    """Where each stage stands. Verifies the files it will use and reports damage. Needs the lock."""
    root = directory / "checkpoints"
    latest = root / "latest"
    for folder in (root, *(root / spec.name for spec in recipe.stages)):
        if folder.exists() and not folder.is_dir():
            raise RunDirectoryError(
                f"{folder} is not a directory. Delete it to start again from the rollouts in the store."
            )
    if latest.exists() and not latest.is_symlink():
        raise RunDirectoryError(
            f"{latest} is not a link. Was the run copied without its links? Delete it and resume again."
        )
    if latest.is_symlink() and not latest.exists():
        say(f"checkpoints/latest names {latest.readlink()}, which does not exist")
    changes = changes_of(directory)
    return [_stage(root / spec.name, spec, parts_of(changes, spec.name), say) for spec in recipe.stages]


def _stage(folder: Path, spec: Stage, changes: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> ResumePoint:
    """`changes`: the changes of this stage."""
    tidy(folder)
    whole, damaged = _intact_and_damaged(folder)
    ended = _sealed_or_none(folder / RESULT, say)
    if ended is not None and ended["checkpoint"] is None:
        passed = StageResult.restored(ended["result"], folder)
        passed.passed_over = ended["passed_over"]  # the results of earlier runs lack this
        found = _passed_over(folder, passed, say)
    elif ended is not None:
        output = folder / ended["checkpoint"]
        if output not in whole:
            raise damaged.get(output) or RunDirectoryError(
                f"checkpoint {output}: the model that its stage ended with is missing."
            )
        result = StageResult.restored(ended["result"], folder)
        found = ResumePoint(output, output, result, lines=whole[output].get("lines", {}))
    elif whole:
        newest, state = max(whole), whole[max(whole)]
        result = StageResult.restored(state["result"], folder)
        found = ResumePoint(
            None, newest, result, state["unreported"], state.get("lines", {})
        )  # older checkpoints have no lines
        for part in changes:
            if part["result"] is not None and part["result"]["steps"] == step_of(newest):
                found.result = reopened(StageResult.restored(part["result"], folder), spec)
                found.unreported = None  # a finished stage has written everything
    elif damaged:
        raise RunDirectoryError(
            f"{damaged[max(damaged)]} No other checkpoint of this stage is intact. Delete {folder} to start the stage again: the rollouts in "
            "the store are used, so only the updates are repeated."
        )
    else:
        before = _sealed_or_none(folder / BEFORE, say)
        found = ResumePoint(result=None if before is None else StageResult.restored(before, folder))
    found.ended = [part["result"]["steps"] for part in changes if part["result"] is not None]
    for path, what in damaged.items():
        say(f"{what} It was renamed to {_set_aside(path).name}; continuing from {found.checkpoint}")
        if found.result is not None and found.result.best == path:
            found.result.best = None
    return found


def reopened(result: StageResult, spec: Stage) -> StageResult:
    """The result that a finished stage continues from, as if the stage had always had its new number of steps.

    The last evaluation stays in the history only if the new settings also evaluate after that step. The record of the change keeps it in any case.
    """
    here = [line for line in result.history if line["step"] == result.steps]
    due = bool(spec.eval.every) and result.steps % spec.eval.every == 0
    result.history = [line for line in result.history if line["step"] != result.steps] + (here[:1] if due else [])
    result.after = {}
    if result.plateau is None and due and here and result.evaluations(spec.eval.metric).plateau(spec.eval.plateau):
        result.plateau = result.steps
    return result


def _passed_over(folder: Path, result: StageResult, say: Callable[[str], None]) -> ResumePoint:
    """A stage that trained nothing has no checkpoint of its own. If the model it passed on is gone, the stage starts again."""
    try:
        return ResumePoint(Path(output_of(folder.parent.parent, folder.name)), result=result)
    except RunDirectoryError as error:
        say(f"{error} Stage {folder.name!r}, which was passed over, begins again.")
        return ResumePoint()


def _intact_and_damaged(folder: Path) -> tuple[dict[Path, dict[str, Any]], dict[Path, RunDirectoryError]]:
    """The intact checkpoints with their state, and the damaged ones with their errors."""
    whole, damaged = {}, {}
    for path in steps_in(folder):
        try:
            whole[path] = _verified(path)
        except RunDirectoryError as error:
            damaged[path] = error
    return whole, damaged


def _verified(checkpoint: Path) -> dict[str, Any]:
    verify_checkpoint(checkpoint)
    state = read_state(checkpoint)
    if (state["stage"], state["step"]) != (checkpoint.parent.name, step_of(checkpoint)):
        raise RunDirectoryError(
            f"checkpoint {checkpoint} holds step {state['step']} of stage {state['stage']!r}: it has been renamed."
        )
    return state


def require_rollouts(directory: Path, resume_points: Sequence[ResumePoint]) -> None:
    """Reject a log that ends before a checkpoint of an unfinished stage was saved. Nothing has been changed yet."""
    unfinished = [
        resume_point.checkpoint for resume_point in resume_points if resume_point.checkpoint and not resume_point.output
    ]
    if not unfinished:
        return
    store = RolloutStore(directory / "rollouts", read_only=True)
    for checkpoint in unfinished:
        try:
            store.require(Position.from_json(read_state(checkpoint)["store"]), str(checkpoint))
        except StoreError as error:
            raise StoreError(
                f"{error} To continue without what is lost, delete {checkpoint}: an older one takes its place, and what is missing is sampled again."
            ) from None


def _sealed_or_none(path: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """None if the file is missing or damaged: its content can be computed again."""
    if not path.exists():
        return None
    try:
        return read_sealed(path)
    except RunDirectoryError as error:
        say(f"{error} Its contents are computed again.")
        return None


def _set_aside(path: Path) -> Path:
    number, aside = 1, path.with_name(f"damaged-{path.name}")
    while aside.exists():
        number += 1
        aside = path.with_name(f"damaged-{path.name}-{number}")
    return path.rename(aside)


def tidy(folder: Path) -> None:
    """Remove temporary files of an interrupted save."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if not TEMPORARY.fullmatch(path.name) and partial_of(path.name) not in (RESULT, BEFORE):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_result(folder: Path, result: StageResult, checkpoint: Path) -> None:
    """Mark the stage as finished. A resumed run starts after it."""
    write_sealed(folder / RESULT, {"result": result.state(), "checkpoint": checkpoint.name})


def write_passed_over(folder: Path, result: StageResult, start: str) -> None:
    """Mark a stage that trained nothing as finished. Its output is the model it would have started from."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(folder / RESULT, {"result": result.state(), "checkpoint": None, "passed_over": start})


def write_before(folder: Path, result: StageResult) -> None:
    """Keep the evaluation before the first step until a checkpoint holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(folder / BEFORE, result.state())


def drop_before(folder: Path) -> None:
    (folder / BEFORE).unlink(missing_ok=True)


# --- Restoring a stage ---


def restore(parts: StageParts, checkpoint: Path) -> list[str]:
    """Restore every durable part to its state in the checkpoint.

    Returns the ids of rollouts whose samples were not written yet.
    """
    state = read_state(checkpoint)
    for part in durable_parts(parts):
        part.restore(state, checkpoint)
    return list(state.get("newest", ()))  # older checkpoints lack this key


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of an open file, read one at a time, so that a rank that keeps shards never holds all tensors."""

    def __init__(self, opened: Any) -> None:
        self._opened, self._names = opened, list(opened.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._opened.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def random_state(device: torch.device) -> dict[str, Any]:
    """Random states of torch, numpy and Python. opd's own draws are keyed; adapter initialisation, rewards and plugins use these."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "numpy": [kind, np.asarray(keys).tobytes().hex(), position, has_gauss, gauss],
        "python": random.getstate(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device).numpy().tobytes().hex()
    return found


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.frombuffer(bytes.fromhex(keys), dtype=np.uint32), position, has_gauss, gauss))
    version, inner, gauss_next = state["python"]
    random.setstate((version, tuple(inner), gauss_next))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes_tensor(state["cuda"]), device)


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


# --- Lines written per step ---

LINES = ("samples.jsonl", "tokens.jsonl", "answers.jsonl", "monitors.jsonl", "metrics.jsonl")
IN_EVERY_RUN = ("samples.jsonl", "metrics.jsonl")  # older runs have only these


def cut_lines(
    path: Path, stages: Mapping[str, ResumePoint], *, checked: bool
) -> tuple[list[str], Counter[tuple[str, int]]]:
    """Keep each stage's lines up to where it stands. Damaged lines are removed as well.

    Returns messages about removed and missing lines, and the number of remaining lines per stage and step.
    """
    found, answers = read_lines(path, checked=checked), path.name == "answers.jsonl"
    upto = {name: resume_point.answered if answers else resume_point.reported for name, resume_point in stages.items()}
    kept = [line for line in found.whole if line["step"] <= upto.get(line["stage"], 0)]
    after = len(found.whole) - len(kept)
    if answers:
        kept = _without_duplicates(kept, [name for name, resume_point in stages.items() if resume_point.evaluates_last])
    twice = len(found.whole) - after - len(kept)
    if path.exists():
        write_atomic(path, "".join(line_of(line) for line in kept))
    left = Counter((line["stage"], line["step"]) for line in kept)
    said = [f"{path}, line {number}: the line was altered or cut off; it is dropped" for number in found.damaged]
    if found.torn:
        said.append(f"{path.name}: {found.torn} bytes of an unfinished last line are removed")
    if after:
        said.append(f"{path.name}: {after} lines that were written after the last durable state are removed")
    if twice:
        said.append(f"{path.name}: {twice} duplicate lines are removed")
    return said + _missing(path, stages, left), left


def _without_duplicates(lines: Sequence[dict[str, Any]], stages: Sequence[str]) -> list[dict[str, Any]]:
    """Remove duplicate answers. `stages`: those that repeat an interrupted evaluation whose first answers are written already."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(lines):
        again = line["stage"] in stages
        names = (line["stage"], line["step"], line.get("who"), line.get("domain"), line.get("prompt_id"))
        kept.setdefault(names if again else (number,), line)
    return list(kept.values())


def _missing(path: Path, stages: Mapping[str, ResumePoint], left: Mapping[tuple[str, int], int]) -> list[str]:
    """Messages about lines that were written durably and are missing."""
    if not path.exists() and path.name in IN_EVERY_RUN and any(one.reported for one in stages.values()):
        return [f"{path.name} is missing, so the lines written so far are lost"]
    said = []
    for stage, resume_point in stages.items():
        if path.name == "metrics.jsonl":
            lost = [step for step in range(1, resume_point.reported + 1) if not left.get((stage, step))]
            if lost:
                said.append(f"{path.name} lacks {len(lost)} lines of stage {stage}, the first of step {lost[0]}")
            continue
        there = sum(count for (name, _), count in left.items() if name == stage)
        if there < (wrote := resume_point.lines.get(path.name, 0)):
            said.append(f"{path.name} lacks {wrote - there} of the {wrote} lines that stage {stage} had written")
    return said


def sync_lines(directory: Path) -> None:
    """Sync the lines of a step before its checkpoint is written."""
    for name in LINES:
        if (directory / name).is_file():
            sync(directory / name)
    sync(directory)


# --- Pushing trained models to the Hugging Face hub. Access is checked before training ---


LEFT_HERE = (
    "optimiser.safetensors",
    "trainer.json",
    "teachers/*",
    "modules/*",
)  # files of a checkpoint that are not part of the model


def require_access(stage: Stage, *, make: bool = True) -> None:
    """Reject a stage if its model cannot be pushed: no token, no network, no write access. `make`: also create the repository."""
    if stage.hub is None:
        return
    from huggingface_hub import HfApi, constants

    repo, where = stage.hub.repo, f"stage {stage.name!r}: hub.repo {stage.hub.repo!r}"
    if constants.HF_HUB_OFFLINE:
        raise RecipeError(f"{where}: HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it, or leave `hub` out.")
    api = HfApi()
    try:
        api.whoami()
        if make:
            api.create_repo(repo, private=stage.hub.private, exist_ok=True)
    except hub_errors() as error:
        raise RecipeError(
            f"{where} cannot be written to ({first_line(error)}). Log in with `hf auth login` and a token that may write, name "
            "a repository of your own, or leave `hub` out."
        ) from None


def push(directory: Path, hub: Hub) -> str | None:
    """Upload a model. Returns None on success, otherwise the error and the command that pushes it later."""
    from huggingface_hub import HfApi

    try:
        HfApi().upload_folder(repo_id=hub.repo, folder_path=directory, ignore_patterns=list(LEFT_HERE))
    except hub_errors(RuntimeError) as error:
        excluded = " ".join(f"--exclude {shlex.quote(name)}" for name in LEFT_HERE)
        return f"the model was not pushed to {hub.repo} ({first_line(error)}). Later: hf upload {hub.repo} {directory} . {excluded}"
    return None
