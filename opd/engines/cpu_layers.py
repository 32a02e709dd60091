"""Weights packed by MKL, for the sampler on x86-64: products of a few rows take about half the time.

    products = MklWeights(model)              # packs nothing if MKL cannot; layers then run unchanged
    products.join(groups)                     # layers with the same input become one product
    products.begin()                          # before sampling
    with products.routed():                   # one call: layers multiply with packed weights
        hidden = model.backbone(...)
        logits = products.logits(model.project(hidden))
    products.forget()                         # the weights have changed
    products.end()

Packed weights are a second copy, so they are kept only during sampling, and until the weights change. A fused optimiser does
not update the tensors' version counters, so a few values of each matrix are also compared before each call.
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
        self._tried: dict[tuple[int, ...], bool] = {}  # test results: by shape, and by shape and number of rows
        self._sampling = self._packed = self._routed = False
        self._watched: list[Tensor] = []  # views of some values of each matrix
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
        """Whether all of its linear layers, and the head, use packed weights."""
        inside = {layer for group, _ in self._joined for layer in group.layers} | {layer for layer, _ in self._layers}
        return self._head is not None and all(
            layer in inside for layer in module.modules() if isinstance(layer, nn.Linear)
        )

    def join(self, groups: Iterable[Joined]) -> None:
        """Pack the matrices of each group as one, including small ones."""
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
        """Use packed weights for one call. Only with one thread: several split products depending on their size."""
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
        self._layers = [_Layer(layer, window) for layer, window in zip(backbone.layers, windows, strict=True)]
        self._norm = _Norm(backbone.norm)
        self._hooks = _hooks(backbone)

    @property
    def joined(self) -> list[Joined]:
        """The joined query, key and value projections of each layer."""
        return [layer.attended for layer in self._layers]

    @property
    def hooked(self) -> bool:
        """Whether any module has a forward hook now."""
        return any(self._hooks)

    @classmethod
    def of(cls, model: LanguageModel) -> LeanLayers | None:
        """Recognise a model by its modules, without a forward pass."""
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
        turns = _Turns(*self._backbone.rotary_emb(stream, position_ids=layout.columns))
        for layer, kept in zip(self._layers, cache.layers, strict=True):
            stream = layer(stream, turns, layout, kept)
        return self._norm(stream)


class _Layer:
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
    """Rotary embeddings of one pass. The halves are swapped, and the sign of the first is moved into its sine."""

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
