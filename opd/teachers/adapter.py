"""Adapters over one shared base: twelve specialists for the memory of one. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from opd.errors import ModelError
from opd.models.adapters import base_of, is_adapter, smol_models
from opd.settings import Address, Dtype
from opd.teachers.kinds import ModelRef, ModelTeacher, Supplies

if TYPE_CHECKING:
    from opd.teachers.scoring import ScoringTeacher


class AdapterTeacher(ModelTeacher):
    """A LoRA directory; its base is in memory once, and is the student's own where that has adapters over the same model."""

    name = "adapter"
    has_model = True

    model: Address = Field(description="directory of a LoRA adapter as peft writes it; its config names the base")
    dtype: Dtype | None = Field(None, description="of the base; default: that of the student's weights")

    @property
    def title(self) -> str:
        return self.model

    def reads(self) -> Sequence[ModelRef]:
        return (ModelRef(base_of(self.model, self._directory()), None, self.dtype),)

    def inputs(self) -> Sequence[ModelRef]:
        return (ModelRef(self.model),)

    def check(self) -> None:
        from opd.models.adapted import check_adapter
        from opd.models.load import empty_model
        from opd.models.lora import require_peft

        require_peft(f"kind {self.name}")
        (base,) = self.reads()
        check_adapter(self.model, self._directory(), empty_model(base.model))

    def make(self, name: str, supplies: Supplies) -> ScoringTeacher:
        from opd.models.adapted import AdaptedModel
        from opd.teachers.local import LocalTeacher

        (base,) = self.reads()
        model = AdaptedModel(supplies.load(base), self.model, self._directory())
        return LocalTeacher(name, self.role, model, self.batch_tokens, supplies.stop_ids)

    def _directory(self) -> Path:
        directory = smol_models().get(self.model, Path(self.model).expanduser())
        if not is_adapter(directory):
            raise ModelError(
                f"adapter {self.model!r}: no directory with an adapter_config.json (and no config.json). kind adapter takes what "
                "peft saves; a whole model is kind frozen."
            )
        return directory
