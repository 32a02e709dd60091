"""The CUDA backend: cuBLAS products into fp32 tiles, row kernels on the tiles, the gradient in the forward pass.

    fast    tiles of some tokens by the whole vocabulary. One product per head and chunk.
    small   tiles of many tokens by a slab of the vocabulary, computed once for the statistics and again for the
            gradient; besides the gradients themselves, memory depends on neither N nor V. The head's gradient of a slab
            is complete when the slab is done, so it needs no fp32 copy of the head.

Axis legend: n = rows of a tile, C = its columns, E = merged events, M = their member ids.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from opd.divergences import triton_few as few
from opd.divergences import triton_kernels as kernels
from opd.divergences.chunked import slices
from opd.divergences.formulas import KINDS, Formula
from opd.divergences.mixture import Mixture, Source
from opd.divergences.plan import KernelPlan, aligned
from opd.divergences.projection import LOG_ZERO, Projection, canonical_ids, matmul
from opd.divergences.rows import Events, Job, RowStatistics, transform_
from opd.divergences.triton_tiles import LOG2_E, LogitReading, Tile, initial_state, project
from opd.divergences.upload import upload


@dataclass(frozen=True, eq=False)
class Merged:
    """The events of all rows, from a product with the member ids' rows of the head alone."""

    member: Tensor  # (M,)
    of_event: Tensor  # (M,) index of each member's event
    first: Tensor  # (E,) id the event is called by
    student: Tensor  # (N, E) logits
    teacher: Tensor  # (N, E)
    share: Tensor  # (N, M) of each member in its event, student
    logit: Tensor  # (N, M) members' own logits, student


class TileEngine:
    """One call: the buffers, the tiles, and the running statistics of every row.

    Without a teacher, the student's alone.
    """

    def __init__(self, job: Job, student: Projection, teacher: Source | None, plan: KernelPlan) -> None:
        self.formula = job.formula or Formula("reverse_kl")  # without a teacher there is no divergence to speak of
        self.job, self.student, self.teacher, self.plan = job, student, teacher, plan
        self.kind = KINDS.index(self.formula.kind)
        self.count, self.device = student.count, student.hidden.device
        self.slab = plan.slab or job.size
        sides = 1 if teacher is None else 2
        self._buffers = self.empty(sides, min(plan.chunk, self.count), aligned(min(self.slab, job.size)))
        self._held: tuple[slice, slice] | None = None  # whose products the buffers hold
        self.groups = [list(group) for group in job.merge if len(group) > 1]
        self._members: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.part_lse = self._part_normalisers()
        self.merged = self._merge() if self.groups else None
        self.state = self._start(self.empty(8, self.count))
        self.token_logits = None if job.tokens is None else self.empty(2, self.count)
        # apart: a kernel is compiled anew for an address that is no multiple of 16
        self.phi, self.slope = self.empty(self.count).zero_(), self.empty(self.count).zero_()

    def release(self) -> None:
        """Give the tiles back before the gradients are cast."""
        del self._buffers

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    # Tiles

    def column_slices(self) -> Iterator[slice]:
        return slices(self.job.size, self.slab)

    def row_slices(self) -> Iterator[slice]:
        return slices(self.count, self.plan.chunk)

    def tile(self, rows: slice, columns: slice) -> Tile:
        """Products of some rows and columns; those still in the buffers are not computed again."""
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
        """(parts, N) log-normalisers of an arithmetic mixture's teachers, from a pass of their own."""
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

    # Merged events

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
        arrays = (part.contiguous() for part in (student, teacher, events.share, events.logit))  # as kernels read them
        return Merged(member, event, first, *arrays)

    def _event_logits(self, source: Projection, member: Tensor) -> tuple[Tensor, Events]:
        """(N, E) merged logits of one head, on a copy of its few rows."""
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
        """Positions in `merged.member`, and ids, of the members among these columns."""
        key = columns.start, columns.stop
        if key not in self._members:
            every = enumerate(index for group in self.groups for index in group)
            found = [(place, index) for place, index in every if columns.start <= index < columns.stop]
            self._members[key] = self._on_device([place for place, _ in found]), self._on_device([i for _, i in found])
        return self._members[key]

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        return upload(np.array(numbers, dtype=np.int64), self.device)

    # Passes over tiles

    def _start(self, state: Tensor) -> Tensor:
        """The events are the first columns every row has seen."""
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
        """Logits of the sampled ids that lie in this tile."""
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
        """(n,) each, of finished rows: normalisers of both sides, entropies of both sides, reverse and forward KL."""
        return few.closing_values(self.state[:, rows], both=self.teacher is not None)

    @property
    def needs_sums(self) -> bool:
        """The KLs follow from the first pass; other kinds need the normalisers before they can be summed."""
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
        """(n, C) gradient in the student's raw logits, in the head's type and the student's own memory."""
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
            events = few.event_gradient(
                *sides, self.state[:, tile.rows], *sums, weight, self.formula.parameter, self.kind
            )
            self.spread_over_members_(grad, tile, events)
        return grad

    def spread_gradient_(self, tile: Tile, target: Tensor, upstream: Tensor, state: Tensor | None = None) -> Tensor:
        """(n, C) gradient of log-probs (n,) of columns, likewise, without merged events; a `target` of -1 is none of them.

        `state`: (2, n) or more running values that hold the normaliser, where it is not the row's.
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
        """(n, C) gradient of log-probs (n,) of `target`, canonical ids, likewise."""
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
        """From the gradient in the events' logits (n, E) to that of their members among these columns."""
        assert self.merged is not None
        merged, rows, factor = self.merged, tile.rows, self.student.scale / self.job.temperature
        here = *self._members_in(tile.columns), tile.columns.start
        few.members_gradient_(
            grad, events, merged.share[rows], merged.logit[rows], merged.of_event, here, factor, tile.s
        )
