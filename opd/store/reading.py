"""Reading a log: rollouts, what was said of them, and how a store finds its state when it is opened."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from opd.errors import StoreError
from opd.store import records
from opd.store.commit import GroupCommit
from opd.store.entries import Entries, entry
from opd.store.files import Files
from opd.store.index import Index, load_index
from opd.store.log import START, Place, Position, SegmentLog
from opd.store.reclaim import load_base
from opd.store.records import Record
from opd.store.recover import REPAIRED
from opd.store.samplers import folder_of, id_of
from opd.store.select import Selection
from opd.store.state import ENVIRONMENT, State
from opd.types import EnvironmentRecord, Rollout, Signal, SignalKind

if TYPE_CHECKING:
    from opd.store.rollouts import RolloutStore

INDEX = "index.bin"
LOGS_AT_ONCE = 64  # of samplers, that are mapped


class StoreReader:
    """The half of `RolloutStore` that writes nothing."""

    directory: Path
    index: Index
    entries: Entries
    _log: SegmentLog
    _samplers: dict[int, SegmentLog]  # those of samplers that were read from
    _state: State
    _commit: GroupCommit
    _read_only: bool
    _closed: bool

    def load(self, ids: Iterable[str]) -> list[Rollout]:
        """Finished rollouts, copied out of the map; waits until their finish is durable."""
        return self.load_rows([self.entries.number(id) for id in ids])

    def load_rows(self, rows: Iterable[int]) -> list[Rollout]:
        """As `load`, by row of the index."""
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
        """Every rollout that `readable` tells of, oldest first; a few are in memory at once."""
        return iter(self.where())

    @overload
    def __getitem__(self, place: int) -> Rollout: ...
    @overload
    def __getitem__(self, place: slice) -> Selection: ...
    def __getitem__(self, place: int | slice) -> Rollout | Selection:
        """In the order of iteration."""
        return self.where()[place]

    def readable(self) -> np.ndarray:
        """Rows of the index whose rollouts are finished, and whose tokens were not given back."""
        count = len(self.index)  # others may begin meanwhile
        kept = (self.index.own_segments(count) >= self._log.first) & ~self.index.gone(count)
        return np.flatnonzero((self.index["stop"][:count] != 0) & kept)

    def unfinished(self) -> list[str]:
        """Ids of rollouts that were begun and not finished, oldest first."""
        self._settle()
        return [live.names["id"] for live in list(self._state.live.values())]

    def signals(self, ids: Iterable[str], role: str, kind: SignalKind) -> dict[str, Signal]:
        """What teachers said of these rollouts, where it was kept; the newest, if they were asked twice."""
        self._settle()
        wanted = {self.entries.number(id): id for id in ids}
        kept: dict[str, Signal] = {}
        rows = np.array(list(wanted), dtype=np.int64)
        for row, place, size in self._state.index.find_attached(rows, f"{role}/{kind}"):
            if place.segment < self._log.first:
                continue  # given back
            record = self._read(place, size)
            values, mask = records.signal_values(record)
            facts = record.facts
            spans = tuple(cast("tuple[int, int, int, int]", tuple(span)) for span in facts["spans"])
            said_by = (facts["teacher"], facts["teacher_version"], role, facts["view"])
            kept[wanted[row]] = Signal(*said_by, spans, values, mask, facts.get("key", ""))
        return kept

    def environment(self, id: str) -> list[EnvironmentRecord]:
        """The calls a rollout made to its environment, in order."""
        return [record for _, record in self.calls([self.entries.number(id)])]

    def calls(self, rows: Iterable[int]) -> Iterator[tuple[int, EnvironmentRecord]]:
        """The calls of these rows of the index, in the order they were logged."""
        self._settle()
        for row, place, size in self._state.index.find_attached(np.array(list(rows), dtype=np.int64), ENVIRONMENT):
            yield row, EnvironmentRecord(**self._read(place, size).facts)

    @property
    def position(self) -> Position:
        """The durable end of the log. A checkpoint keeps it, and asks with `require` when it is loaded."""
        self._settle()
        return self._log.end

    def require(self, position: Position, who: str, other: str = "") -> None:
        """Refuse a log that has lost what was durable when `who` was written.

        A repaired log says itself what it lost.
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
            log.header(place.segment, data)  # or it is another log's
        return records.decode_record(data, place.offset, str(log.path(place.segment)))

    def _sampler(self, number: int) -> SegmentLog:
        """The log of a sampler, to read from. Few at a time: each map of a segment holds a descriptor."""
        log = self._samplers.get(number)
        if log is None:
            for other in list(self._samplers)[: max(len(self._samplers) + 1 - LOGS_AT_ONCE, 0)]:
                self._samplers.pop(other, None)
            id = id_of(self._log.id, number)
            log = self._samplers.setdefault(number, SegmentLog(folder_of(self.directory, number), Files(), id=id))
        return log

    # Recovery

    def _recover(self) -> tuple[str, State]:
        """(what became of the saved index, the state of the log).

        A writer verifies every frame, a reader what is new.
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
