"""A list of terms from the recipe, turned into one loss on packed rollouts.

    direct            divergence to the teacher, at every token of the chosen authors
    policy_gradient   sampled token: an advantage (teacher log-ratio, outcome, both) times a surrogate's ratio
    k2                sampled token: half the squared log-ratio to the teacher, differentiated directly
    cross_entropy     negative log-likelihood of data, teacher, or chosen student tokens

`prepare` forms weights and advantages for the whole batch before it is cut up; here they are multiplied and summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from opd.config import Rollouts, Term, Train
from opd.config.objective import SAMPLED
from opd.errors import RecipeError
from opd.models.language_model import LanguageModel
from opd.models.packing import Pack
from opd.teachers.local import LocalTeacher
from opd.training.judged import Judged, autocast_head
from opd.training.prepare import TermPlan, plan_term
from opd.training.survey import survey_need, take_survey
from opd.training.terms import Micro, Statistics, term_loss
from opd.types import Rollout, SignalKind


@dataclass
class Plan:
    """A batch, made ready: what every active term gives every token."""

    judged: Judged
    terms: list[TermPlan] = field(default_factory=list)

    def weights(self, rollouts: Sequence[Rollout]) -> list[Mapping[str, np.ndarray]]:
        """One mapping per active term, for the rollouts of one update."""
        return [term.weights(rollouts) for term in self.terms]

    @property
    def shares(self) -> dict[str, float]:
        return {name: value for term in self.terms for name, value in term.shares.items()}


class Objective:
    def __init__(
        self, terms: Sequence[Term], teachers: Mapping[str, LocalTeacher], rollout: Rollouts, stop_ids: tuple[int, ...],
        train: Train | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.terms, self._teachers, self._rollout, self._merge = terms, teachers, rollout, (stop_ids,)
        self._train, self._seed = train or Train(), seed
        self.plateau: int | None = None  # the step after which evaluation stopped improving
        for term in terms:
            _refuse(term, rollout)

    def active(self, step: int) -> list[tuple[int, Term, float]]:
        """(number, term, coefficient) of the terms that count at this step."""
        found = [(index, term, term.coefficient.at(step, self.plateau)) for index, term in enumerate(self.terms)]
        return [item for item in found if item[2] != 0]

    def needs(self, step: int) -> list[tuple[str, SignalKind]]:
        """Which role has to give which kind of signal at this step; a term whose coefficient is 0 costs nothing."""
        found: list[tuple[str, SignalKind]] = []
        for _, term, _ in self.active(step):
            found += _needs(term)
        return list(dict.fromkeys(found))

    def prepare(
        self, student: LanguageModel, judged: Judged, step: int, cut: Callable[[Sequence[Rollout]], list[Pack]]
    ) -> Plan:
        """Gates, advantages and denominators of the batch; `cut` makes micro-batches, if the student is to be asked first."""
        active = self.active(step)
        need = survey_need([term for _, term, _ in active], self._train)
        if need:
            batches = cut(judged.rollouts)
            take_survey(student, batches, judged, need, self._teachers, self._merge, self._rollout.temperature)
        plan = Plan(judged)
        for index, term, coefficient in active:
            deferred = term.advantage.student == "current" or (
                term.advantage.student == "proximal" and not need.proximal
            )
            plan.terms.append(
                plan_term(term, f"{index}:{term.form}", coefficient, judged, self._rollout, self._seed, deferred)
            )
        return plan

    def __call__(
        self, student: LanguageModel, batch: Pack, plan: Plan, weights: Sequence[Mapping[str, np.ndarray]]
    ) -> tuple[Tensor, Statistics]:
        hidden_ND = student.hidden(batch.ids_T, batch.layout)[batch.predicting_N]
        projection = autocast_head(student.project(hidden_ND))
        micro = Micro(
            batch, projection, plan.judged, self._teachers, self._merge, self._rollout.temperature, self._rollout.teacher_mix,
            Statistics.empty(hidden_ND.shape[0]),
        )  # fmt: skip
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        for term, by_rollout in zip(plan.terms, weights, strict=True):
            weight_N = np.concatenate([by_rollout[rollout.id] for rollout in batch.rollouts])
            if weight_N.any():  # tokens a term leaves alone cost nothing
                loss = term_loss(term, micro, weight_N)
                micro.statistics.loss[term.name] = float(loss.detach())
                total = total + loss
        return total, micro.statistics


def _needs(term: Term) -> list[tuple[str, SignalKind]]:
    found: list[tuple[str, SignalKind]] = []
    if term.form == "direct":
        found.append((term.role, "hidden"))
    elif term.form == "k2" or (term.form == "policy_gradient" and term.advantage.teacher_weight):
        found.append((term.role, "logprobs_at"))
    if term.form == "policy_gradient":
        found += [(role, "logprobs_at") for role in term.advantage.roles]
        if term.advantage.kl_baseline:
            found.append((term.role, "hidden"))
    found += [(term.role, gate.signal) for gate in term.gate if gate.signal]
    return found


def _refuse(term: Term, rollout: Rollouts) -> None:
    """Combinations of objective and sampling that mean nothing, found before the first token is drawn."""
    for gate in term.gate:
        if rollout.samples == 1 and gate.kind in ("paced", "perplexity", "contrast"):
            raise RecipeError(
                f"objective: gate {gate.kind} compares the samples of a prompt, and rollout.samples is 1. Set it to 2 or more."
            )
    if term.form == "k2" and rollout.temperature != 1:
        raise RecipeError(
            f"rollout.temperature {rollout.temperature} with form: k2, whose gradient is reverse KL's only on samples of the policy "
            "itself. Sample at temperature 1, or use policy_gradient."
        )
    if term.form == "k2" and rollout.teacher_mix:
        raise RecipeError("rollout.teacher_mix with form: k2, which has no importance weight. Use policy_gradient.")
    if term.form not in SAMPLED and term.correction is None:
        return
    if rollout.top_p < 1 or rollout.top_k > 0:
        raise RecipeError(
            f"rollout: top_p {rollout.top_p}, top_k {rollout.top_k} with a {term.form} term that weighs by ratios. Importance ratios are "
            "undefined for tokens that truncated sampling can never draw; set top_p: 1 and top_k: 0, or use form: direct."
        )
    if rollout.temperature == 0:
        raise RecipeError(
            f"rollout.temperature 0 with a {term.form} term: greedy tokens carry no gradient. Sample at temperature 1."
        )
    advantage = term.advantage
    if advantage.overlong == "penalise" and advantage.overlong_buffer >= rollout.max_new_tokens:
        raise RecipeError(
            f"objective: overlong_buffer {advantage.overlong_buffer} with rollout.max_new_tokens {rollout.max_new_tokens} penalises every answer. "
            "Set it to a part of the limit."
        )
    alone = rollout.samples == 1 and advantage.baseline in ("group", "leave_one_out")
    if term.form == "policy_gradient" and advantage.outcome_weight and alone:
        raise RecipeError(
            f"objective: outcome_weight {advantage.outcome_weight} with baseline: {advantage.baseline} and rollout.samples 1: a sample alone in its "
            "group has advantage 0. Set rollout.samples to 2 or more, or baseline: batch."
        )
