"""What the other settings are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MANY = 1_000_000_000  # no count in a recipe is larger


def _bounded(value: int) -> int:
    """Beside a field's own `le`, which would be lost if this were one too."""
    if value > MANY:
        raise ValueError(f"expected at most {MANY}")
    return value


Positive = Annotated[int, Field(ge=1), AfterValidator(_bounded)]
Count = Annotated[int, Field(ge=0), AfterValidator(_bounded)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[str, Field(min_length=1, max_length=200)]
Address = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]  # of a model or prompts
Dtype = Literal["float32", "bfloat16"]
SETTINGS = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def changed(settings: BaseModel) -> set[str]:
    """Keys that differ from their defaults; a resolved recipe spells out all of them."""
    fields = type(settings).model_fields.items()
    return {name for name, field in fields if getattr(settings, name) != field.get_default(call_default_factory=True)}
