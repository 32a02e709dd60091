"""Weights as MKL wants them, for the sampler's products on x86-64: a few rows are multiplied in about half the time.

    products = PackedProducts(model)          # of no layer where that is not to be had: then all stays as it is
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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from opd.divergences import Projection
from opd.models.language_model import LanguageModel
from opd.rounding import MODE
from opd.sampling.slots import depends_on_others

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


class PackedProducts:
    def __init__(self, model: LanguageModel) -> None:
        """The modules are the sampler's own; between calls they are as they were."""
        self._layers: list[tuple[nn.Module, Matrix]] = []
        self._head: Matrix | None = None
        self._sampling = self._packed = self._routed = False
        self._watched: list[Tensor] = []  # some numbers of each matrix, as they are now
        plain = model.device.type == "cpu" and model.stays and not model.spread and not depends_on_others(model.module)
        if not plain or not packs():
            return
        tried: dict[tuple[int, ...], bool] = {}
        layers = [layer for layer in model.backbone.modules() if type(layer) is nn.Linear and layer.bias is None]
        layers = [layer for layer in layers if _fits(layer.weight) and "forward" not in vars(layer)]
        head = model.head.weight
        found = [*(layer.weight for layer in layers), *([head] if _fits(head) else [])]
        if sum(weight.nbytes for weight in found) > MOST:
            return
        self._layers = [(layer, Matrix(layer.weight, tried)) for layer in layers]
        self._head = Matrix(head, tried, model.size) if _fits(head) else None

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
        ready = [(vars(layer), matrix) for layer, matrix in self._layers if matrix.pack is not None]
        self._routed = True
        try:
            for inside, matrix in ready:
                inside["forward"] = matrix
            yield
        finally:
            self._routed = False
            for inside, _ in ready:
                inside.pop("forward", None)

    def logits(self, projection: Projection) -> Tensor:
        if not self._routed or self._head is None or self._head.pack is None:
            return projection.logits()
        return projection.finished(self._head(projection.hidden))

    @property
    def _matrices(self) -> list[Matrix]:
        return [*(matrix for _, matrix in self._layers), *([] if self._head is None else [self._head])]

    def _pack(self) -> None:
        self.forget()  # before anything is allocated
        try:
            for matrix in self._matrices:
                matrix.renew()
        except (RuntimeError, MemoryError) as error:
            log.warning("the sampler multiplies with weights as they are: packing them failed (%s)", error)
            self.forget()
            self._layers, self._head = [], None
            return
        weights = [matrix.weight.reshape(-1) for matrix in self._matrices]
        self._watched = [weight[:: weight.numel() // WATCHED] for weight in weights]
        self._packed, self._seen = True, (self._places(), torch.cat(self._watched))

    def _places(self) -> list[tuple[int, int]]:
        return [matrix.place for matrix in self._matrices]

    def _changed(self) -> bool:
        """Whether somebody has changed weights without a `load`."""
        places, numbers = self._seen
        return self._places() != places or not torch.equal(torch.cat(self._watched), numbers)


class Matrix:
    """Of a layer without a bias, whose `forward` this is. `tried`: which shapes are right, and with which numbers of rows alike."""

    def __init__(self, weight: Tensor, tried: dict[tuple[int, ...], bool], size: int | None = None) -> None:
        self._parameter, self._tried, self._size = weight, tried, size
        self.pack: Any = None
        self._source: Any = None  # what it was made of

    @property
    def weight(self) -> Tensor:
        """As it is now; `size`: of a head, whose last rows may be padding."""
        weight = self._parameter.detach()
        return weight if self._size is None else weight[: self._size]

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies, and how often that was written to, as far as torch counts."""
        return self._parameter.data_ptr(), self._parameter._version

    def renew(self) -> None:
        weight = self.weight
        shape = tuple(weight.shape)
        if self._tried.get(shape, True):
            self.pack, self._source = torch.ops.mkl._mkl_reorder_linear_weight(weight, PACKED_FOR), weight
            if shape not in self._tried:
                self._try()
            if not self._tried.get(shape):
                self.forget()

    def forget(self) -> None:
        self.pack = self._source = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return linear(x, self._source)
        rows = x.numel() // x.shape[-1]
        how = (*self._source.shape, rows)
        alike = self._tried.get(how)
        if alike:
            return self._multiplied(x, rows)
        found = self._in_pieces(x)
        if alike is None:
            self._tried[how] = torch.equal(self._multiplied(x, rows), found)
        return found

    def _multiplied(self, x: Tensor, rows: int) -> Tensor:
        found: Tensor = torch.ops.mkl._mkl_linear(x, self.pack, self._source, None, rows)
        return found

    def _in_pieces(self, x: Tensor) -> Tensor:
        """As many rows at a time as it was packed for."""
        flat = x.reshape(-1, x.shape[-1])
        pieces = pad(flat, (0, 0, 0, -len(flat) % ROWS)).split(ROWS)
        found = torch.cat([self._multiplied(piece, ROWS) for piece in pieces])
        return found[: len(flat)].view(*x.shape[:-1], -1)

    def _try(self) -> None:
        """Whether a few rows are what they should be, as far as rounding explains; weights that are no numbers tell nothing."""
        x = torch.linspace(0, 1e4, ROWS * self._source.shape[1]).sin().view(ROWS, -1)
        difference = float((self._multiplied(x, ROWS) - linear(x, self._source)).norm())
        size = float(x.norm() * self._source.norm())
        if math.isfinite(size):
            self._tried[tuple(self._source.shape)] = difference <= 1e-6 * size


def _fits(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter and not weight.is_inference() and weight.is_contiguous()
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALLEST
