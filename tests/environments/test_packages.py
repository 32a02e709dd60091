"""Environments of other packages, with the packages themselves: `make test-agents` installs them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import RecipeError
from opd.environments.mcp import McpEnvironment
from opd.environments.simulators import (
    GymnasiumEnvironment,
    OpenEnvEnvironment,
    ScienceWorldEnvironment,
    TextArenaEnvironment,
    seed_of,
)
from opd.records import Author, Prompt
from opd.rollouts.environments import Environment, Step, Turn
from opd.rollouts.tool_calls import Call

pytestmark = pytest.mark.agents


def prompt(number: int = 0) -> Prompt:
    return Prompt(id=f"episodes:x/train/{number}", domain="x", messages=())


def played(environment: Environment, *texts: str, number: int = 0) -> list[str]:
    """The observations of an episode and how it ended."""
    episode = environment.open(prompt(number), 1)
    said = [str(message["content"]) for message in episode.reset()]
    for turn, text in enumerate(texts):
        step = episode.step(Turn(turn, text, np.zeros(0, np.int32), "stop"))
        assert isinstance(step, Step)
        said.append(step.feedback if step.done else str(step.messages[0]["content"]))
        if step.done:
            said.append(f"done: {step.reward}")
            break
    episode.close()
    return said


def replayed(environment: Environment, *texts: str) -> list[str]:
    """Played twice with the same result: what a resumed run relies on."""
    first = played(environment, *texts)
    assert played(environment, *texts) == first
    return first


def roomy(name: str, directory: Path) -> str:
    """A tiny model that reads texts as long as those of these packages."""
    place = directory / name
    shutil.copytree(Path(opd.__file__).parent / "models" / "tiny" / name, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return str(place)


def trained(environment: dict[str, Any], directory: Path, falls: bool = True, **changes: Any) -> opd.Run:
    """A short run in an environment. `falls`: the student comes closer to its teacher."""
    rollout = {"prompts": 8, "max_new_tokens": 6000, **changes.pop("rollout", {})}
    run = opd.run({
        "student": roomy("spelling", directory), "teachers": {"t": roomy("arithmetic", directory)}, "prompts": "episodes:game",
        "rollout": {**rollout, "environment": {"turns": 3, "turn_tokens": 8, "call_seconds": 60, **environment}},
        "objective": {"form": "direct", "divergence": "forward_kl"}, "train": {"steps": 8, "lr": 1e-3}, "eval": {"prompts": 0},
        "log": {"start_table": False}, "device": "cpu", **changes,
    }, out=directory / "run")  # fmt: skip
    kl = [line["loss"] for line in run.metrics]  # the forward KL, at every token of the student
    assert not falls or np.mean(kl[-3:]) < 0.7 * np.mean(kl[:2]), kl
    assert all(line["env/lost"] == 0 for line in run.metrics)
    return run


@pytest.mark.parametrize(
    "environment",
    [
        {"kind": "gymnasium", "id": "FrozenLake-v1", "action": "number"},
        {"kind": "gymnasium", "package": "gem", "id": "game:GuessTheNumber-v0-easy"},
        {"kind": "textarena", "id": "GuessTheNumber-v0"},
        {"kind": "scienceworld", "task": "find-living-thing", "turns": 2, "workers": 2},
    ],
    ids=["gymnasium", "gem", "textarena", "scienceworld"],
)
def test_a_student_learns_in_a_package(environment: dict[str, Any], tmp_path: Path) -> None:
    run = trained(environment, tmp_path)
    rollouts = run.rollouts.load(list(run.rollouts.entries))
    assert np.mean([(rollout.author == Author.ENV).any() for rollout in rollouts]) > 0.9  # its replies were read


def test_gymnasium() -> None:
    lake = GymnasiumEnvironment(id="FrozenLake-v1", arguments={"is_slippery": False}, action="number")
    assert replayed(lake, "2", "2", "1", "1", "1", "2") == [
        "Observation: 0", *(f"Observation: {place}" for place in (1, 2, 6, 10, 14)), "Observation: 15", "done: 1.0",
    ]  # fmt: skip
    cards = GymnasiumEnvironment(id="Blackjack-v1", action="number")
    assert replayed(cards, "0")[-1].startswith("done: ")
    assert len({played(cards, number=number)[0] for number in range(9)}) > 3
    with pytest.raises(RecipeError, match="failed"):
        played(GymnasiumEnvironment(id="Nowhere-v0"))


@pytest.mark.parametrize(
    ("id", "text"),
    [
        ("game:GuessTheNumber-v0-easy", r"\boxed{5}"),
        ("game:Mastermind-v0-easy", r"\boxed{123}"),
        ("game:Sudoku-v0-easy", r"\boxed{1 1 1}"),
        ("game:TowerofHanoi-v0-easy", r"\boxed{A B}"),
        ("game:Minesweeper-v0-easy", r"\boxed{reveal 1 1}"),
    ],
)
def test_gem(id: str, text: str) -> None:
    said = replayed(GymnasiumEnvironment(package="gem", id=id), text, text)
    assert len(said[0]) > 50
    assert len(said) >= 3


@pytest.mark.parametrize("id", ["GuessTheNumber-v0", "Sudoku-v0", "TowerOfHanoi-v0", "FrozenLake-v0"])
def test_textarena(id: str) -> None:
    said = replayed(TextArenaEnvironment(id=id), "[5]", "[right]")
    assert len(said[0]) > 50
    assert len(said) >= 3


def test_scienceworld() -> None:
    world = ScienceWorldEnvironment(task="find-living-thing", steps=5)
    said = replayed(world, "I look.\nlook around", "inventory", "wait1", "wait1", "wait1", "wait1")
    assert "Your task is to find a" in said[0]
    assert "This room is called" in said[1]
    assert said[-1].startswith("done: ")
    with pytest.raises(RecipeError, match="no task 'cook'"):
        played(ScienceWorldEnvironment(task="cook"))


def test_the_gold_path_of_scienceworld_earns_1() -> None:
    world = ScienceWorldEnvironment(task="lifespan-longest-lived")
    # 1 of 62 variations: number 3 begins at the place that the task asks for, and so with half of the score
    numbers = [next(n for n in range(999) if seed_of(prompt(n)) % 62 == variation) for variation in (2, 3)]
    for number, begins in zip(numbers, ("This room is called the kitchen", "This outside location"), strict=True):
        path, total, said = world.oracle(prompt(number)), 0.0, list[str]()
        episode = world.open(prompt(number), 1)
        assert begins in str(episode.reset()[0]["content"])
        for action in path:
            assert world.advice(prompt(number), said) == [action]
            step = episode.step(Turn(len(said), action, np.zeros(0, np.int32), "stop"))
            assert isinstance(step, Step)
            total, said = total + (step.reward or 0), [*said, action]
            if step.done:
                break
        episode.close()
        assert step.done
        assert total == pytest.approx(1)
        assert world.advice(prompt(number), [*said, "look around"]) == ()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def served(file: Path, source: str) -> Iterator[str]:
    """A server in a process of its own."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    file.write_text(source.replace("@PORT@", str(port)))
    process = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


MCP = '''
try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server

server = Server("notes")
NOTES = []


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keeps a note."""
    NOTES.append(text)
    return ", ".join(NOTES)


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("on purpose")


if "@PORT@".isdigit():
    import uvicorn
    uvicorn.run(server.streamable_http_app(), host="127.0.0.1", port=int("@PORT@"))
else:
    server.run("stdio")
'''


KNOWN = """
import opd
from opd.environments.mcp import McpEnvironment


@opd.register
class KnownCalls(McpEnvironment):
    name = "known_calls"

    def oracle(self, prompt):
        return ['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "5"]
"""


def learns_to_call(server: dict[str, Any], directory: Path) -> None:
    """The student clones calls of the server's tools, then makes them itself while it comes closer to its teacher."""
    (directory / "known.py").write_text(KNOWN)
    tools = {"tool_calls": "json", "tool_effects": "none", "allow": ["add"], "turn_tokens": 80, **server}
    clone = {
        "name": "clone", "objective": {"form": "cross_entropy", "on": ["data"]}, "train": {"steps": 60, "lr": 3e-3},
        "rollout": {"writers": [{"kind": "oracle", "share": 1}], "environment": {"kind": "known_calls", **tools}},
    }  # fmt: skip
    play = {"name": "play", "student": "stage:clone", "teachers": {"t": roomy("arithmetic", directory)},
            "objective": {"form": "direct", "divergence": "forward_kl"}, "train": {"steps": 8, "lr": 1e-3},
            "rollout": {"environment": {"kind": "mcp", **tools}}}  # fmt: skip
    run = opd.run({
        "plugins": [str(directory / "known.py")], "student": roomy("spelling", directory), "prompts": "task:addition",
        "rollout": {"prompts": 4, "max_new_tokens": 600}, "eval": {"prompts": 0}, "log": {"start_table": False}, "device": "cpu",
        "stages": [clone, play],
    }, out=directory / "run")  # fmt: skip
    played = [line for line in run.metrics if line["stage"] == "play"]
    assert played[0]["env/calls"] >= 0.5
    assert sum(line["env/lost"] + line["env/errors"] for line in run.metrics) == 0
    kl = [line["loss"] for line in played]
    assert np.mean(kl[-3:]) < 0.7 * np.mean(kl[:2]), kl


def calls(environment: McpEnvironment, *made: tuple[str, dict[str, Any]]) -> list[str]:
    episode = environment.open(prompt(), 1)
    given = tuple(Call(name, arguments, f"call{number:05d}") for number, (name, arguments) in enumerate(made))
    step = episode.step(Turn(0, "", np.zeros(0, np.int32), "stop", given))
    episode.close()
    assert isinstance(step, Step)
    return [str(message["content"]) for message in step.messages]


def used(environment: McpEnvironment) -> None:
    add, *_ = environment.tools()
    assert [tool.name for tool in environment.tools()] == ["add", "note", "fail"]
    assert add.description == "Adds two numbers."
    assert add.parameters["required"] == ["a"]
    said = calls(environment, ("add", {"a": 2, "b": 3}), ("note", {"text": "x"}), ("fail", {}))
    assert said[0] == "5"
    assert said[1].endswith("x")
    assert "on purpose" in said[2] or "Error executing tool fail" in said[2]


def test_an_mcp_server_as_a_process(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(MCP)
    environment = McpEnvironment(
        command=[sys.executable, str(tmp_path / "server.py")], variables=["PYTHONPATH"], call_seconds=60
    )
    used(environment)
    assert calls(environment, ("note", {"text": "y"})) == ["y"]  # a session of its own
    learns_to_call(
        {"command": environment.command, "variables": ["PYTHONPATH"], "session": "shared", "call_seconds": 60}, tmp_path
    )


def test_an_mcp_server_over_http(tmp_path: Path) -> None:
    with served(tmp_path / "server.py", MCP) as url:
        used(McpEnvironment(url=f"{url}/mcp", call_seconds=60))
        used(McpEnvironment(url=f"{url}/mcp", session="shared", call_seconds=60))
        learns_to_call({"url": f"{url}/mcp", "call_seconds": 60}, tmp_path)


OPENENV = """
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Say(Action):
    text: str


class Heard(Observation):
    said: str


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.turns, self.begun = 0, 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.turns, self.begun = 0, seed
        return Heard(said=f"seed {seed}", done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self.turns += 1
        return Heard(said=f"{self.turns}: {action.text}", done=self.turns == 2, reward=0.5 * self.turns)

    @property
    def state(self):
        return State(step_count=self.turns)


import uvicorn
uvicorn.run(create_app(Echo, Say, Heard, env_name="echo", max_concurrent_envs=4), host="127.0.0.1", port=@PORT@)
"""


def test_openenv(tmp_path: Path) -> None:
    with served(tmp_path / "server.py", OPENENV) as url:
        environment = OpenEnvEnvironment(url=url, call_seconds=60)
        said = replayed(environment, "one", "two")
        assert said[0].startswith("seed ")
        assert said[1:] == ["1: one", "2: two", "done: 1.0"]
        assert played(environment, number=1) != said[:1]
        with pytest.raises(RecipeError, match=r"no observation_key 'x'; there is: .*said"):
            played(OpenEnvEnvironment(url=url, observation_key="x", call_seconds=60))
        trained({"kind": "openenv", "url": url}, tmp_path)


SUMS = """
import urllib.request, json
import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[Sum, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes) > 0)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        return [SumTask(Sum(prompt=f"add {number}+1", answer=str(number + 1)), self.config.task) for number in range(3)]


class Twice(vf.Harness[vf.HarnessConfig]):
    \"\"\"Asks, and asks again. A program that verifiers installs would need uv and its registry.\"\"\"

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        from openai import AsyncOpenAI

        client, messages = AsyncOpenAI(base_url=endpoint, api_key=secret), [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            found = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=6)
            said = found.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Sums", "Twice"]
"""


def test_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_sums.py").write_text(SUMS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = {"taskset": {"id": "tiny-sums"}, "agent": {"runtime": {"type": "subprocess"}}}
    python = os.environ["VERIFIERS_PYTHON"]
    run = trained(
        {"kind": "verifiers", "python": python, "settings": settings, "call_seconds": 300, "workers": 2, "turn_tokens": 6},
        tmp_path, falls=False, rollout={"prompts": 2, "max_new_tokens": 200}, train={"steps": 2, "lr": 1e-3},
    )  # fmt: skip
    notes = [entry.notes for entry in run.rollouts.entries.values()]
    assert [noted["reward"] for noted in notes] == [1.0] * 4
    assert all(noted["conversations"] == 1 for noted in notes)
    asked = [run.rollouts.load([name])[0] for name in run.rollouts.entries]
    assert all((np.diff(rollout.author == Author.STUDENT) == 1).sum() == 2 for rollout in asked)
