"""The rollout store itself: what the sampler writes into, and what scoring and training read from."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from opd.errors import StoreError
from opd.store import records
from opd.store.commit import GroupCommit
from opd.store.entries import Entries, entry
from opd.store.files import Files
from opd.store.index import STOPS, load_index
from opd.store.log import SEGMENT_BYTES, START, Place, Position, SegmentLog
from opd.store.records import Record, Row
from opd.store.recover import REPAIRED, finish_repair, pending_repair
from opd.store.select import Selection
from opd.store.state import ENVIRONMENT, Live, State, Waiting, columns_of
from opd.types import Author, EnvironmentRecord, Rollout, SampledToken, Signal, SignalKind, StopReason, TopK

INDEX = "index.bin"
INDEX_ROWS, INDEX_GROWTH = 10_000, 1.25  # the index is saved on the way once it has grown beyond this
HEAVY_BYTES = 128 << 20  # of signals in one frame, about
Fsync = Literal["commit", "never"]


class RolloutStore:
    """`commit_ms`: how long tokens wait for the group commit at most (0: until `commit` is called, without a thread).

    `fsync`: `commit` syncs every group commit. `never` leaves it to the operating system: a killed process loses
    nothing that was written, a power failure may. `hidden`: keep teachers' hidden states too.
    """

    def __init__(
        self,
        directory: Path,
        *,
        read_only: bool = False,
        commit_ms: int = 50,
        fsync: Fsync = "commit",
        hidden: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        files: Files | None = None,
    ) -> None:
        """Open a log, or start one. `read_only` never touches the files: the run may be alive and writing."""
        if not read_only:
            finish_repair(directory)
        directory = pending_repair(directory) or directory
        self.directory, self._read_only, self._closed, self._heavy = directory, read_only, False, 0
        self._files = files or Files()
        self._log = SegmentLog(directory, self._files, segment_bytes=segment_bytes)
        self._commit = GroupCommit(self._write, 0.0)
        self._lock = threading.RLock()  # of the state
        self.configure(commit_ms=commit_ms, fsync=fsync, hidden=hidden)
        self.index_was, self._state = self._recover()
        self._state.settle()
        self.index, self.entries = self._state.index, Entries(self._state)
        self._saved_rows = len(self.index) if self.index_was == "whole" else 0
        self._open = {live.names["id"]: live for live in self._state.live.values()}  # rollouts that take tokens
        if not read_only:
            self._log.open_for_writing()

    def __len__(self) -> int:
        return len(self._state.index)

    def configure(self, *, commit_ms: int, fsync: Fsync, hidden: bool) -> None:
        """The recipe's `store` settings, which may change from stage to stage."""
        self._commit.interval_s = commit_ms / 1e3
        self._log.sync, self._hidden = fsync == "commit", hidden

    # Writing

    def begin(
        self,
        *,
        id: str,
        prompt_id: str,
        visit: int,
        sample: int,
        domain: str,
        source: str,
        prompt_ids: np.ndarray,
        group: str = "",
        pair: str = "",
    ) -> None:
        self._writable()
        names: dict[str, Any] = {"id": id, "prompt_id": prompt_id, "visit": visit, "sample": sample}
        names |= {"domain": domain, "source": source, "group": group, "pair": pair}
        with self._lock:
            if id in self._state.numbers:
                raise StoreError(f"rollout {id!r} was begun twice")
            live = self._open[id] = self._state.begin(names, prompt_ids)
        self._commit.add(Waiting(records.BEGIN, live.number, records.begin(live.number, names, live.prompt_ids)))

    def append(self, token: SampledToken, author: Author = Author.STUDENT) -> None:
        """Take one sampled token; it reaches the disk with the next group commit."""
        id, value, logprob, sampled, stop, version = token
        live = self._open.get(id) or self._taking(id)
        row = (live.number, value, logprob, sampled, stop, version, int(author))
        live.rows.append(row)
        self._commit.add(row)

    def extend(self, id: str, response_ids: np.ndarray, author: Author, version: int) -> None:
        """Tokens nobody sampled here (a dataset's completion): they have no behaviour log-probs."""
        nan = float("nan")
        for token in response_ids.tolist():
            self.append(SampledToken(id, token, nan, nan, nan, version), author)

    def finish(self, id: str, stop: StopReason) -> None:
        """The rollout counts, i.e. may be read and trained on, once this record is durable behind its tokens."""
        if stop not in STOPS[1:]:
            raise StoreError(f"rollout {id!r}: stop {stop!r} must be one of {', '.join(map(str, STOPS[1:]))}")
        live = self._taking(id)
        del self._open[id]
        self._commit.add(Waiting(records.FINISH, live.number, facts=stop, live=live))

    def note(self, id: str, **facts: Any) -> None:
        """Attach facts that came later. `score` is the reward."""
        self._writable()
        number = self.entries.number(id)
        data = records.note(number, facts)
        with self._lock:
            self._state.index.note(number, facts)
        self._commit.add(Waiting(records.NOTE, number, data))

    def record_signal(
        self,
        id: str,
        role: str,
        kind: SignalKind,
        teacher: str,
        teacher_version: int,
        values: np.ndarray | TopK,
        mask: np.ndarray,
        *,
        view: str = "same",
        spans: Iterable[tuple[int, ...]] = (),
    ) -> bool:
        """Keep a teacher's answer; says whether it was kept: hidden states are only with `store.hidden`."""
        self._writable()
        if kind == "hidden" and not self._hidden:
            return False
        number = self.entries.number(id)
        facts = {
            "role": role,
            "kind": kind,
            "teacher": teacher,
            "teacher_version": teacher_version,
            "view": view,
            "spans": [list(span) for span in spans],
        }
        data = records.signal(number, facts, values, mask)
        self._commit.add(Waiting(records.SIGNAL, number, data, facts))
        self._heavy += len(data)
        if self._heavy > HEAVY_BYTES:  # more than the disk takes in passing: wait for it instead of filling the memory
            self._commit.wait()
            self._heavy = 0
        return True

    def record_environment(self, id: str, order: int, call: Any, result: Any) -> None:
        """Log a call to an environment and its result, both plain JSON. `order` counts the rollout's calls from 0."""
        live = self._taking(id)
        if order != live.calls:
            raise StoreError(f"rollout {id!r}: environment call {order} cannot be logged: call {live.calls} is next")
        try:
            data = records.environment(live.number, order, call, result)
        except (TypeError, ValueError) as error:
            raise StoreError(f"rollout {id!r}: environment call {order} is not plain JSON ({error})") from None
        live.calls += 1
        self._commit.add(Waiting(records.ENVIRONMENT, live.number, data))

    def commit(self, sync: bool = False) -> None:
        """Ask for a group commit; with `sync`, wait until everything so far is durable."""
        self._writable()
        if sync:
            self._commit.wait()
            if len(self.index) > self._saved_rows * INDEX_GROWTH + INDEX_ROWS:
                self._log.flush()
                self._save_index()
        else:
            self._commit.nudge()

    def close(self) -> None:
        """Make everything durable, then save the index."""
        if self._read_only or self._closed:
            return
        self._closed = True
        try:
            self._commit.close()
            self._log.flush()
            self._save_index()
        finally:
            self._log.close()

    def _save_index(self) -> None:
        """All of the log is durable now, so the index may testify to it. The next crash has less to replay."""
        path = self.directory / INDEX
        try:
            self.index.save(path, self._files, self._log.end)
        except OSError as error:
            raise StoreError(f"{path}: {error.strerror}. The log is whole; the index will be built again.") from error
        self._saved_rows = len(self.index)

    def _write(self, batch: list[Row | Waiting]) -> None:
        """One frame: begins, then the tokens of whichever rollouts, then the rest; never a finish before its tokens."""
        rows = [item for item in batch if type(item) is tuple]
        others = [item for item in batch if isinstance(item, Waiting)]
        parts: list[tuple[bytes, Waiting | None]] = [
            (item.encode(), item) for item in others if item.kind == records.BEGIN
        ]
        if rows:
            parts.append((records.tokens(rows), None))
        parts += [(item.encode(), item) for item in others if item.kind != records.BEGIN]
        start = self._log.append(b"".join(part for part, _ in parts))
        frame, offset = Place(start.segment, self._log.end.frame), start.offset
        with self._lock:
            for part, item in parts:
                if item is not None:
                    self._committed(item, frame, Place(start.segment, offset), len(part))
                offset += len(part)

    def _committed(self, item: Waiting, frame: Place, place: Place, size: int) -> None:
        """The index learns where a record lies, and that a rollout is finished, only now that it is durable."""
        index = self._state.index
        if item.kind == records.BEGIN:
            index.rows.set(item.number, segment=frame.segment, offset=frame.offset)
        elif item.kind == records.FINISH:
            assert item.versions is not None
            index.finish(item.number, place, size, item.facts, item.versions)
            del self._state.live[item.number]
        elif item.kind == records.SIGNAL:
            self._state.signal(item.number, item.facts, place, size)
        elif item.kind == records.ENVIRONMENT:
            index.attach(item.number, ENVIRONMENT, place, size)

    def _taking(self, id: str) -> Live:
        self._writable()
        live = self._open.get(id)
        if live is None:
            raise StoreError(
                f"rollout {id!r} is finished already" if id in self.entries else f"rollout {id!r} was never begun"
            )
        return live

    def _writable(self) -> None:
        if self._read_only or self._closed:
            raise StoreError(f"{self.directory} was {'closed' if self._closed else 'opened read-only'}")

    # Reading

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
            arrays: dict[str, Any] = columns_of(live.rows)
            unfinished.append(Rollout(**live.names, prompt_ids=live.prompt_ids, stop=None, **arrays))
        return unfinished

    def where(self, **conditions: Any) -> Selection:
        """Finished rollouts by domain, source, teacher, reward, length, stop or a note: see `Selection`."""
        self._settle()
        return Selection(self, np.flatnonzero(self.index["stop"])).where(**conditions)

    def unfinished(self) -> list[str]:
        """Ids of rollouts that were begun and not finished, oldest first."""
        self._settle()
        return [live.names["id"] for live in self._state.live.values()]

    def signals(self, ids: Iterable[str], role: str, kind: SignalKind) -> dict[str, Signal]:
        """What teachers said of these rollouts, where it was kept; the newest, if they were asked twice."""
        self._settle()
        wanted = {self.entries.number(id): id for id in ids}
        kept: dict[str, Signal] = {}
        for row, place, size in self._state.index.find_attached(
            np.array(list(wanted), dtype=np.int64), f"{role}/{kind}"
        ):
            record = self._read(place, size)
            values, mask = records.signal_values(record)
            facts = record.facts
            spans = tuple(cast("tuple[int, int, int, int]", tuple(span)) for span in facts["spans"])
            kept[wanted[row]] = Signal(
                facts["teacher"], facts["teacher_version"], role, facts["view"], spans, values, mask
            )
        return kept

    def environment(self, id: str) -> list[EnvironmentRecord]:
        """The calls a rollout made to its environment, in order."""
        self._settle()
        rows = np.array([self.entries.number(id)], dtype=np.int64)
        places = self._state.index.find_attached(rows, ENVIRONMENT)
        return [EnvironmentRecord(**self._read(place, size).facts) for _, place, size in places]

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
        place = Place(int(index["segment"][row]), int(index["offset"][row]))
        record = self._read(place, int(index["size"][row]))
        if record.kind != records.FINISH or record.number != row:
            raise StoreError(f"{self._log.path(place.segment)}, byte {place.offset}: not the record the index names")
        arrays: dict[str, Any] = {name: np.array(array) for name, array in records.finished_arrays(record).items()}
        facts = {name: value for name, value in record.facts.items() if name not in ("prompt", "tokens")}
        return Rollout(**facts, **arrays)

    def _read(self, place: Place, size: int) -> Record:
        return records.decode_record(
            self._log.map(place.segment, place.offset + size), place.offset, str(self._log.path(place.segment))
        )

    # Recovery

    def _recover(self) -> tuple[str, State]:
        """(what became of the saved index, the state of the log).

        A writer verifies every frame, a reader what is new.
        """
        path = self.directory / INDEX
        loaded = load_index(path)
        count = self._log.segments()
        if not isinstance(loaded, str) and count and loaded[1].log != self._log.id.hex():
            loaded = "of another log"
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
        return "behind" if self._log.end != end else "whole", state


def iterate(store: RolloutStore, batch: int = 256) -> Iterator[Rollout]:
    """Every finished rollout of a run, oldest first."""
    rows = np.flatnonzero(store.index["stop"])
    for start in range(0, len(rows), batch):
        yield from store.load_rows(rows[start : start + batch])
