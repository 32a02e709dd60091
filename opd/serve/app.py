"""The server's addresses: who may ask, how much, and what is wrong with a request that is refused.

Every refusal has a JSON body, {"error": "…"}. The token is compared before anything of a body is read.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException as PlainHTTPException
from starlette.requests import ClientDisconnect

from opd.serve.models import ServedModel
from opd.serve.worker import QueueFull, ScoringThread
from opd.teachers.wire import FRAME, INSTANCE_HEADER, WEIGHTS_HEADER, RequestLimits, WireError, read_question
from opd.text import first_line, plain

HEALTH = "/health"
RETRY = {"retry-after": "1"}
KINDS = (FRAME, "application/octet-stream", "application/json")


@dataclass(eq=False)
class Front:
    """What the addresses share."""

    models: Mapping[str, ServedModel]
    worker: ScoringThread
    token: str
    limits: RequestLimits
    body_seconds: float
    instance: str = field(default_factory=lambda: secrets.token_hex(8))  # of this process: a restart is noticed
    draining: bool = False
    open: int = 0  # requests that were accepted and are not answered yet
    answered: Counter[int] = field(default_factory=Counter)  # status -> requests
    sent: int = 0  # bytes of answers


def make_app(front: Front) -> FastAPI:
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
        body = await _body(request, front)
        asked = await asyncio.to_thread(
            read_question, body, kind, front.limits, model.rows, model.model.size, model.context
        )
        try:
            waiting = asyncio.wrap_future(front.worker.submit(name, asked))
        except QueueFull:
            raise WireError(429, "too many requests are waiting; ask again later") from None
        return frame(model, await waiting)

    _refuse(app)
    app.add_middleware(Doorkeeper, front=front)
    return app


def _refuse(app: FastAPI) -> None:
    """What becomes of errors."""

    @app.exception_handler(WireError)
    async def refused(_: Request, error: WireError) -> Response:
        return refused_with(error.status, str(error))

    @app.exception_handler(PlainHTTPException)
    async def elsewhere(_: Request, error: PlainHTTPException) -> Response:
        return refused_with(error.status_code, f"{error.detail}: see docs/serving.md for what can be asked")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return refused_with(422, plain(error, 300))

    @app.exception_handler(RuntimeError)  # out of memory, a failed kernel: the others are still served
    async def failed(_: Request, error: RuntimeError) -> Response:
        return refused_with(500, f"scoring failed: {plain(first_line(error), 300)}")


def refused_with(status: int, message: str) -> Response:
    headers = RETRY if status in (429, 503) else {"www-authenticate": "Bearer"} if status == 401 else {}
    if status in (401, 408, 413):
        headers = {**headers, "connection": "close"}  # what is left of the body is not read
    return JSONResponse({"error": message}, status, headers)


class Doorkeeper:
    """In front of every address: the token, the limits that need no body, draining; and it counts."""

    def __init__(self, app: Any, front: Front) -> None:
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
            await refused_with(*problem)(scope, receive, counted)
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
            return 401, "a token is needed: Authorization: Bearer TOKEN, the one that the server printed or was given"
        if self._front.draining:
            return 503, "the server is ending; ask again when it is back"
        for name, value in headers:
            if name == b"content-length" and not (value.isdigit() and int(value[:20]) <= self._front.limits.bytes):
                return (
                    413,
                    f"a body of {plain(value.decode('latin-1'), 30)} bytes; at most {self._front.limits.bytes} are taken",
                )
        return None

    def _knows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, token = given.partition(b" ")
        return hmac.compare_digest(token.strip(), self._token) and scheme.lower() == b"bearer"


async def _body(request: Request, front: Front) -> bytes:
    """A body as it comes, in time and within its limit, whatever its headers say."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(front.body_seconds):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > front.limits.bytes:
                    raise WireError(413, f"a body of more than {front.limits.bytes} bytes")
    except TimeoutError:
        raise WireError(408, f"the body did not come within {front.body_seconds:g} s") from None
    except ClientDisconnect:
        raise WireError(400, "the body ended early") from None
    return b"".join(parts)


def _metrics(front: Front) -> Iterable[str]:
    """What Prometheus reads."""
    worker = front.worker
    yield from _metric("opd_requests_total", "counter", "code", front.answered)
    yield from _metric(
        "opd_questions_total", "counter", "model", {name: worker.questions[name] for name in front.models}
    )
    yield from _metric(
        "opd_forward_passes_total", "counter", "model", {name: worker.passes[name] for name in front.models}
    )
    yield from _metric("opd_tokens_total", "counter", "model", {name: worker.scored[name] for name in front.models})
    yield from _metric("opd_scoring_seconds_total", "counter", "model", worker.seconds)
    for name, kind, value in (
        ("opd_sent_bytes_total", "counter", front.sent),
        ("opd_waiting", "gauge", worker.length),
        ("opd_open_requests", "gauge", front.open),
        ("opd_draining", "gauge", int(front.draining)),
    ):
        yield from (f"# TYPE {name} {kind}", f"{name} {value}")


def _metric(name: str, kind: str, label: str, values: Mapping[Any, float]) -> Iterable[str]:
    yield f"# TYPE {name} {kind}"
    yield from (f'{name}{{{label}="{key}"}} {value}' for key, value in values.items())
