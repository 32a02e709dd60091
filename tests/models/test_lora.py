"""LoRA: one policy in the trainer, the sampler and the saved model, whatever is adapted; and what is rejected."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from opd.common.errors import ModelError
from opd.models import lora_parameter_count
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel
from opd.models.lora import GradientDropout, adapted_layers, adapter_size
from opd.recipe import Lora
from tests.support.helpers import tiny_model, tiny_module, tiny_tokenizer

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"decoder_sparse_step": 2, "mlp_only_layers": [0]},  # a dense layer, then a mixture
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
}  # fmt: skip
IDS, LAYOUT = torch.arange(2, 22), Packed.of([12, 8])


def move(model: LanguageModel) -> None:
    """As if trained: every adapter away from zero."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def logits(model: LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return model.project(model.hidden(IDS, LAYOUT)).logits()


def published(model: LanguageModel) -> LanguageModel:
    copy, tensors = model.inference_copy(), model.weights(1).tensors
    assert dict(copy.module.named_parameters()).keys() == tensors.keys()
    with torch.no_grad():
        for name, parameter in copy.module.named_parameters():
            parameter.copy_(tensors[name])
    return copy


def check_one_policy(model: LanguageModel, directory: Path) -> None:
    base = logits(model)
    move(model)
    trained = logits(model)
    assert (trained - base).abs().max() > 0.05
    torch.testing.assert_close(logits(published(model)), trained, rtol=1e-4, atol=1e-4)
    model.save(directory)
    saved = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with torch.no_grad():
        stock = [saved(input_ids=part[None]).logits[0, :, : model.size] for part in IDS.split([12, 8])]
    torch.testing.assert_close(torch.cat(stock), trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", EXPERTS)
def test_mixtures_of_experts_train_as_one_policy_with_the_default_targets(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_model(kind, **EXPERTS[kind])
    model.add_lora(Lora(rank=2))
    adapted = {name for name, _ in adapted_layers(model.module)}
    plain = dict(model._plain.named_parameters())
    linear = {f"{name}.weight" for name, child in model._plain.named_modules() if isinstance(child, torch.nn.Linear)}
    experts = {name for name, parameter in plain.items() if parameter.ndim == 3}
    assert experts
    assert adapted == (linear - {"lm_head.weight"}) | experts
    check_one_policy(model, tmp_path / "m")
    trained = sum(parameter.numel() for parameter in model.trainable().values())
    assert lora_parameter_count(str(tmp_path / "m"), Lora(rank=2)) == trained  # what a dry run shows
    again = tiny_model(kind, **EXPERTS[kind])
    again.add_lora(Lora(rank=2))
    again.restore(tmp_path / "m")
    for name, parameter in again.trainable().items():
        assert torch.equal(parameter, model.trainable()[name]), name
    model.project(model.hidden(IDS, LAYOUT)).logits().log_softmax(-1)[:, 5].sum().backward()
    assert sum(parameter.grad is not None for parameter in model.trainable().values()) == len(model.trainable())


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("targets", ["all-linear", "embedding"])
def test_adapters_reach_the_sampler_and_the_saved_model(kind: str, targets: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_model(kind, tie_word_embeddings=False)
    embedding = {"gpt2": ["wte", "c_attn"]}.get(kind, ["embed_tokens", "q_proj"])
    model.add_lora(Lora(rank=4, targets=targets if targets == "all-linear" else embedding))
    check_one_policy(model, tmp_path / "m")
    trained = sum(parameter.numel() for parameter in model.trainable().values())
    spec = Lora(rank=4, targets=targets if targets == "all-linear" else embedding)
    assert lora_parameter_count(str(tmp_path / "m"), spec) == trained
    whole = (tmp_path / "m" / "adapter" / "adapter_model.safetensors").stat().st_size
    assert whole < 4 * trained + 8192  # no base weights


@pytest.mark.parametrize(
    ("kind", "targets", "words"),
    [
        ("llama", ["q_proj", "lm_head"], "output head"),
        ("llama", ".*head", "output head"),
        ("llama", "lm_.*|.*q_proj", "output head"),
        ("llama_tied", ["embed_tokens"], "also the output head"),
        ("llama_tied", "model\\.embed.*", "also the output head"),
        ("llama", ["no_such"], "no_such"),
        ("llama", ["q_proj", "v_porj"], "v_porj"),
        ("llama", "q_proj", "regular expression"),
        ("llama", "(", "not a regular expression"),
        ("llama", [], "nothing"),
        ("llama", ["mlp"], "LlamaMLP"),
        ("llama", ["input_layernorm"], "RMSNorm"),
        ("qwen3_moe", ["gate"], "TopKRouter"),
    ],
)
def test_targets_that_cannot_be_adapted_are_rejected(kind: str, targets: Any, words: str) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ModelError, match=words):
        tiny_model(kind).add_lora(Lora(targets=targets))
    with torch.device("meta"):
        module = tiny_module(kind)  # as a dry run builds it
    with pytest.raises(ModelError, match=words):
        adapter_size(module, module.get_output_embeddings(), Lora(targets=targets))


def test_a_regular_expression_adapts_what_it_names() -> None:
    pytest.importorskip("peft")
    model = tiny_model("qwen3_moe")
    model.add_lora(Lora(rank=2, targets=r".*layers\.1\.(self_attn\.[qv]_proj|mlp\.experts\.down_proj)"))
    assert sorted(name for name, _ in adapted_layers(model.module)) == [
        "model.layers.1.mlp.experts.down_proj", "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight",
    ]  # fmt: skip


def test_dropout_is_on_in_passes_with_gradients_and_nowhere_else() -> None:
    pytest.importorskip("peft")
    model = tiny_model("llama", attention_dropout=0.5)
    model.add_lora(Lora(rank=4, dropout=0.5))
    move(model)
    assert torch.equal(logits(model), logits(model))
    torch.testing.assert_close(logits(published(model)), logits(model), rtol=1e-4, atol=1e-4)

    def gradients(seed: int, checkpointing: bool = False) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        if checkpointing:
            model.checkpoint_layers()
        model.module.zero_grad()
        model.project(model.hidden(IDS, LAYOUT)).logits().log_softmax(-1)[:, 5].sum().backward()
        return {name: p.grad.clone() for name, p in model.trainable().items() if p.grad is not None}

    first, same, other, again = gradients(0), gradients(0), gradients(1), gradients(0, checkpointing=True)
    for name, gradient in first.items():
        assert torch.equal(gradient, same[name])
        torch.testing.assert_close(gradient, again[name])  # what is computed again is dropped again
    assert any(not torch.equal(gradient, other[name]) for name, gradient in first.items())
    with pytest.raises(ModelError, match=r"lora\.dropout"):
        tiny_model("qwen3_moe").add_lora(Lora(dropout=0.1))


def test_dropout_without_gradients_is_the_identity() -> None:
    values = torch.ones(100)
    with torch.no_grad():
        assert torch.equal(GradientDropout(0.5)(values), values)
    assert not torch.equal(GradientDropout(0.5).eval()(values), values)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_checkpointed_layers_run_twice_and_keep_less(kind: str) -> None:
    """Counted on the real module: recomputed calls, bytes kept for the backward pass, equal gradients, no dropout."""
    found = []
    for checkpointing in (False, True):
        module = tiny_module(kind, **({"resid_pdrop": 0.5, "attn_pdrop": 0.5} if kind == "gpt2" else {}))
        model = LanguageModel(module, tiny_tokenizer(), kind)
        if checkpointing:
            model.checkpoint_layers()
        calls, kept = [0], [0]
        layer = module.model.layers[1].mlp if kind == "llama" else module.transformer.h[1].mlp

        def count(*_: Any, calls: list[int] = calls) -> None:
            calls[0] += 1

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept[0] += tensor.nbytes
            return tensor

        layer.register_forward_pre_hook(count)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model.hidden(IDS, LAYOUT)
        hidden.square().sum().backward()
        with torch.no_grad():
            model.hidden(IDS, LAYOUT)
        gradients = {name: p.grad for name, p in model.trainable().items() if p.grad is not None}
        found.append((calls[0], kept[0], hidden.detach(), gradients))
        sampler = model.inference_copy().module
        assert not any("forward" in vars(child) for child in sampler.modules())
        assert model.snapshot().hidden(IDS, LAYOUT).shape == hidden.shape
    (once, whole, hidden, gradients), (twice, less, same, again) = found
    assert (once, twice) == (2, 3)
    assert less < whole / 2
    torch.testing.assert_close(hidden, same)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, again[name])


def test_a_missing_peft_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    with pytest.raises(ModelError, match=r"pip install 'opd\[lora\]'"):
        tiny_model("llama").add_lora(Lora())
