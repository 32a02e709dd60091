"""The HTTP client against real servers on loopback: it asks again, waits for one that is away, and keeps the token to itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from opd.common.errors import RecipeError, RemoteError, Stopped
from opd.common.http import Remote, address_of
from tests.support.servers import free_port

Answer = tuple[int, dict[str, str], bytes]


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    asked: list[tuple[str, str, bytes, str | None]]
    answer: Callable[[str, bytes], Answer]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, body, self.headers.get("Authorization")))
        status, headers, content = self.server.answer(self.path, body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        if headers.get("Content-Length"):
            self.close_connection = True

    do_GET = do_POST = _any

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(answer: Callable[[str, bytes], Answer], port: int = 0) -> Iterator[Server]:
    server = Server(("127.0.0.1", port), Handler)
    server.asked, server.answer = [], answer
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def plainly(content: Any, status: int = 200, **headers: str) -> Answer:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, json.dumps(content).encode()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opd.common.http.FIRST", 0.01)
    monkeypatch.setattr("opd.common.http.LONGEST", 0.05)


def test_json_bytes_and_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", " hidden-word\n")
    with serving(lambda path, body: plainly({"path": path, "body": body.decode()}, X_Kind="one")) as server:
        remote = Remote(server.address + "/", "MY_TOKEN")
        assert remote.json("POST", "/a", {"x": 1}) == {"path": "/a", "body": '{"x": 1}'}
        content, headers = remote.bytes("POST", "/b", b"\x00\x01")
        assert json.loads(content)["path"] == "/b"
        assert headers["x-kind"] == "one"
        assert [asked[3] for asked in server.asked] == ["Bearer hidden-word"] * 2


def test_it_asks_again_where_that_may_help() -> None:
    answers = iter([plainly("busy", 429, Retry_After="0"), plainly("", 500), plainly("", 503), plainly("done")])
    told: list[str] = []
    with serving(lambda path, body: next(answers)) as server:
        remote = Remote(server.address, say=told.append)
        assert remote.json("GET", "/x") == "done"
    assert len(told) == 2
    assert "429" in told[0]
    assert told[1].endswith("is back")
    assert remote.returns == 1


def test_a_truncated_answer_is_asked_for_again() -> None:
    answers = iter([(200, {"Content-Length": "1000"}, b"short"), plainly("whole")])
    with serving(lambda path, body: next(answers)) as server:
        assert Remote(server.address, say=lambda line: None).json("GET", "/x") == "whole"


def test_refusals_come_at_once_and_say_what_was_asked_without_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hidden-word")
    with serving(lambda path, body: plainly("no hidden-word\x1b[2J here", 403)) as server:
        with pytest.raises(RemoteError, match=r"GET /models was answered with 403: ") as caught:
            Remote(server.address, "MY_TOKEN").json("GET", "/models")
        assert "hidden-word" not in str(caught.value)
        assert "\x1b" not in str(caught.value)
        assert len(server.asked) == 1


def test_a_request_that_a_server_always_fails_at_ends() -> None:
    with serving(lambda path, body: plainly("broken", 500)) as server:
        with pytest.raises(RemoteError, match="fails to answer this request"):
            Remote(server.address, retries=2, say=lambda line: None).json("GET", "/x")
        assert len(server.asked) == 3


def test_redirects_are_not_followed_and_other_pages_are_no_json() -> None:
    with serving(
        lambda path, body: (302, {"Location": "http://127.0.0.1:9/"}, b"") if path == "/a" else (200, {}, b"<a>")
    ) as server:
        remote = Remote(server.address)
        with pytest.raises(RemoteError, match="302"):
            remote.json("GET", "/a")
        with pytest.raises(RemoteError, match="something other than JSON: <a>"):
            remote.json("GET", "/b")


def test_a_server_that_is_away_is_waited_for_until_the_patience_ends() -> None:
    port = free_port()
    with serving(lambda path, body: plainly("first"), port) as server:
        address = server.address
    with pytest.raises(RemoteError, match="Is it running"):
        Remote(address, patience=0.05, say=lambda line: None).json("GET", "/x")
    found: list[Any] = []
    told: list[str] = []
    remote = Remote(address, patience=600, say=told.append)
    asking = threading.Thread(target=lambda: found.append(remote.json("GET", "/x")))
    asking.start()
    while not told and asking.is_alive():
        time.sleep(0.005)
    with serving(lambda path, body: plainly("second"), port):
        asking.join(600)
    assert found == ["second"]
    assert remote.returns == 1


def test_a_wait_ends_when_the_run_does() -> None:
    def stop() -> None:
        raise Stopped

    with serving(lambda path, body: plainly("", 503)) as server, pytest.raises(Stopped):
        Remote(server.address, say=lambda line: None, check=stop).json("GET", "/x")


def test_many_at_once_come_back_in_order_and_never_too_many() -> None:
    now, most, lock = [0], [0], threading.Lock()

    def answer(path: str, body: bytes) -> Answer:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return plainly(path)

    with serving(answer) as server:
        remote = Remote(server.address, concurrency=3)
        paths = [f"/{number}" for number in range(12)]
        assert remote.map([lambda path=path: remote.json("GET", path) for path in paths]) == paths  # type: ignore[misc]
    assert 1 <= most[0] <= 3


def test_the_first_error_of_many_ends_all_and_is_the_one_that_is_raised() -> None:
    with serving(lambda path, body: plainly("no", 400 if path == "/3" else 503)) as server:
        remote = Remote(server.address, concurrency=4, say=lambda line: None)
        with pytest.raises(RemoteError, match="GET /3 was answered with 400"):
            remote.map([lambda number=number: remote.json("GET", f"/{number}") for number in range(6)])  # type: ignore[misc]


@pytest.mark.parametrize(
    "address",
    [
        "ftp://x",
        "127.0.0.1:80",
        "http://",
        "http://me:secret@x",
        "http://x/?a=b",
        "http://x y",
        "http://x:82000",
        "http://x:abc",
        "http://me:sec/ret@x:y",
        "http://[::1",
    ],
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(RecipeError, match="address") as caught:
        address_of(address)
    assert "secret" not in str(caught.value)


def test_a_token_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(RemoteError, match="'MY_TOKEN': this variable is not set"):
        Remote("http://127.0.0.1:1", "MY_TOKEN")
    with pytest.raises(RemoteError, match="never the token itself") as caught:
        Remote("http://127.0.0.1:1", "sk-hidden")
    assert "hidden" not in str(caught.value)
    monkeypatch.setenv("MY_TOKEN", "two\nlines")
    with pytest.raises(RemoteError, match="not a token") as caught:
        Remote("http://127.0.0.1:1", "MY_TOKEN")
    assert "lines" not in str(caught.value)
