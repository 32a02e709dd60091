"""Answers that span steps on purpose: `rollout.segment`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import opd
from opd.common.errors import RecipeError
from opd.recipe import load_recipe
from opd.records import Author, Rollout
from tests.support.crash import durable, same_run
from tests.support.interrupted import SCORED, Crash, strike
from tests.support.ranks import Job, differences, together

SEGMENT, MOST, STEPS = 2, 7, 4
APPENDED = "opd.store.rollouts:RolloutStore.append_many"  # called once per position that is sampled


def recipe(rollout: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "name": "segments",
        "student": "tiny/generalist",
        "teachers": {"arithmetic": "tiny/arithmetic"},
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rewards": "numeric",
        "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": MOST, "segment": SEGMENT, **(rollout or {})},
        "objective": {"form": "policy_gradient", "advantage": {"outcome_weight": 1.0}},
        "train": {"steps": STEPS, "lr": 1e-3},
        "eval": {"prompts": 0},
        "checkpoint": {"every": 2, "keep": 3},
        "log": {"start_table": False},
        "device": "cpu",
        "threads": 1,
        **changes,
    }


Batches = list[list[Rollout]]


def followed(plan: dict[str, Any], out: Path) -> tuple[opd.Run, Batches]:
    """A run, and the rollouts that each of its steps trained on."""
    seen: Batches = []
    return opd.run(plan, out=out, on_rollouts=lambda run, rollouts: seen.append(list(rollouts))), seen


def test_with_frozen_weights_the_tokens_are_those_of_a_run_without_segments(tmp_path: Path) -> None:
    frozen = {"steps": STEPS, "lr": 1e-30}  # below what a float32 weight can change by
    run, batches = followed(recipe(train=frozen), tmp_path / "run")
    longer = {"steps": STEPS + 3, "lr": 1e-30}
    reference = opd.run(recipe({"segment": None}, train=longer), out=tmp_path / "whole")
    ours, theirs = durable(run.directory), durable(reference.directory)
    assert ours.keys() <= theirs.keys()
    for name, rollout in ours.items():
        size = rollout.response_ids.size
        assert rollout.response_ids.tolist() == theirs[name].response_ids[:size].tolist()
        assert rollout.stop is None or (rollout.stop, size) == (theirs[name].stop, theirs[name].response_ids.size)
        for version in range(1, STEPS):  # the first step samples until a group is complete
            assert (rollout.version == version).sum() <= SEGMENT
    trained = [rollout.id for batch in batches for rollout in batch]
    assert len(set(trained)) == len(trained)  # each once
    assert all(rollout.stop is not None for batch in batches for rollout in batch)
    waiting = {rollout.group for rollout in ours.values()} - {rollout.group for batch in batches for rollout in batch}
    assert len(waiting) == run.metrics[-1]["waiting"] > 0
    for step, batch in enumerate(batches):  # in the step in which the last answer of the group ends
        for group in {rollout.group for rollout in batch}:
            members = [rollout for rollout in batch if rollout.group == group]
            assert len(members) == 2
            assert step == 0 or max(rollout.version.max() for rollout in members) == step
    assert any(len(set(rollout.version.tolist())) > 1 for batch in batches for rollout in batch)


@pytest.mark.parametrize(("mode", "place", "call"), [("prefill", SCORED, 4), ("exact", APPENDED, 8)])
def test_an_interrupted_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, place: str, call: int
) -> None:
    plan = recipe(checkpoint={"every": 2, "keep": 3, "resume": mode})
    whole = opd.run(plan, out=tmp_path / "whole")
    strike(monkeypatch, place, call, Crash)
    with pytest.raises(Crash):
        opd.run(plan, out=tmp_path / "run")
    same_run(opd.resume(tmp_path / "run"), whole)


def test_other_writers_answer_whole_groups_and_parts_of_groups(tmp_path: Path) -> None:
    plan = recipe(
        {"samples": 3, "teacher_share": 0.5, "writers": [{"kind": "data", "samples": 1}]},
        objective=[{"form": "policy_gradient"}, {"form": "cross_entropy", "on": ["teacher", "data"]}],
    )
    _, batches = followed(plan, tmp_path / "run")
    for batch in batches:
        for rollout in batch:
            assert rollout.stop is not None
            assert len(set(rollout.author.tolist())) == 1  # continued by the one who began it
    written = [rollout for batch in batches for rollout in batch]
    assert {int(rollout.author[0]) for rollout in written} == {Author.STUDENT, Author.TEACHER, Author.DATA}
    assert all(len([one for one in written if one.group == rollout.group]) == 3 for rollout in written)


def test_two_ranks_sample_what_one_does(tmp_path: Path) -> None:
    together(2, tmp_path / "log.txt", Job(tmp_path / "two", recipe()))
    opd.run(recipe(), out=tmp_path / "one")
    assert not differences(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    ("rollout", "changes", "message"),
    [
        ({"segment": MOST}, {}, "no answer would span steps"),
        ({"staleness": 1}, {}, "samples whole answers"),
        ({"environment": {"kind": "dialogue", "turn_tokens": 4}}, {"prompts": [{"source": "task:dialogue", "domain": "arithmetic"}]}, "an episode is played"),
        ({"contrast": 2}, {}, "with rollout.contrast"),
        ({"teacher_prefix": {"tokens": 2}}, {}, "with rollout.teacher_prefix"),
        ({"length_schedule": {"kind": "line", "start": 2}}, {}, "with rollout.length_schedule"),
        ({"writers": [{"kind": "replay", "share": 0.5}]}, {}, "with the writer replay"),
        ({"mixed_versions": "refuse"}, {}, "Set it to allow"),
        ({}, {"store": {"retain": 4}, "checkpoint": {"every": 1}}, "Set store.retain: null"),
        ({}, {"train": {"steps": 2, "learn": False}}, "train.learn false"),
        ({}, {"prompts": [{"source": "run:somewhere", "domain": "arithmetic"}]}, "rollout.segment has no effect"),
    ],
)  # fmt: skip
def test_what_needs_whole_answers_is_rejected(rollout: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe(rollout, **changes))
