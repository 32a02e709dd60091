"""A monitor detects one way in which a run fails. Its settings are thresholds: (P) is a published number, (H) our heuristic."""

from __future__ import annotations

import copy
import json
import math
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, Field, model_validator

from opd import registry
from opd.common.short_forms import SHORT_FORMS
from opd.common.text import plain
from opd.registry import SETTINGS, Choice, Family, Fraction, Positive, StageView, Word

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
        "warn", description="what an alarm does: warn, or stop the run after a checkpoint; off: no monitoring"
    )
    watch: Annotated[list[AnyMonitor], SHORT_FORMS["monitors.watch"]] = Field(
        default_factory=list,
        max_length=100,
        description="monitors with custom settings; the default ones are added",
    )
    ignore: Annotated[list[Word], SHORT_FORMS["monitors.ignore"]] = Field(
        default_factory=list, max_length=100, description="default monitors to leave out"
    )

    @model_validator(mode="after")
    def _means_something(self) -> Monitors:
        names = [monitor.name for monitor in self.watch]
        if self.action == "off" and (names or self.ignore):
            raise ValueError("action off watches nothing: drop `watch` and `ignore`, or the action")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"watch: {twice[0]} is listed twice: keep one")
        if unknown := [name for name in self.ignore if name not in usual_monitors()]:
            raise ValueError(
                f"ignore: {unknown[0]!r} is not a default monitor; those are: {', '.join(usual_monitors())}"
            )
        if both := [name for name in self.ignore if name in names]:
            raise ValueError(f"ignore: {both[0]} is also listed under `watch`: keep one")
        return self

    def completed(self, growing: bool = False) -> Monitors:
        """Adds the default monitors, so that `resolved.yaml` names all of them. `growing`: answers are cut off at a limit that grows."""
        if self.action == "off":
            return self
        named = {
            *self.ignore,
            *(("stopping", "lengthening") if growing else ()),
            *(monitor.name for monitor in self.watch),
        }
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


# --- The kinds of monitors ---


WARMER = 1.25  # teacher temperature that the remedy sets
LEVELS = 20  # a fall of the KL is compared with this many steps before it
DROPPED = 3  # factor by which distinct pairs or rewards fall when the student has collapsed
STEPS_OF_A_START = 3  # steps at the start; a fall of the KL comes after at least this many
NEWEST_ERRORS = 5  # teacher calibration errors compared at the beginning and at the end
SAFE_REFRESH = 40  # steps between two refreshes of a teacher that follows the student (P)


def offered(*stages: RecipeStage | None) -> Iterator[RecipeStage]:
    return (stage for stage in stages if stage is not None)


def _dropped(history: History, name: str) -> bool:
    """Whether both of the two newest values are below 1/DROPPED of the median before them."""
    before, now = history.recent(name)[-LEVELS - 2 : -2], history.last(name, 2)
    return bool(before) and max(now) < median(before) / DROPPED


class DivergenceJump(Monitor):
    """The KL to the teacher drops suddenly and stays low for a step (P: 2.637 to 0.343 when a teacher was reset to its student),
    or rises to several times its lowest level (H: 3 times, and 0.5 nats). Fast learning at the start is not a failure. A drop
    counts only if a teacher that follows the student has had time to become it, or if scores, rewards or distinct pairs of
    tokens dropped too.
    """

    name = "kl"
    reads = ("reverse_kl",)
    remedy = (
        "refresh a teacher that follows its student every 40 steps or more, or use an EMA; else a lower learning rate"
    )
    fall: float = Field(5.0, gt=1, description="of kl: times by which it falls from one step to the next two")
    rise: float = Field(3.0, gt=1, description="of kl: times its lowest level, over three steps")
    least: float = Field(0.02, ge=0, description="of kl and diversity: falls from fewer nats than this are ignored")
    margin: float = Field(0.5, ge=0, description="of kl: nats above its lowest level, in addition to `rise`")
    errors: float = Field(
        2.0, gt=0, description="a change of the score (of diversity: of pass@k) counts from so many standard errors on"
    )

    def alarm(self, history: History) -> Alarm | None:
        return self._fall(history) or self._rise(history)

    def _fall(self, history: History) -> Alarm | None:
        earlier, now = history.last("reverse_kl", 3, skip=2), history.last("reverse_kl", 2)
        before = history.recent("reverse_kl")[-LEVELS - 2 : -2]
        fallen = bool(earlier) and median(earlier) > self.least and max(now) < median(earlier) / self.fall
        if not fallen or max(now) >= min(before) / 2:  # when the KL is noisy, a few low values are not a drop
            return None
        cause = self._cause(history)
        if cause is None:
            return None
        words = f"KL to the teacher fell from {median(earlier):.3g} to {max(now):.3g} nats at once{cause}"
        return Alarm(max(now), median(earlier) / self.fall, words)

    def _cause(self, history: History) -> str | None:
        """Why a drop of the KL is bad. None: no known reason, so the student simply learned fast."""
        if history.score_rose(self.errors, since=history.step - 1):  # an older score was taken before the drop
            return None
        within, trivial = history.facts.followed_within, "the student writes what is trivial to predict"
        if within is not None and history.step > within:
            return f": the teacher has become the student, or {trivial}"
        if history.score_fell(self.errors):
            before, now = history.evaluations[0].mean, history.evaluations[-1].mean
            return f", and the held-out score from {before:.1%} to {now:.1%}: {trivial}"
        if _dropped(history, "distinct"):
            return f", and so did the share of distinct pairs of tokens: {trivial}"
        if _dropped(history, "reward") and not history.answers_cut(STEPS_OF_A_START):
            return f", and so did rewards: {trivial}"
        return None

    def _rise(self, history: History) -> Alarm | None:
        recent, levels = history.last("reverse_kl", 3), self._levels(history)
        if recent and levels:
            highest = max(self.rise * min(levels), min(levels) + self.margin)
            if median(recent) > highest:
                return Alarm(
                    median(recent),
                    highest,
                    f"KL to the teacher is {median(recent):.3g} nats, up from {min(levels):.3g}: the student is drifting away from it",
                )
        return None

    def _levels(self, history: History) -> list[float]:
        """The first value, and medians of three consecutive steps, so that one odd batch does not set a level."""
        values = history.recent("reverse_kl")
        return [*history.first("reverse_kl", 1), *(median(values[at : at + 3]) for at in range(len(values) - 2))]

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def rarer(kind: dict[str, object]) -> dict[str, object] | None:
            chases = kind["kind"] == "live" or (kind["kind"] == "refresh" and int(str(kind["every"])) < SAFE_REFRESH)
            return {**kind, "kind": "refresh", "every": SAFE_REFRESH, "force": False} if chases else None

        return offered(with_teachers(stage, rarer), slower(stage))


class LostDiversity(Monitor):
    """pass@k falls by more than two standard errors (P), or entropy or distinct pairs of tokens fall by 30 %
    (P: entropy .30 to .21) without any gain in reward. Falling entropy alone is normal during learning.
    """

    name = "diversity"
    reads = ("eval_k/DOMAIN", "entropy", "distinct", "reward")
    remedy = "JSD or a skewed divergence in place of reverse KL, or an entropy-aware mixture of both directions"
    errors: float = Field(
        2.0, gt=0, description="a change of the score (of diversity: of pass@k) counts from so many standard errors on"
    )
    fall: float = Field(
        0.3, gt=0, lt=1, description="of diversity: share of entropy, or of distinct pairs, that is lost"
    )
    least: float = Field(0.1, ge=0, description="of kl and diversity: falls from fewer nats than this are ignored")
    window: Positive = Field(10, le=60, description="steps at the beginning and at the end that are compared")

    def alarm(self, history: History) -> Alarm | None:
        return self._pass_at_k(history) or self._entropy(history)

    def _pass_at_k(self, history: History) -> Alarm | None:
        if len(history.evaluations) < 2:
            return None
        first, now = history.evaluations[0], history.evaluations[-1]
        for domain in first.at_k.keys() & now.at_k.keys():
            error = (first.at_k_stderr.get(domain, 0) ** 2 + now.at_k_stderr.get(domain, 0) ** 2) ** 0.5
            lost = first.at_k[domain] - now.at_k[domain]
            if error and lost > self.errors * error:
                return Alarm(
                    now.at_k[domain],
                    first.at_k[domain] - self.errors * error,
                    f"pass@k of {domain} fell from {first.at_k[domain]:.1%} to {now.at_k[domain]:.1%}, pass@1 went from "
                    f"{first.value.get(domain, 0):.1%} to {now.value.get(domain, 0):.1%}: the student has fewer ways to be right",
                )
        return None

    def _entropy(self, history: History) -> Alarm | None:
        rewards = history.rewards_apart(self.window)
        risen = rewards is not None and mean(rewards[1]) > mean(rewards[0])
        if risen or history.score_rose(self.errors):
            return None
        found = {name: history.apart(name, self.window) for name in ("entropy", "distinct")}
        kept = {
            name: mean(now) / mean(first)
            for name, pair in found.items()
            if pair
            for first, now in [pair]
            if mean(first) > (self.least if name == "entropy" else 0)  # a confident student has little entropy to lose
        }
        fallen = {name: share for name, share in kept.items() if share < 1 - self.fall}
        enough = bool(fallen) if rewards is not None else len(fallen) == 2
        if not enough:
            return None
        name, share = min(fallen.items(), key=lambda item: item[1])
        what = "entropy" if name == "entropy" else "the share of distinct pairs of tokens"
        gain = "and rewards have not risen" if rewards is not None else "and so is the other measure of diversity"
        return Alarm(
            share,
            1 - self.fall,
            f"{what} is down to {share:.0%} of its initial value, {gain}: the student's answers become more and more alike",
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        return offered(
            with_terms(stage, other_divergence("jsd", beta=0.5)),
            with_terms(stage, other_divergence("skew_kl", alpha=0.1)),
            slower(stage),
        )


class DominantToken(Monitor):
    """A few tokens carry the loss. The 1 % of tokens with the largest KL hold more than 70 % of it, or a single id holds
    more than half of it beyond its share of the text (H). The largest KL of a token is also above 5 nats (P: the usual clip of
    advantages) in most of the last steps.
    """

    name = "token"
    reads = ("kl_top", "kl_one", "kl_largest")
    remedy = "clip advantages at 5; a truncated reverse KL (the student's likeliest ids), or a bounded divergence such as JSD"
    share: float = Field(0.7, gt=0, lt=1, description="of token: part of the KL that 1 % of the tokens hold")
    one: float = Field(
        0.5, gt=0, lt=1, description="of token: part of the KL that one id holds beyond how often it is sampled"
    )
    largest: float = Field(5.0, gt=0, description="of token: nats at a single token")
    window: Positive = Field(10, le=60, description="newest steps of which the middle one counts")

    def alarm(self, history: History) -> Alarm | None:
        top, one, largest = (history.last(name, self.window) for name in ("kl_top", "kl_one", "kl_largest"))
        if not largest or median(largest) <= self.largest:
            return None
        most = f"a single one up to {median(largest):.3g} nats: a few tokens dominate every update"
        if top and median(top) > self.share:
            return Alarm(median(top), self.share, f"1 % of the tokens hold {median(top):.0%} of the KL, {most}")
        if one and median(one) > self.one:
            what = f"a single token holds {median(one):.0%} of the KL beyond its share of the text"
            return Alarm(median(one), self.one, f"{what}, {most}")
        return None

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def clipped(term: dict[str, object]) -> dict[str, object] | None:
            advantage = term.get("advantage")
            known = isinstance(advantage, dict) and goes_by_teacher(term) and advantage.get("clip") is None
            return {**term, "advantage": {**advantage, "clip": 5.0}} if known and isinstance(advantage, dict) else None

        def truncated(term: dict[str, object]) -> dict[str, object] | None:
            whole = term["form"] == "direct" and term["divergence"] == "reverse_kl" and term["support"] == "full"
            return {**without(term, *SUPPORT_KEYS), "support": "topk", "side": "student"} if whole else None

        return offered(
            with_terms(stage, clipped),
            with_terms(stage, truncated),
            with_terms(stage, other_divergence("jsd", beta=0.5)),
        )


class SamplerMismatch(Monitor):
    """The sampler's log-probs differ from the trainer's: more than 2 % of the tokens have a ratio outside [0.5, 2] (P: the
    bounds; H: the share), or mean |log ratio| is above 0.2 (H; bf16 alone caused at most 0.09).
    """

    name = "mismatch"
    reads = ("mismatch_outside", "mismatch")
    remedy = "IcePop: tokens whose ratio is outside [0.5, 2] are masked"
    share: float = Field(0.02, gt=0, lt=1, description="of mismatch: tokens whose ratio is outside [0.5, 2]")
    log_ratio: float = Field(0.2, gt=0, description="of mismatch: mean |log ratio|")
    window: Positive = Field(10, le=60, description="steps at the beginning and at the end that are compared")

    def alarm(self, history: History) -> Alarm | None:
        for name, highest in (("mismatch_outside", self.share), ("mismatch", self.log_ratio)):
            found = history.last(name, self.window)
            if found and mean(found) > highest:
                what = (
                    f"{mean(found):.1%} of the tokens have a ratio"
                    if name != "mismatch"
                    else f"|log ratio| is {mean(found):.3g} on average"
                )
                return Alarm(
                    mean(found),
                    highest,
                    f"{what} of trainer to sampler that is far from 1: sampler and trainer compute different probabilities",
                )
        return None

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def corrected(term: dict[str, object]) -> dict[str, object] | None:
            kinds = {"policy_gradient": "icepop", "direct": "prefix"}
            known = term["form"] in kinds and "correction" in term and term["correction"] is None
            return {**term, "correction": {"kind": kinds[str(term["form"])]}} if known else None

        return offered(with_terms(stage, corrected))


class Stale(Monitor):
    """Tokens were sampled from weights more than four updates old (P)."""

    name = "staleness"
    reads = ("staleness/max",)
    remedy = "sample less far ahead, and recompute reverse KL with the weights that are trained"
    most: float = Field(4.0, ge=0, description="of staleness: updates")

    def alarm(self, history: History) -> Alarm | None:
        found = history.last("staleness/max", 1)
        if not found or found[0] <= self.most:
            return None
        return Alarm(
            found[0], self.most, f"tokens of this step were drawn by weights that are {found[0]:.0f} updates old"
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        return offered(with_settings(stage, "rollout", staleness=2, in_flight="recompute"))


class Miscalibrated(Monitor):
    """Confidence drifts away from accuracy: the expected calibration error of the student on the answers of a step, or of its
    teachers on the same answers, has risen by 0.05 (H). Confidence is the geometric mean of token probabilities (H).
    """

    name = "calibration"
    reads = ("ece", "ece/teacher")
    remedy = "a temperature above 1 for the teacher's distribution"
    rise: float = Field(
        0.05, gt=0, le=1, description="of calibration: rise above the initial error; of stopping: see there"
    )
    window: Positive = Field(20, le=60, description="steps at the beginning and at the end that are compared")
    every: Positive = Field(10, description="of prefix, conflict and calibration: steps from one probe to the next")
    answers: Positive = Field(128, le=4096, description="of a probe: those of a step, or of each domain, that it takes")

    def measure(self, probe: StepProbe) -> dict[str, float]:
        return {} if probe.step % self.every else probe.teachers_calibration(self.answers)

    def alarm(self, history: History) -> Alarm | None:
        if history.answers_cut(self.window):
            return None
        for who, name, count in (("the student", "ece", self.window), ("the teacher", "ece/teacher", NEWEST_ERRORS)):
            found = history.apart(name, count)
            if found is not None and mean(found[1]) > mean(found[0]) + self.rise:
                return Alarm(
                    mean(found[1]),
                    mean(found[0]) + self.rise,
                    f"{who}'s confidence in the student's answers is {mean(found[1]):.0%} off from how often they are right "
                    f"({mean(found[0]):.0%} at first)",
                )
        return None

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def warmer(kind: dict[str, object]) -> dict[str, object] | None:
            given = kind.get("temperature")
            return {**kind, "temperature": WARMER} if isinstance(given, (int, float)) and given < WARMER else None

        return offered(with_teachers(stage, warmer))


# --- Length and stopping of answers ---


LENGTH_START = 3  # first steps, which give the initial length: in some runs it has changed by step 10


class LostStopping(Monitor):
    """Answers do not end: the share cut off at max_new_tokens has risen by 0.2 and is still rising (H; P: the late slope
    shows it, no threshold on an early value does), or answers are twice as long (H) and more of them are cut off.
    """

    name = "stopping"
    reads = ("truncated", "response_length")
    remedy = "stop ids that both models know, merged; answers that were cut off are not trained on"
    rise: float = Field(0.2, gt=0, le=1, description="of stopping: rise of the share of answers that are cut off")
    longer: float = Field(2.0, gt=1, description="of stopping and lengthening: times the initial length")
    window: Positive = Field(10, le=60, description="steps at the beginning and at the end that are compared")

    def alarm(self, history: History) -> Alarm | None:
        truncated, lengths = history.apart("truncated", self.window), history.apart("response_length", self.window)
        if truncated is None or lengths is None:
            return None
        (before, now), (short, long) = (tuple(map(mean, pair)) for pair in (truncated, lengths))
        words = f"{now:.0%} of the answers are cut off ({before:.0%} at first) at {long:.3g} tokens ({short:.3g}): the student is unlearning to stop"
        rising = now >= 0.95 or slope(truncated[1]) > 0
        if now - before > self.rise and rising:
            return Alarm(now, before + self.rise, words)
        if long > self.longer * short and now > before:
            return Alarm(long, self.longer * short, words)
        return None

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        return offered(with_terms(stage, gated("finished")), slower(stage))


class OtherLength(Monitor):
    """The length of answers changes while rewards stay flat. Ignored when a teacher reads an instruction, such as to be brief."""

    reads = ("response_length", "reward")
    remedy = "the model that the stage started from as a second teacher"
    words: ClassVar[tuple[str, str]]  # what answers did, and what it means
    window: Positive = Field(10, le=60, description="steps at the beginning and at the end that are compared")
    errors: float = Field(
        2.0, gt=0, description="a change of the score (of diversity: of pass@k) counts from so many standard errors on"
    )

    def alarm(self, history: History) -> Alarm | None:
        lengths, rewards = history.apart("response_length", self.window), history.rewards_apart(self.window)
        if lengths is None or rewards is None or history.facts.instructed or history.score_rose(self.errors):
            return None
        before, now = mean(lengths[0][:LENGTH_START]), mean(lengths[1])
        limit = self.limit(before)
        noise = (standard_error(rewards[0]) ** 2 + standard_error(rewards[1]) ** 2) ** 0.5
        # three steps are noisy, more often upwards: for shortening, compare with the whole first window too
        within = now >= min(limit, self.limit(mean(lengths[0]))) if limit < before else now <= limit
        scatter = (
            standard_error(lengths[1]) * (len(lengths[1]) / LENGTH_START + 1) ** 0.5
        )  # standard error of the difference when nothing changes
        if (
            within
            or abs(now - before) <= self.errors * scatter
            or mean(rewards[1]) > mean(rewards[0]) + self.errors * noise
        ):
            return None
        moved, means = self.words
        return Alarm(
            now,
            limit,
            f"answers have {moved} from {before:.3g} to {now:.3g} tokens, and rewards have not risen ({mean(rewards[0]):.3g}, now "
            f"{mean(rewards[1]):.3g}): {means}",
        )

    @abstractmethod
    def limit(self, before: float) -> float:
        """The mean length in tokens that raises the alarm, given the mean length `before`."""
        raise NotImplementedError

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        start = {"kind": "self", "role": "reference"}
        anchor = {
            "form": "direct",
            "divergence": "reverse_kl",
            "role": "reference",
            "coefficient": 0.1,
            "on": ["student"],
        }
        taken = "start" in stage["teachers"] or any(kind["role"] == "reference" for kind in stage["teachers"].values())
        if not taken:
            teachers = {**stage["teachers"], "start": start}
            yield {**stage, "teachers": teachers, "objective": [*stage["objective"], anchor]}
        yield from offered(slower(stage))


class Shortening(OtherLength):
    """Answers shrink below 70 % of their initial length while rewards stay flat (H)."""

    name = "shortening"
    words = "shrunk", "reasoning is being cut short"
    share: float = Field(0.7, gt=0, lt=1, description="of shortening: share of the initial length")

    def limit(self, before: float) -> float:
        return self.share * before


class Lengthening(OtherLength):
    """Answers grow beyond twice their initial length while rewards stay flat (H), cut off or not."""

    name = "lengthening"
    words = "grown", "length is being inflated"
    longer: float = Field(2.0, gt=1, description="of stopping and lengthening: times the initial length")

    def limit(self, before: float) -> float:
        return self.longer * before


# --- Periodic evaluations (`eval.every`) ---


class FallingTogether(Monitor):
    """KL to the teacher and the held-out score both fall in three consecutive evaluations (H): minimising the KL no longer
    helps.
    """

    name = "together"
    reads = ("reverse_kl", "eval/DOMAIN")
    remedy = "stop; then the exact divergence, or a top-k one, in place of sampled tokens"
    evaluations: Positive = Field(3, le=100, description="of together: in a row")

    def alarm(self, history: History) -> Alarm | None:
        found = history.evaluations[-(self.evaluations + 1) :]
        if len(found) <= self.evaluations:
            return None
        scores, kls = [one.mean for one in found], [one.kl for one in found if one.kl is not None]
        falls = all(now < before for before, now in pairwise(scores)) and all(
            now < before for before, now in pairwise(kls)
        )
        if not falls or len(kls) < self.evaluations or scores[0] - scores[-1] <= found[-1].mean_stderr:
            return None
        return Alarm(
            scores[-1],
            scores[0],
            f"in {self.evaluations} evaluations the score fell from {scores[0]:.1%} to {scores[-1]:.1%} while KL to the teacher fell to "
            f"{kls[-1]:.3g} nats: matching the teacher no longer improves the score",
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def exact(term: dict[str, object]) -> dict[str, object] | None:
            return direct(term) if goes_by_teacher(term) else None

        def topk(term: dict[str, object]) -> dict[str, object] | None:
            return {**direct(term), "support": "topk"} if goes_by_teacher(term) else None

        return offered(with_terms(stage, exact), with_terms(stage, topk), slower(stage))


class Saturation(Monitor):
    """A student that is its own only teacher stops improving: two consecutive evaluations gain less than one standard error (H)."""

    name = "saturation"
    reads = ("eval/DOMAIN",)
    remedy = "a frontier curriculum: prompts that are sometimes answered right"
    errors: float = Field(
        1.0, gt=0, description="a change of the score (of diversity: of pass@k) counts from so many standard errors on"
    )
    evaluations: Positive = Field(2, le=100, description="of together: in a row")

    def alarm(self, history: History) -> Alarm | None:
        found = history.evaluations[-(self.evaluations + 1) :]
        if not history.facts.self_taught or len(found) <= self.evaluations or not found[-1].stderr:
            return None
        gains = [now.mean - before.mean for before, now in pairwise(found)]
        highest = self.errors * found[-1].mean_stderr
        if any(gain >= highest for gain in gains):
            return None
        return Alarm(
            max(gains),
            highest,
            f"{self.evaluations} evaluations in a row gained less than {highest:.1%}, which is chance: the student has nothing more to "
            "learn from itself on these prompts",
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        several = with_settings(stage, "rollout", samples=max(4, stage["rollout"]["samples"])) or stage
        return offered(with_terms(several, gated("paced")))


# --- Probes: measurements taken every few steps, beyond the metrics of a step ---


PROBES = 3  # newest probes, averaged
REWARD_START = 5  # first steps, which give the initial reward
COSINE = "cosine/"
AT_FIRST, LATE = "takeover/first", "takeover/late"


class TurnDrift(Monitor):
    """The student drifts away from what the teacher knows over the turns of an episode: from the first turn to the last, KL rises
    by more than half a nat, and by twice as much as at first (H; TCOD reports the drift).
    """

    name = "turns"
    reads = ("kl_turns",)
    remedy = (
        "a curriculum over turns: fewer at first (TCOD), or weights that fall with a turn's divergence (methods/sod)"
    )
    rise_turns: float = Field(0.5, gt=0, description="of turns: nats by which KL rises from the first turn to the last")
    window: Positive = Field(20, le=60, description="steps at the beginning and at the end that are compared")

    def alarm(self, history: History) -> Alarm | None:
        parts = history.apart("kl_turns", self.window)
        if parts is None:
            return None
        first, now = (mean(part) for part in parts)
        if now <= self.rise_turns or now <= 2 * max(first, 0.0):
            return None
        return Alarm(
            now,
            self.rise_turns,
            f"from the first turn of an episode to the last, KL to the teacher rises by {now:.2g} nats, and by {first:.2g} at first: in late "
            "turns the student is where the teacher does not know its way",
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        environment = stage["rollout"].get("environment")
        if not environment or environment["turns"] < 2:
            return iter(())
        shorter = {**environment, "turns": environment["turns"] // 2}
        return offered(with_settings(stage, "rollout", environment=shorter))


class FlawedPrefix(Monitor):
    """The teacher does better than the student from the beginning, but not after the student's words: after three quarters of
    an answer it gains less than 0.05 (near P: +0.37 falls to +0.02 with depth), and rewards do not rise (H).
    """

    name = "prefix"
    reads = (AT_FIRST, LATE, "reward")
    usual = False  # the teacher has to sample answers
    samples_teacher = True
    remedy = (
        "SCOPE (right answers teach themselves, wrong ones are corrected by a teacher that is sure), an EMA of the student as an anchor, "
        "shorter rollouts, or a share of answers that the teacher or the dataset has written"
    )
    every: Positive = Field(10, description="of prefix, conflict and calibration: steps from one probe to the next")
    answers: Positive = Field(32, le=4096, description="of a probe: those of a step, or of each domain, that it takes")
    depth: Fraction = Field(0.75, description="of prefix: part of an answer after which the teacher takes over")
    takeover: float = Field(0.05, ge=0, lt=1, description="of prefix: how much more often it is right then")
    gap: float = Field(0.2, gt=0, lt=1, description="of prefix: how much more often it is right from the beginning on")
    errors: float = Field(
        2.0, gt=0, description="a change of the score (of diversity: of pass@k) counts from so many standard errors on"
    )
    window: Positive = Field(20, le=60, description="steps at the beginning and at the end that are compared")

    def check(self, view: StageView) -> Iterable[str]:
        if "teacher" not in view.roles:
            yield "prefix lets the teacher continue the student's answer, and there is no teacher. Remove it."

    def measure(self, probe: StepProbe) -> dict[str, float]:
        return {} if probe.step % self.every else probe.taken_over(self.answers, self.depth)

    def alarm(self, history: History) -> Alarm | None:
        first, late = history.last(AT_FIRST, PROBES), history.last(LATE, PROBES)
        rewards = history.rewards_apart(self.window)
        if not first or not late or rewards is None or mean(first) <= self.gap or mean(late) >= self.takeover:
            return None
        # the reward of a step depends on the domains drawn, so the held-out score counts as well
        if self._rises(*rewards) or history.score_rose(self.errors):
            return None
        return Alarm(
            mean(late),
            self.takeover,
            f"from the beginning the teacher is right {mean(first):.0%} more often than the student, and only {mean(late):+.0%} after "
            f"{self.depth:.0%} of what the student wrote, while rewards do not rise: its advice comes too late to fix anything",
        )

    def _rises(self, first: Sequence[float], now: Sequence[float]) -> bool:
        """Whether rewards rose since the first steps (fast learning happens within the first window), or since the first window."""
        return any(
            mean(now) > mean(start) + self.errors * (standard_error(start) ** 2 + standard_error(now) ** 2) ** 0.5
            for start in (first[:REWARD_START], first)
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        rollout = stage["rollout"]
        written = with_settings(stage, "rollout", teacher_share=max(0.25, rollout["teacher_share"]))
        shorter = with_settings(stage, "rollout", max_new_tokens=max(1, rollout["max_new_tokens"] // 2))
        return offered(_scope(stage), written, shorter)


def _scope(stage: RecipeStage) -> RecipeStage | None:
    """Replaces the single teacher term by SCOPE's two terms. Samples at least 4 answers per prompt, since some have to be right."""
    terms = stage["objective"]
    if len(terms) != 1 or terms[0]["form"] not in ("direct", "policy_gradient", "k2"):
        return None
    given = {key: value for key, value in terms[0].items() if key in ("role", "aggregate", "coefficient")}
    right = {
        "form": "cross_entropy",
        "on": ["student"],
        "aggregate": given["aggregate"],
        "gate": ["correct", {"kind": "perplexity", "of": "student", "power": 1.0}],
    }
    wrong = {
        **given,
        "form": "policy_gradient",
        "surrogate": {"kind": "ppo"},
        "gate": ["wrong", {"kind": "perplexity", "of": "teacher", "power": -1.0}],
    }
    several = with_settings(stage, "rollout", samples=max(4, stage["rollout"]["samples"])) or stage
    return {**several, "objective": [right, wrong]}


class TeachersInConflict(Monitor):
    """Teachers pull in opposite directions: the cosine between a domain's gradient and that of the other domains is below -0.05,
    and the domain scores two standard errors less than before training (H).
    """

    name = "conflict"
    reads = (f"{COSINE}DOMAIN", "eval/DOMAIN")
    remedy = (
        "more prompts for the domain farthest from its teacher, the exact KL in place of sampled tokens, or the student itself as the teacher "
        "of a domain where no teacher is better"
    )
    every: Positive = Field(10, description="of prefix, conflict and calibration: steps from one probe to the next")
    answers: Positive = Field(16, le=4096, description="of a probe: those of a step, or of each domain, that it takes")
    cosine: float = Field(-0.05, gt=-1, lt=1, description="of conflict: between a domain's gradient and the others'")
    errors: float = Field(
        2.0, gt=0, description="a change of the score (of diversity: of pass@k) counts from so many standard errors on"
    )

    def measure(self, probe: StepProbe) -> dict[str, float]:
        wanted = probe.evaluates and not probe.step % self.every  # the alarm needs evaluations
        return {f"{COSINE}{domain}": found for domain, found in probe.cosines(self.answers).items()} if wanted else {}

    def alarm(self, history: History) -> Alarm | None:
        if len(history.evaluations) < 2:
            return None
        before, now = history.evaluations[0], history.evaluations[-1]
        for domain in sorted(before.value.keys() & now.value.keys()):
            cosines = history.last(f"{COSINE}{domain}", PROBES)
            error = (before.stderr.get(domain, 0) ** 2 + now.stderr.get(domain, 0) ** 2) ** 0.5
            lost = before.value[domain] - now.value[domain]
            if cosines and mean(cosines) < self.cosine and error and lost > self.errors * error:
                return Alarm(
                    mean(cosines),
                    self.cosine,
                    f"{domain} fell from {before.value[domain]:.1%} to {now.value[domain]:.1%}, and its gradient points against that of the "
                    f"other domains (cosine {mean(cosines):.2f}): the other teachers undo what its teacher trains",
                )
        return None

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def exact(term: dict[str, Any]) -> dict[str, Any] | None:
            return direct(term) if goes_by_teacher(term) else None

        by_gap = {**stage, "shares": {"kind": "gap"}}
        return offered(by_gap if stage["shares"]["kind"] == "static" else None, with_terms(stage, exact), slower(stage))
