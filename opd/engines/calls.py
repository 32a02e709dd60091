"""The sampler's device calls, with fixed shapes: prefill (rows, chunk), decode (slots, 1), and copies.

A call reads and writes only static tensors on the device. So a CUDA graph can replay it and the host can run ahead: a
drawn token is the next step's input before the host has seen it. On the CPU the same functions run without graphs.

Fixed shapes also make a rollout independent of its neighbours: the rounding of a matrix product depends on the number of
rows, never on the contents of other rows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from opd.common.text import first_line
from opd.divergences.projection import even_logsumexp, evenly
from opd.engines.layers import (
    PROBED,
    DecodeLayers,
    LeanLayers,
    MklWeights,
    SlotCache,
    SlotLayout,
    agree,
    any_rows,
    fewer_rows,
    fused_decoding,
    fused_drawing,
    probe,
)
from opd.engines.requests import BITS, GAMMA, MULTIPLIERS, SHIFTS
from opd.models.cuda_graphs import Recorder, on_device, on_stream, own_stream, record, waits_for_the_device
from opd.models.fused_layers import stock_layers
from opd.models.language_model import LanguageModel
from opd.records import Sampling

log = logging.getLogger(__name__)

CPU_SPAN = 64  # decode reads a multiple of this many columns
LANES = 16  # slots shorter than CPU_SPAN have a multiple of this many columns, and are read whole
CUDA_SPAN = 256  # on CUDA, decode reads this many columns times a power of two, with one graph each
COMPILED_SPAN = 1024  # CUDA_SPAN for torch.compile, which compiles every span separately
FIELDS = ("first", "count", "slot", "target", "key", "position", "top_k")  # integers of a prefill row, after its ids


@dataclass(frozen=True)
class Settings:
    """The engine's sizes, chosen or given."""

    slots: int
    prefill_rows: int
    prefill_chunk: int
    even: int = 1  # slots and chunks are multiples of this


@dataclass(frozen=True)
class PrefillRow:
    """A chunk of a prompt. The last chunk draws the first new token and starts decoding in the slot."""

    ids: np.ndarray  # (at most chunk,)
    first: int  # column of ids[0]
    slot: int
    last: bool
    key: int
    position: int  # response position of the token to draw
    sampling: Sampling


@dataclass(frozen=True, eq=False)
class Partner:
    """A second model that reads the same tokens: draws come from (1 - share) * the first model + share * this one."""

    model: LanguageModel
    share: float


class Steps:
    """The cache, the slot state and the calls. Slot number `slots` is scratch: dummy rows write to it."""

    def __init__(
        self, model: LanguageModel, settings: Settings, max_length: int, stop: tuple[int, ...], compiled: bool,
        partner: Partner | None = None,
    ) -> None:  # fmt: skip
        self.model, self.device, self.settings, self.partner = model, model.device, settings, partner
        self._share = 0.0 if partner is None else partner.share
        # The token of the last column is never fed back. Idle slots keep advancing, and padding may exceed it: both stay there.
        self._last, entries = max_length - 1, settings.slots + 1
        step = CPU_SPAN if self.device.type == "cuda" or max_length > CPU_SPAN else LANES
        self.width = -(-max_length // step) * step
        self.cache = SlotCache(model.module.config.num_hidden_layers, entries, self.width)
        self.partner_cache: SlotCache | None = None
        if partner is not None:
            self.partner_cache = SlotCache(partner.model.module.config.num_hidden_layers, entries, self.width)
        self.stop = torch.tensor([index for index in stop if index < model.size], dtype=torch.int64, device=self.device)
        # Slot state, one entry per slot and one for scratch. `token` is the next input, `column` its column.
        self.token, self.column = self._zeros(entries), self._zeros(entries)
        self.slot_settings = RowSettings(
            temperature=self._zeros(entries, torch.float32),
            top_p=self._zeros(entries, torch.float32) + 1,
            top_k=self._zeros(entries),
            key=self._zeros(entries),
            position=self._zeros(entries),
        )
        # Inputs and outputs of the calls.
        rows, chunk = settings.prefill_rows, settings.prefill_chunk
        self._prefill_ints = self._zeros((rows, chunk + len(FIELDS)))
        self._prefill_floats = self._zeros((rows, 2), torch.float32)
        self._prefill_out = self._zeros((4, rows), torch.float64)
        self._copy_slots = self._zeros((2, rows))
        self._decode_out = self._zeros((4, entries), torch.float64)
        self._all_slots = torch.arange(settings.slots, device=self.device)
        self._chunk = torch.arange(chunk, device=self.device)
        on_gpu = self.device.type == "cuda"
        self.calls = RecordedCalls(model.name, self.device, self.state) if on_gpu else None
        self._fewer = fewer_rows(model.module, settings.slots, settings.even) if not on_gpu and partner is None else []
        self._alike: set[tuple[str, int, int, bool, int]] = set()  # calls that may skip idle rows: see `_shorter`
        self._unlike: set[str] = set()  # kinds of calls that may not
        self.products = MklWeights(model)
        self._decoding = fused_decoding(self.device, compiled=False)
        self._decode_hidden: Callable[..., Tensor] = self._hidden
        self._draw_rows = fused_drawing(self.device)
        self._prefill_draw: Callable[..., Tensor] = draw if self._draw_rows is None else self._draw_by_kernels
        self._decode_draw = self._prefill_draw
        self._span_step, self._span_doubles = (CUDA_SPAN, True) if on_gpu else (CPU_SPAN, False)
        self._lean: LeanLayers | None = None
        self.prefill([])  # allocates the cache; rows are dummies
        self._lean = LeanLayers.proven(model, self._hidden, self.cache)
        if self._lean is not None:
            self.products.join(self._lean.joined)
        if settings.even == 1 and self.products.covers(model.backbone):
            self._fewer = any_rows(self._fewer)
        self.writes_out = False  # whether decode steps use `DecodeLayers`
        self._layers = DecodeLayers.of(model, self._decoding["room"]) if self._decoding and not compiled else None
        if self._layers is not None:
            self._write_out_layers()
        if compiled:
            self._compile()

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a call changes for the next one, besides keys and values."""
        return [self.token, self.column, *vars(self.slot_settings).values()]

    def _zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _compile(self) -> None:
        if self.device.type != "cuda":
            log.warning("sampler.compile is for CUDA devices; on %s the decode step is not compiled", self.device)
        else:
            stock_layers(self.model.module)
            self._decoding = fused_decoding(self.device, compiled=True)
            self._span_step = COMPILED_SPAN
            dynamo = torch._dynamo.config  # the limit applies to all spans of all engines together
            dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
            self._decode_hidden = torch.compile(self._hidden, dynamic=False, fullgraph=True)
            self._prefill_draw, self._decode_draw = draw, torch.compile(draw, dynamic=False, fullgraph=True)

    # Called by the engine

    def prefill(self, rows: Sequence[PrefillRow]) -> Results:
        """One prefill call. Result column i belongs to rows[i], and is only valid if that is a prompt's last chunk."""
        chunk, scratch = self.settings.prefill_chunk, self.settings.slots
        ints = np.zeros(self._prefill_ints.shape, dtype=np.int64)
        floats = np.ones(self._prefill_floats.shape, dtype=np.float32)
        ints[:, chunk:] = (0, 1, scratch, scratch, 0, 0, 0)
        for index, row in enumerate(rows):
            ints[index, : len(row.ids)] = row.ids
            target = row.slot if row.last else scratch
            ints[index, chunk:] = (row.first, len(row.ids), row.slot, target, row.key, row.position, row.sampling.top_k)
            floats[index] = (row.sampling.temperature, row.sampling.top_p)
        self._upload(self._prefill_ints, ints)
        self._upload(self._prefill_floats, floats)
        end = max((row.first + len(row.ids) for row in rows), default=1)
        filtered = any(filters(row.sampling) for row in rows)
        span, (count, used) = self._span(end), self._used(rows)
        if (count, used) == (self.settings.prefill_rows, chunk):
            self._launch("prefill", self._prefill_step, span, filtered)
        else:
            short, whole = (partial(self._prefill_step, span, filtered, *some) for some in ([count, used], []))
            self._shorter(("prefill", used, span, filtered, count), short, whole)
        return Results(self._prefill_out)

    def decode(self, longest: int, filtered: bool, live: Collection[int] | None = None) -> Results:
        """Draw one token for every slot, or at least for the `live` ones. Result column i belongs to slot i.

        `longest`: columns used by the longest live slot, including this step's. With several threads all slots are used: threads
        split tensors by size, and other instructions compute the edges.
        """
        span = self._span(longest)
        count = next((count for count in self._fewer if live is not None and count >= len(live)), None)
        if live is None or count is None or "decode" in self._unlike or torch.get_num_threads() > 1:
            self._launch("decode", self._decode_step, span, filtered)
        else:
            rows = torch.tensor([*live, *[self.settings.slots] * (count - len(live))])  # padded with scratch
            real = rows[rows < self.settings.slots]
            self._shorter(
                ("decode", len(rows), span, filtered, 1),
                lambda: self._decode_some(rows, span, filtered)[: len(real)],
                lambda: self._decode_step(span, filtered)[real],
            )
        return Results(self._decode_out)

    def copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy keys and values: (from slot, to slot, columns). Extra columns do no harm, since they are not read yet."""
        moves = [move for move in moves if move[0] != move[1]]
        if not moves:
            return
        slots = np.full((2, self.settings.prefill_rows), self.settings.slots, dtype=np.int64)
        slots[:, : len(moves)] = np.array(moves).T[:2]
        self._upload(self._copy_slots, slots)
        self._launch("copy", self._copy_step, self._span(max(columns for *_, columns in moves)), False)

    def park(self, slot: int) -> None:
        """Protect a partly prefilled slot: decode steps also write to idle slots, so send its writes to the last column."""
        self.column[slot].fill_(self._last)

    @torch.inference_mode()
    def clear(self) -> None:
        self.cache.reset()
        if self.partner_cache is not None:
            self.partner_cache.reset()

    # The two calls

    @torch.no_grad()
    def _prefill_step(self, span: int, filtered: bool, count: int | None = None, used: int | None = None) -> Tensor:
        """Returns the logits. `count`: how many rows are read; `used`: how many of their tokens; default: all."""
        chunk, ints = self.settings.prefill_chunk, self._prefill_ints[:count]
        ids = ints[:, : used or chunk]
        fields = dict(zip(FIELDS, ints[:, chunk:].unbind(1), strict=True))
        # Padding after a prompt's end goes to columns that decoding overwrites before they are read.
        columns = (fields["first"][:, None] + self._chunk[:used]).clamp(max=self._last)
        hidden = self._hidden(ids, SlotLayout(fields["slot"], columns, span, in_order=False))
        other = None
        if self.partner is not None:
            layout = SlotLayout(fields["slot"], columns, span, in_order=False)
            other = self._partner_logits(ids, layout, fields["count"] - 1)
        last = hidden[torch.arange(ids.shape[0], device=self.device), fields["count"] - 1]
        temperature, top_p = self._prefill_floats[:count].unbind(1)
        settings = RowSettings(temperature, top_p, fields["top_k"], fields["key"], fields["position"])
        logits = self.products.logits(self.model.project(last))
        drawn = self._prefill_draw(logits, settings, self.stop, filtered, other, self._share)
        target = fields["target"]
        self.token[target] = drawn[0].long()
        self.column[target] = fields["first"] + fields["count"]
        self.slot_settings.temperature[target] = temperature
        self.slot_settings.top_p[target] = top_p
        self.slot_settings.top_k[target] = settings.top_k
        self.slot_settings.key[target] = settings.key
        self.slot_settings.position[target] = settings.position + 1
        self._prefill_out[:, :count].copy_(drawn)
        return logits

    @torch.no_grad()
    def _decode_step(self, span: int, filtered: bool) -> Tensor:
        """Returns the logits."""
        slots = self.settings.slots
        token, column, state = self.token[:slots], self.column[:slots], self.slot_settings
        layout = SlotLayout(self._all_slots, column[:, None], span, in_order=True, **self._decoding)
        hidden = self._decode_hidden(token[:, None], layout)
        settings = RowSettings(
            *(tensor[:slots] for tensor in (state.temperature, state.top_p, state.top_k, state.key, state.position))
        )
        other = None
        if self.partner is not None:
            layout = SlotLayout(self._all_slots, column[:, None], span, in_order=True, **self._decoding)
            other = self._partner_logits(token[:, None], layout, self._all_slots * 0)
        logits = self.products.logits(self.model.project(hidden[:, 0]))
        drawn = self._decode_draw(logits, settings, self.stop, filtered, other, self._share)
        token.copy_(drawn[0])
        column.copy_((column + 1).clamp(max=self._last))
        settings.position.add_(1)
        self._decode_out[:, :slots].copy_(drawn)
        return logits

    def _decode_some(self, rows: Tensor, span: int, filtered: bool) -> Tensor:
        """The same for some slots only, since idle slots cost as much as busy ones."""
        token, column, state = self.token[rows], self.column[rows], self.slot_settings
        hidden = self._hidden(token[:, None], SlotLayout(rows, column[:, None], span, in_order=False))
        settings = RowSettings(*(tensor[rows] for tensor in vars(state).values()))
        logits = self.products.logits(self.model.project(hidden[:, 0]))
        drawn = self._prefill_draw(logits, settings, self.stop, filtered)
        self.token[rows], self.column[rows] = drawn[0].long(), (column + 1).clamp(max=self._last)
        state.position[rows] = settings.position + 1
        self._decode_out[:, rows] = drawn
        return logits

    def _shorter(
        self, how: tuple[str, int, int, bool, int], short: Callable[[], Tensor], whole: Callable[[], Tensor]
    ) -> None:
        """Run the short call if it gives the same logits as the whole one, which depends on shapes and the math library.

        The first time, both are run and compared, and the whole one's results are used.
        """
        with torch.inference_mode(), self.products.routed():
            if how in self._alike:
                short()
                return
            saved = [tensor.clone() for tensor in self.state]
            found = short()
            for tensor, before in zip(self.state, saved, strict=True):
                tensor.copy_(before)
            if torch.equal(found, whole()[: len(found)]):
                self._alike.add(how)
            elif how[0] == "decode" and how[1] not in fewer_rows(self.model.module, self.settings.slots, 1):
                self._fewer.remove(how[1])  # added by `any_rows`: the other counts may still work
            else:
                self._unlike.add(how[0])

    def _used(self, rows: Sequence[PrefillRow]) -> tuple[int, int]:
        """(rows to read, tokens per row to read). Rows: all, unless weights are packed. Tokens: rounded up, or all."""
        most, chunk, step = self.settings.prefill_rows, self.settings.prefill_chunk, max(4, self.settings.even)
        if not rows or not self._fewer or "prefill" in self._unlike or torch.get_num_threads() > 1:
            return most, chunk
        count = 1 << (len(rows) - 1).bit_length() if self.products.matrices else most
        used = -(-max(len(row.ids) for row in rows) // step) * step
        return min(count, most), min(used, chunk)

    @torch.no_grad()
    def _copy_step(self, span: int, filtered: bool) -> None:
        source, target = self._copy_slots.unbind(0)
        for cache in (self.cache, self.partner_cache):
            for layer in cache.layers if cache is not None else ():
                for tensor in (layer.keys, layer.values):
                    near = tensor[:, :, :span]
                    near[target] = near[source]

    def _hidden(self, ids: Tensor, layout: SlotLayout) -> Tensor:
        """(B, Q) -> (B, Q, D)"""
        if self._lean is not None and not any(self._lean.hooks):
            return self._lean(ids, layout, self.cache)
        self.cache.layout = layout
        out = self.model.backbone(
            input_ids=ids, position_ids=layout.columns, past_key_values=self.cache, use_cache=True, layout=layout
        )
        return out.last_hidden_state

    def _written_out(self, ids: Tensor, layout: SlotLayout) -> Tensor:
        """The same for one token per slot, through `DecodeLayers`."""
        assert self._layers is not None
        return self._layers(ids[:, 0], layout, self.cache)[:, None]

    def _write_out_layers(self) -> None:
        how = self._all_slots, self.model.size, self._span(PROBED), self._decoding
        with torch.cuda.device(self.device):
            right = agree(probe(self._written_out, *how), probe(self._hidden, *how))
        if right:
            self.writes_out, self._decode_hidden = True, self._written_out
        else:
            log.warning("%s: its layers differ from the standard ones, so decode steps take longer", self.model.name)

    def _partner_logits(self, ids: Tensor, layout: SlotLayout, last: Tensor) -> Tensor:
        """The partner's logits after the last token of each row. It reads the same tokens into its own cache."""
        assert self.partner is not None
        assert self.partner_cache is not None
        self.partner_cache.layout = layout
        out = self.partner.model.backbone(
            input_ids=ids,
            position_ids=layout.columns,
            past_key_values=self.partner_cache,
            use_cache=True,
            layout=layout,
        )
        rows = torch.arange(ids.shape[0], device=self.device)
        return self.partner.model.project(out.last_hidden_state[rows, last]).logits(self.model.size)

    def _draw_by_kernels(
        self, logits: Tensor, settings: RowSettings, stop: Tensor, filtered: bool, other: Tensor | None = None,
        share: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """The same as `draw`. There are no kernels for two models' logits."""
        if self._draw_rows is None or other is not None:
            return draw(logits, settings, stop, filtered, other, share)
        return self._draw_rows(logits, settings, stop, kept(logits, settings) if filtered else None)

    # Helpers

    def _upload(self, static: Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if static.is_cuda:
            source = source.pin_memory()  # the caching host allocator keeps it until the copy is done
        static.copy_(source, non_blocking=True)

    def _span(self, columns: int) -> int:
        span = -(-columns // self._span_step) * self._span_step
        if self._span_doubles:
            span = self._span_step
            while span < columns:
                span *= 2
        return min(span, self.width)

    def _launch(self, name: str, step: Callable[[int, bool], object], span: int, filtered: bool) -> None:
        if self.calls is not None:
            self.calls.launch((name, span, filtered), lambda: step(span, filtered))
            return
        with torch.inference_mode(), self.products.routed():
            step(span, filtered)


# --- CUDA graphs of the sampler's calls ---
#
# calls = RecordedCalls(model.name, device, state)     # state: the tensors that a call changes for the next one
# calls.launch(("decode", 512, False), call)           # recorded the first time; run directly if it cannot be recorded


class Results:
    """The results of a call, (4, rows) float64: token, logprob, logprob_sampled, logprob_stop.

    They are being copied from a GPU. `event`: what to wait for before `values` is read; None on a CPU.
    """

    def __init__(self, device_values: Tensor) -> None:
        self.event: Any = None
        if not device_values.is_cuda:
            self.values = device_values.clone()
        else:
            self.values = torch.empty(device_values.shape, dtype=device_values.dtype, pin_memory=True)
            self.values.copy_(device_values, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()


class RecordedCalls:
    """Records calls as CUDA graphs and replays them. For one thread at a time.

    Graphs recorded before a recording fails are still replayed.
    """

    def __init__(self, name: str, device: torch.device, state: Sequence[Tensor], recorder: Recorder = record) -> None:
        self._name, self._device, self._state, self._recorder = name, device, tuple(state), recorder
        self._on_gpu = device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._stream: Any = own_stream(device) if self._on_gpu else None
        self._records: bool | None = None  # whether calls can be recorded; None until the first call
        self.graphs: dict[Hashable, Any] = {}  # None: the call runs directly
        self.seconds = 0.0  # time for compiling and recording, which benchmarks report separately

    def launch(self, key: Hashable, call: Callable[[], object]) -> None:
        with on_device(self._device):
            if key not in self.graphs:
                start = time.perf_counter()
                self.graphs[key] = self._recorded(call)
                self.seconds += time.perf_counter() - start
            graph = self.graphs[key]
            if graph is None:
                call()
            else:
                graph.replay()

    def _recorded(self, call: Callable[[], object]) -> Any:
        if self._records is False:
            return None
        waits = on_stream(self._stream, lambda: self._warm_up(call))
        self._records = not waits
        if waits:
            log.warning(
                "%s: a step waits for the device (%s), so it runs without CUDA graphs, slower", self._name, waits
            )
            return None
        try:
            graph = self._recorder(call, self._pool, self._stream)
        except RuntimeError as error:  # from torch, CUDA or Triton; the call itself works without a graph
            log.warning("%s: sampling cannot be recorded, and runs slower (%s)", self._name, first_line(error))
            self._records = False
            return None
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()  # not the whole device: another thread may be recording
        return graph

    def _warm_up(self, call: Callable[[], object]) -> str:
        """Run a call twice (compilation, library handles, allocation). Returns what in it waits for the device, if anything.

        The warm-up changes the slot state, which is restored. The cache is not: the replay writes the same values to the
        same columns again.
        """
        saved, waits = [tensor.clone() for tensor in self._state], ""
        for first in (True, False):
            if first or self._records or not self._on_gpu:
                call()
            else:
                waits = waits_for_the_device(call)
            for tensor, before in zip(self._state, saved, strict=True):
                tensor.copy_(before)
        return waits


# --- From logits to tokens: one function for all rows, each with its own temperature, top-p, top-k and key ---
#
# Axis legend: N = rows, V = real ids of the vocabulary.


BLOCK = 256  # ids per block sum
# splitmix64's numbers as signed 64-bit integers, which tensors hold
SIGNED = [value - 2**64 if value >= 2**63 else value for value in (GAMMA, *MULTIPLIERS, 1)]


@dataclass(frozen=True, eq=False)
class RowSettings:
    """How each row draws. Temperature 0 is greedy, top_p 1 and top_k 0 are off."""

    temperature: Tensor  # (N,) float32
    top_p: Tensor  # (N,) float32
    top_k: Tensor  # (N,) int64
    key: Tensor  # (N,) int64
    position: Tensor  # (N,) int64, in the response


def draw(
    logits: Tensor, settings: RowSettings, stop: Tensor, filtered: bool, other: Tensor | None = None, share: float = 0.0
) -> Tensor:
    """Draw one token per row of logits (N, V). `stop` (E,) are the ids that form one event.

    Returns (4, N) float64: token, logprob, logprob_sampled, logprob_stop, see `SampledToken`.

    With `other` (N, V), another model's logits, tokens are drawn from (1 - share) * own + share * other, without
    temperature or filter. `logprob_sampled` is then that of the merged stop event, as `logprob` always is.

    `filtered`: whether any row uses top-p or top-k; if not, nothing is sorted. A row that uses neither gives the same
    bits either way. Nothing here waits for the device or copies to it (`where` with a Python number would), so a CUDA
    graph can record it.
    """
    greedy = settings.temperature == 0
    plain = other is None and not filtered and logits.device.type == "cpu" and bool((settings.temperature == 1).all())
    if plain:  # the same numbers in half the passes
        peak, best = logits.amax(-1, keepdim=True), None
    else:
        peak, best = logits.max(-1, keepdim=True)
    centred = logits - peak  # the largest is 0, so dividing by any temperature is safe
    weights = evenly(torch.exp, centred)
    log_total = evenly(torch.log, weights.sum(-1, dtype=torch.float64)).float()  # (N,) of the policy itself
    tempered = centred if plain else centred / settings.temperature.masked_fill(greedy, 1.0)[:, None]
    if other is not None:
        own = centred - log_total[:, None] + math.log1p(-share)
        tempered = evenly(torch.logaddexp, own, other.log_softmax(-1) + math.log(share))
    elif filtered:
        tempered = _filter(tempered, settings.top_p, settings.top_k)
    uniform = uniforms_at(settings.key, settings.position)
    drawn, log_drawn = _inverse_cdf(tempered, uniform, weights if plain else evenly(torch.exp, tempered))
    token = drawn if best is None else torch.where(greedy, best[:, 0], drawn)
    logprob = centred.gather(-1, token[:, None])[:, 0] - log_total
    if stop.numel():
        logprob_stop = even_logsumexp(centred[:, stop]) - log_total
        stopped = (token[:, None] == stop).any(-1)
        logprob = torch.where(stopped, logprob_stop, logprob)
        if other is not None:
            log_drawn = torch.where(stopped, even_logsumexp(tempered[:, stop]), log_drawn)
    else:
        logprob_stop = torch.full_like(logprob, float("nan"))
    rows = (token, logprob, log_drawn.masked_fill(greedy, 0.0), logprob_stop)
    return torch.stack([row.double() for row in rows])


def uniforms_at(keys: Tensor, positions: Tensor) -> Tensor:
    """The same numbers from int64 tensors, on their device: `uniforms_at(k, p) == uniforms(k, p, 1)[0]`, bit for bit.

    Tensor addition and multiplication wrap like unsigned ones; a right shift has to drop the copied sign bits.
    """
    first, *factors = SIGNED
    mixed = keys + positions + first
    for shift, factor in zip(SHIFTS, factors, strict=True):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((mixed >> (64 - BITS)) & ((1 << BITS) - 1)).float() * 2.0**-BITS


def _inverse_cdf(logits: Tensor, uniform: Tensor, probability: Tensor) -> tuple[Tensor, Tensor]:
    """The first id whose cumulative probability exceeds the uniform number, and its log-probability.

    `probability` is exp(logits), which need not sum to 1.

    Two levels (blocks of ids, then ids) in fp64: a running fp32 sum over 100k ids would lose the rare ones, and a
    full-width scan is slow. An id of probability 0 is never returned: comparisons are strict, and if rounding makes the
    two levels disagree, the block's likeliest id is taken.
    """
    size = min(BLOCK, logits.shape[1])
    missing = -logits.shape[1] % size
    blocks = (pad(probability, (0, missing)) if missing else probability).unflatten(
        -1, (-1, size)
    )  # (N, V / size, size)
    before = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = before[:, -1:]
    target = uniform.double()[:, None] * total  # < total, as uniform <= 1 - 2^-24
    block = (before <= target).sum(-1, keepdim=True).clamp(max=before.shape[1] - 1)
    rest = target - before.gather(-1, (block - 1).clamp(min=0)).masked_fill(block == 0, 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, size))[:, 0]  # (N, size)
    index = (inside.cumsum(-1, dtype=torch.float64) <= rest).sum(-1, keepdim=True).clamp(max=size - 1)
    index = torch.where(inside.gather(-1, index) > 0, index, inside.argmax(-1, keepdim=True))
    token = block * size + index
    return token[:, 0], (logits.gather(-1, token) - evenly(torch.log, total).float())[:, 0]


def kept(logits: Tensor, settings: RowSettings) -> Tensor:
    """(N, V): a mask of the ids that pass top-k and top-p."""
    greedy = settings.temperature == 0
    tempered = logits / settings.temperature.masked_fill(greedy, 1.0)[:, None]
    return _filter(tempered, settings.top_p, settings.top_k) > float("-inf")


def _filter(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """-inf outside the top k and, among those, outside the smallest set of mass top_p. At least one id stays.

    Ties are broken by id, so that exactly k remain.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    outside = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probability = ordered.masked_fill(outside, float("-inf")).double().softmax(-1)
    mass_before = probability.cumsum(-1) - probability
    outside = outside | ((top_p[:, None] < 1) & (rank > 0) & (mass_before >= top_p[:, None]))
    return torch.empty_like(logits).scatter(-1, order, ordered.masked_fill(outside, float("-inf")))


def filters(sampling: Sampling) -> bool:
    """Whether drawing needs the sorted vocabulary."""
    return sampling.top_k > 0 or sampling.top_p < 1
