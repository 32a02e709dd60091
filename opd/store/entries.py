"""The index, read one rollout at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any, cast

from opd.errors import StoreError
from opd.store.index import STOPS
from opd.store.state import State
from opd.types import StopReason


@dataclass(frozen=True)
class Entry:
    """What the index knows of one rollout.

    `stop` None: it is not finished, and `length` is what is in the log so far.
    """

    number: int
    id: str
    prompt_id: str
    visit: int
    sample: int
    domain: str
    source: str
    group: str
    pair: str
    prompt_length: int
    length: int
    stop: StopReason | None
    versions: tuple[int, int]  # oldest and newest policy among its tokens; (-1, -1): none
    teacher: str  # who scored it in the role `teacher`; empty: nobody yet
    notes: dict[str, Any]


def entry(state: State, number: int) -> Entry:
    index = state.index
    id, prompt_id, group, pair = json.loads(index.names[number])
    row = {name: index[name][number].item() for name in ("visit", "sample", "prompt_length", "length", "stop")}
    versions = (index["version_min"][number].item(), index["version_max"][number].item())
    if (live := state.live.get(number)) is not None:
        row["length"] = sum(part.size for part in live.parts)
        seen = [part["version"] for part in live.parts if part.size]
        if seen:
            versions = (min(int(part.min()) for part in seen), max(int(part.max()) for part in seen))
    return Entry(
        number=number,
        id=id,
        prompt_id=prompt_id,
        visit=row["visit"],
        sample=row["sample"],
        domain=index.text("domain", number),
        source=index.text("source", number),
        group=group,
        pair=pair,
        prompt_length=row["prompt_length"],
        length=row["length"],
        stop=cast("StopReason | None", STOPS[row["stop"]]),
        versions=versions,
        teacher=index.text("teacher", number),
        notes=index.notes(number),
    )


class Entries(Mapping[str, Entry]):
    """id -> entry, oldest first. Entries are made when asked for."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __len__(self) -> int:
        return len(self._state.index)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._state.numbers))  # others may begin meanwhile

    def __contains__(self, id: object) -> bool:
        return id in self._state.numbers

    def __getitem__(self, id: str) -> Entry:
        return entry(self._state, self._state.numbers[id])

    def values(self) -> Values:
        return Values(self)

    def number(self, id: str) -> int:
        number = self._state.numbers.get(id)
        if number is None:
            raise StoreError(f"rollout {id!r} is not in the store")
        return number


class Values(ValuesView[Entry]):
    """Entries from oldest to newest, or the other way round."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(entries)
        self._state = entries._state

    def __iter__(self) -> Iterator[Entry]:
        return (entry(self._state, number) for number in range(len(self._state.index)))

    def __reversed__(self) -> Iterator[Entry]:
        return (entry(self._state, number) for number in reversed(range(len(self._state.index))))
