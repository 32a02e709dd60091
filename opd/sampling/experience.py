"""The keys of `rollout.experience`: what a model makes of a batch's answers, for teachers to read. No torch here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from opd import families
from opd.settings import SETTINGS, Positive

EXPERIENCE, TRAJECTORIES = "experience", "trajectories"


class Experience(BaseModel):
    """A text that a model writes in every step, having read some of its answers; views name it `{experience}` (OEL)."""

    model_config = SETTINGS
    by: Literal["teacher", "student"] = Field("student", description="the prompts' own teacher, or the student")
    template: str = Field(
        "{trajectories}\n\nList briefly what can be learnt from these answers for questions of this kind.",
        min_length=1,
        max_length=100_000,
        description="what it is asked; {trajectories} are questions, answers and, if there are any, rewards",
    )
    trajectories: Positive = Field(4, le=1000, description="answers that it reads, drawn at random")
    max_new_tokens: Positive = 128

    @model_validator(mode="after")
    def _reads(self) -> Experience:
        if self.question.shows() != {TRAJECTORIES}:
            raise ValueError("the template of an experience names {trajectories}, and no other field")
        return self

    @property
    def question(self) -> Any:
        """As a view, which fills in the template."""
        return families.find("view", "template").model_validate({"template": self.template})
