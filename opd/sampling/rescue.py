"""The keys of `rollout.rescue`: prompts that all samples failed are answered again under a view. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from opd import families
from opd.settings import SETTINGS, Family, Positive
from opd.types import Prompt

HINT = "hint"  # the field that a written hint becomes


class Hint(BaseModel):
    """A text that a model writes at run time, having read more than the student; the view's template names it `{hint}`."""

    model_config = SETTINGS
    by: Literal["teacher", "student"] = Field("teacher", description="the prompt's own teacher, or the student")
    template: str = Field(min_length=1, max_length=100_000, description="what it is asked, with {prompt} and {FIELD}")
    max_new_tokens: Positive = 64

    @model_validator(mode="after")
    def _asks(self) -> Hint:
        if HINT in self.question.shows():
            raise ValueError("the template of a hint cannot name {hint}, which it is to write")
        return self

    @property
    def question(self) -> Any:
        """As a view, which fills in the template."""
        return families.find("view", "template").model_validate({"template": self.template})


class Rescue(BaseModel):
    """Sample again what every sample failed, under a view; right answers take the places of some that were wrong."""

    model_config = SETTINGS
    view: Annotated[Any, Family("view")] = Field(description="what the student reads then")
    replace: Positive = Field(2, le=65_536, description="samples of a group that are sampled again")
    attempts: Positive = Field(5, le=1000, description="until one is right; else the wrong answer stays")
    threshold: float = Field(1.0, description="the least reward of a right answer")
    trained_as: Literal["student", "teacher"] = Field(
        "student", description="whose tokens they are to the terms of the objective (`on`)"
    )
    hint: Hint | None = Field(None, description="written for each failed prompt, before the first attempt")

    @model_validator(mode="after")
    def _hinted(self) -> Rescue:
        named = HINT in self.view.shows()
        if self.hint is not None and not named:
            raise ValueError("a hint is written, and the view does not show it: name {hint} in its template")
        return self

    def mistakes(self, samples: int) -> Iterable[str]:
        if not self.view.reprompts:
            yield f"the view {self.view.name} is no prompt that could be answered. Use template, instruction, context or feedback."
        if self.view.as_sampled:
            yield "the view same shows what the samples that failed have read. Choose one that shows more."
        yield from self.view.idle_for_student
        if self.replace > samples:
            yield f"replace {self.replace} of rollout.samples {samples}. Lower it."

    def shortest(self, prompt: Prompt) -> Prompt:
        """The prompt as it is when an empty hint stands in it: for looking at lengths beforehand."""
        return replace(prompt, fields={**prompt.fields, HINT: " "}) if self.hint is not None else prompt
