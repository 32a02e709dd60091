"""What is written down of a few rollouts, token by token, for somebody to look at (`log.samples`).

It is read off the forward pass that trains on them, without gradients: nothing that is trained on changes. Logits exist
for a few rows at a time, and only of these rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from opd.divergences.mixture import Source, source_log_probs
from opd.divergences.projection import LOG_ZERO, canonical_ids, log_probs
from opd.objective.batch import beside
from opd.objective.micro import MicroBatch
from opd.types import Signal, SignalKind, TopK

if TYPE_CHECKING:
    from opd.objective.prepare import PreparedTerm

TOP = 5  # likeliest ids of both sides
CHUNK = 64  # rows whose logits are held at once
NUMBERS = ("student", "teacher", "entropy", "teacher_entropy", "reverse_kl")
Trace = dict[str, Any]  # (T,) and (T, TOP) arrays; under `terms`, by the term's name, weight, advantage and gates


@torch.no_grad()
def trace_tokens(micro: MicroBatch, terms: Sequence[PreparedTerm], weights: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Note the traced rollouts of a micro-batch."""
    if not micro.traced_N.any():
        return
    role, kind = _scored(micro, terms)
    columns = {name: np.full(micro.projection.count, np.nan) for name in NUMBERS}
    columns |= {name: np.full((micro.projection.count, TOP), np.nan) for name in ("student_top", "teacher_top")}
    columns |= {f"{name}_ids": np.full((micro.projection.count, TOP), -1.0) for name in ("student_top", "teacher_top")}
    left_N = micro.traced_N.copy()
    if kind == "hidden":
        for rows, teacher in micro.teacher_projections(role, micro.traced_N):
            _look(micro, rows, teacher, columns)
            left_N[rows] = False
    _look(micro, np.flatnonzero(left_N), None, columns)
    micro.statistics.later(lambda: _finish(micro, terms, weights, columns, role, kind))


def _scored(micro: MicroBatch, terms: Sequence[PreparedTerm]) -> tuple[str, SignalKind | None]:
    """Which role is shown beside the student, and by what it said the most. One that reads other tokens is not laid out by id."""
    signals = micro.batch.signals
    roles = sorted(dict.fromkeys(term.term.role for term in terms), key=lambda role: role != "teacher")
    kinds: tuple[SignalKind, ...] = ("hidden", "topk", "logprobs_at")
    for role in roles:
        for kind in kinds:
            found = signals.get((role, kind), {})
            crossed = any(signal.crossed is not None for signal in found.values())
            if found and (kind == "logprobs_at" or not crossed):
                return role, kind
    return "", None


def _look(micro: MicroBatch, rows: np.ndarray, teacher: Source | None, columns: dict[str, np.ndarray]) -> None:
    """Both sides' distributions at some rows; without a teacher's, the student's."""
    size = micro.projection.vocabulary if teacher is None else min(micro.projection.vocabulary, teacher.vocabulary)
    tokens = canonical_ids(micro.tokens(rows), micro.merge)[:, None]
    for first in range(0, rows.size, CHUNK):
        part = slice(first, first + CHUNK)
        student = micro.rows(rows[part]).detach()
        log_s = log_probs(student, size, micro.merge)
        found = _side("student", log_s, tokens[part], size)
        found["entropy"] = -(log_s.exp() * log_s).sum(-1)
        if teacher is not None:
            log_t = source_log_probs(teacher.rows(part), size, micro.merge)
            found |= _side("teacher", log_t, tokens[part], size)
            found["teacher_entropy"] = -(log_t.exp() * log_t).sum(-1)
            found["reverse_kl"] = (log_s.exp() * (log_s - log_t)).sum(-1)
        micro.statistics.later(lambda found=found, rows=rows[part]: _put(columns, rows, found))  # type: ignore[misc]


def _side(name: str, logprobs: Tensor, tokens: Tensor, size: int) -> dict[str, Tensor]:
    """A token that one side has no id for has no log-prob there."""
    top = logprobs.topk(min(TOP, size))
    at = logprobs.gather(-1, tokens.clamp(max=size - 1)).masked_fill(tokens >= size, LOG_ZERO).squeeze(-1)
    return {name: at, f"{name}_top": top.values, f"{name}_top_ids": top.indices}


def _put(columns: dict[str, np.ndarray], rows: np.ndarray, found: Mapping[str, Tensor]) -> None:
    for name, values in found.items():
        array = values.double().cpu().numpy()
        if array.ndim == 2:
            columns[name][rows, : array.shape[1]] = array
        else:
            columns[name][rows] = array


def _finish(
    micro: MicroBatch,
    terms: Sequence[PreparedTerm],
    weights: Sequence[Mapping[str, np.ndarray]],
    columns: dict[str, np.ndarray],
    role: str,
    kind: SignalKind | None,
) -> None:
    """Cut by rollout; with what a teacher said that gives no distribution, and what terms made of it."""
    ends = np.cumsum(micro.pack.response_lengths)
    for rollout, end in zip(micro.pack.rollouts, ends, strict=True):
        rows = slice(end - rollout.response_ids.size, end)
        if not micro.traced_N[rows].any():
            continue
        trace: Trace = {name: values[rows] for name, values in columns.items()}
        for name in ("student", "teacher"):
            values, ids = trace[f"{name}_top"], trace[f"{name}_top_ids"].astype(np.int64)
            trace[name] = _known(trace[name])
            trace[f"{name}_top_ids"] = np.where(np.isnan(_known(values)), -1, ids)
            trace[f"{name}_top"] = _known(values)
        trace["by"] = ""
        if kind is not None:
            signal = micro.batch.signals[role, kind][rollout.id]
            trace["by"] = signal.teacher
            trace |= dict(_said(kind, signal, rollout.response_ids))
            trace["ratio"] = beside(trace["student"], signal) - trace["teacher"]
        trace["terms"] = {
            term.name: {
                "weight": by_rollout[rollout.id],
                "gates": {name: gate[rollout.id] for name, gate in term.gates.items()},
            }
            | (
                {"advantage": values[rows]}
                if (values := micro.statistics.advantages.get(term.name)) is not None
                else {}
            )
            for term, by_rollout in zip(terms, weights, strict=True)
        }
        micro.statistics.traces[rollout.id] = trace


def _known(values: np.ndarray) -> np.ndarray:
    """log 0 is not a number that can be drawn."""
    return np.where(values < LOG_ZERO / 2, np.nan, values)


def _said(kind: SignalKind, signal: Signal, ids: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if kind == "logprobs_at":
        yield "teacher", np.where(signal.mask, np.asarray(signal.values, dtype=np.float64), np.nan)
    elif kind == "topk" and isinstance(signal.values, TopK) and signal.mask.any():
        top, mask = signal.values, signal.mask[:, None]
        count = min(TOP, top.ids.shape[1])
        likeliest, logprobs = np.full((ids.size, TOP), -1), np.full((ids.size, TOP), np.nan)
        likeliest[:, :count] = np.where(mask, top.ids[:, :count], -1)
        logprobs[:, :count] = np.where(mask, top.logprobs[:, :count], np.nan)
        here = np.where(mask & (top.ids == ids[:, None]), top.logprobs, np.nan)
        found = np.isfinite(here)
        yield "teacher", np.where(found.any(1), np.nan_to_num(here).sum(1), np.nan)
        yield "teacher_top_ids", likeliest
        yield "teacher_top", logprobs
