"""The terms of a recipe as one loss on packed rollouts.

`prepare` computes weights and everything else that needs the whole batch before it is split; a call then multiplies
and sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from opd.common.errors import UserError
from opd.common.short_forms import SHORT_FORMS
from opd.divergences import Mixture, Projection, statistics
from opd.divergences.compute import likeliest_events
from opd.divergences.projection import (
    MergeGroups,
    Source,
    canonical_ids,
    log_probs,
    merge_events,
    source_log_probs,
)
from opd.objective.batch import Batch, ByRollout, Signals, require_per_token
from opd.objective.gates import GateView
from opd.objective.micro import (
    HeadModule,
    MicroBatch,
    TeacherHead,
    TokenStatistics,
    autocast_head,
    note_overlap,
    trace_tokens,
)
from opd.objective.term import AUTHOR, AnyTerm, Term
from opd.records import Layers, Rollout, SignalKind, SignalNeed, TeacherLike
from opd.registry import Needs, validate_settings

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel, Pack


TokenWeights = Sequence[Mapping[str, np.ndarray]]  # one mapping per active term: rollout id -> (T,)


@dataclass
class PreparedBatch:
    """A batch with the active terms prepared for it."""

    batch: Batch
    terms: list[PreparedTerm] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # of all terms

    def weights(self, rollouts: Sequence[Rollout]) -> TokenWeights:
        """Weights of every token of an update's rollouts. They include all denominators of the loss."""
        return [term.term.weights(term, rollouts) for term in self.terms]


class DrawSettings(Protocol):
    """The sampling settings that an objective needs: a recipe's `rollout`, or an `opd.Sampler`."""

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def teacher_mix(self) -> float: ...


@dataclass(frozen=True)
class DefaultDrawSettings:
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    teacher_mix: float = 0.0


class Objective:
    """A sum of terms. `drawing`: how rollouts are sampled. `stop_ids` count as one event; default: the student's.

    In your own loop, with the syntax of a recipe: `opd.Objective({"divergence": "jsd", "beta": 0.3}, teacher, sampler)`.
    """

    def __init__(
        self,
        terms: Term | Mapping[str, Any] | Sequence[Term | Mapping[str, Any]],
        teachers: TeacherLike | Mapping[str, TeacherLike] | None = None,
        drawing: DrawSettings | None = None,
        stop_ids: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> None:
        given: list[Term] = validate_settings("objective", Annotated[list[AnyTerm], SHORT_FORMS["objective"]], terms)
        self.terms = [term.joined(given) for term in given]
        self.modules: Mapping[str, HeadModule] = {}  # trainable modules by name, set by the trainer
        teachers = teachers if teachers is not None else {}
        self.teachers = teachers if isinstance(teachers, Mapping) else {teachers.name: teachers}
        self.drawing: DrawSettings = drawing or DefaultDrawSettings()
        self._stop_ids = stop_ids
        self._seed = seed
        self._each = [term.needs() for term in self.terms]
        # by updates and the numbers of the active terms
        self._known: dict[tuple[int, ...], tuple[Needs, list[tuple[str, SignalKind]]]] = {}
        self.plateau: int | None = None  # the step after which evaluation stopped improving
        self.overlap = 0  # how many of the likeliest ids `note_overlap` compares; 0: none

    def __repr__(self) -> str:
        terms = " + ".join(f"{term.coefficient} {term.name}" for term in self.terms)
        return f"Objective({terms}, teachers: {', '.join(self.teachers) or 'none'})"

    def active(self, step: int) -> list[tuple[int, Term, float]]:
        """(number, term, coefficient) of the terms with a nonzero coefficient at this step."""
        terms = [(index, term, term.coefficient.at(step, self.plateau)) for index, term in enumerate(self.terms)]
        return [item for item in terms if item[2] != 0]

    def needs(self, step: int, updates: int = 1) -> list[tuple[str, SignalKind]]:
        """(role, kind of signal) needed at this step. A term with coefficient 0 costs nothing.

        Hidden states come first, because log-probs follow from them. `updates`: optimiser steps per batch.
        """
        return self._needs(step, updates)[1]

    def _with_hidden(self, role: str) -> bool:
        """Whether all teachers of a role provide hidden states. A role gives one kind of signal per batch."""
        return all("hidden" in teacher.offers for teacher in self.teachers.values() if teacher.role == role)

    def need_given(self, signals: Signals, role: str, kind: SignalKind) -> SignalNeed:
        """The request to a role's teachers, given the signals already known: a teacher reads a rollout only once.

        For top-k signals, k is the largest that any term needs.
        """
        known = signals.get((role, "hidden")) if kind in ("logprobs_at", "topk") else None
        wanted = [k for needs in self._each for asked, k in needs.topk if asked == role]
        return SignalNeed(
            kind, k=max(wanted, default=None) if kind == "topk" else None, layers=self.layers, hidden=known
        )

    @cached_property
    def layers(self) -> Layers:
        """Those whose hidden states a term reads; without such a term, the last."""
        return next((term.states for term in self.terms if term.states != "last"), "last")

    def _needs(self, step: int, updates: int) -> tuple[Needs, list[tuple[str, SignalKind]]]:
        """What the active terms need, and the signals among it, hidden states first."""
        key = updates, *(number for number, _, _ in self.active(step))
        if key not in self._known:
            needs = Needs()
            for number in key[1:]:
                needs |= self.terms[number].needs(updates)
            signals = sorted(needs.chosen(self._with_hidden), key=lambda need: need[1] != "hidden")
            self._known[key] = needs, signals
        return self._known[key]

    def prepare(
        self,
        student: LanguageModel,
        batch: Batch,
        step: int,
        cut: Callable[[Sequence[Rollout]], list[Pack]],
        updates: int = 1,
        complete: Callable[[Batch], None] = lambda batch: None,
    ) -> PreparedBatch:
        """Compute gates, advantages and denominators.

        `cut` splits the batch into micro-batches, for terms that need a first pass of the student. `complete` adds the
        first-pass results of the other ranks, if each rank takes part of the batch.
        """
        asked = self._needs(step, updates)[0].student
        if asked:
            packs, merge = cut(batch.rollouts), (student.stop_ids if self._stop_ids is None else self._stop_ids,)
            take_first_pass(student, packs, batch, asked, self.teachers, merge, self.drawing.temperature, self.modules)
            complete(batch)
        terms = [
            prepare_term(
                term,
                f"{index}:{term.name}",
                coefficient,
                batch,
                self.drawing.max_new_tokens,
                self._seed,
                step,
                self._each[index],
            )
            for index, term, coefficient in self.active(step)
        ]
        return PreparedBatch(batch, terms, {name: value for term in terms for name, value in term.metrics.items()})

    def __call__(
        self, student: LanguageModel, pack: Pack, prepared: PreparedBatch, weights: TokenWeights
    ) -> tuple[Tensor, TokenStatistics]:
        if self.layers == "last":
            predicted, states = student.predict(pack), None
        else:
            predicted, states = student.predict_layers(pack, self.layers)
        projection = autocast_head(predicted)
        micro = MicroBatch(
            pack,
            projection,
            prepared.batch,
            self.teachers,
            (student.stop_ids if self._stop_ids is None else self._stop_ids,),
            self.drawing.temperature,
            self.drawing.teacher_mix,
            TokenStatistics.empty(projection.count),
            self.modules,
            states,
        )
        total = projection.hidden.new_zeros((), dtype=torch.float32)
        for term, by_rollout in zip(prepared.terms, weights, strict=True):
            weight_N = np.concatenate([by_rollout[rollout.id] for rollout in pack.rollouts])
            if weight_N.any():  # skip a term that weighs no token here
                loss = term.term.loss(term, micro, weight_N)
                micro.statistics.losses[term.name] = loss.detach()
                total = total + loss
        if self.overlap:
            note_overlap(micro, self.overlap)
        if prepared.batch.traced:
            trace_tokens(micro, prepared.terms, weights)
        return total, micro.statistics


# --- Preparing terms: gates, advantages and denominators ---
#
# Tokens are masked, and denominators are computed, only here.


@dataclass
class PreparedTerm:
    """One term on one batch. Masks and factors are (T,) by rollout id."""

    term: Term
    name: str
    coefficient: float
    batch: Batch
    max_new_tokens: int
    eligible: ByRollout  # bool: tokens of the authors that the term trains on, gated or not
    counted: ByRollout  # bool: in the denominator
    factor: ByRollout  # product of the gates' factors; 0: closed
    metrics: dict[str, float]  # of the gates
    gates: dict[str, ByRollout] = field(default_factory=dict)  # factors of each gate, if rollouts are traced
    step: int = 1  # of the stage
    seed: int = 0  # of keyed draws
    state: Any = None  # result of the term's own `prepare`


def prepare_term(
    term: Term,
    name: str,
    coefficient: float,
    batch: Batch,
    max_new_tokens: int,
    seed: int,
    step: int = 1,
    needs: Needs | None = None,
) -> PreparedTerm:
    """`needs`: of the term, if the caller knows them."""
    rollouts, metrics, needs = batch.rollouts, {}, needs or term.needs()
    ids = [rollout.id for rollout in rollouts]
    authors = [int(AUTHOR[author]) for author in term.authors]
    eligible = [np.isin(rollout.author, authors) for rollout in rollouts]
    left_out = term.leaves_out(batch)
    if term.domains is not None:
        left_out |= {rollout.id for rollout in rollouts if rollout.domain not in term.domains}
        eligible = [mask & (item.id not in left_out) for mask, item in zip(eligible, rollouts, strict=True)]
    if needs.rewards:  # a failed reward is not 0
        unrewarded = {rollout.id for rollout in rollouts if batch.rewards.get(rollout.id, 0.0) is None}
        metrics[f"unrewarded/{name}"] = len(unrewarded) / max(len(rollouts), 1)
        left_out |= unrewarded
    signals = [batch.signals[need] for need in needs.possible if need in batch.signals]
    masks = [
        mask & (rollout.id not in left_out) & np.all([signal[rollout.id].mask for signal in signals], axis=0)
        for mask, rollout in zip(eligible, rollouts, strict=True)
    ]
    gates: dict[str, ByRollout] = {}
    is_open, factors = masks, [mask.astype(np.float64) for mask in masks]
    for number, gate in enumerate(term.gate):
        values = gate.factors(GateView(batch, term.role, eligible, is_open, seed))
        require_per_token(f"gate {gate.name}", values, rollouts)
        count = sum(int(mask.sum()) for mask in is_open)
        touched = sum(int((value[mask] != 1).sum()) for mask, value in zip(is_open, values, strict=True))
        repeated = any(other.name == gate.name for other in term.gate[:number])
        called = f"{gate.name}{number if repeated else ''}"
        metrics[f"gate/{name}/{called}"] = touched / max(count, 1)
        if batch.traced:
            gates[called] = dict(zip(ids, values, strict=True))
        factors = [np.nan_to_num(factor * value) for factor, value in zip(factors, values, strict=True)]
        closed = [np.isnan(value) | ((value == 0) & (not gate.weighs)) for value in values]
        is_open = [mask & ~shut for mask, shut in zip(is_open, closed, strict=True)]
    prepared = PreparedTerm(
        term,
        name,
        coefficient,
        batch,
        max_new_tokens,
        eligible=dict(zip(ids, eligible, strict=True)),
        counted=dict(zip(ids, masks if term.gated == "zero" else is_open, strict=True)),
        factor=dict(zip(ids, factors, strict=True)),
        metrics=metrics,
        gates=gates,
        step=step,
        seed=seed,
    )
    prepared.state = term.prepare(prepared)
    return prepared


# --- The first pass of the student, without gradients ---
#
# Some terms need proximal log-probs, or statistics for gates that rank the batch. Requests are tuples in `Needs.student`:
#
# ("proximal",)            log-probs of the sampled tokens before the first update
# ("entropy",)             entropy of the student
# ("comparison", role)     entropy of student and teacher, and their reverse KL
# ("accepted", role, k)    whether the student's likeliest token is among the teacher's k likeliest
# ("acceptance", role)     sum min(S, T): the rate at which the teacher accepts a draw of the student
# ("candidates", k)        the student's k likeliest events
# ("logits", role)         the teacher's logit of the sampled token, and its largest
# ("module", name)         output of a trainable module


CHUNK = 512  # rows of logits held at once when ranking
StudentNeeds = frozenset[tuple[str | int, ...]]


@torch.no_grad()
def take_first_pass(
    student: LanguageModel,
    packs: Sequence[Pack],
    batch: Batch,
    needs: StudentNeeds,
    teachers: Mapping[str, TeacherHead],
    merge: MergeGroups,
    temperature: float,
    modules: Mapping[str, HeadModule] | None = None,
) -> None:
    """Fill `batch.first_pass` for every rollout of the packs."""
    result, modules = batch.first_pass, modules or {}
    for earlier in (result.entropy, result.modules):  # results of an earlier step on the same batch
        earlier.clear()
    compared = {str(need[1]) for need in needs if need[0] == "comparison"}
    ranked = {str(need[1]) for need in needs if need[0] in ("accepted", "acceptance")}

    def look(pack: Pack) -> None:
        projection = autocast_head(student.predict(pack))
        nothing, rows = TokenStatistics(), np.arange(projection.count)
        micro = MicroBatch(pack, projection, batch, teachers, merge, temperature, 0.0, nothing, modules)
        if ("proximal",) in needs:
            untempered = micro.policy(rows)
            _spread(result.logprob, pack, untempered)
            _spread(result.proximal, pack, untempered if temperature == 1.0 else micro.current(rows))
        if ("entropy",) in needs:  # of all tokens, including those that no teacher saw
            _spread(result.entropy, pack, statistics(projection, merge=merge).entropy)
        for k in sorted(int(need[1]) for need in needs if need[0] == "candidates"):
            ids, logprobs = likeliest_events(projection, k, merge)
            _spread(result.likeliest_ids.setdefault(k, {}), pack, ids)
            _spread(result.likeliest.setdefault(k, {}), pack, logprobs)
        for role in sorted(str(need[1]) for need in needs if need[0] == "logits"):
            _spread(result.teacher_logits.setdefault(role, {}), pack, _teacher_logits(micro, role))
        for name in sorted(str(need[1]) for need in needs if need[0] == "module"):
            _spread(result.modules.setdefault(name, {}), pack, micro.module(name, rows))
        for role in sorted(compared | ranked):
            _compare(micro, role, needs)

    for pack in student.passes(packs):
        student.inside(partial(look, pack))


def _compare(micro: MicroBatch, role: str, needs: StudentNeeds) -> None:
    result, pack, count = micro.batch.first_pass, micro.pack, micro.projection.count
    names = ("entropy", "reverse_kl", "teacher_entropy")
    rates = torch.full((count,), float("nan")) if ("acceptance", role) in needs else None
    columns = {name: torch.full((count,), float("nan")) for name in names}
    ranks = {int(need[2]): torch.zeros(count) for need in needs if need[:2] == ("accepted", role)}
    everything = np.ones(count, dtype=bool)
    for rows, teacher in micro.teacher_projections(role, everything):
        student = micro.projection.rows(micro.tensor(rows))
        if ("comparison", role) in needs:
            values = statistics(student, teacher, merge=micro.merge)
            for name in names:
                columns[name][rows] = getattr(values, name).cpu().float()
        if rates is not None:
            distance = statistics(student, teacher, kind="tvd", merge=micro.merge).value
            assert distance is not None
            rates[rows] = 1 - distance.cpu().float()
        for k, accepted in ranks.items():
            accepted[rows] = proposal_accepted(student, teacher, k, micro.merge).cpu().float()
    if ("comparison", role) in needs:
        _fill(result.entropy, pack, columns["entropy"])
        _spread(result.reverse_kl.setdefault(role, {}), pack, columns["reverse_kl"])
        _spread(result.teacher_entropy.setdefault(role, {}), pack, columns["teacher_entropy"])
    if rates is not None:
        _spread(result.acceptance.setdefault(role, {}), pack, rates)
    for k, accepted in ranks.items():
        _spread(result.accepted.setdefault((role, k), {}), pack, accepted)


def proposal_accepted(student: Projection, teacher: Source, k: int, merge: MergeGroups = ()) -> Tensor:
    """(N,) bool: the student's likeliest event is among the teacher's k likeliest."""
    size = min(student.vocabulary, teacher.vocabulary)
    parts = []
    for start in range(0, student.count, CHUNK):
        rows = slice(start, start + CHUNK)
        proposal = log_probs(student.rows(rows), size, merge).argmax(-1, keepdim=True)
        scored = source_log_probs(teacher.rows(rows), size, merge)
        parts.append((scored > scored.gather(-1, proposal)).sum(-1) < k)
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool)


def _teacher_logits(micro: MicroBatch, role: str) -> Tensor:
    """(N, 2) the teacher's logits of the sampled event and of its likeliest one; NaN where it did not read."""
    found = torch.full((micro.projection.count, 2), float("nan"))
    everything = np.ones(micro.projection.count, dtype=bool)
    for rows, teacher in micro.teacher_projections(role, everything):
        if isinstance(teacher, Mixture):
            raise UserError(
                "advantage ketchup: a mixture of teachers has no logits of its own. Give the role one model."
            )
        size = min(micro.projection.vocabulary, teacher.vocabulary)
        tokens = canonical_ids(micro.tokens(rows), micro.merge)[:, None]
        for first in range(0, rows.size, CHUNK):
            part = slice(first, first + CHUNK)
            logits = merge_events(teacher.rows(part).logits(size), micro.merge)
            both = torch.cat([logits.gather(-1, tokens[part].clamp(max=size - 1)), logits.amax(-1, keepdim=True)], -1)
            found[rows[part]] = both.cpu().float()
    return found


def _fill(into: ByRollout, pack: Pack, values_N: Tensor) -> None:
    """Fill in missing values only: one role's teacher may have seen tokens that another's did not."""
    found: ByRollout = {}
    _spread(found, pack, values_N)
    for name, values in found.items():
        known = into.get(name, values)
        into[name] = np.where(np.isnan(known), values, known)


def _spread(into: ByRollout, pack: Pack, values_N: Tensor) -> None:
    for rollout, values in zip(pack.rollouts, values_N.cpu().double().split(pack.response_lengths), strict=True):
        into[rollout.id] = values.numpy()
