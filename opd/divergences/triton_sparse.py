"""Divergences on part of the vocabulary, on tiles: what is chosen is a few columns of each row, and autograd's work.

Rows are folded as for the whole vocabulary, which gives normalisers and statistics. In a row's logits the gradient is then
-G S, with G the sum of the slopes at the chosen log-probs, and at the chosen columns that and the slope. Whole tiles only.

For the closure `tail` what is chosen is taken out of the tile before it is folded, so that the same pass gives the log-sum-exp
of all that is outside; what was taken is added to a row's sums afterwards. Outside, the gradient is its share of the tail
times g - S G, of the tail's own slope g and mass S.

Axis legend: n = rows of a tile, K = chosen columns, E = merged events.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from opd.divergences import triton_few as few
from opd.divergences.formulas import Formula
from opd.divergences.mixture import Source
from opd.divergences.plan import KernelPlan
from opd.divergences.projection import LOG_ZERO, Projection, canonical_ids
from opd.divergences.rows import Job, RowStatistics
from opd.divergences.supports import closed, largest, unique_ids
from opd.divergences.triton_backend import TileEngine
from opd.divergences.triton_modes import Gradients, HeadTotals, given_weights
from opd.divergences.triton_select import largest_columns, takes
from opd.divergences.triton_tiles import LogitReading, Tile

GONE = LOG_ZERO / 2  # raw values at or below: not a column


def sparse_divergence(
    job: Job, student: Projection, teacher: Source, plan: KernelPlan, sink: list[RowStatistics], needs: tuple[bool, ...]
) -> tuple[Tensor, Gradients]:
    """The loss and the gradients, as `triton_divergence` gives them."""
    engine = TileEngine(replace(job, formula=Formula("reverse_kl")), student, teacher, plan)
    loss = torch.zeros((), dtype=torch.float32, device=engine.device)
    totals, values = HeadTotals(student, needs, job.size), []
    weight = given_weights(engine, job.weight)
    for rows in engine.row_slices():
        tile = engine.tile(rows, slice(0, job.size))
        chosen = _Chosen(engine, job.rows(rows), tile)
        values.append(chosen.value.detach())
        if callable(job.weight):  # of this chunk's statistics; otherwise those can wait for the end
            sink.append(replace(engine.observe(rows), value=values[-1]))
            weight[rows] = job.row_weight(sink[-1])
        part = chosen.loss(weight[rows])
        loss += part.detach()
        if any(needs):
            totals.add(rows, chosen.gradient(part))
    if not callable(job.weight):
        sink.append(replace(engine.observe(slice(0, engine.count)), value=torch.cat(values)))
    del tile, chosen  # views of the tiles, which have to go before the gradients are cast
    engine.release()
    return loss, totals.finish()


class _Chosen:
    """The support of a tile's rows, and what lies there."""

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
            student, teacher = few.take_chosen_(tile, self.ids, self.state, self.first, *self.events)
            engine.fold_logits(tile)
            self.rest = few.tail_logprobs_(student, teacher, self.state)
        else:
            engine.fold(tile)
            self.ids, self.rest = self._ids().contiguous(), self.state
            student, teacher = few.chosen_logprobs(tile, self.ids, self.state, self.first, *self.events)
        self.student = student.requires_grad_()  # (n, K) log-probs; for the closure `tail` (n, K + 1)
        assert job.formula is not None
        with torch.enable_grad():
            self.value = closed(job.formula, job.truncation.closure, self.student, teacher)

    def _ids(self) -> Tensor:
        """(n, K), -1 where a row has fewer, like `Truncation.choose`."""
        job, truncation = self.job, self.job.truncation
        if truncation.support == "ids":
            assert job.ids is not None
            return unique_ids(canonical_ids(job.ids, self.engine.groups))
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
        ids = ids.masked_fill(values <= GONE, -1)  # too few are left beside merged ones
        return torch.cat([ids, merged.first.expand(len(ids), -1)], -1).gather(
            -1, every.topk(k, dim=-1, sorted=False).indices
        )

    def _reading(self, side: int) -> LogitReading:
        return (self.tile.s, self.tile.t)[side]

    def loss(self, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            return (self.value * weight).sum()

    def gradient(self, loss: Tensor) -> Tensor:
        """Of the loss, in the student's raw values, over their memory."""
        engine, tile, ids = self.engine, self.tile, self.ids
        (slope,) = torch.autograd.grad(loss, self.student)
        student = self.student.detach()
        if self.tailed:  # an id of -1 has a mass of 0 beside the tail's, hence a slope of 0
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
        events = few.chosen_gradient_(
            grad, ids, slope, total, outside, student, self.state, self.rest, self.first, self.events[0], factor, tile.s
        )
        if engine.merged is not None:
            engine.spread_over_members_(grad, tile, events)
        return grad


def _finished(raw: Tensor, reading: LogitReading) -> Tensor:
    """Logits of raw values, as a kernel reads them; heads with a bias are not taken."""
    logits = raw * reading.scale
    if reading.softcap:
        logits = torch.tanh(logits) * reading.cap
    return logits.masked_fill(raw <= GONE, LOG_ZERO)
