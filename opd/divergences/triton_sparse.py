"""Divergences on part of the vocabulary, on tiles: what is chosen is a few columns of each row, and autograd's work.

Rows are folded as for the whole vocabulary, which gives normalisers and statistics. In a row's logits the gradient is then
-G S, with G the sum of the slopes at the chosen log-probs, and at the chosen columns that and the slope. Whole tiles only.

Axis legend: n = rows of a tile, K = chosen columns, E = merged events.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from opd.divergences.formulas import Formula
from opd.divergences.mixture import Source
from opd.divergences.plan import KernelPlan
from opd.divergences.projection import LOG_ZERO, Projection, canonical_ids
from opd.divergences.rows import Job, RowStatistics, untransform_
from opd.divergences.supports import closed, largest, unique_ids
from opd.divergences.triton_backend import TileEngine
from opd.divergences.triton_modes import Gradients, HeadTotals
from opd.divergences.triton_select import largest_columns, takes
from opd.divergences.triton_tiles import LogitReading, Tile

GONE = LOG_ZERO / 2  # raw values at or below: not a column


def sparse_divergence(
    job: Job, student: Projection, teacher: Source, plan: KernelPlan, sink: list[RowStatistics], needs: tuple[bool, ...]
) -> tuple[Tensor, Gradients]:
    """The loss and the gradients, as `triton_divergence` gives them."""
    engine = TileEngine(replace(job, formula=Formula("reverse_kl")), student, teacher, plan)
    loss = torch.zeros((), dtype=torch.float32, device=engine.device)
    totals = HeadTotals(student, needs, job.size)
    for rows in engine.row_slices():
        tile = engine.tile(rows, slice(0, job.size))
        engine.fold(tile)
        part, grad = _Chosen(engine, job.rows(rows), tile).loss(sink, any(needs))
        loss += part
        if grad is not None:
            totals.add(rows, grad)
    del tile, grad  # views of the tiles, which have to go before the gradients are cast
    engine.release()
    return loss, totals.finish()


class _Chosen:
    """The support of a tile's rows, and what lies there."""

    def __init__(self, engine: TileEngine, job: Job, tile: Tile) -> None:
        self.engine, self.job, self.tile = engine, job, tile
        merged, rows = engine.merged, tile.rows
        self.events = (None, None) if merged is None else (merged.student[rows], merged.teacher[rows])  # (n, E)
        self.normalisers = [lse[rows, None] for lse in engine.normalisers()]
        self.ids = self._ids()
        self.student, self.teacher = (self._logits(side) for side in (0, 1))

    def _ids(self) -> Tensor:
        """(n, K), -1 where a row has fewer, like `Truncation.choose`."""
        job, truncation = self.job, self.job.truncation
        if truncation.support == "ids":
            assert job.ids is not None
            return unique_ids(canonical_ids(job.ids, job.merge))
        sides = {"teacher": (1,), "student": (0,), "union": (1, 0)}[truncation.side]
        chosen = torch.cat([self._top(side) for side in sides], -1)
        return unique_ids(chosen) if truncation.side == "union" else chosen

    def _top(self, side: int) -> Tensor:
        """The k largest of a side. Raw values are in the order of logits; merged events, which are elsewhere, come on top."""
        k, events, merged = self.job.truncation.k, self.events[side], self.engine.merged
        assert k is not None
        raw = (self.tile.student, self.tile.teacher)[side]
        values, ids = largest_columns(raw, k) if takes(raw, k) else largest(raw, k)
        if events is None or merged is None:
            return ids
        every = torch.cat([_finished(values, self._reading(side)), events], -1)
        return torch.cat([ids, merged.first.expand(len(ids), -1)], -1).gather(-1, every.topk(k, dim=-1).indices)

    def _reading(self, side: int) -> LogitReading:
        return (self.tile.s, self.tile.t)[side]

    def _logits(self, side: int) -> Tensor:
        """(n, K) logits at the ids."""
        raw = (self.tile.student, self.tile.teacher)[side].gather(-1, self.ids.clamp(min=0))
        found = _finished(raw, self._reading(side))
        events, merged = self.events[side], self.engine.merged
        if events is not None and merged is not None:
            for number, first in enumerate(merged.first):
                found = torch.where(self.ids == first, events[:, number, None], found)
        return found.masked_fill(self.ids < 0, LOG_ZERO)

    def loss(self, sink: list[RowStatistics], grads: bool) -> tuple[Tensor, Tensor | None]:
        """Of these rows, and its gradient in the student's raw values, over their memory."""
        job, tile = self.job, self.tile
        assert job.formula is not None
        s_lse, t_lse = self.normalisers
        chosen = (self.student - s_lse).requires_grad_()
        with torch.enable_grad():
            value = closed(job.formula, job.truncation.closure, chosen, self.teacher - t_lse)
        observed = replace(self.engine.observe(tile.rows)[0], value=value.detach())
        sink.append(observed)
        with torch.enable_grad():
            loss = (value * job.row_weight(observed)).sum()
        if not grads:
            return loss.detach(), None
        (slope,) = torch.autograd.grad(loss, chosen)
        slope = slope.masked_fill(self.ids < 0, 0)
        return loss.detach(), self._gradient(slope, slope.sum(-1), chosen.detach().exp())

    def _gradient(self, slope: Tensor, total: Tensor, s: Tensor) -> Tensor:
        engine, tile = self.engine, self.tile
        nowhere = torch.full_like(total, -1, dtype=torch.int64)
        grad = engine.spread_gradient_(tile, nowhere, total)
        here = slope - s * total[:, None]
        at = untransform_(here.clone(), self.student, engine.student, self.job.temperature)
        ids, at = _whole(self.ids, at)
        grad.scatter_(-1, ids, at.to(grad.dtype))
        if engine.merged is not None and self.events[0] is not None:
            share = (self.events[0] - self.normalisers[0]).exp()
            hits = [(slope * (self.ids == first)).sum(-1) for first in engine.merged.first]
            engine.event_gradient_(grad, tile, torch.stack(hits, -1) - share * total[:, None])
        return grad


def _finished(raw: Tensor, reading: LogitReading) -> Tensor:
    """Logits of raw values, as a kernel reads them; heads with a bias are not taken."""
    logits = raw * reading.scale
    if reading.softcap:
        logits = torch.tanh(logits) * reading.cap
    return logits.masked_fill(raw <= GONE, LOG_ZERO)


def _whole(ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Without -1: in their place, once more, an id that the row has, and its value. A row that has none is 0 everywhere."""
    there = ids >= 0
    one = there.int().argmax(-1, keepdim=True)
    values = values.masked_fill(~there, 0)
    return (
        torch.where(there, ids, ids.gather(-1, one)).clamp(min=0),
        torch.where(there, values, values.gather(-1, one)),
    )
