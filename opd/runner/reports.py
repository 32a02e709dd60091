"""What a step leaves to be read: a line in metrics.jsonl, samples, the panel, and trackers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from opd.config import Recipe, Stage
from opd.errors import UserError
from opd.files import append_text, line_of
from opd.report.page import write_report
from opd.runner.progress import Progress
from opd.runner.results import StageResult
from opd.runner.resume import LINES
from opd.runner.stage import StageRun
from opd.runner.token_lines import TOKENS, room_for, token_line
from opd.runner.trackers import Experiment, Write, open_trackers
from opd.runner.watching import MONITORS, StageWatch
from opd.trainer.samples import few_per_domain


class Reports:
    """`stop`: ends the run at the next safe moment, where a monitor is to."""

    def __init__(self, recipe: Recipe, directory: Path, progress: Progress, stop: Callable[[], None]) -> None:
        self._recipe, self._directory, self._progress, self._stop = recipe, directory, progress, stop
        self._steps = sum(stage.train.steps for stage in recipe.stages)
        self._track: Write | None = None
        self._watch: StageWatch | None = None  # of the stage at work
        self._opened = ExitStack()
        self.written: dict[str, Counter[tuple[str, int]]] = {name: Counter() for name in LINES}  # by stage and step

    def open(self, spec: Stage, result: StageResult) -> None:
        """A stage begins. Trackers see a run once its first one has loaded: a start that fails is nobody's experiment."""
        self._settle()
        self._watch = StageWatch(self._recipe, spec, self._directory, result, self._progress.say, self._stop)
        if self._track is None:
            log, config = self._recipe.stages[0].log, self._recipe.model_dump(mode="json")
            experiment = Experiment(self._directory, self._recipe.name, log.project, config)
            self._track = self._opened.enter_context(open_trackers(log.to, experiment))

    def close(self) -> None:
        self._opened.close()

    def lines(self, stage: str, step: int) -> dict[str, int]:
        """How many lines of a stage each file has up to a step: by this a run that is resumed notices which are missing."""
        return {
            name: sum(count for (of, at), count in counts.items() if of == stage and at <= step)
            for name, counts in self.written.items()
        }

    def step(self, run: StageRun, metrics: Mapping[str, Any], earlier: int) -> None:
        """`earlier`: the steps of the stages before. Trackers count on through a run; wandb drops what goes back."""
        assert self._track is not None
        assert self._watch is not None
        step, log = metrics["step"], run.spec.log
        self._write_line("metrics.jsonl", metrics)
        self._progress.step(metrics)
        for alarm in self._watch.step(metrics):
            self._write_line(MONITORS, alarm)
        numbers = {f"{run.spec.name}/{key}": value for key, value in metrics.items() if isinstance(value, (int, float))}
        self._track(earlier + step, numbers)
        if log.samples and (step - 1) % log.samples_every == 0:
            self._write_samples(run, step, (earlier + step) / max(self._steps, 1))

    def answers(self, run: StageRun, step: int) -> None:
        """What was answered to a few held-out questions; step 0 is before training."""
        for answer in run.answered:
            self._write_line("answers.jsonl", {"step": step, "stage": run.spec.name, **answer})
        run.answered.clear()

    def page(self) -> None:
        """report.html. A run that has ended well does not fail for it."""
        self._settle()
        try:
            write_report([self._directory])
        except UserError as error:
            self._progress.say(f"WARNING: there is no report: {error}")

    def _settle(self) -> None:
        """A stage has saved for the last time."""
        if self._watch is not None:
            self._watch.settle()

    def _write_samples(self, run: StageRun, step: int, progress: float) -> None:
        """A few of this step's completions, so that one can read what the numbers mean. `progress`: share of the run."""
        newest = sorted(reversed(run.trajectories.newest), key=lambda name: name not in run.traces)  # traced ones first
        domains = [(name, run.store.entries[name].domain) for name in newest]
        for rollout_id in few_per_domain(domains, run.spec.log.samples):
            entry = run.store.entries[rollout_id]
            (rollout,) = run.store.load([entry.id])
            line = {
                "step": step,
                "stage": run.spec.name,
                "domain": entry.domain,
                "source": entry.source,
                "prompt": run.student.tokenizer.decode(rollout.prompt_ids.tolist()),
                "response": run.text(rollout),
                "stop": entry.stop,
                "id": entry.id,
                "prompt_id": entry.prompt_id,
            }
            self._write_line("samples.jsonl", line | entry.notes)
            if (trace := run.traces.get(entry.id)) is not None:
                tokens = line_of(token_line(run, step, rollout, trace))
                if len(tokens) <= room_for(self._directory / TOKENS, progress):
                    self._append(TOKENS, tokens, run.spec.name, step)

    def _write_line(self, name: str, values: Mapping[str, Any]) -> None:
        self._append(name, line_of(values), values["stage"], values["step"])

    def _append(self, name: str, line: str, stage: str, step: int) -> None:
        append_text(self._directory / name, line)
        self.written[name][stage, step] += 1
