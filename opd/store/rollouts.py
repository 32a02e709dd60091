"""The rollout store. The sampler writes to it; scoring and training read from it.

index           one row per rollout, in columns; queries: `store.where(…)`, Parquet
state           the index and the unfinished rollouts, built by replaying the log
sampler logs    logs that sampler processes write, and that the store links to
RolloutStore    reading, writing, settling sampler logs, recovery
calls           results of environments and of graders, replayed on resume
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, overload

import numpy as np

from opd.common.errors import StoreError, UserError
from opd.records import (
    Author,
    EnvironmentRecord,
    Rollout,
    SampledToken,
    Signal,
    SignalKind,
    StopReason,
    TokenColumns,
    TopK,
)
from opd.store.log import (
    BEFORE_START,
    BEGIN,
    EMPTY,
    ENVIRONMENT,
    FINISH,
    FORMAT,
    KINDS,
    LINK,
    LINKED_FORMAT,
    LOG,
    NOTE,
    PACKED,
    ROW_COLUMNS,
    SEGMENT_BYTES,
    SIGNAL,
    START,
    TOKEN_COLUMNS,
    TOKENS,
    Columns,
    Files,
    Frame,
    GroupCommit,
    Place,
    Position,
    Record,
    Row,
    SegmentLog,
    begin_record,
    encode_record,
    finish_record,
    finished_arrays,
    joined_tokens,
    packed,
    prompt_of,
    records_in,
    require_known,
    segment_numbers,
    signal_record,
    signal_values,
    token_columns,
    tokens_record,
)

# --- The index: one row per rollout, in columns. Rollouts can be found and queried without reading payload ---
#
# It is saved next to the log as `index.bin`, with a checksum, when a store is closed and as it grows; opening maps it.
# It is only a cache: if it is missing or damaged, it is rebuilt from the log; if it is older than the log, it is
# updated from the log. If it is newer than the log, durable frames have been lost, and opening the store is an error.
#
#     index.bin   magic (8) | header length u64 | header (JSON) | sections, each aligned to 64 bytes | checksum u64


INDEX_MAGIC = b"opd-idx\n"
INDEX_FORMAT = 2
CHUNK = 8 << 20
STOPS: tuple[str | None, ...] = (None, "stop", "length", "env")  # codes of the column `stop`; 0: unfinished
INDEX_COLUMNS = {
    "segment": "<u4", "offset": "<u8", "size": "<u4",  # the FINISH record; if unfinished, the frame of BEGIN and 0
    "length": "<u4", "prompt_length": "<u4", "visit": "<u4", "sample": "<u4",
    "domain": "<u4", "source": "<u4", "teacher": "<u4",  # vocabulary codes
    "version_min": "<i4", "version_max": "<i4", "reward": "<f8", "stop": "u1",
    "unit": "<u8",  # hash of the pair, group or id: an objective must see all rollouts of a unit together
}  # fmt: skip
RATIO_COLUMNS = {  # how far student and teacher are apart in an answer: see `RolloutStore.note_disagreement`
    "kl": "<f4",
    "log_ratio": "<f4",
    "largest_ratio": "<f4",
    "ratio_at": "<i4",
}
UNKNOWN = {"kl": np.nan, "log_ratio": np.nan, "largest_ratio": np.nan, "ratio_at": -1}
RATIO_FACTS = ("kl", "log_ratio", "largest", "at")  # in a note, in the order of the columns
DISAGREEMENT = "disagreement"  # a note: by role
LINK_COLUMNS = {
    "log": "<u4",
    "linked": "<u4",
}  # for a FINISH in a sampler log: the log's number, the segment of the LINK
ATTACHED_COLUMNS = {"rollout": "<u4", "what": "<u4", "segment": "<u4", "offset": "<u8", "size": "<u4"}  # signals, calls
VOCABULARIES = ("domain", "source", "teacher", "what")


class LogState(NamedTuple):
    """The state of a sampler log. If it is settled, with its end; anything after the end is ignored."""

    what: Literal["open", "settled", "gone"]
    segment: int = -1
    offset: int = 0

    @property
    def place(self) -> Place:
        return Place(self.segment, self.offset)


class Table:
    """Columns of equal length that grow together."""

    def __init__(self, dtypes: Mapping[str, str], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self._arrays = dict(arrays) if arrays else {name: np.zeros(0, dtype=kind) for name, kind in dtypes.items()}
        self._owned = False
        self.count = len(next(iter(self._arrays.values())))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name][: self.count]

    def append(self, **values: Any) -> int:
        if not self._owned or self.count == len(next(iter(self._arrays.values()))):
            self._grow(max(1024, 2 * self.count))
        for name, value in values.items():
            self._arrays[name][self.count] = value
        self.count += 1
        return self.count - 1

    def set(self, row: int, **values: Any) -> None:
        if not self._owned:
            self._grow(max(64, self.count))
        for name, value in values.items():
            self._arrays[name][row] = value

    def _grow(self, capacity: int) -> None:
        for name, array in self._arrays.items():
            grown = np.zeros(capacity, dtype=array.dtype)
            grown[: self.count] = array[: self.count]
            self._arrays[name] = grown
        self._owned = True


class Texts:
    """One text per row. Saved texts stay in the map; new and changed ones are in memory."""

    def __init__(self, blob: np.ndarray | None = None, ends: np.ndarray | None = None) -> None:
        self._blob = np.zeros(0, dtype="u1") if blob is None else blob
        self._ends = np.zeros(0, dtype="<u8") if ends is None else ends
        self._new: dict[int, str] = {}

    def __getitem__(self, row: int) -> str:
        if row in self._new or row >= len(self._ends):
            return self._new.get(row, "")
        start = int(self._ends[row - 1]) if row else 0
        return self._blob[start : int(self._ends[row])].tobytes().decode()

    def __setitem__(self, row: int, text: str) -> None:
        self._new[row] = text

    def sections(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        if not self._new and count == len(self._ends):
            return self._blob, self._ends
        kept = min(min(self._new, default=count), len(self._ends))  # rows before the first new or changed one
        encoded = [self[row].encode() for row in range(kept, count)]
        start = int(self._ends[kept - 1]) if kept else 0
        ends = start + np.cumsum([len(text) for text in encoded], dtype="<u8")
        blob = np.concatenate([self._blob[:start], np.frombuffer(b"".join(encoded), dtype="u1")])
        return blob, np.concatenate([self._ends[:kept], ends]).astype("<u8")


class Vocabulary(dict[str, int]):
    """A few distinct texts and their codes; a new text gets the next code. Code 0 is the empty text."""

    def __init__(self, texts: Sequence[str] = ("",)) -> None:
        super().__init__({text: code for code, text in enumerate(texts)})
        self.texts = list(texts)

    def __missing__(self, text: str) -> int:
        self.texts.append(text)
        self[text] = len(self)
        return self[text]


class Index(Table):
    """The facts about each rollout: numbers and codes in columns, names and notes as texts."""

    def __init__(self, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        super().__init__(INDEX_COLUMNS | RATIO_COLUMNS | LINK_COLUMNS, arrays)
        self.attached = Table(ATTACHED_COLUMNS)  # signals and calls
        self.names = Texts()  # JSON: id, prompt_id, group, pair
        self.facts = Texts()  # JSON: notes, except a reward, which has a column
        self.vocabularies = {name: Vocabulary() for name in VOCABULARIES}
        self.logs: dict[int, LogState] = {}  # sampler logs by number, including deleted ones

    def text(self, column: str, row: int) -> str:
        return self.vocabularies[column].texts[int(self[column][row])]

    def finish(self, row: int, place: Place, size: int, stop: str, versions: np.ndarray) -> None:
        low, high = (int(versions.min()), int(versions.max())) if versions.size else (-1, -1)
        self.set(
            row,
            segment=place.segment,
            offset=place.offset,
            size=size,
            length=versions.size,
            stop=STOPS.index(stop),
            version_min=low,
            version_max=high,
        )

    def link(self, row: int, facts: Mapping[str, Any], linked: int) -> None:
        """Record that a rollout was finished in a sampler log."""
        names = ("log", "segment", "offset", "size", "length", "version_min", "version_max")
        self.set(row, linked=linked, **{name: facts[name] for name in names}, stop=STOPS.index(facts["stop"]))

    def own_segments(self, count: int) -> np.ndarray:
        """The segment of the store's own log that each rollout needs: that of its finish, begin or link."""
        if not self.logs:
            return self["segment"][:count]
        return np.where(self["log"][:count] > 0, self["linked"][:count], self["segment"][:count])

    def gone(self, count: int) -> np.ndarray:
        """A mask of the rollouts in deleted sampler logs."""
        gone = [
            number for number, state in list(self.logs.items()) if state.what == "gone"
        ]  # a copy: more logs may be added meanwhile
        return np.isin(self["log"][:count], gone) if gone else np.zeros(count, dtype=bool)

    def last_linked(self, log: int) -> Place:
        """The end of the last linked record in a sampler log. Everything up to there was durable."""
        count = self.count
        mine = np.flatnonzero(self["log"][:count] == log)
        columns = (self[name][mine].tolist() for name in ("segment", "offset", "size"))
        ends = (Place(segment, offset + size) for segment, offset, size in zip(*columns, strict=True))
        return max(ends, default=BEFORE_START)

    def note(self, row: int, facts: Mapping[str, Any]) -> None:
        renamed = {"reward" if key == "score" else key: value for key, value in facts.items()}  # its name in older runs
        if DISAGREEMENT in renamed:
            renamed[DISAGREEMENT] = self._note_ratios(row, renamed[DISAGREEMENT])
        merged = {name: value for name, value in {**self.notes(row), **renamed}.items() if value != {}}
        reward = merged.get("reward")
        if isinstance(reward, (int, float)) and not isinstance(reward, bool):
            self.set(row, reward=float(merged.pop("reward")))
        elif "reward" in merged:
            self.set(row, reward=np.nan)
        if merged or self.facts[row]:
            self.facts[row] = json.dumps(merged) if merged else ""

    def _note_ratios(self, row: int, by_role: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Put those of the role `teacher` into the columns; returns the others."""
        found = by_role.get("teacher", {})
        names = zip(RATIO_COLUMNS, RATIO_FACTS, strict=True)
        self.set(row, **{column: found.get(fact, UNKNOWN[column]) for column, fact in names})
        return {role: facts for role, facts in by_role.items() if role != "teacher"}

    def notes(self, row: int) -> dict[str, Any]:
        reward = float(self["reward"][row])
        held = {} if np.isnan(reward) else {"reward": reward}
        kept = json.loads(text) if (text := self.facts[row]) else {}
        return {**held, **{"reward" if key == "score" else key: value for key, value in kept.items()}}

    def attach(self, row: int, what: str, place: Place, size: int) -> None:
        self.attached.append(
            rollout=row, what=self.vocabularies["what"][what], segment=place.segment, offset=place.offset, size=size
        )

    def find_attached(self, rows: np.ndarray, what: str) -> Iterator[tuple[int, Place, int]]:
        """(row, place, size) in the order they were logged."""
        code = self.vocabularies["what"].get(what)
        if code is None:
            return
        count = self.attached.count  # more may be attached meanwhile
        of_rows = np.isin(self.attached["rollout"][:count], rows)
        mine = np.flatnonzero((self.attached["what"][:count] == code) & of_rows)
        columns = [self.attached[name][mine].tolist() for name in ("rollout", "segment", "offset", "size")]
        for row, segment, offset, size in zip(*columns, strict=True):
            yield row, Place(segment, offset), size

    # The file

    def save(self, path: Path, files: Files, position: Position, **further: Any) -> None:
        """`further`: plain JSON for the header."""
        count = self.count
        columns = INDEX_COLUMNS | RATIO_COLUMNS | (LINK_COLUMNS if self.logs else {})
        sections = {f"rows/{name}": self[name] for name in columns}
        sections |= {f"attached/{name}": self.attached[name] for name in ATTACHED_COLUMNS}
        for kind, texts in (("names", self.names), ("facts", self.facts)):
            sections[f"{kind}/blob"], sections[f"{kind}/ends"] = texts.sections(count)
        header = json.dumps(
            {
                "format": INDEX_FORMAT,
                "position": position.to_json(),
                "count": count,
                "vocabularies": {name: vocabulary.texts for name, vocabulary in self.vocabularies.items()},
                "sections": [[name, array.dtype.str, len(array)] for name, array in sections.items()],
                **({"logs": sorted([number, *state] for number, state in self.logs.items())} if self.logs else {}),
                **further,
            }
        ).encode()
        files.create(path, _chunks(header, list(sections.values())))


def _chunks(header: bytes, arrays: list[np.ndarray]) -> Iterator[bytes]:
    checksum, at = 0, 0
    head = INDEX_MAGIC + struct.pack("<Q", len(header)) + header
    for part in (np.frombuffer(head, dtype="u1"), *arrays):
        raw = np.ascontiguousarray(part).view("u1").reshape(-1)
        for start in range(0, len(raw), CHUNK):
            chunk = raw[start : start + CHUNK].tobytes()
            checksum = zlib.crc32(chunk, checksum)
            yield chunk
        filling = bytes(-(at + len(raw)) % 64)
        checksum, at = zlib.crc32(filling, checksum), at + len(raw) + len(filling)
        yield filling
    yield struct.pack("<Q", checksum)


def load_index(path: Path) -> tuple[Index, Position] | str:
    """(saved index, end of the log at that time), or why the index cannot be used."""
    found = read_index(path)
    return found if isinstance(found, str) else found[:2]


def read_index(path: Path) -> tuple[Index, Position, dict[str, Any]] | str:
    """Like `load_index`, and the header."""
    if not path.is_file():
        return "missing"
    if not _has_checksum(path):
        return "damaged"
    data = np.asarray(np.memmap(path, dtype="u1", mode="r"))
    (length,) = struct.unpack("<Q", data[8:16].tobytes())
    header = json.loads(data[16 : 16 + length].tobytes())
    if header["format"] != INDEX_FORMAT:
        return "of another format"
    sections, at = {}, -(-(16 + length) // 64) * 64
    for name, dtype, count in header["sections"]:
        size = count * np.dtype(dtype).itemsize
        sections[name] = data[at : at + size].view(dtype)
        at += -(-size // 64) * 64
    logs = {number: LogState(*state) for number, *state in header.get("logs", ())}
    rows = {name: sections[f"rows/{name}"] for name in (INDEX_COLUMNS | (LINK_COLUMNS if logs else {}))}
    count = header["count"]
    rows |= {  # older runs have none
        name: sections.get(f"rows/{name}", np.full(count, UNKNOWN[name], dtype=kind))
        for name, kind in RATIO_COLUMNS.items()
    }
    index = Index({name: np.zeros(count, dtype=kind) for name, kind in LINK_COLUMNS.items()} | rows)
    index.logs = logs
    index.attached = Table(ATTACHED_COLUMNS, {name: sections[f"attached/{name}"] for name in ATTACHED_COLUMNS})
    index.names = Texts(sections["names/blob"], sections["names/ends"])
    index.facts = Texts(sections["facts/blob"], sections["facts/ends"])
    index.vocabularies = {name: Vocabulary(texts) for name, texts in header["vocabularies"].items()}
    return index, Position.from_json(header["position"]), header


def _has_checksum(path: Path) -> bool:
    """Whether the file's checksum is correct. Reads in chunks, so that a large index does not fill memory."""
    checksum, held = 0, b""
    with path.open("rb") as file:
        if file.read(len(INDEX_MAGIC)) != INDEX_MAGIC:
            return False
        checksum = zlib.crc32(INDEX_MAGIC)
        while chunk := file.read(CHUNK):
            held += chunk
            checksum, held = zlib.crc32(held[:-8], checksum), held[-8:]
    return len(held) == 8 and struct.unpack("<Q", held)[0] == checksum


# --- Queries on the index: `run.rollouts.where(domain="math", reward=0)` ---
#
# Only `load`, iteration and `to_parquet` read payload.


CODED = ("domain", "source", "teacher")
NUMBERS = ("length", "prompt_length", "visit", "sample", "version_min", "version_max", "reward", *RATIO_COLUMNS)
FLOATS = ("reward", "kl", "log_ratio", "largest_ratio")
NAMED = ("id", "prompt_id", "group", "pair")
KNOWN = (*CODED, *NUMBERS, "stop", *NAMED)
BATCH = 256  # rollouts in memory at once


class Selection:
    """Finished rollouts that match conditions, oldest first. It only holds row numbers.

    A condition is a value to match (`reward=None`: no reward was given), or a function. For a number, the function gets
    the whole column and returns a mask (`length=lambda n: n > 100`); for a text, it gets one value at a time. A name
    that is not a column is looked up in the notes.
    """

    def __init__(self, store: RolloutStore, rows: np.ndarray) -> None:
        self._store, self.rows = store, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{len(self)} of {len(self._store)} rollouts>"

    def __iter__(self) -> Iterator[Rollout]:
        for start in range(0, len(self.rows), BATCH):
            yield from self._store.load_rows(self.rows[start : start + BATCH])

    @overload
    def __getitem__(self, place: int) -> Rollout: ...
    @overload
    def __getitem__(self, place: slice) -> Selection: ...
    def __getitem__(self, place: int | slice) -> Rollout | Selection:
        if isinstance(place, slice):
            return Selection(self._store, self.rows[place])
        return self._store.load_rows([self.rows[place]])[0]

    @property
    def ids(self) -> list[str]:
        return [_names(self._store.index, row)[0] for row in self.rows]

    def where(self, **conditions: Any) -> Selection:
        rows = self.rows
        for name, condition in conditions.items():
            rows = rows[_mask(self._store.index, rows, name, condition)]
        return Selection(self._store, rows)

    def sorted(self, name: str, *, ascending: bool = False) -> Selection:
        """Sorted by a number of the index, the largest first; unknown values last. `largest_ratio` is sorted by its size."""
        if name not in NUMBERS:
            raise UserError(f"unknown number {name!r}; known: {', '.join(NUMBERS)}.")
        values = self._store.index[name][self.rows].astype(np.float64)
        values = np.abs(values) if name == "largest_ratio" else values
        order = np.argsort(values if ascending else -values, kind="stable")  # NaN sorts last
        return Selection(self._store, self.rows[order])

    def column(self, name: str) -> np.ndarray:
        """One column of the index for these rollouts. Texts have dtype object."""
        index = self._store.index
        if name in NUMBERS:
            return index[name][self.rows]
        if name in CODED:
            return np.array(index.vocabularies[name].texts, dtype=object)[index[name][self.rows]]
        if name == "stop":
            return np.array(STOPS, dtype=object)[index["stop"][self.rows]]
        if name in NAMED:
            return np.array([_names(index, row)[NAMED.index(name)] for row in self.rows], dtype=object)
        raise UserError(f"unknown column {name!r}; known: {', '.join(KNOWN)}.")

    def load(self) -> list[Rollout]:
        return self._store.load_rows(self.rows)

    def to_parquet(self, path: str | Path) -> None:
        """One line per rollout: the index's columns, its notes as JSON, and the per-token arrays as lists."""
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise UserError("to_parquet needs pyarrow: pip install 'opd[data]'") from None
        arrays = [
            ("prompt_ids", pa.int32()),
            ("response_ids", pa.int32()),
            ("logprob", pa.float32()),
            ("logprob_sampled", pa.float32()),
            ("logprob_stop", pa.float32()),
            ("version", pa.int32()),
            ("author", pa.uint8()),
        ]
        texts = [*NAMED, *CODED, "stop", "notes"]
        numbers = [(name, pa.float64() if name in FLOATS else pa.int64()) for name in NUMBERS]
        schema = pa.schema(
            [*((name, pa.string()) for name in texts), *numbers, *((name, pa.list_(kind)) for name, kind in arrays)]
        )
        with pq.ParquetWriter(str(path), schema) as writer:
            for start in range(0, len(self.rows), BATCH):
                part = Selection(self._store, self.rows[start : start + BATCH])
                rollouts = part.load()
                columns: dict[str, Any] = {name: part.column(name) for name in (*NAMED, *CODED, "stop", *NUMBERS)}
                columns["notes"] = [json.dumps(self._store.index.notes(int(row))) for row in part.rows]
                columns |= {name: [getattr(rollout, name) for rollout in rollouts] for name, _ in arrays}
                for name in FLOATS:
                    columns[name] = [None if np.isnan(value) else float(value) for value in columns[name]]
                writer.write_table(
                    pa.table({name: pa.array(columns[name], schema.field(name).type) for name in schema.names})
                )


def _mask(index: Index, rows: np.ndarray, name: str, condition: Any) -> np.ndarray:
    if name in NUMBERS:
        values = index[name][rows]
        if callable(condition):
            return np.asarray(condition(values), dtype=bool)
        return np.isnan(values.astype(np.float64)) if condition is None else values == condition
    test = condition if callable(condition) else lambda value: value == condition
    if name in CODED:
        return _true(test, index.vocabularies[name].texts)[index[name][rows]]
    if name == "stop":
        return _true(test, STOPS)[index["stop"][rows]]
    if name in NAMED:
        return _true(test, [_names(index, row)[NAMED.index(name)] for row in rows])
    notes = [index.notes(int(row)) for row in rows]
    if len(rows) and not any(name in facts for facts in notes):
        raise UserError(f"{name!r} is neither a column ({', '.join(KNOWN)}) nor a note of any of these rollouts.")
    return np.array([name in facts and bool(test(facts[name])) for facts in notes], dtype=bool)


def _true(test: Callable[[Any], Any], values: Any) -> np.ndarray:
    return np.array([bool(test(value)) for value in values], dtype=bool)


def _names(index: Index, row: int) -> list[str]:
    return json.loads(index.names[int(row)])


def iterate(store: RolloutStore, batch: int = 256) -> Iterator[Rollout]:
    """Every finished rollout of a run, oldest first."""
    rows = store.readable()
    for start in range(0, len(rows), batch):
        yield from store.load_rows(rows[start : start + batch])


# --- The state of a log: its index and the unfinished rollouts, built by replaying records in order ---


CALLS = "environment"  # the kind of attached record
STEPS = "episode"  # the kind of a rollout's own steps in its environment, which are needed only while it is unfinished
NAMES = ("id", "prompt_id", "visit", "sample", "domain", "source", "group", "pair")


def names_of(record: Record) -> dict[str, Any]:
    """The facts that a rollout was begun with."""
    names = {name: record.facts[name] for name in NAMES}
    return {**names, "extras": record.facts["extras"]} if "extras" in record.facts else names


@dataclass
class UnfinishedRollout:
    """An unfinished rollout, with the tokens that are in the log."""

    number: int
    names: Mapping[str, Any]
    prompt_ids: np.ndarray
    parts: list[np.ndarray] = field(default_factory=list)  # its tokens, `PACKED`, one part per commit
    calls: int = 0
    frames: list[Columns] = field(default_factory=list)  # replayed frames that contain some of its tokens
    replayed: int = 0  # the number of its tokens in `frames`

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, `PACKED`. The fields are the columns."""
        if len(self.parts) > 1:
            self.parts = [joined_tokens(self.parts)]
        return self.parts[0] if self.parts else np.zeros(0, dtype=PACKED)

    def collect_frames(self) -> None:
        """Turn replayed frames into parts. Most rollouts are finished by the end of a log and never need this."""
        for columns in self.frames:
            self.parts.append(_chosen(columns, columns["rollout"] == self.number))
        self.frames, self.replayed = [], 0


@dataclass
class PendingRecord:
    """A record that waits to be written. A finish is encoded by the writing thread."""

    kind: int
    number: int
    data: bytes = b""
    facts: Any = None
    live: UnfinishedRollout | None = None
    versions: np.ndarray | None = None

    def encode(self) -> bytes:
        if self.live is not None:
            tokens = self.live.tokens
            self.versions = tokens["version"]
            self.data = finish_record(self.number, self.live.names, self.facts, self.live.prompt_ids, tokens)
        return self.data


def compose(
    batch: Sequence[Row | np.ndarray | PendingRecord], live: Mapping[int, UnfinishedRollout]
) -> list[tuple[bytes, PendingRecord | None]]:
    """Records of one frame: begins, then tokens, then the rest, so that no finish precedes its tokens."""
    rows = [item for item in batch if not isinstance(item, PendingRecord)]
    others = [item for item in batch if isinstance(item, PendingRecord)]
    parts: list[tuple[bytes, PendingRecord | None]] = [(item.encode(), item) for item in others if item.kind == BEGIN]
    if rows:
        tokens = packed(rows)
        parts.append((tokens_record(tokens), None))
        distribute_tokens(tokens, live)
    return parts + [(item.encode(), item) for item in others if item.kind != BEGIN]


def distribute_tokens(rows: np.ndarray, live: Mapping[int, UnfinishedRollout]) -> None:
    """Add tokens of any rollouts (`PACKED`) to their rollouts' parts, for the finish records."""
    order = np.argsort(rows["rollout"], kind="stable")
    tokens = rows.view(f"V{PACKED.itemsize}")[order].view(PACKED)
    numbers, starts = np.unique(tokens["rollout"], return_index=True)
    ends = [*starts[1:].tolist(), tokens.size]
    for number, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True):
        live[number].parts.append(tokens[start:end].copy())  # a view would keep all rows in memory


def take_tokens(record: Record, live: Mapping[int, UnfinishedRollout]) -> None:
    """Add a replayed TOKENS record to its unfinished rollouts."""
    columns = token_columns(record)
    numbers, counts = np.unique(columns["rollout"], return_counts=True)
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if (found := live.get(number)) is not None:
            found.frames.append(columns)
            found.replayed += count


class MissingRollout(StoreError, KeyError):
    __str__ = StoreError.__str__


class Numbers(dict[str, int]):
    """The number (row of the index) of each rollout, by id."""

    def __missing__(self, id: str) -> int:
        raise MissingRollout(f"rollout {id!r} is not in the store")


class State:
    def __init__(self, index: Index | None = None) -> None:
        self.index = index or Index()
        self.live: dict[int, UnfinishedRollout] = {}

    @cached_property
    def numbers(self) -> Numbers:
        """Built when first asked for, since queries do not need it."""
        return Numbers({json.loads(self.index.names[row])[0]: row for row in range(self.index.count)})

    def begin(self, names: Mapping[str, Any], prompt_ids: np.ndarray) -> UnfinishedRollout:
        index, unit = self.index, names["pair"] or names["group"] or names["id"]
        row = index.append(
            visit=names["visit"],
            sample=names["sample"],
            prompt_length=prompt_ids.size,
            domain=index.vocabularies["domain"][names["domain"]],
            source=index.vocabularies["source"][names["source"]],
            reward=np.nan,
            **UNKNOWN,
            version_min=-1,
            version_max=-1,
            unit=int.from_bytes(hashlib.blake2b(unit.encode(), digest_size=8).digest(), "little"),
        )
        index.names[row] = json.dumps([names["id"], names["prompt_id"], names["group"], names["pair"]])
        live = self.live[row] = UnfinishedRollout(row, names, np.array(prompt_ids, dtype=np.int32))
        if "numbers" in vars(self):
            self.numbers[names["id"]] = row
        return live

    # Replay

    def replay(self, segment: int, frame: Frame, where: str) -> None:
        """Apply a frame that is not in the index."""
        for record in records_in(frame.payload, frame.start):
            self._apply(record, Place(segment, frame.offset), f"{where}, byte {record.offset}")

    def replay_unfinished(self, frame: Frame) -> None:
        """Apply a frame that is in the index: only its records of unfinished rollouts are needed."""
        stops = self.index["stop"]
        for record in records_in(frame.payload, frame.start):
            if record.kind == TOKENS:
                take_tokens(record, self.live)
            elif record.kind != LOG and not stops[record.number]:
                if record.kind == BEGIN:
                    self._begin_live(record)
                elif record.kind == ENVIRONMENT:
                    self.live[record.number].calls += "call" in record.facts

    def unfinished_since(self, end: Position) -> Place:
        """The earliest begin of an unfinished rollout. Reading from there finds all tokens of unfinished rollouts."""
        open_rows = np.flatnonzero(self.index["stop"] == 0)
        places = zip(self.index["segment"][open_rows].tolist(), self.index["offset"][open_rows].tolist(), strict=True)
        return min((Place(segment, offset) for segment, offset in places), default=end.place)

    def _apply(self, record: Record, frame: Place, where: str) -> None:
        place = Place(frame.segment, record.offset)
        if record.kind not in KINDS:
            raise StoreError(f"{where}: a record of kind {record.kind}, which this version of opd does not know.")
        if record.kind == BEGIN:
            if record.number != len(self.index):
                raise StoreError(f"{where}: rollout {record.number} begins, but {len(self.index)} is next")
            live = self.begin(names_of(record), prompt_of(record))
            self.index.set(live.number, segment=frame.segment, offset=frame.offset)
            return
        if record.kind == TOKENS:
            take_tokens(record, self.live)
            return
        if record.kind == LOG:
            self.index.logs[record.number] = LogState(*record.facts["state"])
            return
        if record.number >= len(self.index):
            raise StoreError(f"{where}: a {KINDS[record.kind]} record of rollout {record.number}, which never began")
        if record.kind == FINISH:
            self._finish(record, place, where)
        elif record.kind == LINK:
            if self.live.pop(record.number, None) is None:
                raise StoreError(f"{where}: rollout {record.number} is linked after it was finished")
            self.index.link(record.number, record.facts, place.segment)
        else:
            self._apply_later(record, place)

    def _apply_later(self, record: Record, place: Place) -> None:
        """Apply a note, a signal or an environment call."""
        if record.kind == NOTE:
            self.index.note(record.number, record.facts)
        elif record.kind == SIGNAL:
            self.signal(record.number, record.facts, place, record.size)
        elif record.kind == ENVIRONMENT:
            self.index.attach(record.number, record.facts.get("of", CALLS), place, record.size)
            if record.number in self.live:
                self.live[record.number].calls += "call" in record.facts

    def signal(self, number: int, facts: Mapping[str, Any], place: Place, size: int) -> None:
        self.index.attach(number, f"{facts['role']}/{facts['kind']}", place, size)
        if facts["role"] == "teacher":
            self.index.set(number, teacher=self.index.vocabularies["teacher"][facts["teacher"]])

    def _begin_live(self, record: Record) -> None:
        names = names_of(record)
        self.live[record.number] = UnfinishedRollout(record.number, names, np.array(prompt_of(record)))

    def _finish(self, record: Record, place: Place, where: str) -> None:
        live = self.live.pop(record.number, None)
        if live is None or live.replayed != record.facts["tokens"]:
            stored = "a finished rollout" if live is None else f"{live.replayed} tokens"
            raise StoreError(
                f"{where}: rollout {record.number} finishes with {record.facts['tokens']} tokens, but the log has {stored}"
            )
        self.index.finish(record.number, place, record.size, record.facts["stop"], finished_arrays(record)["version"])

    def settle(self) -> None:
        """Call this after replaying the log."""
        for live in self.live.values():
            live.collect_frames()


def _chosen(columns: Columns, mask: np.ndarray) -> np.ndarray:
    """The masked tokens, `PACKED`."""
    tokens = np.empty(np.count_nonzero(mask), dtype=PACKED)
    for name, _ in ROW_COLUMNS:
        tokens[name] = columns[name][mask]
    return tokens


# --- Reading the index one rollout at a time ---


@dataclass(frozen=True)
class Entry:
    """The index's facts about one rollout.

    `stop` is None while it is unfinished; `length` is then the number of tokens in the log so far.
    """

    number: int
    id: str
    prompt_id: str
    visit: int
    sample: int
    domain: str
    source: str
    group: str
    pair: str
    prompt_length: int
    length: int
    stop: StopReason | None
    versions: tuple[int, int]  # oldest and newest policy among its tokens; (-1, -1): none
    teacher: str  # the teacher that scored it in the role `teacher`; empty: not scored yet
    notes: dict[str, Any]


def entry(state: State, number: int) -> Entry:
    index = state.index
    id, prompt_id, group, pair = json.loads(index.names[number])
    row = {name: index[name][number].item() for name in ("visit", "sample", "prompt_length", "length", "stop")}
    versions = (index["version_min"][number].item(), index["version_max"][number].item())
    if (live := state.live.get(number)) is not None:
        row["length"] = sum(part.size for part in live.parts)
        seen = [part["version"] for part in live.parts if part.size]
        if seen:
            versions = (min(int(part.min()) for part in seen), max(int(part.max()) for part in seen))
    return Entry(
        number=number,
        id=id,
        prompt_id=prompt_id,
        visit=row["visit"],
        sample=row["sample"],
        domain=index.text("domain", number),
        source=index.text("source", number),
        group=group,
        pair=pair,
        prompt_length=row["prompt_length"],
        length=row["length"],
        stop=cast("StopReason | None", STOPS[row["stop"]]),
        versions=versions,
        teacher=index.text("teacher", number),
        notes=index.notes(number),
    )


class Entries(Mapping[str, Entry]):
    """id -> entry, oldest first. Entries are created on access."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __len__(self) -> int:
        return len(self._state.index)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._state.numbers))  # more rollouts may begin meanwhile

    def __contains__(self, id: object) -> bool:
        return id in self._state.numbers

    def __getitem__(self, id: str) -> Entry:
        return entry(self._state, self._state.numbers[id])

    def values(self) -> Values:
        return Values(self)

    def number(self, id: str) -> int:
        return self._state.numbers[id]


class Values(ValuesView[Entry]):
    """Entries from oldest to newest; `reversed` works too."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(entries)
        self._state = entries._state

    def __iter__(self) -> Iterator[Entry]:
        return (entry(self._state, number) for number in range(len(self._state.index)))

    def __reversed__(self) -> Iterator[Entry]:
        return (entry(self._state, number) for number in reversed(range(len(self._state.index))))


# --- Sampler logs: rollouts/sampler-000001/segment-000000.log, … ---
#
# Each is written once, by one sampler process: BEGIN, TOKENS and FINISH records with the store's rollout numbers. It is never
# continued, and its torn tail is never cut. The store's own log says what in it counts (LINK and LOG, see `RolloutStore.settle`).
# Its id is derived from that log's id, so a foreign log is detected.


FOLDER = "sampler-"


def folder_of(store: Path, number: int) -> Path:
    return store / f"{FOLDER}{number:06d}"


def numbers_in(store: Path) -> list[int]:
    """The numbers of sampler logs that have at least one segment."""
    names = [path.name.removeprefix(FOLDER) for path in store.glob(f"{FOLDER}*") if segment_numbers(path)]
    return sorted(int(name) for name in names if name.isdigit())


def id_of(store: bytes, number: int) -> bytes:
    """The id of a sampler log. `store`: the id of the store's own log."""
    return hashlib.blake2b(store + number.to_bytes(4, "little"), digest_size=8).digest()


def link_facts(log: int, place: Place, size: int, stop: str, versions: np.ndarray) -> dict[str, Any]:
    """The facts of a LINK record about a FINISH in this log."""
    low, high = (int(versions.min()), int(versions.max())) if versions.size else (-1, -1)
    facts = {"log": log, "segment": place.segment, "offset": place.offset, "size": size, "stop": stop}
    return {**facts, "length": int(versions.size), "version_min": low, "version_max": high}


class SamplerLog:
    """Writes a sampler log. Tokens wait for the group commit, as in the store."""

    def __init__(
        self,
        directory: Path,
        number: int,
        id: bytes,
        *,
        commit_ms: int,
        sync: bool = True,
        segment_bytes: int = SEGMENT_BYTES,
        files: Files | None = None,
    ) -> None:
        self.number = number
        self._log = SegmentLog(
            directory, files or Files(), segment_bytes=segment_bytes, sync=sync, id=id, format=LINKED_FORMAT
        )
        if self._log.segments():
            raise StoreError(
                f"{directory}, byte 0: this sampler log exists already, and such a log is never continued. Use a new number."
            )
        self._log.open_for_writing()
        self._live: dict[int, UnfinishedRollout] = {}
        self._links: dict[int, dict[str, Any]] = {}
        self._commit = GroupCommit(self._write, commit_ms / 1e3)

    def begin(
        self, number: int, names: Mapping[str, Any], prompt_ids: np.ndarray, columns: Sequence[np.ndarray] | None = None
    ) -> None:
        """Begin a rollout of the store. `columns`: its existing tokens."""
        live = self._live[number] = UnfinishedRollout(number, dict(names), np.array(prompt_ids, dtype=np.int32))
        self._commit.add(PendingRecord(BEGIN, number, begin_record(number, live.names, live.prompt_ids)))
        if columns is not None:
            self.append(np.full(columns[0].size, number), columns)

    def append(self, numbers: np.ndarray | Sequence[int], columns: Sequence[Any]) -> None:
        """Add tokens of any rollouts. `columns`: as in `TOKEN_COLUMNS`."""
        rows = np.empty(len(numbers), dtype=PACKED)
        rows["rollout"] = numbers
        for (name, _), column in zip(TOKEN_COLUMNS, columns, strict=True):
            rows[name] = column
        if rows.size:
            self._commit.add(rows)

    def finish(self, number: int, stop: StopReason) -> None:
        self._commit.add(PendingRecord(FINISH, number, facts=stop, live=self._live[number]))

    def commit(self, sync: bool = False) -> None:
        """Request a group commit; with `sync`, wait until everything so far is durable."""
        self._commit.flush(wait=sync)

    def links(self, numbers: Iterable[int]) -> list[tuple[int, dict[str, Any]]]:
        """(number, link facts) of finished, durable rollouts. Each can be asked for once."""
        return [(number, self._links.pop(number)) for number in numbers]

    def close(self) -> None:
        try:
            self._commit.close()
            self._log.flush()
        finally:
            self._log.close()

    def _write(self, batch: list[Any]) -> None:
        parts = compose(batch, self._live)
        start = self._log.append(b"".join(part for part, _ in parts))
        offset = start.offset
        for part, item in parts:
            if item is not None and item.versions is not None:
                place = Place(start.segment, offset)
                self._links[item.number] = link_facts(self.number, place, len(part), item.facts, item.versions)
                del self._live[item.number]
            offset += len(part)


@dataclass
class LoggedRollout:
    """One rollout in a sampler log, finished or not."""

    names: Mapping[str, Any]
    finish: Record | None = None
    place: Place = BEFORE_START
    live: UnfinishedRollout | None = None

    def tokens(self) -> Mapping[str, np.ndarray]:
        """Its tokens, by column."""
        if self.finish is not None:
            return finished_arrays(self.finish)
        assert self.live is not None
        packed = self.live.tokens
        return {name: packed[name] for name, _ in TOKEN_COLUMNS}

    def extends(self, ours: np.ndarray) -> bool:
        """Whether its tokens begin with `ours` (`PACKED`), bit for bit."""
        theirs = self.tokens()
        return all(ours[name].tobytes() == theirs[name][: ours.size].tobytes() for name, _ in TOKEN_COLUMNS)


def held_in(log: SegmentLog) -> dict[int, LoggedRollout]:
    """The rollouts of a sampler log, by the store's numbers. Damage raises an error."""
    found: dict[int, LoggedRollout] = {}
    live: dict[int, UnfinishedRollout] = {}
    for segment, frame in log.scan():
        for record in records_in(frame.payload, frame.start):
            require_known(record, log.path(segment))
            if record.kind == BEGIN:
                one = live[record.number] = UnfinishedRollout(
                    record.number, names_of(record), np.array(prompt_of(record))
                )
                found[record.number] = LoggedRollout(one.names, live=one)
            elif record.kind == TOKENS:
                take_tokens(record, live)
            elif record.kind == FINISH:
                live.pop(record.number, None)
                found[record.number] = LoggedRollout(names_of(record), record, Place(segment, record.offset))
    for one in live.values():
        one.collect_frames()
    return found


# --- Deleted segments: `base.bin` replaces them ---
#
# It is an index like `index.bin`, saved before any segment is deleted, with the number of the first remaining segment and the
# checksum before it. The index keeps rows of deleted rollouts. If the process is killed in between, the next writer deletes
# the rest. Sampler logs are deleted whole, after a record in the store's own log.


BASE = "base.bin"


@dataclass(frozen=True)
class Base:
    first: int  # the first remaining segment
    chain: int  # the last checksum of the segment before it
    index: Index
    end: Position


def load_base(directory: Path) -> Base | None:
    path = directory / BASE
    found = read_index(path)
    if found == "missing":
        return None
    if isinstance(found, str):
        raise StoreError(
            f"{path}, byte 0: the file is {found}. It replaces segments whose tokens were deleted: restore it from a backup."
        )
    index, end, header = found
    return Base(header["first"], header["chain"], index, end)


def needed_rows(index: Index, boundary: int) -> np.ndarray:
    return (np.arange(len(index)) >= boundary) | (index["stop"] == 0)


def logs_not_needed(index: Index, boundary: int) -> list[int]:
    """Settled sampler logs in which no rollout from number `boundary` on was finished."""
    needed = set(np.unique(index["log"][needed_rows(index, boundary)]).tolist())
    return [number for number, state in index.logs.items() if state.what == "settled" and number not in needed]


def first_needed(index: Index, boundary: int, last: int) -> int:
    """The first segment that is still needed: by rollouts from `boundary` on, unfinished ones or calls; at most `last`."""
    needed = needed_rows(index, boundary)
    calls = index.vocabularies["what"].get(CALLS)
    attached = needed[index.attached["rollout"]] | (index.attached["what"] == (-1 if calls is None else calls))
    segments = [index.own_segments(len(index))[needed], index.attached["segment"][attached]]
    return int(min([last, *(found.min() for found in segments if found.size)]))


# --- Finishing an interrupted repair ---
#
# `repair` writes a clean log (`repaired.json` last), renames the damaged one away, then renames the clean one into its place.
# If it is killed between the two renames, the next process that opens the log does the last rename.


REPAIRED = "repaired.json"  # written by `opd store repair`: the log it came from, and what was lost
DAMAGED = ".damaged"


def repaired_name(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.repaired")


def pending_repair(directory: Path) -> Path | None:
    """The clean log that an interrupted repair has not yet renamed to this directory."""
    clean = repaired_name(directory)
    return clean if not directory.exists() and (clean / REPAIRED).is_file() else None


def finish_repair(directory: Path) -> None:
    """Finish an interrupted repair. Raises an error if only a damaged log is left, so that no new log is started."""
    clean = pending_repair(directory)
    if clean is not None:
        os.rename(clean, directory)
        Files().sync_directory(directory.parent)
    damaged = directory.with_name(directory.name + DAMAGED)
    if not directory.exists() and damaged.exists():
        raise StoreError(
            f"{directory}, byte 0: the log is missing, but {damaged.name} is there: a repair has lost its result. "
            f"Rename it to {directory.name}, and repair it again with `opd store repair`."
        )


# --- The store ---


INDEX = "index.bin"
LOGS_AT_ONCE = 64  # sampler logs that are mapped at the same time
INDEX_ROWS, INDEX_GROWTH = 10_000, 1.25  # the index is saved during a run when it has grown beyond this
HEAVY_BYTES = 128 << 20  # approximate bytes of signals in one frame
Fsync = Literal["commit", "never"]


class RolloutStore:
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
        self._samplers: dict[int, SegmentLog] = {}  # sampler logs opened for reading
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
            self._adopt_sampler_logs()

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
            self._commit.add(PendingRecord(BEGIN, live.number, begin_record(live.number, names, live.prompt_ids)))

    def append(self, token: SampledToken, author: Author = Author.STUDENT) -> None:
        """Add one sampled token. It is written with the next group commit."""
        id, value, logprob, sampled, stop, version, by = token
        number = self._open.get(id)
        if number is None:
            self._writable()
            raise self._not_open(id)
        self._commit.add((number, value, logprob, sampled, stop, version, int(author if by is None else by)))

    def append_many(self, tokens: TokenColumns, author: Author | np.ndarray = Author.STUDENT) -> None:
        """Add many tokens at once, of one rollout or of several. Only the lookup of their rollouts is done per token."""
        self._writable()
        ids, values, *rest = tokens
        rows = np.empty(len(values), dtype=PACKED)  # a copy: the caller's arrays may be used again
        try:
            numbers: Any = self._open[ids] if isinstance(ids, str) else list(map(self._open.__getitem__, ids))
        except KeyError as error:
            raise self._not_open(error.args[0]) from None
        given = (numbers, values, *rest, int(author) if isinstance(author, Author) else author)
        for (name, _), column in zip(ROW_COLUMNS, given, strict=True):
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
        self._writable()
        if id not in self._open:
            raise self._not_open(id)
        live = self._state.live[self._open.pop(id)]
        self._commit.add(PendingRecord(FINISH, live.number, facts=stop, live=live))

    def note(self, id: str, **facts: Any) -> None:
        """Attach later facts, such as the `reward`."""
        self._writable()
        number = self._state.numbers[id]
        data = encode_record(NOTE, number, facts)
        with self._changing:
            with self._lock:
                self._state.index.note(number, facts)
            self._commit.add(PendingRecord(NOTE, number, data))

    def note_disagreement(self, id: str, by_role: Mapping[str, Mapping[str, float]]) -> None:
        """Note how far student and teacher are apart in a rollout. By role, what is known of:

        kl          the mean KL(student || teacher) per token, in nats
        log_ratio   the mean of log student - log teacher at the sampled tokens, an estimate of it
        largest     the log-ratio of largest size, with its sign; at: the place of its token in the answer, from 0
        """
        self.note(id, **{DISAGREEMENT: by_role})

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
        number = self._state.numbers[id]
        facts = {
            "role": role,
            "kind": kind,
            "teacher": teacher,
            "teacher_version": teacher_version,
            "view": view,
            "spans": [list(span) for span in spans],
            "key": key,
        }
        data = signal_record(number, facts, values, mask)
        self._commit.add(PendingRecord(SIGNAL, number, data, facts))
        self._heavy += len(data)
        if self._heavy > HEAVY_BYTES:  # wait for the disk instead of filling the memory
            self._commit.flush()
            self._heavy = 0
        return True

    def record_environment(self, id: str, order: int, call: Any, result: Any) -> None:
        """Log a call and its result, both plain JSON. The call is about a rollout, such as a grader's.

        `order` counts from 0.
        """
        self._record_call(id, order, {"order": order, "call": call, "result": result})

    def record_call(self, id: str, order: int, call: Any) -> None:
        """Log that a call of a rollout to its environment begins. `record_result` logs its result."""
        self._record_call(id, order, {"order": order, "call": call, "of": STEPS})

    def record_result(self, id: str, order: int, result: Any) -> None:
        self._record_call(id, order, {"order": order, "result": result, "of": STEPS})

    def _record_call(self, id: str, order: int, facts: dict[str, Any]) -> None:
        self._writable()
        number = self._state.numbers[id]
        live = self._state.live[number] if id in self._open else None
        if live is not None and "call" in facts and order != live.calls:
            raise StoreError(f"rollout {id!r}: environment call {order} cannot be logged: call {live.calls} is next")
        try:
            data = encode_record(ENVIRONMENT, number, facts)
        except (TypeError, ValueError) as error:
            raise StoreError(f"rollout {id!r}: environment call {order} is not plain JSON ({error})") from None
        if live is not None:
            live.calls += "call" in facts
        self._commit.add(PendingRecord(ENVIRONMENT, number, data, facts.get("of", CALLS)))

    def commit(self, sync: bool = False) -> None:
        """Request a group commit; with `sync`, wait until everything so far is durable."""
        self._writable()
        self._commit.flush(wait=sync)
        if sync and self.index.count > self._saved_rows * INDEX_GROWTH + INDEX_ROWS:
            with self._exclusive():
                self._save_index()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """A block in which everything is durable and no other thread begins a rollout or writes."""
        with self._changing:
            self._commit.flush()
            with self._commit.writing:
                self._log.flush()
                yield

    def reclaim(self, boundary: int, until: int | None = None) -> int:
        """Delete segments and sampler logs that hold nothing about rollouts from number `boundary` on. Returns the count.

        Unfinished rollouts are kept. So are calls, since their costs count, and segments from `until` on, since a
        checkpoint names a frame there. The index keeps a row for every rollout.
        """
        self._writable()
        with self._exclusive():
            last = self._log.end.segment
            last = last if until is None else min(until, last)
            before, first = self._log.first, first_needed(self.index, boundary, last)
            if first > before:
                chain = self._log.header(first, self._log.map(first)).chain
                self.index.save(self.directory / BASE, self._files, self._log.end, first=first, chain=chain)
                self._log.delete_before(first)
            unneeded = logs_not_needed(self.index, boundary)
        with self._changing:
            for number in unneeded:
                self._note_log(number, LogState("gone"))
        if unneeded:
            with self._exclusive():  # makes the LOG records durable, whatever the `fsync` setting
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
                f"{path}: {error.strerror}. The log is intact, and the index will be rebuilt. Check the disk, then `opd resume`."
            ) from error
        self._saved_rows = len(self.index)

    def _write(self, batch: list[Row | np.ndarray | PendingRecord]) -> None:
        """Write one frame."""
        parts = compose(batch, self._state.live)
        linked = any(item is not None and item.kind in (LINK, LOG) for _, item in parts)
        start = self._log.append(b"".join(part for part, _ in parts), LINKED_FORMAT if linked else FORMAT)
        frame, offset = Place(start.segment, self._log.end.frame), start.offset
        with self._lock:
            for part, item in parts:
                if item is not None:
                    self._committed(item, frame, Place(start.segment, offset), len(part))
                offset += len(part)

    def _committed(self, item: PendingRecord, frame: Place, place: Place, size: int) -> None:
        """Update the index after a record is durable: its place, and whether the rollout is finished."""
        index = self._state.index
        if item.kind == BEGIN:
            index.set(item.number, segment=frame.segment, offset=frame.offset)
        elif item.kind == FINISH:
            assert item.versions is not None
            index.finish(item.number, place, size, item.facts, item.versions)
            del self._state.live[item.number]
        elif item.kind == LINK:
            index.link(item.number, item.facts, place.segment)
            del self._state.live[item.number]
        elif item.kind == SIGNAL:
            self._state.signal(item.number, item.facts, place, size)
        elif item.kind == ENVIRONMENT:
            index.attach(item.number, item.facts, place, size)

    def _not_open(self, id: str) -> StoreError:
        return StoreError(
            f"rollout {id!r} is finished already" if id in self.entries else f"rollout {id!r} was never begun"
        )

    def _writable(self) -> None:
        if self._read_only or self._closed:
            raise StoreError(f"{self.directory} was {'closed' if self._closed else 'opened read-only'}")

    # Reading

    def load(self, ids: Iterable[str]) -> list[Rollout]:
        """Load finished rollouts, as copies. Waits until their finish is durable."""
        return self.load_rows([self._state.numbers[id] for id in ids])

    def load_rows(self, rows: Iterable[int]) -> list[Rollout]:
        """Like `load`, by row of the index."""
        self._commit.flush()
        index, found = self.index, []
        for row in map(int, rows):
            place, number = Place(int(index["segment"][row]), int(index["offset"][row])), int(index["log"][row])
            own = int(index["linked"][row]) if number else place.segment
            if not index["stop"][row]:
                raise StoreError(f"rollout {entry(self._state, row).id!r} is not finished, so it cannot be read")
            if own < self._log.first or (number and index.logs[number].what == "gone"):
                raise StoreError(
                    f"rollout {entry(self._state, row).id!r}: its tokens were deleted (store.retain); only the index still has facts about it"
                )
            log = self._sampler(number) if number else self._log
            record = log.read(place, int(index["size"][row]))
            if record.kind != FINISH or record.number != row:
                raise StoreError(f"{log.path(place.segment)}, byte {place.offset}: not the record the index names")
            arrays: dict[str, Any] = {name: np.array(array) for name, array in finished_arrays(record).items()}
            facts = {name: value for name, value in record.facts.items() if name not in ("prompt", "tokens")}
            found.append(Rollout(**facts, **arrays))
        return found

    def partial(self, ids: Iterable[str]) -> list[Rollout]:
        """Unfinished rollouts with their durable tokens so far; `stop` is None."""
        self._commit.flush()
        unfinished = []
        for id in ids:
            live = self._state.live.get(self._state.numbers[id])
            if live is None:
                raise StoreError(f"rollout {id!r} is finished; `load` reads it")
            arrays: dict[str, Any] = {name: np.array(live.tokens[name]) for name, _ in TOKEN_COLUMNS}
            unfinished.append(Rollout(**live.names, prompt_ids=live.prompt_ids, stop=None, **arrays))
        return unfinished

    def where(self, **conditions: Any) -> Selection:
        """Finished rollouts by domain, source, teacher, reward, length, stop or a note: see `Selection`."""
        self._commit.flush()
        return Selection(self, self.readable()).where(**conditions)

    def __iter__(self) -> Iterator[Rollout]:
        """Every readable rollout, oldest first. Only a few are in memory at once."""
        return iter(self.where())

    @overload
    def __getitem__(self, place: int) -> Rollout: ...
    @overload
    def __getitem__(self, place: slice) -> Selection: ...
    def __getitem__(self, place: int | slice) -> Rollout | Selection:
        """Rollouts by their place in iteration order."""
        return self.where()[place]

    def readable(self) -> np.ndarray:
        """Rows of the index whose rollouts are finished, and whose tokens were not deleted."""
        count = len(self.index)  # more rollouts may begin meanwhile
        kept = (self.index.own_segments(count) >= self._log.first) & ~self.index.gone(count)
        return np.flatnonzero((self.index["stop"][:count] != 0) & kept)

    def unfinished(self) -> list[str]:
        """Ids of unfinished rollouts, oldest first."""
        self._commit.flush()
        return [live.names["id"] for live in list(self._state.live.values())]

    def signals(self, ids: Iterable[str], role: str, kind: SignalKind) -> dict[str, Signal]:
        """The stored signals of these rollouts, by id. If a rollout was scored twice, the newest."""
        self._commit.flush()
        wanted = {self._state.numbers[id]: id for id in ids}
        kept: dict[str, Signal] = {}
        rows = np.array(list(wanted), dtype=np.int64)
        for row, place, size in self._state.index.find_attached(rows, f"{role}/{kind}"):
            if place.segment < self._log.first:
                continue  # deleted
            record = self._log.read(place, size)
            values, mask = signal_values(record)
            facts = record.facts
            spans = tuple(cast("tuple[int, int, int, int]", tuple(span)) for span in facts["spans"])
            said_by = (facts["teacher"], facts["teacher_version"], role, facts["view"])
            kept[wanted[row]] = Signal(*said_by, spans, values, mask, facts.get("key", ""))
        return kept

    def environment(self, id: str) -> list[EnvironmentRecord]:
        """A rollout's environment calls, in order. `finished` is false for a call whose result was never logged."""
        row, calls = self._state.numbers[id], dict[int, EnvironmentRecord]()
        found = list(self._attached([row], STEPS)) or list(
            self._attached([row], CALLS)
        )  # a grader's have their own order
        for _, facts in found:
            begun = calls.get(facts["order"])
            call = facts.get("call", None if begun is None else begun.call)
            calls[facts["order"]] = EnvironmentRecord(facts["order"], call, facts.get("result"), "result" in facts)
        return [calls[order] for order in sorted(calls)]

    def calls(self, rows: Iterable[int]) -> Iterator[tuple[int, EnvironmentRecord]]:
        """(row, call) about these rows of the index, in the order they were logged."""
        for row, facts in self._attached(rows, CALLS):
            yield row, EnvironmentRecord(facts["order"], facts["call"], facts["result"])

    def _attached(self, rows: Iterable[int], kind: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        self._commit.flush()
        for row, place, size in self._state.index.find_attached(np.array(list(rows), dtype=np.int64), kind):
            if place.segment >= self._log.first:
                yield row, self._log.read(place, size).facts

    @property
    def position(self) -> Position:
        """The durable end of the log. A checkpoint stores it, and passes it to `require` when it is loaded."""
        self._commit.flush()
        return self._log.end

    def require(self, position: Position, who: str, other: str = "") -> None:
        """Raise an error if the log has lost data that was durable when `who` was written.

        A repaired log is accepted, since the repair has reported its losses.
        """
        if self._log.holds(position) or position.log == self._repaired_from():
            return
        raise StoreError(
            f"{self._log.path(position.segment)}, byte {position.offset}: {who} was written when the log reached this "
            f"byte, and it no longer does: durable rollouts are lost. Restore the right files{other}."
        )

    def _repaired_from(self) -> str | None:
        path = self.directory / REPAIRED
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["from"]) if path.is_file() else None
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"{path}, byte 0: the file is damaged. Remove it if the log was never repaired.") from None

    def _sampler(self, number: int) -> SegmentLog:
        """A sampler log, opened for reading. Only a few stay open, since each segment's map holds a file descriptor."""
        log = self._samplers.get(number)
        if log is None:
            for other in list(self._samplers)[: max(len(self._samplers) + 1 - LOGS_AT_ONCE, 0)]:
                self._samplers.pop(other, None)
            id = id_of(self._log.id, number)
            log = self._samplers.setdefault(number, SegmentLog(folder_of(self.directory, number), Files(), id=id))
        return log

    # Sampler logs
    #
    # LOG open       durable before a process may write into the new log of this number
    # LINK           a rollout was finished there; it counts once this record is durable, and its tokens were durable before
    # LOG settled    the store has taken everything useful; anything after this end is ignored
    # LOG gone       the log was deleted from the store; its files are removed next
    #
    # Settling links finished rollouts, and copies the tokens of unfinished ones into the store's own log. This is durable
    # before anybody else resumes these rollouts, so whatever a process writes after its trainer has ended is never read.

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
        return self._state.live[self._state.numbers[id]].names

    def sampler_log_id(self, number: int) -> bytes:
        return id_of(self._log.id, number)

    def link(self, row: int, facts: Mapping[str, Any]) -> None:
        """Record that a rollout is finished and durable in a sampler log. `facts`: see `link_facts`."""
        live = self._state.live[row]
        del self._open[live.names["id"]]
        self._commit.add(PendingRecord(LINK, row, encode_record(LINK, row, facts), facts))

    def settle(self, number: int) -> None:
        """Take everything useful from a sampler log. Its process is gone, or gets no more requests."""
        self._commit.flush()
        log = SegmentLog(folder_of(self.directory, number), self._files, id=self.sampler_log_id(number))
        log.copy_in()
        found = held_in(log)
        self._require_end(log, log.end.place, self.index.last_linked(number))
        for row, held in sorted(found.items()):
            self._adopt(row, held, log, number)
        with self._changing:
            self._note_log(number, LogState("settled", *log.end.place))
        self._commit.flush()

    def _adopt(self, row: int, held: LoggedRollout, log: SegmentLog, number: int) -> None:
        if row >= len(self.index) or json.loads(self.index.names[row])[0] != held.names["id"]:
            raise self._lost_data(f"rollout {held.names['id']!r}, which {log.directory.name} has, was begun here")
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
            for name, _ in TOKEN_COLUMNS:
                rows[name] = tokens[name][known:]
            self._commit.add(rows)

    def _note_log(self, number: int, state: LogState) -> None:
        self.index.logs[number] = state
        self._commit.add(PendingRecord(LOG, number, encode_record(LOG, number, {"state": list(state)})))

    def _lost_data(self, what: str) -> StoreError:
        """The error for lost data. A sampler only writes what the store's log already knows durably: the log has lost it."""
        end = self._log.end
        return StoreError(
            f"{self._log.path(max(end.segment, 0))}, byte {end.offset}: {what}, and is lost. Restore the right files, or save the rest "
            "with `opd store repair`."
        )

    def _require_known(self) -> None:
        for number in numbers_in(self.directory):
            if number not in self.index.logs:
                raise self._lost_data(f"{folder_of(self.directory, number).name} was opened here")

    def _adopt_sampler_logs(self) -> None:
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
        log, end = (
            SegmentLog(folder_of(self.directory, number), self._files, id=self.sampler_log_id(number)),
            BEFORE_START,
        )
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
                f"{log.path(until.segment).name}, and are lost. Restore the right files, or save the rest with `opd store repair`."
            )

    def _remove(self, number: int) -> None:
        """Remove the files of a deleted log, and their maps, which would keep the disk blocks in use.

        If a file cannot be removed now (on a network file system while another process reads it), the next writer does.
        """
        self._samplers.pop(number, None)
        if (folder := folder_of(self.directory, number)).exists():
            shutil.rmtree(folder, ignore_errors=True)
            self._files.sync_directory(self.directory)

    # Recovery

    def _recover(self) -> tuple[str, State]:
        """(status of the saved index, state of the log).

        A writer verifies every frame, a reader only the new ones.
        """
        path = self.directory / INDEX
        loaded, base = load_index(path), load_base(self.directory)
        if base is not None:
            self._log.first, self._log.chain = base.first, base.chain
        count = self._log.segments()
        if not isinstance(loaded, str) and count and loaded[1].log != self._log.id.hex():
            loaded = "of another log"
        was = loaded if isinstance(loaded, str) else ""
        if base is not None and (isinstance(loaded, str) or loaded[1].place < base.end.place):
            loaded, was = (base.index, base.end), was or "outdated"
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
        return was or ("outdated" if self._log.end != end else "whole"), state


# --- Environment replay: calls and results of environments are logged, and replayed on resume ---


class Replay:
    """The calls of one rollout to its environment, in order: logged ones first, then real ones.

    replay = Replay(store, "main/task:shell/7/0/0")
    listing = replay.call({"tool": "shell", "command": "ls"}, lambda: sandbox.run("ls"))

    A call is durable before it is executed, and its result before it is returned. Calls and results are plain JSON. Executed and
    replayed results both go through JSON, so they are equal.

    `begun`: whether an earlier process may have logged calls. Otherwise the log is not read, which would wait for the disk.
    """

    def __init__(self, store: RolloutStore, id: str, begun: bool = True) -> None:
        self._store, self._id = store, id
        self._logged = {record.order: record for record in store.environment(id)} if begun else {}
        self._order = 0

    @property
    def logged(self) -> EnvironmentRecord | None:
        """What an earlier process logged of the next call. If it is not finished, the process died inside the call."""
        return self._logged.get(self._order)

    def sync(self) -> None:
        """Wait until everything that was written so far is durable."""
        self._store.commit(sync=True)

    def call(self, key: Any, execute: Callable[[], Any]) -> Any:
        """The logged result of this call. If there is none, execute it and return once the result is durable."""
        key, order, logged = _plain(key), self._order, self.logged
        if logged is not None and logged.call != key:
            raise StoreError(
                f"rollout {self._id!r}: replay diverged at environment call {order}: the log has {logged.call!r:.200}, "
                f"now the call is {key!r:.200}. The environment or its settings changed; start a new run."
            )
        self._order += 1
        if logged is not None and logged.finished:
            return logged.result
        if logged is None:
            self._store.record_call(self._id, order, key)
            self._store.commit(sync=True)
        result = _plain(execute())
        self._store.record_result(self._id, order, result)
        self._store.commit(sync=True)
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


class NullStore(RolloutStore):
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
