"""Monitors that need more than the metrics of a step: every so many steps they take a probe, and read what it says later on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import Field

from opd.monitors.by_metrics import offered
from opd.monitors.changes import direct, goes_by_teacher, slower, with_settings, with_terms
from opd.monitors.history import History, mean, standard_error
from opd.monitors.monitor import Alarm, Monitor, RecipeStage, StepProbe
from opd.settings import Fraction, Positive, StageView

PROBES = 3  # the newest ones are looked at together
START = 5  # steps that say where rewards began
COSINE = "cosine/"
AT_FIRST, LATE = "takeover/first", "takeover/late"


class FlawedPrefix(Monitor):
    """The teacher would do better from the beginning, but not behind what the student has written: behind three quarters of its
    answers it gains less than 0.05 (near P: +0.37 falls to +0.02 with depth), and rewards do not rise (H).
    """

    name = "prefix"
    reads = (AT_FIRST, LATE, "reward")
    usual = False  # the teacher has to answer
    samples_teacher = True
    remedy = (
        "SCOPE (right answers teach themselves, wrong ones are corrected by a teacher that is sure), an EMA of the student as an anchor, "
        "shorter rollouts, or a share of answers that the teacher or the dataset has written"
    )
    every: Positive = Field(10, description="of prefix, conflict and calibration: steps from one probe to the next")
    answers: Positive = Field(32, le=4096, description="of a probe: those of a step, or of each domain, that it takes")
    depth: Fraction = Field(0.75, description="of prefix: part of an answer behind which the teacher takes over")
    takeover: float = Field(0.05, ge=0, lt=1, description="of prefix: how much more often it is right then")
    gap: float = Field(0.2, gt=0, lt=1, description="of prefix: how much more often it is right from the beginning on")
    errors: float = Field(
        2.0, gt=0, description="of diversity: standard errors by which pass@k falls; of others likewise"
    )
    window: Positive = Field(20, le=60, description="steps at the beginning and at the end that are compared")

    def refuse(self, view: StageView) -> Iterable[str]:
        if "teacher" not in view.roles:
            yield "prefix lets the teacher go on behind the student's words, and there is none. Drop it."

    def measure(self, probe: StepProbe) -> dict[str, float]:
        return {} if probe.step % self.every else probe.taken_over(self.answers, self.depth)

    def alarm(self, history: History) -> Alarm | None:
        first, late = history.last(AT_FIRST, PROBES), history.last(LATE, PROBES)
        rewards = history.rewards_apart(self.window)
        if not first or not late or rewards is None or mean(first) <= self.gap or mean(late) >= self.takeover:
            return None
        # rewards of a step also follow which domains it drew, so the held-out score counts as well
        if self._rises(*rewards) or history.score_rose(self.errors):
            return None
        return Alarm(
            mean(late),
            self.takeover,
            f"from the beginning the teacher is right {mean(first):.0%} more often than the student, and only {mean(late):+.0%} behind "
            f"{self.depth:.0%} of what the student wrote, while rewards do not rise: its advice comes too late to mend anything",
        )

    def _rises(self, first: Sequence[float], now: Sequence[float]) -> bool:
        """Since the very start, where who learns fast has done so within the first window; or, slowly, from one window to another."""
        return any(
            mean(now) > mean(start) + self.errors * (standard_error(start) ** 2 + standard_error(now) ** 2) ** 0.5
            for start in (first[:START], first)
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        rollout = stage["rollout"]
        written = with_settings(stage, "rollout", teacher_share=max(0.25, rollout["teacher_share"]))
        shorter = with_settings(stage, "rollout", max_new_tokens=max(1, rollout["max_new_tokens"] // 2))
        return offered(_scope(stage), written, shorter)


def _scope(stage: RecipeStage) -> RecipeStage | None:
    """Its two terms in place of the one that goes by the teacher; groups of answers, since some have to be right."""
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
    """What one domain's teacher asks for undoes what the others ask for: the cosine between its gradient and that of the other domains
    is below -0.05, and the domain scores two standard errors less than before training (H).
    """

    name = "conflict"
    reads = (f"{COSINE}DOMAIN", "eval/DOMAIN")
    remedy = (
        "more prompts for who is farthest from its teacher, the exact KL in place of sampled tokens, or the student itself as the teacher "
        "of a domain that nobody is better at"
    )
    every: Positive = Field(10, description="of prefix, conflict and calibration: steps from one probe to the next")
    answers: Positive = Field(16, le=4096, description="of a probe: those of a step, or of each domain, that it takes")
    cosine: float = Field(-0.05, gt=-1, lt=1, description="of conflict: between a domain's gradient and the others'")
    errors: float = Field(
        2.0, gt=0, description="of diversity: standard errors by which pass@k falls; of others likewise"
    )

    def measure(self, probe: StepProbe) -> dict[str, float]:
        wanted = probe.evaluates and not probe.step % self.every  # without evaluations nothing could be said
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
                    f"other domains (cosine {mean(cosines):.2f}): what its teacher asks for is undone by the others",
                )
        return None

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def exact(term: dict[str, Any]) -> dict[str, Any] | None:
            return direct(term) if goes_by_teacher(term) else None

        by_gap = {**stage, "shares": {"kind": "gap"}}
        return offered(by_gap if stage["shares"]["kind"] == "static" else None, with_terms(stage, exact), slower(stage))
