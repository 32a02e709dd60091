"""The sampler's calls as CUDA graphs: each is recorded when it first comes up, and launched as one from then on.

    calls = RecordedCalls(model.name, device, state)     # state: what a call changes and the next one reads
    calls.launch(("decode", 512, False), call)

A call that cannot be recorded is made as it is, every time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opd.models.capture import Recorder, on_device, on_stream, own_stream, record, waits_for_the_device
from opd.text import first_line

log = logging.getLogger(__name__)


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


class RecordedCalls:
    """One thread at a time. What was recorded before a recording fails is still replayed."""

    def __init__(self, name: str, device: torch.device, state: Sequence[Tensor], recorder: Recorder = record) -> None:
        self._name, self._device, self._state, self._recorder = name, device, tuple(state), recorder
        self._on_gpu = device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._stream: Any = own_stream(device) if self._on_gpu else None
        self._records: bool | None = None  # whether calls become graphs; not known before the first one
        self.graphs: dict[Hashable, Any] = {}  # None: it is made as it is
        self.seconds = 0.0  # compiling and recording, so that a benchmark can tell it apart

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
        except RuntimeError as error:  # of torch, CUDA or Triton; the call itself has just been made without
            log.warning("%s: sampling cannot be recorded, and runs slower (%s)", self._name, first_line(error))
            self._records = False
            return None
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()  # not the device: another thread may be recording by now
        return graph

    def _warm_up(self, call: Callable[[], object]) -> str:
        """Twice (compilation, library handles, the cache's allocation); what in it waits for the device, or nothing.

        The warm-up really steps, so what it changes is put back: slot state only. What it writes into the cache is
        what the replay writes again, with the same inputs and to the same columns.
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
