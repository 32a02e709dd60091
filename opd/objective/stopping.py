"""Rules that stop a stage by its evaluations, and the definition of a plateau.

No torch here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from opd.registry import Choice, Family, Positive

if TYPE_CHECKING:
    from opd.registry import StageView


@dataclass(frozen=True)
class EvaluationHistory:
    """`eval.metric` of every evaluation so far, and the teachers' own score."""

    values: Sequence[float | None]  # None: not measured
    teacher: float | None = None  # None: teachers were not evaluated

    @property
    def best(self) -> float | None:
        return max((value for value in self.values if value is not None), default=None)

    @property
    def without_better(self) -> int:
        """Evaluations since the best one."""
        known = [number for number, value in enumerate(self.values) if value is not None and value == self.best]
        return len(self.values) - 1 - known[0] if known else len(self.values)

    def plateau(self, patience: int) -> bool:
        """Whether the last `patience` evaluations brought no improvement."""
        return self.without_better >= patience


class StopRule(Choice):
    """Checked after every periodic evaluation."""

    family = "stop_rule"

    @abstractmethod
    def should_stop(self, history: EvaluationHistory) -> bool:
        raise NotImplementedError

    def in_words(self) -> str:
        """The stopping condition in a few words, for a diagram."""
        return self.name


class Patience(StopRule):
    """Stops when no evaluation has improved for a while."""

    name = "patience"
    by_default = True
    patience: Positive = Field(3, description="evaluations without a better metric")

    def should_stop(self, history: EvaluationHistory) -> bool:
        return history.plateau(self.patience)

    def in_words(self) -> str:
        return f"{self.patience} evaluation{'s' * (self.patience > 1)} without a better one"


class Target(StopRule):
    """Stops at a target: a value, or a share of the teachers' own score."""

    name = "target"
    value: float | None = Field(None, ge=0, le=1, description="the metric to reach")
    of_teacher: float | None = Field(
        None, gt=0, le=10, description="share of the teachers' level; 1 unless `value` is set"
    )

    @model_validator(mode="after")
    def _one(self) -> Target:
        if self.value is not None and self.of_teacher is not None:
            raise ValueError(f"`value` ({self.value}) and `of_teacher` ({self.of_teacher}) are two targets: keep one")
        return self

    def should_stop(self, history: EvaluationHistory) -> bool:
        goal = self.value
        if goal is None and history.teacher is not None:
            goal = (1.0 if self.of_teacher is None else self.of_teacher) * history.teacher
        return goal is not None and history.best is not None and history.best >= goal

    def in_words(self) -> str:
        return f"a score of {self.value:g}" if self.value is not None else f"{self.of_teacher or 1:g} of the teachers"

    def check(self, view: StageView) -> Iterable[str]:
        if self.value is None and not (view.teachers_evaluated and "teacher" in view.roles):
            yield (
                "eval.early_stop target compares with the teachers, and none is evaluated. Set eval.teachers: true, or "
                "the `value` to reach."
            )


STOP_RULES = Family("stop_rule", default=Patience.name)
