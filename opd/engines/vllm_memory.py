"""Memory that a run and the engines on its machine share: `sampler.weights: shared`. Read by both; imports nothing of opd.

    {"process": P, "descriptor": D, "name": N}    memory of process P that has no path
    {"uuid": U, "handle": …, …}                   memory of the GPU U (CUDA IPC)

Either is a stretch of bytes, in which each tensor lies at its `start`.
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

MEMORY = re.compile(r"opd-vllm-weights-[0-9a-f]{16}")  # drawn at random: another process has none of this name

# torch would lower the run's counter, which is one, behind every opening; it has no sign, so that one time too many leaves it large and the
# memory taken until the run's process ends. Shared memory cannot have this name (two slashes), and torch passes over a counter that it
# cannot open: it stays at one until the run lowers it itself.
UNCOUNTED = b"/opd/uncounted"


def load_shared(load: Callable[..., Any], asked: dict[str, Any]) -> Any:
    """By the engine. Once it has answered, nobody here reads there any more, and the run may write."""
    memory = opened(asked["memory"])
    try:
        return load(asked["version"], None, list(tensors_in(memory, asked["tensors"])))
    finally:
        if memory.is_cuda:
            for device in {memory.device.index, torch.cuda.current_device()}:
                torch.cuda.synchronize(device)


def opened(memory: dict[str, Any]) -> torch.Tensor:
    """As one tensor of bytes."""
    return _opened_cuda(memory) if "uuid" in memory else _opened_plain(**memory)


def tensors_in(memory: torch.Tensor, tensors: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views, by name."""
    for entry in tensors:
        dtype, shape, start = getattr(torch, entry["dtype"], None), entry["shape"], entry["start"]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{entry['name']}: there is no dtype {entry['dtype']!r}")
        end = start + math.prod(shape) * dtype.itemsize
        if not 0 <= start <= end <= memory.numel():
            raise ValueError(f"{entry['name']} would lie at {start} to {end} of {memory.numel()} bytes")
        yield entry["name"], memory[start:end].view(dtype).view(shape)


def _opened_plain(process: int, descriptor: int, name: str) -> torch.Tensor:
    """Never a file; only what is called as a run calls it, and belongs to the user that runs this."""
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
        # private: pages are shared until they are written to, and nothing that is done here gets back to the run
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
    """UUIDs of the GPUs that this process sees: their numbers depend on CUDA_VISIBLE_DEVICES."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def cuda_handle(uuid: str, fields: tuple[Any, ...]) -> dict[str, Any]:
    """What torch's `_share_cuda_` says, in words that go into JSON.

    Without its event: the run has waited for its writes, and torch would leave one behind at every opening. And without its counter,
    see `UNCOUNTED`.
    """
    _, handle, size, offset, *_ = fields
    return {"uuid": uuid, "size": size, "offset": offset, "handle": handle.hex()}


def cuda_fields(memory: dict[str, Any], index: int) -> tuple[Any, ...]:
    """And back, for `_new_shared_cuda` on the GPU that has this number here."""
    size, offset = int(memory["size"]), int(memory["offset"])
    if min(size, offset) < 0:
        raise ValueError(f"no size and offset: {size}, {offset}")
    return index, bytes.fromhex(memory["handle"]), size, offset, UNCOUNTED, 0, b"", False
