"""An adapter over a shared base model: it has its own layers, shares the base's tensors and merges nothing.

So each specialist over one base costs only its adapter. Adapters are never switched, so no model can answer with another's
adapter, and the base is never written to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from opd.common.errors import ModelError
from opd.models import lora
from opd.models.files import read_json, read_shapes, reading_model
from opd.models.language_model import LanguageModel, share_module
from opd.models.load import CONFIG, WEIGHTS_FILE, refuse_difference, wanted_shapes

# Settings that add more to the weights than a product of two factors, or change the base while loading.
OTHER_WAYS = ("use_dora", "modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias", "use_qalora")
STARTS = (
    True,
    False,
    None,
    "gaussian",
)  # allowed `init_lora_weights`; others subtract the initial factors from the base


class AdaptedModel(LanguageModel):
    """A base with an adapter's layers added. Copies for sampling have the adapter merged."""

    def __init__(self, base: LanguageModel, name: str, directory: Path) -> None:
        vars(self).update(vars(base.inference_copy()))
        self.name, self._plain = name, share_module(self.module)
        self.adapter = _attached(self.module, name, directory, base.device)
        self.module.eval().requires_grad_(False)

    def inference_copy(self, dtype: torch.dtype | None = None, *, own: bool = False) -> LanguageModel:
        clone = super().inference_copy(dtype, own=own)
        merged = lora.merged_weights(self.module)
        for name, parameter in clone.module.named_parameters():
            if name in merged:
                parameter.data = merged[name].to(parameter.dtype)
        return clone


def check_adapter(name: str, directory: Path, empty: Any) -> None:
    """Reject an adapter that is incomplete or made for another model. `empty`: this model on the meta device."""
    settings = read_json(directory / CONFIG)
    _refuse_settings(name, settings)
    head = next(key for key, child in empty.named_modules() if child is empty.get_output_embeddings())
    with reading_model(name, "its adapter", directory):
        stored = read_shapes(directory / WEIGHTS_FILE)
        _refuse_tensors(name, stored, head)
        refuse_difference(name, settings, wanted_shapes(name, directory, empty), stored)


def _refuse_settings(name: str, settings: dict[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise ModelError(
            f"adapter {name!r} is a {settings.get('peft_type')}, and only LoRA can share its base. Merge it."
        )
    other = next((key for key in OTHER_WAYS if settings.get(key)), None)
    if other is None and settings.get("bias", "none") != "none":
        other = "bias"
    if other is None and settings.get("init_lora_weights") not in STARTS:
        other = "init_lora_weights"
    if other is not None:
        raise ModelError(
            f"adapter {name!r} has {other} {settings[other]!r}, which more than adds two factors to a base that is shared. "
            "Merge it into its base and name that as a frozen teacher."
        )


def _refuse_tensors(name: str, stored: dict[str, tuple[int, ...]], head: str) -> None:
    """Reject adapters on the head or on embeddings, which may share its matrix: exact divergences read the head's matrix directly."""
    for key in stored:
        if "lora_embedding" in key or f".{head}." in key or "lora_" not in key:
            what = "embeddings" if "embed" in key else "output head" if f".{head}." in key else "whole tensors"
            raise ModelError(
                f"adapter {name!r} has {key}: it changes the {what}, which adapters over a shared base cannot. "
                "Merge it into its base and name that as a frozen teacher."
            )


def _attached(module: Any, name: str, directory: Path, device: torch.device) -> Any:
    lora.require_peft()
    from peft import PeftModel

    with reading_model(name, "its adapter", directory):
        return PeftModel.from_pretrained(module, str(directory), is_trainable=False, torch_device=str(device))
