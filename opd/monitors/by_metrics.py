"""Monitors that read the metrics of every step."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from opd.monitors.changes import (
    SUPPORT_KEYS,
    goes_by_teacher,
    other_divergence,
    slower,
    with_settings,
    with_teachers,
    with_terms,
    without,
)
from opd.monitors.history import History, mean, median
from opd.monitors.monitor import Alarm, Monitor, RecipeStage, StepProbe
from opd.settings import Positive

WARMER = 1.25  # than a teacher is by itself
LEVELS = 20  # steps before a fall of the KL that it is compared with
DROPPED = 3  # times that distinct pairs or rewards fall where the student has collapsed
STEPS_OF_A_START = 3  # that a fall of the KL comes after, at least
PROBES = 5  # at the beginning and at the end that are compared
SAFE_REFRESH = 40  # steps between two refreshes of a teacher that follows its student (P)


def offered(*stages: RecipeStage | None) -> Iterator[RecipeStage]:
    return (stage for stage in stages if stage is not None)


def _dropped(history: History, name: str) -> bool:
    """Whether the two newest values are a fraction of what the metric was in the steps before."""
    before, now = history.recent(name)[-LEVELS - 2 : -2], history.last(name, 2)
    return bool(before) and max(now) < median(before) / DROPPED


class DivergenceJump(Monitor):
    """The KL to the teacher falls to a fraction at once, and stays there for a step (P: 2.637 to 0.343 where a teacher was reset to its student),
    or climbs to several times the lowest it has been (H: 3 times, and half a nat). A fast start is no failure: a fall counts only where a
    teacher that follows its student has had the time to become it, or where scores, rewards or distinct pairs of tokens fell as well.
    """

    name = "kl"
    reads = ("reverse_kl",)
    remedy = (
        "refresh a teacher that follows its student every 40 steps or more, or use an EMA; else a lower learning rate"
    )
    fall: float = Field(5.0, gt=1, description="of kl: times by which it falls from one step to the next two")
    rise: float = Field(3.0, gt=1, description="of kl: times its lowest level, over three steps")
    least: float = Field(0.02, ge=0, description="of kl and diversity: nats below which nothing is a fall")
    margin: float = Field(0.5, ge=0, description="of kl: nats above its lowest level, beside `rise`")
    errors: float = Field(
        2.0, gt=0, description="of diversity: standard errors by which pass@k falls; of others likewise"
    )

    def alarm(self, history: History) -> Alarm | None:
        return self._fall(history) or self._rise(history)

    def _fall(self, history: History) -> Alarm | None:
        earlier, now = history.last("reverse_kl", 3, skip=2), history.last("reverse_kl", 2)
        before = history.recent("reverse_kl")[-LEVELS - 2 : -2]
        fallen = bool(earlier) and median(earlier) > self.least and max(now) < median(earlier) / self.fall
        if not fallen or max(now) >= min(before) / 2:  # where it scatters widely, a few low values are none
            return None
        cause = self._cause(history)
        if cause is None:
            return None
        words = f"KL to the teacher fell from {median(earlier):.3g} to {max(now):.3g} nats at once{cause}"
        return Alarm(max(now), median(earlier) / self.fall, words)

    def _cause(self, history: History) -> str | None:
        """What is wrong with a fall of the KL. None: nothing that is known, so the student has learned fast."""
        if history.score_rose(self.errors, since=history.step - 1):  # an older score does not know of the fall
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
                    f"KL to the teacher is {median(recent):.3g} nats and has been {min(levels):.3g}: the student is running away from it",
                )
        return None

    def _levels(self, history: History) -> list[float]:
        """Medians of three steps in a row, so that one odd batch is no level; and where it all began."""
        values = history.recent("reverse_kl")
        return [*history.first("reverse_kl", 1), *(median(values[at : at + 3]) for at in range(len(values) - 2))]

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def rarer(kind: dict[str, object]) -> dict[str, object] | None:
            chases = kind["kind"] == "live" or (kind["kind"] == "refresh" and int(str(kind["every"])) < SAFE_REFRESH)
            return {**kind, "kind": "refresh", "every": SAFE_REFRESH, "force": False} if chases else None

        return offered(with_teachers(stage, rarer), slower(stage))


class LostDiversity(Monitor):
    """pass@k falls by more than two standard errors (P); or entropy, or distinct pairs of tokens, fall by
    30 % (P: entropy .30 to .21) without any gain in reward. A falling entropy alone is what learning looks like.
    """

    name = "diversity"
    reads = ("eval_k/DOMAIN", "entropy", "distinct", "reward")
    remedy = "JSD or a skewed divergence in place of reverse KL, or an entropy-aware mixture of both directions"
    errors: float = Field(
        2.0, gt=0, description="of diversity: standard errors by which pass@k falls; of others likewise"
    )
    fall: float = Field(
        0.3, gt=0, lt=1, description="of diversity: share of entropy, or of distinct pairs, that is lost"
    )
    least: float = Field(0.1, ge=0, description="of kl and diversity: nats below which nothing is a fall")
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
            if mean(first) > (self.least if name == "entropy" else 0)  # who is sure already has little to lose
        }
        fallen = {name: share for name, share in kept.items() if share < 1 - self.fall}
        enough = bool(fallen) if rewards is not None else len(fallen) == 2
        if not enough:
            return None
        name, share = min(fallen.items(), key=lambda item: item[1])
        what = "entropy" if name == "entropy" else "the share of distinct pairs of tokens"
        gain = "and rewards have not risen" if rewards is not None else "and so has the other sign of it"
        return Alarm(
            share,
            1 - self.fall,
            f"{what} is down to {share:.0%} of what it was, {gain}: the student says ever the same",
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        return offered(
            with_terms(stage, other_divergence("jsd", beta=0.5)),
            with_terms(stage, other_divergence("skew_kl", alpha=0.1)),
            slower(stage),
        )


class DominantToken(Monitor):
    """A few tokens carry the loss: the 1 % with the largest KL hold more than 70 % of it, or one and the same token holds half of it more than
    its share of the text (H); and the largest is beyond 5 nats (P: where advantages are clipped), in most of the last steps.
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
        most = f"a single one up to {median(largest):.3g} nats: a few tokens steer every update"
        if top and median(top) > self.share:
            return Alarm(median(top), self.share, f"1 % of the tokens hold {median(top):.0%} of the KL, {most}")
        if one and median(one) > self.one:
            what = f"one and the same token holds {median(one):.0%} of the KL more than its share of the text"
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
    """The sampler's log-probs are not the trainer's: more than 2 % of the tokens have a ratio outside [0.5, 2] (P: the bounds;
    H: the share), or |log ratio| is 0.2 on average (H; bf16 alone came to 0.09 at most).
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
                    f"{what} of trainer to sampler that is far from 1: what was sampled is not what is trained",
                )
        return None

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def corrected(term: dict[str, object]) -> dict[str, object] | None:
            kinds = {"policy_gradient": "icepop", "direct": "prefix"}
            known = term["form"] in kinds and "correction" in term and term["correction"] is None
            return {**term, "correction": {"kind": kinds[str(term["form"])]}} if known else None

        return offered(with_terms(stage, corrected))


class Stale(Monitor):
    """Tokens were drawn by weights that are more than four updates old (P)."""

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
    """Confidence drifts away from how often answers are right: the expected calibration error of the student over the answers of a
    step, or of its teachers on them, is 0.05 above where it began (H). Confidence is the geometric mean of token probabilities (H).
    """

    name = "calibration"
    reads = ("ece", "ece/teacher")
    remedy = "a temperature above 1 for the teacher's distribution"
    rise: float = Field(
        0.05, gt=0, le=1, description="of calibration: above the error at first; of stopping: see there"
    )
    window: Positive = Field(20, le=60, description="steps at the beginning and at the end that are compared")
    every: Positive = Field(10, description="of prefix, conflict and calibration: steps from one probe to the next")
    answers: Positive = Field(128, le=4096, description="of a probe: those of a step, or of each domain, that it takes")

    def measure(self, probe: StepProbe) -> dict[str, float]:
        return {} if probe.step % self.every else probe.teachers_calibration(self.answers)

    def alarm(self, history: History) -> Alarm | None:
        if history.answers_cut(self.window):
            return None
        for who, name, count in (("the student", "ece", self.window), ("the teacher", "ece/teacher", PROBES)):
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
