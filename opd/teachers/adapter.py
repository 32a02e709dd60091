"""Adapters over one shared base: twelve specialists for the memory of one. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from opd.errors import ModelError
from opd.models.adapters import base_of, is_adapter, smol_models
from opd.settings import Address, Dtype
from opd.teachers.kinds import ModelRef, ModelTeacher, Supplies
from opd.types import SignalKind

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

    def scored_with(self) -> Sequence[ModelRef]:
        return (ModelRef(self.model, None, self.dtype),)  # its base is part of what is hashed

    def files(self) -> list[Path]:
        return sorted(path for path in self._directory().iterdir() if path.suffix in (".json", ".safetensors"))

    def require(self, name: str, tokenizer: Any, signals: Collection[SignalKind]) -> None:
        from opd.models.adapted import check_adapter
        from opd.models.load import empty_model, load_config
        from opd.models.lora import require_peft

        require_peft(f"teachers.{name}: kind {self.name}")
        (base,) = self.reads()
        check_adapter(self.model, self._directory(), empty_model(load_config(base.model)))

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
