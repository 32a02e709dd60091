"""Attention without padding on CUDA, against the padded rectangle: values, gradients, and what the kernels do not take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from opd.models import attention
from opd.models.attention import Packed
from tests.support.helpers import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LENGTHS = [37, 1, 200, 64, 3, 129]
SHAPE = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "initializer_range": 0.08}


def tensors(heads: int, groups: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Packed as layers give them: (1, H, T, D) views of (1, T, H, D)."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, sum(LENGTHS), count, width) for count in (heads, groups, groups)]
    made = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes]
    return [tensor.transpose(1, 2).requires_grad_(True) for tensor in made]


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 16, 10_000])
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 64), (9, 3, 64), (16, 8, 128), (8, 1, 256), (4, 2, 40)])
def test_kernels_equal_the_rectangle(
    dtype: torch.dtype, window: int | None, heads: int, groups: int, width: int
) -> None:
    layout, scale = Packed.of(LENGTHS, "cuda"), width**-0.5
    inputs = tensors(heads, groups, width, dtype)
    assert attention.fits_varlen(inputs[0], inputs[2])
    exact = [tensor.detach().float().requires_grad_(True) for tensor in inputs]
    ours, padded = layout.attend(*inputs, scale, window, None), layout.attend_padded(*inputs, scale, window, None)
    reference = layout.attend_padded(*exact, scale, window, None)
    assert ours.shape == padded.shape == (1, sum(LENGTHS), heads, width)
    assert error(ours, reference) < max(2 * error(padded, reference), 4e-3)
    found = (gradients(out, given) for out, given in ((ours, inputs), (padded, inputs), (reference, exact)))
    for mine, theirs, true in zip(*found, strict=True):
        assert error(mine, true) < max(2 * error(theirs, true), 8e-3)


def error(found: Tensor, reference: Tensor) -> float:
    """Relative; where there is nothing to be relative to (the gradient of scores of one token), absolute."""
    with torch.no_grad():
        return float((found.float() - reference).norm() / max(reference.norm(), 1e-2 * reference.numel() ** 0.5))


def test_what_the_kernels_do_not_take_goes_through_the_rectangle() -> None:
    layout = Packed.of(LENGTHS, "cuda")
    for width, dtype in ((64, torch.float32), (36, torch.bfloat16), (264, torch.bfloat16)):
        inputs = tensors(4, 2, width, dtype)
        assert not attention.fits_varlen(inputs[0], inputs[2])
        assert layout.attend(*inputs, 0.1, None, None).isfinite().all()
    inputs = tensors(4, 2, 64, torch.bfloat16)
    assert error(layout.attend(*inputs, 0.1, None, 2.0), layout.attend_padded(*inputs, 0.1, None, 2.0).float()) == 0
    with torch.autocast("cuda", torch.bfloat16):
        mixed = layout.attend(*tensors(4, 2, 64, torch.float32), 0.1, None, None)
    assert mixed.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "mistral", "gemma2"])
def test_a_model_packed_equals_each_sequence_alone(kind: str) -> None:
    model = tiny_model(kind, **SHAPE)
    model.module.to("cuda", torch.bfloat16)
    sequences = [torch.arange(2, 2 + length, device="cuda") % 70 + 2 for length in (40, 7, 90)]
    with torch.no_grad():
        together = model.hidden(torch.cat(sequences), Packed.of([ids.numel() for ids in sequences], "cuda"))
        alone = torch.cat([model.hidden(ids, Packed.of([ids.numel()], "cuda")) for ids in sequences])
    assert error(together, alone.float()) < 2e-2


def test_padding_costs_no_time_in_the_backward_pass() -> None:
    """One long sequence among many short ones: the gradient of the rectangle holds no sort and no serial addition."""
    layout = Packed.of([512] + [8] * 200, "cuda")
    inputs = [torch.randn(1, 4, 512 + 1600, 64, device="cuda", requires_grad=True) for _ in range(3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layout.attend_padded(*inputs, 0.1, None, None).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::index_put_", "aten::_index_put_impl_", "aten::sort"}


def test_gradients_are_the_same_every_time() -> None:
    """Blocks of a long sequence are added up in order, and what other operations may do is as it was."""
    lengths = [4000, 17, 900]
    layout = Packed.of(lengths, "cuda")
    inputs = [torch.randn(1, heads, sum(lengths), 64, device="cuda").bfloat16().requires_grad_() for heads in (8, 2, 2)]
    first, *others = ([*gradients(layout.attend(*inputs, 0.125, None, None), inputs)] for _ in range(5))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()
