"""The environments that come with opd, played by oracles and by worse players."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opd
from opd.common.errors import DataError, RecipeError
from opd.data.tasks import MOVES, World, get_task
from opd.environments.calculator import compute
from opd.environments.search import SearchIndex
from opd.recipe import load_recipe
from opd.records import Prompt
from opd.registry import find
from opd.rollouts.environments import Environment, Step, Turn
from opd.rollouts.tool_calls import Call


def environment(name: str, **settings: Any) -> Environment:
    found = find("environment", name)(**settings)
    assert isinstance(found, Environment)
    return found


def played(game: Environment, prompt: Prompt, texts: list[str], calls: list[list[Call]] | None = None) -> list[Step]:
    """The steps until the episode is over."""
    episode, steps = game.open(prompt, 0), list[Step]()
    episode.reset()
    for number, text in enumerate(texts):
        step = episode.step(Turn(number, text, np.zeros(0, np.int32), "stop", calls[number] if calls else ()))
        assert isinstance(step, Step)
        steps.append(step)
        if step.done:
            break
    return steps


# Grid


@pytest.mark.parametrize("index", range(20))
def test_the_oracle_of_the_grid_reaches_the_door(index: int) -> None:
    prompt = get_task("grid", size=5, walls=4).prompt("train", index)
    game = environment("grid", progress=0.5, turns=40)
    moves = game.oracle(prompt)
    assert moves is not None
    assert "".join(moves) == prompt.fields["answer"]
    steps = played(game, prompt, list(moves))
    assert steps[-1].done
    assert len(steps) == len(moves)
    rewards = [step.reward or 0.0 for step in steps]
    assert sum(rewards) == pytest.approx(1 + 0.5 * (len(moves) - 1) / len(moves))


@given(st.lists(st.sampled_from([*MOVES, "x", ""]), max_size=30), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_every_state_of_the_grid_has_a_way_on(moves: list[str], index: int) -> None:
    prompt = get_task("grid").prompt("train", index)
    world = World.read(str(prompt.messages[0]["content"]))  # type: ignore[index]
    assert World.read(str(world)) == world
    place, has_key = world.start, world.start == world.key
    for move in moves:
        if move in MOVES:
            there = world.moved(place, move)
            assert there not in world.walls
            before, place = len(world.path(place, has_key)), there
            has_key = has_key or there == world.key
            if has_key and place == world.door:
                return
            assert abs(len(world.path(place, has_key)) - before) <= 1  # one move changes the distance by one at most
    steps = played(environment("grid"), prompt, moves)
    assert all(step.counts == {"malformed": 1} for step, move in zip(steps, moves, strict=True) if move not in MOVES)


def test_a_text_that_is_no_world_is_named() -> None:
    with pytest.raises(DataError, match="not a world of task:grid"):
        environment("grid").open(Prompt("p", "d", text="add 1+1"), 0)
    spec = {"student": "tiny/generalist", "teachers": {"a": "tiny/arithmetic"}, "prompts": ["task:grid"], "rollout": {"environment": "grid"}}  # fmt: skip
    with pytest.raises(RecipeError, match="Set turn_tokens"):
        load_recipe(spec)


# Calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+3*4", "14"), ("-(2**10) // 3", "-342"), ("7/2", "3.5"), ("2**2000 % 7", "4"), ("1e3", "1000.0")],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9**9**9", "too large"),
        ("2**100000", "too large"),
        ("__import__('os')", "only numbers"),
        ("'a'*10", "only numbers"),
        ("(-1)**0.5", "not a real number"),
        ("1/0", "division"),
        ("1 +", "not an arithmetic"),
        ("(" * 500 + ")" * 500, "not an arithmetic"),
        ("1+" * 600 + "1", "at most 1000"),
        ("1e400", "not a real number"),
        ("10**400 * 1.0", "too large"),
    ],
)
def test_the_calculator_rejects_what_is_no_arithmetic(expression: str, problem: str) -> None:
    with pytest.raises((ValueError, ArithmeticError), match=problem):
        compute(expression)


def test_the_calculator_as_an_environment() -> None:
    calls = [[Call("compute", {"expression": "12+30"})], [Call("compute", {"expression": "1/0"})], []]
    steps = played(environment("calculator"), Prompt("p", "d", text="12+30?"), ["", "", "42"], calls)
    assert steps[0].messages[0]["content"] == "42"
    assert "ZeroDivisionError" in steps[1].messages[0]["content"]
    assert steps[1].counts == {"errors": 1}
    assert steps[2].done
    assert steps[2].reward is None  # the recipe's rewards see the answer


# Dialogue, search, repair


def test_a_scripted_dialogue() -> None:
    prompt = get_task("dialogue", turns=4).prompt("train", 3)
    game = environment("dialogue")
    right = game.oracle(prompt)
    assert right is not None
    assert len(right) == 4
    steps = played(game, prompt, list(right))
    assert [step.reward for step in steps] == [0.25] * 4
    assert [step.done for step in steps] == [False, False, False, True]
    assert [step.reward for step in played(game, prompt, ["?", *right[1:]])] == [0.0, 0.25, 0.25, 0.25]
    with pytest.raises(DataError, match="needs a column `script`"):
        game.open(Prompt("p", "d", text="hello"), 0)


def test_cut_dialogues_go_straight_to_the_last_message() -> None:
    prompt = get_task("dialogue", turns=4).prompt("train", 3)
    right = list(environment("dialogue").oracle(prompt) or ())
    for cut, all_lengths in ((0.5, {2, 3, 4}), (1.0, {2, 3})):
        lengths, game = set(), environment("dialogue", cut=cut)
        for key in range(40):
            episode = game.open(prompt, key)
            expected = list(episode.expected)  # type: ignore[attr-defined]
            assert expected == [*right[: len(expected) - 1], right[-1]]
            assert game.open(prompt, key).expected == expected  # type: ignore[attr-defined]
            lengths.add(len(expected))
            earned = [episode.step(Turn(n, text, np.zeros(0, np.int32), "stop")).reward for n, text in enumerate(expected)]  # type: ignore[union-attr]  # fmt: skip
            assert sum(earned) == pytest.approx(1, abs=1e-9)  # type: ignore[arg-type]
        assert lengths == all_lengths
        assert not game.has_oracle
    short = get_task("dialogue", turns=2).prompt("train", 3)
    assert len(environment("dialogue", cut=1.0).open(short, 0).expected) == 2  # type: ignore[attr-defined]


def test_every_wrong_answer_of_a_dialogue_gets_feedback() -> None:
    prompt = Prompt("p", "d", text="2-2?", fields={"answer": 0, "script": [{"say": "Thanks!"}]})
    steps = played(environment("dialogue"), prompt, ["1", "?"])
    assert [step.feedback for step in steps] == ["The answer is 0.", ""]
    assert [step.reward for step in steps] == [0.0, None]


def test_search_finds_the_document_about_the_query(tmp_path: Path) -> None:
    rows = [{"title": name, "text": f"The capital of {name} is {city}."} for name, city in (("France", "Paris"), ("Peru", "Lima"))]  # fmt: skip
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    calls = [[Call("search", {"query": "capital of Peru"})], [Call("read", {"title": "Peru"})], [Call("read", {"title": "?"})], []]  # fmt: skip
    for game, prompt in (
        (environment("search", corpus=str(tmp_path / "corpus.jsonl")), Prompt("p", "d", text="?")),
        (environment("search"), Prompt("p", "d", text="?", fields={"documents": rows})),
    ):
        steps = played(game, prompt, ["", "", "", "Lima"], calls)
        assert str(steps[0].messages[0]["content"]).startswith("Peru")
        assert steps[1].messages[0]["content"] == "The capital of Peru is Lima."
        assert "LookupError" in steps[2].messages[0]["content"]
    assert [tool.name for tool in game.tools()] == ["search", "read"]


@given(st.lists(st.text("abc ", max_size=20), min_size=1, max_size=8), st.text("abc ", max_size=5))
@settings(max_examples=100, deadline=None)
def test_search_lists_only_documents_with_a_word_of_the_query(texts: list[str], query: str) -> None:
    documents = {f"t{number}": text for number, text in enumerate(texts)}
    for title in SearchIndex(documents).search(query, 5):
        assert set(query.split()) & {*documents[title].split(), title}


def test_code_is_repaired_until_its_tests_pass() -> None:
    prompt = Prompt(
        "p", "d", text="Write add(a, b).", fields={"tests": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
    )
    wrong, right = "```python\ndef add(a, b):\n    return 3\n```", "```python\ndef add(a, b):\n    return a + b\n```"
    game = environment("repair", turns=3, sandbox="none", partial=True)
    steps = played(game, prompt, ["I cannot.", wrong, right])
    assert [step.done for step in steps] == [False, False, True]
    assert "no Python block" in str(steps[0].messages[0]["content"])
    assert "The tests fail" in str(steps[1].messages[0]["content"])
    assert steps[2].reward == 1.0
    last = played(game, prompt, [wrong, wrong, wrong])[-1]
    assert last.done
    assert last.reward == 0.5


def test_a_run_in_the_grid(tmp_path: Path) -> None:
    run = opd.run(
        {
            "student": "tiny/generalist",
            "teachers": {"grid": "tiny/sorting"},
            "prompts": [{"source": "task:grid", "environment": {"kind": "grid", "turns": 4, "turn_tokens": 3}}],
            "rollout": {"prompts": 4, "max_new_tokens": 48},
            "train": {"steps": 1, "lr": 1e-3},
            "eval": {"prompts": 2, "teachers": False},
            "log": {"start_table": False},
            "device": "cpu",
        },
        out=tmp_path / "run",
    )
    assert run.metrics[0]["reward"] is not None
    assert all(rollout.stop == "env" for rollout in run.rollouts)
