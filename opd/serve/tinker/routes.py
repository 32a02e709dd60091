"""The HTTP routes of the Tinker API, all under /api/v1, and who may use them.

A token is an owner: what one token's sessions made does not exist for the others. Errors are `{"error": …, "category": …}`, with a 4xx
status where a request is refused at once, or as the result of its future.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException as PlainHTTPException

from opd.common.errors import OpdError, StoreError
from opd.common.text import first_line, plain
from opd.serve.app import RETRY, metric_lines, read_body
from opd.serve.tinker.checkpoints import SavedClient, SavedState
from opd.serve.tinker.requests import (
    Cancel,
    NewModel,
    NewSampler,
    OfModel,
    OfSession,
    PathBody,
    Retrieve,
    SampleBody,
    SessionBody,
    parse_body,
)
from opd.serve.tinker.service import HEAD_NOTE, QueuedRequest, Result, Service
from opd.teachers.served import RequestLimits, WireError

ROOT = "/api/v1"
HEALTH = f"{ROOT}/healthz"
POLL_SECONDS = 30.0  # the SDK waits 45
TOKEN_BYTES = 12  # of a datum's smallest token: input, target
PROTOBUF = "application/x-protobuf"
Handler = Callable[[str, bytes], Awaitable[Response]]


@dataclass(eq=False)
class TinkerState:
    """State that all routes share. `tokens`: of all owners."""

    service: Service
    tokens: Sequence[str]
    limits: RequestLimits
    body_seconds: float
    draining: bool = False
    open: int = 0
    owners: dict[str, str] = field(default_factory=dict)
    answered: Counter[int] = field(default_factory=Counter)  # status -> requests

    def __post_init__(self) -> None:
        self.owners = {token: hashlib.sha256(token.encode()).hexdigest()[:16] for token in self.tokens}

    def owner(self, given: bytes) -> str | None:
        """Compares with every token in constant time."""
        found = [owner for token, owner in self.owners.items() if hmac.compare_digest(given, token.encode())]
        return found[0] if found else None


def make_tinker_app(front: TinkerState) -> FastAPI:
    app = FastAPI(title="opd serve --tinker", docs_url=None, redoc_url=None, openapi_url=None)
    _add_posts(app, front)
    _add_reads(app, front)

    @app.exception_handler(WireError)
    async def refused(_: Request, error: WireError) -> Response:
        return _error(error.status, str(error))

    @app.exception_handler(StoreError)
    async def unwritten(_: Request, error: StoreError) -> Response:
        return _error(500, str(error))

    @app.exception_handler(OpdError)
    async def failed(_: Request, error: OpdError) -> Response:
        return _error(400, str(error))

    @app.exception_handler(PlainHTTPException)
    async def elsewhere(_: Request, error: PlainHTTPException) -> Response:
        return _error(error.status_code, f"{error.detail}: see docs/tinker.md for what is served")

    app.add_middleware(TinkerGuard, front=front)
    return app


def _error(status: int, message: str) -> Response:
    headers = RETRY if status in (429, 503) else {}
    if status in (401, 408, 413):
        headers = {"connection": "close"}  # the rest of the body is not read
    return JSONResponse({"error": message, "category": "server" if status >= 500 else "user"}, status, headers)


class TinkerGuard:
    """Middleware of every route: token, size, draining."""

    def __init__(self, app: Any, front: TinkerState) -> None:
        self._app, self._front = app, front

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._front.answered[message["status"]] += 1
            await send(message)

        problem = self._problem(scope)
        if problem is not None:
            await _error(*problem)(scope, receive, counted)
            return
        self._front.open += 1
        try:
            await self._app(scope, receive, counted)
        finally:
            self._front.open -= 1

    def _problem(self, scope: Any) -> tuple[int, str] | None:
        if scope["path"] == HEALTH:
            return None
        headers = dict(scope["headers"])
        given = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        owner = self._front.owner(given.strip())
        if owner is None:
            return 401, "a token is needed in the header X-API-Key: set TINKER_API_KEY to the server's token"
        if self._front.draining:
            return 503, "the server is shutting down"
        size = headers.get(b"content-length", b"0")
        if not (size.isdigit() and int(size[:20]) <= self._front.limits.bytes):
            return (
                413,
                f"a body of {plain(size.decode('latin-1'), 30)} bytes; at most {self._front.limits.bytes} are accepted",
            )
        scope.setdefault("state", {})["owner"] = owner
        return None


# --- Requests with a body ---


def _add_posts(app: FastAPI, front: TinkerState) -> None:
    routes = TinkerRoutes(front)
    for name, handler in routes.handlers().items():
        app.post(f"{ROOT}/{name}")(_route(front, handler))


def _route(front: TinkerState, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def post(request: Request) -> Response:
        answer = await handler(request.state.owner, await read_body(request, front))
        await asyncio.to_thread(front.service.journal.sync)  # what is said here survives the process
        return answer

    return post


class TinkerRoutes:
    """One method per address."""

    def __init__(self, front: TinkerState) -> None:
        self._front, self._service, self._limits = front, front.service, front.limits

    def handlers(self) -> dict[str, Handler]:
        ordered: dict[str, Handler] = {
            address: self._in_turn(address)
            for address in (
                "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler", "load_weights",
            )
        }  # fmt: skip
        return ordered | {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._info,
            "unload_model": self._unload,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "weights_info": self._weights_info,
        }

    def _in_turn(self, address: str) -> Handler:
        async def handler(owner: str, raw: bytes) -> Response:
            return _promise(await asyncio.to_thread(self._service.take_turn, address, owner, raw))

        return handler

    async def _config(self, owner: str, raw: bytes) -> Response:
        limits = self._limits
        found = {
            "pjwt_auth_enabled": False,
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": False,
            "fwdbwd_max_chunk_len": limits.sequences,
            "fwdbwd_max_chunk_bytes_count": min(limits.tokens * TOKEN_BYTES, limits.bytes // 2),
        }
        return JSONResponse(found)

    async def _dynamic_config(self, owner: str, raw: bytes) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def _telemetry(self, owner: str, raw: bytes) -> Response:
        return JSONResponse({"status": "accepted"})  # nothing of it is kept

    async def _create_session(self, owner: str, raw: bytes) -> Response:
        body = parse_body(raw, SessionBody, self._limits)
        session = self._service.open_session(owner, body.user_metadata or {})
        return JSONResponse({"type": "create_session", "session_id": session.id, "info_message": HEAD_NOTE})

    async def _heartbeat(self, owner: str, raw: bytes) -> Response:
        try:
            self._service.session(owner, parse_body(raw, OfSession, self._limits).session_id)
        except WireError as error:
            raise WireError(410 if error.status == 404 else error.status, str(error)) from None
        return JSONResponse({"type": "session_heartbeat"})

    async def _create_model(self, owner: str, raw: bytes) -> Response:
        return _promise(self._service.create(owner, parse_body(raw, NewModel, self._limits), raw))

    async def _info(self, owner: str, raw: bytes) -> Response:
        _, client = self._service.client(owner, parse_body(raw, OfModel, self._limits).model_id)
        base = client.base
        data = {
            "arch": base.model.module.config.model_type,
            "model_name": base.name,
            "tokenizer_id": base.tokenizer,
        }
        found = {"type": "get_info", "model_data": data, "model_id": client.id, "is_lora": True}
        return JSONResponse(found | {"lora_rank": client.rank, "model_name": base.name})

    async def _unload(self, owner: str, raw: bytes) -> Response:
        return _promise(self._service.unload(owner, parse_body(raw, OfModel, self._limits).model_id))

    async def _create_sampler(self, owner: str, raw: bytes) -> Response:
        name = self._service.create_sampler(owner, parse_body(raw, NewSampler, self._limits))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    async def _sample(self, owner: str, raw: bytes) -> Response:
        body = await asyncio.to_thread(parse_body, raw, SampleBody, self._limits)
        job, sequences = self._service.sample(owner, body, raw)
        return JSONResponse({"request_id": job.id, "sample_sequence_ids": sequences})

    async def _retrieve(self, owner: str, raw: bytes) -> Response:
        name = parse_body(raw, Retrieve, self._limits).request_id
        job = self._service.future(owner, name)
        await _finished(job, POLL_SECONDS)
        if not job.answer.done():
            return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"})
        if job.answer.cancelled():
            raise WireError(410, f"request {plain(name, 120)} was cancelled")
        job.fetched = time.monotonic()
        error = job.answer.exception()
        return _result(job.answer.result()) if error is None else JSONResponse(_failure(error))

    async def _cancel(self, owner: str, raw: bytes) -> Response:
        self._service.cancel(owner, parse_body(raw, Cancel, self._limits).request_id)
        return Response(status_code=204)

    async def _weights_info(self, owner: str, raw: bytes) -> Response:
        found = self._service.checkpoints.find(owner, parse_body(raw, PathBody, self._limits).tinker_path)
        client = found.client
        return JSONResponse(
            {
                "base_model": client.base,
                "is_lora": True,
                "lora_rank": client.rank,
                "train_unembed": client.rank == 0,
                "train_mlp": client.mlp,
                "train_attn": client.attention,
            }
        )


async def _finished(job: QueuedRequest, seconds: float) -> None:
    """Wait for a result, so long at most."""
    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def wake(_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(done.set)

    job.answer.add_done_callback(wake)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await done.wait()


def _promise(job: QueuedRequest) -> Response:
    return JSONResponse({"request_id": job.id})


def _result(result: Result) -> Response:
    return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)


def _failure(error: BaseException) -> dict[str, str]:
    mistake = isinstance(error, OpdError) and not (isinstance(error, WireError) and error.status >= 500)
    text = str(error) if mistake else f"the request failed: {plain(first_line(error), 300)}"
    return {"error": text, "category": "user" if mistake else "server"}


# --- Requests without a body ---


def _add_reads(app: FastAPI, front: TinkerState) -> None:
    service = front.service

    @app.get(HEALTH)
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse("\n".join(_metrics(front)) + "\n", media_type="text/plain; version=0.0.4")

    @app.get(f"{ROOT}/get_server_capabilities")
    async def capabilities() -> Response:
        models = [
            {"model_name": base.name, "max_context_length": base.model.context, "trainable": True, "sampleable": True}
            for base in service.bases.values()
        ]
        return JSONResponse({"supported_models": models})

    @app.post(f"{ROOT}/sessions/{{name}}/finish")
    async def finish(name: str, request: Request) -> Response:
        await read_body(request, front)
        service.end_session(request.state.owner, name)
        await asyncio.to_thread(service.journal.sync)
        return Response(status_code=204)

    @app.get(f"{ROOT}/samplers/{{name}}")
    async def sampler(name: str, request: Request) -> Response:
        _, weights = service.sampler(request.state.owner, name)
        return JSONResponse({"sampler_id": name, "base_model": weights.base.name, "model_path": weights.path})

    @app.get(f"{ROOT}/training_runs/{{run}}")
    async def training_run(run: str, request: Request) -> Response:
        return JSONResponse(_training_run(service, request.state.owner, run))

    @app.get(f"{ROOT}/training_runs/{{run}}/checkpoints")
    async def list_checkpoints(run: str, request: Request) -> Response:
        found = [_checkpoint(each) for each in service.checkpoints.of_run(request.state.owner, run)]
        return JSONResponse({"checkpoints": found})

    @app.delete(f"{ROOT}/training_runs/{{run}}/checkpoints/{{name:path}}")
    async def delete(run: str, name: str, request: Request) -> Response:
        service.checkpoints.delete(request.state.owner, f"tinker://{run}/{name}")
        return Response(status_code=204)


def _metrics(front: TinkerState) -> Iterator[str]:
    """What Prometheus reads."""
    service = front.service
    yield from metric_lines("opd_requests_total", "counter", "code", front.answered)
    yield from metric_lines("opd_tokens_total", "counter", "kind", dict(service.tokens))
    yield from metric_lines("opd_computing_seconds_total", "counter", "kind", dict(service.seconds))
    for name, value in {**service.gauges(), "open_requests": front.open, "draining": int(front.draining)}.items():
        yield from (f"# TYPE opd_{name} gauge", f"opd_{name} {value}")


def _training_run(service: Service, owner: str, run: str) -> dict[str, Any]:
    client = next((client for _, client in service.runs(owner) if client.id == run), None)
    saved = list(service.checkpoints.of_run(owner, run))
    if client is None and not saved:
        raise WireError(404, f"there is no training run {plain(run, 100)!r}")
    if client is not None:
        facts: SavedClient | None = client.saved() if client.model is not None else None
        metadata, base, rank, used = client.metadata, client.base.name, client.rank, client.used
    else:
        last = max(saved, key=lambda each: each.made)
        facts = last.client
        metadata, base, rank, used = facts.metadata, facts.base, facts.rank, last.made
    found: dict[str, Any] = {
        "training_run_id": run,
        "base_model": base,
        "model_owner": owner,
        "is_lora": True,
        "lora_rank": rank,
        "last_request_time": _time(used),
        "user_metadata": {str(key): str(value) for key, value in metadata.items()},
    }
    for key, kind in (("last_checkpoint", "weights"), ("last_sampler_checkpoint", "sampler_weights")):
        of_kind = [each for each in saved if each.kind == kind]
        if of_kind:
            found[key] = _checkpoint(max(of_kind, key=lambda each: each.made))
    return found


def _checkpoint(found: SavedState) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{found.kind}/{found.name}",
        "checkpoint_type": "training" if found.kind == "weights" else "sampler",
        "time": _time(found.made),
        "tinker_path": found.path,
        "size_bytes": found.bytes,
        "user_metadata": dict(found.user_metadata),
        "expires_at": None if found.expires is None else _time(found.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
