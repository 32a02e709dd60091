"""Large tensors of a CPU in pages of 2 MiB: an update faults and looks up far fewer of them."""

from __future__ import annotations

import os

LARGE = "THP_MEM_ALLOC_ENABLE"  # read by torch when it first allocates; for blocks of 2 MiB and more


def large_pages() -> None:
    """Where Linux gives them to those who ask, as most distributions have it; without effect elsewhere. A user's setting stays."""
    os.environ.setdefault(LARGE, "1")
