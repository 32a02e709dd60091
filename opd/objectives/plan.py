"""Which backend runs, how large its pieces are, and why: `auto` never picks silently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from opd.objectives.mixture import Source
from opd.objectives.projection import Projection
from opd.objectives.rows import Job
from opd.objectives.supports import TopRows

Backend = Literal["auto", "reference", "chunked", "triton"]


@dataclass(frozen=True)
class Plan:
    """A choice and its reason. `chunk` rows of tokens at a time; `slab` ids of the vocabulary at a time (0: all)."""

    backend: str
    reason: str
    chunk: int = 1
    slab: int = 0

    @property
    def mode(self) -> str:
        """`fast` keeps whole rows of a chunk of tokens; `small` keeps tiles and recomputes them."""
        return "small" if self.slab else "fast"


def chunk_tokens(count: int, width: int, bytes_: int) -> int:
    """Tokens whose (chunk, width) fp32 array fits."""
    return max(1, min(count, bytes_ // (4 * max(width, 1))))


def make_plan(
    job: Job, student: Projection, teacher: Source | TopRows, backend: Backend, memory: int | None, chunk_bytes: int
) -> Plan:
    if backend not in get_args(Backend):
        raise ValueError(f"unknown backend {backend!r}; known: {', '.join(get_args(Backend))}")
    if memory is not None:
        chunk_bytes = min(chunk_bytes, max(memory // 8, 1))  # raw logits of both sides and the temporaries of a block
    chunk = chunk_tokens(student.count, job.size, chunk_bytes)
    if backend == "reference":
        return Plan("reference", "asked for", student.count)
    if backend == "chunked":
        return Plan("chunked", "asked for", chunk)
    return Plan("chunked", "", chunk)
