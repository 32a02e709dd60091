"""A language-model head before its matrix product: hidden states and the matrix that turns them into logits.

Everything in this package works on `Projection`s, so the (N, V) logits exist only a chunk at a time.
Axis legend: N = tokens, D = hidden width, V = vocabulary rows of the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal, ParamSpec, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from opd.common.errors import UserError
from opd.divergences.kinds import LOG_ZERO

MergeGroups = Sequence[Sequence[int]]  # each group of ids is one event


@dataclass(frozen=True, eq=False, repr=False)
class Projection:
    """Logits are `softcap_tanh(scale * (hidden @ weight.T + bias))` over the first `size` ids; the rest is padding.

    A bias of -inf, which rules an id out, becomes `LOG_ZERO`, or the lowest number of its type.
    """

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float | None = None
    size: int | None = None
    count: int = field(init=False)  # N
    vocabulary: int = field(init=False)  # number of ids that exist
    wide: torch.dtype = field(init=False)  # of sums: fp64 for fp64 hidden states, else fp32

    def __post_init__(self) -> None:
        rows = self.weight.shape[0]
        object.__setattr__(self, "count", self.hidden.shape[0])
        object.__setattr__(self, "vocabulary", rows if self.size is None else min(self.size, rows))
        object.__setattr__(self, "wide", torch.promote_types(self.hidden.dtype, torch.float32))
        if self.bias is not None:
            lowest = max(LOG_ZERO, torch.finfo(self.bias.dtype).min)  # float16 cannot represent LOG_ZERO
            object.__setattr__(self, "bias", self.bias.clamp(min=lowest))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.count} tokens, {self.vocabulary} ids, {self.hidden.dtype}, {self.hidden.device})"

    def rows(self, index: Any) -> Projection:
        """The same head on some of the tokens."""
        return replace(self, hidden=self.hidden[index])

    def detach(self) -> Projection:
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    def logits(self, size: int | None = None) -> Tensor:
        """(N, size) in fp32 (fp64 stays fp64). bf16 inputs are accumulated and returned in fp32, never rounded to bf16."""
        size = self.vocabulary if size is None else size
        return self.finished(Fp32Linear.apply(self.hidden, self.weight[:size]))

    def finished(self, logits: Tensor) -> Tensor:
        """Apply bias, scale and softcap to the product `hidden @ weight.T`."""
        if self.bias is not None:
            logits = logits + self.bias[: logits.shape[-1]]
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * evenly(torch.tanh, logits / self.softcap)
        return logits


class Logits(Projection):
    """Existing logits in place of a head: (N, V) in `hidden`, and a head of width 0."""

    @classmethod
    def of(cls, logits: Tensor) -> Logits:
        return cls(logits, logits.detach().new_empty(logits.shape[1], 0))

    def logits(self, size: int | None = None) -> Tensor:
        return self.hidden[:, : self.vocabulary if size is None else size].to(self.wide).clamp(min=LOG_ZERO)


def as_projection(name: str, given: Any) -> Projection:
    """A `Projection`, from a `Projection` or from logits."""
    if isinstance(given, Projection):
        return given
    if not isinstance(given, Tensor):
        raise UserError(
            f"{name}: expected a Projection, such as model.predict(batch), or logits of shape (N, V), got {type(given).__name__}. "
            "Of what a transformers model returns, give `.logits`."
        )
    if given.ndim != 2 or not given.is_floating_point():
        raise UserError(
            f"{name}: expected logits of shape (N, V), a row for each token, got {given.dtype} of shape {tuple(given.shape)}. "
            "Of logits of shape (B, T, V), choose the rows: logits[mask], with a mask of shape (B, T)."
        )
    return Logits.of(given)


class Fp32Linear(torch.autograd.Function):
    """`hidden @ weight.T` with fp32 output from low-precision inputs, forwards and backwards.

    `mm(out_dtype=)` exists on CUDA only and has no derivative; on the CPU the operands are upcast.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return matmul(hidden, weight.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad
        operand = grad.to(weight.dtype) if grad.is_cuda else grad
        grad_hidden = matmul(operand, weight).to(hidden.dtype) if need_hidden else None
        grad_weight = matmul(operand.T, hidden).to(weight.dtype) if need_weight else None
        return grad_hidden, grad_weight


def matmul(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """`left @ right`, accumulated and returned in fp32 (fp64 for fp64 inputs), regardless of autocast."""
    with torch.autocast(left.device.type, enabled=False):
        if left.dtype in (torch.bfloat16, torch.float16) and left.is_cuda and left.dtype == right.dtype:
            return torch.mm(left, right, out_dtype=torch.float32, out=out)
        dtype = torch.promote_types(torch.promote_types(left.dtype, right.dtype), torch.float32)
        return torch.mm(left.to(dtype), right.to(dtype), out=out)


def merge_events(logits: Tensor, merge: MergeGroups) -> Tensor:
    """Turn each group of ids into one event: the log-sum-exp sits at the group's first id, the others become log 0.

    Gradients flow through the log-sum-exp to every id of the group.
    """
    for group in merge:
        ids = [index for index in dict.fromkeys(group) if index < logits.shape[-1]]
        if len(ids) > 1:
            columns = upload(np.array(ids, dtype=np.int64), logits.device)
            merged = logits[:, columns].logsumexp(-1, keepdim=True)
            rest = torch.full_like(merged, LOG_ZERO).expand(-1, len(ids) - 1)
            logits = logits.index_copy(-1, columns, torch.cat([merged, rest], dim=-1))
    return logits


def canonical_ids(ids: Tensor, merge: MergeGroups) -> Tensor:
    """Replace each id of a merged group by the group's first id, which holds the event."""
    for group in merge:
        members = list(dict.fromkeys(group))
        if len(members) > 1:
            ids = torch.where(torch.isin(ids, upload(np.array(members), ids.device)), members[0], ids)
    return ids


def log_probs(projection: Projection, size: int, merge: MergeGroups = (), temperature: float = 1.0) -> Tensor:
    """(N, size) log-probabilities after temperature and merging: the definition every fast path is tested against."""
    logits = projection.logits(size)
    if temperature != 1.0:
        logits = logits / temperature
    return merge_events(logits, merge).log_softmax(-1)


P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Keep the mathematics in fp32 when the caller's forward pass runs under bf16 autocast, and kernels on its own GPU."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, (Projection, Tensor))), None)
        if given is None:
            return function(*args, **kwargs)  # it raises the error
        device = given.device if isinstance(given, Tensor) else given.hidden.device
        own_gpu = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.autocast(device.type, enabled=False), own_gpu:
            return function(*args, **kwargs)

    return wrapped


# --- Mixtures: several teachers on one token, combined before the divergence ---
#
# arithmetic   T = sum_i w_i T_i            weights >= 0, normalised: any of the teachers may be right
# geometric    log T = sum_i w_i log T_i    up to a constant; weights of any sign: all agree, or one is subtracted
# sum          sum_i w_i KL(S || T_i)       weights >= 0; only with `reverse_kl`
#
# A part may be the student's own projection: parts are always detached. That gives, as plain divergences,
# Veto (`[teacher, student], [1, beta]`), ExOPD and AlignDistil (`[teacher, reference], [scale, 1 - scale]`), and the
# skew reverse KL of DistiLLM-2 (`arithmetic`, `[teacher, student], [1 - alpha, alpha]` under `reverse_kl`).
#
# A sum equals the reverse KL to the geometric mean, times the sum of the weights, plus a constant, so the gradients are
# equal. It is computed as an unnormalised geometric mean, which is not a distribution: its `teacher_entropy` is meaningless.


Combination = Literal["arithmetic", "geometric", "sum"]


@dataclass(frozen=True, eq=False)
class Mixture:
    """Teachers with their weights. All parts see the same N tokens; ids beyond the smallest vocabulary do not exist."""

    parts: Sequence[Projection]  # logits are converted to projections
    weights: Sequence[float | Tensor]  # numbers, or (N,): one per token
    kind: Combination = "arithmetic"
    factor: float | Tensor | None = None  # factor of every token's loss: a number, or (N,)

    def __post_init__(self) -> None:
        parts = [as_projection(f"part {number} of a mixture", part) for number, part in enumerate(self.parts)]
        object.__setattr__(self, "parts", parts)
        if len(self.parts) != len(self.weights) or not self.parts:
            raise ValueError(
                f"a mixture needs one weight per part; got {len(self.parts)} parts, {self.weights} weights"
            )
        if self.kind not in get_args(Combination):
            raise ValueError(f"unknown mixture {self.kind!r}; known: {', '.join(get_args(Combination))}")
        if self.kind != "geometric" and not self.per_token and (min(self.weights) < 0 or sum(self.weights) <= 0):
            name = "a sum" if self.kind == "sum" else f"{self.kind} mixture"
            raise ValueError(f"{name}: weights {self.weights} must be >= 0 with a positive sum")
        if len({part.count for part in self.parts}) > 1:
            raise ValueError(f"mixture parts differ in tokens: {[part.count for part in self.parts]}")

    @property
    def per_token(self) -> bool:
        return any(isinstance(weight, Tensor) for weight in self.weights)

    @property
    def vocabulary(self) -> int:
        return min(part.vocabulary for part in self.parts)

    @property
    def count(self) -> int:
        return self.parts[0].count

    @property
    def shares(self) -> list[float | Tensor]:
        """The weights, normalised to sum to 1 except in a geometric mixture."""
        total = 1.0 if self.kind == "geometric" else sum(self.weights)
        return [weight / total for weight in self.weights]

    def rows(self, index: Any) -> Mixture:
        weights = [weight[index] if isinstance(weight, Tensor) else weight for weight in self.weights]
        factor = self.factor[index] if isinstance(self.factor, Tensor) else self.factor
        return replace(self, parts=[part.rows(index) for part in self.parts], weights=weights, factor=factor)

    def detach(self) -> Mixture:
        return self.each(Projection.detach)

    def each(self, change: Callable[[Projection], Projection]) -> Mixture:
        return replace(self, parts=[change(part) for part in self.parts])

    @property
    def row_factor(self) -> float | Tensor | None:
        """Factor of every token's loss; None: 1."""
        total = sum(self.weights) if self.kind == "sum" else None
        if total is None or self.factor is None:
            return self.factor if total is None else total
        return self.factor * total

    def log_probs(self, size: int, merge: MergeGroups = (), temperature: float = 1.0) -> Tensor:
        """(N, size) log-probs of the mixture. Parts are merged into events first, so a geometric mean is over events."""
        total: Tensor | None = None
        for part, share in zip(self.parts, self.shares, strict=True):
            if isinstance(share, float) and share == 0:
                continue
            logs = log_probs(part, size, merge, temperature)
            if self.kind == "arithmetic":
                logs.add_(_log(share))
                total = logs if total is None else torch.logaddexp(total, logs, out=total)
            else:
                logs.mul_(share[:, None] if isinstance(share, Tensor) else share)
                total = logs if total is None else total.add_(logs)
        if total is None:
            raise ValueError(f"mixture: every weight is 0: {self.weights}")
        if self.kind == "arithmetic":
            return total
        total[:, absent_ids(merge, size)] = LOG_ZERO  # a negative weight would have made log 0 positive
        return total if self.kind == "sum" else total.log_softmax(-1)


def _log(share: float | Tensor) -> float | Tensor:
    """Log of a share, per row or common to all rows; a finite stand-in for log 0."""
    return share.log().clamp(min=LOG_ZERO)[:, None] if isinstance(share, Tensor) else math.log(share)


def absent_ids(merge: MergeGroups, size: int) -> list[int]:
    """Ids that merging moved into the first id of their group."""
    found: list[int] = []
    for group in merge:
        found += [index for index in dict.fromkeys(group) if index < size][1:]
    return found


Source = Projection | Mixture


def source_log_probs(source: Source, size: int, merge: MergeGroups = (), temperature: float = 1.0) -> Tensor:
    if isinstance(source, Mixture):
        return source.log_probs(size, merge, temperature)
    return log_probs(source, size, merge, temperature)


# --- Elementwise functions with results independent of an element's position ---
#
# On a CPU, PyTorch computes `exp`, `log` or `tanh` in vectors, and the last few elements with a scalar function that may
# round differently (with AVX-512 it does). The same row could then differ at the start and at the end of a batch.


LANES = 64  # elements per iteration of the widest loop: two vectors of 512 bits, 16 bits each


def evenly(function: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Apply `function` with padding to whole iterations of the loop, so that equal elements give equal bits."""
    first = values[0]
    missing = -first.numel() % LANES
    if missing == 0 or first.device.type != "cpu":
        return function(*values)
    return function(*(pad(tensor.flatten(), (0, missing)) for tensor in values))[: first.numel()].view(first.shape)


def even_logsumexp(values: Tensor) -> Tensor:
    """(N, E) -> (N,). A row with only -inf gives -inf."""
    peak = values.amax(-1).clamp(min=torch.finfo(values.dtype).min)
    return evenly(torch.log, evenly(torch.exp, values - peak[:, None]).sum(-1)) + peak


# --- Copying small arrays to the device without waiting for its queued work, as a plain copy would ---


def upload(array: np.ndarray, device: torch.device | str) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()  # the caching host allocator keeps it until the copy is done
    return tensor.to(device, non_blocking=True)
