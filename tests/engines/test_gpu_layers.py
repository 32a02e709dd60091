"""Layers written out for decode steps against the classes of models: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from opd.engines.layers import DecodeLayers, SlotCache, SlotLayout, agree
from opd.models.fused_layers import fuse_layers, norm_formula
from opd.models.language_model import LanguageModel
from tests.support.helpers import tiny_model

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs CUDA or TRITON_INTERPRET=1"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE, ROOM = "cpu" if INTERPRETED else "cuda", 100_000
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter's numpy has no bf16
CLOSE = 4e-3 if INTERPRETED else 3e-2
SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "initializer_range": 0.08}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("rows", [3, 70, 130])  # a part of a tile, more than one, more than kernels take
@pytest.mark.parametrize("biased", [False, True])
def test_joined_products(rows: int, biased: bool) -> None:
    from opd.engines.kernels import joined_products

    x = numbers(rows, 96)
    weights = [numbers(count, 96, seed=count) / 10 for count in (64, 32, 96)]
    biases = [numbers(len(weight), seed=1) if biased else None for weight in weights]
    expected = torch.cat(
        [linear(x.float(), w.float(), None if b is None else b.float()) for w, b in zip(weights, biases, strict=True)],
        1,
    )
    close(joined_products(x, weights, biases, ROOM), expected)


@pytest.mark.parametrize("rows", [3, 70, 130])
def test_gated_products(rows: int) -> None:
    from opd.engines.kernels import gated_products

    x, gate, up = numbers(rows, 64), numbers(96, 64, seed=1) / 8, numbers(96, 64, seed=2) / 8
    expected = silu(linear(x.float(), gate.float())) * linear(x.float(), up.float())
    close(gated_products(x, gate, up, ROOM), expected)


@pytest.mark.parametrize(("offset", "early"), [(0.0, True), (1.0, False)])
def test_a_sum_and_its_norm(offset: float, early: bool) -> None:
    from opd.engines.kernels import add_norm

    stream, change, weight = numbers(5, 48), numbers(5, 48, seed=1), numbers(48, seed=2)
    total = stream + change
    close(add_norm(stream, None, weight, 1e-6, offset, early), norm_formula(stream, weight, 1e-6, offset, early))
    close(add_norm(stream, change, weight, 1e-6, offset, early), norm_formula(total, weight, 1e-6, offset, early))
    assert torch.equal(stream, total)


def made(kind: str, **config: Any) -> LanguageModel:
    model = tiny_model(kind, **(SHAPE | config))
    model.module.to(DEVICE, DTYPE)
    for name, parameter in model.module.named_parameters():
        if "norm" in name or "bias" in name:  # a fresh one is all ones or zeros, and says nothing
            nn.init.uniform_(parameter, 0.5, 1.5)
    fuse_layers(model.module)
    return model


def after(model: LanguageModel, layers: DecodeLayers | None, count: int) -> tuple[Tensor, Tensor]:
    """Hidden states behind some tokens of three slots, each at columns of its own, and what the cache holds."""
    from opd.engines.kernels import attend_slots

    cache = SlotCache(model.module.config.num_hidden_layers, 4, 64)
    slots = torch.arange(3, device=DEVICE)
    hidden = torch.empty(0)
    with torch.no_grad():
        scratch = torch.full((1,), 3, device=DEVICE)
        cache.layout = layout = SlotLayout(scratch, scratch[:, None] * 0, 64, in_order=False)
        model.backbone(
            input_ids=scratch[:, None],
            position_ids=layout.columns,
            past_key_values=cache,
            use_cache=True,
            layout=layout,
        )
        for step in range(count):
            columns = torch.tensor([[0], [0], [0]], device=DEVICE) + step
            ids = (torch.tensor([[5], [9], [40]], device=DEVICE) + 7 * step) % model.size
            if layers is None:
                cache.layout = layout = SlotLayout(slots, columns, 64, in_order=True)
                out = model.backbone(
                    input_ids=ids, position_ids=columns, past_key_values=cache, use_cache=True, layout=layout
                )
                hidden = out.last_hidden_state[:, 0]
            else:
                layout = SlotLayout(slots, columns, 64, in_order=True, kernel=attend_slots, room=ROOM)
                hidden = layers(ids[:, 0], layout, cache)
    return hidden, torch.cat([tensor[:3] for layer in cache.layers for tensor in (layer.keys, layer.values)])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])  # plain, biases, norms of heads, a window
def test_layers_written_out_equal_the_classes(kind: str) -> None:
    model = made(kind, **({"sliding_window": 4} if kind == "mistral" else {}))
    layers = DecodeLayers.of(model, ROOM)
    assert layers is not None
    (found, cached), (usual, expected) = after(model, layers, 7), after(model, None, 7)
    assert agree(found, usual)
    close(cached, expected)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "olmo2", "phi3", "gpt2"])
def test_other_layers_are_left_alone(kind: str) -> None:
    assert DecodeLayers.of(made(kind), ROOM) is None


@pytest.mark.parametrize(
    "kind", ["ministral3", "smollm3", "granite"]
)  # scaled far queries, layers that do not turn, other scales
def test_families_that_only_look_similar_are_not_changed(kind: str) -> None:
    assert DecodeLayers.of(made(kind), ROOM) is None


def test_a_window_that_the_classes_do_not_read_is_none() -> None:
    model = made("llama", sliding_window=4)
    layers = DecodeLayers.of(model, ROOM)
    assert layers is not None
    assert agree(after(model, layers, 9)[0], after(model, None, 9)[0])


def test_what_does_not_agree() -> None:
    usual = numbers(4, 8)
    assert agree(usual * 1.01, usual)
    assert not agree(usual * 1.2, usual)
    assert not agree(usual, usual * float("nan"))
