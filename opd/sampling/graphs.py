"""The calls the sampler makes on the device, with fixed shapes: prefill (rows, chunk), decode (slots, 1), and copies.

Everything a call needs lies in static tensors on the device and everything it changes is changed there, so a CUDA
graph can replay it and the host can run ahead: a drawn token is the next step's input before the host has seen it.
On the CPU the same functions run as they are.

Fixed shapes are also what makes a rollout independent of its neighbours: the rounding of a matrix product depends on
the number of rows, never on what the other rows hold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.models.capture import record, waits_for_the_device
from opd.models.fused import stock_layers
from opd.models.language_model import LanguageModel
from opd.sampling.sampling import Drawn, RowSettings, draw
from opd.sampling.slots import SlotCache, SlotLayout, fused_decoding
from opd.types import Sampling

log = logging.getLogger(__name__)

CPU_SPAN = 64  # decode reads a multiple of this many columns
CUDA_SPAN = 256  # and on CUDA this many, doubled as often as needed: one graph each
COMPILED_SPAN = 1024  # each span is compiled anew
FIELDS = ("first", "count", "slot", "target", "key", "position", "top_k")  # integers of a prefill row, behind its ids


@dataclass(frozen=True)
class Settings:
    """What the engine chose, or was told."""

    slots: int
    prefill_rows: int
    prefill_chunk: int


@dataclass(frozen=True)
class PrefillRow:
    """A piece of a prompt. The last piece draws the first new token and starts the slot."""

    ids: np.ndarray  # (at most chunk,)
    first: int  # column of ids[0]
    slot: int
    last: bool
    key: int
    position: int  # of the token to be drawn, in the response
    sampling: Sampling


@dataclass(frozen=True, eq=False)
class Partner:
    """A second model that reads along: tokens are drawn from (1 - share) * the first + share * this one."""

    model: LanguageModel
    share: float


class Results:
    """What a call drew, (4, rows) float64: token, logprob, logprob_sampled, logprob_stop. Waits only when read."""

    def __init__(self, device_values: Tensor) -> None:
        self._event: Any = None
        if not device_values.is_cuda:
            self._values = device_values.clone()
        else:
            self._values = torch.empty(device_values.shape, dtype=device_values.dtype, pin_memory=True)
            self._values.copy_(device_values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def numpy(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._values.numpy()


class Steps:
    """Cache, slot state and the two calls. Slot number `slots` is scratch: dummy rows write there and nobody reads."""

    def __init__(
        self,
        model: LanguageModel,
        settings: Settings,
        max_length: int,
        stop: tuple[int, ...],
        compiled: bool,
        partner: Partner | None = None,
    ) -> None:
        self.model, self.settings, self.max_length, self.partner = model, settings, max_length, partner
        self.device = model.device
        self.width = -(-max_length // CPU_SPAN) * CPU_SPAN
        self.cache = SlotCache(model.module.config.num_hidden_layers, settings.slots + 1, self.width)
        self.partner_cache: SlotCache | None = None
        if partner is not None:
            layers = partner.model.module.config.num_hidden_layers
            self.partner_cache = SlotCache(layers, settings.slots + 1, self.width)
        self.stop = torch.tensor([index for index in stop if index < model.size], dtype=torch.int64, device=self.device)
        # Slot state, one entry per slot and one for scratch. `token` is the next input, `column` where it belongs.
        entries = settings.slots + 1
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
        self._decode_out = self._zeros((4, settings.slots), torch.float64)
        self._all_slots = torch.arange(settings.slots, device=self.device)
        self._chunk = torch.arange(chunk, device=self.device)
        self._graphs: dict[Hashable, Any] = {}
        self._graphed: bool | None = None  # whether calls are graphs: not where a layer waits for the device
        self._pool: Any = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.capture_seconds = 0.0  # compiling and capturing, so that a benchmark can tell it apart
        self._decoding = fused_decoding(self.device, compiled)
        self._decode_hidden: Callable[..., Tensor] = self._hidden
        self._decode_draw: Callable[..., Drawn] = draw
        self._span_step, self._span_doubles = CPU_SPAN, False
        if self.device.type == "cuda":
            self._span_step, self._span_doubles = (COMPILED_SPAN if compiled else CUDA_SPAN), True
        if compiled and self.device.type == "cuda":
            stock_layers(model.module)
            dynamo = torch._dynamo.config  # the limit counts spans and engines together
            dynamo.recompile_limit = max(dynamo.recompile_limit, 64)
            self._decode_hidden = torch.compile(self._hidden, dynamic=False, fullgraph=True)
            self._decode_draw = torch.compile(draw, dynamic=False, fullgraph=True)
        elif compiled:
            log.warning("sampler.compile is for CUDA devices; on %s the decode step runs as it is", self.device)
        self.prefill([])  # allocates the cache; rows are dummies

    def _zeros(self, shape: int | tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    # Called by the engine

    def prefill(self, rows: Sequence[PrefillRow]) -> Results:
        """One call. Result column i belongs to rows[i]; it means something only where the row is a prompt's last."""
        ints, floats = self._pack(rows)
        self._upload(self._prefill_ints, ints)
        self._upload(self._prefill_floats, floats)
        end = max((row.first + len(row.ids) for row in rows), default=1)
        filtered = any(filters(row.sampling) for row in rows)
        self._launch("prefill", self._prefill_step, self._span(end), filtered)
        return Results(self._prefill_out)

    def decode(self, longest: int, filtered: bool) -> Results:
        """One token for every slot. `longest`: columns in use by the longest live slot, this step's included."""
        self._launch("decode", self._decode_step, self._span(longest), filtered)
        return Results(self._decode_out)

    def copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """(from slot, to slot, columns): keys and values. A few columns more do no harm: nobody has read them yet."""
        moves = [move for move in moves if move[0] != move[1]]
        if not moves:
            return
        slots = np.full((2, self.settings.prefill_rows), self.settings.slots, dtype=np.int64)
        slots[:, : len(moves)] = np.array(moves).T[:2]
        self._upload(self._copy_slots, slots)
        self._launch("copy", self._copy_step, self._span(max(columns for *_, columns in moves)), False)

    def park(self, slot: int) -> None:
        """Keep a slot that is only partly prefilled out of harm's way: idle slots write too, and here it does no
        harm.
        """
        self.column[slot].fill_(self.max_length - 1)

    @torch.inference_mode()
    def clear(self) -> None:
        self.cache.reset()
        if self.partner_cache is not None:
            self.partner_cache.reset()

    # The two calls

    @torch.no_grad()
    def _prefill_step(self, span: int, filtered: bool) -> None:
        chunk = self.settings.prefill_chunk
        ids, fields = (
            self._prefill_ints[:, :chunk],
            dict(zip(FIELDS, self._prefill_ints[:, chunk:].unbind(1), strict=True)),
        )
        # Padding behind a prompt's end goes to columns that decoding overwrites before anyone reads them.
        columns = self._in_bounds(fields["first"][:, None] + self._chunk)
        hidden = self._hidden(ids, SlotLayout(fields["slot"], columns, span, in_order=False))
        last = hidden[torch.arange(ids.shape[0], device=self.device), fields["count"] - 1]
        temperature, top_p = self._prefill_floats.unbind(1)
        settings = RowSettings(temperature, top_p, fields["top_k"], fields["key"], fields["position"])
        other = self._other(ids, SlotLayout(fields["slot"], columns, span, in_order=False), fields["count"] - 1)
        drawn = draw(self.model.project(last).logits(), settings, self.stop, filtered, other, self._share)
        target = fields["target"]
        self.token[target] = drawn.token
        self.column[target] = fields["first"] + fields["count"]
        self.slot_settings.temperature[target] = temperature
        self.slot_settings.top_p[target] = top_p
        self.slot_settings.top_k[target] = settings.top_k
        self.slot_settings.key[target] = settings.key
        self.slot_settings.position[target] = settings.position + 1
        _store(self._prefill_out, drawn)

    @torch.no_grad()
    def _decode_step(self, span: int, filtered: bool) -> None:
        slots = self.settings.slots
        token, column, state = self.token[:slots], self.column[:slots], self.slot_settings
        layout = SlotLayout(self._all_slots, column[:, None], span, in_order=True, **self._decoding)
        hidden = self._decode_hidden(token[:, None], layout)
        settings = RowSettings(
            *(tensor[:slots] for tensor in (state.temperature, state.top_p, state.top_k, state.key, state.position))
        )
        beside = SlotLayout(self._all_slots, column[:, None], span, in_order=True, **self._decoding)
        other = self._other(token[:, None], beside, self._all_slots * 0)
        logits = self.model.project(hidden[:, 0]).logits()
        drawn = self._decode_draw(logits, settings, self.stop, filtered, other, self._share)
        token.copy_(drawn.token)
        column.copy_(self._in_bounds(column + 1))
        settings.position.add_(1)
        _store(self._decode_out, drawn)

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
        self.cache.layout = layout
        out = self.model.backbone(
            input_ids=ids, position_ids=layout.columns, past_key_values=self.cache, use_cache=True, layout=layout
        )
        return out.last_hidden_state

    def _other(self, ids: Tensor, layout: SlotLayout, last: Tensor) -> Tensor | None:
        """The partner's logits behind the last token of each row; it reads the same tokens into a cache of its own."""
        if self.partner is None or self.partner_cache is None:
            return None
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

    @property
    def _share(self) -> float:
        return 0.0 if self.partner is None else self.partner.share

    def _in_bounds(self, columns: Tensor) -> Tensor:
        """Idle slots run on and padding reaches over the end. The last column holds a token that is never fed back."""
        return columns.clamp(max=self.max_length - 1)

    # Around them

    def _pack(self, rows: Sequence[PrefillRow]) -> tuple[np.ndarray, np.ndarray]:
        chunk, scratch = self.settings.prefill_chunk, self.settings.slots
        ints = np.zeros((self.settings.prefill_rows, chunk + len(FIELDS)), dtype=np.int64)
        floats = np.ones((self.settings.prefill_rows, 2), dtype=np.float32)
        ints[:, chunk:] = (0, 1, scratch, scratch, 0, 0, 0)
        for index, row in enumerate(rows):
            ints[index, : len(row.ids)] = row.ids
            target = row.slot if row.last else scratch
            ints[index, chunk:] = (row.first, len(row.ids), row.slot, target, row.key, row.position, row.sampling.top_k)
            floats[index] = (row.sampling.temperature, row.sampling.top_p)
        return ints, floats

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

    def _launch(self, name: str, step: Callable[[int, bool], None], span: int, filtered: bool) -> None:
        if self.device.type != "cuda":
            with torch.inference_mode():
                step(span, filtered)
            return
        key = (name, span, filtered)
        with torch.cuda.device(self.device):
            if key not in self._graphs:
                start = time.perf_counter()
                self._graphs[key] = self._capture(step, span, filtered)
                self.capture_seconds += time.perf_counter() - start
            graph = self._graphs[key]
            if graph is None:
                step(span, filtered)
            else:
                graph.replay()

    def _capture(self, step: Callable[[int, bool], None], span: int, filtered: bool) -> Any:
        """Run twice to warm up (compilation, library handles, the cache's allocation), then record. None: cannot be.

        The warm-up really steps, so what it changes is put back: slot state only. What it writes into the cache is
        what the replay writes again, with the same inputs and to the same columns.
        """
        if self._graphed is False:
            return None
        state = [self.token, self.column, *vars(self.slot_settings).values()]
        saved = [tensor.clone() for tensor in state]

        def restore() -> None:
            for tensor, before in zip(state, saved, strict=True):
                tensor.copy_(before)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        waits = ""
        with torch.cuda.stream(side):
            step(span, filtered)
            restore()
            if self._graphed:
                step(span, filtered)
            else:
                waits = waits_for_the_device(lambda: step(span, filtered))
            restore()
        torch.cuda.current_stream().wait_stream(side)
        self._graphed = not waits
        if waits:
            log.warning(
                "%s: a step waits for the device (%s), so it runs without CUDA graphs, slower", self.model.name, waits
            )
            return None
        graph = record(lambda: step(span, filtered), self._pool)
        torch.cuda.current_stream().synchronize()  # not the device: another thread may be recording by now
        return graph


def _store(out: Tensor, drawn: Drawn) -> None:
    rows = (drawn.token, drawn.logprob, drawn.logprob_sampled, drawn.logprob_stop)
    out.copy_(torch.stack([row.double() for row in rows]))


def filters(sampling: Sampling) -> bool:
    """Whether drawing needs the sorted vocabulary."""
    return sampling.top_k > 0 or sampling.top_p < 1
