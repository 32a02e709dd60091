"""The CUDA backend: cuBLAS products into fp32 tiles, row kernels on the tiles, the gradient in the forward pass.

    fast    tiles of some tokens by the whole vocabulary. One product per head and chunk.
    small   tiles of many tokens by a slab of the vocabulary, computed once for the statistics and again for the
            gradient; apart from the gradients themselves, memory depends on neither N nor V. The head's gradient of a
            slab is complete when the slab is done, so it needs no fp32 copy of the head.

Axis legend: n = rows of a tile, C = its columns, E = merged events, M = their member ids.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.divergences import triton_kernels as kernels
from opd.divergences.compute import KernelPlan, aligned
from opd.divergences.kinds import KINDS, LOG_ZERO, Formula
from opd.divergences.projection import Mixture, Projection, Source, canonical_ids, matmul, upload
from opd.divergences.torch_backend import (
    Events,
    Job,
    RowStatistics,
    Weight,
    closed,
    largest,
    slices,
    transform_,
    unique_ids,
)
from opd.divergences.triton_kernels import largest_columns, takes


@dataclass(frozen=True, eq=False)
class Merged:
    """The events of all rows, from a product with only the member ids' rows of the head."""

    member: Tensor  # (M,)
    of_event: Tensor  # (M,) index of each member's event
    first: Tensor  # (E,) id that represents the event
    student: Tensor  # (N, E) logits
    teacher: Tensor  # (N, E)
    share: Tensor  # (N, M) of each member in its event, student
    logit: Tensor  # (N, M) members' own logits, student


class TileEngine:
    """One call: the buffers, the tiles, and the running statistics of every row.

    Without a teacher, only the student's.
    """

    def __init__(self, job: Job, student: Projection, teacher: Source | None, plan: KernelPlan) -> None:
        self.formula = job.formula or Formula("reverse_kl")  # a placeholder if there is no teacher
        self.job, self.student, self.teacher, self.plan = job, student, teacher, plan
        self.kind = KINDS.index(self.formula.kind)
        self.count, self.device = student.count, student.hidden.device
        self.slab = plan.slab or job.size
        sides = 1 if teacher is None else 2
        self._buffers = self.empty(sides, min(plan.chunk, self.count), aligned(min(self.slab, job.size)))
        self._held: tuple[slice, slice] | None = None  # rows and columns of the products in the buffers
        self.groups = [list(group) for group in job.merge if len(group) > 1]
        self._members: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.part_lse = self._part_normalisers()
        self.merged = self._merge() if self.groups else None
        self.state = self._start(self.empty(8, self.count))
        self.token_logits = None if job.tokens is None else self.empty(2, self.count)
        # separate allocations: a kernel is recompiled for an address that is not a multiple of 16
        self.phi, self.slope = self.empty(self.count).zero_(), self.empty(self.count).zero_()

    def release(self) -> None:
        """Free the tiles before the gradients are cast."""
        del self._buffers

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    # --- Tiles ---

    def column_slices(self) -> Iterator[slice]:
        return slices(self.job.size, self.slab)

    def row_slices(self) -> Iterator[slice]:
        return slices(self.count, self.plan.chunk)

    def tile(self, rows: slice, columns: slice) -> Tile:
        """Products of some rows and columns; products still in the buffers are reused."""
        n, width = rows.stop - rows.start, columns.stop - columns.start
        student, teacher = self._buffers[0, :n, :width], self._buffers[-1, :n, :width]
        if self._held != (rows, columns):
            self._fill(rows, columns, student, teacher)
            self._held = (rows, columns)
        temperature = self.job.temperature
        s = LogitReading.of(self.student, columns, temperature)
        t = s if self.teacher is None else LogitReading.of(self.teacher, columns, temperature)
        return Tile(rows, columns, student, teacher, s, t)

    def _fill(self, rows: slice, columns: slice, student: Tensor, teacher: Tensor) -> None:
        if isinstance(self.teacher, Mixture):
            self._mix(self.teacher, rows, columns, teacher, scratch=student)
        elif self.teacher is not None:
            project(self.teacher, rows, columns, teacher)
        project(self.student, rows, columns, student)
        if self.merged is not None:
            hidden = self._members_in(columns)[1] - columns.start
            student.index_fill_(1, hidden, LOG_ZERO)
            teacher.index_fill_(1, hidden, LOG_ZERO)

    def _mix(self, mixture: Mixture, rows: slice, columns: slice, out: Tensor, scratch: Tensor) -> None:
        """Logits of a mixture into `out`; the student's buffer, not yet filled, is the scratch space."""
        geometric, first = mixture.kind == "geometric", True
        for number, (part, share) in enumerate(zip(mixture.parts, map(float, mixture.shares), strict=True)):
            if share == 0:
                continue
            project(part, rows, columns, scratch)
            reading = LogitReading.of(part, columns, self.job.temperature)
            shift = out if geometric else math.log(share) - self.part_lse[number, rows]
            n, width = out.shape
            kernels.mix_kernel[(n, -(-width // 1024))](
                out,
                scratch,
                out.stride(0),
                scratch.stride(0),
                out if reading.bias is None else reading.bias,
                shift,
                width,
                share,
                reading.scale,
                reading.cap,
                BIAS=reading.bias is not None,
                SOFTCAP=reading.softcap,
                GEOMETRIC=geometric,
                FIRST=first,
                BLOCK=1024,
                num_warps=4,
            )
            first = False

    def _part_normalisers(self) -> Tensor:
        """(parts, N) log-normalisers of an arithmetic mixture's teachers, from a separate pass."""
        mixture = self.teacher
        if not isinstance(mixture, Mixture) or mixture.kind == "geometric":
            return self.empty(0)
        lse = self.empty(len(mixture.parts), self.count)
        for number, part in enumerate(mixture.parts):
            state = initial_state(self.empty(8, self.count))
            for rows in self.row_slices():
                for columns in self.column_slices():
                    raw = self._buffers[0, : rows.stop - rows.start, : columns.stop - columns.start]
                    project(part, rows, columns, raw)
                    reading = LogitReading.of(part, columns, self.job.temperature)
                    Tile(rows, columns, raw, raw, reading, reading).fold_into(state, forward=False, both=False)
            lse[number] = (state[0] + state[1].log2()) / LOG2_E
        return lse

    # --- Merged events ---

    def _merge(self) -> Merged:
        member = self._on_device([index for group in self.groups for index in group])
        event = self._on_device([number for number, group in enumerate(self.groups) for _ in group])
        student, events = self._event_logits(self.student, member)
        if self.teacher is None:
            teacher = student
        elif isinstance(self.teacher, Mixture):
            teacher = self._mixture_events(self.teacher, member)
        else:
            teacher = self._event_logits(self.teacher, member)[0]
        first = self._on_device([group[0] for group in self.groups])
        arrays = (
            part.contiguous() for part in (student, teacher, events.share, events.logit)
        )  # kernels need contiguous arrays
        return Merged(member, event, first, *arrays)

    def _event_logits(self, source: Projection, member: Tensor) -> tuple[Tensor, Events]:
        """(N, E) merged logits of one head, from a copy of its member rows."""
        bias = None if source.bias is None else source.bias[member]
        few = replace(source, weight=source.weight[member], bias=bias, size=None)
        logits = transform_(matmul(few.hidden, few.weight.T), few, self.job.temperature)
        ends = itertools.accumulate(len(group) for group in self.groups)
        groups = [range(end - len(group), end) for group, end in zip(self.groups, ends, strict=True)]
        events = Events.merge_(logits, groups)
        assert events is not None
        return logits[:, [group.start for group in groups]], events

    def _mixture_events(self, mixture: Mixture, member: Tensor) -> Tensor:
        parts = [self._event_logits(part, member)[0] for part in mixture.parts]
        weighted = list(zip(parts, map(float, mixture.shares), strict=True))
        if mixture.kind == "geometric":
            return torch.stack([share * part for part, share in weighted]).sum(0)
        logs = [
            part - lse[:, None] + math.log(share)
            for (part, share), lse in zip(weighted, self.part_lse, strict=True)
            if share
        ]
        return torch.stack(logs).logsumexp(0)

    def _members_in(self, columns: slice) -> tuple[Tensor, Tensor]:
        """Positions in `merged.member`, and ids, of the members in these columns."""
        key = columns.start, columns.stop
        if key not in self._members:
            every = enumerate(index for group in self.groups for index in group)
            found = [(place, index) for place, index in every if columns.start <= index < columns.stop]
            self._members[key] = self._on_device([place for place, _ in found]), self._on_device([i for _, i in found])
        return self._members[key]

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        return upload(np.array(numbers, dtype=np.int64), self.device)

    # --- Passes over tiles ---

    def _start(self, state: Tensor) -> Tensor:
        """Initialise the running values with the events, as the first columns of every row."""
        initial_state(state)
        if self.merged is None:
            return state
        s, t = self.merged.student * LOG2_E, self.merged.teacher * LOG2_E
        for offset, side, other in ((0, s, t), (4, t, s)):
            top = side.amax(-1)
            e = (side - top[:, None]).exp2()
            parts = (top, e.sum(-1), (e * side).sum(-1), (e * (side - other)).sum(-1))
            for number, part in enumerate(parts):
                state[offset + number] = part
        return state

    def fold(self, tile: Tile) -> None:
        self.fold_logits(tile)
        self.find_tokens(tile)

    def fold_logits(self, tile: Tile) -> None:
        tile.fold_into(self.state, self.formula.kind == "forward_kl", both=self.teacher is not None)

    def find_tokens(self, tile: Tile) -> None:
        """Store the logits of the sampled ids in this tile."""
        if self.token_logits is None:
            return
        assert self.job.tokens is not None
        tokens, start, stop = self.job.tokens[tile.rows], tile.columns.start, tile.columns.stop
        here = (tokens >= start) & (tokens < stop)
        column = (tokens - start).clamp(0, stop - start - 1)
        for number, (raw, source) in enumerate(((tile.student, self.student), (tile.teacher, self.teacher))):
            if source is None:
                continue
            value = raw.gather(1, column[:, None]).squeeze(1)
            if isinstance(source, Projection):
                bias = 0 if source.bias is None else source.bias[tile.columns][column]
                value = transform_(value + bias, replace(source, bias=None), self.job.temperature)
            target = self.token_logits[number, tile.rows]
            torch.where(here, value, target, out=target)

    def add_sums(self, tile: Tile) -> None:
        tile.launch(
            kernels.sums_kernel,
            self.state[:, tile.rows],
            self.state.stride(0),
            self.phi[tile.rows],
            self.slope[tile.rows],
            a=self.formula.parameter,
            KIND=self.kind,
        )

    def add_event_sums(self, rows: slice) -> None:
        if self.merged is not None:
            phi, slope = self._event_terms(rows)
            self.phi[rows] += phi.sum(-1)
            self.slope[rows] += slope.sum(-1)

    def _event_terms(self, rows: slice) -> tuple[Tensor, Tensor]:
        assert self.merged is not None
        s_lse, t_lse = self.close(rows)[:2]
        log_s = self.merged.student[rows] - s_lse[:, None]
        log_t = self.merged.teacher[rows] - t_lse[:, None]
        return self.formula.terms(log_s, log_t, log_s.exp(), log_t.exp())

    def close(self, rows: slice) -> tuple[Tensor, ...]:
        """(n,) each, for finished rows: normalisers and entropies of both sides, reverse and forward KL."""
        return kernels.closing_values(self.state[:, rows], both=self.teacher is not None)

    @property
    def needs_sums(self) -> bool:
        """Whether the kind needs a second pass. KLs follow from the first; other kinds need the normalisers first."""
        return self.formula.kind not in ("reverse_kl", "forward_kl")

    def observe_one(self, rows: slice) -> RowStatistics:
        """Statistics of finished rows without a teacher."""
        s_lse, t_lse, entropy, *_ = self.close(rows)
        index = torch.arange(rows.start, rows.stop, device=self.device)
        statistics = self._add_extras(RowStatistics(index, entropy), rows, s_lse, t_lse)
        return replace(statistics, teacher_logprob=None, teacher_stop=None)

    def observe(self, rows: slice) -> RowStatistics:
        """Statistics of finished rows."""
        s_lse, t_lse, entropy, teacher_entropy, reverse, forward = self.close(rows)
        values = {"reverse_kl": reverse, "forward_kl": forward}
        kind = self.formula.kind
        value = values[kind] if kind in values else self.formula.outer(self.phi[rows])[0]
        index = torch.arange(rows.start, rows.stop, device=self.device)
        return self._add_extras(RowStatistics(index, entropy, value, teacher_entropy, reverse), rows, s_lse, t_lse)

    def _add_extras(self, statistics: RowStatistics, rows: slice, s_lse: Tensor, t_lse: Tensor) -> RowStatistics:
        merged = self.merged
        if merged is not None and self.groups[0] == self.job.merge[0]:
            stops = [(side[rows, 0] - lse).exp() for side, lse in ((merged.student, s_lse), (merged.teacher, t_lse))]
            statistics = replace(statistics, stop=stops[0], teacher_stop=stops[1])
        if self.token_logits is None or self.job.tokens is None:
            return statistics
        pair = list(self.token_logits[:, rows])
        if merged is not None:
            match = canonical_ids(self.job.tokens[rows], self.groups)[:, None] == merged.first
            for number, side in enumerate((merged.student, merged.teacher)):
                event = side[rows].gather(1, match.int().argmax(-1, keepdim=True)).squeeze(1)
                pair[number] = torch.where(match.any(-1), event, pair[number])
        return replace(statistics, logprob=pair[0] - s_lse, teacher_logprob=pair[1] - t_lse)

    def gradient_(self, tile: Tile, weight: Tensor) -> Tensor:
        """(n, C) gradient in the student's raw logits, in the head's type, written to the student's tile."""
        grad = self._over(tile)
        tile.launch(
            kernels.gradient_kernel,
            self.state[:, tile.rows],
            self.state.stride(0),
            self.phi[tile.rows],
            self.slope[tile.rows],
            weight * (self.student.scale / self.job.temperature),
            grad,
            grad.stride(0),
            a=self.formula.parameter,
            KIND=self.kind,
        )
        if self.merged is not None:
            sides = self.merged.student[tile.rows], self.merged.teacher[tile.rows]
            sums = self.phi[tile.rows], self.slope[tile.rows]
            events = kernels.event_gradient(
                *sides, self.state[:, tile.rows], *sums, weight, self.formula.parameter, self.kind
            )
            self.spread_over_members_(grad, tile, events)
        return grad

    def spread_gradient_(self, tile: Tile, target: Tensor, upstream: Tensor, state: Tensor | None = None) -> Tensor:
        """Like `gradient_`, for log-probs (n,) of columns, without merged events. A `target` of -1 is no column.

        `state`: (2, n) or more running values that hold the normaliser, if it is not the row's.
        """
        grad, state = self._over(tile), self.state[:, tile.rows] if state is None else state
        tile.launch(
            kernels.logprob_kernel,
            state,
            state.stride(0),
            target,
            upstream * (self.student.scale / self.job.temperature),
            grad,
            grad.stride(0),
        )
        return grad

    def logprob_gradient_(self, tile: Tile, target: Tensor, upstream: Tensor) -> Tensor:
        """Like `gradient_`, for log-probs (n,) of `target`, which are canonical ids."""
        grad = self.spread_gradient_(tile, target - tile.columns.start, upstream)
        if self.merged is not None:
            s = (self.merged.student[tile.rows] - self.close(tile.rows)[0][:, None]).exp()
            hit = (target[:, None] == self.merged.first).to(s.dtype)
            self.spread_over_members_(grad, tile, (hit - s) * upstream[:, None])
        return grad

    def _over(self, tile: Tile) -> Tensor:
        self._held = None
        return tile.student.view(self.student.weight.dtype)[:, : tile.student.shape[1]]

    def spread_over_members_(self, grad: Tensor, tile: Tile, events: Tensor) -> None:
        """Spread the gradient in the events' logits (n, E) over their members in these columns."""
        assert self.merged is not None
        merged, rows, factor = self.merged, tile.rows, self.student.scale / self.job.temperature
        here = *self._members_in(tile.columns), tile.columns.start
        kernels.members_gradient_(
            grad, events, merged.share[rows], merged.logit[rows], merged.of_event, here, factor, tile.s
        )


# --- The two loops: over chunks of tokens (`fast`) and over slabs of the vocabulary (`small`) ---


Gradients = list[Tensor | None]


def triton_divergence(
    job: Job, student: Projection, teacher: Source, plan: KernelPlan, sink: list[RowStatistics], needs: tuple[bool, ...]
) -> tuple[Tensor, Gradients]:
    """The loss and the gradients of hidden states, head and bias, each in its own type."""
    engine = TileEngine(job, student, teacher, plan)
    return (_small if plan.mode == "small" else _fast)(engine, sink, needs)


def _weigh(engine: TileEngine, rows: slice, sink: list[RowStatistics]) -> tuple[Tensor, Tensor]:
    """Finish the statistics of these rows; return their loss and weights."""
    observed = engine.observe(rows)
    weight = engine.job.rows(rows).row_weight(observed)
    sink.append(observed)
    assert observed.value is not None
    return (weight * observed.value).sum(), weight


def given_weights(engine: TileEngine, given: Weight) -> Tensor:
    """(N,) row weights in fp32. If `given` is a function, they are filled in chunk by chunk."""
    weight = engine.empty(engine.count).fill_(1)
    return weight.copy_(given) if isinstance(given, Tensor) else weight


def _fast(engine: TileEngine, sink: list[RowStatistics], needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    student, size, given = engine.student, engine.job.size, engine.job.weight
    loss = torch.zeros((), dtype=torch.float32, device=engine.device)
    totals = HeadTotals(student, needs, size)
    weight = given_weights(engine, given)
    for rows in engine.row_slices():
        tile = engine.tile(rows, slice(0, size))
        engine.fold(tile)
        if engine.needs_sums:
            engine.add_event_sums(rows)
            engine.add_sums(tile)
        if callable(given):  # it needs this chunk's statistics now; otherwise they are computed at the end
            part, weight[rows] = _weigh(engine, rows, sink)
            loss += part
        if any(needs):
            totals.add(rows, engine.gradient_(tile, weight[rows]))
    if not callable(given):
        loss += _weigh(engine, slice(0, engine.count), sink)[0]
    del tile  # a view of the tiles, which must be freed before the gradients are cast
    engine.release()
    return loss, totals.finish()


class HeadTotals:
    """Gradients of hidden states, head and bias, summed over chunks of tokens; the head's sum is in fp32."""

    def __init__(self, student: Projection, needs: tuple[bool, ...], size: int) -> None:
        self._student, self._size = student, size
        wide = torch.float32
        self.hidden = torch.empty_like(student.hidden) if needs[0] else None
        self.weight = torch.empty_like(student.weight, dtype=wide) if needs[1] else None
        self.bias = None if student.bias is None or not needs[2] else torch.zeros_like(student.bias, dtype=wide)
        if self.weight is not None:
            self.weight[size:] = 0

    def add(self, rows: slice, grad: Tensor) -> None:
        size, student = self._size, self._student
        if self.hidden is not None:
            self.hidden[rows] = matmul(grad, student.weight[:size])
        if self.weight is not None:
            accumulate(self.weight[:size], grad.T, student.hidden[rows], first=rows.start == 0)
        if self.bias is not None:
            self.bias[:size] += grad.sum(0, dtype=torch.float32)

    def finish(self) -> Gradients:
        return _cast(self._student, self.hidden, self.weight, self.bias)


def _small(engine: TileEngine, sink: list[RowStatistics], needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    """Loop over slabs. Every pass starts with the last slab of the previous pass, which is still in the buffers."""
    student, size = engine.student, engine.job.size
    loss = torch.zeros((), dtype=torch.float32, device=engine.device)
    weights = engine.empty(engine.count)
    slabs = list(engine.column_slices())
    for rows in engine.row_slices():
        for columns in slabs:
            engine.fold(engine.tile(rows, columns))
        slabs.reverse()
        if engine.needs_sums:
            engine.add_event_sums(rows)
            for columns in slabs:
                engine.add_sums(engine.tile(rows, columns))
            slabs.reverse()
        part, weights[rows] = _weigh(engine, rows, sink)
        loss += part
    if not any(needs):
        return loss, [None, None, None]
    hidden = engine.empty(*student.hidden.shape).zero_() if needs[0] else None
    weight = torch.empty_like(student.weight) if needs[1] else None
    bias = None if student.bias is None or not needs[2] else torch.zeros_like(student.bias, dtype=torch.float32)
    if weight is not None:
        weight[size:] = 0
    for columns in slabs:
        slab = engine.empty(columns.stop - columns.start, student.weight.shape[1]) if weight is not None else None
        for number, rows in enumerate(reversed(list(engine.row_slices()))):
            grad = engine.gradient_(engine.tile(rows, columns), weights[rows])
            if hidden is not None:
                accumulate(hidden[rows], grad, student.weight[columns], first=False)
            if slab is not None:
                accumulate(slab, grad.T, student.hidden[rows], first=number == 0)
            if bias is not None:
                bias[columns] += grad.sum(0, dtype=torch.float32)
        if weight is not None and slab is not None:
            weight[columns] = slab
    del grad, slab  # views of the tiles, which must be freed before the gradients are cast
    engine.release()
    return loss, _cast(student, hidden, weight, bias)


def triton_statistics(job: Job, student: Projection, teacher: Source | None, plan: KernelPlan) -> RowStatistics:
    """Values without gradients."""
    if teacher is not None:
        sink: list[RowStatistics] = []
        triton_divergence(job, student, teacher, plan, sink, (False, False, False))
        return RowStatistics.join(sink)
    engine = TileEngine(job, student, None, plan)
    for rows in engine.row_slices():
        engine.fold(engine.tile(rows, slice(0, job.size)))
    return engine.observe_one(slice(0, engine.count))


class TritonLogprobs(torch.autograd.Function):
    """Log-probs of one id per row; the backward pass recomputes a chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Projection,
        job: Job,
        plan: KernelPlan,
    ) -> Tensor:
        engine = TileEngine(job, projection.detach(), None, plan)
        for rows in engine.row_slices():
            engine.fold(engine.tile(rows, slice(0, job.size)))
        logprob = engine.observe_one(slice(0, engine.count)).logprob
        assert logprob is not None
        ctx.save_for_backward(hidden, weight, bias, engine.state)
        ctx.static = projection, job, plan
        return logprob

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, state = ctx.saved_tensors
        projection, job, plan = ctx.static
        detached = replace(projection, hidden=hidden, weight=weight, bias=bias).detach()
        engine, totals = TileEngine(job, detached, None, plan), HeadTotals(detached, ctx.needs_input_grad[:3], job.size)
        engine.state = state
        targets = canonical_ids(job.tokens, engine.groups)
        for rows in engine.row_slices():
            tile = engine.tile(rows, slice(0, job.size))
            totals.add(rows, engine.logprob_gradient_(tile, targets[rows], upstream[rows].float()))
        del tile
        engine.release()
        return *totals.finish(), None, None, None


def accumulate(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right in fp32; the first product overwrites uninitialised memory."""
    if first:
        matmul(left, right, out=total)
    elif left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _cast(student: Projection, hidden: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> Gradients:
    pairs = ((hidden, student.hidden), (weight, student.weight), (bias, student.bias))
    return [None if grad is None or like is None else grad.to(like.dtype) for grad, like in pairs]


def triton_scale_(grad: Tensor, factor: Tensor) -> None:
    if grad.numel():
        blocks = -(-grad.numel() // 4096)
        kernels.scale_kernel[(blocks,)](grad, factor, grad.numel(), BLOCK=4096, num_warps=8)


# --- Divergences on part of the vocabulary: a few chosen columns per row, differentiated by autograd ---
#
# Rows are folded as for the whole vocabulary, for normalisers and statistics. The gradient in a row's logits is then -G S,
# with G the sum of the slopes at the chosen log-probs; at the chosen columns the slope is added. Whole tiles only.
#
# For the closure `tail`, the chosen columns are removed from the tile before it is folded, so the same pass gives the
# log-sum-exp of all other columns; the chosen ones are added to the row's sums afterwards. Outside the support, the gradient
# is a column's share of the tail times g - S G, with the tail's slope g and mass S.
#
# Axis legend: n = rows of a tile, K = chosen columns, E = merged events.


GONE = LOG_ZERO / 2  # raw values at or below this are not columns


def sparse_divergence(
    job: Job, student: Projection, teacher: Source, plan: KernelPlan, sink: list[RowStatistics], needs: tuple[bool, ...]
) -> tuple[Tensor, Gradients]:
    """The loss and the gradients, in the form of `triton_divergence`."""
    engine = TileEngine(replace(job, formula=Formula("reverse_kl")), student, teacher, plan)
    loss = torch.zeros((), dtype=torch.float32, device=engine.device)
    totals, values = HeadTotals(student, needs, job.size), []
    weight = given_weights(engine, job.weight)
    for rows in engine.row_slices():
        tile = engine.tile(rows, slice(0, job.size))
        chosen = _Chosen(engine, job.rows(rows), tile)
        values.append(chosen.value.detach())
        if callable(job.weight):  # it needs this chunk's statistics now; otherwise they are computed at the end
            sink.append(replace(engine.observe(rows), value=values[-1]))
            weight[rows] = job.row_weight(sink[-1])
        part = chosen.loss(weight[rows])
        loss += part.detach()
        if any(needs):
            totals.add(rows, chosen.gradient(part))
    if not callable(job.weight):
        sink.append(replace(engine.observe(slice(0, engine.count)), value=torch.cat(values)))
    del tile, chosen  # views of the tiles, which must be freed before the gradients are cast
    engine.release()
    return loss, totals.finish()


class _Chosen:
    """The support of a tile's rows, and the log-probs there."""

    def __init__(self, engine: TileEngine, job: Job, tile: Tile) -> None:
        self.engine, self.job, self.tile = engine, job, tile
        merged, rows = engine.merged, tile.rows
        self.events = (None, None) if merged is None else (merged.student[rows], merged.teacher[rows])  # (n, E)
        self.first = None if merged is None else merged.first
        self.state = engine.state[:, rows]
        self.tailed = job.truncation.closure == "tail"
        if self.tailed:
            engine.find_tokens(tile)
            self.ids = self._ids().contiguous()
            student, teacher = kernels.take_chosen_(tile, self.ids, self.state, self.first, *self.events)
            engine.fold_logits(tile)
            self.rest = kernels.tail_logprobs_(student, teacher, self.state)
        else:
            engine.fold(tile)
            self.ids, self.rest = self._ids().contiguous(), self.state
            student, teacher = kernels.chosen_logprobs(tile, self.ids, self.state, self.first, *self.events)
        self.student = student.requires_grad_()  # (n, K) log-probs; for the closure `tail` (n, K + 1)
        assert job.formula is not None
        with torch.enable_grad():
            self.value = closed(job.formula, job.truncation.closure, self.student, teacher)

    def _ids(self) -> Tensor:
        """(n, K) ids, -1 if a row has fewer, like `Truncation.choose`."""
        job, truncation = self.job, self.job.truncation
        if truncation.support == "ids":
            assert job.ids is not None
            return unique_ids(canonical_ids(job.ids, self.engine.groups))
        sides = {"teacher": (1,), "student": (0,), "union": (1, 0)}[truncation.side]
        chosen = torch.cat([self._top(side) for side in sides], -1)
        return truncation.joined(chosen, job.tokens, self.engine.groups)

    def _top(self, side: int) -> Tensor:
        """The k largest of a side. Raw values have the order of logits; merged events, stored elsewhere, are added."""
        k, events, merged = self.job.truncation.k, self.events[side], self.engine.merged
        assert k is not None
        raw = (self.tile.student, self.tile.teacher)[side]
        values, ids = largest_columns(raw, k) if takes(raw, k) else largest(raw, k)
        if events is None or merged is None:
            return ids
        every = torch.cat([_finished(values, self._reading(side)), events], -1)
        ids = ids.masked_fill(values <= GONE, -1)  # too few columns remain next to merged ones
        return torch.cat([ids, merged.first.expand(len(ids), -1)], -1).gather(
            -1, every.topk(k, dim=-1, sorted=False).indices
        )

    def _reading(self, side: int) -> LogitReading:
        return (self.tile.s, self.tile.t)[side]

    def loss(self, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            return (self.value * weight).sum()

    def gradient(self, loss: Tensor) -> Tensor:
        """Gradient of the loss in the student's raw values, written over them."""
        engine, tile, ids = self.engine, self.tile, self.ids
        (slope,) = torch.autograd.grad(loss, self.student)
        student = self.student.detach()
        if self.tailed:  # an id of -1 has mass 0, hence slope 0
            slope = slope.contiguous()
            total = slope.sum(-1)
            outside = slope[:, -1] - student[:, -1].exp() * total
        else:
            slope = slope.masked_fill(ids < 0, 0).contiguous()
            total = slope.sum(-1)
            outside = -total
        none = torch.full_like(total, -1, dtype=torch.int64)
        grad = engine.spread_gradient_(tile, none, -outside, self.rest)
        factor = engine.student.scale / self.job.temperature
        events = kernels.chosen_gradient_(
            grad, ids, slope, total, outside, student, self.state, self.rest, self.first, self.events[0], factor, tile.s
        )
        if engine.merged is not None:
            engine.spread_over_members_(grad, tile, events)
        return grad


def _finished(raw: Tensor, reading: LogitReading) -> Tensor:
    """Logits of raw values, as a kernel reads them; heads with a bias are not supported."""
    logits = raw * reading.scale
    if reading.softcap:
        logits = torch.tanh(logits) * reading.cap
    return logits.masked_fill(raw <= GONE, LOG_ZERO)


# --- Tiles: raw products of some rows and columns, and how a kernel reads logits from them ---
#
# Axis legend: n = rows of a tile, C = its columns.


# Columns and warps per step of a row kernel, for wide tiles and slabs; `benchmarks/divergence.py --sweep` tries others
WIDE, WIDE_SUMS, WIDE_FORWARD, NARROW = (2048, 16), (2048, 8), (1024, 8), (512, 4)
NARROW_COLUMNS = 16384
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class LogitReading:
    """How a kernel converts a side's raw values to logits: constants and the bias of the tile's columns."""

    bias: Tensor | None
    scale: float
    cap: float
    softcap: bool

    @classmethod
    def of(cls, source: Source, columns: slice, temperature: float) -> LogitReading:
        if isinstance(source, Mixture):  # its tile holds finished logits
            return cls(None, 1.0, 1.0, False)
        bias = None if source.bias is None else source.bias[columns]
        if source.softcap is None:
            return cls(bias, source.scale / temperature, 1.0, False)
        return cls(bias, source.scale / source.softcap, source.softcap / temperature, True)

    def in_base_2(self) -> LogitReading:
        """The same logits divided by log 2, because the GPU computes exponentials as powers of two."""
        if self.softcap:
            return replace(self, cap=self.cap * LOG2_E)
        return replace(self, scale=self.scale * LOG2_E)


@dataclass(frozen=True, eq=False)
class Tile:
    """Raw values of both sides for some rows and columns, with merged ids set to LOG_ZERO."""

    rows: slice
    columns: slice
    student: Tensor  # (n, C) fp32
    teacher: Tensor  # (n, C) fp32
    s: LogitReading
    t: LogitReading

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        n, width = self.student.shape
        wide = WIDE_SUMS if kernel is kernels.sums_kernel else WIDE_FORWARD if constants.get("FORWARD") else WIDE
        block, warps = NARROW if width <= NARROW_COLUMNS else wide
        s, t = self.s, self.t
        kernel[(n,)](
            self.student,
            self.teacher,
            self.student.stride(0),
            self.teacher.stride(0),
            self.student if s.bias is None else s.bias,
            self.teacher if t.bias is None else t.bias,
            *arguments,
            columns_total=width,
            s_scale=s.scale,
            s_cap=s.cap,
            t_scale=t.scale,
            t_cap=t.cap,
            S_BIAS=s.bias is not None,
            T_BIAS=t.bias is not None,
            S_SOFTCAP=s.softcap,
            T_SOFTCAP=t.softcap,
            **constants,
            BLOCK=block,
            num_warps=warps,
        )

    def fold_into(self, state: Tensor, forward: bool, both: bool = True) -> None:
        """Add this tile to the running sums (8, N) of its rows; without `both`, only the student's."""
        tile = replace(self, s=self.s.in_base_2(), t=self.t.in_base_2())
        tile.launch(kernels.statistics_kernel, state[:, self.rows], state.stride(0), FORWARD=forward, BOTH=both)


def initial_state(state: Tensor) -> Tensor:
    """Eight running values per row: (max, sum, sum e z, sum e (z - other)) of the student, then the teacher, in base 2."""
    state.zero_()
    state[0] = LOG_ZERO
    state[4] = LOG_ZERO
    return state


def project(source: Projection, rows: slice, columns: slice, out: Tensor) -> None:
    """Raw products of a head into a tile."""
    matmul(source.hidden[rows], source.weight[columns].T, out=out)
