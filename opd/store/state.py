"""The state of a log: its index and the unfinished rollouts. Built by replaying records in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from opd.common.errors import StoreError
from opd.records import StopReason
from opd.store import records
from opd.store.index import STOPS, Index, LogState
from opd.store.log import Frame, Place, Position
from opd.store.records import PACKED, ROW_COLUMNS, Columns, Record, Row

ENVIRONMENT = "environment"
NAMES = ("id", "prompt_id", "visit", "sample", "domain", "source", "group", "pair")


def names_of(record: Record) -> dict[str, Any]:
    """The facts that a rollout was begun with."""
    names = {name: record.facts[name] for name in NAMES}
    return {**names, "extras": record.facts["extras"]} if "extras" in record.facts else names


@dataclass
class Live:
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
            self.parts = [records.one_behind_the_other(self.parts)]
        return self.parts[0] if self.parts else np.zeros(0, dtype=PACKED)

    def take_out(self) -> None:
        """Turn replayed frames into parts. Most rollouts are finished by the end of a log and never need this."""
        for columns in self.frames:
            self.parts.append(_chosen(columns, columns["rollout"] == self.number))
        self.frames, self.replayed = [], 0


@dataclass
class Waiting:
    """A record that waits to be written. A finish is encoded by the writing thread."""

    kind: int
    number: int
    data: bytes = b""
    facts: Any = None
    live: Live | None = None
    versions: np.ndarray | None = None

    def encode(self) -> bytes:
        if self.live is not None:
            tokens = self.live.tokens
            self.versions = tokens["version"]
            self.data = records.finish(self.number, self.live.names, self.facts, self.live.prompt_ids, tokens)
        return self.data


def compose(
    batch: Sequence[Row | np.ndarray | Waiting], live: Mapping[int, Live]
) -> list[tuple[bytes, Waiting | None]]:
    """Records of one frame: begins, then tokens, then the rest, so that no finish precedes its tokens."""
    rows = [item for item in batch if not isinstance(item, Waiting)]
    others = [item for item in batch if isinstance(item, Waiting)]
    parts: list[tuple[bytes, Waiting | None]] = [(item.encode(), item) for item in others if item.kind == records.BEGIN]
    if rows:
        tokens = records.packed(rows)
        parts.append((records.tokens(tokens), None))
        deal(tokens, live)
    return parts + [(item.encode(), item) for item in others if item.kind != records.BEGIN]


def deal(rows: np.ndarray, live: Mapping[int, Live]) -> None:
    """Add tokens of any rollouts (`PACKED`) to their rollouts' parts, for the finish records."""
    order = np.argsort(rows["rollout"], kind="stable")
    tokens = rows.view(f"V{PACKED.itemsize}")[order].view(PACKED)
    numbers, starts = np.unique(tokens["rollout"], return_index=True)
    ends = [*starts[1:].tolist(), tokens.size]
    for number, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True):
        live[number].parts.append(tokens[start:end].copy())  # a view would keep all rows in memory


def take_tokens(record: Record, live: Mapping[int, Live]) -> None:
    """Add a replayed TOKENS record to its unfinished rollouts."""
    columns = records.rows_of(record)
    numbers, counts = np.unique(columns["rollout"], return_counts=True)
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if (found := live.get(number)) is not None:
            found.frames.append(columns)
            found.replayed += count


class State:
    def __init__(self, index: Index | None = None) -> None:
        self.index = index or Index()
        self.live: dict[int, Live] = {}
        self._numbers: dict[str, int] | None = None

    @property
    def numbers(self) -> dict[str, int]:
        """Row of each id. Built lazily, since queries do not need it."""
        if self._numbers is None:
            self._numbers = {json.loads(self.index.names[row])[0]: row for row in range(len(self.index))}
        return self._numbers

    def begin(self, names: Mapping[str, Any], prompt_ids: np.ndarray) -> Live:
        live = Live(self.index.begin(names, prompt_ids.size), names, np.array(prompt_ids, dtype=np.int32))
        self.live[live.number] = live
        if self._numbers is not None:
            self._numbers[names["id"]] = live.number
        return live

    # Replay

    def replay(self, segment: int, frame: Frame, where: str) -> None:
        """Apply a frame that is not in the index."""
        for record in records.split(frame.payload, frame.start):
            self._apply(record, Place(segment, frame.offset), f"{where}, byte {record.offset}")

    def replay_unfinished(self, frame: Frame) -> None:
        """Apply a frame that is in the index: only its records of unfinished rollouts are needed."""
        stops = self.index["stop"]
        for record in records.split(frame.payload, frame.start):
            if record.kind == records.TOKENS:
                take_tokens(record, self.live)
            elif record.kind != records.LOG and not stops[record.number]:
                if record.kind == records.BEGIN:
                    self._begin_live(record)
                elif record.kind == records.ENVIRONMENT:
                    self.live[record.number].calls += 1

    def unfinished_since(self, end: Position) -> Place:
        """The earliest begin of an unfinished rollout. Reading from there finds all tokens of unfinished rollouts."""
        open_rows = np.flatnonzero(self.index["stop"] == 0)
        places = zip(self.index["segment"][open_rows].tolist(), self.index["offset"][open_rows].tolist(), strict=True)
        return min((Place(segment, offset) for segment, offset in places), default=end.place)

    def _apply(self, record: Record, frame: Place, where: str) -> None:
        place = Place(frame.segment, record.offset)
        if record.kind not in records.KINDS:
            raise StoreError(f"{where}: a record of kind {record.kind}, which this version of opd does not know.")
        if record.kind == records.BEGIN:
            if record.number != len(self.index):
                raise StoreError(f"{where}: rollout {record.number} begins, but {len(self.index)} is next")
            live = self.begin(names_of(record), records.prompt_of(record))
            self.index.rows.set(live.number, segment=frame.segment, offset=frame.offset)
            return
        if record.kind == records.TOKENS:
            take_tokens(record, self.live)
            return
        if record.kind == records.LOG:
            self.index.logs[record.number] = LogState(*record.facts["state"])
            return
        if record.number >= len(self.index):
            raise StoreError(
                f"{where}: a {records.KINDS[record.kind]} record of rollout {record.number}, which never began"
            )
        if record.kind == records.FINISH:
            self._finish(record, place, where)
        elif record.kind == records.LINK:
            if self.live.pop(record.number, None) is None:
                raise StoreError(f"{where}: rollout {record.number} is linked behind a finished one")
            self.index.link(record.number, record.facts, place.segment)
        else:
            self._apply_later(record, place)

    def _apply_later(self, record: Record, place: Place) -> None:
        """Apply a note, a signal or an environment call."""
        if record.kind == records.NOTE:
            self.index.note(record.number, record.facts)
        elif record.kind == records.SIGNAL:
            self.signal(record.number, record.facts, place, record.size)
        elif record.kind == records.ENVIRONMENT:
            self.index.attach(record.number, ENVIRONMENT, place, record.size)
            if record.number in self.live:
                self.live[record.number].calls += 1

    def signal(self, number: int, facts: Mapping[str, Any], place: Place, size: int) -> None:
        self.index.attach(number, f"{facts['role']}/{facts['kind']}", place, size)
        if facts["role"] == "teacher":
            self.index.rows.set(number, teacher=self.index.code("teacher", facts["teacher"]))

    def _begin_live(self, record: Record) -> None:
        names = names_of(record)
        self.live[record.number] = Live(record.number, names, np.array(records.prompt_of(record)))

    def _finish(self, record: Record, place: Place, where: str) -> None:
        live = self.live.pop(record.number, None)
        if live is None or live.replayed != record.facts["tokens"]:
            stored = "a finished rollout" if live is None else f"{live.replayed} tokens"
            raise StoreError(
                f"{where}: rollout {record.number} finishes with {record.facts['tokens']} tokens behind {stored}"
            )
        self.index.finish(
            record.number, place, record.size, record.facts["stop"], records.finished_arrays(record)["version"]
        )

    def settle(self) -> None:
        """Call this after replaying the log."""
        for live in self.live.values():
            live.take_out()


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
        number = self._state.numbers.get(id)
        if number is None:
            raise StoreError(f"rollout {id!r} is not in the store")
        return number


class Values(ValuesView[Entry]):
    """Entries from oldest to newest; `reversed` works too."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(entries)
        self._state = entries._state

    def __iter__(self) -> Iterator[Entry]:
        return (entry(self._state, number) for number in range(len(self._state.index)))

    def __reversed__(self) -> Iterator[Entry]:
        return (entry(self._state, number) for number in reversed(range(len(self._state.index))))
