"""Credit by turn: rewards and advantages of turns, for rollouts in environments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opd
from opd.common.errors import RecipeError
from opd.objective.advantages import ProbingAdvantage, TurnAdvantage, probing_bonuses, turn_advantages
from opd.objective.batch import Batch, own_turns, rewards_by_turn
from opd.recipe import load_recipe
from opd.records import Author, Rollout

S, E = int(Author.STUDENT), int(Author.ENV)


def rollout(authors: list[int], name: str = "r") -> Rollout:
    size = len(authors)
    nan = np.full(size, np.nan, np.float32)
    ids = np.zeros(size, np.int32)
    return Rollout(
        name, "p", 0, 0, "d", "student", ids[:1], ids, np.array(authors, np.uint8), nan, nan, nan, ids, "env", "g"
    )


@given(st.lists(st.sampled_from([S, E]), max_size=12))
def test_turns_are_the_runs_between_the_environments_tokens(authors: list[int]) -> None:
    marked = np.zeros(len(authors), int)
    found = own_turns(rollout(authors))
    for first, end in found:
        marked[first:end] += 1
        assert end > first or E not in authors
    assert marked.tolist() == [int(author == S) for author in authors]
    runs = "".join("s" if author == S else " " for author in authors).split()
    assert len(found) == (len(runs) if E in authors else 1)


reward_lists = st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=5), min_size=1, max_size=5)


@given(reward_lists, st.floats(0, 1), st.sampled_from(["turn", "group", "none"]))
@settings(deadline=None)
def test_turn_advantages_against_the_definition(rewards: list[list[float]], discount: float, baseline: str) -> None:
    found = turn_advantages([np.array(values) for values in rewards], ["g"] * len(rewards), discount, baseline)
    sums = [
        [sum(discount ** (j - k) * values[j] for j in range(k, len(values))) for k in range(len(values))]
        for values in rewards
    ]
    for number, values in enumerate(sums):
        for turn, value in enumerate(values):
            same = [other[turn] for other in sums if len(other) > turn]
            every = [one for other in sums for one in other]
            base = {"turn": np.mean(same), "group": np.mean(every), "none": 0.0}[baseline]
            assert found[number][turn] == pytest.approx(value - base, abs=1e-9)


def test_groups_are_apart_and_missing_rewards_have_no_advantage() -> None:
    found = turn_advantages([np.array([1.0]), np.array([3.0]), None], ["a", "b", "b"], 1.0)
    assert [values.tolist() for values in found] == [[0.0], [0.0], []]


@pytest.mark.parametrize("baseline", ["turn", "group", "none"])
def test_turns_that_are_rollouts_of_their_own_have_the_same_advantages(baseline: str) -> None:
    """`history: split` changes what a turn reads, not what it earned."""
    given = {"a": [0.5, 0.0, 0.25], "b": [1.0], "c": None}
    whole = [rollout([S, E, S, S, E, S], "a"), rollout([S, S], "b"), rollout([S, E, S], "c")]
    parts = [
        replace(rollout([S] * (end - first), f"{item.id}/turn{turn}"), extras={"turn_of": item.id})
        for item in whole
        for turn, (first, end) in enumerate(own_turns(item))
    ]
    rewards = {name: None if values is None else sum(values) for name, values in given.items()}
    turns = {name: values for name, values in given.items() if values is not None}
    part = TurnAdvantage(turn_discount=0.5, turn_baseline=baseline)
    found = []
    for rollouts in (whole, parts):
        batch = Batch(rollouts, rewards={item.id: rewards[item.episode] for item in rollouts}, turn_rewards=turns)
        tokens: Any = SimpleNamespace(batch=batch, rollouts=rollouts)
        values = part.values(tokens, part.prepare(tokens))
        found.append([value[item.author == S] for item, value in zip(rollouts, values, strict=True)])
    assert np.concatenate(found[0]).tolist() == np.concatenate(found[1]).tolist()


@pytest.mark.parametrize("baseline", ["turn", "group", "none"])
def test_conversations_of_several_turns_have_the_same_advantages(baseline: str) -> None:
    """An agent's conversations are rollouts, each with some of the episode's turns."""
    whole = [rollout([S, E, S, S, E, S], "a"), rollout([S, S, E, S], "b")]
    cuts = {"a": [(0, 4), (5, 6)], "b": [(0, 4)]}
    parts = [
        replace(rollout(item.author[first:end].tolist(), f"{item.id}/conversation{n}"), extras={"turn_of": item.id})
        for item in whole
        for n, (first, end) in enumerate(cuts[item.id])
    ]
    turns = {"a": [0.5, 0.25, 1.0], "b": [0.0, 1.0]}
    part = TurnAdvantage(turn_discount=0.5, turn_baseline=baseline)
    found = []
    for rollouts in (whole, parts):
        rewards = {item.id: sum(turns[item.episode]) for item in rollouts}
        tokens: Any = SimpleNamespace(batch=Batch(rollouts, rewards=rewards, turn_rewards=turns), rollouts=rollouts)
        values = part.values(tokens, part.prepare(tokens))
        assert all((value[item.author == E] == 0).all() for item, value in zip(rollouts, values, strict=True))
        found.append([value[item.author == S] for item, value in zip(rollouts, values, strict=True)])
    assert np.concatenate(found[0]).tolist() == np.concatenate(found[1]).tolist()
    assert len({*np.concatenate(found[1]).tolist()}) >= 3  # later turns have theirs


def test_the_outcome_belongs_to_the_last_turn() -> None:
    played = rollout([S, S, E, S, E, S])
    assert rewards_by_turn(Batch([played], rewards={"r": 1.0}), played).tolist() == [0.0, 0.0, 1.0]  # type: ignore[union-attr]
    by_turn = Batch([played], rewards={"r": 0.75}, turn_rewards={"r": [0.5, None, 0.25]})
    assert rewards_by_turn(by_turn, played).tolist() == [0.5, 0.0, 0.25]  # type: ignore[union-attr]
    assert rewards_by_turn(Batch([played], rewards={"r": None}), played) is None


groups_of_dialogues = st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=8)


@given(groups_of_dialogues, st.floats(0.1, 2), st.floats(0.5, 2))
def test_the_bonus_of_probing_against_the_definition(
    group: list[tuple[bool, int]], bonus: float, margin: float
) -> None:
    right, turns = np.array([float(ok) for ok, _ in group]), np.array([count for _, count in group])
    found = probing_bonuses(right, turns, bonus, margin)
    most = max(count for _, count in group)
    whole = [ok for ok, count in group if count == most]
    cut = [ok for ok, count in group if count < most]
    helps = bool(cut) and sum(whole) / len(whole) > margin * sum(cut) / len(cut)
    assert found.tolist() == [bonus if helps and ok and count == most else 0.0 for ok, count in group]


def test_what_rounding_leaves_is_no_right_ending() -> None:
    played = [rollout([S, E] * turns, str(turns)) for turns in (3, 3, 2)]
    rewards = {"3": 0.3 + 1e-16, "2": 0.2}
    batch = Batch(played, rewards=rewards, turn_rewards={"3": [0.1, 0.2, 0.0], "2": [0.2, 0.0]})
    found = ProbingAdvantage().prepare(SimpleNamespace(batch=batch, rollouts=played))  # type: ignore[arg-type]
    assert set(found.values()) == {0.0}


RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {"arithmetic": "tiny/arithmetic"},
    "prompts": [{"source": "task:dialogue"}],
    "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 64, "environment": {"kind": "dialogue", "turn_tokens": 6}},
    "objective": [
        {"divergence": "reverse_kl", "gate": "turns"},
        {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "also": [{"kind": "turns", "turn_discount": 0.9}]}},
    ],
    "train": {"steps": 2, "lr": 1e-3},
    "eval": {"prompts": 0},
    "log": {"start_table": False},
    "device": "cpu",
}  # fmt: skip


def test_a_run_with_credit_by_turn(tmp_path: Path) -> None:
    run = opd.run(RECIPE, out=tmp_path / "run")
    for line in run.metrics:
        assert line["env/turns"] == 3.0
        assert line["env/malformed"] == line["env/lost"] == 0.0
        assert {"kl_turn/1", "kl_turn/3", "kl_turns", "reward_turn/1", "reward_turn/3"} <= line.keys()
        assert np.isfinite(line["loss"])
    (sample, *_) = [json.loads(line) for line in (run.directory / "samples.jsonl").read_text().splitlines()]
    assert [turn.partition(":")[0] for turn in sample["response"].splitlines()] == ["student", "environment"] * 2 + [
        "student"
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["rollout.environment=null"], "one turn"),
        (["rollout.samples=1"], "advantage 0"),
        (["objective.1.advantage.also.0={kind: probing}"], "compares whole dialogues with cut ones"),
        (
            [
                "objective.1.advantage.also.0={kind: probing}",
                "rollout.environment.cut=0.5",
                "rollout.environment.history=split",
            ],
            "with history split each turn is apart",
        ),
    ],
)
def test_rewards_by_turn_need_turns_and_a_group(changes: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(RECIPE, changes)
