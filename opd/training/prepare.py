"""What each term gives each token of a batch, before the batch is cut up: gates, advantages and denominators.

The only place where tokens are masked and denominators formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from opd.config import Rollouts, Term
from opd.config.gates import (
    EntropyGate,
    FinishedGate,
    Gate,
    OutcomeGate,
    Paced,
    Perplexity,
    RandomGate,
    SelectKD,
    SoftOrGate,
    TeacherEntropyGate,
)
from opd.divergence import divergence_advantage
from opd.objective.advantages import extrapolated, outcome_advantages, overlong_penalty, returns, whitened
from opd.objective.gates import (
    Arrays,
    pass_rates,
    perplexity_weights,
    random_share,
    runs,
    soft_or,
    speculative,
    top_share,
    turn_weights,
)
from opd.objective.weights import token_weights
from opd.training.judged import Judged
from opd.types import Author, Rollout

WEIGHTS = ("paced", "perplexity", "turns")  # a weight of 0 is small; a gate's 0 is shut


@dataclass
class TermPlan:
    """One term on one batch. `advantage` is None for forms without one, or where it depends on the current policy."""

    term: Term
    name: str
    coefficient: float
    own: dict[str, np.ndarray]  # rollout id -> (T,) bool: tokens of the term's authors, gated or not
    counted: dict[str, np.ndarray]  # rollout id -> (T,) bool: in the denominator
    factor: dict[str, np.ndarray]  # rollout id -> (T,) what gates leave of it, 0 where closed
    outcome: dict[str, float]  # rollout id -> outcome advantage, 0 where nobody was asked
    advantage: dict[str, np.ndarray] | None
    shares: dict[str, float]  # what the gates did, for the metrics

    def weights(self, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        """Of every token of an update's rollouts. They are its loss's only denominators."""
        masks, groups = [self.counted[rollout.id] for rollout in rollouts], [rollout.group for rollout in rollouts]
        shares = token_weights(masks, groups, self.term.aggregate, self.term.denominator)
        return {
            rollout.id: (share * self.factor[rollout.id] * self.coefficient).astype(np.float32)
            for rollout, share in zip(rollouts, shares, strict=True)
        }


def plan_term(
    term: Term, name: str, coefficient: float, judged: Judged, limits: Rollouts, seed: int, deferred: bool
) -> TermPlan:
    """`deferred`: the advantage is formed later, from the log-probs of the policy being trained."""
    rollouts = judged.rollouts
    authors = [int(Author[author.upper()]) for author in term.authors]
    own = [np.isin(rollout.author, authors) for rollout in rollouts]
    outcomes, unjudged, cut_short = _outcomes(term, judged, own, limits)
    masked = unjudged | cut_short
    masks = [mask & (rollout.id not in masked) for mask, rollout in zip(own, rollouts, strict=True)]
    open_ones, factors = masks, [mask.astype(np.float64) for mask in masks]
    shares = {f"unjudged/{name}": len(unjudged) / max(len(rollouts), 1)} if term.outcome else {}
    for number, gate in enumerate(term.gate):
        found = apply_gate(gate, term, judged, own, open_ones, seed)
        count = sum(int(mask.sum()) for mask in open_ones)
        changed = sum(int((value[mask] != 1).sum()) for mask, value in zip(open_ones, found, strict=True))
        repeated = any(other.kind == gate.kind for other in term.gate[:number])
        shares[f"gate/{name}/{gate.kind}{number if repeated else ''}"] = changed / max(count, 1)
        factors = [np.nan_to_num(factor * value) for factor, value in zip(factors, found, strict=True)]
        closed = [np.isnan(value) | ((value == 0) & (gate.kind not in WEIGHTS)) for value in found]
        open_ones = [mask & ~shut for mask, shut in zip(open_ones, closed, strict=True)]
    counted = masks if term.gated == "zero" else open_ones
    plan = TermPlan(
        term, name, coefficient,
        own={rollout.id: mask for rollout, mask in zip(rollouts, own, strict=True)},
        counted={rollout.id: mask for rollout, mask in zip(rollouts, counted, strict=True)},
        factor={rollout.id: factor for rollout, factor in zip(rollouts, factors, strict=True)},
        outcome=outcomes, advantage=None, shares=shares,
    )  # fmt: skip
    if term.form == "policy_gradient" and not deferred:
        source = judged.survey.plain
        student = [
            rollout.logprob.astype(np.float64) if term.advantage.student == "behaviour" else source[rollout.id]
            for rollout in rollouts
        ]
        values = token_advantages(plan, judged, rollouts, student)
        plan.advantage = {rollout.id: value for rollout, value in zip(rollouts, values, strict=True)}
    return plan


def _outcomes(
    term: Term, judged: Judged, own: Sequence[np.ndarray], limits: Rollouts
) -> tuple[dict[str, float], set[str], set[str]]:
    """(outcome advantage by rollout, those whose verification failed, those cut off and masked). Failed is never a zero."""
    if not term.outcome:
        return {}, set(), set()
    rollouts, spec = judged.rollouts, term.advantage
    failed = {rollout.id for rollout in rollouts if judged.scores.get(rollout.id, 0.0) is None}
    if term.form != "policy_gradient" or not spec.outcome_weight:
        return {}, failed, set()
    cut_short = {rollout.id for rollout in rollouts if rollout.stop == "length" and spec.overlong == "mask"}
    scores: list[float | None] = []
    for rollout, mask in zip(rollouts, own, strict=True):  # answers somebody else wrote enter no baseline
        score = judged.scores.get(rollout.id) if mask.any() and rollout.id not in cut_short else None
        if score is not None and spec.overlong == "penalise":
            score += overlong_penalty(rollout.response_ids.size, limits.max_new_tokens, spec.overlong_buffer)
        scores.append(score)
    values = outcome_advantages(scores, [rollout.group for rollout in rollouts], spec.baseline, spec.std)
    advantages = {rollout.id: float(np.nan_to_num(value)) for rollout, value in zip(rollouts, values, strict=True)}
    return advantages, failed, cut_short


def apply_gate(  # noqa: PLR0911  one case per gate
    gate: Gate, term: Term, judged: Judged, own: Sequence[np.ndarray], open_ones: Sequence[np.ndarray], seed: int
) -> Arrays:
    """One factor per token and rollout. A gate sees only the tokens that those before it left open; NaN: cannot be said."""
    rollouts, survey = judged.rollouts, judged.survey
    names, lengths = [rollout.id for rollout in rollouts], [rollout.response_ids.size for rollout in rollouts]
    if isinstance(gate, (OutcomeGate, Paced, FinishedGate, Perplexity)):
        values = _rollout_gate(gate, term, judged, open_ones)
        return [np.full(length, value) for length, value in zip(lengths, values, strict=True)]
    if isinstance(gate, EntropyGate):
        return top_share([survey.entropy[name] for name in names], open_ones, gate.share)
    if isinstance(gate, SoftOrGate):
        entropies = [survey.entropy[name] for name in names]
        divergences = [survey.reverse_kl[term.role][name] for name in names]
        return top_share(soft_or(entropies, divergences, open_ones), open_ones, gate.share)
    if isinstance(gate, RandomGate):
        return random_share([f"gate/{name}" for name in names], lengths, gate.share, seed)
    if isinstance(gate, TeacherEntropyGate):
        low = -np.inf if gate.above is None else gate.above
        high = np.inf if gate.below is None else gate.below
        found = [survey.teacher_entropy[term.role][name] for name in names]
        return [((value > low) & (value < high)).astype(np.float64) for value in found]
    if isinstance(gate, SelectKD) and gate.accept == "greedy":
        found = [survey.accepted[term.role, gate.k][name] for name in names]
        return [np.where(value > 0, 1.0, gate.rejected) for value in found]
    teachers = judged.logprobs(term.role, rollouts)
    if isinstance(gate, SelectKD):
        students = [rollout.logprob for rollout in rollouts]
        return speculative([f"accept/{name}" for name in names], students, teachers, gate.rejected, seed)
    return [
        turn_weights(np.abs(rollout.logprob - teacher), runs(mask), gate.delta, gate.eps)
        for rollout, teacher, mask in zip(rollouts, teachers, own, strict=True)
    ]


def _rollout_gate(
    gate: OutcomeGate | Paced | FinishedGate | Perplexity, term: Term, judged: Judged, open_ones: Sequence[np.ndarray]
) -> np.ndarray:
    """(B,) one factor per rollout."""
    rollouts = judged.rollouts
    groups = [rollout.group for rollout in rollouts]
    if isinstance(gate, FinishedGate):
        return np.array([float(rollout.stop != "length") for rollout in rollouts])
    if isinstance(gate, Perplexity):
        student = [rollout.logprob for rollout in rollouts]
        judges = student if gate.of == "student" else judged.logprobs(term.role, rollouts)
        is_open = np.array([bool(mask.any()) for mask in open_ones])
        means = np.array(
            [values[mask].mean() if mask.any() else 0.0 for values, mask in zip(judges, open_ones, strict=True)]
        )
        return perplexity_weights(means, groups, is_open, gate.power)
    scores = [judged.scores.get(rollout.id) for rollout in rollouts]
    rates = pass_rates(scores, groups, gate.threshold)
    if isinstance(gate, Paced):
        return rates**gate.a * (1 - rates) ** gate.b
    if gate.kind in ("correct", "wrong"):
        passed = np.array([np.nan if score is None else float(score >= gate.threshold) for score in scores])
        return passed if gate.kind == "correct" else 1 - passed
    wanted = {"all_wrong": rates == 0, "all_correct": rates == 1, "contrast": (rates > 0) & (rates < 1)}[gate.kind]
    return np.where(np.isnan(rates), np.nan, wanted.astype(np.float64))


def token_advantages(
    plan: TermPlan, judged: Judged, rollouts: Sequence[Rollout], students: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The sum of the term's advantages at every token, given the student's untempered log-probs there."""
    term, spec = plan.term, plan.term.advantage
    masks = [plan.factor[rollout.id] != 0 for rollout in rollouts]
    total = [np.full(student.size, spec.outcome_weight * plan.outcome.get(rollout.id, 0.0))
             for rollout, student in zip(rollouts, students, strict=True)]  # fmt: skip
    references = judged.logprobs("reference", rollouts) if spec.roles else [np.zeros(0)] * len(rollouts)
    if spec.teacher_weight:
        teachers = judged.logprobs(term.role, rollouts)
        parts = [
            _teacher_part(term, teacher, student, reference, mask)
            for teacher, student, reference, mask in zip(teachers, students, references, masks, strict=True)
        ]
        if spec.whiten:
            parts = whitened(parts, masks)
        total = [sum_ + spec.teacher_weight * part for sum_, part in zip(total, parts, strict=True)]
    if spec.reference_weight:
        total = [
            sum_ - spec.reference_weight * (student - reference)
            for sum_, student, reference in zip(total, students, references, strict=True)
        ]
    return total


def _teacher_part(
    term: Term, teacher: np.ndarray, student: np.ndarray, reference: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    spec = term.advantage
    if spec.extrapolation != 1:
        value = extrapolated(teacher, student, reference, spec.extrapolation)
    elif term.divergence == "reverse_kl":
        value = teacher - student
    else:
        both = torch.from_numpy(student.astype(np.float64)), torch.from_numpy(teacher)
        value = divergence_advantage(term.divergence, *both, **term.parameters).numpy()
    if spec.clip is not None:
        value = value.clip(-spec.clip, spec.clip)
    if spec.discount:  # over the tokens that count, one behind the other
        value = value.copy()
        value[mask] = returns(value[mask], spec.discount, length_normalised=spec.length_normalised, future_only=spec.future_only)  # fmt: skip
    return value
