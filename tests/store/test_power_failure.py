"""Power fails at any byte and any moment: what was durable is there, exactly, and the log goes on behind it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from opd.store import RolloutStore, rollouts
from opd.store.log import AppendFile
from tests.support.lossy import Life, LossyFile, LossyFiles, PowerCut, snapshot
from tests.support.stores import write_rollout

ACTS = 60
SEGMENT = 2000  # small segments, so that a script makes several


def live(directory: Path, files: LossyFiles, seed: int, commit_ms: int = 0, acts: int = ACTS) -> Life:
    """One script on a disk that may fail; a clean close in the middle, so that an index is there too."""
    life = Life(seed)
    try:
        store = RolloutStore(directory, files=files, segment_bytes=SEGMENT, commit_ms=commit_ms)
        life.live(store, acts // 2)
        store.close()
        store = RolloutStore(directory, files=files, segment_bytes=SEGMENT, commit_ms=commit_ms)
        life.live(store, acts // 2)
    except PowerCut:
        pass
    return life


def recovers(directory: Path, life: Life) -> bool:
    """Exactly what was acknowledged, or the whole commit under way; the same for a reader; and writing goes on."""
    reader = snapshot(RolloutStore(directory, read_only=True))
    store = RolloutStore(directory, commit_ms=0)
    known = snapshot(store)
    if known != reader or known not in (life.acknowledged, life.attempted):
        return False
    write_rollout(store, "new", 2)
    store.close()
    reopened = RolloutStore(directory, read_only=True)
    written = snapshot(reopened)
    return written.pop("new")[1] == [0, 1] and written == known and reopened.index_was == "whole"


def total(directory: Path, seed: int, acts: int = ACTS) -> int:
    files = LossyFiles()
    live(directory, files, seed, acts=acts)
    return files.spent


@pytest.mark.slow
def test_cut_at_every_byte_of_the_last_records(tmp_path: Path) -> None:
    end = total(tmp_path / "whole", 0, acts=24)
    for budget in range(end - 250, end + 1):
        files, torn = LossyFiles(budget), tmp_path / f"torn{budget}"
        life = live(tmp_path / f"live{budget}", files, 0, acts=24)
        files.after_power_loss(torn, random.Random(budget), keep=1.0)
        assert recovers(torn, life), budget


def test_power_fails_at_random_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "INDEX_ROWS", 2)  # so that the index is saved on the way, too
    ends = [total(tmp_path / f"whole{seed}", seed) for seed in range(10)]
    for number in range(100):
        rng, seed = random.Random(number), number % len(ends)
        files, lost = LossyFiles(rng.randrange(ends[seed] + 1)), tmp_path / f"lost{number}"
        life = live(tmp_path / f"live{number}", files, seed)
        files.after_power_loss(lost, rng)
        assert recovers(lost, life), number


def test_power_fails_while_the_thread_writes(tmp_path: Path) -> None:
    """Group commits cut the script elsewhere; what was acknowledged is a lower bound, what was asked for an upper one."""
    for number in range(20):
        rng, files = random.Random(number), LossyFiles(random.Random(number).randrange(500, 12_000))
        life = live(tmp_path / f"live{number}", files, number, commit_ms=1)
        lost = tmp_path / f"lost{number}"
        files.after_power_loss(lost, rng)
        known = snapshot(RolloutStore(lost))
        for name, (prompt, tokens, *_, stop, _, _, calls) in life.acknowledged.items():
            assert known[name][0] == prompt
            assert known[name][1][: len(tokens)] == tokens
            assert stop is None or (known[name][4] == stop and len(known[name][1]) == len(tokens))
            assert known[name][7][: len(calls)] == calls


def test_what_a_killed_process_left_unsynced_is_synced_before_it_counts(tmp_path: Path) -> None:
    """First the process dies between write and fsync, and another takes over what it sees; then the power fails."""
    for number in range(30):
        files, lost = LossyFiles(), tmp_path / f"lost{number}"
        files.syncs_left = number % 10
        live(tmp_path / f"live{number}", files, number)
        files.syncs_left = None
        known = snapshot(RolloutStore(tmp_path / f"live{number}", files=files, segment_bytes=SEGMENT, commit_ms=0))
        files.after_power_loss(lost, random.Random(number))
        assert snapshot(RolloutStore(lost)) == known


def test_the_policy_decides_what_is_synced(tmp_path: Path) -> None:
    synced = {}
    for fsync in ("commit", "never"):
        files = LossyFiles()
        store = RolloutStore(tmp_path / fsync, files=files, commit_ms=0, fsync=fsync)  # type: ignore[arg-type]
        write_rollout(store, "a", 5)
        store.commit(sync=True)
        files.after_power_loss(tmp_path / f"{fsync}-lost", random.Random(0), keep=0.0)
        synced[fsync] = list(RolloutStore(tmp_path / f"{fsync}-lost", read_only=True).entries)
    assert synced == {"commit": ["a"], "never": []}
    store.close()  # closing syncs, whatever the policy
    files.after_power_loss(tmp_path / "closed", random.Random(0), keep=0.0)
    assert list(RolloutStore(tmp_path / "closed", read_only=True).entries) == ["a"]


class NeverSyncs(LossyFiles):
    def append(self, path: Path) -> AppendFile:
        file = super().append(path)
        file.sync = lambda: None  # type: ignore[method-assign]
        return file


class ForgetsTheDirectory(LossyFiles):
    def sync_directory(self, directory: Path) -> None:
        if directory == self._directory:
            return
        super().sync_directory(directory)


@pytest.mark.parametrize("broken", [NeverSyncs, ForgetsTheDirectory])
def test_a_missing_fsync_would_show(tmp_path: Path, broken: type[LossyFiles]) -> None:
    """The tests above can fail: without the fsync of files, or of the directory, they do."""
    failures = 0
    for number in range(20):
        files, lost = broken(), tmp_path / f"lost{number}"
        life = live(tmp_path / f"live{number}", files, number)
        files.after_power_loss(lost, random.Random(number))
        failures += snapshot(RolloutStore(lost)) != life.acknowledged if _opens(lost) else 1
    assert failures > 10


def _opens(directory: Path) -> bool:
    from opd.common.errors import StoreError

    try:
        RolloutStore(directory, read_only=True)
    except StoreError:
        return False
    return True


def test_the_double_passes_bytes_through(tmp_path: Path) -> None:
    files = LossyFiles()
    file = files.append(tmp_path / "x")
    assert isinstance(file, LossyFile)
    file.write(b"abc")
    file.sync()
    file.write(b"def")
    files.sync_directory(tmp_path)
    assert (tmp_path / "x").read_bytes() == b"abcdef"
    files.after_power_loss(tmp_path / "lost", random.Random(0), keep=0.0)
    assert (tmp_path / "lost" / "x").read_bytes() == b"abc"
