"""The index: one row per rollout, in columns. Rollouts can be found and queried without reading payload.

It is saved next to the log as `index.bin`, with a checksum, when a store is closed and as it grows; opening maps it.
It is only a cache: if it is missing or damaged, it is rebuilt from the log; if it is older than the log, it is
updated from the log. If it is newer than the log, durable frames have been lost, and opening the store is an error.

    index.bin   magic (8) | header length u64 | header (JSON) | sections, each aligned to 64 bytes | checksum u64
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from opd.common.errors import UserError
from opd.records import Rollout
from opd.store.log import NOWHERE, Files, Place, Position

if TYPE_CHECKING:
    from opd.store.rollouts import RolloutStore


MAGIC = b"opd-idx\n"
FORMAT = 2
CHUNK = 8 << 20
STOPS: tuple[str | None, ...] = (None, "stop", "length", "env")  # codes of the column `stop`; 0: unfinished
COLUMNS = {
    "segment": "<u4", "offset": "<u8", "size": "<u4",  # the FINISH record; if unfinished, the frame of BEGIN and 0
    "length": "<u4", "prompt_length": "<u4", "visit": "<u4", "sample": "<u4",
    "domain": "<u4", "source": "<u4", "teacher": "<u4",  # vocabulary codes
    "version_min": "<i4", "version_max": "<i4", "reward": "<f8", "stop": "u1",
    "unit": "<u8",  # hash of the pair, group or id: an objective must see all rollouts of a unit together
}  # fmt: skip
LINKED = {"log": "<u4", "linked": "<u4"}  # for a FINISH in a sampler log: the log's number, the segment of the LINK
ATTACHED = {"rollout": "<u4", "what": "<u4", "segment": "<u4", "offset": "<u8", "size": "<u4"}  # signals, calls
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

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name][: self.count]

    def append(self, **values: Any) -> int:
        if not self._owned or self.count == len(next(iter(self._arrays.values()))):
            self._grow(max(64, 2 * self.count))
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


class Vocabulary:
    """A few distinct texts, stored as codes. Code 0 is the empty text."""

    def __init__(self, texts: list[str] | None = None) -> None:
        self.texts = texts or [""]
        self._codes = {text: code for code, text in enumerate(self.texts)}

    def code(self, text: str) -> int:
        if text not in self._codes:
            self._codes[text] = len(self.texts)
            self.texts.append(text)
        return self._codes[text]

    def find(self, text: str) -> int | None:
        return self._codes.get(text)


class Index:
    def __init__(self) -> None:
        self.rows = Table(COLUMNS | LINKED)
        self.attached = Table(ATTACHED)
        self.names = Texts()  # JSON: id, prompt_id, group, pair
        self.facts = Texts()  # JSON: notes, except a reward, which has a column
        self.vocabularies = {name: Vocabulary() for name in VOCABULARIES}
        self.logs: dict[int, LogState] = {}  # sampler logs by number, including deleted ones

    def __len__(self) -> int:
        return self.rows.count

    def __getitem__(self, column: str) -> np.ndarray:
        return self.rows[column]

    def code(self, vocabulary: str, text: str) -> int:
        return self.vocabularies[vocabulary].code(text)

    def text(self, column: str, row: int) -> str:
        return self.vocabularies[column].texts[int(self.rows[column][row])]

    # Changes

    def begin(self, names: Mapping[str, Any], prompt_length: int) -> int:
        unit = names["pair"] or names["group"] or names["id"]
        row = self.rows.append(
            visit=names["visit"],
            sample=names["sample"],
            prompt_length=prompt_length,
            domain=self.code("domain", names["domain"]),
            source=self.code("source", names["source"]),
            reward=np.nan,
            version_min=-1,
            version_max=-1,
            unit=digest(unit),
        )
        self.names[row] = json.dumps([names["id"], names["prompt_id"], names["group"], names["pair"]])
        return row

    def finish(self, row: int, place: Place, size: int, stop: str, versions: np.ndarray) -> None:
        low, high = (int(versions.min()), int(versions.max())) if versions.size else (-1, -1)
        self.rows.set(
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
        self.rows.set(row, linked=linked, **{name: facts[name] for name in names}, stop=STOPS.index(facts["stop"]))

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
        count = len(self)
        mine = np.flatnonzero(self["log"][:count] == log)
        columns = (self[name][mine].tolist() for name in ("segment", "offset", "size"))
        ends = (Place(segment, offset + size) for segment, offset, size in zip(*columns, strict=True))
        return max(ends, default=NOWHERE)

    def note(self, row: int, facts: Mapping[str, Any]) -> None:
        renamed = {"reward" if key == "score" else key: value for key, value in facts.items()}  # its name in older runs
        merged = {**self.notes(row), **renamed}
        reward = merged.get("reward")
        if isinstance(reward, (int, float)) and not isinstance(reward, bool):
            self.rows.set(row, reward=float(merged.pop("reward")))
        elif "reward" in merged:
            self.rows.set(row, reward=np.nan)
        if merged or self.facts[row]:
            self.facts[row] = json.dumps(merged) if merged else ""

    def notes(self, row: int) -> dict[str, Any]:
        reward = float(self.rows["reward"][row])
        held = {} if np.isnan(reward) else {"reward": reward}
        kept = json.loads(text) if (text := self.facts[row]) else {}
        return {**held, **{"reward" if key == "score" else key: value for key, value in kept.items()}}

    def attach(self, row: int, what: str, place: Place, size: int) -> None:
        self.attached.append(
            rollout=row, what=self.code("what", what), segment=place.segment, offset=place.offset, size=size
        )

    def find_attached(self, rows: np.ndarray, what: str) -> Iterator[tuple[int, Place, int]]:
        """(row, place, size) in the order they were logged."""
        code = self.vocabularies["what"].find(what)
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
        count = len(self)
        columns = COLUMNS | (LINKED if self.logs else {})
        sections = {f"rows/{name}": self.rows[name] for name in columns}
        sections |= {f"attached/{name}": self.attached[name] for name in ATTACHED}
        for kind, texts in (("names", self.names), ("facts", self.facts)):
            sections[f"{kind}/blob"], sections[f"{kind}/ends"] = texts.sections(count)
        header = json.dumps(
            {
                "format": FORMAT,
                "position": position.to_json(),
                "count": count,
                "vocabularies": {name: vocabulary.texts for name, vocabulary in self.vocabularies.items()},
                "sections": [[name, array.dtype.str, len(array)] for name, array in sections.items()],
                **({"logs": sorted([number, *state] for number, state in self.logs.items())} if self.logs else {}),
                **further,
            }
        ).encode()
        files.create(path, _chunks(header, list(sections.values())))


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _chunks(header: bytes, arrays: list[np.ndarray]) -> Iterator[bytes]:
    checksum, at = 0, 0
    head = MAGIC + struct.pack("<Q", len(header)) + header
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
    if not _whole(path):
        return "damaged"
    data = np.asarray(np.memmap(path, dtype="u1", mode="r"))
    (length,) = struct.unpack("<Q", data[8:16].tobytes())
    header = json.loads(data[16 : 16 + length].tobytes())
    if header["format"] != FORMAT:
        return "of another format"
    sections, at = {}, -(-(16 + length) // 64) * 64
    for name, dtype, count in header["sections"]:
        size = count * np.dtype(dtype).itemsize
        sections[name] = data[at : at + size].view(dtype)
        at += -(-size // 64) * 64
    index = Index()
    index.logs = {number: LogState(*state) for number, *state in header.get("logs", ())}
    rows = {name: sections[f"rows/{name}"] for name in (COLUMNS | (LINKED if index.logs else {}))}
    unlinked = {name: np.zeros(header["count"], dtype=kind) for name, kind in LINKED.items()}
    index.rows = Table(COLUMNS | LINKED, unlinked | rows)
    index.attached = Table(ATTACHED, {name: sections[f"attached/{name}"] for name in ATTACHED})
    index.names = Texts(sections["names/blob"], sections["names/ends"])
    index.facts = Texts(sections["facts/blob"], sections["facts/ends"])
    index.vocabularies = {name: Vocabulary(texts) for name, texts in header["vocabularies"].items()}
    return index, Position.from_json(header["position"]), header


def _whole(path: Path) -> bool:
    """Whether the file's checksum is correct. Reads in chunks, so that a large index does not fill memory."""
    checksum, held = 0, b""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return False
        checksum = zlib.crc32(MAGIC)
        while chunk := file.read(CHUNK):
            held += chunk
            checksum, held = zlib.crc32(held[:-8], checksum), held[-8:]
    return len(held) == 8 and struct.unpack("<Q", held)[0] == checksum


# --- Queries on the index: `run.rollouts.where(domain="math", reward=0)` ---
#
# Only `load`, iteration and `to_parquet` read payload.


CODED = ("domain", "source", "teacher")
NUMBERS = ("length", "prompt_length", "visit", "sample", "version_min", "version_max", "reward")
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
        numbers = [(name, pa.float64() if name == "reward" else pa.int64()) for name in NUMBERS]
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
                columns["reward"] = [None if np.isnan(reward) else reward for reward in columns["reward"]]
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
