"""The terms of a recipe as one loss on packed rollouts.

`prepare` forms weights and what else needs the whole batch before it is cut up; a call then multiplies and sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from opd.objective.batch import Signals, TrainingBatch
from opd.objective.first_pass import take_first_pass
from opd.objective.micro import MicroBatch, TokenStatistics, autocast_head
from opd.objective.prepare import PreparedTerm, prepare_term
from opd.objective.term import AnyTerm, Term
from opd.objective.trace import trace_tokens
from opd.settings import Needs, by_hand
from opd.shorthand import OneOrMany
from opd.types import Rollout, SignalKind, SignalNeed, TeacherLike

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel
    from opd.models.packing import Pack

TokenWeights = Sequence[Mapping[str, np.ndarray]]  # one mapping per active term: rollout id -> (T,)


@dataclass
class PreparedBatch:
    """A batch, made ready: what every active term gives every token."""

    batch: TrainingBatch
    terms: list[PreparedTerm] = field(default_factory=list)

    def weights(self, rollouts: Sequence[Rollout]) -> TokenWeights:
        """For the rollouts of one update."""
        return [term.weights(rollouts) for term in self.terms]

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for term in self.terms for name, value in term.metrics.items()}


class Drawing(Protocol):
    """How rollouts are drawn, as far as an objective has to know: a recipe's `rollout`, or an `opd.Sampler`."""

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
class PlainDrawing:
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    teacher_mix: float = 0.0


class Objective:
    """A sum of terms. `drawing` says how the batches are drawn; `stop_ids` are one event.

    By hand, as a recipe writes it: `opd.Objective({"divergence": "jsd", "beta": 0.3}, teacher, sampler)`. Without
    `stop_ids` it takes the student's.
    """

    def __init__(
        self,
        terms: Term | Mapping[str, Any] | Sequence[Term | Mapping[str, Any]],
        teachers: TeacherLike | Mapping[str, TeacherLike] | None = None,
        drawing: Drawing | None = None,
        stop_ids: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> None:
        self.terms: list[Term] = by_hand("objective", Annotated[list[AnyTerm], OneOrMany()], terms)
        teachers = teachers if teachers is not None else {}
        self.teachers = teachers if isinstance(teachers, Mapping) else {teachers.name: teachers}
        self.drawing: Drawing = drawing or PlainDrawing()
        self._stop_ids = stop_ids
        self._seed = seed
        self.plateau: int | None = None  # the step after which evaluation stopped improving

    def __repr__(self) -> str:
        terms = " + ".join(f"{term.coefficient} {term.name}" for term in self.terms)
        return f"Objective({terms}, teachers: {', '.join(self.teachers) or 'none'})"

    def active(self, step: int) -> list[tuple[int, Term, float]]:
        """(number, term, coefficient) of the terms that count at this step."""
        terms = [(index, term, term.coefficient.at(step, self.plateau)) for index, term in enumerate(self.terms)]
        return [item for item in terms if item[2] != 0]

    def needs(self, step: int, updates: int = 1) -> list[tuple[str, SignalKind]]:
        """Which role has to give which kind of signal at this step; a term whose coefficient is 0 costs nothing.

        Hidden states come first: log-probs follow from them. `updates`: how often a batch is used.
        """
        return sorted(self._needs(step, updates).settled(self._with_hidden), key=lambda need: need[1] != "hidden")

    def _with_hidden(self, role: str) -> bool:
        """Whether all of a role's teachers give hidden states: what it says of a batch is of one kind."""
        return all("hidden" in teacher.offers for teacher in self.teachers.values() if teacher.role == role)

    def need_beside(self, signals: Signals, role: str, kind: SignalKind) -> SignalNeed:
        """What is asked of a role's teachers, which have said these signals already: a teacher reads a rollout once.

        Of their likeliest ids, as many as any term wants.
        """
        known = signals.get((role, "hidden")) if kind in ("logprobs_at", "topk") else None
        wanted = [k for term in self.terms for asked, k in term.needs().topk if asked == role]
        return SignalNeed(kind, k=max(wanted, default=None) if kind == "topk" else None, hidden=known)

    def _needs(self, step: int, updates: int) -> Needs:
        needs = Needs()
        for _, term, _ in self.active(step):
            needs |= term.needs(updates)
        return needs

    def prepare(
        self,
        student: LanguageModel,
        batch: TrainingBatch,
        step: int,
        cut: Callable[[Sequence[Rollout]], list[Pack]],
        updates: int = 1,
        complete: Callable[[TrainingBatch], None] = lambda batch: None,
    ) -> PreparedBatch:
        """Gates, advantages and denominators; `cut` makes micro-batches, if the student has to be asked first.

        `complete`: adds what other ranks have asked it, where each takes a part of the batch.
        """
        asked = self._needs(step, updates).student
        if asked:
            packs, merge = cut(batch.rollouts), self._merge(student)
            take_first_pass(student, packs, batch, asked, self.teachers, merge, self.drawing.temperature)
            complete(batch)
        terms = [
            prepare_term(
                term, f"{index}:{term.name}", coefficient, batch, self.drawing.max_new_tokens, self._seed, step
            )
            for index, term, coefficient in self.active(step)
        ]
        return PreparedBatch(batch, terms)

    def _merge(self, student: LanguageModel) -> tuple[tuple[int, ...], ...]:
        return (student.stop_ids if self._stop_ids is None else self._stop_ids,)

    def __call__(
        self, student: LanguageModel, pack: Pack, prepared: PreparedBatch, weights: TokenWeights
    ) -> tuple[Tensor, TokenStatistics]:
        projection = autocast_head(student.predict(pack))
        micro = MicroBatch(
            pack,
            projection,
            prepared.batch,
            self.teachers,
            self._merge(student),
            self.drawing.temperature,
            self.drawing.teacher_mix,
            TokenStatistics.empty(projection.count),
        )
        total = projection.hidden.new_zeros((), dtype=torch.float32)
        for term, by_rollout in zip(prepared.terms, weights, strict=True):
            weight_N = np.concatenate([by_rollout[rollout.id] for rollout in pack.rollouts])
            if weight_N.any():  # tokens a term leaves alone cost nothing
                loss = term.term.loss(term, micro, weight_N)
                micro.note_loss(term.name, loss)
                total = total + loss
        trace_tokens(micro, prepared.terms, weights)
        return total, micro.statistics
