"""Divergences on part of the vocabulary: which ids, and what becomes of the mass outside.

A sum over a support A is not a divergence by itself: its gradient is not 0 at S = T (it pushes mass into A or out of
it). A closure decides:

    tail           one more event holds the rest of each side (default; exact for the coarse-grained distributions)
    renormalised   both sides are conditioned on A; nothing is said about the mass outside
    generalised    f~(u) = f(u) - f'(1)(u - 1) on A: zero with zero gradient at S = T, still an estimate
    none           the bare sum. Not a divergence; here to reproduce what others publish
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from opd.divergences.formulas import Formula
from opd.divergences.kinds import Closure, Side
from opd.divergences.projection import LOG_ZERO, MergeGroups, canonical_ids
from opd.types import TopK

Support = Literal["full", "topk", "ids"]
TOP_BLOCK = 64  # ids whose maximum stands for them where the k likeliest are looked for


@dataclass(frozen=True)
class Truncation:
    """How a divergence is cut down; `support="full"` leaves it whole."""

    support: Support = "full"
    k: int | None = None
    side: Side = "teacher"
    closure: Closure = "tail"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("support", self.support, Support),
            ("side", self.side, Side),
            ("closure", self.closure, Closure),
        ):
            if value not in get_args(known):
                raise ValueError(f"unknown {name} {value!r}; known: {', '.join(get_args(known))}")
        if self.k is not None and self.k < 1:
            raise ValueError(f"k {self.k} must be at least 1")

    def choose(self, log_s: Tensor, log_t: Tensor, ids: Tensor | None, merge: MergeGroups) -> Tensor:
        """(N, K) ids of the support, -1 where a row has fewer: top-k of one side or both, or the given ids as a set."""
        if self.support == "ids":
            assert ids is not None
            return unique_ids(canonical_ids(ids, merge))
        k = min(self.k or log_s.shape[-1], log_s.shape[-1])
        sides = {"teacher": (log_t,), "student": (log_s,), "union": (log_t, log_s)}[self.side]
        chosen = torch.cat([largest(side, k)[1] for side in sides], dim=-1)
        return unique_ids(chosen) if self.side == "union" else chosen


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`values.topk(k)` of every row. On a GPU a long row is not sorted through as a whole: see `largest_by_blocks`."""
    if values.is_cuda and values.shape[-1] > 4 * k * TOP_BLOCK:
        return largest_by_blocks(values, k)
    found = values.topk(k, dim=-1)
    return found.values, found.indices


def largest_by_blocks(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same from the k blocks with the largest maxima, and what no block holds: no other block can have one of the k."""
    rows, size = values.shape
    blocks = size // TOP_BLOCK
    inside = torch.arange(TOP_BLOCK, device=values.device)
    maxima = values[:, : blocks * TOP_BLOCK].unflatten(-1, (blocks, TOP_BLOCK)).amax(-1)
    chosen = maxima.topk(min(k, blocks), dim=-1, sorted=False).indices
    behind = torch.arange(blocks * TOP_BLOCK, size, device=values.device).expand(rows, -1)
    columns = torch.cat([(chosen[:, :, None] * TOP_BLOCK + inside).flatten(1), behind], -1)
    found = values.gather(-1, columns).topk(k, dim=-1)
    return found.values, columns.gather(-1, found.indices)


def unique_ids(ids: Tensor) -> Tensor:
    """Each id of a row once, in ascending order; repetitions become -1. Monte-Carlo draws repeat, sets do not."""
    ordered = ids.sort(-1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return ordered.masked_fill(repeated, -1)


def gather(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs at `ids`, log 0 where an id is -1."""
    return logprobs.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, LOG_ZERO)


def outside(logprobs: Tensor) -> Tensor:
    """(N, 1) log of the mass that is not in the support; never log 0, and masses that sum above 1 leave that floor."""
    floor = torch.finfo(logprobs.dtype).eps
    return (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=floor).log()


def closed(formula: Formula, closure: Closure, student: Tensor, teacher: Tensor, tail: Tensor | None = None) -> Tensor:
    """(N,) divergence from the support's log-probs (N, K), differentiable in `student`.

    `tail`: the teacher's, if known.
    """
    if closure == "tail":
        teacher_tail = outside(teacher) if tail is None else tail[:, None]
        return formula(torch.cat([student, outside(student)], -1), torch.cat([teacher, teacher_tail], -1))
    if closure == "renormalised":
        return formula(student - student.logsumexp(-1, keepdim=True), teacher - teacher.logsumexp(-1, keepdim=True))
    if closure == "generalised":
        slope = formula.slope_at_one
        if slope is None:
            raise ValueError(f"{formula.kind} is not an f-divergence: closure generalised does not apply; use tail")
        return formula(student, teacher) - slope * (teacher.exp() - student.exp()).sum(-1)
    return formula(student, teacher)


@dataclass(frozen=True, eq=False)
class TopRows:
    """A `TopK` made ready: groups merged, on the device, -1 for what is missing."""

    ids: Tensor  # (N, K)
    logprobs: Tensor  # (N, K), LOG_ZERO where ids is -1
    tail: Tensor  # (N,) log of the mass outside

    @property
    def count(self) -> int:
        return self.ids.shape[0]

    def rows(self, index: slice) -> TopRows:
        return TopRows(self.ids[index], self.logprobs[index], self.tail[index])

    @classmethod
    def of(
        cls,
        top: TopK,
        device: torch.device,
        dtype: torch.dtype,
        merge: MergeGroups,
        size: int,
        k: int | None,
        tau: float,
    ) -> TopRows:
        """Merge groups: with `stop_logprob` the first group is one known event; a group that is complete in a row is
        summed; an incomplete one goes to the tail, on both sides. Then the `k` likeliest events are kept.

        At a temperature `tau` other than 1 a sum is known from its members alone."""
        ids = torch.as_tensor(top.ids).to(device=device, dtype=torch.long)
        logprobs = torch.as_tensor(top.logprobs).to(device=device, dtype=dtype)
        known = (ids >= 0) & (ids < size) & ~logprobs.isnan()
        ids, logprobs = ids.masked_fill(~known, -1), (logprobs / tau).masked_fill(~known, LOG_ZERO)
        for number, group in enumerate(merge):
            stop_known = number == 0 and tau == 1.0
            stop = torch.as_tensor(top.stop_logprob).to(device=device, dtype=dtype) if stop_known else None
            ids, logprobs = merge_top(ids, logprobs, [index for index in dict.fromkeys(group) if index < size], stop)
        if k is not None and k < ids.shape[-1]:
            logprobs, columns = logprobs.topk(k, dim=-1)
            ids = ids.gather(-1, columns)
        tail = outside(logprobs).squeeze(-1)
        if not merge and k is None:  # nothing moved: the given tail is sharper than one minus a sum near 1
            given = torch.as_tensor(top.tail).to(device=device, dtype=dtype)
            above_one = logprobs.exp().sum(-1) > 1
            tail = torch.where(given.isnan() | above_one, tail, given)
        return cls(ids, logprobs, tail)


def merge_top(ids: Tensor, logprobs: Tensor, group: list[int], stop: Tensor | None) -> tuple[Tensor, Tensor]:
    """One event per row for `group` in an extra column: its given mass, else the sum of all members, else none."""
    if len(group) < 2:
        return ids, logprobs
    member = torch.isin(ids, torch.tensor(group, device=ids.device))
    total = torch.where(member, logprobs, LOG_ZERO).logsumexp(-1)
    complete = member.sum(-1) == len(group)
    if stop is not None:
        total, complete = torch.where(stop.isnan(), total, stop), complete | ~stop.isnan()
    event = torch.where(complete, group[0], -1)
    ids = torch.cat([ids.masked_fill(member, -1), event[:, None]], -1)
    column = torch.where(complete, total, torch.full_like(total, LOG_ZERO))
    return ids, torch.cat([logprobs.masked_fill(member, LOG_ZERO), column[:, None]], -1)
