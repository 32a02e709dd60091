"""The torch backend: gradient in the forward pass, a chunk of tokens at a time, on any device.

A chunk is sized for the matrix products; inside it, blocks of rows are sized for the processor's cache, since the
dozen elementwise passes of a divergence would otherwise each go to main memory. Backward only scales what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from opd.divergences.mixture import Mixture, Source
from opd.divergences.projection import LOG_ZERO, MergeGroups, Projection, canonical_ids, matmul
from opd.divergences.rows import Events, Job, RowStatistics, gradient_rows, softmax_, transform_, untransform_
from opd.divergences.supports import TopRows, largest

Compute = Callable[[tuple[bool, ...]], tuple[Tensor, list[Tensor | None]]]
Scale = Callable[[Tensor, Tensor], None]
BLOCK_BYTES = 2 << 20  # of one (block, V) array, on a CPU; a handful of them live at once


def slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, max(step, 1)))


def block_rows(array: Tensor) -> int:
    """Rows of one cache-sized block; a GPU takes the chunk whole."""
    if array.device.type != "cpu":
        return max(array.shape[0], 1)
    return max(1, BLOCK_BYTES // max(array.shape[1] * array.element_size(), 1))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def scale_(grad: Tensor, factor: Tensor) -> None:
    grad.mul_(factor)


class GradientInForward(torch.autograd.Function):
    """`compute(needs)` gives the loss and the gradients of hidden states, head and bias; backward only scales them.

    The first backward scales them in place and hands them out, so that no copy of the head's gradient is ever made; a
    second one through a retained graph computes them again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, compute: Compute, scale: Scale = scale_
    ) -> Tensor:
        ctx.needs = ctx.needs_input_grad[:3]
        loss, ctx.grads = compute(ctx.needs)
        ctx.compute, ctx.scale, ctx.inputs = compute, scale, (hidden.detach(), weight.detach())
        ctx.versions = hidden._version, weight._version
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            if tuple(tensor._version for tensor in ctx.inputs) != ctx.versions:
                raise RuntimeError("hidden states or head changed between two backward passes through one divergence")
            _, grads = ctx.compute(ctx.needs)
        for grad in grads:
            if grad is not None:
                ctx.scale(grad, grad_loss)
        return *grads, None, None


def chunked_divergence(
    job: Job,
    student: Projection,
    teacher: Source | TopRows,
    chunk: int,
    sink: list[RowStatistics],
    needs: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss and the gradients; the statistics of each block are appended to `sink`."""
    grads, device = HeadGradients(student, needs), student.hidden.device
    total = torch.zeros((), dtype=wide_dtype(student.hidden), device=device)
    for rows in slices(student.count, chunk):
        raw = matmul(student.hidden[rows], student.weight[: job.size].T)
        part = teacher.rows(rows)
        part_log_t = part.log_probs(job.size, job.merge, job.temperature) if isinstance(part, Mixture) else None
        raw_t = matmul(part.hidden, part.weight[: job.size].T) if isinstance(part, Projection) else None
        for block in slices(raw.shape[0], block_rows(raw)):
            log_t = None if part_log_t is None else part_log_t[block]
            t = None if log_t is None else log_t.exp()
            if isinstance(part, Projection) and raw_t is not None:
                log_t, t = log_softmax_(raw_t[block], part, job)
            index = torch.arange(rows.start + block.start, rows.start + block.stop, device=device)
            loss, observed = gradient_rows(
                job.rows(index), student, raw[block], log_t, t, part.rows(block), index, any(needs)
            )
            total += loss
            sink.append(observed)
        grads.add(rows, raw, student.hidden[rows])
        del raw, raw_t, part_log_t, log_t, t  # before the next chunk's are made
    return total, grads.finish()


def log_softmax_(raw: Tensor, projection: Projection, job: Job) -> tuple[Tensor, Tensor]:
    """Log-probs of a block over the head's products, and probabilities."""
    logits = transform_(raw, projection, job.temperature)
    Events.merge_(logits, job.merge)
    return softmax_(logits)[:2]


class HeadGradients:
    """Sums of the gradients of hidden states, head and bias over chunks; the head's, which adds up many, in fp32."""

    def __init__(self, student: Projection, needs: tuple[bool, ...]) -> None:
        self._student, wide = student, wide_dtype(student.hidden)
        hidden, weight, bias = student.hidden, student.weight, student.bias
        self.hidden = torch.zeros_like(hidden) if needs[0] else None
        self.weight = torch.empty_like(weight, dtype=wide) if needs[1] else None
        self._begun = False  # `weight` holds something
        self.bias = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None

    def add(self, rows: slice, grad: Tensor, hidden: Tensor) -> None:
        """`grad` (n, size) is in the head's products before bias and scale."""
        size = grad.shape[1]
        operand = grad.to(hidden.dtype) if grad.is_cuda else grad
        if self.hidden is not None:
            self.hidden[rows] = matmul(operand, self._student.weight[:size]).to(self.hidden.dtype)
        if self.weight is not None:
            target = self.weight[:size]
            if not self._begun:
                matmul(operand.T, hidden, out=target)
                self.weight[size:].zero_()
                self._begun = True
            elif operand.is_cuda and operand.dtype in (torch.bfloat16, torch.float16):
                torch.addmm(target, operand.T, hidden, out_dtype=torch.float32, out=target)
            else:
                target.addmm_(operand.T, hidden.to(operand.dtype))
        if self.bias is not None:
            self.bias[:size] += grad.sum(0)

    def finish(self) -> list[Tensor | None]:
        student = self._student
        if self.weight is not None and not self._begun:
            self.weight.zero_()
        pairs = ((self.hidden, student.hidden), (self.weight, student.weight), (self.bias, student.bias))
        return [None if grad is None or like is None else grad.to(like.dtype) for grad, like in pairs]


class ChunkedLogprobs(torch.autograd.Function):
    """Log-probs of one id per row; the backward pass recomputes a chunk of logits at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Projection,
        ids: Tensor,
        merge: MergeGroups,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        size, targets = projection.vocabulary, canonical_ids(ids, merge)
        normaliser = hidden.new_zeros(hidden.shape[0], dtype=wide_dtype(hidden))
        logprobs = torch.zeros_like(normaliser)
        for rows in slices(hidden.shape[0], chunk):
            raw = matmul(hidden[rows], weight[:size].T)
            for block in slices(raw.shape[0], block_rows(raw)):
                where = slice(rows.start + block.start, rows.start + block.stop)
                logits = transform_(raw[block], projection, temperature)
                Events.merge_(logits, merge)
                chosen = logits.gather(-1, targets[where, None]).squeeze(-1)
                normaliser[where] = logits.logsumexp(-1)
                logprobs[where] = chosen - normaliser[where]
            del raw, logits  # before the next chunk's are made
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser)
        ctx.static = projection, merge, temperature, chunk
        return logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normaliser = ctx.saved_tensors
        projection, merge, temperature, chunk = ctx.static
        live = Projection(hidden, weight, bias, projection.scale, projection.softcap, projection.size)
        grads = HeadGradients(live, ctx.needs_input_grad[:3])
        for rows in slices(hidden.shape[0], chunk):
            raw = matmul(hidden[rows], weight[: live.vocabulary].T)
            for block in slices(raw.shape[0], block_rows(raw)):
                where = slice(rows.start + block.start, rows.start + block.stop)
                logits = transform_(raw[block], live, temperature)
                events = Events.merge_(logits, merge)
                upstream = grad[where, None].to(logits.dtype)
                slope = (logits - normaliser[where, None]).exp_().mul_(-upstream)
                slope.scatter_add_(-1, targets[where, None], upstream)
                members = None if events is None else slope[:, events.event] * events.share
                untransform_(slope, logits, live, temperature)
                if events is not None and members is not None:
                    slope[:, events.member] = untransform_(members, events.logit, live, temperature)
                raw[block] = slope
            grads.add(rows, raw, hidden[rows])
            del raw, logits
        return *grads.finish(), None, None, None, None, None


@torch.no_grad()
def chunked_statistics(job: Job, student: Projection, teacher: Source | None, chunk: int) -> Iterator[RowStatistics]:
    """Values only: what gates that must see the whole batch first are made from."""
    for rows in slices(student.count, chunk):
        log_s, s = log_softmax_(matmul(student.hidden[rows], student.weight[: job.size].T), student, job)
        log_t, t = None, None
        if isinstance(teacher, Mixture):
            log_t = teacher.rows(rows).log_probs(job.size, job.merge, job.temperature)
            t = log_t.exp()
        elif teacher is not None:
            log_t, t = log_softmax_(matmul(teacher.hidden[rows], teacher.weight[: job.size].T), teacher, job)
        index = torch.arange(rows.start, rows.stop, device=student.hidden.device)
        value = None if log_t is None or job.formula is None else job.formula(log_s, log_t)
        yield job.rows(index).observe(index, log_s, log_t, value, s, t)


def likeliest_rows(job: Job, projection: Projection, k: int, apart: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids and log-probs of `apart` and of the k likeliest others, most likely first; the log-probs of all that is outside, and of
    `apart` together."""
    log_p, _ = log_softmax_(matmul(projection.hidden, projection.weight[: job.size].T), projection, job)
    members = torch.tensor(apart, dtype=torch.long, device=log_p.device)
    own = log_p[:, members]
    values, likely = largest(log_p.index_fill_(-1, members, -torch.inf), min(k, job.size - len(apart)))
    ids = torch.cat([likely, members.expand(log_p.shape[0], -1)], -1)
    tail = log_p.scatter_(-1, likely, -torch.inf).logsumexp(-1).clamp(min=LOG_ZERO)
    logprobs, order = torch.cat([values, own], -1).sort(dim=-1, descending=True, stable=True)
    return ids.gather(-1, order), logprobs, tail, own.logsumexp(-1)
