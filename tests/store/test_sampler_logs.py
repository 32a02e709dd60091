"""Logs of samplers, and the one store that they are to whoever reads: order, crashes, damage, repair, giving back, formats."""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.common.errors import RunDirectoryError, StoreError
from opd.report.browse import RolloutBrowser
from opd.store import RolloutStore
from opd.store import log as log_module
from opd.store import repair as repair_module
from opd.store.log import FORMAT, LINKED_FORMAT, SEGMENT_NAME, SegmentLog, encode_record, read_segment_header
from opd.store.repair import Report, Salvage, check_log, repair
from opd.store.rollouts import (
    INDEX_COLUMNS,
    RATIO_COLUMNS,
    PendingRecord,
    SamplerLog,
    folder_of,
    load_index,
    numbers_in,
)
from tests.support.lossy import LossyFiles
from tests.support.stores import begin, token, write_rollout

Made = dict[str, list[int]]  # tokens of each rollout that is finished
NAMES = {"a": 1, "b": 2, "c": 0, "d": 1, "e": 2}  # who writes; 0: the store itself


def opened(directory: Path, **settings: Any) -> RolloutStore:
    return RolloutStore(directory, commit_ms=0, **settings)


def log_for(store: RolloutStore, number: int | None = None, commit_ms: int = 0) -> SamplerLog:
    number = store.open_sampler_log() if number is None else number
    store.commit(sync=True)
    folder, id = folder_of(store.directory, number), store.sampler_log_id(number)
    return SamplerLog(folder, number, id, commit_ms=commit_ms, segment_bytes=store.segment_bytes)


def both(store: RolloutStore) -> dict[int, SamplerLog]:
    return {number: log_for(store) for number in (1, 2)}


def draw(log: SamplerLog, store: RolloutStore, name: str, values: list[int], stop: bool = True) -> int:
    """Into the log of a sampler, all of it, as a process would that goes on behind what the store has."""
    (known,) = store.partial([name])
    row = store.entries.number(name)
    columns = [
        getattr(known, column)
        for column in ("response_ids", "logprob", "logprob_sampled", "logprob_stop", "version", "author")
    ]
    log.begin(row, store.names(name), known.prompt_ids, columns if known.response_ids.size else None)
    for value in values:
        log.append([row], [*token(name, value)[1:6], 0])
    log.commit(sync=True)
    if stop:
        log.finish(row, "stop")
        log.commit(sync=True)
    return row


def write(store: RolloutStore, logs: dict[int, SamplerLog], names: dict[str, int], *, linked: bool = True) -> Made:
    """Rollouts begun in the store and finished in the log of each one's number."""
    for name in names:
        begin(store, name)
    store.commit(sync=True)
    for length, (name, log) in enumerate(names.items(), start=3):
        if not log:
            for value in range(length):
                store.append(token(name, value))
            store.finish(name, "stop")
            continue
        row = draw(logs[log], store, name, list(range(length)))
        if linked:
            for found, facts in logs[log].links([row]):
                store.link(found, facts)
            store.note(name, reward=float(length))
    store.commit(sync=True)
    return {name: list(range(length)) for length, name in enumerate(names, start=3)}


def tokens(store: RolloutStore) -> Made:
    return {rollout.id: rollout.response_ids.tolist() for rollout in store.where().load()}


def read(directory: Path) -> Made:
    return tokens(RolloutStore(directory, read_only=True))


# Order


def test_one_store_in_the_order_of_the_stream(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    made = write(store, both(store), NAMES)
    assert list(tokens(store).items()) == list(read(tmp_path / "log").items()) == list(made.items())  # while they write
    assert [entry.length for entry in store.entries.values()] == [3, 4, 5, 6, 7]
    store.close()
    for index in ("nothing", "index.bin"):  # from the index, then from the logs alone
        (tmp_path / "log" / index).unlink(missing_ok=True)
        again = RolloutStore(tmp_path / "log", read_only=True)
        assert list(tokens(again).items()) == list(made.items())
        assert again.where(reward=lambda reward: reward > 3, length=lambda length: length > 3).ids == ["b", "d", "e"]
        assert again.entries["d"].versions == (3, 3)
        assert again.entries["d"].stop == "stop"
    report = check_log(tmp_path / "log")
    assert not report.damages
    assert report.finished == 5
    assert any(line.startswith("sampler-000002: open, 4 commits: 2 begin") for line in report.lines())
    assert repair(tmp_path / "log") == ["nothing is damaged; nothing was changed."]


def test_the_browser_of_a_run_shows_all_of_them(tmp_path: Path) -> None:
    store = opened(tmp_path / "rollouts")
    made = write(store, both(store), NAMES)
    (tmp_path / "resolved.yaml").write_text("stages: [{name: main, student: {model: tiny/generalist}}]")
    shown = RolloutBrowser(tmp_path)
    assert [row["id"] for row in shown.page({"sort": "newest"})["rows"]] == list(made)[::-1]
    assert shown.one(3)["tokens"]["ids"] == made["d"]


# What is written without such logs, and who may read it


def test_without_samplers_nothing_is_written_otherwise(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    write_rollout(store, "a", 3)
    store.close()
    header = read_segment_header((tmp_path / "log" / "segment-000000.log").read_bytes(), tmp_path)
    assert header.format == FORMAT
    index = (tmp_path / "log" / "index.bin").read_bytes()
    (length,) = struct.unpack("<Q", index[8:16])
    saved = json.loads(index[16 : 16 + length])
    assert [name for name, *_ in saved["sections"] if name.startswith("rows/")] == [
        f"rows/{name}" for name in (*INDEX_COLUMNS, *RATIO_COLUMNS)
    ]
    assert "logs" not in saved
    again = opened(tmp_path / "log")  # an index of before there were such logs, and a log that goes on
    assert again.index_was == "whole"
    made = write(again, both(again), {"b": 1, "c": 2})
    again.close()
    assert read(tmp_path / "log") == {"a": [0, 1, 2], **made}


def test_an_older_opd_rejects_such_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path / "log")
    write_rollout(store, "own", 3)
    store.commit(sync=True)
    logs = both(store)
    formats = [
        read_segment_header(path.read_bytes(), path).format for path in sorted((tmp_path / "log").glob("segment-*.log"))
    ]
    assert formats == [FORMAT, LINKED_FORMAT]  # from the first such record on
    write(store, logs, NAMES)
    store.close()
    monkeypatch.setattr("opd.store.log.LINKED_FORMAT", FORMAT)  # what that one knows
    for forgotten in ("nothing", "index.bin"):
        (tmp_path / "log" / forgotten).unlink(missing_ok=True)
        for act in (opened, read, check_log, repair):
            with pytest.raises(StoreError, match=r"segment-000001\.log, byte 8: log format 3"):
                act(tmp_path / "log")  # type: ignore[operator]


# Crashes


def test_whatever_moment_everything_is_killed_at(tmp_path: Path) -> None:
    """The run directory is copied behind every step of the three writers, and opened as by whoever comes next."""
    store, copies = opened(tmp_path / "log", segment_bytes=600), []

    def killed() -> None:
        copies.append(shutil.copytree(tmp_path / "log", tmp_path / f"copy{len(copies)}"))

    for name in ("a", "b"):
        begin(store, name)
    killed()
    log = log_for(store)
    killed()
    row = store.entries.number("a")
    log.begin(row, store.names("a"), np.array([5, 6]))
    for value in range(4):
        log.append([row], [*token("a", value)[1:6], 0])
        log.commit(sync=True)
        killed()
    log.finish(row, "stop")
    log.commit(sync=True)
    killed()
    for found, facts in log.links([row]):
        store.link(found, facts)
    killed()
    store.commit(sync=True)
    killed()
    draw(log, store, "b", [0, 1], stop=False)
    killed()
    store.settle(log.number)
    killed()
    other = log_for(store)
    draw(other, store, "b", [2, 3])
    killed()
    lengths = []
    for copy in copies:
        found = opened(copy)
        lengths.append([entry.length for entry in found.entries.values()])
        whole = tokens(found)
        parts = found.partial(found.unfinished())
        for name, ids in [*whole.items(), *((part.id, part.response_ids.tolist()) for part in parts)]:
            assert ids == list(range(len(ids))), (copy, name)
        assert whole.get("a", [0, 1, 2, 3]) == whole.get("b", [0, 1, 2, 3]) == [0, 1, 2, 3]
        for name in found.unfinished():  # and it goes on from there
            size = found.entries[name].length
            draw(log_for(found), found, name, list(range(size, 4)))
        found.close()
        if len(found):
            assert tokens(opened(copy)) == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}
        assert not check_log(copy).damages
    assert lengths == [[], [0, 0], [1, 0], [2, 0], [3, 0], [4, 0], [4, 0], [4, 0], [4, 0], [4, 2], [4, 2], [4, 4]]


def test_power_fails_at_any_moment(tmp_path: Path) -> None:
    """What each of the two has not synced is lost, torn or garbage: a link is never without what it links."""
    own, theirs = LossyFiles(), LossyFiles()
    store = opened(tmp_path / "log", files=own)
    acknowledged: dict[str, int] = {}  # tokens
    over: set[str] = set()

    def cut() -> None:
        for seed in range(3):
            lost, rng = tmp_path / f"lost{len(list(tmp_path.iterdir()))}", random.Random(seed)
            own.after_power_loss(lost, rng)
            theirs.after_power_loss(folder_of(lost, 1), rng)
            found = opened(lost)
            for name, size in acknowledged.items():
                assert found.entries[name].length >= size
                assert found.entries[name].stop or name not in over
            for part in [*found.where().load(), *found.partial(found.unfinished())]:
                assert part.response_ids.tolist() == list(range(part.response_ids.size))
                assert part.stop is None or part.response_ids.size == 5

    for name in "ab":
        begin(store, name)
    cut()
    number = store.open_sampler_log()
    store.commit(sync=True)
    acknowledged |= dict.fromkeys("ab", 0)
    log = SamplerLog(folder_of(store.directory, 1), number, store.sampler_log_id(1), commit_ms=0, files=theirs)
    for row, name in enumerate("ab"):
        cut()
        log.begin(row, store.names(name), np.array([5, 6]))
        for value in range(5):
            log.append([row], [*token(name, value)[1:6], 0])
            if value in (1, 4):
                log.commit(sync=True)
                acknowledged[name] = value + 1
                cut()
        log.finish(row, "stop")
        log.commit(sync=True)
        over.add(name)
        cut()
        for found, facts in log.links([row]):
            store.link(found, facts)
        cut()
        store.commit(sync=True)
        cut()


def test_a_process_that_outlives_its_trainer_is_ignored(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    begin(store, "a")
    orphan = log_for(store)
    row = draw(orphan, store, "a", [1, 2, 3], stop=False)
    again = opened(tmp_path / "log")  # the trainer was killed
    assert again.partial(["a"])[0].response_ids.tolist() == [1, 2, 3]
    orphan.append([row], [*token("a", 4)[1:6], 0])  # the orphan ends its step
    orphan.close()
    other = log_for(again)
    draw(other, again, "a", [50, 60], stop=False)
    last = opened(tmp_path / "log")  # killed again
    assert last.partial(["a"])[0].response_ids.tolist() == [1, 2, 3, 50, 60]
    draw(log_for(last), last, "a", [70])
    last.close()
    assert tokens(opened(tmp_path / "log")) == {"a": [1, 2, 3, 50, 60, 70]}
    assert not check_log(tmp_path / "log").damages


def test_a_log_that_grows_while_it_is_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an orphan, which also begins another segment: what was read counts, and no more."""
    store = opened(tmp_path / "log", segment_bytes=500)
    begin(store, "a")
    orphan = log_for(store)
    row = draw(orphan, store, "a", [0, 1], stop=False)
    copy_in = SegmentLog.copy_in

    def meanwhile(log: SegmentLog) -> None:
        copy_in(log)
        for value in range(2, 30):
            orphan.append([row], [*token("a", value)[1:6], 0])
            orphan.commit(sync=True)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "copy_in", meanwhile)
        again = opened(tmp_path / "log", segment_bytes=500)
    assert len(list(folder_of(tmp_path / "log", 1).iterdir())) > 1
    assert again.partial(["a"])[0].response_ids.tolist() == [0, 1]
    again.close()
    opened(tmp_path / "log").close()
    assert not check_log(tmp_path / "log").damages


def test_what_a_log_that_was_settled_empty_holds_later_is_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    begin(store, "a")
    orphan = log_for(store)
    again = opened(tmp_path / "log")
    row = draw(orphan, store, "a", [7])
    flip(folder_of(tmp_path / "log", 1) / "segment-000000.log", 0.3)
    assert again.entries["a"].length == row == 0
    again.close()
    opened(tmp_path / "log").close()
    assert not check_log(tmp_path / "log").damages


def test_another_continuation_is_never_glued_to_ours(tmp_path: Path) -> None:
    """Were two logs open that hold two answers, as cannot be: the one that the store has gone on with stays."""
    store = opened(tmp_path / "log")
    begin(store, "a")
    first, second = log_for(store), log_for(store)
    draw(first, store, "a", [1, 2, 3, 4], stop=False)
    draw(second, store, "a", [1, 2, 3, 50, 60])
    again = opened(tmp_path / "log")
    assert again.partial(["a"])[0].response_ids.tolist() == [1, 2, 3, 4]
    again.close()
    assert check_log(tmp_path / "log").finished == 0


def test_a_torn_tail_takes_nothing_from_others(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    logs = both(store)
    made = write(store, logs, NAMES)
    write(store, logs, {"f": 1, "g": 2}, linked=False)
    segment = folder_of(tmp_path / "log", 1) / "segment-000000.log"
    whole = segment.read_bytes()
    for cut in range(1, 120, 17):  # within the last frame, which nobody has heard of
        segment.write_bytes(whole[:-cut])
        copy = shutil.copytree(tmp_path / "log", tmp_path / f"copy{cut}")
        assert not check_log(copy).damages
        found = opened(copy)
        assert tokens(found) == {**made, "g": [0, 1, 2, 3]}
        assert found.partial(["f"])[0].response_ids.tolist() == [0, 1, 2]
        found.close()
        assert not check_log(copy).damages
        assert tokens(opened(copy)) == {**made, "g": [0, 1, 2, 3]}


def test_a_sampler_log_is_never_continued(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    log_for(store, 7).close()
    with pytest.raises(StoreError, match="never continued"):
        log_for(store, 7)


# Damage


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place) if place < 1 else len(data) - 9] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "d"),
    "gone": (lambda path: shutil.rmtree(path.parent), "ad"),
    "first frames": (lambda path: flip(path, 0.35), "a"),
    "last frame": (lambda path: flip(path, 1), "d"),
    "header": (lambda path: flip(path, 0.001), ""),
}


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("settled", [False, True])
def test_what_was_linked_and_is_lost_is_rejected_and_the_rest_repaired(tmp_path: Path, how: str, settled: bool) -> None:
    store = opened(tmp_path / "log")
    logs = both(store)
    made = write(store, logs, NAMES)
    begin(store, "open")
    draw(logs[2], store, "open", [0], stop=False)
    if settled:
        store.settle(1)
    store.commit(sync=True)
    damage, lost = DAMAGES[how]
    damage(folder_of(tmp_path / "log", 1) / "segment-000000.log")
    for _ in range(2):  # refused, and still rejected
        with pytest.raises(StoreError, match=r"sampler-000001/segment-000000\.log, byte \d+"):
            opened(tmp_path / "log")
    if lost:
        with pytest.raises(StoreError, match=r"sampler-000001/segment-000000\.log"):
            read(tmp_path / "log")
    report = check_log(tmp_path / "log")
    assert report.damages
    assert [line for line in report.lines() if "opd store repair" in line] == [report.lines()[-1]]
    said = "\n".join(repair(tmp_path / "log"))
    assert "sampler-000001/segment-000000.log" in said
    assert (f"lost: {', '.join(lost)}" if lost else "lost: no rollout") in said
    saved = opened(tmp_path / "log")
    assert list(tokens(saved).items()) == [(name, ids) for name, ids in made.items() if name not in lost]
    assert {entry.id: entry.notes for entry in saved.entries.values() if entry.id in "abde"} == {
        name: {"reward": float(len(made[name]))} for name in "abde"
    }
    assert saved.partial(["open"])[0].response_ids.tolist() == [0]
    assert set(saved.unfinished()) == {"open", *lost}  # they are drawn again, or on
    assert not numbers_in(tmp_path / "log")
    assert not check_log(tmp_path / "log").damages


def test_damage_of_the_own_log_keeps_what_samplers_have_of_it(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    logs = both(store)
    made = write(store, logs, NAMES)
    more = write(store, logs, {f"{name}2": log for name, log in NAMES.items() if log})
    whole = {**made, **more}
    own = sorted((tmp_path / "log").glob("segment-*.log"))[-1].name
    for place in range(2, 10):  # begins, links, what became of logs
        copy = shutil.copytree(tmp_path / "log", tmp_path / f"copy{place}")
        flip(copy / own, place / 10)
        with pytest.raises(StoreError):
            opened(copy)
        repair(copy)
        saved = tokens(opened(copy))
        assert list(saved.items()) == [(name, ids) for name, ids in whole.items() if name in saved]
        assert set(whole) - set(saved) <= {"c"}


def test_an_index_of_another_log_is_not_believed(tmp_path: Path) -> None:
    other = opened(tmp_path / "other", segment_bytes=1500)
    batches(other, 6)
    other.reclaim(other.entries.number("a5"))
    other.close()
    store = opened(tmp_path / "log")
    made = write(store, both(store), NAMES)
    store.close()
    shutil.copy(tmp_path / "other" / "index.bin", tmp_path / "log" / "index.bin")
    report = check_log(tmp_path / "log")
    assert (report.index, report.finished, report.damages) == ("of another log", len(made), [])
    flip(folder_of(tmp_path / "log", 1) / "segment-000000.log", 1)
    assert "lost: d" in "\n".join(repair(tmp_path / "log"))


@pytest.mark.parametrize("what", ["opened here", "begun here"])
def test_what_a_sampler_has_and_the_own_log_does_not_is_lost_there(tmp_path: Path, what: str) -> None:
    """It was durable before the sampler wrote. Nothing else testifies to the end of the own log."""
    store = opened(tmp_path / "log")
    before = shutil.copytree(tmp_path / "log", tmp_path / "before")
    logs = both(store)
    if what == "begun here":
        before = shutil.copytree(tmp_path / "log", tmp_path / "later")
    made = write(store, logs, {"a": 1, "b": 2}, linked=False)
    for path in (tmp_path / "log").glob("segment-*.log"):
        path.unlink()
    for path in before.glob("segment-*.log"):
        shutil.copy(path, tmp_path / "log")
    for _ in range(2):
        with pytest.raises(StoreError, match=rf"segment-00000\d\.log, byte \d+: .*{what}, and is lost"):
            opened(tmp_path / "log")
    assert what in str(check_log(tmp_path / "log").damages)
    repair(tmp_path / "log")
    assert tokens(opened(tmp_path / "log")) == made


def test_a_run_that_is_alive_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on, opens logs and gives them back between the reading of its own log and that of the samplers'."""
    store = opened(tmp_path / "log", segment_bytes=1500)
    batches(store, 4)
    joined = repair_module.join_samplers

    def meanwhile(report: Report, salvage: Salvage) -> None:
        write(store, {1: log_for(store)}, {"x": 1, "y": 1})
        store.reclaim(store.entries.number("a3"))
        joined(report, salvage)

    before = numbers_in(tmp_path / "log")
    with monkeypatch.context() as patch:
        patch.setattr(repair_module, "join_samplers", meanwhile)
        assert check_log(tmp_path / "log").damages == []
    assert not set(before) <= set(numbers_in(tmp_path / "log"))
    assert check_log(tmp_path / "log").damages == []


def test_records_of_a_newer_opd_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path / "log")
    logs = both(store)
    made = write(store, logs, NAMES)
    with monkeypatch.context() as patch:
        patch.setattr("opd.store.log.KINDS", {**log_module.KINDS, 9: "news"})
        logs[1]._commit.add(PendingRecord(9, 0, encode_record(9, 0, {"news": 1})))
        logs[1].commit(sync=True)
    for act in (opened, check_log, repair):
        with pytest.raises(StoreError, match=r"sampler-000001/segment-000000\.log, byte \d+: a record of kind 9"):
            act(tmp_path / "log")  # type: ignore[operator]
    assert read(tmp_path / "log") == made


def test_a_log_of_another_run_is_rejected(tmp_path: Path) -> None:
    for name in ("here", "there"):
        store = opened(tmp_path / name)
        write(store, both(store), NAMES)
    folder = folder_of(tmp_path / "here", 1)
    shutil.rmtree(folder)
    shutil.copytree(folder_of(tmp_path / "there", 1), folder)
    with pytest.raises(StoreError, match="belongs to another log"):
        opened(tmp_path / "here")
    with pytest.raises(StoreError, match="belongs to another log"):
        read(tmp_path / "here")
    assert check_log(tmp_path / "here").damages


def test_the_log_of_a_sampler_is_no_log_to_check_or_repair(tmp_path: Path) -> None:
    store = opened(tmp_path / "rollouts")
    write(store, both(store), NAMES)
    for act in (check_log, repair):
        with pytest.raises(RunDirectoryError, match="Name the run instead"):
            act(folder_of(tmp_path / "rollouts", 1))
    assert not check_log(tmp_path).damages


# Giving back


def batches(store: RolloutStore, count: int, signals: bool = False) -> Made:
    """As a trainer writes them, a batch ahead: two logs, a new one when one is full."""
    made: Made = {}
    numbers: dict[int, int | None] = {1: None, 2: None}
    logs: dict[int, SamplerLog] = {}
    for batch in range(count):
        for slot, number in numbers.items():
            numbers[slot] = found = store.open_sampler_log(number)
            if found != number:
                logs[slot] = log_for(store, found)
        made |= write(store, logs, {f"{name}{batch}": log for name, log in NAMES.items()})
        begin(store, f"ahead{batch}")  # before links that follow: a begin may be given back before its link
        made |= {f"ahead{batch}": [0]}
        if batch:
            row = draw(logs[1], store, f"ahead{batch - 1}", [0])
            for found_row, facts in logs[1].links([row]):
                store.link(found_row, facts)
            store.note(f"ahead{batch - 1}", reward=1.0)
    store.commit(sync=True)
    del made[f"ahead{count - 1}"]
    return made


def deleted_maps() -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "sampler-" in line and "deleted" in line
    ]


def test_few_logs_are_mapped_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.store.rollouts.LOGS_AT_ONCE", 2)
    store = opened(tmp_path / "log", segment_bytes=1500)
    made = batches(store, 4)
    assert len(store.index.logs) > 3
    assert tokens(store) == made
    assert len(store._samplers) == 2


def test_logs_are_given_back_while_the_run_lives(tmp_path: Path) -> None:
    store = opened(tmp_path / "log", segment_bytes=1500)
    made = batches(store, 10)
    assert tokens(store) == made  # all are mapped
    before, boundary = len(numbers_in(tmp_path / "log")), store.entries.number("a8")
    assert store.reclaim(boundary) > 0
    assert store.reclaim(boundary) == 0
    left = numbers_in(tmp_path / "log")
    assert 0 < len(left) < before
    assert not deleted_maps()  # which would hold the disk's blocks
    late = {name: ids for name, ids in made.items() if store.entries.number(name) >= boundary}
    store.commit(sync=True)
    for found in (store, RolloutStore(tmp_path / "log", read_only=True)):
        readable = tokens(found)
        assert late.items() <= readable.items() <= made.items()
        assert len(readable) < len(made) < len(found)
        with pytest.raises(StoreError, match="its tokens were deleted"):
            found.load(["a0"])
        assert found.entries["a0"].length == 3
    report = check_log(tmp_path / "log")
    assert not report.damages, report.lines()
    assert report.finished == len(tokens(store))
    store.close()
    for forgotten in ("nothing", "index.bin"):
        (tmp_path / "log" / forgotten).unlink(missing_ok=True)
        assert late.items() <= read(tmp_path / "log").items()
    again = opened(tmp_path / "log")  # and it goes on, with numbers that were never used
    assert again.open_sampler_log() > max(left)


def test_repair_after_deleting_segments_keeps_order_and_rewards(tmp_path: Path) -> None:
    store = opened(tmp_path / "log", segment_bytes=1500)
    made = batches(store, 10)
    store.reclaim(store.entries.number("a6"))
    kept, last = list(tokens(store)), max(numbers_in(tmp_path / "log"))
    store.settle(last)
    store.close()
    hit = next(name for name in kept if store.index["log"][store.entries.number(name)] == last)
    row = store.entries.number(hit)
    segment, place, size = (int(store.index[column][row]) for column in ("segment", "offset", "size"))
    path = folder_of(tmp_path / "log", last) / SEGMENT_NAME.format(segment)
    data = bytearray(path.read_bytes())
    data[place + size // 2] ^= 1
    path.write_bytes(data)
    said = "\n".join(repair(tmp_path / "log"))
    assert f"lost: {hit}" in said
    saved = opened(tmp_path / "log")
    assert list(tokens(saved)) == [name for name in kept if name != hit]
    assert saved.unfinished() == [name for name in (hit, "ahead9") if name in saved.entries]
    for name in kept:
        if not name.startswith(("ahead", "c")):
            assert saved.entries[name].notes == {"reward": float(len(made[name]))}


def test_a_log_that_was_to_go_when_everything_was_killed(tmp_path: Path) -> None:
    store = opened(tmp_path / "log", segment_bytes=1500)
    batches(store, 6)
    kept = shutil.copytree(tmp_path / "log", tmp_path / "copy")
    store.reclaim(store.entries.number("a5"))
    missing = set(numbers_in(kept)) - set(numbers_in(tmp_path / "log"))
    for number in missing:  # as if none of its files had been removed yet
        shutil.copytree(folder_of(kept, number), folder_of(tmp_path / "log", number))
    assert not check_log(tmp_path / "log").damages
    opened(tmp_path / "log").close()
    assert missing
    assert not missing & set(numbers_in(tmp_path / "log"))


def test_logs_of_processes_that_are_no_more_are_given_back_too(tmp_path: Path) -> None:
    """Also where a rollout was begun in one log and finished in another, after a kill."""
    store = opened(tmp_path / "log")
    logs = both(store)
    made = write(store, logs, NAMES)
    begin(store, "half")
    draw(logs[1], store, "half", [0, 1], stop=False)
    again = opened(tmp_path / "log")
    made |= write(again, {3: log_for(again)}, {"x": 3})
    draw(log_for(again), again, "half", [2])
    again.settle(4)
    again.reclaim(again.entries.number("half"))
    assert numbers_in(tmp_path / "log") == [3, 4]
    assert {"x": made["x"], "half": [0, 1, 2]}.items() <= tokens(again).items()


def test_giving_back_while_others_begin(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    write(store, both(store), NAMES)
    failures, over = [], threading.Event()

    def look() -> None:
        try:
            while not over.is_set():
                store.reclaim(0)
                store.readable()
        except BaseException as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(150):
            begin(store, f"n{number}")
            if number % 30 == 0:
                store.open_sampler_log()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures


def test_an_index_says_what_became_of_logs(tmp_path: Path) -> None:
    store = opened(tmp_path / "log")
    write(store, both(store), NAMES)
    store.settle(1)
    store.close()
    loaded = load_index(tmp_path / "log" / "index.bin")
    assert not isinstance(loaded, str)
    assert [(number, state.what) for number, state in loaded[0].logs.items()] == [(1, "settled"), (2, "open")]
