"""Our attention functions, registered with transformers under the name `opd`.

Stock model classes run unchanged: they pass query, key and value to the function that `config._attn_implementation` names,
along with unknown keyword arguments. So a `layout` argument reaches every attention layer from `backbone(…, layout=…)`. It
says how the rows of this batch relate to each other: `Packed` here, the sampler's slots in `sampling.slots`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from opd.divergences.projection import upload

NAME = "opd"


class Layout(Protocol):
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """query (B, H, Q, D), key and value (B, G, K, D) with G dividing H, sinks (H,) -> (B, Q, H, Dv)."""
        ...


class Unknown(Exception):
    """A model asks its attention for something that these functions do not support."""


HARMLESS = {"position_ids", "cache_position"}  # tensors that stock classes pass along but attention never reads


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
    layout: Layout | None = None, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`s_aux` are attention sinks: one score per head that takes part in the softmax but has no value."""
    if layout is None:
        raise Unknown("its layers do not pass arguments on to their attention")
    if attention_mask is not None:
        raise Unknown("it masks attention in a way of its own")
    for name, value_given in others.items():
        if isinstance(value_given, Tensor) and name not in HARMLESS:
            raise Unknown(f"it passes {name} to its attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(query, key, value, scale, sliding_window, softcap, s_aux), None


AttentionInterface.register(NAME, attention)


class PlaceRows(torch.autograd.Function):
    """Scatter rows to the given places of `count`, zeros elsewhere. Places are unique, so the gradient is a plain gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


class TakeRows(torch.autograd.Function):
    """Gather rows at the given places. Places are unique, so the gradient is copied back; stock indexing would sort and add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.count = rows.shape[0]
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, *grad.shape[1:]).index_copy_(0, places, grad), None


def take(rows: Tensor, places: Tensor) -> Tensor:
    return TakeRows.apply(rows, places)


SLACK = 0.75  # least length of a sequence in a rectangle, as a fraction of the longest one


def _rectangles(lengths: list[int]) -> tuple[tuple[tuple[int, int], ...], np.ndarray]:
    """Group sequences of similar length. Returns (rows, columns) of each rectangle, and every sequence's first cell."""
    shapes: list[list[int]] = []
    first_cells, end = np.empty(len(lengths), dtype=np.int64), 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):  # the sort is stable
        if not shapes or lengths[index] < SLACK * shapes[-1][1]:
            shapes.append([0, lengths[index]])
        first_cells[index] = end
        shapes[-1][0] += 1
        end += shapes[-1][1]
    return tuple((rows, longest) for rows, longest in shapes), first_cells


@dataclass(frozen=True, eq=False)
class Packed:
    """Several sequences back to back in one row; each attends only to itself.

    On CUDA in half precision attention reads them as they are. Elsewhere, and for features those kernels lack, sequences of
    similar length are padded on the right to rectangles, for attention alone. With a causal mask no real token sees padding.
    """

    lengths: tuple[int, ...]
    positions: Tensor  # (T,) restart at 0 with each sequence
    cells: Tensor  # (T,) where each token sits in the flattened rectangles
    bounds: Tensor  # (sequences + 1,) int32: the start of each sequence, then the end
    rectangles: tuple[tuple[int, int], ...]  # (number of sequences, longest sequence) of each

    @classmethod
    def of(cls, lengths: list[int], device: torch.device | str = "cpu") -> Packed:
        ends = np.cumsum(lengths)
        starts, rows = ends - lengths, np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(ends[-1]) - starts[rows]
        rectangles, first_cells = _rectangles(lengths)
        arrays = positions, first_cells[rows] + positions, np.append(0, ends).astype(np.int32)
        places, cells, bounds = (upload(array, device) for array in arrays)
        return cls(tuple(lengths), places, cells, bounds, rectangles)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if softcap is None and sinks is None and fits_varlen(query, value):
            query, key, value = (
                tensor.squeeze(0) for tensor in (query, key, value)
            )  # not [0], whose gradient has to be filled with zeros
            return attend_varlen(query, key, value, self.bounds, max(self.lengths), scale, window)[None]
        return self.attend_padded(query, key, value, scale, window, softcap, sinks)

    def attend_padded(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        sizes = [rows * longest for rows, longest in self.rectangles]
        full = len(sizes) == 1 and sizes[0] == sum(self.lengths)

        def padded(tensor: Tensor) -> list[Tensor]:  # (1, H, T, D) -> (rows, H, longest, D) each
            tokens = tensor[0].transpose(0, 1)
            cells = tokens if full else PlaceRows.apply(tokens, self.cells, sum(sizes))
            parts = cells.split(sizes)
            return [
                part.unflatten(0, shape).transpose(1, 2) for part, shape in zip(parts, self.rectangles, strict=True)
            ]

        parts = zip(padded(query), padded(key), padded(value), strict=True)
        outs = [self._attend_rectangle(*part, scale, window, softcap, sinks) for part in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return (out.contiguous() if full else take(out, self.cells))[None]  # some models view it

    def _attend_rectangle(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """(rows, H, longest, D) -> (rows * longest, H, Dv)"""
        longest = query.shape[2]
        if softcap is None and sinks is None and (window is None or window >= longest):
            out = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )
        else:
            out = masked_attention(query, key, value, self._mask(longest, window, query.device), scale, softcap, sinks)
        return out.transpose(1, 2).flatten(0, 1)

    @staticmethod
    def _mask(longest: int, window: int | None, device: torch.device) -> Tensor:
        distance = torch.arange(longest, device=device)[:, None] - torch.arange(longest, device=device)
        return (distance >= 0) & (distance < (window or longest))


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention written out, for features that the fused kernels lack: soft-capped scores, arbitrary masks, sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, column], -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(query.dtype) @ value


# --- Attention over packed sequences with torch's own flash kernels: no padding, no mask ---
#
# The gradient is bitwise reproducible as long as no other thread uses the device: see `beside_training`.


HALF = (torch.bfloat16, torch.float16)
WIDEST = 256  # largest head dimension of the kernels; it must be a multiple of 8
OLDEST = (8, 0)  # least compute capability
_others: set[int] = set()  # threads that use the device alongside the one that trains


def fits_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels support these: query (1, H, T, D), value (1, G, T, Dv)."""
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
    """query (H, T, D), key and value (G, T, D) with G dividing H -> (T, H, D). `window`: tokens seen, including itself."""
    q, k, v = (tensor.transpose(0, 1) for tensor in (query, key, value))
    before = -1 if window is None or window >= longest else window - 1
    out: Tensor = FlashAttention.apply(q, k, v, bounds, longest, scale, before)
    return out


class FlashAttention(torch.autograd.Function):
    """The operators that torch's `varlen_attn` calls. Calling them directly halves the time on the host."""

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
    """Mark this thread as using the device while another trains: gradients are then not made repeatable.

    The switch for that is process-wide, and some of this thread's operations would fail under it. Sampling ahead of training is
    not reproducible anyway.
    """
    own = threading.get_ident()
    _others.add(own)
    try:
        yield
    finally:
        _others.discard(own)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Add up the blocks of the gradient in a fixed order."""
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
