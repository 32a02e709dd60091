"""Kinds of teacher that are the student itself: at the start of the stage, some steps ago, on average, or now. No torch here.

They score under a view that shows more than the student is given (a solution, an instruction), or hold it back (role `reference`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from opd.settings import Positive, StageView
from opd.teachers.kinds import Supplies, TeacherKind
from opd.types import TeacherLike

if TYPE_CHECKING:
    from opd.teachers.following import FollowingTeacher

LEAST = 20  # steps between two refreshes below which published runs with an instruction collapse


class StudentTeacher(TeacherKind):
    """What they have in common."""

    offers = frozenset({"logprobs_at", "hidden"})
    of_student = True

    batch_tokens: Positive = Field(8192, description="tokens scored in one forward pass")


class SelfTeacher(StudentTeacher):
    """The student as it is when the stage begins."""

    name = "self"
    has_model = True

    def copies_student(self, lora: bool) -> bool:
        return not lora

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
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

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        from opd.teachers.local import LocalTeacher

        return LocalTeacher(name, self.role, supplies.student.base(), self.batch_tokens, supplies.stop_ids)


class EmaTeacher(StudentTeacher):
    """A running average of the student's weights: after every step, `rate` of the way towards them."""

    name = "ema"
    has_model = True
    rate: float = Field(0.01, gt=0, lt=1, description="of ema: 1 - decay; SDFT 0.01 to 0.05, SDPO 0.05, OPSD 0.001")

    def copies_student(self, lora: bool) -> bool:
        return True

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
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

    def copies_student(self, lora: bool) -> bool:
        return True

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        return _following(self, name, supplies, every=self.every, rate=1.0)


class LiveTeacher(StudentTeacher):
    """The student as it is now, without gradients; only the view tells the two apart."""

    name = "live"
    force: bool = Field(False, description="take a setting that published runs collapsed with")

    def refuse(self, view: StageView) -> Iterable[str]:
        if self.view.name == "same":
            yield "kind live reads what the student reads, so the two never differ. Give it a `view`."
        yield from refuse_chasing(self, view, 1, self.force)

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        from opd.teachers.following import LiveStudent

        return LiveStudent(name, self.role, supplies.student, self.batch_tokens, supplies.stop_ids)


def refuse_chasing(kind: StudentTeacher, view: StageView, every: int, force: bool) -> Iterable[str]:
    """An instruction to be brief, scored by a teacher that follows closely, runs away: each is briefer than the other."""
    if kind.view.name == "instruction" and every < LEAST and not force and _asked(kind, view, "reverse_kl"):
        yield (
            f"reverse KL to the student itself under an instruction, renewed every {every} steps: published runs collapsed below "
            f"{LEAST} (accuracy 82 % to 2 % at 1). Use kind: refresh with every: 50, or set force: true."
        )


def _asked(kind: TeacherKind, view: StageView, divergence: str) -> bool:
    return any(term.minimises == divergence and term.role == kind.role for term in view.terms)


def _following(kind: StudentTeacher, name: str, supplies: Supplies, *, every: int, rate: float) -> FollowingTeacher:
    from opd.teachers.following import FollowingTeacher

    return FollowingTeacher(
        name, kind.role, supplies.student, kind.batch_tokens, supplies.stop_ids, every=every, rate=rate
    )
