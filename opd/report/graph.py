"""Stages of a run and the models that go between them, as nodes and edges to be drawn from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from opd.config import STAGE_PREFIX


def stage_graph(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`nodes`: stages with their column; `edges`: from, to, and as what the model comes."""
    names = [str(stage.get("name", "")) for stage in stages]
    edges = [
        {"from": source, "to": name, "as": role}
        for stage, name in zip(stages, names, strict=True)
        for source, role in dict(reversed(list(_sources(stage)))).items()
        if source in names
    ]
    column: dict[str, int] = {}
    for name in names:  # a stage can only name one before it
        column[name] = 1 + max(
            (column[edge["from"]] for edge in edges if edge["to"] == name and edge["from"] in column), default=-1
        )
    return {"nodes": [{"name": name, "column": column[name]} for name in names], "edges": edges}


def _sources(stage: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(stage, role) of every earlier stage whose output it uses, wherever in it that is written."""
    for key, value in stage.items():
        role = "student" if key == "student" else "teacher" if key == "teachers" else key
        for text in _texts(value):
            if text.startswith(STAGE_PREFIX):
                yield text.removeprefix(STAGE_PREFIX), role


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
