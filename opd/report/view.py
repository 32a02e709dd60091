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

import numpy as np

from opd.common.errors import OpdError, RunDirectoryError, UserError
from opd.common.files import json_text
from opd.common.process_identity import is_running
from opd.models.load import tokenizer_file
from opd.recipe.paths import read_resolved
from opd.recipe.stage import MERGED
from opd.records import Rollout, Signal
from opd.report.facts import run_facts
from opd.report.page import page
from opd.store import RolloutStore
from opd.store.rollouts import STOPS

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


# Pages of the rollout store, filtered by the index's columns; payload is only read for the rows shown


PREVIEW = 48  # tokens of a prompt and an answer in the list
SHOWN = 4096  # tokens of one rollout
MOST = 200  # rows of a page
REST = 10.0  # wait between reads of the store, as a multiple of the time of one read
SORTS: dict[str, tuple[str, bool]] = {  # column, largest first
    "newest": ("", True),
    "oldest": ("", False),
    "longest": ("length", True),
    "shortest": ("length", False),
    "best": ("reward", True),
    "worst": ("reward", False),
}
CODED = ("domain", "teacher", "source")


class RolloutBrowser:
    """A store that may be growing. Requests are answered from the newest snapshot, which a thread renews."""

    def __init__(self, directory: Path) -> None:
        self._root = directory
        self._lock = threading.Lock()
        self._size, self._next = -1, 0.0
        self._store: RolloutStore | None = None
        self._decode: Callable[[list[int]], str] | None = None
        self._searched = False  # whether a tokenizer was looked for since the store has grown
        self.refresh()

    def refresh(self) -> None:
        """Open the store again if it has grown, but not so often that the writer slows down."""
        folder = self._root / "rollouts"
        size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file()) if folder.is_dir() else 0
        if not size or size == self._size or time.monotonic() < self._next:
            return
        start = time.monotonic()
        store = RolloutStore(folder, read_only=True)
        with self._lock:
            self._store, self._size, self._searched = store, size, False
        self._next = time.monotonic() + REST * (time.monotonic() - start)

    def page(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """`asked`: domain, teacher, source, stop, reward (right, wrong, none), length_from, version_from, sort, offset, limit."""
        with self._lock:
            store = self._store
        if store is None:
            return {"total": 0, "all": 0, "values": {name: [] for name in (*CODED, "stop")}, "rows": []}
        index = store.index
        finished = store.readable()
        rows = finished[_mask(index, finished, asked)]
        order = asked.get("sort", "newest")
        if order not in SORTS:
            raise UserError(f"sort {order!r}: expected one of {', '.join(SORTS)}.")
        offset, limit = _whole(asked, "offset", 0), min(_whole(asked, "limit", 50), MOST)
        chosen = _sorted(index, rows, *SORTS[order])[offset : offset + limit]
        values = {name: _present(index, finished, name) for name in CODED}
        values["stop"] = [
            str(name) for code, name in enumerate(STOPS) if code and (index["stop"][finished] == code).any()
        ]
        return {
            "total": len(rows),
            "all": len(finished),
            "values": values,
            "rows": [self._row(store, int(row)) for row in chosen],
        }

    def _row(self, store: RolloutStore, row: int) -> dict[str, Any]:
        index, (rollout,) = store.index, store.load_rows([row])
        reward = float(index["reward"][row])
        return {
            "row": row,
            "id": rollout.id,
            "domain": rollout.domain,
            "source": rollout.source,
            "teacher": index.text("teacher", row),
            "reward": None if np.isnan(reward) else reward,
            "length": int(rollout.response_ids.size),
            "stop": rollout.stop,
            "version": int(index["version_max"][row]),
            "prompt": self.text(rollout.prompt_ids[-PREVIEW:]),
            "response": self.text(rollout.response_ids[:PREVIEW]),
        }

    def one(self, row: int) -> dict[str, Any]:
        """A rollout with its tokens, and its teacher's scores if the store has them."""
        with self._lock:
            store = self._store
        if store is None or row not in store.readable():
            raise UserError(f"row {row}: there is no such rollout.")
        (rollout,) = store.load_rows([row])
        scored = store.signals([rollout.id], "teacher", "logprobs_at").get(rollout.id)
        return {
            **self._row(store, row),
            "prompt": self.text(rollout.prompt_ids),
            "tokens": self._tokens(rollout, scored),
        }

    def _tokens(self, rollout: Rollout, scored: Signal | None) -> dict[str, Any]:
        ids = rollout.response_ids[:SHOWN].tolist()
        student = rollout.logprob[:SHOWN].astype(float)
        teacher = np.full(len(ids), np.nan)
        if scored is not None:
            teacher = np.where(scored.mask, np.asarray(scored.values, dtype=float), np.nan)[:SHOWN]
        return {
            "id": rollout.id,
            "ids": ids,
            "author": rollout.author[:SHOWN].tolist(),
            "texts": {str(index): self.text([index]) for index in set(ids)},
            "teacher": scored.teacher if scored is not None else "",
            "student": student.tolist(),
            "teacher_logprob": teacher.tolist(),
            "ratio": (student - teacher).tolist(),
            "left_out": max(rollout.response_ids.size - SHOWN, 0),
        }

    # Tokenizer

    def text(self, ids: Any) -> str:
        decode = self._decoder()
        numbers = [int(index) for index in ids]
        return " ".join(map(str, numbers)) if decode is None else decode(numbers)

    def _decoder(self) -> Callable[[list[int]], str] | None:
        """The tokenizer. None: neither the run nor the first student has a tokenizer file; ids are shown until one is saved."""
        if self._decode is None and not self._searched:
            self._searched, path = True, self._tokenizer()
            if path is not None:
                from tokenizers import Tokenizer

                found = Tokenizer.from_file(str(path))
                self._decode = lambda ids: str(found.decode(ids, skip_special_tokens=False))
        return self._decode

    def _tokenizer(self) -> Path | None:
        """The student's tokenizer file, in a checkpoint or in the model that it started from."""
        saved = sorted((self._root / "checkpoints").glob("*/step-*/tokenizer.json"))
        if saved:
            return saved[-1]
        student = read_resolved(self._root)["stages"][0].get("student")
        if not isinstance(student, dict) or "model" not in student:
            raise RunDirectoryError(f"{self._root / 'resolved.yaml'} was altered: it does not name the student.")
        model = str(student["model"])
        if model.startswith(MERGED):  # created at the start of the stage
            model = str(self._root / "merged" / model.removeprefix(MERGED))
        return tokenizer_file(model, student.get("revision"))


def _mask(index: Any, rows: np.ndarray, asked: Mapping[str, str]) -> np.ndarray:
    mask = np.ones(rows.size, dtype=bool)
    for name in CODED:
        if asked.get(name):
            code = index.vocabularies[name].get(asked[name])
            mask &= index[name][rows] == (-1 if code is None else code)
    if asked.get("stop"):
        mask &= index["stop"][rows] == (STOPS.index(asked["stop"]) if asked["stop"] in STOPS else len(STOPS))
    reward = index["reward"][rows]
    known = ~np.isnan(reward)
    full = known & (np.nan_to_num(reward) >= 1 - 1e-9)
    kinds = {"right": full, "wrong": known & ~full, "none": ~known}
    if asked.get("reward"):
        if asked["reward"] not in kinds:
            raise UserError(f"reward {asked['reward']!r}: expected one of {', '.join(kinds)}.")
        mask &= kinds[asked["reward"]]
    mask &= index["length"][rows] >= _whole(asked, "length_from", 0)
    return mask & (index["version_max"][rows] >= _whole(asked, "version_from", -1))


def _sorted(index: Any, rows: np.ndarray, column: str, largest: bool) -> np.ndarray:
    if not column:
        return rows[::-1] if largest else rows
    values = np.nan_to_num(index[column][rows].astype(float), nan=-np.inf if largest else np.inf)
    return rows[np.argsort(-values if largest else values, kind="stable")]


def _present(index: Any, rows: np.ndarray, name: str) -> list[str]:
    used = np.bincount(index[name][rows], minlength=1)
    return [
        text for code, text in enumerate(index.vocabularies[name].texts) if text and code < used.size and used[code]
    ]


def _whole(asked: Mapping[str, str], name: str, usual: int) -> int:
    try:
        return int(asked.get(name) or usual)
    except ValueError:
        raise UserError(f"{name} {asked[name]!r}: expected a whole number.") from None


def refresh_while_growing(rollouts: RolloutBrowser, every: float, ended: threading.Event) -> None:
    """Renews the snapshot of the store until it is stopped. A store that is being written may be incomplete for a moment."""
    while not ended.wait(every):
        try:
            rollouts.refresh()
        except (OpdError, OSError):
            continue  # it is complete next time
