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
from opd.sampling.slots import SlotCache, SlotLayout

FAMILIES = tuple(name.removesuffix("Attention") for name in KNOWN)
TRIED = 7  # tokens of two slots that are read at once, before one more each
SPAN = 16  # columns, which the shortest slot has


class LeanLayers:
    def __init__(self, backbone: Any, windows: list[int | None]) -> None:
        self._backbone, self._windows = backbone, windows
        self._hooks = _hooks(backbone)

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
        if lean is None or len(lean._windows) != len(cache.layers):  # some layers are not gone through
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
        rows, queries, _ = stream.shape
        turns = _Turns(*self._backbone.rotary_emb(stream, position_ids=layout.columns))
        for layer, kept, window in zip(self._backbone.layers, cache.layers, self._windows, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            normed = _norm(stream, layer.input_layernorm)
            shape = rows, queries, -1, attention.head_dim
            query, key, value = (
                part.forward(normed).view(shape) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if "q_norm" in attention._modules:
                query, key = _norm(query, attention.q_norm), _norm(key, attention.k_norm)
            query, key = turns(query.transpose(1, 2)), turns(key.transpose(1, 2))
            layout.write(kept.keys, kept.values, key, value.transpose(1, 2))
            found = layout.attend(query, kept.keys, kept.values, attention.scaling, window, None)
            stream = attention.o_proj.forward(found.view(rows, queries, -1)).add_(stream)
            normed = _norm(stream, layer.post_attention_layernorm)
            gated = silu(mlp.gate_proj.forward(normed), inplace=True).mul_(mlp.up_proj.forward(normed))
            stream = mlp.down_proj.forward(gated).add_(stream)
        return _norm(stream, self._backbone.norm)


class _Turns:
    """Rotary embeddings of one pass. Halves change places, and the sign of the first goes to its sine: the product is the same."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """(B or 1, Q, D)"""
        self._half = cos.shape[-1] // 2
        self._cos = cos[:, None]
        self._sin = torch.cat([-sin[..., : self._half], sin[..., self._half :]], -1)[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        """(B, H, Q, D)"""
        return (x * self._cos).add_(x.roll(self._half, -1).mul_(self._sin))


def _norm(x: Tensor, norm: Any) -> Tensor:
    scale = x.pow(2).mean(-1, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
    found: Tensor = (x * scale).mul_(norm.weight)
    return found


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
