"""Gates that go by rewards: of the rollout itself, or of all samples of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from opd.objective.gates import Arrays, Gate, GateView
from opd.settings import Needs


class RewardGate(Gate):
    """By the reward of the rollout, or by those of its whole group."""

    threshold: float = Field(0.5, description="a reward of at least this is correct")

    def needs(self, role: str = "teacher") -> Needs:
        return Needs(rewards=True)

    def passed(self, view: GateView) -> np.ndarray:
        """(B,) 1 or 0; NaN where there is no reward."""
        return np.array([np.nan if reward is None else float(reward >= self.threshold) for reward in view.rewards])

    def pass_rates(self, view: GateView) -> np.ndarray:
        return pass_rates(view.rewards, view.groups, self.threshold)

    def _where(self, wanted: np.ndarray, rates: np.ndarray, view: GateView) -> Arrays:
        return view.spread(np.where(np.isnan(rates), np.nan, wanted.astype(np.float64)))


class Correct(RewardGate):
    name = "correct"

    def factors(self, view: GateView) -> Arrays:
        return view.spread(self.passed(view))


class Wrong(RewardGate):
    name = "wrong"

    def factors(self, view: GateView) -> Arrays:
        return view.spread(1 - self.passed(view))


class AllWrong(RewardGate):
    name = "all_wrong"

    def factors(self, view: GateView) -> Arrays:
        rates = self.pass_rates(view)
        return self._where(rates == 0, rates, view)


class AllCorrect(RewardGate):
    name = "all_correct"

    def factors(self, view: GateView) -> Arrays:
        rates = self.pass_rates(view)
        return self._where(rates == 1, rates, view)


class Contrast(RewardGate):
    """Groups with right and wrong answers."""

    name = "contrast"
    compares_samples = True

    def factors(self, view: GateView) -> Arrays:
        rates = self.pass_rates(view)
        return self._where((rates > 0) & (rates < 1), rates, view)


class Paced(RewardGate):
    """PACED: the weight of a prompt is p^a (1 - p)^b, with p its pass rate among this batch's samples."""

    name = "paced"
    weighs = True
    compares_samples = True
    a: float = Field(1.0, ge=0)
    b: float = Field(1.0, ge=0)

    def factors(self, view: GateView) -> Arrays:
        rates = self.pass_rates(view)
        return view.spread(rates**self.a * (1 - rates) ** self.b)


def pass_rates(scores: Sequence[float | None], groups: Sequence[str], threshold: float) -> np.ndarray:
    """(B,) share of each rollout's group that passed, among those that could be rewarded; NaN where none could.

    >>> pass_rates([1.0, 0.0, None, 0.0], ["a", "a", "a", "b"], 0.5).tolist()
    [0.5, 0.5, 0.5, 0.0]
    """
    passed = np.array([np.nan if score is None else float(score >= threshold) for score in scores])
    rates = np.full(passed.size, np.nan)
    for number in np.unique(groups):
        members = np.asarray(groups) == number
        known = passed[members & ~np.isnan(passed)]
        if known.size:
            rates[members] = known.mean()
    return rates
