"""How much memory a sandbox holds: all its processes together, looked at many times a second.

Cgroups would be exact, but few users may write to them; so the sum is watched, and what grows in between two looks is
bounded by the limit of each process. Pages that a fork shares count in each process that holds them.
"""

from __future__ import annotations

import os
from pathlib import Path

TICK = 0.05  # seconds between two looks
WALLS = 64 << 20  # bytes for the processes around a program: one that fills its own limit is told so, not killed
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(root: int) -> int:
    """Bytes of main memory that a process and all its descendants hold."""
    total, waiting = 0, [root]
    while waiting:
        place = Path("/proc", str(waiting.pop()))
        try:
            total += int((place / "statm").read_text().split()[1]) * PAGE
            for thread in os.listdir(place / "task"):
                waiting += [int(child) for child in (place / "task" / thread / "children").read_text().split()]
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
    return total
