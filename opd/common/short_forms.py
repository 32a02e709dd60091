"""The short forms of a recipe: what it may omit or abbreviate. One table for all of them.

A form marks the field that it is for, so pydantic reads it and the JSON schema has it. Overrides, the paths of a recipe and
stages find the same mark (`opd.recipe.places`). A new short form is a row of `SHORT_FORMS`, or of `TEXTS` for a family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

Schema = dict[str, Any]


class ShortForm:
    """One way to write less. Subclasses say what a value is short for, and which values an editor may accept."""

    field: str | None = None  # the recipe's name of the marked field, if it differs

    def long(self, value: Any) -> Any:
        """What a value is short for. Other values are returned unchanged."""
        raise NotImplementedError

    def options(self, node: Schema) -> list[Schema]:
        """Schemas that are accepted instead of the long form, whose schema is `node`."""
        raise NotImplementedError

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.long, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        whole = handler(schema)
        return {"anyOf": [*self.options(handler.resolve_ref_schema(whole)), whole]}


class OneOrMany(ShortForm):
    """A list with one entry may be written without brackets."""

    def __init__(self, field: str | None = None) -> None:
        self.field = field

    def long(self, value: Any) -> Any:
        return value if isinstance(value, (list, tuple)) else [value]

    def options(self, node: Schema) -> list[Schema]:
        return _flat([node["items"]])


class Short(ShortForm):
    """A mapping may be written as the value of one of its keys: `coefficient: 0.5` for `{value: 0.5}`.

    `keeps`: as an override of a mapping, the value replaces that key, and the other keys stay.
    `pattern`: only a text that matches is short. `rest`: further keys of the long form.
    """

    def __init__(
        self, key: str, *kinds: type, keeps: bool = False, pattern: str = "", rest: Mapping[str, str] | None = None
    ) -> None:
        self.key, self.kinds, self.keeps, self.pattern, self.rest = key, kinds, keeps, pattern, rest or {}
        self.text: Schema = {"type": "string"} | ({"pattern": pattern} if pattern else {})  # in place of a choice

    def long(self, value: Any) -> Any:
        short = isinstance(value, self.kinds) and not isinstance(value, bool)
        short = short and (not self.pattern or re.search(self.pattern, value) is not None)
        return {**self.rest, self.key: value} if short else value

    def options(self, node: Schema) -> list[Schema]:
        names = {str: "string", int: "integer", float: "number", list: "array"}
        types = {names[kind] for kind in self.kinds}
        value = node["properties"][self.key] if "properties" in node else node["additionalProperties"]
        return [one for one in _flat([value]) if "enum" in one or one.get("type") in types]


class ByDomain(ShortForm):
    """Rewards: one, a list of them, or either by domain, instead of a mapping with `domains`. `None`: no rewards."""

    key, default = "domains", "default"  # the field with the entries; the domain that stands for all others
    reserved = ("sandbox", "stop_after")  # keys next to the domains

    def long(self, value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value
        if not isinstance(value, Mapping):
            return {} if value is None else {self.key: {self.default: value}}
        own_sandbox = value.get("kind") == "code"
        own = {key: value[key] for key in self.reserved if key in value and not (key == "sandbox" and own_sandbox)}
        rest = {key: entry for key, entry in value.items() if key not in own}
        if "kind" in rest:
            return {self.key: {self.default: rest}, **own}
        if isinstance(rest.get(self.key), Mapping) and len(rest) == 1:  # the long form, as in a resolved recipe
            rest = rest[self.key]
        return {self.key: {str(domain): entry for domain, entry in rest.items() if entry is not None}, **own}

    def options(self, node: Schema) -> list[Schema]:
        known = node["properties"]
        some = _flat([known[self.key]["additionalProperties"]])
        own = {key: known[key] for key in self.reserved}
        alone = {"type": "object", "properties": own, "required": ["kind", "stop_after"]}  # a single reward with it
        by_domain = {"type": "object", "properties": own, "additionalProperties": {"anyOf": [*some, {"type": "null"}]}}
        return [*some, alone, by_domain]

    def ways(self, model: type[BaseModel]) -> tuple[Any, ...]:
        """Annotations of what is accepted instead of the model: the rewards of every domain, and rewards by domain."""
        by_domain = model.model_fields[self.key].annotation
        return (cast(Any, by_domain).__args__[1], by_domain)


def _flat(options: list[Schema]) -> list[Schema]:
    """Flatten nested options, without their annotations."""
    return [item for option in options for item in (_flat(option["anyOf"]) if "anyOf" in option else [option])]


# The table. A key is the place in a recipe; NAME and DOMAIN are keys that the user chooses.


SHORT_FORMS: dict[str, ShortForm] = {
    "plugins": OneOrMany(),
    "student": Short("model", str, keeps=True),
    "teachers": Short("teacher", str, keeps=True),  # a single teacher is called `teacher`
    "teachers.NAME.address": OneOrMany(),
    "teachers.NAME.weights.NAME": Short("value", int, float),
    "teachers.NAME.by": Short("value", int, float),
    "prompts": OneOrMany(),
    "rollout.writers": OneOrMany(),
    "sampler.address": OneOrMany(),
    "objective": OneOrMany(),
    "objective.coefficient": Short("value", int, float),
    "objective.gate": OneOrMany(),
    "objective.advantage.also": OneOrMany("also"),
    "rewards": ByDomain(),
    "rewards.DOMAIN": OneOrMany(),
    "eval.further": OneOrMany(),
    "log": Short("to", str, list),
    "log.to": OneOrMany(),
    "monitors": Short("action", str),
    "monitors.watch": OneOrMany(),
    "monitors.ignore": OneOrMany(),
    "cluster.sizes.NAME": Short("parameters", str, int),
}

# A text in place of a choice is the choice's name, unless its family has a row here.
TEXTS: dict[str, Short] = {
    "teacher": Short("model", str, keeps=True),
    "source": Short("source", str),
    "reward": Short("function", str, pattern=":", rest={"kind": "custom"}),
}
