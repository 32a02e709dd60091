"""Any number of frozen teachers, a few of them in memory: the others wait on shelves, and are read back before they score.

With two resident, one scores while the next is read. None is resident while the student is updated, but for one head: what
a teacher said is kept as hidden states. After every page-in a fixed probe is scored again, behind what the teacher was brought in to
score, and has to be the same bit for bit. While a batch is scored nobody waits for its answers: they are compared at the end, before
anything is trained on what the teachers said, or before it is written down. So a GPU goes from one teacher to the next without a pause.
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
from opd.teachers.pool import probe_rollouts, refuse_changed, refuse_lost
from opd.teachers.scoring import LocalTeacher, Page
from opd.teachers.views import behind

SPARE = 0.25  # of a GPU's memory that hidden states leave free; what does not fit goes to pinned host memory


class PagedWeights:
    """A model's place in the pool: the shelf where its weights wait, and the bytes they are while they are here."""

    def __init__(self, model: LanguageModel, shelf: Shelf, layout: FlatLayout) -> None:
        self.name, self.shelf, self.layout, self.device = model.name, shelf, layout, model.device
        self.flat: Tensor | None = None
        self.asked = True  # since its weights came in
        self._parameters = dict(model.module.named_parameters())
        self._head = [
            next((name for name, found in self._parameters.items() if found is part), None)
            for part in (model.head.weight, model.head.bias)
        ]
        own = copy.copy(model)  # whatever vocabulary it comes to share with others, it is compared with itself
        own.stays = False  # and passes are not recorded: its weights come and go
        self._scorer = LocalTeacher(model.name, "teacher", own, 8192, own.stop_ids)
        texts = [behind(rollout.prompt_ids, rollout) for rollout in probe_rollouts(own.size, own.stop_ids)]
        self._probe = Page.of(texts, model.device)
        self._said = self._answers().cpu().numpy()
        refuse_lost(self.name, self._said, own.size)
        dtypes = {parameter.dtype for parameter in self._parameters.values()}
        self._missing = {kind: torch.full((1,), float("nan"), dtype=kind, device=model.device) for kind in dtypes}
        self.take_away()

    def put(self, flat: Tensor) -> None:
        self.flat, self.asked = flat, False
        for name, view in self.layout.views(flat).items():
            self._parameters[name].data = view

    def take_away(self) -> None:
        """Shapes, dtypes and device stay as they are; whoever computed with what is left would get NaN."""
        self.flat = None
        for parameter in self._parameters.values():
            parameter.data = self._missing[parameter.dtype].expand(parameter.shape)

    def ask(self) -> ProbeAnswers:
        """What it says of the probe, as soon as the device gets there."""
        self.asked = True
        return ProbeAnswers(self.name, self._said, self._answers())

    @torch.no_grad()
    def _answers(self) -> Tensor:
        projection = self._scorer.project(self._scorer.hidden(self._probe))
        return token_logprobs(projection, self._probe.tokens_N, merge=(self._scorer.stop_ids,), trusted=True)

    def head(self) -> tuple[Tensor, Tensor | None]:
        """While its weights are here."""
        weight, bias = (None if name is None else self._parameters[name].data for name in self._head)
        assert weight is not None
        return weight, bias

    def read_head(self) -> tuple[Tensor, Tensor | None]:
        """Its output head alone, from the shelf."""
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
    """To the probe: when the model was opened, and since its weights came back."""

    name: str
    before: np.ndarray
    now: Tensor

    def compare(self) -> None:
        refuse_changed(self.name, self.before, self.now.cpu().numpy())


class Pager:
    """Brings weights in and takes them away: at most `resident` models at once. `heads`: how many roles teachers have."""

    def __init__(self, resident: int, keep: Literal["memory", "disk"], scratch: Path, heads: int = 1) -> None:
        self._resident, self._keep, self._scratch, self._room = resident, keep, scratch, heads
        self._order: list[PagedWeights] = []  # in which they will score
        self._here: list[PagedWeights] = []
        self._coming: dict[PagedWeights, Load] = {}
        self._arrived: list[Load] = []  # while these score
        self._answers: list[ProbeAnswers] = []  # that nobody has compared yet
        self._heads: dict[PagedWeights, tuple[Tensor, Tensor | None]] = {}
        self._staging, self._reading = Staging(), threading.Lock()
        self._reader = ThreadPoolExecutor(1, "opd-pages") if resident > 1 else None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._shelves: list[Shelf] = []
        self.sizes: list[int] = []  # bytes of each model
        self.seconds, self.count = 0.0, 0  # waited for weights, and page-ins, of this step
        self._read_bytes, self._read_seconds = 0, 0.0

    # Opening and closing

    def take_in(self, model: LanguageModel, source: Path | None) -> PagedModel:
        """A model that has just been loaded, with its weights put on a shelf. `source`: its checkpoint's directory."""
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
        """Of the last step: seconds waited for weights, how often some were brought in, and how fast (GB/s)."""
        rate = {"page_rate": round(self._read_bytes / self._read_seconds / 1e9, 3)} if self._read_seconds else {}
        return {"time/page": round(self.seconds, 4), "pages": self.count, **rate}

    # Weights that are needed

    @contextmanager
    def scoring(self, order: Sequence[LanguageModel]) -> Iterator[None]:
        """Models that will score, in this order; afterwards none is resident, and each has said of the probe what it did before."""
        self.seconds, self.count, self._read_bytes, self._read_seconds = 0.0, 0, 0, 0.0
        self._order = list(dict.fromkeys(model.stay for model in order if isinstance(model, PagedModel)))
        try:
            yield
            self.check()
            self._account()
        finally:
            self.release()

    def bring(self, stay: PagedWeights) -> None:
        """Have its weights here, and those of the next on their way."""
        if stay.flat is not None:
            return
        self.ask()
        wanted = [stay, *self._behind(stay)]
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
        """Models whose weights came in since are asked about the probe; between batches their answers are compared at once."""
        self._answers += [stay.ask() for stay in self._here if not stay.asked]
        if not self._order:
            self._compare()

    def check(self) -> None:
        """Each model whose weights came in since is the one that was opened."""
        self.ask()
        self._compare()

    def _compare(self) -> None:
        answers, self._answers = self._answers, []
        for answer in answers:
            answer.compare()

    def _account(self) -> None:
        """How long the models of a batch were waited for, once the device is done with them."""
        for device in {stay.device for stay in self._order if stay.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        for load in self._arrived:
            took = load.took()
            self.seconds, self._read_seconds = self.seconds + took.waited, self._read_seconds + took.read
            self._read_bytes += load.size

    def head(self, stay: PagedWeights) -> tuple[Tensor, Tensor | None]:
        """Its output head; of models whose weights are not here, the last few that were asked for stay."""
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
        """Nothing is resident any more, nor on its way."""
        for stay in (*self._here, *self._coming):
            self._drop(stay)
        self._order, self._arrived, self._answers = [], [], []
        self._heads.clear()

    def _behind(self, stay: PagedWeights) -> list[PagedWeights]:
        """Those that score next, as many as have room beside it."""
        if stay not in self._order:
            return []
        at = self._order.index(stay)
        return self._order[at + 1 : at + self._resident]

    def _load(self, stay: PagedWeights, reader: ThreadPoolExecutor | None) -> Load:
        """Into memory that is allocated here, where it is used and freed."""
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
            stay.take_away()


def _settle(device: torch.device) -> None:
    """What was computed so far is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class PagedModel(LanguageModel):
    """A model whose weights are here while they are used: all of them for hidden states, the head alone for a loss."""

    stays = False

    def __init__(self, model: LanguageModel, stay: PagedWeights, pager: Pager) -> None:
        vars(self).update(vars(model))
        self.stay, self._pager = stay, pager

    def hidden(self, ids_T: Tensor, layout: Packed) -> Tensor:
        self._pager.bring(self.stay)
        return super().hidden(ids_T, layout)

    def project(self, hidden: Tensor) -> Projection:
        weight, bias = self._pager.head(self.stay)
        return Projection(hidden, weight, bias, self.scale, self.softcap, self.size)

    def ask(self) -> None:
        """Once behind every page-in."""
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
    """A frozen checkpoint that comes and goes. What it said waits on the device, or where that is full in pinned host memory."""

    _model: PagedModel

    def kept(self, hidden: Tensor) -> Tensor:
        if hidden.device.type != "cuda" or _has_room(hidden):
            return hidden
        host = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
        return host.copy_(hidden, non_blocking=True)

    def _signal(self, rollout: Rollout, text: Rendered, values: Any) -> Signal:
        """Where a view leaves tokens out, what it said is spread over the response: read here, so the copy has to be whole."""
        reached = sum(s1 - s0 for s0, s1, _, _ in text.spans)
        if isinstance(values, Tensor) and values.device != self._model.device and reached < rollout.response_ids.size:
            _settle(self._model.device)
        return super()._signal(rollout, text, values)

    def score(
        self, rollouts: Sequence[Rollout], need: SignalNeed, seen: Sequence[Rendered] | None = None
    ) -> list[Signal]:
        found = super().score(rollouts, need, seen)
        self._model.ask()
        if any(isinstance(signal.values, Tensor) and signal.values.device != self._model.device for signal in found):
            _settle(self._model.device)  # copies to the host are whole
        return found


def _has_room(hidden: Tensor) -> bool:
    free, total = torch.cuda.mem_get_info(hidden.device)
    unused = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
    return free + unused > SPARE * total


# Where a model's weights wait: one run of bytes, in (pinned) host memory or in files, from which any part can be read.
#
# Files are read with `pread` straight into place. A mapping would count twice while it is copied, and stay in memory after.


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


# How weights come in: copied by a GPU beside what it computes, or read by a thread.
#
# A GPU is told of a copy and goes on. What it computes with these weights waits for the copy, and the copy waits for what is still computed
# in the memory it goes to; whoever asks waits for neither.


class Took(NamedTuple):
    """Seconds of a load."""

    waited: float  # with nothing else to do
    read: float


class Load(Protocol):
    size: int

    def arrive(self) -> Tensor:
        """The bytes: what is computed from now on finds them there."""

    def abandon(self) -> None:
        """Nobody wants them: what is computed from now on may use their memory."""

    def took(self) -> Took:
        """Once it has arrived, and everything that was computed behind it is known to be done."""


class CopiedLoad:
    """From pinned memory, on a stream of its own. `computing` is the one where things are computed, `event` makes one that takes the
    time, and in `on(stream)` copies go there.
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
        copying.wait_stream(computing())  # what was computed in this memory before
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

    def took(self) -> Took:
        waited, read = self._asked.elapsed_time(self._arrived), self._began.elapsed_time(self._ended)
        return Took(waited / 1000, read / 1000)  # of milliseconds

    def _given(self) -> Tensor:
        """Kept here no longer: it is free as soon as its new owner lets it go."""
        flat = self._flat
        del self._flat
        return flat


class ReadLoad:
    """By a thread, or without one when it is asked for. On CUDA, `copying` is the stream that brings what was read there."""

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
            torch.cuda.current_stream(self._copying.device).synchronize()  # what was computed is not waited for
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
            wait([self._future])  # its memory is written to until then
        self._future = self._flat = None

    def took(self) -> Took:
        return Took(self._waited, self._read)

    def _fill(self, into: Tensor) -> Tensor:
        with self._turn, nullcontext() if self._copying is None else torch.cuda.stream(self._copying):
            start = time.perf_counter()
            self._shelf.fill(into, 0)
            if self._copying is not None:
                self._copying.synchronize()
            self._read = time.perf_counter() - start
        return into


# Host memory that a GPU reads by itself: pages that stay where they are.
#
# torch's own allocator locks them on one thread and rounds every block up to a power of two: a dozen models of 8 GB would take
# minutes before the first step. Here they are asked for in large pages where the system has some, and written to and locked by
# several threads.


THREADS = 8


def pinned(size: int, piece: int, device: torch.device) -> list[Tensor]:
    """Bytes in pieces of this size, each locked as a whole: a copy may not cross from one to the next. `unpin` them."""
    free = _available()
    if free is not None and size > free:
        raise TrainingError(
            f"pool.keep memory: the next teacher needs {bytes_in_words(size)} of host memory, and {bytes_in_words(free)} are free. "
            "Set pool.keep: disk."
        )
    pieces = list(_mapped(size).split(piece))
    number = (
        torch.cuda.current_device() if device.index is None else device.index
    )  # else threads begin on the first one
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
    """Bytes of host memory that can be had; what is locked cannot be swapped out, and the system would end whoever has most."""
    facts = Path("/proc/meminfo")
    lines = facts.read_text(encoding="ascii").splitlines() if facts.is_file() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), None)


def unpin(pieces: list[Tensor]) -> None:
    for piece in pieces:
        torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def _mapped(size: int) -> Tensor:
    """Bytes of the system, in large pages where it gives some; the tensor keeps them."""
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without large pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def _lock(piece: Tensor) -> int:
    piece.zero_()  # pages that exist already are locked ten times as fast as those that have to be found meanwhile
    return int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
