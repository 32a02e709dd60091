"""How a model runs is found out when it is loaded: packed, padded or alone; in slots or one request at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import opd
from opd.common.errors import ModelError
from opd.engines.builtin import Engine, PlainSampler, open_sampler
from opd.engines.calls import Partner
from opd.engines.kinds import BuiltInSampler
from opd.models import load_model
from opd.models.attention import NARROW, Packed, StockRoute, far, narrow_windows
from opd.models.language_model import LanguageModel
from opd.records import SampleRequest, Sampling
from opd.rollouts.rollouter import answers
from tests.support.families import family_named
from tests.support.helpers import EOS, TEMPLATE, save_tiny, tiny_model, tiny_module, tiny_tokenizer


def requests(temperature: float = 1.0, **sampling: Any) -> list[SampleRequest]:
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(2, 70, length).astype(np.int32) for length in (3, 9, 5)]
    how = Sampling(12, temperature, stop_ids=(EOS,), **sampling)
    return [SampleRequest(f"r{key}", ids, key, how) for key, ids in enumerate(prompts)]


def loaded(name: str) -> LanguageModel:
    return LanguageModel(family_named(name).build(), tiny_tokenizer(), name)


def test_a_short_convolution_does_not_leak_into_the_next_sequence() -> None:
    model, stock = loaded("LFM2"), family_named("LFM2").build()
    ids = torch.randint(2, 70, (20,), generator=torch.Generator().manual_seed(0))
    together = model.hidden(ids, Packed.of([12, 8]))
    with torch.no_grad():
        alone = stock.model(input_ids=ids[None, 12:], use_cache=False).last_hidden_state[0]
    assert isinstance(model.route, StockRoute)
    torch.testing.assert_close(together[12:].detach(), alone, rtol=1e-4, atol=1e-4)


def test_longrope_goes_alone_beyond_its_original_context_and_packed_within() -> None:
    model, stock = loaded("Phi-3 longrope"), family_named("Phi-3 longrope").build()
    for lengths in ([30, 7, 18], [12, 9]):  # the original context is 16
        sequences = [torch.arange(2, 2 + length) for length in lengths]
        with torch.no_grad():
            found = model.project(model.hidden(torch.cat(sequences), Packed.of(lengths))).logits().split(lengths)
            for ids, ours in zip(sequences, found, strict=True):
                expected = stock(input_ids=ids[None], use_cache=False).logits[0, :, : model.size]
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    spec = BuiltInSampler(slots=2)
    assert isinstance(open_sampler(model.inference_copy(), spec, 16, merge_stop=(EOS,)), Engine)
    assert isinstance(open_sampler(model.inference_copy(), spec, 17, merge_stop=(EOS,)), PlainSampler)


def test_half_precision_hides_no_leak() -> None:
    """RWKV's config names no kinds of layers: in bf16 too the probe alone has to find its state."""
    assert LanguageModel(family_named("RWKV").build().bfloat16(), tiny_tokenizer(), "rwkv").route.name == "padded"
    assert LanguageModel(tiny_module("llama").bfloat16(), tiny_tokenizer(), "llama").route.name == "packed"


def test_rounding_of_a_single_row_decides_nothing() -> None:
    drawn = torch.Generator().manual_seed(0)
    stock, noise = torch.randn(9, 50, generator=drawn), torch.randn(9, 50, generator=drawn)

    def differs(rows: int, by: float, dtype: torch.dtype = torch.bfloat16) -> bool:
        return far(stock + by * noise * (torch.arange(9) < rows)[:, None], stock, dtype)

    assert not differs(9, 0.05)
    assert not differs(4, 0.4)
    assert differs(5, 0.4)
    assert differs(1, 0.4, torch.float32)


def test_rectangles_hold_sequences_of_similar_length() -> None:
    assert StockRoute("")._groups((30, 4, 8, 16, 5)) == [[1, 4, 2], [3, 0]]
    assert StockRoute("", alone=True)._groups((3, 3)) == [[0], [1]]
    assert StockRoute("", limit=4)._groups((3, 5)) == [[0], [1]]


def test_a_window_that_attention_does_not_get_is_detected_whatever_its_length() -> None:
    module = tiny_module("gemma3_text", sliding_window=128)
    with narrow_windows(module):
        assert module.config.sliding_window == module.model.layers[0].self_attn.sliding_window == NARROW
    assert module.config.sliding_window == module.model.layers[0].self_attn.sliding_window == 128
    assert LanguageModel(module, tiny_tokenizer(), "told").route.name == "packed"
    module = tiny_module("gemma3_text", sliding_window=128)
    module.model.layers[0].self_attn.sliding_window = None
    model = LanguageModel(module, tiny_tokenizer(), "untold")
    assert (model.route.name, module.config._attn_implementation) == ("padded", "sdpa")


def test_the_plain_sampler_draws_what_the_engine_draws() -> None:
    model = tiny_model("llama")
    engine = Engine(model.inference_copy(), BuiltInSampler(slots=2), 32, merge_stop=(EOS,))
    plain = PlainSampler(model.inference_copy(), 32, merge_stop=(EOS,))
    for asked in (requests(), requests(0.0), requests(0.7, top_k=20, top_p=0.9), requests(stop_strings=("7", "a"))):
        for ours, theirs in zip(answers(plain, asked), answers(engine, asked), strict=True):
            assert ours.response_ids.tolist() == theirs.response_ids.tolist()
            assert ours.stop == theirs.stop
            for column in ("logprob", "logprob_sampled", "logprob_stop"):
                np.testing.assert_allclose(getattr(ours, column), getattr(theirs, column), atol=1e-4)


def test_a_whole_prefix_is_finished_at_once() -> None:
    plain = PlainSampler(loaded("LFM2").inference_copy(), 32, merge_stop=(EOS,))
    asked = requests()[0]
    done = SampleRequest(asked.id, asked.prompt_ids, asked.key, asked.sampling, np.array([5, EOS], dtype=np.int32))
    assert [event.stop for event in plain.sample([done])] == ["stop"]  # type: ignore[union-attr]


def test_two_models_cannot_be_mixed_where_one_does_not_fit_into_slots() -> None:
    llama, hybrid = tiny_model("llama"), loaded("LFM2")
    for model, other in ((llama, hybrid), (hybrid, llama)):
        with pytest.raises(ModelError, match="teacher_mix"):
            open_sampler(model, BuiltInSampler(), 32, merge_stop=(EOS,), partner=Partner(other, 0.5))


def test_a_checkpoint_is_complete_or_rejected(tmp_path: Path) -> None:
    def edited(name: str, change: Any) -> str:
        path = Path(save_tiny(tmp_path / name)) / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
        return str(path.parent)

    layer = "model.layers.0.self_attn.q_proj"
    with pytest.raises(ModelError, match=rf"lacks {layer}\.weight, which would be random"):
        load_model(edited("missing", lambda tensors: tensors.pop(f"{layer}.weight")))
    with pytest.raises(ModelError, match=r"q_proj\.bias, which LlamaForCausalLM"):
        load_model(edited("bias", lambda tensors: tensors.update({f"{layer}.bias": torch.zeros(32)})))
    deeper = {f"model.layers.2.{name}": torch.ones(32) for name in ("input_layernorm.weight",)}
    with pytest.raises(ModelError, match=r"layers\.2\.input_layernorm"):
        load_model(edited("deeper", lambda tensors: tensors.update(deeper)))
    load_model(edited("more", lambda tensors: tensors.update({"v_head.weight": torch.zeros(1, 32)})))


@pytest.mark.families
@pytest.mark.parametrize("name", ["Qwen3-Next", "Granite-4 hybrid", "RWKV", "Phi-3 longrope"])
def test_a_run_with_a_slower_model_says_so_and_starts_with_no_divergence(name: str, tmp_path: Path) -> None:
    """Student, teacher, its samples, evaluation and the saved model, all by the slower way."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    family_named(name).build().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    run = opd.run(
        {
            "student": model, "teachers": {"arithmetic": model}, "prompts": [{"source": "task:addition"}], "device": "cpu",
            "rollout": {"prompts": 4, "max_new_tokens": 8, "teacher_share": 0.5}, "train": {"steps": 2, "lr": 1e-3},
            "eval": {"prompts": 2},
        },
        out=tmp_path / "run",
    )  # fmt: skip
    assert run.metrics[0]["reverse_kl"] == pytest.approx(0.0, abs=1e-5)
    assert "one request at a time" in (run.directory / "log.txt").read_text()
    saved = sorted((run.directory / "checkpoints").glob("*/config.json"))
    AutoModelForCausalLM.from_pretrained(saved[-1].parent)
