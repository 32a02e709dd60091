"""The training step. Every method is a configuration of it.

    prompts -> sample -> reward -> route -> score -> pack -> loss -> update -> publish -> report

The sampler writes into the rollout store, and everything after it reads from there; there is no other path. `train_step` is the
part after the scores. It needs a student, a batch, an objective and an optimiser, but no run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from opd.common.errors import TrainingError
from opd.engines.requests import request_key
from opd.loop.metrics import Clock, StepReport, StepResult, sampled_ids, step_metrics, study, take_probes
from opd.loop.oom_retry import MicroBudget, micro_batches, once
from opd.loop.ranks import Ranks
from opd.models.language_model import LanguageModel, Pack
from opd.objective.batch import Batch
from opd.objective.micro import TokenStatistics
from opd.objective.objective import Objective, PreparedBatch
from opd.recipe import Train
from opd.records import Rollout

if TYPE_CHECKING:
    from opd.loop.parts import StageParts


def run_step(parts: StageParts, step: int) -> StepReport:
    clock = Clock(parts.context.on_phase)
    batch = parts.producer.next(step, clock)
    parts.rewards.require_rewarded(step, batch.rewards)
    parts.on_rollouts(batch.rollouts, batch.rewards)
    with clock("score"):
        if not batch.scored:
            parts.scorer.score(batch, step)
    result = StepResult({})
    if parts.spec.train.learn:  # otherwise only scores are wanted
        with clock("update"):
            batch.traced = sampled_ids(parts.spec.log, batch, step)
            result = parts.trainer.step(batch, step)
            parts.publish(step=step)
        result.measured |= take_probes(parts, step, batch, clock)
    extra = {"lr": result.rate, "grad_norm": max(result.norms)} if result.norms else {}
    extra |= batch.metrics | result.measured
    if parts.scorer.pager is not None:  # the step is over, so the teachers' heads are no longer needed
        parts.scorer.pager.release()
        extra |= parts.scorer.pager.metrics()
    facts = (batch.rollouts, result.statistics, batch.rewards, clock.seconds, extra)
    metrics = step_metrics(parts.spec.name, step, *facts, updates=len(result.norms))
    metrics |= parts.stream.note(batch.rollouts, metrics)
    if parts.stream.curriculum is not None:
        metrics |= study(parts.stream, batch, result, parts.ranks)
    first_traces = {name: trace for _, seen in reversed(result.statistics) for name, trace in seen.traces.items()}
    return StepReport(metrics, batch.written, first_traces, result.statistics)


class Updates(Protocol):
    """What `train_step` needs from an optimiser. `opd.loop.learner.Learner` implements it, and so does the student's `Optimiser`."""

    def clip(self) -> float: ...
    def step(self, step: int) -> float: ...
    def discard(self) -> None: ...


def train_step(
    student: LanguageModel, batch: Batch, objective: Objective, optimiser: Updates, *, step: int = 1,
    train: Train | None = None, seed: int = 0, teacher_of: Mapping[str, str] | None = None,
    check_stop: Callable[[], None] = lambda: None, ranks: Ranks | None = None, budget: MicroBudget | None = None,
) -> StepResult:  # fmt: skip
    """Train on one scored batch: `epochs` times `minibatches` updates. `teacher_of`: domain -> teacher, if the batch does not say."""
    train, domains, ranks = train or Train(), teacher_of or {}, ranks or Ranks()
    owners = batch.owners or {item.id: domains.get(item.domain, "") for item in batch.rollouts}
    device, mine = student.device, {rollout.id for rollout in ranks.deal(batch.rollouts)}
    budget = budget or MicroBudget(train.micro_budget)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=train.precision == "autocast")

    def cut(rollouts: Sequence[Rollout]) -> list[Pack]:
        return micro_batches([item for item in rollouts if item.id in mine], budget.tokens, device, owners)

    def prepare() -> PreparedBatch:
        with autocast():
            return objective.prepare(student, batch, step, cut, train.updates, ranks.complete)

    def passes(rollouts: Sequence[Rollout]) -> list[tuple[Pack, TokenStatistics]]:
        weights, seen = prepared.weights(rollouts), []
        for micro in student.passes(cut(rollouts)):
            with autocast():
                loss, statistics = student.inside(partial(objective, student, micro, prepared, weights))
            if loss.requires_grad:  # a micro-batch may have no token that any term trains on
                loss.backward()
            seen.append((micro, statistics))
            check_stop()
        return seen

    repeat = budget.repeat if ranks.size == 1 else once  # all ranks must take the same number of passes
    prepared = repeat(prepare, optimiser.discard, batch.rollouts)
    result = StepResult(prepared.metrics, step=step)
    for rollouts in updates(batch.rollouts, train, seed, step):
        check_stop()
        seen = repeat(partial(passes, rollouts), optimiser.discard, rollouts)
        norm = optimiser.clip()
        for _, statistics in seen:  # one synchronisation with the device per update
            statistics.settle(moved=bool(result.norms))
        seen = ranks.collect(seen)
        require_finite(step, seen, norm, optimiser)
        result.rate = optimiser.step(step)
        result.norms.append(norm)
        result.statistics += seen
    return result


def updates(rollouts: Sequence[Rollout], train: Train, seed: int, step: int) -> Iterator[list[Rollout]]:
    """The rollouts of each optimiser step: `epochs` passes over the batch, each split into `minibatches` of whole groups."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.unit, []).append(rollout)
    for epoch in range(train.epochs):
        names = list(groups)
        if train.minibatches > 1:  # keyed, so that it is the same after a restart
            names.sort(key=lambda name: request_key(seed, name, step, epoch))
        for first in range(min(train.minibatches, len(names))):
            yield [rollout for name in names[first :: train.minibatches] for rollout in groups[name]]


def require_finite(step: int, seen: list[tuple[Pack, TokenStatistics]], norm: float, optimiser: Updates) -> None:
    """Stop before a NaN reaches the weights. The last good weights are saved and named."""
    bad = [(micro, name) for micro, values in seen for name, loss in values.loss.items() if not math.isfinite(loss)]
    if not bad and math.isfinite(norm):
        return
    where = f"term {bad[0][1]}, rollouts {bad[0][0].rollouts[0].id}, …" if bad else "the gradient"
    optimiser.discard()
    raise TrainingError(
        f"step {step}: the loss or its gradient is not finite ({where}). The update was not applied. "
        "Lower train.lr, or set train.clip; or try train.precision: float32."
    )
