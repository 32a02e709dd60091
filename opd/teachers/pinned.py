"""Host memory that a GPU reads by itself: pages that stay where they are.

torch's own allocator locks them on one thread and rounds every block up to a power of two: a dozen models of 8 GB would take
minutes before the first step. Here they are asked for in large pages where the system has some, and written to and locked by
several threads.
"""

from __future__ import annotations

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from opd.errors import TrainingError
from opd.text import bytes_in_words

THREADS = 8


def pinned(size: int, piece: int, device: torch.device) -> list[Tensor]:
    """Bytes in pieces of this size, each locked as a whole: a copy may not cross from one to the next. `unpin` them."""
    free = _available()
    if free is not None and size > free:
        raise TrainingError(
            f"pool.keep memory: the next teacher needs {bytes_in_words(size)} of host memory, and {bytes_in_words(free)} are free. "
            "Set pool.keep: disk."
        )
    pieces = list(_mapped(size).split(piece))
    number = (
        torch.cuda.current_device() if device.index is None else device.index
    )  # else threads begin on the first one
    with ThreadPoolExecutor(THREADS, "opd-pin", torch.cuda.set_device, (number,)) as pool:
        codes = list(pool.map(_lock, pieces))
    wrong = [code for code in codes if code]
    if wrong:
        unpin([piece for piece, code in zip(pieces, codes, strict=True) if not code])
        raise TrainingError(
            f"pool.keep memory: {bytes_in_words(size)} of host memory cannot be pinned for a teacher (CUDA error {wrong[0]}). Set "
            "pool.keep: disk, or raise the limit of locked memory (ulimit -l)."
        )
    return pieces


def _available() -> int | None:
    """Bytes of host memory that can be had; what is locked cannot be swapped out, and the system would end whoever has most."""
    facts = Path("/proc/meminfo")
    lines = facts.read_text(encoding="ascii").splitlines() if facts.is_file() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), None)


def unpin(pieces: list[Tensor]) -> None:
    for piece in pieces:
        torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())


def _mapped(size: int) -> Tensor:
    """Bytes of the system, in large pages where it gives some; the tensor keeps them."""
    if sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without large pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)


def _lock(piece: Tensor) -> int:
    piece.zero_()  # pages that exist already are locked ten times as fast as those that have to be found meanwhile
    return int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0))
