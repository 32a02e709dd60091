"""Distances between distributions over different vocabularies (ULD, GOLD), computed in blocks of rows.

Axis legend: M = events (spans that both tokenizers cut out), V = ids of one side.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opd.divergences.formulas import Formula
from opd.divergences.kinds import Closure
from opd.divergences.projection import MergeGroups, Projection, log_probs, without_autocast
from opd.divergences.supports import closed

BLOCK_BYTES = 64 << 20  # of one (block, V) array; several exist at once


def sorted_distance(student: Tensor, teacher: Tensor, k: int | None = None) -> Tensor:
    """(M,) sum over ranks of |p - q|, both in descending order, the shorter padded with zeros.

    This is an earth mover's distance with equal costs. With `k`: the k likeliest of each, and the remaining mass of both.

    >>> sorted_distance(torch.tensor([[0.7, 0.3]]), torch.tensor([[0.1, 0.8, 0.1]]))
    tensor([0.4000])
    """
    width = max(student.shape[-1], teacher.shape[-1])
    k = width if k is None else min(k, width)
    tops, rests = [], []
    for side in (student, teacher):
        top = side.topk(min(k, side.shape[-1])).values
        tops.append(torch.nn.functional.pad(top, (0, k - top.shape[-1])))
        rests.append(side.sum(-1) - top.sum(-1))
    distance = (tops[0] - tops[1]).abs().sum(-1)
    return distance if k == width else distance + (rests[0] - rests[1]).abs()


def matched_distance(
    student: Tensor,
    teacher: Tensor,
    ids: tuple[Tensor, Tensor] | None,
    beta: float,
    weights: tuple[float, float] | None,
) -> Tensor:
    """(M,) the JSD of events in both vocabularies, plus the sorted distance of the other events (GOLD).

    The common events are only part of the vocabulary, so at beta 0 and 1 the KL includes the masses (`closed`,
    generalised): the bare sum has a nonzero gradient even if both sides agree.

    `ids`: of the common events on either side; None: the vocabularies are the same. `weights` of the two parts; None:
    the share of the teacher's ids that are common, and the rest of 1.
    """
    formula = Formula.of("jsd", {"beta": beta})
    if ids is None:
        return formula(student, teacher)
    closure: Closure = "generalised" if formula.slope_at_one else "none"
    common = closed(formula, closure, student[:, ids[0]], teacher[:, ids[1]])
    others = [_without(side, some) for side, some in zip((student, teacher), ids, strict=True)]
    share = ids[1].numel() / max(1, teacher.shape[-1])
    first, second = weights or (share, 1 - share)
    return first * common + second * sorted_distance(others[0].exp(), others[1].exp())


def _without(values: Tensor, ids: Tensor) -> Tensor:
    keep = torch.ones(values.shape[-1], dtype=torch.bool, device=values.device)
    keep[ids] = False
    return values[:, keep]


@without_autocast
def crossed_loss(
    student: Projection,
    teacher: Projection,
    weight: Tensor,
    distance: Callable[[Tensor, Tensor], Tensor],
    merge: tuple[MergeGroups, MergeGroups] = ((), ()),
    before: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of weight times distance over events, with gradients; and the distances.

    `before`: (M,) log-probs of the tokens before the rows within their events. The backward pass recomputes log-probs, a
    block of rows at a time.
    """
    wide = max(student.vocabulary, teacher.vocabulary)
    block = max(1, BLOCK_BYTES // (4 * wide))
    total, values = student.hidden.new_zeros((), dtype=torch.float32), []
    for first in range(0, student.count, block):
        part = slice(first, first + block)

        def rows(hidden: Tensor, earlier: Tensor | None, part: slice = part) -> Tensor:
            mine = Projection(hidden, student.weight, student.bias, student.scale, student.softcap, student.size)
            log_s = log_probs(mine, student.vocabulary, merge[0])
            with torch.no_grad():
                log_t = log_probs(teacher.rows(part), teacher.vocabulary, merge[1])
            if before is not None and earlier is not None:
                log_s, log_t = log_s + earlier[:, None], log_t + before[1][part].detach()[:, None]
            return distance(log_s, log_t)

        earlier = None if before is None else before[0][part]
        found = checkpoint(rows, student.hidden[part], earlier, use_reentrant=False)
        total = total + (found * weight[part].to(found)).sum().to(
            total.dtype if found.dtype != torch.float64 else found.dtype
        )
        values.append(found.detach())
    return total, torch.cat(values) if values else student.hidden.new_zeros(0)
