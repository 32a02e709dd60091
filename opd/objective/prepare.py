"""What each term gives each token of a batch, before the batch is cut up: gates, advantages and denominators.

The only place where tokens are masked and denominators formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.objective.batch import ByRollout, TrainingBatch, require_per_token
from opd.objective.gates import GateView
from opd.objective.term import Term
from opd.types import Author, Rollout


@dataclass
class PreparedTerm:
    """One term on one batch. Masks and factors are (T,) by rollout id."""

    term: Term
    name: str
    coefficient: float
    batch: TrainingBatch
    max_new_tokens: int
    eligible: ByRollout  # bool: tokens of the authors that the term trains on, gated or not
    counted: ByRollout  # bool: in the denominator
    factor: ByRollout  # what gates leave of a token, 0 where closed
    metrics: dict[str, float]  # what the gates did
    gates: dict[str, ByRollout] = field(default_factory=dict)  # what each did, to rollouts that are traced
    step: int = 1  # of the stage, for what changes with it
    state: Any = None  # what the form has prepared for itself

    def weights(self, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        """Of every token of an update's rollouts. They are its loss's only denominators."""
        return self.term.weights(self, rollouts)


def prepare_term(
    term: Term, name: str, coefficient: float, batch: TrainingBatch, max_new_tokens: int, seed: int, step: int = 1
) -> PreparedTerm:
    rollouts, metrics = batch.rollouts, {}
    authors = [int(Author[author.upper()]) for author in term.authors]
    eligible = [np.isin(rollout.author, authors) for rollout in rollouts]
    left_out = term.leaves_out(batch)
    if term.needs().rewards:  # a reward that failed is not a zero
        unrewarded = {rollout.id for rollout in rollouts if batch.rewards.get(rollout.id, 0.0) is None}
        metrics[f"unrewarded/{name}"] = len(unrewarded) / max(len(rollouts), 1)
        left_out |= unrewarded
    asked = term.needs().possible
    masks = [
        mask & (rollout.id not in left_out) & batch.seen(asked, rollout)
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
            gates[called] = _by_rollout(rollouts, values)
        factors = [np.nan_to_num(factor * value) for factor, value in zip(factors, values, strict=True)]
        closed = [np.isnan(value) | ((value == 0) & (not gate.weighs)) for value in values]
        is_open = [mask & ~shut for mask, shut in zip(is_open, closed, strict=True)]
    prepared = PreparedTerm(
        term,
        name,
        coefficient,
        batch,
        max_new_tokens,
        eligible=_by_rollout(rollouts, eligible),
        counted=_by_rollout(rollouts, masks if term.gated == "zero" else is_open),
        factor=_by_rollout(rollouts, factors),
        metrics=metrics,
        gates=gates,
        step=step,
    )
    prepared.state = term.prepare(prepared)
    return prepared


def _by_rollout(rollouts: Sequence[Rollout], values: Sequence[np.ndarray]) -> ByRollout:
    return {rollout.id: value for rollout, value in zip(rollouts, values, strict=True)}
