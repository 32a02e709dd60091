"""What is minimised: a list of terms, each with a form, a coefficient, gates and, for sampled tokens, an advantage."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from opd.config.base import SETTINGS, Fraction, Positive, changed
from opd.config.gates import Gate, OutcomeGate, Paced

Moment = Positive | Literal["plateau"]


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
        if isinstance(self.until, int) and isinstance(self.after, int) and self.until <= self.after:
            raise ValueError(f"after {self.after} and until {self.until}: that is never")
        return self

    def at(self, step: int, plateau: int | None) -> float:
        """The coefficient of a step, counted from 1. `plateau`: the step after which evaluation stopped improving."""
        first = 0
        if self.until is not None:
            end = plateau if self.until == "plateau" else self.until
            if end is not None and step > end:
                return 0.0
        if self.after is not None:
            start = plateau if self.after == "plateau" else self.after
            if start is None or step <= start:
                return 0.0
            first = start
        if self.to is None or self.over is None:
            return self.value
        return self.value + (self.to - self.value) * min((step - first - 1) / max(self.over - 1, 1), 1.0)


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
        if self.kl_baseline and (returns or self.whiten or self.clip is not None or self.extrapolation != 1):
            raise ValueError(
                "kl_baseline belongs to the plain log-ratio: drop discount, whiten, clip and extrapolation"
            )
        if self.whiten and self.student == "current":
            raise ValueError("whiten needs the whole batch first: compare with behaviour or proximal, not with current")
        if not (self.teacher_weight or self.outcome_weight or self.reference_weight):
            raise ValueError("every weight is 0: there is no advantage")
        if self.teacher_weight == 0 and (
            returns or self.whiten or self.kl_baseline or self.clip or self.extrapolation != 1
        ):
            raise ValueError("teacher_weight is 0, so what shapes the teacher's part does nothing")
        given = changed(self)
        if self.outcome_weight == 0 and given & {"std", "overlong", "baseline"}:
            raise ValueError("outcome_weight is 0, so baseline, std and overlong do nothing")
        if "overlong_buffer" in given and self.overlong != "penalise":
            raise ValueError("overlong_buffer belongs to overlong: penalise")
        if self.baseline == "none" and self.std:
            raise ValueError("std divides what a baseline has centred: set a baseline")
        if "student" in given and not self.teacher_weight and not self.reference_weight:
            raise ValueError("teacher_weight and reference_weight are 0, so `student` does nothing")
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
        unread = {"none": {"low", "high"}, "tis": {"low"}, "prefix": {"low"}}.get(self.kind, set())
        if unread & changed(self):
            raise ValueError(f"{' and '.join(sorted(unread))} do nothing with kind: {self.kind}")
        return self


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
        min_length=1,
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
        if "beta" in given and self.divergence != "jsd":
            raise ValueError(f"beta belongs to jsd, not to {self.divergence}")
        if "denominator" in given and self.aggregate != "constant":
            raise ValueError(f"denominator belongs to aggregate: constant, not to {self.aggregate}")
        if "gated" in given and not self.gate:
            raise ValueError("gated says what becomes of tokens that a gate closes: there is no gate")
        if self.form == "policy_gradient" and not self.advantage.teacher_weight and "divergence" in given:
            raise ValueError("teacher_weight is 0, so the divergence does nothing")
        if not self.roles and "role" in given:
            raise ValueError("nobody is asked, so `role` does nothing")
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
        if self.surrogate.kind in ("cispo", "gspo") and self.surrogate.against == "behaviour":
            raise ValueError(
                f"{self.surrogate.kind} does not multiply by the ratio itself, so a correction on top needs surrogate.against: proximal"
            )
        if self.form != "direct" and correction.kind == "prefix":
            raise ValueError(f"prefix is for form: direct; {self.form} is corrected by icepop, tis or mis")

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the divergence, by the names `opd.divergence.divergence` gives them."""
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
        if any(gate.signal for gate in self.gate):
            found.append(self.role)
        return tuple(dict.fromkeys(found))


__all__ = ["SAMPLED", "Advantage", "Correction", "Form", "Gate", "Schedule", "Surrogate", "Term"]
