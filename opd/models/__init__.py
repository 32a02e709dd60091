"""Load a causal LM as hidden states plus a head. Heavy packages are imported only when a model is loaded."""

from opd.models.load import (
    load_config,
    load_model,
    load_tokenizer,
    locate,
    lora_parameter_count,
    parameter_count,
    parameter_shapes,
    tiny_models,
)

__all__ = [
    "load_config",
    "load_model",
    "load_tokenizer",
    "locate",
    "lora_parameter_count",
    "parameter_count",
    "parameter_shapes",
    "tiny_models",
]
