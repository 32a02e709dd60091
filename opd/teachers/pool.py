"""How many teachers are in memory at once, and where the others wait. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from opd.common.context import RunContext
from opd.common.errors import RecipeError, TrainingError
from opd.common.text import bytes_in_words
from opd.engines.draws import request_key, uniforms
from opd.models.tokenizers import matching_ids, require_same, share_vocabulary
from opd.records import Author, Rollout, SignalNeed, TeacherLike
from opd.registry import SETTINGS, Positive
from opd.teachers.kinds import ModelRef, TeacherInputs, TeacherKind
from opd.teachers.scoring import ScoringTeacher

if TYPE_CHECKING:
    import torch

    from opd.models.language_model import LanguageModel


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
        None, description="frozen teachers in memory at once; 2: one scores while the next is read; default: all"
    )
    keep: Literal["memory", "disk"] | None = Field(
        None, description="where the others wait: pinned host memory, or disk; default: memory on CUDA, disk on a CPU"
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
        idle = " WARNING: on a CPU, waiting there is being resident; use keep: disk." if where == "in memory" else ""
        return (
            f"at most {self.resident} of {len(sizes)} teachers' models resident while they score, none during updates; the others "
            f"wait {where}. A page-in is {least if least == most else f'{least} to {most}'}; {len(sizes)} of them a step, at most.{idle}"
        )

    def refuse(self, kinds: Mapping[str, TeacherKind], drawn: Iterable[str]) -> Iterable[str]:
        """`drawn`: recipe keys that sample from teachers, or read all their weights at once."""
        if self.keep is not None and self.resident is None:
            yield f"pool.keep {self.keep} says where teachers wait, but all of them are resident. Set pool.resident."
        if self.resident is not None and not any(kind.waiting() for kind in kinds.values()):
            yield f"pool.resident {self.resident}: only frozen teachers can wait outside, and there is none. Drop it."
        paged = set(self.paged(kinds))
        names = [name for name, kind in kinds.items() if kind.role == "teacher" and paged & set(kind.reads())]
        for key in drawn:
            if names:
                yield (
                    f"{key} needs the weights of teachers.{names[0]} at any moment, and with pool.resident {self.resident} they are "
                    f"here only while it scores. Drop {key}, or pool.resident."
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
    same = {settled(ref, here) for kind in kinds.values() if not kind.view.crosses for ref in kind.reads()}
    for ref in (settled(ref, here) for kind in kinds.values() for ref in kind.reads()):
        if ref not in models:
            models[ref] = load(ref)
            models[ref].module.requires_grad_(False)
            if ref in same:
                require_same(student.tokenizer, models[ref].tokenizer, student.name, ref.model)
    elsewhere = [found for kind in kinds.values() if (found := kind.vocabulary(context)) is not None]
    stop_ids = share_vocabulary(student, {str(ref): models[ref] for ref in models if ref in same}, elsewhere)

    def loaded(named: ModelRef) -> LanguageModel:
        ref = settled(named, student.device)
        if ref not in models:
            known = ", ".join(map(str, models)) or "none"
            raise RecipeError(f"a teacher loads {ref}, which no kind's `reads` names; they name {known}. Add it there.")
        return models[ref]

    supplies = TeacherInputs(student, stop_ids, loaded, context)
    opened: dict[str, TeacherLike] = {}
    for name, kind in kinds.items():
        opened[name] = _crossing(name, kind, supplies) if kind.view.crosses else kind.open(name, supplies)
    return opened, stop_ids


def _crossing(name: str, kind: TeacherKind, supplies: TeacherInputs) -> TeacherLike:
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


def settled(ref: ModelRef, home: torch.device) -> ModelRef:
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
        refuse_lost(teacher.name, self.logprobs, size)

    def check(self, teacher: TeacherLike) -> None:
        """Raises if the teacher's scores have changed since it was opened."""
        refuse_changed(teacher.name, self.logprobs, self._score(teacher), self._tolerance)

    def _score(self, teacher: TeacherLike) -> np.ndarray:
        signals = teacher.score(self._rollouts, SignalNeed("logprobs_at"))
        return np.concatenate([np.asarray(signal.values, dtype=np.float64) for signal in signals])


def refuse_lost(name: str, logprobs: np.ndarray, size: int) -> None:
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
            f"{-np.log(size):.4f}), whatever stands before it: its weights are not there. Check the model, or its server."
        )


def refuse_changed(name: str, before: np.ndarray, now: np.ndarray, tolerance: float = 0.0) -> None:
    gap = np.abs(now - before)
    same = np.array_equal(now, before) if tolerance == 0 else bool((gap <= tolerance).all())
    if not same:
        worst = int(np.nan_to_num(gap, nan=np.inf).argmax())
        raise TrainingError(
            f"teacher {name!r} is no longer the one that was opened: token {worst} of a fixed probe had log-prob {before[worst]:.9g}, "
            f"and now has {now[worst]:.9g} (allowed difference {tolerance:g}). Its weights were changed or lost on the way. Nothing was "
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
