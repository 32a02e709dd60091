"""Runs: start one, go on with one that was interrupted, or open the directory of one that is over. Opening needs no torch.

run = opd.run("quickstart", overrides=["train.steps=20"])
run = opd.resume("runs/quickstart")
run.summary["stages"][0]["evals"], run.metrics[-1]["reverse_kl"], run.model
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opd.errors import RunDirectoryError
from opd.files import read_sealed, sha256, sync, write_sealed, write_whole

if TYPE_CHECKING:  # `import opd` and `opd --help` stay instant
    from rich.console import Console

    from opd.config import Recipe
    from opd.rollout.store import RolloutStore

RUNS = Path("runs")
SEALS = "run.json"  # checksums of the files that say what is carried out


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
        whole = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []  # not a line being written
        return [json.loads(line) for line in whole]

    @property
    def summary(self) -> dict[str, Any]:
        path = self.directory / "summary.json"
        if not path.is_file():
            raise RunDirectoryError(f"{self.directory}: no summary.json yet; the run has not ended.")
        return json.loads(path.read_text(encoding="utf-8"))

    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first; each is a Hugging Face model directory."""
        import yaml

        stages = yaml.safe_load((self.directory / "resolved.yaml").read_text(encoding="utf-8"))["stages"]
        order = [stage["name"] for stage in stages]
        return [path for name in order for path in sorted(self.directory.glob(f"checkpoints/{name}/step-*"))]

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

    Ctrl-C raises `opd.errors.Stopped` after a checkpoint has been saved; SIGTERM raises `opd.errors.Preempted`.
    """
    from rich.console import Console

    from opd.config import Recipe, load_recipe

    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    directory = new_directory(Path(out) if out else RUNS / loaded.name)
    _write_recipe(directory, recipe, loaded)
    from opd.training.pipeline import Pipeline

    Pipeline(loaded, directory, console or Console(), quiet).run()
    return Run(directory)


def resume(
    directory: str | Path, *, mode: Literal["prefill", "exact"] | None = None, quiet: bool = True, console: Console | None = None,
) -> Run:  # fmt: skip
    """Go on with a run that was killed, stopped, preempted or ran out of disk, and return it. A finished one is returned as it is.

    `mode` overrides the recipe's `checkpoint.resume` for rollouts that were unfinished.
    """
    from rich.console import Console

    found = Run(directory)
    recipe = verified_recipe(found.directory)
    if mode is not None:
        changed = [
            stage.model_copy(update={"checkpoint": stage.checkpoint.model_copy(update={"resume": mode})})
            for stage in recipe.stages
        ]
        recipe = recipe.model_copy(update={"stages": changed})
    from opd.training.pipeline import Pipeline

    Pipeline(recipe, found.directory, console or Console(), quiet).run(resume=True)
    return found


def verified_recipe(directory: Path) -> Recipe:
    """What the run carries out, after checking that `resolved.yaml` is the file the run wrote."""
    from opd.config import load_recipe

    if not (directory / SEALS).is_file():
        raise RunDirectoryError(
            f"{directory / SEALS} is missing, so nothing says that resolved.yaml is what the run began with. Start again: "
            f"opd run {directory / 'resolved.yaml'}"
        )
    expected = read_sealed(directory / SEALS)
    for name, digest in expected["files"].items():
        path = directory / name
        if not path.is_file():
            raise RunDirectoryError(f"{path} is missing.")
        if sha256(path) != digest:
            raise RunDirectoryError(
                f"{path} was altered since the run began (its sha256 does not match {SEALS}). A changed recipe is a new run: "
                f"opd run {path}"
            )
    return load_recipe(directory / "resolved.yaml")


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
    write_whole(directory / "recipe.yaml", text)
    write_whole(directory / "resolved.yaml", resolved.to_yaml())
    write_sealed(directory / SEALS, {"files": {"resolved.yaml": sha256(directory / "resolved.yaml")}})
    sync(directory.parent)
