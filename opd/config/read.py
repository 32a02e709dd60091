"""How a recipe is read: YAML, shipped names, overrides, stages, and errors that name the nearest known key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from opd.config.rewards import rewards_schema
from opd.config.stage import Recipe, Stage
from opd.errors import RecipeError
from opd.overrides import apply_override, merge

STAGE_PREFIX = "stage:"  # `student: stage:NAME` is the model that stage NAME saved


def load_recipe(recipe: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a file, a shipped name or a mapping, apply `key=value` overrides, and validate it."""
    if isinstance(recipe, Mapping):
        name, raw = str(recipe.get("name", "run")), dict(recipe)
    else:
        path = find_recipe(str(recipe))
        name, raw = path.stem, parse_yaml(path.read_text(encoding="utf-8"), str(path))
    for override in overrides:
        apply_override(raw, override)
    return resolve(raw, name)


def resolve(raw: Mapping[str, Any], name: str) -> Recipe:
    """Spread top-level defaults over the stages. A later stage without a student of its own continues the one before."""
    defaults = {key: value for key, value in raw.items() if key not in ("stages", "name")}
    overrides = raw.get("stages") or [{}]
    if not isinstance(overrides, list) or not all(isinstance(stage, Mapping) for stage in overrides):
        raise RecipeError(
            f"stages: expected a list of mappings, got {overrides!r}. Write `stages: [{{name: warm-up, …}}, …]`."
        )
    if "stages" in raw and any("name" not in stage for stage in overrides):
        raise RecipeError("stages: every stage needs a name. Write `stages: [{name: warm-up, train: {steps: 50}}, …]`.")
    stages: list[Stage] = []
    for override in overrides:
        merged = merge(defaults, override)
        if stages and "student" not in override:
            merged["student"] = merge(
                _mapping(merged.get("student"), "model"), {"model": STAGE_PREFIX + stages[-1].name}
            )
        where = f"stages.{override['name']}." if "stages" in raw else ""
        stages.append(validate(merged, where))
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise RecipeError(f"stages: names must differ, got {', '.join(names)}.")
    return Recipe(name=str(raw.get("name", name)), stages=stages)


def validate(raw: Mapping[str, Any], where: str = "") -> Stage:
    try:
        return Stage.model_validate(raw)
    except ValidationError as error:
        lines = [_explain(detail, where) for detail in error.errors(include_url=False)]
        raise RecipeError("\n".join(lines)) from None


def _explain(detail: Any, where: str) -> str:
    path = where + ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        *parents, key = detail["loc"]
        known = _fields_at(parents)
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known keys here: {', '.join(known)}."
        return f"{path}: unknown key. {hint}"
    if detail["type"] == "missing":
        return f"{path}: missing, and the recipe needs it."
    message = detail["msg"].removeprefix("Value error, ")
    return f"{path}: {message[0].lower() + message[1:]}; got {detail['input']!r}."


def _fields_at(location: Iterable[Any]) -> list[str]:
    """Field names of the settings model at a location such as ("prompts", 0)."""
    schema = Stage.model_json_schema()
    node: Mapping[str, Any] = schema
    for part in location:
        tagged = node.get("discriminator", {}).get("mapping", {})
        if isinstance(part, int):
            node = node.get("items", {})
        elif part in tagged:
            node = {"$ref": tagged[part]}
        elif part in node.get("properties", {}):
            node = node["properties"][part]
        else:
            node = node.get("additionalProperties", {})
        options = [option for option in node.get("anyOf", []) if "$ref" in option]
        reference = node.get("$ref") or (options[0]["$ref"] if options else None)
        if reference:
            node = schema["$defs"][reference.rsplit("/", 1)[1]]
    return list(node.get("properties", {}))


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads the keys `on`, `off`, `yes`, `no`, `y` and `n` as booleans; here they are words."""


_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0] != "tag:yaml.org,2002:bool" or first in "tTfF"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise RecipeError(
            f"{where}: a recipe is a mapping of keys, got {type(raw).__name__}. See `opd recipes show quickstart`."
        )
    return raw


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {key: value}


# Shipped recipes


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of every recipe in the package: `quickstart`, `methods/gkd`, …"""
    root = Path(str(resources.files("opd") / "recipes"))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def find_recipe(name: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise RecipeError(f"recipe {name!r}: no such file. `opd recipes list` names the shipped ones.")
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise RecipeError(
        f"recipe {name!r}: neither a .yaml file nor a shipped recipe.{hint} `opd recipes list` shows all."
    )


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe file, for editors: a stage's keys, plus `name` and `stages` (partial stages)."""
    schema = Stage.model_json_schema()
    properties = schema["properties"]
    short = {"type": "string"}
    properties["student"] = {"anyOf": [short, properties["student"]]}
    properties["teachers"]["additionalProperties"] = {"anyOf": [short, properties["teachers"]["additionalProperties"]]}
    properties["prompts"]["items"] = {"anyOf": [short, properties["prompts"]["items"]]}
    term = properties["objective"]["items"]
    properties["objective"] = {"anyOf": [term, {"type": "array", "items": term}]}
    properties["rewards"] = rewards_schema(properties["rewards"])
    properties["log"] = {"anyOf": [short, {"type": "array", "items": short}, properties["log"]]}
    stage = {"type": "object", "additionalProperties": False, "properties": dict(properties), "required": ["name"]}
    schema["properties"] = {**properties, "name": {"type": "string"}, "stages": {"type": "array", "items": stage}}
    schema["title"] = "opd recipe"
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["required"] = ["prompts"]
    return json.loads(json.dumps(schema))
