"""`opd store check` and `opd store repair`: report what a log holds and where it is damaged, and save the rest."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opd.common.errors import RunDirectoryError, StoreError
from opd.records import TokenColumns
from opd.store.log import (
    BEFORE_START,
    BEGIN,
    EMPTY,
    ENVIRONMENT,
    FINISH,
    HEADER,
    KINDS,
    LINK,
    LOG,
    NOTE,
    ROW_COLUMNS,
    SEGMENT_NAME,
    TOKEN_COLUMNS,
    TOKENS,
    Files,
    FormatError,
    Frame,
    Place,
    Position,
    Record,
    Row,
    SegmentLog,
    finished_arrays,
    next_frame,
    packed,
    prompt_of,
    read_frame,
    read_segment_header,
    records_in,
    require_known,
    segment_numbers,
    signal_values,
    token_columns,
)
from opd.store.rollouts import (
    DAMAGED,
    FOLDER,
    INDEX,
    REPAIRED,
    Index,
    LogState,
    RolloutStore,
    finish_repair,
    folder_of,
    id_of,
    load_base,
    load_index,
    names_of,
    numbers_in,
    pending_repair,
    repaired_name,
)

BATCH = 1000  # rollouts rewritten per commit


@dataclass
class SavedRollout:
    """The remaining records of one rollout: its finish record, or its begin and every token up to the first damage."""

    begin: Record | None = None
    rows: list[Row] = field(default_factory=list)
    finish: Record | None = None
    later: list[Record] = field(default_factory=list)  # notes and signals
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # about it, such as a grader's: facts by order
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)  # of its episode: facts by order
    interrupted: bool = False  # the log is damaged after its begin, so tokens after the damage may not be the next ones
    link: Record | None = None  # to its finish record in a sampler log
    place: Place = BEFORE_START  # of the finish record


@dataclass
class Report:
    directory: Path
    segments: list[tuple[str, int]] = field(default_factory=list)
    frames: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    damages: list[Damage] = field(default_factory=list)
    torn: Damage | None = None
    index: str = ""
    rollouts: dict[int, SavedRollout] = field(default_factory=dict)
    logs: dict[int, LogState] = field(default_factory=dict)  # states of sampler logs, according to this log
    samplers: dict[int, Report] = field(default_factory=dict)
    saved: Index | None = None  # the saved index
    reclaimed: set[int] = field(default_factory=set)  # numbers of rollouts whose tokens were deleted on purpose

    @property
    def finished(self) -> int:
        return sum(saved.finish is not None for saved in self.rollouts.values())

    @property
    def unfinished(self) -> list[SavedRollout]:
        return [saved for saved in self.rollouts.values() if saved.finish is None and saved.begin is not None]

    def summary(self) -> str:
        kinds = ", ".join(f"{self.kinds[name]} {name}" for name in KINDS.values() if self.kinds[name])
        return f"{self.frames} commits: {kinds or 'no records'}"

    def lines(self) -> list[str]:
        lines = [f"{name}: {size} bytes" for name, size in self.segments]
        lines.append(self.summary())
        lines.append(f"rollouts: {self.finished} finished, {len(self.unfinished)} unfinished")
        lines.append(f"index: {self.index}")
        if self.torn is not None:
            lines.append(f"torn tail (a crash, no damage): {self.torn}; the next writer cuts it")
        for number, report in self.samplers.items():
            torn = "" if report.torn is None else ", followed by a torn tail (a crash, no damage)"
            lines.append(f"{report.directory.name}: {self.logs[number].what}, {report.summary()}{torn}")
        lines += [f"DAMAGED {damage}" for damage in self.damages]
        if self.damages:
            lines.append(f"`opd store repair {self.directory}` saves everything that is intact.")
        return lines


def find_log(run: Path) -> Path:
    """The log of a run directory, or the directory itself if it is a log. An unfinished repair may have renamed it."""
    if run.resolve().name.startswith(FOLDER) and any(run.resolve().parent.glob("segment-*.log")):
        raise RunDirectoryError(
            f"{run}: this is the log of a sampler, a part of the rollout log above it. Name the run instead."
        )
    for place in (run / "rollouts", run):
        candidate = pending_repair(place) or place
        if any(candidate.glob("segment-*.log")) or (candidate / INDEX).is_file():
            return candidate
    raise RunDirectoryError(f"{run}: there is no rollout log here, and none in {run / 'rollouts'}.")


def check_log(run: Path) -> Report:
    """Verify every byte of a run's log and of its sampler logs. Read-only; the run may be alive."""
    salvage = Salvage(find_log(run))
    report = _checked(salvage)
    report.index, report.saved = salvage.index, salvage.saved
    join_samplers(report, salvage)
    return report


def _checked(salvage: Salvage, until: Place | None = None) -> Report:
    """Check one log. Everything from `until` on is ignored."""
    report = Report(salvage.directory)
    for number in salvage.numbers:
        path = salvage.log.path(number)
        report.segments.append((path.name, path.stat().st_size))
    for segment, item in salvage.frames():
        if until is not None and Place(segment, item.offset) >= until:
            break
        if isinstance(item, Frame):
            report.frames += 1
            for record in records_in(item.payload, item.start):
                require_known(record, salvage.log.path(segment))
                report.kinds[KINDS[record.kind]] += 1
                _collect(report, record, segment)
        elif item.torn:
            report.torn = item
        else:
            report.damages.append(item)
            for saved in report.rollouts.values():
                saved.interrupted = True
    return report


def _collect(report: Report, record: Record, segment: int) -> None:
    rollouts = report.rollouts
    if record.kind == LOG:
        report.logs[record.number] = LogState(*record.facts["state"])
        return
    if record.kind == TOKENS:
        columns = token_columns(record)
        for row in zip(*(columns[name].tolist() for name, _ in ROW_COLUMNS), strict=True):
            saved = rollouts.get(row[0])
            if saved is not None and saved.begin is not None and not saved.interrupted and saved.finish is None:
                saved.rows.append(row)
        return
    saved = rollouts.setdefault(record.number, SavedRollout())
    if record.kind == BEGIN:
        saved.begin = record
    elif record.kind == FINISH:
        saved.finish, saved.rows, saved.place = record, [], Place(segment, record.offset)
    elif record.kind == LINK:
        saved.link = record
    elif record.kind == ENVIRONMENT:
        calls = saved.steps if "of" in record.facts else saved.calls
        calls.setdefault(record.facts["order"], {}).update(record.facts)
    else:
        saved.later.append(record)


STATES = ("open", "settled", "gone")  # a sampler log goes through them in this order


def join_samplers(report: Report, salvage: Salvage) -> None:
    """Add the contents of the sampler logs to the report of the store's own log."""
    for index in (None if salvage.base is None else salvage.base.index, salvage.saved):
        for number, state in (index.logs if index is not None else {}).items():
            known = report.logs.get(number, state)  # the log's own record of it may be damaged
            report.logs[number] = max(known, state, key=lambda found: STATES.index(found.what))
    ends: dict[int, Place] = {}  # the end of the last linked rollout in each log
    for facts in (saved.link.facts for saved in report.rollouts.values() if saved.link is not None):
        end = Place(facts["segment"], facts["offset"] + facts["size"])
        ends[facts["log"]] = max(end, ends.get(facts["log"], BEFORE_START))
    unknown = {*ends, *numbers_in(report.directory)} - set(report.logs)
    report.logs |= dict.fromkeys(unknown, LogState("open"))
    report.reclaimed = _reclaimed(report, salvage)
    for number in report.reclaimed & set(report.rollouts):
        del report.rollouts[number]
    strangers: dict[int, str] = {}
    for number, state in sorted(report.logs.items()):
        if state.what != "gone":
            strangers |= _join(report, number, state, salvage, max(state.place, ends.get(number, BEFORE_START)))
    _report_losses(report, salvage, unknown, strangers)


def _report_losses(report: Report, salvage: Salvage, unknown: set[int], strangers: Mapping[int, str]) -> None:
    """Report damage in sampler logs, and rollouts that the store's own log must have lost since it does not know them.

    A live run may have written more in the meantime, so the log is read again first.
    """
    unfound = [saved.link for saved in report.rollouts.values() if saved.link is not None and saved.finish is None]
    damaged = [number for number, log in report.samplers.items() if log.damages]
    if not (unknown or strangers or unfound or damaged):
        return
    newer, lost = _checked(Salvage(report.directory)), list[str]()
    for number in sorted(unknown - set(newer.logs)):
        lost.append(f"{folder_of(report.directory, number).name} was opened here")
    for row, name in strangers.items():
        begun = newer.rollouts.get(row, SavedRollout()).begin
        if begun is None or begun.facts["id"] != name:
            lost.append(f"rollout {name}, which a sampler has, was begun here")
    if lost and not report.damages:  # otherwise the loss is explained by the damage
        path = salvage.log.path(max(salvage.numbers, default=0))
        size = path.stat().st_size if path.is_file() else 0
        report.damages.append(Damage(path, size, 0, f"{lost[0]}, and is lost"))
    gone = {number for number, state in newer.logs.items() if state.what == "gone"}
    for link in unfound:
        number, segment = link.facts["log"], SEGMENT_NAME.format(link.facts["segment"])
        if number not in gone and number not in damaged:  # not yet reported
            path, why = folder_of(report.directory, number) / segment, f"rollout {link.number} was finished here"
            report.damages.append(Damage(path, link.facts["offset"], link.facts["size"], why))
    for number in damaged:
        report.damages += report.samplers[number].damages if number not in gone else []


def _reclaimed(report: Report, salvage: Salvage) -> set[int]:
    gone = [number for number, state in report.logs.items() if state.what == "gone"]
    found = {number for number, saved in report.rollouts.items() if saved.link and saved.link.facts["log"] in gone}
    if (base := salvage.base) is not None:
        found |= set(np.flatnonzero(base.index.own_segments(len(base.index)) < base.first).tolist())
    for index in (None if base is None else base.index, salvage.saved):
        found |= set() if index is None else set(np.flatnonzero(np.isin(index["log"], gone)).tolist())
    return found


def _join(report: Report, number: int, state: LogState, salvage: Salvage, seen: Place) -> dict[int, str]:
    """Merge one sampler log into the report. Returns rollouts that the store's own log does not know, as row -> id.

    `salvage`: of the store's own log. `seen`: the end of what was durable in this sampler log.
    """
    folder, own = folder_of(report.directory, number), id_of(salvage.log.id, number)
    strangers: dict[int, str] = {}
    if state.what == "settled" and seen <= EMPTY:
        report.samplers[number] = Report(folder)
        return strangers  # nothing in it counts
    witness = Position(seen.segment, seen.offset, 0, 0, own.hex()) if seen.segment >= 0 else None
    settled = state.what == "settled"
    log = report.samplers[number] = _checked(Salvage(folder, own, witness), state.place if settled else None)
    for row, found in log.rollouts.items():
        record = found.begin or found.finish
        name = "" if record is None else record.facts["id"]
        known = name if row in report.reclaimed else _known_name(report, salvage, row)
        if known != name:
            strangers[row] = name
        if known not in (name, None):
            continue
        saved = SavedRollout() if row in report.reclaimed else report.rollouts.setdefault(row, SavedRollout())
        if saved.finish is not None:
            continue
        link = None if saved.link is None else saved.link.facts
        if found.finish is not None:
            linked_here = link and (link["log"], link["segment"], link["offset"]) == (number, *found.place)
            if linked_here or (link is None and _same(saved, found)):
                saved.finish, saved.rows, saved.place = found.finish, [], found.place
        elif not settled or (link is not None and link["log"] == number):
            longer = saved.begin is None or len(found.rows) > len(saved.rows)
            if found.begin is not None and longer and _same(saved, found):
                saved.begin, saved.rows, saved.interrupted = found.begin, found.rows, found.interrupted
    return strangers


def _known_name(report: Report, salvage: Salvage, row: int) -> str | None:
    """The id of a row, from the store's log or from an index, since the segment of its begin may be deleted."""
    saved = report.rollouts.get(row, SavedRollout())
    for record in (saved.begin, saved.finish):
        if record is not None:
            return str(record.facts["id"])
    for index in (None if salvage.base is None else salvage.base.index, salvage.saved):
        if index is not None and row < len(index):
            return str(json.loads(index.names[row])[0])
    return None


def _same(saved: SavedRollout, found: SavedRollout) -> bool:
    """Whether the sampler log's tokens and versions begin with those of the store."""
    rows = [(row[1], row[5]) for row in found.rows]
    if found.finish is not None:
        columns = finished_arrays(found.finish)
        rows = list(zip(columns["response_ids"].tolist(), columns["version"].tolist(), strict=True))
    return all((row[1], row[5]) == theirs for row, theirs in zip(saved.rows, rows, strict=False))


def repair(run: Path) -> list[str]:
    """Write everything intact to a clean log and put it in the place of the old one, which is kept next to it."""
    for place in (run / "rollouts", run):
        finish_repair(place)
    report = check_log(run)
    if not report.damages:
        return ["nothing is damaged; nothing was changed."]
    source, files = report.directory, Files()
    target = repaired_name(source)
    shutil.rmtree(target, ignore_errors=True)
    lost = _lost(report)
    store = RolloutStore(target, commit_ms=0)
    kept = [saved for _, saved in sorted(report.rollouts.items()) if saved.finish or saved.begin]
    for number, saved in enumerate(kept, start=1):
        _rewrite(store, saved)
        if number % BATCH == 0:
            store.commit(sync=True)
    store.close()
    note = {"from": Salvage(source).log.id.hex(), "damages": [str(damage) for damage in report.damages], "lost": lost}
    files.create(target / REPAIRED, [json.dumps(note, indent=1).encode()])
    aside = _free_name(source.with_name(source.name + DAMAGED))
    os.rename(source, aside)  # if killed before the next rename, the next process to open the log finishes the repair
    files.sync_directory(source.parent)
    finish_repair(source)
    return [
        *(f"DAMAGED {damage}" for damage in report.damages),
        f"kept {report.finished} finished rollouts and {len(report.unfinished)} unfinished ones, "
        "with their tokens up to the damage",
        f"lost: {', '.join(lost)}" if lost else "lost: no rollout that is known to have existed",
        *_unnamed(report),
        f"the damaged log is kept in {aside}",
    ]


def _unnamed(report: Report) -> list[str]:
    """A note about what the damage may have cost, if no index was saved."""
    damaged = [damage.length for damage in report.damages if damage.length]
    if report.saved is not None or not damaged:
        return []
    places = "one place" if len(damaged) == 1 else f"{len(damaged)} places"
    return [
        f"index: {report.index}. {sum(damaged)} bytes are damaged, in {places}: rollouts that began in them, after the last one that is "
        "known, cannot be named or counted"
    ]


def _rewrite(store: RolloutStore, saved: SavedRollout) -> None:
    whole = saved.finish or saved.begin
    assert whole is not None
    names = names_of(whole)
    id = names["id"]
    store.begin(**names, prompt_ids=np.array(prompt_of(whole)))
    columns: Any = packed(saved.rows) if saved.rows else None
    if saved.finish is not None:
        columns = finished_arrays(saved.finish)
    if columns is not None:
        *tokens, author = (columns[name] for name, _ in TOKEN_COLUMNS)
        store.append_many(TokenColumns(id, *tokens), author)
    for order, facts in _without_gap(saved.steps):
        store.record_call(id, order, facts["call"])
        if "result" in facts:
            store.record_result(id, order, facts["result"])
    if saved.finish is not None:
        store.finish(id, saved.finish.facts["stop"])
    for order, facts in _without_gap(saved.calls):
        store.record_environment(id, order, facts["call"], facts["result"])
    for record in saved.later:
        _rewrite_later(store, id, record)


def _without_gap(calls: Mapping[int, dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The calls in order, up to the first that is lost."""
    for order in range(len(calls)):
        if "call" not in calls.get(order, {}):
            return
        yield order, calls[order]


def _rewrite_later(store: RolloutStore, id: str, record: Record) -> None:
    if record.kind == NOTE:
        store.note(id, **record.facts)
        return
    facts: dict[str, Any] = {
        name: record.facts[name] for name in ("role", "kind", "teacher", "teacher_version", "view", "spans")
    } | {"key": record.facts.get("key", "")}
    values, mask = signal_values(record)
    store.configure(commit_ms=0, fsync="commit", hidden=True)
    store.record_signal(id, values=values, mask=mask, **facts)


def _lost(report: Report) -> list[str]:
    """Rollouts that are known to have existed and are lost or cut short, except those deleted on purpose."""
    names: dict[int, str] = {}
    if (index := report.saved) is not None:
        for row in sorted(set(range(len(index))) - report.reclaimed):
            found = report.rollouts.get(row, SavedRollout())
            if found.finish is None and (found.begin is None or index["stop"][row]):
                names[row] = json.loads(index.names[row])[0]
    known = report.rollouts.keys() | report.reclaimed
    for number in range(max(known, default=-1) + 1):  # numbers are consecutive
        saved = report.rollouts.get(number, SavedRollout())
        if number not in report.reclaimed and saved.begin is None and saved.finish is None:
            names.setdefault(number, f"rollout number {number} (its name is lost too)")
        elif saved.finish is None and saved.link is not None and saved.begin is not None:
            names.setdefault(number, saved.begin.facts["id"])
    cut = [saved.begin.facts["id"] for saved in report.unfinished if saved.begin and saved.interrupted]
    return [*names.values(), *(f"later tokens of {id}" for id in cut)]


def _free_name(path: Path) -> Path:
    number, candidate = 2, path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate


# --- Reading a damaged log ---


@dataclass(frozen=True)
class Damage:
    """An invalid place in the log. `torn`: the incomplete write that a crash leaves at the end, which does not count as damage."""

    path: Path
    offset: int
    length: int
    why: str
    torn: bool = False

    def __str__(self) -> str:
        return f"{self.path}, byte {self.offset}: {self.why}"


class Salvage:
    """Reads all segments of a log. `frames` yields good frames and damages in log order."""

    def __init__(self, directory: Path, id: bytes = b"", witness: Position | None = None) -> None:
        """`id` and `witness`: for a sampler log, which has no index: its required id, and the end of its durable part."""
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
        self._chain: int | None = self.log.chain  # the checksum that must come next; None: unknown, after damage
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
        """Whether this byte was durable according to the saved index."""
        seen = self.witness
        return seen is not None and seen.log == self.log.id.hex() and seen.place > (number, offset)

    def _unseen(self) -> Damage | None:
        """Data that was durable according to the saved index and is missing from the log."""
        seen = self.witness
        if seen is None or (self.log.id and seen.log != self.log.id.hex()):
            return None
        path = self.log.path(seen.segment)
        size = path.stat().st_size if path.is_file() else 0
        if size >= seen.offset:
            return None
        return Damage(path, size, seen.offset - size, f"the index saw this segment reach byte {seen.offset}")

    def _find_id(self) -> bytes:
        """The log's id, from a valid header, else from the index, else the id with which a frame is valid."""
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
    """The id as read, then every variant with one byte changed."""
    yield raw
    for place in range(len(raw)):
        for value in range(256):
            yield raw[:place] + bytes([value]) + raw[place + 1 :]
