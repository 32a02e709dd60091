"""What a step leaves to be read: a line in metrics.jsonl, samples, the panel, and trackers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from opd.config import Recipe
from opd.files import line_of
from opd.runner.progress import Progress
from opd.runner.stage import StageRun
from opd.runner.trackers import Experiment, Write, open_trackers


class Reports:
    def __init__(self, recipe: Recipe, directory: Path, progress: Progress) -> None:
        self._recipe, self._directory, self._progress = recipe, directory, progress
        self._track: Write | None = None
        self._opened = ExitStack()

    def open(self) -> None:
        """Trackers see a run once its first stage has loaded: a start that fails is nobody's experiment."""
        if self._track is None:
            log, config = self._recipe.stages[0].log, self._recipe.model_dump(mode="json")
            experiment = Experiment(self._directory, self._recipe.name, log.project, config)
            self._track = self._opened.enter_context(open_trackers(log.to, experiment))

    def close(self) -> None:
        self._opened.close()

    def step(self, run: StageRun, metrics: Mapping[str, Any], earlier: int) -> None:
        """`earlier`: the steps of the stages before. Trackers count on through a run; wandb drops what goes back."""
        assert self._track is not None
        step, log = metrics["step"], run.spec.log
        self._write_line("metrics.jsonl", metrics)
        self._progress.step(metrics)
        numbers = {f"{run.spec.name}/{key}": value for key, value in metrics.items() if isinstance(value, (int, float))}
        self._track(earlier + step, numbers)
        if log.samples and (step - 1) % log.samples_every == 0:
            self._write_samples(run, step)

    def _write_samples(self, run: StageRun, step: int) -> None:
        """A few of this step's completions, so that one can read what the numbers mean."""
        shown: dict[str, int] = {}
        for rollout_id in reversed(run.trajectories.newest):
            entry = run.store.entries[rollout_id]
            if shown.get(entry.domain, 0) < run.spec.log.samples:
                shown[entry.domain] = shown.get(entry.domain, 0) + 1
                (rollout,) = run.store.load([entry.id])
                prompt = run.student.tokenizer.decode(rollout.prompt_ids.tolist())
                line = {
                    "step": step,
                    "stage": run.spec.name,
                    "domain": entry.domain,
                    "source": entry.source,
                    "prompt": prompt,
                    "response": run.text(rollout),
                    "stop": entry.stop,
                }
                self._write_line("samples.jsonl", line | entry.notes)

    def _write_line(self, name: str, values: Mapping[str, Any]) -> None:
        with (self._directory / name).open("a", encoding="utf-8") as file:
            file.write(line_of(values))
