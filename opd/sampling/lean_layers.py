"""Layers as most decoders have them, on a CPU: the operations of their classes, in their order, without the classes around them.

    layers = LeanLayers.proven(model, usual, cache)   # None: its layers are of another kind
    layers(ids, layout, cache)                        # (B, Q, D) final hidden states

A decode step of a few rows spends a good part of its time between operations. Models are recognised by the names of their classes and
parts, and then by their results: a few tokens have to give, to the bit, what the classes give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from opd.models.fused import GATED
from opd.models.language_model import LanguageModel
from opd.sampling.decode_layers import HEAD_NORMS, KNOWN, LAYER, PARTS, PROJECTIONS
from opd.sampling.packed import Joined
from opd.sampling.slots import SlotCache, SlotLayout

FAMILIES = tuple(name.removesuffix("Attention") for name in KNOWN)
TRIED = 7  # tokens of two slots that are read at once, before one more each
SPAN = 16  # columns, which the shortest slot has


class LeanLayers:
    def __init__(self, backbone: Any, windows: list[int | None]) -> None:
        self._backbone = backbone
        self._layers = [_Layer(layer, window) for layer, window in zip(backbone.layers, windows, strict=True)]
        self._norm = _Norm(backbone.norm)
        self._hooks = _hooks(backbone)

    @property
    def joined(self) -> list[Joined]:
        """Queries, keys and values of a layer each."""
        return [layer.attended for layer in self._layers]

    @property
    def hooked(self) -> bool:
        """Whether somebody listens to the classes now."""
        return any(self._hooks)

    @classmethod
    def of(cls, model: LanguageModel) -> LeanLayers | None:
        """What can be told without a pass."""
        backbone: Any = model.backbone
        family = type(backbone).__name__.removesuffix("Model")
        plain = model.device.type == "cpu" and model.stays and not model.spread and family in FAMILIES
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
        """`usual`: through the model's own classes. The cache is empty when this is asked, and behind it."""
        lean = cls.of(model)
        if lean is None or len(lean._layers) != len(cache.layers):  # some layers are not gone through
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
        turns = _Turns(*self._backbone.rotary_emb(stream, position_ids=layout.columns))
        for layer, kept in zip(self._layers, cache.layers, strict=True):
            stream = layer(stream, turns, layout, kept)
        return self._norm(stream)


class _Layer:
    """Its parts are looked up once: an attribute of a module takes as long as a small operation."""

    def __init__(self, layer: Any, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attended = Joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self._back, self._gate, self._up, self._down = attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self._before, self._between = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._head_norms = [_Norm(attention._modules[name]) for name in HEAD_NORMS if name in attention._modules]
        self._width, self._scale, self._window = attention.head_dim, attention.scaling, window
        queries, keys, _ = (part.out_features // self._width for part in self.attended.layers)
        self._queries, self._turned = queries, queries + keys

    def __call__(self, stream: Tensor, turns: _Turns, layout: SlotLayout, kept: Any) -> Tensor:
        """(B, Q, D) -> (B, Q, D)"""
        rows, tokens, _ = stream.shape
        heads = self.attended(self._before(stream)).view(rows, tokens, -1, self._width)
        turned = heads[:, :, : self._turned]
        if self._head_norms:
            sides = turned[:, :, : self._queries], turned[:, :, self._queries :]
            turned = torch.cat([norm(side) for norm, side in zip(self._head_norms, sides, strict=True)], 2)
        turned = turns(turned)
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


class _Turns:
    """Rotary embeddings of one pass. Halves change places, and the sign of the first goes to its sine: the product is the same."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """(B or 1, Q, D)"""
        self._half = cos.shape[-1] // 2
        self._cos = cos[:, :, None]
        self._sin = torch.cat([-sin[..., : self._half], sin[..., self._half :]], -1)[:, :, None]

    def __call__(self, x: Tensor) -> Tensor:
        """(B, Q, H, D)"""
        return (x * self._cos).add_(x.roll(self._half, -1).mul_(self._sin))


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
