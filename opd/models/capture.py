"""CUDA graphs: calls recorded once, and launched as one from then on.

Who records holds `RECORDING`: engines and models of several threads (`rollout.staleness`) would end each other's recording,
which empties the allocator's cache when it begins. Whether a call waits for the device is asked once for each model, before
other threads run: the question makes every thread's waiting an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

RECORDING = threading.RLock()  # one for the process


def record(call: Callable[[], None], pool: Any) -> Any:
    """The call as a graph. It has to have run before, so that kernels are compiled and libraries have their handles.

    `pool`: memory that it shares with graphs which never run at the same time. Other threads may use the device meanwhile.
    """
    graph, stream = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device())
    with RECORDING, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        call()
    return graph


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """One for each device: a pass and its gradient are recorded on the same."""
    return torch.cuda.Stream(device)


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
