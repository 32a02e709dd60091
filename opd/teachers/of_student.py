"""Kinds of teacher that are the student itself: at the start of the stage, some steps ago, on average, or now. No torch here.

They score under a view that shows more than the student is given (a solution, an instruction), or hold it back (role `reference`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from opd.errors import RecipeError
from opd.settings import Positive, StageView
from opd.teachers.kinds import ModelTeacher, Supplies, TeacherKind

if TYPE_CHECKING:
    from opd.teachers.following import FollowingTeacher
    from opd.teachers.scoring import ScoringTeacher

FLOAT32 = 4  # bytes
LEAST = 20  # steps between two refreshes below which published runs with an instruction collapse


class StudentTeacher(ModelTeacher):
    """What they have in common."""

    of_student = True


class SelfTeacher(StudentTeacher):
    """The student as it is when the stage begins."""

    name = "self"
    has_model = True

    def bytes_per_weight(self, each: int, lora: bool) -> int:
        return 0 if lora else each

    def make(self, name: str, supplies: Supplies) -> ScoringTeacher:
        from opd.teachers.following import copy_of
        from opd.teachers.local import LocalTeacher

        student = supplies.student
        model = copy_of(student) if student.adapter is None else student.base()  # new adapters change nothing yet
        return LocalTeacher(name, self.role, model, self.batch_tokens, supplies.stop_ids)


class BaseTeacher(StudentTeacher):
    """The model below the student's adapters, which stays as it is; it needs no memory of its own."""

    name = "base"
    has_model = True

    def refuse(self, view: StageView) -> Iterable[str]:
        if not view.lora:
            yield "kind base is the model below the student's adapters, and it has none. Set student.lora, or use kind: self."

    def make(self, name: str, supplies: Supplies) -> ScoringTeacher:
        from opd.teachers.local import LocalTeacher

        return LocalTeacher(name, self.role, supplies.student.base(), self.batch_tokens, supplies.stop_ids)


class EmaTeacher(StudentTeacher):
    """A running average of the student's weights: after every step, `rate` of the way towards them."""

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
        return each if each == FLOAT32 else each + FLOAT32  # means are kept in fp32

    def follows_within(self) -> int:
        return math.ceil(1 / self.rate)

    def make(self, name: str, supplies: Supplies) -> ScoringTeacher:
        return _following(self, name, supplies, every=1, rate=self.rate)


class RefreshTeacher(StudentTeacher):
    """A copy of the student that is made anew every so many steps."""

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

    def make(self, name: str, supplies: Supplies) -> ScoringTeacher:
        return _following(self, name, supplies, every=self.every, rate=1.0)


SPREAD = (
    "kind live scores with the student's own weights, which are spread over the ranks. Use kind: refresh with every: 1, which "
    "scores with a whole copy of the same."
)


class LiveTeacher(StudentTeacher):
    """The student as it is now, without gradients; only the view tells the two apart."""

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

    def make(self, name: str, supplies: Supplies) -> ScoringTeacher:
        from opd.teachers.following import LiveStudent

        if supplies.around.sharded:
            raise RecipeError(f"teachers.{name}: {SPREAD}")
        return LiveStudent(name, self.role, supplies.student, self.batch_tokens, supplies.stop_ids)


def refuse_chasing(kind: StudentTeacher, view: StageView, every: int, force: bool) -> Iterable[str]:
    """An instruction to be brief, scored by a teacher that follows closely, runs away: each is briefer than the other."""
    if kind.view.instructs and every < LEAST and not force and _asked(kind, view, "reverse_kl"):
        yield (
            f"reverse KL to the student itself under an instruction, renewed every {every} steps: published runs collapsed below "
            f"{LEAST} (accuracy 82 % to 2 % at 1). Use kind: refresh with every: 50, or set force: true."
        )


def _asked(kind: TeacherKind, view: StageView, divergence: str) -> bool:
    return any(term.plain_kl == divergence and term.role == kind.role for term in view.terms)


def _following(kind: StudentTeacher, name: str, supplies: Supplies, *, every: int, rate: float) -> FollowingTeacher:
    from opd.teachers.following import FollowingTeacher

    return FollowingTeacher(
        name, kind.role, supplies.student, kind.batch_tokens, supplies.stop_ids, every=every, rate=rate
    )
