"""Exact full-vocabulary divergences between two `Projection`s.

`reference` holds the logits and lets autograd differentiate the formula. `chunked` walks over the tokens, computes
each chunk's gradient with the same formula in the forward pass, and never holds more than one chunk of logits.

Names say direction: `reverse_kl = KL(student || teacher)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opd.objectives.formulas import Form, Kind, entropy, reverse_kl
from opd.objectives.projection import MergeGroups, Projection, canonical_ids, log_probs

Backend = Literal["auto", "reference", "chunked"]
CHUNK_BYTES = 64 << 20  # of one (chunk, V) fp32 array; a handful of them live at once


@dataclass(frozen=True, eq=False)
class Divergence:
    loss: Tensor  # scalar: sum_n weight_n * D_n, differentiable w.r.t. the student's hidden, weight and bias
    value: Tensor  # (N,) D_n, detached
    entropy: Tensor  # (N,) of the student, detached
    teacher_entropy: Tensor  # (N,) detached
    reverse_kl: Tensor  # (N,) KL(student || teacher), whatever was asked for: the yardstick runs are compared by


def divergence(
    kind: Kind,
    student: Projection,
    teacher: Projection,
    *,
    weight: Tensor | None = None,
    temperature: float = 1.0,
    merge: MergeGroups = (),
    backend: Backend = "auto",
    **params: float,
) -> Divergence:
    """Sum over tokens of `weight_n * D_n` and the per-token values. `params`: `beta` for jsd.

    Ids at or beyond the smaller vocabulary do not exist on either side. `auto` is `chunked`; `reference` is the
    readable definition. The weight enters here, not afterwards: the head's gradient is summed over tokens inside.
    """
    form = Form.of(kind, params)
    if backend not in ("auto", "reference", "chunked"):
        raise ValueError(f"unknown backend {backend!r}; known: auto, reference, chunked")
    if student.hidden.shape[0] != teacher.hidden.shape[0]:
        raise ValueError(f"student has {student.hidden.shape[0]} tokens, teacher {teacher.hidden.shape[0]}")
    row_weight = (
        student.hidden.new_ones(student.hidden.shape[0], dtype=torch.float32) if weight is None else weight.detach()
    )
    teacher = Projection(
        teacher.hidden.detach(), teacher.weight.detach(), None if teacher.bias is None else teacher.bias.detach(),
        teacher.scale, teacher.softcap, teacher.size,
    )  # fmt: skip
    rows = _Rows(form, temperature, merge, min(student.vocabulary, teacher.vocabulary))
    if backend == "reference":
        loss, stats = rows(student, teacher, row_weight)
        return Divergence(loss, *stats)
    loss, *statistics = _Chunked.apply(student.hidden, student.weight, student.bias, student, teacher, row_weight, rows)
    return Divergence(loss, *statistics)


@dataclass(frozen=True)
class _Rows:
    """The formula applied to a block of rows: the loss, and value, entropy, teacher entropy and reverse KL by row."""

    form: Form
    temperature: float
    merge: MergeGroups
    size: int

    def __call__(self, student: Projection, teacher: Projection, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        log_s = log_probs(student, self.size, self.merge, self.temperature)
        with torch.no_grad():
            log_t = log_probs(teacher, self.size, self.merge, self.temperature)
        value = self.form(log_s, log_t)
        loss = (value * weight).sum()
        with torch.no_grad():
            yardstick = value.detach() if self.form.kind == "reverse_kl" else reverse_kl(log_s, log_t)
            return loss, (value.detach(), entropy(log_s), entropy(log_t), yardstick)


class _Chunked(torch.autograd.Function):
    """Gradient in the forward pass, a chunk of tokens at a time; backward only scales what is already there."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None,
        student: Projection, teacher: Projection, row_weight: Tensor, rows: _Rows,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        needs = ctx.needs_input_grad[:3]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grads = [
            torch.zeros_like(tensor, dtype=tensor.dtype if index == 0 else wide)
            if need and tensor is not None
            else None
            for index, (tensor, need) in enumerate(zip((hidden, weight, bias), needs, strict=True))
        ]
        total = torch.zeros((), dtype=wide, device=hidden.device)
        parts: list[tuple[Tensor, ...]] = []
        for chunk in chunks(hidden.shape[0], rows.size):
            leaves = [
                None if tensor is None else tensor.detach().requires_grad_(need)
                for tensor, need in zip((hidden[chunk], weight, bias), needs, strict=True)
            ]
            with torch.enable_grad():
                block = Projection(leaves[0], leaves[1], leaves[2], student.scale, student.softcap, student.size)  # type: ignore[arg-type]
                loss, statistics = rows(block, teacher.rows(chunk), row_weight[chunk])
            wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
            found = iter(torch.autograd.grad(loss, wanted) if wanted else ())
            for index, leaf in enumerate(leaves):
                if leaf is not None and leaf.requires_grad:
                    target = grads[index]
                    assert target is not None
                    (target[chunk] if index == 0 else target).add_(next(found))
            total += loss.detach()
            parts.append(statistics)
        ctx.grads = [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(grads, (hidden, weight, bias), strict=True)
        ]
        columns = (
            [torch.cat(column) for column in zip(*parts, strict=True)]
            if parts
            else [hidden.new_zeros(0, dtype=wide) for _ in range(4)]
        )
        ctx.mark_non_differentiable(*columns)
        return total, *columns

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.grads]
        return *scaled, None, None, None, None


def chunks(count: int, width: int) -> list[slice]:
    """Slices of at most CHUNK_BYTES of fp32 logits each."""
    step = max(1, min(count, CHUNK_BYTES // (4 * max(width, 1))))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def token_logprobs(projection: Projection, ids: Tensor, *, merge: MergeGroups = (), temperature: float = 1.0) -> Tensor:
    """(N,) log-prob of each given id, differentiable; logits are recomputed chunk by chunk in the backward pass."""
    size = projection.vocabulary
    if ids.numel() and int(ids.max()) >= size:
        raise ValueError(f"id {int(ids.max())} is outside the vocabulary of {size} ids")
    targets = canonical_ids(ids, merge)

    def rows(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
        block = Projection(hidden, weight, bias, projection.scale, projection.softcap, projection.size)
        return log_probs(block, size, merge, temperature).gather(-1, target[:, None]).squeeze(-1)

    needs_grad = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad
        for tensor in (projection.hidden, projection.weight, projection.bias)
    )
    parts = []
    for chunk in chunks(ids.shape[0], size):
        arguments = (projection.hidden[chunk], projection.weight, projection.bias, targets[chunk])
        parts.append(checkpoint(rows, *arguments, use_reentrant=False) if needs_grad else rows(*arguments))
    if not parts:
        return projection.hidden.sum(-1).to(torch.promote_types(projection.hidden.dtype, torch.float32))
    return torch.cat(parts)
