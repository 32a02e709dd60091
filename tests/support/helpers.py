"""Tiny random models of stock architectures, with a tokenizer of one character per id."""

from __future__ import annotations

import string
from typing import Any

import torch
from pydantic import TypeAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from opd.models.language_model import LanguageModel
from opd.objective.term import AnyTerm, objective_mistakes
from opd.recipe import Rollouts, Train
from opd.registry import StageView

PAD, EOS = 0, 1
CHARACTERS = string.digits + string.ascii_letters + " +-*/=.,:;!?()"  # 76; ids 2 to 77
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama_tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    "gemma2": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "mistral": {"sliding_window": 8},
    "phi3": {"pad_token_id": PAD},
    "olmo2": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48, "initializer_range": 0.3},
}
KINDS = tuple(SPECIAL)


def term(**settings: Any) -> Any:
    """A term of the objective as a recipe writes it: `term(form="direct", divergence="jsd", beta=0.3)`."""
    return TypeAdapter(AnyTerm).validate_python(settings)


def refusals(rollout: Rollouts, *terms: Any) -> str:
    """What reading a recipe with these terms complains about."""
    return "\n".join(objective_mistakes(StageView(rollout, Train(), terms)))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {character: index + 2 for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_module(kind: str = "llama", seed: int = 0, **config: Any) -> Any:
    """A stock `…ForCausalLM` with random weights. Its vocabulary has two padding ids more than the tokenizer."""
    model_type = kind.removesuffix("_tied")
    shape = {} if model_type == "gpt2" else SHAPE
    vocabulary = len(CHARACTERS) + 4
    settings = {
        **shape,
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **SPECIAL.get(kind, {}),
        **config,
    }
    torch.manual_seed(seed)
    attention = "eager" if kind == "gemma2" else "sdpa"
    return (
        AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings), attn_implementation=attention)
        .float()
        .eval()
    )


def tiny_model(kind: str = "llama", seed: int = 0, **config: Any) -> LanguageModel:
    return LanguageModel(tiny_module(kind, seed, **config), tiny_tokenizer(), f"test/{kind}")


TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def save_tiny(directory: Any, kind: str = "llama", seed: int = 0, **config: Any) -> str:
    """A random model as a directory that a recipe can name; its tokenizer has a chat template."""
    model = tiny_model(kind, seed, **config)
    model.tokenizer.chat_template = TEMPLATE
    model.save(directory)
    return str(directory)
