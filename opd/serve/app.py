"""The server's routes: authorisation, limits and error messages.

Every error has a JSON body, {"error": "…"}. The token is checked before any part of a body is read.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Protocol

import h11
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException as PlainHTTPException
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from opd.common.files import allow_open_files
from opd.common.text import first_line, plain
from opd.serve.models import QueueFull, ScoringThread, ServedModel
from opd.teachers.served import FRAME, INSTANCE_HEADER, WEIGHTS_HEADER, RequestLimits, WireError, read_question

HEALTH = "/health"
RETRY = {"retry-after": "1"}
KINDS = (FRAME, "application/octet-stream", "application/json")


@dataclass(eq=False)
class ServerState:
    """State that all routes share."""

    models: Mapping[str, ServedModel]
    worker: ScoringThread
    token: str
    limits: RequestLimits
    body_seconds: float
    instance: str = field(default_factory=lambda: secrets.token_hex(8))  # of this process, so clients notice a restart
    draining: bool = False
    open: int = 0  # accepted requests that are not answered yet
    answered: Counter[int] = field(default_factory=Counter)  # status -> requests
    sent: int = 0  # bytes of answers


class Receiver(Protocol):
    """What limits a request, and says whether any is open: the state of any server here."""

    limits: RequestLimits
    body_seconds: float
    draining: bool
    open: int


def make_app(front: ServerState) -> FastAPI:
    app = FastAPI(title="opd serve", docs_url=None, redoc_url=None, openapi_url=None)

    def model_of(name: str) -> ServedModel:
        if name not in front.models:
            raise WireError(404, f"no model {plain(name, 100)!r} here; there are {', '.join(front.models)}")
        return front.models[name]

    def facts(model: ServedModel) -> dict[str, Any]:
        return {**model.facts, "instance": front.instance, "limits": asdict(front.limits)}

    def frame(model: ServedModel, content: bytes) -> Response:
        front.sent += len(content)
        headers = {WEIGHTS_HEADER: model.weights, INSTANCE_HEADER: front.instance}
        return Response(content, media_type=FRAME, headers=headers)

    @app.get(HEALTH)
    async def health() -> Response:
        state = "draining" if front.draining else "ok"
        return JSONResponse({"status": state}, 503 if front.draining else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse("\n".join(_metrics(front)) + "\n", media_type="text/plain; version=0.0.4")

    @app.get("/models")
    async def list_all() -> Response:
        return JSONResponse({"models": [facts(model) for model in front.models.values()]})

    @app.get("/models/{name}")
    async def one(name: str) -> Response:
        return JSONResponse(facts(model_of(name)))

    @app.get("/models/{name}/head/{digest}")
    async def head(name: str, digest: str) -> Response:
        model = model_of(name)
        if digest != model.head_hash:
            raise WireError(404, f"the head of {name!r} is {model.head_hash}, not {plain(digest, 80)!r}")
        return frame(model, await asyncio.to_thread(model.head))

    @app.post("/models/{name}/score")
    async def score(name: str, request: Request) -> Response:
        model = model_of(name)
        kind = request.headers.get("content-type", FRAME).partition(";")[0].strip().lower()
        if kind not in KINDS:
            raise WireError(415, f"a body of type {plain(kind, 80)!r}; send {' or '.join(KINDS)}")
        body = await read_body(request, front)
        asked = await asyncio.to_thread(
            read_question, body, kind, front.limits, model.rows, model.model.size, model.context
        )
        try:
            waiting = asyncio.wrap_future(front.worker.submit(name, asked))
        except QueueFull:
            raise WireError(429, "too many requests are waiting; ask again later") from None
        return frame(model, await waiting)

    _add_error_handlers(app)
    app.add_middleware(RequestGuard, front=front)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Error handlers."""

    @app.exception_handler(WireError)
    async def refused(_: Request, error: WireError) -> Response:
        return error_response(error.status, str(error))

    @app.exception_handler(PlainHTTPException)
    async def elsewhere(_: Request, error: PlainHTTPException) -> Response:
        return error_response(error.status_code, f"{error.detail}: see docs/serving.md for what can be asked")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return error_response(422, plain(error, 300))

    @app.exception_handler(RuntimeError)  # out of memory, a failed kernel: other requests are still served
    async def failed(_: Request, error: RuntimeError) -> Response:
        return error_response(500, f"scoring failed: {plain(first_line(error), 300)}")


def error_response(status: int, message: str) -> Response:
    headers = RETRY if status in (429, 503) else {"www-authenticate": "Bearer"} if status == 401 else {}
    if status in (401, 408, 413):
        headers = {**headers, "connection": "close"}  # the rest of the body is not read
    return JSONResponse({"error": message}, status, headers)


class RequestGuard:
    """Middleware of every route: token, limits on headers, draining, counters."""

    def __init__(self, app: Any, front: ServerState) -> None:
        self._app, self._front = app, front
        self._token = front.token.encode()

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        front = self._front

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                front.answered[message["status"]] += 1
            await send(message)

        problem = self._problem(scope)
        if problem is not None:
            await error_response(*problem)(scope, receive, counted)
            return
        front.open += 1
        try:
            await self._app(scope, receive, counted)
        finally:
            front.open -= 1

    def _problem(self, scope: Any) -> tuple[int, str] | None:
        if scope["path"] == HEALTH:
            return None
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if not self._knows(headers):
            return (
                401,
                "a token is needed: Authorization: Bearer TOKEN, the token that the server printed or was started with",
            )
        if self._front.draining:
            return 503, "the server is shutting down; ask again when it is back"
        for name, value in headers:
            if name == b"content-length" and not (value.isdigit() and int(value[:20]) <= self._front.limits.bytes):
                return (
                    413,
                    f"a body of {plain(value.decode('latin-1'), 30)} bytes; at most {self._front.limits.bytes} are accepted",
                )
        return None

    def _knows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and scheme.lower() == b"bearer"


async def read_body(request: Request, front: Receiver) -> bytes:
    """Read a body in time and within its limit, whatever its headers say."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(front.body_seconds):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > front.limits.bytes:
                    raise WireError(413, f"a body of more than {front.limits.bytes} bytes")
    except TimeoutError:
        raise WireError(408, f"the body did not arrive within {front.body_seconds:g} s") from None
    except ClientDisconnect:
        raise WireError(400, "the body ended early") from None
    return b"".join(parts)


def _metrics(front: ServerState) -> Iterable[str]:
    """What Prometheus reads."""
    worker = front.worker
    yield from metric_lines("opd_requests_total", "counter", "code", front.answered)
    yield from metric_lines(
        "opd_questions_total", "counter", "model", {name: worker.questions[name] for name in front.models}
    )
    yield from metric_lines(
        "opd_forward_passes_total", "counter", "model", {name: worker.passes[name] for name in front.models}
    )
    yield from metric_lines(
        "opd_tokens_total", "counter", "model", {name: worker.scored[name] for name in front.models}
    )
    yield from metric_lines("opd_scoring_seconds_total", "counter", "model", worker.seconds)
    for name, kind, value in (
        ("opd_sent_bytes_total", "counter", front.sent),
        ("opd_waiting", "gauge", worker.length),
        ("opd_open_requests", "gauge", front.open),
        ("opd_draining", "gauge", int(front.draining)),
    ):
        yield from (f"# TYPE {name} {kind}", f"{name} {value}")


def metric_lines(name: str, kind: str, label: str, values: Mapping[Any, float]) -> Iterable[str]:
    yield f"# TYPE {name} {kind}"
    yield from (f'{name}{{{label}="{key}"}} {value}' for key, value in values.items())


# uvicorn with limits on time and size of headers, an error for incomplete requests, and draining on SIGTERM


BACKLOG = 4096  # connections that wait to be accepted
CONNECTIONS = 8192
HEAD_BYTES = 16 << 10  # of a request line and headers
HEADERS = 100
BLANK_LINE = re.compile(rb"\n\r?\n")  # after the last header


class BoundedConnection(h11.Connection):
    """Checks the size of a request's head before h11 parses it. h11 only limits heads that arrive in several pieces."""

    head_too_large = False

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            received = self.trailing_data[0]
            end = BLANK_LINE.search(received)
            head = received[: end.start()] if end else received
            if len(head) > HEAD_BYTES or head.count(b"\n") > HEADERS:
                self.head_too_large = True
                raise h11.RemoteProtocolError("the head is too large")
        return super().next_event()


class TimeLimitedProtocol(H11Protocol):
    """Limits the time from the start of a request to the end of its headers. The body has its own limit."""

    def __init__(self, *args: Any, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds
        self.conn = BoundedConnection(h11.SERVER, HEAD_BYTES)
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        headers_are_coming = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
        if not headers_are_coming:
            self._stop()
        elif self._clock is None:
            self._clock = self.loop.call_later(self._seconds, self._late)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late(self) -> None:
        self._reject("408 Request Timeout", "the request did not arrive in time")

    def eof_received(self) -> bool:
        """The client has closed its side. An incomplete request is an error; a complete one is still answered."""
        waits = self.cycle is not None and not self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]):
            self._reject("400 Bad Request", "the request ended early: it is shorter than its headers say")
        elif waits:
            self.cycle.keep_alive = False
        return waits and not self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        if self.conn.head_too_large:
            limits = f"at most {HEADERS} headers and {HEAD_BYTES} bytes are accepted"
            self._reject(
                "431 Request Header Fields Too Large", f"the request has too many headers, or too long ones; {limits}"
            )
        else:
            self._reject("400 Bad Request", msg)

    def _reject(self, status: str, message: str) -> None:
        """Send an error directly, if no answer has started."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = json.dumps({"error": message}).encode()
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """The first signal drains, a second one ends the process."""

    def __init__(self, config: Any, front: Receiver, seconds: float) -> None:
        super().__init__(config)
        self._front, self._seconds, self._deadline = front, seconds, float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._front.draining:
            super().handle_exit(sig, frame)
            self.force_exit = True
        self._front.draining = True
        self._deadline = time.monotonic() + self._seconds

    async def on_tick(self, counter: int) -> bool:
        drained = self._front.draining and (self._front.open == 0 or time.monotonic() > self._deadline)
        return bool(await super().on_tick(counter)) or drained


def run_until_signal(
    app: Any, front: Receiver, listening: socket.socket, request_seconds: float, drain_seconds: float
) -> None:
    config = uvicorn.Config(
        app,
        http=functools.partial(TimeLimitedProtocol, seconds=request_seconds),
        ws="none",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=int(drain_seconds),
        server_header=False,
        proxy_headers=False,
        lifespan="off",
    )
    allow_open_files(CONNECTIONS + 1024)
    DrainingServer(config, front, drain_seconds).run(sockets=[listening])
