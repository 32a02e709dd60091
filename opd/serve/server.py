"""The command `opd serve`: models are loaded, a socket is opened, and it stays until it is told to end.

SIGTERM and Ctrl-C drain: what was accepted is answered, what comes later gets 503, then the process ends. A second one ends it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from opd.errors import UserError
from opd.remote import LOOPBACK, token_of
from opd.teachers.wire import RequestLimits
from opd.text import plain

if TYPE_CHECKING:
    from opd.serve.app import Front
    from opd.serve.models import ServedModel

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
BACKLOG = 4096  # connections that may wait to be accepted
CONNECTIONS = 8192
HEAD_BYTES = 64 << 10  # of a request line and headers


@dataclass(frozen=True)
class ServeSettings:
    """What the command line says. `waiting`: questions that may wait; seconds: for a request to come in, and to end."""

    host: str = "127.0.0.1"
    port: int = 8200
    token_env: str | None = None
    device: str = "auto"
    dtype: str | None = None
    batch_tokens: int = 8192
    waiting: int = 4096
    limits: RequestLimits = field(default_factory=RequestLimits)
    body_seconds: float = 30.0
    drain_seconds: float = 60.0


def serve(models: Sequence[str], adapters: Sequence[str], settings: ServeSettings, say: Callable[[str], None]) -> None:
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serving needs {' and '.join(missing)}: pip install 'opd[serve]'.")
    named = names_of(models, adapters)
    token = secrets.token_urlsafe(32) if settings.token_env is None else token_of(settings.token_env, "this server")
    assert token is not None
    listening = _listen(settings)
    served = _load(named, settings, say)
    from opd.serve.app import Front, make_app
    from opd.serve.worker import Worker

    most = 64 * settings.limits.tokens
    worker = Worker(served, batch_tokens=settings.batch_tokens, waiting=settings.waiting, tokens=most)
    front = Front(served, worker, token, settings.limits, settings.body_seconds)
    listening.listen(BACKLOG)
    port = listening.getsockname()[1]
    if not LOOPBACK.fullmatch(settings.host):
        say(
            f"WARNING: listening on {settings.host}, beyond this machine, without encryption: whoever can read the traffic has "
            "the token. Put it behind a tunnel or a proxy with TLS"
        )
    if settings.token_env is None:
        say(f"token: {token}")
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    say(f"serving {', '.join(served)} at http://{host}:{port}")
    try:
        _run(make_app(front), front, listening, settings)
    finally:
        worker.close()
    say("every request that was accepted has been answered")


def names_of(models: Sequence[str], adapters: Sequence[str]) -> dict[str, str]:
    """Name -> model. `maths=Qwen/Qwen3-8B`, or a model that goes by the last part of its own name."""
    pairs = [_named(text) for text in models] + [_named(text, adapter=True) for text in adapters]
    found: dict[str, str] = {}
    for name, model in pairs:
        if not NAME.fullmatch(name):
            raise UserError(
                f"name {plain(name, 120)!r}: letters, digits, '.', '_' and '-' only. Give it one: NAME={plain(model, 120)}"
            )
        if name in found:
            raise UserError(f"two models are called {name!r}. Give one another name: NAME={plain(model, 120)}")
        found[name] = model
    if not found:
        raise UserError("there is nothing to serve. Name a model: opd serve tiny/arithmetic")
    return found


def _named(text: str, adapter: bool = False) -> tuple[str, str]:
    name, given, model = text.partition("=")
    if not given and adapter:
        raise UserError(f"--adapter {plain(text, 200)!r}: expected NAME=DIRECTORY.")
    return (name, model) if given else (text.rstrip("/").rpartition("/")[2], text)


def _load(named: Mapping[str, str], settings: ServeSettings, say: Callable[[str], None]) -> dict[str, ServedModel]:
    """Each model once, whatever it is called."""
    from opd.models import load_model
    from opd.runner.checks import pick_device
    from opd.serve.models import ServedModel

    device = str(pick_device(settings.device))
    dtype = settings.dtype or ("float32" if device == "cpu" else "bfloat16")
    loaded: dict[str, Any] = {}
    served = {}
    for name, model in named.items():
        if model not in loaded:
            say(f"loading {plain(model, 200)} ({dtype}, {device})")
            loaded[model] = load_model(model, dtype=dtype, device=device)
        served[name] = ServedModel(name, loaded[model], settings.batch_tokens)
    return served


def _listen(settings: ServeSettings) -> socket.socket:
    """Before anything is loaded: an address that is taken is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise UserError(
            f"{settings.host}:{settings.port} cannot be listened on: {error.strerror or error}. Choose another --port."
        ) from None
    return listening


def _run(app: Any, front: Front, listening: socket.socket, settings: ServeSettings) -> None:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PatientOnce(H11Protocol):
        """Headers have to come in time, too; uvicorn alone would wait for ever."""

        slow: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.slow is not None:
                self.slow.cancel()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """A clock runs from the first byte of a request to the end of its headers."""
            import h11

            headers_are_coming = self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None
            if headers_are_coming and self.slow is None:
                self.slow = self.loop.call_later(settings.body_seconds, self._too_slow)
            elif not headers_are_coming and self.slow is not None:
                self.slow.cancel()
                self.slow = None

        def _too_slow(self) -> None:
            if not self.transport.is_closing():
                body = b'{"error": "the request did not come in time"}'
                head = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
                self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                self.transport.close()

    class DrainingServer(uvicorn.Server):
        deadline = float("inf")

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if front.draining:
                super().handle_exit(sig, frame)
                self.force_exit = True
            front.draining = True
            self.deadline = time.monotonic() + settings.drain_seconds

        async def on_tick(self, counter: int) -> bool:
            ended = front.draining and (front.open == 0 or time.monotonic() > self.deadline)
            return bool(await super().on_tick(counter)) or ended

    config = uvicorn.Config(
        app,
        http=PatientOnce,
        ws="none",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        limit_concurrency=CONNECTIONS,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_graceful_shutdown=int(settings.drain_seconds),
        server_header=False,
        proxy_headers=False,
        lifespan="off",
    )
    DrainingServer(config).run(sockets=[listening])
