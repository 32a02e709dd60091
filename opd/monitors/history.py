"""What a stage's metrics have said so far: all that a monitor decides by. It is the same, line by line, after a resume."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FIRST = 64  # values of a metric kept from the beginning of a stage
RECENT = 128  # and from its end: values, not steps, since probes and evaluations come every so many steps alone
MOSTLY_CUT = 0.5  # share of answers cut off at max_new_tokens, above which rewards say nothing about the student
DOMAINS = "eval/"
ESTIMATES = {"entropy": "entropy_sampled"}  # of metrics that some steps lack; older runs wrote both as `entropy`
KEPT = {"stderr": "eval_stderr/", "at_k": "eval_k/", "at_k_stderr": "eval_k_stderr/"}


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: pass@1 by domain, and where it is known its standard error, pass@k and that one's."""

    step: int
    value: Mapping[str, float]
    stderr: Mapping[str, float] = field(default_factory=dict)
    at_k: Mapping[str, float] = field(default_factory=dict)
    at_k_stderr: Mapping[str, float] = field(default_factory=dict)
    kl: float | None = None  # to the teachers, on average since the evaluation before

    @property
    def mean(self) -> float:
        return mean(self.value.values())

    @property
    def mean_stderr(self) -> float:
        """Of the mean over domains."""
        return math.sqrt(sum(error**2 for error in self.stderr.values())) / max(len(self.value), 1)


@dataclass(frozen=True)
class StageFacts:
    """What a monitor has to know of the recipe."""

    self_taught: bool = False  # its teachers are the student itself, and nobody else
    instructed: bool = False  # a teacher reads an instruction, such as to be brief
    followed_within: int | None = None  # steps after which a teacher may have become the student; None: none ever does
    before: Callable[[], Evaluated | None] = lambda: None  # the evaluation before the first step


class History:
    """Metrics of the stage at work, oldest first."""

    def __init__(self, facts: StageFacts | None = None) -> None:
        self.facts = facts or StageFacts()
        self.step = 0  # the newest
        self._seen: Counter[str] = Counter()  # values of each metric
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._evaluations: list[Evaluated] = []
        self._divergences: list[float] = []  # since the newest evaluation

    def add(self, line: Mapping[str, Any]) -> None:
        """The line of a step, as metrics.jsonl has it. Where it lacks a metric, an estimate of that stands in."""
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
        """The values that the metric began with; nothing while there are fewer."""
        found = self._first.get(name, ())[:count]
        return list(found) if len(found) == count else []

    def last(self, name: str, count: int, skip: int = 0) -> list[float]:
        """Its newest values, without the `skip` very newest; nothing while there are fewer."""
        known = self.recent(name)
        known = known[: len(known) - skip]
        return known[-count:] if len(known) >= count else []

    def apart(self, name: str, count: int) -> tuple[list[float], list[float]] | None:
        """The first values and the newest, where they do not overlap."""
        first, last = self.first(name, count), self.last(name, count)
        return (first, last) if first and last and self._seen[name] >= 2 * count else None

    def answers_cut(self, count: int) -> bool:
        """Whether most answers of the first steps were cut off: nobody knows then whether they would have been right."""
        return mean(self.first("truncated", count)) > MOSTLY_CUT

    def rewards_apart(self, count: int) -> tuple[list[float], list[float]] | None:
        """The first rewards and the newest, as `apart`; None also where most answers were cut off from the start."""
        return None if self.answers_cut(count) else self.apart("reward", count)

    def recent(self, name: str) -> list[float]:
        """All its values that are kept."""
        return list(self._recent.get(name, ()))

    @property
    def evaluations(self) -> list[Evaluated]:
        """With the one before training, if there was any."""
        before = self.facts.before()
        return [*([before] if before is not None else []), *self._evaluations]

    def score_rose(self, errors: float, since: int = 0) -> bool:
        """Whether the newest held-out score, if it is not older than `since`, is so many standard errors above the first one."""
        found = self.evaluations
        if len(found) < 2 or found[-1].step < since:
            return False
        return found[-1].mean > found[0].mean + errors * _error_of_difference(found[0], found[-1])

    def score_fell(self, errors: float) -> bool:
        """Whether it is as far below. Never where the standard error is unknown."""
        found = self.evaluations
        error = _error_of_difference(found[0], found[-1]) if len(found) > 1 else 0.0
        return error > 0 and found[-1].mean < found[0].mean - errors * error


def with_estimates(line: Mapping[str, Any]) -> dict[str, Any]:
    """
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
    """Of the mean."""
    centre, count = mean(values), len(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (count - 1) / count) if count > 1 else 0.0


def slope(values: Sequence[float]) -> float:
    """Of the line through them by least squares, per step."""
    centre, middle = mean(values), (len(values) - 1) / 2
    spread = sum((number - middle) ** 2 for number in range(len(values)))
    return sum((number - middle) * (value - centre) for number, value in enumerate(values)) / spread if spread else 0.0


def _error_of_difference(before: Evaluated, now: Evaluated) -> float:
    return math.hypot(before.mean_stderr, now.mean_stderr)


def _by_domain(line: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {key[len(prefix) :]: value for key, value in line.items() if key.startswith(prefix) and is_number(value)}
