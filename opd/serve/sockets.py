"""uvicorn with four habits more: headers have to come in time and be few, half a request is told so, and SIGTERM lets what was accepted be answered."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import resource
import socket
import time
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from opd.serve.app import Front

BACKLOG = 4096  # connections that may wait to be accepted
CONNECTIONS = 8192
HEAD_BYTES = 16 << 10  # of a request line and headers
HEADERS = 100
BLANK_LINE = re.compile(rb"\n\r?\n")  # after the last header


class BoundedConnection(h11.Connection):
    """Looks at the size of a request's head before h11 parses it, which by itself bounds only heads that come in pieces."""

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


class PunctualProtocol(H11Protocol):
    """A clock runs from a request's first moment to the end of its headers; the body has one of its own."""

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
        self._refuse("408 Request Timeout", "the request did not come in time")

    def eof_received(self) -> bool:
        """The client will send no more: of half a request it is told, and one that came whole is still answered."""
        waits = self.cycle is not None and not self.cycle.response_complete
        if self.conn.their_state is h11.SEND_BODY or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]):
            self._refuse("400 Bad Request", "the request ended early: less came than its headers say")
        elif waits:
            self.cycle.keep_alive = False
        return waits and not self.transport.is_closing()

    def send_400_response(self, msg: str) -> None:
        if self.conn.head_too_large:
            limits = f"at most {HEADERS} headers and {HEAD_BYTES} bytes are taken"
            self._refuse(
                "431 Request Header Fields Too Large", f"the request has too many headers, or too long ones; {limits}"
            )
        else:
            self._refuse("400 Bad Request", msg)

    def _refuse(self, status: str, message: str) -> None:
        """Past the app, where no answer has begun."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = json.dumps({"error": message}).encode()
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """The first signal drains, a second one ends."""

    def __init__(self, config: Any, front: Front, seconds: float) -> None:
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


def allow_connections(wanted: int = CONNECTIONS + 1024) -> None:
    """Each is an open file, and many systems begin with 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run_until_told(
    app: Any, front: Front, listening: socket.socket, request_seconds: float, drain_seconds: float
) -> None:
    config = uvicorn.Config(
        app,
        http=functools.partial(PunctualProtocol, seconds=request_seconds),
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
    allow_connections()
    DrainingServer(config, front, drain_seconds).run(sockets=[listening])
