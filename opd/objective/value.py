"""Values of states, learnt by a module alongside the student: PPO's advantage, and the loss that trains the values.

    r_t   reward of token t: the answer's reward at the student's last token, minus reference_weight * (log S - log reference)
    V_t   value of the state that predicts token t, before the first update on the batch
    A_t   sum over i >= t of (gamma * lam)^(i-t) * (r_i + gamma * V_{i+1} - V_i): generalised advantage estimation
    R_t   A_t + V_t: the target of the value

Only the student's tokens count. Tokens by other authors are skipped: the next value and sum carry over.

Axis legend: T = tokens of one response, N = response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, PrivateAttr

from opd.common.errors import TrainingError
from opd.objective.advantages import AdvantageEstimate, AdvantagePart, SampledTokens, moments, whitened_by
from opd.objective.batch import Batch
from opd.objective.term import Term
from opd.records import Author, Rollout
from opd.registry import Fraction, Needs, StageView, Word

if TYPE_CHECKING:
    from torch import Tensor

    from opd.objective.micro import MicroBatch
    from opd.objective.objective import PreparedTerm


class GeneralisedAdvantage(AdvantagePart):
    """Generalised advantage estimation (GAE): the outcome reward, compared with the values of a module."""

    name = "gae"
    module: Word = Field(
        "value", description="of gae and value: name of the module that gives values, one number per position"
    )
    gamma: Fraction = Field(1.0, description="of gae: discount of later rewards")
    lam: Fraction = Field(1.0, description="of gae: 1 sums up rewards to the end, 0 trusts the next value")
    whiten: bool = Field(
        True, description="of gae: mean 0 and variance 1 over the batch's tokens; returns stay as they are"
    )
    reference_weight: float = Field(
        0.0, ge=0, description="of gae: KL penalty towards the role `reference`, token by token, as part of the reward"
    )

    @property
    def values_of(self) -> str | None:
        return self.module

    def needs(self, role: str = "teacher") -> Needs:
        needs = Needs(rewards=True, student=frozenset({("module", self.module)}), modules=(self.module,))
        if self.reference_weight:
            needs |= Needs(signals=(("reference", "logprobs_at"),), student=frozenset({("proximal",)}))
        return needs

    def estimate(self, batch: Batch) -> AdvantageEstimate:
        advantages, returns = {}, {}
        for rollout in batch.rollouts:
            values = batch.first_pass.modules[self.module][rollout.id]
            own = rollout.author == Author.STUDENT
            if values.shape != own.shape:
                raise TrainingError(
                    f"module {self.module!r} gave numbers of shape {values.shape} for {own.size} tokens, and a value is one "
                    "number per position. Use kind: head, or a module that gives (N,)."
                )
            advantages[rollout.id] = gae(self._rewards(batch, rollout), values, own, self.gamma, self.lam)
            returns[rollout.id] = np.where(own, advantages[rollout.id] + values, 0.0)
        return AdvantageEstimate(advantages, returns)

    def _rewards(self, batch: Batch, rollout: Rollout) -> np.ndarray:
        """(T,) reward of each token. The outcome reward goes to the student's last token."""
        own = np.flatnonzero(rollout.author == Author.STUDENT)
        rewards = np.zeros(rollout.response_ids.size)
        if self.reference_weight:
            student = batch.first_pass.logprob[rollout.id]
            (reference,) = batch.logprobs("reference", [rollout])
            rewards[own] = -self.reference_weight * (student - reference)[own]
        if own.size:
            rewards[own[-1]] += batch.rewards.get(rollout.id) or 0.0
        return rewards

    def prepare(self, tokens: SampledTokens) -> dict[str, np.ndarray]:
        """Computed over the whole batch, so that whitening does not depend on micro-batches."""
        found = self.estimate(tokens.batch).advantages
        if not self.whiten:
            return found
        values = [found[rollout.id] for rollout in tokens.rollouts]
        white = whitened_by(values, moments(values, tokens.counted))
        return {rollout.id: value for rollout, value in zip(tokens.rollouts, white, strict=True)}

    def values(self, tokens: SampledTokens, prepared: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [prepared[rollout.id] for rollout in tokens.rollouts]


def gae(rewards_T: np.ndarray, values_T: np.ndarray, own_T: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """(T,) advantages of the student's tokens; other tokens are skipped and have 0.

    >>> gae(np.array([0.0, 9.0, 1.0]), np.array([0.5, 9.0, 0.25]), np.array([True, False, True]), 1.0, 1.0).tolist()
    [0.5, 0.0, 0.75]
    """
    advantages, ahead, after = np.zeros(rewards_T.size), 0.0, 0.0
    for index in np.flatnonzero(own_T)[::-1]:
        ahead = rewards_T[index] + gamma * after - values_T[index] + gamma * lam * ahead
        advantages[index], after = ahead, values_T[index]
    return advantages


class ValueLoss(Term):
    """Half the squared distance to the returns of the `gae` advantage of the same module, clipped around the old values."""

    name = "value"
    usual_authors = ("student",)

    module: Word = Field(
        "value", description="of gae and value: name of the module that gives values, one number per position"
    )
    clip: float | None = Field(
        0.5,
        gt=0,
        description="of value: how far a value may move from its old one before it stops learning; null: any way",
    )
    _estimator: AdvantagePart | None = PrivateAttr(None)

    def joined(self, terms: Sequence[Term]) -> Term:
        """Use the returns of the advantage that reads the same module, even if its term is inactive at a step."""
        found = self.model_copy()
        found._estimator = self._advantage(terms)
        return found

    def _advantage(self, terms: Sequence[Term]) -> AdvantagePart | None:
        parts = (part for term in terms for part in term.advantages)
        return next((part for part in parts if part.values_of == self.module), None)

    def form_needs(self, updates: int) -> Needs:
        own = Needs(rewards=True, student=frozenset({("module", self.module)}), modules=(self.module,))
        return own if self._estimator is None else own | self._estimator.needs(self.role)

    def refuse(self, view: StageView) -> Iterable[str]:
        yield from super().refuse(view)
        if self._advantage(view.terms) is None:
            yield (
                f"value learns the returns of an advantage, and no term has one for the module {self.module!r}. Add to a "
                f"policy_gradient term: advantage: {{also: [{{kind: gae, module: {self.module}}}]}}."
            )

    def prepare(self, prepared: PreparedTerm) -> AdvantageEstimate:
        assert self._estimator is not None
        found = self._estimator.estimate(prepared.batch)
        old = prepared.batch.first_pass.modules[self.module]
        pairs = [(found.returns[name][mask], old[name][mask]) for name, mask in prepared.counted.items()]
        returns, values = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
        if returns.size and returns.var() > 0:
            prepared.metrics[f"explained/{prepared.name}"] = float(1 - (returns - values).var() / returns.var())
        return found

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        rows, state = np.flatnonzero(weight_N), prepared.state
        rollouts, old = micro.pack.rollouts, prepared.batch.first_pass.modules[self.module]
        now = micro.module(self.module, rows)
        returns, before = (
            micro.tensor(np.concatenate([found[rollout.id] for rollout in rollouts])[rows]).to(now)
            for found in (state.returns, old)
        )
        losses, clipped = value_losses(now, before, returns, self.clip)
        if clipped is not None:
            micro.count(f"clipped/{prepared.name}", clipped)
        return (losses * micro.tensor(weight_N[rows])).sum()


def value_losses(now: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Any]:
    """(N,) losses 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), and where the clip acts (None: no clip)."""
    import torch

    plain = (now - returns) ** 2
    if clip is None:
        return 0.5 * plain, None
    near = (torch.maximum(torch.minimum(now, old + clip), old - clip) - returns) ** 2
    return 0.5 * torch.maximum(plain, near), (near > plain).detach()
