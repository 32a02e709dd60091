"""`opd resume RUN train.steps=400`: change a run that has begun, finished or not.

    1. The requested changes are checked against what the run has done. Nothing is written before all checks pass.
    2. `resolved-2.yaml` is written: what the run carries out from now on. No file names it yet.
    3. For a finished stage that is to continue, `result.json` is removed. A run killed here finishes as it had before.
    4. `run.json` is replaced atomically. From here on the run is the changed one (`recipe/run_changes.py`).

So a run killed at any moment resumes either unchanged or changed.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.common.errors import RecipeError
from opd.common.files import SEALS, read_sealed, sync, write_atomic, write_sealed
from opd.common.text import plain
from opd.loop.learner import learning_rate
from opd.recipe import Recipe, Stage
from opd.recipe.graph import edges
from opd.recipe.paths import RESULT
from opd.recipe.run_changes import (
    KeyChange,
    changed_keys,
    changed_text,
    changes_of,
    parts_of,
    recipe_file,
    recipe_name,
    shown_value,
)
from opd.runner.checkpoint import ResumePoint, checkpoint_directory, find_resume_points, reopened
from opd.runner.evaluate import read_start
from opd.runner.inputs import merged_directory
from opd.runner.results import StageResult, budget_used_up, meets_stop_rules
from opd.runner.reuse import REUSED
from opd.store import RolloutStore

EVERY_KEY = frozenset({"checkpoint", "monitors", "hub"})  # sections in which every key may change
CHANGEABLE = {  # and the keys of other sections
    "train": frozenset({"steps", "tokens", "lr", "warmup", "schedule", "weight_decay", "clip", "micro_tokens"}),
    "eval": frozenset({"every", "prompts", "early_stop", "plateau", "answers", "answers_mib"}),
    "log": frozenset({"to", "project", "samples", "samples_every"}),
    "store": frozenset({"commit_ms", "fsync", "retain"}),
}
TRACKERS = ("log.to", "log.project")  # the same for all stages of a run
RATES = ("train.steps", "train.lr", "train.warmup", "train.schedule")  # settings that determine the learning rate
WHY = {  # section -> why its other keys cannot change
    "name": "checkpoints and rollouts are filed under it",
    "student": "weights and optimiser state are this student's",
    "teachers": "the steps so far were scored by these teachers",
    "pool": "the teachers are loaded by it",
    "prompts": "prompts continue where they stopped, and evaluations ask the same questions",
    "select": "the stage's domains were chosen when it began",
    "shares": "prompts continue where they stopped",
    "curriculum": "prompts continue where they stopped",
    "route": "the steps so far were scored by these teachers",
    "data": "prompts continue where they stopped",
    "rollout": "answers that were begun continue as they were drawn",
    "sampler": "answers that were begun continue as they were drawn",
    "objective": "the weights so far were trained on this objective",
    "modules": "their weights so far were trained with these settings",
    "rewards": "the answers so far were rewarded by these",
    "train": "the updates so far were made with it",
    "eval": "evaluations before and after would not measure the same",
    "store": "later steps would store other things than the steps so far",
    "log": "it is measured before the first step only",
    "cluster": "the run began on this cluster",
    "seed": "all draws of the run follow from it",
    "device": "numbers so far were computed there",
    "threads": "numbers so far were computed with so many",
}


def place_overrides(recipe: Recipe, overrides: Iterable[str]) -> list[str]:
    """Add stage names to overrides. With several stages, all keys but the trackers' need one: `stages.NAME.train.steps=20`. Trackers apply to all."""
    placed = []
    for override in overrides:
        key, separator, _ = override.partition("=")
        section = key.split(".")[0]
        if not separator or not key:
            raise RecipeError(f"override {plain(override)!r}: expected KEY=VALUE, for example train.steps=400.")
        if section in ("name", "plugins"):
            raise RecipeError(
                f"{section} cannot change in a run that has begun: its files depend on it. Start a new run with opd run."
            )
        if section == "stages":
            placed.append(override)
        elif len(recipe.stages) == 1 or key in TRACKERS:
            placed += [f"stages.{number}.{override}" for number in range(len(recipe.stages))]
        else:
            names = ", ".join(stage.name for stage in recipe.stages)
            raise RecipeError(
                f"override {plain(override)!r}: this run has the stages {names}. Name one: "
                f"stages.{recipe.stages[0].name}.{plain(override)}"
            )
    return placed


def change_run(directory: Path, before: Recipe, after: Recipe, say: Callable[[str], None]) -> None:
    """Carry out `after` from the run's current step on. The caller holds the lock. Does nothing if both recipes are the same."""
    if [stage.name for stage in before.stages] != [stage.name for stage in after.stages]:
        raise RecipeError("the stages of a run that has begun keep their names and their order. Start a new run.")
    pairs = list(zip(before.stages, after.stages, strict=True))
    wanted = {
        old.name: found
        for old, new in pairs
        if (found := [*changed_keys(old.model_dump(mode="json"), new.model_dump(mode="json"), whole=True)])
    }
    if not wanted:
        return
    resume_points = dict(
        zip([stage.name for stage in before.stages], find_resume_points(directory, before, say), strict=True)
    )
    for old, new in pairs:
        if old.name in wanted:
            detailed = [*changed_keys(old.model_dump(mode="json"), new.model_dump(mode="json"))]
            _require_changeable(directory, old, detailed, resume_points[old.name], len(pairs))
    left = any(_left(new, resume_points[new.name]) for _, new in pairs)
    stages = {}
    for old, new in pairs:
        if (changes := wanted.get(new.name)) is not None:
            stages[new.name] = _part(directory, old, new, changes, resume_points[new.name], len(pairs))
            if resume_points[new.name].output is not None and not (left and _only_trackers(changes)):
                _require_continues(directory, before, new, changes, resume_points)
    _write(directory, stages)


def _may_change(key: str) -> bool:
    section, _, rest = key.partition(".")
    return section in EVERY_KEY or rest.partition(".")[0] in CHANGEABLE.get(section, ())


def _require_changeable(
    directory: Path, stage: Stage, changes: Sequence[KeyChange], resume_point: ResumePoint, stages: int
) -> None:
    """Reject, all at once, changed keys that the steps so far depend on."""
    fixed = [change for change in changes if not _may_change(change.key)]
    if not fixed:
        return
    reasons = [f"{one.in_words()}, since {WHY[one.key.partition('.')[0]]}" for one in fixed[:5]]
    raise RecipeError(
        f"{_of_stage(stage.name, stages)}a run that has begun cannot change {'; '.join(reasons)}. "
        f"{_new_run(directory, stage, changes, resume_point)}"
    )


def _new_run(directory: Path, stage: Stage, changes: Sequence[KeyChange], resume_point: ResumePoint) -> str:
    """How to get the change with a new run."""
    place, keys = f"stages.{stage.name}.", [change.key for change in changes]
    settings = [f"{place}{change.key}={json.dumps(change.new)}" for change in changes]
    start = resume_point.checkpoint
    if start is None or stage.student.merge is not None or any(key.startswith(("student", "name")) for key in keys):
        return f"Start a new run: {shlex.join(['opd', 'run', str(recipe_file(directory)), *settings])}"
    begin = [f"{place}student.model={start}", *([f"{place}student.revision=null"] if stage.student.revision else [])]
    command = shlex.join(["opd", "run", str(recipe_file(directory)), *begin, *settings])
    return f"Start a new run, for example from this run's checkpoint: {command}"


def _of_stage(name: str, stages: int) -> str:
    return f"stage {name!r}: " if stages > 1 else ""


def _part(
    directory: Path, old: Stage, new: Stage, changes: Sequence[KeyChange], resume_point: ResumePoint, stages: int
) -> dict[str, Any]:
    """The record of one stage's change in `run.json`. Rejects changes that contradict what was done."""
    result, of = resume_point.result or StageResult(old.name), _of_stage(old.name, stages)
    if result.steps > new.train.steps:
        raise RecipeError(
            f"{of}train.steps {new.train.steps}: {result.steps} steps are done, and steps cannot be undone. Checkpoints of "
            f"earlier steps are in {directory / 'checkpoints' / old.name}."
        )
    if result.steps and not result.before and new.eval.prompts and not old.eval.prompts:
        raise RecipeError(
            f"{of}eval.prompts {new.eval.prompts}: the run began without evaluation, so the student before training was "
            "not measured. Measure its checkpoints with opd eval, or start a new run."
        )
    ended = resume_point.result is not None and (resume_point.output is not None or bool(result.after))
    rates = None
    if result.steps and new.train.learn and any(change.key in RATES for change in changes):
        rates = [learning_rate(result.steps, old.train), learning_rate(result.steps + 1, new.train)]
    return {
        "after": result.steps,
        "keys": {change.key: [change.old, change.new] for change in changes},
        "lr": rates,
        "schedule": f"{new.train.schedule} over {new.train.steps} steps",
        "result": result.state() if ended and _continues(new, result) else None,
    }


def _only_trackers(changes: Sequence[KeyChange]) -> bool:
    return all(change.key in TRACKERS for change in changes)


def _left(new: Stage, resume_point: ResumePoint) -> bool:
    """Whether the stage has work left."""
    return resume_point.output is None or (resume_point.result is not None and _continues(new, resume_point.result))


def _continues(new: Stage, result: StageResult) -> bool:
    """Whether the stage has a step left."""
    known = reopened(StageResult.restored(result.state(), Path()), new)
    return result.steps < new.train.steps and not budget_used_up(new, known) and not meets_stop_rules(new, known)


def _require_continues(
    directory: Path,
    recipe: Recipe,
    new: Stage,
    changes: Sequence[KeyChange],
    resume_points: Mapping[str, ResumePoint],
) -> None:
    """Require that a finished stage has steps left after the change, and that nothing was built on its result."""
    resume_point, of = resume_points[new.name], _of_stage(new.name, len(recipe.stages))
    result = resume_point.result
    assert result is not None
    where = directory / "checkpoints" / new.name
    keys = ", ".join(change.key for change in changes)
    if resume_point.checkpoint is None:
        raise RecipeError(f"{of}{keys}: the stage was passed over, so there is nothing to continue. Start a new run.")
    if not _continues(new, result):
        raise RecipeError(
            f"{of}{keys}: the stage is finished after step {result.steps}, so this changes nothing. {_remedy(new, result)}"
        )
    if (where / REUSED).exists():
        origin = read_sealed(where / REUSED)
        settings = [f"stages.{origin['stage']}.{change.key}={json.dumps(change.new)}" for change in changes]
        raise RecipeError(
            f"{of}{keys}: the stage was taken from {origin['run']}, where its rollouts are. Extend it there: "
            f"{shlex.join(['opd', 'resume', origin['run'], *settings])}"
        )
    begun = [name for name in _built_on(recipe, new.name) if _has_begun(directory, name, resume_points[name])]
    if begun:
        settings = [f"stages.{new.name}.{change.key}={json.dumps(change.new)}" for change in changes]
        again = [] if recipe.plugins else ["--reuse", str(directory)]  # no key covers plugin code
        command = shlex.join(["opd", "run", str(recipe_file(directory)), *settings, *again])
        raise RecipeError(
            f"{of}{keys}: {', '.join(begun)} began with the model that {new.name} ended with after step {result.steps}, and "
            f"would no longer belong to it. Start a new run, which runs both again: {command}"
        )


def _remedy(new: Stage, result: StageResult) -> str:
    if result.steps >= new.train.steps:
        return f"Raise train.steps above {result.steps}."
    if budget_used_up(new, result):
        return f"Its token budget is used up: raise train.tokens above {result.tokens:,} as well, or set it to null."
    return "Early stopping has ended it: change eval.early_stop as well, or set it to null."


def _built_on(recipe: Recipe, name: str) -> list[str]:
    """Stages that depend on this one, directly or through others."""
    found = [name]
    for stage in recipe.stages:  # in the order of dependencies
        if any(edge.stage in found for edge in edges(stage)):
            found.append(stage.name)
    return found[1:]


def _has_begun(directory: Path, name: str, resume_point: ResumePoint) -> bool:
    if resume_point.result is not None or resume_point.checkpoint is not None or name in read_start(directory):
        return True
    if merged_directory(directory, name).is_dir():
        return True
    if not (directory / "rollouts").is_dir():
        return False
    store = RolloutStore(directory / "rollouts", read_only=True)
    return any(id.startswith(f"{name}/") for id in store.entries)


def _write(directory: Path, stages: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the change. The file that makes it effective is written last."""
    facts, current = read_sealed(directory / SEALS), recipe_file(directory)
    changes = facts.get("changes", [])
    name = recipe_name(len(changes) + 1)
    text = changed_text(current.read_text(encoding="utf-8"), {stage: part["keys"] for stage, part in stages.items()})
    write_atomic(directory / name, text)
    for stage, part in stages.items():
        folder = checkpoint_directory(directory, stage, 0).parent
        if part["result"] is not None and (folder / RESULT).exists():
            (directory / "summary.json").unlink(missing_ok=True)  # it says that the run is finished
            (folder / RESULT).unlink()
            sync(folder)
    files = {**facts["files"], name: hashlib.sha256(text.encode()).hexdigest()}
    write_sealed(
        directory / SEALS, {**facts, "files": files, "changes": [*changes, {"recipe": name, "stages": stages}]}
    )


def recover_changed(directory: Path, name: str, files: Mapping[str, str]) -> bool:
    """Rewrite a truncated `resolved-2.yaml` from the recipe before and the changes. Returns whether the result matches the seal."""
    changes = changes_of(directory)
    number = [change["recipe"] for change in changes].index(name)
    earlier = directory / recipe_name(number)
    keys = {stage: part["keys"] for stage, part in changes[number]["stages"].items()}
    text = changed_text(earlier.read_text(encoding="utf-8"), keys)
    if hashlib.sha256(text.encode()).hexdigest() != files[name]:
        return False
    cut = (directory / name).read_bytes().rstrip(b"\0") if (directory / name).is_file() else b""
    if not text.encode().startswith(cut):  # the user edited it
        return False
    write_atomic(directory / name, text)
    return True


def correct_changes(directory: Path, resume_points: Mapping[str, ResumePoint], say: Callable[[str], None]) -> None:
    """If a missing checkpoint takes a stage back to before a change, record that the repeated steps use the changed settings."""
    facts = read_sealed(directory / SEALS)
    corrected = False
    for change in facts.get("changes", []):
        for name, part in change["stages"].items():
            result = resume_points[name].result
            done = 0 if result is None else result.steps
            if part["after"] > done:
                say(
                    f"{name}: steps {done + 1} to {part['after']} are repeated with settings that were changed later: "
                    f"{', '.join(part['keys'])}"
                )
                part["after"], part["lr"], corrected = done, None, True
    if corrected:
        write_sealed(directory / SEALS, facts)


def differences_in_words(before: Recipe, after: Recipe) -> str:
    """The keys that differ between two recipes, for a message: `train.steps 10 → 20`."""
    one, other = ({stage.name: stage.model_dump(mode="json") for stage in recipe.stages} for recipe in (before, after))
    if list(one) != list(other):
        return f"stages {shown_value(list(one))} → {shown_value(list(other))}"
    found = [
        (f"stages.{name}." if len(one) > 1 else "") + change.in_words()
        for name in one
        for change in changed_keys(one[name], other[name])
    ]
    more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
    return "; ".join(found[:10]) + more


def as_overrides(before: Recipe, after: Recipe) -> list[str]:
    """Overrides that turn a run of one recipe into the other; empty if a differing key cannot change."""
    if [stage.name for stage in before.stages] != [stage.name for stage in after.stages]:
        return []
    found = [
        (stage.name, change)
        for stage, other in zip(before.stages, after.stages, strict=True)
        for change in changed_keys(stage.model_dump(mode="json"), other.model_dump(mode="json"), whole=True)
    ]
    if not all(_may_change(change.key) for _, change in found):
        return []
    several = len(before.stages) > 1
    return [f"{f'stages.{name}.' if several else ''}{change.key}={json.dumps(change.new)}" for name, change in found]


def changes_from(directory: Path, stage: str, steps: int) -> list[dict[str, Any]]:
    """Changes of a stage that take effect after this step."""
    return [part for part in parts_of(changes_of(directory), stage) if part["after"] == steps]
