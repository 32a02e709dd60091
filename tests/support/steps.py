"""Loss and gradients of one step on given rollouts, through the step itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from opd.loop.step import train_step
from opd.models.language_model import LanguageModel, Pack
from opd.objective.batch import Batch
from opd.objective.objective import Objective
from opd.recipe import Rollouts, Train
from opd.records import Rollout, SignalNeed
from opd.teachers.scoring import LocalTeacher
from tests.support.rollouts import STOPS


def in_order(pack: Pack, statistics: Any, rollouts: list[Rollout]) -> Any:
    """Per-token values in the order of the rollouts given, whatever order they were packed in."""
    ends = np.cumsum(pack.response_lengths)
    rows = {
        item.id: np.arange(end - item.response_ids.size, end) for item, end in zip(pack.rollouts, ends, strict=True)
    }
    order = np.concatenate([rows[item.id] for item in rollouts if item.id in rows])
    for name in ("reverse_kl", "entropy", "mismatch"):
        setattr(statistics, name, getattr(statistics, name)[order])
    return statistics


class KeepGradients:
    """An optimiser that changes nothing, so that the gradients of a step can be looked at."""

    def clip(self) -> float:
        return 0.0

    def step(self, step: int) -> float:
        return 0.0

    def discard(self) -> None: ...


def gradients(student: LanguageModel, teachers: dict[str, LanguageModel], terms: list[Any], rollouts: list[Rollout], budget: int = 10**6,
              spec: Rollouts | None = None, stops: tuple[int, ...] = STOPS, scores: Any = None, autocast: bool = False) -> tuple[float, dict[str, torch.Tensor], list[Any]]:  # fmt: skip
    """Loss and gradients of one step on given rollouts, through the step itself."""
    judges = {name: LocalTeacher(name, "teacher", model, 64, stops) for name, model in teachers.items()}
    objective = Objective(terms, judges, spec or Rollouts(), stops)
    names = list(teachers)
    signals: Any = {}
    for role, kind in objective.needs(1):
        signals[role, kind] = {}
        for item in rollouts:
            name = item.domain if item.domain in teachers else names[0]
            signals[role, kind][item.id] = judges[name].score([item], SignalNeed(kind))[0]
    student.module.requires_grad_(True)
    student.module.zero_grad()
    batch = Batch(rollouts, signals, scores or {})
    result = train_step(
        student,
        batch,
        objective,
        KeepGradients(),
        train=Train(micro_tokens=budget, precision="autocast" if autocast else "float32"),
    )
    found = [in_order(pack, statistics, rollouts) for pack, statistics in result.statistics]
    return (
        sum(value for statistics in found for value in statistics.loss.values()),
        {
            name: p.grad.clone() if p.grad is not None else torch.zeros_like(p)
            for name, p in student.module.named_parameters()
        },
        found,
    )
