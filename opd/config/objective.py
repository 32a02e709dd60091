"""What is minimised: a list of terms."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from opd.config.base import SETTINGS


class Term(BaseModel):
    """One summand of the objective."""

    model_config = SETTINGS
    form: Literal["direct", "policy_gradient", "cross_entropy"] = "direct"
    divergence: Literal[
        "reverse_kl", "forward_kl", "jsd", "skew_kl", "skew_reverse_kl", "alpha", "tvd", "hellinger", "acceptance"
    ] = Field("reverse_kl", description="of a direct term")
    beta: float = Field(0.5, ge=0, le=1, description="jsd: 0 is forward KL, 1 is reverse KL")
    alpha: float | None = Field(
        None,
        ge=-2,
        le=3,
        description="skew_kl, skew_reverse_kl (share of the first argument, default 0.1) and alpha (default 0.5)",
    )
    support: Literal["full"] = Field("full", description="of a direct term: the exact full vocabulary")
    temperature: float = Field(1.0, gt=0, description="of the divergence; sampling has its own")
    role: str = Field("teacher", description="whose signal")
    on: list[Literal["student", "teacher", "data"]] | None = Field(
        None,
        description="authors of the tokens trained on; default: all, but student for policy_gradient, data and teacher for cross_entropy",
    )
    coefficient: float = 1.0
    aggregate: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    denominator: float = Field(1.0, gt=0, description="of aggregate: constant")

    @model_validator(mode="after")
    def _alpha(self) -> Term:
        if self.alpha is not None and self.divergence not in ("skew_kl", "skew_reverse_kl", "alpha"):
            raise ValueError(f"alpha belongs to skew_kl, skew_reverse_kl and alpha, not to {self.divergence}")
        if self.alpha is not None and self.divergence != "alpha" and not 0 <= self.alpha < 1:
            raise ValueError(f"alpha of {self.divergence} must be at least 0 and below 1")
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the divergence, by the names `opd.objectives.divergence` gives them."""
        if self.divergence == "jsd":
            return {"beta": self.beta}
        return {} if self.alpha is None else {"alpha": self.alpha}

    @property
    def authors(self) -> tuple[str, ...]:
        if self.on is not None:
            return tuple(self.on)
        return {
            "direct": ("student", "teacher", "data"),
            "policy_gradient": ("student",),
            "cross_entropy": ("data", "teacher"),
        }[self.form]
