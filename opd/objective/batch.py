"""A batch to train on and what is known about it: rollouts, rewards, signals, the student's first pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from opd.types import Rollout, Signal, SignalKind, SignalNeed

Signals = Mapping[tuple[str, SignalKind], Mapping[str, Signal]]  # (role, kind) -> rollout id -> signal
Rewards = Mapping[str, float | None]  # rollout id -> reward; None: it could not be given; absent: nobody was asked
ByRollout = dict[str, np.ndarray]  # rollout id -> (T,)


@dataclass
class FirstPass:
    """What the student said of each token at the start of this batch's updates; filled as far as a term needs it."""

    proximal: ByRollout = field(default_factory=dict)  # log-prob, under the transform that ratios use
    logprob: ByRollout = field(default_factory=dict)  # log-prob, untempered
    entropy: ByRollout = field(default_factory=dict)
    reverse_kl: dict[str, ByRollout] = field(default_factory=dict)  # by role, like those below
    teacher_entropy: dict[str, ByRollout] = field(default_factory=dict)
    accepted: dict[tuple[str, int], ByRollout] = field(
        default_factory=dict
    )  # by role and k: argmax in the teacher's top k


@dataclass
class TrainingBatch:
    rollouts: Sequence[Rollout]
    signals: Signals = field(default_factory=dict)
    rewards: Rewards = field(default_factory=dict)
    first_pass: FirstPass = field(default_factory=FirstPass)

    def seen(self, needs: Iterable[tuple[str, SignalKind]], rollout: Rollout) -> np.ndarray:
        """(T,) bool: tokens of a rollout about which all of these signals that there are say something."""
        mask = np.ones(rollout.response_ids.size, dtype=bool)
        for need in (need for need in needs if need in self.signals):
            mask &= self.signals[need][rollout.id].mask
        return mask

    def logprobs(self, role: str, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Of the response tokens, under the model of a role."""
        signals = self.signals[role, "logprobs_at"]
        return [np.asarray(signals[rollout.id].values, dtype=np.float64) for rollout in rollouts]


def need_beside(signals: Signals, role: str, kind: SignalKind) -> SignalNeed:
    """What is asked of a role's teachers, which have said these signals already: a teacher reads a rollout once."""
    return SignalNeed(kind, hidden=signals.get((role, "hidden")) if kind == "logprobs_at" else None)


def concatenated(rollouts: Sequence[Rollout], name: str) -> np.ndarray:
    return np.concatenate([getattr(rollout, name) for rollout in rollouts])
