"""The segmented log: append a commit, read a record, verify the chain. It knows frames, not what is in them."""

from __future__ import annotations

import errno
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from opd.errors import StoreError
from opd.store.files import AppendFile, Files
from opd.store.frames import (
    FORMAT,
    HEADER,
    Buffer,
    Frame,
    SegmentHeader,
    encode_frame,
    frames,
    next_frame,
    read_frame,
    read_segment_header,
    segment_name,
    segment_numbers,
)

SEGMENT_BYTES = 64 << 20


class Place(NamedTuple):
    segment: int
    offset: int


NOWHERE = Place(-1, 0)  # before the first segment
EMPTY = Place(0, HEADER.size)  # behind the header of the first segment


@dataclass(frozen=True)
class Position:
    """The end of a log: what an index or a checkpoint notes, to see later that nothing before it was lost."""

    segment: int
    offset: int
    checksum: int
    frame: int  # where the last frame begins; 0: the segment has none yet
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
    """`scan` reads it from a place on and finds its end; `open_for_writing` goes on from there."""

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
        """`id`: that it has to have; else the one it was given when it was started. `format`: of segments that are started."""
        self.directory, self.segment_bytes, self.sync, self.format = directory, segment_bytes, sync, format
        self._meant = id
        self._files = files
        self._maps: dict[int, Buffer] = {}
        self._copied: list[int] | None = None  # segments that are read from memory, and no others
        self._file: AppendFile | None = None
        self.id = id
        self.first = self.chain = 0  # of a log whose first segments were given back: `opd.store.reclaim`
        self.end = START
        self.torn: tuple[Path, int, int] | None = None  # file, byte and length of a tail that a torn write left
        self.failure: StoreError | None = None

    # Opening

    def segments(self) -> int:
        """One more than the number of the last segment; a gap in their numbers is an error."""
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
        """(segment, frame) from a known end of the log on.

        Every checksum is verified, every link of the chain followed.
        """
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
        """Whether the log has the very frame that ended at this position."""
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
        """The end of the log as it was when the frame at this place was written."""
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
        """What lies behind the last good frame: nothing, a torn write (cut before writing goes on), or damage."""
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
        return self.directory / segment_name(number)

    def map(self, number: int, size: int = 0) -> Buffer:
        """A segment, mapped; mapped again once it has grown beyond `size`."""
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
        return found  # another thread may have put a shorter one there meanwhile

    def copy_in(self) -> None:
        """Read all of it into memory, then sync that: a log that a process of its own has written, which may not be gone yet."""
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
        """Cut a torn tail, remove half-made files, and go on behind the last good frame; or start the first segment.

        What is there is synced first: a process that was killed may have left it to the operating system alone.
        """
        try:
            self._files.make_directory(self.directory)
            for partial in self.directory.glob("*.partial"):
                self._files.remove(partial)
            self.give_back(self.first)
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
        """Write one frame and sync it; returns where its payload begins. Nothing durable is touched if that fails.

        `format`: that its segment has to have at least; a new one is started where it has not.
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

    def give_back(self, first: int) -> None:
        """Remove the segments before this one. What stands for them is durable."""
        if gone := [number for number in segment_numbers(self.directory) if number < first]:
            self.first, self.chain = first, self.header(first, self.map(first)).chain
            for number in gone:
                self._maps.pop(number, None)
                self._files.remove(self.path(number))
            self._files.sync_directory(self.directory)

    def _start_segment(self, number: int, chain: int) -> None:
        """The one before is whole and synced; the new one gets its name only with its header on the disk."""
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
        """Take back the torn frame, so that the file can be opened, and refuse all further writing."""
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
            else "See to the disk"
        )
        self.failure = StoreError(
            f"{path}, byte {offset}: {'the disk is full' if full else 'writing failed'} ({error.strerror}). "
            f"What was durable is kept. {advice}, then `opd resume`."
        )
        return self.failure

    def flush(self) -> None:
        """Sync what was written, whatever the policy."""
        if self._file is not None and self.failure is None:
            try:
                self._file.sync()
            except OSError as error:
                raise self._fail(error, self.end.offset) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
