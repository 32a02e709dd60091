"""How weights come in: copied by a GPU beside what it computes, or read by a thread.

A GPU is told of a copy and goes on. What it computes with these weights waits for the copy, and the copy waits for what is still computed
in the memory it goes to; whoever asks waits for neither.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from opd.teachers.shelves import Shelf


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
