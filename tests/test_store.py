"""The rollout log: what goes in comes out, only finished rollouts can be read, torn tails are cut, damage is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opd.errors import StoreError
from opd.rollout import store as store_module
from opd.rollout.store import RolloutStore, iterate
from opd.types import Author, SampledToken


def begin(store: RolloutStore, name: str, prompt: tuple[int, ...] = (5, 6)) -> None:
    store.begin(
        id=name,
        prompt_id=f"p/{name}",
        visit=1,
        sample=2,
        domain="d",
        source="student",
        group="g",
        prompt_ids=np.array(prompt),
    )


def token(name: str, value: int) -> SampledToken:
    return SampledToken(name, value, -0.5 * value, -0.25 * value, -9.0, 3)


def test_round_trip_of_interleaved_rollouts(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    begin(store, "a")
    begin(store, "b", (7,))
    for value in range(5):
        store.append(token("a", value))
        store.append(token("b", 10 + value))
        store.commit()
    store.finish("b", "length")
    store.append(token("a", 5))
    store.finish("a", "stop")
    store.note("a", score=1.0)
    store.commit()
    for opened in (store, RolloutStore(tmp_path), RolloutStore(tmp_path, read_only=True)):
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
        assert opened.entries["a"].notes == {"score": 1.0}
        assert opened.entries["a"].length == 6
        assert [rollout.id for rollout in iterate(opened)] == ["a", "b"]


def test_unfinished_rollouts_cannot_be_read(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    begin(store, "a")
    store.append(token("a", 1))
    with pytest.raises(StoreError, match="not finished"):
        store.load(["a"])
    with pytest.raises(StoreError, match="twice"):
        begin(store, "a")


def test_data_tokens_have_no_behaviour(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    begin(store, "a")
    store.extend("a", np.array([4, 5]), Author.DATA, 0)
    store.finish("a", "stop")
    (rollout,) = store.load(["a"])
    assert np.isnan(rollout.logprob).all()
    assert set(rollout.author) == {Author.DATA}


def filled(directory: Path) -> bytes:
    store = RolloutStore(directory)
    for name in ("a", "b"):
        begin(store, name)
        for value in range(4):
            store.append(token(name, value))
        store.finish(name, "stop")
    store.close()
    return (directory / "segment-000000.log").read_bytes()


def test_a_torn_tail_is_cut_at_every_byte(tmp_path: Path) -> None:
    data = filled(tmp_path / "whole")
    for length in range(len(data)):
        directory = tmp_path / str(length)
        directory.mkdir()
        (directory / "segment-000000.log").write_bytes(data[:length])
        store = RolloutStore(directory)
        for rollout in iterate(store):
            assert rollout.response_ids.tolist() == [0, 1, 2, 3]
        begin(store, "new")  # and the log goes on behind the cut
        store.finish("new", "stop")
        store.close()
        assert "new" in RolloutStore(directory).entries


def test_a_reader_never_cuts_a_live_log(tmp_path: Path) -> None:
    data = filled(tmp_path)
    path = tmp_path / "segment-000000.log"
    path.write_bytes(data[:-3])
    reader = RolloutStore(tmp_path, read_only=True)
    assert [rollout.id for rollout in iterate(reader)] == ["a"]
    assert path.read_bytes() == data[:-3]
    with pytest.raises(StoreError, match="read-only"):
        begin(reader, "c")


@given(st.integers(0, 10**9), st.integers(1, 255))
def test_a_flipped_byte_is_never_read_as_truth(position: int, change: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        data = bytearray(filled(Path(name)))
        data[position % len(data)] ^= change
        (Path(name) / "segment-000000.log").write_bytes(data)
        for rollout in iterate(RolloutStore(Path(name))):
            assert rollout.response_ids.tolist() == [0, 1, 2, 3]
            np.testing.assert_allclose(rollout.logprob, -0.5 * np.arange(4))


def test_damage_before_the_last_segment_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SEGMENT_BYTES", 200)
    filled(tmp_path)
    segments = sorted(tmp_path.glob("segment-*.log"))
    assert len(segments) > 1
    assert len(RolloutStore(tmp_path)) == 2
    data = bytearray(segments[0].read_bytes())
    data[20] ^= 1
    segments[0].write_bytes(data)
    with pytest.raises(StoreError, match=r"segment-000000.log, byte 0"):
        RolloutStore(tmp_path)


def test_the_store_needs_no_torch() -> None:
    code = "import sys; import opd.rollout.store, opd.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
