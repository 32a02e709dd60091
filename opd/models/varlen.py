"""Attention over sequences of different lengths as they lie back to back: torch's own flash kernels, no padding, no mask.

Its gradient is the same to the bit every time, as long as no other thread uses the device: see `beside_training`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
WIDEST = 256  # head dimension of the kernels, which also take multiples of 8 alone
OLDEST = (8, 0)  # compute capability
_others: set[int] = set()  # threads that use the device beside the one that trains


def fits_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these: query (1, H, T, D), value (1, G, T, Dv)."""
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in HALF
        and width == value.shape[-1]
        and width % 8 == 0
        and width <= WIDEST
        and _capability(query.device) >= OLDEST
    )


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """query (H, T, D), key and value (G, T, D) with G dividing H -> (T, H, D). `window`: tokens seen, oneself included."""
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    before = -1 if window is None or window >= longest else window - 1
    out: Tensor = FlashAttention.apply(q, k, v, bounds, longest, scale, before)
    return out


class FlashAttention(torch.autograd.Function):
    """The operators below torch's `varlen_attn`, which are half as long under way on the host."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, before: int
    ) -> Tensor:
        ctx.sizes, ctx.window = (longest, longest, 0.0, before == -1), (scale, before)
        out, mass, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, *ctx.sizes, False, scale=scale, window_size_left=before, window_size_right=0
        )
        ctx.save_for_backward(q, k, v, out, mass, bounds, state, unused)
        found: Tensor = out
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, mass, bounds, state, unused = ctx.saved_tensors
        scale, before = ctx.window
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        with _repeatable():
            found = torch.ops.aten._flash_attention_backward(
                grad, q, k, v, out, mass, bounds, bounds, *ctx.sizes, state, unused,
                scale=scale, window_size_left=before, window_size_right=0,
            )  # fmt: skip
        return *found, None, None, None, None


@contextmanager
def beside_training() -> Iterator[None]:
    """A thread that uses the device while another trains. What makes gradients repeatable is a switch for the whole process,
    under which some of its operations would fail; and who samples ahead of training does not repeat a run anyway.
    """
    own = threading.get_ident()
    _others.add(own)
    try:
        yield
    finally:
        _others.discard(own)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Blocks of the gradient are added up in order, not as they come."""
    if _others or torch.are_deterministic_algorithms_enabled():
        yield
        return
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False, warn_only=False)
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
