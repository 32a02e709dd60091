"""Merged models that stages start from. Each is created once and kept in the run directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from opd.common.files import fresh_directory, sync
from opd.models.load import locate
from opd.models.merging import same_directory
from opd.recipe import STAGE_PREFIX, Recipe, Stage
from opd.runner.inputs import Inputs, revision_begun_with

FOLDER = "merged"


def merged_directory(directory: Path, stage: str) -> Path:
    return directory / FOLDER / stage


class PlannedModels:
    """The models that stages will start from and save, before any stage has run. Existing models of the same shapes stand for them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str | None]] = {}  # stage:NAME, merge:NAME -> a model and its revision
        self._bases: dict[str, str | None] = {}  # stage:NAME -> the base of its adapters; None: it has none

    def resolve(self, name: str) -> str:
        return self._named(name)[0]

    def add(self, stage: Stage) -> None:
        """Add the next stage, in the order of the recipe. Rejects merges with parts that do not fit each other."""
        student, saved = stage.student, STAGE_PREFIX + stage.name
        if student.merge is not None:
            student.merge.require_planned(self._named, self._bases)
            self._known[student.model] = self._named(student.merge.reads()[0])
        self._known[saved] = self._known.get(student.model, (student.model, student.revision))
        self._bases[saved] = None if student.lora is None else self._base(student.model, student.revision)

    def _named(self, name: str) -> tuple[str, str | None]:
        return self._known.get(name, (name, None))

    def _base(self, start: str, revision: str | None) -> str:
        return start if start in self._known else same_directory(locate(start, revision).path)


def require_merges(recipe: Recipe) -> None:
    """Reject impossible merges before the first stage begins. The shapes of all parts are known."""
    if any(stage.student.merge is not None for stage in recipe.stages):
        planned = PlannedModels()
        for stage in recipe.stages:
            planned.add(stage)


def merge_start(stage: Stage, directory: Path, resolve: Callable[[str], str], recorded: Inputs) -> None:
    """Create the merged model, or use the one of an earlier process. A directory with the final name is complete."""
    where, merge = merged_directory(directory, stage.name), stage.student.merge
    if merge is None or where.is_dir():
        return

    def named(name: str) -> tuple[str, str | None]:
        return resolve(name), revision_begun_with(recorded, name, None)

    merge.require(named)
    partial = fresh_directory(where.with_name(f".{where.name}.partial"))
    merge.make(named).save(partial)
    for path in partial.rglob("*"):
        sync(path)
    partial.rename(where)
    sync(where.parent)
