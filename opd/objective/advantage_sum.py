"""The advantage of a policy-gradient term: a sum of parts, which a recipe writes side by side under `advantage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import (
    BaseModel,
    Field,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema

from opd import families
from opd.objective.advantages import AdvantagePart, AnyAdvantage, SampledTokens, TeacherAdvantage
from opd.objective.batch import require_per_token
from opd.settings import SETTINGS, Family, Needs, changed, key_hint, schema_of
from opd.shorthand import WrittenAs

FLAT = ("outcome", "teacher", "reference")  # parts whose settings stand directly under `advantage`; added in this order


class Advantage(BaseModel):
    """The sum of its parts. Under `advantage` a recipe writes the settings of all parts side by side."""

    model_config = SETTINGS
    student: Literal["behaviour", "proximal", "current"] = Field(
        "behaviour", description="whose log-prob the teacher's is compared with"
    )
    parts: Annotated[tuple[AnyAdvantage, ...], WrittenAs("also")] = Field(default_factory=lambda: (TeacherAdvantage(),))

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "parts" in value:
            return value
        rest, parts = dict(value), []
        for name in FLAT:
            part = families.find("advantage", name)
            given = {key: rest.pop(key) for key in part.model_fields if key in rest}
            parts.append(part.model_validate(given))
        more = rest.pop("also", None) or []
        known = ("student", "also", *(key for name in FLAT for key in families.find("advantage", name).model_fields))
        parts += [Family("advantage").read(entry) for entry in (more if isinstance(more, list) else [more])]
        added = [part for part in cast("list[AdvantagePart]", parts) if part.acts]
        unknown = next((key for key in rest if key != "student"), None)
        if unknown is not None:
            raise ValueError(f"unknown key {unknown!r}; {key_hint([str(unknown)], known)}")
        return {**rest, "parts": added}

    @model_validator(mode="after")
    def _consistent(self) -> Advantage:
        if not self.parts:
            raise ValueError("every weight is 0, so there is no advantage")
        if self.student == "current" and any(part.needs_batch for part in self.parts):
            raise ValueError("whiten needs the whole batch first: compare with behaviour or proximal, not with current")
        if "student" in changed(self) and not any(part.of_student for part in self.parts):
            raise ValueError("teacher_weight and reference_weight are 0, so `student` does nothing")
        return self

    @model_serializer(mode="wrap")
    def _flat(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        """As a recipe writes it."""
        values: dict[str, Any] = {"student": self.student}
        left = list(self.parts)
        for name in FLAT:
            kind = families.find("advantage", name)
            part = next((part for part in left if part.name == name), None)
            if part is not None:
                left.remove(part)
            weight = f"{name}_weight"
            values |= part.model_dump() if part is not None else kind.model_validate({weight: 0.0}).model_dump()
        values.pop("kind")
        if left:
            values["also"] = [part.model_dump() for part in left]
        if info.exclude_defaults:
            usual = Advantage().model_dump()
            return {key: value for key, value in values.items() if value != usual.get(key)}
        return values

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = handler(schema)
        node = handler.resolve_ref_schema(reference)
        parts = node["properties"].pop("parts")
        for name in FLAT:
            part = handler.resolve_ref_schema(schema_of(families.find("advantage", name), handler))
            node["properties"] |= {key: value for key, value in part["properties"].items() if key != "kind"}
        also = parts["items"]
        node["properties"]["also"] = {
            "anyOf": [also, {"type": "array", "items": also}],
            "description": "further advantages, added to these",
        }
        return reference

    def needs(self, role: str) -> Needs:
        needs = Needs()
        for part in self.parts:
            needs |= part.needs(role)
        return needs

    @property
    def of_teacher(self) -> bool:
        return any(part.of_teacher for part in self.parts)

    def prepare(self, tokens: SampledTokens) -> list[Any]:
        return [part.prepare(tokens) for part in self.parts]

    def values(self, tokens: SampledTokens, prepared: Sequence[Any]) -> list[np.ndarray]:
        """(T,) per rollout: the one place where a token's advantage is formed."""
        total = [np.zeros(rollout.response_ids.size) for rollout in tokens.rollouts]
        for part, state in zip(self.parts, prepared, strict=True):
            values = part.values(tokens, state)
            require_per_token(f"advantage {part.name}", values, tokens.rollouts)
            total = [before + value for before, value in zip(total, values, strict=True)]
        return total
