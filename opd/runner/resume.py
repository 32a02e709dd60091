"""Where an interrupted run stands, and how its stage continues from there.

    finished stages    their result.json, and the checkpoint it names
    the stage at work  its newest checkpoint whose every file is unaltered; without any, its first step
    one to continue    after its end, by a change (`runner/extend.py`): the same, and what it had ended with
    after that step    the store: finished rollouts are used, unfinished ones are continued (`trainer.trajectories`)

A damaged checkpoint is named, set aside and never used again; the one before it takes its place.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from opd.config import Recipe, Stage
from opd.config.run_changes import changes_of, parts_of
from opd.config.runs import RESULT, output_of
from opd.errors import RunDirectoryError, StoreError
from opd.files import line_of, partial_of, read_lines, read_sealed, sync, write_sealed, write_whole
from opd.runner.checkpoint import NAME, TEACHERS, TENSORS, read_state, step_of, steps_in, verify_checkpoint
from opd.runner.results import StageResult
from opd.store import Position, RolloutStore
from opd.teachers.pool import restore_teachers

if TYPE_CHECKING:
    from opd.runner.stage import StageRun

BEFORE = "before.json"
TEMPORARY = re.compile(rf"\.{NAME.pattern}\.(partial|old)")


@dataclass
class Boundary:
    """What a complete step leaves behind, apart from tensors: from here the next step can begin again."""

    stream: dict[str, Any]
    updates: int
    version: int
    rollouts: int | None  # trained on so far, earlier stages included
    random: dict[str, Any]

    @classmethod
    def of(cls, run: StageRun) -> Boundary:
        rollouts = run.trajectories.consumed
        return cls(run.stream.state(), run.optimiser.updates, run.version, rollouts, random_state(run.device))


@dataclass
class Standing:
    """How far a stage has come. Nothing set: it begins."""

    output: Path | None = None  # the checkpoint it ended with; None while it is not finished
    checkpoint: Path | None = None  # the newest whole one
    result: StageResult | None = None  # as of then
    unreported: dict[str, Any] | None = None  # metrics of its last step, where it was not yet evaluated and written
    lines: Mapping[str, int] = field(default_factory=dict)  # file -> lines that it had when the checkpoint was saved
    ended: Sequence[int] = ()  # steps after which it had ended before a change had it continue

    def to_plain(self) -> list[Any]:
        """For other ranks."""
        paths = [None if path is None else str(path) for path in (self.output, self.checkpoint)]
        return [*paths, None if self.result is None else self.result.state(), self.unreported]

    @classmethod
    def of_plain(cls, told: Sequence[Any], folder: Path) -> Standing:
        output, checkpoint, result, unreported = told
        return cls(
            None if output is None else Path(output),
            None if checkpoint is None else Path(checkpoint),
            None if result is None else StageResult.restored(result, folder),
            unreported,
        )

    @property
    def reported(self) -> int:
        """The last step that belongs into metrics.jsonl."""
        return 0 if self.result is None else self.result.steps - (self.unreported is not None)

    @property
    def evaluates_last(self) -> bool:
        """Whether the evaluation after the last step is still to come, though some of its answers may be written already."""
        return self.output is None and self.result is not None and not self.result.after

    @property
    def answered(self) -> int:
        """The last step that belongs into answers.jsonl. An evaluation whose result is not durable is done again: -1 is before step 0."""
        if self.result is None:
            return -1
        known = self.reported in (*self.ended, *(line["step"] for line in self.result.history))
        return self.reported - (self.evaluates_last and self.reported > 0 and not known)


def find_standings(directory: Path, recipe: Recipe, say: Callable[[str], None]) -> list[Standing]:
    """Every stage's standing. Verifies what is going to be used, and says what is damaged. Needs the lock."""
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


def _stage(folder: Path, spec: Stage, changes: Sequence[Mapping[str, Any]], say: Callable[[str], None]) -> Standing:
    """`changes`: those of the stage."""
    tidy(folder)
    whole, damaged = _sorted_out(folder)
    ended = _sealed_or_none(folder / RESULT, say)
    if ended is not None and ended["checkpoint"] is None:
        passed = StageResult.restored(ended["result"], folder)
        passed.passed_over = ended["passed_over"]  # earlier runs do not say so in the result
        found = _passed_over(folder, passed, say)
    elif ended is not None:
        output = folder / ended["checkpoint"]
        if output not in whole:
            raise damaged.get(output) or RunDirectoryError(
                f"checkpoint {output}: the model that its stage ended with is missing."
            )
        result = StageResult.restored(ended["result"], folder)
        found = Standing(output, output, result, lines=whole[output].get("lines", {}))
    elif whole:
        newest, state = max(whole), whole[max(whole)]
        result = StageResult.restored(state["result"], folder)
        found = Standing(None, newest, result, state["unreported"], state.get("lines", {}))  # older ones have no lines
        for part in changes:
            if part["result"] is not None and part["result"]["steps"] == step_of(newest):
                found.result = reopened(StageResult.restored(part["result"], folder), spec)
                found.unreported = None  # a stage that has ended has written everything
    elif damaged:
        raise RunDirectoryError(
            f"{damaged[max(damaged)]} No other checkpoint of this stage is intact. Delete {folder} to start the stage again: the rollouts in "
            "the store are used, so only the updates are repeated."
        )
    else:
        before = _sealed_or_none(folder / BEFORE, say)
        found = Standing(result=None if before is None else StageResult.restored(before, folder))
    found.ended = [part["result"]["steps"] for part in changes if part["result"] is not None]
    for path, what in damaged.items():
        say(f"{what} It was renamed to {_set_aside(path).name}; continuing from {found.checkpoint}")
        if found.result is not None and found.result.best == path:
            found.result.best = None
    return found


def reopened(result: StageResult, spec: Stage) -> StageResult:
    """What a stage that had ended continues from: as if it had been on its way, with the steps that it has now.

    Its last evaluation counts for what comes where one was due after that step anyway. Otherwise it stays in the record of the change.
    """
    here = [line for line in result.history if line["step"] == result.steps]
    due = bool(spec.eval.every) and result.steps % spec.eval.every == 0
    result.history = [line for line in result.history if line["step"] != result.steps] + (here[:1] if due else [])
    result.after = {}
    if result.plateau is None and due and here and result.evaluations(spec.eval.metric).plateau(spec.eval.plateau):
        result.plateau = result.steps
    return result


def _passed_over(folder: Path, result: StageResult, say: Callable[[str], None]) -> Standing:
    """A stage that trained nothing has no checkpoint of its own. Where what it passed on is gone, it begins again."""
    try:
        return Standing(Path(output_of(folder.parent.parent, folder.name)), result=result)
    except RunDirectoryError as error:
        say(f"{error} Stage {folder.name!r}, which was passed over, begins again.")
        return Standing()


def _sorted_out(folder: Path) -> tuple[dict[Path, dict[str, Any]], dict[Path, RunDirectoryError]]:
    """Checkpoints that are whole, with their state, and those that are not, with what is wrong."""
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


def require_rollouts(directory: Path, standings: Sequence[Standing]) -> None:
    """Refuse a log that ends before a checkpoint of a stage at work was saved. Nothing is touched yet."""
    at_work = [standing.checkpoint for standing in standings if standing.checkpoint and not standing.output]
    if not at_work:
        return
    store = RolloutStore(directory / "rollouts", read_only=True)
    for checkpoint in at_work:
        try:
            store.require(Position.from_json(read_state(checkpoint)["store"]), str(checkpoint))
        except StoreError as error:
            raise StoreError(
                f"{error} To continue without what is lost, delete {checkpoint}: an older one takes its place, and what is missing is sampled again."
            ) from None


def _sealed_or_none(path: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """None where the file is missing or damaged: what it holds can be worked out again."""
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
    """Remove what an interrupted save left under a temporary name of ours."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if not TEMPORARY.fullmatch(path.name) and partial_of(path.name) not in (RESULT, BEFORE):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_result(folder: Path, result: StageResult, checkpoint: Path) -> None:
    """The stage is finished: from now on a resumed run begins behind it."""
    write_sealed(folder / RESULT, {"result": result.state(), "checkpoint": checkpoint.name})


def write_passed_over(folder: Path, result: StageResult, start: str) -> None:
    """Nothing was trained: the stage is finished with what it would have started from."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(folder / RESULT, {"result": result.state(), "checkpoint": None, "passed_over": start})


def write_before(folder: Path, result: StageResult) -> None:
    """The evaluation before the first step, kept until a checkpoint holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_sealed(folder / BEFORE, result.state())


def drop_before(folder: Path) -> None:
    (folder / BEFORE).unlink(missing_ok=True)


# A stage


def restore(run: StageRun, checkpoint: Path) -> None:
    """Student, optimiser, teachers, sampler, prompt stream and random state, as they were when the checkpoint was saved."""
    state = read_state(checkpoint)
    run.student.restore(checkpoint)
    with safe_open(checkpoint / TENSORS, "pt") as stored:
        run.optimiser.restore(StoredTensors(stored), state["updates"])
    followed = load_file(checkpoint / TEACHERS) if (checkpoint / TEACHERS).exists() else {}
    restore_teachers(run.teachers, state.get("teachers", {}), followed)  # older checkpoints know of none that move
    run.stream.restore(state["stream"])
    if run.trajectories.consumed is not None:
        run.trajectories.consumed = min(state["rollouts"], len(run.store))
    run.trajectories.newest = list(state.get("newest", ()))  # older checkpoints do not say
    run.publish(version=state["version"])
    set_random_state(state["random"], run.device)


class StoredTensors(Mapping[str, torch.Tensor]):
    """Of an open file, each read when it is looked at: a rank that keeps a part of each never holds all of them."""

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
    """Of torch, numpy and Python. opd's own draws are keyed; this is for adapters' first weights, rewards and plugins."""
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


# Lines written per step

LINES = ("samples.jsonl", "tokens.jsonl", "answers.jsonl", "monitors.jsonl", "metrics.jsonl")
IN_EVERY_RUN = ("samples.jsonl", "metrics.jsonl")  # older runs have no others


def cut_lines(
    path: Path, stages: Mapping[str, Standing], *, checked: bool
) -> tuple[list[str], Counter[tuple[str, int]]]:
    """Keep each stage's lines up to where it stands; those that are damaged go, too.

    Returns what is to be said of lines that were removed or are missing, and how many are left of each stage and step.
    """
    found, answers = read_lines(path, checked=checked), path.name == "answers.jsonl"
    upto = {name: standing.answered if answers else standing.reported for name, standing in stages.items()}
    kept = [line for line in found.whole if line["step"] <= upto.get(line["stage"], 0)]
    after = len(found.whole) - len(kept)
    if answers:
        kept = _once(kept, [name for name, standing in stages.items() if standing.evaluates_last])
    twice = len(found.whole) - after - len(kept)
    if path.exists():
        write_whole(path, "".join(line_of(line) for line in kept))
    left = Counter((line["stage"], line["step"]) for line in kept)
    said = [f"{path}, line {number}: the line was altered or cut off; it is dropped" for number in found.damaged]
    if found.torn:
        said.append(f"{path.name}: {found.torn} bytes of an unfinished last line are removed")
    if after:
        said.append(f"{path.name}: {after} lines that were written after the last durable state are removed")
    if twice:
        said.append(f"{path.name}: {twice} lines that were there twice are removed")
    return said + _missing(path, stages, left), left


def _once(lines: Sequence[dict[str, Any]], stages: Sequence[str]) -> list[dict[str, Any]]:
    """Without answers that stand twice: these stages evaluate again what an evaluation that was cut off has written already."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, line in enumerate(lines):
        again = line["stage"] in stages
        names = (line["stage"], line["step"], line.get("who"), line.get("domain"), line.get("prompt_id"))
        kept.setdefault(names if again else (number,), line)
    return list(kept.values())


def _missing(path: Path, stages: Mapping[str, Standing], left: Mapping[tuple[str, int], int]) -> list[str]:
    """Lines that had been written, durably, and are not there."""
    if not path.exists() and path.name in IN_EVERY_RUN and any(one.reported for one in stages.values()):
        return [f"{path.name} is missing, so the lines written so far are lost"]
    said = []
    for stage, standing in stages.items():
        if path.name == "metrics.jsonl":
            lost = [step for step in range(1, standing.reported + 1) if not left.get((stage, step))]
            if lost:
                said.append(f"{path.name} lacks {len(lost)} lines of stage {stage}, the first of step {lost[0]}")
            continue
        there = sum(count for (name, _), count in left.items() if name == stage)
        if there < (wrote := standing.lines.get(path.name, 0)):
            said.append(f"{path.name} lacks {wrote - there} of the {wrote} lines that stage {stage} had written")
    return said


def sync_lines(directory: Path) -> None:
    """The lines of a step are on disk before the checkpoint that follows it."""
    for name in LINES:
        if (directory / name).is_file():
            sync(directory / name)
    sync(directory)
