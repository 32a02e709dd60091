"""The rollout store: what goes in comes out, only finished rollouts can be read, and everything known of them is kept."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest

from opd.common.errors import StoreError
from opd.records import Author, SampledToken, TokenColumns, TopK
from opd.store import Replay, RolloutStore, iterate
from opd.store.log import HEADER, read_frame, read_segment_header
from tests.support.stores import begin, token, write_rollout


def test_round_trip_of_interleaved_rollouts(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    begin(store, "a")
    begin(store, "b", (7,))
    for value in range(5):
        store.append(token("a", value))
        store.append(token("b", 10 + value))
        store.commit(sync=True)
    store.finish("b", "length")
    store.append(token("a", 5))
    store.finish("a", "stop")
    store.note("a", reward=1.0)
    store.commit(sync=True)
    reader = RolloutStore(tmp_path, read_only=True)  # beside the living writer
    store.close()
    for opened in (reader, RolloutStore(tmp_path, read_only=True), RolloutStore(tmp_path)):
        b, a = opened.load(["b", "a"])
        assert a.response_ids.tolist() == [0, 1, 2, 3, 4, 5]
        assert b.response_ids.tolist() == [10, 11, 12, 13, 14]
        assert (a.prompt_ids.tolist(), b.prompt_ids.tolist()) == ([5, 6], [7])
        assert (a.stop, b.stop) == ("stop", "length")
        np.testing.assert_allclose(a.logprob, -0.5 * np.arange(6))
        np.testing.assert_allclose(a.logprob_sampled, -0.25 * np.arange(6))
        assert set(a.author) == {Author.STUDENT}
        assert set(a.version) == {3}
        assert (a.visit, a.sample, a.group, a.domain) == (1, 2, "g", "d")
        assert opened.entries["a"].notes == {"reward": 1.0}
        assert opened.entries["a"].length == 6
        assert [entry.id for entry in reversed(opened.entries.values())] == ["b", "a"]
        assert [rollout.id for rollout in iterate(opened)] == ["a", "b"]


def test_a_living_store_reads_its_own_rollouts(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, segment_bytes=512)
    for number in range(20):
        write_rollout(store, f"r{number}", 7)
        (rollout,) = store.load([f"r{number}"])
        assert rollout.response_ids.tolist() == list(range(7))
    assert len(list(tmp_path.glob("segment-*.log"))) > 3


def test_unfinished_rollouts_cannot_be_read(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    begin(store, "a")
    store.append(token("a", 1))
    with pytest.raises(StoreError, match="not finished"):
        store.load(["a"])
    with pytest.raises(StoreError, match="twice"):
        begin(store, "a")
    with pytest.raises(StoreError, match="not in the store"):
        store.load(["b"])
    with pytest.raises(StoreError, match="never begun"):
        store.append(token("b", 1))
    store.finish("a", "stop")
    with pytest.raises(StoreError, match="finished already"):
        store.append(token("a", 2))
    with pytest.raises(StoreError, match="`load` reads it"):
        store.partial(["a"])


def test_unfinished_rollouts_resume_where_they_stopped(tmp_path: Path) -> None:
    """Over a clean close (the index was saved) and over a crash (it was not): same tokens, versions told apart."""
    for round_number in range(4):
        store = RolloutStore(tmp_path)
        if not round_number:
            write_rollout(store, "done", 3)
            begin(store, "a", (4, 5, 6))
        (before,) = store.partial(["a"])
        assert (before.stop, before.prompt_ids.tolist()) == (None, [4, 5, 6])
        assert before.response_ids.tolist() == list(range(2 * round_number))
        assert store.unfinished() == ["a"]
        for value in range(2 * round_number, 2 * round_number + 2):
            store.append(token("a", value)._replace(version=round_number))
        store.commit(sync=True)
        if round_number % 2:
            store.close()
        (reader,) = RolloutStore(tmp_path, read_only=True).partial(["a"])
        assert reader.response_ids.tolist() == list(range(2 * round_number + 2))
    store = RolloutStore(tmp_path)
    store.finish("a", "length")
    (rollout,) = store.load(["a"])
    assert rollout.response_ids.tolist() == list(range(8))
    assert rollout.version.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert store.entries["a"].versions == (0, 3)
    assert store.entries["a"].stop == "length"


def test_data_tokens_have_no_behaviour(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    begin(store, "a")
    store.extend("a", np.array([4, 5]), Author.DATA, 0)
    store.finish("a", "stop")
    begin(store, "empty")
    store.finish("empty", "stop")
    rollout, empty = store.load(["a", "empty"])
    assert np.isnan(rollout.logprob).all()
    assert set(rollout.author) == {Author.DATA}
    assert (empty.response_ids.size, store.entries["empty"].versions) == (0, (-1, -1))


def test_signals_survive(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    write_rollout(store, "a", 3)
    write_rollout(store, "b", 2)
    values, mask = np.array([-1.5, np.nan, -0.25], dtype=np.float32), np.array([True, False, True])
    top = TopK(np.array([[1, 2]] * 3), np.full((3, 2), -0.5, np.float32), np.zeros(3), np.ones(3), "abc")
    assert store.record_signal("a", "teacher", "logprobs_at", "maths", 4, values - 1, mask)
    assert store.record_signal("a", "teacher", "logprobs_at", "maths", 5, values, mask, spans=[(0, 3, 2, 5)])
    assert store.record_signal("a", "reference", "topk", "old", 0, top, mask)
    assert not store.record_signal("a", "teacher", "hidden", "maths", 5, np.ones((3, 4)), mask)
    store.configure(commit_ms=50, fsync="commit", hidden=True)
    assert store.record_signal("b", "teacher", "hidden", "maths", 5, np.ones((2, 4), np.float32), mask[:2])
    store.commit(sync=True)
    reader = RolloutStore(tmp_path, read_only=True)
    store.close()
    for opened in (reader, RolloutStore(tmp_path)):
        signal = opened.signals(["b", "a"], "teacher", "logprobs_at")["a"]
        np.testing.assert_array_equal(signal.values, values)
        np.testing.assert_array_equal(signal.mask, mask)
        assert (signal.teacher, signal.teacher_version, signal.spans) == ("maths", 5, ((0, 3, 2, 5),))
        kept = opened.signals(["a"], "reference", "topk")["a"].values
        np.testing.assert_array_equal(kept.ids, top.ids)
        assert kept.fingerprint == "abc"
        assert opened.signals(["b"], "teacher", "hidden")["b"].values.shape == (2, 4)
        assert opened.signals(["a"], "teacher", "hidden") == {}
        assert opened.entries["a"].teacher == "maths"


def test_environment_calls_are_replayed_and_never_executed_again(tmp_path: Path) -> None:
    executed: list[str] = []

    def run(name: str) -> dict[str, object]:
        executed.append(name)
        return {"out": (1, name)}

    store = RolloutStore(tmp_path)
    begin(store, "a")
    replay = Replay(store, "a")
    first = replay.call({"run": "ls"}, lambda: run("ls"))
    assert first == {"out": [1, "ls"]}
    for reopen in (False, True):  # a crash, then a clean close
        if reopen:
            store.close()
        store = RolloutStore(tmp_path)
        replay = Replay(store, "a")
        assert replay.call({"run": "ls"}, lambda: run("ls")) == first
        assert executed == ["ls"]
    with pytest.raises(StoreError, match=r"diverged at environment call 0: the log has \{'run': 'ls'\}"):
        Replay(store, "a").call({"run": "rm"}, lambda: run("rm"))
    replay.call("again", lambda: run("again"))
    assert [(record.order, record.call) for record in store.environment("a")] == [(0, {"run": "ls"}), (1, "again")]
    with pytest.raises(StoreError, match="call 2 is next"):
        store.record_environment("a", 7, "x", None)
    with pytest.raises(StoreError, match="plain JSON"):
        replay.call(object(), lambda: None)


def test_notes(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for name in "abc":
        write_rollout(store, name, 1)
    store.note("a", score=0.1)  # as older runs wrote it
    store.note("b", score=None, why="unreadable")
    store.note("c", reward=1)
    store.note("c", by="x")
    store.close()
    for opened in (RolloutStore(tmp_path), RolloutStore(tmp_path, read_only=True)):
        notes = [entry.notes for entry in opened.entries.values()]
        assert notes == [{"reward": 0.1}, {"reward": None, "why": "unreadable"}, {"reward": 1.0, "by": "x"}]
        np.testing.assert_array_equal(opened.index["reward"], [0.1, np.nan, 1.0])


def test_a_group_commit_happens_by_itself(tmp_path: Path) -> None:
    """Nobody calls commit: the tokens are in the log all the same, those that came during a write in one frame."""
    store = RolloutStore(tmp_path, commit_ms=20)
    with store._commit.writing:  # as if the disk were busy
        begin(store, "a")
        for value in range(50):
            store.append(token("a", value))
    until = time.monotonic() + 600  # a hang, on any machine
    while store._commit._durable < 51 and time.monotonic() < until:
        time.sleep(0.01)
    (rollout,) = RolloutStore(tmp_path, read_only=True).partial(["a"])
    assert rollout.response_ids.tolist() == list(range(50))
    frames = (tmp_path / "segment-000000.log").read_bytes().count(bytes.fromhex("9b5e0f7d"))
    assert 1 <= frames <= 2


def test_a_reader_never_touches_the_files(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    write_rollout(store, "a", 2)
    write_rollout(store, "b", 2)
    store.commit(sync=True)
    path = tmp_path / "segment-000000.log"
    torn = path.read_bytes()[:-3]
    path.write_bytes(torn)
    reader = RolloutStore(tmp_path, read_only=True)
    assert [rollout.id for rollout in iterate(reader)] == []  # one commit held both
    assert path.read_bytes() == torn
    assert sorted(file.name for file in tmp_path.iterdir()) == ["segment-000000.log"]
    with pytest.raises(StoreError, match="read-only"):
        begin(reader, "c")
    with pytest.raises(StoreError, match="read-only"):
        reader.commit()


def test_the_store_needs_no_torch() -> None:
    code = "import sys; import opd.store, opd.runner.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_many_tokens_at_once_are_those_one_by_one(tmp_path: Path) -> None:
    """Columns of several rollouts, of one, and single tokens between them: the same log, byte for byte but its id."""
    single, many = (RolloutStore(tmp_path / name, commit_ms=0) for name in ("single", "many"))
    for store in (single, many):
        for name in ("a", "b"):
            store.begin(
                id=name, prompt_id=name, visit=0, sample=0, domain="d", source="student", prompt_ids=np.arange(3)
            )
    drawn = [SampledToken("ab"[at % 2], at, -0.5 * at, -0.25 * at, -3.0 - at, at // 4) for at in range(10)]
    for item in drawn:
        single.append(item)
    values = np.arange(12)
    reused = values[:4]
    many.append_many(TokenColumns(list("abab"), reused, -0.5 * reused, -0.25 * reused, -3.0 - reused, reused // 4))
    many.append(drawn[4])
    values[:] = 77  # the caller's own again
    rest = np.arange(5, 10)
    many.append_many(
        TokenColumns([item.request_id for item in drawn[5:]], rest, -0.5 * rest, -0.25 * rest, -3.0 - rest, rest // 4)
    )
    single.extend("a", np.array([5, 6]), Author.DATA, 3)
    nan = float("nan")
    many.append_many(TokenColumns("a", np.array([5, 6]), nan, nan, nan, 3), np.array([Author.DATA, Author.DATA]))
    many.append_many(TokenColumns("b", np.zeros(0), nan, nan, nan, 3))  # nothing
    for store in (single, many):
        store.commit(sync=True)
        store.finish("a", "stop")
        store.close()
    names = [tmp_path / name / "segment-000000.log" for name in ("single", "many")]
    one, other = (read_payloads(path) for path in names)
    assert one == other
    kept = RolloutStore(tmp_path / "many", read_only=True)
    assert kept.load(["a"])[0].response_ids.tolist() == [0, 2, 4, 6, 8, 5, 6]
    assert kept.partial(["b"])[0].logprob.tolist() == [-0.5, -1.5, -2.5, -3.5, -4.5]
    with pytest.raises(StoreError, match="never begun"):
        RolloutStore(tmp_path / "many", commit_ms=0).append_many(
            TokenColumns(["b", "c"], np.arange(2), nan, nan, nan, 0)
        )


@pytest.mark.parametrize("commit_ms", [0, 1])
def test_two_threads_write_in_the_order_of_the_log(tmp_path: Path, commit_ms: int) -> None:
    store = RolloutStore(tmp_path / "log", commit_ms=commit_ms)

    def write(name: str) -> None:
        for number in range(100):
            write_rollout(store, f"{name}{number}", 3)
            store.commit()
            assert len(store.readable()) <= 200

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    store.close()
    (tmp_path / "log" / "index.bin").unlink()  # so that every record is read again
    again = RolloutStore(tmp_path / "log", read_only=True)
    assert [rollout.response_ids.tolist() for rollout in iterate(again)] == [[0, 1, 2]] * 200


def read_payloads(path: Path) -> list[bytes]:
    data = path.read_bytes()
    seed, offset, found = zlib.crc32(read_segment_header(data, path).log_id), HEADER.size, []
    while (frame := read_frame(data, offset, seed)) is not None:
        found.append(bytes(frame.payload))
        offset = frame.end
    return found
