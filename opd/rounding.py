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
