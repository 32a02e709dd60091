"""One block of rows: raw logits in, statistics out, and the gradient of the weighted loss left in place of the logits.

Everything here is plain torch on (n, V) arrays small enough to stay in a cache; `chunked` feeds it block by block.
`reference_rows` is the same computation written for autograd: the definition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from opd.divergences.formulas import Formula, entropy
from opd.divergences.mixture import Source, source_log_probs
from opd.divergences.projection import LOG_ZERO, MergeGroups, Projection, canonical_ids, log_probs
from opd.divergences.supports import TopRows, Truncation, closed, gather, largest, on_support, spread_outside
from opd.divergences.upload import upload


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """What one pass knows about each row, detached; after temperature and merging.

    None: not asked for, or no teacher.
    """

    index: Tensor  # (n,) which rows of the call these are
    entropy: Tensor  # (n,) of the student
    value: Tensor | None = None  # (n,) the divergence
    teacher_entropy: Tensor | None = None
    reverse_kl: Tensor | None = None  # KL(student || teacher), whatever divergence was asked for
    logprob: Tensor | None = None  # of `tokens` under the student
    teacher_logprob: Tensor | None = None
    overlap: Tensor | None = None  # share of the two top-`overlap` sets that agrees
    stop: Tensor | None = None  # mass of the first merged group, student
    teacher_stop: Tensor | None = None
    vague_tail: Tensor | None = None  # bool, of a `TopK` teacher: its mass outside is too small to be known

    @classmethod
    def join(cls, parts: Sequence[RowStatistics]) -> RowStatistics:
        """Blocks of rows, one after the other."""
        names = [field.name for field in fields(cls) if getattr(parts[0], field.name) is not None]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


Weight = Tensor | Callable[[RowStatistics], Tensor] | None


FULL = Truncation()


@dataclass(frozen=True, eq=False)
class Job:
    """What is computed at every row; the same object serves every backend."""

    formula: Formula | None  # None: statistics only
    size: int
    merge: MergeGroups = ()  # of ids that exist, each in one group and once; no group is empty
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
        """(n,) weights. They enter here, in the forward pass: the head's gradient is summed over rows right after."""
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
    """(n,) sums of products, without holding the products; on a CPU, whose arrays are small, that takes several times as long."""
    return (left * right).sum(-1) if left.device.type == "cpu" else torch.einsum("nv,nv->n", left, right)


def top_overlap(student: Tensor, teacher: Tensor, k: int) -> Tensor:
    """(n,) |top-k of S and top-k of T| / k."""
    k = min(k, student.shape[-1])
    both = torch.cat([largest(student, k)[1], largest(teacher, k)[1]], -1).sort(-1).values
    return (both[:, 1:] == both[:, :-1]).sum(-1).to(student.dtype) / k


def reference_rows(
    job: Job, student: Projection, teacher: Source | TopRows, index: Tensor
) -> tuple[Tensor, RowStatistics]:
    """The weighted sum and the statistics, differentiable by autograd, with all logits held."""
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
    # A top-k teacher is known only as events and a tail: entropy and yardstick are those of that coarser alphabet.
    coarse_s = part_s if job.truncation.closure == "tail" else on_support(log_s, ids, "tail")
    coarse_t = teacher.on_support("tail")
    yardstick = closed(Formula("reverse_kl"), "tail", teacher.seen(coarse_s), coarse_t)
    return replace(statistics, teacher_entropy=entropy(coarse_t), reverse_kl=yardstick, vague_tail=teacher.vague)


@dataclass(frozen=True, eq=False)
class Events:
    """Merged groups of one block: where they are, and each member's share of its event."""

    member: Tensor  # (M,) ids
    event: Tensor  # (M,) the id its event sits at
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
            of_group = member_logits[
                :, end - len(group) : end
            ].contiguous()  # summed in the same order wherever it lies
            logits[:, group[0]] = of_group.logsumexp(-1)
            shares.append(of_group.softmax(-1))
        return cls(member, event, torch.cat(shares, -1), member_logits)


def transform_(raw: Tensor, projection: Projection, temperature: float) -> Tensor:
    """Raw products of the head to logits at this temperature, in place."""
    if projection.bias is not None:
        raw.add_(projection.bias[: raw.shape[-1]])
    if projection.softcap is None:
        return raw.mul_(projection.scale / temperature) if projection.scale != temperature else raw
    return raw.mul_(projection.scale / projection.softcap).tanh_().mul_(projection.softcap / temperature)


def softmax_(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs over the logits' memory, probabilities, and (n, 1) normalisers, with one exponential for all."""
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
    """Weighted sum and statistics of a block; `raw` (n, V), the head's products, becomes the gradient in them."""
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
    """Autograd on the few chosen log-probs and the tail, then the softmax's own derivative by hand."""
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
