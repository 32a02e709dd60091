"""What teachers said is kept in the store, so that an interrupted run does not ask them again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from opd.teachers.cache import text_key
from opd.teachers.from_cache import keep_scores
from opd.types import Rendered, Rollout, Signal, SignalKind, SignalNeed, TeacherLike

if TYPE_CHECKING:
    from opd.runner.stage import StageRun


def ask(
    run: StageRun,
    teacher: TeacherLike,
    rollouts: Sequence[Rollout],
    seen: Sequence[Rendered | None],
    need: SignalNeed,
    mine: Collection[str],
    taken_up: bool,
) -> list[Signal]:
    """Signals of one teacher about these rollouts: those in the store, and answers to the rest, which go there.

    `mine`: the rollouts that this process trains on. It asks about those, and is told what the others have been told.
    `taken_up`: an earlier process may have asked already.
    An exact resume takes all or none of them: a teacher's rounding depends on what it scores together.
    """
    view, kind = run.spec.teachers[teacher.name].view.name, need.kind
    known = {
        rollout.id: _nothing(teacher, view, rollout)
        for rollout, text in zip(rollouts, seen, strict=True)
        if text is None
    }
    shown = {rollout.id: text for rollout, text in zip(rollouts, seen, strict=True) if text is not None}
    stored = run.world.share(lambda: _stored(run, teacher, shown, kind)) if taken_up else {}
    if run.spec.checkpoint.resume != "exact" or len(stored) == len(shown):
        known |= stored
    rest = [rollout for rollout in rollouts if rollout.id not in known]
    own = [rollout for rollout in rest if rollout.id in mine]
    together = teacher.model is not None and teacher.model.spread  # over ranks, which then score side by side
    answers = teacher.score(own, need, [shown[rollout.id] for rollout in own]) if own or together else []
    written = kind != "hidden" or run.spec.keeps_hidden
    if written and run.pager is not None:
        run.pager.check()  # a resumed run would believe what is in the store
    said = {rollout.id: signal for rollout, signal in zip(own, answers, strict=True)}
    known |= run.world.exchange(said, hidden=kind == "hidden")
    for rollout in rest:
        signal = known[rollout.id]
        if written:
            run.store.record_signal(
                rollout.id, teacher.role, kind, teacher.name, signal.teacher_version, _plain(signal.values), signal.mask,
                view=signal.view, spans=signal.spans, key=text_key(shown[rollout.id]),
            )  # fmt: skip
    if run.scored is not None:
        keep_scores(run.scored, teacher, kind, answers)
    return [known[rollout.id] for rollout in rollouts]


def _nothing(teacher: TeacherLike, view: str, rollout: Rollout) -> Signal:
    """About a rollout for which the teacher's view has nothing to show."""
    size = rollout.response_ids.size
    return Signal(
        teacher.name, teacher.version, teacher.role, view, (), np.full(size, np.nan), np.zeros(size, dtype=bool)
    )


def _stored(run: StageRun, teacher: TeacherLike, shown: dict[str, Rendered], kind: SignalKind) -> dict[str, Signal]:
    """What the same teacher, in the same version, said of the same texts."""
    found = run.store.signals(list(shown), teacher.role, kind)

    def again(key: str, signal: Signal) -> Signal:
        text, values = shown[key], signal.values
        ids = np.concatenate([text.ids[t0:t1] for _, _, t0, t1 in text.spans]) if text.crossed and text.spans else None
        return replace(signal, values=torch.from_numpy(np.asarray(values)) if kind == "hidden" else values, crossed=ids)

    return {
        key: again(key, signal)
        for key, signal in found.items()
        if (signal.teacher, signal.teacher_version) == (teacher.name, teacher.version)
        and (signal.view, signal.spans) == (shown[key].view, shown[key].spans)
        and signal.key in ("", text_key(shown[key]))  # older stores do not say
    }


def _plain(values: Any) -> Any:
    """Hidden states come as tensors on the teacher's device; every bfloat16 is a float32."""
    return values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else values
