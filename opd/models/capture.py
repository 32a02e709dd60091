"""CUDA graphs: calls recorded once, and launched as one from then on.

Who records holds `RECORDING`: engines and models of several threads (`rollout.staleness`) would end each other's recording,
which empties the allocator's cache when it begins. Whether a call waits for the device is asked once for each model, before
other threads run: the question makes every thread's waiting an error.

Graphs of two owners may run at once, so no two of them share the scratch memory of products: it belongs to a thread's handle and
a stream, and would otherwise be that of the first one recorded. And no garbage is collected meanwhile: a graph that is given up
in the middle of a recording ends it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

RECORDING = threading.RLock()  # one for the process


def record(call: Callable[[], None], pool: Any) -> Any:
    """The call as a graph. It has to have run before, so that kernels are compiled and libraries have their handles.

    `pool`: memory that it shares with graphs which never run at the same time. Other threads may use the device meanwhile.
    """
    graph, stream, before = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device()), torch.cuda.current_stream()
    with RECORDING, _no_garbage(), _own_scratch():
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                call()
        finally:
            torch.cuda.set_stream(before)  # a recording that fails would leave its own
    return graph


@contextmanager
def _no_garbage() -> Iterator[None]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _own_scratch() -> Iterator[None]:
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for each device: a pass and its gradient are recorded on the same. Streams come from a few that are handed out again
    and again; nobody else asks for those of this priority, so nobody's work is recorded by mistake.
    """
    return torch.cuda.Stream(device, priority=-1)


def waits_for_the_device(call: Callable[[], None]) -> str:
    """Run it; the first thing in it that would need the host to wait (some rotary embeddings, some experts), or nothing."""
    with RECORDING:
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""
