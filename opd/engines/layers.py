"""What the models of the built-in sampler compute with: the key/value cache in slots, and common decoder layers written out.

A `SlotLayout` gives the slot and the columns of each row of a call. Stock model classes write to the cache through `Cache.update` and
read it through our attention function (see `models.attention`). Common decoder layers are written out, which is faster:
`DecodeLayers` on a GPU, `LeanLayers` on a CPU. They are used only if a few tokens give the same results as the model's own classes.
On x86-64, `MklWeights` packs the weights.

Axis legend: B = rows of a call, Q = tokens per row, S = slots, W = columns, H = query heads, G = key/value heads.
"""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.cache_utils import Cache, CacheLayerMixin

from opd.common.cpu_env import MODE
from opd.divergences import Projection
from opd.models.fused_layers import GATED, HALF, NormFormula, is_fused, kernels_on, norm_of, stock_class
from opd.models.language_model import LanguageModel

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
        self._lines: dict[int, Tensor] = {}  # (B * G,) by G: the lines of a cache that belong to the slots

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
        if groups not in self._lines:
            self._lines[groups] = (self.slots[:, None] * groups + torch.arange(groups, device=cache.device)).flatten()
        lines = cache.view(-1, length * width)[:, : self.span * width]  # one per slot and head: few long copies
        return lines.index_select(0, self._lines[groups]).view(-1, groups, min(self.span, length), width)

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


# --- Common decoder layers on a GPU: a decode step with fused kernels, see `kernels` ---
#
# layers = DecodeLayers.of(model, room)      # None: the model has other layers
# layers(ids_B, layout, cache)               # (B, D) final hidden states
#
# Layers are recognised by their attention class, since others look alike but scale distant queries or do not rotate in every layer.
# Their parts are recognised by `fuse_layers` from what they compute.


KNOWN = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")  # plain attention, without extras
PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
PROBED = 4  # tokens per slot that the comparison with the model's own layers uses
MOST_SHARED = 48 * 1024  # bytes of shared memory that a tile of the deepest product needs at least


def writes_out(config: Any) -> bool:
    """Whether the model's family suggests that these layers apply, by name. The final test is `agree`."""
    return f"{config.model_type}attention" in [name.lower() for name in KNOWN]


@dataclass(frozen=True, eq=False)
class DecodeLayer:
    """The parts of a layer and their settings."""

    attention: Any
    mlp: Any
    norms: tuple[NormFormula, NormFormula]  # before attention, before the gated product
    head_norms: tuple[NormFormula, NormFormula] | None  # of queries and of keys
    width: int  # of a head
    groups: int
    scale: float
    window: int | None

    @classmethod
    def of(cls, layer: nn.Module, window: int | None) -> DecodeLayer | None:
        """`window`: the sliding window of the config, for layers that use that."""
        parts: dict[str, Any] = dict(layer.named_children())
        if parts.keys() != LAYER or not is_fused(parts["self_attn"]) or not is_fused(parts["mlp"]):
            return None
        norms = norm_of(parts["input_layernorm"]), norm_of(parts["post_attention_layernorm"])
        attention, mlp = parts["self_attn"], parts["mlp"]
        family = stock_class(attention).__name__
        inside, facts = dict(attention.named_children()), vars(attention)
        width, scale = facts.get("head_dim"), facts.get("scaling")
        plain = all(type(inside.get(name)) is nn.Linear for name in PROJECTIONS)
        known = inside.keys() <= {*PROJECTIONS, *HEAD_NORMS} and family in KNOWN
        if not (plain and known and isinstance(width, int) and isinstance(scale, float)) or None in norms:
            return None
        heads = [norm_of(inside[name]) for name in HEAD_NORMS if name in inside]
        pair: Any = (heads[0], heads[1]) if len(heads) == 2 else None
        groups = attention.k_proj.out_features // width
        around: Any = norms
        own = window if family == "MistralAttention" else facts.get("sliding_window")
        found = cls(attention, mlp, around, pair, width, groups, scale, own)
        return found if len(heads) != 1 and found._fits() else None

    def _fits(self) -> bool:
        from opd.engines.kernels import takes_product

        attention, width = self.attention, self.width
        query, key, value, out = (getattr(attention, name) for name in PROJECTIONS)
        even = query.out_features % width == 0 and key.out_features == value.out_features == self.groups * width
        sizes = even and out.in_features == query.out_features and width % 2 == 0 and width <= WIDEST
        biases = [module.bias is None for module in (query, key, value)]
        bare = self.mlp.gate_proj.bias is None and self.mlp.up_proj.bias is None
        heads = self.head_norms is None or (
            None not in self.head_norms
            and self.head_norms[0].like(self.head_norms[1])
            and all(norm.weight.shape == (width,) for norm in self.head_norms)
        )
        products = (query, key, value, self.mlp.gate_proj, self.mlp.up_proj)
        tiles = all(takes_product(module.weight) for module in products)
        return sizes and heads and tiles and bare and (all(biases) or not any(biases))


class DecodeLayers:
    """The layers of a model, using its own weights."""

    def __init__(self, backbone: Any, layers: list[DecodeLayer], last: NormFormula, room: int) -> None:
        self._backbone, self._layers, self._last, self._room = backbone, layers, last, room

    @classmethod
    def of(cls, model: LanguageModel, room: int) -> DecodeLayers | None:
        """Recognise a model without a forward pass. `room`: bytes of shared memory for the kernels."""
        backbone: Any = model.backbone
        weights = list(backbone.parameters())
        plain = model.stays and not model.sharded and not any(map(is_traceable_wrapper_subclass, weights))
        half = plain and model.dtype in HALF and all(weight.dtype == model.dtype for weight in weights)
        parts = dict(backbone.named_children())
        if not half or room < MOST_SHARED or parts.keys() != PARTS or type(parts["embed_tokens"]) is not nn.Embedding:
            return None
        window = vars(model.module.config).get("sliding_window")
        layers, last = [DecodeLayer.of(layer, window) for layer in backbone.layers], norm_of(backbone.norm)
        found = [layer for layer in layers if layer is not None]
        return cls(backbone, found, last, room) if last is not None and len(found) == len(layers) else None

    def __call__(self, ids_B: Tensor, layout: SlotLayout, cache: SlotCache) -> Tensor:
        from opd.engines.kernels import add_norm, gated_products, joined_products, place_heads

        column, room = layout.columns[:, 0], self._room
        stream = self._backbone.embed_tokens(ids_B)
        turns = [
            turn.expand(len(ids_B), -1, -1)[:, 0] for turn in self._backbone.rotary_emb(stream[:, None], layout.columns)
        ]
        change: Tensor | None = None
        for layer, kept in zip(self._layers, cache.layers, strict=True):
            attention, mlp, (before, after) = layer.attention, layer.mlp, layer.norms
            heads = layer.head_norms
            normed = add_norm(stream, change, *before)
            three = attention.q_proj, attention.k_proj, attention.v_proj
            joined = joined_products(normed, [part.weight for part in three], [part.bias for part in three], room)
            gains = None if heads is None else (heads[0].weight, heads[1].weight)
            how = (0.0, 0.0, True) if heads is None else heads[0][1:]
            query = place_heads(joined, turns, gains, kept.keys, kept.values, column, layer.groups, *how)
            assert layout.kernel is not None
            found = layout.kernel(
                query, kept.keys, kept.values, column, layout.span, layer.scale, layer.window, layout.room
            )
            out = attention.o_proj
            normed = add_norm(stream, linear(found.flatten(1), out.weight, out.bias), *after)
            down = mlp.down_proj
            change = linear(
                gated_products(normed, mlp.gate_proj.weight, mlp.up_proj.weight, room), down.weight, down.bias
            )
        last: Tensor = add_norm(stream, change, *self._last)
        return last


@torch.no_grad()
def probe(
    compute: Callable[[Tensor, SlotLayout], Tensor], slots: Tensor, size: int, span: int, decoding: Decoding
) -> Tensor:
    """Hidden states after a few tokens in every slot. Slots must be empty; what this writes is overwritten later."""
    hidden = torch.empty(0)
    for column in range(min(PROBED, span)):
        ids, columns = (slots * 7919 + column * 104_729) % size, torch.full_like(slots, column)
        hidden = compute(ids[:, None], SlotLayout(slots, columns[:, None], span, in_order=True, **decoding))
    return hidden


def agree(result: Tensor, usual: Tensor) -> bool:
    """Whether two results are equal up to half-precision rounding."""
    difference, size = (result - usual).float().norm(), usual.float().norm()
    return bool(torch.isfinite(size)) and float(difference) <= 0.05 * float(size)


# --- Weights packed by MKL, on x86-64: products of a few rows take about half the time ---
#
# products = MklWeights(model)              # packs nothing if MKL cannot; layers then run unchanged
# products.join(groups)                     # layers with the same input become one product
# with products.sampling():
#     with products.routed():               # one call: layers multiply with packed weights
#         hidden = model.backbone(...)
#         logits = products.logits(model.project(hidden))
# products.forget()                         # the weights have changed
#
# Packed weights are a second copy, so they are kept only during sampling, and until the weights change. A fused optimiser does
# not update the tensors' version counters, so a few values of each matrix are also compared before each call.


log = logging.getLogger(__name__)

SMALLEST = 2**17  # elements; packing does not speed up smaller matrices
MOST = 2**32  # bytes of all matrices of a model
PACKED_FOR = 128  # rows, as in a few prompts: packed for 16, these take 25% longer, and 16 rows are no faster
ROWS = 16  # rows per product; other numbers are tested before they are used
WATCHED = 16  # values of a matrix that are compared before each call


def packs() -> bool:
    """Whether MKL is used, in the mode in which the rounding of a row does not depend on other rows."""
    known = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkl.is_available()
    ops = ("_mkl_linear", "_mkl_reorder_linear_weight")
    return known and "STRICT" in os.environ.get(MODE, "") and all(hasattr(torch.ops.mkl, name) for name in ops)


class MklWeights:
    def __init__(self, model: LanguageModel) -> None:
        """The modules must belong to the sampler. They are only changed during calls."""
        self._layers: list[tuple[nn.Linear, Matrix]] = []
        self._joined: list[tuple[Joined, Matrix]] = []
        self._head: Matrix | None = None
        self.matrices: list[Matrix] = []  # of all of these
        self._tried: dict[tuple[int, ...], bool] = {}  # test results: by shape, and by shape and number of rows
        self._sampling = self._packed = self._routed = False
        self._watched: list[Tensor] = []  # views of some values of each matrix
        plain = model.device.type == "cpu" and model.stays and not model.sharded and not depends_on_others(model.module)
        if not plain or not packs():
            return
        layers = [layer for layer in model.backbone.modules() if _plain(layer) and layer.weight.numel() >= SMALLEST]
        head = model.head.weight if _fits(model.head.weight) and model.head.weight.numel() >= SMALLEST else None
        found = [*(layer.weight for layer in layers), *([] if head is None else [head])]
        if sum(weight.nbytes for weight in found) > MOST:
            return
        self._layers = [(layer, Matrix((layer.weight,), self._tried)) for layer in layers]
        self._head = None if head is None else Matrix((head,), self._tried, model.size)
        self._list_matrices()

    def _list_matrices(self) -> None:
        self.matrices = [matrix for _, matrix in self._layers] + [matrix for _, matrix in self._joined]
        self.matrices += [] if self._head is None else [self._head]

    def covers(self, module: nn.Module) -> bool:
        """Whether all of its linear layers, and the head, use packed weights."""
        inside = {layer for group, _ in self._joined for layer in group.layers} | {layer for layer, _ in self._layers}
        return self._head is not None and all(
            layer in inside for layer in module.modules() if isinstance(layer, nn.Linear)
        )

    def join(self, groups: Iterable[Joined]) -> None:
        """Pack the matrices of each group as one, including small ones."""
        if not self.matrices:
            return
        for group in groups:
            weights = tuple(layer.weight for layer in group.layers)
            if all(map(_plain, group.layers)) and sum(weight.numel() for weight in weights) >= SMALLEST:
                self._joined.append((group, Matrix(weights, self._tried)))
        inside = {layer for group, _ in self._joined for layer in group.layers}
        self._layers = [pair for pair in self._layers if pair[0] not in inside]
        self._list_matrices()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Keep packed weights until the block ends."""
        self.forget()
        self._sampling = True
        try:
            yield
        finally:
            self.forget()
            self._sampling = False

    def forget(self) -> None:
        for matrix in self.matrices:
            matrix.forget()
        self._packed, self._watched = False, []

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Use packed weights for one call. Only with one thread: several split products depending on their size."""
        if not self._sampling or not self.matrices or torch.get_num_threads() > 1:
            yield
            return
        if not self._packed or self._changed():
            self._pack()
        layers = [(vars(layer), matrix) for layer, matrix in self._layers if matrix.pack is not None]
        groups = [(group, matrix) for group, matrix in self._joined if matrix.pack is not None]
        self._routed = True
        try:
            for inside, matrix in layers:
                inside["forward"] = matrix
            for group, matrix in groups:
                group.route(matrix)
            yield
        finally:
            self._routed = False
            for inside, _ in layers:
                inside.pop("forward", None)
            for group, _ in groups:
                group.route(None)

    def logits(self, projection: Projection) -> Tensor:
        if not self._routed or self._head is None or self._head.pack is None:
            return projection.logits()
        return projection.finished(self._head(projection.hidden))

    def _pack(self) -> None:
        self.forget()  # before anything is allocated
        try:
            for matrix in self.matrices:
                matrix.renew()
        except (RuntimeError, MemoryError) as error:
            log.warning("the sampler uses unpacked weights, since packing them failed (%s)", error)
            self.forget()
            self._layers, self._joined, self._head, self.matrices = [], [], None, []
            return
        weights = [weight.reshape(-1) for matrix in self.matrices for weight in matrix.weights]
        self._watched = [weight[:: max(weight.numel() // WATCHED, 1)] for weight in weights]
        self._packed, self._seen = True, (self._places(), torch.cat(self._watched))

    def _places(self) -> list[tuple[int, int]]:
        return [place for matrix in self.matrices for place in matrix.places]

    def _changed(self) -> bool:
        """Whether the weights have changed without a `load`."""
        places, numbers = self._seen
        return self._places() != places or not torch.equal(torch.cat(self._watched), numbers)


class Joined:
    """Layers with the same input. If their weights are packed, they are one product."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers, self._sizes = layers, [layer.out_features for layer in layers]
        self._matrix: Matrix | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, sum of the layers' outputs)"""
        return torch.cat([layer.forward(x) for layer in self.layers], -1) if self._matrix is None else self._matrix(x)

    def route(self, matrix: Matrix | None) -> None:
        """Use the packed matrix. A layer called on its own computes all and takes its part: slower, but the same bits."""
        self._matrix = matrix
        for index, layer in enumerate(self.layers):
            if matrix is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = lambda x, index=index: self(x).split(self._sizes, -1)[index]


class Matrix:
    """The packed matrix of one or several layers without bias, callable as `forward`.

    `tried` is shared by the matrices of a model.
    """

    def __init__(
        self, parameters: tuple[Tensor, ...], tried: dict[tuple[int, ...], bool], size: int | None = None
    ) -> None:
        self._parameters, self._tried, self._size = parameters, tried, size
        self.shape = sum(weight.shape[0] for weight in self.weights), parameters[0].shape[1]
        self.pack: Any = None
        self._like: Any = None  # a tensor of the matrix's shape

    @property
    def weights(self) -> list[Tensor]:
        """The current weights, without the padding rows of a head."""
        return [weight.detach()[: self._size] for weight in self._parameters]

    @property
    def weight(self) -> Tensor:
        weights = self.weights
        return torch.cat(weights) if len(weights) > 1 else weights[0]

    @property
    def places(self) -> list[tuple[int, int]]:
        """(address, version counter) of each weight."""
        return [(weight.data_ptr(), weight._version) for weight in self._parameters]

    def renew(self) -> None:
        if self._tried.get(self.shape, True):
            weight = self.weight
            self._like = weight.new_zeros(1).expand(self.shape)
            self.pack = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_FOR)
            if self.shape not in self._tried:
                self._try(weight)
            if not self._tried.get(self.shape):
                self.forget()

    def forget(self) -> None:
        self.pack = self._like = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return linear(x, self.weight)
        rows = x.numel() // x.shape[-1]
        how = (*self.shape, rows)
        alike = self._tried.get(how)
        if alike:
            return self._multiplied(x, rows)
        found = self._in_pieces(x)
        if alike is None:
            self._tried[how] = torch.equal(self._multiplied(x, rows), found)
        return found

    def _multiplied(self, x: Tensor, rows: int) -> Tensor:
        found: Tensor = torch.ops.mkl._mkl_linear.default(x, self.pack, self._like, None, rows)
        return found

    def _in_pieces(self, x: Tensor) -> Tensor:
        """Multiply ROWS rows at a time."""
        flat = x.reshape(-1, x.shape[-1])
        pieces = pad(flat, (0, 0, 0, -len(flat) % ROWS)).split(ROWS)
        found = torch.cat([self._multiplied(piece, ROWS) for piece in pieces])
        return found[: len(flat)].view(*x.shape[:-1], -1)

    def _try(self, weight: Tensor) -> None:
        """Test whether products are correct up to rounding. Weights that are not finite are not tested."""
        x = torch.linspace(0, 1e4, ROWS * self.shape[1]).sin().view(ROWS, -1)
        difference = float((self._multiplied(x, ROWS) - linear(x, weight)).norm())
        size = float(x.norm() * weight.norm())
        if math.isfinite(size):
            self._tried[self.shape] = difference <= 1e-6 * size


def _plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return type(layer) is nn.Linear and layer.bias is None and _fits(layer.weight) and "forward" not in vars(layer)


def _fits(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter and not weight.is_inference() and weight.is_contiguous()
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32


# --- Common decoder layers on a CPU, without the overhead of their classes ---
#
# layers = LeanLayers.proven(model, usual, cache)   # None: the model has other layers
# layers(ids, layout, cache)                        # (B, Q, D) final hidden states
#
# A small decode step spends much of its time between operations. Models are recognised by class and part names, and are used
# only if a few tokens give the same bits as the model's classes.


FAMILIES = tuple(name.removesuffix("Attention") for name in KNOWN)
TRIED = 7  # tokens that the test reads at once in two slots, before one more each
SPAN = 16  # columns; the shortest slot has as many


class LeanLayers:
    def __init__(self, backbone: Any, windows: list[int | None]) -> None:
        self._backbone = backbone
        self._layers = [_LeanLayer(layer, window) for layer, window in zip(backbone.layers, windows, strict=True)]
        self._norm = _Norm(backbone.norm)
        self.hooks = _hooks(backbone)  # of all modules; if any is set, the model's own classes are used

    @property
    def joined(self) -> list[Joined]:
        """The joined query, key and value projections of each layer."""
        return [layer.attended for layer in self._layers]

    @classmethod
    def of(cls, model: LanguageModel) -> LeanLayers | None:
        """Recognise a model by its modules, without a forward pass."""
        backbone: Any = model.backbone
        family = type(backbone).__name__.removesuffix("Model")
        plain = model.device.type == "cpu" and model.stays and not model.sharded and family in FAMILIES
        if not plain or {name for name, _ in backbone.named_children()} != PARTS or any(_hooks(backbone)):
            return None
        if any(type(weight) is not nn.Parameter or weight.dtype != torch.float32 for weight in backbone.parameters()):
            return None
        known = all(_known(layer, family) for layer in backbone.layers)
        if type(backbone.embed_tokens) is not nn.Embedding or not known:
            return None
        given = vars(model.module.config).get("sliding_window") if family == "Mistral" else None
        windows = [vars(layer.self_attn).get("sliding_window", given) for layer in backbone.layers]
        return cls(backbone, windows)

    @classmethod
    def proven(
        cls, model: LanguageModel, usual: Callable[[Tensor, SlotLayout], Tensor], cache: SlotCache
    ) -> LeanLayers | None:
        """Recognise a model and compare its results with `usual`, its own classes. The cache is empty before and after."""
        lean = cls.of(model)
        if lean is None or len(lean._layers) != len(cache.layers):  # the model skips some layers
            return None
        ids = torch.arange(2 * TRIED).view(2, TRIED) * 7919 % model.size
        slots, columns = torch.arange(2), torch.arange(TRIED).expand(2, -1)
        found = []
        with torch.inference_mode():
            for compute in (usual, lambda ids, layout: lean(ids, layout, cache)):
                piece = compute(ids, SlotLayout(slots, columns, SPAN, in_order=False))
                token = compute(ids[:, :1], SlotLayout(slots, columns[:, :1] + TRIED, SPAN, in_order=True))
                found.append(torch.cat([piece, token], 1))
            cache.reset()
        return lean if torch.equal(*found) else None

    def __call__(self, ids: Tensor, layout: SlotLayout, cache: SlotCache) -> Tensor:
        stream = self._backbone.embed_tokens.forward(ids)
        # rotary embeddings (B or 1, Q, D): the halves are swapped, and the sign of the first is moved into its sine
        cos, sin = self._backbone.rotary_emb(stream, position_ids=layout.columns)
        half = cos.shape[-1] // 2
        turns = cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None], half
        for layer, kept in zip(self._layers, cache.layers, strict=True):
            stream = layer(stream, turns, layout, kept)
        return self._norm(stream)


class _LeanLayer:
    """One decoder layer. Its parts are looked up once, since a module attribute costs as much as a small operation."""

    def __init__(self, layer: Any, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attended = Joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._back, self._gate, self._up, self._down = attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._before, self._between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._head_norms = [_Norm(attention._modules[name]) for name in HEAD_NORMS if name in attention._modules]
        self._width, self._scale, self._window = attention.head_dim, attention.scaling, window
        queries, keys, _ = (part.out_features // self._width for part in self.attended.layers)
        self._queries, self._turned = queries, queries + keys

    def __call__(self, stream: Tensor, turns: tuple[Tensor, Tensor, int], layout: SlotLayout, kept: Any) -> Tensor:
        """(B, Q, D) -> (B, Q, D)"""
        rows, tokens, _ = stream.shape
        heads = self.attended(self._before(stream)).view(rows, tokens, -1, self._width)
        turned = heads[:, :, : self._turned]
        if self._head_norms:
            sides = turned[:, :, : self._queries], turned[:, :, self._queries :]
            turned = torch.cat([norm(side) for norm, side in zip(self._head_norms, sides, strict=True)], 2)
        cos, sin, half = turns
        turned = (turned * cos).add_(turned.roll(half, -1).mul_(sin))
        query, key, value = (
            part.transpose(1, 2)
            for part in (turned[:, :, : self._queries], turned[:, :, self._queries :], heads[:, :, self._turned :])
        )
        layout.write(kept.keys, kept.values, key, value)
        found = layout.attend(query, kept.keys, kept.values, self._scale, self._window, None)
        stream = self._back.forward(found.view(rows, tokens, -1)).add_(stream)
        normed = self._between(stream)
        gated = silu(self._gate.forward(normed), inplace=True).mul_(self._up.forward(normed))
        return self._down.forward(gated).add_(stream)


class _Norm:
    def __init__(self, norm: Any) -> None:
        self._parameters, self._epsilon = norm._parameters, norm.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        scale = (x * x).mean(-1, keepdim=True).add_(self._epsilon).rsqrt_()
        return (x * scale).mul_(self._parameters["weight"])


def _known(layer: Any, family: str) -> bool:
    parts = dict(layer.named_children())
    if parts.keys() != LAYER or type(layer).__name__ != f"{family}DecoderLayer":
        return False
    inside, gated = dict(parts["self_attn"].named_children()), dict(parts["mlp"].named_children())
    linear = [inside.get(name) for name in PROJECTIONS] + [gated.get(name) for name in GATED]
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    norms += [inside[name] for name in HEAD_NORMS if name in inside]
    return (
        type(parts["self_attn"]).__name__ == f"{family}Attention"
        and type(parts["mlp"]).__name__ == f"{family}MLP"
        and inside.keys() in ({*PROJECTIONS}, {*PROJECTIONS, *HEAD_NORMS})
        and gated.keys() - {"act_fn"} == GATED
        and all(type(part) is nn.Linear for part in linear)
        and all(type(norm).__name__ == f"{family}RMSNorm" for norm in norms)
    )


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [hooks for part in module.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)]
