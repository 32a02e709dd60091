"""Products with weights that MKL has packed: the same rollouts, and never with weights of yesterday."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from opd.common.cpu_env import MODE
from opd.engines import layers as sampler_layers
from opd.engines.builtin import Engine, choose_settings
from opd.engines.calls import Partner
from opd.engines.kinds import BuiltInSampler
from opd.engines.layers import Matrix, MklWeights
from opd.models.language_model import LanguageModel
from opd.records import SampledToken, SampleRequest, Sampling
from tests.support.engines import by_id, collect, make_engine, make_requests
from tests.support.helpers import tiny_model

pytestmark = pytest.mark.skipif(
    not sampler_layers.packs(), reason="MKL packs no weights here, or has not been told to round alike"
)

SPEC = BuiltInSampler(slots=8, prefill_rows=1, prefill_chunk=8)
EVEN = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
}  # widths of whole vectors, as almost all models have


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_layers, "SMALLEST", 1)


def packed_engine(model: LanguageModel) -> Engine:
    return make_engine(model, SPEC)


def plain_engine(model: LanguageModel) -> Engine:
    engine = make_engine(model, SPEC)
    products = engine.steps.products
    products._layers, products._joined, products._head, products.matrices = [], [], None, []
    return engine


def alike(engine: Engine, other: Engine, requests: list[SampleRequest]) -> None:
    """The same tokens; what they are worth as far as rounding explains."""
    for found, usual in zip(*(by_id(collect(one, requests), requests) for one in (engine, other)), strict=True):
        assert found.ids == usual.ids
        for index in (2, 3, 4):
            assert [e[index] for e in found.events] == pytest.approx([e[index] for e in usual.events], abs=1e-4)


@pytest.mark.parametrize("shape", [(77, 130), (192, 960)])
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix, x = Matrix((nn.Parameter(torch.randn(shape), requires_grad=False),), {}), torch.randn(150, shape[1])
    with torch.inference_mode():
        matrix.renew()
        whole = matrix(x)
        assert torch.allclose(whole, linear(x, matrix.weight), atol=1e-3)
        for rows in (1, 2, 3, 7, 16, 17, 40, 112, 150):
            for _ in range(2):  # tried, then used
                assert torch.equal(matrix(x[None, :rows]), whole[None, :rows])
        matrix._tried[(*shape, 17)] = False  # as of a library that does not round alike
        assert torch.equal(matrix(x[:17]), whole[:17])


def test_rollouts_are_those_of_plain_products() -> None:
    model = tiny_model("llama")
    engine, seen = packed_engine(model), []
    products, layer = engine.steps.products, engine.model.backbone.layers[0].mlp.down_proj
    requests = make_requests((6, 13, 21, 3), Sampling(25))
    layer.register_forward_hook(lambda module, *_: seen.append(type(vars(module).get("forward"))))
    alike(engine, plain_engine(model), requests)
    assert set(seen) == {Matrix}
    assert "forward" not in vars(layer)
    assert not products._packed
    assert all(matrix.pack is None for matrix in products.matrices)
    assert len(products.matrices) == 5 * len(engine.model.backbone.layers) + 1


def numbers(engine: Engine, requests: list[SampleRequest]) -> dict[str, list[tuple[Any, ...]]]:
    return {name: response.numbers for name, response in collect(engine, requests).items()}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_queries_keys_and_values_are_one_product_also_with_hooks(kind: str) -> None:
    engine, seen = packed_engine(tiny_model(kind)), []
    requests = make_requests((6, 13, 21, 3), Sampling(25))
    expected = numbers(engine, requests)
    assert len(engine.steps.products._joined) == len(engine.model.backbone.layers)
    key = engine.model.backbone.layers[1].self_attn.k_proj
    key.register_forward_hook(lambda *_: seen.append(1))  # from now on each layer is called by its class
    assert numbers(engine, requests) == expected
    assert seen
    assert "forward" not in vars(key)


def test_the_last_request_continues_alone() -> None:
    """One row, where all products are with packed weights; its numbers are those of the whole batch."""
    model, (*short, last) = tiny_model("llama", **EVEN), make_requests((6, 13, 9), Sampling(5))
    requests = [*short, replace(last, sampling=Sampling(30))]
    engine, whole = packed_engine(model), packed_engine(model)
    whole.steps._fewer = []
    assert numbers(engine, requests) == numbers(whole, requests)
    assert ("decode", 1) in {how[:2] for how in engine.steps._alike}
    assert 1 not in packed_engine(tiny_model("llama", attention_bias=True, **EVEN)).steps._fewer


@pytest.mark.parametrize(("odd", "left"), [(1, [2, 3, 4, 6]), (3, [1, 2, 4, 6])])
def test_rows_that_come_out_otherwise_say_nothing_of_other_numbers(
    odd: int, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests = tiny_model("llama", **EVEN), make_requests((6, 13, 9)[:odd], Sampling(12))
    expected, engine = numbers(packed_engine(model), requests), packed_engine(model)
    usual = engine.steps._decode_some
    monkeypatch.setattr(engine.steps, "_decode_some", lambda rows, *how: usual(rows, *how) + 1e-3 * (len(rows) == odd))
    assert numbers(engine, requests) == expected
    assert engine.steps._fewer == left
    assert not engine.steps._unlike
    assert ("decode", odd + 1) in {how[:2] for how in engine.steps._alike}


def test_a_rollout_is_the_same_alone_batched_and_interrupted() -> None:
    engine = packed_engine(tiny_model("llama"))
    requests = make_requests((6, 13, 21, 3, 8), Sampling(20))
    together = collect(engine, requests)
    for request in requests[:3]:
        whole = together[request.id].numbers
        assert collect(engine, [request])[request.id].numbers == whole
        begun = replace(request, prefix_ids=np.array(together[request.id].ids[:7], dtype=np.int32))
        rest = collect(engine, [begun])[request.id]
        assert rest.ids == together[request.id].ids[7:]
        assert [e.logprob for e in rest.events] == pytest.approx([row[1] for row in whole[7:]], abs=1e-4)


def test_prefills_leave_idle_rows_out() -> None:
    model, requests = tiny_model("llama"), make_requests((6, 13, 21), Sampling(5))
    wide = BuiltInSampler(slots=8, prefill_rows=4, prefill_chunk=8)
    whole, engine = make_engine(model, wide), make_engine(model, wide)
    whole.steps._fewer = []
    expected = numbers(whole, requests)
    assert numbers(engine, requests) == expected
    counts = {count for call, *_, count in engine.steps._alike if call == "prefill"}
    assert counts - {4} or "prefill" in engine.steps._unlike
    assert numbers(engine, requests) == expected


def test_large_models_read_several_prompts_at_once_where_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert choose_settings(model, BuiltInSampler()).prefill_rows == 16
    monkeypatch.setattr("opd.engines.builtin.SMALL_MODEL", 1)
    assert choose_settings(model, BuiltInSampler()).prefill_rows == 4
    assert choose_settings(model, BuiltInSampler(slots=1)).prefill_rows == 1
    assert choose_settings(model, BuiltInSampler(), Partner(model, 0.5)).prefill_rows == 1
    monkeypatch.setattr(sampler_layers, "SMALLEST", 2**17)
    assert choose_settings(model, BuiltInSampler()).prefill_rows == 1


def test_weights_are_packed_anew_after_a_load() -> None:
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    engine, usual = (make(model.inference_copy(own=True)) for make in (packed_engine, plain_engine))
    requests = make_requests((4, 9), Sampling(12))
    alike(engine, usual, requests)
    for one in (engine, usual):
        one.load(other.weights(1))
    alike(engine, usual, requests)


def fused_step(model: LanguageModel) -> None:
    """Its weights do not count such a change."""
    for parameter in model.trainable().values():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.trainable().values(), lr=0.05, fused=True).step()


def moved(model: LanguageModel) -> None:
    for parameter in model.trainable().values():
        parameter.data.mul_(1.5)


@pytest.mark.parametrize("change", [fused_step, moved])
def test_a_change_of_shared_weights_is_never_answered_with_packed_ones(change: Callable[[LanguageModel], None]) -> None:
    def sampled(make: Callable[[LanguageModel], Engine]) -> list[tuple[Any, ...]]:
        model = tiny_model("llama")
        engine = make(model)
        found = [event[1:] for event in changing(engine, model) if isinstance(event, SampledToken)]
        change(model)
        return found + [number for response in collect(engine, requests).values() for number in response.numbers]

    def changing(engine: Engine, model: LanguageModel) -> Iterator[Any]:
        for number, event in enumerate(engine.sample(requests)):
            yield event
            if number == 9:
                change(model)

    requests = make_requests((4, 9), Sampling(12))
    found, usual = sampled(packed_engine), sampled(plain_engine)
    assert [row[0] for row in found] == [row[0] for row in usual]
    assert [row[1] for row in found] == pytest.approx([row[1] for row in usual], abs=1e-4)


def test_layers_that_cannot_be_packed_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(model: LanguageModel) -> int:
        return len(MklWeights(model).matrices)

    model, biased = tiny_model("llama"), tiny_model("llama", attention_bias=True)
    layers = len(model.backbone.layers)
    assert count(model) == 7 * layers + 1
    assert count(biased) == 3 * layers + 1
    assert count(model.inference_copy(torch.bfloat16)) == 0
    assert count(tiny_model("qwen3_moe")) == 0
    monkeypatch.setattr(sampler_layers, "MOST", 1000)
    assert count(model) == 0
    monkeypatch.setattr(sampler_layers, "MOST", 2**32)
    monkeypatch.setenv(MODE, "AUTO")
    assert count(model) == 0


def test_what_is_packed_wrongly_or_not_at_all_is_multiplied_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> None:
        raise RuntimeError("no memory")

    model, requests = tiny_model("llama"), make_requests((4, 9), Sampling(8))
    expected = numbers(plain_engine(model), requests)
    wrong, refused = packed_engine(model), packed_engine(model)
    with monkeypatch.context() as patched:
        patched.setattr(Matrix, "_multiplied", lambda matrix, x, rows: linear(x, matrix.weight) * 1.001)
        assert numbers(wrong, requests) == expected
    with monkeypatch.context() as patched:
        patched.setattr(Matrix, "renew", failing)
        assert numbers(refused, requests) == expected
