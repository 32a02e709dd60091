"""Reuse finished stages of another run if their settings and the content of their inputs are the same.

A stage's key is a hash of opd's version and source, the stage's settings, the content of its inputs, and the keys of the stages it depends
on. So a change affects its own stage and those that depend on it. A stage changed during its run gets a different key, unless the
result is the same: it got more steps, and its learning rate does not depend on their number.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd.common.errors import RunDirectoryError, UserError
from opd.common.files import (
    SEALS,
    append_text,
    line_of,
    lines_checked,
    read_lines,
    read_sealed,
    sha256,
    sync,
    this_version,
    write_sealed,
)
from opd.recipe import Recipe, Stage, load_begun
from opd.recipe.graph import edges
from opd.recipe.run_changes import parts_of, recipe_file
from opd.recipe.stage import MERGED
from opd.rewards.custom import callables
from opd.runner.checkpoint import LINES, RESULT, checkpoint_directory, verify_checkpoint
from opd.runner.inputs import Inputs, merged_directory

SHOWN = 4  # differences that are named
REUSED = "reused.json"  # next to the result: which run a stage was taken from
WITHOUT_EFFECT = {"log", "monitors", "hub", "checkpoint", "store"}  # settings that do not affect the model


def stage_keys(
    recipe: Recipe, inputs: Mapping[str, Inputs], version: str, changes: Sequence[Mapping[str, Any]] = ()
) -> dict[str, str]:
    """Name -> key of every stage, as this version of opd carries it out. `changes`: those made during the run."""
    keys: dict[str, str] = {}
    for stage in recipe.stages:  # in the order of dependencies
        facts = sorted(inputs[stage.name].items())  # with names, since two files may have been swapped
        needs = sorted((edge.key, keys[edge.stage]) for edge in edges(stage))
        settings = _settings(stage)
        history = changed_course(stage, parts_of(changes, stage.name))
        whole = json.dumps([version, settings, facts, needs, *history], sort_keys=True)
        keys[stage.name] = hashlib.sha256(whole.encode()).hexdigest()
    return keys


def changed_course(stage: Stage, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Changes that make the stage's result differ from that of a run which begins with its settings."""
    found = []
    for part in parts:
        keys = {key for key in part["keys"] if key.partition(".")[0] not in WITHOUT_EFFECT}
        only_longer = keys <= {"train.steps"} and stage.train.schedule == "constant" and not stage.rollout.staleness
        if part["after"] and keys and not only_longer:
            found.append([part["after"], {key: part["keys"][key] for key in sorted(keys)}])
    return found


def _settings(stage: Stage) -> dict[str, Any]:
    return stage.model_dump(mode="json", exclude=WITHOUT_EFFECT)


def changed_settings(here: Mapping[str, Any], there: Mapping[str, Any], path: str = "") -> list[str]:
    """The innermost keys with different values."""
    found = []
    for key in (key for key in {**here, **there} if here.get(key) != there.get(key)):
        one, other, name = here.get(key), there.get(key), f"{path}{key}"
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += changed_settings(one, other, f"{name}.")
        else:
            found.append(name)
    return found


class EarlierStages:
    """The finished stages of a run directory, by key."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not (directory / SEALS).is_file():
            raise RunDirectoryError(f"--reuse {directory}: not a run directory. Name one that `opd run` made.")
        sealed, current = read_sealed(directory / SEALS), recipe_file(directory)
        if sha256(current) != sealed["files"][current.name]:
            raise RunDirectoryError(f"--reuse {directory}: {current.name} has been altered since that run began.")
        recipe = load_begun(directory, current)
        if recipe.plugins:
            raise UserError(f"--reuse {directory}: its recipe has plugins, whose code no key covers. Run it again.")
        self._inputs, self._version = sealed.get("inputs") or {}, sealed["opd"]
        self._changes = sealed.get("changes", [])
        keys = stage_keys(recipe, self._inputs, self._version, self._changes) if self._inputs else {}
        self.by_key = {key: name for name, key in keys.items() if (self.folder(name) / RESULT).is_file()}
        self._finished = {stage.name: stage for stage in recipe.stages if stage.name in self.by_key.values()}

    def folder(self, stage: str) -> Path:
        return checkpoint_directory(self.directory, stage, 0).parent

    def difference(self, stage: Stage, inputs: Inputs) -> str:
        """How this stage differs from a finished stage of the same name; empty if there is none."""
        there = self._finished.get(stage.name)
        if there is None:
            return ""
        if self._version != this_version():
            return "opd itself has changed"
        before = self._inputs[stage.name]
        changed = changed_settings(_settings(stage), _settings(there))
        changed += [name for name in {**inputs, **before} if inputs.get(name) != before.get(name)]
        if not changed and changed_course(there, parts_of(self._changes, there.name)):
            return "its settings were changed while it ran"
        return ", ".join(changed[:SHOWN]) or "a stage that it depends on differs"


def reuse_stages(
    recipe: Recipe, inputs: Mapping[str, Inputs], directory: Path, earlier: Sequence[Path], without: Sequence[str],
    say: Callable[[str], None],
) -> list[str]:  # fmt: skip
    """Put finished stages of other runs into this run's directory. `without`: stages that run in any case."""
    if earlier and recipe.plugins:
        raise UserError("--reuse: the recipe has plugins, whose code no key covers. Drop --reuse.")
    if earlier and any(True for stage in recipe.stages for _ in callables(stage.rewards)):
        raise UserError("reuse: rewards are Python callables, whose code no key covers. Drop reuse, or rewards.")
    runs = [EarlierStages(path) for path in earlier]
    keys = stage_keys(recipe, inputs, this_version())
    found = {name: next((run for run in runs if key in run.by_key), None) for name, key in keys.items()}
    taken = {name: run for name, run in found.items() if run is not None and name not in without}
    while (
        read := {
            edge.stage for stage in recipe.stages if stage.name not in taken for edge in edges(stage) if edge.rollouts
        }
        & taken.keys()
    ):  # their rollouts are in the other run's store
        for name in read:
            say(
                f"{name}: finished in {taken.pop(name).directory}, and run again, because a later stage reads its rollouts"
            )
    for name, run in taken.items():
        _copy_stage(run, name, run.by_key[keys[name]], directory)
        say(f"{name}: taken from {run.directory}: the same settings, the same inputs")
    for stage in (stage for stage in recipe.stages if stage.name not in (*taken, *without)):
        for run in runs:
            if found[stage.name] is None and (why := run.difference(stage, inputs[stage.name])):
                say(f"{stage.name}: finished in {run.directory}, but different here: {why}")
    return list(taken)


def _copy_stage(run: EarlierStages, name: str, there: str, directory: Path) -> None:
    """Copy the stage's last and best checkpoints, its result and its lines. The folder gets its final name when it is complete."""
    folder, target = run.folder(there), checkpoint_directory(directory, name, 0).parent
    ended, partial = read_sealed(folder / RESULT), target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True)
    for checkpoint in dict.fromkeys([ended["checkpoint"], ended["result"]["best"]]):
        if checkpoint is not None and (folder / checkpoint).is_dir():
            verify_checkpoint(folder / checkpoint)
            shutil.copytree(folder / checkpoint, partial / checkpoint, copy_function=_linked)
    merged, where = merged_directory(run.directory, there), merged_directory(directory, name)
    needed = (ended.get("passed_over") or "").startswith(MERGED)  # its output is the merged model itself
    if needed or merged.is_dir():
        shutil.copytree(merged, unfinished := where.with_name(f".{name}.partial"), copy_function=_linked)
        unfinished.rename(where)
    for file in LINES:
        if (run.directory / file).is_file():
            lines = read_lines(run.directory / file, checked=lines_checked(run.directory)).whole
            taken = (line_of({**line, **_without_recipe(line)}) for line in lines if line["stage"] == there)
            append_text(directory / file, "".join(taken))
    write_sealed(partial / REUSED, {"run": str(run.directory.absolute()), "stage": there})
    write_sealed(partial / RESULT, ended)
    partial.rename(target)
    sync(target.parent)


def _without_recipe(line: Mapping[str, Any]) -> dict[str, None]:
    """An alarm without its remedy recipe, which stays in the run whose checkpoint it continues."""
    return {key: None for key in ("recipe", "changes", "command") if key in line and "monitor" in line}


def _linked(source: str, target: str) -> None:
    """Hard-link the file if it is on the same disk. Checkpoints are never modified."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
