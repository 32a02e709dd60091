"""What teachers said is kept in the store, so that an interrupted run does not ask them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opd.types import Rollout, Signal, SignalKind, SignalNeed

if TYPE_CHECKING:
    from opd.runner.stage import StageRun


def ask(run: StageRun, name: str, rollouts: Sequence[Rollout], role: str, kind: SignalKind) -> list[Signal]:
    """Signals of one teacher about these rollouts: those in the store, and answers to the rest, which go there.

    An exact resume takes all or none of them: a teacher's rounding depends on what it scores together.
    """
    teacher = run.teachers[name]
    known: dict[str, Signal] = {}
    if run.trajectories.taken_up:
        stored = run.store.signals([rollout.id for rollout in rollouts], role, kind)
        known = {key: _loaded(run, signal, kind) for key, signal in stored.items() if signal.teacher == name}
        if run.spec.checkpoint.resume == "exact" and len(known) < len(rollouts):
            known = {}
    rest = [rollout for rollout in rollouts if rollout.id not in known]
    for rollout, signal in zip(rest, teacher.score(rest, SignalNeed(kind)) if rest else [], strict=True):
        known[rollout.id] = signal
        if kind != "hidden" or run.spec.store.hidden:
            run.store.record_signal(
                rollout.id, role, kind, name, signal.teacher_version, _plain(signal.values), signal.mask, view=signal.view, spans=signal.spans
            )  # fmt: skip
    return [known[rollout.id] for rollout in rollouts]


def _plain(values: Any) -> Any:
    """Hidden states come as tensors on the teacher's device; every bfloat16 is a float32."""
    return values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else values


def _loaded(run: StageRun, signal: Signal, kind: SignalKind) -> Signal:
    if kind != "hidden":
        return signal
    model = run.teachers[signal.teacher].model
    return replace(signal, values=torch.from_numpy(np.asarray(signal.values)).to(model.device, model.dtype))
