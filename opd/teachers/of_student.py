"""Teachers that are the student itself: at the start of the stage, some steps ago, averaged, or now. No torch here.

They score under a view that shows more than the student sees (a solution, an instruction), or keep the student near its start
(role `reference`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from opd.common.errors import RecipeError
from opd.records import WeightsRef
from opd.registry import Positive, StageView
from opd.teachers.kinds import ModelTeacher, TeacherInputs, TeacherKind
from opd.teachers.scoring import LocalTeacher, Page, ScoringTeacher

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences import Projection
    from opd.models.language_model import LanguageModel

FLOAT32 = 4  # bytes
LEAST = 20  # published runs with an instruction collapse with fewer steps between two refreshes


class StudentTeacher(ModelTeacher):
    """Base of these kinds."""

    of_student = True


class SelfTeacher(StudentTeacher):
    """Scores with the student as it was at the start of the stage."""

    name = "self"
    has_model = True

    def bytes_per_weight(self, each: int, lora: bool) -> int:
        return 0 if lora else each

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        from opd.teachers.scoring import LocalTeacher

        student = supplies.student
        model = copy_of(student) if student.adapter is None else student.base()  # new adapters change nothing yet
        return LocalTeacher(name, self.role, model, self.batch_tokens, supplies.stop_ids)


class BaseTeacher(StudentTeacher):
    """Scores with the frozen model below the student's adapters. Needs no extra memory."""

    name = "base"
    has_model = True

    def refuse(self, view: StageView) -> Iterable[str]:
        if not view.lora:
            yield "kind base is the model below the student's adapters, and it has none. Set student.lora, or use kind: self."

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        from opd.teachers.scoring import LocalTeacher

        return LocalTeacher(name, self.role, supplies.student.base(), self.batch_tokens, supplies.stop_ids)


class EmaTeacher(StudentTeacher):
    """Scores with a running average of the student's weights: each step moves it `rate` of the way towards them."""

    name = "ema"
    has_model = True
    rate: float = Field(0.01, gt=0, lt=1, description="of ema: 1 - decay; SDFT 0.01 to 0.05, SDPO 0.05, OPSD 0.001")

    def warn(self, view: StageView) -> Iterable[str]:
        if self.view.instructs and self.rate > 1 / LEAST and _asked(self, view, "reverse_kl"):
            yield (
                f"ema at rate {self.rate:g} under an instruction follows the student within {1 / self.rate:.0f} steps: copies renewed "
                f"within {LEAST} collapsed in published runs. Prefer {1 / LEAST:g} or less"
            )

    def bytes_per_weight(self, each: int, lora: bool) -> int:
        return each if each == FLOAT32 else each + FLOAT32  # averages are kept in fp32

    def follows_within(self) -> int:
        return math.ceil(1 / self.rate)

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        return _following(self, name, supplies, every=1, rate=self.rate)


class RefreshTeacher(StudentTeacher):
    """Scores with a copy of the student, renewed every few steps."""

    name = "refresh"
    has_model = True
    every: Positive = Field(50, description="of refresh: steps; CRISP 50")
    force: bool = Field(False, description="take a setting that published runs collapsed with")

    def refuse(self, view: StageView) -> Iterable[str]:
        return refuse_chasing(self, view, self.every, self.force)

    def warn(self, view: StageView) -> Iterable[str]:
        if _asked(self, view, "forward_kl"):
            yield "forward KL to a teacher that is refreshed: published runs collapsed at every refresh. Prefer reverse_kl"

    def bytes_per_weight(self, each: int, lora: bool) -> int:
        return each

    def follows_within(self) -> int:
        return self.every

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        return _following(self, name, supplies, every=self.every, rate=1.0)


SPREAD = (
    "kind live scores with the student's own weights, which are spread over the ranks. Use kind: refresh with every: 1, which "
    "scores with a whole copy of the same."
)


class LiveTeacher(StudentTeacher):
    """Scores with the current student, without gradients. Only the view differs."""

    name = "live"
    is_student_now = True
    force: bool = Field(False, description="take a setting that published runs collapsed with")

    def refuse(self, view: StageView) -> Iterable[str]:
        if self.view.as_sampled:
            yield "kind live reads what the student reads, so the two never differ. Give it a `view`."
        yield from self.refuse_as_part(view)

    def refuse_as_part(self, view: StageView) -> Iterable[str]:
        return refuse_chasing(self, view, 1, self.force)

    def follows_within(self) -> int:
        return 1

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:

        if supplies.context.ranks.sharded:
            raise RecipeError(f"teachers.{name}: {SPREAD}")
        return LiveStudent(name, self.role, supplies.student, self.batch_tokens, supplies.stop_ids)


def refuse_chasing(kind: StudentTeacher, view: StageView, every: int, force: bool) -> Iterable[str]:
    """Rejects an instruction scored by a teacher that closely follows the student: the effect (e.g. brevity) runs away."""
    if kind.view.instructs and every < LEAST and not force and _asked(kind, view, "reverse_kl"):
        yield (
            f"reverse KL to the student itself under an instruction, renewed every {every} steps: published runs collapsed below "
            f"{LEAST} (accuracy 82 % to 2 % at 1). Use kind: refresh with every: 50, or set force: true."
        )


def _asked(kind: TeacherKind, view: StageView, divergence: str) -> bool:
    return any(term.plain_kl == divergence and term.role == kind.role for term in view.terms)


def _following(
    kind: StudentTeacher, name: str, supplies: TeacherInputs, *, every: int, rate: float
) -> FollowingTeacher:

    return FollowingTeacher(
        name, kind.role, supplies.student, kind.batch_tokens, supplies.stop_ids, every=every, rate=rate
    )


# --- The teachers: a copy that follows the student's weights, and the current student ---


def copy_of(student: LanguageModel) -> LanguageModel:
    """A copy of the current policy with adapters merged. Tensors that training does not change are shared."""
    tensors, moving = student.weights(0).tensors, student.moving()
    clone = student.inference_copy()
    for name, parameter in clone.module.named_parameters():
        if name in moving:
            parameter.data = tensors[name].clone()
    return clone


class FollowingTeacher(LocalTeacher):
    """Every `every` steps it moves `rate` of the way to the student's weights; 1 is a copy.

    Averages are kept in fp32 whatever the dtype of the weights: in bfloat16 a step of 1 % would round to zero.
    """

    def __init__(
        self,
        name: str,
        role: str,
        student: LanguageModel,
        batch_tokens: int | None,
        stop_ids: tuple[int, ...],
        *,
        every: int,
        rate: float,
    ) -> None:
        super().__init__(name, role, copy_of(student), batch_tokens, stop_ids)
        self._every, self._rate = every, rate
        moving = student.moving()
        self._weights = {name: parameter for name, parameter in self._model.module.named_parameters() if name in moving}
        self._means = {
            name: parameter.detach().float() if rate < 1 else parameter.detach()
            for name, parameter in self._weights.items()
        }

    def observe(self, step: int, weights: WeightsRef) -> None:
        import torch

        with torch.no_grad():
            if step % self._every:
                return
            self.version += 1
            for name, mean in self._means.items():
                mean.lerp_(weights.tensors[name].to(mean.dtype), self._rate)
            self._take_over()

    def state(self) -> Mapping[str, Tensor]:
        return self._means

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        import torch

        with torch.no_grad():
            super().restore(version, tensors)
            for name, mean in self._means.items():
                mean.copy_(tensors[name])
            self._take_over()

    def _take_over(self) -> None:
        for name, parameter in self._weights.items():
            if parameter.data_ptr() != self._means[name].data_ptr():
                parameter.copy_(self._means[name])


class LiveStudent(ScoringTeacher):
    """Scores with the weights at the start of the step. Keeps their head, since a step may have several updates."""

    def __init__(
        self, name: str, role: str, student: LanguageModel, batch_tokens: int | None, stop_ids: tuple[int, ...]
    ) -> None:
        super().__init__(name, role, stop_ids, batch_tokens, student.device)
        self._student, self.context = student, student.context
        self._keep_head()

    def _keep_head(self) -> None:
        head = self._student.head
        kept = [None if part is None else part.detach() for part in (head.weight, head.bias)]
        if head.weight.requires_grad:
            kept = [None if part is None else part.clone() for part in kept]
        self._weight, self._bias = kept

    def hidden(self, page: Page) -> Tensor:
        return self._student.predict(page).hidden

    @property
    def width(self) -> int:
        return int(self._student.head.weight.shape[1])

    def project(self, hidden: Tensor) -> Projection:
        assert self._weight is not None
        now = self._student.project(hidden.to(self._weight.dtype))
        return self.tempered(replace(now, weight=self._weight, bias=self._bias).detach())

    def observe(self, step: int, weights: WeightsRef) -> None:
        self.version = weights.version
        self._keep_head()

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        super().restore(version, tensors)
        self._keep_head()
