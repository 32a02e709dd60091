"""Tools of MCP servers: a real server process, a real HTTP server, and what can go wrong with them."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import RecipeError, RemoteError
from opd.environments.mcp import McpEnvironment
from opd.records import Prompt
from opd.registry import StageView
from opd.rollouts.environments import Step, Turn
from opd.rollouts.tool_calls import Call

SERVER = '''
"""An MCP server over standard input and output. It also prints what is no message, and asks the client."""
import json, os, sys, time

NOTES = []
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NONE = {"type": "object", "properties": {}}
PAGES = [["note", "wait"], ["fail", "die", "variable", "picture"]]


def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def run(name, arguments):
    if name == "note":
        NOTES.append(arguments["text"])
        return [{"type": "text", "text": f"{len(NOTES)}: {arguments['text']}"}]
    if name == "wait":
        time.sleep(30)
    if name == "die":
        os._exit(3)
    if name == "variable":
        return [{"type": "text", "text": str(os.environ.get(arguments["text"]))}]
    if name == "picture":
        return [{"type": "image", "data": "", "mimeType": "image/png"}, {"type": "resource", "resource": {"uri": "a", "text": "t"}}]
    raise ValueError("it failed")


for line in sys.stdin:
    message = json.loads(line)
    method, number = message.get("method"), message.get("id")
    if method == "initialize":
        print("this is not a message", flush=True)
        say(id="s1", method="ping", params={})
        say(id=number, result={"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "t", "version": "1"}})
    elif method == "tools/list":
        page = int(message["params"].get("cursor", 0))
        tools = [{"name": name, "description": name, "inputSchema": TEXT if name in ("note", "variable") else NONE} for name in PAGES[page]]
        say(id=number, result={"tools": tools, **({"nextCursor": "1"} if page == 0 else {})})
    elif method == "tools/call":
        try:
            say(id=number, result={"content": run(message["params"]["name"], message["params"]["arguments"])})
        except ValueError as error:
            say(id=number, result={"content": [{"type": "text", "text": str(error)}], "isError": True})
'''
PROMPT = Prompt(id="p", domain="", messages=({"role": "user", "content": "Note it."},))


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return [sys.executable, "-S", str(file)]


def turn(*calls: tuple[str, dict[str, Any]]) -> Turn:
    made = tuple(Call(name, arguments, f"call{number:05d}") for number, (name, arguments) in enumerate(calls))
    return Turn(0, "", np.zeros(0, np.int32), "stop", made)


def said(step: Any) -> list[str]:
    assert isinstance(step, Step)
    return [str(message["content"]) for message in step.messages]


def test_the_tools_of_a_process_are_listed_and_called(command: list[str]) -> None:
    environment = McpEnvironment(command=command)
    assert [tool.name for tool in environment.tools()] == ["note", "wait", "fail", "die", "variable", "picture"]
    assert environment.tools()[0].parameters["required"] == ["text"]
    first, second = environment.open(PROMPT, 1), environment.open(PROMPT, 2)
    step = first.step(turn(("note", {"text": "one"}), ("note", {"text": "two"})))
    assert said(step) == ["1: one", "2: two"]
    assert [message["tool_call_id"] for message in step.messages] == ["call00000", "call00001"]  # type: ignore[union-attr]
    assert said(second.step(turn(("note", {"text": "three"})))) == ["1: three"]  # a session of its own
    assert said(first.step(turn(("picture", {})))) == ["[image image/png]\nt"]
    assert first.step(turn()).done  # type: ignore[union-attr]
    first.close()
    second.close()


def test_a_shared_session_is_kept_and_replaced_when_it_ends(command: list[str]) -> None:
    environment = McpEnvironment(command=command, session="shared")
    first, second = environment.open(PROMPT, 1), environment.open(PROMPT, 2)
    first.step(turn(("note", {"text": "one"})))
    assert said(second.step(turn(("note", {"text": "two"})))) == ["2: two"]
    assert "the server has ended" in said(first.step(turn(("die", {}))))[0]
    assert said(environment.open(PROMPT, 3).step(turn(("note", {"text": "three"})))) == ["1: three"]


def test_failures_are_shown_to_the_student(command: list[str]) -> None:
    environment = McpEnvironment(command=command, call_seconds=1.0)
    episode = environment.open(PROMPT, 1)
    step = episode.step(turn(("fail", {}), ("wait", {}), ("note", {"text": "x"})))
    assert isinstance(step, Step)
    assert "it failed" in said(step)[0]
    assert "took longer than 1 s" in said(step)[1] or "within 1 s" in said(step)[1]
    assert step.counts["errors"] + step.counts["timeouts"] == 3  # the server is still waiting when the third call comes
    began = time.monotonic()
    episode.close()
    assert time.monotonic() - began < 5


def test_the_process_gets_only_named_variables(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    monkeypatch.setenv("WANTED", "shown")
    episode = McpEnvironment(command=command, variables=["WANTED"]).open(PROMPT, 1)
    assert said(episode.step(turn(("variable", {"text": "SECRET"}), ("variable", {"text": "WANTED"})))) == [
        "None",
        "shown",
    ]
    episode.close()


def test_mistakes_are_named(command: list[str]) -> None:
    with pytest.raises(RemoteError, match="does not start"):
        McpEnvironment(command=["/no/such/server"]).tools()
    with pytest.raises(RemoteError, match="the server has ended"):
        McpEnvironment(command=[sys.executable, "-c", "pass"]).tools()
    with pytest.raises(RecipeError, match="allow names 'nothing'"):
        McpEnvironment(command=command, allow=["note", "nothing"]).tools()
    assert [tool.name for tool in McpEnvironment(command=command, allow=["note"]).tools()] == ["note"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "one of command and url"),
        ({"command": ["x"], "url": "http://h"}, "one of command and url"),
        ({"url": "nowhere"}, "expected http://"),
        ({"command": ["x"], "tool_effects": "own", "session": "shared"}, "tool_effects own with session shared"),
        ({"url": "http://h/mcp", "tool_effects": "own", "session": "shared"}, "tool_effects own with session shared"),
        ({"command": ["x"], "token_env": "TOKEN"}, "token_env TOKEN is for a url"),
        ({"url": "http://h/mcp", "variables": ["KEY"]}, "variables KEY are for a command"),
    ],
)
def test_settings_that_make_no_sense_are_rejected(settings: dict[str, Any], words: str) -> None:
    view = StageView(None, None, ())  # type: ignore[arg-type]
    assert words in " ".join(McpEnvironment(**settings).check(view))


class Handler(BaseHTTPRequestHandler):
    """An MCP server over HTTP: sessions, JSON answers, and a stream of events for calls."""

    sessions: dict[str, int] = {}  # noqa: RUF012

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        method, session = message["method"], self.headers.get("Mcp-Session-Id")
        if self.headers.get("Authorization") != "Bearer pass":
            return self.answer(401, b"who are you?")
        if method == "initialize":
            session = f"s{len(self.sessions)}"
            self.sessions[session] = 0
            return self.reply(message, {"protocolVersion": "2025-03-26"}, session)
        if session not in self.sessions or self.headers.get("MCP-Protocol-Version") != "2025-03-26":
            return self.answer(400, b"no session")
        if method == "notifications/initialized":
            return self.answer(202, b"")
        if method == "tools/list":
            return self.reply(
                message, {"tools": [{"name": "count", "inputSchema": {"type": "object", "properties": {}}}]}
            )
        self.sessions[session] += 1
        result = {"content": [{"type": "text", "text": f"{session}: {self.sessions[session]}"}]}
        events = [
            {"method": "notifications/progress", "params": {}},
            {"jsonrpc": "2.0", "id": message["id"], "result": result},
        ]
        stream = "".join(f"event: message\ndata: {json.dumps(event)}\n\n" for event in events)
        return self.answer(200, stream.encode(), "text/event-stream")

    def do_DELETE(self) -> None:
        del self.sessions[self.headers["Mcp-Session-Id"]]
        self.answer(200, b"")

    def reply(self, message: Any, result: Any, session: str = "") -> None:
        self.answer(
            200,
            json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode(),
            "application/json",
            session,
        )

    def answer(self, status: int, body: bytes, kind: str = "text/plain", session: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if session:
            self.send_header("Mcp-Session-Id", session)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/mcp"
    server.shutdown()
    server.server_close()


def test_a_server_over_http(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_TOKEN", "pass")
    environment = McpEnvironment(url=url, token_env="MCP_TOKEN")
    assert [tool.name for tool in environment.tools()] == ["count"]
    assert not Handler.sessions  # the session that listed them is closed
    first, second = environment.open(PROMPT, 1), environment.open(PROMPT, 2)
    first.step(turn(("count", {})))
    assert said(first.step(turn(("count", {}))))[0].endswith(": 2")
    assert said(second.step(turn(("count", {}))))[0].endswith(": 1")
    first.close()
    second.close()
    assert not Handler.sessions
    monkeypatch.setenv("MCP_TOKEN", "wrong")
    with pytest.raises(RemoteError, match="401: who are you"):
        environment.connect()


def test_a_run_with_an_mcp_server(command: list[str], tmp_path: Path) -> None:
    """The tools stand in the system message; answers without a call end the rollout."""
    run = opd.run(
        {
            "student": "tiny/generalist", "teachers": {"arithmetic": "tiny/arithmetic"},
            "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
            "rollout": {"prompts": 2, "max_new_tokens": 8, "environment": {"kind": "mcp", "command": command, "allow": ["note"], "tool_calls": "json"}},
            "objective": [{"divergence": "reverse_kl"}], "train": {"steps": 1}, "eval": {"prompts": 0}, "log": {"start_table": False}, "device": "cpu",
        },
        out=tmp_path / "run",
    )  # fmt: skip
    rollouts = run.rollouts.load(list(run.rollouts.entries))
    assert len(rollouts) == 2
    assert all(rollout.prompt_ids.size > 100 for rollout in rollouts)
