"""Kinds of teacher. One class each, with its settings; no torch here.

A kind says which signals it `offers` and which models it reads, so that recipes are checked before anything is loaded. `open`
makes the teacher, which is then used only through the protocol `opd.records.TeacherLike`.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from opd.common.context import RunContext
from opd.common.errors import ModelError
from opd.models.load import base_of, is_adapter, smol_models
from opd.records import SignalKind, TeacherLike
from opd.registry import Address, Choice, Dtype, Family, Positive, StageView, Word
from opd.teachers.views import AnyView, SameView

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel
    from opd.models.tokenizers import Elsewhere
    from opd.teachers.scoring import ScoringTeacher


Quantisation = Literal["int8", "fp8", "int4", "mxfp4"]


class ModelRef(NamedTuple):
    """A model that a kind reads."""

    model: str
    revision: str | None = None
    dtype: Dtype | None = None  # None: that of the student's weights
    device: str | None = None  # None: the student's
    quantise: Quantisation | None = None

    def identified(self, name: str) -> str:
        """Prefixes `name` (a model's name, or a hash of its weights) with the quantisation."""
        return name if self.quantise is None else f"{self.quantise} of {name}"


class RemoteFacts(NamedTuple):
    """What is known about a remote teacher before anything is loaded."""

    context: int = sys.maxsize
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TeacherInputs:
    """The inputs of `TeacherKind.open`. `load` gives the models named in `reads`; a shared model is loaded once."""

    student: LanguageModel
    stop_ids: tuple[int, ...]  # of all models together, as one event
    load: Callable[[ModelRef], LanguageModel]
    context: RunContext = field(default_factory=RunContext)


class TeacherKind(Choice):
    """Subclass this with `offers` and `open` for your own kind, and with `reads` if it loads models."""

    family = "teacher"
    offers: ClassVar[frozenset[SignalKind]]
    has_model: ClassVar[bool] = False  # in this process: it can sample, be mixed in and averaged
    can_wait: ClassVar[bool] = False  # can be paged out while others score: `pool.resident`
    scores_any: ClassVar[bool] = True  # can score any text; a cache knows only texts scored before
    stands_still: ClassVar[bool] = False  # never changes, so it can score steps ahead
    of_student: ClassVar[bool] = False  # is the student at some step, so it is not evaluated separately
    is_student_now: ClassVar[bool] = False  # is the current student: under the same view the two never differ

    role: Word = Field("teacher", description="terms ask for signals by role")
    domains: list[Word] | None = Field(
        None, min_length=1, description="default: its own name, or every domain if it is alone in its role"
    )
    view: AnyView = Field(SameView(), description="what it reads of a rollout")

    def reads(self) -> Sequence[ModelRef]:
        return ()

    def scored_with(self) -> Sequence[ModelRef]:
        """The models that its scores depend on; stored scores are keyed by the hashes of their weights."""
        return self.reads()

    def waiting(self) -> Sequence[ModelRef]:
        """The models in `reads` that can be paged out while others score."""
        return self.reads() if self.can_wait else ()

    def earlier(self) -> Sequence[str]:
        """The earlier runs that it reads: directories, or `stage:NAME`."""
        return ()

    def inside(self, directory: Path) -> TeacherKind:
        """The same kind, with earlier stages found in a run directory."""
        return self

    def files(self) -> list[Path]:
        """Files it reads besides models. A run records their content and does not resume if it has changed."""
        return []

    def require(self, name: str, tokenizer: Any, signals: Collection[SignalKind]) -> None:
        """Raises if something it needs is missing, before weights are loaded."""

    def vocabulary(self, context: RunContext) -> Elsewhere | None:
        """The vocabulary of a teacher whose model is not in this process."""
        return None

    @property
    def has_plain_weights(self) -> bool:
        """Whether its model's weights can be averaged with others."""
        return self.has_model

    @property
    def title(self) -> str:
        """Its name in a model card."""
        return ", ".join(ref.model for ref in self.reads()) or self.name

    def bytes_per_weight(self, each: int, lora: bool) -> int:
        """Bytes of memory that it needs at most per weight of the student, whose weights take `each` bytes."""
        return 0

    def sized(self, tokens: int) -> TeacherKind:
        """Sets the tokens per forward pass if the recipe leaves them open."""
        return self

    def scored_at_once(self) -> int | None:
        """Tokens per forward pass; None: it runs none in this process."""
        return None

    def follows_within(self) -> int | None:
        """Steps until its weights are (nearly) the student's; None: it never follows the student."""
        return None

    def warn(self, view: StageView) -> Iterable[str]:
        """Warnings: settings that may be intended, but have often gone wrong."""
        return ()

    def inquire(self, name: str, tokenizer: Any, student: str) -> RemoteFacts:
        """Asks a remote teacher. Raises if it does not fit the student or rejects our token; it may be offline for now."""
        return RemoteFacts()

    def refuse_as_part(self, view: StageView) -> Iterable[str]:
        """Mistakes when used as a part of a mixture, with the mixture's role and view."""
        return self.refuse(view)

    def weighed_domains(self) -> list[str]:
        """Domains that its weights name, apart from those that it scores."""
        return []

    @abstractmethod
    def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:
        raise NotImplementedError


AnyTeacher = Annotated[TeacherKind, Family("teacher", default="frozen")]


BATCH_TOKENS = 8192  # default tokens per forward pass


class ModelTeacher(TeacherKind):
    """Kinds that score with a model in this process."""

    offers = frozenset({"logprobs_at", "hidden", "topk"})

    batch_tokens: Positive | None = Field(
        None, description="tokens scored in one forward pass; default: what fits a GPU, 8192 on a CPU"
    )
    temperature: float = Field(1.0, ge=0.01, le=100, description="of the teacher's distribution alone")

    def sized(self, tokens: int) -> TeacherKind:
        return self if self.batch_tokens is not None else self.model_copy(update={"batch_tokens": tokens})

    def scored_at_once(self) -> int | None:
        return self.batch_tokens or BATCH_TOKENS

    def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:
        teacher = self.make(name, supplies)
        teacher.temperature = self.temperature
        return teacher

    @abstractmethod
    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        raise NotImplementedError


class FrozenTeacher(ModelTeacher):
    """Scores with a checkpoint that never changes: a directory, a hub id, `stage:NAME`, …"""

    name = "frozen"
    by_default = True
    has_model = True
    stands_still = True
    can_wait = True

    model: Address = Field(description="directory, hub id, .gguf file, smol, tiny/NAME or stage:NAME")
    revision: Word | None = None
    dtype: Dtype | None = Field(None, description="default: that of the student's weights (train.precision)")
    device: Word | None = Field(None, description="where it scores: cpu, cuda or cuda:N; default: the student's")

    quantise: Quantisation | None = Field(
        None,
        description="int8, fp8, int4 or mxfp4: weights of its linear layers, with torchao; the head stays as it is",
    )

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", value):
            raise ValueError("expected cpu, cuda or cuda:N")
        return value

    def reads(self) -> Sequence[ModelRef]:
        return (ModelRef(self.model, self.revision, self.dtype, self.device, self.quantise),)

    @property
    def has_plain_weights(self) -> bool:
        return self.quantise is None

    def refuse(self, view: StageView) -> Iterable[str]:
        if self.quantise is not None and view.rollout.teacher_mix and self.role == "teacher":
            yield (
                f"quantise: {self.quantise} with rollout.teacher_mix, which draws every token from student and teacher together: a "
                "quantised teacher only scores. Drop one of the two."
            )
        if self.device is not None and view.rollout.teacher_mix and self.role == "teacher":
            yield (
                f"device {self.device} with rollout.teacher_mix, which draws every token from student and teacher together: both "
                "have to be on one device. Drop one of the two."
            )

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        from opd.teachers.paging import PagedModel, PagedTeacher
        from opd.teachers.scoring import LocalTeacher

        (ref,) = self.reads()
        model = supplies.load(ref)
        if self.quantise is not None:
            from opd.teachers.quantised import QuantisedTeacher

            return QuantisedTeacher(name, self.role, model, self.batch_tokens, supplies.stop_ids)
        teacher = PagedTeacher if isinstance(model, PagedModel) else LocalTeacher
        return teacher(name, self.role, model, self.batch_tokens, supplies.stop_ids)


# --- Adapters over one shared base: twelve specialists in the memory of one ---


class AdapterTeacher(ModelTeacher):
    """Scores with a LoRA directory. Its base is loaded once, and shared with a student that has adapters over the same model."""

    name = "adapter"
    has_model = True

    model: Address = Field(description="directory of a LoRA adapter as peft writes it; its config names the base")
    dtype: Dtype | None = Field(None, description="of the base; default: that of the student's weights")

    @property
    def title(self) -> str:
        return self.model

    def reads(self) -> Sequence[ModelRef]:
        return (ModelRef(base_of(self.model, self._directory()), None, self.dtype),)

    def scored_with(self) -> Sequence[ModelRef]:
        return (ModelRef(self.model, None, self.dtype),)  # the hash includes the base

    def files(self) -> list[Path]:
        return sorted(path for path in self._directory().iterdir() if path.suffix in (".json", ".safetensors"))

    def require(self, name: str, tokenizer: Any, signals: Collection[SignalKind]) -> None:
        from opd.models.load import empty_model, load_config
        from opd.models.lora import require_peft
        from opd.models.shared_base import check_adapter

        require_peft(f"teachers.{name}: kind {self.name}")
        (base,) = self.reads()
        check_adapter(self.model, self._directory(), empty_model(load_config(base.model)))

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        from opd.models.shared_base import AdaptedModel
        from opd.teachers.scoring import LocalTeacher

        (base,) = self.reads()
        model = AdaptedModel(supplies.load(base), self.model, self._directory())
        return LocalTeacher(name, self.role, model, self.batch_tokens, supplies.stop_ids)

    def _directory(self) -> Path:
        directory = smol_models().get(self.model, Path(self.model).expanduser())
        if not is_adapter(directory):
            raise ModelError(
                f"adapter {self.model!r}: no directory with an adapter_config.json (and no config.json). kind adapter takes what "
                "peft saves; a whole model is kind frozen."
            )
        return directory
