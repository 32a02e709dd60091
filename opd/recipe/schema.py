"""The JSON schema of a recipe file, for editors, with all short forms.

The settings define the keys of a resolved stage; their marks add the short forms. A file may leave keys out, because the
defaults of all stages supply them.
"""

from __future__ import annotations

import json
from typing import Any

from opd.plugins import load_announced
from opd.recipe.paths import NAME_PATTERN
from opd.recipe.read import IGNORED
from opd.recipe.stage import Recipe, Stage
from opd.registry import Family

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}


def recipe_schema() -> Schema:
    """A stage's keys, plus `name`, `stages` and `plugins`. It includes the choices of loaded plugins."""
    load_announced()
    schema = Stage.model_json_schema()
    teachers = [choice.__name__ for choice in Family("teacher").classes().values()]
    for partial in ("Student", "Hub", *teachers):  # a stage may give some of the keys, and the defaults the others
        schema["$defs"][partial].pop("required", None)
    properties = schema["properties"]
    for option in properties["teachers"]["anyOf"]:
        if "additionalProperties" in option:
            option["additionalProperties"] = _or(NULL, option["additionalProperties"])
    keys = {key: _or(NULL, value) for key, value in properties.items()}
    name = {"type": "string", "pattern": f"^{NAME_PATTERN}$"}
    stage = {"type": "object", "additionalProperties": False, "properties": keys | {"name": name}, "required": ["name"]}
    stages = {"type": "array", "items": {"$ref": "#/$defs/StageInFile"}, "minItems": 1}
    schema["$defs"]["StageInFile"] = stage
    schema["properties"] = keys | {"name": _or(NULL, name), "stages": _or(NULL, stages)}
    schema["properties"]["plugins"] = _or(NULL, Recipe.model_json_schema()["properties"]["plugins"])
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
