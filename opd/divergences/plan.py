"""Which backend runs, how large its pieces are, and why: `auto` never picks silently."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from opd.divergences.formulas import KINDS
from opd.divergences.mixture import Mixture, Source
from opd.divergences.projection import Logits, Projection
from opd.divergences.rows import Job
from opd.divergences.supports import TopRows

Backend = Literal["auto", "reference", "chunked", "triton"]
FAST_TILE_BYTES = 1792 << 20  # both fp32 tiles of `fast` when no budget is given
VALUES_TILE_BYTES = 512 << 20  # one fp32 tile of a pass that needs no gradient of a divergence
FEWEST_FAST_ROWS = 256  # below this the head's gradient is read and written more often than it is worth
SMALL_ROWS, SMALL_SLAB = 8192, 8192  # tile of `small`: as efficient as larger ones, half a GiB
FEWEST_SMALL = 256  # rows and columns of the smallest tile worth launching
ALIGNMENT = 64  # columns; keeps rows of a tile aligned for the tensor cores in any type


@dataclass(frozen=True)
class KernelPlan:
    """A choice and its reason. `chunk` rows of tokens at a time; `slab` ids of the vocabulary at a time (0: all)."""

    backend: str
    reason: str
    chunk: int = 1
    slab: int = 0

    @property
    def mode(self) -> str:
        """`fast` keeps whole rows of a chunk of tokens; `small` keeps tiles and computes them again."""
        return "small" if self.slab else "fast"


def chunk_tokens(count: int, width: int, bytes_: int) -> int:
    """Tokens whose (chunk, width) fp32 array fits."""
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
    if student.hidden.is_cuda:  # a GPU wants more rows at once than a processor's cache does
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
    """For passes without a divergence's gradient, and log-probs: pieces of half a GiB on a GPU."""
    ranked = "top-k overlap needs whole sorted rows" if job.overlap and teacher is not None else ""
    obstacle = ranked or mixture_obstacle(teacher) or heads_obstacle(_heads(student, teacher))
    if student.hidden.is_cuda:
        chunk_bytes = VALUES_TILE_BYTES // (4 if obstacle else 1)
    chunk = chunk_tokens(student.count, job.size, chunk_bytes)
    return KernelPlan("chunked", obstacle, chunk) if obstacle else KernelPlan("triton", "CUDA tensors", _rounded(chunk))


def triton_plan(student: Projection, size: int, memory: int | None) -> KernelPlan:
    """`fast` if its tiles fit the budget beside the gradients, else `small`."""
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
    """Rows and columns of a tile of `small`, slabs of equal size; (0, 0) if none fits.

    `width` is that of a slab's gradient.
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
    """Whole tiles of a matrix product, which are 128 or 192 rows high."""
    return chunk // 384 * 384 if chunk > 384 else chunk // 128 * 128 if chunk > 128 else chunk
