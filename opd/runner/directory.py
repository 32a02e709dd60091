"""Reads a run directory, whether the run is active or not. Needs no torch.

run = opd.Run("runs/quickstart")
run.summary["stages"][0]["evals"], run.metrics[-1]["reverse_kl"], run.model
"""

from __future__ import annotations

import warnings
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opd.common.errors import RunDirectoryError
from opd.common.files import is_file, json_object, lines_checked, read_lines, reading

if TYPE_CHECKING:
    from opd.store import RolloutStore


def model_named(name: str) -> str:
    """The model of this name. For a run directory, the model in its last checkpoint."""
    directory = Path(name)
    is_run = is_file(directory / "resolved.yaml") and not is_file(directory / "config.json")
    return str(Run(directory).model) if is_run else name


class Run:
    """A run directory, whether the run is active or not."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()  # the program may change its working directory
        with reading(self.directory):
            found = (self.directory / "resolved.yaml").is_file()
        if not found:
            raise RunDirectoryError(f"{self.directory}: not a run directory (it has no resolved.yaml).")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    def _repr_html_(self) -> str:
        """For notebooks."""
        from opd.report.page import run_html

        return run_html(self.directory)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One object per step, with `eval/DOMAIN` keys if it was evaluated. A damaged line raises an error that names it."""
        return self._lines("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """The completions that were written down during the run."""
        return self._lines("samples.jsonl")

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """Some of the samples token by token: log-probs and likeliest tokens of student and teacher, weights, gates, advantages."""
        return self._lines("tokens.jsonl")

    @property
    def answers(self) -> list[dict[str, Any]]:
        """Answers to a few held-out questions at every evaluation; step 0 is before training."""
        return self._lines("answers.jsonl")

    @property
    def monitors(self) -> list[dict[str, Any]]:
        """Alarms of monitors: step, monitor, value, threshold, text, remedy, and the recipe that applies it."""
        return self._lines("monitors.jsonl")

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        found = read_lines(path, checked=lines_checked(self.directory))
        number = next(iter(found.damaged), None)
        if number is None and found.torn and (self.directory / "summary.json").exists():  # else it is being written
            number = len(found.whole) + 1
        if number is not None:
            raise RunDirectoryError(
                f"{path}, line {number}: the line was altered or cut off (its checksum does not match). Delete it to read the others."
            )
        return found.whole

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`. If the sealed result of a finished stage differs, the result is used, with a warning."""
        from opd.report.facts import checked_stages

        path = self.directory / "summary.json"
        if not path.exists():
            raise RunDirectoryError(f"{self.directory}: no summary.json yet; the run has not ended.")
        found = json_object(path)
        stages, differences = checked_stages(self.directory, found)
        for line in differences:
            warnings.warn(line, stacklevel=2)
        return {**found, "stages": stages}

    @property
    def checkpoints(self) -> list[Path]:
        """All checkpoints, oldest first. Each is a Hugging Face model directory."""
        from opd.recipe.paths import read_resolved
        from opd.runner.checkpoint import steps_in

        order = [stage["name"] for stage in read_resolved(self.directory)["stages"]]
        return [path for name in order for path in steps_in(self.directory / "checkpoints" / name)]

    @property
    def model(self) -> Path:
        """The newest checkpoint: the model that the run trained."""
        if not self.checkpoints:
            raise RunDirectoryError(f"{self.directory}: no checkpoint has been saved.")
        return self.checkpoints[-1]

    @cached_property
    def rollouts(self) -> RolloutStore:
        from opd.store import RolloutStore

        return RolloutStore(self.directory / "rollouts", read_only=True)
