"""CUDA graphs: calls recorded once, and launched as one from then on.

Who records holds `RECORDING`: engines and models of several threads (`rollout.staleness`) would end each other's recording,
which empties the allocator's cache when it begins. Whether a call waits for the device is asked once for each model, before
other threads run: the question makes every thread's waiting an error.

Graphs of two owners may run at once, so no two of them share the scratch memory of products: it belongs to a thread's handle and
a stream, and an owner warms up and records on a stream of its own. And no garbage is collected meanwhile: a graph that is given
up in the middle of a recording ends it.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")
# A call, the memory and the stream of whose recordings it is one -> what replays it
Recorder = Callable[[Callable[[], object], Any, Any], Any]
RECORDING = threading.RLock()  # one for the process
FAILED: list[Any] = []  # graphs whose recording failed: the allocator of pinned memory goes on asking them


def record(call: Callable[[], object], pool: Any, stream: torch.cuda.Stream) -> Any:
    """The call as a graph. It has to have run before on that stream, so that kernels are compiled and libraries have what they need.

    `pool`: memory that it shares with graphs which never run at the same time. Other threads may use the device meanwhile. Where a
    recording fails, random numbers and the device's memory are as they were before; its pool cannot be used for another.
    """
    graph, before, device = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    with RECORDING, _no_garbage():
        numbers = generator.clone_state()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                call()
        except BaseException:
            torch.cuda.set_stream(before)
            _end_allocating(device, pool)
            FAILED.append(graph)
            # the generator's own numbers would wait for the end of the recording, and refuse to be drawn
            generator.graphsafe_set_state(numbers)
            raise
    return graph


def _end_allocating(device: int, pool: Any) -> None:
    """What a recording that failed may have left: an allocator which takes it to be under way, and keeps what is given back."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError as error:
        if "not currently recording" not in str(error):
            raise


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


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """For all recordings of one owner. Torch hands out 32 streams of this priority in turn, and nobody else asks for them."""
    return torch.cuda.Stream(device, priority=-1)


def on_stream(stream: torch.cuda.Stream | None, call: Callable[[], T]) -> T:
    """The one of an owner's recordings, so that what libraries keep for a stream is there. None: there is no GPU."""
    if stream is None:
        return call()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        found = call()
    torch.cuda.current_stream(stream.device).wait_stream(stream)
    return found


def on_device(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def waits_for_the_device(call: Callable[[], object]) -> str:
    """Run it; the first thing in it that would need the host to wait (some rotary embeddings, some experts), or nothing."""
    with RECORDING:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")  # that it is a prototype
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
