"""Simulators with the interface of Gymnasium, played by a run, and their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import RecipeError
from opd.data.prompts import render_prompt
from opd.environments.simulators import (
    GymnasiumEnvironment,
    OpenEnvEnvironment,
    ScienceWorldEnvironment,
    TextArenaEnvironment,
    action_of,
    seed_of,
)
from opd.records import Author, Prompt
from opd.rollouts.environments import Step, Turn

PACKAGE = '''
"""Walk to a number between 0 and 9, drawn with the seed; an action is a step."""
import random


class Steps:
    start, n = -5, 11

    def contains(self, action):
        return -5 <= action <= 5


class Walk:
    closed = 0
    action_space = Steps()

    def __init__(self, goal=None):
        self.goal = goal

    def reset(self, seed=None):
        self.at, self.steps = 5, 0
        self.to = random.Random(seed).randrange(10) if self.goal is None else self.goal
        return f"at 5, go to {self.to}", {}

    def step(self, action):
        self.at, self.steps = self.at + int(action), self.steps + 1
        return f"at {self.at}", float(self.at == self.to), self.at == self.to, self.steps == 3, {}

    def close(self):
        Walk.closed += 1


def make(id, **arguments):
    if id != "Walk-v0":
        raise KeyError(f"no environment {id}")
    return Walk(**arguments)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tiny_walks.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "tiny_walks"


def prompt(number: int = 0) -> Prompt:
    return Prompt(id=f"episodes:walk/train/{number}", domain="walk", messages=())


def played(environment: Any, *texts: str) -> list[Step]:
    episode = environment.open(prompt(), 1)
    steps = [episode.step(Turn(number, text, np.zeros(0, np.int32), "stop")) for number, text in enumerate(texts)]
    episode.close()
    return steps


def test_a_game_is_played_by_turns(package: str) -> None:
    environment = GymnasiumEnvironment(package=package, id="Walk-v0", arguments={"goal": 6}, action="number")
    steps = played(environment, "I go 1 back: -1", "nowhere", "<think>3?</think>Then 2.")
    assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[0].messages == [{"role": "user", "content": "at 4"}]
    assert "no whole number" in steps[1].messages[0]["content"]
    assert steps[1].counts == {"malformed": 1}
    assert steps[2].feedback == "at 6"
    assert [step.done for step in played(environment, "0", "0", "0")] == [False, False, True]  # cut by the environment
    too_far, near = played(environment, "6", "1")
    assert too_far.messages == [{"role": "user", "content": "6 is not an action. Write a number from -5 to 5."}]
    assert (too_far.reward, too_far.counts, near.reward) == (0.0, {"malformed": 1}, 1.0)


def test_samples_of_a_prompt_begin_in_the_same_way(package: str) -> None:
    environment = GymnasiumEnvironment(package=package, id="Walk-v0")
    assert environment.open(prompt(3), 1).reset() == environment.open(prompt(3), 2).reset()
    assert len({str(environment.open(prompt(number), 1).reset()) for number in range(20)}) > 5
    assert 0 <= seed_of(prompt()) < 2**31


@pytest.mark.parametrize(
    ("text", "kind", "action"),
    [
        ("go\nnorth ", "text", "go\nnorth"),
        ("I think so.\nopen door\n\n", "last_line", "open door"),
        ("<think>a</think> ", "last_line", None),
        ("1 or -2", "number", -2),
        ("9" * 30, "number", None),
        ("", "text", None),
    ],
)
def test_the_action_of_a_turn(text: str, kind: Any, action: Any) -> None:
    assert action_of(text, kind) == action


def test_mistakes_are_named(package: str) -> None:
    with pytest.raises(RecipeError, match=r"tiny_walks.make\('Run-v0'\) failed: KeyError"):
        GymnasiumEnvironment(package=package, id="Run-v0").open(prompt(), 1)
    with pytest.raises(RecipeError, match="needs the package nowhere_to_be_found"):
        GymnasiumEnvironment(package="nowhere_to_be_found", id="x").open(prompt(), 1)
    for environment in (TextArenaEnvironment(id="x"), ScienceWorldEnvironment(task="boil")):
        with pytest.raises(RecipeError, match="not installed: pip install"):
            environment.open(prompt(), 1)
    with pytest.raises(RecipeError, match=r"pip install 'opd\[agents\]'"):
        OpenEnvEnvironment(url="http://127.0.0.1:1").open(prompt(), 1)


RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {"teacher": "tiny/arithmetic"},
    "prompts": [{"source": "episodes:walk", "system": "Walk."}],
    "rollout": {
        "prompts": 3, "samples": 2, "max_new_tokens": 200,
        "environment": {"kind": "gymnasium", "id": "Walk-v0", "action": "number", "turns": 4, "turn_tokens": 4},
    },
    "objective": [{"divergence": "reverse_kl"}, {"form": "policy_gradient", "advantage": {"outcome_weight": 1}}],
    "train": {"steps": 2, "lr": 1e-3},
    "eval": {"prompts": 3, "teachers": False},
    "log": {"start_table": False},
    "device": "cpu",
}  # fmt: skip


def test_a_run_plays_episodes(package: str, tmp_path: Path) -> None:
    rollout = RECIPE["rollout"] | {"environment": RECIPE["rollout"]["environment"] | {"package": package}}
    run = opd.run(RECIPE | {"rollout": rollout}, out=tmp_path / "run")
    rollouts = run.rollouts.load(list(run.rollouts.entries))
    assert len(rollouts) == 12
    assert any((rollout.author == Author.ENV).any() for rollout in rollouts)
    prompts = {rollout.prompt_id: rollout.prompt_ids.tolist() for rollout in rollouts}
    assert all(name.startswith("episodes:walk/train/") for name in prompts)
    assert len({tuple(ids) for ids in prompts.values()}) > 1  # goals differ
    assert run.summary["stages"][0]["evals"]["walk"]["n"] == 3


def test_episodes_need_an_environment(tmp_path: Path) -> None:
    rollout = {name: value for name, value in RECIPE["rollout"].items() if name != "environment"}
    with pytest.raises(opd.UserError, match="begin with what an environment says"):
        opd.run(RECIPE | {"rollout": rollout}, out=tmp_path / "run")


def test_the_first_message_is_rendered_after_the_system_message(package: str) -> None:
    from opd.data.sources import SOURCES, open_sources
    from opd.models import load_model

    environment = GymnasiumEnvironment(package=package, id="Walk-v0")
    (source,) = open_sources([SOURCES.read({"source": "episodes:walk", "system": "Walk."})], environment=environment)
    found = source.train(0)
    assert [message["role"] for message in found.messages or ()] == ["system", "user"]
    assert len({found.id for found in source.held_out(5)}) == 5
    assert render_prompt(found, load_model("tiny/generalist").tokenizer).size > 10
