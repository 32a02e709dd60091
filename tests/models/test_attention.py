"""Attention over packed sequences: the padded rectangle, against stock indexing and against each sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opd.models.attention import SLACK, Packed, TakeRows, masked_attention
from opd.models.language_model import Pack
from tests.support.rollouts import rollout

LENGTHS = [5, 1, 12, 3, 12]
HEADS, GROUPS, WIDTH = 4, 2, 8


def tensors(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, sum(LENGTHS), WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return list(torch.autograd.grad((out * weights).sum(), inputs))


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 2.0), (3, 2.0)])
def test_a_pack_equals_each_sequence_alone(window: int | None, softcap: float | None) -> None:
    inputs = tensors()
    together = Packed.of(LENGTHS).attend(*inputs, 0.4, window, softcap)
    parts = []
    for part in zip(*(tensor.split(LENGTHS, 2) for tensor in inputs), strict=True):
        length = part[0].shape[2]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < (window or length))
        parts.append(masked_attention(*part, mask, 0.4, softcap).transpose(1, 2))
    alone = torch.cat(parts, 1)
    torch.testing.assert_close(together, alone)
    for ours, theirs in zip(gradients(together, inputs), gradients(alone, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_rectangle_equals_stock_indexing_bit_for_bit() -> None:
    """Padding that repeats token 0 gives the same numbers, and a gradient that adds up thousands of duplicates."""
    inputs, layout = tensors(), Packed.of(LENGTHS)
    sizes = [rows * longest for rows, longest in layout.rectangles]
    gather = torch.zeros(sum(sizes), dtype=torch.int64)
    gather[layout.cells] = torch.arange(sum(LENGTHS))
    outs = []
    for cells, shape in zip(gather.split(sizes), layout.rectangles, strict=True):
        query, key, value = (tensor[0].transpose(0, 1)[cells].unflatten(0, shape).transpose(1, 2) for tensor in inputs)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=0.4, enable_gqa=True
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    stock = torch.cat(outs)[layout.cells][None]
    ours = layout.attend(*inputs, 0.4, None, None)
    assert torch.equal(ours, stock)
    assert all(torch.equal(*pair) for pair in zip(gradients(ours, inputs), gradients(stock, inputs), strict=True))


def test_sequences_of_one_length_need_no_rectangle() -> None:
    inputs = [tensor[:, :, :24] for tensor in tensors()]
    out = Packed.of([12, 12]).attend(*inputs, 0.4, None, None)
    halves = zip(*(tensor.split(12, 2) for tensor in inputs), strict=True)
    alone = torch.cat([Packed.of([12]).attend(*half, 0.4, None, None) for half in halves], 1)
    torch.testing.assert_close(out, alone)


def test_layout_of_a_pack() -> None:
    layout = Packed.of([3, 1, 2])
    assert layout.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert layout.rectangles == ((1, 3), (1, 2), (1, 1))
    assert layout.cells.tolist() == [0, 1, 2, 5, 3, 4]
    assert layout.bounds.tolist() == [0, 3, 4, 6]
    assert layout.bounds.dtype == torch.int32


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_rectangles_hold_every_token_once_and_little_else(lengths: list[int]) -> None:
    layout = Packed.of(lengths)
    cells = sum(rows * longest for rows, longest in layout.rectangles)
    assert len(set(layout.cells.tolist())) == sum(lengths)
    assert max(layout.cells.tolist()) < cells
    assert sum(rows for rows, _ in layout.rectangles) == len(lengths)
    assert cells * SLACK <= sum(lengths)
    for first, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):  # a sequence lies in one row
        assert layout.cells[first : first + length].diff().eq(1).all()


def test_no_row_of_a_pack_is_taken_twice() -> None:
    """Gradients of rows that are taken are copied back, so a row taken twice would lose one of them."""
    rollouts = [rollout("1", [5, 6], [8, 9, 1]), rollout("2", [10], [11]), rollout("3", [7, 7, 7], [4, 5])]
    places = Pack.of(rollouts).predicting_N
    assert places.unique().numel() == places.numel() == 6
    rows = torch.randn(int(places.max()) + 2, 3, requires_grad=True)
    torch.testing.assert_close(gradients(TakeRows.apply(rows, places), [rows]), gradients(rows[places], [rows]))
