"""A row of a matrix product has the same bits, however many rows stand beside it."""

from __future__ import annotations

import os
from pathlib import Path

MODE = "MKL_CBWR"  # read by MKL, which multiplies for torch on x86-64, at its first call


def round_alike(processors: Path = Path("/proc/cpuinfo")) -> None:
    """On Intel's processors, at no cost; what MKL would do on others is not known here. A mode of the user's stays."""
    try:
        with processors.open(encoding="utf-8") as file:
            intel = "GenuineIntel" in file.read(4096)  # the first processor is enough
    except OSError:
        return
    if intel:
        os.environ.setdefault(MODE, "AUTO,STRICT")


# Large tensors of a CPU in pages of 2 MiB: an update faults and looks up far fewer of them.


LARGE = "THP_MEM_ALLOC_ENABLE"  # read by torch when it first allocates; for blocks of 2 MiB and more


def large_pages() -> None:
    """Where Linux gives them to those who ask, as most distributions have it; without effect elsewhere. A user's setting stays."""
    os.environ.setdefault(LARGE, "1")
