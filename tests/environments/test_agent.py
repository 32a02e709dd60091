"""Agents that are programs: how their requests become turns, what is recorded, and what can go wrong with them."""

from __future__ import annotations

import contextlib
import errno
import functools
import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import RecipeError, RemoteError, TrainingError, UserError
from opd.data.prompts import render_prompt
from opd.environments.agent import AgentEnvironment
from opd.environments.agent_turns import AgentPlaying, Toolset
from opd.environments.chat_protocols import ChatError, read_body
from opd.environments.chat_server import AgentSession, AgentSessions, ChatServer, PendingChat
from opd.records import Author, Finished, Prompt, Rollout, SampledToken, SampleRequest, Sampling
from opd.registry import StageView
from opd.rollouts.episodes import PARTS, TURN_OF, split_conversations
from opd.rollouts.rollouter import answers
from opd.serve.student import serve_student
from tests.support.chat_templates import OWN, template_tokenizer

TOKEN = "0123456789abcdef"
HI = {"role": "user", "content": "Hi."}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
AGENT = """
import json, os, sys, urllib.request

facts = json.loads(sys.stdin.readline())


def ask(path, body):
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), key)
    return json.loads(urllib.request.urlopen(request, timeout=60).read())


messages = list(facts["messages"])
for number in range(TURNS):
    messages.append(ask("/chat/completions", {"messages": messages})["choices"][0]["message"])
    messages.append({"role": "user", "content": "add 1+%d" % (number + 2)})
"""


NUMBERS = itertools.count()


class Scripted:
    """Says texts in turn, and keeps the requests."""

    def __init__(self, tokenizer: Any, stop: int, texts: Sequence[str]) -> None:
        self.tokenizer, self.stop, self.texts, self.requests = tokenizer, stop, list(texts), list[SampleRequest]()

    def sample(self, requests: Iterable[SampleRequest | None]) -> Iterator[SampledToken | Finished]:
        for request in requests:
            if request is None:
                time.sleep(0.001)
                continue
            text = self.texts[len(self.requests) % len(self.texts)]
            self.requests.append(request)
            ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.stop]
            most = request.sampling.max_new_tokens
            for token in ids[:most]:
                yield SampledToken(request.id, token, -1.0, -1.0, -2.0, 0)
            yield Finished(request.id, "stop" if len(ids) <= most else "length")

    def load(self, weights: Any) -> None: ...


class Client:
    """An agent in a thread of the test, which finds the student at the port."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, f"conversation{next(NUMBERS)}"

    def ask(self, path: str, body: Any = None, token: str = TOKEN, **headers: str) -> tuple[int, Any]:
        host = self.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=120)  # the server itself answers 503 after 30 s
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        known = {"Authorization": f"Bearer {token}", "X-Conversation": self.name, **headers}
        connection.request("GET" if body is None else "POST", path, None if body is None else content, known)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, json.loads(text) if text.startswith("{") else text

    def chat(self, messages: Any, headers: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
        status, found = self.ask("/v1/chat/completions", {"messages": messages, **more}, **(headers or {}))
        assert status == 200, found
        message: dict[str, Any] = found["choices"][0]["message"]
        return message

    def end(self, **given: Any) -> None:
        assert self.ask("/v1/end", given)[0] in (200, 410)


class Played:
    """A rollout with an agent that is a function of the test."""

    def __init__(
        self, sampler: Scripted, rollout: Rollout, notes: dict[str, Any], failure: list[BaseException]
    ) -> None:
        self.sampler, self.rollout, self.notes = sampler, rollout, notes
        self.parts = split_conversations(rollout, notes[PARTS])
        if failure:
            raise failure[0]

    def read(self) -> list[str]:
        """What the student read before each turn."""
        decode = self.sampler.tokenizer.decode
        return [
            decode([*one.prompt_ids, *(one.prefix_ids if one.prefix_ids is not None else ())])
            for one in self.sampler.requests
        ]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Played]:
    monkeypatch.setenv("AGENT_TOKEN", TOKEN)

    def played(
        agent: Callable[[Client], None], texts: Sequence[str] = ("a", "b", "c"), template: str = "chatml",
        tokens: int = 600, **settings: Any,
    ) -> Played:  # fmt: skip
        tokenizer, stop_ids = template_tokenizer(OWN[template])
        environment = AgentEnvironment(port=0, token_env="AGENT_TOKEN", **settings)
        prompt = environment.opened(Prompt(id="p", domain="", messages=(HI,)), {})
        sampler = Scripted(tokenizer, stop_ids[0], texts)
        request = SampleRequest("r", render_prompt(prompt, tokenizer), 7, Sampling(tokens, stop_ids=stop_ids))
        failure: list[BaseException] = []

        def run() -> None:
            client = Client(environment.server().url)
            try:
                agent(client)
                client.end()
            except BaseException as error:
                failure.append(error)
                client.end()

        thread = threading.Thread(target=run)
        thread.start()
        notes: dict[str, Any] = {}
        (rollout,) = answers(sampler, [request], prompts={"r": prompt}, tokenizer=tokenizer, notes=notes)  # type: ignore[arg-type]
        thread.join()
        return Played(sampler, rollout, notes["r"], failure)

    return played


def test_a_conversation_continues_without_being_rendered_again(play: Callable[..., Played]) -> None:
    said = []

    def agent(client: Client) -> None:
        messages = [{"role": "system", "content": "S"}, HI]
        for number in range(3):
            said.append(client.chat(messages))
            messages += [said[-1], {"role": "user", "content": f"q{number}"}]
        client.ask("/v1/reward", {"reward": 0.5})

    found = play(agent, ["<think>why</think>\n a ", "<think>so</think>b", "c"], "drops_thinking")
    assert [message["content"] for message in said] == [" a ", "b", "c"]
    assert [message.get("reasoning_content") for message in said] == ["why", "so", None]
    whole = found.read()[-1]
    assert whole.startswith(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n<think>why</think>\n a <|im_end|>"
    )
    assert whole.endswith("<think>so</think>b<|im_end|>\n<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n")
    (part,) = found.parts
    decode = found.sampler.tokenizer.decode
    assert decode([*part.prompt_ids, *part.response_ids]) == whole + "c<|im_end|>"
    own = part.author == Author.STUDENT
    assert np.isfinite(part.logprob[own]).all()
    assert np.isnan(part.logprob[~own]).all()
    assert part.extras[TURN_OF] == "r"
    assert found.notes["turn_rewards"] == [None, None, 0.5]
    assert found.notes["conversations"] == 1
    assert len({one.key for one in found.sampler.requests}) == 1


def test_another_history_is_another_conversation(play: Callable[..., Played]) -> None:
    """It shares the sampled ids of the first one as far as the messages are the same."""

    def agent(client: Client) -> None:
        first = client.chat([HI])
        client.chat([HI, first, {"role": "user", "content": "q"}])
        client.chat([HI, first, {"role": "user", "content": "other"}])
        client.chat([{"role": "user", "content": "new"}])
        client.chat([HI, {**first, "content": "edited"}, {"role": "user", "content": "q"}])

    found = play(agent, ["<think>x</think>a", "b", "c", "d", "e"], "drops_thinking")
    read = found.read()
    assert found.notes["conversations"] == len(found.parts) == 4
    assert "<think>x</think>a<|im_end|>\n<|im_start|>user\nother" in read[2]
    assert read[3] == "<|im_start|>user\nnew<|im_end|>\n<|im_start|>assistant\n"
    assert "edited" in read[4]
    decode = found.sampler.tokenizer.decode
    assert [decode(part.response_ids[part.author == Author.STUDENT]) for part in found.parts] == [
        "<think>x</think>a<|im_end|>b<|im_end|>", "c<|im_end|>", "d<|im_end|>", "e<|im_end|>",
    ]  # fmt: skip
    assert len({part.id for part in found.parts}) == 4
    assert len({part.group for part in found.parts}) == 1
    assert len({one.key for one in found.sampler.requests}) == 4


def test_a_repeated_request_gets_the_recorded_answer(play: Callable[..., Played]) -> None:
    said = []

    def agent(client: Client) -> None:
        said.extend([client.chat([HI]), client.chat([HI])])
        said.append(client.chat([HI, said[0], HI]))
        said.append(client.chat([HI], max_tokens=5))  # another request

    found = play(agent)
    assert [message["content"] for message in said] == ["a", "a", "b", "c"]
    assert found.notes["retries"] == 1


def test_a_repeated_request_may_be_answered_anew(play: Callable[..., Played]) -> None:
    said = []

    def agent(client: Client) -> None:
        said.extend([client.chat([HI]), client.chat([HI])])
        said.append(client.chat([HI], {"x-stainless-retry-count": "1"}))

    found = play(agent, repeats="sample")
    assert [message["content"] for message in said] == ["a", "b", "b"]
    assert found.notes["retries"] == 1
    assert found.notes["conversations"] == 2


def test_a_lost_answer_is_given_to_one_repeated_request_only(
    play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, lost = list[str](), iter([True])

    def answered(self: PendingChat, result: Any) -> None:
        self.left = next(lost, False)  # the client of the first request is gone
        give(self, result)

    give = PendingChat.give
    monkeypatch.setattr(PendingChat, "give", answered)
    found = play(lambda client: said.extend(client.chat([HI])["content"] for _ in range(3)), repeats="sample")
    assert said == ["a", "a", "b"]
    assert found.notes["retries"] == 1


def test_a_server_on_an_address_of_ipv6_whose_programs_have_ended() -> None:
    try:
        server = ChatServer(AgentSessions(), "::1")
    except UserError:
        pytest.skip("no IPv6 on this machine")
    session = server.sessions.open({"prompt": "x"}, own=True)
    client = Client(server.url)
    assert client.ask("/v1/prompt", token=session.token) == (200, {"prompt": "x"})
    server.sessions.close(session)
    assert client.ask("/v1/prompt", token=session.token)[0] == 410
    assert client.ask("/v1/prompt", token="wrong")[0] == 401
    server.shutdown()
    server.server_close()


def test_a_machine_without_room_does_not_blame_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(code: int) -> None:
        def no_process(*args: Any, **settings: Any) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(subprocess, "Popen", no_process)
        AgentEnvironment(command=["agent"]).open(Prompt(id="p", domain="", text="x"), 0)

    with pytest.raises(OSError, match="Too many open files"):
        fails(errno.EMFILE)
    with pytest.raises(RecipeError, match="does not start: Exec format error"):
        fails(errno.ENOEXEC)


def test_a_dropped_connection_loses_nothing(play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch) -> None:
    said, entered, ask = list[Any](), list[PendingChat](), AgentSession.ask

    def asked(self: AgentSession, pending: PendingChat, there: Callable[[], bool]) -> Any:
        entered.append(pending)
        return ask(self, pending, there)

    monkeypatch.setattr(AgentSession, "ask", asked)

    def agent(client: Client) -> None:
        host, port = client.url.removeprefix("http://").split(":")
        body = json.dumps({"messages": [HI]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nX-Conversation: {client.name}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            while not entered:  # the request has reached the rollout
                time.sleep(0.01)
        said.append(client.chat([HI]))
        said.append(client.chat([HI, said[0], HI]))

    found = play(agent)
    assert [message["content"] for message in said] == ["a", "b"]
    assert found.notes["conversations"] == 1
    assert found.notes.get("retries", 0) + found.notes.get("dropped", 0) >= 1


def test_tools_of_the_request_are_rendered_and_called(play: Callable[..., Played]) -> None:
    said = []

    def agent(client: Client) -> None:
        said.append(client.chat([HI], tools=[WEATHER]))
        call = said[0]["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "<|im_end|> sunny"}
        said.append(client.chat([HI, said[0], result], tools=[WEATHER]))
        said.append(client.chat([HI, said[0], result, said[1], HI], tools=[WEATHER], tool_choice="none"))

    calls = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    found = play(agent, [f"Let me see.\n{calls}", "It is sunny.", "<tool_call>{"], "json_calls")
    assert said[0]["content"] == "Let me see."
    assert said[0]["tool_calls"] == [
        {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    ]
    assert "<tool_response>\n< |im_end|> sunny\n</tool_response>" in found.read()[1]
    assert f"Let me see.\n{calls}<|im_end|>" in found.read()[1]
    assert said[2] == {"role": "assistant", "content": "<tool_call>{"}
    assert found.notes["calls"] == 1
    assert found.notes["conversations"] == 2  # without tools it reads something else


def test_a_call_that_cannot_be_read_stays_text(play: Callable[..., Played]) -> None:
    said = []
    hostile = {"properties": {"a": 3, "b": {"anyOf": [{"type": 5}, []]}}, "required": 7}
    tool = {"type": "function", "function": {"name": "weather", "parameters": hostile}}
    found = play(lambda client: said.append(client.chat([HI], tools=[tool])), ["<tool_call>{oh"], "json_calls")
    assert said[0]["content"] == "<tool_call>{oh"
    assert found.notes["malformed"] == 1


def test_events_of_a_stream(play: Callable[..., Played]) -> None:
    said = []

    def agent(client: Client) -> None:
        body = {"messages": [HI], "stream": True, "stream_options": {"include_usage": True}}
        said.append(client.ask("/v1/chat/completions", body)[1])

    play(agent)
    *chunks, last = [line.removeprefix("data: ") for line in said[0].split("\n\n") if line]
    parsed = [json.loads(chunk) for chunk in chunks]
    assert last == "[DONE]"
    assert "".join(choice["delta"].get("content") or "" for one in parsed for choice in one["choices"]) == "a"
    assert parsed[-1]["usage"]["completion_tokens"] == 2


def test_messages_of_anthropic(play: Callable[..., Played]) -> None:
    said = []
    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}  # type: ignore[index]

    def agent(client: Client) -> None:
        known = {"max_tokens": 200, "tools": [tool], "system": [{"type": "text", "text": "S"}]}
        status, first = client.ask("/v1/messages", {"messages": [HI], **known}, **{"x-api-key": TOKEN})
        assert status == 200, first
        result = {
            "type": "tool_result",
            "tool_use_id": first["content"][-1]["id"],
            "content": [{"type": "text", "text": "sunny"}],
        }
        asked = [HI, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        said.extend([first, client.ask("/v1/messages", {"messages": asked, **known})[1]])
        said.append(client.ask("/v1/messages", {"messages": [HI], "tool_choice": {"type": "any"}}))

    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    found = play(agent, [f"<think>hm</think>Well.\n{call}", "Sunny."], "json_calls")
    assert [block["type"] for block in said[0]["content"]] == ["thinking", "text", "tool_use"]
    assert said[0]["content"][-1]["input"] == {"city": "Rome"}
    assert said[0]["stop_reason"] == "tool_use"
    assert said[1]["content"] == [{"type": "text", "text": "Sunny."}]
    assert said[2][0] == 400
    assert said[2][1]["type"] == "error"
    assert found.notes["conversations"] == 1
    assert "<tool_response>\nsunny\n</tool_response>" in found.read()[1]


def test_token_ids_in_and_out(play: Callable[..., Played]) -> None:
    said = []

    def agent(client: Client) -> None:
        def generate(ids: list[int], **sampling: Any) -> Any:
            status, found = client.ask(
                "/inference/v1/generate", {"token_ids": ids, "sampling_params": {"logprobs": 0, **sampling}}
            )
            assert status == 200, found
            return found["choices"][0]

        said.append(generate([1, 2, 3], max_tokens=1))
        said.append(generate([1, 2, 3, *said[0]["token_ids"], 9, 9]))
        said.append(generate([4]))
        assert client.ask("/inference/v1/generate", {"token_ids": [10**6]})[0] == 400

    found = play(agent, ["aa", "b", "c"])
    assert [one["finish_reason"] for one in said] == ["length", "stop", "stop"]
    assert [entry["logprob"] for entry in said[1]["logprobs"]["content"]] == [-1.0, -1.0]
    assert [part.prompt_ids.tolist() for part in found.parts] == [[1, 2, 3], [4]]
    assert found.parts[0].response_ids.tolist() == [*said[0]["token_ids"], 9, 9, *said[1]["token_ids"]]


def test_ids_of_a_chat_completion_are_given_if_they_are_wanted(play: Callable[..., Played]) -> None:
    said: list[dict[str, Any]] = []

    def agent(client: Client) -> None:
        body = {"messages": [HI], "return_token_ids": True, "logprobs": True}
        said.append(client.ask("/v1/chat/completions", body)[1])
        message = said[0]["choices"][0]["message"]
        said.append(client.ask("/v1/chat/completions", body | {"messages": [HI, message, HI]})[1])
        stream = client.ask("/v1/chat/completions", {"messages": [HI], "return_token_ids": True, "stream": True})[1]
        chunks = [json.loads(line.removeprefix("data: ")) for line in stream.split("\n\n")[:-2]]
        assert chunks[0]["prompt_token_ids"] == said[0]["prompt_token_ids"]
        assert chunks[-1]["choices"][0]["token_ids"] == said[0]["choices"][0]["token_ids"]
        assert "token_ids" not in client.ask("/v1/chat/completions", {"messages": [HI, HI]})[1]["choices"][0]

    part = play(agent, ["aa", "b", "c"]).parts[0]
    whole = [*part.prompt_ids, *part.response_ids]
    for one in said:
        read, (choice,) = one["prompt_token_ids"], one["choices"]
        assert whole[: len(read) + len(choice["token_ids"])] == [*read, *choice["token_ids"]]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert len(whole) == len(read) + len(choice["token_ids"])


DEEP = '{"a": ' + "[" * 900 + "]" * 900 + "}"
BODIES: list[tuple[Any, int, str]] = [
    (b"{", 400, "not JSON"),
    (b"[" * 100_000, 400, "not JSON"),
    (b'{"messages": ' + b"[" * 80 + b"]" * 80 + b"}", 400, "levels deep"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}]},
        400,
        "levels deep",
    ),
    ([], 400, "JSON object"),
    ({}, 400, "messages must be"),
    ({"messages": []}, 400, "empty"),
    ({"messages": [{"role": "judge", "content": "x"}]}, 400, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "text only"),
    ({"messages": [HI], "n": 2}, 400, "one answer"),
    ({"messages": [HI], "max_tokens": -1}, 400, "positive"),
    ({"messages": [HI], "max_tokens": True}, 400, "positive"),
    ({"messages": [HI], "stop": [""]}, 400, "stop"),
    ({"messages": [HI], "tools": [{"type": "function"}]}, 400, "a tool must be"),
    ({"messages": [HI], "tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": [HI], "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"messages": [{"role": "user", "content": "x" * 700}]}, 400, "at most"),
]


def test_bad_requests_are_refused_and_the_rollout_continues(play: Callable[..., Played]) -> None:
    found = []

    def agent(client: Client) -> None:
        for body, _, _ in BODIES:
            found.append(client.ask("/v1/chat/completions", body))
        found.append(client.ask("/v1/nowhere", {}))
        found.append(client.ask("/v1/reward", {"reward": float("nan")}))
        found.append(client.ask("/v1/chat/completions", {"messages": [HI]}, token="wrong"))
        found.append(client.ask("/v1/chat/completions", {"messages": [HI]}, token="wröng"))
        found.append(client.ask("/v1/chat/completions", b"x", **{"Content-Length": "99999999999"}))
        found.append(client.ask("/v1/chat/completions", b"x", **{"Content-Length": "-1"}))
        client.chat([{"role": "user", "content": "\ud800<|im_end|>\x00"}])

    played = play(agent)
    for (status, said), (_, wanted, message) in zip(found, BODIES, strict=False):
        assert (status, message in said["error"]["message"]) == (wanted, True), said
    assert [status for status, _ in found[len(BODIES) :]] == [404, 400, 401, 401, 413, 411]
    assert played.notes["conversations"] == 1
    assert "<|im_start|>user\n?< |im_end|>" in played.read()[0]


def exchanged(client: Client, body: bytes, length: bytes | None = None, head: bytes = b"") -> bytes:
    """What the server answers to these bytes of a client that then leaves."""
    host, _, port = client.url.removeprefix("http://").rpartition(":")
    given = b"%d" % len(body) if length is None else length
    start = b"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer %s\r\nX-Conversation: %s\r\nContent-Length: %s\r\n%s\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as line, contextlib.suppress(ConnectionError):
        line.sendall(start % (TOKEN.encode(), client.name.encode(), given, head) + body)
        line.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: line.recv(65536), b""))
    return b""


def test_hostile_bytes_do_not_end_the_rollout(play: Callable[..., Played]) -> None:
    answers: list[tuple[bytes, bytes]] = []

    def agent(client: Client) -> None:
        models = b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer %s\r\nX-Conversation: %s\r\n\r\n"
        asked = models % (TOKEN.encode(), client.name.encode())
        for body, length, head, expected in (
            (b"", b"\xb2", b"", b"411"),  # a digit, but not of a number
            (b"", b"+1", b"", b"411"),
            (b"", b"9" * 19, b"", b"411"),
            (b"", b"100000000", b"", b"413"),
            (b'{"messages"', b"100", b"", b"ended early"),
            (b"\xff\xfe\xfd", None, b"", b"not JSON"),
            (b"1" * 5000, None, b"", b"not JSON"),
            (b"", b"5", b"X-More: 1\r\n" * 101, b"431"),
            (b"5", None, b"Transfer-Encoding: chunked\r\n", b"411"),
            (b"{}" + asked, b"2", b"", b'"object": "list"'),  # pipelined
        ):
            answers.append((expected, exchanged(client, body, length, head)))
        answers.append((b"400", exchanged(client, b"\x16\x03\x01\x02\x00", b"0\r\n\r\n")))
        found = client.ask("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\xed\xa0\x80 a"}]}')
        assert found[0] == 200

    played = play(agent)
    assert all(expected in answer for expected, answer in answers), answers
    assert played.notes["conversations"] == 1
    assert " a<|im_end|>" in played.read()[0]


def test_megabytes_are_not_rendered(play: Callable[..., Played], monkeypatch: pytest.MonkeyPatch) -> None:
    def agent(client: Client) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Toolset, "render", lambda *given: pytest.fail("rendered"))
            status, said = client.ask(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3_000_000}]}
            )
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
        client.chat([HI])

    assert play(agent).notes["refused"] == 1


def test_halves_of_surrogate_pairs_are_replaced_and_pairs_kept() -> None:
    assert read_body(rb'{"a": "\ud83d\ude00\ud800b\\ud800"}') == {"a": "😀?b\\ud800"}
    with pytest.raises(ChatError, match="NaN"):
        read_body(b'{"a": NaN}')


def test_turns_and_requests_are_limited(play: Callable[..., Played]) -> None:
    found = []

    def agent(client: Client) -> None:
        for number in range(30):
            found.append(client.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": str(number)}]}))
            if found[-1][0] == 410:
                break

    played = play(agent, turns=2)
    assert [status for status, _ in found[:3]] == [200, 200, 400]
    assert found[2][1]["error"]["code"] == "no_more_turns"
    assert found[-1][0] in (400, 410)
    assert len(found) < 30
    assert played.notes["lost"] == 1
    assert len(played.parts) == 2


def test_an_agent_that_is_silent_is_abandoned(play: Callable[..., Played]) -> None:
    found = []

    def agent(client: Client) -> None:
        client.chat([HI])
        while client.ask("/v1/reward", {"reward": None})[0] != 410:
            time.sleep(0.05)
        found.append(client.ask("/v1/chat/completions", {"messages": [HI]}))

    played = play(agent, call_seconds=2)
    assert found[0][0] == 410
    assert found[0][1]["error"]["code"] == "conversation_over"
    assert played.notes["lost"] == played.notes["timeouts"] == 1
    assert len(played.parts) == 1


def test_an_agent_that_takes_a_prompt_and_dies_is_abandoned(play: Callable[..., Played]) -> None:
    def agent(client: Client) -> None:
        time.sleep(0.2)  # the rollout waits for an agent already
        assert client.ask("/v1/prompt")[0] == 200
        while client.ask("/v1/reward", {"reward": None})[0] != 410:
            time.sleep(0.05)

    played = play(agent, call_seconds=0.3)
    assert played.notes["lost"] == played.notes["timeouts"] == 1


def test_an_old_conversation_takes_no_prompt(play: Callable[..., Played]) -> None:
    """After a restart of the run, agents may ask once more in conversations that an earlier process has begun."""
    found = []

    def agent(client: Client) -> None:
        old = Client(client.url)
        found.append(old.ask("/v1/reward", {"reward": 1.0})[0])
        found.append(old.ask("/v1/end", {})[0])
        messages = [HI, {"role": "assistant", "content": "a"}, HI]
        found.append(old.ask("/v1/chat/completions", {"messages": messages})[0])
        found.append(old.ask("/v1/chat/completions", b"{")[0])
        found.append(old.ask("/v1/models")[0])
        found.append(Client.ask(old, "/v1/prompt", **{"X-Conversation": "x" * 201})[0])
        client.chat([HI])

    played = play(agent)
    assert found == [410, 410, 410, 400, 200, 400]
    assert len(played.parts) == 1
    assert "lost" not in played.notes


def test_a_conversation_may_begin_with_answers_once_its_prompt_is_taken(play: Callable[..., Played]) -> None:
    def agent(client: Client) -> None:
        client.ask("/v1/prompt")
        client.chat([HI, {"role": "assistant", "content": "shown"}, HI])

    assert "shown" in play(agent).read()[0]


def test_an_agent_that_asks_nothing_loses_its_rollout(play: Callable[..., Played]) -> None:
    played = play(lambda client: client.ask("/v1/prompt") and None)
    assert played.notes["lost"] == 1
    assert "without a request" in played.notes["feedback"]


def test_log_probs_of_a_recorded_answer(play: Callable[..., Played]) -> None:
    found = []

    def agent(client: Client) -> None:
        client.chat([HI])
        body = {"messages": [HI], "logprobs": True}
        found.append(client.ask("/v1/chat/completions", body)[1]["choices"][0]["logprobs"]["content"])

    played = play(agent)
    assert [one["token"] for one in found[0]] == ["a", "<|im_end|>"]
    assert played.notes["retries"] == 1


def test_token_ids_continue_the_longest_conversation(play: Callable[..., Played]) -> None:
    def agent(client: Client) -> None:
        def generate(ids: list[int]) -> list[int]:
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 1}}
            return list(client.ask("/inference/v1/generate", body)[1]["choices"][0]["token_ids"])

        first = generate([1])
        generate([1, *first, 5])
        second = generate([1, 9])
        generate([1, 9, *second, 6])

    assert [part.prompt_ids.tolist() for part in play(agent, ["a", "b", "c", "d"]).parts] == [[1], [1, 9]]


def test_a_marker_of_calls_within_the_thinking_is_kept(play: Callable[..., Played]) -> None:
    said = []
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    play(
        lambda client: said.append(client.chat([HI], tools=[WEATHER])),
        [f"<think>a {call} b</think>Well.\n{call}"],
        "json_calls",
    )
    assert said[0]["reasoning_content"] == f"a {call} b"
    assert said[0]["content"] == "Well."
    assert len(said[0]["tool_calls"]) == 1


def test_special_tokens_in_names_and_keys_are_broken_up(play: Callable[..., Played]) -> None:
    end = "<|im_end|>"

    def agent(client: Client) -> None:
        first = client.chat([HI], tools=[WEATHER])
        call = {"function": {"name": f"weather{end}", "arguments": {f"city{end}": "Rome"}}}
        messages = [HI, {"role": "assistant", "content": "x", "tool_calls": [call]}]
        messages.append({"role": "tool", "content": "sunny", "name": f"n{end}", "tool_call_id": f"i{end}"})
        client.chat(messages, tools=[WEATHER])
        client.chat([HI, first, messages[-1]], tools=[WEATHER])

    read = play(agent, template="json_calls").read()
    assert read[1].count(end) == 3
    assert read[2].count(end) == 3


# --- Programs ---


def program(tmp_path: Path, source: str, turns: int = 1) -> list[str]:
    file = tmp_path / "agent.py"
    file.write_text(source.replace("TURNS", str(turns)))
    return [sys.executable, "-S", str(file)]


def play_program(command: list[str], **settings: Any) -> tuple[dict[str, Any], Scripted]:
    tokenizer, stop_ids = template_tokenizer(OWN["chatml"])
    environment = AgentEnvironment(command=command, **settings)
    prompt = environment.opened(Prompt(id="p", domain="", messages=(HI,), fields={"answer": "7", "shown": "s"}), {})
    sampler = Scripted(tokenizer, stop_ids[0], ["a"])
    request = SampleRequest("r", render_prompt(prompt, tokenizer), 7, Sampling(400, stop_ids=stop_ids))
    notes: dict[str, Any] = {}
    answers(sampler, [request], prompts={"r": prompt}, tokenizer=tokenizer, notes=notes)  # type: ignore[arg-type]
    return notes["r"], sampler


def test_a_program_rewards_itself_and_gets_only_the_columns_that_are_named(tmp_path: Path) -> None:
    ending = 'assert facts["columns"] == {"shown": "s"} and "7" not in str(facts["messages"])\nprint("log")\nprint(json.dumps({"reward": 0.25}))'
    notes, sampler = play_program(program(tmp_path, AGENT + ending), columns=["shown"])
    assert notes["turn_rewards"] == [0.25]
    assert len(sampler.requests) == 1


@pytest.mark.parametrize(
    ("ending", "seconds", "reason", "count"),
    [
        ("raise SystemExit('out of luck')", 60, "out of luck", "errors"),
        ("import time; time.sleep(60)", 8, "neither asked nor ended for 8 s", "timeouts"),
    ],
)
def test_a_program_that_fails_loses_its_rollout(
    tmp_path: Path, ending: str, seconds: float, reason: str, count: str
) -> None:
    notes, _ = play_program(program(tmp_path, AGENT + ending), call_seconds=seconds)
    assert notes["lost"] == notes[count] == 1
    assert reason in notes["feedback"]
    assert len(notes[PARTS]) == 1  # its turns are the student's all the same


@pytest.mark.parametrize("last", ['{"reward": 1' + "0" * 400 + "}", "[" * 50_000, '{"reward": "high"}'])
def test_a_last_line_that_is_no_reward_gives_none(tmp_path: Path, last: str) -> None:
    notes, _ = play_program(program(tmp_path, f"{AGENT}print({last!r})"))
    assert "turn_rewards" not in notes
    assert "lost" not in notes


def test_settings_that_mean_nothing_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistakes(**settings: Any) -> str:
        return " ".join(AgentEnvironment(**settings).check(StageView(None, None, ())))  # type: ignore[arg-type]

    assert "one of command and port" in mistakes()
    assert "no program 'nowhere'" in mistakes(command=["nowhere"])
    assert "needs token_env" in mistakes(port=0)
    assert "belong to a port" in mistakes(command=[sys.executable], token_env="A")
    assert "variables A are for a command" in mistakes(port=0, token_env="A", variables=["A"])
    assert "curriculum forward" in mistakes(command=[sys.executable], curriculum="forward")
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(RemoteError, match="NOT_SET"):
        AgentEnvironment(port=0, token_env="NOT_SET").server()


# --- Runs ---


def recipe(command: list[str], **changes: Any) -> dict[str, Any]:
    environment = {"kind": "agent", "command": command, "turn_tokens": 6, **changes.pop("environment", {})}
    return {
        "student": "tiny/generalist", "teachers": {"arithmetic": "tiny/arithmetic"},
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 60, "environment": environment},
        "objective": [{"divergence": "reverse_kl"}, {"form": "policy_gradient", "advantage": {"outcome_weight": 1}}],
        "train": {"steps": 2, "lr": 1e-3}, "eval": {"prompts": 0}, "log": {"start_table": False}, "device": "cpu",
    } | changes  # fmt: skip


def test_an_interrupted_run_continues_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped when some agents have their first answer. They are started again, and asked nothing twice."""
    plan = recipe(program(tmp_path, AGENT, turns=2))
    whole = opd.run(plan, out=tmp_path / "whole")
    original, answered = AgentPlaying.accept, 0

    def crash(self: Any, step: Any, sink: Any) -> Any:
        nonlocal answered
        answered += step.pending is not None
        if answered == 7:
            raise RuntimeError("killed")
        return original(self, step, sink)

    monkeypatch.setattr(AgentPlaying, "accept", crash)
    with pytest.raises(RuntimeError, match="killed"):
        opd.run(plan, out=tmp_path / "run")
    monkeypatch.setattr(AgentPlaying, "accept", original)
    run = opd.resume(tmp_path / "run")
    entries = list(whole.rollouts.entries)
    assert sorted(run.rollouts.entries) == sorted(entries)
    for name in entries:
        (one,), (other,) = whole.rollouts.load([name]), run.rollouts.load([name])
        assert one.response_ids.tolist() == other.response_ids.tolist()
        np.testing.assert_allclose(one.logprob, other.logprob, rtol=1e-4, atol=1e-5)
        assert whole.rollouts.entries[name].notes == run.rollouts.entries[name].notes
    assert [line["loss"] for line in run.metrics] == pytest.approx([line["loss"] for line in whole.metrics], rel=1e-4)


def test_a_program_with_effects_outside_starts_once_although_no_token_was_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = tmp_path / "starts"
    source = f"import json, sys\nopen({str(starts)!r}, 'a').write('%s\\n' % json.loads(sys.stdin.readline())['seed'])"
    plan = recipe(
        program(tmp_path, source),
        environment={"program_effects": "outside", "workers": 2},
        train={"steps": 1, "lr": 1e-3},
    )
    original = AgentPlaying.accept

    def crash(self: Any, step: Any, sink: Any) -> Any:
        raise RuntimeError("killed")

    monkeypatch.setattr(AgentPlaying, "accept", crash)
    with pytest.raises(RuntimeError, match="killed"):
        opd.run(plan, out=tmp_path / "run")
    assert 1 <= len(starts.read_text().split()) <= 2
    monkeypatch.setattr(AgentPlaying, "accept", original)
    run = opd.resume(tmp_path / "run")
    seeds = starts.read_text().split()
    assert len(seeds) == len(set(seeds)) <= 4
    feedback = [entry.notes["feedback"] for entry in run.rollouts.entries.values()]
    assert sum("must not be started twice" in one for one in feedback) >= 1


def serve_conversations(environment: AgentEnvironment, over: threading.Event) -> None:
    """An agent elsewhere: it takes one prompt after another."""
    while not over.is_set():
        client = Client(environment.server().url)
        with contextlib.suppress(OSError):
            status, facts = client.ask("/v1/prompt")
            if status == 200:
                client.chat(facts["messages"])
                client.end()


def ask_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no prompt waits, agents get 503 after a second, so their threads end soon after the run."""
    monkeypatch.setattr(AgentSessions, "claimed", functools.partialmethod(AgentSessions.claimed, seconds=1.0))


def test_kl_falls_with_agents_that_others_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_TOKEN", TOKEN)
    ask_again_soon(monkeypatch)
    settings = {"command": [], "port": 0, "token_env": "AGENT_TOKEN"}
    over = threading.Event()
    agents = [
        threading.Thread(target=serve_conversations, args=(AgentEnvironment(**settings), over), daemon=True)
        for _ in range(4)
    ]
    for agent in agents:
        agent.start()
    plan = recipe(
        [],
        environment=settings,
        train={"steps": 16, "lr": 1e-3},
        objective={"divergence": "forward_kl"},
        student="tiny/spelling",
    )
    plan["rollout"]["prompts"] = 8
    run = opd.run(plan, out=tmp_path / "run")
    over.set()
    for agent in agents:
        agent.join()
    kl = [line["reverse_kl"] for line in run.metrics]
    assert np.mean(kl[-5:]) < 0.6 * np.mean(kl[:3])
    assert all(line["env/lost"] == 0 for line in run.metrics)
    assert len(run.rollouts.entries) == 256


def free_port() -> int:
    """One that the system gives to nobody who asks for any port, so it stays free."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def test_serving_the_student_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_TOKEN", TOKEN)
    ask_again_soon(monkeypatch)
    port = free_port()
    over, said = threading.Event(), list[str]()

    def agent() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                client = Client(f"http://127.0.0.1:{port}")
                status, facts = client.ask("/v1/prompt")
                if status != 200:
                    continue
                path = f"/conversations/{client.name}/v1/chat/completions"
                assert client.ask(path, {"messages": facts["messages"]}, **{"X-Conversation": ""})[0] == 200
                client.end(reward=0.5)
            time.sleep(0.05)

    thread = threading.Thread(target=agent, daemon=True)
    thread.start()
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({**recipe([]), "rollout": {"prompts": 1, "samples": 2, "max_new_tokens": 8}}))
    known = ("127.0.0.1", port, "AGENT_TOKEN", said.append)
    serve_student([str(file), "train.steps=1"], *known, out=tmp_path / "run", quiet=True)
    over.set()
    thread.join()
    assert [line["reward"] for line in opd.Run(tmp_path / "run").metrics] == [0.5]
    assert str(port) in said[0]
    with pytest.raises(UserError, match="needs a recipe"):
        serve_student([], *known)
    with pytest.raises(UserError, match="other than 0"):
        serve_student([str(file)], "127.0.0.1", 0, "AGENT_TOKEN", said.append)


def test_a_run_ends_when_every_agent_fails(tmp_path: Path) -> None:
    plan = recipe(program(tmp_path, "raise SystemExit('no key')"), train={"steps": 9, "lr": 1e-3})
    with pytest.raises(TrainingError, match=r"failed in every rollout of 3 steps.*no key"):
        opd.run(plan, out=tmp_path / "run")
