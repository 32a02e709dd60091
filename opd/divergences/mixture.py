"""Several teachers on one token, combined before the divergence sees them.

    arithmetic   T = sum_i w_i T_i            weights >= 0, normalised: any of the teachers may be right
    geometric    log T = sum_i w_i log T_i    up to a constant; weights of any sign: all agree, or one is subtracted
    sum          sum_i w_i KL(S || T_i)       weights >= 0; under `reverse_kl` alone

A part may be the student's own projection: parts are always detached. That gives, as plain divergences,
Veto (`[teacher, student], [1, beta]`), ExOPD and AlignDistil (`[teacher, reference], [scale, 1 - scale]`), and the
skew reverse KL of DistiLLM-2 (`arithmetic`, `[teacher, student], [1 - alpha, alpha]` under `reverse_kl`).

A sum is the reverse KL to the geometric mean, times the sum of the weights, plus a constant: the gradients are equal. So it is
computed as a geometric mean that is not normalised, which is no distribution: of a sum, `teacher_entropy` means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from opd.divergences.projection import LOG_ZERO, MergeGroups, Projection, as_projection, log_probs

Combination = Literal["arithmetic", "geometric", "sum"]


@dataclass(frozen=True, eq=False)
class Mixture:
    """Teachers with their weights. All parts see the same N tokens; ids beyond the smallest vocabulary do not exist."""

    parts: Sequence[Projection]  # logits that are given in their place become such
    weights: Sequence[float | Tensor]  # numbers, or (N,): one per token
    kind: Combination = "arithmetic"
    factor: float | Tensor | None = None  # one, or (N,), that the loss of every token is multiplied with

    def __post_init__(self) -> None:
        parts = [as_projection(f"part {number} of a mixture", part) for number, part in enumerate(self.parts)]
        object.__setattr__(self, "parts", parts)
        if len(self.parts) != len(self.weights) or not self.parts:
            raise ValueError(
                f"a mixture needs one weight per part; got {len(self.parts)} parts, {self.weights} weights"
            )
        if self.kind not in get_args(Combination):
            raise ValueError(f"unknown mixture {self.kind!r}; known: {', '.join(get_args(Combination))}")
        if self.kind != "geometric" and not self.per_token and (min(self.weights) < 0 or sum(self.weights) <= 0):
            name = "a sum" if self.kind == "sum" else f"{self.kind} mixture"
            raise ValueError(f"{name}: weights {self.weights} must be >= 0 with a positive sum")
        if len({part.count for part in self.parts}) > 1:
            raise ValueError(f"mixture parts differ in tokens: {[part.count for part in self.parts]}")

    @property
    def per_token(self) -> bool:
        return any(isinstance(weight, Tensor) for weight in self.weights)

    @property
    def vocabulary(self) -> int:
        return min(part.vocabulary for part in self.parts)

    @property
    def count(self) -> int:
        return self.parts[0].count

    @property
    def shares(self) -> list[float | Tensor]:
        """The weights; but for a geometric mixture they sum to 1."""
        total = 1.0 if self.kind == "geometric" else sum(self.weights)
        return [weight / total for weight in self.weights]

    def rows(self, index: Any) -> Mixture:
        weights = [weight[index] if isinstance(weight, Tensor) else weight for weight in self.weights]
        factor = self.factor[index] if isinstance(self.factor, Tensor) else self.factor
        return replace(self, parts=[part.rows(index) for part in self.parts], weights=weights, factor=factor)

    def detach(self) -> Mixture:
        return self.each(Projection.detach)

    def each(self, change: Callable[[Projection], Projection]) -> Mixture:
        return replace(self, parts=[change(part) for part in self.parts])

    @property
    def row_factor(self) -> float | Tensor | None:
        """What the loss of every token is multiplied with."""
        total = sum(self.weights) if self.kind == "sum" else None
        if total is None or self.factor is None:
            return self.factor if total is None else total
        return self.factor * total

    def log_probs(self, size: int, merge: MergeGroups = (), temperature: float = 1.0) -> Tensor:
        """(N, size) of the mixture. Parts are merged into events first: a geometric mean is one of events."""
        total: Tensor | None = None
        for part, share in zip(self.parts, self.shares, strict=True):
            if isinstance(share, float) and share == 0:
                continue
            logs = log_probs(part, size, merge, temperature)
            if self.kind == "arithmetic":
                logs.add_(_log(share))
                total = logs if total is None else torch.logaddexp(total, logs, out=total)
            else:
                logs.mul_(share[:, None] if isinstance(share, Tensor) else share)
                total = logs if total is None else total.add_(logs)
        if total is None:
            raise ValueError(f"mixture: every weight is 0: {self.weights}")
        if self.kind == "arithmetic":
            return total
        total[:, absent_ids(merge, size)] = LOG_ZERO  # a negative weight would have made log 0 positive
        return total if self.kind == "sum" else total.log_softmax(-1)


def _log(share: float | Tensor) -> float | Tensor:
    """Of a share, one row's or everyone's; of none, a finite stand-in."""
    return share.log().clamp(min=LOG_ZERO)[:, None] if isinstance(share, Tensor) else math.log(share)


def absent_ids(merge: MergeGroups, size: int) -> list[int]:
    """Ids whose mass moved to the first id of their group."""
    found: list[int] = []
    for group in merge:
        found += [index for index in dict.fromkeys(group) if index < size][1:]
    return found


Source = Projection | Mixture


def source_log_probs(source: Source, size: int, merge: MergeGroups = (), temperature: float = 1.0) -> Tensor:
    if isinstance(source, Mixture):
        return source.log_probs(size, merge, temperature)
    return log_probs(source, size, merge, temperature)
