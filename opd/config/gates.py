"""Gates: which tokens count, and how much. Each names its own dials."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from opd.config.base import SETTINGS, Fraction, Positive, changed


class GateSettings(BaseModel):
    """What every gate has: the kind of signal it asks of the term's teacher, if any."""

    model_config = SETTINGS

    @property
    def signal(self) -> Literal["hidden", "logprobs_at"] | None:
        return None


class OutcomeGate(GateSettings):
    """By verdict: of the rollout (correct, wrong), or of its whole group (all_wrong, all_correct, contrast)."""

    kind: Literal["correct", "wrong", "all_wrong", "all_correct", "contrast"]
    threshold: float = Field(0.5, description="a reward of at least this is correct")


class FinishedGate(GateSettings):
    """Rollouts that ended by themselves, not by the length limit."""

    kind: Literal["finished"]


class EntropyGate(GateSettings):
    """TIP: the share of the batch's tokens at which the student is least sure."""

    kind: Literal["entropy"]
    share: float = Field(0.5, gt=0, le=1)


class SoftOrGate(GateSettings):
    """TIP: the tokens with the largest h + d - h*d, with entropy h and reverse KL d scaled to [0, 1] over the batch."""

    kind: Literal["soft_or"]
    share: float = Field(0.5, gt=0, le=1)

    @property
    def signal(self) -> Literal["hidden", "logprobs_at"] | None:
        return "hidden"


class RandomGate(GateSettings):
    """A share of tokens at random: the control at equal budget for every other gate."""

    kind: Literal["random"]
    share: float = Field(0.5, gt=0, le=1)


class TeacherEntropyGate(GateSettings):
    """By the teacher's confidence: its entropy, in nats, at the position."""

    kind: Literal["teacher_entropy"]
    below: float | None = Field(None, ge=0)
    above: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _bounded(self) -> TeacherEntropyGate:
        if self.below is None and self.above is None:
            raise ValueError("teacher_entropy needs `below` (the teacher is sure) or `above` (it is not), in nats")
        if self.below is not None and self.above is not None and self.above >= self.below:
            raise ValueError(f"above {self.above} and below {self.below}: that is nowhere")
        return self

    @property
    def signal(self) -> Literal["hidden", "logprobs_at"] | None:
        return "hidden"


class SelectKD(GateSettings):
    """SelecTKD: the student proposes, the teacher accepts. What it rejects counts `rejected`."""

    kind: Literal["selectkd"]
    accept: Literal["greedy", "speculative"] = Field(
        "greedy",
        description="greedy: the student's likeliest token is in the teacher's top k; speculative: min(1, T/S) of the sampled one",
    )
    k: Positive = Field(5, description="of greedy")
    rejected: Fraction = 0.0

    @model_validator(mode="after")
    def _consistent(self) -> SelectKD:
        if self.accept == "speculative" and "k" in changed(self):
            raise ValueError("k belongs to accept: greedy")
        return self

    @property
    def signal(self) -> Literal["hidden", "logprobs_at"] | None:
        return "hidden" if self.accept == "greedy" else "logprobs_at"


class Paced(GateSettings):
    """PACED: the weight of a prompt is p^a (1 - p)^b, with p its pass rate among this batch's samples."""

    kind: Literal["paced"]
    a: float = Field(1.0, ge=0)
    b: float = Field(1.0, ge=0)
    threshold: float = Field(0.5, description="a reward of at least this is a pass")


class Perplexity(GateSettings):
    """SCOPE: rollouts weigh perplexity^power, normalised to mean 1 over those of their group that other gates let through."""

    kind: Literal["perplexity"]
    of: Literal["student", "teacher"] = "student"
    power: float = Field(1.0, description="1/tau favours what the model finds unlikely, -1/tau what it is sure of")

    @property
    def signal(self) -> Literal["hidden", "logprobs_at"] | None:
        return "logprobs_at" if self.of == "teacher" else None


class TurnWeights(GateSettings):
    """SOD: turn k weighs min((d_1 + eps) / (d_k + eps), 1 + delta), with d the mean |log student - log teacher|."""

    kind: Literal["turns"]
    delta: float = Field(0.2, ge=0)
    eps: float = Field(1e-6, gt=0)

    @property
    def signal(self) -> Literal["hidden", "logprobs_at"] | None:
        return "logprobs_at"


Gate = Annotated[
    OutcomeGate | FinishedGate | EntropyGate | SoftOrGate | RandomGate | TeacherEntropyGate | SelectKD | Paced
    | Perplexity | TurnWeights,
    Field(discriminator="kind"),
]  # fmt: skip
