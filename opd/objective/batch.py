"""A training batch: rollouts, rewards, signals, and the student's first pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.common.errors import TrainingError
from opd.records import Author, Prompt, Rollout, Signal, SignalKind

Signals = Mapping[tuple[str, SignalKind], Mapping[str, Signal]]  # (role, kind) -> rollout id -> signal
RewardsById = Mapping[str, float | None]  # rollout id -> reward; None: the reward failed; absent: none was requested
ByRollout = dict[str, np.ndarray]  # rollout id -> (T,)


@dataclass
class FirstPass:
    """The student's values for each token before this batch's updates. Only what terms need is filled in."""

    proximal: ByRollout = field(default_factory=dict)  # log-prob, under the transform that ratios use
    logprob: ByRollout = field(default_factory=dict)  # log-prob, untempered
    entropy: ByRollout = field(default_factory=dict)
    reverse_kl: dict[str, ByRollout] = field(default_factory=dict)  # by role, like the next two
    teacher_entropy: dict[str, ByRollout] = field(default_factory=dict)
    accepted: dict[tuple[str, int], ByRollout] = field(
        default_factory=dict
    )  # by role and k: argmax in the teacher's top k
    acceptance: dict[str, ByRollout] = field(default_factory=dict)  # by role: sum min(S, T)
    likeliest_ids: dict[int, ByRollout] = field(default_factory=dict)  # by k: (T, K) of the student's likeliest events
    likeliest: dict[int, ByRollout] = field(default_factory=dict)  # their log-probs
    teacher_logits: dict[str, ByRollout] = field(default_factory=dict)  # by role: (T, 2), of the token and the largest
    modules: dict[str, ByRollout] = field(default_factory=dict)  # by name: output of each head, (T,) or (T, K)
    scores: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # by name: scores of modules with their own passes, by rollout


@dataclass
class Written:
    """Rollouts in the store: their ids, and how many an earlier process had finished or started."""

    ids: list[str] = field(default_factory=list)
    finished: int = 0
    continued: int = 0
    prompts: int = 0
    unshown: int = 0  # of these, rollouts without anything to show in a view; they used the plain prompt
    resumed: bool = False  # whether an earlier process may have rewarded and scored some of them already

    def add(self, other: Written) -> None:
        """Add rollouts written later for the same batch."""
        self.finished += other.finished
        self.continued += other.continued
        self.resumed |= other.resumed


@dataclass(repr=False)
class Batch:
    """The rollouts of one step and their data. Each stage from sampling to the update adds to it.

    To train on your own scored rollouts, `Batch(rollouts, signals, rewards)` is enough.
    """

    rollouts: Sequence[Rollout]
    signals: Signals = field(default_factory=dict)  # from teachers, by role and kind
    rewards: RewardsById = field(default_factory=dict)
    first_pass: FirstPass = field(default_factory=FirstPass)
    owners: Mapping[str, str] = field(default_factory=dict)  # rollout id -> its teacher; a micro-batch has one teacher
    traced: frozenset[str] = frozenset()  # ids of rollouts to trace token by token: see `trace_tokens`
    prompts: Mapping[str, Prompt] = field(default_factory=dict)  # by id
    groups: Mapping[str, Any] = field(default_factory=dict)  # by name: data available to views
    written: Written = field(default_factory=Written)
    metrics: dict[str, float] = field(default_factory=dict)  # counts, and seconds of work alongside training
    scored: bool = False  # whether the teachers have scored it
    turn_rewards: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # of an environment, by rollout id

    def __repr__(self) -> str:
        signals = ", ".join(f"{kind} of {role}" for role, kind in self.signals)
        return f"Batch({len(self.rollouts)} rollouts, {len(self.rewards)} rewards, signals: {signals or 'none'})"

    def logprobs(self, role: str, rollouts: Sequence[Rollout]) -> list[np.ndarray]:
        """Log-probs of the response tokens under the model of a role."""
        signals = self.signals[role, "logprobs_at"]
        return [np.asarray(signals[rollout.id].values, dtype=np.float64) for rollout in rollouts]


CALLS, FAILED_CALLS = (
    "calls",
    "failed_calls",
)  # in the extras of a rollout in an environment: how many of its tool calls


def own_turns(rollout: Rollout) -> list[tuple[int, int]]:
    """(first, end) of the student's tokens in each turn of a response: between them stands what an environment said."""
    played = rollout.author == Author.ENV
    if not played.any():
        return [(0, rollout.response_ids.size)]
    edges = np.flatnonzero(np.diff(np.concatenate([[1], played.astype(np.int8), [1]])))
    return [(int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def rewards_by_turn(batch: Batch, rollout: Rollout) -> np.ndarray | None:
    """(turns,) reward of each turn. Without rewards from an environment, the rollout's reward belongs to the last turn.

    None: the rollout has no reward.
    """
    return episode_rewards(batch, batch.rewards.get(rollout.id), rollout.id, len(own_turns(rollout)))


def episode_rewards(batch: Batch, reward: float | None, name: str, turns: int) -> np.ndarray | None:
    """The same for an episode of so many turns, which may be rollouts of their own. `reward`: of the whole."""
    if reward is None:
        return None
    found = np.zeros(turns)
    given = [value or 0.0 for value in batch.turn_rewards.get(name, ())][:turns]
    found[: len(given)] = given
    found[-1] += reward - found.sum()
    return found


def over_spans(student: np.ndarray, signal: Signal) -> np.ndarray:
    """The student's log-probs in the layout of the teacher's.

    If the teacher has another tokenizer, the log-prob of each span is divided over its tokens.
    """
    if signal.crossed is None:
        return student
    found = student.copy()
    for s0, s1, _, _ in signal.spans:
        found[s0:s1] = student[s0:s1].mean()
    return found


def concatenated(rollouts: Sequence[Rollout], name: str) -> np.ndarray:
    return np.concatenate([getattr(rollout, name) for rollout in rollouts])


def require_per_token(what: str, values: Any, rollouts: Sequence[Rollout]) -> None:
    """Check that `values` has one array per rollout and one number per response token, also for custom choices."""
    fits = isinstance(values, Sequence) and len(values) == len(rollouts)
    if not fits or any(
        np.shape(value) != rollout.response_ids.shape for value, rollout in zip(values, rollouts, strict=True)
    ):
        shapes = [np.shape(value) for value in values][:3] if isinstance(values, Sequence) else type(values).__name__
        wanted = [rollout.response_ids.shape for rollout in rollouts][:3]
        raise TrainingError(
            f"{what} has to give one array per rollout with one number per response token, {wanted}, …; it gave {shapes}."
        )
