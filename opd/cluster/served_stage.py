"""A stage whose frozen teachers are served by other workers: the recipe stays as it is, and the ranks ask them over HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from opd.config import Stage
from opd.teachers.kinds import TeacherKind
from opd.teachers.pool_settings import movable
from opd.teachers.served import ServedTeacher

TOKEN = "OPD_CLUSTER_TOKEN"  # the variable that holds the token of all servers of a run
TeacherPlaces = Mapping[str, str]  # model -> address


def served_models(stage: Stage) -> list[str]:
    """Models that a server can score with as they are named in the recipe."""
    return [ref.model for ref in movable(stage.teachers) if ref.revision is None and ref.dtype is None]


def served_name(model: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in model).strip("-")[-80:]


def served_stage(stage: Stage, places: TeacherPlaces) -> Stage:
    """Evaluations of the teachers' own weights, which are elsewhere then, are left out."""
    teachers = {name: _served(kind, places) for name, kind in stage.teachers.items()}
    if teachers == stage.teachers:
        return stage
    evaluated = stage.eval.model_copy(update={"teachers": False, "weight_average": False})
    return stage.model_copy(update={"teachers": teachers, "eval": evaluated})


def _served(kind: TeacherKind, places: TeacherPlaces) -> TeacherKind:
    models = [ref.model for ref in kind.reads()]
    if not kind.can_wait or len(models) != 1 or models[0] not in places:
        return kind
    same = ("role", "domains", "view", "temperature", "batch_tokens")
    kept = {key: value for key, value in kind if key in same and value is not None}
    return ServedTeacher(address=places[models[0]], model=served_name(models[0]), token_env=TOKEN, **kept)
