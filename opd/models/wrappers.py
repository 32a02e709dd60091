"""Checkpoints that wrap a text model together with others, for images or audio. They are recognised by their config and rejected."""

from __future__ import annotations

from typing import Any

from opd.errors import ModelError

TEXT = "text_config"


def reject_wrapper(name: str, config: Any) -> None:
    """Say what the checkpoint is and how to get a text model. Nothing is read but its config."""
    text = inner_text_config(config)
    if text is None:
        return
    what = config.architectures[0] if config.architectures else config.model_type
    parts = [key.removesuffix("_config").replace("_", " ") for key in config.sub_configs if key != TEXT]
    others = f" with further parts ({', '.join(parts)})" if parts else ""
    wanted = text_class(config)
    instead = (
        f"Write its text model with `opd models export {name} DIRECTORY` and name that directory, or choose a text-only "
        f"checkpoint, whose class in config.json is {wanted}."
        if wanted
        else "Choose a text-only checkpoint, whose class in config.json ends in ForCausalLM."
    )
    raise ModelError(
        f"model {name!r} is a {what}: a wrapper around the text model {text.model_type!r}{others}. "
        f"opd trains text models only and does not take wrappers yet. {instead}"
    )


def inner_text_config(config: Any) -> Any | None:
    """The config of the text model inside; None: the config is a text model's own."""
    text = config.get_text_config(decoder=True)
    if text.model_type != config.model_type:
        return text
    if TEXT not in config.sub_configs:
        return None
    return getattr(config, TEXT) or config


def text_class(config: Any) -> str:
    """The class that the text model has by itself; nothing where transformers has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    text = inner_text_config(config)
    if text is None or text is config or config.is_encoder_decoder or text.is_encoder_decoder:
        return ""
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):  # PaliGemma's sees later tokens
        return ""
    found = CAUSAL.get(text.model_type, "")
    return found if isinstance(found, str) else found[0]
