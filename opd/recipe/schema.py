"""The JSON schema of a recipe file, for editors: what may be written, short forms included.

The settings themselves say what a stage holds once it is read. A file may say less (defaults, stages laid over them) and may
say it shorter; `SHORT_FORMS` lists where.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from opd.plugins import load_announced
from opd.recipe.paths import NAME_PATTERN
from opd.recipe.read import IGNORED
from opd.recipe.stage import Stage
from opd.registry import Family

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NULL: Schema = {"type": "null"}


def recipe_schema() -> Schema:
    """A stage's keys, plus `name`, `stages` and `plugins`. Choices of plugins that are loaded stand in it, too."""
    load_announced()
    schema = Stage.model_json_schema()
    for definition in schema["$defs"].values():
        _shorten(definition.get("properties", {}))
    teachers = [choice.__name__ for choice in Family("teacher").classes().values()]
    for partial in ("Student", "Hub", *teachers):  # a stage gives some of their keys, the defaults the others
        schema["$defs"][partial].pop("required", None)
    properties = schema["properties"]
    _shorten(properties)
    keys = {key: _or(NULL, value) for key, value in properties.items()}
    name = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
    stage = {"type": "object", "additionalProperties": False, "properties": keys | {"name": name}, "required": ["name"]}
    stages = {"type": "array", "items": {"$ref": "#/$defs/StageInFile"}, "minItems": 1}
    schema["$defs"]["StageInFile"] = stage
    schema["properties"] = keys | {"name": _or(NULL, name), "stages": _or(NULL, stages)}
    schema["properties"]["plugins"] = _or(NULL, TEXT, {"type": "array", "items": TEXT})
    schema["patternProperties"] = {f"^{IGNORED}": {}}
    schema["title"] = "opd recipe"
    schema["description"] = "Top-level keys are the defaults of every stage."
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema.pop("required", None)
    return json.loads(json.dumps(schema))


def _or(*options: Schema) -> Schema:
    """One of several, flat."""
    found: list[Schema] = []
    for option in options:
        plain = option.keys() <= {"anyOf", "default", "description", "title"} and "anyOf" in option
        found += [item for item in (option["anyOf"] if plain else [option]) if item not in found]
    notes = {key: option[key] for option in options for key in ("description", "title") if key in option}
    return notes | {"anyOf": found}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def _one_or_list(item: Schema) -> Schema:
    return _or(item, _list(item))


def _mapping(item: Schema) -> Schema:
    return {"type": "object", "additionalProperties": item}


SHORT_FORMS: dict[str, Callable[[Schema], Schema]] = {  # key -> what else may stand there, wherever it is one
    "student": lambda whole: _or(TEXT, whole),
    "teachers": lambda whole: _or(TEXT, _mapping(_or(TEXT, NULL, whole["additionalProperties"]))),
    "prompts": lambda whole: _one_or_list(_or(TEXT, whole["items"])),
    "further": lambda whole: _or(TEXT, whole["items"], whole | {"items": _or(TEXT, whole["items"])}),
    "sampler": lambda whole: _or(TEXT, whole),
    "objective": lambda whole: _one_or_list(whole["items"]),
    "log": lambda whole: _or(TEXT, _list(_or(TEXT, {"type": "object"})), whole),
}


def _shorten(properties: Schema) -> None:
    for key, short in SHORT_FORMS.items():
        whole = properties.get(key)
        if whole is not None and whole.get("type") not in ("integer", "boolean", "string"):
            properties[key] = short(whole)
