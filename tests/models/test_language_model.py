"""The model wrapper: packed hidden states and the head, LoRA, loading, saving, and what is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from opd.common.errors import ModelError, TokenizerMismatch
from opd.models import load_model, locate
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel
from opd.models.tokenizers import fingerprint, require_same
from opd.recipe import Lora
from tests.support.helpers import KINDS, tiny_model, tiny_module, tiny_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_packed_hidden_states_equal_one_sequence_at_a_time(kind: str) -> None:
    """Block-diagonal attention with reset positions, on stock classes, sliding windows and soft caps included."""
    stock = tiny_module(kind)
    model = LanguageModel(tiny_module(kind), tiny_tokenizer(), kind)
    generator = torch.Generator().manual_seed(0)
    lengths = [13, 1, 30, 7]
    sequences = [torch.randint(2, 70, (length,), generator=generator) for length in lengths]
    with torch.no_grad():
        packed = model.project(model.hidden(torch.cat(sequences), Packed.of(lengths))).logits()
        for sequence, logits in zip(sequences, packed.split(lengths), strict=True):
            expected = stock(input_ids=sequence[None], use_cache=False).logits[0, :, : model.size]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_padding_ids_are_outside_the_vocabulary() -> None:
    model = tiny_model()
    assert model.size == len(model.tokenizer) < model.head.weight.shape[0]
    assert model.project(torch.zeros(1, 32)).logits().shape == (1, model.size)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gemma2"])
def test_gradients_reach_every_parameter_and_survive_checkpointing(kind: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(kind)
        model.module.requires_grad_(True)
        if checkpointing:
            model.checkpoint_layers()
        ids = torch.arange(2, 22)
        model.project(model.hidden(ids, Packed.of([12, 8]))).logits().log_softmax(-1)[:, 5].sum().backward()
        gradients.append(
            {
                name: parameter.grad.clone()
                for name, parameter in model.trainable().items()
                if parameter.grad is not None
            }
        )
    assert gradients[0].keys() == gradients[1].keys() == model.trainable().keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


def test_lora_trains_only_adapters_and_publishes_merged_weights() -> None:
    pytest.importorskip("peft")
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.weights(0).tensors.items()}
    model.add_lora(Lora(rank=4))
    assert all("lora_" in name for name in model.trainable())
    for name, parameter in model.trainable().items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    merged = model.weights(1).tensors
    assert merged.keys() == before.keys()
    assert any(not torch.equal(merged[name], before[name]) for name in merged)
    copy = model.inference_copy()
    assert dict(copy.module.named_parameters()).keys() == merged.keys()
    with torch.no_grad():
        for name, parameter in copy.module.named_parameters():
            if parameter.data_ptr() != merged[name].data_ptr():
                parameter.copy_(merged[name])
        ids = torch.arange(2, 20)
        adapted, plain = (m.project(m.hidden(ids, Packed.of([18]))).logits() for m in (model, copy))
    torch.testing.assert_close(adapted, plain, rtol=1e-4, atol=1e-4)
    for name, tensor in model._plain.named_parameters():  # the base is untouched by publishing
        torch.testing.assert_close(tensor.detach(), before[name])


def test_an_inference_copy_shares_weights_and_follows_updates() -> None:
    model = tiny_model()
    copy = model.inference_copy()
    assert copy.head.weight.data_ptr() == model.head.weight.data_ptr()
    with torch.no_grad():
        model.head.weight.add_(1.0)
    torch.testing.assert_close(copy.head.weight, model.head.weight, check_device=False)
    assert model.inference_copy(torch.bfloat16).dtype == torch.bfloat16


def test_saved_models_load_in_transformers_and_carry_all_stop_ids(tmp_path: Path) -> None:
    model = tiny_model("llama_tied")
    model.save(tmp_path / "m", stop=(7,))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert again.generation_config.eos_token_id == [1, 7]
    assert fingerprint(AutoTokenizer.from_pretrained(tmp_path / "m")) == fingerprint(model.tokenizer)
    loaded = load_model(str(tmp_path / "m"))
    assert loaded.stop_ids == (1, 7)
    ids = torch.arange(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(loaded.hidden(ids, Packed.of([10])), model.hidden(ids, Packed.of([10])))


def test_lora_models_are_saved_merged_and_with_the_adapter(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_model("llama")
    model.add_lora(Lora(rank=2))
    for name, parameter in model.trainable().items():
        torch.nn.init.normal_(parameter, std=0.2) if "lora_B" in name else None
    model.save(tmp_path / "m")
    assert (tmp_path / "m" / "adapter" / "adapter_config.json").is_file()
    ids = torch.arange(2, 12)
    with torch.no_grad():
        expected = model.project(model.hidden(ids, Packed.of([10]))).logits()
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "m")(input_ids=ids[None]).logits[0, :, : model.size]
    torch.testing.assert_close(stock, expected, rtol=1e-4, atol=1e-4)


def test_models_that_cannot_be_used_are_rejected(tmp_path: Path) -> None:
    small = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForMaskedLM(BertConfig(**small)).save_pretrained(tmp_path / "bert")
    T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    ).save_pretrained(tmp_path / "t5")
    for name in ("bert", "t5"):
        with pytest.raises(ModelError, match="not a causal language model"):
            load_model(str(tmp_path / name))
    (tmp_path / "empty").mkdir()
    (tmp_path / "run" / "checkpoints" / "latest").mkdir(parents=True)
    for name, words in (
        (str(tmp_path / "run"), "It is a run: its model is '.*/run/checkpoints/latest'"),
        (str(tmp_path / "empty"), "no config.json"), (str(tmp_path / "nowhere"), "no such directory"), ("tiny/nothing", "no such built-in"),
        (str(tmp_path / "x.gguf"), "no such file"), ("nobody/no-such-model", "hub id|the hub cannot be reached"),
    ):  # fmt: skip
        with pytest.raises(ModelError, match=words):
            load_model(name)
    torch.save({}, tmp_path / "empty" / "pytorch_model.bin")  # pickled weights are never opened
    tiny_module("llama").config.save_pretrained(tmp_path / "empty")
    with pytest.raises(ModelError):
        load_model(str(tmp_path / "empty"))


def test_smol_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="make smol"):
        locate("smol")


def test_a_head_that_is_no_plain_projection_is_found_out() -> None:
    module = tiny_module("llama")
    original = module.lm_head.forward
    module.lm_head.forward = lambda hidden: original(hidden) * 2
    with pytest.raises(ModelError, match="not head"):
        LanguageModel(module, tiny_tokenizer(), "odd")


def test_tokenizer_identity_is_what_ids_mean() -> None:
    ours, same, theirs = tiny_tokenizer(), tiny_tokenizer(), tiny_tokenizer()
    require_same(ours, same, "a", "b")
    theirs.add_tokens(["<think>"])
    with pytest.raises(TokenizerMismatch, match="<think>"):
        require_same(ours, theirs, "a", "b")
