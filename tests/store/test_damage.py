"""Files that cannot lie: every truncation, flip, swap and full disk is cut, rejected with its place, or repaired."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.common.errors import StoreError
from opd.store import Position, RolloutStore, iterate, rollouts
from opd.store.log import AppendFile, Files
from opd.store.repair import check_log, find_log, repair
from tests.support.lossy import Life, Snapshot, snapshot
from tests.support.stores import begin, token, write_rollout

PLACE = r"(segment-\d+\.log|index\.bin), byte \d+: "


def make_log(directory: Path, *, rollouts: int = 6, segment_bytes: int = 1200, close: bool = True) -> Snapshot:
    """Finished rollouts, one commit each, then an unfinished one; several segments."""
    store = RolloutStore(directory, commit_ms=0, segment_bytes=segment_bytes)
    for number in range(rollouts):
        write_rollout(store, f"r{number}", 3 + number)
        store.note(f"r{number}", reward=number / 4)
        values = np.arange(3 + number, dtype=np.float32)
        store.record_signal(f"r{number}", "teacher", "logprobs_at", "t", 0, values, values > 0)
        store.commit(sync=True)
    begin(store, "open")
    store.append(token("open", 7))
    store.record_environment("open", 0, "ls", "x")
    store.commit(sync=True)
    known = snapshot(store)
    if close:
        store.close()
    return known


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.log"))


def copy(source: Path, target: Path, without: str = "") -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target, ignore=shutil.ignore_patterns(without) if without else None)


def outcome(directory: Path, read_only: bool = False) -> Snapshot | str:
    """All the store knows, or that it rejected and named the place."""
    try:
        return snapshot(RolloutStore(directory, read_only=read_only))
    except StoreError as error:
        return "refused" if re.search(PLACE, str(error)) else str(error)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Snapshot]:
    directory = tmp_path_factory.mktemp("log")
    return directory, make_log(directory)


def test_every_flipped_byte_of_a_closed_log_is_rejected(log: tuple[Path, Snapshot], tmp_path: Path) -> None:
    """With the index as a witness nothing passes for a torn tail. A reader never hands out anything but the truth."""
    source, known = log
    assert len(segments(source)) >= 3
    rng = random.Random(0)
    for path in segments(source):
        for place in range(path.stat().st_size):
            if place > 50 and place % 47:
                continue
            directory = copy(source, tmp_path / "flipped")
            damaged = bytearray((directory / path.name).read_bytes())
            damaged[place] ^= 1 << rng.randrange(8)
            (directory / path.name).write_bytes(damaged)
            with pytest.raises(StoreError, match=PLACE):
                RolloutStore(directory)
            assert (directory / path.name).read_bytes() == damaged
            assert outcome(directory, read_only=True) in (known, "refused")
            assert check_log(directory).damages, place


def test_every_truncation_of_a_closed_log_is_rejected(log: tuple[Path, Snapshot], tmp_path: Path) -> None:
    source, _ = log
    for path in segments(source):
        for size in range(0, path.stat().st_size, 23):
            directory = copy(source, tmp_path / "cut")
            os.truncate(directory / path.name, size)
            with pytest.raises(StoreError, match=PLACE):
                RolloutStore(directory)
            assert check_log(directory).damages


@given(st.integers(0, 10**9), st.integers(1, 255))
def test_a_flip_without_an_index_is_rejected_or_cuts_the_last_frame(position: int, change: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "log"
        known = make_log(directory, close=False)
        paths = segments(directory)
        data = bytearray(b"".join(path.read_bytes() for path in paths))
        place = position % len(data)
        for path in paths:
            size = path.stat().st_size
            if place < size:
                damaged = bytearray(path.read_bytes())
                damaged[place] ^= change
                path.write_bytes(damaged)
                break
            place -= size
        found = outcome(directory)
        if found == "refused":
            return
        assert path == paths[-1]  # only a last frame looks like a torn one
        known.pop("open")
        assert found == known


def test_damage_is_distinguished_from_a_torn_tail(tmp_path: Path) -> None:
    """The same flip, before a good frame and as the last one; and what power loss can leave behind: zeros, garbage."""
    known = make_log(tmp_path / "log", segment_bytes=1 << 20, close=False)
    path = segments(tmp_path / "log")[0]
    data = path.read_bytes()
    starts = [match.start() for match in re.finditer(re.escape(bytes.fromhex("9b5e0f7d")), data)]
    damaged = bytearray(data)
    damaged[starts[-2] + 30] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(
        StoreError, match=rf"byte {starts[-2]}: the frame is damaged, and a good one follows at byte {starts[-1]}"
    ):
        RolloutStore(tmp_path / "log")
    known.pop("open")
    for tail in (b"", bytes(1), bytes(5000), data[starts[-1] : -8] + bytes(8), data[starts[-1] : -1], os.urandom(300)):
        path.write_bytes(data[: starts[-1]] + tail)
        reader = RolloutStore(tmp_path / "log", read_only=True)
        assert snapshot(reader) == known
        report = check_log(tmp_path / "log")
        assert not report.damages
        assert (report.torn is None) == (not tail)
        assert snapshot(RolloutStore(tmp_path / "log")) == known
        assert path.stat().st_size == starts[-1]


def test_segments_missing_swapped_foreign_and_empty(log: tuple[Path, Snapshot], tmp_path: Path) -> None:
    source, _ = log
    names = [path.name for path in segments(source)]
    other = tmp_path / "other"
    make_log(other)

    def refused(words: str, without_index: bool = True) -> None:
        for index in (True, False) if without_index else (True,):
            if not index:
                (tmp_path / "x" / "index.bin").unlink()
            for read_only in (False, True):
                with pytest.raises(StoreError, match=words):
                    RolloutStore(tmp_path / "x", read_only=read_only)
            assert check_log(tmp_path / "x").damages

    for name in names[:-1]:
        (copy(source, tmp_path / "x") / name).unlink()
        refused(rf"{name}, byte 0: the segment is missing")
    (copy(source, tmp_path / "x") / names[-1]).unlink()
    refused(r"index.bin was written when the log reached this byte", without_index=False)
    for path in segments(copy(source, tmp_path / "x")):
        path.unlink()
    refused("durable rollouts are lost", without_index=False)
    (copy(source, tmp_path / "x") / "segment-999999.log").mkdir()
    for reading in (RolloutStore, check_log):
        with pytest.raises(StoreError, match=r"segment-999999\.log: a directory where a segment"):
            reading(tmp_path / "x")
    directory = copy(source, tmp_path / "x")
    (directory / names[0]).rename(directory / "swap")
    (directory / names[1]).rename(directory / names[0])
    (directory / "swap").rename(directory / names[1])
    with pytest.raises(StoreError, match=r"byte 12: its header says segment 1"):
        RolloutStore(directory)
    shutil.copy(other / names[1], copy(source, tmp_path / "x") / names[1])
    with pytest.raises(StoreError, match=rf"{names[1]}, byte 16: this segment belongs to another log"):
        RolloutStore(tmp_path / "x")
    for name in names:
        (copy(source, tmp_path / "x", without="index.bin") / name).write_bytes(b"")
        with pytest.raises(StoreError, match=rf"{name}, byte 0: the segment's header is cut off"):
            RolloutStore(tmp_path / "x")
    (copy(source, tmp_path / "x") / names[0]).write_bytes(b"something else entirely" * 5)
    with pytest.raises(StoreError, match="not a rollout log"):
        RolloutStore(tmp_path / "x")


def test_a_missing_or_duplicate_frame_is_rejected(tmp_path: Path) -> None:
    make_log(tmp_path / "log", segment_bytes=1 << 20, close=False)
    path = segments(tmp_path / "log")[0]
    data = path.read_bytes()
    starts = [match.start() for match in re.finditer(re.escape(bytes.fromhex("9b5e0f7d")), data)]
    without = data[: starts[2]] + data[starts[3] :]
    doubled = data[: starts[3]] + data[starts[2] :]
    for changed, place in ((without, starts[2]), (doubled, starts[3])):
        path.write_bytes(changed)
        with pytest.raises(StoreError, match=rf"byte {place}: "):
            RolloutStore(tmp_path / "log")


def test_the_index_is_only_a_shortcut(log: tuple[Path, Snapshot], tmp_path: Path) -> None:
    """Missing, cut or flipped anywhere it is built again; behind the log it catches up; it is never believed blindly."""
    source, known = log
    size = (source / "index.bin").stat().st_size
    rng = random.Random(1)
    for number in range(60):
        directory = copy(source, tmp_path / "x")
        data = bytearray((directory / "index.bin").read_bytes())
        if number % 2:
            data[rng.randrange(size)] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(size) :]
        (directory / "index.bin").write_bytes(data)
        reader = RolloutStore(directory, read_only=True)
        assert reader.index_was == "damaged"
        assert snapshot(reader) == known
    store = RolloutStore(directory, commit_ms=0)
    assert snapshot(store) == known
    store.close()
    assert RolloutStore(directory, read_only=True).index_was == "whole"
    store = RolloutStore(directory, commit_ms=0)
    write_rollout(store, "later", 4)
    store.commit(sync=True)  # and then it crashes
    reader = RolloutStore(directory, read_only=True)
    assert reader.index_was == "outdated"
    assert {**known, "later": snapshot(store)["later"]} == snapshot(reader)


def test_the_index_is_saved_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run that crashes is not replayed from its beginning; and what the index saw durable is missed if it goes."""
    monkeypatch.setattr(rollouts, "INDEX_ROWS", 5)
    make_log(tmp_path, rollouts=40, close=False)
    reader = RolloutStore(tmp_path, read_only=True)
    assert reader.index_was == "outdated"
    known = snapshot(reader)
    (tmp_path / "index.bin").rename(tmp_path / "index")
    assert snapshot(RolloutStore(tmp_path, read_only=True)) == known
    (tmp_path / "index").rename(tmp_path / "index.bin")
    for path in segments(tmp_path)[2:]:
        path.unlink()
    with pytest.raises(StoreError, match=r"index.bin was written when the log reached this byte"):
        RolloutStore(tmp_path)


def test_a_checkpoint_can_ask_for_what_it_was_written_with(tmp_path: Path) -> None:
    make_log(tmp_path / "log", close=False)
    store = RolloutStore(tmp_path / "log", commit_ms=0)
    early = Position.from_json(store.position.to_json())
    write_rollout(store, "later", 2)
    late = store.position
    store.require(early, "step-000001")
    store.require(late, "step-000002")
    last = segments(tmp_path / "log")[-1]
    os.truncate(last, last.stat().st_size - 1)
    store = RolloutStore(tmp_path / "log", commit_ms=0)
    store.require(early, "step-000001")
    with pytest.raises(StoreError, match=rf"{last.name}, byte {late.offset}: step-000002 was written when"):
        store.require(late, "step-000002")


# The disk fills


class SmallDisk(Files):
    def __init__(self, room: int) -> None:
        self.room = room

    def append(self, path: Path) -> AppendFile:
        return SmallDiskFile(path, self)


class SmallDiskFile(AppendFile):
    def __init__(self, path: Path, disk: SmallDisk) -> None:
        super().__init__(path)
        self._disk = disk

    def write(self, data: bytes) -> None:
        taken = min(len(data), self._disk.room)
        self._disk.room -= taken
        super().write(data[:taken])
        if taken < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("commit_ms", [0, 1])
def test_a_full_disk_loses_nothing_durable(tmp_path: Path, commit_ms: int) -> None:
    for room in range(100, 6000, 157 if commit_ms else 97):
        directory, life = tmp_path / f"{commit_ms}-{room}", Life(room)
        store = RolloutStore(directory, commit_ms=commit_ms, segment_bytes=900, files=SmallDisk(room))
        with pytest.raises(StoreError, match=r"the disk is full .* store.hidden: false") as caught:
            life.live(store, 1000)
        assert re.search(PLACE, str(caught.value))
        with pytest.raises(StoreError, match="disk is full"):
            store.commit(sync=True)
        with pytest.raises(StoreError, match="disk is full"):
            store.close()
        store.close()
        assert not (directory / "index.bin").exists()
        assert not check_log(directory).damages
        if not commit_ms:
            assert snapshot(RolloutStore(directory)) == life.acknowledged
        else:
            assert RolloutStore(directory).entries.keys() >= life.acknowledged.keys()


FILL = """
import sys
from pathlib import Path
from opd.common.errors import StoreError
from opd.store import RolloutStore, iterate
from tests.support.stores import write_rollout

directory, durable = Path(sys.argv[1]), 0
store = RolloutStore(directory)
try:
    while True:
        write_rollout(store, f"r{durable}", 200)
        store.load([f"r{durable}"])
        durable += 1
except StoreError as error:
    assert "the disk is full" in str(error), error
assert len(list(iterate(RolloutStore(directory)))) == durable > 10
print("durable", durable)
"""


def test_a_really_full_disk(tmp_path: Path) -> None:
    """A tmpfs of 300 kB in a mount namespace of its own."""
    script = f'mount -t tmpfs -o size=300k none "{tmp_path}" && exec "{sys.executable}" -c "$0" "{tmp_path}/log"'
    if subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces here")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(["unshare", "-Urm", "sh", "-c", script, FILL], check=False, capture_output=True, text=True,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("durable")


# Repair


def test_repair_keeps_everything_intact(log: tuple[Path, Snapshot], tmp_path: Path) -> None:
    """One flip anywhere: at most the rollouts of one commit are lost, all others come back exactly."""
    source, known = log
    rng = random.Random(2)
    for number in range(60):
        run = tmp_path / f"run{number}"
        directory = copy(source, run / "rollouts", without="index.bin" if number % 2 else "")
        path = rng.choice(segments(directory))
        damaged = bytearray(path.read_bytes())
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        if not check_log(run).damages:  # the last frame, and no index that saw it
            continue
        lines = repair(run)
        kept = snapshot(RolloutStore(directory))
        assert len(kept) >= len(known) - 1
        assert all(found == known[name] for name, found in kept.items())
        assert not check_log(run).damages
        assert (run / "rollouts.damaged" / path.name).read_bytes() == damaged
        missing = known.keys() - kept.keys()
        assert all(any(name in line for line in lines) for name in missing) or number % 2


@pytest.mark.parametrize("place", [0, 1, 2])
def test_repair_counts_rollouts_that_one_frame_held_completely(place: int, tmp_path: Path) -> None:
    """Without an index its name is lost with the frame; those that come later show that it was there."""
    store = RolloutStore(tmp_path / "rollouts", commit_ms=0)
    offsets = []
    for name in ("first", "second", "third"):
        offsets.append(store.position.offset)
        begin(store, name)
        store.append(token(name, 1))
        store.finish(name, "stop")
        store.commit(sync=True)
    begin(store, "open")
    store.commit(sync=True)
    store.close()
    (tmp_path / "rollouts" / "index.bin").unlink()
    path = segments(tmp_path / "rollouts")[0]
    damaged = bytearray(path.read_bytes())
    damaged[offsets[place] + 40] ^= 16
    path.write_bytes(damaged)
    lines = repair(tmp_path)
    assert f"lost: rollout number {place} (its name is lost too)" in lines
    assert any(re.search(r"index: missing. \d+ bytes are damaged, in one place: rollouts", line) for line in lines)


def test_repair_of_a_log_that_was_cut(log: tuple[Path, Snapshot], tmp_path: Path) -> None:
    """The index saw more than is left: the log is rejected, and repair keeps the rest and names what is gone."""
    source, known = log
    for number, path in enumerate(segments(source)):
        run = tmp_path / f"run{number}"
        directory = copy(source, run / "rollouts")
        os.truncate(directory / path.name, path.stat().st_size // 2)
        assert outcome(directory) == "refused"
        lines = repair(run)
        kept = snapshot(RolloutStore(directory))
        gone = known.keys() - kept.keys()
        assert gone
        assert all(found == known[name] for name, found in kept.items())
        assert all(any(name in line for line in lines if line.startswith("lost")) for name in gone)


def test_repair_cuts_unfinished_rollouts_at_the_damage(tmp_path: Path) -> None:
    """Tokens behind a hole may not be the next ones; a finish record behind it is whole in itself."""
    store = RolloutStore(tmp_path / "rollouts", commit_ms=0)
    for name in ("long", "done"):
        begin(store, name)
    places = []
    for value in range(5):
        for name in ("long", "done"):
            store.append(token(name, value))
        store.commit(sync=True)
        places.append(store.position.offset)
    store.finish("done", "stop")
    position = store.position
    store.close()
    path = segments(tmp_path / "rollouts")[0]
    damaged = bytearray(path.read_bytes())
    damaged[places[2] + 40] ^= 16
    path.write_bytes(damaged)
    lines = repair(tmp_path)
    assert any("later tokens of long" in line for line in lines)
    repaired = RolloutStore(tmp_path / "rollouts")
    assert repaired.partial(["long"])[0].response_ids.tolist() == [0, 1, 2]
    assert repaired.load(["done"])[0].response_ids.tolist() == [0, 1, 2, 3, 4]
    repaired.require(position, "an old checkpoint")
    assert repair(tmp_path) == ["nothing is damaged; nothing was changed."]
    assert [rollout.id for rollout in iterate(repaired)] == ["done"]


def test_the_commands(log: tuple[Path, Snapshot], tmp_path: Path, capsys: pytest.CaptureFixture[str],
                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from opd import cli

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["opd", "store", *arguments])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        captured = capsys.readouterr()
        return int(leaving.value.code or 0), captured.out + captured.err

    source, known = log
    directory = copy(source, tmp_path / "rollouts")
    code, said = call("check", str(tmp_path))
    assert code == 0
    assert "segment-000000.log" in said
    assert "rollouts: 6 finished, 1 unfinished" in said
    assert "index: whole" in said
    path = segments(directory)[1]
    damaged = bytearray(path.read_bytes())
    damaged[60] ^= 4
    path.write_bytes(damaged)
    code, said = call("check", str(tmp_path))
    assert code == 1
    assert re.search(rf"DAMAGED .*{path.name}, byte 32: damaged, \d+ bytes", said)
    code, said = call("repair", str(tmp_path))
    assert code == 0
    assert "rollouts.damaged" in said
    assert call("check", str(tmp_path))[0] == 0
    assert len(RolloutStore(directory)) >= len(known) - 1
    assert call("check", str(tmp_path / "nowhere"))[0] == 2


# A repair that is killed


class Killed(BaseException):
    pass


def test_a_repair_may_be_killed_at_any_step(
    log: tuple[Path, Snapshot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever operation on the disk is its last: who opens the log next finds all that was whole, or the damage."""
    source, known = log
    for last in range(200):
        run = tmp_path / f"run{last}"
        directory = copy(source, run / "rollouts")
        path = segments(directory)[0]
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 2] ^= 4
        path.write_bytes(damaged)
        left = itertools.count(last, -1)
        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "fsync"):
                patch.setattr(os, name, _killed_at(getattr(os, name), left))
            try:
                repair(run)
                ended = True
            except Killed:
                ended = False
        place = find_log(run)
        whole = bool(check_log(run).damages) is (place == directory and not (directory / "repaired.json").exists())
        assert whole, last
        if not check_log(run).damages:
            seen = snapshot(RolloutStore(directory, read_only=True))  # before anything is touched
            assert snapshot(RolloutStore(directory)) == seen
        assert repair(run)
        kept = snapshot(RolloutStore(directory))
        assert len(kept) >= len(known) - 1
        assert all(found == known[name] for name, found in kept.items())
        if ended:
            return
    raise AssertionError("a repair has fewer operations than this")


def _killed_at(original: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
    def operation(*arguments: Any, **options: Any) -> Any:
        if next(left) == 0:
            raise Killed
        return original(*arguments, **options)

    return operation


def test_no_new_log_is_started_next_to_a_damaged_one(log: tuple[Path, Snapshot], tmp_path: Path) -> None:
    copy(log[0], tmp_path / "rollouts.damaged")
    with pytest.raises(StoreError, match=r"the log is missing, but rollouts.damaged is there"):
        RolloutStore(tmp_path / "rollouts")


def with_steps(directory: Path) -> list[Path]:
    """A finished rollout with two steps of its episode, then a grader's call; one segment per commit."""
    store = RolloutStore(directory, commit_ms=0, segment_bytes=1)
    begin(store, "a")
    store.append(token("a", 7))
    store.commit(sync=True)
    for order in range(2):
        store.record_call("a", order, f"call {order}")
        store.commit(sync=True)
        store.record_result("a", order, f"result {order}")
        store.commit(sync=True)
    store.finish("a", "env")
    store.commit(sync=True)
    store.record_environment("a", 0, "graded?", "yes")
    store.commit(sync=True)
    write_rollout(store, "b", 3)
    store.commit(sync=True)
    store.close()
    return segments(directory)


@pytest.mark.parametrize("lost", ["b", "call 0", "result 1"])
def test_a_repair_keeps_steps_apart_from_calls_of_graders(tmp_path: Path, lost: str) -> None:
    files = with_steps(tmp_path)
    assert [one.result for one in RolloutStore(tmp_path, read_only=True).environment("a")] == ["result 0", "result 1"]
    marks = {"b": b'"id":"b"', "call 0": b'"call":"call 0"', "result 1": b'"result":"result 1"'}
    (path,) = [path for path in files if marks[lost] in path.read_bytes()]
    raw = path.read_bytes()
    at = raw.index(marks[lost])
    path.write_bytes(raw[:at] + b"X" + raw[at + 1 :])
    repair(tmp_path)
    store = RolloutStore(tmp_path)
    steps = [(one.call, one.finished) for one in store.environment("a") if one.call != "graded?"]
    assert (
        steps
        == {"b": [("call 0", True), ("call 1", True)], "call 0": [], "result 1": [("call 0", True), ("call 1", False)]}[
            lost
        ]
    )
    assert [record.call for _, record in store.calls([store.entries.number("a")])] == ["graded?"]
    store.close()
