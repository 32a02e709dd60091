"""The segmented log: files, segments, frames, the records in a frame, and the group commit.

segment   header | frame | frame | …
frame     one commit: record | record | …
record    what happened to one rollout, or tokens of several
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from opd.common.errors import StoreError
from opd.records import TopK

# --- The file layer: every disk operation of the store ---
#
# Tests replace it with one that loses unsynced data.


class AppendFile:
    """A file that can only be appended to or truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # a link could lead to a foreign file
        self._descriptor = os.open(path, flags, 0o644)
        self.size = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Write all of the data. After an error the end of the file is unknown and has to be truncated."""
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            self.size += written
            view = view[written:]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        self.size = size

    def close(self) -> None:
        os.close(self._descriptor)


class Files:
    def append(self, path: Path) -> AppendFile:
        return AppendFile(path)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_directory(self, directory: Path) -> None:
        """A file's name is durable only once its directory is."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        """Create a directory and its missing parents, durably."""
        missing = [part for part in (path, *path.parents) if not part.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for part in reversed(missing):
            self.sync_directory(part.parent)

    def create(self, path: Path, chunks: Iterable[bytes]) -> None:
        """Create a file atomically: temporary name, sync, rename, sync of the directory."""
        partial = path.with_name(path.name + ".partial")
        self.remove(partial)
        file = self.append(partial)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.sync()
        except OSError:
            self.remove(partial)
            raise
        finally:
            file.close()
        self.rename(partial, path)
        self.sync_directory(path.parent)


# --- Segments and frames: the file format, and how to tell a torn tail from damage ---
#
# segment  header | frame | frame | …
# header   magic (8) | format u32 | number u32 | log id (8) | chain u32 | checksum u32
# frame    marker u32 | length u32 | previous u32 | checksum u32 | payload (length bytes, a multiple of 8)
#
# A frame is one commit. Its checksum is a CRC-32 of length, previous and payload, seeded with the log's id; `previous`
# is the checksum of the frame before it (of the segment's header, for the first). A header's `chain` is the last
# checksum of the segment before. So the checksum verifies a frame, and the chain verifies its position.
#
# The writer syncs every frame before it writes the next (`fsync: commit`), and a segment gets its name only once its
# header is on the disk. So if a valid frame follows an invalid one, the invalid one had been durable: this is damage. If
# none follows, in the last segment, it is a torn write, and the tail is cut.


MAGIC = b"opd-log\n"
FORMAT = 2
LINKED_FORMAT = 3  # for segments that may name sampler logs, and for sampler logs
HEADER = struct.Struct("<8sII8sII")
FRAME = struct.Struct("<IIII")
MARKER = 0x7D0F5E9B
MARKER_BYTES = struct.pack("<I", MARKER)
ALIGN = 8
SEGMENT_NAME = "segment-{:06d}.log"

Buffer = bytes | memoryview | mmap.mmap


class FormatError(StoreError):
    """The log was written by a newer opd. It cannot be read, so it is not reported as damaged."""


def segment_numbers(directory: Path) -> list[int]:
    """The numbers of the segments in a directory, sorted."""
    numbers = []
    for path in directory.glob("segment-*.log"):
        stem = path.stem.removeprefix("segment-")
        if stem.isdigit():
            if path.is_dir():
                raise StoreError(f"{path}: a directory where a segment of the log should be. Move it elsewhere.")
            numbers.append(int(stem))
    return sorted(numbers)


@dataclass(frozen=True)
class SegmentHeader:
    number: int
    log_id: bytes
    chain: int  # last checksum of the previous segment; 0 for the first
    checksum: int
    format: int

    @classmethod
    def make(cls, number: int, log_id: bytes, chain: int, format: int = FORMAT) -> SegmentHeader:
        return cls(number, log_id, chain, zlib.crc32(_head(number, log_id, chain, format)), format)

    def encode(self) -> bytes:
        return _head(self.number, self.log_id, self.chain, self.format) + struct.pack("<I", self.checksum)


def _head(number: int, log_id: bytes, chain: int, format: int) -> bytes:
    return HEADER.pack(MAGIC, format, number, log_id, chain, 0)[:-4]


def read_segment_header(data: Buffer, path: Path) -> SegmentHeader:
    """A segment with a partial header is damaged, not torn: a segment is named after its header is durable."""
    if len(data) < HEADER.size:
        raise StoreError(f"{path}, byte {len(data)}: the segment's header is cut off. Try `opd store check`.")
    magic, format_version, number, log_id, chain, checksum = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise StoreError(f"{path}, byte 0: not a rollout log (it starts with {bytes(data[:8])!r}).")
    if zlib.crc32(bytes(data[: HEADER.size - 4])) != checksum:
        raise StoreError(f"{path}, byte 0: the segment's header is damaged. Try `opd store check`.")
    if format_version not in (FORMAT, LINKED_FORMAT):
        raise FormatError(
            f"{path}, byte 8: log format {format_version}; this version of opd reads {FORMAT} and {LINKED_FORMAT}. A newer one wrote it."
        )
    return SegmentHeader(number, log_id, chain, checksum, format_version)


@dataclass(frozen=True)
class Frame:
    offset: int
    previous: int
    checksum: int
    payload: memoryview

    @property
    def start(self) -> int:
        """The payload's offset in the file."""
        return self.offset + FRAME.size

    @property
    def end(self) -> int:
        return self.start + len(self.payload)


def encode_frame(payload: bytes, previous: int, seed: int) -> tuple[bytes, int]:
    """(frame, checksum). The payload's length must be a multiple of 8."""
    fixed = struct.pack("<II", len(payload), previous)
    checksum = zlib.crc32(payload, zlib.crc32(fixed, seed))
    return MARKER_BYTES + fixed + struct.pack("<I", checksum) + payload, checksum


def read_frame(data: Buffer, offset: int, seed: int) -> Frame | None:
    """The frame at an offset, or None if there is no valid one."""
    if offset + FRAME.size > len(data):
        return None
    marker, length, previous, checksum = FRAME.unpack_from(data, offset)
    start = offset + FRAME.size
    if marker != MARKER or length % ALIGN or start + length > len(data):
        return None
    payload = memoryview(data)[start : start + length]
    if zlib.crc32(payload, zlib.crc32(struct.pack("<II", length, previous), seed)) != checksum:
        return None
    return Frame(offset, previous, checksum, payload)


def frames(data: Buffer, offset: int, seed: int, chain: int) -> Iterator[Frame]:
    """Frames starting at an offset, up to the first one that is invalid or breaks the chain."""
    while (frame := read_frame(data, offset, seed)) is not None and frame.previous == chain:
        yield frame
        chain, offset = frame.checksum, frame.end


def next_frame(data: Buffer, offset: int, seed: int) -> Frame | None:
    """The first valid frame at or after an offset."""
    window = bytes(data[offset:])
    place = window.find(MARKER_BYTES)
    while place >= 0:
        if frame := read_frame(data, offset + place, seed):
            return frame
        place = window.find(MARKER_BYTES, place + 1)
    return None


# --- Records: what a frame holds ---
#
# The records in a frame, one after another, each with facts (JSON) and arrays.
#
#     record   kind u8, 3 zero bytes | number u32 | facts u32 | body u32 | checksum u32 | 0 u32 | facts | arrays
#
# `number` is the rollout's number (in TOKENS: the count of rows). Facts and every array are padded to 8 bytes, so arrays can
# be used in place in the memory map. The record's checksum is for readers of a single rollout, who do not read the frame.
#
#     BEGIN         names, prompt_ids                          a rollout exists
#     TOKENS        rows of any rollouts, column by column
#     FINISH        names, stop, prompt_ids, all its columns   from here on it counts; complete in a single record
#     NOTE          later facts, such as a reward
#     SIGNAL        a teacher's scores
#     ENVIRONMENT   order, call, result; of a step of an episode: first order and call, then order and result
#     LINK          the place of its FINISH in a sampler log, and the facts for the index
#     LOG           the state of a sampler log; `number` is the log's number


BEGIN, TOKENS, FINISH, NOTE, SIGNAL, ENVIRONMENT, LINK, LOG = range(1, 9)
KINDS = {
    BEGIN: "begin",
    TOKENS: "tokens",
    FINISH: "finish",
    NOTE: "note",
    SIGNAL: "signal",
    ENVIRONMENT: "environment",
    LINK: "link",
    LOG: "log",
}
RECORD = struct.Struct("<B3xIIIII")
CHECKED = struct.Struct("<BIII")

TOKEN_COLUMNS: tuple[tuple[str, str], ...] = (  # per token, besides its rollout; as in `Rollout`
    ("response_ids", "<i4"),
    ("logprob", "<f4"),
    ("logprob_sampled", "<f4"),
    ("logprob_stop", "<f4"),
    ("version", "<i4"),
    ("author", "u1"),
)
ROW_COLUMNS: tuple[tuple[str, str], ...] = (("rollout", "<u4"), *TOKEN_COLUMNS)
Row = tuple[int, int, float, float, float, int, int]  # a token in memory: the values of ROW_COLUMNS
Columns = dict[str, np.ndarray]  # many tokens, read from a log: ROW_COLUMNS
PACKED = np.dtype([(name, kind) for name, kind in ROW_COLUMNS], align=True)  # many tokens in memory, row by row


@dataclass(frozen=True)
class Record:
    kind: int
    number: int
    facts: dict[str, Any]
    data: memoryview  # the arrays
    offset: int  # of the record in its segment
    size: int  # of the whole record

    def arrays(self, layout: Sequence[tuple[str, str, Sequence[int]]]) -> dict[str, np.ndarray]:
        """Arrays of a known layout (name, dtype, shape), as views of the memory map."""
        found, start = {}, 0
        for name, dtype, shape in layout:
            count = math.prod(shape)
            found[name] = np.frombuffer(self.data, dtype=dtype, count=count, offset=start).reshape(tuple(shape))
            size = count * np.dtype(dtype).itemsize
            start += size + -size % ALIGN
        return found


def encode_record(kind: int, number: int, facts: Mapping[str, Any] | None, arrays: Sequence[np.ndarray] = ()) -> bytes:
    text = json.dumps(facts, separators=(",", ":")).encode() if facts else b""
    parts = [text, *(array.tobytes() for array in arrays)]
    body = b"".join(part + bytes(-len(part) % ALIGN) for part in parts)
    checksum = zlib.crc32(body, zlib.crc32(CHECKED.pack(kind, number, len(text), len(body))))
    return RECORD.pack(kind, number, len(text), len(body), checksum, 0) + body


def records_in(payload: memoryview, start: int) -> Iterator[Record]:
    """The records of a verified frame. `start`: the payload's offset in the file."""
    at = 0
    while at < len(payload):
        kind, number, size, length, _, _ = RECORD.unpack_from(payload, at)
        body = payload[at + RECORD.size : at + RECORD.size + length]
        facts = json.loads(bytes(body[:size])) if size else {}
        yield Record(kind, number, facts, body[size + -size % ALIGN :], start + at, RECORD.size + length)
        at += RECORD.size + length


def require_known(record: Record, path: Path) -> None:
    if record.kind not in KINDS:
        raise FormatError(
            f"{path}, byte {record.offset}: a record of kind {record.kind}, which this version of opd does not know."
        )


def begin_record(number: int, names: Mapping[str, Any], prompt_ids: np.ndarray) -> bytes:
    return encode_record(BEGIN, number, {**names, "prompt": int(prompt_ids.size)}, [prompt_ids.astype("<i4")])


def prompt_of(record: Record) -> np.ndarray:
    return record.arrays([("prompt_ids", "<i4", (record.facts["prompt"],))])["prompt_ids"]


def packed(items: Sequence[Row | np.ndarray]) -> np.ndarray:
    """Single tokens and arrays of tokens, joined in order, `PACKED`."""
    return joined_tokens(
        [
            part
            for single, group in groupby(items, lambda item: type(item) is tuple)
            for part in ([np.array(list(group), dtype=PACKED)] if single else cast("Iterator[np.ndarray]", group))
        ]
    )


def joined_tokens(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate as bytes, since numpy would copy field by field."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part.view("u1") for part in parts]).view(PACKED)


def tokens_record(rows: np.ndarray) -> bytes:
    """`rows`: tokens of any rollouts, `PACKED`."""
    return encode_record(TOKENS, rows.size, None, [rows[name] for name, _ in ROW_COLUMNS])


def token_columns(record: Record) -> dict[str, np.ndarray]:
    return record.arrays([(name, kind, (record.number,)) for name, kind in ROW_COLUMNS])


def finish_record(
    number: int, names: Mapping[str, Any], stop: str, prompt_ids: np.ndarray, columns: np.ndarray
) -> bytes:
    """`columns`: its tokens, `PACKED`."""
    facts = {**names, "stop": stop, "prompt": int(prompt_ids.size), "tokens": int(columns.size)}
    return encode_record(
        FINISH, number, facts, [prompt_ids.astype("<i4"), *(columns[name] for name, _ in TOKEN_COLUMNS)]
    )


def finished_arrays(record: Record) -> dict[str, np.ndarray]:
    """`prompt_ids` and the columns of a FINISH record."""
    count = record.facts["tokens"]
    columns = [(name, kind, (count,)) for name, kind in TOKEN_COLUMNS]
    return record.arrays([("prompt_ids", "<i4", (record.facts["prompt"],)), *columns])


def signal_record(number: int, facts: Mapping[str, Any], values: np.ndarray | TopK, mask: np.ndarray) -> bytes:
    """`facts` has role, kind, teacher, teacher_version, view, spans."""
    arrays = {"mask": np.asarray(mask, dtype=bool)}
    extra: dict[str, Any] = {}
    if isinstance(values, TopK):
        arrays |= {name: np.asarray(getattr(values, name)) for name in ("ids", "logprobs", "tail", "stop_logprob")}
        extra["fingerprint"] = values.fingerprint
    else:
        arrays["values"] = np.asarray(values)
    layout = [(name, array.dtype.str, array.shape) for name, array in arrays.items()]
    return encode_record(SIGNAL, number, {**facts, **extra, "arrays": layout}, list(arrays.values()))


def signal_values(record: Record) -> tuple[np.ndarray | TopK, np.ndarray]:
    """(values, mask), as copies."""
    arrays = {name: np.array(array) for name, array in record.arrays(record.facts["arrays"]).items()}
    mask = arrays.pop("mask")
    if "values" in arrays:
        return arrays["values"], mask
    return TopK(**arrays, fingerprint=record.facts["fingerprint"]), mask


# --- Group commit ---
#
# A thread writes and syncs added items together, at most once per interval, one frame at a time: a crash can tear at most
# one frame. Sampling never waits for the disk; only `flush` does.


class GroupCommit:
    """Collects items and makes them durable in groups with `write`.

    With an interval of 0 there is no thread: `flush` writes.
    """

    def __init__(self, write: Callable[[list[Any]], None], interval_s: float) -> None:
        self._write, self.interval_s = write, interval_s
        self._items: list[Any] = []
        self._changed = threading.Condition()
        self._accepted = self._durable = 0
        self._urgent = self._closing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.writing = threading.Lock()  # held while a frame is written

    def add(self, item: Any) -> None:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._items.append(item)
            self._accepted += 1
            if self.interval_s and (self._thread is None or len(self._items) == 1):
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="opd-store", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def flush(self, wait: bool = True) -> None:
        """Return once everything added so far is durable. Without `wait`, leave the writing to the thread, if there is one."""
        if self._closing:
            return
        if not wait and self.interval_s:
            if self._failure is not None:
                raise self._failure
            return
        if self._thread is None:
            self._write_here()
            return
        with self._changed:
            wanted = self._accepted
            self._urgent = True
            self._changed.notify_all()
            while self._durable < wanted:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()

    def close(self) -> None:
        """Write the remaining items and stop the thread."""
        try:
            self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()
                self._thread = None

    def _write_here(self) -> None:
        with self.writing:  # taken before the items, so that two threads write theirs in order
            if self._failure is not None:
                raise self._failure
            with self._changed:
                batch, self._items = self._items, []
            if not batch:
                return
            try:
                self._write(batch)
            except BaseException as error:  # nothing may be written after a failed frame
                self._failure = error
                raise
            with self._changed:
                self._durable += len(batch)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closing)
                if not self._items:
                    return
                self._changed.wait_for(lambda: self._urgent or self._closing, timeout=self.interval_s)
                batch, self._items, self._urgent = self._items, [], False
            try:
                with self.writing:
                    self._write(batch)
            except BaseException as error:  # raised again in the caller's thread
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._durable += len(batch)
                self._changed.notify_all()


# --- The segments of a log ---


SEGMENT_BYTES = 64 << 20


class Place(NamedTuple):
    segment: int
    offset: int


BEFORE_START = Place(-1, 0)  # before the first segment
EMPTY = Place(0, HEADER.size)  # after the header of the first segment


@dataclass(frozen=True)
class Position:
    """The end of a log. An index or a checkpoint records it, to verify later that nothing before it was lost."""

    segment: int
    offset: int
    checksum: int
    frame: int  # offset of the last frame; 0: the segment has none yet
    log: str  # the log's id

    @property
    def place(self) -> Place:
        return Place(self.segment, self.offset)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Position:
        return cls(**value)


START = Position(-1, 0, 0, 0, "")


class SegmentLog:
    """A log of segments. `scan` reads it and finds its end; `open_for_writing` continues from there."""

    def __init__(
        self,
        directory: Path,
        files: Files,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        sync: bool = True,
        id: bytes = b"",
        format: int = FORMAT,
    ) -> None:
        """`id`: the id that the log must have; empty: any. `format`: the format of new segments."""
        self.directory, self.segment_bytes, self.sync, self.format = directory, segment_bytes, sync, format
        self._meant = id
        self._files = files
        self._maps: dict[int, Buffer] = {}
        self._copied: list[int] | None = None  # if set, only these segments exist, and they are read from memory
        self._file: AppendFile | None = None
        self.id = id
        self.first = self.chain = 0  # the first segment that remains, and its chain: see `Base`
        self.end = START
        self.torn: tuple[Path, int, int] | None = None  # file, byte and length of a torn tail
        self.failure: StoreError | None = None

    # Opening

    def segments(self) -> int:
        """The number of the last segment plus one. A gap in the numbers is an error."""
        found = segment_numbers(self.directory) if self._copied is None else self._copied
        numbers = [number for number in found if number >= self.first]
        if self.first and not numbers:
            raise StoreError(f"{self.path(self.first)}, byte 0: the segment is missing.")
        for expected, number in enumerate(numbers, self.first):
            if number != expected:
                raise StoreError(
                    f"{self.path(expected)}, byte 0: the segment is missing, but {self.path(number).name} is there."
                )
        if numbers:
            self.id = read_segment_header(self.map(self.first), self.path(self.first)).log_id
            if self._meant not in (b"", self.id):
                raise StoreError(f"{self.path(self.first)}, byte 16: this segment belongs to another log.")
        return self.first + len(numbers)

    def scan(self, start: Position = START) -> Iterator[tuple[int, Frame]]:
        """(segment, frame) from `start` to the end. Verifies every checksum and every link of the chain."""
        count = self.segments()
        if start is not START:
            self.end = start
        for number in range(max(start.segment, self.first), count):
            data, path = self.map(number), self.path(number)
            header = self.header(number, data)
            self.format = max(self.format, header.format)
            if number != start.segment:
                if header.chain != (self.chain if number == self.first else self.end.checksum):
                    raise StoreError(f"{path}, byte 24: this segment does not follow the one before it.")
                self.end = self._position(number, HEADER.size, header.checksum, 0)
            for frame in frames(data, self.end.offset, self.seed, self.end.checksum):
                yield number, frame
                self.end = self._position(number, frame.end, frame.checksum, frame.offset)
            self._tail(number, data, last=number == count - 1)

    def holds(self, position: Position) -> bool:
        """Whether the log contains the exact frame that ended at this position."""
        if position.segment < 0:
            return True
        count = self.segments()
        if (
            position.log != self.id.hex()
            or position.segment >= count
            or len(data := self.map(position.segment, position.offset)) < position.offset
        ):
            return False
        header = self.header(position.segment, data)
        if not position.frame:
            return header.checksum == position.checksum
        frame = read_frame(data, position.frame, self.seed)
        return frame is not None and (frame.end, frame.checksum) == (position.offset, position.checksum)

    def before(self, place: Place) -> Position:
        """The end of the log just before the frame at this place was written."""
        frame = read_frame(self.map(place.segment), place.offset, self.seed)
        if frame is None:
            raise StoreError(
                f"{self.path(place.segment)}, byte {place.offset}: the frame is damaged. Try `opd store check`."
            )
        return self._position(place.segment, place.offset, frame.previous, 0)

    def _position(self, segment: int, offset: int, checksum: int, frame: int) -> Position:
        return Position(segment, offset, checksum, frame, self.id.hex())

    def header(self, number: int, data: Buffer) -> SegmentHeader:
        path = self.path(number)
        header = read_segment_header(data, path)
        if header.number != number:
            raise StoreError(f"{path}, byte 12: its header says segment {header.number}: the files were renamed.")
        if header.log_id != self.id:
            raise StoreError(f"{path}, byte 16: this segment belongs to another log.")
        return header

    def _tail(self, number: int, data: Buffer, last: bool) -> None:
        """Check the bytes after the last good frame: nothing, a torn write (cut before the next write), or damage."""
        offset, path = self.end.offset, self.path(number)
        if offset == len(data):
            return
        later = next_frame(data, offset, self.seed)
        if later is not None or not last:
            follows = f"a good one follows at byte {later.offset}" if later else "other segments follow"
            raise StoreError(
                f"{path}, byte {offset}: the frame is damaged, and {follows}. `opd store repair` saves the rest."
            )
        self.torn = (path, offset, len(data) - offset)

    # Reading

    def path(self, number: int) -> Path:
        return self.directory / SEGMENT_NAME.format(number)

    def map(self, number: int, size: int = 0) -> Buffer:
        """A memory map of a segment. It is mapped again if the known map is shorter than `size`."""
        known = self._maps.get(number)
        if known is not None and len(known) >= max(size, 1):
            return known
        try:
            with self.path(number).open("rb") as file:
                length = os.fstat(file.fileno()).st_size
                found: Buffer = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ) if length else b""
        except FileNotFoundError:
            raise StoreError(f"{self.path(number)}, byte 0: the segment is missing.") from None
        self._maps[number] = found
        return found  # not `self._maps[number]`: another thread may have stored a shorter one

    def read(self, place: Place, size: int) -> Record:
        """The record at this place. Verifies its checksum, and in a sampler log that the segment belongs to this log."""
        data, offset = self.map(place.segment, place.offset + size), place.offset
        if self._meant:
            self.header(place.segment, data)
        if offset + RECORD.size > len(data):
            raise StoreError(f"{self.path(place.segment)}, byte {offset}: the file ends before this record does.")
        kind, number, facts_size, length, checksum, _ = RECORD.unpack_from(data, offset)
        body = memoryview(data)[offset + RECORD.size : offset + RECORD.size + length]
        head = CHECKED.pack(kind, number, facts_size, length)
        if len(body) < length or kind not in KINDS or zlib.crc32(body, zlib.crc32(head)) != checksum:
            raise StoreError(
                f"{self.path(place.segment)}, byte {offset}: the record is damaged. Try `opd store check`."
            )
        facts = json.loads(bytes(body[:facts_size])) if facts_size else {}
        return Record(kind, number, facts, body[facts_size + -facts_size % ALIGN :], offset, RECORD.size + length)

    def copy_in(self) -> None:
        """Read the log into memory, then sync its files. Its writer is another process, which may still be running."""
        self._copied = segment_numbers(self.directory)
        for number in self._copied:
            self._maps[number] = self.path(number).read_bytes()
            file = self._files.append(self.path(number))
            file.sync()
            file.close()
        if self._copied:
            self._files.sync_directory(self.directory)

    # Writing

    def open_for_writing(self) -> None:
        """Cut a torn tail, remove partial files, and continue after the last good frame; or start the first segment.

        Existing data is synced first, since a killed process may have left it unsynced.
        """
        try:
            self._files.make_directory(self.directory)
            for partial in self.directory.glob("*.partial"):
                self._files.remove(partial)
            self.delete_before(self.first)
            if self.end is START:
                self.id = self._meant or os.urandom(8)
                self._start_segment(0, 0)
                return
            self._file = self._files.append(self.path(self.end.segment))
            if self._file.size > self.end.offset:
                self._file.truncate(self.end.offset)
                self._maps.pop(self.end.segment, None)
            self._file.sync()
            self._files.sync_directory(self.directory)
        except OSError as error:
            raise self._fail(error, self.end.offset) from error

    def append(self, payload: bytes, format: int = FORMAT) -> Place:
        """Write one frame and sync it; returns the place of its payload. A failure changes nothing durable.

        `format`: the minimum format of its segment; if the current segment has a lower one, a new one is started.
        """
        if self.failure is not None:
            raise self.failure
        assert self._file is not None
        offset = self._file.size
        try:
            if offset >= self.segment_bytes or self.format < format:
                self.format = max(self.format, format)
                self._start_segment(self.end.segment + 1, self.end.checksum)
                offset = self._file.size
            frame, checksum = encode_frame(payload, self.end.checksum, self.seed)
            self._file.write(frame)
            if self.sync:
                self._file.sync()
        except OSError as error:
            raise self._fail(error, offset) from error
        self.end = self._position(self.end.segment, self._file.size, checksum, offset)
        return Place(self.end.segment, self.end.offset - len(payload))

    def delete_before(self, first: int) -> None:
        """Delete the segments before `first`. Their replacement (`base.bin`) must be durable."""
        if gone := [number for number in segment_numbers(self.directory) if number < first]:
            self.first, self.chain = first, self.header(first, self.map(first)).chain
            for number in gone:
                self._maps.pop(number, None)
                self._files.remove(self.path(number))
            self._files.sync_directory(self.directory)

    def _start_segment(self, number: int, chain: int) -> None:
        """Sync the previous segment, then create the new one atomically with its header."""
        header = SegmentHeader.make(number, self.id, chain, self.format)
        if self._file is not None:
            self._file.sync()
        self._files.create(self.path(number), [header.encode()])
        if self._file is not None:
            self._file.close()
        self._file = self._files.append(self.path(number))
        self.end = self._position(number, HEADER.size, header.checksum, 0)

    @property
    def seed(self) -> int:
        return zlib.crc32(self.id)

    def _fail(self, error: OSError, offset: int) -> StoreError:
        """Truncate the torn frame, so that the file can be opened, and block all further writes."""
        path = self.path(max(self.end.segment, 0))
        try:
            if self._file is not None and self._file.size > self.end.offset:
                self._file.truncate(self.end.offset)
        except OSError:
            pass  # a torn tail; the next writer cuts it
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            "Free some space "
            "(lower checkpoint.keep, set store.hidden: false, or move the run directory to a larger disk)"
            if full
            else "Check the disk"
        )
        self.failure = StoreError(
            f"{path}, byte {offset}: {'the disk is full' if full else 'writing failed'} ({error.strerror}). "
            f"What was durable is kept. {advice}, then `opd resume`."
        )
        return self.failure

    def flush(self) -> None:
        """Sync what was written, whatever the `fsync` setting."""
        if self._file is not None and self.failure is None:
            try:
                self._file.sync()
            except OSError as error:
                raise self._fail(error, self.end.offset) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
