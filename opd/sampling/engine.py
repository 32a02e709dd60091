"""The built-in sampler: continuous batching over a fixed number of slots.

    engine = Engine(student.inference_copy(), BuiltInSampler(), max_length=512, merge_stop=stop_ids)
    for event in engine.sample(requests):        # a generator: requests are pulled as slots become free
        ...                                      # SampledToken, SampledToken, …, Finished, of many requests interleaved

    requests ──► free slots ──► prefill calls ──► decode steps, all slots at once ──► events
                     ▲                                  │
                     └──────────── finished ◄───────────┘

A rollout depends on its request and the weights only, never on what shares the batch: see `draws` and `graphs`.
Samples of one prompt share its prefill: all but its last piece is copied from a slot that holds it already.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from opd.divergences.lanes import LANES
from opd.errors import ModelError, TrainingError
from opd.models.language_model import LanguageModel
from opd.sampling.graphs import Partner, PrefillRow, Settings, Steps
from opd.sampling.packed import PackedProducts
from opd.sampling.recorded import Results
from opd.sampling.requests import check_context, copy_weights, sequence_ids, why_over
from opd.sampling.samplers import BuiltInSampler
from opd.sampling.sampling import filters
from opd.sampling.slots import fewer_rows
from opd.types import Finished, SampledToken, SampleRequest, StopReason, WeightsRef

SMALL_MODEL = 20_000_000  # parameters; below it a CPU step is bound by overhead, above it by arithmetic


def choose_settings(model: LanguageModel, spec: BuiltInSampler, partner: Partner | None = None) -> Settings:
    """Measured choices: a large model on a CPU gains nothing from wide prefills and loses by padding them, unless its weights are
    packed and the padding is left out.
    """
    if model.device.type == "cuda":
        slots, rows, chunk = 64, 16, 64
    elif bound_by_overhead(model):
        slots, rows, chunk = 64, 16, 16
    else:
        slots, rows, chunk = 16, 1, 32
    even = max(even_rows(model), even_rows(partner.model) if partner else 1)  # powers of two
    slots, chunk = (-(-count // even) * even for count in (spec.slots or slots, spec.prefill_chunk or chunk))
    if rows == 1 and partner is None and torch.get_num_threads() == 1 and fewer_rows(model.module, slots, even):
        rows = 4 if PackedProducts(model).some else 1
    return Settings(slots, spec.prefill_rows or rows, chunk, even)


def bound_by_overhead(model: LanguageModel) -> bool:
    """A step over twice as many slots takes hardly longer."""
    size = sum(parameter.numel() for parameter in model.module.parameters())
    return model.device.type != "cuda" and size < SMALL_MODEL


def even_rows(model: LanguageModel) -> int:
    """Slots and chunks are multiples of this, so that no activation ends within a vector: see `divergences.lanes`.

    It is 1 on CUDA and for models whose widths are multiples of 64, as almost all are.
    """
    if model.device.type != "cpu":
        return 1
    widths = [tensor.shape[-1] for tensor in model.module.parameters() if tensor.dim()]
    # one frequency per pair of a rotary embedding's sines and cosines
    widths += [2 * tensor.shape[-1] for name, tensor in model.module.named_buffers() if name.endswith("inv_freq")]
    lanes = LANES if model.dtype == torch.bfloat16 else LANES // 2
    return lanes // math.gcd(lanes, *widths)


@dataclass(eq=False)
class Active:
    """A request in a slot. `length` and `position` run ahead of what has been emitted."""

    request: SampleRequest
    slot: int
    rows: deque[PrefillRow]  # of its prompt, not prefilled yet
    length: int  # columns in use once everything launched so far is done, the token to be fed next included
    position: int  # response tokens launched, the prefix included
    ids: list[int]  # response ids emitted, the prefix included
    head: Head | None  # all of its prompt but the last piece; None: it has one piece
    source: Active | None = None  # whose slot holds that already
    finished: bool = False

    @property
    def exhausted(self) -> bool:
        return self.position >= self.request.sampling.max_new_tokens

    @property
    def copyable(self) -> bool:
        """Whether its head is in its slot, once everything launched so far is done."""
        return len(self.rows) <= 1


@dataclass(frozen=True)
class Head:
    """The beginning of a prompt, as whole pieces, read with the weights of a version."""

    ids: bytes
    columns: int
    version: int


@dataclass(frozen=True, eq=False)
class Launched:
    """A call whose results have not been read: column of the results -> request."""

    results: Results
    columns: list[tuple[int, Active]]
    version: int


class Engine:
    """Implements `types.TokenSampler`. One `sample` at a time; `load` may come between two events of it."""

    manner = ""  # nothing is faster

    def __init__(
        self,
        model: LanguageModel,
        spec: BuiltInSampler,
        max_length: int,
        *,
        merge_stop: tuple[int, ...],
        partner: Partner | None = None,
    ) -> None:
        check_context(model, max_length)
        if partner is not None and partner.model.size < model.size:
            raise ModelError(
                f"teacher_mix: {partner.model.name} has {partner.model.size} ids, {model.name} {model.size}: it cannot "
                "draw for it."
            )
        self.model, self.max_length, self.version = model, max_length, 0
        self.settings = choose_settings(model, spec, partner)
        self.steps = Steps(model, self.settings, max_length, merge_stop, spec.compile is True, partner)
        self.lag = 1 if model.device.type == "cuda" else 0  # calls whose results stay unread while the next one runs
        self.decode_steps = self.prefill_calls = self.prefill_rows = 0
        self._busy = False

    def load(self, weights: WeightsRef) -> None:
        self.steps.products.forget()
        copy_weights(self.model, weights)
        self.version = weights.version

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        """Events of all requests, interleaved: each request's tokens in order, then its `Finished`."""
        if self._busy:
            raise RuntimeError("this engine is sampling already; finish or close that generator first")
        self._busy = True
        try:
            self.steps.products.begin()
            yield from _Schedule(self, iter(requests)).run()
        finally:
            self.steps.products.end()
            self._busy = False


class _Schedule:
    """One run of `Engine.sample`."""

    def __init__(self, engine: Engine, requests: Iterator[SampleRequest]) -> None:
        self.engine, self.steps, self.settings = engine, engine.steps, engine.settings
        self.requests: Iterator[SampleRequest] | None = requests  # None: no more
        self.free = list(range(self.settings.slots - 1, -1, -1))
        self.waiting: deque[Active] = deque()  # in a slot, prompt not prefilled yet
        self.decoding: dict[int, Active] = {}  # by slot
        self.launched: deque[Launched] = deque()
        self.holders: dict[Head, Active] = {}  # a request whose slot holds it, or will once its rows are launched
        self.held: dict[int, Head] = {}  # by slot
        self.lag = engine.lag
        self.idle = 0  # slot-steps wasted since the last prefill

    def run(self) -> Iterator[SampledToken | Finished]:
        while True:
            yield from self.admit()
            while self.should_prefill():
                self.prefill()
            if self.decoding:
                self.decode()
            elif not self.launched:
                return
            keep = self.lag if self.decoding else 0
            while len(self.launched) > keep:
                yield from self.read(self.launched.popleft())

    # Requests into slots

    def admit(self) -> Iterator[Finished]:
        while self.free and self.requests is not None:
            request = next(self.requests, None)
            if request is None:
                self.requests = None
                return
            active = self.place(request)
            over = self.ended(active)
            if over is None:
                self.free.pop()
                self.share(active)
                self.waiting.append(active)
            else:  # an interrupted rollout whose last token was kept, but not the fact that it was the last
                yield Finished(request.id, over)

    def place(self, request: SampleRequest) -> Active:
        sampling = request.sampling
        ids, prefix = sequence_ids(request, self.engine.max_length)
        slot, chunk = self.free[-1], self.settings.prefill_chunk
        rows = deque(
            PrefillRow(
                ids[first : first + chunk], first, slot, first + chunk >= ids.size, request.key, prefix.size, sampling
            )
            for first in range(0, ids.size, chunk)
        )
        columns = rows[-1].first
        head = Head(ids[:columns].tobytes(), columns, self.engine.version) if columns else None
        return Active(request, slot, rows, ids.size, prefix.size, prefix.tolist(), head)

    def share(self, active: Active) -> None:
        """It takes its head from a slot that holds it, or becomes the one from which others take it."""
        if active.slot in self.held and self.held[active.slot] != active.head:  # what the slot held is overwritten
            lost = self.held.pop(active.slot)
            if lost in self.holders and self.holders[lost].slot == active.slot:
                del self.holders[lost]
            for other in self.waiting:
                if other.source is not None and other.source.slot == active.slot:
                    self.read_whole(other)
        if active.head is None:
            return
        active.source = self.holders.get(active.head)
        if active.source is None:
            self.hold(active)
        else:
            active.rows = deque([active.rows[-1]])

    def hold(self, active: Active) -> None:
        assert active.head is not None
        self.holders[active.head], self.held[active.slot] = active, active.head

    def read_whole(self, active: Active) -> None:
        """Its head is not to be had any more."""
        active.source, (last,) = None, active.rows
        ids, _ = sequence_ids(active.request, self.engine.max_length)
        chunk = self.settings.prefill_chunk
        head = (
            replace(last, ids=ids[first : first + chunk], first=first, last=False)
            for first in range(0, last.first, chunk)
        )
        active.rows = deque([*head, last])

    # Calls

    def should_prefill(self) -> bool:
        """At once when the rows fill a call or nothing else is running; otherwise when waiting has become as dear.

        A call costs about one decode step, and dummy rows are its waste; idle slots are the waste of waiting.
        """
        rows = sum(len(active.rows) for active in self.waiting)
        if rows == 0:
            return False
        wasted = self.settings.slots * (1 - rows / self.settings.prefill_rows)
        return not self.decoding or self.idle >= wasted

    def prefill(self) -> None:
        rows: list[PrefillRow] = []
        columns: list[tuple[int, Active]] = []
        for active in self.ready():
            while active.rows and len(rows) < self.settings.prefill_rows:
                rows.append(active.rows.popleft())
            if not active.rows:
                columns.append((len(rows) - 1, active))
        copied = [active for _, active in columns if active.source is not None]
        self.steps.copy([(a.source.slot, a.slot, a.head.columns) for a in copied if a.source and a.head])
        results = self.steps.prefill(rows)
        self.waiting = deque(active for active in self.waiting if active.rows)
        for active in self.waiting:
            if active.source is None and active.rows[0].first > 0:
                self.steps.park(active.slot)
        self.engine.prefill_calls += 1
        self.engine.prefill_rows += len(rows)
        self.idle = 0
        for active in copied:
            self.hold(active)
        for _, active in columns:
            self.decoding[active.slot] = active
        self.note(results, columns)

    def ready(self) -> list[Active]:
        """Requests that a call can take: what others hold for them has to be there before it."""
        for active in self.waiting:
            if active.source is not None and active.head is not None and active.head.version != self.engine.version:
                self.read_whole(active)
        return [active for active in self.waiting if active.source is None or active.source.copyable]

    def decode(self) -> None:
        longest = max(active.length for active in self.decoding.values())
        filtered = any(filters(active.request.sampling) for active in self.decoding.values())
        self.idle += self.settings.slots - len(self.decoding)
        results = self.steps.decode(longest, filtered, self.decoding)
        self.engine.decode_steps += 1
        self.note(results, list(self.decoding.items()))

    def note(self, results: Results, columns: list[tuple[int, Active]]) -> None:
        """A call that will draw a token for each of these was launched. Who has no more to come frees the slot now."""
        self.launched.append(Launched(results, columns, self.engine.version))
        for _, active in columns:
            active.length += 1
            active.position += 1
            if active.exhausted:
                self.release(active)

    def release(self, active: Active) -> None:
        if self.decoding.get(active.slot) is active:  # else the slot is free already, or has a new tenant
            del self.decoding[active.slot]
            self.free.append(active.slot)

    # Results into events

    def read(self, launched: Launched) -> Iterator[SampledToken | Finished]:
        values = launched.results.numpy()
        tokens, (logprobs, sampled, stops) = values[0].astype(np.int64).tolist(), values[1:].tolist()
        version = launched.version
        for column, active in launched.columns:
            if active.finished:  # it stopped one step ago, and this one was under way
                continue
            token, logprob = tokens[column], logprobs[column]
            if math.isnan(logprob):
                self.steps.clear()  # NaNs would outlive the weights that made them
                raise TrainingError(
                    f"request {active.request.id!r}: the policy's logits (version {version}) are not finite."
                )
            active.ids.append(token)
            yield SampledToken(active.request.id, token, logprob, sampled[column], stops[column], version)
            over = self.ended(active)
            if over is not None:
                active.finished = True
                self.release(active)
                yield Finished(active.request.id, over)

    def ended(self, active: Active) -> StopReason | None:
        return why_over(active.ids, active.request.sampling, self.engine.model.tokenizer)
