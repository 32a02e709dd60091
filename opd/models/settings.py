"""Settings of models that a recipe can give, and sizes that plans have to know. No torch here."""

from __future__ import annotations

from pydantic import BaseModel, Field

from opd.registry import SETTINGS, Positive, Word

UNIT = 2**26  # weights that ranks gather at once, at most, if that is a layer or more
UNITS = 8  # of a model, at least


def layers_of_unit(layers: int, weights: int) -> int:
    """How many layers of so many weights each are gathered together where a model is spread over ranks."""
    return max(min(-(-layers // UNITS), UNIT // max(weights, 1)), 1)


class Lora(BaseModel):
    """Low-rank adapters through peft."""

    model_config = SETTINGS
    rank: Positive = Field(16, le=65_536)
    alpha: float = Field(32, gt=0, le=1e6)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Word | list[Word] = Field("all-linear", description="peft target modules; never the output head")
