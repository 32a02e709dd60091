"""Advantages: what one sampled token, or one whole answer, is worth. They add up; numpy, since none is differentiated.

    A = outcome_weight * A_outcome + teacher_weight * A_teacher - reference_weight * (log student - log reference)

Axis legend: T = tokens of one response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from opd.objective.advantage_formulas import (
    Baseline,
    extrapolated,
    moments,
    outcome_advantages,
    overlong_penalty,
    returns,
    whitened_by,
)
from opd.objective.batch import TrainingBatch
from opd.settings import Choice, Family, Fraction, Needs, Positive, StageView, changed
from opd.types import Rollout

if TYPE_CHECKING:
    from opd.objective.policy_gradient import PolicyGradient
    from opd.objective.prepare import PreparedTerm


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """Rollouts whose tokens are to be weighed, with the student's untempered log-probs of them."""

    term: PolicyGradient
    prepared: PreparedTerm
    rollouts: Sequence[Rollout]
    student: Sequence[np.ndarray]  # (T,) per rollout
    exact_kl: Sequence[np.ndarray] | None = (
        None  # (T,) KL(student || teacher) at the position, if an advantage needs it
    )

    @property
    def batch(self) -> TrainingBatch:
        return self.prepared.batch

    @property
    def counted(self) -> list[np.ndarray]:
        """(T,) bool per rollout: tokens that gates leave something of."""
        return [self.prepared.factor[rollout.id] != 0 for rollout in self.rollouts]


class AdvantagePart(Choice):
    """One summand of the advantage, its weight included."""

    family = "advantage"

    def needs(self, role: str = "teacher") -> Needs:
        return Needs()

    @property
    def acts(self) -> bool:
        """Whether there is anything to add."""
        return True

    @property
    def of_teacher(self) -> bool:
        """Whether it is formed from the teacher's log-probs and the term's divergence."""
        return False

    @property
    def of_student(self) -> bool:
        """Whether it compares with the student's log-probs."""
        return False

    @property
    def needs_batch(self) -> bool:
        """Whether `prepare` reads log-probs, so that those of the whole batch have to be known before it is cut up."""
        return False

    @property
    def needs_exact_kl(self) -> bool:
        """Whether it reads `SampledTokens.exact_kl`."""
        return False

    @property
    def for_reverse_kl(self) -> bool:
        """Whether it is defined for the term's divergence reverse_kl alone."""
        return False

    def leaves_out(self, batch: TrainingBatch) -> set[str]:
        """Ids of rollouts that the term must not train on."""
        return set()

    def prepare(self, tokens: SampledTokens) -> Any:
        """What has to see the whole batch before it is cut up; handed back to `values`."""
        return None

    def values(self, tokens: SampledTokens, prepared: Any) -> list[np.ndarray]:
        """(T,) per rollout."""
        raise NotImplementedError


AnyAdvantage = Annotated[AdvantagePart, Family("advantage")]


class OutcomeAdvantage(AdvantagePart):
    """The reward of the whole answer, compared with others."""

    name = "outcome"
    outcome_weight: float = Field(0.0, ge=0)
    baseline: Baseline = Field("group", description="what is subtracted from a reward")
    std: bool = Field(False, description="divide by the standard deviation within the group (GRPO as published)")
    overlong: Literal["keep", "mask", "penalise"] = Field(
        "keep", description="what becomes of answers cut off by the length limit"
    )
    overlong_buffer: Positive = Field(
        16, description="penalise: the reward falls by up to 1 over the last tokens before the limit"
    )

    @model_validator(mode="after")
    def _consistent(self) -> OutcomeAdvantage:
        given = changed(self)
        if self.outcome_weight == 0 and given & {"std", "overlong", "baseline"}:
            raise ValueError("outcome_weight is 0, so baseline, std and overlong do nothing")
        if "overlong_buffer" in given and self.overlong != "penalise":
            raise ValueError("overlong_buffer belongs to overlong: penalise")
        if self.baseline == "none" and self.std:
            raise ValueError(
                "`std` divides rewards that a baseline has centred: set `baseline` to group, leave_one_out or batch"
            )
        return self

    @property
    def acts(self) -> bool:
        return self.outcome_weight != 0

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(rewards=True)

    def refuse(self, view: StageView) -> Iterable[str]:
        limit = view.rollout.max_new_tokens
        if self.overlong == "penalise" and self.overlong_buffer >= limit:
            yield (
                f"overlong_buffer {self.overlong_buffer} with rollout.max_new_tokens {limit} penalises every answer. "
                "Set it to a part of the limit."
            )
        if view.rollout.samples == 1 and self.baseline in ("group", "leave_one_out"):
            yield (
                f"outcome_weight {self.outcome_weight:g} with baseline: {self.baseline} and rollout.samples 1: a "
                "sample alone in its group has advantage 0. Set rollout.samples to 2 or more, or baseline: batch."
            )

    def leaves_out(self, batch: TrainingBatch) -> set[str]:
        return {rollout.id for rollout in batch.rollouts if rollout.stop == "length" and self.overlong == "mask"}

    def prepare(self, tokens: SampledTokens) -> dict[str, float]:
        """Rollout id -> outcome advantage, 0 where nobody was asked."""
        rollouts, batch, left_out = tokens.rollouts, tokens.batch, self.leaves_out(tokens.batch)
        rewards: list[float | None] = []
        for rollout in rollouts:  # answers somebody else wrote enter no baseline
            counts = tokens.prepared.eligible[rollout.id].any() and rollout.id not in left_out
            reward = batch.rewards.get(rollout.id) if counts else None
            if reward is not None and self.overlong == "penalise":
                reward += overlong_penalty(
                    rollout.response_ids.size, tokens.prepared.max_new_tokens, self.overlong_buffer
                )
            rewards.append(reward)
        values = outcome_advantages(rewards, [rollout.group for rollout in rollouts], self.baseline, self.std)
        return {rollout.id: float(np.nan_to_num(value)) for rollout, value in zip(rollouts, values, strict=True)}

    def values(self, tokens: SampledTokens, prepared: dict[str, float]) -> list[np.ndarray]:
        return [
            np.full(rollout.response_ids.size, self.outcome_weight * prepared.get(rollout.id, 0.0))
            for rollout in tokens.rollouts
        ]


class TeacherAdvantage(AdvantagePart):
    """The teacher's log-ratio, or that of another divergence, at the sampled token."""

    name = "teacher"
    teacher_weight: float = Field(1.0, ge=0)
    clip: float | None = Field(None, gt=0, description="largest |A_teacher| of a token")
    extrapolation: float = Field(
        1.0, ge=0, description="G-OPD's lambda: above 1 goes past the teacher, away from the role `reference`"
    )
    kl_baseline: bool = Field(
        False, description="add the exact KL of the position: same expectation, less variance (vOPD)"
    )
    discount: Fraction = Field(0.0, description="of A_teacher of later tokens; 0: each token its own only")
    length_normalised: bool = Field(False, description="divide returns by the number of tokens they sum over")
    future_only: bool = Field(False, description="returns start behind the token: its own part is trained directly")
    whiten: bool = Field(False, description="mean 0 and variance 1 of A_teacher over the batch's tokens")

    @model_validator(mode="after")
    def _consistent(self) -> TeacherAdvantage:
        returns = self.discount > 0
        if not returns and (self.length_normalised or self.future_only):
            raise ValueError("length_normalised and future_only belong to returns: set discount above 0")
        if self.kl_baseline and (returns or self.whiten or self.clip is not None or self.extrapolation != 1):
            raise ValueError(
                "kl_baseline belongs to the plain log-ratio: drop discount, whiten, clip and extrapolation"
            )
        if self.teacher_weight == 0 and changed(self) - {"teacher_weight"}:
            raise ValueError("teacher_weight is 0, so the other settings of the teacher's part do nothing")
        return self

    @property
    def acts(self) -> bool:
        return self.teacher_weight != 0

    @property
    def of_teacher(self) -> bool:
        return True

    @property
    def of_student(self) -> bool:
        return True

    @property
    def needs_batch(self) -> bool:
        return self.whiten

    @property
    def needs_exact_kl(self) -> bool:
        return self.kl_baseline

    @property
    def for_reverse_kl(self) -> bool:
        return self.extrapolation != 1 or self.kl_baseline

    def needs(self, role: str = "teacher") -> Needs:
        needs = Needs(signals=((role, "logprobs_at"),))
        if self.extrapolation != 1:
            needs |= Needs(signals=(("reference", "logprobs_at"),))
        return needs | Needs(signals=((role, "hidden"),)) if self.kl_baseline else needs

    def prepare(self, tokens: SampledTokens) -> tuple[float, float] | None:
        """Mean and standard deviation over the batch, for whitening."""
        return moments(self._shaped(tokens), tokens.counted) if self.whiten else None

    def values(self, tokens: SampledTokens, prepared: tuple[float, float] | None) -> list[np.ndarray]:
        parts = self._shaped(tokens)
        if self.whiten:
            parts = whitened_by(parts, prepared)
        weighed = [self.teacher_weight * part for part in parts]
        if self.kl_baseline:
            assert tokens.exact_kl is not None
            weighed = [part + self.teacher_weight * kl for part, kl in zip(weighed, tokens.exact_kl, strict=True)]
        return weighed

    def _shaped(self, tokens: SampledTokens) -> list[np.ndarray]:
        """Each rollout's log-ratios, extrapolated, clipped and summed up as asked for."""
        rollouts, batch = tokens.rollouts, tokens.batch
        teachers = batch.logprobs(tokens.term.role, rollouts)
        none = [np.zeros(0)] * len(rollouts)
        references = batch.logprobs("reference", rollouts) if self.extrapolation != 1 else none
        return [
            self._of_rollout(tokens, teacher, student, reference, counted)
            for teacher, student, reference, counted in zip(
                teachers, tokens.student, references, tokens.counted, strict=True
            )
        ]

    def _of_rollout(
        self,
        tokens: SampledTokens,
        teacher: np.ndarray,
        student: np.ndarray,
        reference: np.ndarray,
        counted: np.ndarray,
    ) -> np.ndarray:
        if self.extrapolation != 1:
            value = extrapolated(teacher, student, reference, self.extrapolation)
        elif tokens.term.divergence.name == "reverse_kl":
            value = teacher - student
        else:
            import torch

            both = torch.from_numpy(student.astype(np.float64)), torch.from_numpy(teacher)
            value = tokens.term.divergence.advantage(*both).numpy()
        if self.clip is not None:
            value = value.clip(-self.clip, self.clip)
        if self.discount:  # over the tokens that count, one behind the other
            value = value.copy()
            value[counted] = returns(
                value[counted], self.discount, length_normalised=self.length_normalised, future_only=self.future_only
            )
        return value


class ReferenceAdvantage(AdvantagePart):
    """KL penalty towards the role `reference`, as part of the advantage."""

    name = "reference"
    reference_weight: float = Field(
        0.0, ge=0, description="KL penalty towards the role `reference`, as part of the advantage"
    )

    @property
    def acts(self) -> bool:
        return self.reference_weight != 0

    @property
    def of_student(self) -> bool:
        return True

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(signals=(("reference", "logprobs_at"),))

    def values(self, tokens: SampledTokens, prepared: Any) -> list[np.ndarray]:
        references = tokens.batch.logprobs("reference", tokens.rollouts)
        return [
            -(self.reference_weight * (student - reference))
            for student, reference in zip(tokens.student, references, strict=True)
        ]
