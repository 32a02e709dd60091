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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal, get_args

import torch
from torch import Tensor

from opd.common.errors import UserError
from opd.divergences.formulas import KINDS, Formula
from opd.divergences.projection import (
    Logits,
    MergeGroups,
    Mixture,
    Projection,
    Source,
    as_projection,
    canonical_ids,
    log_probs,
    without_autocast,
)
from opd.divergences.supports import Closure, Side, Support, TopRows, Truncation
from opd.divergences.torch_backend import (
    ChunkedLogprobs,
    GradientInForward,
    Job,
    RowStatistics,
    Weight,
    chunked_divergence,
    chunked_statistics,
    likeliest_rows,
    reference_rows,
    scale_,
    slices,
    wide_dtype,
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
    none). `closure`: how to treat the remaining ids. `weight`: (N,), 0 to ignore a row, or a function of RowStatistics
    called per chunk. Weights must be given here, because the head's gradient is summed over rows inside. `merge`:
    groups of ids that are one event on both sides. `tokens` (N,) and `overlap` (a k) add statistics. `memory`: bytes
    the call may use beyond its inputs. Ids at or above the smaller vocabulary size do not exist on either side.
    `trusted`: ids and tokens are known to exist, so the call does not wait for a GPU to check them; a bad id then ends
    the process.
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
            from opd.divergences.triton_backend import sparse_divergence, triton_divergence, triton_scale_

            by_tiles = triton_divergence if truncation.support == "full" else sparse_divergence
            compute, scale = partial(by_tiles, job, detached, rows, plan, sink), triton_scale_
        loss = GradientInForward.apply(student.hidden, student.weight, student.bias, compute, scale)
        statistics = RowStatistics.join(sink)
    return _result(loss, statistics, plan)


def _source(teacher: object) -> Source | TopK:
    return teacher if isinstance(teacher, (Mixture, TopK)) else as_projection("teacher", teacher)


def _shared_size(student: Projection, teacher: Source | TopK | None) -> int:
    """Size of the smallest vocabulary. Ids at or above it do not exist on either side; warns if the sizes differ."""
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


def _result(loss: Tensor, found: RowStatistics, plan: KernelPlan) -> Divergence:
    assert found.value is not None
    assert found.teacher_entropy is not None
    assert found.reverse_kl is not None
    return Divergence(loss, found.value, found.entropy, found.teacher_entropy, found.reverse_kl, found, plan)


def _empty(student: Projection, plan: KernelPlan) -> Divergence:
    """Result for no rows: a loss of 0 with a graph, so that backward gives zero gradients."""
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
    plan = values_plan(job, projection, None, CHUNK_BYTES)
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
    formula, size = None if teacher is None else Formula.of(kind, params), _shared_size(student, teacher)
    job = Job(formula, size, _within(merge, size), temperature, tokens=tokens, overlap=overlap)
    count = student.count if teacher is None else teacher.count
    _check(student, count, job.truncation, None, None, tokens, job.size, trusted)
    plan = values_plan(job, student, teacher, CHUNK_BYTES)
    if not student.count:
        return _empty(student, plan).statistics
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
    chunk = values_plan(job, projection, None, CHUNK_BYTES).chunk
    parts = [likeliest_rows(job, projection.rows(rows), k, apart) for rows in slices(max(projection.count, 1), chunk)]
    ids, logprobs, tail, group = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, logprobs, tail, group


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
    job: Job, student: Projection, teacher: Source | TopRows, backend: Backend, memory: int | None, chunk_bytes: int
) -> KernelPlan:
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(get_args(Backend))}")
    heads = [student] if isinstance(teacher, TopRows) else _heads(student, teacher)
    if any(isinstance(head, Logits) for head in heads):
        if backend not in ("auto", "reference"):
            raise ValueError(f"backend {backend!r} computes logits itself and was given some; use backend='auto'")
        return KernelPlan("reference", "logits were given", student.count)
    if backend == "reference":
        return KernelPlan("reference", "asked for", student.count)
    obstacle = triton_obstacle(job, student, teacher)
    if backend == "triton" and obstacle:
        raise ValueError(f"backend triton: {obstacle}; use backend='chunked' or 'auto'")
    if backend == "chunked" or obstacle:
        return KernelPlan("chunked", obstacle or "asked for", _chunk(job, student, memory, chunk_bytes))
    plan = triton_plan(student, job.size, memory)
    if plan.mode == "small" and job.truncation.support != "full":
        return KernelPlan(
            "chunked", "a support needs whole rows, and they do not fit", _chunk(job, student, memory, chunk_bytes)
        )
    return plan


def _chunk(job: Job, student: Projection, memory: int | None, chunk_bytes: int) -> int:
    if student.hidden.is_cuda:  # a GPU needs more rows at once than fit a CPU's cache
        chunk_bytes *= 8
    if memory is not None:  # raw logits of both sides and the temporaries of a block
        chunk_bytes = min(chunk_bytes, max(memory // 8, 1))
    return chunk_tokens(student.count, job.size, chunk_bytes)


def triton_obstacle(job: Job, student: Projection, teacher: Source | TopRows) -> str:
    """Why the CUDA backend cannot run this; empty if it can."""
    if isinstance(teacher, TopRows):
        return "a teacher of likeliest ids alone runs in torch"
    if job.overlap:
        return "top-k overlap needs whole sorted rows, which run in torch"
    if job.formula is not None and job.formula.kind not in KINDS:
        return f"divergence {job.formula.kind!r} has no kernel"
    heads = _heads(student, teacher)
    return mixture_obstacle(teacher) or support_obstacle(job, heads) or heads_obstacle(heads)


def support_obstacle(job: Job, heads: Sequence[Projection]) -> str:
    """Why the CUDA backend cannot choose part of the vocabulary here; empty if it can."""
    truncation = job.truncation
    if truncation.support == "full":
        return ""
    if any(head.bias is not None or head.scale <= 0 for head in heads):  # raw products would be in another order
        return f"support {truncation.support!r} of a head with a bias runs in torch"
    if truncation.support == "topk" and (truncation.k is None or 2 * truncation.k > job.size):
        return "support 'topk' of most of the vocabulary runs in torch"
    return ""


def mixture_obstacle(teacher: Source | None) -> str:
    """Why the CUDA backend cannot mix these teachers; empty if it can."""
    if not isinstance(teacher, Mixture):
        return ""
    if teacher.kind == "sum":
        return "a sum of divergences runs in torch"
    return "a mixture with weights per token runs in torch" if teacher.per_token else ""


def _heads(student: Projection, teacher: Source | None) -> list[Projection]:
    if teacher is None:
        return [student]
    return [student, *(teacher.parts if isinstance(teacher, Mixture) else [teacher])]


def heads_obstacle(heads: Sequence[Projection]) -> str:
    """Why the CUDA backend cannot run on these heads; empty if it can."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not all(head.hidden.is_cuda for head in heads):
        return f"tensors are on {heads[0].hidden.device.type}"
    if any(head.hidden.dtype == torch.float64 for head in heads):
        return "fp64 tensors"
    if any(head.hidden.dtype != head.weight.dtype for head in heads):
        return "hidden states and head differ in type"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return ""


def values_plan(job: Job, student: Projection, teacher: Source | None, chunk_bytes: int) -> KernelPlan:
    """Plan for log-probs and for passes without a divergence's gradient: chunks of half a GiB on a GPU."""
    ranked = "top-k overlap needs whole sorted rows" if job.overlap and teacher is not None else ""
    obstacle = ranked or mixture_obstacle(teacher) or heads_obstacle(_heads(student, teacher))
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
