"""Losses of single tokens that are differentiated directly: k2 and cross-entropy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from pydantic import model_validator

from opd.objective.term import CorrectedTerm, Term
from opd.settings import Needs, StageView

if TYPE_CHECKING:
    from torch import Tensor

    from opd.objective.micro import MicroBatch
    from opd.objective.prepare import PreparedTerm


class K2(CorrectedTerm):
    """(log student - log teacher)^2 / 2: on samples of the student, reverse KL's gradient (KDRL)."""

    name = "k2"
    usual_authors = ("student",)
    by_ratio = True

    @model_validator(mode="after")
    def _means_something(self) -> K2:
        if self.correction is not None and self.correction.weighs_by == "prefix":
            raise ValueError("prefix is for form: direct; k2 is corrected by icepop, tis or mis")
        return self

    @property
    def minimises(self) -> str:
        return "reverse_kl"

    def form_needs(self, updates: int) -> Needs:
        proximal = {("proximal",)} if updates > 1 and self.correction is not None else set()
        return Needs(signals=((self.role, "logprobs_at"),), student=frozenset(proximal))

    def refuse(self, view: StageView) -> Iterable[str]:
        drawn = view.rollout
        if drawn.temperature != 1:
            yield (
                f"rollout.temperature {drawn.temperature:g} with form: k2, whose gradient is reverse KL's only on "
                "samples of the policy itself. Sample at temperature 1, or use policy_gradient."
            )
        if drawn.teacher_mix:
            yield "rollout.teacher_mix with form: k2, which has no importance weight. Use policy_gradient."
        yield from super().refuse(view)

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        import torch

        rows = np.flatnonzero(weight_N)
        if self.correction is not None:  # rollouts are looked at whole, gated or not
            rows = np.flatnonzero(np.concatenate([prepared.eligible[item.id] for item in micro.pack.rollouts]))
        teacher = micro.tensor(micro.teacher_logprobs(self.role, rows)).float()
        policy = micro.policy(rows)
        trained = micro.tensor(weight_N[rows] != 0)
        micro.estimate(rows, policy.detach() - teacher)
        losses, log_ratio = k2(policy, torch.where(trained, teacher, policy.detach())), micro.log_ratio(rows, policy)
        if self.correction is not None:
            weight, bites = self.correction.apply(log_ratio, micro.segment(rows))
            micro.count(f"corrected/{prepared.name}", bites[trained])
            losses = losses * weight
        return (losses * micro.tensor(weight_N[rows])).sum()


def k2(current: Tensor, teacher: Tensor) -> Tensor:
    """(log current - log teacher)^2 / 2, differentiated directly."""
    return 0.5 * (current - teacher.detach()) ** 2


class CrossEntropy(Term):
    """Negative log-likelihood."""

    name = "cross_entropy"
    usual_authors = ("data", "teacher")

    def loss(self, prepared: PreparedTerm, micro: MicroBatch, weight_N: np.ndarray) -> Tensor:
        rows = np.flatnonzero(weight_N)
        return -(micro.policy(rows) * micro.tensor(weight_N[rows])).sum()
