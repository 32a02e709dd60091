"""What a server accepted and answered, on the disk before its clients hear of it, so that a killed server continues.

    DIR/.journal/current      the number of the log in use
    DIR/.journal/000001/      a log as of the store: an entry per request, answer, sampler and snapshot
    DIR/.live/                the tensors that entries name: snapshots of clients, weights of samplers without a name

A client is restored from its last snapshot by repeating the requests after it. Now and then the log is written anew, with the entries
that are still needed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from opd.common.errors import StoreError, UserError
from opd.common.files import write_atomic
from opd.store.log import Files, GroupCommit, SegmentLog, encode_record, records_in

log = logging.getLogger(__name__)

REWRITE_BYTES = 64 << 20  # the log is written anew if it has grown by so much, and at least doubled
FRAME_BYTES = 4 << 20  # of entries that are copied together
ENTRY = 1  # the only kind of record


class JournalEntry(NamedTuple):
    """`op`: session, end, request, answer, gone, sampler, snapshot, skip or unload."""

    op: str
    facts: Mapping[str, Any]
    data: bytes | memoryview = b""

    @property
    def id(self) -> str:
        return str(self.facts["id"])

    def encode(self) -> bytes:
        facts = {"op": self.op, "bytes": len(self.data), **self.facts}
        return encode_record(ENTRY, 0, facts, [np.frombuffer(self.data, dtype=np.uint8)])


class Journal:
    """`add` keeps an entry in memory; it is durable once `sync` returns. Both may be called by any thread."""

    def __init__(self, directory: Path) -> None:
        self._root, self._files = directory / ".journal", Files()
        current = self._root / "current"
        self._number = int(current.read_text()) if current.exists() else 0
        self._log = self._opened(self._number)
        for other in self._root.glob("[0-9]*"):
            if other != self._log.directory:  # from a server that was killed while it wrote the log anew
                shutil.rmtree(other)
        try:
            self.found = list(_entries(self._log))  # of the server before
        except StoreError as error:
            raise UserError(
                f"{error} This is the journal of sessions of `opd serve --tinker`. To start without them, move {self._root} away; "
                "saved states stay."
            ) from None
        self._log.open_for_writing()
        self._size = self._copied = sum(len(entry.data) for entry in self.found)
        self._commit = GroupCommit(self._write, 0)

    @property
    def grown(self) -> bool:
        """Whether it is time for `rewrite`."""
        return self._size > max(self._copied + REWRITE_BYTES, 2 * self._copied)

    def add(self, op: str, facts: Mapping[str, Any], data: bytes = b"") -> None:
        """Never fails; after a disk error, `sync` does."""
        encoded = JournalEntry(op, facts, data).encode()
        self._size += len(encoded)
        with suppress(StoreError):
            self._commit.add(encoded)

    def sync(self) -> None:
        self._commit.flush()

    def rewrite(self, needed: Callable[[JournalEntry], JournalEntry | None]) -> None:
        """Copy what is `needed` into a new log. Nothing may be added meanwhile. After a disk error the old log stays in use."""
        try:
            self._rewrite(needed)
        except (OSError, StoreError) as error:
            log.warning("the journal stays as it is: %s", error)
            self._copied = self._size

    def _rewrite(self, needed: Callable[[JournalEntry], JournalEntry | None]) -> None:
        self.sync()
        old, number = self._log, self._number + 1
        shutil.rmtree(self._opened(number).directory, ignore_errors=True)
        new = self._opened(number, sync=False)
        new.open_for_writing()
        copied, frame = 0, bytearray()
        for entry in _entries(self._opened(self._number)):
            kept = needed(entry)
            if kept is not None:
                frame += kept.encode()
            if len(frame) > FRAME_BYTES:
                copied += len(frame)
                new.append(bytes(frame))
                frame.clear()
        new.append(bytes(frame))
        new.flush()
        new.sync = True
        write_atomic(self._root / "current", f"{number:06d}")
        self._log, self._number, self._size, self._copied = new, number, copied + len(frame), copied + len(frame)
        old.close()
        shutil.rmtree(old.directory)

    def close(self) -> None:
        self._commit.close()
        self._log.close()

    def _opened(self, number: int, sync: bool = True) -> SegmentLog:
        return SegmentLog(self._root / f"{number:06d}", self._files, sync=sync)

    def _write(self, entries: list[bytes]) -> None:
        self._log.append(b"".join(entries))


def _entries(written: SegmentLog) -> Iterator[JournalEntry]:
    for _, frame in written.scan():
        for record in records_in(frame.payload, frame.start):
            facts = dict(record.facts)
            op, size = facts.pop("op"), facts.pop("bytes")
            yield JournalEntry(op, facts, record.data[:size])
