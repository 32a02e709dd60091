"""How teachers are opened: those of a stage, how many of them are in memory at once, and single ones (`opd.Teacher`).

torch is imported when they are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from opd.common.context import RunContext
from opd.common.errors import RecipeError, TrainingError, UserError
from opd.common.text import bytes_in_words
from opd.engines.requests import request_key, uniforms
from opd.models.tokenizers import matching_ids, require_same, share_vocabulary
from opd.records import Author, Rendered, Rollout, Signal, SignalNeed, TeacherLike, WeightsRef
from opd.registry import SETTINGS, Positive, StageView, validate_settings
from opd.rollouts.settings import Rollouts
from opd.teachers.kinds import AnyTeacher, ModelRef, TeacherInputs, TeacherKind
from opd.teachers.scoring import ScoringTeacher
from opd.teachers.views import response_after

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from opd.divergences.projection import Source
    from opd.models.language_model import LanguageModel, Pack


def movable(kinds: Mapping[str, TeacherKind], parts: bool = False) -> list[ModelRef]:
    """Models used only by teachers that can be paged out while others score. `parts`: include parts of mixtures."""
    waiting = {name: set(kind.waiting()) if parts or kind.can_wait else set() for name, kind in kinds.items()}
    staying = {ref for name, kind in kinds.items() for ref in kind.reads() if ref not in waiting[name]}
    coming = (ref for name, kind in kinds.items() for ref in kind.reads() if ref in waiting[name])
    return list(
        dict.fromkeys(ref for ref in coming if ref not in staying and ref.device is None and ref.quantise is None)
    )


class TeacherPool(BaseModel):
    model_config = SETTINGS
    resident: Positive | None = Field(
        None, description="frozen teachers in memory at once; 2: one scores while the next is loaded; default: all"
    )
    keep: Literal["memory", "disk"] | None = Field(
        None,
        description="where the others are kept: pinned host memory, or disk; default: memory on CUDA, disk on a CPU",
    )

    def keep_on(self, device: str) -> Literal["memory", "disk"]:
        return self.keep or ("memory" if device.startswith("cuda") else "disk")

    def paged(self, kinds: Mapping[str, TeacherKind]) -> list[ModelRef]:
        """Models to page; empty if all fit. Models that are quantised, have a `device` or serve another kind stay resident."""
        coming = movable(kinds, parts=True)
        return coming if self.resident is not None and self.resident < len(coming) else []

    def describe(self, sizes: Sequence[int], device: str) -> str:
        """Describes the paging of models of these sizes in bytes; empty if all are resident."""
        if not sizes:
            return ""
        least, most = bytes_in_words(min(sizes)), bytes_in_words(max(sizes))
        keep = self.keep_on(device)
        where = "on disk" if keep == "disk" else "in pinned memory" if device.startswith("cuda") else "in memory"
        idle = (
            " WARNING: on a CPU this saves no memory, since they would all still be loaded; use keep: disk."
            if where == "in memory"
            else ""
        )
        return (
            f"at most {self.resident} of {len(sizes)} teachers' models resident while they score, none during updates; the others "
            f"wait {where}. A page-in is {least if least == most else f'{least} to {most}'}, with at most {len(sizes)} of them per step.{idle}"
        )

    def check(self, kinds: Mapping[str, TeacherKind], drawn: Iterable[str]) -> Iterable[str]:
        """`drawn`: recipe keys that sample from teachers, or read all their weights at once."""
        if self.keep is not None and self.resident is None:
            yield f"pool.keep {self.keep} says where teachers are kept while others score, but all of them are resident. Set pool.resident."
        if self.resident is not None and not any(kind.waiting() for kind in kinds.values()):
            yield f"pool.resident {self.resident}: only frozen teachers can be paged out, and there is none. Drop it."
        paged = set(self.paged(kinds))
        names = [name for name, kind in kinds.items() if kind.role == "teacher" and paged & set(kind.reads())]
        for key in drawn:
            if names:
                yield (
                    f"{key} needs the weights of teachers.{names[0]} at all times, and with pool.resident {self.resident} they are "
                    f"loaded only while it scores. Drop {key}, or pool.resident."
                )


# --- Opening the teachers of a stage; their state in checkpoints ---


def open_teachers(
    kinds: Mapping[str, TeacherKind],
    student: LanguageModel,
    load: Callable[[ModelRef], LanguageModel],
    context: RunContext | None = None,
) -> tuple[dict[str, TeacherLike], tuple[int, ...]]:
    """The teachers by name, and the stop ids of all models together. A model shared by several teachers is loaded once.

    `load` may give a `paging.PagedModel`, which keeps its weights outside of GPU memory.
    """
    context = context or RunContext()
    models: dict[ModelRef, LanguageModel] = {}
    here = student.device
    same = {without_home(ref, here) for kind in kinds.values() if not kind.view.crosses for ref in kind.reads()}
    for ref in (without_home(ref, here) for kind in kinds.values() for ref in kind.reads()):
        if ref not in models:
            models[ref] = load(ref)
            models[ref].module.requires_grad_(False)
            if ref in same:
                require_same(student.tokenizer, models[ref].tokenizer, student.name, ref.model)
    elsewhere = [found for kind in kinds.values() if (found := kind.vocabulary(context)) is not None]
    stop_ids = share_vocabulary(student, {str(ref): models[ref] for ref in models if ref in same}, elsewhere)

    def loaded(named: ModelRef) -> LanguageModel:
        ref = without_home(named, student.device)
        if ref not in models:
            known = ", ".join(map(str, models)) or "none"
            raise RecipeError(f"a teacher loads {ref}, which no kind's `reads` names; they name {known}. Add it there.")
        return models[ref]

    supplies = TeacherInputs(student, stop_ids, loaded, context)
    opened: dict[str, TeacherLike] = {}
    for name, kind in kinds.items():
        opened[name] = _with_other_tokenizer(name, kind, supplies) if kind.view.crosses else kind.open(name, supplies)
    return opened, stop_ids


def _with_other_tokenizer(name: str, kind: TeacherKind, supplies: TeacherInputs) -> TeacherLike:
    """A teacher with another tokenizer. It has its own stop ids, and some of its ids match ids of the student."""
    (ref,) = kind.reads()
    model, student = supplies.load(ref), supplies.student
    teacher = kind.open(name, replace(supplies, stop_ids=model.stop_ids))
    if not model.stop_ids or not isinstance(teacher, ScoringTeacher):
        raise RecipeError(
            f"teachers.{name}: the view bytes needs a model that names a stop id, and {ref.model!r} has none."
        )
    left, right = matching_ids(student.tokenizer, model.tokenizer, (set(supplies.stop_ids), set(model.stop_ids)))
    known = (left < student.size) & (right < model.size)
    teacher.matched = left[known], right[known]
    return teacher


def without_home(ref: ModelRef, home: torch.device) -> ModelRef:
    """Normalises the student's device to None, so that equal references compare equal."""
    import torch

    named = home if ref.device is None else torch.device(ref.device)
    return ref._replace(device=None) if (named.type, named.index or 0) == (home.type, home.index or 0) else ref


def teacher_tensors(teachers: Mapping[str, TeacherLike]) -> dict[str, Any]:
    """The tensors of all teachers for a checkpoint, with keys prefixed by the teacher's number."""
    return {
        f"{number}/{key}": tensor
        for number, teacher in enumerate(teachers.values())
        for key, tensor in teacher.state().items()
    }


def restore_teachers(
    teachers: Mapping[str, TeacherLike], versions: Mapping[str, int], tensors: Mapping[str, Any]
) -> None:
    """Restores the output of `teacher_tensors`."""
    for number, (name, teacher) in enumerate(teachers.items()):
        own = {key.removeprefix(f"{number}/"): value for key, value in tensors.items() if key.startswith(f"{number}/")}
        teacher.restore(versions.get(name, 0), own)


# --- Probe: fixed texts that a teacher scores when opened, and again after its weights were reloaded ---
#
# probe = Probe(teacher, size=student.size, avoid=stop_ids)      # scores once, as the reference
# probe.check(teacher)                                           # after a page-in, a wake-up, a reconnect
#
# A teacher that lost its weights still answers in the right shape, with the same number for every token. Only comparing shows it.


LENGTHS = ((3, 5), (2, 9), (6, 7))  # prompt and response of each text
FLAT = 1e-5  # nats: log-probs that all lie within this range carry no information


class Probe:
    """A teacher's scores when it was opened. `size`: size of the shared vocabulary; ids in `avoid` are not used.

    `tolerance` (nats) is 0 within a process: the same weights give the same bits. A remote server may batch differently, so
    allow for rounding there.
    """

    def __init__(self, teacher: TeacherLike, size: int, *, avoid: Sequence[int] = (), tolerance: float = 0.0) -> None:
        self._tolerance, self._rollouts = tolerance, probe_rollouts(size, avoid)
        self.logprobs = self._score(teacher)
        require_information(teacher.name, self.logprobs, size)

    def check(self, teacher: TeacherLike) -> None:
        """Raises if the teacher's scores have changed since it was opened."""
        require_unchanged(teacher.name, self.logprobs, self._score(teacher), self._tolerance)

    def _score(self, teacher: TeacherLike) -> np.ndarray:
        signals = teacher.score(self._rollouts, SignalNeed("logprobs_at"))
        return np.concatenate([np.asarray(signal.values, dtype=np.float64) for signal in signals])


def require_information(name: str, logprobs: np.ndarray, size: int) -> None:
    """Raises if scores carry no information. `size`: size of the vocabulary."""
    strange = ~np.isfinite(logprobs)
    if strange.any():
        raise TrainingError(
            f"teacher {name!r}: {int(strange.sum())} of {logprobs.size} log-probs of a fixed probe are not finite (the first is "
            f"{logprobs[strange][0]}). Its weights are damaged, or its dtype is too narrow for it."
        )
    if np.ptp(logprobs) <= FLAT:
        raise TrainingError(
            f"teacher {name!r} answers {logprobs[0]:.4f} for every token of a fixed probe (-ln of its {size} ids is "
            f"{-np.log(size):.4f}), whatever comes before it: its weights are missing. Check the model or its server."
        )


def require_unchanged(name: str, before: np.ndarray, now: np.ndarray, tolerance: float = 0.0) -> None:
    gap = np.abs(now - before)
    same = np.array_equal(now, before) if tolerance == 0 else bool((gap <= tolerance).all())
    if not same:
        worst = int(np.nan_to_num(gap, nan=np.inf).argmax())
        raise TrainingError(
            f"teacher {name!r} is not the one that was opened: token {worst} of a fixed probe had log-prob {before[worst]:.9g}, "
            f"and now has {now[worst]:.9g} (allowed difference {tolerance:g}). Its weights have changed or were lost. Nothing was "
            "trained on it; resume the run."
        )


def probe_rollouts(size: int, avoid: Sequence[int] = ()) -> list[Rollout]:
    """Fixed texts of ids that any model with this vocabulary can read."""
    known = np.setdiff1d(np.arange(size, dtype=np.int32), np.asarray(avoid, dtype=np.int32))
    return [_rollout(f"probe/{number}", known, *lengths) for number, lengths in enumerate(LENGTHS)]


def _rollout(name: str, known: np.ndarray, prompt: int, response: int) -> Rollout:
    draws = uniforms(request_key(0, name, 0, 0), 0, prompt + response)
    ids = known[(draws * known.size).astype(np.int64)]
    zeros = np.zeros(response, dtype=np.float32)
    return Rollout(
        id=name,
        prompt_id=name,
        visit=0,
        sample=0,
        domain="probe",
        source="data",
        prompt_ids=ids[:prompt],
        response_ids=ids[prompt:],
        author=np.full(response, Author.DATA, dtype=np.uint8),
        logprob=zeros,
        logprob_sampled=zeros,
        logprob_stop=zeros,
        version=np.zeros(response, dtype=np.int32),
        stop="length",
    )


# --- `opd.Teacher`: a teacher of any kind that a recipe can name, in one line ---
#
# teacher = opd.Teacher("tiny/arithmetic", student)
# teacher.predict(batch)                                   # the distribution of every response token: a `Projection`
# teacher.score(rollouts, SignalNeed("logprobs_at"))       # signals, as objectives request them


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
        from opd.teachers.quantised import load_teacher, require_quantiser

        kind: TeacherKind = validate_settings(name, AnyTeacher, settings)
        if not kind.view.as_sampled:
            raise UserError(
                f"{name}: the view {kind.view.name!r} is supported in runs only; `opd.Teacher` reads what the student read."
            )
        if kind.domains is not None:
            raise UserError(
                f"{name}: domains {', '.join(kind.domains)}: the domains of an `opd.Teacher` are named where it is used: "
                "opd.Objective(…, {domain: teacher, …}). Drop them."
            )
        if student is None and not kind.reads():
            raise UserError(f"{name}: a teacher of kind {kind.name!r} needs its student: opd.Teacher(…, student)")
        _check_alone(name, kind, student)
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

        scored = student if student is not None else load(kind.reads()[0])
        opened, self.stop_ids = open_teachers({name: kind}, scored, load)
        self._opened, self._student, self._skip = opened[name], scored, kind.view.skip
        self._models = [*loaded.values(), *([self._opened.model] if kind.has_model else [])]
        self._size, scored.stop_ids = scored.size, self.stop_ids
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

    def predict(self, batch: Pack) -> Source:
        """The distribution at every response token of a batch: row t - 1 predicts token t."""
        import torch

        self._follow()
        with torch.no_grad():
            signals = self._opened.score(batch.rollouts, SignalNeed("hidden"))
            return self.project(torch.cat([signal.values for signal in signals]).to(self._student.device))

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        self._follow()
        seen = (
            seen
            if seen is not None
            else [response_after(rollout.prompt_ids, rollout, self._skip) for rollout in rollouts]
        )
        return self._opened.score(rollouts, need, seen)

    def _follow(self) -> None:
        """Adopts stop ids added by teachers of the same student that were opened later."""
        student = self._student
        if (student.stop_ids, student.size) == (self.stop_ids, self._size):
            return
        if not isinstance(self._opened, ScoringTeacher):
            raise UserError(
                f"{self.name}: the student stops at {student.stop_ids} now, and this teacher was opened when it stopped at "
                f"{self.stop_ids}. Open this one last."
            )
        share_vocabulary(student, {str(number): model for number, model in enumerate(self._models)})
        self._opened.stop_ids = self.stop_ids = student.stop_ids
        self._size = student.size

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


def _check_alone(name: str, kind: TeacherKind, student: LanguageModel | None) -> None:
    """Raises for mistakes that can be seen without objective terms."""
    lora = student is not None and student.adapter is not None
    view = StageView(Rollouts(samples=2), None, (), frozenset({kind.role}), lora=lora)
    mistakes = [f"{name}: {mistake}" for choice in (kind, kind.view) for mistake in choice.check(view)]
    if mistakes:
        raise RecipeError("\n".join(mistakes))
