"""The sampled twins of divergences: what one token drawn from the student is worth, from two log-probs alone."""

from __future__ import annotations

import torch
from torch import Tensor

from opd.divergences.formulas import Formula


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
    log-probs of the sampled token. `acceptance` also needs `value`, the divergence itself at that position: its
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
