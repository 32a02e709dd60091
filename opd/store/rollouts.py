"""The rollout store. The sampler writes to it; scoring and training read from it."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from opd.common.errors import StoreError
from opd.records import Author, SampledToken, SignalKind, StopReason, TokenColumns, TopK
from opd.store import records
from opd.store.index import STOPS, LogState
from opd.store.log import (
    EMPTY,
    FORMAT,
    LINKED_FORMAT,
    NOWHERE,
    SEGMENT_BYTES,
    Files,
    GroupCommit,
    Place,
    SegmentLog,
    segment_numbers,
)
from opd.store.reading import (
    BASE,
    INDEX,
    Held,
    StoreReader,
    finish_repair,
    first_needed,
    folder_of,
    held_in,
    id_of,
    link_facts,
    logs_not_needed,
    numbers_in,
    pending_repair,
)
from opd.store.records import COLUMNS, PACKED, Row
from opd.store.state import ENVIRONMENT, Entries, Live, Waiting, compose

# --- One store over several logs: its own and those of samplers ---
#
# LOG open       durable before a process may write into the new log of this number
# LINK           a rollout was finished there; it counts once this record is durable, and its tokens were durable before
# LOG settled    the store has taken everything useful; anything after this end is ignored
# LOG gone       the log was deleted from the store; its files are removed next
#
# Settling links finished rollouts, and copies the tokens of unfinished ones into the store's own log. This is durable
# before anybody else resumes these rollouts, so whatever a process writes after its trainer has ended is never read.


class LinkingStore(StoreReader):
    """The part of `RolloutStore` that handles sampler logs."""

    _changing: threading.RLock
    _files: Files
    _open: dict[str, int]

    def open_sampler_log(self, full: int | None = None) -> int:
        """The number of a log that a sampler process may write. Durable with the next commit.

        `full`: the log that it has now, which is returned again unless it is full.
        """
        if full is not None:
            folder = folder_of(self.directory, full)
            sizes = [self._sampler(full).path(number).stat().st_size for number in segment_numbers(folder)]
            if sum(sizes) < self._log.segment_bytes:
                return full
            self.settle(full)
        with self._changing:
            number = max(self.index.logs, default=0) + 1
            self._note_log(number, LogState("open"))
        return number

    @property
    def segment_bytes(self) -> int:
        return self._log.segment_bytes

    @property
    def failed(self) -> bool:
        """Whether the store can no longer be written."""
        return self._closed or self._log.failure is not None

    def names(self, id: str) -> Mapping[str, Any]:
        """The facts that an unfinished rollout was begun with."""
        return self._state.live[self.entries.number(id)].names

    def sampler_log_id(self, number: int) -> bytes:
        return id_of(self._log.id, number)

    def link(self, row: int, facts: Mapping[str, Any]) -> None:
        """Record that a rollout is finished and durable in a sampler log. `facts`: see `link_facts`."""
        live = self._state.live[row]
        del self._open[live.names["id"]]
        self._commit.add(Waiting(records.LINK, row, records.link(row, facts), facts))

    def settle(self, number: int) -> None:
        """Take everything useful from a sampler log. Its process is gone, or gets no more requests."""
        self._commit.wait()
        log = SegmentLog(folder_of(self.directory, number), self._files, id=self.sampler_log_id(number))
        log.copy_in()
        found = held_in(log)
        self._require_end(log, log.end.place, self.index.last_linked(number))
        for row, held in sorted(found.items()):
            self._take(row, held, log, number)
        with self._changing:
            self._note_log(number, LogState("settled", *log.end.place))
        self._commit.wait()

    def _take(self, row: int, held: Held, log: SegmentLog, number: int) -> None:
        if row >= len(self.index) or json.loads(self.index.names[row])[0] != held.names["id"]:
            raise self._forgotten(f"rollout {held.names['id']!r}, which {log.directory.name} has, was begun here")
        live = self._state.live.get(row)
        if live is None or not held.extends(live.tokens):
            return  # finished, or resumed elsewhere
        tokens = held.tokens()
        if held.finish is not None:
            stop, versions = held.finish.facts["stop"], tokens["version"]
            self.link(row, link_facts(number, held.place, held.finish.size, stop, versions))
        elif (known := live.tokens.size) < tokens["version"].size:
            rows = np.empty(tokens["version"].size - known, dtype=PACKED)
            rows["rollout"] = row
            for name, _ in COLUMNS:
                rows[name] = tokens[name][known:]
            self._commit.add(rows)

    def _note_log(self, number: int, state: LogState) -> None:
        self.index.logs[number] = state
        self._commit.add(Waiting(records.LOG, number, records.sampler_log(number, state)))

    def _forgotten(self, what: str) -> StoreError:
        """The error for lost data. A sampler only writes what the store's log already knows durably: the log has lost it."""
        end = self._log.end
        return StoreError(
            f"{self._log.path(max(end.segment, 0))}, byte {end.offset}: {what}, and is lost. Put the right files back, or save the rest "
            "with `opd store repair`."
        )

    def _require_known(self) -> None:
        for number in numbers_in(self.directory):
            if number not in self.index.logs:
                raise self._forgotten(f"{folder_of(self.directory, number).name} was opened here")

    def _take_in(self) -> None:
        """On opening for writing: settle open sampler logs, verify settled ones, and remove deleted ones."""
        for number, state in list(self.index.logs.items()):
            if state.what == "gone":
                self._remove(number)
            elif state.what == "open":
                self.settle(number)
            else:
                self._verify(number, max(state.place, self.index.last_linked(number)))

    def _verify(self, number: int, until: Place) -> None:
        if until <= EMPTY:
            return  # nothing in it counts
        log, end = SegmentLog(folder_of(self.directory, number), self._files, id=self.sampler_log_id(number)), NOWHERE
        for segment, frame in log.scan():
            end = Place(segment, frame.end)
            if end >= until:
                return
        self._require_end(log, max(end, log.end.place), until)

    def _require_end(self, log: SegmentLog, end: Place, until: Place) -> None:
        if end < until:
            at = end if end.segment == until.segment else Place(until.segment, 0)
            raise StoreError(
                f"{log.path(at.segment)}, byte {at.offset}: rollouts were durable in this log up to byte {until.offset} of "
                f"{log.path(until.segment).name}, and are lost. Put the right files back, or save the rest with `opd store repair`."
            )

    def _remove(self, number: int) -> None:
        """Remove the files of a deleted log, and their maps, which would keep the disk blocks in use.

        If a file cannot be removed now (on a network file system while another process reads it), the next writer does.
        """
        self._samplers.pop(number, None)
        if (folder := folder_of(self.directory, number)).exists():
            shutil.rmtree(folder, ignore_errors=True)
            self._files.sync_directory(self.directory)


INDEX_ROWS, INDEX_GROWTH = 10_000, 1.25  # the index is saved during a run when it has grown beyond this
HEAVY_BYTES = 128 << 20  # approximate bytes of signals in one frame
Fsync = Literal["commit", "never"]


class RolloutStore(LinkingStore):
    """A durable store of rollouts.

    `commit_ms`: the longest time that tokens wait for the group commit (0: until `commit` is called, without a thread).
    `fsync`: `commit` syncs every group commit. `never` leaves syncing to the operating system: a killed process loses
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
        """Open a log, or start one. `read_only` never changes the files: the run may still be writing."""
        if not read_only:
            finish_repair(directory)
        directory = pending_repair(directory) or directory
        self.directory, self._read_only, self._closed, self._heavy = directory, read_only, False, 0
        self._files = files or Files()
        self._log = SegmentLog(directory, self._files, segment_bytes=segment_bytes)
        self._samplers = {}
        self._commit = GroupCommit(self._write, 0.0)
        self._lock = threading.RLock()  # guards the state
        self._changing = threading.RLock()  # guards changes that the index has before the log
        self.configure(commit_ms=commit_ms, fsync=fsync, hidden=hidden)
        self.index_was, self._state = self._recover()
        self._state.settle()
        self.index, self.entries = self._state.index, Entries(self._state)
        self._saved_rows = len(self.index) if self.index_was == "whole" else 0
        self._open = {live.names["id"]: live.number for live in self._state.live.values()}  # rollouts that take tokens
        if not read_only:
            self._require_known()
            self._log.open_for_writing()
            self._take_in()

    def __len__(self) -> int:
        """The number of rollouts begun. Iteration skips unfinished ones, and those whose tokens were deleted."""
        return len(self._state.index)

    def __repr__(self) -> str:
        return (
            f"RolloutStore({str(self.directory)!r}, {len(self.readable())} of {len(self)} rollouts finished and kept)"
        )

    def configure(self, *, commit_ms: int, fsync: Fsync, hidden: bool) -> None:
        """Apply the recipe's `store` settings, which may change between stages."""
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
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        self._writable()
        names: dict[str, Any] = {"id": id, "prompt_id": prompt_id, "visit": visit, "sample": sample}
        names |= {"domain": domain, "source": source, "group": group, "pair": pair}
        names |= {"extras": dict(extras)} if extras else {}  # further facts of the rollout, plain JSON
        with self._changing:
            with self._lock:
                if id in self._state.numbers:
                    raise StoreError(f"rollout {id!r} was begun twice")
                live = self._state.begin(names, prompt_ids)
                self._open[id] = live.number
            self._commit.add(Waiting(records.BEGIN, live.number, records.begin(live.number, names, live.prompt_ids)))

    def append(self, token: SampledToken, author: Author = Author.STUDENT) -> None:
        """Add one sampled token. It is written with the next group commit."""
        id, value, logprob, sampled, stop, version, by = token
        number = self._open[id] if id in self._open else self._taking(id).number
        self._commit.add((number, value, logprob, sampled, stop, version, int(author if by is None else by)))

    def append_many(self, tokens: TokenColumns, author: Author | np.ndarray = Author.STUDENT) -> None:
        """Add many tokens at once, of one rollout or of several. Only the lookup of their rollouts is done per token."""
        self._writable()
        ids, values, *rest = tokens
        rows = np.empty(len(values), dtype=records.PACKED)  # a copy: the caller's arrays may be used again
        if isinstance(ids, str):
            numbers: Any = self._taking(ids).number
        else:
            try:
                numbers = list(map(self._open.__getitem__, ids))
            except KeyError:
                numbers = [self._taking(id).number for id in ids]  # raises an error that names the rollout
        given = (numbers, values, *rest, int(author) if isinstance(author, Author) else author)
        for (name, _), column in zip(records.ROW_COLUMNS, given, strict=True):
            if isinstance(column, (np.ndarray, list)) and np.shape(column) not in ((), rows.shape):
                raise StoreError(f"a column of {np.shape(column)} values for {rows.size} tokens")
            rows[name] = column  # a single value is broadcast
        if rows.size:
            self._commit.add(rows)

    def extend(self, id: str, response_ids: np.ndarray, author: Author, version: int) -> None:
        """Add tokens that were not sampled (a dataset's completion). They have no behaviour log-probs."""
        nan = float("nan")
        self.append_many(TokenColumns(id, response_ids, nan, nan, nan, version), author)

    def finish(self, id: str, stop: StopReason) -> None:
        """Finish a rollout. It can be read and trained on once this record is durable after its tokens."""
        if stop not in STOPS[1:]:
            raise StoreError(f"rollout {id!r}: stop {stop!r} must be one of {', '.join(map(str, STOPS[1:]))}")
        live = self._taking(id)
        del self._open[id]
        self._commit.add(Waiting(records.FINISH, live.number, facts=stop, live=live))

    def note(self, id: str, **facts: Any) -> None:
        """Attach later facts, such as the `reward`."""
        self._writable()
        number = self.entries.number(id)
        data = records.note(number, facts)
        with self._changing:
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
        key: str = "",
    ) -> bool:
        """Store a teacher's signal. Returns whether it was stored: hidden states are only kept with `store.hidden`.

        `key`: identifies what the teacher read.
        """
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
            "key": key,
        }
        data = records.signal(number, facts, values, mask)
        self._commit.add(Waiting(records.SIGNAL, number, data, facts))
        self._heavy += len(data)
        if self._heavy > HEAVY_BYTES:  # wait for the disk instead of filling the memory
            self._commit.wait()
            self._heavy = 0
        return True

    def record_environment(self, id: str, order: int, call: Any, result: Any) -> None:
        """Log a call and its result, both plain JSON. The call is to an environment or about a finished rollout.

        `order` counts from 0.
        """
        self._writable()
        number = self.entries.number(id)
        live = self._state.live[number] if id in self._open else None
        if live is not None and order != live.calls:
            raise StoreError(f"rollout {id!r}: environment call {order} cannot be logged: call {live.calls} is next")
        try:
            data = records.environment(number, order, call, result)
        except (TypeError, ValueError) as error:
            raise StoreError(f"rollout {id!r}: environment call {order} is not plain JSON ({error})") from None
        if live is not None:
            live.calls += 1
        self._commit.add(Waiting(records.ENVIRONMENT, number, data))

    def commit(self, sync: bool = False) -> None:
        """Request a group commit; with `sync`, wait until everything so far is durable."""
        self._writable()
        if sync:
            self._commit.wait()
            if len(self.index) > self._saved_rows * INDEX_GROWTH + INDEX_ROWS:
                with self._still():
                    self._save_index()
        else:
            self._commit.nudge()

    @contextmanager
    def _still(self) -> Iterator[None]:
        """A block in which everything is durable and no other thread begins a rollout or writes."""
        with self._changing:
            self._commit.wait()
            with self._commit.writing:
                self._log.flush()
                yield

    def reclaim(self, boundary: int, until: int | None = None) -> int:
        """Delete segments and sampler logs that hold nothing about rollouts from number `boundary` on. Returns the count.

        Unfinished rollouts are kept. So are calls, since their costs count, and segments from `until` on, since a
        checkpoint names a frame there. The index keeps a row for every rollout.
        """
        self._writable()
        with self._still():
            last = self._log.end.segment
            last = last if until is None else min(until, last)
            before, first = self._log.first, first_needed(self.index, boundary, last)
            if first > before:
                chain = self._log.header(first, self._log.map(first)).chain
                self.index.save(self.directory / BASE, self._files, self._log.end, first=first, chain=chain)
                self._log.give_back(first)
            unneeded = logs_not_needed(self.index, boundary)
        with self._changing:
            for number in unneeded:
                self._note_log(number, LogState("gone"))
        if unneeded:
            with self._still():  # makes the LOG records durable, whatever the `fsync` setting
                for number in unneeded:
                    self._remove(number)
        return max(first - before, 0) + len(unneeded)

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
        """Save the index. The log must be durable. After the next crash there is less to replay."""
        path = self.directory / INDEX
        try:
            self.index.save(path, self._files, self._log.end)
        except OSError as error:
            raise StoreError(
                f"{path}: {error.strerror}. The log is whole, and the index will be built again: see to the disk, then `opd resume`."
            ) from error
        self._saved_rows = len(self.index)

    def _write(self, batch: list[Row | np.ndarray | Waiting]) -> None:
        """Write one frame."""
        parts = compose(batch, self._state.live)
        linked = any(item is not None and item.kind in (records.LINK, records.LOG) for _, item in parts)
        start = self._log.append(b"".join(part for part, _ in parts), LINKED_FORMAT if linked else FORMAT)
        frame, offset = Place(start.segment, self._log.end.frame), start.offset
        with self._lock:
            for part, item in parts:
                if item is not None:
                    self._committed(item, frame, Place(start.segment, offset), len(part))
                offset += len(part)

    def _committed(self, item: Waiting, frame: Place, place: Place, size: int) -> None:
        """Update the index after a record is durable: its place, and whether the rollout is finished."""
        index = self._state.index
        if item.kind == records.BEGIN:
            index.rows.set(item.number, segment=frame.segment, offset=frame.offset)
        elif item.kind == records.FINISH:
            assert item.versions is not None
            index.finish(item.number, place, size, item.facts, item.versions)
            del self._state.live[item.number]
        elif item.kind == records.LINK:
            index.link(item.number, item.facts, place.segment)
            del self._state.live[item.number]
        elif item.kind == records.SIGNAL:
            self._state.signal(item.number, item.facts, place, size)
        elif item.kind == records.ENVIRONMENT:
            index.attach(item.number, ENVIRONMENT, place, size)

    def _taking(self, id: str) -> Live:
        self._writable()
        if id not in self._open:
            raise StoreError(
                f"rollout {id!r} is finished already" if id in self.entries else f"rollout {id!r} was never begun"
            )
        return self._state.live[self._open[id]]

    def _writable(self) -> None:
        if self._read_only or self._closed:
            raise StoreError(f"{self.directory} was {'closed' if self._closed else 'opened read-only'}")


# --- Environment replay: results of tool and sandbox calls are logged, and replayed on resume ---


class Replay:
    """The calls of one rollout, in order: logged ones first, then real ones.

    replay = Replay(store, "main/task:shell/7/0/0")
    listing = replay.call({"tool": "shell", "command": "ls"}, lambda: sandbox.run("ls"))

    Calls and results are plain JSON. Executed and replayed results both go through JSON, so they are equal.
    """

    def __init__(self, store: RolloutStore, id: str) -> None:
        self._store, self._id = store, id
        self._logged = store.environment(id)
        self._order = 0

    def call(self, key: Any, execute: Callable[[], Any]) -> Any:
        """The logged result of this call. If there is none, execute it and return once the result is durable."""
        key, order = _plain(key), self._order
        if order < len(self._logged):
            logged = self._logged[order]
            if logged.call != key:
                raise StoreError(
                    f"rollout {self._id!r}: replay diverged at environment call {order}: the log has {logged.call!r}, "
                    f"now {key!r} is asked. The environment or its settings changed; start a new run."
                )
            result = logged.result
        else:
            result = _plain(execute())
            self._store.record_environment(self._id, order, key, result)
            self._store.commit(sync=True)
        self._order += 1
        return result


def _plain(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise StoreError(f"an environment's calls and results must be plain JSON ({error}): {value!r:.200}") from None


# --- Calls about finished rollouts, such as model-based grading, are logged like environment calls ---


class StoredCalls:
    """The stored calls of one stage. Calls of an earlier process are looked up by their content."""

    def __init__(self, store: RolloutStore, stage: str) -> None:
        self._store, self._stage, self._orders = store, stage, dict[str, int]()

    @cached_property
    def _known(self) -> dict[tuple[str, str], tuple[Any, Any]]:
        """Read lazily, since most stages have none."""
        store, known = self._store, dict[tuple[str, str], tuple[Any, Any]]()
        ids = {store.entries.number(id): id for id in store.entries if id.startswith(f"{self._stage}/")}
        for row, record in store.calls(ids):
            known[ids[row], _text(record.call)] = (record.call, record.result)
            self._orders[ids[row]] = record.order + 1
        return known

    def find(self, about: str, call: Any) -> Any:
        found = self._known.get((about, _text(call)))
        return None if found is None else found[1]

    def add(self, about: str, call: Any, result: Any) -> None:
        self._known[about, _text(call)] = (call, result)
        order = self._orders.get(about, 0)
        self._orders[about] = order + 1
        self._store.record_environment(about, order, call, result)

    def earlier(self) -> Sequence[tuple[Any, Any]]:
        return list(self._known.values())


def _text(call: Any) -> str:
    return json.dumps(call, sort_keys=True)


# --- The store of ranks other than the leader, which writes every token and shares what is read ---


class StoreElsewhere(RolloutStore):
    """Accepts writes and keeps nothing. Reading from it is a bug."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __len__(self) -> int:
        return 0

    def configure(self, *, commit_ms: int, fsync: Fsync, hidden: bool) -> None:
        pass

    def append(self, token: SampledToken, author: Author = Author.STUDENT) -> None:
        pass

    def append_many(self, tokens: TokenColumns, author: Author | np.ndarray = Author.STUDENT) -> None:
        pass

    def finish(self, id: str, stop: StopReason) -> None:
        pass

    def record_signal(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def commit(self, sync: bool = False) -> None:
        pass

    def close(self) -> None:
        pass
