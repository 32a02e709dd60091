"""The batch of a step: sampled, rewarded, and scored by teachers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from opd.data.prompts import route_value
from opd.data.stream import Visit
from opd.objective.batch import Signals
from opd.teachers.router import by_teacher
from opd.teachers.scoring import ScoringTeacher
from opd.teachers.views import Group, View, texts_for
from opd.trainer.experience import write_experience
from opd.trainer.metrics import Clock
from opd.trainer.rescue import rescue
from opd.trainer.signal_store import ask
from opd.trainer.trajectories import as_trained
from opd.types import Prompt, Rendered, Rollout, Signal, SignalKind

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
    counts: dict[str, float]  # what became of the rewards
    taken_up: bool  # some of it is an earlier process's, and may have been rewarded and scored already
    scored: tuple[Signals, dict[str, float]] | None = (
        None  # as `score` says it, where teachers were asked ahead of the step
    )

    def teacher_of(self, run: StageRun) -> dict[str, str]:
        """Rollout id -> the teacher (of that role) that it belongs to; nothing where there is none."""
        if "teacher" not in run.routes:
            return {}
        return {rollout.id: run.teacher_for(self.prompts[rollout.prompt_id]) for rollout in self.rollouts}


def sample_and_reward(run: StageRun, clock: Clock) -> Gathered:
    """Draw prompts, let them be answered and the answers be rewarded.

    With `rollout.contrast`, groups whose rewards are all equal make room for others; if all are, the last round stays.
    """
    spec = run.spec.rollout
    run.rewarder.drain()  # what evaluation rewarded is not this step's
    rewards: dict[str, float | None] = {}
    kept: dict[str, list[Rollout]] = {}
    asked: dict[str, Visit] = {}
    metrics: dict[str, float] = {}
    tokens = drawn = 0
    for _ in range(max(spec.contrast, 1)):
        with clock("sample"):
            visits = run.stream.take(spec.prompts - len(kept))
            asked |= {visit.prompt.id: visit for visit in visits}
            written = run.trajectories.collect(visits, run.version)
            rollouts = [*map(as_trained, run.world.share(partial(run.store.load, written)))]
        with clock("reward"):
            rewards |= run.world.share(partial(run.reward, rollouts, visits, run.trajectories.taken_up))
            rollouts = run.demonstrate(rollouts, rewards, visits)
        if spec.rescue is not None:
            with clock("rescue"):
                rollouts, metrics = rescue(run, visits, rollouts, rewards)
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        tokens, drawn = tokens + sum(rollout.response_ids.size for rollout in rollouts), drawn + len(groups)
        kept |= {name: members for name, members in groups.items() if not spec.contrast or contrasts(members, rewards)}
        if len(kept) >= spec.prompts:
            break
    if spec.contrast:
        metrics |= {"contrast": len(kept) / drawn, "tokens/sampled": tokens}
    if any(writer.shows_more for writer in spec.everyone):  # of the last round
        metrics["rollout/unshown"] = run.trajectories.unshown / len(visits)
    if run.stream.skipped:  # prompts that cannot be used, since the stage began
        metrics["prompts/skipped"] = run.stream.skipped
    if run.demonstrator is not None:
        metrics |= run.demonstrator.drain()
    kept = kept or groups
    trained = [rollout for members in kept.values() for rollout in members]
    prompts = {name: visit.prompt for name, visit in asked.items()}
    if spec.experience is not None:
        with clock("experience"):
            prompts, told = write_experience(run, asked[trained[0].prompt_id], trained, rewards, prompts)
            metrics |= told
    return Gathered(
        trained,
        rewards,
        metrics,
        prompts,
        {name: run.group(asked[members[0].prompt_id], members, rewards) for name, members in kept.items()},
        run.rewarder.drain(),
        run.trajectories.taken_up,
    )


def reward_stored(run: StageRun, visits: Sequence[Visit], written: Sequence[str], taken_up: bool) -> Gathered:
    """A batch that is in the store already, rewarded."""
    rollouts = [*map(as_trained, run.store.load(written))]
    with run.rewarding:
        run.rewarder.drain()  # what evaluation rewarded is not this step's
        rewards = run.reward(rollouts, visits, taken_up)
        counts = run.rewarder.drain()
    asked = {visit.prompt.id: visit for visit in visits}
    members: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        members.setdefault(rollout.group, []).append(rollout)
    groups = {name: run.group(asked[found[0].prompt_id], found, rewards) for name, found in members.items()}
    prompts = {name: visit.prompt for name, visit in asked.items()}
    return Gathered(rollouts, rewards, {}, prompts, groups, counts, taken_up)


def contrasts(members: Sequence[Rollout], rewards: Mapping[str, float | None]) -> bool:
    """Whether a group's rewards differ. One that has none, or that the dataset wrote, is not at issue."""
    asked = [rewards[rollout.id] for rollout in members if rollout.id in rewards]
    return not asked or members[0].source == "data" or len({reward for reward in asked if reward is not None}) > 1


def score(run: StageRun, batch: Gathered, step: int) -> tuple[Signals, dict[str, float]]:
    """Ask the teacher of each rollout for what the objective needs of its role. One teacher works at a time, and once.

    With the signals, the share of rollouts for which a teacher's view had nothing to show, or more than it can read; and of
    tokens that one with another tokenizer was not compared at.
    """
    needs = run.objective.needs(step, run.spec.train.updates)
    signals: dict[tuple[str, SignalKind], dict[str, Signal]] = {need: {} for need in needs}
    metrics: dict[str, float] = {}
    mine = {rollout.id for rollout in run.world.deal(batch.rollouts)}
    asked = _by_model(run, batch, [role for role, _ in needs])
    with run.scoring(asked):
        for name, rollouts in asked.items():
            view, teacher = run.spec.teachers[name].view, run.teachers[name]
            seen = texts_for(view, rollouts, batch.prompts, run.groups_for(name, batch.groups), teacher.context)
            if view.crosses:
                metrics |= _left_out(name, view, rollouts, seen)
                seen = [text if text is not None and (text.spans or not text.cut) else None for text in seen]
            unshown = sum(text is None for text in seen)
            if unshown or not view.as_sampled:
                metrics[f"unshown/{name}"] = unshown / len(seen)
            if step == 1 and isinstance(teacher, ScoringTeacher):
                measured = teacher.measure([text for text in seen if text is not None])
                metrics |= measured
                for key, value in measured.items():
                    run.say(f"{run.spec.name}: {key} {value:.2e} nats per token of the first batch")
            for role, kind in (need for need in needs if need[0] == teacher.role):
                answers = ask(
                    run, teacher, rollouts, seen, run.objective.need_beside(signals, role, kind), mine, batch.taken_up
                )
                signals[role, kind] |= {item.id: signal for item, signal in zip(rollouts, answers, strict=True)}
                run.check_stop()
    run.tell_unshown(step, metrics)
    return signals, metrics


def _left_out(name: str, view: View, rollouts: Sequence[Rollout], seen: Sequence[Rendered | None]) -> dict[str, float]:
    """Of answers that a teacher with another tokenizer can read, the shares of tokens in no span, and left out at a cut."""
    shown = [(rollout, text) for rollout, text in zip(rollouts, seen, strict=True) if text is not None]
    every = sum(max(rollout.response_ids.size - view.skip, 0) for rollout, _ in shown)
    inside = sum(s1 - s0 for _, text in shown for s0, s1, _, _ in text.spans)
    cut = sum(text.cut for _, text in shown)
    return {f"unaligned/{name}": (every - inside - cut) / max(every, 1), f"cut_off/{name}": cut / max(every, 1)}


def _by_model(run: StageRun, batch: Gathered, roles: Sequence[str]) -> dict[str, list[Rollout]]:
    """The rollouts that each teacher is asked about; teachers that read one model stand together."""

    def value_of(rollout: Rollout) -> str:
        return route_value(batch.prompts[rollout.prompt_id], run.spec.route)

    asked: dict[str, list[Rollout]] = {}
    for role in dict.fromkeys(roles):
        asked |= by_teacher(batch.rollouts, run.routes[role], value_of)
    models = {name: tuple(run.spec.teachers[name].reads()) or name for name in asked}
    first = list(dict.fromkeys(models.values()))
    return {name: asked[name] for name in sorted(asked, key=lambda name: first.index(models[name]))}
