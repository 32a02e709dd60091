"""Reading a log that may be damaged: everything in it that proves itself, and where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opd.errors import StoreError
from opd.store.files import Files
from opd.store.frames import HEADER, FormatError, Frame, next_frame, read_frame, read_segment_header, segment_numbers
from opd.store.index import load_index
from opd.store.log import Position, SegmentLog
from opd.store.reclaim import load_base


@dataclass(frozen=True)
class Damage:
    """A place where the log does not hold. `torn`: what a crash leaves at the end, which is no damage."""

    path: Path
    offset: int
    length: int
    why: str
    torn: bool = False

    def __str__(self) -> str:
        return f"{self.path}, byte {self.offset}: {self.why}"


class Salvage:
    """Walks all segments; `frames` gives good frames and damages in the order of the log."""

    def __init__(self, directory: Path, id: bytes = b"", witness: Position | None = None) -> None:
        """`id` and `witness`: of the log of a sampler, which has no index: what it has to be, and what was durable in it."""
        self.directory = directory
        self.log = SegmentLog(directory, Files())
        self.base = load_base(directory)
        if self.base is not None:
            self.log.first, self.log.chain = self.base.first, self.base.chain
        self.numbers = [number for number in segment_numbers(directory) if number >= self.log.first]
        loaded = load_index(directory / "index.bin")
        self.index = loaded if isinstance(loaded, str) else "whole"
        self.saved = None if isinstance(loaded, str) else loaded[0]
        self.witness: Position | None = witness if isinstance(loaded, str) else loaded[1]
        self.log.id = id or self._find_id()
        if self.saved is not None and self.witness is not None and self.witness.log != self.log.id.hex():
            self.saved, self.witness, self.index = None, None, "of another log"

    def frames(self) -> Iterator[tuple[int, Frame | Damage]]:
        """(segment, good frame or damage)."""
        self._chain: int | None = self.log.chain  # what the next link must name; None: unknown, behind damage
        for number in range(self.log.first, max(self.numbers, default=-1) + 1):
            if number in self.numbers:
                for item in self._segment(number):
                    yield number, item
            else:
                yield number, Damage(self.log.path(number), 0, 0, "the segment is missing")
                self._chain = None
        if (lost := self._unseen()) is not None:
            yield self.numbers[-1] if self.numbers else 0, lost

    def _segment(self, number: int) -> Iterator[Frame | Damage]:
        data, path, offset = self.log.map(number), self.log.path(number), HEADER.size
        try:
            header = self.log.header(number, data)
            if self._chain not in (None, header.chain):
                yield Damage(path, 24, 0, "this segment does not follow the one before it")
            self._chain = header.checksum
        except FormatError:
            raise
        except StoreError as error:
            yield Damage(path, 0, min(offset, len(data)), str(error).split(": ", 1)[1].split(". ")[0])
            self._chain = None
        while offset < len(data):
            frame = read_frame(data, offset, self.log.seed)
            if frame is None:
                later = next_frame(data, offset, self.log.seed)
                end = len(data) if later is None else later.offset
                torn = later is None and number == self.numbers[-1] and not self._saw(number, offset)
                why = "the tail of a torn write" if torn else "damaged"
                yield Damage(path, offset, end - offset, f"{why}, {end - offset} bytes", torn)
                offset, self._chain = end, None
                continue
            if self._chain not in (None, frame.previous):
                yield Damage(path, offset, 0, "this frame does not follow the one before it")
            yield frame
            offset, self._chain = frame.end, frame.checksum

    def _saw(self, number: int, offset: int) -> bool:
        """Whether the saved index saw this byte durable."""
        seen = self.witness
        return seen is not None and seen.log == self.log.id.hex() and seen.place > (number, offset)

    def _unseen(self) -> Damage | None:
        """What the saved index saw durable and the log no longer has."""
        seen = self.witness
        if seen is None or (self.log.id and seen.log != self.log.id.hex()):
            return None
        path = self.log.path(seen.segment)
        size = path.stat().st_size if path.is_file() else 0
        if size >= seen.offset:
            return None
        return Damage(path, size, seen.offset - size, f"the index saw this segment reach byte {seen.offset}")

    def _find_id(self) -> bytes:
        """The log's id: from a header that holds, else the index, else the one under which a frame proves itself."""
        for number in self.numbers:
            try:
                return read_segment_header(self.log.map(number), self.log.path(number)).log_id
            except FormatError:
                raise
            except StoreError:
                continue
        if self.witness is not None:
            return bytes.fromhex(self.witness.log)
        for number in self.numbers:
            raw = bytes(self.log.map(number)[16:24])
            for candidate in _near(raw):
                self.log.id = candidate
                if next_frame(self.log.map(number)[:65536], HEADER.size, self.log.seed):
                    return candidate
        return b""


def _near(raw: bytes) -> Iterator[bytes]:
    """The id as it stands, then with any one byte changed."""
    yield raw
    for place in range(len(raw)):
        for value in range(256):
            yield raw[:place] + bytes([value]) + raw[place + 1 :]
