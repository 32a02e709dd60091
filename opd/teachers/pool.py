"""The teachers of a stage, opened together; and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from opd.errors import RecipeError
from opd.models.language_model import LanguageModel
from opd.models.tokenizers import require_same, share_vocabulary
from opd.teachers.kinds import ModelRef, Supplies, Surroundings, TeacherKind
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
    for ref in (settled(ref, student.device) for kind in kinds.values() for ref in kind.reads()):
        if ref not in models:
            models[ref] = load(ref)
            models[ref].module.requires_grad_(False)
            require_same(student.tokenizer, models[ref].tokenizer, student.name, ref.model)
    elsewhere = [found for kind in kinds.values() if (found := kind.vocabulary(around)) is not None]
    stop_ids = share_vocabulary(student, {str(ref): model for ref, model in models.items()}, elsewhere)

    def loaded(named: ModelRef) -> LanguageModel:
        ref = settled(named, student.device)
        if ref not in models:
            known = ", ".join(map(str, models)) or "none"
            raise RecipeError(f"a teacher loads {ref}, which no kind's `reads` names; they name {known}. Add it there.")
        return models[ref]

    supplies = Supplies(student, stop_ids, loaded, around)
    return {name: kind.open(name, supplies) for name, kind in kinds.items()}, stop_ids


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
