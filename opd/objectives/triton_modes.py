"""The two loops of the CUDA backend: over chunks of tokens (`fast`) and over slabs of the vocabulary (`small`)."""

from __future__ import annotations

import torch
from torch import Tensor

from opd.objectives import triton_kernels
from opd.objectives.mixture import Source
from opd.objectives.plan import Plan
from opd.objectives.projection import Projection, matmul
from opd.objectives.rows import Job, RowStatistics
from opd.objectives.triton_backend import Engine

Gradients = list[Tensor | None]


def triton_divergence(
    job: Job, student: Projection, teacher: Source, plan: Plan, sink: list[RowStatistics], needs: tuple[bool, ...]
) -> tuple[Tensor, Gradients]:
    """The loss and the gradients of hidden states, head and bias, each in its own type."""
    engine = Engine(job, student, teacher, plan)
    return (_small if plan.mode == "small" else _fast)(engine, sink, needs)


def _weigh(engine: Engine, rows: slice, sink: list[RowStatistics]) -> tuple[Tensor, Tensor, Tensor]:
    """Close the statistics of these rows: their loss, mean slope and gradient factor."""
    found, mean, outer = engine.observe(rows)
    weight = engine.job.rows(rows).row_weight(found)
    sink.append(found)
    assert found.value is not None
    return (weight * found.value).sum(), mean.contiguous(), outer * weight


def _fast(engine: Engine, sink: list[RowStatistics], needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    student, size = engine.student, engine.job.size
    loss = torch.zeros((), dtype=torch.float32, device=engine.device)
    hidden = torch.empty_like(student.hidden) if needs[0] else None
    weight = engine.empty(*student.weight.shape) if needs[1] else None
    bias = None if student.bias is None or not needs[2] else torch.zeros_like(student.bias, dtype=torch.float32)
    if weight is not None:
        weight[size:] = 0
    for rows in engine.row_slices():
        part, grad = _chunk(engine, rows, sink, any(needs))
        loss += part
        if hidden is not None and grad is not None:
            hidden[rows] = matmul(grad, student.weight[:size])
        if weight is not None and grad is not None:
            accumulate(weight[:size], grad.T, student.hidden[rows], first=rows.start == 0)
        if bias is not None and grad is not None:
            bias[:size] += grad.sum(0, dtype=torch.float32)
    del grad  # a view of the tiles, which have to go before the gradients are cast
    engine.release()
    return loss, _cast(student, hidden, weight, bias)


def _chunk(engine: Engine, rows: slice, sink: list[RowStatistics], needed: bool) -> tuple[Tensor, Tensor | None]:
    """Loss of a chunk of tokens, and the gradient in its raw logits."""
    tile = engine.tile(rows, slice(0, engine.job.size))
    engine.start(rows)
    engine.fold(tile)
    if engine.needs_sums:
        engine.add_event_sums(rows)
        engine.add_sums(tile)
    loss, mean, factor = _weigh(engine, rows, sink)
    return loss, engine.gradient_(tile, mean, factor) if needed else None


def _small(engine: Engine, sink: list[RowStatistics], needs: tuple[bool, ...]) -> tuple[Tensor, Gradients]:
    student, size = engine.student, engine.job.size
    loss = torch.zeros((), dtype=torch.float32, device=engine.device)
    means, factors = engine.empty(2, engine.count)
    for rows in engine.row_slices():
        engine.start(rows)
        for columns in engine.column_slices():
            engine.fold(engine.tile(rows, columns))
        if engine.needs_sums:
            engine.add_event_sums(rows)
            for columns in engine.column_slices():
                engine.add_sums(engine.tile(rows, columns))
        part, means[rows], factors[rows] = _weigh(engine, rows, sink)
        loss += part
    if not any(needs):
        return loss, [None, None, None]
    hidden = engine.empty(*student.hidden.shape).zero_() if needs[0] else None
    weight = torch.empty_like(student.weight) if needs[1] else None
    bias = None if student.bias is None or not needs[2] else torch.zeros_like(student.bias, dtype=torch.float32)
    if weight is not None:
        weight[size:] = 0
    for columns in engine.column_slices():
        slab = engine.empty(columns.stop - columns.start, student.weight.shape[1]) if weight is not None else None
        for rows in engine.row_slices():
            grad = engine.gradient_(engine.tile(rows, columns), means[rows], factors[rows])
            if hidden is not None:
                accumulate(hidden[rows], grad, student.weight[columns], first=False)
            if slab is not None:
                accumulate(slab, grad.T, student.hidden[rows], first=rows.start == 0)
            if bias is not None:
                bias[columns] += grad.sum(0, dtype=torch.float32)
        if weight is not None and slab is not None:
            weight[columns] = slab
    del grad, slab  # views of the tiles, which have to go before the gradients are cast
    engine.release()
    return loss, _cast(student, hidden, weight, bias)


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
