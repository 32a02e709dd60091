"""Draws by kernels against `sampling.draw`: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from opd.engines.calls import RowSettings, draw, kept

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs CUDA or TRITON_INTERPRET=1"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
STOP = torch.tensor([3, 70], device=DEVICE)


def settings(rows: int, temperature: float, top_p: float = 1.0, top_k: int = 0) -> RowSettings:
    keys = torch.arange(rows, device=DEVICE) * 0x1234567890ABCDEF + 77
    return RowSettings(
        temperature=torch.full((rows,), temperature, device=DEVICE),
        top_p=torch.full((rows,), top_p, device=DEVICE),
        top_k=torch.full((rows,), top_k, device=DEVICE),
        key=keys & (2**63 - 1),
        position=torch.arange(rows, device=DEVICE) * 3,
    )


def logits(rows: int, size: int) -> Tensor:
    return (3 * torch.randn(rows, size, generator=torch.Generator().manual_seed(0))).to(DEVICE)


@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.6])
@pytest.mark.parametrize("size", [90, 9000])
def test_kernels_draw_what_torch_draws(temperature: float, size: int) -> None:
    from opd.engines.kernels import draw_rows

    rows = settings(6, temperature)
    z = logits(6, size)
    for stop in (STOP, STOP[:0]):
        expected, found = draw(z, rows, stop, filtered=False), draw_rows(z, rows, stop)
        assert found[0].tolist() == expected[0].tolist()
        torch.testing.assert_close(found[1:].float(), expected[1:].float(), atol=1e-5, rtol=1e-5, equal_nan=True)


def test_filters_and_neighbours() -> None:
    """Top-k and top-p; and a row without them comes out the same beside rows that have them."""
    from opd.engines.kernels import draw_rows

    z = logits(6, 5000)
    filtered = settings(6, 0.8, top_p=0.7, top_k=30)
    found = draw_rows(z, filtered, STOP, kept(z, filtered))
    expected = draw(z, filtered, STOP, filtered=True)
    assert found[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(found[2].float(), expected[2].float(), atol=1e-5, rtol=1e-5)
    free = settings(6, 0.8)
    wide = RowSettings(**{name: torch.stack([part, part + 1], 1)[:, 0] for name, part in vars(free).items()})
    assert torch.equal(draw_rows(z, free, STOP), draw_rows(z, wide, STOP))  # settings that lie apart
    assert torch.equal(draw_rows(z, free, STOP), draw_rows(z, free, STOP, kept(z, free)))


def test_what_is_no_number_is_none() -> None:
    from opd.engines.kernels import draw_rows

    z = logits(2, 5000)
    z[1, 17] = float("nan")
    found = draw_rows(z, settings(2, 1.0), STOP)
    assert found[1].isnan().tolist() == [False, True]
    assert 0 <= int(found[0, 1]) < 5000
