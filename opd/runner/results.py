"""The results of a stage: `summary.json` and the table printed at the end."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from opd.common.errors import RecipeError
from opd.common.text import cell, plain
from opd.evaluation import Measures
from opd.objective.stopping import EvaluationHistory
from opd.recipe import Recipe, Stage
from opd.report.answers import Flips

MEASURED = ("before", "after", "weight_average")  # fields of a result that map domains to measures
PLAIN = ("name", "teacher_of", "tokens", "steps", "seconds", "saved", "best_value", "best_step",
         "plateau", "history", "losses", "skipped", "start", "passed_over")  # fmt: skip


class Selected(NamedTuple):
    """The outcome of `select` for a stage's domains."""

    by: str  # the stage whose evaluations decided
    chosen: list[str]
    left_out: list[str]

    def in_words(self) -> str:
        if not self.chosen:
            return f"no domain is chosen, according to the evaluations of {self.by}"
        rest = (
            f"{', '.join(self.left_out)} {'are' if len(self.left_out) > 1 else 'is'}" if self.left_out else "nothing is"
        )
        return f"trains on {', '.join(self.chosen)}; {rest} left out, according to the evaluations of {self.by}"


@dataclass
class StageResult:
    name: str
    before: dict[str, Measures] = field(default_factory=dict)
    after: dict[str, Measures] = field(default_factory=dict)
    teachers: dict[str, dict[str, Measures]] = field(default_factory=dict)
    teacher_of: dict[str, str] = field(default_factory=dict)  # domain -> teacher
    weight_average: dict[str, Measures] = field(default_factory=dict)
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    saved: int | None = None  # step of the newest checkpoint
    best: Path | None = None
    best_value: float | None = None
    best_step: int | None = None
    plateau: int | None = None  # the step after which evaluation stopped improving
    history: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # validation losses, if measured: before training, and later ones
    skipped: int = 0  # unusable prompts
    start: list[dict[str, Any]] = field(default_factory=list)  # teachers compared with the student before step 1
    selected: Selected | None = None  # None: not in the recipe, or an older run
    passed_over: str | None = None  # if no domain was selected: the model it hands on, as the recipe names it

    def note_evaluation(self, step: int, measures: Mapping[str, Measures], value: float | None) -> bool:
        """Record an evaluation. True if it is the best so far."""
        self.history.append({"step": step} | {domain: found.value for domain, found in measures.items()})
        better = value is not None and (self.best_value is None or value > self.best_value)
        if better:
            self.best_value, self.best_step = value, step
        return better

    def note_loss(self, measures: Mapping[str, Measures]) -> None:
        """Record the validation loss: the mean over the tokens of all worked answers."""
        known = [(one.loss, one.loss_tokens) for one in measures.values() if one.loss is not None]
        if known:
            self.losses.append(sum(loss * tokens for loss, tokens in known) / sum(tokens for _, tokens in known))

    def evaluations(self, metric: str) -> EvaluationHistory:
        """The history that stop rules use."""
        values = [
            _mean(metric, {key: value for key, value in line.items() if key in self.before}) for line in self.history
        ]
        level = _mean(
            metric, {domain: found.value for domain in self.before if (found := self.teacher_measures(domain))}
        )
        return EvaluationHistory(values, level)

    def teacher_measures(self, domain: str) -> Measures | None:
        return self.teachers.get(self.teacher_of.get(domain, ""), {}).get(domain)

    @property
    def gaps(self) -> dict[str, float]:
        """How far each domain is below its own teacher in the newest evaluation, if both are known."""
        newest = self.history[-1] if self.history else {name: found.value for name, found in self.before.items()}
        levels = {domain: self.teacher_measures(domain) for domain in self.before}
        found = {domain: (level.value, newest.get(domain)) for domain, level in levels.items() if level is not None}
        return {name: goal - now for name, (goal, now) in found.items() if goal is not None and now is not None}

    def to_json(self) -> dict[str, Any]:
        evals = {domain: self._domain(domain) for domain in self.before}
        best = (
            {"step": self.best_step, "value": self.best_value, "path": f"checkpoints/{self.name}/{self.best.name}"}
            if self.best
            else None
        )
        return {
            "name": self.name, "evals": evals, "teachers": {name: {domain: found.value for domain, found in measures.items()} for name, measures in self.teachers.items()},
            "history": self.history, "best": best, "steps": self.steps, "seconds": round(self.seconds, 2), "tokens": self.tokens,
            "skipped_prompts": self.skipped, "start": self.start,
        }  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The complete current state, for a checkpoint saved during the run. `restored` reads it. Paths are relative to the stage's folder."""
        tables = {name: {key: found.to_json() for key, found in getattr(self, name).items()} for name in MEASURED}
        teachers = {
            name: {key: found.to_json() for key, found in measures.items()} for name, measures in self.teachers.items()
        }
        best = self.best.name if self.best else None
        selected = None if self.selected is None else self.selected._asdict()
        return {
            **copy.deepcopy({name: getattr(self, name) for name in PLAIN}), **tables, "teachers": teachers, "best": best, "selected": selected,
        }  # fmt: skip

    @classmethod
    def restored(cls, state: Mapping[str, Any], folder: Path) -> StageResult:
        result = cls(**{name: state[name] for name in PLAIN if name in state})  # earlier runs have fewer fields
        for name in MEASURED:
            setattr(result, name, {key: Measures.of_json(found) for key, found in state[name].items()})
        result.teachers = {
            name: {key: Measures.of_json(found) for key, found in measures.items()}
            for name, measures in state["teachers"].items()
        }
        result.best = folder / state["best"] if state["best"] else None
        result.selected = Selected(**found) if (found := state.get("selected")) else None
        return result

    def _domain(self, domain: str) -> dict[str, Any]:
        before, after, teacher = self.before[domain], self.after.get(domain), self.teacher_measures(domain)
        line: dict[str, Any] = {
            "before": before.value, "after": after.value if after else None, "teacher": teacher.value if teacher else None,
            "n": before.n, "stderr": (after or before).stderr, "reward": (after or before).reward,
        }  # fmt: skip
        if domain in self.weight_average:
            line["weight_average"] = self.weight_average[domain].value
            line["weight_average_normalised"] = normalised(before, self.weight_average[domain], teacher)
        line["normalised"] = normalised(before, after, teacher)
        line["details"] = {
            name: found.to_json()
            for name, found in (("before", before), ("after", after), ("teacher", teacher))
            if found
        }
        return line


def watched_domains(metric: str, domains: Sequence[str]) -> list[str]:
    """The domains that `eval.metric` covers: `pass@1` is the mean over all, `pass@1/DOMAIN` one of them."""
    name, _, domain = metric.partition("/")
    if name != "pass@1" or (domain and domain not in domains):
        raise RecipeError(
            f"eval.metric {metric!r}: expected pass@1, or pass@1/DOMAIN with one of {', '.join(domains)}."
        )
    return [domain] if domain else list(domains)


def watched(measures: Mapping[str, Measures], metric: str) -> float | None:
    """The value of the metric; None if nothing could be rewarded."""
    watched_domains(metric, list(measures))
    return _mean(metric, {domain: found.value for domain, found in measures.items()})


def _mean(metric: str, values: Mapping[str, float | None]) -> float | None:
    """The mean over the metric's domains with known values."""
    domain = metric.partition("/")[2]
    known = [value for name, value in values.items() if value is not None and domain in ("", name)]
    return sum(known) / len(known) if known else None


def normalised(before: Measures, after: Measures | None, teacher: Measures | None) -> float | None:
    """0 = where the student started, 1 = the domain's own teacher. None if the teacher is no better than the start."""
    start, end, goal = (found.value if found is not None else None for found in (before, after, teacher))
    if start is None or end is None or goal is None or goal <= start:
        return None
    return (end - start) / (goal - start)


def results_table(result: StageResult, flips: Mapping[str, Flips] | None = None) -> Table:
    """Per domain: student before, every teacher, the weight average, student after, the normalised gain, and what changed."""
    found = next(iter(result.before.values()))
    what = f"pass@1, {'greedy' if found.greedy is not None else 'sampled'}, {found.n} held-out prompts per domain"
    title = Text.assemble(cell(result.name), f": {what}")
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("domain")
    columns = [
        ("before", result.before),
        *result.teachers.items(),
        *([("average", result.weight_average)] if result.weight_average else []),
        ("after", result.after),
    ]
    for name, _ in columns:
        table.add_column(cell(name), justify="right", style="bold" if name == "after" else None)
    table.add_column("norm.", justify="right")
    changed = {domain: found for domain, found in (flips or {}).items() if domain in result.after}
    if changed:
        table.add_column("+/− (p)", justify="right")
    for domain in result.before:
        own = result.teachers.get(result.teacher_of.get(domain, ""))
        cells = [_cell(measures.get(domain), own=measures is own) for _, measures in columns]
        ratio = normalised(result.before[domain], result.after.get(domain), result.teacher_measures(domain))
        more = [flips_in_words(changed.get(domain))] if changed else []
        table.add_row(cell(domain), *cells, "–" if ratio is None else f"{ratio:.2f}", *more)
    notes = ["norm.: 0 = before, 1 = the domain's own teacher (*)"] if result.teachers else []
    notes += ["+/−: right only after, right only before; p: McNemar's exact test"] if changed else []
    notes += ["average: plain average of the teachers' weights"] if result.weight_average else []
    notes += [
        f"mean reward of {plain(domain)}, partial credit included: {before.reward:.3g} before, {after.reward:.3g} after"
        for domain, before in result.before.items()
        if (after := result.after.get(domain)) and (before.partial or after.partial)
        if before.reward is not None and after.reward is not None
    ]
    table.caption, table.caption_justify = Text("\n".join(notes), style="table.caption") if notes else None, "left"
    return table


def flips_in_words(found: Flips | None) -> str:
    """`+12 −3 (0.035)`: gained, lost, and how likely that is by chance."""
    return "–" if found is None else f"+{found.gained} −{found.lost} ({found.p:.2g})"


def _cell(found: Measures | None, own: bool) -> Text:
    """A table cell. The domain's own teacher gets a star, which plain-text output keeps."""
    if found is None or found.value is None:
        return Text("– ")
    return Text(f"{found.value:.1%}*", style="underline") if own else Text(f"{found.value:.1%} ")


# --- When a stage ends before its last step ---


def meets_stop_rules(spec: Stage, result: StageResult) -> bool:
    """Whether its evaluations meet the stop rules."""
    stop = spec.eval.early_stop
    return stop is not None and stop.should_stop(result.evaluations(spec.eval.metric))


def budget_used_up(spec: Stage, result: StageResult) -> bool:
    """Whether its token budget is used up."""
    return spec.train.tokens is not None and result.tokens >= spec.train.tokens


def early_stop(spec: Stage, result: StageResult, enough: bool) -> str:
    """The message for an early stop. `enough`: evaluations ended it; otherwise the token budget."""
    why = (
        f"the best {spec.eval.metric} was at step {result.best_step}"
        if enough
        else f"{result.tokens:,} response tokens, of train.tokens {spec.train.tokens:,}"
    )
    return f"{spec.name}: early stop after step {result.steps}; {why}"


# --- `select`: a stage trains only on domains that an earlier stage's evaluations choose, and is evaluated on all of them ---


def require_selections(recipe: Recipe) -> None:
    """Reject a stage that selects by evaluations that will not exist, if the recipe alone shows it."""
    named = {stage.name: stage for stage in recipe.stages}
    for stage in recipe.stages:
        if stage.select is not None:
            earlier = named[stage.select.stage]
            sources = (*earlier.prompts, *earlier.eval.further)
            evaluated = [source.only_domain for source in sources if source.only_domain is not None]
            if len(evaluated) == len(sources):  # otherwise the rows name their domains
                stage.select.require(stage.name, stage.named_domains, evaluated)


def require_evaluated(recipe: Recipe, chosen: Collection[str], stage: str, evaluated: Collection[str]) -> None:
    """The same check for stages to be carried out that select by a stage which is about to train."""
    for later in recipe.stages:
        if later.name in chosen and later.select is not None and later.select.stage == stage:
            later.select.require(later.name, later.named_domains, evaluated)


def selected(stage: Stage, results: Sequence[StageResult]) -> Selected | None:
    """The domains that an earlier stage's evaluations choose. None: the stage does not select."""
    if stage.select is None:
        return None
    earlier = next(result for result in results if result.name == stage.select.stage)
    domains = stage.named_domains
    values = {domain: found for domain in domains if (found := _evaluations_of(earlier, domain))}
    stage.select.require(stage.name, domains, values)
    chosen = [domain for domain, found in values.items() if stage.select.chooses(found)]
    return Selected(earlier.name, chosen, [domain for domain in domains if domain not in chosen])


def narrowed(stage: Stage, found: Selected | None) -> Stage | None:
    """The stage with the chosen prompts and their teachers, still evaluated on all domains. None: no domain is chosen."""
    if found is None:
        return stage
    if not found.chosen:
        return None
    dropped = found.left_out
    measured = [*stage.eval.further, *(source for source in stage.prompts if source.domain in dropped)]
    changes = {
        "prompts": [source for source in stage.prompts if source.domain not in dropped],
        "teachers": _teachers_left(stage, dropped),
        "eval": stage.eval.model_copy(update={"further": measured if stage.eval.prompts else []}),
    }
    return stage.model_copy(update=changes)


def _evaluations_of(result: StageResult, domain: str) -> list[float]:
    """The domain's evaluations, from before the first step to after the last."""
    before = result.before.get(domain)
    known = [before.value if before is not None else None, *(line.get(domain) for line in result.history)]
    return [value for value in known if value is not None]


def _teachers_left(stage: Stage, dropped: Collection[str]) -> dict[str, object]:
    """The teachers that still have something to score."""
    kept: dict[str, object] = {}
    for name, kind in stage.teachers.items():
        alone = sum(other.role == kind.role for other in stage.teachers.values()) == 1
        if kind.domains is None and (alone or name not in dropped):
            kept[name] = kind
        elif kind.domains is not None and (left := [domain for domain in kind.domains if domain not in dropped]):
            kept[name] = kind.model_copy(update={"domains": left})
    return kept
