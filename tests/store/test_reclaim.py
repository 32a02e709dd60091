"""Segments that are given back: what is needed stays, whatever happens meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import opd
from opd.common.errors import RecipeError, StoreError, TrainingError, UserError
from opd.recipe import load_recipe
from opd.report.browse import RolloutBrowser
from opd.runner import pipeline
from opd.runner.checkpoint import StageCheckpoints
from opd.store import RolloutStore, iterate
from opd.store.repair import check_log, repair
from tests.support.lossy import LossyFiles, PowerCut
from tests.support.stores import begin, token, write_rollout

SEGMENT = 2000


def written(directory: Path, count: int = 24, files: Any = None) -> RolloutStore:
    store = RolloutStore(directory, commit_ms=0, segment_bytes=SEGMENT, files=files)
    for number in range(count):
        write_rollout(store, f"r{number}", 5)
        store.note(f"r{number}", reward=number)
        store.commit(sync=True)
    return store


def readable(store: RolloutStore) -> dict[str, list[int]]:
    return {rollout.id: rollout.response_ids.tolist() for rollout in iterate(store)}


def test_what_is_needed_stays(tmp_path: Path) -> None:
    store = written(tmp_path / "log")
    begin(store, "open")
    store.append(token("open", 7))
    before = readable(store)
    segments = len(list((tmp_path / "log").glob("segment-*.log")))
    gone = store.reclaim(12)
    assert 0 < gone < segments
    assert store.reclaim(12) == 0
    assert len(list((tmp_path / "log").glob("segment-*.log"))) == segments - gone
    write_rollout(store, "later", 2)
    store.close()
    for again in (store, RolloutStore(tmp_path / "log", read_only=True), RolloutStore(tmp_path / "log", commit_ms=0)):
        found = readable(again)
        assert found == {**{name: ids for name, ids in before.items() if name in found}, "later": [0, 1]}
        assert {f"r{number}" for number in range(12, 24)} <= found.keys()
        assert len(again) == 26
        assert again.entries["r0"].notes == {"reward": 0.0}  # what the index knows is left
        assert again.partial(["open"])[0].response_ids.tolist() == [7]
        assert len(again.where()) == len(found)
        with pytest.raises(StoreError, match="'r0': its tokens were deleted"):
            again.load(["r0"])
    again.append(token("open", 8))
    again.finish("open", "stop")
    again.close()
    assert not check_log(tmp_path / "log").damages


def test_a_browser_shows_what_is_left(tmp_path: Path) -> None:
    store = written(tmp_path / "rollouts")
    store.reclaim(12)
    store.close()
    (tmp_path / "resolved.yaml").write_text("stages: [{name: main, student: {model: none}}]")
    browser, left = RolloutBrowser(tmp_path), readable(store)
    found = browser.page({"sort": "oldest", "limit": "100"})
    assert [row["id"] for row in found["rows"]] == list(left)
    assert found["all"] == len(left) < 24
    with pytest.raises(UserError, match="no such rollout"):
        browser.one(0)


def test_the_frame_that_a_checkpoint_names_stays(tmp_path: Path) -> None:
    store = written(tmp_path / "log", 12)
    checkpoint, count = store.position, len(store)
    while store.position.segment == checkpoint.segment:
        write_rollout(store, f"later{len(store)}", 400)
        store.commit(sync=True)
    begun = [number for number in range(count, len(store)) if store.index["segment"][number] == checkpoint.segment]
    assert store.reclaim(count + len(begun), checkpoint.segment) > 0
    store.require(checkpoint, "a checkpoint")
    store.close()
    RolloutStore(tmp_path / "log", read_only=True).require(checkpoint, "a checkpoint")


def test_without_its_index_it_opens_by_its_base(tmp_path: Path) -> None:
    store = written(tmp_path / "log")
    store.reclaim(20)
    write_rollout(store, "later", 2)
    store.close()
    whole = readable(store)
    (tmp_path / "log" / "index.bin").unlink()
    store = RolloutStore(tmp_path / "log", commit_ms=0)
    assert (store.index_was, readable(store), len(store)) == ("missing", whole, 25)
    store.close()
    base = tmp_path / "log" / "base.bin"
    base.write_bytes(base.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="segments whose tokens were deleted"):
        RolloutStore(tmp_path / "log")


def test_unfinished_rollouts_and_calls_hold_their_segments(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "log", commit_ms=0, segment_bytes=SEGMENT)
    begin(store, "open")
    store.commit(sync=True)
    for number in range(24):
        write_rollout(store, f"r{number}", 5)
        store.commit(sync=True)
    assert store.reclaim(24) == 0
    store.finish("open", "stop")
    store.commit(sync=True)
    store.record_environment("r3", 0, {"asked": 1}, {"said": 2})
    store.commit(sync=True)
    assert store.reclaim(25) > 0
    assert [record.result for record in store.environment("r3")] == [{"said": 2}]
    store.close()


def test_power_fails_while_segments_are_given_back(tmp_path: Path) -> None:
    def live(directory: Path, files: LossyFiles) -> dict[str, list[int]]:
        known: dict[str, list[int]] = {}
        try:
            store = written(directory, 16, files)
            known = readable(store)
            store.reclaim(8)
            write_rollout(store, "later", 3)
            store.commit(sync=True)
            store.close()
        except PowerCut:
            pass
        return known

    whole = LossyFiles()
    needed = {name: ids for name, ids in live(tmp_path / "whole", whole).items() if int(name[1:]) >= 8}
    for number in range(40):
        files = LossyFiles(whole.spent - 1 - number * 180)
        known = live(tmp_path / f"live{number}", files)
        files.after_power_loss(tmp_path / f"torn{number}", random.Random(number), keep=random.Random(number).random())
        store = RolloutStore(tmp_path / f"torn{number}", commit_ms=0)
        if known:  # all was written before any of it was given back
            assert needed.items() <= readable(store).items()
            assert len(store) >= 16
        write_rollout(store, "new", 2)
        store.close()
        assert RolloutStore(tmp_path / f"torn{number}", read_only=True).load(["new"])[0].response_ids.tolist() == [0, 1]
        assert not check_log(tmp_path / f"torn{number}").damages


def test_a_damaged_log_is_repaired_without_what_was_given_back(tmp_path: Path) -> None:
    store = written(tmp_path / "log")
    store.reclaim(12)
    first = store._log.first
    store.close()
    path = tmp_path / "log" / f"segment-{first:06d}.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged"):
        RolloutStore(tmp_path / "log")
    told = "\n".join(repair(tmp_path / "log"))
    assert "'r0'" not in told
    assert " r0" not in told
    assert set(readable(RolloutStore(tmp_path / "log"))) >= {f"r{number}" for number in range(16, 24)}


RECIPE: dict[str, Any] = {
    "student": "tiny/generalist", "teachers": "tiny/arithmetic", "prompts": "task:addition", "eval": {"prompts": 0},
    "rollout": {"prompts": 6, "max_new_tokens": 8}, "train": {"steps": 5, "lr": 1e-3}, "device": "cpu", "threads": 1,
    "checkpoint": {"every": 1, "keep": 2, "background": False}, "store": {"retain": 0}, "log": {"start_table": False},
}  # fmt: skip


def test_a_run_gives_back_what_no_checkpoint_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = pipeline.run_step

    def fails(run: Any, number: int) -> Any:
        if number == 4:
            raise TrainingError("enough")
        return step(run, number)

    monkeypatch.setattr(pipeline, "RolloutStore", lambda place: RolloutStore(place, segment_bytes=SEGMENT))
    monkeypatch.setattr(pipeline, "run_step", fails)
    with pytest.raises(TrainingError, match="enough"):
        opd.run(RECIPE, out=tmp_path / "run")
    monkeypatch.setattr(pipeline, "run_step", step)
    run = opd.resume(tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5]
    assert not (tmp_path / "run" / "rollouts" / "segment-000000.log").exists()
    rows = [entry.number for entry in map(run.rollouts.entries.get, readable(run.rollouts)) if entry is not None]
    assert len(run.rollouts) == 30
    assert set(range(24, 30)) <= set(rows)
    assert 0 not in rows


@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_stage_that_is_halfway_keeps_its_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    step = pipeline.run_step

    def fails(run: Any, number: int) -> Any:
        if run.spec.name == "one" and number == 3:
            run.rollouter.collect(run.stream.take(6), run.samplers.version)  # sampled, and not trained on
            raise TrainingError("enough")
        return step(run, number)

    monkeypatch.setattr(pipeline, "RolloutStore", lambda place: RolloutStore(place, segment_bytes=SEGMENT))
    monkeypatch.setattr(pipeline, "run_step", fails)
    monkeypatch.setattr(StageCheckpoints, "rescue", lambda *_: "")  # as if the process had been killed
    stages = [
        {"name": "one", "train": {"steps": 3}, "checkpoint": {"every": every}},
        {"name": "two", "student": "tiny/generalist"},
    ]
    with pytest.raises(TrainingError, match="enough"):
        opd.run(RECIPE | {"stages": stages}, out=tmp_path / "run")
    monkeypatch.setattr(pipeline, "run_step", step)
    sampled = readable(opd.Run(tmp_path / "run").rollouts)
    opd.resume(tmp_path / "run", only="two")
    run = opd.resume(tmp_path / "run")
    assert len(run.rollouts) == 18 + 30
    assert {name: ids for name, ids in readable(run.rollouts).items() if name in sampled}.items() <= sampled.items()
    assert [line["step"] for line in run.metrics if line["stage"] == "one"] == [1, 2, 3]


def test_what_gives_back_too_much() -> None:
    stages = [{"name": "one"}, {"name": "two", "prompts": "stage:one"}]
    some = [{"name": "one", "store": {"retain": None}}, {"name": "two"}]
    for changes, message in (
        ({"checkpoint": {"every": 0}}, "checkpoint.every is 0"),
        ({"train": {"learn": False}, "objective": {"form": "direct"}}, "train.learn false"),
        ({"stages": stages}, "but store.retain deletes them"),
        ({"stages": some}, "for all of them"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_recipe(RECIPE | changes)
