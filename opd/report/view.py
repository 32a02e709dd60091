"""`opd view RUN`: the live page of a run, with every rollout. On loopback, with a token in the address.

/TOKEN/               the page                    /TOKEN/api/rollouts?…   a page of the store, filtered
/TOKEN/api/run        what the page is drawn from /TOKEN/api/rollout?row= one rollout, token by token
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from opd.common.errors import OpdError, UserError
from opd.common.files import json_text
from opd.common.process_identity import is_running
from opd.report.browse import RolloutBrowser
from opd.report.facts import run_facts
from opd.report.page import page

LOOPBACK = "127.0.0.1"
DIGITS = 18  # digits of a row number
EVERY = 2.0  # seconds between checks of the store
PATIENCE = 30.0  # seconds to send a request, or to read its answer
CONNECTIONS = 128  # at once; each has a thread
READ = (
    "metrics.jsonl",
    "samples.jsonl",
    "tokens.jsonl",
    "answers.jsonl",
    "monitors.jsonl",
    "summary.json",
    "diagnose.json",
)
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class LiveFacts:
    """The data of the page, read again only when a file has changed."""

    def __init__(self, directory: Path) -> None:
        self._root, self._lock = directory, threading.Lock()
        self._stamp, self._facts = "", dict[str, Any]()

    def __call__(self) -> tuple[str, dict[str, Any]]:
        with self._lock:
            stamp = self._now()
            if stamp != self._stamp:
                self._stamp, self._facts = stamp, run_facts(self._root)
            return self._stamp, self._facts

    def _now(self) -> str:
        found = ((self._root / name).stat() for name in READ if (self._root / name).is_file())
        return "-".join((str(is_running(self._root)), *(f"{facts.st_size:x}.{facts.st_mtime_ns:x}" for facts in found)))


class ViewServer(ThreadingHTTPServer):
    """A server for one run. Its `address` holds the token, so other users cannot read the run without it."""

    daemon_threads = True

    def __init__(self, directory: Path, port: int = 0, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._free = threading.Semaphore(CONNECTIONS)
        self._deadlines = dict[socket.socket, float]()  # of requests that are not complete yet
        self._watch = threading.Lock()
        self.facts, self.rollouts, self.token = (
            LiveFacts(directory),
            RolloutBrowser(directory),
            secrets.token_urlsafe(24),
        )
        self.facts()  # fails now if the directory cannot be read
        self._ended = threading.Event()
        try:
            super().__init__((LOOPBACK, port), ViewRequest)
        except OSError as error:
            raise UserError(
                f"port {port} of {LOOPBACK} cannot be used: {error.strerror}. Give another: --port 0"
            ) from None
        threading.Thread(target=refresh_while_growing, args=(self.rollouts, EVERY, self._ended), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def expect(self, connection: socket.socket) -> None:
        """Start the clock of a request."""
        with self._watch:
            self._deadlines[connection] = time.monotonic() + self.patience

    def arrived(self, connection: socket.socket) -> None:
        """Stop the clock of a request."""
        with self._watch:
            self._deadlines.pop(connection, None)

    def service_actions(self) -> None:
        """Called several times a second: close connections whose request is late, even if single bytes still arrive."""
        now = time.monotonic()
        with self._watch:
            late = [connection for connection, deadline in self._deadlines.items() if deadline < now]
            for connection in late:
                del self._deadlines[connection]
                with suppress(OSError):  # the client has closed it
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def server_close(self) -> None:
        self._ended.set()
        super().server_close()


class ViewRequest(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.patience)

    def handle_one_request(self) -> None:
        self.server.expect(self.connection)
        try:
            super().handle_one_request()
        except ConnectionError:  # the browser or the clock has closed it
            self.close_connection = True
        finally:
            self.server.arrived(self.connection)

    def do_GET(self) -> None:
        """Without the token every path is 404, so a stranger learns nothing."""
        self.server.arrived(self.connection)
        if self.headers.get("Host") not in (
            f"{LOOPBACK}:{self.server.server_port}",
            f"localhost:{self.server.server_port}",
        ):
            return self._send(404, "text/plain", b"")  # another host name for this address, used by a foreign page
        parts = urlsplit(self.path)
        _, given, *rest = parts.path.split("/", 2) if parts.path.count("/") > 1 else ("", "", "")
        what = (
            self._routes().get(rest[0]) if secrets.compare_digest(given.encode(), self.server.token.encode()) else None
        )
        if what is None:
            return self._send(404, "text/plain", b"")
        try:
            code, kind, body = what(dict(parse_qsl(parts.query)))
        except UserError as error:
            code, kind, body = 400, "text/plain", str(error)
        except OpdError as error:
            code, kind, body = 503, "text/plain", str(error)
        return self._send(code, kind, body.encode())

    def _routes(self) -> dict[str, Callable[[Mapping[str, str]], tuple[int, str, str]]]:
        return {"": self._page, "api/run": self._run, "api/rollouts": self._rollouts, "api/rollout": self._rollout}

    def _page(self, asked: Mapping[str, str]) -> tuple[int, str, str]:
        stamp, facts = self.server.facts()
        return 200, "text/html", page([facts], live=True, stamp=stamp)

    def _run(self, asked: Mapping[str, str]) -> tuple[int, str, str]:
        stamp, facts = self.server.facts()
        if asked.get("since") == stamp:
            return 204, "text/plain", ""
        return 200, "application/json", json_text({"stamp": stamp, "runs": [facts]})

    def _rollouts(self, asked: Mapping[str, str]) -> tuple[int, str, str]:
        return 200, "application/json", json_text(self.server.rollouts.page(asked))

    def _rollout(self, asked: Mapping[str, str]) -> tuple[int, str, str]:
        row = asked.get("row", "")
        if not row.isdecimal() or len(row) > DIGITS:
            raise UserError(f"row {row!r}: expected a whole number.")
        found = self.server.rollouts.one(int(row))
        written = [line for line in self.server.facts()[1]["tokens"] if line["id"] == found["id"]]
        return 200, "application/json", json_text({**found, "tokens": written[-1] if written else found["tokens"]})

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if code != 204:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Addresses hold the token, so they are not logged."""


def serve_view(directory: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted."""
    server = ViewServer(directory, port)
    say(f"{directory} at {server.address}\nonly on this machine, for anybody who has this address; Ctrl-C stops it")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def refresh_while_growing(rollouts: RolloutBrowser, every: float, ended: threading.Event) -> None:
    """Renews the snapshot of the store until it is stopped. A store that is being written may be incomplete for a moment."""
    while not ended.wait(every):
        try:
            rollouts.refresh()
        except (OpdError, OSError):
            continue  # it is complete next time
