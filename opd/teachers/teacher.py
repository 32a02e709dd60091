"""Opens a teacher of any kind that a recipe can name, in one line.

teacher = opd.Teacher("tiny/arithmetic", student)
teacher.predict(batch)                                   # the distribution of every response token: a `Projection`
teacher.score(rollouts, SignalNeed("logprobs_at"))       # signals, as objectives request them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opd.common.errors import RecipeError, UserError
from opd.divergences.projection import Source
from opd.models.language_model import LanguageModel, Pack
from opd.models.tokenizers import share_vocabulary
from opd.records import Rendered, Rollout, Signal, SignalNeed, WeightsRef
from opd.registry import StageView, by_hand
from opd.rollouts.settings import Rollouts
from opd.teachers.kinds import AnyTeacher, ModelRef, TeacherKind
from opd.teachers.pool import open_teachers
from opd.teachers.quantised import load_teacher, require_quantiser
from opd.teachers.scoring import ScoringTeacher
from opd.teachers.views import behind


class Teacher:
    """`settings`: a model, or a recipe's keys of a teacher.

    With a `student`, tokenizers are compared, and from then on the student also stops at the teacher's stop ids. All stop ids are
    one event, also for teachers of the same student opened later. Pass `student.stop_ids` to functions that merge them.
    """

    def __init__(
        self,
        settings: str | Mapping[str, Any],
        student: LanguageModel | None = None,
        *,
        name: str = "teacher",
        device: str | None = None,
    ) -> None:
        kind: TeacherKind = by_hand(name, AnyTeacher, settings)
        if not kind.view.as_sampled:
            raise UserError(
                f"{name}: the view {kind.view.name!r} needs a run; by hand a teacher reads what the student read."
            )
        if kind.domains is not None:
            raise UserError(
                f"{name}: domains {', '.join(kind.domains)}: by hand a teacher scores the domains that it stands under: "
                "opd.Objective(…, {domain: teacher, …}). Drop them."
            )
        if student is None and not kind.reads():
            raise UserError(f"{name}: a teacher of kind {kind.name!r} needs its student: opd.Teacher(…, student)")
        _refuse(name, kind, student)
        place = device or ("cpu" if student is None else str(student.device))
        usual = "float32" if student is None else str(student.dtype).removeprefix("torch.")
        loaded: dict[ModelRef, LanguageModel] = {}

        def load(ref: ModelRef) -> LanguageModel:
            if ref not in loaded:
                dtype, where = ref.dtype or usual, ref.device or place
                if ref.quantise is not None:
                    require_quantiser(name, ref.quantise, dtype, where)
                loaded[ref] = load_teacher(ref, ref.model, ref.revision, dtype, where)
                loaded[ref].unquantised = {}  # no first batch to compare on
            return loaded[ref]

        beside = student if student is not None else load(kind.reads()[0])
        opened, self.stop_ids = open_teachers({name: kind}, beside, load)
        self._opened, self._beside, self._skip = opened[name], beside, kind.view.skip
        self._models = [*loaded.values(), *([self._opened.model] if kind.has_model else [])]
        self._size, beside.stop_ids = beside.size, self.stop_ids
        self.name, self.role, self.offers = name, kind.role, kind.offers

    def __repr__(self) -> str:
        model = "" if self.model is None else f", model={self.model.name!r}"
        return f"Teacher({self.name!r}, role={self.role!r}{model}, gives {', '.join(sorted(self.offers))})"

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
    def predict(self, batch: Pack) -> Source:
        """The distribution at every response token of a batch: row t - 1 predicts token t."""
        self._follow()
        signals = self._opened.score(batch.rollouts, SignalNeed("hidden"))
        return self.project(torch.cat([signal.values for signal in signals]).to(self._beside.device))

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        self._follow()
        seen = seen if seen is not None else [behind(rollout.prompt_ids, rollout, self._skip) for rollout in rollouts]
        return self._opened.score(rollouts, need, seen)

    def _follow(self) -> None:
        """Adopts stop ids added by teachers of the same student that were opened later."""
        beside = self._beside
        if (beside.stop_ids, beside.size) == (self.stop_ids, self._size):
            return
        if not isinstance(self._opened, ScoringTeacher):
            raise UserError(
                f"{self.name}: the student stops at {beside.stop_ids} by now, and this teacher was opened when it stopped at "
                f"{self.stop_ids}. Open it after the others."
            )
        share_vocabulary(beside, {str(number): model for number, model in enumerate(self._models)})
        self._opened.stop_ids = self.stop_ids = beside.stop_ids
        self._size = beside.size

    def project(self, hidden: Tensor) -> Source:
        self._follow()
        found: Source = self._opened.project(hidden)
        return found

    def observe(self, step: int, weights: WeightsRef) -> None:
        self._opened.observe(step, weights)

    def state(self) -> Mapping[str, Any]:
        return self._opened.state()

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        self._opened.restore(version, tensors)


def _refuse(name: str, kind: TeacherKind, student: LanguageModel | None) -> None:
    """Raises for mistakes that can be seen without objective terms."""
    lora = student is not None and student.adapter is not None
    view = StageView(Rollouts(samples=2), None, (), frozenset({kind.role}), lora=lora)
    mistakes = [f"{name}: {mistake}" for choice in (kind, kind.view) for mistake in choice.refuse(view)]
    if mistakes:
        raise RecipeError("\n".join(mistakes))
