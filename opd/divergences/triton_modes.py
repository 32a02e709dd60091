"""The two loops of the CUDA backend: over chunks of tokens (`fast`) and over slabs of the vocabulary (`small`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opd.divergences import triton_kernels
from opd.divergences.mixture import Source
from opd.divergences.plan import KernelPlan
from opd.divergences.projection import Projection, canonical_ids, matmul
from opd.divergences.rows import Job, RowStatistics, Weight
from opd.divergences.triton_backend import TileEngine

Gradients = list[Tensor | None]


def triton_divergence(
    job: Job, student: Projection, teacher: Source, plan: KernelPlan, sink: list[RowStatistics], needs: tuple[bool, ...]
) -> tuple[Tensor, Gradients]:
    """The loss and the gradients of hidden states, head and bias, each in its own type."""
    engine = TileEngine(job, student, teacher, plan)
    return (_small if plan.mode == "small" else _fast)(engine, sink, needs)


def _weigh(engine: TileEngine, rows: slice, sink: list[RowStatistics]) -> tuple[Tensor, Tensor]:
    """Close the statistics of these rows: their loss and their weights."""
    observed = engine.observe(rows)
    weight = engine.job.rows(rows).row_weight(observed)
    sink.append(observed)
    assert observed.value is not None
    return (weight * observed.value).sum(), weight


def given_weights(engine: TileEngine, given: Weight) -> Tensor:
    """(N,) weights of rows in fp32; a function's are filled in chunk by chunk."""
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
        if callable(given):  # of this chunk's statistics; otherwise those can wait for the end
            part, weight[rows] = _weigh(engine, rows, sink)
            loss += part
        if any(needs):
            totals.add(rows, engine.gradient_(tile, weight[rows]))
    if not callable(given):
        loss += _weigh(engine, slice(0, engine.count), sink)[0]
    del tile  # a view of the tiles, which have to go before the gradients are cast
    engine.release()
    return loss, totals.finish()


class HeadTotals:
    """Gradients of hidden states, head and bias, summed over chunks of tokens; the head's in fp32."""

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
    """Every pass begins with the slab the last one ended with, whose tile is still there."""
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
    del grad, slab  # views of the tiles, which have to go before the gradients are cast
    engine.release()
    return loss, _cast(student, hidden, weight, bias)


def triton_statistics(job: Job, student: Projection, teacher: Source | None, plan: KernelPlan) -> RowStatistics:
    """A pass for values alone."""
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
    """total += left @ right in fp32; the first product overwrites what was never written."""
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
        triton_kernels.scale_kernel[(blocks,)](grad, factor, grad.numel(), BLOCK=4096, num_warps=8)
