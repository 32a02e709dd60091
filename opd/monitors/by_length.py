"""Monitors of how long answers are, and whether they end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from opd.monitors.by_metrics import offered
from opd.monitors.changes import gated, slower, with_terms
from opd.monitors.history import History, mean, slope, standard_error
from opd.monitors.monitor import Alarm, Monitor, RecipeStage
from opd.settings import Positive

START = 3  # steps that say how long answers were: some runs have lost it by the tenth


class LostStopping(Monitor):
    """Answers that do not end: the share that reaches max_new_tokens has risen by a fifth and goes on rising (H; P: no threshold
    on an early value tells, the late slope does); or answers are twice as long (H), and more of them are cut off.
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
    """Answers change their length while rewards stay flat. Not where a teacher is told to be brief, or to think longer."""

    reads = ("response_length", "reward")
    remedy = "the model that the stage started from as a second teacher"
    words: ClassVar[tuple[str, str]]  # what answers have done, and what that means
    window: Positive = Field(10, le=60, description="steps at the beginning and at the end that are compared")
    errors: float = Field(
        2.0, gt=0, description="of diversity: standard errors by which pass@k falls; of others likewise"
    )

    def alarm(self, history: History) -> Alarm | None:
        lengths, rewards = history.apart("response_length", self.window), history.rewards_apart(self.window)
        if lengths is None or rewards is None or history.facts.instructed or history.score_rose(self.errors):
            return None
        before, now = mean(lengths[0][:START]), mean(lengths[1])
        limit = self.limit(before)
        noise = (standard_error(rewards[0]) ** 2 + standard_error(rewards[1]) ** 2) ** 0.5
        # three steps scatter widely, and more often upwards: short answers are held against the whole first window as well
        within = now >= min(limit, self.limit(mean(lengths[0]))) if limit < before else now <= limit
        scatter = (
            standard_error(lengths[1]) * (len(lengths[1]) / START + 1) ** 0.5
        )  # of the difference, where nothing happens
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
        """Tokens beyond which a mean length is too far from what it was."""
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
    """Answers shrink below 70 % of their length while rewards stay flat (H)."""

    name = "shortening"
    words = "shrunk", "reasoning is being cut short"
    share: float = Field(0.7, gt=0, lt=1, description="of shortening: of the length at first")

    def limit(self, before: float) -> float:
        return self.share * before


class Lengthening(OtherLength):
    """Answers grow to twice their length while rewards stay flat (H), cut off or not."""

    name = "lengthening"
    words = "grown", "length is being inflated"
    longer: float = Field(2.0, gt=1, description="of stopping and lengthening: times the length at first")

    def limit(self, before: float) -> float:
        return self.longer * before
