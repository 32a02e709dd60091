"""Attention over sequences of different lengths as they lie back to back: torch's own flash kernels, no padding, no mask."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

KNOWN = frozenset(inspect.signature(varlen_attn).parameters)  # torch 2.12 wants to be told of grouped heads, 2.11 not
HALF = (torch.bfloat16, torch.float16)
WIDEST = 256  # head dimension of the kernels, which also take multiples of 8 alone
OLDEST = (8, 0)  # compute capability


def fits_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these: query (1, H, T, D), value (1, G, T, Dv)."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in HALF
        and width == value.shape[-1]
        and width % 8 == 0
        and width <= WIDEST
        and "window_size" in KNOWN
        and _capability(query.device) >= OLDEST
    )


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """query (H, T, D), key and value (G, T, D) with G dividing H -> (T, H, D). `window`: tokens seen, oneself included."""
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    before = -1 if window is None or window >= longest else window - 1
    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] and "enable_gqa" in KNOWN else {}
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(before, 0), **grouped)
    assert isinstance(out, Tensor)
    return out


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
