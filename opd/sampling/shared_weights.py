"""The newest weights in memory that several processes share: one writes them, and those that sample read.

    counts (4) | one place | another          which version was begun, which is whole; the version of each place

The two places are used in turn, so nobody waits for anybody, and whoever is killed leaves no lock behind: a reader that was
overtaken within one copy reads again. The memory has no name, and goes with the last process that holds it.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from opd.types import TokenSampler, WeightsRef

Layout = Mapping[str, tuple[str, Sequence[int]]]  # dtype and shape of each tensor, by name
ALIGN = 64
BEGUN, WHOLE, VERSIONS = 0, 1, 2  # where the counts stand
_ORDER = threading.Lock()


class SharedWeights:
    """`descriptor`: of memory that another process has made for the same layout. `still`: weights that nobody publishes."""

    def __init__(
        self, layout: Layout, descriptor: int | None = None, still: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.layout, self._still = layout, dict(still or {})
        size = sum(_padded(_bytes(*one)) for one in layout.values())
        whole = ALIGN + 2 * size
        self.descriptor = _made(whole) if descriptor is None else descriptor
        memory = mmap.mmap(self.descriptor, whole)
        self._counts = np.frombuffer(memory, dtype=np.int64, count=4)
        self._places = [_tensors(memory, layout, ALIGN + place * size) for place in range(2)]
        if descriptor is None:
            self._counts[VERSIONS:] = -1

    @property
    def version(self) -> int:
        """The newest; -1: none yet."""
        return int(self._counts[VERSIONS + self._counts[WHOLE] % 2])

    def put(self, weights: WeightsRef) -> None:
        count = int(self._counts[WHOLE]) + 1
        place = count % 2
        self._counts[BEGUN] = count
        _in_order()
        with torch.no_grad():
            for name, tensor in self._places[place].items():
                tensor.copy_(weights.tensors[name])
        self._counts[VERSIONS + place] = weights.version
        _in_order()
        self._counts[WHOLE] = count

    def load(self, sampler: TokenSampler) -> int:
        """By a process that samples; says which version it took."""
        while True:
            count = int(self._counts[WHOLE])
            _in_order()
            version = int(self._counts[VERSIONS + count % 2])
            sampler.load(WeightsRef(version, {**self._still, **self._places[count % 2]}))
            _in_order()
            if self._counts[BEGUN] < count + 2:
                return version

    def close(self) -> None:
        os.close(self.descriptor)


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}


def _made(size: int) -> int:
    if sys.platform == "linux":
        descriptor = os.memfd_create("opd-weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _tensors(memory: mmap.mmap, layout: Layout, start: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, (dtype, shape) in layout.items():
        flat = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=math.prod(shape), offset=start)
        found[name] = flat.view(*shape) if shape else flat[0]
        start += _padded(_bytes(dtype, shape))
    return found


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _in_order() -> None:
    """What was written or read before is so for other processors, too, before what follows: ARM keeps no order by itself.

    A lock that is let go and one that is taken behind it are never exchanged, nor what lies before and behind them.
    """
    for _ in range(2):
        with _ORDER:
            pass


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
