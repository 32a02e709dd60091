"""Which keys and values of a slot cache a call reads."""

from __future__ import annotations

import pytest
import torch

from opd.engines.layers import SlotLayout

SLOTS, GROUPS, LENGTH, WIDTH = 5, 3, 16, 4


@pytest.mark.parametrize("chosen", [[], [2], [4, 0, 2], [1, 1]])
@pytest.mark.parametrize("span", [1, 7, LENGTH, 2 * LENGTH])
def test_slots_are_read_up_to_the_span(chosen: list[int], span: int) -> None:
    """From a cache as it is kept, and from one that a layer has made of latents, whose heads lie elsewhere in memory."""
    kept = torch.randn(SLOTS, GROUPS, LENGTH, WIDTH)
    made = kept.transpose(1, 2).contiguous().transpose(1, 2)
    assert not made.is_contiguous()
    slots = torch.tensor(chosen, dtype=torch.int64)
    layout = SlotLayout(slots, torch.zeros(len(chosen), 1, dtype=torch.int64), span, in_order=False)
    wanted = kept[slots, :, :span]
    for cache in (kept, made, kept[:, :1]):
        found = layout.read(cache)
        assert found.shape == wanted[:, : cache.shape[1]].shape
        assert torch.equal(found, wanted[:, : cache.shape[1]])


def test_slots_in_order_are_not_copied() -> None:
    kept = torch.randn(SLOTS, GROUPS, LENGTH, WIDTH)
    found = SlotLayout(torch.arange(2), torch.zeros(2, 1, dtype=torch.int64), 7, in_order=True).read(kept)
    assert found.data_ptr() == kept.data_ptr()
    assert torch.equal(found, kept[:2, :, :7])
