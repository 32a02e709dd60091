"""The keys of `rollout`. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from opd import families
from opd.settings import SETTINGS, Count, Family, Fraction, OneOrMany, Positive, Word


class Rollouts(BaseModel):
    """Who writes the tokens of a step, how many, and how they are drawn."""

    model_config = SETTINGS
    prompts: Positive = Field(64, le=1_000_000)
    samples: Positive = Field(1, le=65_536, description="rollouts per prompt (the group)")
    max_new_tokens: Positive = 128
    temperature: float = Field(1.0, ge=0, le=100, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Count = Field(0, le=10_000, description="0: no limit")
    stop: list[Word] = Field(
        default_factory=list, max_length=64, description="stop strings, beside the models' stop ids"
    )
    data_share: Fraction = Field(
        0.0, description="share of prompts answered by the dataset's completion (GKD: 1 - lambda)"
    )
    teacher_share: Fraction = Field(0.0, description="share of prompts answered by the prompt's own teacher")
    teacher_mix: float = Field(
        0.0, ge=0, lt=1, description="tokens are drawn from (1 - mix) * student + mix * teacher (MiniLLM: 0.2)"
    )
    writers: Annotated[list[Annotated[Any, Family("writer")]], OneOrMany()] = Field(
        default_factory=list, max_length=100, description="further writers, each with a share of the prompts"
    )
    contrast: Count = Field(
        0,
        description=(
            "dynamic sampling: drop groups whose rewards are all equal, and sample up to this many rounds to fill the "
            "batch; 0: off"
        ),
    )
    max_prompt_tokens: Positive | None = Field(
        None, description="longer prompts are bad rows; default: what the context leaves"
    )
    mixed_versions: Literal["allow", "refuse"] = Field(
        "allow", description="a rollout that was interrupted and would go on with newer weights"
    )

    @model_validator(mode="after")
    def _shares(self) -> Rollouts:
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature {self.temperature}: 0 is greedy, else at least 0.01")
        if self.data_share + self.teacher_share > 1:
            raise ValueError("data_share + teacher_share is above 1")
        if self.data_share + self.teacher_share + sum(writer.share for writer in self.writers) > 1 + 1e-9:
            raise ValueError("data_share, teacher_share and the shares of writers add up to more than 1")
        idle = [writer.name for writer in self.writers if not writer.share]
        if idle:
            raise ValueError(f"writer {idle[0]} has no share of the prompts: set `share`")
        if self.teacher_mix and (self.temperature != 1 or self.top_p < 1 or self.top_k):
            raise ValueError("teacher_mix draws from both models as they are: set temperature 1, top_p 1 and top_k 0")
        if self.contrast and self.samples == 1:
            raise ValueError("contrast compares the samples of a prompt: set samples to 2 or more")
        return self

    @property
    def everyone(self) -> list[Any]:
        """All writers, in the order in which a draw goes to them; the student has what the others leave."""
        data = [families.find("writer", "data")(share=self.data_share)] if self.data_share else []
        teacher = [families.find("writer", "teacher")(share=self.teacher_share)] if self.teacher_share else []
        rest = 1 - self.data_share - self.teacher_share - sum(writer.share for writer in self.writers)
        student = families.find("writer", "mixed" if self.teacher_mix else "student")
        return [*data, *teacher, *self.writers, student(share=min(rest if rest > 1e-9 else 0.0, 1.0))]
