"""One store over several logs: those of samplers, and the store's own, which says what of theirs counts.

    LOG open                        durable before a process may write into a log of this number, which is new
    LINK                            a rollout was finished there; it counts once this is durable, and its tokens were before
    LOG settled, at its end         the store has taken all that is of use; whatever comes behind the end is nothing
    LOG gone                        given back; its files are removed next

Settling links what is finished, and copies the tokens of what is not into the store's own log. All of that is durable before anybody else is
asked to go on with these rollouts, so a process that outlives its trainer may write what it likes: nobody will read it.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from opd.errors import StoreError
from opd.store import records
from opd.store.files import Files
from opd.store.frames import segment_numbers
from opd.store.index import LogState
from opd.store.log import EMPTY, NOWHERE, Place, SegmentLog
from opd.store.reading import StoreReader
from opd.store.records import COLUMNS, PACKED
from opd.store.samplers import Held, folder_of, held_in, id_of, link_facts, numbers_in
from opd.store.state import Waiting


class LinkingStore(StoreReader):
    """The half of `RolloutStore` that is about logs of samplers."""

    _changing: threading.RLock
    _files: Files
    _open: dict[str, int]

    def open_sampler_log(self, full: int | None = None) -> int:
        """The number of a new one, for a process to write; or the one it has, unless it is full. Durable with the next commit."""
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
        """Whether nothing more can be written."""
        return self._closed or self._log.failure is not None

    def names(self, id: str) -> Mapping[str, Any]:
        """What an unfinished rollout was begun with."""
        return self._state.live[self.entries.number(id)].names

    def sampler_log_id(self, number: int) -> bytes:
        return id_of(self._log.id, number)

    def link(self, row: int, facts: Mapping[str, Any]) -> None:
        """A rollout was finished in the log of a sampler, and is durable there. `facts`: `samplers.link_facts`."""
        live = self._state.live[row]
        del self._open[live.names["id"]]
        self._commit.add(Waiting(records.LINK, row, records.link(row, facts), facts))

    def settle(self, number: int) -> None:
        """Take what the log of a sampler holds. Its process is gone, or will not be asked again."""
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
            return  # finished, or gone on with elsewhere
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
        """A sampler writes only behind what is durable in the store's own log: what that does not know, it has lost."""
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
        """Whoever opens the store for writing verifies the logs of samplers as far as they count, and takes what is news."""
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
        """The files of a log that is gone, and the maps of them, which would hold the disk's blocks.

        What cannot be removed now, as on a network file system while another process reads it, the next writer removes.
        """
        self._samplers.pop(number, None)
        if (folder := folder_of(self.directory, number)).exists():
            shutil.rmtree(folder, ignore_errors=True)
            self._files.sync_directory(self.directory)
