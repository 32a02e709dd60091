"""The teachers of a stage, opened together; and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from opd.errors import RecipeError
from opd.models.language_model import LanguageModel
from opd.models.token_bytes import matching_ids
from opd.models.tokenizers import require_same, share_vocabulary
from opd.teachers.kinds import ModelRef, Supplies, Surroundings, TeacherKind
from opd.teachers.scoring import ScoringTeacher
from opd.types import TeacherLike


def open_teachers(
    kinds: Mapping[str, TeacherKind],
    student: LanguageModel,
    load: Callable[[ModelRef], LanguageModel],
    around: Surroundings | None = None,
) -> tuple[dict[str, TeacherLike], tuple[int, ...]]:
    """The teachers by name, and the stop ids of all models together. A model that several teachers name is loaded once.

    What `load` gives may be a `paging.PagedModel`, whose weights wait elsewhere.
    """
    around = around or Surroundings()
    models: dict[ModelRef, LanguageModel] = {}
    here = student.device
    same = {settled(ref, here) for kind in kinds.values() if not kind.view.crosses for ref in kind.reads()}
    for ref in (settled(ref, here) for kind in kinds.values() for ref in kind.reads()):
        if ref not in models:
            models[ref] = load(ref)
            models[ref].module.requires_grad_(False)
            if ref in same:
                require_same(student.tokenizer, models[ref].tokenizer, student.name, ref.model)
    elsewhere = [found for kind in kinds.values() if (found := kind.vocabulary(around)) is not None]
    stop_ids = share_vocabulary(student, {str(ref): models[ref] for ref in models if ref in same}, elsewhere)

    def loaded(named: ModelRef) -> LanguageModel:
        ref = settled(named, student.device)
        if ref not in models:
            known = ", ".join(map(str, models)) or "none"
            raise RecipeError(f"a teacher loads {ref}, which no kind's `reads` names; they name {known}. Add it there.")
        return models[ref]

    supplies = Supplies(student, stop_ids, loaded, around)
    opened: dict[str, TeacherLike] = {}
    for name, kind in kinds.items():
        opened[name] = _crossing(name, kind, supplies) if kind.view.crosses else kind.open(name, supplies)
    return opened, stop_ids


def _crossing(name: str, kind: TeacherKind, supplies: Supplies) -> TeacherLike:
    """A teacher with another tokenizer: it has stop ids of its own, and some ids mean the same as the student's."""
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
    """The student's own device goes without its name: one model, however it is written."""
    named = home if ref.device is None else torch.device(ref.device)
    return ref._replace(device=None) if (named.type, named.index or 0) == (home.type, home.index or 0) else ref


def teacher_tensors(teachers: Mapping[str, TeacherLike]) -> dict[str, Any]:
    """What a checkpoint has to hold of all of them, under the number of each."""
    return {
        f"{number}/{key}": tensor
        for number, teacher in enumerate(teachers.values())
        for key, tensor in teacher.state().items()
    }


def restore_teachers(
    teachers: Mapping[str, TeacherLike], versions: Mapping[str, int], tensors: Mapping[str, Any]
) -> None:
    """What `teacher_tensors` gave."""
    for number, (name, teacher) in enumerate(teachers.items()):
        own = {key.removeprefix(f"{number}/"): value for key, value in tensors.items() if key.startswith(f"{number}/")}
        teacher.restore(versions.get(name, 0), own)
