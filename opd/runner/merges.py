"""The model that a stage starts from where it is merged from others: made once, kept in the run directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from opd.config import Stage
from opd.files import sync
from opd.runner.inputs import Inputs, revision_begun_with

FOLDER = "merged"


def merged_directory(directory: Path, stage: str) -> Path:
    return directory / FOLDER / stage


def merge_start(stage: Stage, directory: Path, resolve: Callable[[str], str], recorded: Inputs) -> None:
    """Under its name the model is whole; one that a process before has made is used again."""
    where, merge = merged_directory(directory, stage.name), stage.student.merge
    if merge is None or where.is_dir():
        return

    def named(name: str) -> tuple[str, str | None]:
        return resolve(name), revision_begun_with(recorded, name, None)

    merge.require(named)
    partial = where.with_name(f".{where.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    merge.make(named).save(partial)
    for path in partial.rglob("*"):
        sync(path)
    partial.rename(where)
    sync(where.parent)
