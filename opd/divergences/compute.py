"""Exact divergences between `Projection`s, and what else one pass over the logits can tell.

`reference` holds the logits and lets autograd differentiate the formula. `chunked` (torch, any device) and `triton`
(CUDA) compute the gradient in the forward pass and never hold more than a chunk of logits. Names say direction:
`reverse_kl = KL(student || teacher)`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from opd.divergences.chunked import (
    ChunkedLogprobs,
    GradientInForward,
    chunked_divergence,
    chunked_statistics,
    likeliest_rows,
    scale_,
    slices,
    wide_dtype,
)
from opd.divergences.formulas import Formula
from opd.divergences.mixture import Mixture, Source
from opd.divergences.plan import Backend, KernelPlan, kernel_plan, values_plan
from opd.divergences.projection import (
    Logits,
    MergeGroups,
    Projection,
    as_projection,
    canonical_ids,
    log_probs,
    without_autocast,
)
from opd.divergences.rows import Job, RowStatistics, Weight, reference_rows
from opd.divergences.supports import Closure, Side, Support, TopRows, Truncation
from opd.errors import UserError
from opd.types import TopK

CHUNK_BYTES = 24 << 20  # of one (chunk, V) fp32 array of the torch backend; a handful of them live at once


@dataclass(frozen=True, eq=False, repr=False)
class Divergence:
    loss: Tensor  # scalar: sum_n weight_n * D_n, differentiable w.r.t. the student's hidden, weight and bias
    value: Tensor  # (N,) D_n, detached, like all that follows
    entropy: Tensor  # (N,) of the student
    teacher_entropy: Tensor  # (N,); of the known events and the tail, if the teacher is a TopK
    reverse_kl: Tensor  # (N,) KL(student || teacher), whatever was asked for: the yardstick runs are compared by
    statistics: RowStatistics  # the above and what was asked for beside them
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

    `kind`: a name, or a `Formula` with its parameter. Logits (N, V) may stand in place of a `Projection`: they run in `reference`.

    `support`: full | topk (`k` ids of `side`: teacher, student, union) | ids ((N, K) given ids, a set per row, -1 for
    none); `closure` says what becomes of the rest. `weight` is (N,), 0 to ignore a row, or a function of RowStatistics
    called chunk by chunk; it enters here, not afterwards: the head's gradient is summed over rows inside. `merge`:
    groups of ids that are one event on both sides. `tokens` (N,) and `overlap` (a k) add statistics. `memory`: bytes
    the call may use beyond its inputs. Ids at or beyond the smaller vocabulary do not exist on either side. `trusted`:
    given ids and tokens are sure to exist, so that a GPU is not waited for to look; one that does not ends the process.
    """
    formula = kind if isinstance(kind, Formula) else Formula.of(kind, params)
    truncation = Truncation(support, k, side, closure)
    size = _shared_size(student := as_projection("student", student), teacher := _source(teacher))
    merge = _within(merge, size)
    rows = _teacher_rows(student, teacher, truncation, merge, size, temperature)
    _check(student, rows.count, truncation, weight, ids, tokens, size, trusted)
    if isinstance(rows, Mixture):
        _require_fit(rows, formula, truncation)
        weight = _weighed(weight, rows)
    job = Job(formula, size, merge, temperature, truncation, weight, tokens, ids, overlap)
    plan = kernel_plan(job, student, rows, backend, memory, CHUNK_BYTES)
    if not student.count:
        return _empty(student, plan)
    if plan.backend == "reference":
        loss, statistics = reference_rows(job, student, rows, torch.arange(student.count, device=student.hidden.device))
    else:
        sink: list[RowStatistics] = []
        detached = student.detach()
        if plan.backend == "chunked" or isinstance(rows, TopRows):
            compute, scale = partial(chunked_divergence, job, detached, rows, plan.chunk, sink), scale_
        else:
            from opd.divergences.triton_modes import triton_divergence, triton_scale_
            from opd.divergences.triton_sparse import sparse_divergence

            by_tiles = triton_divergence if truncation.support == "full" else sparse_divergence
            compute, scale = partial(by_tiles, job, detached, rows, plan, sink), triton_scale_
        loss = GradientInForward.apply(student.hidden, student.weight, student.bias, compute, scale)
        statistics = RowStatistics.join(sink)
    return _result(loss, statistics, plan)


def _source(teacher: object) -> Source | TopK:
    return teacher if isinstance(teacher, (Mixture, TopK)) else as_projection("teacher", teacher)


def _shared_size(student: Projection, teacher: Source | TopK | None) -> int:
    """Ids at or beyond the smallest vocabulary do not exist on either side, which is said where somebody may not know."""
    others = teacher.parts if isinstance(teacher, Mixture) else [teacher] if isinstance(teacher, Projection) else []
    sizes = [student.vocabulary, *(other.vocabulary for other in others)]
    if len(set(sizes)) > 1:
        warnings.warn(
            f"heads of different sizes: the student has {sizes[0]} ids, the teacher {', '.join(map(str, sizes[1:]))}. Ids from "
            f"{min(sizes)} on are left out on both sides. Give every Projection size={min(sizes)} if that is meant; if the "
            "tokenizers differ, ids cannot be compared.",
            stacklevel=4,
        )
    return min(sizes)


def _within(merge: MergeGroups, size: int) -> MergeGroups:
    """Groups without ids that do not exist. An id is part of one event."""
    groups = [[index for index in dict.fromkeys(group) if index < size] for group in merge]
    counts = Counter(chain.from_iterable(groups))
    if twice := sorted(index for index, count in counts.items() if count > 1):
        raise ValueError(f"ids {twice} are in more than one of the groups to merge: give every id to one group")
    return [group for group in groups if group]


def _require_fit(mixture: Mixture, formula: Formula, truncation: Truncation) -> None:
    """A sum of divergences is one to a single teacher in one case alone."""
    if mixture.kind == "sum" and (formula != Formula("reverse_kl") or truncation.support != "full"):
        raise ValueError(
            f"a mixture of kind 'sum' is a sum of reverse KLs over the full vocabulary, and was given {formula.kind!r} over "
            f"support {truncation.support!r}; use 'geometric' or 'arithmetic'"
        )


def _weighed(weight: Weight, mixture: Mixture) -> Weight:
    """The weights of rows, times what a mixture's rows are multiplied with."""
    factor = mixture.row_factor
    if factor is None:
        return weight
    if isinstance(weight, Tensor):
        return weight * factor

    def of_rows(found: RowStatistics) -> Tensor:
        own = factor[found.index].to(found.entropy) if isinstance(factor, Tensor) else factor
        return own * (torch.ones_like(found.entropy) if weight is None else weight(found))

    return of_rows


def _result(loss: Tensor, found: RowStatistics, plan: KernelPlan) -> Divergence:
    assert found.value is not None
    assert found.teacher_entropy is not None
    assert found.reverse_kl is not None
    return Divergence(loss, found.value, found.entropy, found.teacher_entropy, found.reverse_kl, found, plan)


def _empty(student: Projection, plan: KernelPlan) -> Divergence:
    """No rows: a loss of 0 that still has a graph, so that backward leaves zeros."""
    tensors = [tensor for tensor in (student.hidden, student.weight, student.bias) if tensor is not None]
    loss = torch.stack([tensor.sum() * 0 for tensor in tensors]).sum().to(wide_dtype(student.hidden))
    none = student.hidden.new_zeros(0, dtype=loss.dtype)
    index = torch.zeros(0, dtype=torch.long, device=student.hidden.device)
    return _result(loss, RowStatistics(index, none, none, none, none), plan)


def _teacher_rows(
    student: Projection,
    teacher: Source | TopK,
    truncation: Truncation,
    merge: MergeGroups,
    size: int,
    temperature: float,
) -> Source | TopRows:
    if not isinstance(teacher, TopK):
        return teacher.detach()
    if truncation.support != "topk" or truncation.side != "teacher":
        raise ValueError(
            f"a TopK teacher knows its own top ids alone: support {truncation.support!r}, side {truncation.side!r} "
            "need a Projection; use support='topk', side='teacher'"
        )
    if temperature != 1.0 and truncation.closure != "renormalised":
        raise ValueError(
            f"temperature {temperature} with a TopK teacher: the mass outside is known at temperature 1 only; "
            "use closure='renormalised'"
        )
    dtype = wide_dtype(student.hidden)
    return TopRows.of(teacher, student.hidden.device, dtype, merge, size, truncation.k, temperature)


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
    """On a GPU to look is to wait for all that is queued; of trusted ids the device itself stops at one that does not exist."""
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

    `trusted`: see `divergence`. Logits (N, V) may stand in place of a `Projection`.
    """
    projection = as_projection("projection", projection)
    size = projection.vocabulary
    _require_known(ids, size, trusted)
    merge = _within(merge, size)
    if isinstance(projection, Logits):
        logprobs = log_probs(projection, size, merge, temperature)
        return logprobs.gather(-1, canonical_ids(ids, merge)[:, None]).squeeze(-1)
    job = Job(None, size, merge, temperature, tokens=ids)
    plan = values_plan(job, projection, None, CHUNK_BYTES)
    tensors = projection.hidden, projection.weight, projection.bias
    if plan.backend == "triton" and projection.count:
        from opd.divergences.triton_modes import TritonLogprobs

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
    """A pass for values alone: for gates and weights that need the whole batch first.

    Without a teacher, the student's. `trusted`: see `divergence`.
    """
    for name, given in (("student", student), ("teacher", teacher)):
        if isinstance(given, (Logits, Tensor)):
            raise UserError(f"{name}: statistics takes Projections. Of logits, divergence(…).statistics has the same.")
    formula, size = None if teacher is None else Formula.of(kind, params), _shared_size(student, teacher)
    job = Job(formula, size, _within(merge, size), temperature, tokens=tokens, overlap=overlap)
    count = student.count if teacher is None else teacher.count
    _check(student, count, job.truncation, None, None, tokens, job.size, trusted)
    plan = values_plan(job, student, teacher, CHUNK_BYTES)
    if not student.count:
        return _empty(student, plan).statistics
    source = None if teacher is None else teacher.detach()
    if plan.backend == "triton":
        from opd.divergences.triton_modes import triton_statistics

        return triton_statistics(job, student.detach(), source, plan)
    return RowStatistics.join(list(chunked_statistics(job, student.detach(), source, plan.chunk)))


@without_autocast
@torch.no_grad()
def likeliest_ids(projection: Projection, k: int, apart: Sequence[int] = ()) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(N, K) ids and log-probs, most likely first: each of `apart`, and the k likeliest of the others; the mass outside, that of `apart`.

    Both are (N,) logs. With all members of a group known, it can be merged at any temperature.
    """
    job = Job(None, projection.vocabulary)
    apart = [index for index in dict.fromkeys(apart) if index < job.size]
    chunk = values_plan(job, projection, None, CHUNK_BYTES).chunk
    parts = [likeliest_rows(job, projection.rows(rows), k, apart) for rows in slices(max(projection.count, 1), chunk)]
    ids, logprobs, tail, group = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, logprobs, tail, group
