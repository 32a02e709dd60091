"""What a recipe may leave out: the brackets of a list with one entry, the key of a mapping with one value."""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


class OneOrMany:
    """A list of which a recipe may write the only entry without brackets."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: value if isinstance(value, (list, tuple)) else [value], handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        node = handler(schema)
        return {"anyOf": [node["items"], node]}


class Short:
    """A mapping of which a recipe may write one key's value alone: `coefficient: 0.5` for `{value: 0.5}`."""

    def __init__(self, key: str, *kinds: type) -> None:
        self._key, self._kinds = key, kinds

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def spell_out(value: Any) -> Any:
            short = isinstance(value, self._kinds) and not isinstance(value, bool)
            return {self._key: value} if short else value

        return core_schema.no_info_before_validator_function(spell_out, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        node = handler(schema)
        return {"anyOf": [handler.resolve_ref_schema(node)["properties"][self._key], node]}


class WrittenAs:
    """Marks a field that a recipe writes under another key."""

    def __init__(self, key: str) -> None:
        self.key = key
