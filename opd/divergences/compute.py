"""Exact divergences between `Projection`s, and other statistics from the same pass over the logits.

`reference` holds all logits and uses autograd. `chunked` (torch, any device) and `triton` (CUDA) compute the gradient
in the forward pass and hold at most a chunk of logits. Names give the direction:
`reverse_kl = KL(student || teacher)`.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opd.common.errors import UserError
from opd.divergences.kinds import KINDS, Closure, Formula, Side
from opd.divergences.projection import (
    Logits,
    MergeGroups,
    Mixture,
    Projection,
    Source,
    as_projection,
    canonical_ids,
    log_probs,
    source_log_probs,
    without_autocast,
)
from opd.divergences.torch_backend import (
    ChunkedLogprobs,
    GradientInForward,
    Job,
    RowStatistics,
    Scale,
    Support,
    TopRows,
    Truncation,
    Weight,
    chunked_divergence,
    chunked_statistics,
    closed,
    gather,
    largest,
    likeliest_rows,
    reference_rows,
    slices,
)
from opd.records import TopK

CHUNK_BYTES = 24 << 20  # of one (chunk, V) fp32 array of the torch backend; several exist at once


@dataclass(frozen=True, eq=False, repr=False)
class Divergence:
    loss: Tensor  # scalar: sum_n weight_n * D_n, differentiable w.r.t. the student's hidden, weight and bias
    value: Tensor  # (N,) D_n, detached, like all following fields
    entropy: Tensor  # (N,) of the student
    teacher_entropy: Tensor  # (N,); of the known events and the tail, if the teacher is a TopK
    reverse_kl: Tensor  # (N,) KL(student || teacher), computed for every kind, so that runs can be compared
    statistics: RowStatistics  # the values above, and additional statistics that were requested
    plan: KernelPlan  # which backend ran, and why

    def __repr__(self) -> str:
        mean = float(self.value.mean()) if len(self.value) else 0.0
        return f"Divergence(loss={float(self.loss.detach()):.6g}, {len(self.value)} rows, mean value {mean:.6g}, {self.plan.backend})"


@without_autocast
def divergence(
    kind: str | Formula,
    student: Projection | Tensor,
    teacher: Source | TopK | Tensor,
    *,
    support: Support = "full",
    k: int | None = None,
    side: Side = "teacher",
    closure: Closure = "tail",
    with_sampled: bool = False,
    ids: Tensor | None = None,
    weight: Tensor | Callable[[RowStatistics], Tensor] | None = None,
    temperature: float = 1.0,
    merge: MergeGroups = (),
    tokens: Tensor | None = None,
    overlap: int | None = None,
    backend: Backend = "auto",
    memory: int | None = None,
    trusted: bool = False,
    **params: float,
) -> Divergence:
    """Sum over rows of `weight_n * D_n` and the per-row values. `params`: `beta` for jsd, `alpha` for skew_* and alpha.

    `kind`: a name, or a `Formula` with its parameter. Logits (N, V) can replace a `Projection`; they use `reference`.

    `support`: full | topk (`k` ids of `side`: teacher, student, union) | ids ((N, K) given ids, a set per row, -1 for
    none). `with_sampled`: the ids of `tokens` belong to a topk support. `closure`: how to treat the remaining ids. `weight`: (N,), 0 to ignore a row, or a function of RowStatistics
    called per chunk. Weights must be given here, because the head's gradient is summed over rows inside. `merge`:
    groups of ids that are one event on both sides. `tokens` (N,) and `overlap` (a k) add statistics. `memory`: bytes
    the call may use beyond its inputs. Ids at or above the smaller vocabulary size do not exist on either side.
    `trusted`: ids and tokens are known to exist, so the call does not wait for a GPU to check them; a bad id then ends
    the process.
    """
    formula = kind if isinstance(kind, Formula) else Formula.of(kind, params)
    truncation = Truncation(support, k, side, closure, with_sampled)
    student = as_projection("student", student)
    if not isinstance(teacher, (Mixture, TopK)):
        teacher = as_projection("teacher", teacher)
    heads, size = _heads(student, teacher)
    _check(
        student,
        len(teacher.ids) if isinstance(teacher, TopK) else teacher.count,
        truncation,
        weight,
        ids,
        tokens,
        size,
        trusted,
    )
    merge = _within(merge, size)
    if isinstance(teacher, Mixture):
        _require_fit(teacher, formula, truncation)
        weight = _weighed(weight, teacher)
    job = Job(formula, size, merge, temperature, truncation, weight, tokens, ids, overlap)
    rows = _top_rows(job, student, teacher) if isinstance(teacher, TopK) else teacher.detach()
    plan = kernel_plan(job, heads, rows, backend, memory, CHUNK_BYTES)
    loss, found = _execute(plan, job, student, rows)
    assert found.value is not None and found.teacher_entropy is not None and found.reverse_kl is not None  # noqa: PT018
    return Divergence(loss, found.value, found.entropy, found.teacher_entropy, found.reverse_kl, found, plan)


def _execute(
    plan: KernelPlan, job: Job, student: Projection, teacher: Source | TopRows
) -> tuple[Tensor, RowStatistics]:
    """The loss and the statistics, by the plan's backend."""
    if not student.count:
        return _empty(student)
    if plan.backend == "reference":
        return reference_rows(job, student, teacher, torch.arange(student.count, device=student.hidden.device))
    sink: list[RowStatistics] = []
    detached = student.detach()
    scale: Scale = Tensor.mul_
    if plan.backend == "chunked" or isinstance(teacher, TopRows):
        compute = partial(chunked_divergence, job, detached, teacher, plan.chunk, sink)
    else:
        from opd.divergences.triton_backend import sparse_divergence, triton_divergence, triton_scale_

        by_tiles = triton_divergence if job.truncation.support == "full" else sparse_divergence
        compute, scale = partial(by_tiles, job, detached, teacher, plan, sink), triton_scale_
    loss = GradientInForward.apply(student.hidden, student.weight, student.bias, compute, scale)
    return loss, RowStatistics.join(sink)


def _heads(student: Projection, teacher: Source | TopK | None) -> tuple[list[Projection], int]:
    """The heads that are compared, the student's first, and the size of the smallest vocabulary; warns if the sizes differ.

    Ids at or above that size do not exist on either side.
    """
    others = teacher.parts if isinstance(teacher, Mixture) else [teacher] if isinstance(teacher, Projection) else []
    heads = [student, *others]
    sizes = [head.vocabulary for head in heads]
    if len(set(sizes)) > 1:
        warnings.warn(
            f"heads of different sizes: the student has {sizes[0]} ids, the teacher {', '.join(map(str, sizes[1:]))}. Ids from "
            f"{min(sizes)} on are left out on both sides. Give every Projection size={min(sizes)} if that is meant; if the "
            "tokenizers differ, ids cannot be compared.",
            stacklevel=4,
        )
    return heads, min(sizes)


def _within(merge: MergeGroups, size: int) -> MergeGroups:
    """Merge groups restricted to existing ids. An id can be in only one group."""
    groups = [[index for index in dict.fromkeys(group) if index < size] for group in merge]
    counts = Counter(chain.from_iterable(groups))
    if twice := sorted(index for index, count in counts.items() if count > 1):
        raise ValueError(f"ids {twice} are in more than one of the groups to merge: give every id to one group")
    return [group for group in groups if group]


def _require_fit(mixture: Mixture, formula: Formula, truncation: Truncation) -> None:
    """Check that a 'sum' mixture is used only for full reverse KL: only then is it a divergence to a single teacher."""
    if mixture.kind == "sum" and (formula != Formula("reverse_kl") or truncation.support != "full"):
        raise ValueError(
            f"a mixture of kind 'sum' is a sum of reverse KLs over the full vocabulary, and was given {formula.kind!r} over "
            f"support {truncation.support!r}; use 'geometric' or 'arithmetic'"
        )


def _weighed(weight: Weight, mixture: Mixture) -> Weight:
    """Row weights times the mixture's row factor."""
    factor = mixture.row_factor
    if factor is None:
        return weight
    if isinstance(weight, Tensor):
        return weight * factor

    def of_rows(found: RowStatistics) -> Tensor:
        own = factor[found.index].to(found.entropy) if isinstance(factor, Tensor) else factor
        return own * (torch.ones_like(found.entropy) if weight is None else weight(found))

    return of_rows


def _empty(student: Projection) -> tuple[Tensor, RowStatistics]:
    """Result for no rows: a loss of 0 with a graph, so that backward gives zero gradients."""
    tensors = [tensor for tensor in (student.hidden, student.weight, student.bias) if tensor is not None]
    loss = torch.stack([tensor.sum() * 0 for tensor in tensors]).sum().to(student.wide)
    none = student.hidden.new_zeros(0, dtype=loss.dtype)
    index = torch.zeros(0, dtype=torch.long, device=student.hidden.device)
    return loss, RowStatistics(index, none, none, none, none)


def _top_rows(job: Job, student: Projection, teacher: TopK) -> TopRows:
    truncation, temperature = job.truncation, job.temperature
    if truncation.support != "topk" or truncation.side != "teacher":
        raise ValueError(
            f"a TopK teacher knows its own top ids alone: support {truncation.support!r}, side {truncation.side!r} "
            "need a Projection; use support='topk', side='teacher'"
        )
    if truncation.with_sampled:
        raise ValueError(
            "with_sampled needs the teacher's probability of any token: a TopK teacher has its own ids alone"
        )
    if temperature != 1.0 and truncation.closure not in ("renormalised", "teacher_renormalised"):
        raise ValueError(
            f"temperature {temperature} with a TopK teacher: the mass outside is known at temperature 1 only; "
            "use closure='renormalised'"
        )
    return TopRows.of(teacher, student.hidden.device, student.wide, job.merge, job.size, truncation.k, temperature)


def _check(
    student: Projection,
    count: int,
    truncation: Truncation,
    weight: object,
    ids: Tensor | None,
    tokens: Tensor | None,
    size: int,
    trusted: bool,
) -> None:
    for name, value, known in (
        ("support", truncation.support, Support),
        ("side", truncation.side, Side),
        ("closure", truncation.closure, Closure),
    ):
        if value not in get_args(known):
            raise ValueError(f"unknown {name} {value!r}; known: {', '.join(get_args(known))}")
    if truncation.k is not None and truncation.k < 1:
        raise ValueError(f"k {truncation.k} must be at least 1")
    if truncation.with_sampled and (truncation.support != "topk" or tokens is None):
        raise ValueError("with_sampled adds `tokens` to support='topk': give both")
    if student.count != count:
        raise ValueError(f"student has {student.count} tokens, but teacher has {count}")
    if isinstance(weight, Tensor) and weight.shape != (count,):
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected ({count},)")
    if (ids is not None) != (truncation.support == "ids"):
        raise ValueError(
            f"support {truncation.support!r}, ids {'given' if ids is not None else 'missing'}: they go together"
        )
    for name, given, lowest in (("ids: ", ids, -1), ("tokens: ", tokens, 0)):
        if given is not None:
            _require_known(given, size, trusted, name, lowest)
    if truncation.support == "topk" and truncation.k is None and truncation.side != "teacher":
        raise ValueError(f"support 'topk' of side {truncation.side!r} needs k")


def _require_known(ids: Tensor, size: int, trusted: bool, name: str = "", lowest: int = 0) -> None:
    """Check that all ids exist.

    On a GPU this check waits for all queued work. Trusted ids are therefore checked on the device by an assertion.
    """
    known = (ids >= lowest) & (ids < size)
    if trusted and ids.is_cuda:
        torch._assert_async(known.all(), f"{name}an id is outside the vocabulary of {size} ids")
    elif not known.all():
        raise ValueError(f"{name}id {int(ids[~known][0])} is outside the vocabulary of {size} ids")


@without_autocast
def token_logprobs(
    projection: Projection | Tensor,
    ids: Tensor,
    *,
    merge: MergeGroups = (),
    temperature: float = 1.0,
    trusted: bool = False,
) -> Tensor:
    """(N,) log-prob of each given id, differentiable; logits are recomputed chunk by chunk in the backward pass.

    `trusted`: see `divergence`. Logits (N, V) can replace a `Projection`.
    """
    projection = as_projection("projection", projection)
    size = projection.vocabulary
    _require_known(ids, size, trusted)
    merge = _within(merge, size)
    if isinstance(projection, Logits):
        logprobs = log_probs(projection, size, merge, temperature)
        return logprobs.gather(-1, canonical_ids(ids, merge)[:, None]).squeeze(-1)
    job = Job(None, size, merge, temperature, tokens=ids)
    plan = values_plan(job, [projection], None, CHUNK_BYTES)
    tensors = projection.hidden, projection.weight, projection.bias
    if plan.backend == "triton" and projection.count:
        from opd.divergences.triton_backend import TritonLogprobs

        return TritonLogprobs.apply(*tensors, projection, job, plan)
    return ChunkedLogprobs.apply(*tensors, projection, ids, merge, temperature, plan.chunk)


@without_autocast
def statistics(
    student: Projection,
    teacher: Source | None = None,
    *,
    kind: str = "reverse_kl",
    temperature: float = 1.0,
    merge: MergeGroups = (),
    tokens: Tensor | None = None,
    overlap: int | None = None,
    trusted: bool = False,
    **params: float,
) -> RowStatistics:
    """Values without gradients, for gates and weights that need the whole batch first.

    Without a teacher, only the student's statistics. `trusted`: see `divergence`.
    """
    for name, given in (("student", student), ("teacher", teacher)):
        if isinstance(given, (Logits, Tensor)):
            raise UserError(f"{name}: statistics takes Projections. Of logits, divergence(…).statistics has the same.")
    formula = None if teacher is None else Formula.of(kind, params)
    heads, size = _heads(student, teacher)
    job = Job(formula, size, _within(merge, size), temperature, tokens=tokens, overlap=overlap)
    count = student.count if teacher is None else teacher.count
    _check(student, count, job.truncation, None, None, tokens, job.size, trusted)
    plan = values_plan(job, heads, teacher, CHUNK_BYTES)
    if not student.count:
        return _empty(student)[1]
    source = None if teacher is None else teacher.detach()
    if plan.backend == "triton":
        from opd.divergences.triton_backend import triton_statistics

        return triton_statistics(job, student.detach(), source, plan)
    return RowStatistics.join(list(chunked_statistics(job, student.detach(), source, plan.chunk)))


@without_autocast
@torch.no_grad()
def likeliest_ids(projection: Projection, k: int, apart: Sequence[int] = ()) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(N, K) ids and log-probs, most likely first: all of `apart` and the k likeliest others; and two (N,) log masses.

    The log masses are of all other ids, and of `apart`. When all members of a group are known, it can be merged at any
    temperature.
    """
    job = Job(None, projection.vocabulary)
    apart = [index for index in dict.fromkeys(apart) if index < job.size]
    chunk = values_plan(job, [projection], None, CHUNK_BYTES).chunk
    parts = [likeliest_rows(job, projection.rows(rows), k, apart) for rows in slices(max(projection.count, 1), chunk)]
    ids, logprobs, tail, group = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, logprobs, tail, group


# --- Losses of a few given ids per row, such as candidates with a clip of each, computed in blocks of rows ---


GATHERED_BYTES = 64 << 20  # of one (block, V) array; several exist at once
GatheredLosses = Callable[[Tensor, Tensor, slice], Tensor]  # (n, K) log-probs of both sides, and which rows -> (n,)


@without_autocast
@torch.no_grad()
def likeliest_events(projection: Projection, k: int, merge: MergeGroups = ()) -> tuple[Tensor, Tensor]:
    """(N, K) ids and log-probs of the k likeliest events, most likely first."""
    size, merge = projection.vocabulary, _within(merge, projection.vocabulary)
    parts = [
        largest(log_probs(projection.rows(rows), size, merge), min(k, size))
        for rows in slices(max(projection.count, 1), _gathered_rows(size))
    ]
    logprobs, ids = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, logprobs


@without_autocast
@torch.no_grad()
def drawn_events(projection: Projection, uniforms: Tensor, merge: MergeGroups = ()) -> Tensor:
    """(N,) an event drawn from each row, by a number from [0, 1) each."""
    size, merge = projection.vocabulary, _within(merge, projection.vocabulary)
    parts = []
    for rows in slices(max(projection.count, 1), _gathered_rows(size)):
        sums = log_probs(projection.rows(rows), size, merge).exp().cumsum(-1)
        parts.append(torch.searchsorted(sums, (uniforms[rows, None] * sums[:, -1:]).to(sums), right=True).squeeze(-1))
    return torch.cat(parts).clamp(max=size - 1)


@without_autocast
def gathered_loss(
    student: Projection, teacher: Source, ids: Tensor, weight: Tensor, losses: GatheredLosses, merge: MergeGroups = ()
) -> Tensor:
    """Sum over rows of weight times `losses` of the log-probs at `ids` (N, K), with gradients of the student's.

    The backward pass recomputes log-probs, a block of rows at a time. It runs in torch on every device. Ids at or above the
    smaller vocabulary size have log 0 on both sides.
    """
    _, size = _heads(student, teacher)
    merge = _within(merge, size)
    ids = canonical_ids(ids, merge)
    ids = ids.masked_fill(ids >= size, -1)
    total = student.hidden.new_zeros((), dtype=student.wide)
    for part in slices(student.count, _gathered_rows(size)):

        def of_rows(hidden: Tensor, part: slice = part) -> Tensor:
            mine = Projection(hidden, student.weight, student.bias, student.scale, student.softcap, student.size)
            log_s = gather(log_probs(mine, size, merge), ids[part])
            with torch.no_grad():
                log_t = gather(source_log_probs(teacher.rows(part), size, merge), ids[part])
            return losses(log_s, log_t, part)

        found = checkpoint(of_rows, student.hidden[part], use_reentrant=False)
        total = total + (found * weight[part].to(found)).sum()
    return total


def _gathered_rows(size: int) -> int:
    return max(1, GATHERED_BYTES // (4 * size))


# --- Distances between distributions over different vocabularies (ULD, GOLD), computed in blocks of rows ---
#
# Axis legend: M = events (spans that both tokenizers cut out), V = ids of one side.


CROSSED_BYTES = 64 << 20  # of one (block, V) array; several exist at once


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
def cross_vocabulary_loss(
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
    block = max(1, CROSSED_BYTES // (4 * wide))
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


# --- Choosing a backend and its chunk sizes ---
#
# `KernelPlan` records the reason for the choice.


Backend = Literal["auto", "reference", "chunked", "triton"]
FAST_TILE_BYTES = 1792 << 20  # both fp32 tiles of `fast` when no budget is given
VALUES_TILE_BYTES = 512 << 20  # one fp32 tile of a pass that needs no gradient of a divergence
FEWEST_FAST_ROWS = 256  # with fewer rows, reading and writing the head's gradient costs too much
SMALL_ROWS, SMALL_SLAB = 8192, 8192  # tile of `small`: as efficient as larger ones, half a GiB
FEWEST_SMALL = 256  # rows and columns of the smallest tile worth launching
ALIGNMENT = 64  # columns; keeps rows of a tile aligned for the tensor cores in any type


@dataclass(frozen=True)
class KernelPlan:
    """A backend and the reason for it. `chunk`: tokens at a time; `slab`: vocabulary ids at a time (0: all)."""

    backend: str
    reason: str
    chunk: int = 1
    slab: int = 0

    @property
    def mode(self) -> str:
        """`fast` keeps whole rows of a chunk of tokens; `small` keeps tiles and recomputes them."""
        return "small" if self.slab else "fast"


def chunk_tokens(count: int, width: int, bytes_: int) -> int:
    """Number of tokens such that a (tokens, width) fp32 array fits into the bytes."""
    return max(1, min(count, bytes_ // (4 * max(width, 1))))


def aligned(width: int) -> int:
    return -(-width // ALIGNMENT) * ALIGNMENT


def kernel_plan(
    job: Job,
    heads: Sequence[Projection],
    teacher: Source | TopRows,
    backend: Backend,
    memory: int | None,
    chunk_bytes: int,
) -> KernelPlan:
    student = heads[0]
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(get_args(Backend))}")
    if any(isinstance(head, Logits) for head in heads):
        if backend not in ("auto", "reference"):
            raise ValueError(f"backend {backend!r} computes logits itself and was given some; use backend='auto'")
        return KernelPlan("reference", "logits were given", student.count)
    if backend == "reference":
        return KernelPlan("reference", "asked for", student.count)
    obstacle = next(triton_obstacles(job, heads, teacher), "")
    if backend == "triton" and obstacle:
        raise ValueError(f"backend triton: {obstacle}; use backend='chunked' or 'auto'")
    if backend != "chunked" and not obstacle:
        plan = triton_plan(student, job.size, memory)
        if plan.mode == "fast" or job.truncation.support == "full":
            return plan
        obstacle = "a support needs whole rows, and they do not fit"
    if student.hidden.is_cuda:  # a GPU needs more rows at once than fit a CPU's cache
        chunk_bytes *= 8
    if memory is not None:  # raw logits of both sides and the temporaries of a block
        chunk_bytes = min(chunk_bytes, max(memory // 8, 1))
    return KernelPlan("chunked", obstacle or "asked for", chunk_tokens(student.count, job.size, chunk_bytes))


def triton_obstacles(job: Job, heads: Sequence[Projection], teacher: Source | TopRows | None = None) -> Iterator[str]:
    """Why the CUDA backend cannot run this, if it cannot. Without a teacher: statistics of the student alone."""
    support, k = job.truncation.support, job.truncation.k
    if isinstance(teacher, TopRows):
        yield "a teacher of likeliest ids alone runs in torch"
    if job.overlap and teacher is not None:
        yield "top-k overlap needs whole sorted rows, which run in torch"
    if job.formula is not None and job.formula.kind not in KINDS:
        yield f"divergence {job.formula.kind!r} has no kernel"
    if isinstance(teacher, Mixture) and teacher.kind == "sum":
        yield "a sum of divergences runs in torch"
    if isinstance(teacher, Mixture) and teacher.per_token:
        yield "a mixture with weights per token runs in torch"
    if support != "full" and any(head.bias is not None or head.scale <= 0 for head in heads):
        yield f"support {support!r} of a head with a bias runs in torch"  # raw products would be in another order
    if support == "topk" and (k is None or 2 * k > job.size):
        yield "support 'topk' of most of the vocabulary runs in torch"
    if os.environ.get("TRITON_INTERPRET") != "1" and not all(head.hidden.is_cuda for head in heads):
        yield f"tensors are on {heads[0].hidden.device.type}"
    if any(head.hidden.dtype == torch.float64 for head in heads):
        yield "fp64 tensors"
    if any(head.hidden.dtype != head.weight.dtype for head in heads):
        yield "hidden states and head differ in type"
    if importlib.util.find_spec("triton") is None:
        yield "triton is not installed"


def values_plan(job: Job, heads: Sequence[Projection], teacher: Source | None, chunk_bytes: int) -> KernelPlan:
    """Plan for log-probs and for passes without a divergence's gradient: chunks of half a GiB on a GPU."""
    student, obstacle = heads[0], next(triton_obstacles(job, heads, teacher), "")
    if student.hidden.is_cuda:
        chunk_bytes = VALUES_TILE_BYTES // (4 if obstacle else 1)
    chunk = chunk_tokens(student.count, job.size, chunk_bytes)
    return KernelPlan("chunked", obstacle, chunk) if obstacle else KernelPlan("triton", "CUDA tensors", _rounded(chunk))


def triton_plan(student: Projection, size: int, memory: int | None) -> KernelPlan:
    """`fast` if its tiles fit the budget next to the gradients, else `small`."""
    count, width = student.count, student.hidden.shape[1]
    row_bytes = 8 * aligned(size)
    if memory is None:
        chunk = _rounded(min(count, max(FAST_TILE_BYTES // row_bytes, 1)))
        return KernelPlan("triton", f"fast: CUDA tensors, no budget given, chunks of {chunk} tokens", chunk)
    head = student.weight.numel() if student.weight.requires_grad else 0
    states = count * width * student.hidden.element_size() + 64 * count
    chunk = min(count, (memory - 4 * head - states) // row_bytes)
    if chunk >= min(count, FEWEST_FAST_ROWS):
        return KernelPlan("triton", f"fast: fits {memory} bytes in chunks of {_rounded(chunk)} tokens", _rounded(chunk))
    return small_plan(student, size, memory)


def small_plan(student: Projection, size: int, memory: int) -> KernelPlan:
    count, width = student.count, student.hidden.shape[1]
    head = student.weight.numel() if student.weight.requires_grad else 0
    gradients = head * student.weight.element_size() + count * (width * (student.hidden.element_size() + 4) + 64)
    left = memory - gradients
    rows, slab = _tile(min(count, SMALL_ROWS), size, width if head else 0, left)
    if not rows:
        raise ValueError(
            f"memory {memory} bytes is too little for {count} tokens: the gradients themselves need {gradients} bytes; "
            f"raise memory by at least {8 * FEWEST_SMALL**2 - left} bytes, or pass fewer tokens"
        )
    return KernelPlan("triton", f"small: {memory} bytes hold tiles of {rows} tokens by {slab} ids", rows, slab)


def _tile(rows: int, size: int, width: int, left: int) -> tuple[int, int]:
    """Rows and columns of a tile of `small`, with slabs of equal size; (0, 0) if none fits.

    `width`: of a slab's gradient.
    """
    slab = min(size, SMALL_SLAB)
    while rows and left < slab * (8 * rows + 4 * width):
        if slab > max(FEWEST_SMALL, rows // 4):
            slab //= 2
        elif rows > FEWEST_SMALL:
            rows //= 2
        else:
            return 0, 0
    return rows, min(aligned(-(-size // -(-size // max(slab, 1)))), aligned(size))


def _rounded(chunk: int) -> int:
    """Round down to whole tiles of a matrix product, which have 128 or 192 rows."""
    return chunk // 384 * 384 if chunk > 384 else chunk // 128 * 128 if chunk > 128 else chunk
