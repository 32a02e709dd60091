"""Passes in sizes that can be recorded: what is padded changes nothing, and gradients are those of the usual pass.

On the CPU a recorded pass is replayed before instead of replayed, with attention written out; on a GPU it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.models import attention
from opd.models.attention import Packed, masked_attention
from opd.models.cuda_graphs import PassGraphs, PassSize, own_stream, record
from opd.models.fused_layers import fuse_layers
from opd.models.language_model import LanguageModel
from opd.recipe import Lora
from tests.support.helpers import tiny_model

BATCHES = ([37, 1, 90, 64, 3], [41, 2, 80, 60, 8], [30, 30, 70])  # of one size
LONGER = [200, 100]


@dataclass
class Again:
    call: Callable[[], None]

    def replay(self) -> None:
        self.call()


def again(call: Callable[[], None], pool: Any, stream: Any) -> Again:
    call()
    return Again(call)


def attend_written_out(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """`varlen.attend_varlen` for the CPU."""
    places = torch.arange(query.shape[1])
    owner = torch.searchsorted(bounds[1:].long(), places, right=True)
    distance = places[:, None] - places
    mask = (owner[:, None] == owner) & (distance >= 0) & (distance < (window or longest))
    assert int((bounds[1:] - bounds[:-1]).max()) <= longest
    return masked_attention(query[None], key[None], value[None], mask, scale, None)[0].transpose(0, 1)


@pytest.fixture
def written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "fits_varlen", lambda query, value: True)
    monkeypatch.setattr(attention, "attend_varlen", attend_written_out)


def ids(count: int, device: str = "cpu") -> Tensor:
    return torch.arange(count, device=device) % 60 + 2


def test_sizes() -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(1, rng.integers(2, 3000), rng.integers(1, 200)).tolist() for _ in range(200)]
    for lengths in [*drawn, [32] * 8, [256] * 16, [256]]:  # the last ones leave no room for padding
        size = PassSize.of(lengths)
        bounds = size.bounds(lengths)
        assert bounds.shape == (size.sequences + 1,)
        assert bounds[: len(lengths) + 1].tolist() == [0, *np.cumsum(lengths)]
        assert bounds[-1] == size.tokens <= max(1.25 * sum(lengths) + 1, 256)
        assert 0 <= np.diff(bounds).min() <= np.diff(bounds).max() <= size.longest
    assert len({PassSize.of(lengths) for lengths in BATCHES}) == 1


def gradients(model: LanguageModel, hidden: Tensor) -> dict[str, Tensor]:
    model.module.zero_grad()
    weights = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view(hidden.shape)
    (hidden.float() * weights).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.module.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])  # the last has windows and scaled embeddings
def test_padded_passes_equal_the_usual_ones(kind: str, written_out: None) -> None:
    model = tiny_model(kind)
    graphs = PassGraphs(model, again)
    for number, lengths in enumerate((*BATCHES, LONGER)):
        ids_T, layout = ids(sum(lengths)), Packed.of(lengths)
        found = graphs.hidden(ids_T, layout)
        if number in (0, 3):
            assert found is None  # seen for the first time
            continue
        usual = model.hidden(ids_T, layout)
        assert found is not None
        torch.testing.assert_close(found[: len(ids_T)], usual, atol=1e-5, rtol=1e-4)
        expected = gradients(model, usual)
        got = gradients(model, found[: len(ids_T)])
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, atol=1e-4, rtol=1e-3, msg=name)


def with_adapters(kind: str, **config: Any) -> LanguageModel:
    """As if trained: away from zero."""
    pytest.importorskip("peft")
    model = tiny_model(kind, **config)
    torch.manual_seed(3)
    model.add_lora(Lora(rank=4))
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_adapters_have_gradients_alone(written_out: None) -> None:
    model = with_adapters("llama")
    graphs = PassGraphs(model, again)
    ids_T, layout = ids(sum(LONGER)), Packed.of(LONGER)
    assert graphs.hidden(ids_T, layout) is None
    found = graphs.hidden(ids_T, layout)
    assert found is not None
    got, expected = gradients(model, found[: len(ids_T)]), gradients(model, model.hidden(ids_T, layout))
    assert got.keys() == expected.keys() == model.trainable().keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-4, rtol=1e-3, msg=name)


def test_a_frozen_model_and_weights_that_move(written_out: None) -> None:
    model = tiny_model("llama")
    model.module.requires_grad_(False)
    graphs = PassGraphs(model, again)
    ids_T, layout = ids(sum(LONGER)), Packed.of(LONGER)
    assert graphs.hidden(ids_T, layout) is None
    found = graphs.hidden(ids_T, layout)
    assert found is not None
    assert not found.requires_grad
    torch.testing.assert_close(found[: len(ids_T)], model.hidden(ids_T, layout), atol=1e-5, rtol=1e-4)
    for parameter in model.module.parameters():
        parameter.data = parameter.data * 1.5
    assert graphs.hidden(ids_T, layout) is None  # what is recorded reads where they were
    again_found = graphs.hidden(ids_T, layout)
    assert again_found is not None
    torch.testing.assert_close(again_found[: len(ids_T)], model.hidden(ids_T, layout), atol=1e-5, rtol=1e-4)


def test_a_pass_made_again_has_no_gradient(written_out: None) -> None:
    model = tiny_model("llama")
    graphs = PassGraphs(model, again)
    ids_T, layout = ids(sum(LONGER)), Packed.of(LONGER)
    first, second, third = (graphs.hidden(ids_T, layout) for _ in range(3))
    assert first is None
    assert second is not None
    assert third is not None
    with pytest.raises(RuntimeError, match="replayed before"):
        second.sum().backward()
    third.sum().backward()


def test_copies_have_no_recorded_passes() -> None:
    model = tiny_model("llama")
    model.graphs = PassGraphs(model, again)
    assert [copy.graphs for copy in (model.inference_copy(), model.snapshot())] == [None, None]
    assert PassGraphs.of(model) is None  # there is nothing to record on a CPU


SHAPE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "initializer_range": 0.08}


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-3))


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_replayed_passes_equal_the_usual_ones(kind: str, frozen: bool) -> None:
    """Values and gradients, again after weights have changed where they are."""
    model = tiny_model(kind, **SHAPE)
    model.module.to("cuda", torch.bfloat16).requires_grad_(not frozen)
    fuse_layers(model.module)
    graphs = PassGraphs.of(model)
    assert graphs is not None
    for number, lengths in enumerate((*BATCHES, *BATCHES)):
        if number == 3:
            with torch.no_grad():
                for parameter in model.module.parameters():
                    parameter.mul_(1.05)
        ids_T, layout = ids(sum(lengths), "cuda"), Packed.of(lengths, "cuda")
        found, usual = graphs.hidden(ids_T, layout), model.hidden(ids_T, layout)
        assert (found is None) == (number == 0)
        if found is None:
            continue
        assert apart(found[: len(ids_T)], usual) < 2e-2
        if not frozen:
            got, expected = gradients(model, found[: len(ids_T)]), gradients(model, usual)
            assert got.keys() == expected.keys()
            assert all(apart(got[name], value) < 5e-2 for name, value in expected.items())


@pytest.mark.gpu
def test_replayed_passes_of_adapters() -> None:
    """Over a bf16 base, again after they have changed where they are."""
    model = with_adapters("qwen3", **SHAPE)
    for parameter in model.module.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
    model.module.to("cuda")
    fuse_layers(model.module)
    graphs = PassGraphs.of(model)
    assert graphs is not None
    ids_T, layout = ids(sum(LONGER), "cuda"), Packed.of(LONGER, "cuda")
    assert graphs.hidden(ids_T, layout) is None
    for _ in range(2):
        found, usual = graphs.hidden(ids_T, layout), model.hidden(ids_T, layout)
        assert found is not None
        assert apart(found[: len(ids_T)], usual) < 2e-2
        got, expected = gradients(model, found[: len(ids_T)]), gradients(model, usual)
        assert got.keys() == expected.keys() == model.trainable().keys()
        assert all(apart(got[name], value) < 0.1 for name, value in expected.items())
        with torch.no_grad():
            for parameter in model.trainable().values():
                parameter.mul_(1.1)


@pytest.mark.gpu
def test_who_is_not_recorded() -> None:
    """Scores with a soft cap, and weights in fp32, take other attention; recomputed layers begin again on the host."""
    for kind, dtype in (("gemma2", torch.bfloat16), ("llama", torch.float32)):
        model = tiny_model(kind, **SHAPE)
        model.module.to("cuda", dtype)
        assert PassGraphs.of(model) is None
    model = tiny_model("llama", **SHAPE)
    model.module.to("cuda", torch.bfloat16)
    model.checkpoint_layers()
    assert PassGraphs.of(model) is None


@pytest.mark.gpu
def test_a_recording_that_fails_leaves_everything_as_it_was() -> None:
    """Random numbers, the allocator, and recordings after it."""
    values, found = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    pool, stream, numbers = torch.cuda.graph_pool_handle(), own_stream(values.device), torch.cuda.get_rng_state()
    expected = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(numbers)
    with pytest.raises(RuntimeError):
        record(lambda: found.add_((values * 2).sum().item()), pool, stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    shared = torch.empty(1 << 20, device="cuda")
    shared.record_stream(torch.cuda.Stream())
    del shared
    torch.cuda.synchronize()
    small = torch.empty(1, device="cuda")  # asking for more looks what has been given back
    assert torch.cuda.memory_allocated() - before <= 1 << 19
    graph = record(lambda: found.copy_(values * 3), torch.cuda.graph_pool_handle(), stream)
    graph.replay()
    torch.cuda.synchronize()
    assert found.tolist() == [3.0] * 8, small


@pytest.mark.gpu
def test_a_model_that_cannot_be_recorded_continues(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", **SHAPE)
    model.module.to("cuda", torch.bfloat16)
    fuse_layers(model.module)
    graphs = PassGraphs.of(model)
    assert graphs is not None

    def wait(*args: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.ones(1, device="cuda").item()

    model.backbone.layers[1].register_forward_pre_hook(wait)
    ids_T, layout = ids(sum(LONGER), "cuda"), Packed.of(LONGER, "cuda")
    assert [graphs.hidden(ids_T, layout) for _ in range(3)] == [None] * 3
    assert "cannot be recorded" in caplog.text
    assert gradients(model, model.hidden(ids_T, layout))
    torch.rand(4, device="cuda")
