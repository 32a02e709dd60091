"""Weights as MKL wants them, for the sampler's products on x86-64: a few rows are multiplied in about half the time.

    products = MklWeights(model)          # of no layer where that is not to be had: then all stays as it is
    products.join(groups)                     # layers with one input are one product
    products.begin()                          # rollouts are about to be sampled
    with products.routed():                   # one call: layers multiply with packed weights
        hidden = model.backbone(...)
        logits = products.logits(model.project(hidden))
    products.forget()                         # there are new weights
    products.end()

Packed weights are a second copy, so they last for as long as something is sampled, and no longer than the weights that they were
made of. A fused optimiser changes weights without counting it, so before each call a few of their numbers are compared as well.
"""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, silu

from opd.common.cpu_env import MODE
from opd.divergences import Projection
from opd.engines.gpu_layers import HEAD_NORMS, KNOWN, LAYER, PARTS, PROJECTIONS
from opd.engines.slots import SlotCache, SlotLayout, depends_on_others
from opd.models.fused_layers import GATED
from opd.models.language_model import LanguageModel

log = logging.getLogger(__name__)

SMALLEST = 2**17  # weights of a matrix; a smaller one is multiplied as fast without
MOST = 2**32  # bytes of a model's matrices together
PACKED_FOR = 128  # rows, as of a few prompts: packed for 16 these take a quarter longer, and 16 no shorter
ROWS = 16  # that are multiplied at once; other numbers of rows are tried
WATCHED = 16  # numbers of a matrix that are compared before each call


def packs() -> bool:
    """Whether MKL multiplies here, and has been told to round a row alike in any company."""
    known = platform.machine() in ("x86_64", "AMD64") and torch.backends.mkl.is_available()
    ops = ("_mkl_linear", "_mkl_reorder_linear_weight")
    return known and "STRICT" in os.environ.get(MODE, "") and all(hasattr(torch.ops.mkl, name) for name in ops)


class MklWeights:
    def __init__(self, model: LanguageModel) -> None:
        """The modules are the sampler's own; between calls they are as they were."""
        self._layers: list[tuple[nn.Linear, Matrix]] = []
        self._joined: list[tuple[Joined, Matrix]] = []
        self._head: Matrix | None = None
        self._tried: dict[tuple[int, ...], bool] = {}  # which shapes are right, and with which numbers of rows alike
        self._sampling = self._packed = self._routed = False
        self._watched: list[Tensor] = []  # some numbers of each matrix, as they are now
        plain = model.device.type == "cpu" and model.stays and not model.spread and not depends_on_others(model.module)
        if not plain or not packs():
            return
        layers = [layer for layer in model.backbone.modules() if _plain(layer) and layer.weight.numel() >= SMALLEST]
        head = model.head.weight if _fits(model.head.weight) and model.head.weight.numel() >= SMALLEST else None
        found = [*(layer.weight for layer in layers), *([] if head is None else [head])]
        if sum(weight.nbytes for weight in found) > MOST:
            return
        self._layers = [(layer, Matrix((layer.weight,), self._tried)) for layer in layers]
        self._head = None if head is None else Matrix((head,), self._tried, model.size)

    def covers(self, module: nn.Module) -> bool:
        """Whether all of its products, and the head's, are with packed weights."""
        inside = {layer for group, _ in self._joined for layer in group.layers} | {layer for layer, _ in self._layers}
        return self._head is not None and all(
            layer in inside for layer in module.modules() if isinstance(layer, nn.Linear)
        )

    def join(self, groups: Iterable[Joined]) -> None:
        """These layers' matrices are packed as one; small ones among them as well."""
        if not self.some:
            return
        for group in groups:
            weights = tuple(layer.weight for layer in group.layers)
            if all(map(_plain, group.layers)) and sum(weight.numel() for weight in weights) >= SMALLEST:
                self._joined.append((group, Matrix(weights, self._tried)))
        inside = {layer for group, _ in self._joined for layer in group.layers}
        self._layers = [pair for pair in self._layers if pair[0] not in inside]

    @property
    def some(self) -> bool:
        return bool(self._matrices)

    def begin(self) -> None:
        self.forget()
        self._sampling = True

    def end(self) -> None:
        self.forget()
        self._sampling = False

    def forget(self) -> None:
        for matrix in self._matrices:
            matrix.forget()
        self._packed, self._watched = False, []

    @contextmanager
    def routed(self) -> Iterator[None]:
        """One call. Several threads cut products where their sizes say: one only."""
        if not self._sampling or not self.some or torch.get_num_threads() > 1:
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

    @property
    def _matrices(self) -> list[Matrix]:
        found = [matrix for _, matrix in self._layers] + [matrix for _, matrix in self._joined]
        return found if self._head is None else [*found, self._head]

    def _pack(self) -> None:
        self.forget()  # before anything is allocated
        try:
            for matrix in self._matrices:
                matrix.renew()
        except (RuntimeError, MemoryError) as error:
            log.warning("the sampler multiplies with weights as they are: packing them failed (%s)", error)
            self.forget()
            self._layers, self._joined, self._head = [], [], None
            return
        weights = [weight.reshape(-1) for matrix in self._matrices for weight in matrix.weights]
        self._watched = [weight[:: max(weight.numel() // WATCHED, 1)] for weight in weights]
        self._packed, self._seen = True, (self._places(), torch.cat(self._watched))

    def _places(self) -> list[tuple[int, int]]:
        return [place for matrix in self._matrices for place in matrix.places]

    def _changed(self) -> bool:
        """Whether somebody has changed weights without a `load`."""
        places, numbers = self._seen
        return self._places() != places or not torch.equal(torch.cat(self._watched), numbers)


class Joined:
    """Layers with the same input; where their weights are packed, one product for all of them."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers, self._sizes = layers, [layer.out_features for layer in layers]
        self._matrix: Matrix | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(…, D) -> (…, sum of their outputs)"""
        return torch.cat([layer.forward(x) for layer in self.layers], -1) if self._matrix is None else self._matrix(x)

    def route(self, matrix: Matrix | None) -> None:
        """By themselves, as their class calls them, they compute everything and take theirs: slowly, with the same bits."""
        self._matrix = matrix
        for index, layer in enumerate(self.layers):
            if matrix is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = lambda x, index=index: self(x).split(self._sizes, -1)[index]


class Matrix:
    """Of a layer without a bias, whose `forward` this is, or of several; `tried` is shared by the matrices of a model."""

    def __init__(
        self, parameters: tuple[Tensor, ...], tried: dict[tuple[int, ...], bool], size: int | None = None
    ) -> None:
        self._parameters, self._tried, self._size = parameters, tried, size
        self.shape = sum(weight.shape[0] for weight in self.weights), parameters[0].shape[1]
        self.pack: Any = None
        self._like: Any = None  # something of the matrix's shape

    @property
    def weights(self) -> list[Tensor]:
        """As they are now; `size`: of a head, whose last rows may be padding."""
        return [weight.detach()[: self._size] for weight in self._parameters]

    @property
    def weight(self) -> Tensor:
        weights = self.weights
        return torch.cat(weights) if len(weights) > 1 else weights[0]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where they lie, and how often that was written to, as far as torch counts."""
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
        """As many rows at a time as it was packed for."""
        flat = x.reshape(-1, x.shape[-1])
        pieces = pad(flat, (0, 0, 0, -len(flat) % ROWS)).split(ROWS)
        found = torch.cat([self._multiplied(piece, ROWS) for piece in pieces])
        return found[: len(flat)].view(*x.shape[:-1], -1)

    def _try(self, weight: Tensor) -> None:
        """Whether a few rows are what they should be, as far as rounding explains; weights that are no numbers tell nothing."""
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


# Layers as most decoders have them, on a CPU: the operations of their classes, in their order, without the classes around them.
#
# layers = LeanLayers.proven(model, usual, cache)   # None: its layers are of another kind
# layers(ids, layout, cache)                        # (B, Q, D) final hidden states
#
# A decode step of a few rows spends a good part of its time between operations. Models are recognised by the names of their classes and
# parts, and then by their results: a few tokens have to give, to the bit, what the classes give.


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
