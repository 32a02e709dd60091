"""Reports of each step: a line in metrics.jsonl, samples, the panel, and trackers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from opd.common.errors import UserError
from opd.common.files import append_text, json_text, line_of, lines_checked, read_lines, write_atomic
from opd.common.text import plain, split_pieces
from opd.evaluation import Measures
from opd.loop.metrics import StepReport, disagreements, few_per_domain
from opd.loop.parts import StageParts
from opd.objective.micro import Trace
from opd.recipe import Recipe, Stage
from opd.recipe.run_changes import changes_in_words, changes_of
from opd.recipe.stage import MERGED
from opd.records import Rollout
from opd.report.answers import evaluation_answers, flips_of_stages
from opd.report.page import write_report
from opd.rollouts.episodes import transcript
from opd.runner.checkpoint import LINES
from opd.runner.evaluate import Evaluator
from opd.runner.inputs import MERGED_FOLDER
from opd.runner.monitoring import MONITORS, StageMonitors
from opd.runner.progress import Progress
from opd.runner.results import Selected, StageResult, results_table
from opd.runner.trackers import Experiment, Write, open_trackers


class Reports:
    """`stop`: ends the run at the next safe moment, for monitors that may do so."""

    def __init__(self, recipe: Recipe, directory: Path, progress: Progress, stop: Callable[[], None]) -> None:
        self._recipe, self._directory, self._progress, self._stop = recipe, directory, progress, stop
        self._steps = sum(stage.train.steps for stage in recipe.stages)
        self._track: Write | None = None
        self._watch: StageMonitors | None = None  # the monitors of the current stage
        self._opened = ExitStack()
        self.written: dict[str, Counter[tuple[str, int]]] = {name: Counter() for name in LINES}  # by stage and step

    def open(self, spec: Stage, result: StageResult) -> None:
        """Begin a stage. Trackers open after the first stage has loaded, so that a failed start leaves no experiment."""
        self._settle()
        self._watch = StageMonitors(self._recipe, spec, self._directory, result, self._progress.say, self._stop)
        if self._track is None:
            log, config = self._recipe.stages[0].log, self._recipe.model_dump(mode="json")
            experiment = Experiment(self._directory, self._recipe.name, log.project, config)
            self._track = self._opened.enter_context(open_trackers(log.to, experiment))

    def close(self) -> None:
        self._opened.close()

    def lines(self, stage: str, step: int) -> dict[str, int]:
        """Number of a stage's lines per file up to a step. A resumed run uses it to notice missing lines."""
        return {
            name: sum(count for (of, at), count in counts.items() if of == stage and at <= step)
            for name, counts in self.written.items()
        }

    def step(self, parts: StageParts, report: StepReport, earlier: int) -> None:
        """`earlier`: the steps of earlier stages. Trackers count steps over the whole run, because wandb drops steps that go back."""
        assert self._track is not None
        assert self._watch is not None
        metrics = report.metrics
        step, log = metrics["step"], parts.spec.log
        self._write_line("metrics.jsonl", metrics)
        self._progress.step(metrics)
        for alarm in self._watch.step(metrics):
            self._write_line(MONITORS, alarm)
        numbers = {
            f"{parts.spec.name}/{key}": value for key, value in metrics.items() if isinstance(value, (int, float))
        }
        self._track(earlier + step, numbers)
        if log.samples and (step - 1) % log.samples_every == 0:
            self._write_samples(parts, report, step, (earlier + step) / max(self._steps, 1))

    def note_disagreement(self, parts: StageParts, report: StepReport) -> None:
        """Note in the store how far student and teacher are apart in each rollout of a step, before a checkpoint can be saved."""
        if parts.ranks.leads:
            for id, by_role in disagreements(report.statistics).items():
                if id in parts.store.entries:  # a turn that is trained on its own is not in the store
                    parts.store.note_disagreement(id, by_role)
        report.statistics.clear()

    def answers(self, evaluator: Evaluator, step: int) -> None:
        """Write down answers to held-out questions, beyond the file's limit without texts. Step 0 is before training."""
        spec, path = evaluator.parts.spec, self._directory / ANSWERS
        room = (spec.eval.answers_mib << 20) - (path.stat().st_size if path.is_file() else 0)
        for answer in evaluator.answered:
            values = {"step": step, "stage": spec.name, **answer}
            line = line_of(values)
            if len(line.encode()) > room:
                line = line_of({**values, "prompt": "", "response": "", "left_out": True})
            room -= len(line.encode())
            self._append(ANSWERS, line, spec.name, step)
        evaluator.answered.clear()

    def page(self) -> None:
        """Write report.html. A successful run does not fail because of it."""
        self._settle()
        try:
            write_report([self._directory])
        except UserError as error:
            self._progress.say(f"WARNING: there is no report: {error}")

    def _settle(self) -> None:
        """Called when a stage has saved for the last time."""
        if self._watch is not None:
            self._watch.settle()

    def _write_samples(self, parts: StageParts, report: StepReport, step: int, progress: float) -> None:
        """Write down a few of this step's completions. `progress`: finished fraction of the run."""
        newest = sorted(reversed(report.written.ids), key=lambda name: name not in report.traces)  # traced ones first
        domains = [(name, parts.store.entries[name].domain) for name in newest]
        for rollout_id in few_per_domain(domains, parts.spec.log.samples):
            entry = parts.store.entries[rollout_id]
            (rollout,) = parts.store.load([entry.id])
            line = {
                "step": step,
                "stage": parts.spec.name,
                "domain": entry.domain,
                "source": entry.source,
                "prompt": parts.student.tokenizer.decode(rollout.prompt_ids.tolist()),
                "response": transcript(rollout, parts.student.tokenizer)
                if entry.stop == "env"
                else parts.text(rollout),
                "stop": entry.stop,
                "id": entry.id,
                "prompt_id": entry.prompt_id,
            }
            self._write_line("samples.jsonl", line | entry.notes)
            if (trace := report.traces.get(entry.id)) is not None:
                tokens = line_of(token_line(parts, step, rollout, trace))
                if len(tokens) <= room_for(self._directory / TOKENS, progress):
                    self._append(TOKENS, tokens, parts.spec.name, step)

    def _write_line(self, name: str, values: Mapping[str, Any]) -> None:
        self._append(name, line_of(values), values["stage"], values["step"])

    def _append(self, name: str, line: str, stage: str, step: int) -> None:
        append_text(self._directory / name, line)
        self.written[name][stage, step] += 1


# --- tokens.jsonl: completions token by token, readable by a page without torch or a tokenizer ---
#
# {"step": 41, "stage": "main", "id": …, "domain": …, "teacher": NAME, "ids": [T], "author": [T],
# "student": [T], "teacher_logprob": [T], "ratio": [T], "entropy": [T], "teacher_entropy": [T], "reverse_kl": [T],
# "student_top": [T x [[id, log-prob], …]], "teacher_top": the same, "texts": {id: text},
# "pieces": {place: text}, where a character is made of several tokens: the last one has it, the others are empty,
# "terms": {NAME: {"weight": [T], "advantage": [T], "gates": {NAME: [T]}}}, "left_out": tokens beyond the longest}
#
# Log-probs are in nats, untempered, with all stop ids as one event. `ratio` is the student's minus the teacher's. null: unknown.


TOKENS, ANSWERS = "tokens.jsonl", "answers.jsonl"
LONGEST = 4096  # tokens of one completion
LIMIT = 64 << 20  # bytes of the file
FIRST = 1 / 16  # fraction of `LIMIT` that may be used from the start
DIGITS = 4


def room_for(path: Path, progress: float) -> int:
    """Bytes that may be added so far. The limit grows with progress, so that the end of a long run is written down as well as its beginning."""
    return int(LIMIT * max(progress, FIRST)) - (path.stat().st_size if path.is_file() else 0)


def token_line(parts: StageParts, step: int, rollout: Rollout, trace: Trace) -> dict[str, Any]:
    ids, part = rollout.response_ids.tolist(), slice(LONGEST)
    used = {*ids[part], *_ids(trace["student_top_ids"][part]), *_ids(trace["teacher_top_ids"][part])}
    texts = {str(index): parts.student.tokenizer.decode([index]) for index in sorted(used)}
    return {
        "step": step,
        "stage": parts.spec.name,
        "id": rollout.id,
        "domain": rollout.domain,
        "teacher": trace["by"],
        "ids": ids[part],
        "author": rollout.author[part].tolist(),
        "student": _rounded(trace["student"][part]),
        "teacher_logprob": _rounded(trace["teacher"][part]),
        "ratio": _rounded(trace["ratio"][part]) if "ratio" in trace else [None] * len(ids[part]),
        **{name: _rounded(trace[name][part]) for name in ("entropy", "teacher_entropy", "reverse_kl")},
        "student_top": _top(trace, "student", part),
        "teacher_top": _top(trace, "teacher", part),
        "texts": texts,
        "pieces": split_pieces(ids[part], texts, parts.student.tokenizer.decode),
        "terms": {
            name: {
                key: {gate: _rounded(found[part]) for gate, found in values.items()}
                if isinstance(values, dict)
                else _rounded(values[part], significant=key == "weight")
                for key, values in term.items()
            }
            for name, term in trace["terms"].items()
        },
        "left_out": max(len(ids) - LONGEST, 0),
    }


def _ids(values: np.ndarray) -> Iterable[int]:
    return (index for index in values.ravel().tolist() if index >= 0)


def _top(trace: Trace, side: str, part: slice) -> list[list[list[float]]]:
    ids, logprobs = trace[f"{side}_top_ids"][part].tolist(), _rounded(trace[f"{side}_top"][part])
    return [
        [[index, value] for index, value in zip(row, values, strict=True) if index >= 0]
        for row, values in zip(ids, logprobs, strict=True)
    ]


def _rounded(values: np.ndarray, significant: bool = False) -> list[Any]:
    """Round values. Weights shrink with the size of the batch, so they keep significant digits instead of decimals."""
    if significant:
        return [float(f"{value:.{DIGITS}g}") for value in np.asarray(values).tolist()]
    found: list[Any] = np.round(np.asarray(values, dtype=np.float64), DIGITS).tolist()
    return found


# --- What a pipeline did: per stage and domain, the gains and losses against the model that the stage started from ---


NOISE = 2.0  # differences below this many standard errors count as none


def write_summary(recipe: Recipe, directory: Path, results: Sequence[StageResult], status: str) -> None:
    """summary.json: every stage's result, changes during the run, alarms of monitors, and the story of a pipeline."""
    summary: dict[str, Any] = {
        "recipe": recipe.name,
        "status": status,
        "stages": [result.to_json() for result in results],
    }
    flips = flips_of_stages(evaluation_answers(directory))
    for stage in summary["stages"]:
        for domain, found in flips.get(stage["name"], {}).items():
            if domain in stage["evals"]:
                stage["evals"][domain]["flips"] = found.to_json()
    if changes := changes_of(directory):
        summary["changes"] = [
            {"stage": name, **{key: part[key] for key in ("after", "keys", "lr", "schedule")}}
            for one in changes
            for name, part in one["stages"].items()
        ]
    if story := story_of(recipe, results):
        summary["story"] = story
    if alarms := alarms_of(directory):
        kept = ("stage", "step", "monitor", "words", "remedy", "recipe")
        summary["alarms"] = [{key: line[key] for key in kept} for line in alarms]
    write_atomic(directory / "summary.json", json_text(summary, indent=1))


def alarms_of(directory: Path) -> list[dict[str, Any]]:
    """The alarms of monitors so far."""
    return read_lines(directory / MONITORS, checked=lines_checked(directory)).whole


def final_words(recipe: Recipe, directory: Path, results: Sequence[StageResult]) -> Iterator[str | Table]:
    """What is shown at the end: a table per stage, changes during the run, the story of a pipeline, and all alarms."""
    flips = flips_of_stages(evaluation_answers(directory))
    for result in results:
        if result.before:
            yield ""
            yield results_table(result, flips.get(result.name, {}))
    if changes := changes_of(directory):
        yield ""
        yield from (f"changed {line}" for line in changes_in_words(changes, len(recipe.stages)))
    if story := story_of(recipe, results):
        yield ""
        yield from story_lines(story)
    if alarms := alarms_of(directory):
        yield ""
        yield (
            f"{len(alarms)} alarms of monitors; see monitors.jsonl and the report"
            if len(alarms) > 1
            else "an alarm of a monitor"
        )
        yield from (f"  {line['stage']}, step {line['step']}, {line['monitor']}: {line['words']}" for line in alarms)


def story_of(recipe: Recipe, results: Sequence[StageResult]) -> list[dict[str, Any]]:
    """The story of a pipeline: one chapter per stage that was measured before and after or passed over. Unfinished stages have none."""
    if len(recipe.stages) < 2:
        return []
    starts = {stage.name: stage.starts for stage in recipe.stages}
    found = []
    for result in results:
        changes = {
            domain: (before.value, after.value, _noise(before, after))
            for domain, before in result.before.items()
            if (after := result.after.get(domain)) and before.value is not None and after.value is not None
        }
        if not changes and result.passed_over is None:
            continue
        chapter = {"stage": result.name, "from": starts[result.name], "domains": _sorted_out(changes)}
        if result.selected is not None:
            chapter["selected"] = result.selected._asdict()
        if result.passed_over is not None:
            chapter["passed_over"] = _handed_on(result.passed_over)
        found.append(chapter)
    return found


def _handed_on(start: str) -> str:
    """The output of a stage that was passed over: an earlier stage's model or a path."""
    return f"{MERGED_FOLDER}/{start.removeprefix(MERGED)}" if start.startswith(MERGED) else start


def _noise(before: Measures, after: Measures) -> float:
    return NOISE * ((before.stderr or 0.0) ** 2 + (after.stderr or 0.0) ** 2) ** 0.5


def _sorted_out(changes: Mapping[str, tuple[float, float, float]]) -> dict[str, dict[str, Any]]:
    """Largest gain first. `what`: gained, lost, or kept if the difference is within its noise."""
    ordered = sorted(changes.items(), key=lambda item: item[1][0] - item[1][1])
    return {
        domain: {
            "before": before,
            "after": after,
            "what": "kept" if abs(after - before) <= noise else "gained" if after > before else "lost",
        }
        for domain, (before, after, noise) in ordered
    }


def story_lines(story: Sequence[Mapping[str, Any]]) -> list[str]:
    """The story in words, for any terminal width."""
    lines = ["the story: pass@1 before and after each stage"]
    for chapter in story:
        lines.append(f"{plain(chapter['stage'])}, from {plain(', '.join(chapter['from']))}")
        chosen = plain(Selected(**chapter["selected"]).in_words()) if "selected" in chapter else ""
        if "passed_over" in chapter:
            why = f": {chosen}" if chosen else ""  # older runs did not note the reason
            lines.append(f"  passed over{why}; its output is {plain(chapter['passed_over'])}")
        elif chosen:
            lines.append(f"  {chosen}")
        for what in ("gained", "lost", "kept"):
            shown = [
                f"{plain(domain)} {found['before']:.1%} to {found['after']:.1%} ({found['after'] - found['before']:+.1%})"
                for domain, found in chapter["domains"].items()
                if found["what"] == what
            ]
            if shown:
                lines.append(f"  {what:6} {', '.join(shown)}")
    return lines
