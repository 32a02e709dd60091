"""The records in a frame, one after another, each with facts (JSON) and arrays.

    record   kind u8, 3 zero bytes | number u32 | facts u32 | body u32 | checksum u32 | 0 u32 | facts | arrays

`number` is the rollout's number (in TOKENS: the count of rows). Facts and every array are padded to 8 bytes, so arrays can
be used in place in the memory map. The record's checksum is for readers of a single rollout, who do not read the frame.

    BEGIN         names, prompt_ids                          a rollout exists
    TOKENS        rows of any rollouts, column by column
    FINISH        names, stop, prompt_ids, all its columns   from here on it counts; complete in a single record
    NOTE          later facts, such as a reward
    SIGNAL        a teacher's scores
    ENVIRONMENT   order, call, result
    LINK          the place of its FINISH in a sampler log, and the facts for the index
    LOG           the state of a sampler log; `number` is the log's number
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np

from opd.common.errors import StoreError
from opd.records import TopK
from opd.store.log import ALIGN, Buffer, FormatError

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

COLUMNS: tuple[tuple[str, str], ...] = (  # per token, besides its rollout; as in `Rollout`
    ("response_ids", "<i4"),
    ("logprob", "<f4"),
    ("logprob_sampled", "<f4"),
    ("logprob_stop", "<f4"),
    ("version", "<i4"),
    ("author", "u1"),
)
ROW_COLUMNS: tuple[tuple[str, str], ...] = (("rollout", "<u4"), *COLUMNS)
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
            start += _padded(count * np.dtype(dtype).itemsize)
        return found


def encode_record(kind: int, number: int, facts: Mapping[str, Any] | None, arrays: Sequence[np.ndarray] = ()) -> bytes:
    text = json.dumps(facts, separators=(",", ":")).encode() if facts else b""
    parts = [_pad(text), *(_pad(array.tobytes()) for array in arrays)]
    body = b"".join(parts)
    checksum = zlib.crc32(body, zlib.crc32(CHECKED.pack(kind, number, len(text), len(body))))
    return RECORD.pack(kind, number, len(text), len(body), checksum, 0) + body


def decode_record(data: Buffer, offset: int, where: str) -> Record:
    """The record at an offset of a segment. Verifies its checksum."""
    if offset + RECORD.size > len(data):
        raise StoreError(f"{where}, byte {offset}: the file ends before this record does.")
    kind, number, size, length, checksum, _ = RECORD.unpack_from(data, offset)
    body = memoryview(data)[offset + RECORD.size : offset + RECORD.size + length]
    head = CHECKED.pack(kind, number, size, length)
    if len(body) < length or kind not in KINDS or zlib.crc32(body, zlib.crc32(head)) != checksum:
        raise StoreError(f"{where}, byte {offset}: the record is damaged. Try `opd store check`.")
    facts = json.loads(bytes(body[:size])) if size else {}
    return Record(kind, number, facts, body[_padded(size) :], offset, RECORD.size + length)


def split(payload: memoryview, start: int) -> Iterator[Record]:
    """The records of a verified frame. `start`: the payload's offset in the file."""
    at = 0
    while at < len(payload):
        kind, number, size, length, _, _ = RECORD.unpack_from(payload, at)
        body = payload[at + RECORD.size : at + RECORD.size + length]
        facts = json.loads(bytes(body[:size])) if size else {}
        yield Record(kind, number, facts, body[_padded(size) :], start + at, RECORD.size + length)
        at += RECORD.size + length


def require_known(record: Record, path: Path) -> None:
    if record.kind not in KINDS:
        raise FormatError(
            f"{path}, byte {record.offset}: a record of kind {record.kind}, which this version of opd does not know."
        )


# --- One function per kind of record ---


def begin(number: int, names: Mapping[str, Any], prompt_ids: np.ndarray) -> bytes:
    return encode_record(BEGIN, number, {**names, "prompt": int(prompt_ids.size)}, [prompt_ids.astype("<i4")])


def prompt_of(record: Record) -> np.ndarray:
    return record.arrays([("prompt_ids", "<i4", (record.facts["prompt"],))])["prompt_ids"]


def packed(items: Sequence[Row | np.ndarray]) -> np.ndarray:
    """Single tokens and arrays of tokens, joined in order, `PACKED`."""
    return one_behind_the_other(
        [
            part
            for single, group in groupby(items, lambda item: type(item) is tuple)
            for part in ([np.array(list(group), dtype=PACKED)] if single else cast("Iterator[np.ndarray]", group))
        ]
    )


def one_behind_the_other(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate as bytes, since numpy would copy field by field."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([part.view("u1") for part in parts]).view(PACKED)


def tokens(rows: np.ndarray) -> bytes:
    """`rows`: tokens of any rollouts, `PACKED`."""
    return encode_record(TOKENS, rows.size, None, [rows[name] for name, _ in ROW_COLUMNS])


def rows_of(record: Record) -> dict[str, np.ndarray]:
    return record.arrays([(name, kind, (record.number,)) for name, kind in ROW_COLUMNS])


def finish(number: int, names: Mapping[str, Any], stop: str, prompt_ids: np.ndarray, columns: np.ndarray) -> bytes:
    """`columns`: its tokens, `PACKED`."""
    facts = {**names, "stop": stop, "prompt": int(prompt_ids.size), "tokens": int(columns.size)}
    return encode_record(FINISH, number, facts, [prompt_ids.astype("<i4"), *(columns[name] for name, _ in COLUMNS)])


def finished_arrays(record: Record) -> dict[str, np.ndarray]:
    """`prompt_ids` and the columns of a FINISH record."""
    count = record.facts["tokens"]
    columns = [(name, kind, (count,)) for name, kind in COLUMNS]
    return record.arrays([("prompt_ids", "<i4", (record.facts["prompt"],)), *columns])


def note(number: int, facts: Mapping[str, Any]) -> bytes:
    return encode_record(NOTE, number, facts)


def signal(number: int, facts: Mapping[str, Any], values: np.ndarray | TopK, mask: np.ndarray) -> bytes:
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


def environment(number: int, order: int, call: Any, result: Any) -> bytes:
    return encode_record(ENVIRONMENT, number, {"order": order, "call": call, "result": result})


def link(number: int, facts: Mapping[str, Any]) -> bytes:
    return encode_record(LINK, number, facts)


def sampler_log(number: int, state: Sequence[Any]) -> bytes:
    return encode_record(LOG, number, {"state": list(state)})


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGN)
