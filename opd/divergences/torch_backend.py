"""The torch backend: gradient in the forward pass, a chunk of tokens at a time, on any device.

A chunk is sized for the matrix products. Within it, blocks of rows are sized for the CPU's cache, because otherwise each
of a divergence's dozen elementwise passes would read main memory. Backward only scales the stored gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.divergences.formulas import Formula, entropy
from opd.divergences.projection import (
    LOG_ZERO,
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
from opd.divergences.supports import TopRows, Truncation, closed, gather, largest, on_support, spread_outside

Compute = Callable[[tuple[bool, ...]], tuple[Tensor, list[Tensor | None]]]
Scale = Callable[[Tensor, Tensor], None]
BLOCK_BYTES = 2 << 20  # of one (block, V) array on a CPU; several exist at once


def slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, max(step, 1)))


def block_rows(array: Tensor) -> int:
    """Rows of one cache-sized block; on a GPU, the whole chunk."""
    if array.device.type != "cpu":
        return max(array.shape[0], 1)
    return max(1, BLOCK_BYTES // max(array.shape[1] * array.element_size(), 1))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def scale_(grad: Tensor, factor: Tensor) -> None:
    grad.mul_(factor)


class GradientInForward(torch.autograd.Function):
    """`compute(needs)` returns the loss and the gradients of hidden states, head and bias; backward only scales them.

    The first backward scales them in place and returns them, so the head's gradient is never copied. A second backward
    through a retained graph recomputes them.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, compute: Compute, scale: Scale = scale_
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
    total = torch.zeros((), dtype=wide_dtype(student.hidden), device=device)
    for rows in slices(student.count, chunk):
        raw = matmul(student.hidden[rows], student.weight[: job.size].T)
        part = teacher.rows(rows)
        part_log_t = part.log_probs(job.size, job.merge, job.temperature) if isinstance(part, Mixture) else None
        raw_t = matmul(part.hidden, part.weight[: job.size].T) if isinstance(part, Projection) else None
        for block in slices(raw.shape[0], block_rows(raw)):
            log_t = None if part_log_t is None else part_log_t[block]
            t = None if log_t is None else log_t.exp()
            if isinstance(part, Projection) and raw_t is not None:
                log_t, t = log_softmax_(raw_t[block], part, job)
            index = torch.arange(rows.start + block.start, rows.start + block.stop, device=device)
            loss, observed = gradient_rows(
                job.rows(index), student, raw[block], log_t, t, part.rows(block), index, any(needs)
            )
            total += loss
            sink.append(observed)
        grads.add(rows, raw, student.hidden[rows])
        del raw, raw_t, part_log_t, log_t, t  # free them before the next chunk
    return total, grads.finish()


def log_softmax_(raw: Tensor, projection: Projection, job: Job) -> tuple[Tensor, Tensor]:
    """Log-probs of a block, written over the head's products, and probabilities."""
    logits = transform_(raw, projection, job.temperature)
    Events.merge_(logits, job.merge)
    return softmax_(logits)[:2]


class HeadGradients:
    """Sums of the gradients of hidden states, head and bias over chunks; the head's is accumulated in fp32."""

    def __init__(self, student: Projection, needs: tuple[bool, ...]) -> None:
        self._student, wide = student, wide_dtype(student.hidden)
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
        normaliser = hidden.new_zeros(hidden.shape[0], dtype=wide_dtype(hidden))
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
        log_s, s = log_softmax_(matmul(student.hidden[rows], student.weight[: job.size].T), student, job)
        log_t, t = None, None
        if isinstance(teacher, Mixture):
            log_t = teacher.rows(rows).log_probs(job.size, job.merge, job.temperature)
            t = log_t.exp()
        elif teacher is not None:
            log_t, t = log_softmax_(matmul(teacher.hidden[rows], teacher.weight[: job.size].T), teacher, job)
        index = torch.arange(rows.start, rows.stop, device=student.hidden.device)
        value = None if log_t is None or job.formula is None else job.formula(log_s, log_t)
        yield job.rows(index).observe(index, log_s, log_t, value, s, t)


def likeliest_rows(job: Job, projection: Projection, k: int, apart: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids and log-probs of `apart` and the k likeliest others, most likely first; log masses of other ids and of `apart`."""
    log_p, _ = log_softmax_(matmul(projection.hidden, projection.weight[: job.size].T), projection, job)
    members = torch.tensor(apart, dtype=torch.long, device=log_p.device)
    own = log_p[:, members]
    values, likely = largest(log_p.index_fill_(-1, members, -torch.inf), min(k, job.size - len(apart)))
    ids = torch.cat([likely, members.expand(log_p.shape[0], -1)], -1)
    tail = log_p.scatter_(-1, likely, -torch.inf).logsumexp(-1).clamp(min=LOG_ZERO)
    logprobs, order = torch.cat([values, own], -1).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), logprobs, tail, own.logsumexp(-1)


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
        def cut(value: Tensor | None) -> Tensor | None:
            return None if value is None else value[index]

        weight = cut(self.weight) if isinstance(self.weight, Tensor) else self.weight
        return replace(self, weight=weight, tokens=cut(self.tokens), ids=cut(self.ids))

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
        first = self.merge[0][0] if self.merge else None

        def at_tokens(logprobs: Tensor | None) -> Tensor | None:
            if self.tokens is None or logprobs is None:
                return None
            return logprobs.gather(-1, canonical_ids(self.tokens, self.merge)[:, None]).squeeze(-1)

        def stop(logprobs: Tensor | None) -> Tensor | None:
            return None if first is None or logprobs is None else logprobs[:, first].exp()

        whole = self.formula == Formula("reverse_kl") and self.truncation.support == "full"
        entropy = -row_dot(s, log_s)
        return RowStatistics(
            index,
            entropy,
            value,
            None if log_t is None or t is None else -row_dot(t, log_t),
            None if log_t is None else value if whole else -entropy - row_dot(s, log_t),
            at_tokens(log_s),
            at_tokens(log_t),
            top_overlap(log_s, log_t, self.overlap) if self.overlap and log_t is not None else None,
            stop(log_s),
            stop(log_t),
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
    return job.truncation.choose(log_s, log_t, job.ids, job.merge)


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


def softmax_(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs (in the logits' memory), probabilities, and (n, 1) normalisers, with a single exponential."""
    top = logits.amax(-1, keepdim=True)
    probs = logits.sub_(top).exp()
    total = probs.sum(-1, keepdim=True)
    rest = total.log()
    return logits.sub_(rest), probs.div_(total), rest.add_(top)


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
    logits = transform_(raw, student, job.temperature)
    events = Events.merge_(logits, job.merge)
    log_s, s, normaliser = softmax_(logits)
    ids = support_ids(job, log_s, log_t, teacher)
    if ids is None:
        assert log_t is not None
        assert t is not None
        loss, statistics, grad = _full_gradient(job, log_s, log_t, s, t, index)
    else:
        loss, statistics, grad = _sparse_gradient(job, log_s, log_t, s, t, ids, teacher, index)
    if not grads:
        return loss, statistics
    at_members = None if events is None else grad[:, events.event] * events.share
    untransform_(grad, log_s if student.softcap is None else log_s.add_(normaliser), student, job.temperature)
    if events is not None and at_members is not None:
        grad[:, events.member] = untransform_(at_members, events.logit, student, job.temperature)
    raw.copy_(grad)
    return loss, statistics


def _full_gradient(
    job: Job, log_s: Tensor, log_t: Tensor, s: Tensor, t: Tensor, index: Tensor
) -> tuple[Tensor, RowStatistics, Tensor]:
    assert job.formula is not None
    phi, slope = job.formula.terms(log_s, log_t, s, t)
    value, factor = job.formula.outer(phi.sum(-1))
    mean = value if phi is slope else slope.sum(-1)
    statistics = job.observe(index, log_s, log_t, value, s, t)
    weight = job.row_weight(statistics)
    grad = slope.addcmul_(s, -mean[:, None]).mul_((factor * weight)[:, None])
    return (value * weight).sum(), statistics, grad


def _sparse_gradient(
    job: Job,
    log_s: Tensor,
    log_t: Tensor | None,
    s: Tensor,
    t: Tensor | None,
    ids: Tensor,
    teacher: Source | TopRows,
    index: Tensor,
) -> tuple[Tensor, RowStatistics, Tensor]:
    """Autograd on the chosen log-probs and the tail, then the softmax's derivative by hand."""
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
        with torch.enable_grad():
            leaf = student.detach().clone().requires_grad_()
            value = self(leaf, teacher)
            (slope,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach()[:, None], slope.clone()  # autograd may return a view of a single number

    def outer(self, total: Tensor) -> tuple[Tensor, Tensor]:
        return total, torch.ones_like(total)
