"""The one step. Every method is a setting of it.

    prompts -> sample -> judge -> route -> score -> pack -> loss -> update -> publish -> report

The sampler writes into the rollout store and everything below reads from there; there is no other path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opd.errors import TrainingError
from opd.models.packing import Pack, pack
from opd.rollout.draws import request_key
from opd.teachers.router import by_teacher
from opd.training.judged import Judged, Signals
from opd.training.report import Clock, step_metrics
from opd.training.signal_store import ask
from opd.types import Rollout, Signal, SignalKind

if TYPE_CHECKING:
    from opd.training.stage import StageRun
    from opd.training.terms import Statistics


def train_step(run: StageRun, step: int) -> dict[str, Any]:
    clock = Clock(run.on_phase)
    run.rewards.drain()  # what evaluation judged is not this step's

    rollouts, scores, sampled = sample_and_judge(run, clock)
    run.require_rewarded(step, scores)

    with clock("score"):
        signals = score(run, rollouts, step)

    with clock("update"):
        judged = Judged(rollouts, signals, scores)
        with autocast(run):
            plan = run.objective.prepare(run.student, judged, step, lambda share: micro_batches(run, share))
        statistics: list[tuple[Pack, Statistics]] = []
        norms: list[float] = []
        for share in updates(run, rollouts, step):
            weights = plan.weights(share)
            found: list[tuple[Pack, Statistics]] = []
            for batch in micro_batches(run, share):
                with autocast(run):
                    loss, seen = run.objective(run.student, batch, plan, weights)
                if loss.requires_grad:  # a micro-batch may hold no token that any term trains on
                    loss.backward()
                if norms:  # the policy has moved: what differs from the sampler now is that
                    seen.mismatch[:] = np.nan
                found.append((batch, seen))
                run.check_stop()
            norms.append(run.optimiser.clip())
            refuse_non_finite(run, step, found, norms[-1])
            rate = run.optimiser.step(step)
            statistics += found
        run.publish()

    judging = {f"rewards/{name}": count for name, count in run.rewards.drain().items()}
    extra = {"lr": rate, "grad_norm": max(norms), **sampled, **plan.shares, **judging}
    return step_metrics(run.spec.name, step, rollouts, statistics, scores, clock.seconds, extra, updates=len(norms))


def autocast(run: StageRun) -> torch.autocast:
    return torch.autocast(run.device.type, torch.bfloat16, enabled=run.spec.train.autocast)


def sample_and_judge(run: StageRun, clock: Clock) -> tuple[list[Rollout], dict[str, float | None], dict[str, float]]:
    """The batch, its verdicts, and what dynamic sampling took.

    With `rollout.contrast`, groups whose rewards are all equal make room for others; if all are, the last round stays.
    """
    spec = run.spec.rollout
    scores: dict[str, float | None] = {}
    kept: dict[str, list[Rollout]] = {}
    tokens = drawn = 0
    for _ in range(max(spec.contrast, 1)):
        with clock("sample"):
            visits = run.stream.take(spec.prompts - len(kept))
            rollouts = run.store.load(run.trajectories.collect(visits, run.version))
        with clock("judge"):
            scores |= run.judge(rollouts, visits)
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group, []).append(rollout)
        tokens, drawn = tokens + sum(rollout.response_ids.size for rollout in rollouts), drawn + len(groups)
        kept |= {name: members for name, members in groups.items() if not spec.contrast or contrasts(members, scores)}
        if len(kept) >= spec.prompts:
            break
    taken: dict[str, float] = {"contrast": len(kept) / drawn, "tokens/sampled": tokens} if spec.contrast else {}
    if run.stream.skipped:  # prompts that cannot be used, since the stage began
        taken["prompts/skipped"] = run.stream.skipped
    return [rollout for members in (kept or groups).values() for rollout in members], scores, taken


def contrasts(members: Sequence[Rollout], scores: dict[str, float | None]) -> bool:
    """Whether a group's rewards differ. One that nobody can judge, or that the dataset wrote, is not at issue."""
    judged = [scores[rollout.id] for rollout in members if rollout.id in scores]
    return not judged or members[0].source == "data" or len({score for score in judged if score is not None}) > 1


def score(run: StageRun, rollouts: list[Rollout], step: int) -> Signals:
    """Ask the teacher of each rollout, role by role, for what the objective needs. One teacher works at a time."""
    signals: dict[tuple[str, SignalKind], dict[str, Signal]] = {}
    for role, kind in run.objective.needs(step):
        found: dict[str, Signal] = {}
        signals[role, kind] = found
        for name, share in by_teacher(rollouts, run.routes[role]).items():
            for rollout, signal in zip(share, ask(run, name, share, role, kind), strict=True):
                found[rollout.id] = signal
            run.check_stop()
    return signals


def updates(run: StageRun, rollouts: list[Rollout], step: int) -> Iterator[list[Rollout]]:
    """The rollouts of each optimiser step: `epochs` passes over the batch, each cut into `minibatches` of whole groups."""
    train = run.spec.train
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.pair or rollout.group, []).append(rollout)
    for epoch in range(train.epochs):
        names = list(groups)
        if train.minibatches > 1:
            names.sort(
                key=lambda name: request_key(run.spec.seed, name, step, epoch)
            )  # keyed: the same after a restart
        for first in range(min(train.minibatches, len(names))):
            yield [rollout for name in names[first :: train.minibatches] for rollout in groups[name]]


def micro_batches(run: StageRun, rollouts: Sequence[Rollout]) -> list[Pack]:
    """Packs ordered by teacher, then length; a group is never split."""
    order = run.routes.get("teacher", {})
    longest: dict[str, int] = {}
    for rollout in rollouts:
        longest[rollout.group] = max(longest.get(rollout.group, 0), rollout.length)
    ordered = sorted(
        rollouts, key=lambda rollout: (order.get(rollout.domain, ""), longest[rollout.group], rollout.group)
    )
    batches = pack(ordered, run.spec.train.micro_tokens, unit=lambda rollout: rollout.pair or rollout.group)
    return [Pack.of(batch, run.device) for batch in batches]


def refuse_non_finite(run: StageRun, step: int, statistics: list[tuple[Pack, Statistics]], norm: float) -> None:
    """Stop before a NaN reaches the weights; what they were is saved and named."""
    bad = [
        (batch, name) for batch, found in statistics for name, value in found.loss.items() if not math.isfinite(value)
    ]
    if not bad and math.isfinite(norm):
        return
    place = (
        f"term {bad[0][1]}, rollouts {', '.join(rollout.id for rollout in bad[0][0].rollouts[:3])}, …"
        if bad
        else "the gradient"
    )
    run.optimiser.adamw.zero_grad(set_to_none=True)
    raise TrainingError(
        f"step {step}: the loss or its gradient is not finite ({place}). The update was not applied. "
        "Lower train.lr, or set train.clip; with bfloat16 weights try float32."
    )
