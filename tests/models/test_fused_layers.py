"""Fused kernels of decoder layers against the formulas they stand for, and which models get them."""

from __future__ import annotations

import copy
import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM

from opd.models import fused_layers
from opd.models.fused_layers import fuse_layers, norm_formula, stock_layers

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
kernels = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs CUDA or TRITON_INTERPRET=1"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # the interpreter's numpy has no bf16
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8,
}  # fmt: skip
EVERYTHING = {"RMS norms", "gated activations", "rotary embeddings"}


def kernel_test(function: Any) -> Any:
    for mark in kernels:
        function = mark(function)
    return function


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype).requires_grad_()


def check(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], inputs: list[Tensor], tolerance: float) -> None:
    """Values and gradients; `wanted` was computed from fp32 copies of the inputs."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance)
    weights = [torch.linspace(-1, 1, one.numel(), device=one.device).view(one.shape) for one in found]
    grads = [
        torch.autograd.grad(sum((out.float() * weight).sum() for out, weight in zip(outs, weights, strict=True)), ins)
        for outs, ins in ((found, inputs), (wanted, [x.wide for x in inputs]))  # type: ignore[attr-defined]
    ]
    for one, other in zip(*grads, strict=True):
        scale = float(other.abs().max()) + 1
        torch.testing.assert_close(one.float() / scale, other / scale, atol=tolerance, rtol=tolerance)


def widened(tensors: list[Tensor]) -> list[Tensor]:
    for tensor in tensors:
        tensor.wide = tensor.detach().float().requires_grad_()  # type: ignore[attr-defined]
    return [tensor.wide for tensor in tensors]  # type: ignore[attr-defined]


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", fused_layers.NORMS)
@pytest.mark.parametrize("shape", [(5, 48), (1, 3, 7, 16), (700, 1, 64)])
def test_norms(dtype: torch.dtype, kind: tuple[float, bool], shape: tuple[int, ...]) -> None:
    from opd.models.fused_kernels import rms_norm

    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    wide_x, wide_weight = widened([x, weight])
    found = rms_norm(x, weight, 1e-5, *kind)
    assert torch.equal(found, rms_norm(x.detach(), weight.detach(), 1e-5, *kind))
    check((found,), (norm_formula(wide_x, wide_weight, 1e-5, *kind),), [x, weight], 2e-2)
    torch.testing.assert_close(found, norm_formula(x, weight, 1e-5, *kind), atol=1e-2, rtol=1e-2)
    frozen = rms_norm(x, weight.detach(), 1e-5, *kind)
    assert torch.autograd.grad(frozen.float().sum(), x)[0].shape == x.shape


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype) -> None:
    from opd.models.fused_kernels import gated_silu

    gate, up = random(1, 45, 70, dtype=dtype), random(1, 45, 70, dtype=dtype, seed=1)
    wide_gate, wide_up = widened([gate, up])
    check((gated_silu(gate, up),), (silu(wide_gate) * wide_up,), [gate, up], 2e-2)


@kernel_test
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "tokens", "turns"), [(1, 9, 1), (3, 4, 3), (3, 4, 1), (5, 1, 5)])
def test_rotary_embeddings(dtype: torch.dtype, rows: int, tokens: int, turns: int) -> None:
    """Heads lie behind tokens in memory, as projections leave them, and still do so afterwards."""
    from opd.models.fused_kernels import rotate

    stored = random(rows, tokens, 6, 24, dtype=dtype), random(rows, tokens, 2, 24, dtype=dtype, seed=1)
    cos, sin = (random(turns, tokens, 24, dtype=dtype, seed=seed).detach() for seed in (2, 3))
    wide = widened([*stored])
    found = rotate(*(x.transpose(1, 2) for x in stored), cos, sin)
    assert all(x.transpose(1, 2).is_contiguous() for x in found)

    def turned(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return x * cos.float()[:, None] + torch.cat([-x[..., 12:], x[..., :12]], -1) * sin.float()[:, None]

    check(found, (turned(wide[0]), turned(wide[1])), [*stored], 2e-2)


def tiny(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SMALL | settings))).eval()


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("llama", {}, EVERYTHING),
        ("qwen3", {}, EVERYTHING),
        ("gemma2", {}, {"RMS norms", "rotary embeddings"}),  # its activation is another
        ("olmo2", {}, EVERYTHING),
        ("cohere", {}, {"gated activations"}),  # its norms are no RMS norms, its rotary embedding interleaves
        ("gpt_neox", {}, {"rotary embeddings"}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, set()),
    ],
)
def test_who_is_fused(kind: str, settings: dict[str, Any], expected: set[str]) -> None:
    """By what their classes compute. On a CPU the fused model does what it did, to the bit, and so does a copy."""
    model = tiny(kind, **settings)
    ids = torch.arange(12).view(2, 6)
    before, classes = model(ids).logits, [type(child) for child in model.modules()]
    names, seed = list(model.state_dict()), torch.get_rng_state()
    assert {part for part in fuse_layers(model).split(", ") if part} == expected
    assert fuse_layers(model) == ""  # once is enough
    assert torch.equal(torch.get_rng_state(), seed)  # what a run draws does not depend on it
    assert list(model.state_dict()) == names
    assert torch.equal(model(ids).logits, before)
    assert torch.equal(copy.deepcopy(model)(ids).logits, before)
    stock_layers(model)
    assert [type(child) for child in model.modules()] == classes


@kernel_test
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "olmo2"])
def test_a_fused_model_equals_the_stock_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients, in half precision."""
    dtype = DTYPES[-1]
    if kind == "gemma2" and INTERPRETED:
        pytest.skip("its gradients overflow in fp16")
    monkeypatch.setattr(fused_layers, "_takes", lambda x: x.dtype == dtype)
    model = tiny(kind).to(DEVICE, dtype)
    ids = torch.arange(12, device=DEVICE).view(2, 6)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(ids).logits.float().flatten(0, 1), ids.flatten())
        loss.backward()
        found.append((loss.detach(), [parameter.grad.float() for parameter in model.parameters()]))
        assert fuse_layers(model) != "" or len(found) == 2
    torch.testing.assert_close(found[0][0], found[1][0], atol=2e-2, rtol=2e-2)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        scale = float(one.abs().max()) + 1e-3
        torch.testing.assert_close(one / scale, other / scale, atol=6e-2, rtol=0)
