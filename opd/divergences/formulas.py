"""The definitions of all divergences, from log-probabilities. Every fast path is tested against these.

S is the student, T the teacher, u = T/S. All but `acceptance` are f-divergences, D = sum_v S f(u), and have the
gradient E_S[(f(u) - u f'(u)) grad log S]. The bracket, shifted by a constant so that it is 0 at u = 1, is the *slope*
g; its negative is the single-sample advantage for policy gradients. Names give the direction:
`reverse_kl = KL(S || T)`.

Shapes: log-probs (N, K) of K events, either the vocabulary or a truncated support. `LOG_ZERO` stands for log 0, and
-inf is treated the same: an id with probability 0 on both sides adds 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from opd.divergences.kinds import BUILT_IN, PARAMETERS
from opd.divergences.projection import LOG_ZERO

KINDS: tuple[str, ...] = tuple(kind.name for kind in BUILT_IN)  # kernels use the index in this list


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
    return -torch.minimum(finite(student), finite(teacher)).logsumexp(-1)


def blend(first: Tensor, second: Tensor, share: float) -> Tensor:
    """log(share * first + (1 - share) * second), from logs."""
    if share == 0.0:
        return second
    return torch.logaddexp(finite(first) + math.log(share), finite(second) + math.log1p(-share))


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
        """f'(1), which the generalised closure removes; None for `acceptance`, which is not an f-divergence."""
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
            case "alpha":
                power = (a * teacher + (1 - a) * student).exp()
                return (power - s) / (a * (a - 1)), (s - power) / a
            case "tvd":
                return (t - s).abs() / 2, -s * (t - s).sign() / 2
            case "hellinger":
                root = ((student + teacher) / 2).exp()
                return s + t - 2 * root, s - root
        return torch.minimum(s, t), -s * (t > s)  # acceptance

    def outer(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """The value, and the factor of the gradient, from the sum of `phi`."""
        if self.kind == "acceptance":
            return -total.log(), 1 / total
        return total, torch.ones_like(total)


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
            return (1 - a) * torch.log1p(a * gap.expm1())
        case "skew_kl":
            return (1 - a) * (1 / (a + (1 - a) * (-gap).exp()) - 1)
        case "skew_reverse_kl":
            mixture = (1 - a) * gap.exp() + a
            return mixture.log() + a * (1 / mixture - 1)
        case "alpha":
            return (a * gap).expm1() / a
        case "tvd":
            return gap.sign() / 2
        case "hellinger":
            return (gap / 2).expm1()
    assert value is not None
    return (gap > 0) * value.detach().exp()
