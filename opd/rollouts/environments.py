"""Environments: they answer the student between its turns.

    class Countdown(Environment):                      # a choice in a recipe: rollout.environment, or prompts[].environment
        name = "countdown"
        def open(self, prompt, key): ...               # one episode per rollout

    episode.reset() -> messages                        # what the student reads after the prompt's own messages
    episode.step(turn) -> Step                         # after every turn: the messages that come next, a reward, whether it is over

Tools need less: see `ToolEnvironment`. Steps run outside the sampling loop, at most `workers` at a time, each for at most
`call_seconds`. Whatever goes wrong inside becomes a message to the student or a lost rollout, and is counted.

`effects` says what an interrupted run may do with a step whose result was not saved:

    none      steps have no effects: the step is repeated
    own       effects stay inside the episode, such as in a sandbox: the episode is rebuilt by playing its turns again, which must
              give the same results; then the step is repeated
    outside   others see the effects, such as a booking: nothing is played again. `recover` finds out what became of the step; if it
              cannot, the rollout ends without a reward
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import threading
import time
import types
import typing
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from opd.common.errors import DataError, OpdError, RemoteError, TrainingError, UnopenedEpisode
from opd.common.text import first_line, message_of, shortened
from opd.data.prompts import with_system
from opd.records import Message, Prompt, StopReason
from opd.registry import Choice, Family, Positive, StageView, changed
from opd.rollouts.bridge import tool_message
from opd.rollouts.tool_calls import Call, FormatName, Tool, tool_format

Effects = Literal["none", "own", "outside"]


@dataclass(frozen=True)
class Turn:
    """What the student wrote in one turn. `text` is without its stop token."""

    number: int  # from 0
    text: str
    ids: np.ndarray  # int32, the stop token included
    stop: StopReason
    calls: Sequence[Call] = ()  # of the environment's tools


@dataclass(frozen=True)
class Step:
    """An environment's response to a turn. `messages` is what the student reads next. An environment may give their `ids` instead."""

    ids: Sequence[int] = ()  # including the start of the next turn
    reward: float | None = None  # for this turn; None: no reward
    done: bool = False
    feedback: str = ""
    messages: Sequence[Message] = ()
    counts: Mapping[str, int] = field(default_factory=dict)  # for metrics, such as {"timeouts": 1}


class Episode:
    """One rollout's conversation with its environment. Only one of its methods runs at a time.

    It has a method `step`, or `async def astep`, which runs in an event loop that all such episodes share.
    """

    def reset(self) -> Sequence[Message]:
        """Messages that follow the prompt's own, the same for every sample of a prompt."""
        return ()

    def step(self, turn: Turn) -> Step | Awaitable[Step]:
        """The response to a turn. The same turns must give the same steps, unless effects are `outside`."""
        return self.astep(turn)

    async def astep(self, turn: Turn) -> Step:
        raise NotImplementedError(f"{type(self).__name__} needs a method `step` or `astep`")

    def recover(self, turn: Turn) -> Step | None:
        """With effects `outside`: the result of a step that an earlier process began. None: it is not known."""
        return None

    def resumed(self, turn: Turn, step: Step) -> Step | Awaitable[Step]:
        """With effects `none` or `own`, after an interruption: bring the episode to the state after a step whose result is known.

        By default the step is played again. An episode without state can return the known result.
        """
        return self.step(turn)

    def close(self) -> None:
        """The rollout is over."""


class Environment(Choice):
    family = "environment"
    rewards: ClassVar[bool] = True  # whether its steps give rewards: the rollout gets their sum; else `rewards` applies
    effects: ClassVar[Effects] = "none"
    inline: ClassVar[bool] = (
        False  # steps take microseconds and have no effects: they run in the sampling loop, unlogged
    )
    bounded: ClassVar[bool] = False  # whether at most `workers` episodes are open at the same time, such as processes
    replays: ClassVar[bool] = True  # whether given turns can be played in it: for take-overs and an exact resume
    takes_tokenizer: ClassVar[bool] = False  # whether `open` takes the tokenizer as well, for steps that give ids

    turns: Positive = Field(8, le=10_000, description="largest number of the student's turns")
    turn_tokens: Positive | None = Field(
        None, description="tokens of one turn; default: the remainder of rollout.max_new_tokens"
    )
    call_seconds: float = Field(
        30.0, gt=0, le=86_400, description="seconds; a step or a tool call that takes longer is abandoned"
    )
    workers: Positive = Field(16, le=4096, description="steps that run at the same time")
    result_characters: Positive = Field(4000, description="longer results of tools are cut")
    history: Literal["keep", "split"] = Field(
        "keep",
        description="keep: a turn reads the earlier turns as they were sampled. split: it reads them as the chat template renders them, "
        "often without their thinking; each turn is then trained on as a rollout of its own",
    )
    tool_calls: FormatName = Field(
        "auto",
        description="how tools are called: as the chat template writes calls, or as described in a system message",
    )

    curriculum: Literal["none", "forward", "backward"] = Field(
        "none",
        description="forward: training episodes begin with one turn and grow; backward: they begin after the oracle's turns, of which fewer and fewer are left (TCOD)",
    )
    growth: Positive = Field(6, description="of a curriculum: steps after which the student has another turn")

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.curriculum == "backward" and not self.has_oracle:
            yield f"environment {self.name} with curriculum backward has no oracle, which takes the first turns. Use forward."
        if self.curriculum == "none" and "growth" in changed(self):
            yield f"environment {self.name}: growth {self.growth} belongs to a curriculum. Set curriculum to forward or backward."

    @property
    def has_oracle(self) -> bool:
        return type(self).oracle is not Environment.oracle

    @property
    def advises(self) -> bool:
        return type(self).advice is not Environment.advice

    @property
    def has_tools(self) -> bool:
        """Whether the student may have tools to call. A program that brings its own is one of these."""
        return type(self).tools is not Environment.tools

    @property
    def cuts(self) -> bool:
        """Whether some of its episodes leave out what others have, for the advantage `probing`."""
        return False

    def turns_at(self, step: int | None) -> int:
        """The most turns of an episode at a training step, counted from 1. None: in evaluation."""
        grown = self.turns if step is None or self.curriculum != "forward" else 1 + (step - 1) // self.growth
        return min(self.turns, grown)

    def oracle_turns(self, prompt: Prompt, step: int | None) -> Sequence[str]:
        """The turns that the oracle takes before the student at a training step: all but one at first."""
        if step is None or self.curriculum != "backward":
            return ()
        known = self.oracle(prompt) or ()
        return known[: max(0, min(len(known), self.turns) - 1 - (step - 1) // self.growth)]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "open" in vars(cls):
            cls.takes_tokenizer = len(inspect.signature(vars(cls)["open"]).parameters) > 3
            cls.inline = cls.inline or cls.takes_tokenizer  # a tokenizer cannot be used in two threads

    def tools(self) -> Sequence[Tool]:
        """What the student may call."""
        return ()

    @abstractmethod
    def open(self, prompt: Prompt, key: int) -> Episode:
        """`key`: 63 random bits of (seed, prompt, visit, sample)."""

    def opening(self, prompt: Prompt) -> Sequence[Message]:
        """The messages of `reset`, which become part of the prompt. An episode is opened for them and closed again."""
        if self.takes_tokenizer:
            return ()

        def read() -> Sequence[Message]:
            episode = self.open(prompt, 0)
            try:
                messages = episode.reset()
                require_messages(messages)
                return [
                    {**message, "content": re.sub("[\ud800-\udfff]", "\ufffd", message["content"])}
                    for message in messages
                ]
            finally:
                close_aside(episode)

        attempt = 0
        while True:
            attempt += 1
            try:
                return unlimited(read) if self.inline else limited(read, self.call_seconds)
            except Exception as error:  # an environment may raise anything
                foreign = not isinstance(error, OpdError)
                if not foreign and not isinstance(error, RemoteError):
                    raise
                if attempt < OPENINGS:
                    continue
                if not foreign:
                    raise
                late = isinstance(error, TimeoutError)
                said = f"took longer than {self.call_seconds:g} s" if late else first_line(error)
                raise UnopenedEpisode(
                    f"environment {self.name} could not open an episode of prompt {prompt.id!r}: {type(error).__name__}: {said}. "
                    "Fix the environment, or raise call_seconds if it is slow."
                ) from error

    def player(self) -> Any:
        """The class that plays its rollouts: a `Playing`."""
        from opd.rollouts.episodes import Playing

        return Playing

    def opened(self, prompt: Prompt, template_kwargs: Mapping[str, Any]) -> Prompt:
        """The prompt with the environment's first messages and tools. It remembers the environment."""
        tools, opening, messages = self.tools(), self.opening(prompt), prompt.messages
        kwargs = {**template_kwargs, **prompt.template_kwargs}
        if messages is None and (tools or opening):
            raise DataError(
                f"prompt {prompt.id!r} is text, and environment {self.name} {'has tools' if tools else 'begins with messages'}, which "
                "need a chat template. Give the prompt as messages: a column `messages`, or a column `system` besides the text."
            )
        if tools and self.tool_calls == "auto":
            kwargs["tools"] = [tool.schema() for tool in tools]
        if messages is not None:
            messages = (*messages, *opening)
            if tools and self.tool_calls != "auto":
                messages = with_system(messages, tool_format(self.tool_calls, None).describe(tools))
        return replace(prompt, messages=messages, environment=self, template_kwargs=kwargs)

    def oracle(self, prompt: Prompt) -> Sequence[str] | None:
        """Turns that solve a prompt, if they are known."""
        return None

    def advice(self, prompt: Prompt, turns: Sequence[str]) -> Sequence[str]:
        """Turns that are right after the given ones, the best first. Empty: not known."""
        return ()


AnyEnvironment = Annotated[Environment, Family("environment")]


# --- Calls that may hang ---


HANGING = 500  # calls that were abandoned and still run: more would exhaust the machine
OPENINGS = 3  # attempts to open an episode
BLOCKED = 1.0  # seconds after which an event loop is blocked
_hanging: list[threading.Thread] = []
_loop: list[asyncio.AbstractEventLoop] = []
_starting = threading.Lock()


def limited(call: Callable[[], Any], seconds: float, late: Callable[[Any], object] | None = None) -> Any:
    """The result of a call, awaited if it is a coroutine. `TimeoutError` after that many seconds: the call keeps running in the background.

    `late`: receives a result that comes after the time limit, to free what it holds.
    """
    found: Future[Any] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # raised again below
            found.set_exception(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}"))

    thread = threading.Thread(target=run, name="opd-call", daemon=True)
    thread.start()
    begun = time.monotonic()
    try:
        result = found.result(seconds)
    except TimeoutError:
        if late is not None:
            found.add_done_callback(lambda done: None if done.exception() else late(done.result()))
        if thread.is_alive():
            _hanging[:] = [*(one for one in _hanging if one.is_alive()), thread]
        if len(_hanging) > HANGING:
            raise TrainingError(
                f"{HANGING} calls of environments hang. Give tools their own time limits, or raise call_seconds ({seconds:g} s)."
            ) from None
        raise
    if not inspect.isawaitable(result):
        return result
    loop = _event_loop()
    waiting = asyncio.run_coroutine_threadsafe(_awaited(result), loop)
    try:
        return waiting.result(max(0.001, seconds - (time.monotonic() - begun)))
    except TimeoutError:
        waiting.cancel()
        _leave_if_blocked(loop)
        raise


def unlimited(call: Callable[[], Any]) -> Any:
    """The result of a call in this thread, which only Ctrl-C ends."""
    try:
        return call()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(type(error).__name__) from error


def require_messages(messages: Any) -> None:
    """Raise an error for messages of an environment that no template can render."""
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages must be a list, got {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise TypeError(f"a message must be {{role, content}}, both text, got {shortened(message, 100)}")


def close_aside(episode: Episode) -> threading.Thread:
    """Close an episode that nobody needs any more, in another thread because that may hang."""

    def close() -> None:
        with contextlib.suppress(BaseException):
            episode.close()

    thread = threading.Thread(target=close, name="opd-close", daemon=True)
    thread.start()
    return thread


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # some would end the loop that all coroutines share
        raise RuntimeError(type(error).__name__) from None


def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all coroutines, in its own thread."""
    with _starting:
        if not _loop:
            _loop.append(asyncio.new_event_loop())
            threading.Thread(target=_loop[0].run_forever, name="opd-event-loop", daemon=True).start()
        return _loop[0]


def _leave_if_blocked(loop: asyncio.AbstractEventLoop) -> None:
    """If a coroutine blocks the loop, later ones get another loop."""
    free = threading.Event()
    loop.call_soon_threadsafe(free.set)

    def leave() -> None:
        if not free.wait(BLOCKED):
            with _starting:
                _loop[:] = [one for one in _loop if one is not loop]

    threading.Thread(target=leave, name="opd-call", daemon=True).start()


# --- Tools that are Python functions ---


class ToolEnvironment(Environment):
    """The student calls Python functions until it answers without a call.

        class Clock(ToolEnvironment):
            name = "clock"

            def functions(self, prompt):
                def time_in(city: str) -> str:
                    "The time in a city."
                    return TIMES[city]
                return [time_in]

    Names, type hints and docstrings make the schemas. `reward` rewards the final answer; by default the recipe's `rewards` do.
    """

    rewards = False

    @abstractmethod
    def functions(self, prompt: Prompt | None) -> Sequence[Callable[..., Any]]:
        """The tools of an episode. `None` asks for their names and types only."""

    def tools(self) -> Sequence[Tool]:
        return [tool_of(function) for function in self.functions(None)]

    def reward(self, prompt: Prompt, answer: str) -> float | None:
        return None

    def open(self, prompt: Prompt, key: int) -> Episode:
        return ToolEpisode(self, prompt)


class ToolEpisode(Episode):
    def __init__(self, environment: ToolEnvironment, prompt: Prompt) -> None:
        self.environment, self.prompt = environment, prompt
        self.functions = {function.__name__: function for function in environment.functions(prompt)}

    def step(self, turn: Turn) -> Step:
        if not turn.calls:
            return Step(reward=self.environment.reward(self.prompt, turn.text), done=True)
        messages, counts, most = [], Counter[str](), self.environment.result_characters
        for call in turn.calls:
            try:
                said = result_text(self._call(partial(self.functions[call.name], **call.arguments)), most)
            except TimeoutError:
                said = f"error: {call.name} took longer than {self.environment.call_seconds:g} s"
                counts["timeouts"] += 1
            except TrainingError:  # too many calls hang
                raise
            except Exception as error:  # a tool may raise anything; the student sees the error
                said = result_text(f"error: {type(error).__name__}: {message_of(error)}", most)
                counts["errors"] += 1
            messages.append(tool_message(call, said))
        return Step(messages=messages, counts=counts)

    def _call(self, function: Callable[[], Any]) -> Any:
        return function() if self.environment.inline else limited(function, self.environment.call_seconds)


def result_text(said: Any, characters: int) -> str:
    """A tool's result as text that is safe to show: decoded, without control characters, of limited length.

    >>> result_text(b"ok\\xff\\x00", 10)
    'ok\ufffd\ufffd'
    >>> result_text("abcdef", 3)
    'abc… [3 more characters]'
    """
    if isinstance(said, (bytes, bytearray)):
        said = bytes(said[: 4 * characters]).decode(errors="replace")
    text = said if isinstance(said, str) else str(said)
    cut = len(text) - characters
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", "\ufffd", text[:characters])
    return f"{text}… [{cut:,} more characters]" if cut > 0 else text


def tool_of(function: Callable[..., Any]) -> Tool:
    """The schema of a function, from its type hints and docstring."""
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {function.__name__}: parameter {name!r} must be a plain named parameter")
        if name not in hints:
            raise TypeError(f"tool {function.__name__}: parameter {name!r} needs a type hint")
        properties[name] = json_schema(hints[name])
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return Tool(function.__name__, inspect.getdoc(function) or "", parameters)


JSON_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def json_schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type hint.

    >>> json_schema(list[int] | None)
    {'anyOf': [{'type': 'array', 'items': {'type': 'integer'}}, {'type': 'null'}]}
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [json_schema(inner) for inner in arguments]}
    if hint is list or origin in (list, Sequence):
        return {"type": "array", **({"items": json_schema(arguments[0])} if arguments else {})}
    if hint is dict or origin in (dict, Mapping):
        return {"type": "object"}
    if hint is Any:
        return {}
    raise TypeError(
        f"{hint!r} is not a type that a tool can take: use str, int, float, bool, list, dict, Literal or a union"
    )
