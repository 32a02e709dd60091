"""The list of divergences and supports: names, parameters and bounds. The mathematics is in `formulas`.

S is the student, T the teacher. Names give the direction: `reverse_kl = KL(S || T)`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from opd.registry import Choice, Family, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences.formulas import Formula


Side = Literal["teacher", "student", "union"]
Closure = Literal["tail", "renormalised", "generalised", "none"]


class DivergenceKind(Choice):
    """A divergence with its parameters. To add your own, see `CustomDivergence`."""

    family = "divergence"
    f_divergence: ClassVar[bool] = True  # sum_v S f(T/S); the generalised closure needs this form
    of_one_token: ClassVar[bool] = True  # a sampled token's advantage depends only on its own two log-probs
    by_log_ratio: ClassVar[bool] = False  # that advantage is the plain log-ratio, log T - log S

    @property
    def parameters(self) -> dict[str, Any]:
        """By the names that `opd.divergences.divergence` gives them."""
        return {}

    @property
    def plain_kl(self) -> str:
        """Its name, or the name of the plain KL that its parameter makes it."""
        return self.name

    def formula(self) -> Formula:
        from opd.divergences.formulas import Formula

        return Formula.of(self.name, self.parameters)

    def advantage(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Advantage of a sampled token from its two log-probs; 0 if they are equal."""
        from opd.divergences.formulas import divergence_advantage

        return divergence_advantage(self.name, student, teacher, **self.parameters)


class CustomDivergence(DivergenceKind):
    """Base class of your own divergences. Define `value`; they run in torch, without a kernel.

    With `of_one_token = True` and `advantage`, a policy gradient can use the divergence too.
    """

    f_divergence = False
    of_one_token = False

    @abstractmethod
    def value(self, student: Tensor, teacher: Tensor) -> Tensor:
        """(N,) from log-probs (N, K), differentiable in the student's; 0 with gradient 0 if both are equal."""
        raise NotImplementedError

    def formula(self) -> Formula:
        from opd.divergences.torch_backend import CustomFormula

        return CustomFormula(self.name, value=self.value)


class ReverseKL(DivergenceKind):
    name = "reverse_kl"
    by_default = True
    by_log_ratio = True


class ForwardKL(DivergenceKind):
    name = "forward_kl"


class JSD(DivergenceKind):
    """beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S; the ends are the plain KLs."""

    name = "jsd"
    beta: float = Field(0.5, ge=0, le=1, description="jsd: 0 is forward KL, 1 is reverse KL")

    @property
    def parameters(self) -> dict[str, Any]:
        return {"beta": self.beta}

    @property
    def plain_kl(self) -> str:
        return {0.0: ForwardKL.name, 1.0: ReverseKL.name}.get(self.beta, self.name)


class SkewKL(DivergenceKind):
    """KL(T || alpha T + (1 - alpha) S)."""

    name = "skew_kl"
    alpha: float = Field(0.1, ge=0, le=0.999, description="skew_kl: the teacher's share of the mixture")

    @property
    def parameters(self) -> dict[str, Any]:
        return {"alpha": self.alpha}

    @property
    def plain_kl(self) -> str:
        return self.name if self.alpha else ForwardKL.name


class SkewReverseKL(DivergenceKind):
    """KL(S || (1 - alpha) T + alpha S)."""

    name = "skew_reverse_kl"
    alpha: float = Field(0.1, ge=0, le=0.999, description="skew_reverse_kl: the student's share of the mixture")

    @property
    def parameters(self) -> dict[str, Any]:
        return {"alpha": self.alpha}

    @property
    def plain_kl(self) -> str:
        return self.name if self.alpha else ReverseKL.name


class Alpha(DivergenceKind):
    """0 is reverse KL, 1 is forward KL."""

    name = "alpha"
    alpha: float = Field(0.5, ge=-2, le=3, description="alpha: 0 is reverse KL, 1 is forward KL")

    @property
    def parameters(self) -> dict[str, Any]:
        return {"alpha": self.alpha}

    @property
    def plain_kl(self) -> str:
        return {0.0: ReverseKL.name, 1.0: ForwardKL.name}.get(self.alpha, self.name)


class TVD(DivergenceKind):
    """Total variation."""

    name = "tvd"


class Hellinger(DivergenceKind):
    """Squared Hellinger distance."""

    name = "hellinger"


class Acceptance(DivergenceKind):
    """-log of the acceptance rate of speculative sampling."""

    name = "acceptance"
    f_divergence = False
    of_one_token = False


class Support(Choice):
    """Which ids a divergence is summed over."""

    family = "support"

    @property
    def for_f_divergences(self) -> bool:
        """Whether it is defined only for f-divergences."""
        return False

    @property
    def teacher_ids(self) -> int | None:
        """Number of the teacher's likeliest ids that are sufficient; None: it needs the whole distribution."""
        return None

    @property
    def leaves_rest(self) -> bool:
        """Whether it ignores the mass outside the support, so that this mass may be unknown."""
        return False

    @property
    def truncation(self) -> dict[str, Any]:
        """By the names that `opd.divergences.divergence` gives them."""
        return {}


class Full(Support):
    """The exact full vocabulary."""

    name = "full"
    by_default = True


class TopIds(Support):
    """The k likeliest ids of one side or both, and a rule for the remaining ids."""

    name = "topk"
    k: Positive = Field(64, description="of support: topk")
    side: Side = Field("teacher", description="of support: topk: whose likeliest ids")
    closure: Closure = Field("tail", description="of support: topk: what becomes of the rest")

    @property
    def for_f_divergences(self) -> bool:
        return self.closure == "generalised"

    @property
    def teacher_ids(self) -> int | None:
        return self.k if self.side == "teacher" else None

    @property
    def leaves_rest(self) -> bool:
        return self.closure == "renormalised"

    @property
    def truncation(self) -> dict[str, Any]:
        return {"support": "topk", "k": self.k, "side": self.side, "closure": self.closure}


AnyDivergence = Annotated[DivergenceKind, Family("divergence", default="reverse_kl")]
AnySupport = Annotated[Support, Family("support", default="full")]

BUILT_IN: tuple[type[DivergenceKind], ...] = (
    ReverseKL,
    ForwardKL,
    JSD,
    SkewKL,
    SkewReverseKL,
    Alpha,
    TVD,
    Hellinger,
    Acceptance,
)


def _parameter(kind: type[DivergenceKind]) -> tuple[str, float, float, float] | None:
    for name, field in kind.model_fields.items():
        bounds = {key: getattr(mark, key) for mark in field.metadata for key in ("ge", "le") if hasattr(mark, key)}
        return name, field.default, bounds["ge"], bounds["le"]
    return None


# name, default, minimum and maximum of a kind's parameter
PARAMETERS = {kind.name: found for kind in BUILT_IN if (found := _parameter(kind)) is not None}
