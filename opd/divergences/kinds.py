"""The divergences: their choices in a recipe, their parameters, and their definitions from log-probabilities.

Every fast path is tested against the definitions. S is the student, T the teacher, u = T/S. All but `acceptance` are
f-divergences, D = sum_v S f(u), and have the gradient E_S[(f(u) - u f'(u)) grad log S]. The bracket, shifted by a constant
so that it is 0 at u = 1, is the *slope* g; its negative is the single-sample advantage for policy gradients. Names give the
direction: `reverse_kl = KL(S || T)`.

Shapes: log-probs (N, K) of K events, either the vocabulary or a truncated support. `LOG_ZERO` stands for log 0, and
-inf is treated the same: an id with probability 0 on both sides adds 0.

Recipes are read without torch, so it is imported inside functions only.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from opd.registry import Choice, Family, Positive

if TYPE_CHECKING:
    from torch import Tensor


# Finite stand-in for log 0: probabilities become exactly 0 while 0 * (log p - log q) stays 0 instead of NaN.
LOG_ZERO = -1e30


# --- Choices in a recipe ---


Side = Literal["teacher", "student", "union"]
Closure = Literal["tail", "renormalised", "teacher_renormalised", "generalised", "none"]


class DivergenceKind(Choice):
    """A divergence with its parameters. To add your own, see `CustomDivergence`."""

    family = "divergence"
    f_divergence: ClassVar[bool] = True  # sum_v S f(T/S); the generalised closure needs this form
    of_one_token: ClassVar[bool] = True  # a sampled token's advantage depends only on its own two log-probs
    by_log_ratio: ClassVar[bool] = False  # that advantage is the plain log-ratio, log T - log S
    adapts: ClassVar[bool] = False  # each answer has its own parameter: see `Skewed`

    @property
    def parameters(self) -> dict[str, Any]:
        """By the names that `opd.divergences.divergence` gives them."""
        return {}

    @property
    def plain_kl(self) -> str:
        """Its name, or the name of the plain KL that its parameter makes it."""
        return self.name

    def formula(self) -> Formula:
        return Formula.of(self.name, self.parameters)

    def own_alphas(self, teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
        """(B,) parameters of answers, from their probabilities under the two models. Only for those that adapt."""
        raise NotImplementedError

    def advantage(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Advantage of a sampled token from its two log-probs; 0 if they are equal."""
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


ADAPT = (
    "of skew_kl, skew_reverse_kl: each answer's own alpha, from 0.01 to this one, by how well it is known (DistiLLM-2)"
)
LEAST_ALPHA = 0.01


class Skewed(DivergenceKind):
    """Base of the skewed KLs. With `adapt`, each answer has its own alpha.

    The larger the gap between the two models' mean probability of an answer, the larger the alpha: so (1 - alpha) times the gap
    stays near (1 - alpha) times the batch's mean gap, between `LEAST_ALPHA` and alpha.
    """

    @property
    def adapts(self) -> bool:  # type: ignore[override]
        return self.adapt

    alpha: float = 0.1
    adapt: bool = Field(False, description=ADAPT)
    from_teacher: ClassVar[bool]  # whether the teacher is the divergence's first argument

    @model_validator(mode="after")
    def _room_to_adapt(self) -> Skewed:
        if self.adapts and self.alpha <= LEAST_ALPHA:
            raise ValueError(
                f"adapt moves alpha between {LEAST_ALPHA} and alpha, which is {self.alpha:g}: "
                "raise alpha, or drop adapt"
            )
        return self

    def own_alphas(self, teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
        """(B,) alphas of answers, from the mean token probabilities (geometric) of each under the two models.

        >>> SkewKL(alpha=0.1).own_alphas(np.array([0.35, 0.38]), np.array([0.1, 0.1])).round(3).tolist()
        [0.046, 0.1]
        """
        gaps = teacher - student if self.from_teacher else student - teacher
        if not gaps.size:
            return gaps
        return np.clip(1 - (1 - self.alpha) * gaps.mean() / (gaps + 1e-5), LEAST_ALPHA, self.alpha)


class SkewKL(Skewed):
    """KL(T || alpha T + (1 - alpha) S)."""

    name = "skew_kl"
    from_teacher = True
    alpha: float = Field(0.1, ge=0, le=0.999, description="skew_kl: the teacher's share of the mixture")

    @property
    def parameters(self) -> dict[str, Any]:
        return {"alpha": self.alpha}

    @property
    def plain_kl(self) -> str:
        return self.name if self.alpha else ForwardKL.name


class SkewReverseKL(Skewed):
    """KL(S || (1 - alpha) T + alpha S)."""

    from_teacher = False

    name = "skew_reverse_kl"
    alpha: float = Field(0.1, ge=0, le=0.999, description="skew_reverse_kl: the student's share of the mixture")
    detached: bool = Field(False, description="skew_reverse_kl: no gradient through the mixture (DistiLLM-2)")

    @model_validator(mode="after")
    def _has_a_mixture(self) -> SkewReverseKL:
        if self.detached and not self.alpha:
            raise ValueError("alpha 0 leaves no student in the mixture, so detached does nothing: drop it")
        return self

    @property
    def f_divergence(self) -> bool:  # type: ignore[override]
        return not self.detached

    def formula(self) -> Formula:
        return Formula.of(DETACHED if self.detached else self.name, self.parameters)

    def advantage(self, student: Tensor, teacher: Tensor) -> Tensor:
        return divergence_advantage(DETACHED if self.detached else self.name, student, teacher, **self.parameters)

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
    def for_kl(self) -> str:
        """Name of the only KL that it is defined for; empty: for others as well."""
        return ""

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
    with_sampled: bool = Field(False, description="of support: topk: the sampled token is one of the ids")

    @property
    def for_kl(self) -> str:
        return ForwardKL.name if self.closure == "teacher_renormalised" else ""

    @property
    def for_f_divergences(self) -> bool:
        return self.closure == "generalised"

    @property
    def teacher_ids(self) -> int | None:
        return self.k if self.side == "teacher" and not self.with_sampled else None

    @property
    def leaves_rest(self) -> bool:
        return self.closure in ("renormalised", "teacher_renormalised")

    @property
    def truncation(self) -> dict[str, Any]:
        known = {"k": self.k, "side": self.side, "closure": self.closure, "with_sampled": self.with_sampled}
        return {"support": "topk", **known}


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
DETACHED = "detached_skew_reverse_kl"
PARAMETERS[DETACHED] = PARAMETERS["skew_reverse_kl"]
KINDS: tuple[str, ...] = (*(kind.name for kind in BUILT_IN), DETACHED)  # kernels use the index in this list


# --- The definitions ---


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(S || T) = sum S (log S - log T)."""
    student, teacher = finite(student), finite(teacher)
    return (student.exp() * (student - teacher)).sum(-1)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(T || S) = sum T (log T - log S)."""
    student, teacher = finite(student), finite(teacher)
    return (teacher.exp() * (teacher - student)).sum(-1)


def jsd(student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(T || M) + (1 - beta) KL(S || M), M = beta T + (1 - beta) S; by convention beta 0 and 1 give the plain KLs."""
    if beta == 0.0:
        return forward_kl(student, teacher)
    if beta == 1.0:
        return reverse_kl(student, teacher)
    mixture = blend(teacher, student, beta)
    return beta * forward_kl(mixture, teacher) + (1 - beta) * reverse_kl(student, mixture)


def skew_kl(student: Tensor, teacher: Tensor, alpha: float = 0.1) -> Tensor:
    """KL(T || alpha T + (1 - alpha) S), with the gradient through the mixture."""
    return forward_kl(blend(teacher, student, alpha), teacher)


def skew_reverse_kl(student: Tensor, teacher: Tensor, alpha: float = 0.1) -> Tensor:
    """KL(S || (1 - alpha) T + alpha S), with the gradient through the mixture."""
    return reverse_kl(student, blend(student, teacher, alpha))


def detached_skew_reverse_kl(student: Tensor, teacher: Tensor, alpha: float = 0.1) -> Tensor:
    """KL(S || (1 - alpha) T + alpha S), with the mixture as a constant."""
    return reverse_kl(student, blend(student.detach(), teacher, alpha))


def alpha_divergence(student: Tensor, teacher: Tensor, alpha: float = 0.5) -> Tensor:
    """(sum T^a S^(1-a) - 1) / (a (a - 1)); a -> 0 is reverse KL, a -> 1 forward KL. Written as sum S f(u)."""
    if alpha == 0.0:
        return reverse_kl(student, teacher)
    if alpha == 1.0:
        return forward_kl(student, teacher)
    student, teacher = finite(student), finite(teacher)
    return ((alpha * teacher + (1 - alpha) * student).exp() - student.exp()).sum(-1) / (alpha * (alpha - 1))


def tvd(student: Tensor, teacher: Tensor) -> Tensor:
    """Total variation, 1/2 sum |T - S|: one minus the acceptance rate of speculative sampling."""
    return (teacher.exp() - student.exp()).abs().sum(-1) / 2


def hellinger(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared Hellinger distance, sum (sqrt T - sqrt S)^2."""
    return ((teacher / 2).exp() - (student / 2).exp()).square().sum(-1)


def acceptance(student: Tensor, teacher: Tensor) -> Tensor:
    """-log sum min(T, S): minus the log of the acceptance rate. Its gradient does not vanish when S is far from T."""
    return -finite(student).minimum(finite(teacher)).logsumexp(-1)


def blend(first: Tensor, second: Tensor, share: float) -> Tensor:
    """log(share * first + (1 - share) * second), from logs."""
    if share == 0.0:
        return second
    return (finite(first) + math.log(share)).logaddexp(finite(second) + math.log1p(-share))


def finite(logprobs: Tensor) -> Tensor:
    """Replace -inf by `LOG_ZERO`: differences of -inf and products with 0 would be NaN."""
    return logprobs.clamp(min=LOG_ZERO)


def entropy(logprobs: Tensor) -> Tensor:
    logprobs = finite(logprobs)
    return -(logprobs.exp() * logprobs).sum(-1)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jsd": jsd,
    "skew_kl": skew_kl,
    "skew_reverse_kl": skew_reverse_kl,
    DETACHED: detached_skew_reverse_kl,
    "alpha": alpha_divergence,
    "tvd": tvd,
    "hellinger": hellinger,
    "acceptance": acceptance,
}


@dataclass(frozen=True)
class Formula:
    """A kind with its parameter. Degenerate parameters give the plain KL: `jsd` at beta 1 *is* `reverse_kl`.

    >>> Formula.of("jsd", {"beta": 1.0})
    Formula(kind='reverse_kl', parameter=0.0)
    """

    kind: str
    parameter: float = 0.0

    @classmethod
    def of(cls, kind: str, params: Mapping[str, float]) -> Formula:
        if kind not in FORMULAS:
            raise ValueError(f"unknown divergence {kind!r}; known: {', '.join(FORMULAS)}")
        name, default, low, high = PARAMETERS.get(kind, ("", 0.0, 0.0, 0.0))
        unknown = set(params) - {name}
        if unknown:
            takes = f"takes only {name}" if name else "takes no parameter"
            raise ValueError(f"{kind} {takes}; got {', '.join(sorted(unknown))}")
        value = float(params.get(name, default)) if name else 0.0
        if name and not low <= value <= high:
            raise ValueError(f"{kind}: {name} {value} is outside [{low}, {high}]")
        ends = {
            ("jsd", 0.0): "forward_kl",
            ("jsd", 1.0): "reverse_kl",
            ("skew_kl", 0.0): "forward_kl",
            ("skew_reverse_kl", 0.0): "reverse_kl",
            (DETACHED, 0.0): "reverse_kl",
            ("alpha", 0.0): "reverse_kl",
            ("alpha", 1.0): "forward_kl",
        }
        return cls(ends[kind, value]) if (kind, value) in ends else cls(kind, value)

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        """(N,) from log-probs (N, K), differentiable: the definition."""
        arguments = (self.parameter,) if self.kind in PARAMETERS else ()
        return FORMULAS[self.kind](student, teacher, *arguments)

    @property
    def slope_at_one(self) -> float | None:
        """f'(1), which the generalised closure removes; None for those that are not f-divergences."""
        a = self.parameter
        return {
            "reverse_kl": -1.0,
            "forward_kl": 1.0,
            "jsd": 0.0,
            "skew_kl": 1 - a,
            "skew_reverse_kl": a - 1,
            "alpha": 1 / (a - 1) if self.kind == "alpha" else 0.0,
            "tvd": 0.0,
            "hellinger": 0.0,
            "acceptance": None,
            DETACHED: None,
        }[self.kind]

    def terms(  # noqa: PLR0911  one case per kind
        self, student: Tensor, teacher: Tensor, s: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The value's summand and S times the slope, (N, K) each, for the analytic gradient.

        With P = sum phi and G = sum S g, the gradient of D with respect to the logits is `outer'(P) (S g - S G)`;
        `outer` is the identity except for `acceptance`. `s` and `t` are the probabilities. Multiplying by S keeps
        u = T/S from overflowing.
        """
        a = self.parameter
        match self.kind:
            case "reverse_kl":
                phi = s * (student - teacher)
                return phi, phi
            case "forward_kl":
                return t * (teacher - student), s - t
            case "jsd":
                mixture = blend(teacher, student, a)
                slope = (1 - a) * s * (student - mixture)
                return a * t * (teacher - mixture) + slope, slope
            case "skew_kl":
                mixture = blend(teacher, student, a)
                return t * (teacher - mixture), (1 - a) * (s - (student + teacher - mixture).exp())
            case "skew_reverse_kl":
                mixture = blend(student, teacher, a)
                phi = s * (student - mixture)
                return phi, phi + a * (s - (2 * student - mixture).exp())
            case "detached_skew_reverse_kl":
                phi = s * (student - blend(student, teacher, a))
                return phi, phi
            case "alpha":
                power = (a * teacher + (1 - a) * student).exp()
                return (power - s) / (a * (a - 1)), (s - power) / a
            case "tvd":
                return (t - s).abs() / 2, -s * (t - s).sign() / 2
            case "hellinger":
                root = ((student + teacher) / 2).exp()
                return s + t - 2 * root, s - root
        return s.minimum(t), -s * (t > s)  # acceptance

    def outer(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """The value, and the factor of the gradient, from the sum of `phi`."""
        if self.kind == "acceptance":
            return -total.log(), 1 / total
        return total, total.new_ones(total.shape)


# --- Custom divergences: autograd gives the gradient, a block of rows at a time ---


@dataclass(frozen=True)
class CustomFormula(Formula):
    """A custom formula from log-probs (N, K) to values (N,), in place of a built-in kind."""

    value: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        assert self.value is not None
        return self.value(student, teacher)

    @property
    def slope_at_one(self) -> float | None:
        return None

    def terms(self, student: Tensor, teacher: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The value, and its derivative with respect to log S, which takes the place of S times the slope."""
        import torch

        with torch.enable_grad():
            leaf = student.detach().clone().requires_grad_()
            value = self(leaf, teacher)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach()[:, None], slope.clone()  # autograd may return a view of a single number

    def outer(self, total: Tensor) -> tuple[Tensor, Tensor]:
        return total, total.new_ones(total.shape)


# --- Single-sample advantages of divergences, from the two log-probs of the sampled token ---


def teacher_log_ratio(teacher: Tensor, behaviour: Tensor) -> Tensor:
    """Advantage of reverse KL on the sampled token: log T(y) - log behaviour(y).

    Zero where student and teacher agree.
    """
    return (teacher - behaviour).detach()


def divergence_advantage(  # noqa: PLR0911  one case per kind
    kind: str, student: Tensor, teacher: Tensor, *, value: Tensor | None = None, **params: float
) -> Tensor:
    """Single-sample advantage of a divergence, A(u) with u = T(y)/S(y), shifted so that A = 0 where S = T.

    For y drawn from S, `-A log S(y)` has the divergence's own gradient in expectation. `student` and `teacher` are
    log-probs of the sampled token. `acceptance` also needs `value`, the divergence at that position, because its
    advantage is divided by the acceptance rate exp(-value).

    >>> import torch
    >>> divergence_advantage("tvd", torch.tensor([-1.0]), torch.tensor([-0.5]))
    tensor([0.5000])
    """
    formula = Formula.of(kind, params)
    if formula.kind == "acceptance" and value is None:
        raise ValueError("acceptance: its advantage is divided by sum min(T, S); pass value=, the divergence per token")
    gap, a = (teacher - student).detach(), formula.parameter
    match formula.kind:
        case "reverse_kl":
            return gap
        case "forward_kl":
            return gap.expm1()
        case "jsd":
            return (1 - a) * (a * gap.expm1()).log1p()
        case "skew_kl":
            return (1 - a) * (1 / (a + (1 - a) * (-gap).exp()) - 1)
        case "skew_reverse_kl":
            mixture = (1 - a) * gap.exp() + a
            return mixture.log() + a * (1 / mixture - 1)
        case "detached_skew_reverse_kl":
            return ((1 - a) * gap.exp() + a).log()
        case "alpha":
            return (a * gap).expm1() / a
        case "tvd":
            return gap.sign() / 2
        case "hellinger":
            return (gap / 2).expm1()
    assert value is not None
    return (gap > 0) * value.detach().exp()
