"""Adapted layers in one step each way: peft's own results and gradients, and which layers are left to peft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from opd.models import lora
from opd.models.attention import Packed
from opd.models.fused_layers import fuse_layers
from opd.models.language_model import LanguageModel
from opd.models.lora import adapted_layers
from opd.recipe import Lora
from tests.support.helpers import tiny_model

pytest.importorskip("peft")


SHAPE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "initializer_range": 0.08}


def adapted(kind: str = "qwen2", dropout: float = 0.0, **config: Any) -> LanguageModel:
    """As if trained: every adapter away from zero. qwen2 has biases."""
    model = tiny_model(kind, **config)
    torch.manual_seed(3)
    model.add_lora(Lora(rank=4, alpha=12, dropout=dropout))
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def factors_of(layer: Any) -> list[nn.Parameter]:
    return [layer.lora_A["default"].weight, layer.lora_B["default"].weight]


def computed(layer: Any, x: Tensor) -> list[Tensor]:
    """Its output, and the gradients of its input and factors."""
    x = x.detach().requires_grad_()
    out = layer(x)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).bfloat16().to(out.dtype)  # the same in all types
    return [out.detach(), *torch.autograd.grad(out, [x, *factors_of(layer)], weights.view(out.shape))]


def both(monkeypatch: pytest.MonkeyPatch, layer: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    found = []
    for joined in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(lora, "runs_joined", lambda *_, joined=joined: joined)
            found.append(computed(layer, x))
    return found[0], found[1]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_joined_layers_equal_peft(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float) -> None:
    for name, layer in adapted_layers(adapted().module):
        layer.to(dtype)
        x = torch.randn(2, 5, layer.in_features, dtype=dtype)
        for one, other in zip(*both(monkeypatch, layer, x), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance, msg=name)


def check_rounding(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """fp32 factors over a bf16 weight: as near to fp32 as gradients of a bf16 model are."""
    for name, layer in adapted_layers(adapted().module):
        layer.to(device)
        for parameter in layer.base_layer.parameters():
            parameter.data = parameter.data.bfloat16()
        x = torch.randn(1, 300, layer.in_features, device=device, dtype=torch.bfloat16)
        joined, peft = both(monkeypatch, layer, x)
        layer.float()
        _, exact = both(monkeypatch, layer, x.float())
        for one, other, right in zip(joined, peft, exact, strict=True):
            assert one.dtype == other.dtype, name
            gaps = [float((value.float() - right).norm() / right.norm()) for value in (one, other)]
            assert max(gaps) < 0.01, (name, gaps)


def test_rounding_is_that_of_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rounding(monkeypatch, "cpu")


class Kernels(TorchDispatchMode):
    """How many operations compute something."""

    FREE = ("view", "_unsafe_view", "t", "permute", "transpose", "detach", "new_empty", "alias")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function._schema.name.removeprefix("aten::") not in self.FREE
        return function(*args, **(kwargs or {}))


def half(model: LanguageModel) -> LanguageModel:
    """Mixed precision: the base in bf16, adapters in fp32."""
    for parameter in model.module.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
    return model


def test_how_many_kernels_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, layer), *_ = adapted_layers(half(adapted("qwen3")).module)
    x = torch.randn(1, 5, layer.in_features, dtype=torch.bfloat16)
    counts = []
    for joined in (True, False):
        monkeypatch.setattr(lora, "runs_joined", lambda *_, joined=joined: joined)
        with Kernels() as kernels:
            computed(layer, x)
        counts.append(kernels.count - 2)  # `computed` has two of its own
    assert counts == [10 + 4, 17]  # four casts that a GPU does not need


def test_what_needs_no_gradient_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight's that is frozen, and no input's that comes from frozen embeddings."""
    monkeypatch.setattr(lora, "runs_joined", lambda *_: True)
    (_, layer), *_ = adapted_layers(adapted().module)
    counts = []
    for learns in (True, False):
        layer.zero_grad()
        out = layer(torch.randn(1, 5, layer.in_features).requires_grad_(learns))
        with Kernels() as kernels:
            out.sum().backward()
        counts.append(kernels.count)
    assert counts[0] - counts[1] == 2
    assert layer.base_layer.weight.grad is None


def test_who_is_left_to_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(model: LanguageModel) -> set[str]:
        return {name for name, layer in adapted_layers(model.module) if "Joined" in type(layer).__name__}

    model = adapted("qwen3")
    assert joined(model) == {name for name, _ in adapted_layers(model.module)}
    assert not joined(adapted(dropout=0.1))  # drawn for each layer anew
    assert not joined(adapted("gpt2"))  # its matrices lie the other way round
    assert not [name for name in joined(adapted("qwen3_moe")) if "experts" in name]

    (_, layer), *_ = adapted_layers(model.module)
    x = torch.randn(1, 5, layer.in_features)
    monkeypatch.setattr(lora.AdaptedLinear, "apply", None)
    usual = layer(x)  # on a CPU
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    monkeypatch.setattr(lora, "runs_joined", lambda *_: True)
    layer.float().enable_adapters(False)
    assert not torch.equal(layer(x), usual)


@pytest.mark.gpu
def test_rounding_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rounding(monkeypatch, "cuda")


def check_whole_passes(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Gradients of all adapters through a whole model, against peft's."""
    model = half(adapted("qwen3", **SHAPE))
    model.module.to(device)
    fuse_layers(model.module)
    ids_T, layout = torch.arange(2, 62, device=device), Packed.of([40, 20], device)
    calls, apply = [0], lora.AdaptedLinear.apply

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return apply(*args)

    def gradients() -> dict[str, Tensor]:
        model.module.zero_grad()
        hidden = model.hidden(ids_T, layout).float()
        (hidden * torch.linspace(-1, 1, hidden.numel(), device=device).view(hidden.shape)).sum().backward()
        return {name: weight.grad.clone() for name, weight in model.trainable().items() if weight.grad is not None}

    monkeypatch.setattr(lora.AdaptedLinear, "apply", counted)
    joined = gradients()
    assert calls[0] == len(list(adapted_layers(model.module)))
    monkeypatch.setattr(lora, "runs_joined", lambda *_: False)
    expected = gradients()
    assert calls[0] == len(joined) / 2 == len(expected) / 2
    assert {value.dtype for value in joined.values()} == {torch.float32}
    for name, value in expected.items():
        assert float((joined[name] - value).norm() / value.norm()) < 0.1, name


def test_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "runs_joined", lambda *_: True)
    check_whole_passes(monkeypatch, "cpu")


@pytest.mark.gpu
def test_whole_passes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By themselves, because they are in bf16 there."""
    check_whole_passes(monkeypatch, "cuda")
