"""Monitors that read the metrics of every step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

from pydantic import Field

from opd.monitors.monitor import (
    SUPPORT_KEYS,
    Alarm,
    History,
    Monitor,
    RecipeStage,
    StepProbe,
    direct,
    gated,
    goes_by_teacher,
    mean,
    median,
    other_divergence,
    slope,
    slower,
    standard_error,
    with_settings,
    with_teachers,
    with_terms,
    without,
)
from opd.registry import Fraction, Positive, StageView

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
                    f"KL to the teacher is {median(recent):.3g} nats and has been {min(levels):.3g}: the student is running away from it",
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
            if mean(first) > (self.least if name == "entropy" else 0)  # a confident student has little entropy to lose
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
    rise: float = Field(0.2, gt=0, le=1, description="of stopping: how much more answers are cut off than at first")
    longer: float = Field(2.0, gt=1, description="of stopping and lengthening: times the length at first")
    window: Positive = Field(10, le=60, description="steps at the beginning and at the end that are compared")

    def alarm(self, history: History) -> Alarm | None:
        truncated, lengths = history.apart("truncated", self.window), history.apart("response_length", self.window)
        if truncated is None or lengths is None:
            return None
        (before, now), (short, long) = (tuple(map(mean, pair)) for pair in (truncated, lengths))
        words = f"{now:.0%} of the answers are cut off ({before:.0%} at first) at {long:.3g} tokens ({short:.3g}): stopping is being unlearnt"
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
        2.0, gt=0, description="of diversity: standard errors by which pass@k falls; of others likewise"
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
    share: float = Field(0.7, gt=0, lt=1, description="of shortening: of the length at first")

    def limit(self, before: float) -> float:
        return self.share * before


class Lengthening(OtherLength):
    """Answers grow beyond twice their initial length while rewards stay flat (H), cut off or not."""

    name = "lengthening"
    words = "grown", "length is being inflated"
    longer: float = Field(2.0, gt=1, description="of stopping and lengthening: times the length at first")

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
            f"{kls[-1]:.3g} nats: the student pleases the teacher where it does not help",
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
        1.0, gt=0, description="of diversity: standard errors by which pass@k falls; of others likewise"
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
        # the reward of a step depends on the domains drawn, so the held-out score counts as well
        if self._rises(*rewards) or history.score_rose(self.errors):
            return None
        return Alarm(
            mean(late),
            self.takeover,
            f"from the beginning the teacher is right {mean(first):.0%} more often than the student, and only {mean(late):+.0%} behind "
            f"{self.depth:.0%} of what the student wrote, while rewards do not rise: its advice comes too late to mend anything",
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
                    f"other domains (cosine {mean(cosines):.2f}): what its teacher asks for is undone by the others",
                )
        return None

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def exact(term: dict[str, Any]) -> dict[str, Any] | None:
            return direct(term) if goes_by_teacher(term) else None

        by_gap = {**stage, "shares": {"kind": "gap"}}
        return offered(by_gap if stage["shares"]["kind"] == "static" else None, with_terms(stage, exact), slower(stage))
