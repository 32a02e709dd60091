"""Reading a log: rollouts, their signals and calls, and the recovery of the store's state on opening."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from opd.common.errors import StoreError
from opd.records import EnvironmentRecord, Rollout, Signal, SignalKind, StopReason
from opd.store import records
from opd.store.index import Index, Selection, load_index, read_index
from opd.store.log import (
    LINKED_FORMAT,
    NOWHERE,
    SEGMENT_BYTES,
    START,
    Files,
    GroupCommit,
    Place,
    Position,
    SegmentLog,
    segment_numbers,
)
from opd.store.records import COLUMNS, PACKED, Record
from opd.store.state import ENVIRONMENT, Entries, Live, State, Waiting, compose, entry, names_of, take_tokens

if TYPE_CHECKING:
    from opd.store.rollouts import RolloutStore


INDEX = "index.bin"
LOGS_AT_ONCE = 64  # sampler logs that are mapped at the same time


class StoreReader:
    """The read-only part of `RolloutStore`."""

    directory: Path
    index: Index
    entries: Entries
    _log: SegmentLog
    _samplers: dict[int, SegmentLog]  # sampler logs opened for reading
    _state: State
    _commit: GroupCommit
    _read_only: bool
    _closed: bool

    def load(self, ids: Iterable[str]) -> list[Rollout]:
        """Load finished rollouts, as copies. Waits until their finish is durable."""
        return self.load_rows([self.entries.number(id) for id in ids])

    def load_rows(self, rows: Iterable[int]) -> list[Rollout]:
        """Like `load`, by row of the index."""
        self._settle()
        return [self._rollout(int(row)) for row in rows]

    def partial(self, ids: Iterable[str]) -> list[Rollout]:
        """Unfinished rollouts with their durable tokens so far; `stop` is None."""
        self._settle()
        unfinished = []
        for id in ids:
            live = self._state.live.get(self.entries.number(id))
            if live is None:
                raise StoreError(f"rollout {id!r} is finished; `load` reads it")
            arrays: dict[str, Any] = {name: np.array(live.tokens[name]) for name, _ in records.COLUMNS}
            unfinished.append(Rollout(**live.names, prompt_ids=live.prompt_ids, stop=None, **arrays))
        return unfinished

    def where(self, **conditions: Any) -> Selection:
        """Finished rollouts by domain, source, teacher, reward, length, stop or a note: see `Selection`."""
        self._settle()
        return Selection(cast("RolloutStore", self), self.readable()).where(**conditions)

    def __iter__(self) -> Iterator[Rollout]:
        """Every readable rollout, oldest first. Only a few are in memory at once."""
        return iter(self.where())

    @overload
    def __getitem__(self, place: int) -> Rollout: ...
    @overload
    def __getitem__(self, place: slice) -> Selection: ...
    def __getitem__(self, place: int | slice) -> Rollout | Selection:
        """Rollouts by their place in iteration order."""
        return self.where()[place]

    def readable(self) -> np.ndarray:
        """Rows of the index whose rollouts are finished, and whose tokens were not deleted."""
        count = len(self.index)  # more rollouts may begin meanwhile
        kept = (self.index.own_segments(count) >= self._log.first) & ~self.index.gone(count)
        return np.flatnonzero((self.index["stop"][:count] != 0) & kept)

    def unfinished(self) -> list[str]:
        """Ids of unfinished rollouts, oldest first."""
        self._settle()
        return [live.names["id"] for live in list(self._state.live.values())]

    def signals(self, ids: Iterable[str], role: str, kind: SignalKind) -> dict[str, Signal]:
        """The stored signals of these rollouts, by id. If a rollout was scored twice, the newest."""
        self._settle()
        wanted = {self.entries.number(id): id for id in ids}
        kept: dict[str, Signal] = {}
        rows = np.array(list(wanted), dtype=np.int64)
        for row, place, size in self._state.index.find_attached(rows, f"{role}/{kind}"):
            if place.segment < self._log.first:
                continue  # deleted
            record = self._read(place, size)
            values, mask = records.signal_values(record)
            facts = record.facts
            spans = tuple(cast("tuple[int, int, int, int]", tuple(span)) for span in facts["spans"])
            said_by = (facts["teacher"], facts["teacher_version"], role, facts["view"])
            kept[wanted[row]] = Signal(*said_by, spans, values, mask, facts.get("key", ""))
        return kept

    def environment(self, id: str) -> list[EnvironmentRecord]:
        """A rollout's environment calls, in order."""
        return [record for _, record in self.calls([self.entries.number(id)])]

    def calls(self, rows: Iterable[int]) -> Iterator[tuple[int, EnvironmentRecord]]:
        """(row, call) of these rows of the index, in the order they were logged."""
        self._settle()
        for row, place, size in self._state.index.find_attached(np.array(list(rows), dtype=np.int64), ENVIRONMENT):
            yield row, EnvironmentRecord(**self._read(place, size).facts)

    @property
    def position(self) -> Position:
        """The durable end of the log. A checkpoint stores it, and passes it to `require` when it is loaded."""
        self._settle()
        return self._log.end

    def require(self, position: Position, who: str, other: str = "") -> None:
        """Raise an error if the log has lost data that was durable when `who` was written.

        A repaired log is accepted, since the repair has reported its losses.
        """
        if self._log.holds(position) or position.log == self._repaired_from():
            return
        raise StoreError(
            f"{self._log.path(position.segment)}, byte {position.offset}: {who} was written when the log reached this "
            f"byte, and it no longer does: durable rollouts are lost. Put the right files back{other}."
        )

    def _repaired_from(self) -> str | None:
        path = self.directory / REPAIRED
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["from"]) if path.is_file() else None
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"{path}, byte 0: the file is damaged. Remove it if the log was never repaired.") from None

    def _settle(self) -> None:
        if not self._read_only and not self._closed:
            self._commit.wait()

    def _rollout(self, row: int) -> Rollout:
        index = self._state.index
        if not index["stop"][row]:
            raise StoreError(f"rollout {entry(self._state, row).id!r} is not finished, so it cannot be read")
        place, number = Place(int(index["segment"][row]), int(index["offset"][row])), int(index["log"][row])
        own = int(index["linked"][row]) if number else place.segment
        if own < self._log.first or (number and index.logs[number].what == "gone"):
            raise StoreError(
                f"rollout {entry(self._state, row).id!r}: its tokens were given back (store.retain); what the index knows is left"
            )
        log = self._sampler(number) if number else self._log
        record = self._read(place, int(index["size"][row]), log)
        if record.kind != records.FINISH or record.number != row:
            raise StoreError(f"{log.path(place.segment)}, byte {place.offset}: not the record the index names")
        arrays: dict[str, Any] = {name: np.array(array) for name, array in records.finished_arrays(record).items()}
        facts = {name: value for name, value in record.facts.items() if name not in ("prompt", "tokens")}
        return Rollout(**facts, **arrays)

    def _read(self, place: Place, size: int, log: SegmentLog | None = None) -> Record:
        log = log or self._log
        data = log.map(place.segment, place.offset + size)
        if log is not self._log:
            log.header(place.segment, data)  # raises an error if it belongs to another log
        return records.decode_record(data, place.offset, str(log.path(place.segment)))

    def _sampler(self, number: int) -> SegmentLog:
        """A sampler log, opened for reading. Only a few stay open, since each segment's map holds a file descriptor."""
        log = self._samplers.get(number)
        if log is None:
            for other in list(self._samplers)[: max(len(self._samplers) + 1 - LOGS_AT_ONCE, 0)]:
                self._samplers.pop(other, None)
            id = id_of(self._log.id, number)
            log = self._samplers.setdefault(number, SegmentLog(folder_of(self.directory, number), Files(), id=id))
        return log

    # Recovery

    def _recover(self) -> tuple[str, State]:
        """(status of the saved index, state of the log).

        A writer verifies every frame, a reader only the new ones.
        """
        path = self.directory / INDEX
        loaded, base = load_index(path), load_base(self.directory)
        if base is not None:
            self._log.first, self._log.chain = base.first, base.chain
        count = self._log.segments()
        if not isinstance(loaded, str) and count and loaded[1].log != self._log.id.hex():
            loaded = "of another log"
        was = loaded if isinstance(loaded, str) else ""
        if base is not None and (isinstance(loaded, str) or loaded[1].place < base.end.place):
            loaded, was = (base.index, base.end), was or "behind"
        if isinstance(loaded, str):
            state = State()
            for segment, frame in self._log.scan():
                state.replay(segment, frame, str(self._log.path(segment)))
            return loaded, state
        index, end = loaded
        self.require(end, path.name, ", or save the rest with `opd store repair`")
        state = State(index)
        since = state.unfinished_since(end)
        start = START if not self._read_only else end if since == end.place else self._log.before(since)
        for segment, frame in self._log.scan(start):
            if (segment, frame.end) > end.place:
                state.replay(segment, frame, str(self._log.path(segment)))
            elif (segment, frame.offset) >= since:
                state.replay_unfinished(frame)
        return was or ("behind" if self._log.end != end else "whole"), state


# --- Sampler logs: rollouts/sampler-000001/segment-000000.log, … ---
#
# Each is written once, by one sampler process: BEGIN, TOKENS and FINISH records with the store's rollout numbers. It is never
# continued, and its torn tail is never cut. The store's own log says what in it counts (LINK and LOG, see `LinkingStore`).
# Its id is derived from that log's id, so a foreign log is detected.


FOLDER = "sampler-"


def folder_of(store: Path, number: int) -> Path:
    return store / f"{FOLDER}{number:06d}"


def numbers_in(store: Path) -> list[int]:
    """The numbers of sampler logs that have at least one segment."""
    names = [path.name.removeprefix(FOLDER) for path in store.glob(f"{FOLDER}*") if segment_numbers(path)]
    return sorted(int(name) for name in names if name.isdigit())


def id_of(store: bytes, number: int) -> bytes:
    """The id of a sampler log. `store`: the id of the store's own log."""
    return hashlib.blake2b(store + number.to_bytes(4, "little"), digest_size=8).digest()


def link_facts(log: int, place: Place, size: int, stop: str, versions: np.ndarray) -> dict[str, Any]:
    """The facts of a LINK record about a FINISH in this log."""
    low, high = (int(versions.min()), int(versions.max())) if versions.size else (-1, -1)
    facts = {"log": log, "segment": place.segment, "offset": place.offset, "size": size, "stop": stop}
    return {**facts, "length": int(versions.size), "version_min": low, "version_max": high}


class SamplerLog:
    """Writes a sampler log. Tokens wait for the group commit, as in the store."""

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
        """Begin a rollout of the store. `columns`: its existing tokens."""
        live = self._live[number] = Live(number, dict(names), np.array(prompt_ids, dtype=np.int32))
        self._commit.add(Waiting(records.BEGIN, number, records.begin(number, live.names, live.prompt_ids)))
        if columns is not None:
            self.append(np.full(columns[0].size, number), columns)

    def append(self, numbers: np.ndarray | Sequence[int], columns: Sequence[Any]) -> None:
        """Add tokens of any rollouts. `columns`: as in `records.COLUMNS`."""
        rows = np.empty(len(numbers), dtype=PACKED)
        rows["rollout"] = numbers
        for (name, _), column in zip(COLUMNS, columns, strict=True):
            rows[name] = column
        if rows.size:
            self._commit.add(rows)

    def finish(self, number: int, stop: StopReason) -> None:
        self._commit.add(Waiting(records.FINISH, number, facts=stop, live=self._live[number]))

    def commit(self, sync: bool = False) -> None:
        """Request a group commit; with `sync`, wait until everything so far is durable."""
        if sync:
            self._commit.wait()
        else:
            self._commit.nudge()

    def links(self, numbers: Iterable[int]) -> list[tuple[int, dict[str, Any]]]:
        """(number, link facts) of finished, durable rollouts. Each can be asked for once."""
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
    """One rollout in a sampler log, finished or not."""

    names: Mapping[str, Any]
    finish: Record | None = None
    place: Place = NOWHERE
    live: Live | None = None

    def tokens(self) -> Mapping[str, np.ndarray]:
        """Its tokens, by column."""
        if self.finish is not None:
            return records.finished_arrays(self.finish)
        assert self.live is not None
        packed = self.live.tokens
        return {name: packed[name] for name, _ in COLUMNS}

    def extends(self, ours: np.ndarray) -> bool:
        """Whether its tokens begin with `ours` (`PACKED`), bit for bit."""
        theirs = self.tokens()
        return all(ours[name].tobytes() == theirs[name][: ours.size].tobytes() for name, _ in COLUMNS)


def held_in(log: SegmentLog) -> dict[int, Held]:
    """The rollouts of a sampler log, by the store's numbers. Damage raises an error."""
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


# --- Deleted segments: `base.bin` replaces them ---
#
# It is an index like `index.bin`, saved before any segment is deleted, with the number of the first remaining segment and the
# checksum before it. The index keeps rows of deleted rollouts. If the process is killed in between, the next writer deletes
# the rest. Sampler logs are deleted whole, after a record in the store's own log.


BASE = "base.bin"


@dataclass(frozen=True)
class Base:
    first: int  # the first remaining segment
    chain: int  # the last checksum of the segment before it
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
    """Settled sampler logs in which no rollout from number `boundary` on was finished."""
    needed = set(np.unique(index["log"][needed_rows(index, boundary)]).tolist())
    return [number for number, state in index.logs.items() if state.what == "settled" and number not in needed]


def first_needed(index: Index, boundary: int, last: int) -> int:
    """The first segment that is still needed: by rollouts from `boundary` on, unfinished ones or calls; at most `last`."""
    needed = needed_rows(index, boundary)
    calls = index.vocabularies["what"].find("environment")
    attached = needed[index.attached["rollout"]] | (index.attached["what"] == (-1 if calls is None else calls))
    segments = [index.own_segments(len(index))[needed], index.attached["segment"][attached]]
    return int(min([last, *(found.min() for found in segments if found.size)]))


# --- Finishing an interrupted repair ---
#
# `repair` writes a clean log (`repaired.json` last), renames the damaged one away, then renames the clean one into its place.
# If it is killed between the two renames, the next process that opens the log does the last rename.


REPAIRED = "repaired.json"  # written by `opd store repair`: the log it came from, and what was lost
DAMAGED = ".damaged"


def repaired_name(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.repaired")


def pending_repair(directory: Path) -> Path | None:
    """The clean log that an interrupted repair has not yet renamed to this directory."""
    clean = repaired_name(directory)
    return clean if not directory.exists() and (clean / REPAIRED).is_file() else None


def finish_repair(directory: Path) -> None:
    """Finish an interrupted repair. Raises an error if only a damaged log is left, so that no new log is started."""
    clean = pending_repair(directory)
    if clean is not None:
        os.rename(clean, directory)
        Files().sync_directory(directory.parent)
    damaged = directory.with_name(directory.name + DAMAGED)
    if not directory.exists() and damaged.exists():
        raise StoreError(
            f"{directory}, byte 0: the log is missing, but {damaged.name} is there: a repair has lost its result. "
            f"Rename it to {directory.name}, and repair it again with `opd store repair`."
        )
