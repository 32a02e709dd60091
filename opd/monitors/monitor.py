"""A monitor detects one way in which a run fails. Its settings are thresholds: (P) is a published number, (H) our heuristic."""

from __future__ import annotations

import copy
import json
import math
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, Field, model_validator

from opd import registry
from opd.common.short_forms import SHORT_FORMS
from opd.common.text import plain
from opd.registry import SETTINGS, Choice, Family, Word

RecipeStage = dict[str, Any]  # a stage as in `resolved.yaml`; remedies change a copy


@dataclass(frozen=True)
class Alarm:
    """`words` describe the problem for a reader who does not know the code."""

    value: float
    threshold: float
    words: str


class StepProbe(Protocol):
    """A finished training step, for monitors that need more than its metrics. Values are computed on demand."""

    @property
    def step(self) -> int: ...

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates held-out prompts during training."""

    def cosines(self, answers: int) -> dict[str, float]:
        """Domain -> cosine between its gradient over `answers` answers and that of the others. Empty below two teachers."""

    def teachers_calibration(self, answers: int) -> dict[str, float]:
        """The expected calibration error of teachers on `answers` answers of the student, from signals already computed."""

    def taken_over(self, answers: int, depth: float) -> dict[str, float]:
        """How much more often the teacher is right than the student: from the start, and after a share `depth` of an answer."""


class Monitor(Choice):
    """Checked after every step. An alarm is raised once, and again only after a quiet period."""

    family = "monitor"
    usual: ClassVar[bool] = True  # on by default, since its metrics exist anyway
    reads: ClassVar[tuple[str, ...]]  # metrics; without them there is no alarm
    remedy: ClassVar[str]  # the published remedy, in words
    samples_teacher: ClassVar[bool] = False  # samples from the prompt's teacher, which needs a model in this process
    action: Literal["warn", "stop"] | None = Field(None, description="of one monitor; default: that of all")

    def measure(self, probe: StepProbe) -> dict[str, float]:
        """Extra metrics for this step. Most monitors need none."""
        return {}

    @abstractmethod
    def alarm(self, history: History) -> Alarm | None:
        """None: no problem, or too little data to tell."""
        raise NotImplementedError

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        """Recipes that apply the remedy, best first. The first valid one is written to a file."""
        return iter(())


AnyMonitor = Annotated[Monitor, Family("monitor")]


class Monitors(BaseModel):
    """Which monitors watch a stage, and what an alarm does."""

    model_config = SETTINGS
    action: Literal["warn", "stop", "off"] = Field(
        "warn", description="what an alarm does: say so, or end the run after a checkpoint; off: nothing is watched"
    )
    watch: Annotated[list[AnyMonitor], SHORT_FORMS["monitors.watch"]] = Field(
        default_factory=list,
        max_length=100,
        description="monitors with settings of their own; the usual ones are added",
    )
    ignore: Annotated[list[Word], SHORT_FORMS["monitors.ignore"]] = Field(
        default_factory=list, max_length=100, description="usual monitors that are left out"
    )

    @model_validator(mode="after")
    def _means_something(self) -> Monitors:
        names = [monitor.name for monitor in self.watch]
        if self.action == "off" and (names or self.ignore):
            raise ValueError("action off watches nothing: drop `watch` and `ignore`, or the action")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"watch: {twice[0]} comes twice: keep one")
        if unknown := [name for name in self.ignore if name not in usual_monitors()]:
            raise ValueError(
                f"ignore: {unknown[0]!r} is not watched anyway; those that are: {', '.join(usual_monitors())}"
            )
        if both := [name for name in self.ignore if name in names]:
            raise ValueError(f"ignore: {both[0]} stands under `watch`, too: keep one")
        return self

    def completed(self) -> Monitors:
        """Adds the default monitors, so that `resolved.yaml` names all of them."""
        if self.action == "off":
            return self
        named = {*self.ignore, *(monitor.name for monitor in self.watch)}
        usual = [registry.find("monitor", name)() for name in usual_monitors() if name not in named]
        return self.model_copy(update={"watch": [*self.watch, *usual]})

    def action_of(self, monitor: Monitor) -> str:
        return monitor.action or self.action


def usual_monitors() -> list[str]:
    """Monitors that are on by default."""
    found = {name: registry.find("monitor", name) for name in registry.names("monitor")}
    return [name for name, kind in found.items() if issubclass(kind, Monitor) and kind.usual]


# --- History: the metrics of a stage so far ---
# Monitors decide by this alone. It is the same, line by line, after a resume.


FIRST = 64  # values of a metric kept from the beginning of a stage
RECENT = 128  # newest values kept (values, not steps: probes and evaluations do not come every step)
MOSTLY_CUT = 0.5  # share of answers cut off at max_new_tokens above which rewards do not describe the student
DOMAINS = "eval/"
ESTIMATES = {"entropy": "entropy_sampled"}  # stand-ins for missing metrics; older runs wrote both as `entropy`
KEPT = {"stderr": "eval_stderr/", "at_k": "eval_k/", "at_k_stderr": "eval_k_stderr/"}


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: pass@1 by domain and, if known, its standard error, pass@k and the standard error of pass@k."""

    step: int
    value: Mapping[str, float]
    stderr: Mapping[str, float] = field(default_factory=dict)
    at_k: Mapping[str, float] = field(default_factory=dict)
    at_k_stderr: Mapping[str, float] = field(default_factory=dict)
    kl: float | None = None  # mean KL to the teachers since the previous evaluation

    @property
    def mean(self) -> float:
        return mean(self.value.values())

    @property
    def mean_stderr(self) -> float:
        """Of the mean over domains."""
        return math.sqrt(sum(error**2 for error in self.stderr.values())) / max(len(self.value), 1)


@dataclass(frozen=True)
class StageFacts:
    """What monitors need to know about the recipe."""

    self_taught: bool = False  # the student itself is the only teacher
    instructed: bool = False  # a teacher reads an instruction, such as to be brief
    followed_within: int | None = None  # steps after which a teacher may equal the student; None: never
    before: Callable[[], Evaluated | None] = lambda: None  # the evaluation before the first step


class History:
    """Metrics of the current stage, oldest first."""

    def __init__(self, facts: StageFacts | None = None) -> None:
        self.facts = facts or StageFacts()
        self.step = 0  # the newest
        self._seen: Counter[str] = Counter()  # values of each metric
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._evaluations: list[Evaluated] = []
        self._divergences: list[float] = []  # since the newest evaluation

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds one line of metrics.jsonl. Missing metrics are replaced by their estimates."""
        self.step = int(line["step"])
        for name, value in with_estimates(line).items():
            if is_number(value):
                self._seen[name] += 1
                self._recent.setdefault(name, deque(maxlen=RECENT)).append(value)
                if self._seen[name] <= FIRST:
                    self._first.setdefault(name, []).append(value)
        if is_number(line.get("reverse_kl")):
            self._divergences.append(line["reverse_kl"])
        if values := _by_domain(line, DOMAINS):
            more = {name: _by_domain(line, prefix) for name, prefix in KEPT.items()}
            kl = mean(self._divergences) if self._divergences else None
            self._evaluations.append(Evaluated(line["step"], values, kl=kl, **more))
            self._divergences = []

    def first(self, name: str, count: int) -> list[float]:
        """The first `count` values of a metric; empty if there are fewer."""
        found = self._first.get(name, ())[:count]
        return list(found) if len(found) == count else []

    def last(self, name: str, count: int, skip: int = 0) -> list[float]:
        """The newest `count` values before the `skip` newest ones; empty if there are fewer."""
        known = self.recent(name)
        known = known[: len(known) - skip]
        return known[-count:] if len(known) >= count else []

    def apart(self, name: str, count: int) -> tuple[list[float], list[float]] | None:
        """The first and the newest `count` values; None while they overlap."""
        first, last = self.first(name, count), self.last(name, count)
        return (first, last) if first and last and self._seen[name] >= 2 * count else None

    def answers_cut(self, count: int) -> bool:
        """Whether most answers of the first steps were cut off, so that their correctness is unknown."""
        return mean(self.first("truncated", count)) > MOSTLY_CUT

    def rewards_apart(self, count: int) -> tuple[list[float], list[float]] | None:
        """As `apart` for rewards; None also if most answers were cut off from the start."""
        return None if self.answers_cut(count) else self.apart("reward", count)

    def recent(self, name: str) -> list[float]:
        """All newest values that are kept."""
        return list(self._recent.get(name, ()))

    @property
    def evaluations(self) -> list[Evaluated]:
        """Includes the evaluation before training, if there was one."""
        before = self.facts.before()
        return [*([before] if before is not None else []), *self._evaluations]

    def score_rose(self, errors: float, since: int = 0) -> bool:
        """Whether the newest held-out score is over `errors` standard errors above the first. False if older than step `since`."""
        found = self.evaluations
        if len(found) < 2 or found[-1].step < since:
            return False
        return found[-1].mean > found[0].mean + errors * _error_of_difference(found[0], found[-1])

    def score_fell(self, errors: float) -> bool:
        """Whether the newest score is as far below the first. False if the standard error is unknown."""
        found = self.evaluations
        error = _error_of_difference(found[0], found[-1]) if len(found) > 1 else 0.0
        return error > 0 and found[-1].mean < found[0].mean - errors * error


def with_estimates(line: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces missing metrics by their estimates.

    >>> with_estimates({"entropy": None, "entropy_sampled": 0.3})
    {'entropy': 0.3, 'entropy_sampled': 0.3}
    """
    known = {name: line[other] for name, other in ESTIMATES.items() if line.get(name) is None and other in line}
    return {**line, **known}


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else math.nan


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    centre, count = mean(values), len(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (count - 1) / count) if count > 1 else 0.0


def slope(values: Sequence[float]) -> float:
    """Slope per step of the least-squares line."""
    centre, middle = mean(values), (len(values) - 1) / 2
    spread = sum((number - middle) ** 2 for number in range(len(values)))
    return sum((number - middle) * (value - centre) for number, value in enumerate(values)) / spread if spread else 0.0


def _error_of_difference(before: Evaluated, now: Evaluated) -> float:
    return math.hypot(before.mean_stderr, now.mean_stderr)


def _by_domain(line: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {key[len(prefix) :]: value for key, value in line.items() if key.startswith(prefix) and is_number(value)}


# --- Changes that remedies make to a stage ---
# Each returns a copy of the stage, or None if nothing changes.


DIVERGENCE_KEYS = ("divergence", "alpha", "beta")
SUPPORT_KEYS = ("support", "k", "side", "closure")
SAMPLED_KEYS = ("advantage", "surrogate", "correction", *DIVERGENCE_KEYS)
Change = Callable[[dict[str, Any]], dict[str, Any] | None]  # of a term or teacher; None: unchanged


def with_terms(stage: RecipeStage, change: Change) -> RecipeStage | None:
    found = copy.deepcopy(stage)
    changed = [change(dict(term)) for term in found["objective"]]
    if not any(changed):
        return None
    found["objective"] = [new or old for new, old in zip(changed, found["objective"], strict=True)]
    return found


def with_settings(stage: RecipeStage, part: str, **settings: Any) -> RecipeStage | None:
    if all(stage[part].get(key) == value for key, value in settings.items()):
        return None
    return {**copy.deepcopy(stage), part: {**copy.deepcopy(stage[part]), **settings}}


def with_teachers(stage: RecipeStage, change: Change) -> RecipeStage | None:
    found = copy.deepcopy(stage)
    changed = {name: change(dict(kind)) for name, kind in found["teachers"].items()}
    if not any(changed.values()):
        return None
    found["teachers"] = {name: changed[name] or kind for name, kind in found["teachers"].items()}
    return found


def without(term: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in term.items() if key not in keys}


def other_divergence(kind: str, **settings: Any) -> Change:
    """Direct terms get this divergence. Terms on sampled tokens become direct."""

    def change(term: dict[str, Any]) -> dict[str, Any] | None:
        if term["form"] == "direct" and term["divergence"] != kind:
            return {**without(term, *DIVERGENCE_KEYS), "divergence": kind, **settings}
        return {**direct(term), "divergence": kind, **settings} if goes_by_teacher(term) else None

    return change


def goes_by_teacher(term: dict[str, Any]) -> bool:
    """Whether the term uses the teacher's log-probs of sampled tokens."""
    return term["form"] == "k2" or (
        term["form"] == "policy_gradient" and bool(term["advantage"].get("teacher_weight", 1))
    )


def direct(term: dict[str, Any]) -> dict[str, Any]:
    """Turns a term on sampled tokens into one computed exactly."""
    return {**without(term, *SAMPLED_KEYS), "form": "direct"}


def gated(gate: str) -> Change:
    """Adds a gate to each term."""

    def change(term: dict[str, Any]) -> dict[str, Any] | None:
        kinds = [one["kind"] for one in term["gate"]]
        return None if gate in kinds else {**term, "gate": [*term["gate"], {"kind": gate}]}

    return change


def slower(stage: RecipeStage) -> RecipeStage | None:
    """A third of the learning rate."""
    return with_settings(stage, "train", lr=stage["train"]["lr"] / 3)


def frozen(kind: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    """Replaces teachers that are the student at the start of the stage (parts of mixtures included) by the frozen model `start`."""
    if kind["kind"] in ("self", "base"):
        return {**kind, "kind": "frozen", **start}
    inner: dict[str, Any] = {key: frozen(kind[key], start) for key in ("toward", "away") if key in kind}
    if "parts" in kind:
        inner["parts"] = {name: frozen(part, start) for name, part in kind["parts"].items()}
    return {**kind, **inner}


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """The changes, key by key.

    >>> list(differences({"train": {"lr": 0.3, "clip": 1.0}}, {"train": {"lr": 0.3 / 3}, "teachers": {"b": "x"}}))
    ['train.lr: 0.3 → 0.1', 'train.clip: dropped', 'teachers: {"b": "x"}']
    """
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from differences(before.get(key), after.get(key), f"{place}.{key}" if place else key)
    elif isinstance(before, list) and isinstance(after, list):
        for number, (was, now) in enumerate(zip_longest(before, after)):
            yield from differences(was, now, f"{place}.{number}")
    elif after is None:
        yield f"{place}: dropped"
    else:
        yield f"{place}: {'' if before is None else f'{_shown(before)} → '}{_shown(after)}"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else plain(json.dumps(value, ensure_ascii=False), 120)
