"""What the other settings are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MANY = 1_000_000_000  # no count in a recipe is larger
Positive = Annotated[int, Field(ge=1, le=MANY)]
Count = Annotated[int, Field(ge=0, le=MANY)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Address = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]  # of a model or prompts
Dtype = Literal["float32", "bfloat16"]
SETTINGS = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def changed(settings: BaseModel) -> set[str]:
    """Keys that differ from their defaults; a resolved recipe spells out all of them."""
    fields = type(settings).model_fields.items()
    return {name for name, field in fields if getattr(settings, name) != field.get_default(call_default_factory=True)}
