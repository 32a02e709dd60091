"""What the divergence tests share: the kinds with their parameters, textbook sums, and random heads in fp64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from opd.divergences import Divergence, Projection
from opd.divergences.kinds import Formula
from opd.divergences.projection import merge_events

CASES: list[tuple[str, dict[str, float]]] = [
    ("reverse_kl", {}),
    ("forward_kl", {}),
    ("jsd", {"beta": 0.5}),
    ("jsd", {"beta": 0.1}),
    ("jsd", {"beta": 1.0}),
    ("skew_kl", {"alpha": 0.1}),
    ("skew_reverse_kl", {"alpha": 0.1}),
    ("alpha", {"alpha": 0.3}),
    ("alpha", {"alpha": 2.0}),
    ("tvd", {}),
    ("hellinger", {}),
    ("acceptance", {}),
]
SMOOTH = {kind for kind, _ in CASES} - {"tvd", "acceptance"}  # the others have a kink at equality


def textbook(  # noqa: PLR0911
    kind: str, params: dict[str, float], student: np.ndarray, teacher: np.ndarray
) -> np.ndarray:
    """The definitions on plain probabilities."""

    def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.where(p > 0, p * np.log(np.maximum(p, 1e-300) / np.maximum(q, 1e-300)), 0).sum(-1)

    a = params.get("alpha", params.get("beta", 0.0))
    if kind == "reverse_kl" or (kind, a) == ("jsd", 1.0):
        return kl(student, teacher)
    if kind == "forward_kl" or (kind, a) == ("jsd", 0.0):
        return kl(teacher, student)
    if kind == "jsd":
        mixture = a * teacher + (1 - a) * student
        return a * kl(teacher, mixture) + (1 - a) * kl(student, mixture)
    if kind == "skew_kl":
        return kl(teacher, a * teacher + (1 - a) * student)
    if kind == "skew_reverse_kl":
        return kl(student, (1 - a) * teacher + a * student)
    if kind == "alpha":
        return ((teacher**a * student ** (1 - a)).sum(-1) - 1) / (a * (a - 1))
    if kind == "tvd":
        return np.abs(teacher - student).sum(-1) / 2
    if kind == "hellinger":
        return ((np.sqrt(teacher) - np.sqrt(student)) ** 2).sum(-1)
    return -np.log(np.minimum(teacher, student).sum(-1))


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def heads(
    seed: int, n: int = 5, vocabulary: int = 11, *, bias: bool = True, softcap: float | None = None, padded: int = 0
) -> tuple[Projection, Projection]:
    """A student that wants gradients and a teacher of another width; both heads may have padding rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = vocabulary + padded
    student = Projection(
        draw(generator, n, 4).requires_grad_(), draw(generator, rows, 4).requires_grad_(),
        draw(generator, rows).requires_grad_() if bias else None, 1.3, softcap, vocabulary,
    )  # fmt: skip
    other = draw(generator, rows + 2)
    return student, Projection(
        draw(generator, n, 6), draw(generator, rows + 2, 6), other if bias else None, 0.7, softcap, vocabulary
    )


def tailed(
    student: list[float], teacher: list[float], dtype: torch.dtype, vocabulary: int = 61, k: int = 8, seed: int = 0
) -> tuple[Projection, Projection]:
    """Heads whose rows have these log tails outside k ids, other ones in each row; the same logits in any type."""
    generator, n = torch.Generator().manual_seed(seed), len(student)
    inside = torch.stack([torch.randperm(vocabulary, generator=generator)[:k] for _ in student])
    sides = []
    for tails in (student, teacher):
        rest = (0.5 * draw(generator, n, vocabulary)).scatter(1, inside, -torch.inf).log_softmax(-1)
        tail = torch.tensor(tails, dtype=torch.float64)[:, None]
        chosen = draw(generator, n, k).log_softmax(-1) + torch.log1p(-tail.exp())
        logits = (rest + tail).scatter(1, inside, chosen).float()  # a row of the identity picks out a column
        sides.append(Projection(torch.eye(n, dtype=dtype), logits.T.contiguous().to(dtype)))
    for tensor in leaves(sides[0]):
        tensor.requires_grad_()
    return sides[0], sides[1]


def coarse_gradients(
    formula: Formula,
    student: Projection,
    teacher: Projection,
    ids: list[list[int]],
    merge: tuple = (),
    tau: float = 1.0,
) -> tuple[list[float], list[Tensor]]:
    """Values and gradients of hidden states and head of the closure `tail`, by its definition in fp64: row by row the chosen
    log-probs, and the log-sum-exp of the others."""
    log_s, log_t = (merge_events(side.logits() / tau, merge).log_softmax(-1) for side in (student, teacher))
    values = []
    for row, chosen in enumerate(ids):
        others = [index for index in range(log_s.shape[1]) if index not in chosen]
        pair = [torch.cat([side[row, chosen], side[row, others].logsumexp(-1)[None]])[None] for side in (log_s, log_t)]
        values.append(formula(pair[0], pair[1].detach()))
    gradients = torch.autograd.grad(torch.cat(values).sum(), [student.hidden, student.weight])
    return torch.cat(values).tolist(), list(gradients)


def leaves(projection: Projection) -> list[Tensor]:
    return [leaf for leaf in (projection.hidden, projection.weight, projection.bias) if leaf is not None]


def twin(student: Projection) -> Projection:
    """A teacher equal to the student."""
    return student.detach()


def outcome(found: Divergence, student: Projection) -> list[Tensor]:
    """Everything a caller can see: loss, statistics and gradients of three times the loss."""
    gradients = torch.autograd.grad(3 * found.loss, leaves(student))
    statistics = [value for value in vars(found.statistics).values() if value is not None]
    return [found.loss.detach(), *statistics, *gradients]


def assert_same(left: list[Tensor], right: list[Tensor], rtol: float = 1e-8, atol: float = 1e-11) -> None:
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, check_dtype=False)
