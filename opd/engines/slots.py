"""The key/value cache of the built-in sampler: a fixed number of slots, each as long as the longest sequence.

Stock model classes write to it through `Cache.update` and read it through our attention function (see
`models.attention`). A `SlotLayout` gives the slot and the columns of each row of the batch.

Axis legend: B = rows of a call, Q = tokens per row, S = slots, W = columns, H = query heads, G = key/value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin

from opd.models.fused_layers import kernels_on

WIDEST = 256  # the largest head dimension that the kernels support


DecodeKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, int | None, int], Tensor]
StoreKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


class Decoding(TypedDict, total=False):
    """Arguments of a `SlotLayout` for one token per slot, in order, if there are kernels: see `kernels.attend_slots`."""

    kernel: DecodeKernel
    store: StoreKernel | None
    room: int


def fused_decoding(device: torch.device, compiled: bool) -> Decoding:
    """The decoding kernels for a device; empty if there are none. Code compiled by torch stores keys and values itself."""
    if not kernels_on(device):
        return {}
    from opd.engines import kernels

    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    store = None if compiled else kernels.store_slots
    return {"kernel": kernels.attend_slots, "store": store, "room": room}


def fused_drawing(device: torch.device) -> Callable[..., Tensor] | None:
    """`kernels.draw_rows`, if the device has kernels."""
    if not kernels_on(device):
        return None
    from opd.engines.kernels import draw_rows

    return draw_rows


def fewer_rows(module: nn.Module, slots: int, even: int) -> list[int]:
    """The numbers of slots, ascending, for which a decode step can run instead of all. Not 1: that is another kind of product.

    Empty if the arithmetic of a row depends on other rows.
    """
    if depends_on_others(module):
        return []
    counts = [slots]
    while counts[0] % 2 == 0 and counts[0] >= 4 and counts[0] // 2 % even == 0:
        counts.insert(0, counts[0] // 2)
    return counts[:-1]


def any_rows(counts: list[int]) -> list[int]:
    """More counts than `fewer_rows`, including 1, for packed weights, which multiply any number of rows alike."""
    return sorted({*counts, *(count // 2 for count in counts), *(count // 2 * 3 for count in counts)})


def depends_on_others(module: nn.Module) -> bool:
    """Whether rows depend on each other: an expert multiplies all the rows routed to it at once."""
    experts = any("experts" in name.split(".") for name, _ in module.named_modules())
    return experts or any(weight.ndim > 2 for weight in module.parameters())


def _takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16) and query.dtype == key.dtype == value.dtype
    return half and query.shape[-1] == value.shape[-1] <= WIDEST and query.stride(-1) == 1


class SlotLayout:
    """Row b of a call holds the tokens of slot `slots[b]` at `columns[b]`; a token sees its own slot up to itself.

    `in_order`: slots are 0, 1, … B - 1, so the cache is read in place instead of gathered, as it is for a single slot.
    One object serves one forward pass: the first layer builds the masks, and the others share them. `span` limits the
    columns that are read. Columns after a row's own are masked, so `span` affects speed, not results.
    """

    def __init__(
        self,
        slots: Tensor,
        columns: Tensor,
        span: int,
        in_order: bool,
        kernel: DecodeKernel | None = None,
        store: StoreKernel | None = None,
        room: int = 0,
    ) -> None:
        self.slots = slots  # (B,) int64
        self.columns = columns  # (B, Q) int64
        self.span = span
        self.kernel, self.store = kernel, store  # for one token per slot, in order
        self.room = room  # bytes of shared memory that the kernel may use
        alone = slots.device.type == "cpu" and columns.shape[0] == 1
        self._first = (
            0 if in_order else int(slots) if alone else None
        )  # the first of adjacent slots, which can be read as views
        self._column = int(columns) if alone and columns.numel() == 1 else None  # of a single token
        self._masks: dict[int | None, Tensor] = {}
        self._lines_of: dict[int, Tensor] = {}

    def write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value (B, G, Q, D) to caches (S, G, W, D). All rows of a call are written before any is read."""
        if self.store is not None and key.shape == value.shape and key.stride(-1) == value.stride(-1) == 1:
            self.store(keys, values, key[:, :, 0], value[:, :, 0], self.columns[:, 0])
            return
        for cache, new in ((keys, key), (values, value)):
            if self._first is not None and self._column is not None:
                cache[self._first, :, self._column] = new[0, :, 0]
            else:
                cache[self.slots[:, None], :, self.columns] = new.transpose(1, 2)

    def read(self, cache: Tensor) -> Tensor:
        """(B, G, span, D)"""
        if self._first is not None:
            return cache[self._first : self._first + self.slots.shape[0], :, : self.span]
        if not cache.is_contiguous():  # keys and values computed from cached latents
            return cache[:, :, : self.span].index_select(0, self.slots)
        _, groups, length, width = cache.shape
        lines = cache.view(-1, length * width)[:, : self.span * width]  # one per slot and head: few long copies
        return lines.index_select(0, self._lines(groups)).view(-1, groups, min(self.span, length), width)

    def _lines(self, groups: int) -> Tensor:
        """(B * G,) the lines of a cache that belong to the slots."""
        if groups not in self._lines_of:
            lines = self.slots[:, None] * groups + torch.arange(groups, device=self.slots.device)
            self._lines_of[groups] = lines.flatten()
        return self._lines_of[groups]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query (B, H, Q, D), whole caches (S, G, W, D) -> (B, Q, H, D).

        Query heads that share a key/value head are folded into the query axis, so nothing is repeated.
        """
        rows, heads, queries, _ = query.shape
        groups = key.shape[1]
        if self.kernel is not None and softcap is None and sinks is None and _takes(query, key, value):
            column = self.columns[:, 0]
            return self.kernel(query[:, :, 0], key, value, column, self.span, scale, window, self.room)[:, None]
        folded = query.reshape(rows, groups, heads // groups * queries, -1)
        mask = self._mask(window, heads // groups, query.dtype)
        near_key, near_value = self.read(key), self.read(value)
        if sinks is not None:
            column = sinks.to(query.dtype).view(groups, -1, 1).expand(-1, -1, queries).reshape(1, groups, -1, 1)
            scores = folded @ near_key.transpose(-1, -2) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            scores = torch.cat([scores + mask, column.expand(rows, -1, -1, -1)], -1)
            out = scores.softmax(-1, dtype=torch.float32)[..., :-1].to(query.dtype) @ near_value
        elif softcap is None:
            out = scaled_dot_product_attention(folded, near_key, near_value, attn_mask=mask, scale=scale)
        else:
            scores = softcap * torch.tanh(folded @ near_key.transpose(-1, -2) * (scale / softcap))
            out = (scores + mask).softmax(-1, dtype=torch.float32).to(query.dtype) @ near_value
        return out.reshape(rows, heads, queries, -1).transpose(1, 2).contiguous()

    def _mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """(B, 1, repeats * Q, span), an additive mask: 0 where a token sees a column, hugely negative elsewhere.

        Not -inf: in a sliding layer, an idle slot beyond the span sees nothing, and its NaNs would stay in the cache for
        the slot's next request.
        """
        if window not in self._masks:
            distance = self.columns[:, :, None] - torch.arange(self.span, device=self.columns.device)  # (B, Q, span)
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros_like(distance, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
            self._masks[window] = mask.repeat(1, repeats, 1)[:, None]
        return self._masks[window]


class SlotCache(Cache):
    """One `SlotLayer` per model layer. Set `layout` before each forward pass."""

    def __init__(self, layers: int, slots: int, width: int) -> None:
        super().__init__(layers=[SlotLayer(self, slots, width) for _ in range(layers)])
        self.layout: SlotLayout | None = None

    @property
    def bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer. Allocated at the first update, which shows the number and the width of the heads.

    They start as zeros: a masked column still enters as 0 * value, which must not be 0 * NaN.
    """

    is_sliding = False  # sliding layers keep all columns; their window is in the mask

    def __init__(self, cache: SlotCache, slots: int, width: int) -> None:
        super().__init__()
        self.cache, self.slots, self.width = cache, slots, width

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            torch.zeros(
                self.slots, states.shape[1], self.width, states.shape[3], dtype=states.dtype, device=states.device
            )
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        layout = self.cache.layout
        assert layout is not None
        assert self.keys is not None
        assert self.values is not None
        layout.write(self.keys, self.values, key_states, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0  # slots differ; positions are always given explicitly

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_max_length(self) -> int:
        return self.width

    def get_max_cache_shape(self) -> int:
        return self.width
