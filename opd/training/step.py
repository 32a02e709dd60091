"""The one step. Every method is a setting of it.

    prompts -> sample -> judge -> route -> score -> pack -> loss -> update -> publish -> report

The sampler writes into the rollout store and everything below reads from there; there is no other path.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from opd.errors import TrainingError
from opd.models.packing import Pack, pack
from opd.teachers.router import by_teacher
from opd.training.report import Clock, step_metrics
from opd.training.signal_store import ask
from opd.types import Rollout, Signal, SignalKind

if TYPE_CHECKING:
    from opd.training.objective import Signals, Statistics
    from opd.training.stage import StageRun


def train_step(run: StageRun, step: int) -> dict[str, Any]:
    clock = Clock(run.on_phase)

    with clock("sample"):
        visits = run.stream.take(run.spec.rollout.prompts)
        ids = run.trajectories.collect(visits, run.version)
        rollouts = run.store.load(ids)

    with clock("judge"):
        scores = run.judge(rollouts, visits)

    with clock("score"):
        signals = score(run, rollouts)

    with clock("update"):
        weights = run.objective.token_weights(rollouts)
        statistics: list[tuple[Pack, Statistics]] = []
        for batch in micro_batches(run, rollouts):
            with torch.autocast(run.device.type, torch.bfloat16, enabled=run.spec.train.autocast):
                loss, found = run.objective(run.student, batch, signals, weights)
            if loss.requires_grad:  # a micro-batch may hold no token that any term trains on
                loss.backward()
            statistics.append((batch, found))
            run.check_stop()
        norm = run.optimiser.clip()
        refuse_non_finite(run, step, statistics, norm)
        rate = run.optimiser.step(step)
        run.publish()

    return step_metrics(
        run.spec.name, step, rollouts, statistics, scores, clock.seconds, {"lr": rate, "grad_norm": norm}
    )


def score(run: StageRun, rollouts: list[Rollout]) -> Signals:
    """Ask the teacher of each rollout, role by role, for what the objective needs. One teacher works at a time."""
    signals: dict[tuple[str, SignalKind], dict[str, Signal]] = {}
    for role, kind in run.objective.needs:
        found: dict[str, Signal] = {}
        signals[role, kind] = found
        for name, share in by_teacher(rollouts, run.routes[role]).items():
            for rollout, signal in zip(share, ask(run, name, share, role, kind), strict=True):
                found[rollout.id] = signal
            run.check_stop()
    return signals


def micro_batches(run: StageRun, rollouts: list[Rollout]) -> list[Pack]:
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
