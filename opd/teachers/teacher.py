"""A teacher by hand: any kind that a recipe can name, opened in one line.

teacher = opd.Teacher("tiny/arithmetic", student)
teacher.predict(batch)                                   # the distribution of every response token: a `Projection`
teacher.score(rollouts, SignalNeed("logprobs_at"))       # signals, as the objective asks for them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opd.divergences import Projection
from opd.errors import UserError
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.models.packing import Pack
from opd.settings import by_hand
from opd.teachers.kinds import AnyTeacher, ModelRef, TeacherKind
from opd.teachers.pool import open_teachers
from opd.teachers.views import SameView
from opd.types import Rendered, Rollout, Signal, SignalNeed, WeightsRef


class Teacher:
    """`settings`: a model, or a recipe's keys of a teacher.

    With its `student`, tokenizers are compared, and from then on the student stops at its teacher's stop ids, too: they are one
    event. Give `student.stop_ids` to whatever merges them.
    """

    def __init__(
        self,
        settings: str | Mapping[str, Any],
        student: LanguageModel | None = None,
        *,
        name: str = "teacher",
        device: str | None = None,
    ) -> None:
        kind: TeacherKind = by_hand(name, AnyTeacher, {"model": settings} if isinstance(settings, str) else settings)
        if kind.view.name != SameView.name:
            raise UserError(
                f"{name}: the view {kind.view.name!r} needs a run; by hand a teacher reads what the student read."
            )
        if student is None and not kind.reads():
            raise UserError(f"{name}: a teacher of kind {kind.name!r} needs its student: opd.Teacher(…, student)")
        place = device or ("cpu" if student is None else str(student.device))
        usual = "float32" if student is None else str(student.dtype).removeprefix("torch.")
        loaded: dict[ModelRef, LanguageModel] = {}

        def load(ref: ModelRef) -> LanguageModel:
            if ref not in loaded:
                loaded[ref] = load_model(ref.model, dtype=ref.dtype or usual, revision=ref.revision, device=place)
            return loaded[ref]

        beside = student if student is not None else load(kind.reads()[0])
        opened, self.stop_ids = open_teachers({name: kind}, beside, load)
        self._opened = opened[name]
        beside.stop_ids = self.stop_ids
        self.name, self.role, self.offers = name, kind.role, kind.offers

    @property
    def version(self) -> int:
        return self._opened.version

    @property
    def context(self) -> int:
        return self._opened.context

    @property
    def model(self) -> Any:
        return self._opened.model

    @torch.no_grad()
    def predict(self, batch: Pack) -> Projection:
        """The distribution of every response token of a batch: row t - 1 predicts token t."""
        signals = self._opened.score(batch.rollouts, SignalNeed("hidden"))
        return self.project(torch.cat([signal.values for signal in signals]))

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        return self._opened.score(rollouts, need, seen)

    def project(self, hidden: Tensor) -> Projection:
        found: Projection = self._opened.project(hidden)
        return found

    def observe(self, step: int, weights: WeightsRef) -> None:
        self._opened.observe(step, weights)

    def state(self) -> Mapping[str, Any]:
        return self._opened.state()

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        self._opened.restore(version, tensors)
