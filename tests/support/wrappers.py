"""Wrapper checkpoints at tiny size: a text model together with a vision or audio model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from tests.support.families import MOE, SHAPE, VOCABULARY, WINDOW
from tests.support.helpers import tiny_tokenizer

TEXT = {**SHAPE, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16, "patch_size": 8,
    "head_dim": 8,
}  # fmt: skip
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
AUDIO = {
    "model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "d_model": 32, "max_source_positions": 16,
}  # fmt: skip

# model type -> settings, and the class of its text model where it can stand alone
WRAPPERS: dict[str, tuple[dict[str, Any], str]] = {
    "gemma3": ({"text_config": {**TEXT, **WINDOW, "query_pre_attn_scalar": 8}, "vision_config": VISION, "mm_tokens_per_image": 4, "tie_word_embeddings": True}, "Gemma3ForCausalLM"),
    "gemma4": ({"text_config": {**TEXT, **WINDOW, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 8}, "vision_config": {**VISION, "num_key_value_heads": 4}, "audio_config": None, "tie_word_embeddings": True}, "Gemma4ForCausalLM"),
    "llava": ({"text_config": {**TEXT, "model_type": "llama"}, "vision_config": {**VISION, "model_type": "clip_vision_model"}}, "LlamaForCausalLM"),
    "mistral3": ({"text_config": {**TEXT, "model_type": "mistral"}, "vision_config": {**VISION, "model_type": "pixtral"}}, "MistralForCausalLM"),
    "paligemma": ({"text_config": {**TEXT, "model_type": "gemma"}, "vision_config": {**SIGLIP, "projection_dim": 32}, "projection_dim": 32, "hidden_size": 32}, ""),
    "internvl": ({"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [8, 8]}}, "Qwen2ForCausalLM"),
    "idefics3": ({"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION}, "LlamaForCausalLM"),
    "qwen2_5_vl": ({"text_config": {**TEXT, **MROPE}, "vision_config": QWEN_VISION}, ""),
    "qwen3_vl": ({"text_config": {**TEXT, **MROPE}, "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}}, ""),
    "qwen3_5": ({"text_config": {**TEXT, **DELTA}, "vision_config": QWEN_VISION}, "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ({"text_config": {**TEXT, **DELTA, **MOE, "shared_expert_intermediate_size": 16}, "vision_config": QWEN_VISION}, "Qwen3_5MoeForCausalLM"),
    "qwen2_audio": ({"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": AUDIO}, "Qwen2ForCausalLM"),
}  # fmt: skip


def save_wrapper(model_type: str, directory: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**WRAPPERS[model_type][0])
    module = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config).float().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    module.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return module
