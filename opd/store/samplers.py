"""Logs of samplers: what a process that samples beside the trainer writes, in a directory of its own below the store's.

    rollouts/sampler-000001/segment-000000.log, …

Each is written once, by one process: BEGIN, TOKENS and FINISH, of rollouts that the store has begun and under the store's numbers. Nobody
opens it again to go on with it, or cuts its torn tail. What in it counts is said by the store's own log alone (LINK and LOG, see
`store.linking`). Its id follows from that log's, so one that belongs elsewhere shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from opd.errors import StoreError
from opd.store import records
from opd.store.commit import GroupCommit
from opd.store.files import Files
from opd.store.frames import LINKED_FORMAT, segment_numbers
from opd.store.log import NOWHERE, SEGMENT_BYTES, Place, SegmentLog
from opd.store.records import COLUMNS, PACKED, Record
from opd.store.state import Live, Waiting, compose, names_of, take_tokens
from opd.types import StopReason

FOLDER = "sampler-"


def folder_of(store: Path, number: int) -> Path:
    return store / f"{FOLDER}{number:06d}"


def numbers_in(store: Path) -> list[int]:
    """Which of them are there: those that anything was written into."""
    names = [path.name.removeprefix(FOLDER) for path in store.glob(f"{FOLDER}*") if segment_numbers(path)]
    return sorted(int(name) for name in names if name.isdigit())


def id_of(store: bytes, number: int) -> bytes:
    """`store`: the id of its own log."""
    return hashlib.blake2b(store + number.to_bytes(4, "little"), digest_size=8).digest()


def link_facts(log: int, place: Place, size: int, stop: str, versions: np.ndarray) -> dict[str, Any]:
    """What a LINK record says of a FINISH in this log."""
    low, high = (int(versions.min()), int(versions.max())) if versions.size else (-1, -1)
    facts = {"log": log, "segment": place.segment, "offset": place.offset, "size": size, "stop": stop}
    return {**facts, "length": int(versions.size), "version_min": low, "version_max": high}


class SamplerLog:
    """The writer. Tokens wait for the group commit as those of the store do."""

    def __init__(
        self,
        directory: Path,
        number: int,
        id: bytes,
        *,
        commit_ms: int,
        sync: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        files: Files | None = None,
    ) -> None:
        self.number = number
        self._log = SegmentLog(
            directory, files or Files(), segment_bytes=segment_bytes, sync=sync, id=id, format=LINKED_FORMAT
        )
        if self._log.segments():
            raise StoreError(f"{directory}, byte 0: this log was begun before, and nobody goes on with one.")
        self._log.open_for_writing()
        self._live: dict[int, Live] = {}
        self._links: dict[int, dict[str, Any]] = {}
        self._commit = GroupCommit(self._write, commit_ms / 1e3)

    def begin(
        self, number: int, names: Mapping[str, Any], prompt_ids: np.ndarray, columns: Sequence[np.ndarray] | None = None
    ) -> None:
        """A rollout of the store. `columns`: tokens that there are of it already."""
        live = self._live[number] = Live(number, dict(names), np.array(prompt_ids, dtype=np.int32))
        self._commit.add(Waiting(records.BEGIN, number, records.begin(number, live.names, live.prompt_ids)))
        if columns is not None:
            self.append(np.full(columns[0].size, number), columns)

    def append(self, numbers: np.ndarray | Sequence[int], columns: Sequence[Any]) -> None:
        """Tokens of whichever rollouts: `records.COLUMNS`."""
        rows = np.empty(len(numbers), dtype=PACKED)
        rows["rollout"] = numbers
        for (name, _), column in zip(COLUMNS, columns, strict=True):
            rows[name] = column
        if rows.size:
            self._commit.add(rows)

    def finish(self, number: int, stop: StopReason) -> None:
        self._commit.add(Waiting(records.FINISH, number, facts=stop, live=self._live[number]))

    def commit(self, sync: bool = False) -> None:
        """Ask for a group commit; with `sync`, wait until everything so far is durable."""
        if sync:
            self._commit.wait()
        else:
            self._commit.nudge()

    def links(self, numbers: Iterable[int]) -> list[tuple[int, dict[str, Any]]]:
        """Where these are, which are finished and durable; to be asked once."""
        return [(number, self._links.pop(number)) for number in numbers]

    def close(self) -> None:
        try:
            self._commit.close()
            self._log.flush()
        finally:
            self._log.close()

    def _write(self, batch: list[Any]) -> None:
        parts = compose(batch, self._live)
        start = self._log.append(b"".join(part for part, _ in parts))
        offset = start.offset
        for part, item in parts:
            if item is not None and item.versions is not None:
                place = Place(start.segment, offset)
                self._links[item.number] = link_facts(self.number, place, len(part), item.facts, item.versions)
                del self._live[item.number]
            offset += len(part)


@dataclass
class Held:
    """What such a log has of one rollout: all of it, or a beginning."""

    names: Mapping[str, Any]
    finish: Record | None = None
    place: Place = NOWHERE
    live: Live | None = None

    def tokens(self) -> Mapping[str, np.ndarray]:
        """Its columns."""
        if self.finish is not None:
            return records.finished_arrays(self.finish)
        assert self.live is not None
        packed = self.live.tokens
        return {name: packed[name] for name, _ in COLUMNS}

    def extends(self, ours: np.ndarray) -> bool:
        """Whether it begins with these tokens, `PACKED`, bit for bit."""
        theirs = self.tokens()
        return all(ours[name].tobytes() == theirs[name][: ours.size].tobytes() for name, _ in COLUMNS)


def held_in(log: SegmentLog) -> dict[int, Held]:
    """By the store's numbers; what it finds wrong on the way is refused."""
    found: dict[int, Held] = {}
    live: dict[int, Live] = {}
    for segment, frame in log.scan():
        for record in records.split(frame.payload, frame.start):
            records.require_known(record, log.path(segment))
            if record.kind == records.BEGIN:
                one = live[record.number] = Live(record.number, names_of(record), np.array(records.prompt_of(record)))
                found[record.number] = Held(one.names, live=one)
            elif record.kind == records.TOKENS:
                take_tokens(record, live)
            elif record.kind == records.FINISH:
                live.pop(record.number, None)
                found[record.number] = Held(names_of(record), record, Place(segment, record.offset))
    for one in live.values():
        one.take_out()
    return found
