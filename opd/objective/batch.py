"""A batch to train on and what is known about it: rollouts, rewards, signals, the student's first pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.errors import TrainingError
from opd.types import Rollout, Signal, SignalKind

Signals = Mapping[tuple[str, SignalKind], Mapping[str, Signal]]  # (role, kind) -> rollout id -> signal
RewardsById = Mapping[str, float | None]  # rollout id -> reward; None: it could not be given; absent: nobody was asked
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


@dataclass(repr=False)
class TrainingBatch:
    rollouts: Sequence[Rollout]
    signals: Signals = field(default_factory=dict)
    rewards: RewardsById = field(default_factory=dict)
    first_pass: FirstPass = field(default_factory=FirstPass)
    teacher_of: Mapping[str, str] = field(default_factory=dict)  # rollout id -> its teacher: micro-batches hold one's
    traced: frozenset[str] = frozenset()  # ids of rollouts to be written down token by token: see `trace`

    def __repr__(self) -> str:
        signals = ", ".join(f"{kind} of {role}" for role, kind in self.signals)
        return (
            f"TrainingBatch({len(self.rollouts)} rollouts, {len(self.rewards)} rewards, signals: {signals or 'none'})"
        )

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


def beside(student: np.ndarray, signal: Signal) -> np.ndarray:
    """The student's log-probs as the teacher's are: where it reads other tokens, those of a span divided over its tokens."""
    if signal.crossed is None:
        return student
    found = student.copy()
    for s0, s1, _, _ in signal.spans:
        found[s0:s1] = student[s0:s1].mean()
    return found


def concatenated(rollouts: Sequence[Rollout], name: str) -> np.ndarray:
    return np.concatenate([getattr(rollout, name) for rollout in rollouts])


def require_per_token(what: str, values: Any, rollouts: Sequence[Rollout]) -> None:
    """Of choices from outside as well: one array per rollout, one number per response token."""
    fits = isinstance(values, Sequence) and len(values) == len(rollouts)
    if not fits or any(
        np.shape(value) != rollout.response_ids.shape for value, rollout in zip(values, rollouts, strict=True)
    ):
        shapes = [np.shape(value) for value in values][:3] if isinstance(values, Sequence) else type(values).__name__
        wanted = [rollout.response_ids.shape for rollout in rollouts][:3]
        raise TrainingError(
            f"{what} has to give one array per rollout with one number per response token, {wanted}, …; it gave {shapes}."
        )
