"""`run:DIR#STAGE` in place of a model: what a finished stage of another run saved. Read once, so `resolved.yaml` names the checkpoint."""

from __future__ import annotations

from pathlib import Path

import yaml

from opd.config.plain_data import shown
from opd.errors import RecipeError, RunDirectoryError
from opd.files import SEALS, read_sealed

RESULT = "result.json"  # what the runner writes when a stage has ended


def model_of_run(directory: Path, stage: str | None) -> str:
    """The model that a stage ended with; by default the last one of the run's recipe."""
    what = f"model {shown(f'run:{directory}' + (f'#{stage}' if stage else ''))}"
    if not (directory / SEALS).is_file() or not (directory / "resolved.yaml").is_file():
        raise RecipeError(f"{what}: no run directory. Name one that `opd run` made.")
    names = [one["name"] for one in yaml.safe_load((directory / "resolved.yaml").read_text(encoding="utf-8"))["stages"]]
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
