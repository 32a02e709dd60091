"""What changes from step to step in how answers are written: the writers' shares, and the limit on new tokens. No torch here.

rollout: {data_share: 1.0, share_schedule: {kind: line, to: {data_share: 0.0}}}
rollout: {max_new_tokens: 512, length_schedule: {kind: line, start: 64, over: 100}}
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from opd import registry
from opd.registry import Choice, Fraction, Positive, StageView, Word
from opd.rollouts.settings import Rollouts


@dataclass
class Pace:
    """Follows the steps and evaluations of a stage. `losses`: validation losses so far, oldest first."""

    spec: Rollouts
    steps: int
    losses: Sequence[float] = ()
    growth: dict[str, Any] = field(default_factory=dict)  # state of the length schedule

    @classmethod
    def of(cls, spec: Rollouts, steps: int) -> Pace | None:
        """None: nothing changes."""
        moving = (spec.share_schedule, spec.length_schedule, spec.teacher_prefix)
        return None if moving == (None, None, None) else cls(spec, steps)

    def shares(self, step: int) -> dict[str, float]:
        """The writers' shares at a step, by key; none if they are fixed."""
        schedule = self.spec.share_schedule
        if schedule is None:
            return {}
        known = self.spec.writers_by_key
        found = schedule.at(self.spec.shares, self.spec.replaying, step, self.steps, self.losses)
        return {key: share for key, share in found.items() if key in known}

    def limit(self, step: int) -> int:
        """The most new tokens of an answer at a step."""
        schedule, most = self.spec.length_schedule, self.spec.max_new_tokens
        return most if schedule is None else min(schedule.at(step, self.steps, most, self.growth), most)

    def prefix(self, step: int) -> int:
        """The tokens at the beginning of the student's answers that a teacher writes at a step."""
        wanted = self.spec.teacher_prefix
        return 0 if wanted is None else min(wanted.at(step, self.steps), self.limit(step) - 1)

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of a finished step."""
        if self.spec.length_schedule is not None:
            self.growth = self.spec.length_schedule.noted(self.growth, metrics)

    def state(self) -> dict[str, Any]:
        return dict(self.growth)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.growth = dict(state)


# --- How the writers' shares change ---


REST = "student"  # whoever answers the remaining prompts


class ShareSchedule(Choice):
    """Changes the shares of the writers from step to step. Shares are named by the keys that set them: `data_share`, `writers.0`."""

    family = "share_schedule"
    reads_losses: ClassVar[bool] = False  # depends on the validation loss of every evaluation so far

    @abstractmethod
    def at(
        self, shares: Mapping[str, float], replays: Sequence[str], step: int, steps: int, losses: Sequence[float]
    ) -> dict[str, float]:
        """The shares at a step, counted from 1, of `steps`.

        `shares`: those that the recipe sets. `replays`: which of them replay. `losses`: the validation losses so far, oldest first.
        """
        raise NotImplementedError

    @abstractmethod
    def ever(self, shares: Mapping[str, float], replays: Sequence[str]) -> set[str]:
        """The shares that are above 0 at some step; `student` is the rest."""
        raise NotImplementedError

    def mistakes(self, shares: Mapping[str, float], replays: Sequence[str]) -> Iterable[str]:
        """Mistakes in its settings, given the recipe's shares."""
        return ()


class LineSchedule(ShareSchedule):
    """Moves shares on straight lines."""

    name = "line"
    to: dict[Word, Fraction] = Field(min_length=1, max_length=100, description="of line: share -> where its line ends")
    over: Positive | None = Field(None, description="of line: steps until there; default: all steps of the stage")

    def at(
        self, shares: Mapping[str, float], replays: Sequence[str], step: int, steps: int, losses: Sequence[float]
    ) -> dict[str, float]:
        part = min((step - 1) / max((self.over or steps) - 1, 1), 1.0)
        return {key: share + (self.to.get(key, share) - share) * part for key, share in shares.items()}

    def ever(self, shares: Mapping[str, float], replays: Sequence[str]) -> set[str]:
        ends = {**shares, **self.to}
        found = {key for key in shares if shares[key] > 0 or ends[key] > 0}
        return found | ({REST} if min(sum(shares.values()), sum(ends.values())) < 1 - 1e-9 else set())

    def mistakes(self, shares: Mapping[str, float], replays: Sequence[str]) -> Iterable[str]:
        unknown = [key for key in self.to if key not in shares]
        if unknown:
            yield f"`to` names {unknown[0]!r}, but the shares are {', '.join(shares)}"
        elif sum({**shares, **self.to}.values()) > 1 + 1e-9:
            yield f"the shares end at a sum of {sum({**shares, **self.to}.values()):g}, which is above 1"
        elif all(shares[key] == end for key, end in self.to.items()):
            yield "every share ends where it begins. Change `to`, or drop the schedule"


class LossSchedule(ShareSchedule):
    """Lets the student write more once the validation loss rises (DistiLLM). The other writers divide what remains.

    With a writer that replays, the student's part is more and more answered from the buffer: at step t of T with a probability t / T.
    """

    name = "validation_loss"
    reads_losses = True
    start: Fraction = Field(0.0, description="of validation_loss: the student's share at first")
    rise: float = Field(0.1, gt=0, le=1, description="of validation_loss: added to it when the loss has risen")
    margin: float = Field(0.1, ge=0, le=100, description="of validation_loss: nats per token that count as a rise")

    def student_share(self, losses: Sequence[float]) -> float:
        """The share after these losses. A rise is measured from the loss at the rise before.

        >>> LossSchedule().student_share([2.0, 2.05, 2.1, 2.15, 2.3])
        0.2
        """
        share, level = self.start, losses[0] if losses else 0.0
        for loss in losses[1:]:
            if loss >= level + self.margin:
                share, level = min(share + self.rise, 1.0), loss
        return share

    def at(
        self, shares: Mapping[str, float], replays: Sequence[str], step: int, steps: int, losses: Sequence[float]
    ) -> dict[str, float]:
        student = self.student_share(losses)
        again = student * min(step / steps, 1.0) / max(len(replays), 1)
        return {key: again if key in replays else share * (1 - student) for key, share in shares.items()}

    def ever(self, shares: Mapping[str, float], replays: Sequence[str]) -> set[str]:
        return {REST, *replays, *(key for key, share in shares.items() if share > 0)}

    def mistakes(self, shares: Mapping[str, float], replays: Sequence[str]) -> Iterable[str]:
        others = sum(share for key, share in shares.items() if key not in replays)
        if abs(others - 1) > 1e-9:
            yield (
                f"validation_loss divides the prompts between the student and the other writers, whose shares add up to {others:g}. "
                "Make them add up to 1: data_share: 1"
            )
        given = [key for key in replays if shares[key]]
        if given:
            yield f"validation_loss sets the share that is replayed: drop the share of {given[0]}"
        if self.start == 1:
            yield "validation_loss starts at 1, so the share cannot rise. Lower `start`"

    def check(self, view: StageView) -> Iterable[str]:
        if not (view.evaluates and view.measures_loss):
            yield "validation_loss needs periodic evaluations with a loss: set eval.every, eval.prompts and eval.loss: true."
        if view.rollout.staleness:
            yield (
                f"validation_loss with rollout.staleness {view.rollout.staleness}: prompts would be drawn before the loss is known. "
                "Set staleness: 0."
            )


# --- How the limit on new tokens grows ---


class LengthSchedule(Choice):
    """Answers end at a limit that grows up to `rollout.max_new_tokens`. Sampling stops there, which is what saves time."""

    family = "length_schedule"
    start: Positive = Field(description="of length_schedule: the limit in the first step")

    @abstractmethod
    def at(self, step: int, steps: int, most: int, state: Mapping[str, Any]) -> int:
        """The limit at a step, counted from 1, of `steps`. `most`: `rollout.max_new_tokens`."""
        raise NotImplementedError

    def noted(self, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The state after a step with these metrics. It is plain JSON and saved in checkpoints."""
        return dict(state)

    def check(self, view: StageView) -> Iterable[str]:
        most, outcome = view.rollout.max_new_tokens, registry.find("advantage", "outcome")
        if self.start >= most:
            yield f"start {self.start} must be less than rollout.max_new_tokens {most}, up to which the limit grows. Lower it."
        if any(environment is not None for environment in view.environments):
            yield (
                "a limit that grows counts the tokens of all turns, so that early episodes would end in the middle of a turn. Set "
                "curriculum: forward on the environment, which lets the number of turns grow, or drop length_schedule."
            )
        parts = [part for term in view.terms for part in term.advantages]
        cut = [part.overlong for part in parts if isinstance(part, outcome) and part.overlong != "keep"]  # type: ignore[attr-defined]
        if cut:
            yield f"answers are cut off on purpose, and overlong: {cut[0]} would leave them out or punish them. Set overlong: keep."
        closing = [gate.name for term in view.terms for gate in term.gate if gate.closes_cut_off]
        if closing:
            yield f"answers are cut off on purpose, and gate {closing[0]} would close them. Drop the gate."


class LineGrowth(LengthSchedule):
    """The limit grows on a straight line."""

    name = "line"
    over: Positive | None = Field(None, description="of line: steps until there; default: all steps of the stage")

    def at(self, step: int, steps: int, most: int, state: Mapping[str, Any]) -> int:
        part = min((step - 1) / max((self.over or steps) - 1, 1), 1.0)
        return round(self.start + (most - self.start) * part)


class MatchedGrowth(LengthSchedule):
    """The limit grows once the student is close to the teacher on the tokens so far. Needs no verifier."""

    name = "matched"
    below: float = Field(0.1, gt=0, le=100, description="of matched: nats per token between student and teacher")
    steps: Positive = Field(
        5, le=10_000, description="of matched: steps over which the distance is averaged after each growth"
    )
    factor: float = Field(1.5, gt=1, le=100, description="of matched: factor by which the limit grows")

    def at(self, step: int, steps: int, most: int, state: Mapping[str, Any]) -> int:
        return int(state.get("limit", self.start))

    def noted(self, state: Mapping[str, Any], metrics: Mapping[str, Any]) -> dict[str, Any]:
        limit, kl = int(state.get("limit", self.start)), metrics.get("reverse_kl")
        seen = [*state.get("seen", ()), *([] if kl is None else [kl])][-self.steps :]
        if len(seen) == self.steps and abs(sum(seen) / len(seen)) < self.below:
            return {"limit": min(math.ceil(limit * self.factor), registry.MANY), "seen": []}
        return {"limit": limit, "seen": seen}

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if "teacher" not in view.roles:
            yield "matched uses the distance to teachers, and there is none. Add one, or use kind: line."
        if view.rollout.staleness:
            yield (
                f"matched with rollout.staleness {view.rollout.staleness}: answers would be sampled before the distance is known. "
                "Set staleness: 0, or use kind: line."
            )
