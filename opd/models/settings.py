"""Settings of models that a recipe can give. No torch here."""

from __future__ import annotations

from pydantic import BaseModel, Field

from opd.settings import SETTINGS, Positive, Word


class Lora(BaseModel):
    """Low-rank adapters through peft."""

    model_config = SETTINGS
    rank: Positive = Field(16, le=65_536)
    alpha: float = Field(32, gt=0, le=1e6)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Word | list[Word] = Field("all-linear", description="peft target modules; never the output head")
