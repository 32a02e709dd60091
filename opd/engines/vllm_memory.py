"""Memory shared by a run and the engines on its machine: `sampler.weights: shared`. Used by both; imports nothing from opd.

    {"process": P, "descriptor": D, "name": N}    anonymous memory of process P
    {"uuid": U, "handle": …, …}                   memory of the GPU U (CUDA IPC)

Either is one block of bytes, with each tensor at its `start`.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import Any

import torch

MEMORY = re.compile(r"opd-vllm-weights-[0-9a-f]{16}")  # random: no other memory has this name

# torch decrements the run's counter, which is 1, after every opening. The counter is unsigned: one decrement too many makes it
# huge, and the memory is never freed. Shared memory cannot have this name (two slashes), and torch ignores a counter that
# it cannot open, so it stays 1 until the run decrements it.
UNCOUNTED = b"/opd/uncounted"


def load_shared(load: Callable[..., Any], asked: dict[str, Any]) -> Any:
    """Load weights from shared memory, in the engine. After it returns, the engine no longer reads the memory."""
    memory = opened(asked["memory"])
    try:
        return load(asked["version"], None, list(tensors_in(memory, asked["tensors"])))
    finally:
        if memory.is_cuda:
            for device in {memory.device.index, torch.cuda.current_device()}:
                torch.cuda.synchronize(device)


def opened(memory: dict[str, Any]) -> torch.Tensor:
    """Open the memory as one tensor of bytes."""
    return _opened_cuda(memory) if "uuid" in memory else _opened_plain(**memory)


def tensors_in(memory: torch.Tensor, tensors: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, view) of each tensor."""
    for entry in tensors:
        dtype, shape, start = getattr(torch, entry["dtype"], None), entry["shape"], entry["start"]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{entry['name']}: there is no dtype {entry['dtype']!r}")
        end = start + math.prod(shape) * dtype.itemsize
        if not 0 <= start <= end <= memory.numel():
            raise ValueError(f"{entry['name']} would lie at {start} to {end} of {memory.numel()} bytes")
        yield entry["name"], memory[start:end].view(dtype).view(shape)


def _opened_plain(process: int, descriptor: int, name: str) -> torch.Tensor:
    """Open anonymous memory. Never opens a file: the name must be one that a run gives, and the owner this user."""
    if not MEMORY.fullmatch(name):
        raise ValueError(f"{name!r} is no memory with a run's weights")
    link = f"/proc/{int(process)}/fd/{int(descriptor)}"
    try:
        if os.readlink(link) != f"/memfd:{name} (deleted)":
            raise FileNotFoundError
        file = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        raise ValueError(
            f"the weights that process {process} shares are not to be seen from here: this engine is on another machine, in another "
            "container, or of another user. Set sampler.weights: file"
        ) from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise ValueError(f"{name!r} belongs to another user")
        # copy-on-write: pages are shared until written to, and writes here do not reach the run
        return torch.frombuffer(mmap.mmap(file, found.st_size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    finally:
        os.close(file)


def _opened_cuda(memory: dict[str, Any]) -> torch.Tensor:
    seen = devices()
    if memory["uuid"] not in seen:
        raise ValueError(
            f"the run's weights are on GPU {memory['uuid']}, and this engine sees {', '.join(seen) or 'none'}. Name that one as well, "
            "behind the engine's own, in sampler.devices; or set sampler.weights: file"
        )
    storage = torch.UntypedStorage._new_shared_cuda(*cuda_fields(memory, seen.index(memory["uuid"])))
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def devices() -> list[str]:
    """UUIDs of the GPUs that this process sees. Device numbers would depend on CUDA_VISIBLE_DEVICES."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def cuda_handle(uuid: str, fields: tuple[Any, ...]) -> dict[str, Any]:
    """The result of torch's `_share_cuda_` as JSON.

    Without its event: the run has already waited for its writes, and torch would leak an event at every opening. Without
    its counter: see `UNCOUNTED`.
    """
    _, handle, size, offset, *_ = fields
    return {"uuid": uuid, "size": size, "offset": offset, "handle": handle.hex()}


def cuda_fields(memory: dict[str, Any], index: int) -> tuple[Any, ...]:
    """The arguments of `_new_shared_cuda`. `index`: the GPU's number in this process."""
    size, offset = int(memory["size"]), int(memory["offset"])
    if min(size, offset) < 0:
        raise ValueError(f"no size and offset: {size}, {offset}")
    return index, bytes.fromhex(memory["handle"]), size, offset, UNCOUNTED, 0, b"", False
