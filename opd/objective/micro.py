"""One micro-batch: a forward pass of the student and what is known about its tokens.

Axis legend: N = response tokens of the micro-batch, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from opd.divergences import Mixture, Projection, statistics, token_logprobs
from opd.divergences.compute import likeliest_events
from opd.divergences.projection import LOG_ZERO, MergeGroups, Source, canonical_ids, log_probs, source_log_probs, upload
from opd.objective.batch import Batch, ByRollout, concatenated, over_spans
from opd.objective.gates import shuffled_order
from opd.records import Author, Signal, SignalKind, TopK

if TYPE_CHECKING:
    from opd.models.language_model import Pack
    from opd.objective.objective import PreparedTerm


class TeacherHead(Protocol):
    """Turns a teacher's hidden states into its distribution."""

    name: str

    def project(self, hidden: Tensor) -> Source: ...


class HeadModule(Protocol):
    """Maps hidden states (N, width) to (N,) or (N, K) numbers."""

    def __call__(self, hidden: Tensor) -> Tensor: ...


@dataclass
class TokenStatistics:
    """Detached per-token values of one micro-batch, in the order of its rollouts; NaN: not computed.

    Values are untempered, whatever the divergence's temperature, so that runs can be compared. `settle` copies device
    values here once per update: reading them immediately would stall the device between micro-batches.
    """

    loss: dict[str, float] = field(default_factory=dict)
    reverse_kl: np.ndarray = field(default_factory=lambda: np.empty(0))
    entropy: np.ndarray = field(default_factory=lambda: np.empty(0))
    mismatch: np.ndarray = field(default_factory=lambda: np.empty(0))  # |log trainer - log sampler| of student tokens
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # tokens: (clipped or masked, all)
    traces: dict[str, dict[str, Any]] = field(default_factory=dict)  # of traced rollouts, by id
    advantages: dict[str, np.ndarray] = field(default_factory=dict)  # (N,) by term, if a rollout is traced
    losses: dict[str, Tensor] = field(default_factory=dict)  # by term, on the device until `settle`
    overlap: np.ndarray = field(default_factory=lambda: np.empty(0))  # see `note_overlap`; empty if nobody asks for it
    kl: dict[str, np.ndarray] = field(default_factory=dict)  # (N,) exact KL(student || teacher) by role
    log_ratio: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # (N,) log student - log teacher of the token, by role
    _unread: list[Callable[[], None]] = field(default_factory=list)

    def later(self, read: Callable[[], None]) -> None:
        """Schedule a read from the device for `settle`, which runs the reads in order."""
        self._unread.append(read)

    def settle(self, moved: bool = False) -> None:
        """Run the scheduled reads.

        `moved`: the policy was updated since sampling, so the mismatch with the sampler is unknown (NaN).
        """
        for read in self._unread:
            read()
        self._unread.clear()
        self.loss |= {name: float(loss) for name, loss in self.losses.items()}
        self.losses.clear()
        if moved:
            self.mismatch[:] = np.nan

    @classmethod
    def empty(cls, count: int) -> TokenStatistics:
        nothing = [np.full(count, np.nan) for _ in range(3)]
        return cls(reverse_kl=nothing[0], entropy=nothing[1], mismatch=nothing[2], overlap=np.empty(0))


@dataclass(frozen=True, eq=False)
class MicroBatch:
    pack: Pack
    projection: Projection  # of the student, one row per response token
    batch: Batch
    teachers: Mapping[str, TeacherHead]
    merge: MergeGroups
    temperature: float  # of sampling
    teacher_mix: float  # the teacher's share of the sampling distribution
    statistics: TokenStatistics
    modules: Mapping[str, HeadModule] = field(default_factory=dict)  # trainable modules by name
    states: Tensor | None = None  # (N, L, D) the student's hidden states after several layers, if a term reads them

    def module(self, name: str, rows: np.ndarray) -> Tensor:
        """Output of a trainable module for some rows, with gradients. Its input is the state that predicts the token.

        It is in full precision, regardless of the student's.
        """
        with torch.autocast(self.device.type, enabled=False):
            return self.modules[name](self.rows(rows).hidden.to(self.wide))

    @property
    def device(self) -> torch.device:
        return self.projection.hidden.device

    @cached_property
    def traced_N(self) -> np.ndarray:
        """(N,) bool: tokens of traced rollouts."""
        return np.repeat(
            [rollout.id in self.batch.traced for rollout in self.pack.rollouts], self.pack.response_lengths
        )

    @property
    def wide(self) -> torch.dtype:
        """Data type of sums."""
        return self.projection.wide

    def tensor(self, values: np.ndarray) -> Tensor:
        return upload(values, self.projection.hidden.device)

    def rows(self, rows: np.ndarray) -> Projection:
        """The student's projection of some rows, in their order; for all rows, the projection itself."""
        return self.projection if rows.size == self.projection.count else self.projection.rows(self.tensor(rows))

    def column(self, name: str, rows: np.ndarray) -> Tensor:
        return self.tensor(concatenated(self.pack.rollouts, name)[rows])

    def tokens(self, rows: np.ndarray) -> Tensor:
        """Ids of the response tokens of some rows. Checks that they exist, because on a device a bad id ends the process."""
        ids = concatenated(self.pack.rollouts, "response_ids").astype(np.int64)[rows]
        size = self.projection.vocabulary
        unknown = ids[(ids < 0) | (ids >= size)]
        if unknown.size:
            raise ValueError(f"tokens: id {unknown[0]} is outside the vocabulary of {size} ids")
        return self.tensor(ids)

    def segment(self, rows: np.ndarray) -> Tensor:
        """Rollout numbers of some rows, counted from 0 without gaps."""
        every = np.repeat(np.arange(len(self.pack.rollouts)), self.pack.response_lengths)
        return self.tensor(np.unique(every[rows], return_inverse=True)[1])

    def teacher_logprobs(self, role: str, rows: np.ndarray) -> np.ndarray:
        return np.concatenate(self.batch.logprobs(role, self.pack.rollouts))[rows]

    def teacher_projections(self, role: str, open_N: np.ndarray) -> Iterator[tuple[np.ndarray, Source]]:
        """(rows, projection) per teacher. The teacher's head has the student's precision."""
        for rows, name, hidden in self.teacher_states(role, "hidden", open_N):
            source, half = self.teachers[name].project(hidden), partial(in_half, dtype=self.projection.hidden.dtype)
            yield rows, source.each(half) if isinstance(source, Mixture) else half(source)

    def teacher_states(
        self, role: str, kind: SignalKind, open_N: np.ndarray
    ) -> Iterator[tuple[np.ndarray, str, Tensor]]:
        """(rows, name, hidden states) per teacher, usually one because micro-batches are ordered by teacher.

        Leaves out rows that are not open, and rows without a signal.
        """
        device, signals = self.projection.hidden.device, self.batch.signals[role, kind]
        waits = (
            device.type == "cpu"
        )  # a copy from a GPU must be awaited; one to a GPU is ordered before what reads it there
        known = [signals[rollout.id] for rollout in self.pack.rollouts]
        names = [signal.teacher if signal.mask.any() else "" for signal in known]
        owner = np.repeat(names, self.pack.response_lengths)
        open_N = open_N & np.concatenate([signal.mask for signal in known])
        for name in dict.fromkeys(filter(None, names)):
            rows = np.flatnonzero((owner == name) & open_N)
            values = [signal.values for signal, teacher in zip(known, names, strict=True) if teacher == name]
            hidden = torch.cat([value.to(device, non_blocking=not waits) for value in values])
            chosen = open_N[owner == name]
            if not chosen.all():
                hidden = hidden[self.tensor(np.flatnonzero(chosen))]
            yield rows, name, hidden

    def teacher_distributions(self, role: str, open_N: np.ndarray) -> Iterator[tuple[np.ndarray, Source | TopK]]:
        """Like `teacher_projections`, for either kind of signal: hidden states or top-k ids."""
        if (role, "hidden") in self.batch.signals:
            return self.teacher_projections(role, open_N)
        return iter([teacher_tops(self.pack, self.batch.signals[role, "topk"], open_N)])

    def shuffled(self, role: str, seed: int, factor: ByRollout) -> MicroBatch:
        """The same micro-batch with a role's signals at other tokens of the rollout, among those that `factor` keeps."""
        kind: SignalKind = "hidden" if (role, "hidden") in self.batch.signals else "topk"
        moved = {}
        for rollout in self.pack.rollouts:
            signal = self.batch.signals[role, kind][rollout.id]
            order = shuffled_order(f"{seed}/shuffle/{rollout.id}", signal.mask & (factor[rollout.id] != 0))
            moved[rollout.id] = _reordered(signal, order)
        signals = {**self.batch.signals, (role, kind): moved}
        return replace(self, batch=replace(self.batch, signals=signals))

    # --- Log-probs of the sampled tokens, by policy ---

    def behaviour(self, rows: np.ndarray) -> Tensor:
        """Log-probs under the sampling distribution, in the transform of `current`: the denominator of ratios."""
        return self.column("logprob_sampled", rows) if self.teacher_mix else self.sampler(rows)

    def sampler(self, rows: np.ndarray) -> Tensor:
        """The student's own log-probs from the sampler: the baseline for mismatch."""
        return self.column("logprob" if self.temperature == 1.0 else "logprob_sampled", rows)

    def proximal(self, rows: np.ndarray, current: Tensor) -> Tensor:
        """The trainer's log-probs before this batch's updates; with one update per batch, the current ones."""
        known = self.batch.first_pass.proximal
        if not known:
            return current.detach()
        return self.tensor(np.concatenate([known[item.id] for item in self.pack.rollouts])[rows]).float()

    def candidates(self, k: int, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """(N, K) ids and log-probs of the student's likeliest events before this batch's updates."""
        ids, logprobs = (
            known.get(k) for known in (self.batch.first_pass.likeliest_ids, self.batch.first_pass.likeliest)
        )
        if ids is None or logprobs is None:  # one update per batch: they are the current ones
            return likeliest_events(self.rows(rows).detach(), k, self.merge)
        chosen = [np.concatenate([known[item.id] for item in self.pack.rollouts])[rows] for known in (ids, logprobs)]
        return self.tensor(chosen[0].astype(np.int64)), self.tensor(chosen[1])

    def current(self, rows: np.ndarray) -> Tensor:
        """Log-probs for ratios, both sides under the same transform: merged at temperature 1, otherwise tempered."""
        projection, ids = self.rows(rows), self.tokens(rows)
        if self.temperature == 1.0:
            return token_logprobs(projection, ids, merge=self.merge, trusted=True)
        return token_logprobs(projection, ids, temperature=self.temperature, trusted=True)

    def policy(self, rows: np.ndarray) -> Tensor:
        """Log-probs of the policy itself, untempered, with gradients."""
        return token_logprobs(self.rows(rows), self.tokens(rows), merge=self.merge, trusted=True)

    def untempered(self, rows: np.ndarray, current: Tensor) -> Tensor:
        """Detached log-probs of the policy itself, for advantages, which are untempered."""
        if self.temperature == 1.0:
            return current.detach()
        projection = self.rows(rows).detach()
        return token_logprobs(projection, self.tokens(rows), merge=self.merge, trusted=True)

    # --- Recording metrics ---

    def log_ratio(self, rows: np.ndarray, current: Tensor) -> Tensor:
        """log rho (trainer over sampler) of the student's tokens, recorded as mismatch; 0 at other authors' tokens."""
        gap = self.proximal(rows, current) - self.sampler(rows)
        theirs = concatenated(self.pack.rollouts, "author")[rows] != Author.STUDENT
        self.note("mismatch", rows, gap, np.where(theirs, np.nan, 0.0))
        return gap.masked_fill(self.tensor(theirs), 0.0)

    def note_mismatch(self, rows: np.ndarray, logprobs: Tensor) -> None:
        """Record |log trainer - log sampler| of the policy itself, at the student's tokens."""
        theirs = concatenated(self.pack.rollouts, "author")[rows] != Author.STUDENT
        sampler = np.where(theirs, np.nan, concatenated(self.pack.rollouts, "logprob")[rows])
        self.note("mismatch", rows, logprobs, sampler)

    def note(
        self,
        name: str,
        rows: np.ndarray,
        values: Tensor,
        distance_to: np.ndarray | None = None,
        role: str | None = None,
    ) -> None:
        """Record a per-token statistic (`reverse_kl`, `entropy`, `mismatch` or `overlap`), or its distance to other values.

        `role`: for `kl` and `log_ratio`, of which there is one per role.
        """
        into = getattr(self.statistics, name)
        if role is not None:
            into = into.setdefault(role, np.full(self.projection.count, np.nan))
        self.statistics.later(partial(_put, into, rows, values.detach(), distance_to))

    def estimate(self, rows: np.ndarray, values: np.ndarray | Tensor, role: str) -> None:
        """Record the log-ratio to the teacher, a one-sample estimate of reverse KL, where no term computed it exactly."""
        ratios = self.statistics.log_ratio.setdefault(role, np.full(self.projection.count, np.nan))

        def read() -> None:
            known = self.statistics.reverse_kl[rows]
            found = values.cpu().numpy() if isinstance(values, Tensor) else values
            ratios[rows] = found
            self.statistics.reverse_kl[rows] = np.where(np.isnan(known), found, known)

        self.statistics.later(read)

    def note_advantage(self, name: str, rows: np.ndarray, values: Tensor) -> None:
        """Record a term's advantages for traced rollouts."""
        if self.traced_N[rows].any():
            noted = self.statistics.advantages.setdefault(name, np.full(self.projection.count, np.nan))
            self.statistics.later(partial(_put, noted, rows, values))

    def count(self, name: str, touched: Tensor) -> None:
        number, every = touched.sum(), touched.numel()
        self.statistics.later(lambda: self.statistics.counts.update({name: (int(number), every)}))


def _reordered(signal: Signal, order: np.ndarray) -> Signal:
    """A signal whose values stand at other tokens. A rollout without a signal has no values."""
    if not signal.mask.any():
        return signal
    if isinstance(signal.values, TopK):
        return replace(signal, values=signal.values.rows(order))
    return replace(signal, values=signal.values[torch.from_numpy(order).to(signal.values.device)])


def _put(into: np.ndarray, rows: np.ndarray, values: Tensor, distance_to: np.ndarray | None = None) -> None:
    found = values.cpu().numpy()
    into[rows] = found if distance_to is None else np.abs(found - distance_to)


def autocast_head(projection: Projection) -> Projection:
    """Under autocast, cast the head's operands to its type, whatever type the weights and the last norm have.

    This way they reach the fast kernels. Logits are still accumulated and returned in fp32, and gradients have the
    weights' type.
    """
    device = projection.hidden.device.type
    if not torch.is_autocast_enabled(device) or projection.weight.dtype == torch.float64:
        return projection
    return in_half(projection, torch.get_autocast_dtype(device))


def in_half(projection: Projection, dtype: torch.dtype) -> Projection:
    """Cast the operands to a half precision; unchanged if the student computes in fp32 or fp64."""
    if dtype not in (torch.bfloat16, torch.float16):
        return projection
    return replace(projection, hidden=projection.hidden.to(dtype), weight=projection.weight.to(dtype))


def teacher_tops(pack: Pack, signals: Mapping[str, Signal], open_N: np.ndarray) -> tuple[np.ndarray, TopK]:
    """(rows, their likeliest ids) from any teacher. Leaves out rows without a signal."""
    known = [signals[rollout.id] for rollout in pack.rollouts]
    rows = np.flatnonzero(open_N & np.concatenate([signal.mask for signal in known]))
    scored = [signal for signal in known if signal.mask.any()]
    reached = np.concatenate([np.full(signal.mask.size, signal.mask.any()) for signal in known])
    return rows, TopK.join([signal.values for signal in scored]).rows((np.cumsum(reached) - 1)[rows])


# --- How far student and teacher agree on the likeliest ids ---


@torch.no_grad()
def note_overlap(micro: MicroBatch, k: int) -> None:
    """Record at each token the share of the k likeliest ids that the student and its teacher have in common."""
    if not {("teacher", "hidden"), ("teacher", "topk")} & micro.batch.signals.keys():
        return  # no term compares distributions at this step
    micro.statistics.overlap = np.full(micro.projection.count, np.nan)
    for rows, teacher in micro.teacher_distributions("teacher", np.ones(micro.projection.count, dtype=bool)):
        if not rows.size:
            continue
        student = micro.rows(rows).detach()
        if isinstance(teacher, TopK):
            ours, _ = likeliest_events(student, k, micro.merge)
            theirs = canonical_ids(micro.tensor(teacher.ids[:, :k].astype(np.int64)), micro.merge)
            values = (ours[:, :, None] == theirs[:, None, :]).any(-1).sum(-1) / k
        else:
            found = statistics(student, teacher, merge=micro.merge, overlap=k, trusted=True).overlap
            assert found is not None
            values = found
        micro.note("overlap", rows, values)


# --- Token-by-token traces of a few rollouts, for inspection (`log.samples`) ---
#
# Traces reuse the training forward pass, without gradients, so training does not change. Logits exist for a few rows at
# a time, and only of these rollouts.


TOP = 5  # likeliest ids of both sides
CHUNK = 64  # rows of logits held at once
NUMBERS = ("student", "teacher", "entropy", "teacher_entropy", "reverse_kl")
Trace = dict[str, Any]  # (T,) and (T, TOP) arrays; `terms` holds weight, advantage and gates by the term's name


@torch.no_grad()
def trace_tokens(micro: MicroBatch, terms: Sequence[PreparedTerm], weights: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Record the traced rollouts of a micro-batch."""
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
    """The role shown next to the student, and its most informative signal.

    A teacher with another tokenizer is not shown by id.
    """
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
    """Record both distributions at some rows; without a teacher, only the student's."""
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
        micro.statistics.later(lambda found=found, rows=rows[part]: _put_columns(columns, rows, found))  # type: ignore[misc]


def _side(name: str, logprobs: Tensor, tokens: Tensor, size: int) -> dict[str, Tensor]:
    """Columns of one side. A token without an id on that side has log-prob `LOG_ZERO`."""
    top = logprobs.topk(min(TOP, size))
    at = logprobs.gather(-1, tokens.clamp(max=size - 1)).masked_fill(tokens >= size, LOG_ZERO).squeeze(-1)
    return {name: at, f"{name}_top": top.values, f"{name}_top_ids": top.indices}


def _put_columns(columns: dict[str, np.ndarray], rows: np.ndarray, found: Mapping[str, Tensor]) -> None:
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
    """Split the columns by rollout, and add the signals of teachers without distributions and the terms' values."""
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
            trace |= dict(_teacher_columns(kind, signal, rollout.response_ids))
            trace["ratio"] = over_spans(trace["student"], signal) - trace["teacher"]
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
    """Replace log 0 by NaN, because it cannot be plotted."""
    return np.where(values < LOG_ZERO / 2, np.nan, values)


def _teacher_columns(kind: SignalKind, signal: Signal, ids: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
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
