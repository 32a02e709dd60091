"""Divergences on part of the vocabulary: which ids, and how to treat the mass outside.

A sum over a support A is not a divergence by itself: its gradient is not 0 at S = T (it pushes mass into A or out of
it). The closure sets how the rest is treated:

    tail           one more event holds the rest of each side (default; exact for the coarse-grained distributions)
    renormalised   both sides are conditioned on A; the mass outside is ignored
    generalised    f~(u) = f(u) - f'(1)(u - 1) on A: zero with zero gradient at S = T, still an estimate
    none           the bare sum. Not a divergence; included to reproduce published results

With whole rows of log-probs, the tail is the log-sum-exp of the ids outside A, which is exact however small it is. One
minus the sum over A is not exact: the sum is near 1, and each log-prob in it is a logit minus a normaliser, rounded like
numbers up to 64: to 4e-6 in fp32. If a server sends only A, there is no other way; `TopRows.vague` marks the rows with a
smaller, hence unknown, tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from opd.divergences.formulas import Formula
from opd.divergences.kinds import Closure, Side
from opd.divergences.projection import LOG_ZERO, MergeGroups, canonical_ids
from opd.records import TopK

Support = Literal["full", "topk", "ids"]
SMALL_MASS = 1e-20  # smaller sums of probabilities may have lost terms to underflow
SUM_STEPS = 32  # error bound of the sum of a row's listed masses, in epsilons of the type
TOP_BLOCK = 64  # ids per block in the search for the k likeliest; a block is represented by its maximum


@dataclass(frozen=True)
class Truncation:
    """How a divergence is restricted to a support; `support="full"` means no restriction."""

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
        """(N, K) ids of the support, -1 if a row has fewer: top-k of one side or both, or the given ids as a set."""
        if self.support == "ids":
            assert ids is not None
            return unique_ids(canonical_ids(ids, merge))
        k = min(self.k or log_s.shape[-1], log_s.shape[-1])
        sides = {"teacher": (log_t,), "student": (log_s,), "union": (log_t, log_s)}[self.side]
        chosen = torch.cat([largest(side, k)[1] for side in sides], dim=-1)
        return unique_ids(chosen) if self.side == "union" else chosen


def largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`values.topk(k)` of every row. On a GPU, long rows avoid a full sort: see `largest_by_blocks`."""
    if values.is_cuda and values.shape[-1] > 4 * k * TOP_BLOCK:
        return largest_by_blocks(values, k)
    found = values.topk(k, dim=-1)
    return found.values, found.indices


def largest_by_blocks(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`values.topk(k)` from the k blocks with the largest maxima and the columns after the last block.

    No other block can contain one of the k largest values.
    """
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
    """Distinct ids of a row in ascending order; duplicates become -1. Monte-Carlo draws may repeat, sets may not."""
    ordered = ids.sort(-1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return ordered.masked_fill(repeated, -1)


def gather(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs at `ids`; log 0 for an id of -1."""
    return logprobs.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, LOG_ZERO)


def complement(logprobs: Tensor, ids: Tensor) -> Tensor:
    """(N, V) log-probs with log 0 at `ids`; -1 means no id."""
    rows, size = logprobs.shape
    chosen = torch.zeros(rows, size + 1, dtype=torch.bool, device=logprobs.device)
    chosen.scatter_(-1, torch.where(ids < 0, size, ids), True)  # the last column collects the -1 entries
    return logprobs.masked_fill(chosen[:, :size], LOG_ZERO)


def outside(logprobs: Tensor, ids: Tensor) -> Tensor:
    """(N, 1) log of the mass outside `ids`, from whole rows (N, V); log 0 if nothing is outside."""
    return complement(logprobs, ids).logsumexp(-1, keepdim=True)


def spread_outside(logprobs: Tensor, probs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(N, V) the distribution over the ids outside `ids`, 0 at `ids`; and (N, 1) `outside`. No gradients.

    On a CPU, a sum of probabilities costs a tenth of a log-sum-exp and is as exact, unless they are near the smallest
    float.
    """
    if probs.device.type != "cpu":
        rest = complement(logprobs, ids)
        tail = rest.logsumexp(-1, keepdim=True)
        return rest.sub_(tail).exp_(), tail
    places = ids.clamp(min=0)
    rest = probs.scatter_add(-1, places, -probs.gather(-1, places).masked_fill_(ids < 0, 0))
    mass = rest.sum(-1, keepdim=True)
    rest, tail = rest.div_(mass), mass.log()
    if (small := (mass.squeeze(-1) < SMALL_MASS).nonzero().squeeze(-1)).numel():
        few = complement(logprobs[small], ids[small])
        tail[small] = few.logsumexp(-1, keepdim=True)
        rest[small] = few.sub_(tail[small]).exp_()
    return rest, tail


def on_support(logprobs: Tensor, ids: Tensor, closure: Closure, probs: Tensor | None = None) -> Tensor:
    """(N, K) log-probs at `ids`, from whole rows (N, V); the closure `tail` adds one column for the tail.

    Given `probs`, it may be cheaper, but has no gradients.
    """
    chosen = gather(logprobs, ids)
    if closure != "tail":
        return chosen
    tail = outside(logprobs, ids) if probs is None else spread_outside(logprobs, probs, ids)[1]
    return torch.cat([chosen, tail], -1)


def sum_resolution(dtype: torch.dtype) -> float:
    """The smallest mass that one minus a sum of masses can distinguish from 0, for log-probs of this type.

    >>> f"{sum_resolution(torch.float32):.1e}"
    '3.8e-06'
    """
    return SUM_STEPS * torch.finfo(dtype).eps


def unlisted(logprobs: Tensor, resolution: float) -> Tensor:
    """(N,) log of one minus the sum of the listed masses (N, K), for when the other ids are not listed.

    At least log `resolution`.
    """
    return (1 - logprobs.exp().sum(-1)).clamp(min=resolution).log()


def closed(formula: Formula, closure: Closure, student: Tensor, teacher: Tensor) -> Tensor:
    """(N,) divergence from the support's log-probs (N, K), differentiable in `student`.

    For the closure `tail` their last column is the tail.
    """
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
    """A prepared `TopK`: groups merged, on the device, -1 for missing ids."""

    ids: Tensor  # (N, K)
    logprobs: Tensor  # (N, K), LOG_ZERO where ids is -1
    tail: Tensor  # (N,) log of the mass outside
    vague: Tensor  # (N,) bool: the mass outside is unknown, but at most `tail`

    @property
    def count(self) -> int:
        return self.ids.shape[0]

    def rows(self, index: slice) -> TopRows:
        return TopRows(self.ids[index], self.logprobs[index], self.tail[index], self.vague[index])

    def on_support(self, closure: Closure) -> Tensor:
        """(N, K) log-probs; the closure `tail` adds one column for the tail."""
        return torch.cat([self.logprobs, self.tail[:, None]], -1) if closure == "tail" else self.logprobs

    def seen(self, student: Tensor) -> Tensor:
        """(N, K + 1) log-probs of the student with its tail.

        If the teacher's tail is vague, a smaller student tail counts as equal and has no gradient.
        """
        tail = torch.where(self.vague & (student[:, -1] < self.tail), self.tail, student[:, -1])
        return torch.cat([student[:, :-1], tail[:, None]], -1)

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
        """Merge groups, then keep the `k` likeliest events.

        With `stop_logprob` the first group is one known event. A group that is complete in a row is summed; an
        incomplete one goes to the tail, on both sides. At a temperature `tau` other than 1, a sum is known only from
        its members.
        """
        ids = torch.as_tensor(top.ids).to(device=device, dtype=torch.long)
        given = torch.as_tensor(top.logprobs)
        logprobs = given.to(device=device, dtype=dtype)
        listed = (ids >= 0) & ~logprobs.isnan()
        known = listed & (ids < size)
        joining = [(logprobs / tau).masked_fill(~listed | known, LOG_ZERO)]  # masses that move to the tail
        ids, logprobs = ids.masked_fill(~known, -1), (logprobs / tau).masked_fill(~known, LOG_ZERO)
        leaving = torch.full_like(known[:, 0], tau != 1.0)  # whether part of the tail became an event
        groups = [[index for index in dict.fromkeys(group) if index < size] for group in merge]
        for number, group in enumerate(groups):
            stop_known = number == 0 and tau == 1.0
            stop = torch.as_tensor(top.stop_logprob).to(device=device, dtype=dtype) if stop_known else None
            ids, logprobs, incomplete, partly = merge_top(ids, logprobs, group, stop)
            joining.append(incomplete)
            leaving |= partly
        if k is not None and k < ids.shape[-1]:
            every, (logprobs, columns) = logprobs, logprobs.topk(k, dim=-1)
            ids = ids.gather(-1, columns)
            joining.append(every.scatter(-1, columns, LOG_ZERO))
        whole = (ids >= 0).sum(-1) == size - sum(max(len(group) - 1, 0) for group in groups)
        return cls(ids, logprobs, *_tail_of(top, logprobs, torch.cat(joining, -1), leaving, whole, given.dtype))


def _tail_of(
    top: TopK, logprobs: Tensor, joining: Tensor, leaving: Tensor, whole: Tensor, given: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(N,) log tail, and (N,) whether it is vague.

    The tail is the one that was sent plus `joining`, or one minus the sum if none was sent or it is wrong. `whole`: rows
    with the whole vocabulary as support, so that nothing is outside.
    """
    resolution = max(sum_resolution(dtype) for dtype in (given, logprobs.dtype))
    sent = torch.as_tensor(top.tail).to(logprobs).clamp(min=LOG_ZERO)
    tail = torch.cat([sent[:, None], joining], -1).logsumexp(-1)
    floor = math.log(resolution / SUM_STEPS)  # earlier versions sent this value for any smaller tail
    unknown = sent.isnan() | ((sent - floor).abs() < 1e-3) | leaving | (logprobs.exp().sum(-1) > 1 + resolution)
    tail = torch.where(unknown, unlisted(logprobs, resolution), tail).masked_fill(whole, LOG_ZERO)
    return tail, unknown & ~whole & (tail < math.log(resolution) + 1e-3)


def merge_top(
    ids: Tensor, logprobs: Tensor, group: list[int], stop: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add a column with one event per row for `group`: its given mass, else the sum of all members, else none.

    Also returns (N, K) log-probs of the members in rows without an event, and (N,) whether the given mass covers more
    ids than are listed.
    """
    if len(group) < 2:
        return ids, logprobs, logprobs[:, :0], torch.zeros_like(ids[:, 0], dtype=torch.bool)
    member = torch.isin(ids, torch.tensor(group, device=ids.device))
    of_members = torch.where(member, logprobs, LOG_ZERO)
    total = of_members.logsumexp(-1)
    complete = all_listed = member.sum(-1) == len(group)
    if stop is not None:
        total, complete = torch.where(stop.isnan(), total, stop), complete | ~stop.isnan()
    event = torch.where(complete, group[0], -1)
    ids = torch.cat([ids.masked_fill(member, -1), event[:, None]], -1)
    column = torch.where(complete, total, torch.full_like(total, LOG_ZERO))
    logprobs = torch.cat([logprobs.masked_fill(member, LOG_ZERO), column[:, None]], -1)
    return ids, logprobs, of_members.masked_fill(complete[:, None], LOG_ZERO), complete & ~all_listed
