"""Queries and export from the index; reading a dead run beside a living one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd import Run
from opd.common.errors import UserError
from opd.store import RolloutStore, rollouts
from tests.support.stores import begin, token, write_rollout


def filled(directory: Path) -> RolloutStore:
    store = RolloutStore(directory)
    for number in range(12):
        write_rollout(store, f"r{number}", number, domain="math" if number % 3 else "code")
        if number != 5:
            store.note(f"r{number}", reward=number % 2, manner="strict" if number < 6 else "mild")
    begin(store, "unfinished", domain="math")
    store.append(token("unfinished", 1))
    return store


def test_where(tmp_path: Path) -> None:
    living = filled(tmp_path)
    living.commit(sync=True)
    scanned = RolloutStore(tmp_path, read_only=True)
    living.close()
    for store in (scanned, RolloutStore(tmp_path, read_only=True)):
        assert store.where(domain="math", reward=0).ids == ["r2", "r4", "r8", "r10"]
        assert store.where(reward=None).ids == ["r5"]
        assert store.where(length=lambda n: n > 9).ids == ["r10", "r11"]
        assert store.where(domain=lambda name: name.startswith("c"), length=9).ids == ["r9"]
        assert store.where(manner="strict", reward=1).ids == ["r1", "r3"]
        assert store.where(prompt_id="p/r7").where(stop="stop").ids == ["r7"]
        assert [rollout.id for rollout in store.where(version_max=3, domain="code")] == ["r3", "r6", "r9"]
        assert len(store.where()) == 12
        assert store.where(stop=None).ids == []
        assert store.where(domain="code").column("length").tolist() == [0, 3, 6, 9]
        assert store.where(id="r3").load()[0].response_ids.tolist() == [0, 1, 2]
        with pytest.raises(UserError, match="'domian' is neither a column"):
            store.where(domian="math")


def test_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    store = filled(tmp_path / "log")
    store.where(domain="math").to_parquet(tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["id"] for row in rows] == store.where(domain="math").ids
    for row, rollout in zip(rows, store.where(domain="math").load(), strict=True):
        assert row["response_ids"] == rollout.response_ids.tolist()
        np.testing.assert_allclose(row["logprob"], rollout.logprob)
        assert (row["reward"], row["stop"], row["length"]) == (
            None if rollout.id == "r5" else int(rollout.id[1:]) % 2,
            "stop",
            rollout.response_ids.size,
        )


def test_disagreement_is_in_the_log_and_in_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is rebuilt from the log; an index of an older run, without the columns, opens and learns about new notes."""
    old: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.setattr(rollouts, "RATIO_COLUMNS", old)
        patched.setattr(rollouts, "UNKNOWN", old)
        filled(tmp_path).close()
    assert b"rows/kl" not in (tmp_path / "index.bin").read_bytes()
    store = RolloutStore(tmp_path)
    assert store.index_was == "whole"
    store.note_disagreement("r3", {"teacher": {"log_ratio": 0.5, "largest": -2.5, "at": 1}, "reference": {"kl": 0.125}})
    store.note_disagreement("r4", {"teacher": {"kl": 0.25}})
    store.close()
    for damaged in (False, True):
        if damaged:
            (tmp_path / "index.bin").unlink()
        found = RolloutStore(tmp_path, read_only=True)
        assert found.where(kl=lambda kl: kl > 0.2).ids == ["r4"]
        assert found.where(largest_ratio=-2.5, ratio_at=1, log_ratio=0.5).ids == ["r3"]
        assert found.where(disagreement=lambda by_role: by_role["reference"]["kl"] > 0.1).ids == ["r3"]
        assert found.where().sorted("log_ratio").ids[:2] == ["r3", "r0"]  # unknown ones last
        assert found.entries["r3"].notes["reward"] == 1
    with pytest.raises(UserError, match="unknown number 'size'"):
        store.where().sorted("size")


LIVING = """
import sys, time
from pathlib import Path
from opd.store import RolloutStore
from tests.support.stores import write_rollout
store = RolloutStore(Path(sys.argv[1]) / "rollouts")
for number in range(10**9):
    write_rollout(store, f"r{number}", 5)
    time.sleep(0.002)
"""
READING = """
import sys
import opd
dead, living = opd.Run(sys.argv[1]), opd.Run(sys.argv[2])
assert dead.rollouts.where(domain="math", reward=0).ids == ["r2", "r4", "r8", "r10"]
assert len(dead.rollouts.where(domain="math").load()) == 8
for rollout in living.rollouts.where():
    assert rollout.response_ids.tolist() == [0, 1, 2, 3, 4]
assert len(living.rollouts.where()) > 5
assert not {"torch", "transformers", "pyarrow"} & set(sys.modules)
"""


def test_a_dead_run_opens_while_another_lives(tmp_path: Path) -> None:
    """Without torch; so does the living one itself, and what it has finished so far can be read."""
    root = Path(__file__).parents[2]
    for name in ("dead", "living"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "resolved.yaml").write_text("name: x\n")
    filled(tmp_path / "dead" / "rollouts").commit(sync=True)  # not closed: it died
    before = {path: path.read_bytes() for path in (tmp_path / "dead").rglob("*.*")}
    writer = subprocess.Popen([sys.executable, "-c", LIVING, str(tmp_path / "living")], cwd=root)
    try:
        log = tmp_path / "living" / "rollouts" / "segment-000000.log"
        deadline = time.monotonic() + 300
        while not (log.is_file() and log.stat().st_size > 20_000):
            assert time.monotonic() < deadline
            assert writer.poll() is None
            time.sleep(0.05)
        done = subprocess.run([sys.executable, "-c", READING, str(tmp_path / "dead"), str(tmp_path / "living")], check=False, cwd=root,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    assert before == {path: path.read_bytes() for path in (tmp_path / "dead").rglob("*.*")}
    assert len(Run(tmp_path / "living").rollouts.where()) > 5  # killed: what was durable is there
