"""Runs: start one, or open the directory of one that is over. Opening needs no torch.

run = opd.run("quickstart", overrides=["train.steps=20"])
run.summary["stages"][0]["evals"], run.metrics[-1]["reverse_kl"], run.model
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.errors import RunDirectoryError

if TYPE_CHECKING:  # `import opd` and `opd --help` stay instant
    from rich.console import Console

    from opd.config import Recipe
    from opd.rollout.store import RolloutStore

RUNS = Path("runs")


class Run:
    """A run directory, dead or alive."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / "resolved.yaml").is_file():
            raise RunDirectoryError(f"{self.directory}: not a run directory (it has no resolved.yaml).")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One object per step. Lines of periodic evaluations have `eval/DOMAIN` keys instead of a loss."""
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []

    @property
    def summary(self) -> dict[str, Any]:
        path = self.directory / "summary.json"
        if not path.is_file():
            raise RunDirectoryError(f"{self.directory}: no summary.json yet; the run has not ended.")
        return json.loads(path.read_text(encoding="utf-8"))

    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first; each is a Hugging Face model directory."""
        return sorted(
            self.directory.glob("checkpoints/*/step-*"), key=lambda path: (path.parent.stat().st_ctime, path.name)
        )

    @property
    def model(self) -> Path:
        """The newest checkpoint: what the run trained."""
        if not self.checkpoints:
            raise RunDirectoryError(f"{self.directory}: no checkpoint has been saved.")
        return self.checkpoints[-1]

    @cached_property
    def rollouts(self) -> RolloutStore:
        from opd.rollout.store import RolloutStore

        return RolloutStore(self.directory / "rollouts", read_only=True)


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe, *, overrides: Iterable[str] = (), out: str | Path | None = None,
    quiet: bool = True, console: Console | None = None,
) -> Run:  # fmt: skip
    """Carry out a recipe (file, shipped name, mapping or `Recipe`) and return the run.

    Ctrl-C raises `opd.errors.Stopped` after a checkpoint has been saved.
    """
    from rich.console import Console

    from opd.config import Recipe, load_recipe

    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    directory = new_directory(Path(out) if out else RUNS / loaded.name)
    _write_recipe(directory, recipe, loaded)
    from opd.training.pipeline import Pipeline

    Pipeline(loaded, directory, console or Console(), quiet).run()
    return Run(directory)


def new_directory(wanted: Path) -> Path:
    """The wanted directory, or the first free `NAME-2`, `NAME-3`, …: a run never overwrites another."""
    candidate, number = wanted, 2
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            if candidate.is_dir() and not any(candidate.iterdir()):
                return candidate
            candidate = wanted.with_name(f"{wanted.name}-{number}")
            number += 1
        except OSError as error:
            raise RunDirectoryError(f"run directory {str(candidate)!r} cannot be made: {error.strerror}.") from None


def _write_recipe(directory: Path, given: Any, resolved: Recipe) -> None:
    """`recipe.yaml` is what the user wrote, `resolved.yaml` what is carried out."""
    import yaml

    from opd.config import Recipe, find_recipe

    if isinstance(given, (str, Path)):
        text = find_recipe(str(given)).read_text(encoding="utf-8")
    elif isinstance(given, Recipe):
        text = given.to_yaml()
    else:
        text = yaml.safe_dump(dict(given), sort_keys=False)
    (directory / "recipe.yaml").write_text(text, encoding="utf-8")
    (directory / "resolved.yaml").write_text(resolved.to_yaml(), encoding="utf-8")
