"""Several teachers on one token, combined before the divergence sees them.

    arithmetic   T = sum_i w_i T_i            weights >= 0, normalised: any of the teachers may be right
    geometric    log T = sum_i w_i log T_i    up to a constant; weights of any sign: all agree, or one is subtracted

A part may be the student's own projection: parts are always detached. That gives, as plain divergences,
Veto (`[teacher, student], [1, beta]`), ExOPD and AlignDistil (`[teacher, reference], [scale, 1 - scale]`), and the
skew reverse KL of DistiLLM-2 (`arithmetic`, `[teacher, student], [1 - alpha, alpha]` under `reverse_kl`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from opd.divergences.projection import LOG_ZERO, MergeGroups, Projection, log_probs


@dataclass(frozen=True, eq=False)
class Mixture:
    """Teachers with their weights. All parts see the same N tokens; ids beyond the smallest vocabulary do not exist."""

    parts: Sequence[Projection]
    weights: Sequence[float]
    kind: Literal["arithmetic", "geometric"] = "arithmetic"

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.weights) or not self.parts:
            raise ValueError(
                f"a mixture needs one weight per part; got {len(self.parts)} parts, {self.weights} weights"
            )
        if self.kind not in ("arithmetic", "geometric"):
            raise ValueError(f"unknown mixture {self.kind!r}; known: arithmetic, geometric")
        if self.kind == "arithmetic" and (min(self.weights) < 0 or sum(self.weights) <= 0):
            raise ValueError(f"arithmetic mixture: weights {self.weights} must be >= 0 with a positive sum")
        if len({part.count for part in self.parts}) > 1:
            raise ValueError(f"mixture parts differ in tokens: {[part.count for part in self.parts]}")

    @property
    def vocabulary(self) -> int:
        return min(part.vocabulary for part in self.parts)

    @property
    def count(self) -> int:
        return self.parts[0].count

    @property
    def shares(self) -> list[float]:
        """The weights; those of an arithmetic mixture sum to 1."""
        total = sum(self.weights) if self.kind == "arithmetic" else 1.0
        return [weight / total for weight in self.weights]

    def rows(self, index: Any) -> Mixture:
        return replace(self, parts=[part.rows(index) for part in self.parts])

    def detach(self) -> Mixture:
        return replace(self, parts=[part.detach() for part in self.parts])

    def log_probs(self, size: int, merge: MergeGroups = (), temperature: float = 1.0) -> Tensor:
        """(N, size) of the mixture. Parts are merged into events first: a geometric mean is one of events."""
        total: Tensor | None = None
        for part, share in zip(self.parts, self.shares, strict=True):
            if share == 0:
                continue
            logs = log_probs(part, size, merge, temperature)
            if self.kind == "geometric":
                total = logs.mul_(share) if total is None else total.add_(logs, alpha=share)
            else:
                logs.add_(math.log(share))
                total = logs if total is None else torch.logaddexp(total, logs, out=total)
        if total is None:
            raise ValueError(f"mixture: every weight is 0: {self.weights}")
        if self.kind == "arithmetic":
            return total
        total[:, absent_ids(merge, size)] = LOG_ZERO  # a negative weight would have made log 0 positive
        return total.log_softmax(-1)


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
