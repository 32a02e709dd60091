"""The built-in sampler: continuous batching over a fixed number of slots.

    engine = Engine(student.inference_copy(), BuiltInSampler(), max_length=512, merge_stop=stop_ids)
    for event in engine.sample(requests):        # a generator: takes requests as slots become free
        ...                                      # SampledToken, SampledToken, …, Finished, of many requests interleaved

    requests ──► free slots ──► prefill calls ──► decode steps, all slots at once ──► events
                     ▲                                  │
                     └──────────── finished ◄───────────┘

A rollout depends only on its request and the weights, never on the rest of the batch: see `requests` and `calls`.
Samples of one prompt share its prefill: all but the last chunk is copied from a slot that already holds it.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.common.errors import ModelError, TrainingError
from opd.common.text import first_line
from opd.divergences.projection import LANES
from opd.engines.calls import Partner, PrefillRow, Results, RowSettings, Settings, Steps, draw, filters
from opd.engines.kinds import BuiltInSampler
from opd.engines.layers import MklWeights, SlotCache, SlotLayout, fewer_rows
from opd.engines.requests import check_context, copy_weights, sequence_ids, why_over
from opd.models.attention import (
    FOREIGN,
    FOREIGN_LAYERS,
    Packed,
    PackedRoute,
    Unknown,
    far,
    narrow_windows,
    switch_attention,
    takes_our_attention,
)
from opd.models.language_model import LanguageModel
from opd.records import Finished, SampledToken, SampleRequest, WeightsRef

NOTHING_YET = 0.001  # seconds before a source that had no request is asked again
SMALL_MODEL = 20_000_000  # parameters; a CPU step is bound by overhead below this, by arithmetic above


def choose_settings(model: LanguageModel, spec: BuiltInSampler, partner: Partner | None = None) -> Settings:
    """Slots, prefill rows and chunk size, chosen by measurement.

    On a CPU, a large model gains nothing from wide prefills and loses time to padding, unless its weights are packed and
    the padding is skipped.
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
        rows = 4 if MklWeights(model).matrices else 1
    return Settings(slots, spec.prefill_rows or rows, chunk, even)


def bound_by_overhead(model: LanguageModel) -> bool:
    """Whether a step with twice as many slots takes hardly any longer."""
    size = sum(parameter.numel() for parameter in model.module.parameters())
    return model.device.type != "cuda" and size < SMALL_MODEL


def even_rows(model: LanguageModel) -> int:
    """Slots and chunks are multiples of this, so that no activation ends inside a SIMD vector: see `LANES`.

    It is 1 on CUDA and for models with widths that are multiples of 64, which almost all are.
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
    """A request in a slot. `length` and `position` count launched tokens, which may not be emitted yet."""

    request: SampleRequest
    slot: int
    rows: deque[PrefillRow]  # chunks of its prompt that are not prefilled yet
    length: int  # columns in use once all launched calls are done, including the next input token
    position: int  # response tokens launched, including the prefix
    ids: list[int]  # response ids emitted, including the prefix
    head: Head | None  # all chunks of its prompt but the last; None: there is only one
    source: Active | None = None  # a request with the same head in its slot
    finished: bool = False

    @property
    def copyable(self) -> bool:
        """Whether its slot holds its head once all launched calls are done."""
        return len(self.rows) <= 1


@dataclass(frozen=True)
class Head:
    """The beginning of a prompt, in whole chunks, prefilled with the weights of one version."""

    ids: bytes
    columns: int
    version: int


@dataclass(frozen=True, eq=False)
class Launched:
    """A launched call with unread results. `columns`: (column of the results, request)."""

    results: Results
    columns: list[tuple[int, Active]]
    version: int


class Engine:
    """Implements `TokenSampler`. One `sample` call at a time; `load` may be called between two of its events."""

    why_slow = ""

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
        self.lag = 1 if model.device.type == "cuda" else 0  # calls left unread while the next one runs
        self.decode_steps = self.prefill_calls = self.prefill_rows = 0
        self._busy = False

    def load(self, weights: WeightsRef) -> None:
        self.steps.products.forget()
        copy_weights(self.model, weights)
        self.version = weights.version

    def sample(self, requests: Iterable[SampleRequest | None]) -> Iterator[SampledToken | Finished]:
        """Events of all requests, interleaved: each request's tokens in order, then its `Finished`."""
        if self._busy:
            raise RuntimeError("this engine is sampling already; finish or close that generator first")
        self._busy = True
        try:
            with self.steps.products.sampling():
                yield from _Schedule(self, iter(requests)).run()
        finally:
            self._busy = False


class _Schedule:
    """One call of `Engine.sample`."""

    def __init__(self, engine: Engine, requests: Iterator[SampleRequest | None]) -> None:
        self.engine, self.steps, self.settings = engine, engine.steps, engine.settings
        self.requests: Iterator[SampleRequest | None] | None = requests  # None: no more
        self.free = list(range(self.settings.slots - 1, -1, -1))
        self.waiting: deque[Active] = deque()  # in a slot, with a prompt that is not prefilled yet
        self.decoding: dict[int, Active] = {}  # by slot
        self.launched: deque[Launched] = deque()
        self.holders: dict[Head, Active] = {}  # the request that holds the head, or will once its rows are launched
        self.held: dict[int, Head] = {}  # by slot
        self.lag = engine.lag
        self.idle = 0  # slot-steps wasted since the last prefill

    def run(self) -> Iterator[SampledToken | Finished]:
        while True:
            yield from self.admit()
            while rows := sum(len(active.rows) for active in self.waiting):
                # A prefill costs about one decode step. It wastes its dummy rows; waiting wastes idle slots.
                wasted = self.settings.slots * (1 - rows / self.settings.prefill_rows)
                if self.decoding and self.idle < wasted:
                    break
                self.prefill()
            if self.decoding:
                self.decode()
            elif not self.launched:
                if self.requests is None:
                    return
                time.sleep(NOTHING_YET)
            keep = self.lag if self.decoding else 0
            while len(self.launched) > keep:
                yield from self.read(self.launched.popleft())

    # Requests into slots

    def admit(self) -> Iterator[Finished]:
        while self.free and self.requests is not None:
            try:
                request = next(self.requests)
            except StopIteration:
                self.requests = None
                return
            if request is None:  # nothing yet
                return
            ids, prefix = sequence_ids(request, self.engine.max_length)
            response = prefix.tolist()
            over = why_over(response, request, self.engine.model.tokenizer)
            if over is None:
                self.place(request, ids, response)
            else:  # an interrupted rollout whose last token was saved, but not its end
                yield Finished(request.id, over)

    def place(self, request: SampleRequest, ids: np.ndarray, response: list[int]) -> None:
        """Put a request into a free slot. Its head is copied from a slot that holds it, or others will copy it from this one."""
        sampling, slot, chunk = request.sampling, self.free.pop(), self.settings.prefill_chunk
        rows = deque(
            PrefillRow(
                ids[first : first + chunk], first, slot, first + chunk >= ids.size, request.key, len(response), sampling
            )
            for first in range(0, ids.size, chunk)
        )
        columns = rows[-1].first
        head = Head(ids[:columns].tobytes(), columns, self.engine.version) if columns else None
        if slot in self.held and self.held[slot] != head:
            self.drop_head(slot)
        source = None if head is None else self.holders.get(head)
        active = Active(request, slot, rows, ids.size, len(response), response, head, source)
        if source is not None:
            active.rows = deque([rows[-1]])
        elif head is not None:
            self.hold(active)
        self.waiting.append(active)

    def drop_head(self, slot: int) -> None:
        """The head in a slot is overwritten. Requests that would have copied it prefill their whole prompts."""
        lost = self.held.pop(slot)
        if lost in self.holders and self.holders[lost].slot == slot:
            del self.holders[lost]
        for other in self.waiting:
            if other.source is not None and other.source.slot == slot:
                self.prefill_all(other)

    def hold(self, active: Active) -> None:
        assert active.head is not None
        self.holders[active.head], self.held[active.slot] = active, active.head

    def prefill_all(self, active: Active) -> None:
        """Prefill the whole prompt, since its head can no longer be copied."""
        active.source, (last,) = None, active.rows
        ids, _ = sequence_ids(active.request, self.engine.max_length)
        chunk = self.settings.prefill_chunk
        head = (
            replace(last, ids=ids[first : first + chunk], first=first, last=False)
            for first in range(0, last.first, chunk)
        )
        active.rows = deque([*head, last])

    # Calls

    def prefill(self) -> None:
        rows: list[PrefillRow] = []
        columns: list[tuple[int, Active]] = []
        for active in self.waiting:
            if active.source is not None and active.head is not None and active.head.version != self.engine.version:
                self.prefill_all(active)
        # a head to copy must already be in its slot
        ready = [active for active in self.waiting if active.source is None or active.source.copyable]
        for active in ready:
            while active.rows and len(rows) < self.settings.prefill_rows:
                rows.append(active.rows.popleft())
            if not active.rows:
                columns.append((len(rows) - 1, active))
        copied = [active for _, active in columns if active.source is not None]
        if copied:
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

    def decode(self) -> None:
        longest = max(active.length for active in self.decoding.values())
        filtered = any(filters(active.request.sampling) for active in self.decoding.values())
        self.idle += self.settings.slots - len(self.decoding)
        results = self.steps.decode(longest, filtered, self.decoding)
        self.engine.decode_steps += 1
        self.note(results, list(self.decoding.items()))

    def note(self, results: Results, columns: list[tuple[int, Active]]) -> None:
        """Record a launched call that draws one token per request. A request that needs no more tokens frees its slot."""
        self.launched.append(Launched(results, columns, self.engine.version))
        for _, active in columns:
            active.length += 1
            active.position += 1
            if active.position - active.request.start >= active.request.sampling.max_new_tokens:
                self.release(active)

    def release(self, active: Active) -> None:
        if self.decoding.get(active.slot) is active:  # else the slot is already free or reused
            del self.decoding[active.slot]
            self.free.append(active.slot)

    # Results into events

    def read(self, launched: Launched) -> Iterator[SampledToken | Finished]:
        if launched.results.event is not None:
            launched.results.event.synchronize()
        values = launched.results.values.numpy()
        tokens, (logprobs, sampled, stops) = values[0].astype(np.int64).tolist(), values[1:].tolist()
        version = launched.version
        for column, active in launched.columns:
            if active.finished:  # it stopped one step ago, when this call was already running
                continue
            token, logprob = tokens[column], logprobs[column]
            if math.isnan(logprob):
                self.steps.clear()  # NaNs in the cache would outlive these weights
                raise TrainingError(
                    f"request {active.request.id!r}: the policy's logits (version {version}) are not finite."
                )
            active.ids.append(token)
            yield SampledToken(active.request.id, token, logprob, sampled[column], stops[column], version)
            over = why_over(active.ids, active.request, self.engine.model.tokenizer)
            if over is not None:
                active.finished = True
                self.release(active)
                yield Finished(active.request.id, over)


# --- Choosing the sampler: the engine if keys and values fit into slots, else one request at a time ---


log = logging.getLogger(__name__)

LENGTH = 9  # tokens of each of the probe's two sequences


def open_sampler(
    model: LanguageModel,
    spec: BuiltInSampler,
    max_length: int,
    *,
    merge_stop: tuple[int, ...],
    partner: Partner | None = None,
) -> Engine | PlainSampler:
    """Open a sampler. It takes over the model, so pass an `inference_copy`. Slots are halved until they fit into memory."""
    if partner is not None:
        require_slots([model, partner.model], max_length)
    why = unfit_for_slots(model, max_length)
    if why:
        return PlainSampler(model, max_length, merge_stop=merge_stop, why=why)
    while True:
        try:
            return Engine(model, spec, max_length, merge_stop=merge_stop, partner=partner)
        except torch.OutOfMemoryError:
            slots = choose_settings(model, spec, partner).slots
            if slots == 1:
                raise
        log.warning("%s: no memory for %s slots; trying half as many", model.name, slots)
        spec = spec.model_copy(update={"slots": slots // 2})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def require_slots(models: Sequence[LanguageModel], max_length: int) -> None:
    """Raise an error for models that cannot decode together, token by token."""
    for model in models:
        why = unfit_for_slots(model, max_length)
        if why:
            raise ModelError(
                f"rollout.teacher_mix draws from two models at once, and {model.name} samples one request at a time "
                f"({why}). Set teacher_mix: 0."
            )


def unfit_for_slots(model: LanguageModel, max_length: int) -> str:
    """Why a model cannot sample through slots; empty if it can."""
    route = model.route
    if not isinstance(route, PackedRoute):
        return route.why
    if not takes_our_attention(model):
        return FOREIGN_LAYERS
    if route.limit is not None and max_length > route.limit:
        return (
            f"sequences of {max_length} tokens are longer than the {route.limit} for which its rotary frequencies are "
            "fixed"
        )
    return _wrong_in_slots(model)


def _wrong_in_slots(model: LanguageModel) -> str:
    try:
        with torch.no_grad(), narrow_windows(model.module):
            pairs = _probe(model)
    except Unknown as reason:
        return str(reason)
    except torch.OutOfMemoryError:
        raise
    except FOREIGN as error:
        return f"it does not take our cache ({first_line(error)})"
    wrong = any(far(ours, whole, model.dtype) for ours, whole in pairs)
    return "its cache is not plain keys and values" if wrong else ""


def _probe(model: LanguageModel) -> list[tuple[Tensor, Tensor]]:
    """(logits through slots, reference logits) pairs: two sequences in chunks at different columns, and in one pass."""
    device = model.device
    ids_T = torch.linspace(1, model.size - 1, 2 * LENGTH, device=device).long()
    first, second = ids_T.roll(LENGTH // 2).split(LENGTH)
    whole = model.project(model.hidden(torch.cat([first, second]), Packed.of([LENGTH] * 2, device))).logits()
    cache = SlotCache(model.module.config.num_hidden_layers, slots=3, width=2 * LENGTH)

    def call(ids: Tensor, slots: list[int], columns: Tensor, in_order: bool) -> Tensor:
        cache.layout = layout = SlotLayout(torch.tensor(slots, device=device), columns, 2 * LENGTH, in_order)
        out = model.backbone(
            input_ids=ids, position_ids=columns, past_key_values=cache, use_cache=True, layout=layout
        ).last_hidden_state
        return model.project(out.flatten(0, 1)).logits()

    span = torch.arange(LENGTH, device=device)
    begun = call(torch.stack([first[:6], second[:6]]), [0, 1], span[:6].repeat(2, 1), in_order=False)
    more = call(second[None, 6:8], [1], span[None, 6:8], in_order=False)
    decoded = call(torch.stack([first[6:7], second[8:9]]), [0, 1], torch.stack([span[6:7], span[8:9]]), in_order=True)
    return [
        (begun, torch.cat([whole[:6], whole[LENGTH : LENGTH + 6]])),
        (more, whole[LENGTH + 6 : LENGTH + 8]),
        (decoded, torch.stack([whole[6], whole[LENGTH + 8]])),
    ]


# --- Sampling one request at a time, through the model's own cache ---
#
# Slower than the engine, with the same draws, so a rollout depends only on its request and the weights. For recurrent and
# hybrid models, attention outside transformers' interface, and sequences beyond a rotary limit.


PROBED = 64  # tokens of the sequence that a cache is tested with
DRIFT = 2e-3  # nats; rounding gives 1e-4 in fp32
STEP, SMALL = "dt_bias", -9.2  # softplus(-9.2) = 0.0001, a tenth of Nemotron-H's lower bound for steps
CACHES = ("past_key_values", "cache_params", "state")  # names of the cache in stock classes, as input and output


class PlainSampler:
    """Implements `TokenSampler`. It takes over the model, so pass an `inference_copy`."""

    def __init__(self, model: LanguageModel, max_length: int, *, merge_stop: tuple[int, ...], why: str = "") -> None:
        check_context(model, max_length)
        self.model, self.max_length, self.version = model, max_length, 0
        switch_attention(model.module, model.own_attention)
        stop = [index for index in merge_stop if index < model.size]
        self.stop = torch.tensor(stop, dtype=torch.int64, device=model.device)
        self.cached = self._cache_is_right()
        self.why = why  # why the model cannot use slots

    @property
    def why_slow(self) -> str:
        how = "through its own cache" if self.cached else "reading the whole sequence for every token"
        return f"samples one request at a time, {how}, which is slower: {self.why}"

    def load(self, weights: WeightsRef) -> None:
        copy_weights(self.model, weights)
        self.version = weights.version

    def sample(self, requests: Iterable[SampleRequest | None]) -> Iterator[SampledToken | Finished]:
        """Events of one request after another: its tokens, then its `Finished`."""
        for request in requests:
            if request is None:  # nothing yet
                time.sleep(NOTHING_YET)
                continue
            yield from self._answer(request)

    def _answer(self, request: SampleRequest) -> Iterator[SampledToken | Finished]:
        sequence, prefix = sequence_ids(request, self.max_length)
        ids, response = sequence.tolist(), prefix.tolist()
        reader = Reader(self)
        over = why_over(response, request, self.model.tokenizer)
        while over is None:
            drawn, logprob, sampled, stop = self._draw(reader.read(ids), request, len(response))[:, 0].tolist()
            token = int(drawn)
            if math.isnan(logprob):
                raise TrainingError(
                    f"request {request.id!r}: the policy's logits (version {self.version}) are not finite."
                )
            ids.append(token)
            response.append(token)
            yield SampledToken(request.id, token, logprob, sampled, stop, self.version)
            over = why_over(response, request, self.model.tokenizer)
        yield Finished(request.id, over)

    @torch.inference_mode()
    def _draw(self, logits_V: Tensor, request: SampleRequest, position: int) -> Tensor:
        sampling, device = request.sampling, self.model.device

        def row(value: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value], dtype=dtype, device=device)

        settings = RowSettings(
            temperature=row(sampling.temperature, torch.float32),
            top_p=row(sampling.top_p, torch.float32),
            top_k=row(sampling.top_k, torch.int64),
            key=row(request.key, torch.int64),
            position=row(position, torch.int64),
        )
        return draw(logits_V[None], settings, self.stop, filters(sampling))

    def _cache_is_right(self) -> bool:
        """Compare decoding through the cache with a full pass; a cache that fails is not used.

        A recurrence may drift a little with every token, so many are compared. Its steps are made as small as training may
        make them, since some classes bound them in only one of the two passes.
        """
        if self.model.dtype != torch.float32 and bounded_steps(self.model.module):
            return False  # rounding would hide the drift
        longest = min(PROBED, self.model.context, self.model.route.limit or PROBED)
        ids = torch.linspace(1, self.model.size - 1, longest).long().tolist()
        stepwise, begun = Reader(self, cached=True), min(5, longest - 1)
        try:
            with small_steps(self.model.module):
                whole = Reader(self, cached=False).read_all(ids)
                stepwise.read(ids[:begun])
                ours = torch.stack([stepwise.read(ids[:length]) for length in range(begun + 1, longest + 1)])
        except torch.OutOfMemoryError:
            raise
        except FOREIGN:
            return False
        return not drifted(ours, whole[begun:], self.model.dtype)


def drifted(ours: Tensor, stock: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits (N, V) through a cache give different log-probs than a full pass."""
    if dtype != torch.float32:
        return far(ours, stock, dtype)
    return not bool((ours.log_softmax(-1) - stock.log_softmax(-1)).abs().max() <= DRIFT)


def bounded_steps(module: Any) -> bool:
    """Whether layers bound the steps of their recurrence (Nemotron-H, Zamba 2). Their cached form may not."""
    limits = [vars(part).get("time_step_limit") for part in module.modules()]
    return any(limit is not None and tuple(limit) != (0.0, math.inf) for limit in limits)


@contextmanager
def small_steps(module: Any) -> Iterator[None]:
    """Temporarily give every other head of a Mamba 2 layer steps of 0.0001. The original tensors are not changed."""
    before = [(part, part._parameters[STEP]) for part in module.modules() if part._parameters.get(STEP) is not None]
    try:
        for part, bias in before:
            small = bias.detach().clone()
            small[::2] = SMALL
            part._parameters[STEP] = torch.nn.Parameter(small, requires_grad=False)
        yield
    finally:
        for part, bias in before:
            part._parameters[STEP] = bias


class Reader:
    """Reads one growing sequence.

    Without a cache, the whole sequence is read again for every token: slow, but always correct.
    """

    def __init__(self, sampler: PlainSampler, cached: bool | None = None) -> None:
        self.model = sampler.model
        self.cached = sampler.cached if cached is None else cached
        self._cache: dict[str, Any] = {}
        self._known = 0  # tokens the cache holds
        self._positions = "position_ids" in inspect.signature(self.model.backbone.forward).parameters

    def read(self, ids: list[int]) -> Tensor:
        """Logits (V,) of the token after `ids`, which must extend those of the previous call."""
        return self.read_all(ids, last=1)[0]

    @torch.inference_mode()
    def read_all(self, ids: list[int], last: int = 0) -> Tensor:
        """Logits (N, V) after each new token, or after the `last` ones only."""
        if self._frequencies_change(len(ids)):
            self._cache, self._known = {}, 0
        device = self.model.device
        given = {"position_ids": torch.arange(self._known, len(ids), device=device)[None]} if self._positions else {}
        fresh = torch.tensor([ids[self._known :]], device=device)
        out = self.model.backbone(input_ids=fresh, use_cache=self.cached, **given, **self._cache)
        if self.cached:
            self._cache = {name: out[name] for name in CACHES if name in out}
            self._known = len(ids) if self._cache else 0
        return self.model.project(out.last_hidden_state[0, -last:]).logits()

    def _frequencies_change(self, length: int) -> bool:
        """Beyond its limit longrope uses other frequencies for all positions, so the cache has to be rebuilt."""
        limit = self.model.route.limit
        return limit is not None and self._known <= limit < length
