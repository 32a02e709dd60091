"""Any number of frozen teachers with a few of them in memory. The others wait on shelves, in host memory or on disk, and are loaded before they score.

With two resident, one scores while the next is read. During the update of the student no teacher is resident, except for one
head: teacher outputs are kept as hidden states. After every page-in the teacher scores its batch and then a fixed probe, whose
log-probs must be the same bit for bit. Probe answers are compared at the end of the batch, before training on the signals or
storing them, so a GPU moves from one teacher to the next without waiting.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
import struct
import sys
import tempfile
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from opd.common.errors import DiskError, ModelError, TrainingError
from opd.common.text import bytes_in_words
from opd.divergences import Projection, token_logprobs
from opd.models.attention import Packed
from opd.models.files import read_header, weight_files
from opd.models.language_model import LanguageModel
from opd.records import Rendered, Rollout, Signal, SignalNeed
from opd.teachers.pool import probe_rollouts, require_information, require_unchanged
from opd.teachers.scoring import LocalTeacher, Page
from opd.teachers.views import response_after

SPARE = 0.25  # share of GPU memory that hidden states leave free; the rest of them goes to pinned host memory


class PagedWeights:
    """A model in the pool: the shelf that holds its weights, and the weights as flat bytes while they are resident."""

    def __init__(self, model: LanguageModel, shelf: Shelf, layout: FlatLayout) -> None:
        self.name, self.shelf, self.layout, self.device = model.name, shelf, layout, model.device
        self.flat: Tensor | None = None
        self.probed = True  # whether the probe was scored since the last page-in
        self._parameters = dict(model.module.named_parameters())
        self._head = [
            next((name for name, found in self._parameters.items() if found is part), None)
            for part in (model.head.weight, model.head.bias)
        ]
        probed = copy.copy(model)  # the probe is independent of any vocabulary shared with others
        probed.stays = False  # do not record passes, since weights come and go
        self._scorer = LocalTeacher(model.name, "teacher", probed, 8192, probed.stop_ids)
        texts = [
            response_after(rollout.prompt_ids, rollout) for rollout in probe_rollouts(probed.size, probed.stop_ids)
        ]
        self._probe = Page.of(texts, model.device)
        self._expected = self._answers().cpu().numpy()
        require_information(self.name, self._expected, probed.size)
        dtypes = {parameter.dtype for parameter in self._parameters.values()}
        self._missing = {kind: torch.full((1,), float("nan"), dtype=kind, device=model.device) for kind in dtypes}
        self.drop_weights()

    def put(self, flat: Tensor) -> None:
        self.flat, self.probed = flat, False
        for name, view in self.layout.views(flat).items():
            self._parameters[name].data = view

    def drop_weights(self) -> None:
        """Drops the weights. Shapes, dtypes and device stay; the parameters become NaN."""
        self.flat = None
        for parameter in self._parameters.values():
            parameter.data = self._missing[parameter.dtype].expand(parameter.shape)

    def ask(self) -> ProbeAnswers:
        """Starts scoring the probe; does not wait for the device."""
        self.probed = True
        return ProbeAnswers(self.name, self._expected, self._answers())

    @torch.no_grad()
    def _answers(self) -> Tensor:
        projection = self._scorer.project(self._scorer.hidden(self._probe))
        return token_logprobs(projection, self._probe.tokens_N, merge=(self._scorer.stop_ids,), trusted=True)

    def head(self) -> tuple[Tensor, Tensor | None]:
        """The output head of a resident model."""
        weight, bias = (None if name is None else self._parameters[name].data for name in self._head)
        assert weight is not None
        return weight, bias

    def read_head(self) -> tuple[Tensor, Tensor | None]:
        """Reads only the output head from the shelf."""
        found: list[Tensor | None] = []
        for name in self._head:
            if name is None:
                found.append(None)
                continue
            place = self.layout.places[name]
            flat = torch.empty(place.size, dtype=torch.uint8, device=self.device)
            self.shelf.fill(flat, place.start)
            found.append(place.of(flat, 0))
        weight, bias = found
        assert weight is not None
        return weight, bias


class ProbeAnswers(NamedTuple):
    """Log-probs of the probe: when the model was opened, and after a page-in."""

    name: str
    before: np.ndarray
    now: Tensor

    def compare(self) -> None:
        require_unchanged(self.name, self.before, self.now.cpu().numpy())


class Pager:
    """Loads and drops weights, with at most `resident` models at once. `heads`: number of teacher roles."""

    def __init__(self, resident: int, keep: Literal["memory", "disk"], scratch: Path, heads: int = 1) -> None:
        self._resident, self._keep, self._scratch, self._room = resident, keep, scratch, heads
        self._order: list[PagedWeights] = []  # scoring order
        self._here: list[PagedWeights] = []
        self._coming: dict[PagedWeights, Load] = {}
        self._arrived: list[Load] = []  # loads of the current batch
        self._answers: list[ProbeAnswers] = []  # not compared yet
        self._heads: dict[PagedWeights, tuple[Tensor, Tensor | None]] = {}
        self._staging, self._reading = Staging(), threading.Lock()
        self._reader = ThreadPoolExecutor(1, "opd-pages") if resident > 1 else None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._shelves: list[Shelf] = []
        self.sizes: list[int] = []  # bytes of each model
        self.seconds, self.count = 0.0, 0  # this step: seconds waited for weights, and page-ins
        self._read_bytes, self._read_seconds = 0, 0.0

    # Opening and closing

    def add_model(self, model: LanguageModel, source: Path | None) -> PagedModel:
        """Puts the weights of a newly loaded model on a shelf. `source`: its checkpoint directory."""
        tensors = {name: parameter.detach() for name, parameter in model.module.named_parameters()}
        layout = FlatLayout(tensors)
        if self._keep == "memory":
            shelf: Shelf = MemoryShelf(layout, tensors, model.device)
        else:
            shelf = DiskShelf.of(layout, tensors, source, self._scratch, self._staging)
        self._shelves.append(shelf)
        self.sizes.append(layout.size)
        return PagedModel(model, PagedWeights(model, shelf, layout), self)

    def close(self) -> None:
        self.release()
        if self._reader is not None:
            self._reader.shutdown()
        for shelf in self._shelves:
            shelf.close()

    def metrics(self) -> dict[str, float]:
        """Of the last step: seconds waited for weights, page-ins, and read rate (GB/s)."""
        rate = {"page_rate": round(self._read_bytes / self._read_seconds / 1e9, 3)} if self._read_seconds else {}
        return {"time/page": round(self.seconds, 4), "pages": self.count, **rate}

    # Paging

    @contextmanager
    def scoring(self, order: Sequence[LanguageModel]) -> Iterator[None]:
        """Announces the models that will score, in order. On exit every probe has been checked and no model is resident."""
        self.seconds, self.count, self._read_bytes, self._read_seconds = 0.0, 0, 0, 0.0
        self._order = list(dict.fromkeys(model.stay for model in order if isinstance(model, PagedModel)))
        try:
            yield
            self.check()
            self._account()
        finally:
            self.release()

    def bring(self, stay: PagedWeights) -> None:
        """Makes a model resident and starts loading the next."""
        if stay.flat is not None:
            return
        self.ask()
        wanted = [stay, *self._next_in_order(stay)]
        self._heads.clear()
        for other in [other for other in (*self._here, *self._coming) if other not in wanted]:
            self._drop(other)
        load = self._coming.pop(stay, None) or self._load(stay, None)
        stay.put(load.arrive())
        self._here.append(stay)
        for other in wanted[1:]:
            if other.flat is None and other not in self._coming:
                self._coming[other] = self._load(other, self._reader)
        self.count += 1
        if self._order:
            self._arrived.append(load)

    def ask(self) -> None:
        """Scores the probe with models paged in since the last call. Outside a batch, compares at once."""
        self._answers += [stay.ask() for stay in self._here if not stay.probed]
        if not self._order:
            self._compare()

    def check(self) -> None:
        """Checks that every model paged in still gives its original probe answers."""
        self.ask()
        self._compare()

    def _compare(self) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer.compare()

    def _account(self) -> None:
        """Adds up wait and read times of a batch after the device has finished."""
        for device in {stay.device for stay in self._order if stay.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        for load in self._arrived:
            took = load.took()
            self.seconds, self._read_seconds = self.seconds + took.waited, self._read_seconds + took.read
            self._read_bytes += load.size

    def head(self, stay: PagedWeights) -> tuple[Tensor, Tensor | None]:
        """The output head. Heads of the last few non-resident models are cached."""
        if stay.flat is not None:
            return stay.head()
        if stay not in self._heads:
            start = time.perf_counter()
            while len(self._heads) >= self._room:
                del self._heads[next(iter(self._heads))]
            with self._reading:
                self._heads[stay] = stay.read_head()
            self.seconds += time.perf_counter() - start
        return self._heads[stay]

    def release(self) -> None:
        """Drops all resident models and pending loads."""
        for stay in (*self._here, *self._coming):
            self._drop(stay)
        self._order, self._arrived, self._answers = [], [], []
        self._heads.clear()

    def _next_in_order(self, stay: PagedWeights) -> list[PagedWeights]:
        """The next models in scoring order, as many as fit alongside it."""
        if stay not in self._order:
            return []
        at = self._order.index(stay)
        return self._order[at + 1 : at + self._resident]

    def _load(self, stay: PagedWeights, reader: ThreadPoolExecutor | None) -> Load:
        """Starts a load. Memory is allocated on this thread, which also uses and frees it."""
        flat = torch.empty(stay.layout.size, dtype=torch.uint8, device=stay.device)
        if stay.device.type != "cuda":
            return ReadLoad(stay.shelf, flat, reader, self._reading, None)
        if stay.device not in self._streams:
            self._streams[stay.device] = torch.cuda.Stream(stay.device)
        copying = self._streams[stay.device]
        if isinstance(stay.shelf, MemoryShelf):
            return CopiedLoad.of(stay.shelf, flat, copying)
        return ReadLoad(stay.shelf, flat, reader, self._reading, copying)

    def _drop(self, stay: PagedWeights) -> None:
        if stay in self._coming:
            self._coming.pop(stay).abandon()
        if stay in self._here:
            self._here.remove(stay)
            stay.drop_weights()


def _settle(device: torch.device) -> None:
    """Waits until the device has finished."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class PagedModel(LanguageModel):
    """A model with weights loaded on demand: all of them for hidden states, only the head for a loss."""

    stays = False

    def __init__(self, model: LanguageModel, stay: PagedWeights, pager: Pager) -> None:
        vars(self).update(vars(model))
        self.stay, self._pager = stay, pager

    def hidden(self, ids_T: Tensor, layout: Packed, layers: Sequence[int] = ()) -> Tensor:
        self._pager.bring(self.stay)
        return super().hidden(ids_T, layout, layers)

    def project(self, hidden: Tensor) -> Projection:
        weight, bias = self._pager.head(self.stay)
        return Projection(hidden, weight, bias, self.scale, self.softcap, self.size)

    def ask(self) -> None:
        """Scores the probe once after every page-in."""
        self._pager.ask()

    @contextmanager
    def resident(self) -> Iterator[LanguageModel]:
        self._pager.bring(self.stay)
        self._pager.check()
        plain = LanguageModel.__new__(LanguageModel)
        vars(plain).update({key: value for key, value in vars(self).items() if key not in ("stay", "_pager")})
        try:
            yield plain
        finally:
            self._pager.release()


class PagedTeacher(LocalTeacher):
    """A frozen, paged checkpoint. Its hidden states stay on the device or, if that is full, in pinned host memory."""

    model: PagedModel

    def kept(self, hidden: Tensor) -> Tensor:
        if hidden.device.type != "cuda" or _has_room(hidden):
            return hidden
        host = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
        return host.copy_(hidden, non_blocking=True)

    def _signal(self, rollout: Rollout, text: Rendered, values: Any) -> Signal:
        """If a view leaves tokens out, values are spread over the response, which reads them; so wait for the copy first."""
        reached = sum(s1 - s0 for s0, s1, _, _ in text.spans)
        if isinstance(values, Tensor) and values.device != self.model.device and reached < rollout.response_ids.size:
            _settle(self.model.device)
        return super()._signal(rollout, text, values)

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        found = super().score(rollouts, need, seen)
        self.model.ask()
        if any(isinstance(signal.values, Tensor) and signal.values.device != self.model.device for signal in found):
            _settle(self.model.device)  # wait for copies to the host
        return found


def _has_room(hidden: Tensor) -> bool:
    free, total = torch.cuda.mem_get_info(hidden.device)
    unused = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
    return free + unused > SPARE * total


# --- Shelves: a model's weights as flat bytes in (pinned) host memory or in files ---
# Files are read with `pread` straight into place. A memory map would take twice the memory during the copy and stay afterwards.


ALIGN = 512  # bytes, as torch allocates on CUDA: alignment affects kernel choice, and so the last bits
PIECE = 256 << 20  # bytes pinned at once
STAGE = 32 << 20  # bytes per staging block between file and GPU
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorPlace(NamedTuple):
    """Position of a tensor in the flat bytes of its model."""

    start: int
    size: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, flat: Tensor, start: int | None = None) -> Tensor:
        """The tensor as a view of `flat`, which begins at byte `start` of the model (default: at this tensor)."""
        first = self.start if start is None else start
        part = flat[first : first + self.size].view(self.dtype)
        return part.as_strided(self.shape, self.stride, part.storage_offset())


class FlatLayout:
    """Tensors back to back, each aligned like a separate allocation."""

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
    """The bytes of a tensor in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)


class Shelf(Protocol):
    def fill(self, into: Tensor, start: int) -> None:
        """Copies bytes from `start` into a byte tensor on any device; on CUDA in the order of the current stream."""

    def close(self) -> None:
        """Frees the shelf."""


class MemoryShelf:
    """Host memory, pinned for GPUs so that copies overlap with kernels."""

    def __init__(self, layout: FlatLayout, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        plain = torch.empty(0 if self._pinned else layout.size, dtype=torch.uint8)
        self._pieces = pinned(layout.size, PIECE, device) if self._pinned else list(plain.split(PIECE))
        self._unpin = weakref.finalize(self, unpin, self._pieces if self._pinned else [])
        self._unpin.atexit = False  # the system frees the pages at exit
        for name, place in layout.places.items():
            data = raw(tensors[name])
            for piece, first, part in self._parts(place.start, place.size):
                piece.copy_(data[first : first + part], non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream(device).synchronize()  # wait for copies to the host

    def fill(self, into: Tensor, start: int) -> None:
        for piece, first, part in self._parts(start, into.numel()):
            into[first : first + part].copy_(piece, non_blocking=True)

    def close(self) -> None:
        if self._pinned:
            torch.cuda.synchronize()  # wait for copies that still read from here
        self._unpin()
        self._pieces = []

    def _parts(self, start: int, size: int) -> Iterator[tuple[Tensor, int, int]]:
        """(bytes, offset from `start`, count)."""
        done = 0
        while done < size:
            number, inside = divmod(start + done, PIECE)
            part = min(PIECE - inside, size - done)
            yield self._pieces[number][inside : inside + part], done, part
            done += part


class Staging:
    """Two alternating pinned blocks, shared by all models: one is filled while the other is copied to the GPU."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Tensor, torch.cuda.Event]] = []
        self._turn = 0

    @contextmanager
    def next(self) -> Iterator[Tensor]:
        if not self._blocks:
            self._blocks = [(torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()) for _ in "ab"]
        self._turn = 1 - self._turn
        block, free = self._blocks[self._turn]
        free.synchronize()  # wait until the previous content was copied
        yield block
        free.record()


@dataclass(frozen=True)
class Extent:
    """A range of a model's bytes in a file. The file stays open, so that it cannot be replaced."""

    start: int
    size: int
    file: int
    offset: int
    path: str


class DiskShelf:
    """Reads from the checkpoint's files if they hold the same bytes, else from a temporary file."""

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
    """Writes an unnamed file. Its disk space is freed when the process ends, even after a crash."""
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
    """The extents of every tensor in a checkpoint's files; None if any differs in bits (another dtype, merged, …)."""
    opened: dict[Path, int] = {}
    extents: list[Extent] = []
    with suppress(OSError, ModelError, DiskError):  # missing or damaged
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
    """The tensors of a safetensors file by name, with their positions."""
    read_header(path)  # raises if damaged
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


# --- Loading weights: copied on a separate CUDA stream, or read by a thread ---
# CUDA copies are asynchronous. Kernels that use the weights wait for the copy, and the copy waits for kernels that still use its
# memory. The host waits for neither.


class LoadTimes(NamedTuple):
    """Seconds of a load."""

    waited: float  # while idle
    read: float


class Load(Protocol):
    size: int

    def arrive(self) -> Tensor:
        """The bytes. Later kernels see them loaded."""

    def abandon(self) -> None:
        """Gives the load up. Later kernels may reuse its memory."""

    def took(self) -> LoadTimes:
        """Call after `arrive`, when all later kernels are known to be done."""


class CopiedLoad:
    """Copies from pinned memory on a separate stream. `computing` returns the compute stream, `event` makes a timing event, and
    `on(stream)` is a context that runs copies on `stream`.
    """

    def __init__(
        self,
        shelf: Shelf,
        into: Tensor,
        computing: Callable[[], Any],
        copying: Any,
        event: Callable[[], Any],
        on: Callable[[Any], Any],
    ) -> None:
        self.size, self._flat, self._computing = into.numel(), into, computing
        self._began, self._ended, self._asked, self._arrived = (event() for _ in range(4))
        copying.wait_stream(computing())  # wait for earlier kernels that used this memory
        with on(copying):
            self._began.record(copying)
            shelf.fill(into, 0)
            self._ended.record(copying)

    @classmethod
    def of(cls, shelf: Shelf, into: Tensor, copying: torch.cuda.Stream) -> CopiedLoad:
        computing = partial(torch.cuda.current_stream, into.device)
        return cls(shelf, into, computing, copying, partial(torch.cuda.Event, enable_timing=True), torch.cuda.stream)

    def arrive(self) -> Tensor:
        computing = self._computing()
        self._asked.record(computing)
        computing.wait_event(self._ended)
        self._arrived.record(computing)
        return self._given()

    def abandon(self) -> None:
        self._computing().wait_event(self._ended)
        self._given()

    def took(self) -> LoadTimes:
        waited, read = self._asked.elapsed_time(self._arrived), self._began.elapsed_time(self._ended)
        return LoadTimes(waited / 1000, read / 1000)  # from milliseconds

    def _given(self) -> Tensor:
        """Hands over the tensor, so that its memory is freed as soon as the new owner drops it."""
        flat = self._flat
        del self._flat
        return flat


class ReadLoad:
    """Reads in a thread, or in `arrive` if there is none. On CUDA, `copying` is the stream for host-to-device copies."""

    def __init__(
        self,
        shelf: Shelf,
        into: Tensor,
        reader: ThreadPoolExecutor | None,
        turn: threading.Lock,
        copying: torch.cuda.Stream | None,
    ) -> None:
        self.size, self._shelf, self._turn, self._copying = into.numel(), shelf, turn, copying
        self._waited = self._read = 0.0
        if copying is not None:
            copying.wait_stream(torch.cuda.current_stream(into.device))
        self._future: Future[Tensor] | None = None if reader is None else reader.submit(self._fill, into)
        self._flat = into if reader is None else None

    def arrive(self) -> Tensor:
        if self._copying is not None:
            torch.cuda.current_stream(self._copying.device).synchronize()  # do not count compute time as waiting
        start = time.perf_counter()
        if self._future is not None:
            flat = self._future.result()
        else:
            assert self._flat is not None
            flat = self._fill(self._flat)
        self._future = self._flat = None
        self._waited = time.perf_counter() - start
        return flat

    def abandon(self) -> None:
        if self._future is not None:
            wait([self._future])  # the thread writes to its memory until then
        self._future = self._flat = None

    def took(self) -> LoadTimes:
        return LoadTimes(self._waited, self._read)

    def _fill(self, into: Tensor) -> Tensor:
        with self._turn, nullcontext() if self._copying is None else torch.cuda.stream(self._copying):
            start = time.perf_counter()
            self._shelf.fill(into, 0)
            if self._copying is not None:
                self._copying.synchronize()
            self._read = time.perf_counter() - start
        return into


# --- Pinned host memory ---
# torch's own allocator pins on one thread and rounds every block up to a power of two: a dozen models of 8 GB would take minutes
# before the first step. We use huge pages where available, and write and pin with several threads.


THREADS = 8


def pinned(size: int, piece: int, device: torch.device) -> list[Tensor]:
    """Allocates bytes in pieces, each pinned as a whole; a copy must not cross two pieces. Free them with `unpin`."""
    free = _available()
    if free is not None and size > free:
        raise TrainingError(
            f"pool.keep memory: the next teacher needs {bytes_in_words(size)} of host memory, and {bytes_in_words(free)} are free. "
            "Set pool.keep: disk."
        )
    pieces = list(_mapped(size).split(piece))
    number = torch.cuda.current_device() if device.index is None else device.index  # threads would start on device 0
    with ThreadPoolExecutor(THREADS, "opd-pin", torch.cuda.set_device, (number,)) as pool:
        codes = list(pool.map(_lock, pieces))
    wrong = [code for code in codes if code]
    if wrong:
        unpin([piece for piece, code in zip(pieces, codes, strict=True) if not code])
        raise TrainingError(
            f"pool.keep memory: {bytes_in_words(size)} of host memory cannot be pinned for a teacher (CUDA error {wrong[0]}). Set "
            "pool.keep: disk, or raise the limit of locked memory (ulimit -l)."
        )
    return pieces


def _available() -> int | None:
    """Bytes of available host memory. Pinned memory cannot be swapped out, so using more would wake the OOM killer."""
    facts = Path("/proc/meminfo")
    lines = facts.read_text(encoding="ascii").splitlines() if facts.is_file() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), None)


def unpin(pieces: list[Tensor]) -> None:
    for piece in pieces:
        torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def _mapped(size: int) -> Tensor:
    """Allocates bytes, in huge pages where available. The tensor owns them."""
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # no huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def _lock(piece: Tensor) -> int:
    piece.zero_()  # touch the pages first: pinning existing pages is ten times as fast
    return int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
