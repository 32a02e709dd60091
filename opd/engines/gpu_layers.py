"""A decode step through common decoder layers, with fused kernels for one token per slot: see `kernels`.

    layers = DecodeLayers.of(model, room)      # None: the model has other layers
    layers(ids_B, layout, cache)               # (B, D) final hidden states

Layers are recognised by their attention class, since others look alike but scale distant queries or do not rotate in every layer.
Their parts are recognised by `fuse_layers` from what they compute. A model is used only if a few tokens give the same
results as its own classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from opd.engines.slots import WIDEST, Decoding, SlotCache, SlotLayout
from opd.models.fused_layers import HALF, NormFormula, is_fused, norm_of, stock_class
from opd.models.language_model import LanguageModel

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
class Layer:
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
    def of(cls, layer: nn.Module, window: int | None) -> Layer | None:
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

    def __init__(self, backbone: Any, layers: list[Layer], last: NormFormula, room: int) -> None:
        self._backbone, self._layers, self._last, self._room = backbone, layers, last, room

    @classmethod
    def of(cls, model: LanguageModel, room: int) -> DecodeLayers | None:
        """Recognise a model without a forward pass. `room`: bytes of shared memory for the kernels."""
        backbone: Any = model.backbone
        weights = list(backbone.parameters())
        plain = model.stays and not model.spread and not any(map(is_traceable_wrapper_subclass, weights))
        half = plain and model.dtype in HALF and all(weight.dtype == model.dtype for weight in weights)
        parts = dict(backbone.named_children())
        if not half or room < MOST_SHARED or parts.keys() != PARTS or type(parts["embed_tokens"]) is not nn.Embedding:
            return None
        window = vars(model.module.config).get("sliding_window")
        layers, last = [Layer.of(layer, window) for layer in backbone.layers], norm_of(backbone.norm)
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


def agree(found: Tensor, usual: Tensor) -> bool:
    """Whether two results are equal up to half-precision rounding."""
    difference, size = (found - usual).float().norm(), usual.float().norm()
    return bool(torch.isfinite(size)) and float(difference) <= 0.05 * float(size)
