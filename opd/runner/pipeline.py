"""A whole recipe: stage after stage into one run directory, evaluated, checkpointed, and stoppable at any moment."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from opd.config import STAGE_PREFIX, Recipe, Stage
from opd.config.graph import ChosenStages, require_reachable
from opd.config.run_changes import changes_of, part_in_words, recipe_name
from opd.config.stage import MERGED
from opd.errors import OpdError, Preempted, RecipeError, RunDirectoryError, Stopped, TrainingError
from opd.files import disk_errors, json_object, lines_checked, remove_partials
from opd.plugins import plugin_errors
from opd.report.measured import checked_stages
from opd.runner.beginning import WRITTEN
from opd.runner.checkpoint import Saver, checkpoint_directory, point_latest, read_state
from opd.runner.ending import early_stop, good_enough, spent
from opd.runner.extend import correct_changes, told_now
from opd.runner.hub import push, require_access
from opd.runner.inputs import Inputs, check_inputs, inputs_of, revision_read
from opd.runner.interrupts import Interrupts
from opd.runner.live import CallbackRaised, Callbacks, Hooks, LiveRun
from opd.runner.lock import RunLock
from opd.runner.measuring import measure_student, measure_teachers, measure_weight_average
from opd.runner.merges import merge_start, merged_directory
from opd.runner.narrowing import narrowed, require_evaluated, selected
from opd.runner.progress import Progress
from opd.runner.reports import Reports
from opd.runner.results import StageResult, watched
from opd.runner.resume import (
    LINES,
    Standing,
    cut_lines,
    find_standings,
    require_rollouts,
    restore,
    sync_lines,
    write_before,
    write_passed_over,
    write_result,
)
from opd.runner.reuse import REUSED
from opd.runner.saving import StageCheckpoints
from opd.runner.stage import StageRun
from opd.runner.start import read_start, start_table, table_of, write_start
from opd.runner.story import told, write_summary
from opd.runner.watching import evaluation_metrics
from opd.store import REPAIRED, RolloutStore
from opd.store.elsewhere import StoreElsewhere
from opd.teachers.table import warnings
from opd.trainer.memory import explain_memory
from opd.trainer.step import run_step
from opd.trainer.world import World


class Pipeline:
    """Carries out a recipe in a directory whose lock its caller holds. `inputs`: what it reads, as of the run's beginning."""

    def __init__(
        self,
        recipe: Recipe,
        lock: RunLock,
        inputs: Mapping[str, Inputs] | None,
        console: Console,
        quiet: bool,
        hooks: Hooks,
        world: World | None = None,
        selection: ChosenStages | None = None,
    ) -> None:
        self.world = world or World()
        for stage in recipe.stages:
            self.world.require(stage)
        self._recipe, self._lock, self._inputs, self._console = recipe, lock, inputs, console
        self._directory = lock.directory
        self._chosen = (selection or ChosenStages()).names(recipe)
        self.began = False  # a first step, in this process
        leads = self.world.leads
        self._progress = Progress(console, self._directory / "log.txt" if leads else None, quiet or not leads)
        self._outputs: dict[str, Path] = {}  # stage name -> the model it saved
        self._results: list[StageResult] = []
        self._phase = "loading"
        self._interrupts = Interrupts(self._progress.say, recipe.stages[0].checkpoint.grace)
        self.live = LiveRun(self._directory, self._interrupts.ask)
        self._reports = Reports(recipe, self._directory, self._progress, self.live.stop)
        self._check_stop = self.world.listen(self._interrupts)
        self._callbacks = Callbacks(hooks if leads else Hooks(), self.live)
        self._saver = Saver()
        self._consumed: int | None = 0  # rollouts of the stages before
        self._begun = 0.0  # when the stage would have begun, had it run in one go

    def run(self, resume: bool = False) -> None:
        """Every stage in turn. Whatever happens, the run directory is left complete up to that moment."""
        status = "failed"
        self.began = resume
        with disk_errors(self._directory, self._advice), self._interrupts, self._progress:
            standings = self._shared_standings() if resume else [Standing() for _ in self._recipe.stages]
            if not standings:
                return
            stages = list(zip(self._recipe.stages, standings, strict=True))
            require_reachable(self._recipe, self._chosen, [stage.name for stage, found in stages if found.output])
            left = [stage for stage, found in stages if found.output is None and stage.name not in self._chosen]
            for stage, standing in stages:
                if standing.output is None and self.world.leads:
                    require_access(stage)
            store = self.live.rollouts = self._open_store()
            try:
                for stage, standing in stages:
                    if stage not in left:
                        self._stage(stage, store, standing)
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
        return RolloutStore(directory) if self.world.leads else StoreElsewhere(directory)

    def _shared_standings(self) -> list[Standing]:
        """As the leader finds them: it tidies up on the way."""
        told = self.world.share(lambda: [standing.to_plain() for standing in self._take_up()])
        folders = [checkpoint_directory(self._directory, spec.name, 0).parent for spec in self._recipe.stages]
        return [Standing.of_plain(found, folder) for found, folder in zip(told, folders, strict=bool(told))]

    def _take_up(self) -> list[Standing]:
        """Where every stage stands; none when nothing is left to do. Files written per step are cut back to there."""
        if (previous := self._lock.previous) is not None:
            self._progress.say(
                f"taking over from process {previous.get('pid')} on {previous.get('host')}, which is no longer running"
            )
        recipes = [recipe_name(number) for number in range(len(changes_of(self._directory)) + 2)]
        names = {*WRITTEN, *recipes} - {"report.html"}  # which `opd report` writes without the lock
        remove_partials(self._directory, names)
        standings = find_standings(self._directory, self._recipe, self._progress.say)
        summary = self._directory / "summary.json"
        if all(standing.output for standing in standings) and self._summary_says_done():
            self._progress.say(f"{self._directory} is finished; its model is {standings[-1].output}")
            return []
        stages = [(spec, standing) for spec, standing in zip(self._recipe.stages, standings, strict=True)]
        self._check_inputs([spec for spec, standing in stages if standing.output is None])
        require_rollouts(self._directory, standings)
        summary.unlink(missing_ok=True)
        by_name = {spec.name: standing for spec, standing in stages}
        correct_changes(self._directory, by_name, self._progress.say)
        for name in LINES:
            said, left = cut_lines(self._directory / name, by_name, checked=lines_checked(self._directory))
            self._reports.written[name] = left
            for line in said:
                self._progress.say(line)
        return standings

    def _summary_says_done(self) -> bool:
        """Of a run whose stages are all finished. A summary that their sealed results contradict is written again."""
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
        """Runs from before inputs were written down have none to compare with."""
        if self._inputs is None:
            self._progress.say(
                "this run was started before opd recorded checksums of its inputs: changed inputs go unnoticed"
            )
            return
        now = inputs_of(stages, self._progress.say, self._directory, hub=False)
        for stage in stages:
            check_inputs(stage.name, self._inputs[stage.name], now[stage.name], self._directory, self._recipe.plugins)

    # One stage

    def _stage(self, spec: Stage, store: RolloutStore, standing: Standing) -> None:
        result = standing.result or StageResult(spec.name)
        self._results.append(result)
        if standing.checkpoint is not None and self.world.leads:
            point_latest(standing.checkpoint)  # the process before may have died between saving it and saying so
        if standing.output is not None:
            self._outputs[spec.name] = standing.output
            if standing.checkpoint is not None and not (standing.output.parent / REUSED).exists():  # else elsewhere
                self._consumed = read_state(standing.output)["rollouts"]
            return
        if (chosen := self._select(spec, result)) is None:
            return self._pass_over(spec, result)
        spec = chosen
        if self.world.leads and self._inputs is not None and spec.name != self._recipe.stages[0].name:
            self._check_inputs([spec])  # time has passed since the run began or was taken up
        self._interrupts.grace = spec.checkpoint.grace
        every = {"evaluate": spec.eval.every, "save": spec.checkpoint.every}
        self._progress.start_stage(spec.name, spec.train.steps, result.steps, every)
        self._begun = time.monotonic() - result.seconds
        store.configure(commit_ms=spec.store.commit_ms, fsync=spec.store.fsync, hidden=spec.keeps_hidden)
        with plugin_errors(), explain_memory(lambda: self._phase):
            self._on_phase("loading")
            run = self._open(spec, store)
            if standing.checkpoint is not None:
                restore(run, standing.checkpoint)
        self._say_where(spec.name, result.steps, standing.checkpoint)
        saved = StageCheckpoints(run, result, self._directory, self._saver, self._callbacks, self._begun, self._recipe)
        saved.metrics, saved.unreported = standing.unreported or {}, standing.unreported
        saved.lines = partial(self._reports.lines, spec.name)
        if self.world.leads:
            self._reports.open(spec, result)
        self._progress.say(f"{spec.name}: {spec.train.steps} steps on {run.place}; run directory {self._directory}")
        self.live.enter(spec.name, result.steps, run)
        try:
            with plugin_errors(), explain_memory(lambda: self._phase):
                require_evaluated(self._recipe, self._chosen, spec.name, run.questions)
                self._compare(run, result)
                self._before(run, result)
                self._train(run, result, saved)
                self._finish(run, result, saved)
        except (Stopped, OpdError, CallbackRaised) as stop:
            where = saved.rescue(stop, lambda: self._interrupts.left)
            self._progress.say(f"{spec.name}: stopped after step {result.steps}; {where}")
            if not isinstance(stop, (Preempted, CallbackRaised)):
                saved.announce()
            if isinstance(stop, TrainingError):
                raise TrainingError(f"{stop} Afterwards: {where}.") from None
            raise
        finally:
            run.close()
            self.live.enter(spec.name, result.steps, None)
            result.seconds = time.monotonic() - self._begun

    def _say_where(self, stage: str, steps: int, checkpoint: Path | None) -> None:
        """Where a stage continues, and what has been changed for the steps from there on."""
        if checkpoint is not None:
            self._progress.say(f"{stage}: continuing after step {steps} from {checkpoint}")
        for part in told_now(self._directory, stage, steps):
            self._progress.say(f"{stage}: changed {part_in_words(part)}")

    def _select(self, spec: Stage, result: StageResult) -> Stage | None:
        """The stage with those domains alone that are chosen, which is said; None: there are none."""
        result.selected = selected(spec, self._results)
        if result.selected is not None and result.selected.chosen:
            self._progress.say(f"{spec.name}: {result.selected.in_words()}")
        return narrowed(spec, result.selected)

    def _pass_over(self, spec: Stage, result: StageResult) -> None:
        """Nothing is chosen to train on: what the stage would have started from is what comes out of it."""
        assert result.selected is not None
        self._merge(spec)
        self._outputs[spec.name] = Path(self._resolve_model(spec.student.model))
        result.passed_over = spec.student.model
        if self.world.leads:
            write_passed_over(checkpoint_directory(self._directory, spec.name, 0).parent, result, spec.student.model)
        self._progress.say(f"{spec.name}: {result.selected.in_words()}: passed over")

    def _merge(self, spec: Stage) -> None:
        """The model that the stage starts from, where it is made of others."""
        if self.world.leads:
            merge_start(spec, self._directory, self._resolve_model, (self._inputs or {}).get(spec.name, {}))
        self.world.barrier()

    def _open(self, spec: Stage, store: RolloutStore) -> StageRun:
        """Everything that the stage works with."""
        self._merge(spec)
        run = StageRun(
            self.world.placed(spec.inside(self._directory)),
            store,
            self._resolve_model,
            revision_of=partial(revision_read, self._recipe, self._outputs, self._inputs or {}, spec.name),
            check_stop=self._check_stop,
            on_phase=self._on_phase,
            on_token=self._progress.token,
            on_rollouts=self._callbacks.rollouts,
            say=self._progress.say,
            world=self.world,
        )
        known = self._consumed is not None and not (store.directory / REPAIRED).exists()
        run.trajectories.consumed = min(self._consumed or 0, len(store)) if known else None
        return run

    def _train(self, run: StageRun, result: StageResult, saved: StageCheckpoints) -> None:
        """Steps, each reported, evaluated and saved as the recipe says."""
        run.objective.plateau = result.plateau
        enough = self._close_step(run, result, saved) if saved.unreported else good_enough(run.spec, result)
        while result.steps < run.spec.train.steps and not enough and not spent(run.spec, result):
            run.check_stop()
            saved.check()
            self.began = True
            run.divide_prompts(result.gaps)
            metrics = run_step(run, result.steps + 1)
            self._say_taken_up(run, result.steps + 1)
            result.steps, result.tokens = result.steps + 1, result.tokens + metrics["tokens"]
            result.skipped, self.live.step = run.stream.skipped, result.steps
            saved.step_ended(metrics)
            enough = self._close_step(run, result, saved)
        if result.steps < run.spec.train.steps:
            self._progress.say(early_stop(run.spec, result, enough))

    def _say_taken_up(self, run: StageRun, step: int) -> None:
        found = run.trajectories
        if found.taken_up:
            self._progress.say(
                f"{run.spec.name}: step {step} took {found.used} finished rollouts from the store and continued {found.continued}"
            )

    def _close_step(self, run: StageRun, result: StageResult, saved: StageCheckpoints) -> bool:
        """What follows an update: evaluation, the line in metrics.jsonl, a checkpoint. True: early stopping says enough."""
        step, every = result.steps, run.spec.checkpoint.every
        better = self._evaluate(run, result, step, saved.metrics)
        if self.world.leads:
            self._reports.step(run, saved.metrics, sum(before.steps for before in self._results[:-1]))
        saved.unreported = None
        enough = good_enough(run.spec, result)
        if better or enough or (every and step % every == 0):
            saved.keep(better)
        self._callbacks.step(saved.metrics)
        run.check_stop()
        return enough

    def _compare(self, run: StageRun, result: StageResult) -> None:
        """The start-up table, once: a run that is taken up has it already."""
        if result.steps or not run.spec.log.start_table or not run.teachers:
            return
        known = self.world.share(partial(read_start, self._directory))
        if run.spec.name in known:
            result.start = known[run.spec.name]
            return
        self._on_phase("compare teachers")
        pairs = start_table(run)
        if self.world.leads:
            write_start(self._directory, run.spec.name, pairs, known)
        result.start = [pair.to_json() for pair in pairs]
        if pairs:
            self._progress.show(table_of(run.spec.name, pairs))
        for line in warnings(pairs):
            self._progress.say(f"{run.spec.name}: WARNING: {line}")

    def _before(self, run: StageRun, result: StageResult) -> None:
        if not run.questions or result.before:
            return
        self._on_phase("evaluate")
        before = measure_student(run)
        self._progress.evaluated(
            0, {domain: found.value for domain, found in before.items() if found.value is not None}
        )
        self._on_phase("evaluate teachers")
        if run.spec.eval.teachers and run.teachers:
            result.teachers = measure_teachers(run)
            result.teacher_of = dict(run.teacher_of)
        if run.spec.eval.weight_average:
            result.weight_average = measure_weight_average(run)
        result.before = before
        if self.world.leads:
            self._reports.answers(run, 0)
            sync_lines(self._directory)
            write_before(checkpoint_directory(self._directory, run.spec.name, 0).parent, result)

    def _evaluate(self, run: StageRun, result: StageResult, step: int, metrics: dict[str, Any]) -> bool:
        """Periodic evaluation, added to the step's metrics. True: better than ever."""
        spec = run.spec.eval
        if not spec.every or step % spec.every or step == run.spec.train.steps or not run.questions:
            return False
        self._on_phase("evaluate")
        measures = measure_student(run)
        metrics |= evaluation_metrics(measures)
        better = result.note_evaluation(step, measures, watched(measures, spec.metric))
        if self.world.leads:
            self._reports.answers(run, step)
        if result.plateau is None and result.evaluations(spec.metric).plateau(spec.plateau):
            run.objective.plateau = result.plateau = step
        return better

    def _finish(self, run: StageRun, result: StageResult, saved: StageCheckpoints) -> None:
        better = False
        if run.questions and not result.after:
            self._on_phase("evaluate")
            result.after = measure_student(run)
            better = result.note_evaluation(result.steps, result.after, watched(result.after, run.spec.eval.metric))
            if self.world.leads:
                self._reports.answers(run, result.steps)
        final = saved.keep(better)
        saved.wait()
        self._outputs[run.spec.name] = final
        result.seconds = time.monotonic() - self._begun
        self._consumed = run.trajectories.consumed
        if self.world.leads:
            write_result(final.parent, result, final)
        self.world.barrier()  # the next stage may read the model
        if self.world.leads and run.spec.hub is not None and (failure := push(final, run.spec.hub)) is not None:
            self._progress.say(f"WARNING: {run.spec.name}: {failure}")

    # Stopping, errors, files

    def _on_phase(self, phase: str) -> None:
        self._phase = phase
        self._progress.phase(phase)

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
        if not self.world.leads:
            return
        write_summary(self._recipe, self._directory, self._results, status)
        self._reports.page()
        if status in ("done", "partial"):
            for shown in told(self._recipe, self._directory, self._results):
                self._progress.say(shown) if isinstance(shown, str) else self._progress.show(shown)
