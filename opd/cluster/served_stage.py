"""A stage whose frozen teachers are served by other workers: the recipe stays as it is, and the ranks ask them over HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from opd.config import STAGE_PREFIX, Stage
from opd.teachers.kinds import ModelRef, TeacherKind
from opd.teachers.pool_settings import movable
from opd.teachers.served import ServedTeacher

TOKEN = "OPD_CLUSTER_TOKEN"  # the variable that holds the token of all servers of a run
TeacherPlaces = Mapping[str, str]  # model -> address


def served_models(stage: Stage) -> list[str]:
    """Models that a server can score with as they are named in the recipe, and that are there when it starts."""
    return [ref.model for ref in movable(stage.teachers) if _plain(ref)]


def _plain(ref: ModelRef) -> bool:
    return ref == ModelRef(ref.model) and not ref.model.startswith(STAGE_PREFIX)


def served_name(model: str) -> str:
    """Its own among all models, whatever letters they have."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in model).strip("-")
    return f"{letters[-80:]}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def served_stage(stage: Stage, places: TeacherPlaces) -> Stage:
    """Evaluations of the teachers' own weights, which are elsewhere then, are left out."""
    teachers = {name: _served(kind, places) for name, kind in stage.teachers.items()}
    if teachers == stage.teachers:
        return stage
    evaluated = stage.eval.model_copy(update={"teachers": False, "weight_average": False})
    return stage.model_copy(update={"teachers": teachers, "eval": evaluated})


def _served(kind: TeacherKind, places: TeacherPlaces) -> TeacherKind:
    refs = kind.reads()
    if not kind.can_wait or len(refs) != 1 or not _plain(refs[0]) or refs[0].model not in places:
        return kind
    model = refs[0].model
    same = ("role", "domains", "view", "temperature", "batch_tokens")
    kept = {key: value for key, value in kind if key in same and value is not None}
    return ServedTeacher(address=places[model], model=served_name(model), token_env=TOKEN, **kept)
