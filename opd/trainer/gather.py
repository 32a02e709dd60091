"""The batch of a step: sampled, rewarded, and scored by teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opd.data.stream import Visit
from opd.objective.batch import Signals, need_beside
from opd.teachers.router import by_teacher
from opd.teachers.views import Group, SameView, texts_for
from opd.trainer.metrics import Clock
from opd.trainer.signal_store import ask
from opd.types import Prompt, Rollout, Signal, SignalKind

if TYPE_CHECKING:
    from opd.runner.stage import StageRun


@dataclass(frozen=True)
class Gathered:
    """The rollouts of a step, their rewards, and what dynamic sampling took."""

    rollouts: list[Rollout]
    rewards: dict[str, float | None]
    metrics: dict[str, float]
    prompts: dict[str, Prompt]  # by id
    groups: dict[str, Group]  # what views may look at


def sample_and_reward(run: StageRun, clock: Clock) -> Gathered:
    """Draw prompts, let them be answered and the answers be rewarded.

    With `rollout.contrast`, groups whose rewards are all equal make room for others; if all are, the last round stays.
    """
    spec = run.spec.rollout
    rewards: dict[str, float | None] = {}
    kept: dict[str, list[Rollout]] = {}
    asked: dict[str, Visit] = {}
    tokens = drawn = 0
    for _ in range(max(spec.contrast, 1)):
        with clock("sample"):
            visits = run.stream.take(spec.prompts - len(kept))
            asked |= {visit.prompt.id: visit for visit in visits}
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
    kept = kept or groups
    return Gathered(
        [rollout for members in kept.values() for rollout in members],
        rewards,
        metrics,
        {name: visit.prompt for name, visit in asked.items()},
        {name: run.group(asked[members[0].prompt_id], members, rewards) for name, members in kept.items()},
    )


def contrasts(members: Sequence[Rollout], rewards: Mapping[str, float | None]) -> bool:
    """Whether a group's rewards differ. One that has none, or that the dataset wrote, is not at issue."""
    asked = [rewards[rollout.id] for rollout in members if rollout.id in rewards]
    return not asked or members[0].source == "data" or len({reward for reward in asked if reward is not None}) > 1


def score(run: StageRun, batch: Gathered, step: int) -> tuple[Signals, dict[str, float]]:
    """Ask the teacher of each rollout, role by role, for what the objective needs. One teacher works at a time.

    With the signals, the share of rollouts for which a teacher's view had nothing to show.
    """
    signals: dict[tuple[str, SignalKind], dict[str, Signal]] = {}
    metrics: dict[str, float] = {}
    for role, kind in run.objective.needs(step):
        answers: dict[str, Signal] = {}
        signals[role, kind] = answers
        need = need_beside(signals, role, kind)
        for name, asked in by_teacher(batch.rollouts, run.routes[role]).items():
            view, teacher = run.spec.teachers[name].view, run.teachers[name]
            seen = texts_for(view, asked, batch.prompts, batch.groups, teacher.context)
            if view.name != SameView.name:
                metrics[f"unshown/{name}"] = sum(text is None for text in seen) / len(seen)
            for rollout, signal in zip(asked, ask(run, teacher, asked, seen, need), strict=True):
                answers[rollout.id] = signal
            run.check_stop()
    return signals, metrics
