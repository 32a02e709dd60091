"""Simulators from other packages: the student's turn is an action, the observation is the next message.

    environment: {kind: gymnasium, id: "FrozenLake-v1", action: number}
    environment: {kind: gymnasium, package: gem, id: "game:GuessTheNumber-v0-easy"}
    environment: {kind: textarena, id: "Wordle-v0"}
    environment: {kind: scienceworld, task: boil}
    environment: {kind: openenv, url: "http://localhost:8000"}

Their prompts come from `source: episodes`: each prompt is a seed, so all samples of a prompt begin in the same way. A simulator lives in
this process, or behind its own connection; an interrupted episode is rebuilt from its seed and its turns.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from opd.common.errors import RecipeError, RemoteError
from opd.common.http import HttpAddress, Remote
from opd.common.text import first_line, shortened
from opd.records import Message, Prompt
from opd.registry import Word
from opd.rollouts.environments import Effects, Environment, Episode, Step, Turn

Actions = Literal["text", "last_line", "number"]
LARGEST = 16 << 20  # bytes of a server's message
_seeding = threading.Lock()  # some packages seed the global `random` and draw the game from it
HIDDEN_KEYS = ("metadata", "reward", "done")  # of observations and actions


class Observed(NamedTuple):
    observation: str
    reward: float
    done: bool


class Game(ABC):
    """One running simulator."""

    @abstractmethod
    def reset(self) -> str:
        """The first observation."""

    @abstractmethod
    def act(self, action: Any) -> Observed: ...

    def why_not(self, action: Any) -> str:
        """Why an action is not possible at all; empty if it is, or if the simulator answers that itself."""
        return ""

    def close(self) -> None:  # noqa: B027  optional
        """Free what it holds."""


class Simulator(Environment):
    """Base of the kinds in this file. A turn without a possible action is answered with a hint and earns 0."""

    effects: ClassVar[Effects] = "own"
    package_name: ClassVar[str]
    install: ClassVar[str]

    action: Actions = Field(
        "text", description="of a turn, after its thinking: all text, its last line, or the last whole number in it"
    )

    @abstractmethod
    def start(self, seed: int) -> Game:
        """A new game, the same for the same seed."""

    def open(self, prompt: Prompt, key: int) -> Episode:
        return GameEpisode(self, self.start(seed_of(prompt)))

    def module(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if error.name and error.name.partition(".")[0] != name.partition(".")[0]:
                raise RecipeError(f"environment {self.name}: importing {name} failed: {first_line(error)}.") from None
            raise RecipeError(
                f"environment {self.name} needs the package {name}, which is not installed: pip install {self.install}."
            ) from None


class GameEpisode(Episode):
    def __init__(self, environment: Simulator, game: Game) -> None:
        self._environment, self._game, self._observation = environment, game, game.reset()

    def reset(self) -> Sequence[Message]:
        return [{"role": "user", "content": self._observation}]

    def step(self, turn: Turn) -> Step:
        action = action_of(turn.text, self._environment.action)
        problem = HINTS[self._environment.action] if action is None else self._game.why_not(action)
        if problem:
            return Step(messages=[{"role": "user", "content": problem}], reward=0.0, counts={"malformed": 1})
        observation, reward, done = self._game.act(action)
        messages = [] if done else [{"role": "user", "content": observation}]
        return Step(messages=messages, reward=reward, done=done, feedback=observation if done else "")

    def close(self) -> None:
        self._game.close()


HINTS = {
    "text": "The answer is empty. Write an action.",
    "last_line": "The answer is empty. Write an action on the last line.",
    "number": "There is no whole number in the answer. Write the number of an action.",
}


def action_of(text: str, kind: Actions) -> str | int | None:
    """
    >>> action_of("<think>left?</think>I go right: 2.", "number")
    2
    """
    said = text.rpartition("</think>")[2].strip()
    if kind == "number":
        numbers = re.findall(r"-?\b\d{1,9}\b", said)
        return int(numbers[-1]) if numbers else None
    if kind == "last_line":
        said = said.splitlines()[-1].strip() if said else ""
    return said or None


def seed_of(prompt: Prompt) -> int:
    """31 bits of the prompt's id: every sample of a prompt plays the same game."""
    return int.from_bytes(hashlib.blake2b(prompt.id.encode(), digest_size=4).digest(), "big") >> 1


# --- Gymnasium, and packages with its interface ---


class GymnasiumEnvironment(Simulator):
    """An environment that `gymnasium.make`, or `make` of another package such as gem, gives."""

    name = "gymnasium"
    install = "gymnasium, or the package that is named"
    package: Word = Field("gymnasium", description="the module whose `make` is called")
    id: Word
    arguments: dict[str, Any] = Field(default_factory=dict, description="of `make`")

    def start(self, seed: int) -> Game:
        try:
            made = self.module(self.package).make(self.id, **self.arguments)
        except (RecipeError, MemoryError):
            raise
        except Exception as error:  # of another package, about the id or the arguments
            raise RecipeError(
                f"environment gymnasium: {self.package}.make({self.id!r}) failed: {type(error).__name__}: {first_line(error)}."
            ) from None
        return GymnasiumGame(made, seed)


class GymnasiumGame(Game):
    def __init__(self, made: Any, seed: int) -> None:
        self._made, self._seed = made, seed

    def reset(self) -> str:
        with _seeding:
            found = self._made.reset(seed=self._seed)
        return _observation_text(found[0] if isinstance(found, tuple) else found)

    def act(self, action: Any) -> Observed:
        observation, reward, terminated, truncated, _ = self._made.step(action)
        return Observed(_observation_text(observation), float(reward), bool(terminated or truncated))

    def why_not(self, action: Any) -> str:
        """Numbers outside a Discrete space raise an error in many environments."""
        space: Any = getattr(self._made, "action_space", None)
        if (
            not isinstance(action, int)
            or not hasattr(space, "n")
            or not hasattr(space, "start")
            or space.contains(action)
        ):
            return ""
        return f"{action} is not an action. Write a number from {space.start} to {space.start + space.n - 1}."

    def close(self) -> None:
        if hasattr(self._made, "close"):
            self._made.close()


def _observation_text(observation: Any) -> str:
    """An observation as text; arrays and tuples as Python writes them."""
    if isinstance(observation, str):
        return observation
    return f"Observation: {observation.tolist() if hasattr(observation, 'tolist') else observation}"


# --- TextArena ---


class TextArenaEnvironment(Simulator):
    """A game of TextArena for one player."""

    name = "textarena"
    install = "textarena"
    id: Word
    arguments: dict[str, Any] = Field(default_factory=dict, description="of `textarena.make`")

    def start(self, seed: int) -> Game:
        arena = self.module("textarena")
        try:
            made = arena.make(env_id=self.id, **self.arguments)
        except Exception as error:  # of another package, about the id or the arguments
            raise RecipeError(
                f"environment textarena: make({self.id!r}) failed: {type(error).__name__}: {first_line(error)}."
            ) from None
        return TextArenaGame(made, seed)


class TextArenaGame(Game):
    def __init__(self, made: Any, seed: int) -> None:
        self._made, self._seed = made, seed

    def reset(self) -> str:
        with _seeding:
            self._made.reset(num_players=1, seed=self._seed)
        return str(self._made.get_observation()[1])

    def act(self, action: Any) -> Observed:
        done, _ = self._made.step(action=str(action))
        if not done:
            return Observed(str(self._made.get_observation()[1]), 0.0, False)
        rewards, info = self._made.close()
        said = " ".join(str(facts["reason"]) for facts in (info or {}).values() if "reason" in facts)
        return Observed(said, float((rewards or {}).get(0, 0.0)), True)


# --- ScienceWorld ---


class ScienceWorldEnvironment(Simulator):
    """Elementary-school science in a text world. Needs Java. The reward is the gain in score, 1 in total."""

    name = "scienceworld"
    install = "scienceworld (and Java)"
    task: Word = Field(description="such as boil or find-living-thing")
    simplifications: str = "easy"
    steps: int = Field(100, ge=1, le=10_000, description="actions after which the world ends an episode")
    action: Actions = "last_line"

    def start(self, seed: int) -> ScienceWorldGame:
        return ScienceWorldGame(self, self.module("scienceworld"), seed)

    def oracle(self, prompt: Prompt) -> Sequence[str]:
        """The gold path that the package gives."""
        key = (self.task, self.simplifications, seed_of(prompt))
        if key not in _gold_paths:
            game = self.start(seed_of(prompt))
            _gold_paths[key] = game.gold_path()
            game.close()
        return _gold_paths[key]

    def advice(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        """The next action of the gold path. Nothing is known once a turn has left it."""
        path = self.oracle(prompt)
        return path[len(turns) : len(turns) + 1] if list(turns) == path[: len(turns)] else ()


_gold_paths: dict[tuple[str, str, int], list[str]] = {}  # by task, simplifications and seed


class ScienceWorldGame(Game):
    """Java processes are kept for later episodes with the same limit of steps: each takes seconds to start."""

    _idle: ClassVar[dict[int, list[Any]]] = {}
    _lock = threading.Lock()

    def __init__(self, settings: ScienceWorldEnvironment, package: Any, seed: int) -> None:
        self._steps, self._acting = settings.steps, False
        with self._lock:
            kept = self._idle.get(self._steps)
            idle = kept.pop() if kept else None
        self._world: Any = idle or package.ScienceWorldEnv("", envStepLimit=settings.steps)
        if settings.task not in self._world.get_task_names():
            known = ", ".join(sorted(self._world.get_task_names()))
            raise RecipeError(f"environment scienceworld: no task {settings.task!r}. There are: {known}.")
        self._world.load(settings.task, 0, settings.simplifications)
        variations = list(self._world.get_variations_train()) or [0]
        self._load = partial(
            self._world.load, settings.task, variations[seed % len(variations)], settings.simplifications
        )

    def gold_path(self) -> list[str]:
        self._load(generateGoldPath=True)
        return [str(action) for action in self._world.get_gold_action_sequence()]

    def reset(self) -> str:
        self._load()
        observation, _ = self._world.reset()
        self._world.lastStepScore = 0  # some starts have a score: the first action earns it, or 1 is out of reach
        return f"{self._world.get_task_description()}\n\n{observation}"

    def act(self, action: Any) -> Observed:
        self._acting = True
        observation, reward, done, _ = self._world.step(str(action))
        self._acting = False
        return Observed(str(observation), float(reward) / 100, bool(done))

    def close(self) -> None:
        if self._acting:  # an action hangs or has failed
            self._world.close()
            return
        with self._lock:
            self._idle.setdefault(self._steps, []).append(self._world)


# --- OpenEnv servers ---


class OpenEnvEnvironment(Simulator):
    """A server of OpenEnv, asked through its WebSocket: each connection is a separate episode."""

    name = "openenv"
    install = "'opd[agents]'"
    url: HttpAddress
    action_key: Word | None = Field(
        None, description="of the action that takes the text; default: its only required key"
    )
    observation_key: Word | None = Field(None, description="of the observation that is shown; default: all of it")
    options: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of a reset; `seed` is given by opd"
    )

    def start(self, seed: int) -> Game:
        return OpenEnvGame(self, self.module("websockets.sync.client"), seed)


class OpenEnvGame(Game):
    def __init__(self, settings: OpenEnvEnvironment, client: Any, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self._key = settings.action_key or self._only_key()
        address = settings.url.rstrip("/").replace("http", "ws", 1) + "/ws"
        try:
            self._socket = client.connect(address, open_timeout=settings.call_seconds, max_size=LARGEST)
        except OSError as error:
            raise RemoteError(
                f"OpenEnv server {settings.url} does not answer: {first_line(error)}. Start it."
            ) from None

    def reset(self) -> str:
        return self._ask("reset", {**self._settings.options, "seed": self._seed}).observation

    def act(self, action: Any) -> Observed:
        return self._ask("step", {self._key: action})

    def close(self) -> None:
        self._socket.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        found = json.loads(self._socket.recv(timeout=self._settings.call_seconds))
        if found.get("type") != "observation":
            raise RemoteError(
                f"OpenEnv server {self._settings.url} rejected a {kind}: {shortened(found.get('data'), 300)}."
            )
        data = found["data"]
        return Observed(self._text(data.get("observation")), float(data.get("reward") or 0.0), bool(data.get("done")))

    def _text(self, observation: Any) -> str:
        if not isinstance(observation, dict):
            return _observation_text(observation)
        key = self._settings.observation_key
        if key is not None and key not in observation:
            raise RecipeError(f"environment openenv: no observation_key {key!r}; there is: {', '.join(observation)}.")
        shown = {name: value for name, value in observation.items() if name not in HIDDEN_KEYS}
        values = [observation[key]] if key is not None else list(shown.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown, ensure_ascii=False)

    def _only_key(self) -> str:
        """The key of an action that a text goes to, from the server's schema."""
        schema = Remote(self._settings.url, timeout=self._settings.call_seconds, patience=0).json("GET", "/schema")[
            "action"
        ]
        keys = [key for key in schema.get("required") or schema.get("properties", {}) if key not in HIDDEN_KEYS]
        if len(keys) != 1:
            raise RecipeError(
                f"environment openenv: an action of {self._settings.url} has the keys {', '.join(keys) or 'none'}. "
                "Set action_key to the one that takes the student's text."
            )
        return str(keys[0])
