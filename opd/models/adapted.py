"""An adapter over a base model that others use as well: layers of its own, the base's tensors shared, nothing merged.

So specialists over one base cost their adapters each, and none has to be switched on: there is no moment at which one model could
answer with another's adapter, and the base is never written to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from opd.errors import ModelError
from opd.models import lora
from opd.models.adapters import CONFIG, WEIGHTS_FILE
from opd.models.directory import read_json, reading_model
from opd.models.language_model import LanguageModel, share_module
from opd.text import first_line

# What adds something to the weights that is not a product of two factors, or changes the base while it is loaded.
OTHER_WAYS = ("use_dora", "modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias", "use_qalora")
STARTS = (True, False, None, "gaussian")  # of `init_lora_weights`; others take the first factors out of the base


class AdaptedModel(LanguageModel):
    """A base with an adapter's layers in it. Copies for sampling have the adapter merged."""

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
    """Refuse an adapter that is not one of this model (a module on the meta device, without weights) or not whole."""
    from peft import LoraConfig, PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    settings = read_json(directory / CONFIG)
    _refuse_settings(name, settings)
    head = next(key for key, child in empty.named_modules() if child is empty.get_output_embeddings())
    with reading_model(name, "its adapter", directory):
        with safe_open(directory / WEIGHTS_FILE, "pt") as file:
            stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        _refuse_tensors(name, stored, head)
        try:
            model = PeftModel(empty, LoraConfig.from_pretrained(str(directory), inference_mode=True))
        except ValueError as error:
            raise ModelError(
                f"adapter {name!r} does not fit its base {settings.get('base_model_name_or_path')!r}: {first_line(error)} "
                "Correct base_model_name_or_path in its config."
            ) from None
        found = get_peft_model_state_dict(model, save_embedding_layers=False)
        _refuse_difference(name, settings, {key: tuple(value.shape) for key, value in found.items()}, stored)


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
    """Embeddings may be the head's matrix as well, and exact divergences read that itself."""
    for key in stored:
        if "lora_embedding" in key or f".{head}." in key or "lora_" not in key:
            what = "embeddings" if "embed" in key else "output head" if f".{head}." in key else "whole tensors"
            raise ModelError(
                f"adapter {name!r} has {key}: it changes the {what}, which adapters over a shared base cannot. "
                "Merge it into its base and name that as a frozen teacher."
            )


def _refuse_difference(
    name: str, settings: dict[str, Any], wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]
) -> None:
    base = settings.get("base_model_name_or_path")
    missing, extra = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing:
        raise ModelError(
            f"adapter {name!r} lacks {missing[0]} and {len(missing) - 1} more tensors that its config and its base {base!r} ask "
            "for. Copy it again, or correct its config."
        )
    if extra:
        raise ModelError(
            f"adapter {name!r} has {extra[0]}, for which its base {base!r} has no place ({len(extra)} such tensors): it was made "
            "for another model. Correct base_model_name_or_path in its config."
        )
    for key, shape in wanted.items():
        if stored[key] != shape:
            rank = stored[key][0 if "lora_A" in key else -1] != shape[0 if "lora_A" in key else -1]
            why = (
                "its config names another rank (r, rank_pattern)"
                if rank
                else f"it was made for another base than {base!r}"
            )
            raise ModelError(
                f"adapter {name!r}: {key} is {stored[key]} and should be {shape}: {why}. Correct its config."
            )


def _attached(module: Any, name: str, directory: Path, device: torch.device) -> Any:
    lora.require_peft()
    from peft import PeftModel

    with reading_model(name, "its adapter", directory):
        return PeftModel.from_pretrained(module, str(directory), is_trainable=False, torch_device=str(device))
