"""The verifier says in which direction, the teacher only how far: an outcome advantage, weighed token by token (RLSD)."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field, model_validator

from opd.objective.advantage_formulas import weighed_by_teacher
from opd.objective.advantages import OutcomeAdvantage, SampledTokens
from opd.objective.batch import beside
from opd.settings import Count, Fraction, Needs


class MagnitudeAdvantage(OutcomeAdvantage):
    """A of the whole answer times (1 - share) + share * clip(exp(sign(A) * (log teacher - log student)), 1 - band, 1 + band)."""

    name = "magnitude"
    outcome_weight: float = Field(1.0, ge=0)
    share: Fraction = Field(0.5, description="of magnitude: RLSD's lambda; 0 is the outcome advantage alone")
    band: float = Field(
        0.2, gt=0, lt=1, description="of magnitude: a token's weight stays within 1 - band and 1 + band"
    )
    warmup: Count = Field(0, description="of magnitude: steps over which share rises from 0")
    decay: Count = Field(0, description="of magnitude: steps over which it falls to 0 afterwards; 0: it stays")

    @model_validator(mode="after")
    def _weighs(self) -> MagnitudeAdvantage:
        if self.outcome_weight == 0:
            raise ValueError("outcome_weight is 0, so there is no advantage to weigh")
        if self.share == 0:
            raise ValueError("share is 0, so the teacher does nothing: use outcome_weight without magnitude")
        return self

    @property
    def of_student(self) -> bool:
        return True

    def needs(self, role: str = "teacher") -> Needs:
        return super().needs(role) | Needs(signals=((role, "logprobs_at"),))

    def share_at(self, step: int) -> float:
        """Steps count from 1: the last step of the warm-up has all of it, the last of the decay none."""
        if step <= self.warmup:
            return self.share * step / self.warmup
        if not self.decay:
            return self.share
        return self.share * max(0.0, 1 - (step - self.warmup) / self.decay)

    def values(self, tokens: SampledTokens, prepared: Any) -> list[np.ndarray]:
        share = self.share_at(tokens.prepared.step)
        teachers = tokens.batch.logprobs(tokens.term.role, tokens.rollouts)
        signals = tokens.batch.signals[tokens.term.role, "logprobs_at"]
        students = [
            beside(student, signals[rollout.id])
            for student, rollout in zip(tokens.student, tokens.rollouts, strict=True)
        ]
        return [
            weighed_by_teacher(outcome, teacher - student, share, self.band)
            for outcome, teacher, student in zip(super().values(tokens, prepared), teachers, students, strict=True)
        ]
