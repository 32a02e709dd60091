"""The largest columns of rows against `topk`: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs CUDA or TRITON_INTERPRET=1"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.parametrize(("columns", "k"), [(301, 1), (5000, 7), (9001, 33)])
def test_the_largest_columns(columns: int, k: int) -> None:
    """Rows that are part of a wider tile; one of them with many equal values, one with columns that are not there."""
    from opd.divergences.triton_kernels import largest_columns, takes

    tile = torch.randn(4, columns + 30, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    values = tile[:, :columns]
    values[1] = values[1].round()
    values[2, : columns - 2 * k] = -1e30
    assert takes(values, k)
    found, ids = largest_columns(values, k)
    assert torch.equal(found.sort(-1, descending=True).values, values.topk(k, dim=-1).values)
    assert torch.equal(values.gather(-1, ids), found)
    assert all(len(set(row)) == k for row in ids.tolist())


def test_what_is_left_to_torch() -> None:
    from opd.divergences.triton_kernels import takes

    assert not takes(torch.zeros(2, 1000), 9)
    assert not takes(torch.zeros(2, 200_000), 300)
