"""Tools of MCP servers (Model Context Protocol): the student calls them, the server answers.

    rollout:
      environment: {kind: mcp, command: [python, server.py]}            # a separate process for every episode
      environment: {kind: mcp, url: "http://localhost:8000/mcp", session: shared}

The client speaks JSON-RPC itself: lines over standard input and output, or POST requests ("streamable HTTP"). It needs no package
but httpx, and only for HTTP.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from pydantic import Field

from opd.common.errors import RecipeError, RemoteError
from opd.common.http import Variable, address_of, token_of
from opd.common.text import first_line, shortened
from opd.records import Message, Prompt
from opd.registry import StageView
from opd.rollouts.environments import Effects, Episode, ToolEnvironment, ToolEpisode
from opd.rollouts.tool_calls import Tool

VERSION = "2025-06-18"  # of the protocol; a server may answer with an older one
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "USER")  # variables that a server's process gets
MOST_PAGES = 100  # of a list of tools
LINE = 16 << 20  # most bytes of a message


class McpError(Exception):
    """The server answered with an error, or ended. A tool's error is shown to the student."""


class McpEnvironment(ToolEnvironment):
    """Tools of an MCP server. The recipe's `rewards` reward the last turn."""

    name = "mcp"
    command: list[str] = Field(
        default_factory=list, description="starts a server that speaks over standard input and output"
    )
    url: str | None = Field(None, description="of a server that speaks over HTTP")
    token_env: Variable | None = Field(None, description="environment variable with the token for `url`")
    variables: list[Variable] = Field(
        default_factory=list,
        description="environment variables that the command's process gets in addition to PATH and HOME",
    )
    allow: list[str] = Field(default_factory=list, description="names of the tools to offer; default: all")
    session: Literal["episode", "shared"] = Field(
        "episode", description="a session for every episode, or one for all, for servers that keep no state"
    )
    tool_effects: Effects = Field(
        "outside",
        description="none (tools only read), own (they change their session alone) or outside: what an interrupted run may repeat",
    )

    @property
    def effects(self) -> Effects:  # type: ignore[override]
        return self.tool_effects

    def check(self, view: StageView) -> Iterable[str]:
        if bool(self.command) == bool(self.url):
            yield "mcp needs one of command and url. Give the command that starts the server, or the url of a running one."
        if self.token_env and not self.url:
            yield f"token_env {self.token_env} is for a url, and there is none. Name it in `variables` if the command reads it."
        if self.variables and not self.command:
            yield f"variables {self.variables[0]} are for a command, and there is none. Use token_env for the token of a url."
        if self.url and not _is_address(self.url):
            yield f"url: expected http://HOST:PORT/PATH, got {shortened(self.url)}."
        if self.tool_effects == "own" and self.session == "shared":
            yield "tool_effects own with session shared: effects reach other episodes. Use session episode, or tool_effects outside."

    def tools(self) -> Sequence[Tool]:
        """The server's tools, asked once per process."""
        key = self.model_dump_json()
        if key not in _tools:
            session = self.connect()
            try:
                offered = session.tools()
            except (McpError, TimeoutError) as error:
                raise RemoteError(f"{self.where} does not list its tools: {error}.") from None
            finally:
                session.close()
            names = {tool.name for tool in offered}
            missing = [name for name in self.allow if name not in names]
            if missing:
                raise RecipeError(
                    f"environment mcp: allow names {missing[0]!r}, and {self.where} has the tools {', '.join(sorted(names))}."
                )
            _tools[key] = [tool for tool in offered if tool.name in self.allow or not self.allow]
        return _tools[key]

    @property
    def where(self) -> str:
        return f"MCP server {self.url or ' '.join(self.command)!r}"

    def connect(self) -> McpSession:
        """A new session."""
        try:
            if self.url:
                return McpSession(
                    Http(self.url, token_of(self.token_env, self.url), self.call_seconds), self.call_seconds
                )
            return McpSession(Process(self.command, self.variables), self.call_seconds)
        except (McpError, TimeoutError) as error:
            raise RemoteError(
                f"{self.where} does not start: {error}. Try the command, or the address, by hand."
            ) from None

    def opening(self, prompt: Prompt) -> Sequence[Message]:
        return ()

    def functions(self, prompt: Prompt | None) -> Sequence[Callable[..., Any]]:
        raise NotImplementedError("the tools are the server's")

    def open(self, prompt: Prompt, key: int) -> Episode:
        return McpEpisode(self, prompt)


def _is_address(url: str) -> bool:
    try:
        address_of(url)
    except ValueError:
        return False
    return True


_tools: dict[str, list[Tool]] = {}  # by the settings of an environment
_shared: dict[str, McpSession] = {}
_sharing = threading.Lock()


def _shared_session(environment: McpEnvironment) -> McpSession:
    """The session that all episodes share. One that has ended is replaced."""
    key = environment.model_dump_json()
    with _sharing:
        known = _shared.get(key)
        if known is None or known.ended:
            _shared[key] = known = environment.connect()
            atexit.register(known.close)
        return known


class McpEpisode(ToolEpisode):
    def __init__(self, environment: McpEnvironment, prompt: Prompt) -> None:
        self.environment, self.prompt = environment, prompt
        self._own = environment.session == "episode"
        self._session = environment.connect() if self._own else _shared_session(environment)
        self.functions = {tool.name: partial(self._session.call, tool.name) for tool in environment.tools()}

    def close(self) -> None:
        if self._own:
            self._session.close()


# --- The client ---


class McpSession:
    """One session: requests may come from several threads."""

    def __init__(self, transport: Transport, seconds: float) -> None:
        self._transport, self._seconds = transport, seconds
        self._numbers, self._lock = iter(range(1, 1 << 62)), threading.Lock()
        hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "opd", "version": "1"}}
        try:
            found = self._ask("initialize", hello)
            transport.version = str(found.get("protocolVersion", VERSION))
            transport.notify({"jsonrpc": "2.0", "method": "notifications/initialized"})
        except (McpError, TimeoutError):
            transport.close()
            raise

    @property
    def ended(self) -> bool:
        return self._transport.ended

    def tools(self) -> list[Tool]:
        found: list[Tool] = []
        cursor: dict[str, Any] = {}
        for _ in range(MOST_PAGES):
            page = self._ask("tools/list", cursor)
            for one in page.get("tools", ()):
                found.append(Tool(str(one["name"]), str(one.get("description") or ""), one.get("inputSchema") or {}))
            if not page.get("nextCursor"):
                break
            cursor = {"cursor": page["nextCursor"]}
        return found

    def call(self, name: str, /, **arguments: Any) -> str:
        """The result of a tool as text. An error of the tool is an `McpError`."""
        found = self._ask("tools/call", {"name": name, "arguments": arguments})
        said = "\n".join(map(_content_text, found.get("content") or ()))
        if not said and found.get("structuredContent") is not None:
            said = json.dumps(found["structuredContent"], ensure_ascii=False)
        if found.get("isError"):
            raise McpError(said or "the tool failed without a message")
        return said

    def close(self) -> None:
        self._transport.close()

    def _ask(self, method: str, given: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            number = next(self._numbers)
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": dict(given)}
        answer = self._transport.ask(request, self._seconds)
        if "error" in answer:
            error = answer["error"]
            raise McpError(first_line(error.get("message", error) if isinstance(error, dict) else error))
        result = answer.get("result")
        if not isinstance(result, dict):
            raise McpError(f"{method} gave no result: {shortened(answer)}")
        return result


def _content_text(part: Mapping[str, Any]) -> str:
    """A part of a result as text. Images and sound are only named."""
    if part.get("type") == "text":
        return str(part.get("text", ""))
    resource = part.get("resource")
    if isinstance(resource, dict) and "text" in resource:
        return str(resource["text"])
    return f"[{part.get('type', 'content')} {part.get('mimeType') or part.get('uri') or ''}]".replace(" ]", "]")


class Transport(ABC):
    """How messages travel. `version`: of the protocol, as agreed on."""

    version = ""
    ended = False

    @abstractmethod
    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The response to a request."""

    @abstractmethod
    def notify(self, message: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Process(Transport):
    """A server as a child process: one JSON message per line. A thread reads what it writes."""

    def __init__(self, command: Sequence[str], variables: Sequence[str] = ()) -> None:
        passed = {name: os.environ[name] for name in (*INHERITED, *variables) if name in os.environ}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=passed, start_new_session=True
            )  # fmt: skip
        except OSError as error:
            raise McpError(str(error)) from None
        self._waiting: dict[Any, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for work in (self._read, self._write):
            threading.Thread(target=work, name="opd-mcp", daemon=True).start()

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self.ended:
                raise McpError("the server has ended")
            self._waiting[request["id"]] = future
        self.notify(request)
        try:
            return future.result(seconds)
        except TimeoutError:
            raise TimeoutError(f"the server did not answer within {seconds:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(request["id"], None)

    def notify(self, message: Mapping[str, Any]) -> None:
        self._outbox.put(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self._outbox.put(None)
        if self._process.returncode is not None:
            return  # closed already: its number may belong to another process by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        self._process.wait()

    def _write(self) -> None:
        """In a thread, because a server that does not read would block the caller."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while (line := self._outbox.get()) is not None:
                pipe.write(line)
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            while (line := pipe.readline(LINE)).endswith(b"\n"):
                with contextlib.suppress(ValueError, TypeError, RecursionError):  # servers also print other things
                    self._take(json.loads(line))
        with self._lock:
            self.ended = True
            waiting = list(self._waiting.values())
        for future in waiting:
            future.set_exception(McpError("the server has ended"))

    def _take(self, message: Any) -> None:
        if not isinstance(message, dict):
            return
        if "method" in message and "id" in message:  # the server asks the client
            self.notify(_reply(message))
            return
        with self._lock:
            future = self._waiting.pop(message.get("id"), None)
        if future is not None:
            future.set_result(message)


def _reply(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a server's request: this client offers nothing but an answer to `ping`."""
    if request["method"] == "ping":
        return {"jsonrpc": "2.0", "id": request["id"], "result": {}}
    return {"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "not supported by this client"}}


class Http(Transport):
    """A server behind a URL: each request is a POST, answered by JSON or by a stream of events."""

    def __init__(self, url: str, token: str | None, seconds: float) -> None:
        try:
            import httpx
        except ImportError:
            raise RemoteError("environment mcp with a url needs httpx: pip install 'opd[remote]'.") from None
        headers = {"Accept": "application/json, text/event-stream"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._url, self._failed, self._late = url, httpx.HTTPError, httpx.TimeoutException
        self._client = httpx.Client(headers=headers, timeout=seconds, follow_redirects=True)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        for message in self._post(request):
            if message.get("id") == request["id"] and "method" not in message:
                return message
        raise McpError("the server closed the stream without an answer")

    def notify(self, message: Mapping[str, Any]) -> None:
        for _ in self._post(message):
            pass

    def close(self) -> None:
        self.ended = True
        with contextlib.suppress(self._failed):
            if "mcp-session-id" in self._client.headers:
                self._client.delete(self._url, timeout=2.0)
        self._client.close()

    def _post(self, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            headers = {"MCP-Protocol-Version": self.version} if self.version else {}
            with self._client.stream("POST", self._url, json=dict(message), headers=headers) as response:
                if not response.is_success:
                    raise McpError(f"{response.status_code}: {response.read()[:200].decode(errors='replace')}")
                if "mcp-session-id" in response.headers:
                    self._client.headers["mcp-session-id"] = response.headers["mcp-session-id"]
                kind = response.headers.get("content-type", "")
                bodies = _events(response.iter_lines()) if "event-stream" in kind else [response.read().decode()]
                for body in bodies:
                    found = json.loads(body) if body.strip() else None
                    yield from [one for one in (found if isinstance(found, list) else [found]) if isinstance(one, dict)]
        except self._late:
            raise TimeoutError("the server did not answer in time") from None
        except self._failed as error:
            raise McpError(f"{type(error).__name__}: {first_line(error)}") from None
        except ValueError:
            raise McpError("the server's answer is not JSON") from None


def _events(lines: Iterable[str]) -> Iterator[str]:
    """The data of server-sent events."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    if data:
        yield "\n".join(data)
