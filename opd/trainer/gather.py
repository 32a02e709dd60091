"""The batch of a step: sampled, rewarded, and scored by teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from opd.objective.batch import Signals
from opd.teachers.router import by_teacher
from opd.trainer.metrics import Clock
from opd.trainer.signal_store import ask
from opd.types import Rollout, Signal, SignalKind

if TYPE_CHECKING:
    from opd.runner.stage import StageRun


def sample_and_reward(run: StageRun, clock: Clock) -> tuple[list[Rollout], dict[str, float | None], dict[str, float]]:
    """The rollouts, their rewards, and what dynamic sampling took.

    With `rollout.contrast`, groups whose rewards are all equal make room for others; if all are, the last round stays.
    """
    spec = run.spec.rollout
    rewards: dict[str, float | None] = {}
    kept: dict[str, list[Rollout]] = {}
    tokens = drawn = 0
    for _ in range(max(spec.contrast, 1)):
        with clock("sample"):
            visits = run.stream.take(spec.prompts - len(kept))
            rollouts = run.store.load(run.trajectories.collect(visits, run.version))
        with clock("reward"):
            rewards |= run.reward(rollouts, visits)
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        tokens, drawn = tokens + sum(rollout.response_ids.size for rollout in rollouts), drawn + len(groups)
        kept |= {name: members for name, members in groups.items() if not spec.contrast or contrasts(members, rewards)}
        if len(kept) >= spec.prompts:
            break
    metrics: dict[str, float] = {"contrast": len(kept) / drawn, "tokens/sampled": tokens} if spec.contrast else {}
    if run.stream.skipped:  # prompts that cannot be used, since the stage began
        metrics["prompts/skipped"] = run.stream.skipped
    return [rollout for members in (kept or groups).values() for rollout in members], rewards, metrics


def contrasts(members: Sequence[Rollout], rewards: Mapping[str, float | None]) -> bool:
    """Whether a group's rewards differ. One that has none, or that the dataset wrote, is not at issue."""
    asked = [rewards[rollout.id] for rollout in members if rollout.id in rewards]
    return not asked or members[0].source == "data" or len({reward for reward in asked if reward is not None}) > 1


def score(run: StageRun, rollouts: Sequence[Rollout], step: int) -> Signals:
    """Ask the teacher of each rollout, role by role, for what the objective needs. One teacher works at a time."""
    signals: dict[tuple[str, SignalKind], dict[str, Signal]] = {}
    for role, kind in run.objective.needs(step):
        answers: dict[str, Signal] = {}
        signals[role, kind] = answers
        for name, asked in by_teacher(rollouts, run.routes[role]).items():
            for rollout, signal in zip(asked, ask(run, name, asked, role, kind), strict=True):
                answers[rollout.id] = signal
            run.check_stop()
    return signals
