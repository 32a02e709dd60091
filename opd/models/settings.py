"""Model settings of a recipe, and sizes that plans need. No torch here."""

from __future__ import annotations

from pydantic import BaseModel, Field

from opd.registry import SETTINGS, Positive, Word

UNIT = 2**26  # most weights that ranks gather at once (but at least one layer)
UNITS = 8  # a unit has at most this fraction (1/8) of a model's layers, rounded up


def layers_of_unit(layers: int, weights: int) -> int:
    """How many layers, of `weights` weights each, are gathered together when a model is sharded over ranks."""
    return max(min(-(-layers // UNITS), UNIT // max(weights, 1)), 1)


class Lora(BaseModel):
    """Train low-rank adapters, through peft."""

    model_config = SETTINGS
    rank: Positive = Field(16, le=65_536)
    alpha: float = Field(32, gt=0, le=1e6)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Word | list[Word] = Field("all-linear", description="peft target modules; never the output head")
