"""The turns of a rollout whose agent is a program: each of its requests is a turn of the student.

One rollout in the store holds everything that the student read and wrote for one agent:

    prompt of the dataset | read: conversation 0 | turn | read: the messages after it | turn | read: conversation 1 | turn …

A request continues a conversation if its messages begin with those of the conversation, the student's last turn included: only the
new messages are read, and the ids before them stay as they were sampled. Any other request begins a conversation, which shares
the ids of an earlier one as far as their messages are the same. Each conversation is trained on as a rollout.

After an interruption the agent is started again. While it asks what it asked before, the recorded turns are its answers.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from opd.common.errors import DataError, ModelError, Stopped
from opd.common.text import first_line
from opd.data.prompts import render_prompt, response_text, with_system
from opd.engines.requests import request_key, why_over
from opd.environments.agent import AgentEnvironment, AgentEpisode
from opd.environments.chat_protocols import ChatError, ChatReply, ChatRequest, Finish
from opd.environments.chat_server import PendingChat
from opd.records import Author, Message, Prompt, Rollout, SampledToken, SampleRequest, StopReason
from opd.rollouts.bridge import Bridge
from opd.rollouts.environments import Step, Turn
from opd.rollouts.episodes import (
    ASKED,
    COUNTS,
    PARTS,
    Dialogue,
    GivenTurns,
    Playing,
    StepLog,
    TurnSink,
    parts_by_author,
)
from opd.rollouts.tool_calls import Call, CallError, Tool, ToolFormat, tool_format, turn_text

MOST_TOOLSETS = 64  # lists of tools whose bridges are kept
PATIENCE = 4  # requests for every turn that is allowed; more end the rollout


@dataclass(frozen=True)
class Answered(Turn):
    """A turn that answers a request. Without one: the first request is waited for."""

    pending: PendingChat | None = None
    reply: ChatReply | ChatError | None = None


@dataclass(frozen=True)
class Asked(Step):
    """The next request of the agent."""

    pending: PendingChat | None = None


@dataclass(frozen=True)
class Mark:
    """Where a conversation stood after a turn: messages, ids, and how the turn ended."""

    messages: int
    ids: int
    stopped: bool
    calls: Sequence[Call]


@dataclass
class AgentConversation:
    """`keys`: its messages, as they are compared; `ids`: everything read and written; `places`: where that is in the response."""

    number: int
    tools: str
    keys: list[str]
    ids: list[int]
    read: int  # ids before the first turn
    prompt: tuple[int, int]
    places: list[tuple[int, int]] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


@dataclass(frozen=True)
class Recorded:
    """A turn that an earlier process sampled: what it read, and its place in the response."""

    read: tuple[int, ...]
    first: int
    end: int


@dataclass
class Current:
    """The turn that is being sampled."""

    pending: PendingChat
    conversation: AgentConversation
    read: int
    first: int


class Toolset:
    """How one list of tools is rendered and called."""

    def __init__(
        self, dialogue: Dialogue, kwargs: Mapping[str, Any], stop_ids: Sequence[int], tools: Sequence[Tool]
    ) -> None:
        environment, tokenizer = dialogue.environment, dialogue.tokenizer
        plain = dialogue.bridge
        self.described = tools if environment.tool_calls != "auto" else ()
        rendered = () if self.described else [_harmless_tool(tool, plain) for tool in tools]
        self.bridge = Bridge(tokenizer, stop_ids, kwargs, rendered) if rendered else plain
        self.format: ToolFormat | None = (
            tool_format(environment.tool_calls, tokenizer, stop_ids, kwargs) if tools else None
        )
        self.readable = [Tool(tool.name, tool.description, _plain_schema(tool.parameters)) for tool in tools]
        self._schemas = [tool.schema() for tool in rendered]
        self._kwargs, self._tokenizer = kwargs, tokenizer

    def render(self, messages: Sequence[Message]) -> np.ndarray:
        """The ids of a conversation that the chat template renders."""
        safe: Sequence[Message] = [self._safe(message) for message in messages]
        if self.described and self.format is not None:
            safe = with_system(tuple(safe), self.format.describe(self.described))
        kwargs = {**self._kwargs, **({"tools": self._schemas} if self._schemas else {})}
        try:
            return render_prompt(Prompt("a request of an agent", "", messages=tuple(safe)), self._tokenizer, kwargs)
        except DataError:
            if not any(message.get("tool_calls") for message in safe):
                raise
        texts = [_arguments_as_text(message) for message in safe]  # some templates expect JSON
        return render_prompt(Prompt("a request of an agent", "", messages=tuple(texts)), self._tokenizer, kwargs)

    def _safe(self, message: Message) -> dict[str, Any]:
        found = self.bridge.harmless_message(message)
        if "tool_calls" in found:
            found["tool_calls"] = _harmless_values(found["tool_calls"], self.bridge)
        return found


class AgentPlaying(Playing):
    """One rollout whose agent asks for the turns."""

    environment: AgentEnvironment
    _episode: AgentEpisode | None

    def __init__(
        self, dialogue: Dialogue, request: SampleRequest, prompt: Prompt,
        durable: Rollout | None = None, log: StepLog | None = None, step: int | None = None, draws_again: bool = False,
        given: GivenTurns | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dialogue, request, prompt, None, log, step)
        self._kwargs = {name: value for name, value in prompt.template_kwargs.items() if name != "tools"}
        self._began = durable is not None and bool(durable.response_ids.size)
        self.ids = [] if durable is None else durable.response_ids.tolist()
        self._logprobs = [] if durable is None else durable.logprob.tolist()
        self._recorded = [] if durable is None else recorded_turns(durable)
        self._conversations: list[AgentConversation] = []
        self._replies: dict[str, Answered] = {}
        self._current: Current | None = None
        self._requests = 0

    # In the pool

    def open(self) -> None:
        if self.environment.effects == "outside" and self._log is not None and self.environment.program:
            logged = self._log.logged
            self._began = self._began or (logged is not None and logged.finished)
            if not self._began:  # durable before the program starts
                self._log.call({"start": True}, dict)
        if not (self._began and self.environment.effects == "outside"):
            super().open()

    def answer(self, turn: Turn) -> Step:
        """Give the agent its answer, and wait for what it asks next."""
        assert isinstance(turn, Answered)
        if self._episode is None:
            return Asked(
                done=True,
                feedback=self._unopened or "the run was interrupted, and the agent must not be started twice",
                counts={"lost": 1},
            )
        session = self._episode.session
        if turn.pending is not None and turn.reply is not None:
            if self._log is not None:
                self._log.sync()
            turn.pending.give(turn.reply)
        waits = self.environment.port is not None and not session.name  # for an agent from elsewhere
        found = session.next(self.environment.call_seconds, waits)
        if self._abandoned:  # the end of the run has closed the session
            raise Stopped
        if isinstance(found, PendingChat):
            return Asked(pending=found)
        counts = (
            {"lost": 1, "timeouts" if found.timed_out else "errors": 1}
            if found.problem and session.reward is None
            else {}
        )
        return Asked(done=True, reward=session.reward, feedback=found.problem, counts=counts)

    # In the sampler's thread

    def drawn(self, token: SampledToken) -> None:
        super().drawn(token)
        self._logprobs.append(token.logprob)

    def proceed(self, sink: TurnSink) -> Turn:
        return self._waiting()

    def turn_ended(self, stop: StopReason) -> Turn:
        """The turn as the agent reads it. Its conversation stands after it."""
        current = self._current
        assert current is not None
        self._current = None
        return self._taken(current, current.first, len(self.ids), stop)

    def accept(self, step: Step, sink: TurnSink) -> Any:
        """Take the agent's request, or its end. Returns what comes next; None: the rollout is over."""
        if not isinstance(step, Asked) or step.pending is None:
            self._counts.update(step.counts)
            self._rewards.append(step.reward)
            self._feedback += [step.feedback] if step.feedback else []
            self._end(sink)
            return None
        pending = step.pending
        self._requests += 1
        if self._requests > PATIENCE * (self.environment.turns + PATIENCE):
            pending.give(_no_more_turns(self.environment.turns))
            self._counts["lost"] += 1
            self._feedback.append(f"the agent asked {self._requests} times for {self.environment.turns} turns")
            self._end(sink)
            return None
        try:
            return self._asked(pending, sink)
        except ChatError as error:
            self._counts["refused"] += 1
            return replace(self._waiting(), pending=pending, reply=error)

    # A request

    def _asked(self, pending: PendingChat, sink: TurnSink) -> Turn | SampleRequest:
        """The recorded answer, or the turn to sample."""
        request = pending.request
        known = self._replies.get(request.digest)
        if known is not None and self._repeats(known, pending):
            self._counts["retries"] += 1
            known = replace(known, pending=pending, reply=self._with_tokens(known.reply, request))
            self._replies[request.digest] = known
            return known
        if pending.left:
            self._counts["dropped"] += 1
            pending.give(ChatError(408, "the client closed its connection before its turn came", "client_gone"))
            return self._waiting()
        if self._turn >= self.environment.turns:
            raise _no_more_turns(self.environment.turns)
        try:
            conversation, read = self._located(request)
        except (DataError, ModelError, RecursionError) as error:
            raise ChatError(400, first_line(error)) from None
        self._require_room(conversation, len(read))
        recorded = self._take_recorded(read)
        if recorded is None:
            first = len(self.ids)
            sink.extend(self.request.id, np.array(read, dtype=np.int32), Author.ENV, -1)
            self.ids += read
            self._logprobs += [float("nan")] * len(read)
            recorded = Recorded(tuple(read), first + len(read), first + len(read))
        current = self._enter(pending, conversation, recorded, request)
        following = self.turn_request()
        if recorded.end < len(self.ids):  # whole, for later ones follow it
            stop = why_over(self.ids[recorded.first : recorded.end], _alone(following), self.dialogue.tokenizer)
            return self._taken(current, recorded.first, recorded.end, stop or "length")
        if recorded.end > recorded.first:
            stop = why_over(self.ids[recorded.first :], _alone(following), self.dialogue.tokenizer)
            if stop is not None:
                return self._taken(current, recorded.first, recorded.end, stop)
        self._current = current
        return following

    def _with_tokens(self, reply: ChatReply | ChatError | None, request: ChatRequest) -> ChatReply | ChatError | None:
        """A recorded answer. Its tokens as text are needed if log-probs are wanted only now."""
        return replace(reply, tokens=self._texts(reply.ids, request)) if isinstance(reply, ChatReply) else reply

    def _texts(self, ids: Sequence[int], request: ChatRequest) -> Sequence[str]:
        return [str(self.dialogue.tokenizer.decode([index])) for index in ids] if request.logprobs else ()

    def _repeats(self, known: Answered, pending: PendingChat) -> bool:
        lost = known.pending is not None and known.pending.left
        return self.environment.repeats == "answer" or pending.again or lost

    def _located(self, request: ChatRequest) -> tuple[AgentConversation, list[int]]:
        """The conversation that a request belongs to, and the ids that are new in it. A conversation that begins has no places yet."""
        if request.protocol == "ids":
            return self._located_ids(request)
        most = self.request.prompt_ids.size + self.request.sampling.max_new_tokens
        size = sum(len(message["content"]) for message in request.messages)
        if size > most * self.dialogue.longest_token:  # before it is rendered, which would hold up other rollouts
            raise ChatError(
                400,
                f"the messages have {size:,} characters, and at most {most:,} tokens fit",
                "context_length_exceeded",
            )
        keys = [message_key(message) for message in request.messages]
        toolset = self._toolset(request)
        found = self._longest(keys, request.tools_text)
        if found is not None and any(
            message["role"] == "assistant" for message in request.messages[found[1].messages :]
        ):
            found = None  # turns that the student did not write
        if found is None:
            ids = toolset.render(request.messages).tolist()
            return self._begun(request.tools_text, ids), ids
        conversation, mark = found
        new = [_as_result(message) for message in request.messages[mark.messages :]]
        bridge = toolset.bridge.ids(new, stopped=mark.stopped, calls=mark.calls).tolist()
        if mark is conversation.marks[-1]:
            return conversation, bridge
        ids = [*conversation.ids[: mark.ids], *bridge]
        return self._begun(request.tools_text, ids), ids

    def _located_ids(self, request: ChatRequest) -> tuple[AgentConversation, list[int]]:
        ids = list(request.ids)
        if max(ids) >= len(self.dialogue.tokenizer):
            raise ChatError(
                400, f"token_ids: {max(ids)} is beyond the vocabulary of {len(self.dialogue.tokenizer)} ids"
            )
        found = [
            conversation
            for conversation in self._conversations
            if len(conversation.ids) < len(ids) and ids[: len(conversation.ids)] == conversation.ids
        ]
        if not found:
            return self._begun("", ids), ids
        longest = max(found, key=lambda one: len(one.ids))
        return longest, ids[len(longest.ids) :]

    def _longest(self, keys: Sequence[str], tools: str) -> tuple[AgentConversation, Mark] | None:
        """The conversation, and its turn, with which most of these messages are the same."""
        found = [
            (mark.messages, conversation.number, conversation, mark)
            for conversation in self._conversations
            if conversation.tools == tools
            for mark in conversation.marks
            if mark.messages < len(keys) and conversation.keys[: mark.messages] == keys[: mark.messages]
        ]
        if not found:
            return None
        best = max(found, key=lambda one: (one[0], one[1]))
        return best[2], best[3]

    def _begun(self, tools: str, ids: Sequence[int]) -> AgentConversation:
        return AgentConversation(len(self._conversations), tools, [], [], len(ids), (0, 0))

    def _require_room(self, conversation: AgentConversation, new: int) -> None:
        most = self.request.prompt_ids.size + self.request.sampling.max_new_tokens
        if len(conversation.ids) + new >= most:
            raise ChatError(
                400,
                f"the conversation has {len(conversation.ids) + new:,} tokens, and at most {most:,} fit, the answer included "
                "(rollout.max_new_tokens and the prompt)",
                "context_length_exceeded",
            )

    def _take_recorded(self, read: Sequence[int]) -> Recorded | None:
        """The turn of an earlier process that read the same."""
        for recorded in self._recorded:
            last = recorded.end == len(self.ids)  # only the last one can be sampled further
            if recorded.read == tuple(read) and (last or recorded.end > recorded.first):
                self._recorded.remove(recorded)
                return recorded
        return None

    def _enter(
        self, pending: PendingChat, conversation: AgentConversation, recorded: Recorded, request: ChatRequest
    ) -> Current:
        """The conversation reads what is new."""
        place = (recorded.first - len(recorded.read), recorded.first)
        if not conversation.places and not conversation.ids:
            conversation.prompt = place
            self._conversations.append(conversation)
        else:
            conversation.places.append(place)
        conversation.ids += recorded.read
        conversation.keys = [message_key(message) for message in request.messages]
        self._start, self._asking = recorded.first, (conversation, request)
        return Current(pending, conversation, len(conversation.ids), recorded.first)

    def turn_request(self) -> SampleRequest:
        conversation, request = self._asking
        whole, ids = self.request.sampling, conversation.ids
        left = self.request.prompt_ids.size + whole.max_new_tokens - len(ids)
        most = min(left, self.environment.turn_tokens or left, request.max_tokens or left)
        drawn = self.ids[self._start :]
        prefix = np.array([*ids[conversation.read :], *drawn], dtype=np.int32)
        return replace(
            self.request,
            prompt_ids=np.array(ids[: conversation.read], dtype=np.int32),
            prefix_ids=prefix if prefix.size else None,
            start=len(ids) - conversation.read,
            key=request_key(self.request.key, self._prompt.id, conversation.number, 0),
            sampling=replace(whole, max_new_tokens=most, stop_strings=(*whole.stop_strings, *request.stop)),
        )

    def _taken(self, current: Current, first: int, end: int, stop: StopReason) -> Turn:
        """A whole turn, sampled now or by an earlier process."""
        ids, request, conversation = self.ids[first:end], current.pending.request, current.conversation
        toolset = self._toolset(request)
        reply, calls = self._reply(toolset, request, ids, self._logprobs[first:end], stop, current.read)
        if request.token_ids:
            reply = replace(reply, prompt_ids=tuple(conversation.ids))
        conversation.places.append((first, end))
        conversation.ids += ids
        if request.protocol != "ids":
            said = {
                "role": "assistant",
                "content": reply.content,
                "tool_calls": [call.message() for call in reply.calls],
            }
            conversation.keys.append(message_key(said))
            stopped = bool(ids) and ids[-1] in self.request.sampling.stop_ids
            conversation.marks.append(Mark(len(conversation.keys), len(conversation.ids), stopped, calls))
        self._turn += 1
        turn = Answered(self._turn, "", np.array(ids, dtype=np.int32), stop, calls, current.pending, reply)
        self._replies[request.digest] = turn
        return turn

    def _reply(
        self, toolset: Toolset, request: ChatRequest, ids: Sequence[int], logprobs: Sequence[float], stop: StopReason, read: int
    ) -> tuple[ChatReply, Sequence[Call]]:  # fmt: skip
        tokenizer, stops = self.dialogue.tokenizer, self.request.sampling.stop_ids
        array = np.array(ids, dtype=np.int32)
        text = response_text(array, tokenizer, stops)
        calls: list[Call] = []
        if toolset.format is not None:
            raw = turn_text(array, tokenizer, stops)
            calls = self._calls(toolset, raw)
            if calls:
                marker = str(getattr(toolset.format, "open", "")).split("\n")[0]
                thinking, thought, said = raw.rpartition("</think>")  # a marker within the thinking begins no call
                text = f"{thinking}{thought}{said.partition(marker)[0].rstrip() if marker else ''}"
        thinking, thought, content = text.rpartition("</think>")
        content = content.lstrip("\n") if thought else text
        for end in request.stop:
            content = content.partition(end)[0]
        finish: Finish = "tool_calls" if calls else "length" if stop == "length" else "stop"
        thinking = thinking.removeprefix("<think>").strip("\n")
        return ChatReply(content, thinking, calls, finish, read, ids, logprobs, self._texts(ids, request)), calls

    def _calls(self, toolset: Toolset, text: str) -> list[Call]:
        """The calls in a turn. One that cannot be read leaves the turn as text, as servers of models do."""
        assert toolset.format is not None
        try:
            found = list(toolset.format.read(text.rpartition("</think>")[2], toolset.readable))
        except (CallError, RecursionError):
            self._counts["malformed"] += 1
            return []
        first = self._counts["calls"]
        self._counts["calls"] += len(found)
        return [Call(name, arguments, f"call{number:05d}") for number, (name, arguments) in enumerate(found, first)]

    def _toolset(self, request: ChatRequest) -> Toolset:
        known = _toolsets.setdefault(self.dialogue, {})
        key = request.tools_text
        if key not in known:
            if len(known) >= MOST_TOOLSETS:
                known.clear()
            known[key] = Toolset(self.dialogue, self._kwargs, self.request.sampling.stop_ids, request.tools)
        return known[key]

    def _waiting(self) -> Answered:
        return Answered(self._turn, "", np.zeros(0, np.int32), "env")

    # The end

    def _end(self, sink: TurnSink) -> None:
        whole = [one for one in self._conversations if one.marks or one.places]
        parts = [[list(one.prompt), [list(place) for place in one.places]] for one in whole]
        session = None if self._episode is None else self._episode.session
        if not whole and not self._counts["lost"]:
            self._counts["lost"] = 1
            self._feedback.append("the agent ended without a request that the student could answer")
        counts = Counter(self._counts)
        counts["dropped"] += 0 if session is None else session.dropped
        counts["conversations"], counts["unused"] = len(whole), len(self._recorded)
        facts: dict[str, Any] = {name: counts[name] for name in (*COUNTS, *ASKED) if counts[name]}
        if any(one is not None for one in self._rewards) or counts["lost"]:
            facts["turn_rewards"] = [*([None] * max(0, self._turn - 1)), *self._rewards[-1:]]
        if self._feedback:
            facts["feedback"] = "\n".join(self._feedback)
        if counts["lost"]:
            self.lost = self._feedback[-1] if self._feedback else "lost"
        self._current, self.stop = None, "env"
        sink.note(self.request.id, **facts, **{PARTS: parts})
        self.close()


_toolsets: weakref.WeakKeyDictionary[Dialogue, dict[str, Toolset]] = weakref.WeakKeyDictionary()


def recorded_turns(rollout: Rollout) -> list[Recorded]:
    """The turns of a response: what was read before each, and where it is."""
    found, read, at = list[Recorded](), tuple[int, ...](), 0
    for own, ids in parts_by_author(rollout):
        if own:
            found.append(Recorded(read, at, at + ids.size))
        read, at = (() if own else tuple(ids.tolist())), at + ids.size
    return [*found, Recorded(read, at, at)] if read else found


def message_key(message: Message) -> str:
    """Messages with the same key are the same: a client may write a turn back with other ids, or other spaces around it."""
    content = str(message["content"])
    if message["role"] == "assistant":
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
        return json.dumps(["assistant", content.strip(), calls], sort_keys=True)
    return json.dumps([message["role"], content, message.get("tool_call_id", "")], sort_keys=True)


def _as_result(message: Message) -> Message:
    """A tool's result with a name, which some templates show."""
    return message if message["role"] != "tool" or "name" in message else {**message, "name": "tool"}


def _alone(request: SampleRequest) -> SampleRequest:
    """The request of one turn, whose tokens are counted from its beginning."""
    return replace(request, prefix_ids=None, start=0)


def _no_more_turns(turns: int) -> ChatError:
    return ChatError(400, f"the student has taken all of its {turns} turns (environment.turns)", "no_more_turns")


def _harmless_values(value: Any, bridge: Bridge) -> Any:
    if isinstance(value, str):
        return bridge.harmless(value)
    if isinstance(value, Mapping):
        return {bridge.harmless(key): _harmless_values(inner, bridge) for key, inner in value.items()}
    return [_harmless_values(inner, bridge) for inner in value] if isinstance(value, (list, tuple)) else value


def _harmless_tool(tool: Tool, bridge: Bridge) -> Tool:
    return Tool(tool.name, bridge.harmless(tool.description), _harmless_values(tool.parameters, bridge))


def _arguments_as_text(message: Message) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _plain_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The types of the arguments, whatever else an agent wrote into its schema."""
    properties = parameters.get("properties")
    found = {name: _types_of(schema) for name, schema in properties.items()} if isinstance(properties, dict) else {}
    return {"type": "object", "properties": {name: {"type": types} if types else {} for name, types in found.items()}}


def _types_of(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        return []
    given = schema.get("type")
    types = (
        [given]
        if isinstance(given, str)
        else [one for one in given if isinstance(one, str)]
        if isinstance(given, list)
        else []
    )
    for inner in schema["anyOf"] if isinstance(schema.get("anyOf"), list) else ():
        types += _types_of(inner) if inner is not schema else []
    return types
