"""Kinds of teacher, and which of them scores which prompt. One class each, with its settings; torch is imported when they are opened.

A kind says which signals it `offers` and which models it reads, so that recipes are checked before anything is loaded. `open`
makes the teacher, which is then used only through the protocol `opd.records.TeacherLike`.
"""

from __future__ import annotations

import math
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, field_validator

from opd.common.context import RunContext
from opd.common.errors import ModelError, RecipeError
from opd.data.prompts import DOMAIN, route_value
from opd.models.load import base_of, is_adapter, smol_models
from opd.records import Layers, Prompt, Rollout, SignalKind, TeacherLike, WeightsRef
from opd.registry import Address, Choice, Dtype, Family, Positive, StageView, Word
from opd.teachers.scoring import BATCH_TOKENS, LocalTeacher, Page, ScoringTeacher, tempered
from opd.teachers.views import AnyView, SameView

if TYPE_CHECKING:
    from torch import Tensor

    from opd.divergences import Projection
    from opd.models.language_model import LanguageModel
    from opd.models.tokenizers import RemoteVocabulary


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
    never_changes: ClassVar[bool] = False  # never changes, so it can score steps ahead
    of_student: ClassVar[bool] = False  # is the student at some step, so it is not evaluated separately
    blends: ClassVar[bool] = False  # made of several models, so it has no hidden space of its own
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

    def vocabulary(self, context: RunContext) -> RemoteVocabulary | None:
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

    def check_as_part(self, view: StageView) -> Iterable[str]:
        """Mistakes when used as a part of a mixture, with the mixture's role and view."""
        return self.check(view)

    def weighted_domains(self) -> list[str]:
        """Domains that its weights name, apart from those that it scores."""
        return []

    @abstractmethod
    def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:
        raise NotImplementedError


AnyTeacher = Annotated[TeacherKind, Family("teacher", default="frozen")]


class ModelTeacher(TeacherKind):
    """Kinds that score with a model in this process."""

    offers = frozenset({"logprobs_at", "hidden", "layers", "topk"})

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
    never_changes = True
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

    def check(self, view: StageView) -> Iterable[str]:
        if self.quantise is not None and view.rollout.teacher_mix and self.role == "teacher":
            yield (
                f"quantise: {self.quantise} with rollout.teacher_mix, which draws every token from student and teacher together: a "
                "quantised teacher only scores. Drop one of the two."
            )
        if self.device is not None and view.rollout.teacher_mix and self.role == "teacher":
            yield (
                f"device {self.device} with rollout.teacher_mix, which draws every token from the mixture of student and teacher: both "
                "must be on one device. Drop one of the two."
            )

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        from opd.teachers.paging import PagedModel, PagedTeacher

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
        from opd.models.language_model import check_adapter
        from opd.models.load import empty_model, load_config
        from opd.models.lora import require_peft

        require_peft(f"teachers.{name}: kind {self.name}")
        (base,) = self.reads()
        check_adapter(self.model, self._directory(), empty_model(load_config(base.model)))

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        from opd.models.language_model import AdaptedModel

        (base,) = self.reads()
        model = AdaptedModel(supplies.load(base), self.model, self._directory())
        return LocalTeacher(name, self.role, model, self.batch_tokens, supplies.stop_ids)

    def _directory(self) -> Path:
        directory = smol_models().get(self.model, Path(self.model).expanduser())
        if not is_adapter(directory):
            raise ModelError(
                f"adapter {self.model!r}: no directory with an adapter_config.json (and no config.json). kind: adapter loads what "
                "peft saves; for a full model use kind: frozen."
            )
        return directory


# --- Teachers that are the student at some step: as it was, an average of it, or as it is ---


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
        student = supplies.student
        model = copy_of(student) if student.adapter is None else student.base()  # new adapters change nothing yet
        return LocalTeacher(name, self.role, model, self.batch_tokens, supplies.stop_ids)


class BaseTeacher(StudentTeacher):
    """Scores with the frozen model below the student's adapters. Needs no extra memory."""

    name = "base"
    has_model = True

    def check(self, view: StageView) -> Iterable[str]:
        if not view.lora:
            yield "kind base is the model under the student's adapters, and it has none. Set student.lora, or use kind: self."

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        return LocalTeacher(name, self.role, supplies.student.base(), self.batch_tokens, supplies.stop_ids)


class EmaTeacher(StudentTeacher):
    """Scores with a running average of the student's weights: each step moves it `rate` of the way towards them."""

    name = "ema"
    has_model = True
    rate: float = Field(0.01, gt=0, lt=1, description="of ema: 1 - decay; SDFT 0.01 to 0.05, SDPO 0.05, OPSD 0.001")

    def warn(self, view: StageView) -> Iterable[str]:
        if self.view.instructs and self.rate > 1 / LEAST and _uses(self, view, "reverse_kl"):
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
    force: bool = Field(False, description="allow a setting with which published runs collapsed")

    def check(self, view: StageView) -> Iterable[str]:
        return check_distance(self, view, self.every, self.force)

    def warn(self, view: StageView) -> Iterable[str]:
        if _uses(self, view, "forward_kl"):
            yield "forward KL to a teacher that is refreshed: published runs collapsed at every refresh. Prefer reverse_kl"

    def bytes_per_weight(self, each: int, lora: bool) -> int:
        return each

    def follows_within(self) -> int:
        return self.every

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        return _following(self, name, supplies, every=self.every, rate=1.0)


SPREAD = (
    "kind live scores with the student's own weights, which are sharded over the ranks. Use kind: refresh with every: 1, which "
    "scores with a full copy of them."
)


class LiveTeacher(StudentTeacher):
    """Scores with the current student, without gradients. Only the view differs."""

    name = "live"
    is_student_now = True
    force: bool = Field(False, description="allow a setting with which published runs collapsed")

    def check(self, view: StageView) -> Iterable[str]:
        if self.view.as_sampled:
            yield "kind live reads what the student reads, so the two never differ. Give it another `view`."
        yield from self.check_as_part(view)

    def check_as_part(self, view: StageView) -> Iterable[str]:
        return check_distance(self, view, 1, self.force)

    def follows_within(self) -> int:
        return 1

    def make(self, name: str, supplies: TeacherInputs) -> ScoringTeacher:
        if supplies.context.ranks.sharded:
            raise RecipeError(f"teachers.{name}: {SPREAD}")
        return LiveStudent(name, self.role, supplies.student, self.batch_tokens, supplies.stop_ids)


def check_distance(kind: StudentTeacher, view: StageView, every: int, force: bool) -> Iterable[str]:
    """Rejects an instruction scored by a teacher that closely follows the student: the effect (e.g. brevity) runs away."""
    if kind.view.instructs and every < LEAST and not force and _uses(kind, view, "reverse_kl"):
        yield (
            f"reverse KL to the student itself under an instruction, renewed every {every} steps: published runs collapsed below "
            f"{LEAST} (accuracy 82 % to 2 % at 1). Use kind: refresh with every: 50, or set force: true."
        )


def _uses(kind: TeacherKind, view: StageView, divergence: str) -> bool:
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
        self._weights = {name: parameter for name, parameter in self.model.module.named_parameters() if name in moving}
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

    offers = LocalTeacher.offers

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

    def layers(self, page: Page, layers: Layers) -> Tensor:
        return self._student.layers(page, layers)[:, :-1]

    @property
    def width(self) -> int:
        return int(self._student.head.weight.shape[1])

    def project(self, hidden: Tensor) -> Projection:
        assert self._weight is not None
        now = self._student.project(hidden.to(self._weight.dtype))
        return tempered(replace(now, weight=self._weight, bias=self._bias).detach(), self.temperature)

    def observe(self, step: int, weights: WeightsRef) -> None:
        self.version = weights.version
        self._keep_head()

    def restore(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        super().restore(version, tensors)
        self._keep_head()


# --- Which teacher scores which prompt: exactly one per role, by domain or by another column of its row ---


Routes = Mapping[str, Mapping[str, str]]  # role -> value of the column -> teacher


def routes(
    teachers: Mapping[str, TeacherKind],
    values: Iterable[str],
    roles: Iterable[str],
    where: str = "",
    column: str = DOMAIN,
    places: Mapping[str, str] | None = None,
    unscored: Mapping[str, Collection[str]] | None = None,
) -> dict[str, dict[str, str]]:
    """{role: {value: teacher}} for every role the objective asks for. `where` names the stage, if there are several;
    `places`: where each value first occurs, for messages; `unscored`: by role, values that no term compares.

    A teacher scores the values in its `domains`, else the value with its name, else all if it is alone in its role.
    """
    known, table = list(dict.fromkeys(values)), {}
    for role in dict.fromkeys([*roles, *(kind.role for kind in teachers.values())]):
        names = [name for name, kind in teachers.items() if kind.role == role]
        if not names:
            raise RecipeError(
                f"{where}the objective needs the role {role!r}, but no teacher has it. Add one under `teachers:`."
            )
        scored = [value for value in known if value not in (unscored or {}).get(role, ())]
        table[role] = {value: _pick(value, role, names, teachers, where, column, places or {}) for value in scored}
        idle = [name for name in names if name not in table[role].values()]
        if idle:
            raise RecipeError(
                f"{where}teacher {idle[0]!r} scores no {column}: {_why_idle(idle[0], teachers, table[role], column)}"
            )
    return table


def require_known_domains(teachers: Mapping[str, TeacherKind], domains: Sequence[str], where: str) -> None:
    """Raises if a mixture has weights for unknown domains."""
    for name, kind in teachers.items():
        unknown = [domain for domain in kind.weighted_domains() if domain not in domains]
        if unknown:
            raise RecipeError(
                f"{where}teacher {name!r} has a weight for the domain {unknown[0]!r}, which no prompt has; they have "
                f"{', '.join(domains)}. Correct it."
            )


def _why_idle(name: str, teachers: Mapping[str, TeacherKind], table: Mapping[str, str], column: str) -> str:
    if teachers[name].domains is None and name in table:
        other = table[name]
        return f"{name!r} is listed under `domains` of {other!r}. Take it out of that list, or remove teacher {name!r}."
    if column == DOMAIN:
        return f"the prompts' domains are {', '.join(table)}. Name it after a domain, give it `domains: […]`, or remove it."
    shown = ", ".join(list(table)[:20])
    return (
        f"the values of that column are {shown}. Name it after one, list some under its `domains: […]`, or remove it."
    )


def _pick(
    value: str,
    role: str,
    names: Sequence[str],
    teachers: Mapping[str, TeacherKind],
    where: str,
    column: str,
    places: Mapping[str, str],
) -> str:
    listed = [name for name in names if value in (teachers[name].domains or [])]
    if len(listed) > 1:
        raise RecipeError(
            f"{where}{column} {value!r} is claimed by several teachers ({', '.join(listed)}); exactly one scores it."
        )
    if listed:
        return listed[0]
    open_ones = [name for name in names if teachers[name].domains is None]
    if value in open_ones:
        return value
    if len(names) == 1 and open_ones:
        return names[0]
    place = f" ({places[value]})" if value in places else ""
    raise RecipeError(
        f"{where}{column} {value!r}{place} has no {role}: there are {', '.join(names)}. Add a teacher named {value!r}, or list "
        f"it under one: `teachers: {{{names[0]}: {{…, domains: [{value}]}}}}`."
    )


def chooser(table: Mapping[str, str], column: str) -> Callable[[Prompt], str]:
    """The teacher of a prompt. Raises for values that were not known at start-up."""

    def choose(prompt: Prompt) -> str:
        value = route_value(prompt, column)
        if value not in table:
            raise RecipeError(
                f"prompt {prompt.id!r} has the {column} {value!r}, which no teacher scores; known: {', '.join(table)}."
            )
        return table[value]

    return choose


def one_per_domain(table: Mapping[str, str], found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Domain -> teacher, for domains scored by a single teacher. `found`: (domain, value) of every prompt."""
    owners: dict[str, set[str]] = {}
    for domain, value in found:
        owners.setdefault(domain, set()).update([table[value]] if value in table else [])
    return {domain: next(iter(names)) for domain, names in owners.items() if len(names) == 1}


def by_teacher(
    rollouts: Sequence[Rollout], table: Mapping[str, str], value_of: Callable[[Rollout], str] = lambda item: item.domain
) -> dict[str, list[Rollout]]:
    """The rollouts of a batch grouped by the teacher that scores them, in the order teachers first appear."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        value = value_of(rollout)
        if value not in table:
            raise RecipeError(
                f"rollout {rollout.id!r} belongs to {value!r}, which no teacher scores; known: {', '.join(table)}."
            )
        groups.setdefault(table[value], []).append(rollout)
    return groups
