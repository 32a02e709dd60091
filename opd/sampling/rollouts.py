"""The keys of `rollout`. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from opd import families
from opd.sampling.demonstrations import Demonstrations
from opd.sampling.experience import Experience
from opd.sampling.rescue import Rescue
from opd.settings import SETTINGS, Count, Family, Fraction, Positive, Word
from opd.shorthand import OneOrMany

InFlight = Literal["recompute", "keep", "wait"]


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
    rescue: Rescue | None = Field(
        None, description="answer prompts that all samples failed again, under a view (HDPO, KEPO)"
    )
    experience: Experience | None = Field(
        None, description="a text that a model makes of a step's answers, for teachers' views to show (OEL)"
    )
    demonstrations: Demonstrations | None = Field(
        None, description="answers of a model behind a chat endpoint that replace those of the student that failed"
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
    staleness: Count = Field(
        0, le=1000, description="steps that sampling may run ahead of training; 0: they take turns, in one thread"
    )
    in_flight: InFlight = Field(
        "recompute", description="of staleness: rollouts that are under way when the student's new weights come"
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
        resting = [writer.name for writer in self.writers if writer.takes_the_rest]
        if resting:
            raise ValueError(
                f"writers cannot name {resting[0]}: the student has the prompts that the others leave. Lower their shares, "
                "and mix a teacher in with teacher_mix"
            )
        if self.teacher_mix and (self.temperature != 1 or self.top_p < 1 or self.top_k):
            raise ValueError("teacher_mix draws from both models as they are: set temperature 1, top_p 1 and top_k 0")
        if not self.staleness and self.in_flight != "recompute":
            raise ValueError(
                f"in_flight {self.in_flight}: with staleness 0 no rollout is under way when new weights come"
            )
        if self.contrast and self.samples == 1:
            raise ValueError("contrast compares the samples of a prompt: set samples to 2 or more")
        return self

    @property
    def writers_by_key(self) -> dict[str, Any]:
        """All writers by what asks for them, in the order in which a draw goes to them; the student comes last."""
        found = {}
        for name, share in (("data", self.data_share), ("teacher", self.teacher_share)):
            if share:
                found[f"{name}_share"] = families.find("writer", name)(share=share)
        found |= {f"writers.{number}": writer for number, writer in enumerate(self.writers)}
        rest = 1 - self.data_share - self.teacher_share - sum(writer.share for writer in self.writers)
        key, name = ("teacher_mix", "mixed") if self.teacher_mix else ("prompts", "student")
        return {**found, key: families.find("writer", name)(share=min(rest if rest > 1e-9 else 0.0, 1.0))}

    @property
    def shown_to_student(self) -> list[str]:
        """Keys under which the student answers having read more, with tokens that count as its own."""
        found = [key for key, writer in self.writers_by_key.items() if writer.author == "student" and writer.shows_more]
        return [*found, *(["rescue"] if self.rescue is not None and self.rescue.trained_as == "student" else [])]

    @property
    def everyone(self) -> list[Any]:
        return list(self.writers_by_key.values())
