"""Model families at tiny size: what each needs in its config, and how it is expected to run.

`python -m tests.support.families` writes the table in docs/models.md by building, probing and sampling from every one of them.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from opd.common.errors import ModelError
from opd.engines.builtin import PlainSampler, unfit_for_slots
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.recipe import Lora
from tests.support.helpers import CHARACTERS, EOS, PAD, tiny_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- families: written by `python -m tests.support.families` -->", "<!-- end of families -->"
HEAD = ("family", "class", "sequences", "sampler", "LoRA", "why not packed, or rejected")

VOCABULARY = len(CHARACTERS) + 4
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 256, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": EOS,
    "pad_token_id": PAD,
}  # fmt: skip
OLD = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48, "vocab_size": VOCABULARY, "bos_token_id": EOS,
    "eos_token_id": EOS,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4,
}  # fmt: skip
DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16, "mamba_expand": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """`settings` go on top of `base`; `rejected` is a piece of the sentence where the family cannot be used."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: SHAPE)
    rejected: str = ""
    generates_with_cache: bool = True  # else transformers' own `generate` fails or errs with its cache

    def build(self, seed: int = 0) -> Any:
        """A stock module with random weights, large enough that a mistake shows in the logits."""
        torch.manual_seed(seed)
        settings = {key: value for key, value in {**self.base, **self.settings}.items() if value is not LEFT_OUT}
        config = AutoConfig.for_model(self.model_type, **settings)
        module = AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                randomise(name, parameter)
            for name, buffer in module.named_buffers():
                if name.endswith(("bias", "biases")):
                    randomise(name, buffer)
        module.generation_config.eos_token_id = EOS
        module.generation_config.pad_token_id = PAD
        return module


def randomise(name: str, tensor: Tensor) -> None:
    """As training leaves it: no tensor stays at what it was initialised with.

    Recurrences get decays and step sizes over the whole range that trained models have; some states forget within a token,
    others hardly at all.
    """
    if not tensor.is_floating_point():
        return
    last = name.rpartition(".")[2]
    if last == "A_log":  # a decay of exp(-A dt)
        tensor.add_(torch.empty_like(tensor).uniform_(-0.5, 1.0))
    elif last == "dt_bias" or name.endswith("dt_proj.bias"):  # before softplus: steps of 0.0001 to 1
        step = torch.empty_like(tensor).uniform_(math.log(1e-4), 0.0).exp()
        tensor.copy_(step.expm1().log())
    elif tensor.ndim >= 2 and "A_log" not in name:
        tensor.normal_(0, tensor.shape[-1] ** -0.5)
    else:  # biases, the weights of norms, gates, skips: around what they begin with
        tensor.add_(torch.empty_like(tensor).normal_(0, 0.2))


LEFT_OUT = object()

FAMILIES = (
    Family("Llama", "llama"),
    Family("Llama 4", "llama4_text", {**LOCAL, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "num_experts_per_tok": 1, "no_rope_layers": [1, 0]}),
    Family("Qwen2", "qwen2"),
    Family("Qwen2-MoE", "qwen2_moe", {**MOE, "shared_expert_intermediate_size": 16}),
    Family("Qwen3", "qwen3", {"tie_word_embeddings": True}),
    Family("Qwen3-MoE", "qwen3_moe", {**MOE, "decoder_sparse_step": 1}),
    Family("Qwen3-Next", "qwen3_next", {**MOE, **DELTA, "shared_expert_intermediate_size": 16}),
    Family("Qwen3.5", "qwen3_5_text", DELTA),
    Family("Qwen3.5-MoE", "qwen3_5_moe_text", {**MOE, **DELTA, "shared_expert_intermediate_size": 16}),
    Family("Gemma", "gemma"),
    Family("Gemma 2", "gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}),
    Family("Gemma 3", "gemma3_text", {**WINDOW, "query_pre_attn_scalar": 8}),
    Family("Gemma 3n", "gemma3n_text", {**WINDOW, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0]}),
    Family("Gemma 4", "gemma4_text", {**WINDOW, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 8}),
    Family("VaultGemma", "vaultgemma", {**WINDOW, "query_pre_attn_scalar": 8}),
    Family("Mistral", "mistral", {"sliding_window": 8}),
    Family("Ministral", "ministral", {"sliding_window": 8}),
    Family("Ministral 3", "ministral3"),
    Family("Mixtral", "mixtral", LOCAL),
    Family("Phi", "phi"),
    Family("Phi-3", "phi3"),
    Family("Phi-3 longrope", "phi3", {"original_max_position_embeddings": 16, "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}}, generates_with_cache=False),
    Family("Phi-MoE", "phimoe", LOCAL),
    Family("OLMo", "olmo"),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3", WINDOW),
    Family("OLMo hybrid", "olmo_hybrid", {**DELTA, "num_key_value_heads": 4}),
    Family("OLMoE", "olmoe", {**MOE, "num_experts": 4}),
    Family("FlexOLMo", "flex_olmo", {**MOE, "num_experts": 4}),
    Family("GPT-2", "gpt2", base=OLD),
    Family("GPT-J", "gptj", {"rotary_dim": 4}, base=OLD),
    Family("CodeGen", "codegen", {"rotary_dim": 4}, base=OLD),
    Family("GPT-Neo", "gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8, "num_hidden_layers": LEFT_OUT, "num_attention_heads": LEFT_OUT}),
    Family("GPT-NeoX", "gpt_neox"),
    Family("GPT-BigCode", "gpt_bigcode", base=OLD),
    Family("GPT-OSS", "gpt_oss", {**LOCAL, **WINDOW}),
    Family("OpenAI GPT", "openai-gpt", base=OLD),
    Family("CTRL", "ctrl", {"dff": 48}, base=OLD),
    Family("Starcoder 2", "starcoder2", {"sliding_window": 8}),
    Family("Cohere", "cohere"),
    Family("Cohere 2", "cohere2", WINDOW),
    Family("DeepSeek-V2", "deepseek_v2", {**ROUTED, **LATENT, "head_dim": 8}),
    Family("DeepSeek-V3", "deepseek_v3", {**ROUTED, **LATENT, "head_dim": LEFT_OUT}),
    Family("DeepSeek-V3.2", "deepseek_v32", {**ROUTED, **LATENT, "head_dim": 8, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 16}),
    Family("GLM-MoE-DSA", "glm_moe_dsa", {**ROUTED, **LATENT, "head_dim": 8, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 16}),
    Family("Kimi Linear", "kimi_linear", {**ROUTED, **LATENT, "num_local_experts": 4, "linear_head_dim": 8, "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"], "head_dim": LEFT_OUT}),
    Family("LongCat-Flash", "longcat_flash", {**LATENT, "num_layers": 2, "ffn_hidden_size": 48, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 16, "num_hidden_layers": LEFT_OUT}),
    Family("GLM", "glm"),
    Family("GLM-4", "glm4"),
    Family("GLM-4-MoE", "glm4_moe", ROUTED),
    Family("GLM-4-MoE lite", "glm4_moe_lite", {**ROUTED, **LATENT, "head_dim": LEFT_OUT}),
    Family("Granite", "granite", {"logits_scaling": 2.0}),
    Family("Granite-MoE", "granitemoe", LOCAL),
    Family("Granite-MoE shared", "granitemoeshared", {**LOCAL, "shared_intermediate_size": 16}),
    Family("Granite-4 hybrid", "granitemoehybrid", {**LOCAL, **MAMBA2, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"]}),
    Family("Bamba", "bamba", {**MAMBA2, "attn_layer_indices": [1]}),
    Family("Jamba", "jamba", {**MOE, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}),
    Family("Nemotron", "nemotron"),
    Family("Nemotron-H", "nemotron_h", {"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 16, "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": LEFT_OUT}),
    Family("Falcon", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_key_value_heads": LEFT_OUT, "head_dim": LEFT_OUT}),
    Family("Falcon alibi", "falcon", {"alibi": True, "num_key_value_heads": LEFT_OUT, "head_dim": LEFT_OUT}),
    Family("Falcon-H1", "falcon_h1", {**MAMBA2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    Family("Falcon Mamba", "falcon_mamba", {"state_size": 8}),
    Family("Mamba", "mamba", {"state_size": 8}),
    Family("Mamba 2", "mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 16}),
    Family("RWKV", "rwkv", {"attention_hidden_size": 32, "context_length": 256}),
    Family("xLSTM", "xlstm", {"num_heads": 2, "chunk_size": 16, "hidden_size": 64, "qk_dim_factor": 1.0}, generates_with_cache=False),
    Family("Zamba", "zamba", {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4, "mamba_d_state": 8, "num_key_value_heads": 4, "head_dim": LEFT_OUT, "attention_head_dim": 16}),
    Family("Zamba 2", "zamba2", {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4, "chunk_size": 16, "num_key_value_heads": 4, "head_dim": LEFT_OUT, "mamba_headdim": 16, "adapter_rank": 4}),
    Family("Zaya", "zaya", {**MOE, "num_experts_per_tok": 1, "router_hidden_size": 16}),
    Family("LFM2", "lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    Family("LFM2-MoE", "lfm2_moe", {**MOE, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    Family("MiniMax", "minimax", {**LOCAL, "layer_types": ["linear_attention", "full_attention"], "block_size": 8}),
    Family("MiniMax-M2", "minimax_m2", {**LOCAL, "rotary_dim": 4}),
    Family("MiniCPM3", "minicpm3", {**LATENT, "dim_model_base": 16, "head_dim": LEFT_OUT}),
    Family("MiMo-V2-Flash", "mimo_v2_flash", {**ROUTED, **WINDOW, "v_head_dim": 8}),
    Family("StableLM", "stablelm"),
    Family("SmolLM3", "smollm3"),
    Family("Seed-OSS", "seed_oss"),
    Family("ERNIE 4.5", "ernie4_5"),
    Family("ERNIE 4.5 MoE", "ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1}),
    Family("EXAONE 4", "exaone4", WINDOW),
    Family("Hunyuan", "hunyuan_v1_dense"),
    Family("Hunyuan-MoE", "hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    Family("Apertus", "apertus"),
    Family("Arcee", "arcee"),
    Family("AFMoE", "afmoe", {**MOE, **WINDOW, "num_dense_layers": 1}),
    Family("BitNet", "bitnet"),
    Family("BioGPT", "biogpt"),
    Family("Bloom", "bloom"),
    Family("DiffLlama", "diffllama"),
    Family("Doge", "doge"),
    Family("dots.llm1", "dots1", ROUTED),
    Family("Helium", "helium"),
    Family("JetMoE", "jetmoe", {**LOCAL, "kv_channels": 8}),
    Family("MPT", "mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "vocab_size": VOCABULARY, "eos_token_id": EOS}, base={}),
    Family("NanoChat", "nanochat"),
    Family("OPT", "opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("Persimmon", "persimmon"),
    Family("XGLM", "xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    Family("BERT", "bert", rejected="head"),
    Family("RoBERTa", "roberta", rejected="head"),
    Family("ELECTRA", "electra", rejected="head"),
    Family("XLM", "xlm", {"emb_dim": 32, "n_heads": 4, "n_layers": 2}, rejected="causal"),
    Family("RecurrentGemma", "recurrent_gemma", {"num_hidden_layers": 3, "attention_window_size": 8}, rejected="inside its layers"),
    Family("CPM-Ant", "cpmant", rejected="causal"),
)  # fmt: skip


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def load_family(family: Family, directory: Path) -> LanguageModel:
    """Saved by its stock class, loaded as a recipe would."""
    family.build().save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return load_model(str(directory))


def row(family: Family, found: LanguageModel | ModelError) -> list[str]:
    """The family's line in docs/models.md."""
    if isinstance(found, ModelError):
        reason = (
            str(found)
            .partition(": ")[2]
            .removesuffix(" Use another model.")
            .removesuffix(".")
            .partition(" (they differ")[0]
        )
        return [family.name, f"`{family.model_type}`", "rejected", "–", "–", reason]
    limit = found.route.limit or 64
    why = unfit_for_slots(found, limit)
    sequences = {"packed": "packed", "padded": "padded", "alone": "one at a time"}[found.route.name]
    if found.route.limit is not None:
        sequences += f", one at a time beyond {LIMIT}"
    sampler = "one request at a time" if why else "slots"
    if why and not PlainSampler(found.inference_copy(), limit, merge_stop=(EOS,)).cached:
        sampler += ", without a cache"
    if found.route.limit is not None and not why:
        sampler += f", one request at a time beyond {LIMIT}"
    return [family.name, f"`{family.model_type}`", sequences, sampler, _lora(found), why]


LIMIT = "the original context"


def _lora(model: LanguageModel) -> str:
    try:
        model.add_lora(Lora(rank=2))
    except ModelError:
        return "rejected"
    return "yes"


def page_rows() -> list[list[str]]:
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def write_page() -> None:
    rows = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            try:
                rows.append(row(family, load_family(family, Path(directory))))
            except ModelError as error:
                rows.append(row(family, error))
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, *rows)]
    lines.insert(1, "|" + "---|" * len(HEAD))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + "\n".join([BEGIN, *lines, END]) + after, encoding="utf-8")


if __name__ == "__main__":
    write_page()
