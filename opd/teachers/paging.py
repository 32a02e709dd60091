"""Any number of frozen teachers, a few of them in memory: the others wait on shelves, and are read back before they score.

With two resident, one scores while the next is read. None is resident while the student is updated, but for one head: what
a teacher said is kept as hidden states. After every page-in a fixed probe is scored again, behind what the teacher was brought in to
score, and has to be the same bit for bit. While a batch is scored nobody waits for its answers: they are compared at the end, before
anything is trained on what the teachers said, or before it is written down. So a GPU goes from one teacher to the next without a pause.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opd.divergences import Projection, token_logprobs
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel
from opd.teachers.loads import CopiedLoad, Load, ReadLoad
from opd.teachers.local import LocalTeacher
from opd.teachers.probe import probe_rollouts, refuse_changed, refuse_lost
from opd.teachers.scoring import Page
from opd.teachers.shelves import DiskShelf, FlatLayout, MemoryShelf, Shelf, Staging
from opd.teachers.views import behind
from opd.types import Rendered, Rollout, Signal, SignalNeed

SPARE = 0.25  # of a GPU's memory that hidden states leave free; what does not fit goes to pinned host memory


class Stay:
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
        self._order: list[Stay] = []  # in which they will score
        self._here: list[Stay] = []
        self._coming: dict[Stay, Load] = {}
        self._arrived: list[Load] = []  # while these score
        self._answers: list[ProbeAnswers] = []  # that nobody has compared yet
        self._heads: dict[Stay, tuple[Tensor, Tensor | None]] = {}
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
        return PagedModel(model, Stay(model, shelf, layout), self)

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

    def bring(self, stay: Stay) -> None:
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

    def head(self, stay: Stay) -> tuple[Tensor, Tensor | None]:
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

    def _behind(self, stay: Stay) -> list[Stay]:
        """Those that score next, as many as have room beside it."""
        if stay not in self._order:
            return []
        at = self._order.index(stay)
        return self._order[at + 1 : at + self._resident]

    def _load(self, stay: Stay, reader: ThreadPoolExecutor | None) -> Load:
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

    def _drop(self, stay: Stay) -> None:
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

    def __init__(self, model: LanguageModel, stay: Stay, pager: Pager) -> None:
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
