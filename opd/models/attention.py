"""Packed sequences through a stock model: our attention functions, and the choice of packing or padding.

The functions are registered with transformers under the name `opd`.

Stock model classes run unchanged: they pass query, key and value to the function that `config._attn_implementation` names,
along with unknown keyword arguments. So a `layout` argument reaches every attention layer from `backbone(…, layout=…)`. It
says how the rows of this batch relate to each other: `Packed` here, the sampler's slots in `engines.layers`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils import logging

from opd.common.errors import ModelError
from opd.common.text import first_line
from opd.divergences.projection import upload

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel

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
        raise Unknown("it uses its own kind of attention mask")
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


SLACK = 0.75  # least length of a sequence in a rectangle, as a fraction of the longest one


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
        shapes: list[list[int]] = []  # (rows, columns) of rectangles of sequences with similar length
        first_cells, end = np.empty(len(lengths), dtype=np.int64), 0
        for index in np.argsort(-np.array(lengths), kind="stable").tolist():
            if not shapes or lengths[index] < SLACK * shapes[-1][1]:
                shapes.append([0, lengths[index]])
            first_cells[index] = end
            shapes[-1][0] += 1
            end += shapes[-1][1]
        arrays = positions, first_cells[rows] + positions, np.append(0, ends).astype(np.int32)
        places, cells, bounds = (upload(array, device) for array in arrays)
        return cls(tuple(lengths), places, cells, bounds, tuple((count, longest) for count, longest in shapes))

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
        tokens = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # (T, H, D) each
        cells = tokens if full else [PlaceRows.apply(each, self.cells, sum(sizes)) for each in tokens]
        outs = []
        for shape, *parts in zip(self.rectangles, *(each.split(sizes) for each in cells), strict=True):
            longest = shape[1]
            q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)  # (rows, H, longest, D)
            if softcap is None and sinks is None and (window is None or window >= longest):
                grouped = q.shape[1] != k.shape[1]
                out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
            else:
                out = masked_attention(q, k, v, self._mask(longest, window, q.device), scale, softcap, sinks)
            outs.append(out.transpose(1, 2).flatten(0, 1))  # (rows * longest, H, Dv)
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return (out.contiguous() if full else TakeRows.apply(out, self.cells))[None]  # some models view it

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
# The gradient is bitwise reproducible as long as no other thread uses the device: see `alongside_training`.


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
def alongside_training() -> Iterator[None]:
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


# --- How a batch of sequences goes through a model: packed, padded, or one sequence at a time ---
#
# A model runs packed if a probe shows that packing is right (`choose_route`). Models with state other than keys and values
# (Mamba, gated delta nets, short convolutions), or whose attention bypasses transformers' interface, would leak one packed
# sequence into the next. They run their stock forward pass on rectangles padded on the right; since the model is causal, no real
# token sees the padding.


STRETCH = 2  # a rectangle's longest sequence is at most this many times its shortest, so at most half is padding


@dataclass(frozen=True)
class PackedRoute:
    """All sequences back to back in one row, through our attention.

    Above `limit` tokens, longrope's frequencies depend on the largest position in the batch, so every sequence runs alone.
    """

    limit: int | None = None
    name: str = "packed"
    why: str = ""

    def hidden(self, backbone: Any, ids_T: Tensor, layout: Packed, layers: Sequence[int] = ()) -> Tensor:
        """Final hidden states (T, D) of the sequences that `layout` describes; with `layers`, those after each of them (T, L, D)."""
        if self.limit is not None and len(layout.lengths) > 1 and max(layout.lengths) > self.limit:
            parts = ids_T.split(list(layout.lengths))
            alone = [(part, Packed.of([part.numel()], part.device)) for part in parts]
            return torch.cat([self.hidden(backbone, part, its, layers) for part, its in alone])
        asked = {"output_hidden_states": True} if layers else {}
        out = backbone(
            input_ids=ids_T[None], position_ids=layout.positions[None], use_cache=False, layout=layout, **asked
        )
        states = _stacked(out, layers) if layers else out.last_hidden_state
        return states.squeeze(0)


def _stacked(out: Any, layers: Sequence[int]) -> Tensor:
    """The hidden states after each of these layers: 0 are the embeddings, and the last ones are the final ones."""
    return torch.stack([out.hidden_states[layer] for layer in layers], dim=-2)


@dataclass(frozen=True)
class StockRoute:
    """The stock forward pass on rectangles of sequences of similar length. `alone`: one sequence per rectangle."""

    why: str
    alone: bool = False
    limit: int | None = None

    @property
    def name(self) -> str:
        return "alone" if self.alone else "padded"

    def hidden(self, backbone: Any, ids_T: Tensor, layout: Packed, layers: Sequence[int] = ()) -> Tensor:
        asked = {"output_hidden_states": True} if layers else {}
        parts = ids_T.split(list(layout.lengths))
        found: dict[int, Tensor] = {}
        for group in self._groups(layout.lengths):
            longest = max(layout.lengths[index] for index in group)
            rows = ids_T[:1].repeat(len(group), longest)
            for row, index in enumerate(group):
                rows[row, : layout.lengths[index]] = parts[index]
            found_here = backbone(input_ids=rows, use_cache=False, **asked)
            out = _stacked(found_here, layers) if layers else found_here.last_hidden_state
            found |= {index: out[row, : layout.lengths[index]] for row, index in enumerate(group)}
        return torch.cat([found[index] for index in range(len(parts))])

    def _groups(self, lengths: tuple[int, ...]) -> list[list[int]]:
        alone = self.alone or (self.limit is not None and max(lengths) > self.limit)
        groups: list[list[int]] = []
        for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
            if alone or not groups or lengths[index] > STRETCH * lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(index)
        return groups


Route = PackedRoute | StockRoute


# --- Choosing the route when a model is loaded ---
#
# A probe compares two sequences of different length with the stock forward pass. Sliding windows and chunks are narrowed
# meanwhile, so that short, cheap sequences exceed them. The result decides:
#
# stock logits are not head(hidden), or depend on later tokens   -> rejected
# packed is right                                                -> packed
# packed is wrong, padded is right                               -> padded
# both are wrong                                                 -> one sequence at a time


LENGTHS = (13, 9)
NARROW = 4  # width of a window while the probe runs
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
PACKABLE = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers; others are not probed
INDEXED = (
    "index_topk",
    "index_topk_blocks",
    "indexer_compress_ratio",
)  # attention to chosen tokens only, once there are many
FOREIGN_LAYERS = "its layers do not go through transformers' attention interface"
# Errors of a stock class called in a way it does not support: a keyword, a shape, a missing part.
FOREIGN = (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, ImportError)


def choose_route(model: LanguageModel) -> Route:
    """Probe the model. Leaves our attention switched on if packing is right, else the model's own."""
    count = sum(LENGTHS)
    ids_T = torch.linspace(1, model.size - 1, count, device=model.device).long().roll(count // 2)
    limit = rotary_limit(model.module.config, "longrope")
    own = model.module.config._attn_implementation
    with torch.no_grad(), narrow_windows(model.module):
        stock = _stock(model, ids_T)
        packed = PackedRoute(limit)
        why = _unpackable(model.module.config) or _try(model, packed, ids_T, stock)
        if not why:
            return packed
        switch_attention(model.module, own)
        wrong = _compare(model, StockRoute(why, limit=limit), ids_T, stock)
        return StockRoute(why, alone=bool(wrong), limit=limit)


def _unpackable(config: Any) -> str:
    """Why the config rules packing out, for reasons that a short probe would not show; else empty."""
    kinds = set(getattr(config, "layer_types", None) or ()) - PACKABLE
    if kinds:
        return f"it has layers of the kind {', '.join(sorted(kinds))}"
    if any(getattr(config, name, None) for name in INDEXED):
        return "it chooses the tokens that it attends to"
    return ""


def _try(model: LanguageModel, route: Route, ids_T: Tensor, stock: Sequence[Tensor]) -> str:
    try:
        switch_attention(model.module, NAME)
        wrong = _compare(model, route, ids_T, stock)
        return FOREIGN_LAYERS if wrong and not takes_our_attention(model) else wrong
    except Unknown as reason:
        return str(reason)
    except torch.OutOfMemoryError:
        raise
    except FOREIGN as error:
        return f"it does not take our attention ({first_line(error)})"


def switch_attention(module: Any, name: str) -> None:
    """Switch the attention. Classes with their own attention are unchanged, and transformers' log line about it is silenced."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        module.set_attn_implementation(name)
    finally:
        logging.set_verbosity(before)


def takes_our_attention(model: LanguageModel) -> bool:
    """Whether the class uses our attention. If not, it can still be packed if it masks by positions."""
    return bool(model.module.config._attn_implementation == NAME)


def _stock(model: LanguageModel, ids_T: Tensor) -> list[Tensor]:
    """Logits of each sequence alone from the stock class, after checking that the model can be used at all."""

    def run(ids: Tensor) -> tuple[Tensor, Tensor]:
        try:
            logits = model.module(input_ids=ids[None], use_cache=False).logits[0, :, : model.size].float()
            hidden = model.backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        except torch.OutOfMemoryError:
            raise
        except FOREIGN as error:
            raise _unusable(model, f"its forward pass fails on plain token ids ({first_line(error)})") from None
        return logits, hidden

    if any("recurrent_states" in vars(part) for part in model.module.modules()):
        raise _unusable(model, "it keeps its state inside its layers, where one sequence would see another's")
    found = []
    for ids in ids_T.split(LENGTHS):
        logits, hidden = run(ids)
        if hidden.shape[-1] != model.head.weight.shape[1]:
            raise _unusable(model, "its head does not read the backbone's final hidden states")
        if far(model.project(hidden).logits(), logits, model.dtype):
            gap = float((model.project(hidden).logits() - logits).abs().max())
            raise _unusable(model, f"its logits are not head(hidden) (they differ by {gap:.3g})")
        found.append(logits)
    first, _ = run(ids_T[: LENGTHS[0] - 3])
    if far(first, found[0][:-3], model.dtype):
        raise _unusable(model, "it is not causal (what it says about a token depends on later tokens)")
    return found


def _compare(model: LanguageModel, route: Route, ids_T: Tensor, stock: Sequence[Tensor]) -> str:
    """Why the route is wrong; empty if it is right."""
    hidden = route.hidden(model.backbone, ids_T, Packed.of(list(LENGTHS), model.device))
    ours = model.project(hidden).logits().split(LENGTHS)
    if far(ours[0], stock[0], model.dtype):
        return "our attention gives other results than its own"
    if far(ours[1], stock[1], model.dtype):
        return "packed, a sequence would see the one before it"
    return ""


def far(ours: Tensor, stock: Tensor, dtype: torch.dtype) -> bool:
    """Whether two sets of logits (N, V) differ by more than rounding.

    In half precision single logits may differ a lot, so the gap is also compared with the logits' spread, and at least half the
    rows must be close. Rounding gives 0.2 to 15 % of the spread (once in SmolLM2 40 %, for a single row); a sequence that sees
    another one gives 30 % or more, in all its rows.
    """
    gap, scale = (ours - stock).abs(), max(1.0, float(stock.abs().max()))
    if dtype == torch.float32:
        return not bool(gap.max() <= 1e-3 * scale)
    spread = (stock - stock.mean(-1, keepdim=True)).square().mean().sqrt()
    close = (gap.amax(-1) <= 0.1 * scale) & (gap.square().mean(-1).sqrt() <= 0.15 * spread)
    return bool(2 * close.sum() < close.numel())


@contextmanager
def narrow_windows(module: Any) -> Iterator[None]:
    """Set sliding windows and attention chunks to `NARROW` columns, in the config (for masks) and in the layers' own copies."""
    holders = [(vars(config), config) for config in {id(part.config): part.config for part in _models(module)}.values()]
    holders += [(vars(part), part) for part in module.modules()]
    before = [
        (holder, name, values[name])
        for values, holder in holders
        for name in WINDOWS
        if isinstance(values.get(name), int) and values[name] > NARROW
    ]
    try:
        for holder, name, _ in before:
            setattr(holder, name, NARROW)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def _models(module: Any) -> list[Any]:
    from transformers import PreTrainedModel

    return [part for part in module.modules() if isinstance(part, PreTrainedModel)]


def rotary_limit(config: Any, kind: str) -> int | None:
    """The longest sequence for which this kind of rotary embedding has fixed frequencies. None: the model does not use this kind."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    limits = [
        found.get("original_max_position_embeddings") or config.max_position_embeddings
        for found in kinds
        if found.get("rope_type") == kind
    ]
    return min(limits, default=None)


def _unusable(model: LanguageModel, reason: str) -> ModelError:
    return ModelError(
        f"model {model.name!r} ({type(model.module).__name__}) cannot be used: {reason}. Use another model."
    )
