"""What the other settings are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16"]
SETTINGS = ConfigDict(extra="forbid", frozen=True)
