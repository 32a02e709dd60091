"""`opd store check` and `opd store repair`: what a log holds, where it is damaged, and saving the rest."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from opd.errors import RunDirectoryError
from opd.store import records
from opd.store.files import Files
from opd.store.frames import Frame
from opd.store.index import load_index
from opd.store.reclaim import load_base
from opd.store.records import COLUMNS, ROW_COLUMNS, Record, Row
from opd.store.recover import DAMAGED, REPAIRED, finish_repair, pending_repair, repaired_name
from opd.store.rollouts import INDEX, RolloutStore
from opd.store.salvage import Damage, Salvage
from opd.store.state import names_of
from opd.types import TokenColumns

BATCH = 1000  # rollouts rewritten between two commits


@dataclass
class Saved:
    """What is left of one rollout. Whole: its finish record, or its begin and every token up to the first damage."""

    begin: Record | None = None
    rows: list[Row] = field(default_factory=list)
    finish: Record | None = None
    later: list[Record] = field(default_factory=list)  # notes and signals
    calls: dict[int, Record] = field(default_factory=dict)
    interrupted: bool = False  # damage since it began: tokens behind it may not be the next ones


@dataclass
class Report:
    directory: Path
    segments: list[tuple[str, int]] = field(default_factory=list)
    frames: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    damages: list[Damage] = field(default_factory=list)
    torn: Damage | None = None
    index: str = ""
    rollouts: dict[int, Saved] = field(default_factory=dict)

    @property
    def finished(self) -> int:
        return sum(saved.finish is not None for saved in self.rollouts.values())

    @property
    def unfinished(self) -> list[Saved]:
        return [saved for saved in self.rollouts.values() if saved.finish is None and saved.begin is not None]

    def lines(self) -> list[str]:
        kinds = ", ".join(f"{self.kinds[name]} {name}" for name in records.KINDS.values() if self.kinds[name])
        told = [f"{name}: {size} bytes" for name, size in self.segments]
        told.append(f"{self.frames} commits: {kinds or 'no records'}")
        told.append(f"rollouts: {self.finished} finished, {len(self.unfinished)} unfinished")
        told.append(f"index: {self.index}")
        if self.torn is not None:
            told.append(f"torn tail, no damage: {self.torn}; the next writer cuts it")
        told += [f"DAMAGED {damage}" for damage in self.damages]
        if self.damages:
            told.append(f"`opd store repair {self.directory}` keeps what is whole.")
        return told


def find_log(run: Path) -> Path:
    """The log of a run directory, or the directory itself if it is one. It may still have the name a repair gave it."""
    for place in (run / "rollouts", run):
        candidate = pending_repair(place) or place
        if any(candidate.glob("segment-*.log")) or (candidate / INDEX).is_file():
            return candidate
    raise RunDirectoryError(f"{run}: there is no rollout log here, and none in {run / 'rollouts'}.")


def check_log(run: Path) -> Report:
    """Verify every byte of a run's log. Touches nothing; the run may be alive."""
    report, salvage = Report(find_log(run)), Salvage(find_log(run))
    report.index = salvage.index
    for number in salvage.numbers:
        path = salvage.log.path(number)
        report.segments.append((path.name, path.stat().st_size))
    for _, item in salvage.frames():
        if isinstance(item, Frame):
            report.frames += 1
            for record in records.split(item.payload, item.start):
                report.kinds[records.KINDS[record.kind]] += 1
                _collect(report.rollouts, record)
        elif item.torn:
            report.torn = item
        else:
            report.damages.append(item)
            for saved in report.rollouts.values():
                saved.interrupted = True
    return report


def _collect(rollouts: dict[int, Saved], record: Record) -> None:
    if record.kind == records.TOKENS:
        columns = records.rows_of(record)
        for row in zip(*(columns[name].tolist() for name, _ in ROW_COLUMNS), strict=True):
            saved = rollouts.get(row[0])
            if saved is not None and saved.begin is not None and not saved.interrupted and saved.finish is None:
                saved.rows.append(row)
        return
    saved = rollouts.setdefault(record.number, Saved())
    if record.kind == records.BEGIN:
        saved.begin = record
    elif record.kind == records.FINISH:
        saved.finish, saved.rows = record, []
    elif record.kind == records.ENVIRONMENT:
        saved.calls[record.facts["order"]] = record
    else:
        saved.later.append(record)


def repair(run: Path) -> list[str]:
    """Write a clean log of all that is whole and put it in the old one's place; the old one stays beside it."""
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
    os.rename(source, aside)  # between the two there is no log of this name: whoever looks for it then ends the repair
    files.sync_directory(source.parent)
    finish_repair(source)
    return [
        *(f"DAMAGED {damage}" for damage in report.damages),
        f"kept {report.finished} finished rollouts and {len(report.unfinished)} unfinished ones, "
        "with their tokens up to the damage",
        f"lost: {', '.join(lost)}" if lost else "lost: no rollout that is known to have existed",
        f"the damaged log is kept in {aside}",
    ]


def _rewrite(store: RolloutStore, saved: Saved) -> None:
    whole = saved.finish or saved.begin
    assert whole is not None
    names = names_of(whole)
    id = names["id"]
    store.begin(**names, prompt_ids=np.array(records.prompt_of(whole)))
    columns: Any = records.packed(saved.rows) if saved.rows else None
    if saved.finish is not None:
        columns = records.finished_arrays(saved.finish)
    if columns is not None:
        *tokens, author = (columns[name] for name, _ in COLUMNS)
        store.append_many(TokenColumns(id, *tokens), author)
    for order in range(len(saved.calls)):
        if order not in saved.calls:
            break
        facts = saved.calls[order].facts
        store.record_environment(id, order, facts["call"], facts["result"])
    if saved.finish is not None:
        store.finish(id, saved.finish.facts["stop"])
    for record in saved.later:
        _rewrite_later(store, id, record)


def _rewrite_later(store: RolloutStore, id: str, record: Record) -> None:
    if record.kind == records.NOTE:
        store.note(id, **record.facts)
        return
    facts: dict[str, Any] = {
        name: record.facts[name] for name in ("role", "kind", "teacher", "teacher_version", "view", "spans")
    }
    values, mask = records.signal_values(record)
    store.configure(commit_ms=0, fsync="commit", hidden=True)
    store.record_signal(id, values=values, mask=mask, **facts)


def _lost(report: Report) -> list[str]:
    """Rollouts that are known to have existed and are gone, or are cut shorter; not those that were given back."""
    base = load_base(report.directory)
    given_back = set() if base is None else set(np.flatnonzero(base.index["segment"] < base.first).tolist())
    lost = [
        f"rollout number {number} (its name too)"
        for number, saved in report.rollouts.items()
        if not (saved.finish or saved.begin) and number not in given_back
    ]
    lost += [
        f"later tokens of {saved.begin.facts['id']}" for saved in report.unfinished if saved.begin and saved.interrupted
    ]
    loaded = load_index(report.directory / INDEX)
    if not isinstance(loaded, str):
        index = loaded[0]
        for row in range(len(index)):
            saved = report.rollouts.get(row)
            if row in given_back:
                continue
            if saved is None or (saved.finish is None and (saved.begin is None or index["stop"][row])):
                lost.append(json.loads(index.names[row])[0])
    return lost


def _free_name(path: Path) -> Path:
    number, candidate = 2, path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
