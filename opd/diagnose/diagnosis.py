"""Run `opd diagnose`: measure every teacher in every domain, decide, recommend, and estimate the cost of the planned run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd.diagnose.measures import AnswerStatistics, PairMeasures
from opd.diagnose.measuring import Bench, DomainAnswers, Stopwatch, measure_pair, open_bench
from opd.diagnose.rules import Advice, Case, Decision, Recommendation, decide, ranked, recommend
from opd.recipe import Stage
from opd.runner.plan import make_plan
from opd.teachers.table import K

PROMPTS, SAMPLES, BY_TEACHER = 32, 8, 4  # prompts per domain; answers of the student and of every teacher to each
PASSES = 4  # time of training relative to scoring: scoring, forward, and backward at twice its cost


def ignored(line: str) -> None:
    pass


@dataclass(frozen=True)
class Diagnosis:
    """All measurements, and the conclusions."""

    student: str
    models: dict[str, str]  # teacher -> model
    students: dict[str, AnswerStatistics]  # by domain
    pairs: list[PairMeasures]
    decisions: dict[tuple[str, str], Decision]  # (domain, teacher)
    advice: list[Advice]
    recommendation: Recommendation
    plan: list[str] = field(default_factory=list)  # memory of the recommended recipe, in words
    seconds: float | None = None  # of training on this machine
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "student": self.student,
            "models": self.models,
            "verdict": self.recommendation.verdict,
            "k": K,
            "students": {domain: found.to_json() for domain, found in self.students.items()},
            "pairs": [pair.to_json() | self._decided(pair) for pair in self.pairs],
            "ranking": {one.domain: [list(entry) for entry in one.ranking] for one in self.advice},
            "recommendation": self.recommendation.to_json(),
            "plan": self.plan,
            "seconds": self.seconds,
            "notes": self.notes,
        }

    def _decided(self, pair: PairMeasures) -> dict[str, Any]:
        rule, because, refined = self.decisions[pair.domain, pair.teacher]
        return {
            "rule": {"number": rule.number, "when": rule.when, "evidence": rule.evidence},
            "verdict": rule.verdict,
            "because": because,
            "remedy": rule.remedy,
            "refined": [
                {
                    "number": one.number,
                    "when": one.when,
                    "because": found,
                    "remedy": one.remedy,
                    "evidence": one.evidence,
                }
                for one, found in refined
            ],
        }


def diagnose(
    spec: Stage,
    *,
    prompts: int = PROMPTS,
    samples: int = SAMPLES,
    target: float | None = None,
    given: bool = True,
    say: Callable[[str], None] = ignored,
) -> Diagnosis:
    """`given`: the stage is the user's, and its training settings are kept; otherwise it was made for the named models."""
    with tempfile.TemporaryDirectory(prefix="opd-diagnose-") as scratch:
        bench = open_bench(spec, prompts, Path(scratch), say)
        try:
            return _diagnosed(bench, spec, samples, target, given, say)
        finally:
            bench.close()


def _diagnosed(
    bench: Bench, spec: Stage, samples: int, target: float | None, given: bool, say: Callable[[str], None]
) -> Diagnosis:
    clock, pairs, students = Stopwatch(), list[PairMeasures](), dict[str, AnswerStatistics]()
    for domain, asked in bench.domains.items():
        own = DomainAnswers(bench, domain, asked, samples)
        say(f"{domain}: {len(asked)} prompts, {len(asked) * samples} answers of the student")
        clock.begin()
        written = sum(rollout.response_ids.size for rollout in own.rollouts)
        clock.end("sample", written)
        students[domain] = own.answers
        for name in bench.teachers:
            say(f"{domain}: {name}")
            pairs.append(measure_pair(bench, name, own, BY_TEACHER, clock))
    decisions = _decisions(students, pairs, target)
    advice = [_advice(domain, [pair for pair in pairs if pair.domain == domain], decisions) for domain in students]
    sources: dict[int, set[str]] = {}
    for asking in bench.asked.values():
        sources.setdefault(asking.source, set()).add(asking.prompt.domain)
    longest = max(found.longest for found in _answered(students, pairs))
    found = recommend(spec, advice, sources, longest, given)
    plan, seconds = _plan(found, clock, max(answers.length for answers in students.values()))
    models = {name: kind.title for name, kind in bench.kinds.items()}
    return Diagnosis(
        bench.spec.student.model, models, students, pairs, decisions, advice, found, plan, seconds, bench.notes
    )


def _answered(students: dict[str, AnswerStatistics], pairs: Sequence[PairMeasures]) -> list[AnswerStatistics]:
    return [*students.values(), *(pair.answers for pair in pairs if pair.answers is not None)]


def _decisions(
    students: dict[str, AnswerStatistics], pairs: Sequence[PairMeasures], target: float | None
) -> dict[tuple[str, str], Decision]:
    rivals = {domain: sum(pair.domain == domain for pair in pairs) - 1 for domain in students}
    return {
        (pair.domain, pair.teacher): decide(Case(students[pair.domain], pair, target, rivals[pair.domain]))
        for pair in pairs
    }


def _advice(domain: str, pairs: Sequence[PairMeasures], decisions: dict[tuple[str, str], Decision]) -> Advice:
    """The verdict on the best accepted teacher; if none is accepted, on the best."""
    order = ranked(pairs)
    useful = [pair for pair in order if decisions[domain, pair.teacher].rule.verdict != "do not"]
    best = (useful or order)[0]
    return Advice(domain, best, decisions[domain, best.teacher], tuple((pair.teacher, pair.signal) for pair in order))


def _plan(found: Recommendation, clock: Stopwatch, length: float) -> tuple[list[str], float | None]:
    """Estimated memory of the recommended run, and its time from the measured sampling and scoring."""
    recipe = found.recipe()
    if recipe is None:
        return [], None
    plans, seconds = make_plan(recipe), 0.0
    for plan, stage in zip(plans, recipe.stages, strict=True):
        tokens = plan.rollouts_per_step * (length + plan.prompt_tokens)
        step = plan.rollouts_per_step * length * clock.each("sample") + PASSES * tokens * clock.each("score")
        seconds += stage.train.steps * step
    return [line for plan in plans for line in plan.lines()], seconds
