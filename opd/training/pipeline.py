"""A whole recipe: stage after stage into one run directory, evaluated, checkpointed, and stoppable at any moment."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from opd.config import STAGE_PREFIX, Recipe, Stage
from opd.errors import OpdError, RecipeError, Stopped, TrainingError
from opd.rollout.store import RolloutStore
from opd.training.checkpoint import retain, save_checkpoint
from opd.training.progress import Progress
from opd.training.results import StageResult, results_table, watched
from opd.training.stage import StageRun, checkpoint_directory, model_card
from opd.training.step import train_step
from opd.training.trackers import Tracker, open_trackers

KNOBS = {
    "sample": "sampler.slots or rollout.max_new_tokens",
    "score": "teachers.NAME.batch_tokens",
    "update": "train.micro_tokens, or set student.gradient_checkpointing: true",
    "evaluate": "sampler.slots or eval.max_new_tokens",
}


class Pipeline:
    def __init__(self, recipe: Recipe, directory: Path, console: Console, quiet: bool = False) -> None:
        self._recipe, self._directory, self._console = recipe, directory, console
        self._progress = Progress(console, directory / "log.txt", quiet)
        self._outputs: dict[str, Path] = {}  # stage name -> the model it saved
        self._results: list[StageResult] = []
        self._stop_requested = False
        self._phase = "loading"
        self._trackers: list[Tracker] = []

    def run(self) -> None:
        """Every stage in turn. Whatever happens, the run directory is left complete up to that moment."""
        status = "failed"
        with _stop_on_signals(self._request_stop), self._progress:
            store = RolloutStore(self._directory / "rollouts")
            self._trackers = open_trackers(
                self._recipe.stages[0].log, self._directory, self._recipe.name, self._recipe.model_dump(mode="json")
            )
            try:
                for stage in self._recipe.stages:
                    self._stage(stage, store)
                status = "done"
            except Stopped:
                status = "stopped"
            finally:
                store.close()
                for tracker in self._trackers:
                    tracker.close()
                self._summarise(status)
        if status == "stopped":
            raise Stopped

    # One stage

    def _stage(self, spec: Stage, store: RolloutStore) -> None:
        result = StageResult(spec.name)
        self._results.append(result)
        store.configure(commit_ms=spec.store.commit_ms, fsync=spec.store.fsync, hidden=spec.store.hidden)
        self._progress.start_stage(spec.name, spec.train.steps)
        started = time.monotonic()
        with self._explain_memory():
            self._on_phase("loading")
            run = StageRun(
                spec,
                store,
                self._resolve_model,
                check_stop=self._check_stop,
                on_phase=self._on_phase,
                on_token=self._progress.token,
            )
        self._progress.say(f"{spec.name}: {spec.train.steps} steps on {run.device}; run directory {self._directory}")
        metrics: dict[str, Any] = {}
        try:
            with self._explain_memory():
                self._before(run, result)
                metrics = self._train(run, result)
                self._finish(run, result, metrics)
        except (Stopped, OpdError) as stop:
            where = self._rescue(run, result, metrics)
            self._progress.say(f"{spec.name}: stopped after step {result.steps}; {where}")
            if isinstance(stop, TrainingError):
                raise TrainingError(f"{stop} Afterwards: {where}.") from None
            raise
        finally:
            result.seconds = time.monotonic() - started

    def _train(self, run: StageRun, result: StageResult) -> dict[str, Any]:
        """Steps, each reported, evaluated and saved as the recipe says; returns the last step's metrics."""
        metrics: dict[str, Any] = {}
        for step in range(1, run.spec.train.steps + 1):
            self._check_stop()
            metrics = train_step(run, step)
            result.steps, result.tokens = step, result.tokens + metrics["tokens"]
            better, enough = self._evaluate(run, result, step, metrics)
            self._report(run, step, metrics)
            if better or enough or (run.spec.checkpoint.every and step % run.spec.checkpoint.every == 0):
                self._keep(run, result, step, metrics, better)
            if enough:
                self._progress.say(
                    f"{run.spec.name}: early stop after step {step}; {run.spec.eval.metric} was best at step {result.best_step}"
                )
                break
        return metrics

    def _before(self, run: StageRun, result: StageResult) -> None:
        if not run.questions:
            return
        self._on_phase("evaluate")
        result.before = run.evaluate(run.engine)
        if run.spec.eval.teachers and run.teachers:
            result.teachers = run.evaluate_teachers()
            result.teacher_of = dict(run.routes.get("teacher", {}))
        if run.spec.eval.weight_average:
            result.weight_average = run.evaluate_weight_average()

    def _evaluate(self, run: StageRun, result: StageResult, step: int, metrics: dict[str, Any]) -> tuple[bool, bool]:
        """Periodic evaluation, added to the step's metrics: (better than ever, early stopping says enough)."""
        spec = run.spec.eval
        if not spec.every or step % spec.every or step == run.spec.train.steps or not run.questions:
            return False, False
        self._on_phase("evaluate")
        scores = run.evaluate(run.engine)
        metrics |= {f"eval/{domain}": score.value for domain, score in scores.items()}
        better = result.note_evaluation(step, scores, watched(scores, spec.metric))
        return better, spec.early_stop is not None and result.evaluations_since_best >= spec.early_stop.patience

    def _finish(self, run: StageRun, result: StageResult, metrics: Mapping[str, Any]) -> None:
        better = False
        if run.questions:
            self._on_phase("evaluate")
            result.after = run.evaluate(run.engine)
            better = result.note_evaluation(result.steps, result.after, watched(result.after, run.spec.eval.metric))
        final = self._keep(run, result, result.steps, metrics, better)
        self._outputs[run.spec.name] = final
        if run.spec.hub is not None:
            push(final, run.spec.hub.repo, run.spec.hub.private)

    def _keep(self, run: StageRun, result: StageResult, step: int, metrics: Mapping[str, Any], better: bool) -> Path:
        where = self._save(run, result, step, metrics)
        result.best = where if better else result.best
        retain(where.parent, run.spec.checkpoint.keep, result.best)
        return where

    def _save(self, run: StageRun, result: StageResult, step: int, metrics: Mapping[str, Any]) -> Path:
        directory = checkpoint_directory(self._directory, run.spec.name, step)
        if directory.is_dir() and result.saved == step:
            return directory
        state = {
            "step": step,
            "stage": run.spec.name,
            "version": run.version,
            "stream": run.stream.state(),
            "seed": run.spec.seed,
        }
        directory.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(
            directory, run.student, run.stop_ids, model_card(run.spec, step, metrics), run.optimiser.tensors(), state
        )
        result.saved = step
        return directory

    def _rescue(self, run: StageRun, result: StageResult, metrics: Mapping[str, Any]) -> str:
        """Save what is there when a run ends early, unless the weights themselves are broken; says where they are."""
        if all(bool(torch.isfinite(parameter).all()) for parameter in run.student.trainable().values()):
            return f"the weights of step {result.steps} are in {self._save(run, result, result.steps, metrics)}"
        if result.saved is None:
            return "the weights are not finite and no checkpoint had been saved; set checkpoint.every"
        return f"the weights are not finite; the last good checkpoint is {checkpoint_directory(self._directory, run.spec.name, result.saved)}"

    def _report(self, run: StageRun, step: int, metrics: Mapping[str, Any]) -> None:
        self._write_line("metrics.jsonl", metrics)
        self._progress.step(metrics)
        numbers = {f"{run.spec.name}/{key}": value for key, value in metrics.items() if isinstance(value, (int, float))}
        for tracker in self._trackers:
            tracker.log(step, numbers)
        if run.spec.log.samples and (step - 1) % run.spec.log.samples_every == 0:
            self._write_samples(run, step)

    def _write_samples(self, run: StageRun, step: int) -> None:
        """A few of this step's completions, so that one can read what the numbers mean."""
        shown: dict[str, int] = {}
        for entry in reversed(run.store.entries.values()):
            if not entry.id.startswith(f"{run.spec.name}/") or (
                len(shown) == len(run.domains) and min(shown.values()) >= run.spec.log.samples
            ):
                break
            if shown.get(entry.domain, 0) < run.spec.log.samples:
                shown[entry.domain] = shown.get(entry.domain, 0) + 1
                (rollout,) = run.store.load([entry.id])
                prompt = run.student.tokenizer.decode(rollout.prompt_ids.tolist())
                line = {
                    "step": step,
                    "domain": entry.domain,
                    "source": entry.source,
                    "prompt": prompt,
                    "response": run.text(rollout),
                    "stop": entry.stop,
                }
                self._write_line("samples.jsonl", line | entry.notes)

    # Stopping, errors, files

    def _request_stop(self) -> None:
        self._stop_requested = True
        self._progress.say("stopping: saving a checkpoint (press Ctrl-C again to leave at once)")

    def _check_stop(self) -> None:
        if self._stop_requested:
            raise Stopped

    def _on_phase(self, phase: str) -> None:
        self._phase = phase
        self._progress.phase(phase)

    def _resolve_model(self, name: str) -> str:
        if not name.startswith(STAGE_PREFIX):
            return name
        stage = name.removeprefix(STAGE_PREFIX)
        if stage not in self._outputs:
            raise RecipeError(
                f"model {name!r}: no earlier stage is called {stage!r}; there are {', '.join(self._outputs) or 'none'}."
            )
        return str(self._outputs[stage])

    @contextmanager
    def _explain_memory(self) -> Iterator[None]:
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise self._out_of_memory(error) from None
        except RuntimeError as error:
            if isinstance(error, OpdError) or "can't allocate memory" not in str(error):
                raise
            raise self._out_of_memory(error) from None

    def _out_of_memory(self, error: BaseException) -> TrainingError:
        knob = KNOBS.get(self._phase, "the size of the models, or load them in bfloat16")
        return TrainingError(
            f"out of memory in phase {self._phase!r}. Lower {knob}. ({str(error).splitlines()[0][:200] if str(error) else 'MemoryError'})"
        )

    def _write_line(self, name: str, values: Mapping[str, Any]) -> None:
        with (self._directory / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def _summarise(self, status: str) -> None:
        summary = {
            "recipe": self._recipe.name,
            "status": status,
            "stages": [result.to_json() for result in self._results],
        }
        partial = self._directory / "summary.json.partial"
        partial.write_text(json.dumps(summary, indent=1), encoding="utf-8")
        os.replace(partial, self._directory / "summary.json")
        for result in self._results:
            if result.before and status == "done":
                self._progress.say("")
                self._progress.show(results_table(result))


def push(directory: Path, repo: str, private: bool) -> None:
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    api.upload_folder(repo_id=repo, folder_path=directory, ignore_patterns=["optimiser.safetensors", "trainer.json"])


@contextmanager
def _stop_on_signals(request: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask for a clean stop; a second one interrupts at once. Only the main thread may do this."""
    seen = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            raise KeyboardInterrupt
        request()

    try:
        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller keeps its own handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
