"""What is minimised: a list of terms, each with a form, a coefficient, gates and, for sampled tokens, an advantage."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from opd.config.base import SETTINGS, Fraction, Positive

Moment = Positive | Literal["plateau"]


def changed(settings: BaseModel) -> set[str]:
    """Keys that differ from their defaults; a resolved recipe spells out all of them."""
    fields = type(settings).model_fields.items()
    return {name for name, field in fields if getattr(settings, name) != field.get_default(call_default_factory=True)}


class Schedule(BaseModel):
    """A coefficient that changes with the step. A plain number is one that does not."""

    model_config = SETTINGS
    value: float = 1.0
    to: float | None = Field(None, description="where a straight line from `value` ends …")
    over: Positive | None = Field(None, description="… after this many steps; it stays there")
    until: Moment | None = Field(None, description="0 after this step, or once evaluation stops improving")
    after: Moment | None = Field(
        None, description="0 up to and including this step, or until evaluation stops improving"
    )

    @model_validator(mode="after")
    def _line(self) -> Schedule:
        if (self.to is None) != (self.over is None):
            raise ValueError("`to` and `over` belong together: {value: 5e-3, to: 1e-3, over: 100}")
        return self

    def at(self, step: int, plateau: int | None) -> float:
        """The coefficient of a step, counted from 1. `plateau`: the step after which evaluation stopped improving."""
        if self.until is not None:
            end = plateau if self.until == "plateau" else self.until
            if end is not None and step > end:
                return 0.0
        if self.after is not None:
            start = plateau if self.after == "plateau" else self.after
            if start is None or step <= start:
                return 0.0
        if self.to is None or self.over is None:
            return self.value
        return self.value + (self.to - self.value) * min((step - 1) / max(self.over - 1, 1), 1.0)


class Advantage(BaseModel):
    """A = teacher_weight * A_teacher + outcome_weight * A_outcome - reference_weight * (log student - log reference)."""

    model_config = SETTINGS
    teacher_weight: float = Field(1.0, ge=0)
    student: Literal["behaviour", "proximal", "current"] = Field(
        "behaviour", description="whose log-prob the teacher's is compared with"
    )
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
    outcome_weight: float = Field(0.0, ge=0)
    baseline: Literal["group", "leave_one_out", "batch", "none"] = Field(
        "group", description="what is subtracted from a reward"
    )
    std: bool = Field(False, description="divide by the standard deviation within the group (GRPO as published)")
    overlong: Literal["keep", "mask", "penalise"] = Field(
        "keep", description="what becomes of answers cut off by the length limit"
    )
    overlong_buffer: Positive = Field(
        16, description="penalise: the reward falls by up to 1 over the last tokens before the limit"
    )
    reference_weight: float = Field(
        0.0, ge=0, description="KL penalty towards the role `reference`, as part of the advantage"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Advantage:
        returns = self.discount > 0
        if not returns and (self.length_normalised or self.future_only):
            raise ValueError("length_normalised and future_only belong to returns: set discount above 0")
        if self.kl_baseline and (returns or self.whiten or self.clip is not None):
            raise ValueError("kl_baseline belongs to the plain log-ratio: drop discount, whiten and clip")
        if not (self.teacher_weight or self.outcome_weight or self.reference_weight):
            raise ValueError("every weight is 0: there is no advantage")
        if self.teacher_weight == 0 and (
            returns or self.whiten or self.kl_baseline or self.clip or self.extrapolation != 1
        ):
            raise ValueError("teacher_weight is 0, so what shapes the teacher's part does nothing")
        if self.outcome_weight == 0 and (self.std or self.overlong != "keep"):
            raise ValueError("outcome_weight is 0, so std and overlong do nothing")
        return self

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles beside the term's own."""
        return ("reference",) if self.extrapolation != 1 or self.reference_weight else ()


class Surrogate(BaseModel):
    """How the advantage meets the ratio of the policy being trained to the one that sampled."""

    model_config = SETTINGS
    kind: Literal["importance_sampling", "ppo", "cispo", "gspo"] = "importance_sampling"
    against: Literal["behaviour", "proximal"] = Field(
        "behaviour", description="denominator of the ratio; proximal: the trainer at the start of this batch's updates"
    )
    low: float = Field(0.2, ge=0, le=1, description="ratios below 1 - low are clipped (ppo, cispo, gspo)")
    high: float = Field(0.2, ge=0, description="ratios above 1 + high are clipped")
    dual: float | None = Field(
        None, gt=1, description="dual clip of ppo: the loss of a negative advantage is at most this times |A|"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Surrogate:
        if self.dual is not None and self.kind != "ppo":
            raise ValueError(f"dual belongs to ppo, not to {self.kind}")
        if self.kind == "importance_sampling" and changed(self) & {"low", "high"}:
            raise ValueError("importance_sampling does not clip: drop low and high, or use ppo, cispo or gspo")
        return self


class Correction(BaseModel):
    """What is done about the gap between the trainer's log-probs and those the sampler computed (or stale weights)."""

    model_config = SETTINGS
    kind: Literal["icepop", "tis", "mis", "prefix", "none"] = "none"
    level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="of tis and mis: which ratio is judged"
    )
    low: float = Field(0.5, ge=0, description="icepop, mis: ratios below it are masked")
    high: float = Field(2.0, gt=0, description="icepop, mis: ratios above it are masked; tis, prefix: cut off here")
    veto: float | None = Field(
        None, gt=0, lt=1, description="drop the whole rollout if one token's ratio is below this"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Correction:
        if self.kind not in ("tis", "mis") and self.level != "token":
            raise ValueError(f"level belongs to tis and mis, not to {self.kind}")
        if self.kind == "tis" and self.level == "geometric":
            raise ValueError("a geometric mean is a measure to reject by: use kind: mis")
        if self.kind in ("icepop", "mis") and self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        if self.kind == "none" and self.veto is None:
            raise ValueError("kind none without a veto corrects nothing")
        return self


# Gates: which tokens count, and how much. Each names its own dials.


class OutcomeGate(BaseModel):
    """By verdict: of the rollout (correct, wrong), or of its whole group (all_wrong, all_correct, contrast)."""

    model_config = SETTINGS
    kind: Literal["correct", "wrong", "all_wrong", "all_correct", "contrast"]
    threshold: float = Field(0.5, description="a reward of at least this is correct")


class FinishedGate(BaseModel):
    """Rollouts that ended by themselves, not by the length limit."""

    model_config = SETTINGS
    kind: Literal["finished"]


class EntropyGate(BaseModel):
    """TIP: the share of the batch's tokens at which the student is least sure."""

    model_config = SETTINGS
    kind: Literal["entropy"]
    share: Fraction = 0.5


class SoftOrGate(BaseModel):
    """TIP: the tokens with the largest h + d - h*d, with entropy h and reverse KL d scaled to [0, 1] over the batch."""

    model_config = SETTINGS
    kind: Literal["soft_or"]
    share: Fraction = 0.5


class RandomGate(BaseModel):
    """A share of tokens at random: the control at equal budget for every other gate."""

    model_config = SETTINGS
    kind: Literal["random"]
    share: Fraction = 0.5


class TeacherEntropyGate(BaseModel):
    """By the teacher's confidence: its entropy, in nats, at the position."""

    model_config = SETTINGS
    kind: Literal["teacher_entropy"]
    below: float | None = Field(None, ge=0)
    above: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _bounded(self) -> TeacherEntropyGate:
        if self.below is None and self.above is None:
            raise ValueError("teacher_entropy needs `below` (the teacher is sure) or `above` (it is not), in nats")
        return self


class SelectKD(BaseModel):
    """SelecTKD: the student proposes, the teacher accepts. What it rejects counts `rejected`."""

    model_config = SETTINGS
    kind: Literal["selectkd"]
    accept: Literal["greedy", "speculative"] = Field(
        "greedy",
        description="greedy: the student's likeliest token is in the teacher's top k; speculative: min(1, T/S) of the sampled one",
    )
    k: Positive = Field(5, description="of greedy")
    rejected: Fraction = 0.0


class Paced(BaseModel):
    """PACED: the weight of a prompt is p^a (1 - p)^b, with p its pass rate among this batch's samples."""

    model_config = SETTINGS
    kind: Literal["paced"]
    a: float = Field(1.0, ge=0)
    b: float = Field(1.0, ge=0)
    threshold: float = Field(0.5, description="a reward of at least this is a pass")


class Perplexity(BaseModel):
    """SCOPE: rollouts weigh perplexity^power, normalised to mean 1 over those of their group that other gates let through."""

    model_config = SETTINGS
    kind: Literal["perplexity"]
    of: Literal["student", "teacher"] = "student"
    power: float = Field(1.0, description="1/tau favours what the model finds unlikely, -1/tau what it is sure of")


class TurnWeights(BaseModel):
    """SOD: turn k weighs min((d_1 + eps) / (d_k + eps), 1 + delta), with d the mean |log student - log teacher|."""

    model_config = SETTINGS
    kind: Literal["turns"]
    delta: float = Field(0.2, ge=0)
    eps: float = Field(1e-6, gt=0)


Gate = Annotated[
    OutcomeGate | FinishedGate | EntropyGate | SoftOrGate | RandomGate | TeacherEntropyGate | SelectKD | Paced
    | Perplexity | TurnWeights,
    Field(discriminator="kind"),
]  # fmt: skip
Form = Literal["direct", "policy_gradient", "k2", "cross_entropy"]
SAMPLED = ("policy_gradient", "k2")  # forms that need the log-prob a token was sampled with


class Term(BaseModel):
    """One summand of the objective."""

    model_config = SETTINGS
    form: Form = "direct"
    divergence: Literal[
        "reverse_kl", "forward_kl", "jsd", "skew_kl", "skew_reverse_kl", "alpha", "tvd", "hellinger", "acceptance"
    ] = Field("reverse_kl", description="of a direct term; of policy_gradient: whose single-sample advantage")
    beta: float = Field(0.5, ge=0, le=1, description="jsd: 0 is forward KL, 1 is reverse KL")
    alpha: float | None = Field(
        None,
        ge=-2,
        le=3,
        description="skew_kl, skew_reverse_kl (share of the first argument, default 0.1) and alpha (default 0.5)",
    )
    support: Literal["full", "topk"] = Field(
        "full", description="of a direct term: the exact full vocabulary, or the k likeliest ids"
    )
    k: Positive = Field(64, description="of support: topk")
    side: Literal["teacher", "student", "union"] = Field("teacher", description="of support: topk: whose likeliest ids")
    closure: Literal["tail", "renormalised", "generalised", "none"] = Field(
        "tail", description="of support: topk: what becomes of the rest"
    )
    temperature: float = Field(1.0, gt=0, description="of the divergence; sampling has its own")
    role: str = Field("teacher", description="whose signal")
    on: list[Literal["student", "teacher", "data"]] | None = Field(
        None,
        description="authors of the tokens trained on; default: all, but student for policy_gradient and k2, data and teacher for cross_entropy",
    )
    coefficient: Schedule = Schedule()
    advantage: Advantage = Field(Advantage(), description="of policy_gradient")
    surrogate: Surrogate = Field(Surrogate(), description="of policy_gradient")
    correction: Correction | None = Field(None, description="of the gap between trainer and sampler")
    gate: list[Gate] = Field(default_factory=list, description="which tokens count, and how much; several multiply")
    gated: Literal["drop", "zero"] = Field(
        "drop", description="tokens a gate closes: leave the denominator, or stay in it"
    )
    aggregate: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    denominator: float = Field(1.0, gt=0, description="of aggregate: constant")

    @field_validator("coefficient", mode="before")
    @classmethod
    def _coefficient(cls, value: Any) -> Any:
        return {"value": value} if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    @field_validator("gate", mode="before")
    @classmethod
    def _gate(cls, value: Any) -> Any:
        rows = value if isinstance(value, list) else [value]
        return [{"kind": row} if isinstance(row, str) else row for row in rows]

    @field_validator("surrogate", "correction", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _alpha(self) -> Term:
        if self.alpha is not None and self.divergence not in ("skew_kl", "skew_reverse_kl", "alpha"):
            raise ValueError(f"alpha belongs to skew_kl, skew_reverse_kl and alpha, not to {self.divergence}")
        if self.alpha is not None and self.divergence != "alpha" and not 0 <= self.alpha < 1:
            raise ValueError(f"alpha of {self.divergence} must be at least 0 and below 1")
        return self

    @model_validator(mode="after")
    def _belongs(self) -> Term:
        """A key that the form does not read is a mistake."""
        given, form = changed(self), self.form
        for key, forms in (
            ("advantage", ("policy_gradient",)), ("surrogate", ("policy_gradient",)), ("support", ("direct",)),
            ("temperature", ("direct",)), ("divergence", ("direct", "policy_gradient")),
            ("correction", ("direct", *SAMPLED)),
        ):  # fmt: skip
            if key in given and form not in forms:
                raise ValueError(f"{key} belongs to form {' and '.join(forms)}, not to {form}")
        if self.support == "full" and {"k", "side", "closure"} & given:
            raise ValueError("k, side and closure belong to support: topk")
        if form in SAMPLED and self.on not in (None, ["student"]):
            raise ValueError(f"{form} trains on tokens whose sampling log-prob is known, so `on` is [student]")
        if form == "policy_gradient" and self.divergence == "acceptance":
            raise ValueError("acceptance has no advantage of the sampled token alone: use form: direct")
        if self.divergence != "reverse_kl" and form == "policy_gradient" and not self._plain_twin():
            raise ValueError(f"extrapolation and kl_baseline are defined for reverse_kl, not for {self.divergence}")
        if self.correction is not None:
            self._check_correction(self.correction)
        return self

    def _plain_twin(self) -> bool:
        return self.advantage.extrapolation == 1 and not self.advantage.kl_baseline

    def _check_correction(self, correction: Correction) -> None:
        if self.form == "direct" and correction.kind not in ("prefix", "none"):
            raise ValueError(
                f"{correction.kind} weighs a token by its own ratio, which corrects nothing in a direct loss: it depends on the "
                "prefix alone. Use kind: prefix, or a veto"
            )
        if self.form != "direct" and correction.kind == "prefix":
            raise ValueError(f"prefix is for form: direct; {self.form} is corrected by icepop, tis or mis")

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the divergence, by the names `opd.objectives.divergence` gives them."""
        if self.divergence == "jsd":
            return {"beta": self.beta}
        return {} if self.alpha is None else {"alpha": self.alpha}

    @property
    def truncation(self) -> dict[str, Any]:
        """Those of the support, likewise."""
        if self.support == "full":
            return {}
        return {"support": "topk", "k": self.k, "side": self.side, "closure": self.closure}

    @property
    def authors(self) -> tuple[str, ...]:
        if self.on is not None:
            return tuple(self.on)
        if self.form == "direct":
            return ("student", "teacher", "data")
        return ("student",) if self.form in SAMPLED else ("data", "teacher")

    @property
    def outcome(self) -> bool:
        """Whether verdicts on whole answers enter it."""
        advantage = self.form == "policy_gradient" and self.advantage.outcome_weight > 0
        return advantage or any(isinstance(gate, (OutcomeGate, Paced)) for gate in self.gate)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the models that have to judge its tokens."""
        found: list[str] = []
        if self.form in ("direct", "k2") or (self.form == "policy_gradient" and self.advantage.teacher_weight):
            found.append(self.role)
        if self.form == "policy_gradient":
            found += self.advantage.roles
        if any(_asks_teacher(gate) for gate in self.gate):
            found.append(self.role)
        return tuple(dict.fromkeys(found))


def _asks_teacher(gate: BaseModel) -> bool:
    if isinstance(gate, Perplexity):
        return gate.of == "teacher"
    return isinstance(gate, (SoftOrGate, TeacherEntropyGate, SelectKD, TurnWeights))


__all__ = ["SAMPLED", "Advantage", "Correction", "Form", "Gate", "Schedule", "Surrogate", "Term"]
