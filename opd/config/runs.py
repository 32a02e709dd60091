"""`run:DIR#STAGE` in place of a model: what a finished stage of another run saved. Read once, so `resolved.yaml` names the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from opd.config.plain_data import shown
from opd.config.run_changes import RESOLVED
from opd.errors import RecipeError, RunDirectoryError
from opd.files import SEALS, read_sealed, reading

RESULT = "result.json"  # what the runner writes when a stage has ended


def read_resolved(directory: Path, name: str = RESOLVED) -> dict[str, Any]:
    """`resolved.yaml` of a run as plain data, or the file of a later part. One that was altered or cut, so that it names no stages,
    is an error.
    """
    path = directory / name
    with reading(path):
        text = path.read_bytes()
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):  # not YAML, not UTF-8, or a date that does not exist
        found = None
    stages = found.get("stages") if isinstance(found, dict) else None
    named = isinstance(stages, list) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) for one in stages
    )
    if not isinstance(found, dict) or not stages or not named:
        raise RunDirectoryError(
            f"{path} was altered or cut off: it does not name the run's stages. Restore it, or try `opd resume {directory}`, which "
            "can write it again where recipe.yaml is intact."
        )
    return found


def model_of_run(directory: Path, stage: str | None) -> str:
    """The model that a stage ended with; by default the last one of the run's recipe."""
    what = f"model {shown(f'run:{directory}' + (f'#{stage}' if stage else ''))}"
    if not (directory / SEALS).is_file() or not (directory / "resolved.yaml").is_file():
        raise RecipeError(f"{what}: no run directory. Name one that `opd run` made.")
    try:
        names = [one["name"] for one in read_resolved(directory)["stages"]]
    except RunDirectoryError as error:
        raise RecipeError(f"{what}: {error}") from None
    name = names[-1] if stage is None else stage
    if name not in names:
        raise RecipeError(f"{what}: the run has no stage {name!r}; it has {', '.join(names)}.")
    folder = directory / "checkpoints" / name
    if not (folder / RESULT).is_file():
        raise RecipeError(f"{what}: stage {name!r} is not finished. Let it come to its end: opd resume {directory}")
    try:
        return output_of(directory, name)
    except RunDirectoryError as error:
        raise RecipeError(f"{what}: {error}") from None


def output_of(directory: Path, stage: str) -> str:
    """What a finished stage of a run ended with: its last checkpoint, or, where it was passed over, what it would have started from."""
    folder = directory / "checkpoints" / stage
    ended = read_sealed(folder / RESULT)
    if ended["checkpoint"] is not None:
        return str(folder / ended["checkpoint"])
    start: str = ended["passed_over"]
    if start.startswith("stage:"):
        return output_of(directory, start.removeprefix("stage:"))
    return str(directory / "merged" / start.removeprefix("merge:")) if start.startswith("merge:") else start
