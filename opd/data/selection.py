"""Which domains a stage trains on, by what an earlier stage came to: RL polish only where distillation has flattened. No torch here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pydantic import Field, field_validator, model_validator

from opd.errors import RecipeError
from opd.settings import Choice, Fraction, Positive, Word


class SelectionRule(Choice):
    """Asked once, for every domain of the stage's prompts, before the stage begins."""

    family = "select"
    stage: Word = Field(description="the earlier stage whose evaluations decide")

    @field_validator("stage", mode="before")
    @classmethod
    def _its_name(cls, given: Any) -> Any:
        """`stage:NAME`, as it is written everywhere else, is NAME."""
        return given.removeprefix("stage:") if isinstance(given, str) else given

    @abstractmethod
    def chooses(self, values: Sequence[float]) -> bool:
        """Whether to train on a domain; `values`: its evaluations in that stage, from before the first step to after the last."""
        raise NotImplementedError

    def require(self, stage: str, domains: Iterable[str], evaluated: Collection[str]) -> None:
        """Refuse domains of a stage's prompts of which the earlier one says nothing."""
        unknown = [domain for domain in domains if domain not in evaluated]
        if unknown:
            raise RecipeError(
                f"stages.{stage}.select: stage {self.stage!r} does not evaluate {', '.join(unknown)}. Give it such prompts, or name "
                "them in its eval.further."
            )


class Flattened(SelectionRule):
    """Domains in which the last evaluations brought nothing more."""

    name = "flat"
    by_default = True
    evaluations: Positive = Field(1, description="the last ones that are looked at")
    gain: Fraction = Field(0.01, description="more than this above the best before them is not flat")

    def chooses(self, values: Sequence[float]) -> bool:
        before, last = values[: -self.evaluations], values[-self.evaluations :]
        return not before or max(last) <= max(before) + self.gain


class ScoreBetween(SelectionRule):
    """Domains whose last evaluation lies between two values: neither hopeless nor learnt."""

    name = "score"
    least: Fraction = 0.0
    most: Fraction = 1.0

    @model_validator(mode="after")
    def _some(self) -> ScoreBetween:
        if self.least > self.most:
            raise ValueError(f"least ({self.least}) is more than most ({self.most}), so no domain is chosen")
        return self

    def chooses(self, values: Sequence[float]) -> bool:
        return self.least <= values[-1] <= self.most
