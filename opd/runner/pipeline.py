"""Carries out a recipe stage by stage in one run directory, with evaluation and checkpoints. It can be stopped at any time."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from opd.common.context import RunContext
from opd.common.errors import OpdError, Preempted, RecipeError, RunDirectoryError, Stopped, TrainingError
from opd.common.files import disk_errors, json_object, lines_checked, remove_partials
from opd.loop.metrics import StepReport
from opd.loop.oom_retry import explain_memory
from opd.loop.parts import StageParts
from opd.loop.ranks import Ranks
from opd.loop.step import run_step
from opd.objective.batch import Written
from opd.plugins import plugin_errors
from opd.recipe import STAGE_PREFIX, Recipe, Stage
from opd.recipe.graph import ChosenStages, require_reachable
from opd.recipe.run_changes import changes_of, part_in_words, recipe_name
from opd.recipe.stage import MERGED
from opd.report.facts import checked_stages
from opd.runner.checkpoint import (
    LINES,
    ResumePoint,
    Saver,
    StageCheckpoints,
    checkpoint_directory,
    cut_lines,
    find_resume_points,
    point_latest,
    push,
    read_state,
    require_access,
    require_rollouts,
    restore,
    sync_lines,
    write_before,
    write_passed_over,
    write_result,
)
from opd.runner.directory import CallbackRaised, Callbacks, Hooks, Interrupts, LiveRun
from opd.runner.evaluate import Evaluator, read_start, start_table, table_of, write_start
from opd.runner.extend import changes_from, correct_changes
from opd.runner.inputs import Inputs, check_inputs, inputs_of, merge_start, merged_directory, revision_read
from opd.runner.lock import RunLock
from opd.runner.monitoring import evaluation_metrics
from opd.runner.progress import Progress
from opd.runner.reports import Reports, final_words, write_summary
from opd.runner.results import (
    StageResult,
    budget_used_up,
    early_stop,
    meets_stop_rules,
    narrowed,
    require_evaluated,
    selected,
    watched,
)
from opd.runner.reuse import REUSED
from opd.runner.run_files import WRITTEN
from opd.runner.stage import open_stage
from opd.store import REPAIRED, RolloutStore
from opd.store.rollouts import NullStore
from opd.teachers.table import warnings


class Pipeline:
    """Carries out a recipe in a directory that its caller has locked. `inputs`: what the run read when it began."""

    def __init__(
        self,
        recipe: Recipe,
        lock: RunLock,
        inputs: Mapping[str, Inputs] | None,
        console: Console,
        quiet: bool,
        hooks: Hooks,
        ranks: Ranks | None = None,
        selection: ChosenStages | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        for stage in recipe.stages:
            self.ranks.require(stage)
        self._recipe, self._lock, self._inputs, self._console = recipe, lock, inputs, console
        self._directory = lock.directory
        self._chosen = (selection or ChosenStages()).names(recipe)
        self.began = False  # whether this process has begun a first step
        leads = self.ranks.leads
        self._progress = Progress(console, self._directory / "log.txt" if leads else None, quiet or not leads)
        self._outputs: dict[str, Path] = {}  # stage name -> saved model
        self._results: list[StageResult] = []
        self._interrupts = Interrupts(self._progress.say, recipe.stages[0].checkpoint.grace)
        self.live = LiveRun(self._directory, self._interrupts.ask)
        self._reports = Reports(recipe, self._directory, self._progress, self.live.stop)
        self._check_stop = self.ranks.listen(self._interrupts)
        self._callbacks = Callbacks(hooks if leads else Hooks(), self.live)
        self._saver = Saver()
        self._consumed: int | None = 0  # rollouts of earlier stages
        self._begun = 0.0  # when the stage would have begun without interruptions

    def run(self, resume: bool = False) -> None:
        """Run all stages in turn. However this ends, the run directory is complete up to that moment."""
        status = "failed"
        self.began = resume
        with disk_errors(self._directory, self._advice), self._interrupts, self._progress:
            resume_points = self._shared_resume_points() if resume else [ResumePoint() for _ in self._recipe.stages]
            if not resume_points:
                return
            stages = list(zip(self._recipe.stages, resume_points, strict=True))
            require_reachable(self._recipe, self._chosen, [stage.name for stage, found in stages if found.output])
            left = [stage for stage, found in stages if found.output is None and stage.name not in self._chosen]
            for stage, resume_point in stages:
                if resume_point.output is None and self.ranks.leads:
                    require_access(stage)
            store = self.live.rollouts = self._open_store()
            try:
                for stage, resume_point in stages:
                    if stage not in left:
                        self._stage(stage, store, resume_point)
                status = "partial" if left else "done"
            except Stopped as stop:
                status = "preempted" if isinstance(stop, Preempted) else "stopped"
                raise
            finally:
                if status == "failed" and not isinstance(sys.exception(), KeyboardInterrupt):
                    self._saver.settle()
                store.close()
                self._reports.close()
                self._summarise(status)

    def _advice(self) -> str:
        return f"continue: opd resume {self._directory}" if self.began else "start again."

    def _open_store(self) -> RolloutStore:
        directory = self._directory / "rollouts"
        return RolloutStore(directory) if self.ranks.leads else NullStore(directory)

    def _shared_resume_points(self) -> list[ResumePoint]:
        """The resume_points that the leader finds; it also cleans up."""
        plain = self.ranks.share(lambda: [resume_point.to_plain() for resume_point in self._take_over_run()])
        folders = [checkpoint_directory(self._directory, spec.name, 0).parent for spec in self._recipe.stages]
        return [ResumePoint.of_plain(found, folder) for found, folder in zip(plain, folders, strict=bool(plain))]

    def _take_over_run(self) -> list[ResumePoint]:
        """Where every stage stands, or nothing if the run is finished. Cuts files written per step back to that point."""
        if (previous := self._lock.previous) is not None:
            self._progress.say(
                f"taking over from process {previous.get('pid')} on {previous.get('host')}, which is no longer running"
            )
        recipes = [recipe_name(number) for number in range(len(changes_of(self._directory)) + 2)]
        names = {*WRITTEN, *recipes} - {"report.html"}  # `opd report` writes it without the lock
        remove_partials(self._directory, names)
        resume_points = find_resume_points(self._directory, self._recipe, self._progress.say)
        summary = self._directory / "summary.json"
        if all(resume_point.output for resume_point in resume_points) and self._summary_says_done():
            self._progress.say(f"{self._directory} is finished; its model is {resume_points[-1].output}")
            return []
        stages = [(spec, resume_point) for spec, resume_point in zip(self._recipe.stages, resume_points, strict=True)]
        self._check_inputs([spec for spec, resume_point in stages if resume_point.output is None])
        require_rollouts(self._directory, resume_points)
        summary.unlink(missing_ok=True)
        by_name = {spec.name: resume_point for spec, resume_point in stages}
        correct_changes(self._directory, by_name, self._progress.say)
        for name in LINES:
            notes, left = cut_lines(self._directory / name, by_name, checked=lines_checked(self._directory))
            self._reports.written[name] = left
            for line in notes:
                self._progress.say(line)
        return resume_points

    def _summary_says_done(self) -> bool:
        """Whether all stages are finished according to the summary. A summary that contradicts their sealed results is rewritten."""
        if not (self._directory / "summary.json").is_file():
            return False
        try:
            found = json_object(self._directory / "summary.json")
            differences = checked_stages(self._directory, found)[1]
        except RunDirectoryError as error:
            found, differences = {}, [str(error)]
        for line in differences:
            self._progress.say(f"{line} summary.json is written again.")
        return not differences and found.get("status") == "done"

    def _check_inputs(self, stages: Sequence[Stage]) -> None:
        """Runs from before inputs were recorded have nothing to compare with."""
        if self._inputs is None:
            self._progress.say(
                "this run was started before opd recorded checksums of its inputs: changed inputs go unnoticed"
            )
            return
        now = inputs_of(stages, self._progress.say, self._directory, hub=False)
        for stage in stages:
            check_inputs(stage.name, self._inputs[stage.name], now[stage.name], self._directory, self._recipe.plugins)

    # --- One stage ---

    def _stage(self, spec: Stage, store: RolloutStore, resume_point: ResumePoint) -> None:
        result = resume_point.result or StageResult(spec.name)
        self._results.append(result)
        if resume_point.checkpoint is not None and self.ranks.leads:
            point_latest(resume_point.checkpoint)  # the process before may have ended between the save and this link
        if resume_point.output is not None:
            self._outputs[spec.name] = resume_point.output
            if (
                resume_point.checkpoint is not None and not (resume_point.output.parent / REUSED).exists()
            ):  # stored in this run
                self._consumed = read_state(resume_point.output)["rollouts"]
            return
        if (chosen := self._select(spec, result)) is None:
            return self._pass_over(spec, result)
        self._carry_out(chosen, store, resume_point, result)

    def _carry_out(self, spec: Stage, store: RolloutStore, resume_point: ResumePoint, result: StageResult) -> None:
        if self.ranks.leads and self._inputs is not None and spec.name != self._recipe.stages[0].name:
            self._check_inputs([spec])  # inputs may have changed since the run began or resumed
        self._interrupts.grace = spec.checkpoint.grace
        every = {"evaluate": spec.eval.every, "save": spec.checkpoint.every}
        self._progress.start_stage(spec.name, spec.train.steps, result.steps, every)
        self._begun = time.monotonic() - result.seconds
        store.configure(commit_ms=spec.store.commit_ms, fsync=spec.store.fsync, hidden=spec.keeps_hidden)
        with plugin_errors(), explain_memory(lambda: self._progress.current_phase):
            parts, saved = self._opened(spec, store, resume_point, result)
            evaluator = Evaluator(parts)
        self._say_where(spec.name, result.steps, resume_point.checkpoint)
        if self.ranks.leads:
            self._reports.open(spec, result)
        self._progress.say(f"{spec.name}: {spec.train.steps} steps on {parts.place}; run directory {self._directory}")
        self.live.enter(spec.name, result.steps, parts)
        try:
            with plugin_errors(), explain_memory(lambda: self._progress.current_phase):
                require_evaluated(self._recipe, self._chosen, spec.name, parts.questions)
                self._compare(parts, result)
                self._before(evaluator, result)
                self._train(evaluator, result, saved)
                self._finish(evaluator, result, saved)
        except (Stopped, OpdError, CallbackRaised) as stop:
            where = saved.rescue(stop, lambda: self._interrupts.left)
            self._progress.say(f"{spec.name}: stopped after step {result.steps}; {where}")
            if not isinstance(stop, (Preempted, CallbackRaised)):
                saved.announce()
            if isinstance(stop, TrainingError):
                raise TrainingError(f"{stop} Afterwards: {where}.") from None
            raise
        finally:
            parts.close()
            self.live.enter(spec.name, result.steps, None)
            result.seconds = time.monotonic() - self._begun

    def _opened(
        self, spec: Stage, store: RolloutStore, resume_point: ResumePoint, result: StageResult
    ) -> tuple[StageParts, StageCheckpoints]:
        """The parts of the stage, restored from its newest checkpoint, and the writer of the next ones."""
        self._progress.phase("loading")
        parts, newest = self._open(spec, store), list[str]()
        if resume_point.checkpoint is not None:
            newest = restore(parts, resume_point.checkpoint)
        saved = StageCheckpoints(
            parts, result, self._directory, self._saver, self._callbacks, self._begun, self._recipe
        )
        saved.metrics = resume_point.unreported or {}
        saved.unreported = StepReport(saved.metrics, Written(newest)) if resume_point.unreported else None
        saved.lines = partial(self._reports.lines, spec.name)
        return parts, saved

    def _say_where(self, stage: str, steps: int, checkpoint: Path | None) -> None:
        """Print where a stage continues, and which settings change from there on."""
        if checkpoint is not None:
            self._progress.say(f"{stage}: continuing after step {steps} from {checkpoint}")
        for part in changes_from(self._directory, stage, steps):
            self._progress.say(f"{stage}: changed {part_in_words(part)}")

    def _select(self, spec: Stage, result: StageResult) -> Stage | None:
        """The stage with only the selected domains, which are printed; None if there are none."""
        result.selected = selected(spec, self._results)
        if result.selected is not None and result.selected.chosen:
            self._progress.say(f"{spec.name}: {result.selected.in_words()}")
        return narrowed(spec, result.selected)

    def _pass_over(self, spec: Stage, result: StageResult) -> None:
        """Nothing is selected for training: the stage's output is the model it would have started from."""
        assert result.selected is not None
        self._merge(spec)
        self._outputs[spec.name] = Path(self._resolve_model(spec.student.model))
        result.passed_over = spec.student.model
        if self.ranks.leads:
            write_passed_over(checkpoint_directory(self._directory, spec.name, 0).parent, result, spec.student.model)
        self._progress.say(f"{spec.name}: {result.selected.in_words()}: passed over")

    def _merge(self, spec: Stage) -> None:
        """Merge the model that the stage starts from, if the recipe asks for it."""
        if self.ranks.leads:
            merge_start(spec, self._directory, self._resolve_model, (self._inputs or {}).get(spec.name, {}))
        self.ranks.barrier()

    def _open(self, spec: Stage, store: RolloutStore) -> StageParts:
        """Open everything that the stage works with."""
        self._merge(spec)
        context = RunContext(
            self._directory,
            ranks=self.ranks,
            say=self._progress.say,
            on_phase=self._progress.phase,
            check_stop=self._check_stop,
        )
        parts = open_stage(
            self.ranks.placed(spec.inside(self._directory)),
            store,
            self._resolve_model,
            context=context,
            ranks=self.ranks,
            revision_of=partial(revision_read, self._recipe, self._outputs, self._inputs or {}, spec.name),
            on_token=self._progress.token,
            on_rollouts=self._callbacks.rollouts,
        )
        known = self._consumed is not None and not (store.directory / REPAIRED).exists()
        parts.rollouter.consumed = min(self._consumed or 0, len(store)) if known else None
        return parts

    def _train(self, evaluator: Evaluator, result: StageResult, saved: StageCheckpoints) -> None:
        """Train step by step; report, evaluate and save as the recipe says."""
        parts = evaluator.parts
        parts.objective.plateau = result.plateau
        if parts.rollouter.pace is not None:
            if not result.losses:
                result.note_loss(result.before)
            parts.rollouter.pace.losses = result.losses
        enough = (
            self._close_step(evaluator, result, saved) if saved.unreported else meets_stop_rules(parts.spec, result)
        )
        while result.steps < parts.spec.train.steps and not enough and not budget_used_up(parts.spec, result):
            parts.context.check_stop()
            saved.check()
            self.began = True
            parts.stream.divide(result.gaps, self.ranks.share)
            report = run_step(parts, result.steps + 1)
            self._reports.note_disagreement(parts, report)
            self._say_resumed(parts.spec.name, report)
            result.steps, result.tokens = result.steps + 1, result.tokens + report.metrics["tokens"]
            result.skipped, self.live.step = parts.stream.skipped, result.steps
            if parts.rollouter.pace is not None:
                parts.rollouter.pace.note(report.metrics)
            saved.step_ended(report)
            enough = self._close_step(evaluator, result, saved)
        if result.steps < parts.spec.train.steps:
            self._progress.say(early_stop(parts.spec, result, enough))

    def _say_resumed(self, stage: str, report: StepReport) -> None:
        written, step = report.written, report.metrics["step"]
        if written.resumed:
            self._progress.say(
                f"{stage}: step {step} took {written.finished} finished rollouts from the store and continued {written.continued}"
            )

    def _close_step(self, evaluator: Evaluator, result: StageResult, saved: StageCheckpoints) -> bool:
        """After an update: evaluate, write the line in metrics.jsonl, and save. True if early stopping ends the stage."""
        parts, report = evaluator.parts, saved.unreported
        assert report is not None
        step, every = result.steps, parts.spec.checkpoint.every
        better = self._evaluate(evaluator, result, step, saved.metrics)
        if self.ranks.leads:
            self._reports.step(parts, report, sum(before.steps for before in self._results[:-1]))
        saved.unreported = None
        enough = meets_stop_rules(parts.spec, result)
        if better or enough or (every and step % every == 0):
            saved.keep(better)
        self._callbacks.step(saved.metrics)
        parts.context.check_stop()
        return enough

    def _compare(self, parts: StageParts, result: StageResult) -> None:
        """Measure the start-up table, once per run."""
        if result.steps or not parts.spec.log.start_table or not parts.teachers:
            return
        known = self.ranks.share(partial(read_start, self._directory))
        if parts.spec.name in known:
            result.start = known[parts.spec.name]
            return
        self._progress.phase("compare teachers")
        pairs = start_table(parts)
        if self.ranks.leads:
            write_start(self._directory, parts.spec.name, pairs, known)
        result.start = [pair.to_json() for pair in pairs]
        if pairs:
            self._progress.show(table_of(parts.spec.name, pairs))
        for line in warnings(pairs):
            self._progress.say(f"{parts.spec.name}: WARNING: {line}")

    def _before(self, evaluator: Evaluator, result: StageResult) -> None:
        parts = evaluator.parts
        if not parts.questions or result.before:
            return
        self._progress.phase("evaluate")
        before = evaluator.student()
        self._progress.evaluated(
            0, {domain: found.value for domain, found in before.items() if found.value is not None}
        )
        self._progress.phase("evaluate teachers")
        if parts.spec.eval.teachers and parts.teachers:
            result.teachers = evaluator.teachers()
            result.teacher_of = dict(parts.teacher_of)
        if parts.spec.eval.weight_average:
            result.weight_average = evaluator.weight_average()
        result.before = before
        if self.ranks.leads:
            self._reports.answers(evaluator, 0)
            sync_lines(self._directory)
            write_before(checkpoint_directory(self._directory, parts.spec.name, 0).parent, result)

    def _evaluate(self, evaluator: Evaluator, result: StageResult, step: int, metrics: dict[str, Any]) -> bool:
        """Periodic evaluation, added to the step's metrics. True if the result is the best so far."""
        parts = evaluator.parts
        spec = parts.spec.eval
        if not spec.every or step % spec.every or step == parts.spec.train.steps or not parts.questions:
            return False
        self._progress.phase("evaluate")
        measures = evaluator.student()
        metrics |= evaluation_metrics(measures)
        better = result.note_evaluation(step, measures, watched(measures, spec.metric))
        result.note_loss(measures)
        if self.ranks.leads:
            self._reports.answers(evaluator, step)
        if result.plateau is None and result.evaluations(spec.metric).plateau(spec.plateau):
            parts.objective.plateau = result.plateau = step
        return better

    def _finish(self, evaluator: Evaluator, result: StageResult, saved: StageCheckpoints) -> None:
        parts = evaluator.parts
        better = False
        if parts.questions and not result.after:
            self._progress.phase("evaluate")
            result.after = evaluator.student()
            better = result.note_evaluation(result.steps, result.after, watched(result.after, parts.spec.eval.metric))
            if self.ranks.leads:
                self._reports.answers(evaluator, result.steps)
        final = saved.keep(better)
        saved.wait()
        self._outputs[parts.spec.name] = final
        result.seconds = time.monotonic() - self._begun
        self._consumed = parts.rollouter.consumed
        if self.ranks.leads:
            write_result(final.parent, result, final)
        self.ranks.barrier()  # the next stage may read the model
        if self.ranks.leads and parts.spec.hub is not None and (failure := push(final, parts.spec.hub)) is not None:
            self._progress.say(f"WARNING: {parts.spec.name}: {failure}")

    # --- Stopping, errors, files ---

    def _resolve_model(self, name: str) -> str:
        if name.startswith(MERGED):
            return str(merged_directory(self._directory, name.removeprefix(MERGED)))
        if not name.startswith(STAGE_PREFIX):
            return name
        stage = name.removeprefix(STAGE_PREFIX)
        if stage not in self._outputs:
            raise RecipeError(
                f"model {name!r}: no earlier stage is called {stage!r}; there are {', '.join(self._outputs) or 'none'}."
            )
        return str(self._outputs[stage])

    def _summarise(self, status: str) -> None:
        if not self.ranks.leads:
            return
        write_summary(self._recipe, self._directory, self._results, status)
        self._reports.page()
        if status in ("done", "partial"):
            for shown in final_words(self._recipe, self._directory, self._results):
                self._progress.say(shown) if isinstance(shown, str) else self._progress.show(shown)
