"""Layers without their classes, on a CPU: the same bits, for the models that they are for; other models go through their classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opd.engines.builtin import Engine
from opd.engines.kinds import BuiltInSampler
from opd.engines.layers import LeanLayers
from opd.models.language_model import LanguageModel
from opd.records import Sampling
from tests.support.engines import collect, make_requests
from tests.support.helpers import EOS, tiny_model

SPEC = BuiltInSampler(slots=4, prefill_rows=3, prefill_chunk=5)
WINDOWED = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
MODELS = {
    "llama": ("llama", {}),
    "grouped": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2, some layers within a window": ("qwen2", WINDOWED),
    "qwen3": ("qwen3", {}),
    "mistral within a window": ("mistral", {"sliding_window": 6}),
}  # fmt: skip


def engine(model: LanguageModel, max_length: int = 80) -> Engine:
    return Engine(model.inference_copy(), SPEC, max_length, merge_stop=(EOS,))


def answers(sampler: Engine) -> dict[str, list[tuple[Any, ...]]]:
    found = collect(sampler, make_requests([3, 17, 9, 1, 12, 25], Sampling(max_new_tokens=24, stop_ids=(EOS,))))
    return {name: response.numbers for name, response in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_the_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token and every number beside it; longer than a window, several pieces of a prompt, slots that are idle."""
    kind, config = MODELS[name]
    model = tiny_model(kind, **config)
    lean = engine(model)
    assert lean.steps._lean is not None
    monkeypatch.setattr(LeanLayers, "proven", lambda *_: None)
    usual = engine(model)
    assert usual.steps._lean is None
    assert answers(lean) == answers(usual)


def test_new_weights_are_followed() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    sampler = engine(model)
    before = answers(sampler)
    with torch.no_grad():
        for weight, new in zip(sampler.model.module.parameters(), other.module.parameters(), strict=True):
            weight.copy_(new)
    assert answers(sampler) == answers(engine(other)) != before


def test_hooks_that_come_later_are_called() -> None:
    sampler, calls = engine(tiny_model()), []
    expected = answers(sampler)
    sampler.model.backbone.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[index, union-attr]
    assert answers(sampler) == expected
    assert calls


def other_gate(model: LanguageModel) -> None:
    model.backbone.layers[1].mlp.act_fn = torch.nn.GELU()  # type: ignore[index, union-attr]


def half(model: LanguageModel) -> None:
    model.module.bfloat16()


def watched(model: LanguageModel) -> None:
    model.backbone.layers[0].self_attn.register_forward_hook(lambda *_: None)  # type: ignore[index, union-attr]


def not_finite(model: LanguageModel) -> None:
    with torch.no_grad():
        next(iter(model.module.parameters())).fill_(float("nan"))


def cut_short(model: LanguageModel) -> None:
    model.module.config.num_hidden_layers -= 1


@pytest.mark.parametrize("change", [other_gate, half, watched, not_finite, cut_short])
def test_others_go_through_their_classes(change: Any) -> None:
    model = tiny_model().inference_copy(own=True)
    change(model)
    sampler = Engine(model, SPEC, 80, merge_stop=(EOS,))
    assert sampler.steps._lean is None
    for layer in sampler.steps.cache.layers:  # what was tried has left nothing behind
        assert not layer.keys.any()


def test_a_family_of_another_kind() -> None:
    assert LeanLayers.of(tiny_model("gemma2")) is None


@pytest.mark.parametrize(("room", "width"), [(16, 16), (31, 32), (64, 64), (65, 128)])
def test_short_slots_are_no_wider_than_they_need_to_be(room: int, width: int) -> None:
    assert engine(tiny_model(), room).steps.width == width
