"""Segments that are given back: `base.bin` stands for what they held.

It is an index like `index.bin`, saved before the first of them is removed, with the number of the first segment that stays and the
checksum that it follows. Rows of rollouts in removed segments stay in the index; their tokens are gone. Killed between the two,
segments are left over that nobody needs: the next writer removes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opd.errors import StoreError
from opd.store.index import Index, read_index
from opd.store.log import Position

BASE = "base.bin"


@dataclass(frozen=True)
class Base:
    first: int  # the first segment that stays
    chain: int  # the last checksum of the one before it
    index: Index
    end: Position


def load_base(directory: Path) -> Base | None:
    path = directory / BASE
    found = read_index(path)
    if found == "missing":
        return None
    if isinstance(found, str):
        raise StoreError(
            f"{path}, byte 0: the file is {found}. It stands for segments that were given back: put it back."
        )
    index, end, header = found
    return Base(header["first"], header["chain"], index, end)


def first_needed(index: Index, boundary: int, last: int) -> int:
    """The first segment with anything about rollouts from number `boundary` on, or unfinished ones, or calls; at most `last`."""
    numbers = np.arange(len(index))
    needed = (numbers >= boundary) | (index["stop"] == 0)
    calls = index.vocabularies["what"].find("environment")
    attached = needed[index.attached["rollout"]] | (index.attached["what"] == (-1 if calls is None else calls))
    segments = [index["segment"][needed], index.attached["segment"][attached]]
    return int(min([last, *(found.min() for found in segments if found.size)]))
