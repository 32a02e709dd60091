"""How a batch of sequences goes through a model: packed, padded, or one sequence at a time.

A model runs packed if a probe shows that packing is right (`choose_route`). Models with state other than keys and values
(Mamba, gated delta nets, short convolutions), or whose attention bypasses transformers' interface, would leak one packed
sequence into the next. They run their stock forward pass on rectangles padded on the right; since the model is causal, no real
token sees the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import logging

from opd.common.errors import ModelError
from opd.common.text import first_line
from opd.models import attention
from opd.models.attention import Packed, Unknown

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel


STRETCH = (
    2  # most times longer than a rectangle's shortest sequence that its longest may be, so at most half is padding
)


@dataclass(frozen=True)
class PackedRoute:
    """All sequences back to back in one row, through our attention.

    Above `limit` tokens, longrope's frequencies depend on the largest position in the batch, so every sequence runs alone.
    """

    limit: int | None = None
    name: str = "packed"
    why: str = ""

    def hidden(self, backbone: Any, ids_T: Tensor, layout: Packed) -> Tensor:
        """Final hidden states (T, D) of the sequences that `layout` describes."""
        if self.limit is None or max(layout.lengths) <= self.limit:
            return _packed(backbone, ids_T, layout)
        parts = ids_T.split(list(layout.lengths))
        return torch.cat([_packed(backbone, part, Packed.of([part.numel()], part.device)) for part in parts])


@dataclass(frozen=True)
class StockRoute:
    """The stock forward pass on rectangles of sequences of similar length. `alone`: one sequence per rectangle."""

    why: str
    alone: bool = False
    limit: int | None = None

    @property
    def name(self) -> str:
        return "alone" if self.alone else "padded"

    def hidden(self, backbone: Any, ids_T: Tensor, layout: Packed) -> Tensor:
        parts = ids_T.split(list(layout.lengths))
        found: dict[int, Tensor] = {}
        for group in self._groups(layout.lengths):
            longest = max(layout.lengths[index] for index in group)
            rows = ids_T[:1].repeat(len(group), longest)
            for row, index in enumerate(group):
                rows[row, : layout.lengths[index]] = parts[index]
            out = backbone(input_ids=rows, use_cache=False).last_hidden_state
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


def _packed(backbone: Any, ids_T: Tensor, layout: Packed) -> Tensor:
    out = backbone(input_ids=ids_T[None], position_ids=layout.positions[None], use_cache=False, layout=layout)
    return out.last_hidden_state.squeeze(0)


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
        switch_attention(model.module, attention.NAME)
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
    return bool(model.module.config._attn_implementation == attention.NAME)


def _stock(model: LanguageModel, ids_T: Tensor) -> list[Tensor]:
    """Logits of each sequence alone from the stock class, after checking that the model can be used at all."""

    def run(ids: Tensor) -> tuple[Tensor, Tensor]:
        try:
            logits = model.module(input_ids=ids[None], use_cache=False).logits[0, :, : model.size].float()
            hidden = model.backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        except torch.OutOfMemoryError:
            raise
        except FOREIGN as error:
            raise _refusal(model, f"its forward pass fails on plain token ids ({first_line(error)})") from None
        return logits, hidden

    if any("recurrent_states" in vars(part) for part in model.module.modules()):
        raise _refusal(model, "it keeps its state inside its layers, where one sequence would see another's")
    found = []
    for ids in ids_T.split(LENGTHS):
        logits, hidden = run(ids)
        if hidden.shape[-1] != model.head.weight.shape[1]:
            raise _refusal(model, "its head does not read the backbone's final hidden states")
        if far(model.project(hidden).logits(), logits, model.dtype):
            gap = float((model.project(hidden).logits() - logits).abs().max())
            raise _refusal(model, f"its logits are not head(hidden) (they differ by {gap:.3g})")
        found.append(logits)
    first, _ = run(ids_T[: LENGTHS[0] - 3])
    if far(first, found[0][:-3], model.dtype):
        raise _refusal(model, "it is not causal (what it says about a token depends on the tokens behind it)")
    return found


def _compare(model: LanguageModel, route: Route, ids_T: Tensor, stock: Sequence[Tensor]) -> str:
    """Why the route is wrong; empty if it is right."""
    hidden = route.hidden(model.backbone, ids_T, Packed.of(list(LENGTHS), model.device))
    ours = model.project(hidden).logits().split(LENGTHS)
    if far(ours[0], stock[0], model.dtype):
        return "its attention does something ours does not know"
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


def _refusal(model: LanguageModel, reason: str) -> ModelError:
    return ModelError(
        f"model {model.name!r} ({type(model.module).__name__}) cannot be used: {reason}. Use another model."
    )
