"""The endpoint at which agents ask the student: one HTTP server per process, and a session for every rollout.

    agent's request -> a thread of the server -> AgentSession.asked ....... the sampler draws the turn
    agent           <- the thread waits       <- PendingChat.give(reply)   once its tokens are durable

A session is known by its token. Its requests are answered one after another, in the order in which they arrive.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import queue
import secrets
import select
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opd.common.errors import UserError
from opd.common.files import allow_open_files
from opd.common.http import to_stderr
from opd.common.text import first_line, plain
from opd.environments.chat_protocols import (
    ChatError,
    ChatReply,
    ChatRequest,
    Protocol,
    error_body,
    events,
    read_anthropic,
    read_body,
    read_ids,
    read_openai,
    reply_body,
)

LOOPBACK = "127.0.0.1"
BODY = 32 << 20  # most bytes of a request
PATIENCE = 30.0  # seconds to send a request, or to read its answer
IDLE = 600.0  # seconds between two requests of one connection
CONNECTIONS = 4096  # at once; each has a thread
NAMES = 100_000  # of conversations that have ended
LONGEST_NAME = 200  # characters
LOOK = 1.0  # seconds between checks of whether a client is still there
READERS: dict[str, tuple[Protocol, Callable[[Mapping[str, Any]], ChatRequest]]] = {
    "/v1/chat/completions": ("openai", read_openai),
    "/v1/messages": ("anthropic", read_anthropic),
    "/inference/v1/generate": ("ids", read_ids),
}


@dataclass(eq=False)
class PendingChat:
    """A request that waits for its answer. `left`: its client is gone."""

    request: ChatRequest
    again: bool = False  # the client says that it repeats a request
    left: bool = False
    _result: queue.SimpleQueue[ChatReply | ChatError] = field(default_factory=queue.SimpleQueue)

    def give(self, result: ChatReply | ChatError) -> None:
        self._result.put(result)

    def wait(self, there: Callable[[], bool]) -> ChatReply | ChatError:
        """The answer. `there`: whether the client still waits for it."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._result.get(timeout=LOOK)
            self.left = self.left or not there()


@dataclass(frozen=True)
class AgentEnded:
    """The agent has finished. `problem`: why its rollout is lost."""

    problem: str = ""
    timed_out: bool = False


class AgentSession:
    """What happens between one rollout and its agent."""

    def __init__(self, facts: Mapping[str, Any], name: str = "") -> None:
        """`facts`: about the prompt. `name`: of a conversation that an agent elsewhere has begun."""
        self.token, self.facts, self.name = secrets.token_urlsafe(24), facts, name
        self.asked: queue.SimpleQueue[PendingChat | AgentEnded | None] = queue.SimpleQueue()  # None: its agent has come
        self.reward: float | None = None
        self.dropped = 0  # answers that the client did not take
        self._lock, self._waiting, self.closed = threading.Lock(), set[PendingChat](), False

    def ask(self, pending: PendingChat, there: Callable[[], bool]) -> ChatReply | ChatError:
        with self._lock:
            if self.closed:
                return _over()
            self._waiting.add(pending)
        self.asked.put(pending)
        try:
            return pending.wait(there)
        finally:
            with self._lock:
                self._waiting.discard(pending)

    def next(self, seconds: float, waits: bool = False) -> PendingChat | AgentEnded:
        """The next request. `waits`: no agent has come yet, so the time limit begins when one comes."""
        limit = None if waits else seconds
        while True:
            try:
                found = self.asked.get(timeout=limit)
            except queue.Empty:
                return AgentEnded(f"the agent neither asked nor ended for {seconds:g} s", timed_out=True)
            if found is not None:
                return found
            limit = seconds

    def end(self, ended: AgentEnded) -> None:
        self.asked.put(ended)

    def close(self) -> None:
        """Whoever still waits is answered with an error."""
        with self._lock:
            self.closed, waiting = True, list(self._waiting)
        for pending in waiting:
            pending.give(_over())
        self.asked.put(AgentEnded("the rollout is over"))


def _over() -> ChatError:
    return ChatError(410, "this conversation is over: no more turns are recorded", "conversation_over")


class AgentSessions:
    """The sessions of a server. Those without a program of their own wait in line for an agent from elsewhere."""

    def __init__(self, token: str = "") -> None:
        """`token`: of agents from elsewhere; empty: there are none."""
        self._by_token, self._by_name = dict[str, AgentSession](), dict[str, AgentSession]()
        self._ended: dict[str, None] = {}  # names of conversations, and tokens of programs; oldest first
        self._unclaimed: deque[AgentSession] = deque()
        self._token, self._lock = token, threading.Condition()
        self.counts: Counter[str] = Counter()

    def open(self, facts: Mapping[str, Any], own: bool) -> AgentSession:
        """`own`: its agent gets the session's token. Otherwise it is given to the next agent that begins a conversation."""
        session = AgentSession(facts)
        with self._lock:
            self._by_token[session.token] = session
            if not own:
                self._unclaimed.append(session)
                self._lock.notify_all()
        return session

    def close(self, session: AgentSession) -> None:
        session.close()
        with self._lock:
            self._by_token.pop(session.token, None)
            self._by_name.pop(session.name, None)
            self._ended[session.name or session.token] = None
            if len(self._ended) > NAMES:
                self._ended.pop(next(iter(self._ended)))
            if session in self._unclaimed:
                self._unclaimed.remove(session)

    def known(self, token: str, name: str) -> AgentSession | None:
        """The session of a request. `name`: of the conversation, if its agent was started elsewhere; None: it has not begun."""
        with self._lock:
            if token in self._by_token:
                return self._by_token[token]
            if token in self._ended:
                raise _over()
        if not self._token or not hmac.compare_digest(token.encode(), self._token.encode()):
            self.counts["refused"] += 1
            raise ChatError(401, "the token is not that of a conversation of this run", "authentication_error")
        if not name:
            raise ChatError(400, "name the conversation: header X-Conversation, or the path /conversations/NAME/v1/…")
        if len(name) > LONGEST_NAME:
            raise ChatError(
                400, f"the name of a conversation has {len(name):,} characters; at most {LONGEST_NAME} are accepted"
            )
        with self._lock:
            if name in self._ended:
                raise _over()
            return self._by_name.get(name)

    def claimed(self, name: str, seconds: float = PATIENCE) -> AgentSession:
        """The session of a conversation; a new conversation takes the prompt that has waited longest."""
        with self._lock:
            if name in self._ended:
                raise _over()
            found = self._lock.wait_for(lambda: name in self._by_name or bool(self._unclaimed), seconds)
            if name in self._by_name:
                return self._by_name[name]
            if not found:
                raise ChatError(
                    503, "no prompt waits for a conversation now: the run is training. Ask again", "try_again"
                )
            session = self._unclaimed.popleft()
            session.name = name
            session.asked.put(None)
            self._by_name[name] = session
            self._lock.notify_all()  # another request of the same conversation may wait
            return session


class ChatServer(ThreadingHTTPServer):
    """The server. Its `url` is without the version of an API."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, sessions: AgentSessions, host: str = LOOPBACK, port: int = 0) -> None:
        self.sessions = sessions
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        allow_open_files(CONNECTIONS + 1024)
        try:
            super().__init__((host, port), ChatHandler)
        except OSError as error:
            raise UserError(
                f"{host}:{port} is not available: {error.strerror or error}. Choose another port."
            ) from None
        threading.Thread(target=self.serve_forever, name="opd-chat", daemon=True).start()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        host = host if isinstance(host, str) else host.decode()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads; the connection is closed
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are no news; any other error is a fault of this server."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            to_stderr(f"an agent's connection was dropped: {type(error).__name__}: {first_line(error)}")


class ChatHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE  # for the first request; see `_answer`
    server: ChatServer
    connection: socket.socket

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, method: Callable[[str, str], None]) -> None:
        path, name = _conversation(self.path.partition("?")[0])
        protocol: Protocol = "anthropic" if path.startswith("/v1/messages") else "openai"
        self.connection.settimeout(PATIENCE)
        try:
            method(path, name or self.headers.get("x-conversation", "").strip())
        except ChatError as error:
            self._send(error.status, error_body(protocol, error))
        self.connection.settimeout(IDLE)

    def _get(self, path: str, name: str) -> None:
        if path == "/health":
            self._send(200, {"status": "ok"})
            return
        self._require_length(none=True)
        known = self._known(name)
        if path == "/v1/models":
            model = {"id": "student", "object": "model", "created": 0, "owned_by": "opd"}
            self._send(200, {"object": "list", "data": [model]})
        elif path == "/v1/prompt":
            session = known or self.server.sessions.claimed(name)
            self._send(200, dict(session.facts))
        else:
            raise ChatError(404, f"there is no {plain(path, 100)!r} here")

    def _post(self, path: str, name: str) -> None:
        length = self._require_length()
        known = self._known(name)  # before the body is read
        reading = self.rfile.read(length)
        if len(reading) < length:
            raise ChatError(400, "the body ended early")
        if path in READERS:
            _, read = READERS[path]
            request = read(read_body(reading))
            self._chat(known or self._begun(name, request), request)
            return
        if path not in ("/v1/reward", "/v1/end"):
            raise ChatError(404, f"there is no {plain(path, 100)!r} here")
        given = read_body(reading or b"{}")
        if known is None:
            raise _over()
        if path == "/v1/reward" or "reward" in given:
            known.reward = given_reward(given.get("reward"))
        if path == "/v1/end":
            known.end(AgentEnded())
        self._send(200, {"reward": known.reward})

    def _begun(self, name: str, request: ChatRequest) -> AgentSession:
        """The session of a conversation whose agent has not asked for its prompt."""
        if any(message["role"] == "assistant" for message in request.messages):
            raise ChatError(
                410,
                f"conversation {plain(name, 100)!r} is not known, and its first request holds an answer already: a conversation "
                "that an earlier process of the run began is over. If it is a new one, begin it with GET /v1/prompt",
                "conversation_over",
            )
        return self.server.sessions.claimed(name)

    def _chat(self, session: AgentSession, request: ChatRequest) -> None:
        again = self.headers.get("x-stainless-retry-count", "0").strip() != "0"
        result = session.ask(PendingChat(request, again), partial(_is_there, self.connection))
        if isinstance(result, ChatError):
            raise result
        if not _is_there(self.connection):
            session.dropped += 1
        if request.stream:
            self._stream("".join(events(request, result)))
        else:
            self._send(200, reply_body(request, result))

    def _known(self, name: str) -> AgentSession | None:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            token = self.headers.get("x-api-key", "")
        try:
            return self.server.sessions.known(token.strip(), name)
        except ChatError:
            self.close_connection = True  # the body is not read
            raise

    def _require_length(self, none: bool = False) -> int:
        """The length of the body."""
        given = self.headers.get("content-length", "0" if none else "")
        self.close_connection = True  # unless the length is accepted
        if self.headers.get("transfer-encoding"):
            raise ChatError(411, "send the body with a Content-Length")
        if not (given.isascii() and given.isdigit()) or len(given) > 18:
            raise ChatError(411, f"send the body with a Content-Length, got {plain(given, 30)!r}")
        if int(given) > (0 if none else BODY):
            raise ChatError(413, f"a body of {int(given):,} bytes; at most {0 if none else BODY:,} are accepted")
        self.close_connection = (
            self.headers.get("connection", "").lower() == "close" or self.request_version < "HTTP/1.1"
        )
        return int(given)

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 503:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, text: str) -> None:
        self.close_connection = True  # the end of the stream is the end of the connection
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text.encode())


def _conversation(path: str) -> tuple[str, str]:
    """The path of an API, and the conversation that it names: /conversations/NAME/v1/…"""
    head, _, rest = path.removeprefix("/conversations/").partition("/")
    return (f"/{rest}", head) if path.startswith("/conversations/") else (path, "")


def _is_there(connection: socket.socket) -> bool:
    """Whether the client has not closed its side."""
    try:
        waiting = select.poll()  # `select` cannot take more than 1,024 files
        waiting.register(connection, select.POLLIN)
        return not waiting.poll(0) or bool(connection.recv(1, socket.MSG_PEEK))
    except (OSError, ValueError):
        return False


def given_reward(given: Any) -> float:
    with contextlib.suppress(OverflowError):  # a whole number may have too many digits
        if not isinstance(given, bool) and isinstance(given, (int, float)) and math.isfinite(given):
            return float(given)
    raise ChatError(400, f"a reward must be a finite number, got {plain(given, 100)}")
