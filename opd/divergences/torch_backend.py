"""The torch backend: gradient in the forward pass, a chunk of tokens at a time, on any device.

A chunk is sized for the matrix products. Within it, blocks of rows are sized for the CPU's cache, because otherwise each
of a divergence's dozen elementwise passes would read main memory. Backward only scales the stored gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.divergences.kinds import LOG_ZERO, Closure, Formula, Side, entropy
from opd.divergences.projection import (
    MergeGroups,
    Mixture,
    Projection,
    Source,
    canonical_ids,
    log_probs,
    matmul,
    source_log_probs,
    upload,
)
from opd.records import TopK

Compute = Callable[[tuple[bool, ...]], tuple[Tensor, list[Tensor | None]]]
Scale = Callable[[Tensor, Tensor], object]
BLOCK_BYTES = 2 << 20  # of one (block, V) array on a CPU; several exist at once


def slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, max(step, 1)))


def block_rows(array: Tensor) -> int:
    """Rows of one cache-sized block; on a GPU, the whole chunk."""
    if array.device.type != "cpu":
        return max(array.shape[0], 1)
    return max(1, BLOCK_BYTES // max(array.shape[1] * array.element_size(), 1))


class GradientInForward(torch.autograd.Function):
    """`compute(needs)` returns the loss and the gradients of hidden states, head and bias; backward only scales them.

    The first backward scales them in place and returns them, so the head's gradient is never copied. A second backward
    through a retained graph recomputes them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, compute: Compute, scale: Scale
    ) -> Tensor:
        ctx.needs = ctx.needs_input_grad[:3]
        loss, ctx.grads = compute(ctx.needs)
        ctx.compute, ctx.scale, ctx.inputs = compute, scale, (hidden.detach(), weight.detach())
        ctx.versions = hidden._version, weight._version
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            if tuple(tensor._version for tensor in ctx.inputs) != ctx.versions:
                raise RuntimeError("hidden states or head changed between two backward passes through one divergence")
            _, grads = ctx.compute(ctx.needs)
        for grad in grads:
            if grad is not None:
                ctx.scale(grad, grad_loss)
        return *grads, None, None


def chunked_divergence(
    job: Job,
    student: Projection,
    teacher: Source | TopRows,
    chunk: int,
    sink: list[RowStatistics],
    needs: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss and the gradients; the statistics of each block are appended to `sink`."""
    grads, device = HeadGradients(student, needs), student.hidden.device
    total = torch.zeros((), dtype=student.wide, device=device)
    for rows in slices(student.count, chunk):
        raw = matmul(student.hidden[rows], student.weight[: job.size].T)
        part = teacher.rows(rows)
        part_log_t = part.log_probs(job.size, job.merge, job.temperature) if isinstance(part, Mixture) else None
        raw_t = matmul(part.hidden, part.weight[: job.size].T) if isinstance(part, Projection) else None
        for block in slices(raw.shape[0], block_rows(raw)):
            log_t = None if part_log_t is None else part_log_t[block]
            t = None if log_t is None else log_t.exp()
            if isinstance(part, Projection) and raw_t is not None:
                log_t, t, *_ = log_softmax_(raw_t[block], part, job)
            index = torch.arange(rows.start + block.start, rows.start + block.stop, device=device)
            loss, observed = gradient_rows(
                job.rows(index), student, raw[block], log_t, t, part.rows(block), index, any(needs)
            )
            total += loss
            sink.append(observed)
        grads.add(rows, raw, student.hidden[rows])
        del raw, raw_t, part_log_t, log_t, t  # free them before the next chunk
    return total, grads.finish()


def log_softmax_(raw: Tensor, projection: Projection, job: Job) -> tuple[Tensor, Tensor, Tensor, Events | None]:
    """Of a block: log-probs (written over the head's products), probabilities, (n, 1) normalisers, and merged events.

    It takes a single exponential.
    """
    logits = transform_(raw, projection, job.temperature)
    events = Events.merge_(logits, job.merge)
    top = logits.amax(-1, keepdim=True)
    probs = logits.sub_(top).exp()
    total = probs.sum(-1, keepdim=True)
    rest = total.log()
    return logits.sub_(rest), probs.div_(total), rest.add_(top), events


class HeadGradients:
    """Sums of the gradients of hidden states, head and bias over chunks; the head's is accumulated in fp32."""

    def __init__(self, student: Projection, needs: tuple[bool, ...]) -> None:
        self._student, wide = student, student.wide
        hidden, weight, bias = student.hidden, student.weight, student.bias
        self.hidden = torch.zeros_like(hidden) if needs[0] else None
        self.weight = torch.empty_like(weight, dtype=wide) if needs[1] else None
        self._begun = False  # whether `weight` is initialised
        self.bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None

    def add(self, rows: slice, grad: Tensor, hidden: Tensor) -> None:
        """`grad` (n, size): with respect to the head's products, before bias and scale."""
        size = grad.shape[1]
        operand = grad.to(hidden.dtype) if grad.is_cuda else grad
        if self.hidden is not None:
            self.hidden[rows] = matmul(operand, self._student.weight[:size]).to(self.hidden.dtype)
        if self.weight is not None:
            target = self.weight[:size]
            if not self._begun:
                matmul(operand.T, hidden, out=target)
                self.weight[size:].zero_()
                self._begun = True
            elif operand.is_cuda and operand.dtype in (torch.bfloat16, torch.float16):
                torch.addmm(target, operand.T, hidden, out_dtype=torch.float32, out=target)
            else:
                target.addmm_(operand.T, hidden.to(operand.dtype))
        if self.bias is not None:
            self.bias[:size] += grad.sum(0)

    def finish(self) -> list[Tensor | None]:
        student = self._student
        if self.weight is not None and not self._begun:
            self.weight.zero_()
        pairs = ((self.hidden, student.hidden), (self.weight, student.weight), (self.bias, student.bias))
        return [None if grad is None or like is None else grad.to(like.dtype) for grad, like in pairs]


class ChunkedLogprobs(torch.autograd.Function):
    """Log-probs of one id per row; the backward pass recomputes a chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Projection,
        ids: Tensor,
        merge: MergeGroups,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        size, targets = projection.vocabulary, canonical_ids(ids, merge)
        normaliser = hidden.new_zeros(hidden.shape[0], dtype=projection.wide)
        logprobs = torch.zeros_like(normaliser)
        for rows in slices(hidden.shape[0], chunk):
            raw = matmul(hidden[rows], weight[:size].T)
            for block in slices(raw.shape[0], block_rows(raw)):
                where = slice(rows.start + block.start, rows.start + block.stop)
                logits = transform_(raw[block], projection, temperature)
                Events.merge_(logits, merge)
                chosen = logits.gather(-1, targets[where, None]).squeeze(-1)
                normaliser[where] = logits.logsumexp(-1)
                logprobs[where] = chosen - normaliser[where]
            del raw, logits  # free them before the next chunk
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.static = projection, merge, temperature, chunk
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        projection, merge, temperature, chunk = ctx.static
        live = Projection(hidden, weight, bias, projection.scale, projection.softcap, projection.size)
        grads = HeadGradients(live, ctx.needs_input_grad[:3])
        for rows in slices(hidden.shape[0], chunk):
            raw = matmul(hidden[rows], weight[: live.vocabulary].T)
            for block in slices(raw.shape[0], block_rows(raw)):
                where = slice(rows.start + block.start, rows.start + block.stop)
                logits = transform_(raw[block], live, temperature)
                events = Events.merge_(logits, merge)
                upstream = grad[where, None].to(logits.dtype)
                slope = (logits - normaliser[where, None]).exp_().mul_(-upstream)
                slope.scatter_add_(-1, targets[where, None], upstream)
                members = None if events is None else slope[:, events.event] * events.share
                untransform_(slope, logits, live, temperature)
                if events is not None and members is not None:
                    slope[:, events.member] = untransform_(members, events.logit, live, temperature)
                raw[block] = slope
            grads.add(rows, raw, hidden[rows])
            del raw, logits
        return *grads.finish(), None, None, None, None, None


@torch.no_grad()
def chunked_statistics(job: Job, student: Projection, teacher: Source | None, chunk: int) -> Iterator[RowStatistics]:
    """Values without gradients, for gates that need the whole batch first."""
    for rows in slices(student.count, chunk):
        log_s, s, *_ = log_softmax_(matmul(student.hidden[rows], student.weight[: job.size].T), student, job)
        log_t, t = None, None
        if isinstance(teacher, Mixture):
            log_t = teacher.rows(rows).log_probs(job.size, job.merge, job.temperature)
            t = log_t.exp()
        elif teacher is not None:
            log_t, t, *_ = log_softmax_(matmul(teacher.hidden[rows], teacher.weight[: job.size].T), teacher, job)
        index = torch.arange(rows.start, rows.stop, device=student.hidden.device)
        value = None if log_t is None or job.formula is None else job.formula(log_s, log_t)
        yield job.rows(index).observe(index, log_s, log_t, value, s, t)


def likeliest_rows(job: Job, projection: Projection, k: int, apart: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids and log-probs of `apart` and the k likeliest others, most likely first; log masses of other ids and of `apart`."""
    log_p, *_ = log_softmax_(matmul(projection.hidden, projection.weight[: job.size].T), projection, job)
    members = torch.tensor(apart, dtype=torch.long, device=log_p.device)
    own = log_p[:, members]
    values, likely = largest(log_p.index_fill_(-1, members, -torch.inf), min(k, job.size - len(apart)))
    ids = torch.cat([likely, members.expand(log_p.shape[0], -1)], -1)
    tail = log_p.scatter_(-1, likely, -torch.inf).logsumexp(-1).clamp(min=LOG_ZERO)
    logprobs, order = torch.cat([values, own], -1).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), logprobs, tail, own.logsumexp(-1)


# --- Divergences on part of the vocabulary: which ids, and how to treat the mass outside ---
#
# A sum over a support A is not a divergence by itself: its gradient is not 0 at S = T (it pushes mass into A or out of
# it). The closure sets how the rest is treated:
#
#     tail           one more event holds the rest of each side (default; exact for the coarse-grained distributions)
#     renormalised   both sides are conditioned on A; the mass outside is ignored
#     teacher_renormalised   T alone is: forward KL to T conditioned on A, least where S has no mass outside A (EOPD)
#     generalised    f~(u) = f(u) - f'(1)(u - 1) on A: zero with zero gradient at S = T, still an estimate
#     none           the bare sum. Not a divergence; included to reproduce published results
#
# With whole rows of log-probs, the tail is the log-sum-exp of the ids outside A, which is exact however small it is. One
# minus the sum over A is not exact: the sum is near 1, and each log-prob in it is a logit minus a normaliser, rounded like
# numbers up to 64: to 4e-6 in fp32. If a server sends only A, there is no other way; `TopRows.vague` marks the rows with a
# smaller, hence unknown, tail.


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
    with_sampled: bool = False

    def choose(
        self, log_s: Tensor, log_t: Tensor, ids: Tensor | None, merge: MergeGroups, tokens: Tensor | None = None
    ) -> Tensor:
        """(N, K) ids of the support, -1 if a row has fewer: top-k of one side or both, or the given ids as a set."""
        if self.support == "ids":
            assert ids is not None
            return unique_ids(canonical_ids(ids, merge))
        k = min(self.k or log_s.shape[-1], log_s.shape[-1])
        sides = {"teacher": (log_t,), "student": (log_s,), "union": (log_t, log_s)}[self.side]
        chosen = torch.cat([largest(side, k)[1] for side in sides], dim=-1)
        return self.joined(chosen, tokens, merge)

    def joined(self, chosen: Tensor, tokens: Tensor | None, merge: MergeGroups) -> Tensor:
        """The ids of one side or both as a set, with the sampled token if it belongs to the support."""
        if self.with_sampled:
            assert tokens is not None
            chosen = torch.cat([chosen, canonical_ids(tokens, merge)[:, None]], -1)
        return unique_ids(chosen) if self.side == "union" or self.with_sampled else chosen


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
    remaining = torch.arange(blocks * TOP_BLOCK, size, device=values.device).expand(rows, -1)
    columns = torch.cat([(chosen[:, :, None] * TOP_BLOCK + inside).flatten(1), remaining], -1)
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
    if closure == "teacher_renormalised":
        return formula(student, teacher - teacher.logsumexp(-1, keepdim=True))
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


# --- One block of rows: from raw logits to statistics and, in place, the gradient of the weighted loss ---
#
# Plain torch on (n, V) arrays that fit in a cache; `chunked` calls it block by block. `reference_rows` is the same
# computation written for autograd, and serves as the definition.


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Detached values of each row from one pass, after temperature and merging.

    None: not requested, or no teacher.
    """

    index: Tensor  # (n,) which rows of the call these are
    entropy: Tensor  # (n,) of the student
    value: Tensor | None = None  # (n,) the divergence
    teacher_entropy: Tensor | None = None
    reverse_kl: Tensor | None = None  # KL(student || teacher), for every kind of divergence
    logprob: Tensor | None = None  # of `tokens` under the student
    teacher_logprob: Tensor | None = None
    overlap: Tensor | None = None  # share of ids common to the two top-`overlap` sets
    stop: Tensor | None = None  # mass of the first merged group, student
    teacher_stop: Tensor | None = None
    vague_tail: Tensor | None = None  # bool, for a `TopK` teacher: the mass outside is too small to be known

    @classmethod
    def join(cls, parts: Sequence[RowStatistics]) -> RowStatistics:
        """Concatenate blocks of rows."""
        names = [field.name for field in fields(cls) if getattr(parts[0], field.name) is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


Weight = Tensor | Callable[[RowStatistics], Tensor] | None


FULL = Truncation()


@dataclass(frozen=True, eq=False)
class Job:
    """The computation for every row; all backends use the same object."""

    formula: Formula | None  # None: statistics only
    size: int
    merge: MergeGroups = ()  # existing ids, each in one group and once; no group is empty
    temperature: float = 1.0
    truncation: Truncation = FULL
    weight: Weight = None  # (N,), or a function of the rows' statistics
    tokens: Tensor | None = None  # (N,) sampled ids, for their log-probs
    ids: Tensor | None = None  # (N, K) the support, if it is given
    overlap: int | None = None

    def rows(self, index: Tensor | slice) -> Job:
        weight = self.weight[index] if isinstance(self.weight, Tensor) else self.weight
        tokens = None if self.tokens is None else self.tokens[index]
        return replace(self, weight=weight, tokens=tokens, ids=None if self.ids is None else self.ids[index])

    def row_weight(self, statistics: RowStatistics) -> Tensor:
        """(n,) weights. They are applied in the forward pass, because the head's gradient is summed over rows right after."""
        like = statistics.entropy
        if self.weight is None:
            return torch.ones_like(like)
        weight = self.weight if isinstance(self.weight, Tensor) else self.weight(statistics)
        return weight.detach().to(like)

    def observe(
        self, index: Tensor, log_s: Tensor, log_t: Tensor | None, value: Tensor | None, s: Tensor, t: Tensor | None
    ) -> RowStatistics:
        """Statistics of whole rows of log-probs; `s` and `t` are the probabilities, computed once by the caller."""
        tokens = None if self.tokens is None else canonical_ids(self.tokens, self.merge)[:, None]
        logprob = None if tokens is None else log_s.gather(-1, tokens).squeeze(-1)
        stop = log_s[:, self.merge[0][0]].exp() if self.merge else None
        entropy = -row_dot(s, log_s)
        if log_t is None or t is None:
            return RowStatistics(index, entropy, value, logprob=logprob, stop=stop)
        whole = self.formula == Formula("reverse_kl") and self.truncation.support == "full"
        return RowStatistics(
            index,
            entropy,
            value,
            -row_dot(t, log_t),
            value if whole else -entropy - row_dot(s, log_t),
            logprob,
            None if tokens is None else log_t.gather(-1, tokens).squeeze(-1),
            top_overlap(log_s, log_t, self.overlap) if self.overlap else None,
            stop,
            log_t[:, self.merge[0][0]].exp() if self.merge else None,
        )


def row_dot(left: Tensor, right: Tensor) -> Tensor:
    """(n,) sums of products.

    A GPU does not store the products. A CPU does: its arrays are small, and avoiding it takes several times as long.
    """
    return (left * right).sum(-1) if left.device.type == "cpu" else torch.einsum("nv,nv->n", left, right)


def top_overlap(student: Tensor, teacher: Tensor, k: int) -> Tensor:
    """(n,) |top-k of S and top-k of T| / k."""
    k = min(k, student.shape[-1])
    both = torch.cat([largest(student, k)[1], largest(teacher, k)[1]], -1).sort(-1).values
    return (both[:, 1:] == both[:, :-1]).sum(-1).to(student.dtype) / k


def reference_rows(
    job: Job, student: Projection, teacher: Source | TopRows, index: Tensor
) -> tuple[Tensor, RowStatistics]:
    """The weighted sum and the statistics, differentiable by autograd; holds all logits."""
    assert job.formula is not None
    log_s = log_probs(student, job.size, job.merge, job.temperature)
    with torch.no_grad():
        log_t = (
            None if isinstance(teacher, TopRows) else source_log_probs(teacher, job.size, job.merge, job.temperature)
        )
        ids = support_ids(job, log_s.detach(), log_t, teacher)
    closure = job.truncation.closure
    part_s = log_s if ids is None else on_support(log_s, ids, closure)
    value = _value(job, part_s, log_t, None, ids, teacher)
    with torch.no_grad():
        s, t = log_s.detach().exp(), None if log_t is None else log_t.exp()
        statistics = _observe(job, index, log_s.detach(), log_t, s, t, value.detach(), ids, part_s.detach(), teacher)
        weight = job.row_weight(statistics)
    return (value * weight).sum(), statistics


def support_ids(job: Job, log_s: Tensor, log_t: Tensor | None, teacher: Source | TopRows) -> Tensor | None:
    """(n, K) ids of the support; None for the full vocabulary."""
    if isinstance(teacher, TopRows):
        return teacher.ids
    if job.truncation.support == "full":
        return None
    assert log_t is not None
    return job.truncation.choose(log_s, log_t, job.ids, job.merge, job.tokens)


def _value(
    job: Job, student: Tensor, log_t: Tensor | None, t: Tensor | None, ids: Tensor | None, teacher: Source | TopRows
) -> Tensor:
    """(n,) from the student's log-probs `on_support` (all of them if `ids` is None)."""
    assert job.formula is not None
    closure = job.truncation.closure
    if isinstance(teacher, TopRows):
        seen = teacher.seen(student) if closure == "tail" else student
        return closed(job.formula, closure, seen, teacher.on_support(closure))
    assert log_t is not None
    if ids is None:
        return job.formula(student, log_t)
    return closed(job.formula, closure, student, on_support(log_t, ids, closure, t))


def _observe(
    job: Job,
    index: Tensor,
    log_s: Tensor,
    log_t: Tensor | None,
    s: Tensor,
    t: Tensor | None,
    value: Tensor,
    ids: Tensor | None,
    part_s: Tensor,
    teacher: Source | TopRows,
) -> RowStatistics:
    """`part_s`: the student's log-probs `on_support`."""
    statistics = job.observe(index, log_s, log_t, value, s, t)
    if not isinstance(teacher, TopRows) or ids is None:
        return statistics
    # A top-k teacher is known only as events and a tail, so entropy and reverse KL are over these events.
    coarse_s = part_s if job.truncation.closure == "tail" else on_support(log_s, ids, "tail")
    coarse_t = teacher.on_support("tail")
    yardstick = closed(Formula("reverse_kl"), "tail", teacher.seen(coarse_s), coarse_t)
    return replace(statistics, teacher_entropy=entropy(coarse_t), reverse_kl=yardstick, vague_tail=teacher.vague)


@dataclass(frozen=True, eq=False)
class Events:
    """Merged groups of one block: their ids, and each member's share of its event."""

    member: Tensor  # (M,) ids
    event: Tensor  # (M,) the id that holds the event
    share: Tensor  # (n, M)
    logit: Tensor  # (n, M) the members' own logits, before merging

    @classmethod
    def merge_(cls, logits: Tensor, merge: MergeGroups) -> Events | None:
        """Merge in place; None if there is nothing to merge."""
        groups = [[index for index in dict.fromkeys(group) if index < logits.shape[-1]] for group in merge]
        groups = [group for group in groups if len(group) > 1]
        if not groups:
            return None
        device = logits.device
        member, event = (
            upload(np.array(numbers, dtype=np.int64), device)
            for numbers in (
                [index for group in groups for index in group],
                [group[0] for group in groups for _ in group],
            )
        )
        member_logits, shares = logits[:, member], []
        logits[:, member] = LOG_ZERO
        for group, end in zip(groups, itertools.accumulate(map(len, groups)), strict=True):
            of_group = member_logits[:, end - len(group) : end].contiguous()  # the same summation order at any position
            logits[:, group[0]] = of_group.logsumexp(-1)
            shares.append(of_group.softmax(-1))
        return cls(member, event, torch.cat(shares, -1), member_logits)


def transform_(raw: Tensor, projection: Projection, temperature: float) -> Tensor:
    """Turn raw products of the head into logits at this temperature, in place."""
    if projection.bias is not None:
        raw.add_(projection.bias[: raw.shape[-1]])
    if projection.softcap is None:
        return raw.mul_(projection.scale / temperature) if projection.scale != temperature else raw
    return raw.mul_(projection.scale / projection.softcap).tanh_().mul_(projection.softcap / temperature)


def untransform_(grad: Tensor, logits: Tensor, projection: Projection, temperature: float) -> Tensor:
    """Chain rule back through `transform_`, in place; `logits` are its output."""
    if projection.softcap is not None:
        grad.mul_(1 - (logits * (temperature / projection.softcap)).square_())
    return grad.mul_(projection.scale / temperature) if projection.scale != temperature else grad


def gradient_rows(
    job: Job,
    student: Projection,
    raw: Tensor,
    log_t: Tensor | None,
    t: Tensor | None,
    teacher: Source | TopRows,
    index: Tensor,
    grads: bool,
) -> tuple[Tensor, RowStatistics]:
    """Weighted sum and statistics of a block; `raw` (n, V), the head's products, is overwritten by their gradient."""
    assert job.formula is not None
    log_s, s, normaliser, events = log_softmax_(raw, student, job)
    if job.truncation.support == "full":
        assert log_t is not None
        assert t is not None
        phi, slope = job.formula.terms(log_s, log_t, s, t)
        value, factor = job.formula.outer(phi.sum(-1))
        mean = value if phi is slope else slope.sum(-1)
        statistics = job.observe(index, log_s, log_t, value, s, t)
        weight = job.row_weight(statistics)
        loss, grad = (value * weight).sum(), slope.addcmul_(s, -mean[:, None]).mul_((factor * weight)[:, None])
    else:
        loss, statistics, grad = _sparse_gradient(job, log_s, log_t, s, t, teacher, index)
    if not grads:
        return loss, statistics
    at_members = None if events is None else grad[:, events.event] * events.share
    untransform_(grad, log_s if student.softcap is None else log_s.add_(normaliser), student, job.temperature)
    if events is not None and at_members is not None:
        grad[:, events.member] = untransform_(at_members, events.logit, student, job.temperature)
    raw.copy_(grad)
    return loss, statistics


def _sparse_gradient(
    job: Job,
    log_s: Tensor,
    log_t: Tensor | None,
    s: Tensor,
    t: Tensor | None,
    teacher: Source | TopRows,
    index: Tensor,
) -> tuple[Tensor, RowStatistics, Tensor]:
    """Autograd on the chosen log-probs and the tail, then the softmax's derivative by hand."""
    ids = support_ids(job, log_s, log_t, teacher)
    assert ids is not None
    tailed = job.truncation.closure == "tail"
    chosen, spread = gather(log_s, ids), s
    if tailed:
        spread, tail = spread_outside(log_s, s, ids)
        chosen = torch.cat([chosen, tail], -1)
    chosen.requires_grad_()
    with torch.enable_grad():
        value = _value(job, chosen, log_t, t, ids, teacher)
    statistics = _observe(job, index, log_s, log_t, s, t, value.detach(), ids, chosen.detach(), teacher)
    with torch.enable_grad():
        loss = (value * job.row_weight(statistics)).sum()
    (slope,) = torch.autograd.grad(loss, chosen)
    k = ids.shape[-1]
    inside = slope[:, :k].masked_fill(ids < 0, 0)
    if not tailed:
        grad = spread.mul_(-inside.sum(-1, keepdim=True))
        return loss.detach(), statistics, grad.scatter_add_(-1, ids.clamp(min=0), inside)
    slope, probs = torch.cat([inside, slope[:, k:]], -1), chosen.detach().exp()
    logit_grad = slope - probs * slope.sum(-1, keepdim=True)  # of the chosen ids, and of all others together
    grad = spread.mul_(logit_grad[:, k:])
    return loss.detach(), statistics, grad.scatter_add_(-1, ids.clamp(min=0), logit_grad[:, :k])
