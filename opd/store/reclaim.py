"""Segments that are given back: `base.bin` stands for what they held.

It is an index like `index.bin`, saved before the first of them is removed, with the number of the first segment that stays and the
checksum that it follows. Rows of rollouts in removed segments stay in the index; their tokens are gone. Killed between the two,
segments are left over that nobody needs: the next writer removes them.

Logs of samplers go whole: a record in the store's own log says so first.
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


def needed_rows(index: Index, boundary: int) -> np.ndarray:
    return (np.arange(len(index)) >= boundary) | (index["stop"] == 0)


def logs_not_needed(index: Index, boundary: int) -> list[int]:
    """Logs of samplers that are settled, and in which no rollout from number `boundary` on was finished."""
    needed = set(np.unique(index["log"][needed_rows(index, boundary)]).tolist())
    return [number for number, state in index.logs.items() if state.what == "settled" and number not in needed]


def first_needed(index: Index, boundary: int, last: int) -> int:
    """The first segment with anything about rollouts from number `boundary` on, or unfinished ones, or calls; at most `last`."""
    needed = needed_rows(index, boundary)
    calls = index.vocabularies["what"].find("environment")
    attached = needed[index.attached["rollout"]] | (index.attached["what"] == (-1 if calls is None else calls))
    segments = [index.own_segments(len(index))[needed], index.attached["segment"][attached]]
    return int(min([last, *(found.min() for found in segments if found.size)]))
