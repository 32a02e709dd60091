"""CPU settings: matrix products whose rows do not depend on the number of rows, and large memory pages."""

from __future__ import annotations

import os
from pathlib import Path

MODE = "MKL_CBWR"  # read at the first call of MKL, which torch uses on x86-64


def round_alike(processors: Path = Path("/proc/cpuinfo")) -> None:
    """Set it on Intel processors, where it costs nothing. The effect on others was not measured. A user's setting stays."""
    try:
        with processors.open(encoding="utf-8") as file:
            intel = "GenuineIntel" in file.read(4096)  # the first processor is enough
    except OSError:
        return
    if intel:
        os.environ.setdefault(MODE, "AUTO,STRICT")


# Pages of 2 MiB for large CPU tensors, so an update has far fewer page faults


LARGE = "THP_MEM_ALLOC_ENABLE"  # read by torch when it first allocates; for blocks of 2 MiB and more


def large_pages() -> None:
    """Ask for large pages. Most Linux distributions give them on request; elsewhere it has no effect. A user's setting stays."""
    os.environ.setdefault(LARGE, "1")
