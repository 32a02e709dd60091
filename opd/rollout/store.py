"""The rollout store: the only path from the sampler to the trainer.

Tokens are appended to a log on disk as they are sampled; a rollout can be read only after its finish record. The light
index (one entry per rollout) stays in memory; per-token arrays live in the log and are read when a batch asks for them.

A segment is a sequence of frames, `length | crc | kind | payload`, each checksum seeded with the one before it, so a
frame that is missing, torn or altered shows. A torn tail of the last segment is cut off; damage anywhere else is an error.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from opd.errors import StoreError
from opd.types import Author, Rollout, SampledToken, StopReason

HEADER = struct.Struct("<IIB")  # payload length, checksum, kind
BEGIN, TOKENS, FINISH, NOTE = 1, 2, 3, 4
SEGMENT_BYTES = 64 << 20
COLUMNS: tuple[tuple[str, str], ...] = (  # one token = one row; columns are written one after the other
    ("rollout", "<u4"), ("response_ids", "<i4"), ("author", "u1"), ("logprob", "<f4"),
    ("logprob_sampled", "<f4"), ("logprob_stop", "<f4"), ("version", "<i4"),
)  # fmt: skip
ROW = np.dtype([(name, kind) for name, kind in COLUMNS])
NO_ROWS = np.empty(0, dtype=ROW)


@dataclass
class Entry:
    """The index's line about one rollout. `frames` are (segment, offset) of the frames that hold its tokens."""

    number: int
    id: str
    prompt_id: str
    visit: int
    sample: int
    domain: str
    source: str
    group: str
    pair: str
    begin: tuple[int, int]
    length: int = 0
    stop: StopReason | None = None
    frames: list[tuple[int, int]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


class RolloutStore:
    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        """Open a log, or start one. `read_only` never touches the files: the run may be alive and writing."""
        self.directory, self._read_only = directory, read_only
        self.entries: dict[str, Entry] = {}
        self._numbers: list[Entry] = []
        self._pending: list[tuple[Any, ...]] = []  # token rows not written yet
        self._finishing: list[tuple[Entry, StopReason]] = []  # finish records not written yet
        self._checksum = 0
        if not read_only:
            directory.mkdir(parents=True, exist_ok=True)
        segments = sorted(directory.glob("segment-*.log"))
        for position, path in enumerate(segments):
            self._recover(path, position, last=position == len(segments) - 1)
        self._segment = max(len(segments) - 1, 0)
        self._file: BinaryIO | None = None if read_only else self._path(self._segment).open("ab")

    def __len__(self) -> int:
        return len(self.entries)

    # Writing

    def begin(self, *, id: str, prompt_id: str, visit: int, sample: int, domain: str, source: str,
              prompt_ids: np.ndarray, group: str = "", pair: str = "") -> None:  # fmt: skip
        if id in self.entries:
            raise StoreError(f"rollout {id!r} was begun twice")
        meta: dict[str, Any] = {"id": id, "prompt_id": prompt_id, "visit": visit, "sample": sample, "domain": domain, "source": source,
                "group": group, "pair": pair}  # fmt: skip
        text = json.dumps(meta).encode()
        payload = struct.pack("<II", len(self._numbers), len(text)) + text + prompt_ids.astype("<i4").tobytes()
        place = self._write(BEGIN, payload)
        self._register(Entry(number=len(self._numbers), begin=place, **meta))

    def append(self, token: SampledToken, author: Author = Author.STUDENT) -> None:
        """Buffer one sampled token; it reaches the log with the next `commit`."""
        entry = self.entries[token.request_id]
        self._pending.append(
            (
                entry.number,
                token.token,
                int(author),
                token.logprob,
                token.logprob_sampled,
                token.logprob_stop,
                token.version,
            )
        )

    def extend(self, id: str, response_ids: np.ndarray, author: Author, version: int) -> None:
        """Tokens nobody sampled here (a dataset's completion): they have no behaviour log-probs."""
        number, nan = self.entries[id].number, float("nan")
        self._pending += [(number, int(token), int(author), nan, nan, nan, version) for token in response_ids]

    def finish(self, id: str, stop: StopReason) -> None:
        """The rollout counts, i.e. may be read and trained on, once this record is written behind its tokens."""
        self._finishing.append((self.entries[id], stop))

    def note(self, id: str, **facts: Any) -> None:
        """Attach facts that came later, such as a reward."""
        entry = self.entries[id]
        entry.notes.update(facts)
        self._write(NOTE, struct.pack("<I", entry.number) + json.dumps(facts).encode())

    def commit(self, sync: bool = False) -> None:
        """Hand everything so far to the operating system; with `sync`, wait until the disk has it."""
        self._write_pending()
        file = self._writable()
        file.flush()
        if sync:
            os.fsync(file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self.commit(sync=True)
            self._file.close()

    def _write_pending(self) -> None:
        """All buffered tokens, of whichever rollouts, as one frame; then the finish records, never before their tokens."""
        if self._pending:
            columns = list(zip(*self._pending, strict=True))
            blocks = [
                np.asarray(column, dtype=kind).tobytes() for column, (_, kind) in zip(columns, COLUMNS, strict=True)
            ]
            place = self._write(TOKENS, b"".join(blocks))
            self._index_tokens(np.asarray(columns[0], dtype=np.int64), place)
            self._pending.clear()
        for entry, stop in self._finishing:
            self._write(FINISH, struct.pack("<I", entry.number) + stop.encode())
            entry.stop = stop
        self._finishing.clear()

    def _write(self, kind: int, payload: bytes) -> tuple[int, int]:
        file = self._writable()
        if file.tell() > SEGMENT_BYTES:
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._segment += 1
            self._checksum = 0
            file = self._file = self._path(self._segment).open("ab")
        place = (self._segment, file.tell())
        self._checksum = zlib.crc32(bytes([kind]) + payload, self._checksum)
        file.write(HEADER.pack(len(payload), self._checksum, kind) + payload)
        return place

    def _writable(self) -> BinaryIO:
        if self._file is None:
            raise StoreError(f"{self.directory} was opened read-only")
        return self._file

    # Reading

    def load(self, ids: Iterable[str]) -> list[Rollout]:
        """Finished rollouts, read back from the log; each frame is read once however many rollouts share it."""
        if self._file is not None:
            self.commit()
        entries = [self.entries[id] for id in ids]
        for entry in entries:
            if entry.stop is None:
                raise StoreError(f"rollout {entry.id!r} is not finished, so it cannot be read")
        prompts = {entry.number: _begin(self._read(*entry.begin)[1])[2] for entry in entries}
        places = sorted({place for entry in entries for place in entry.frames})
        frames = [token_rows(self._read(*place)[1]) for place in places]
        rows = np.concatenate(frames) if frames else NO_ROWS
        rows = rows[np.argsort(rows["rollout"], kind="stable")]  # frames are in order, so tokens of a rollout stay so
        numbers = np.array([entry.number for entry in entries])
        starts, ends = (np.searchsorted(rows["rollout"], numbers, side=side) for side in ("left", "right"))
        return [
            _rollout(entry, prompts[entry.number], rows[start:end])
            for entry, start, end in zip(entries, starts, ends, strict=True)
        ]

    def _read(self, segment: int, offset: int) -> tuple[int, bytes]:
        with self._path(segment).open("rb") as file:
            file.seek(offset)
            length, _, kind = HEADER.unpack(file.read(HEADER.size))
            return kind, file.read(length)

    def _path(self, segment: int) -> Path:
        return self.directory / f"segment-{segment:06d}.log"

    # Recovery

    def _recover(self, path: Path, segment: int, last: bool) -> None:
        data = path.read_bytes()
        self._checksum, offset = 0, 0
        while offset < len(data):
            frame = _frame(data, offset, self._checksum)
            if frame is None:
                if not last:
                    raise StoreError(
                        f"{path}, byte {offset}: the frame is damaged. The segments after it cannot be trusted."
                    )
                if not self._read_only:
                    with path.open("r+b") as file:
                        file.truncate(offset)
                return
            kind, payload, self._checksum = frame
            self._replay(kind, payload, (segment, offset))
            offset += HEADER.size + len(payload)

    def _replay(self, kind: int, payload: bytes, place: tuple[int, int]) -> None:
        if kind == BEGIN:
            number, meta, _ = _begin(payload)
            self._register(Entry(number=number, begin=place, **meta))
        elif kind == TOKENS:
            self._index_tokens(token_rows(payload)["rollout"].astype(np.int64), place)
        elif kind == FINISH:
            self._numbers[struct.unpack("<I", payload[:4])[0]].stop = payload[4:].decode()
        elif kind == NOTE:
            self._numbers[struct.unpack("<I", payload[:4])[0]].notes.update(json.loads(payload[4:]))

    def _register(self, entry: Entry) -> None:
        self.entries[entry.id] = entry
        self._numbers.append(entry)

    def _index_tokens(self, numbers: np.ndarray, place: tuple[int, int]) -> None:
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            entry = self._numbers[number]
            entry.frames.append(place)
            entry.length += int(count)


def _frame(data: bytes, offset: int, checksum: int) -> tuple[int, bytes, int] | None:
    """(kind, payload, checksum) of the frame at an offset, or None where it is torn or altered."""
    if offset + HEADER.size > len(data):
        return None
    length, expected, kind = HEADER.unpack_from(data, offset)
    payload = data[offset + HEADER.size : offset + HEADER.size + length]
    if len(payload) < length or zlib.crc32(bytes([kind]) + payload, checksum) != expected:
        return None
    return kind, payload, expected


def _begin(payload: bytes) -> tuple[int, dict[str, Any], np.ndarray]:
    number, size = struct.unpack_from("<II", payload)
    return number, json.loads(payload[8 : 8 + size]), np.frombuffer(payload[8 + size :], dtype="<i4")


def token_rows(payload: bytes) -> np.ndarray:
    """The columns of a token frame, as a structured array."""
    count, start = len(payload) // ROW.itemsize, 0
    rows = np.empty(count, dtype=ROW)
    for name, kind in COLUMNS:
        rows[name] = np.frombuffer(payload, dtype=kind, count=count, offset=start)
        start += count * np.dtype(kind).itemsize
    return rows


def _rollout(entry: Entry, prompt_ids: np.ndarray, rows: np.ndarray) -> Rollout:
    assert entry.stop is not None
    columns: dict[str, Any] = {name: np.ascontiguousarray(rows[name]) for name, _ in COLUMNS if name != "rollout"}
    return Rollout(
        id=entry.id, prompt_id=entry.prompt_id, visit=entry.visit, sample=entry.sample, domain=entry.domain, source=entry.source,
        group=entry.group, pair=entry.pair, prompt_ids=prompt_ids, stop=entry.stop, **columns,
    )  # fmt: skip


def iterate(store: RolloutStore, batch: int = 256) -> Iterator[Rollout]:
    """Every finished rollout of a run, oldest first."""
    ids = [entry.id for entry in store.entries.values() if entry.stop is not None]
    for start in range(0, len(ids), batch):
        yield from store.load(ids[start : start + batch])
