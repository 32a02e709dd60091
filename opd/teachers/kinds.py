"""Kinds of teacher: where what scores comes from. One class each, with its settings; no torch here.

A kind says which signals it `offers` and which models it reads, so that recipes are refused before anything is loaded; `open`
makes the teacher, which from then on is used through the protocol `opd.types.TeacherLike` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from pydantic import Field

from opd.settings import Address, Choice, Dtype, Family, Positive, StageView, Word
from opd.teachers.views import AnyView, SameView
from opd.types import SignalKind, TeacherLike

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel

Commits = Callable[
    [str, str | None], str | None
]  # (model, revision) -> the commit that a run began with, if it is on the hub


class ModelRef(NamedTuple):
    """A model that a kind reads."""

    model: str
    revision: str | None = None
    dtype: Dtype | None = None  # None: what the student computes in


@dataclass(frozen=True)
class Supplies:
    """What a kind makes its teacher of. `load` gives what it names in `reads`: one that several name is there once."""

    student: LanguageModel
    stop_ids: tuple[int, ...]  # of all models together: one event
    load: Callable[[ModelRef], LanguageModel]


class TeacherKind(Choice):
    """A kind of your own is a subclass with `offers` and `open`, and `reads` if it loads models."""

    family = "teacher"
    offers: ClassVar[frozenset[SignalKind]]
    has_model: ClassVar[bool] = False  # in this process: it can sample, be mixed in and averaged
    of_student: ClassVar[bool] = False  # it is the student at some moment, so there is nothing of its own to evaluate

    role: Word = Field("teacher", description="terms ask for signals by role")
    domains: list[Word] | None = Field(
        None, min_length=1, description="default: its own name, or every domain if it is alone in its role"
    )
    view: AnyView = Field(SameView(), description="what it reads of a rollout")

    def reads(self) -> Sequence[ModelRef]:
        return ()

    def pinned(self, commit: Commits) -> TeacherKind:
        """The same, with hub models at the commits that a run began with."""
        return self

    @property
    def title(self) -> str:
        """What it is called in a model card."""
        return ", ".join(ref.model for ref in self.reads()) or self.name

    def copies_student(self, lora: bool) -> bool:
        """Whether it holds the student's weights a second time."""
        return False

    def warn(self, view: StageView) -> Iterable[str]:
        """What may be meant as it is, but has gone wrong for others."""
        return ()

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        raise NotImplementedError


AnyTeacher = Annotated[TeacherKind, Family("teacher", default="frozen")]


class FrozenTeacher(TeacherKind):
    """A checkpoint that stays as it is: a directory, a hub id, `stage:NAME`, …"""

    name = "frozen"
    by_default = True
    offers = frozenset({"logprobs_at", "hidden"})
    has_model = True

    model: Address = Field(description="directory, hub id, .gguf file, smol, tiny/NAME or stage:NAME")
    revision: Word | None = None
    dtype: Dtype | None = Field(None, description="default: what the student computes in (train.precision)")
    batch_tokens: Positive = Field(8192, description="tokens scored in one forward pass")

    def reads(self) -> Sequence[ModelRef]:
        return (ModelRef(self.model, self.revision, self.dtype),)

    def pinned(self, commit: Commits) -> TeacherKind:
        found = commit(self.model, self.revision)
        return self if found is None else self.model_copy(update={"revision": found})

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        from opd.teachers.local import LocalTeacher

        (ref,) = self.reads()
        return LocalTeacher(name, self.role, supplies.load(ref), self.batch_tokens, supplies.stop_ids)
