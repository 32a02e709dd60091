"""The teachers of a stage, opened together; and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opd.models.language_model import LanguageModel
from opd.models.tokenizers import require_same, share_vocabulary
from opd.teachers.kinds import ModelRef, Supplies, TeacherKind
from opd.types import TeacherLike


def open_teachers(
    kinds: Mapping[str, TeacherKind], student: LanguageModel, load: Callable[[ModelRef], LanguageModel]
) -> tuple[dict[str, TeacherLike], tuple[int, ...]]:
    """The teachers by name, and the stop ids of all models together. A model that several teachers name is loaded once."""
    models: dict[ModelRef, LanguageModel] = {}
    for ref in (ref for kind in kinds.values() for ref in kind.reads()):
        if ref not in models:
            models[ref] = load(ref)
            models[ref].module.requires_grad_(False)
            require_same(student.tokenizer, models[ref].tokenizer, student.name, ref.model)
    stop_ids = share_vocabulary(student, {str(ref): model for ref, model in models.items()})
    supplies = Supplies(student, stop_ids, models.__getitem__)
    return {name: kind.open(name, supplies) for name, kind in kinds.items()}, stop_ids


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
