"""A tiny GGUF file, as llama.cpp would write it, with whatever tensors are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 127)), "Ġ", "ab"]
HIDDEN, INNER, HEADS, KEYS, LAYERS = 32, 64, 4, 2, 2
HALF = HIDDEN * KEYS // HEADS


def llama_tensors(seed: int = 0, layers: int = LAYERS) -> dict[str, np.ndarray[Any, Any]]:
    """Of a llama with tied embeddings."""
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(WORDS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(layers):
        block = {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (HALF, HIDDEN),
            "attn_v": (HALF, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }  # fmt: skip
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return {name: generator.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]], layers: int = LAYERS) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
