"""The fused attention of decode steps against attention written out: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from opd.engines.layers import SlotLayout
from opd.models.attention import masked_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs CUDA or TRITON_INTERPRET=1"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # the interpreter's numpy has no bf16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(
    ("slots", "heads", "groups", "width"), [(3, 4, 2, 16), (2, 9, 3, 64), (4, 8, 1, 40), (70, 16, 8, 32)]
)
def test_one_token_per_slot(
    dtype: torch.dtype, window: int | None, slots: int, heads: int, groups: int, width: int
) -> None:
    """Slots of every length: empty but for the token itself, at a block's edge, and idle beyond the span."""
    from opd.engines.kernels import attend_slots

    if INTERPRETED and slots > 10:
        pytest.skip("takes long in the interpreter")
    total, span = 640, 512
    generator = torch.Generator().manual_seed(0)
    cache = [torch.randn(slots + 1, groups, total, width, generator=generator).to(DEVICE, dtype) for _ in range(2)]
    query = torch.randn(slots, 1, heads, width, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    column = torch.tensor([0, 63, 300, 639] * slots)[:slots].to(DEVICE)
    found = attend_slots(query[:, :, 0], *cache, column, span, 0.2, window)
    distance = column.clamp(max=span - 1)[:, None, None, None] - torch.arange(span, device=DEVICE)
    mask = (distance >= 0) & (distance < (window or span))
    near = [tensor[:slots, :, :span].float() for tensor in cache]
    expected = masked_attention(query.float(), *near, mask, 0.2, None)[:, :, 0]
    torch.testing.assert_close(found.float(), expected, atol=4e-3 if dtype == torch.float16 else 3e-2, rtol=0)


def test_a_layout_with_kernels_equals_one_without() -> None:
    """What is written, and what is read."""
    from opd.engines.kernels import attend_slots, store_slots

    slots, columns = torch.arange(2, device=DEVICE), torch.tensor([[70], [9]], device=DEVICE)
    before = [torch.randn(3, 2, 128, 24, device=DEVICE).half() for _ in range(2)]
    query = torch.randn(2, 4, 1, 24, device=DEVICE).half()
    new = [torch.randn(2, 1, 2, 24, device=DEVICE).half().transpose(1, 2) for _ in range(2)]
    found = []
    for kernels in ({}, {"kernel": attend_slots, "store": store_slots, "room": 100_000}):
        cache = [tensor.clone() for tensor in before]
        layout = SlotLayout(slots, columns, 128, in_order=True, **kernels)
        layout.write(*cache, *new)
        found.append((layout.attend(query, *cache, 0.25, 8, None), *cache))
    (plain, *caches), (fused, *written) = found
    assert all(torch.equal(one, other) for one, other in zip(caches, written, strict=True))
    assert plain.shape == fused.shape
    torch.testing.assert_close(fused, plain, atol=4e-3, rtol=0)


@pytest.mark.parametrize(
    ("room", "width", "expected"),
    [(232_448, 256, 3), (166_912, 256, 2), (101_376, 256, 1), (101_376, 64, 3), (0, 256, 1)],
)
def test_tiles_on_their_way_fit_into_shared_memory(room: int, width: int, expected: int) -> None:
    """H100, A100 and an RTX 4090."""
    from opd.engines.kernels import stages_in

    assert stages_in(room, width, 2) == expected
