"""Kinds of teacher: where what scores comes from. One class each, with its settings; no torch here.

A kind says which signals it `offers` and which models it reads, so that recipes are refused before anything is loaded; `open`
makes the teacher, which from then on is used through the protocol `opd.types.TeacherLike` alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from pydantic import Field

from opd.settings import Address, Choice, Dtype, Family, Positive, StageView, Word
from opd.teachers.views import AnyView, SameView
from opd.types import SignalKind, TeacherLike

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel
    from opd.teachers.scoring import ScoringTeacher


class ModelRef(NamedTuple):
    """A model that a kind reads."""

    model: str
    revision: str | None = None
    dtype: Dtype | None = None  # None: that of the student's weights


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
    can_wait: ClassVar[bool] = False  # outside the memory, while others score: `pool.resident`
    of_student: ClassVar[bool] = False  # it is the student at some moment, so there is nothing of its own to evaluate

    role: Word = Field("teacher", description="terms ask for signals by role")
    domains: list[Word] | None = Field(
        None, min_length=1, description="default: its own name, or every domain if it is alone in its role"
    )
    view: AnyView = Field(SameView(), description="what it reads of a rollout")

    def reads(self) -> Sequence[ModelRef]:
        return ()

    def inputs(self) -> Sequence[ModelRef]:
        """Models whose files a resumed run has to find as they were."""
        return self.reads()

    def check(self) -> None:
        """Look at what it will read, before any weights are loaded."""

    @property
    def title(self) -> str:
        """What it is called in a model card."""
        return ", ".join(ref.model for ref in self.reads()) or self.name

    def bytes_per_weight(self, each: int, lora: bool) -> int:
        """Of the student's, what it holds beside them at most; they have `each`."""
        return 0

    def warn(self, view: StageView) -> Iterable[str]:
        """What may be meant as it is, but has gone wrong for others."""
        return ()

    @abstractmethod
    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        raise NotImplementedError


AnyTeacher = Annotated[TeacherKind, Family("teacher", default="frozen")]


class ModelTeacher(TeacherKind):
    """Kinds that score with a model in this process."""

    offers = frozenset({"logprobs_at", "hidden", "topk"})

    batch_tokens: Positive = Field(8192, description="tokens scored in one forward pass")
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the teacher's distribution alone")

    def open(self, name: str, supplies: Supplies) -> TeacherLike:
        teacher = self.make(name, supplies)
        teacher.temperature = self.temperature
        return teacher

    @abstractmethod
    def make(self, name: str, supplies: Supplies) -> ScoringTeacher:
        raise NotImplementedError


class FrozenTeacher(ModelTeacher):
    """A checkpoint that stays as it is: a directory, a hub id, `stage:NAME`, …"""

    name = "frozen"
    by_default = True
    has_model = True
    can_wait = True

    model: Address = Field(description="directory, hub id, .gguf file, smol, tiny/NAME or stage:NAME")
    revision: Word | None = None
    dtype: Dtype | None = Field(None, description="default: that of the student's weights (train.precision)")

    def reads(self) -> Sequence[ModelRef]:
        return (ModelRef(self.model, self.revision, self.dtype),)

    def make(self, name: str, supplies: Supplies) -> ScoringTeacher:
        from opd.teachers.local import LocalTeacher
        from opd.teachers.paging import PagedModel, PagedTeacher

        (ref,) = self.reads()
        model = supplies.load(ref)
        teacher = PagedTeacher if isinstance(model, PagedModel) else LocalTeacher
        return teacher(name, self.role, model, self.batch_tokens, supplies.stop_ids)
