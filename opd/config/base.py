"""What the other settings are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16"]
SETTINGS = ConfigDict(extra="forbid", frozen=True)


def changed(settings: BaseModel) -> set[str]:
    """Keys that differ from their defaults; a resolved recipe spells out all of them."""
    fields = type(settings).model_fields.items()
    return {name for name, field in fields if getattr(settings, name) != field.get_default(call_default_factory=True)}
