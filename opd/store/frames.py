"""Segments and frames: how commits lie in a file, and how a torn tail is told from damage.

    segment  header | frame | frame | …
    header   magic (8) | format u32 | number u32 | log id (8) | chain u32 | checksum u32
    frame    marker u32 | length u32 | previous u32 | checksum u32 | payload (length bytes, a multiple of 8)

A frame is one commit. Its checksum is a CRC-32 of length, previous and payload, seeded with the log's id; `previous`
is the checksum of the frame before it (of the segment's header, for the first). A header's `chain` is the last
checksum of the segment before. So a frame proves itself alone, and its place by the chain.

The writer syncs every frame before it writes the next (`fsync: commit`), and a segment gets its name only when its
header is on the disk. Hence the rule: behind a frame that does not hold, one later frame that proves itself shows that
the bad one had been durable: damage. Nothing provable behind it, in the last segment: a torn write, which is cut.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from opd.errors import StoreError

MAGIC = b"opd-log\n"
FORMAT = 2
LINKED_FORMAT = 3  # of segments that may name logs of samplers, and of these logs
HEADER = struct.Struct("<8sII8sII")
FRAME = struct.Struct("<IIII")
MARKER = 0x7D0F5E9B
MARKER_BYTES = struct.pack("<I", MARKER)
ALIGN = 8

Buffer = bytes | memoryview | mmap.mmap


class FormatError(StoreError):
    """A log of a newer opd: nothing about it can be said, so nothing is called damaged."""


def segment_name(number: int) -> str:
    return f"segment-{number:06d}.log"


def segment_numbers(directory: Path) -> list[int]:
    """Which segments there are, in order."""
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
    chain: int  # last checksum of the segment before; 0 for the first
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
    """A segment without a whole header is never a torn write: it got its name after its header was durable."""
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
        """Where the payload begins in the file."""
        return self.offset + FRAME.size

    @property
    def end(self) -> int:
        return self.start + len(self.payload)


def encode_frame(payload: bytes, previous: int, seed: int) -> tuple[bytes, int]:
    """(frame, checksum). The payload's length is already a multiple of 8."""
    fixed = struct.pack("<II", len(payload), previous)
    checksum = zlib.crc32(payload, zlib.crc32(fixed, seed))
    return MARKER_BYTES + fixed + struct.pack("<I", checksum) + payload, checksum


def read_frame(data: Buffer, offset: int, seed: int) -> Frame | None:
    """The frame at an offset, or None where there is none that proves itself."""
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
    """Frames from an offset on, as long as each proves itself and its place."""
    while (frame := read_frame(data, offset, seed)) is not None and frame.previous == chain:
        yield frame
        chain, offset = frame.checksum, frame.end


def next_frame(data: Buffer, offset: int, seed: int) -> Frame | None:
    """The first frame at or behind an offset that proves itself, whatever lies between."""
    window = bytes(data[offset:])
    place = window.find(MARKER_BYTES)
    while place >= 0:
        if frame := read_frame(data, offset + place, seed):
            return frame
        place = window.find(MARKER_BYTES, place + 1)
    return None
