"""Where a model's weights wait: one run of bytes, in (pinned) host memory or in files, from which any part can be read.

Files are read with `pread` straight into place. A mapping would count twice while it is copied, and stay in memory after.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from opd.errors import DiskError, ModelError
from opd.models.directory import read_header, weight_files
from opd.teachers.pinned import pinned, unpin

ALIGN = 512  # bytes, as torch allocates on CUDA: kernels are chosen by it, and so are the last bits
PIECE = 256 << 20  # bytes that are pinned together
STAGE = 32 << 20  # bytes on the way from a file to a GPU
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorPlace(NamedTuple):
    """Of one tensor among the bytes of its model."""

    start: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, flat: Tensor, start: int | None = None) -> Tensor:
        """The tensor, in bytes that begin with it or (without `start`) with the model."""
        first = self.start if start is None else start
        part = flat[first : first + self.size].view(self.dtype)
        return part.as_strided(self.shape, self.stride, part.storage_offset())


class FlatLayout:
    """Tensors back to back, each where an allocation of its own could begin."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.places: dict[str, TensorPlace] = {}
        self.size = 0
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            self.places[name] = TensorPlace(self.size, size, tensor.dtype, tuple(tensor.shape), tensor.stride())
            self.size += -(-size // ALIGN) * ALIGN

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: place.of(flat) for name, place in self.places.items()}


def raw(tensor: Tensor) -> Tensor:
    """Its bytes, in the order they have in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


class Shelf(Protocol):
    def fill(self, into: Tensor, start: int) -> None:
        """Bytes from `start` on into a tensor of bytes, on any device; on CUDA in the order of the current stream."""

    def close(self) -> None:
        """It is not read any more."""


class MemoryShelf:
    """Host memory, pinned where a GPU reads it, so that copies run beside its kernels."""

    def __init__(self, layout: FlatLayout, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        plain = torch.empty(0 if self._pinned else layout.size, dtype=torch.uint8)
        self._pieces = pinned(layout.size, PIECE, device) if self._pinned else list(plain.split(PIECE))
        self._unpin = weakref.finalize(self, unpin, self._pieces if self._pinned else [])
        self._unpin.atexit = False  # the system takes its pages back
        for name, place in layout.places.items():
            data = raw(tensors[name])
            for piece, first, part in self._parts(place.start, place.size):
                piece.copy_(data[first : first + part], non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream(device).synchronize()  # copies to the host are whole

    def fill(self, into: Tensor, start: int) -> None:
        for piece, first, part in self._parts(start, into.numel()):
            into[first : first + part].copy_(piece, non_blocking=True)

    def close(self) -> None:
        if self._pinned:
            torch.cuda.synchronize()  # copies that are under way read from here
        self._unpin()
        self._pieces = []

    def _parts(self, start: int, size: int) -> Iterator[tuple[Tensor, int, int]]:
        """(bytes, where they stand behind `start`, how many)."""
        done = 0
        while done < size:
            number, inside = divmod(start + done, PIECE)
            part = min(PIECE - inside, size - done)
            yield self._pieces[number][inside : inside + part], done, part
            done += part


class Staging:
    """Two pinned blocks in turn, for all models: one is read into while the other is on its way to the GPU."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0

    @contextmanager
    def next(self) -> Iterator[Tensor]:
        if not self._blocks:
            self._blocks = [(torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in "ab"]
        self._turn = 1 - self._turn
        block, free = self._blocks[self._turn]
        free.synchronize()  # what was in it before has gone
        yield block
        free.record()


@dataclass(frozen=True)
class Extent:
    """Bytes of a model, and the file in which they stand. The file stays open, so that nobody can put another in its place."""

    start: int
    size: int
    file: int
    offset: int
    path: str


class DiskShelf:
    """Files: the checkpoint's own where they hold the very bytes, else one that vanishes with the process."""

    def __init__(self, extents: Sequence[Extent], staging: Staging) -> None:
        self._extents = sorted(extents, key=lambda extent: extent.start)
        self._starts = [extent.start for extent in self._extents]
        self._staging = staging

    @classmethod
    def of(
        cls, layout: FlatLayout, tensors: Mapping[str, Tensor], source: Path | None, scratch: Path, staging: Staging
    ) -> DiskShelf:
        found = None if source is None else _in_checkpoint(layout, tensors, source)
        return cls(found if found is not None else [_written(layout, tensors, scratch)], staging)

    def fill(self, into: Tensor, start: int) -> None:
        number, end = max(bisect_right(self._starts, start) - 1, 0), start + into.numel()
        for extent in self._extents[number:]:
            first, last = max(start, extent.start), min(end, extent.start + extent.size)
            if extent.start >= end:
                break
            if first < last:
                self._read(extent, first - extent.start, into[first - start : last - start])

    def _read(self, extent: Extent, skip: int, into: Tensor) -> None:
        if into.device.type != "cuda":
            _pread(extent, skip, into)
            return
        for first in range(0, into.numel(), STAGE):
            with self._staging.next() as stage:
                part = stage[: min(STAGE, into.numel() - first)]
                _pread(extent, skip + first, part)
                into[first : first + part.numel()].copy_(part, non_blocking=True)

    def close(self) -> None:
        for file in {extent.file for extent in self._extents}:
            os.close(file)
        self._extents = []


def _pread(extent: Extent, skip: int, into: Tensor) -> None:
    view, done = into.numpy().data, 0
    try:
        while done < len(view):
            count = os.preadv(extent.file, [view[done:]], extent.offset + skip + done)
            if not count:
                raise OSError("it has become shorter")
            done += count
    except OSError as error:
        raise DiskError(f"a teacher's weights cannot be read from {extent.path}: {error.strerror or error}.") from None


def _written(layout: FlatLayout, tensors: Mapping[str, Tensor], scratch: Path) -> Extent:
    """One file without a name: its room is free again when the process ends, however it ends."""
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=scratch, buffering=0) as file:
        for name, place in layout.places.items():
            data = raw(tensors[name]).cpu().numpy().data
            done = 0
            while done < len(data):
                done += os.pwrite(file.fileno(), data[done:], place.start + done)
        os.ftruncate(file.fileno(), layout.size)
        return Extent(0, layout.size, os.dup(file.fileno()), 0, f"a file in {scratch}")


def _in_checkpoint(layout: FlatLayout, tensors: Mapping[str, Tensor], directory: Path) -> list[Extent] | None:
    """Where a checkpoint's files hold every tensor, bit for bit; None: they hold them otherwise (another dtype, merged, …)."""
    opened: dict[Path, int] = {}
    extents: list[Extent] = []
    with suppress(OSError, ModelError, DiskError):  # it is not here any more, or damaged
        where = {name: (path, found) for path in weight_files(directory) for name, found in _header(path).items()}
        for name, place in layout.places.items():
            path, found = where.get(name, (directory, None))
            if found is None or (found.dtype, found.shape) != (place.dtype, place.shape):
                break
            if path not in opened:
                opened[path] = os.open(path, os.O_RDONLY)
            extents.append(Extent(place.start, place.size, opened[path], found.start, str(path)))
            if not _equal(extents[-1], tensors[name]):
                break
        else:
            return extents
    for file in opened.values():
        os.close(file)
    return None


def _header(path: Path) -> dict[str, TensorPlace]:
    """Tensors of a safetensors file by name, and where they stand in it."""
    read_header(path)  # refuses a damaged one
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {
        name: TensorPlace(
            8 + length + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
            DTYPES[entry["dtype"]],
            tuple(entry["shape"]),
            (),
        )
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in DTYPES
    }


def _equal(extent: Extent, tensor: Tensor) -> bool:
    data, scratch = raw(tensor), torch.empty(min(STAGE, extent.size), dtype=torch.uint8)
    if not tensor.is_contiguous():
        return False
    for first in range(0, extent.size, STAGE):
        part = scratch[: min(STAGE, extent.size - first)]
        _pread(extent, first, part)
        if not np.array_equal(part.numpy(), data[first : first + part.numel()].cpu().numpy()):
            return False
    return True
