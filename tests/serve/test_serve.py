"""`opd serve` as a real process, and attacks on it: each gets a 4xx and a clear body, and the next request is answered."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from opd.common.errors import UserError
from opd.common.files import allow_open_files
from opd.serve.app import CONNECTIONS
from opd.serve.server import served_names
from opd.teachers.served import FRAME, RequestLimits, WireError, read_question
from tests.support.servers import TOKEN, ServeProcess

SEEN = {"Authorization": f"Bearer {TOKEN}"}
SCORE = "/models/arithmetic/score"


def asking(address: str, headers: Mapping[str, str] = SEEN) -> httpx.Client:
    """One that waits as long as it takes, and never meets a connection that the server is just about to close."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=address, headers=headers, timeout=600, limits=limits, trust_env=False)


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> Iterator[httpx.Client]:
    with asking(server.address) as found:
        yield found


def question(ids: list[list[int]], **asked: Any) -> bytes:
    tensors = {
        "ids": np.array([index for text in ids for index in text], dtype=np.int32),
        "lengths": np.array([len(text) for text in ids], dtype=np.int32),
    }
    extra = {name: asked.pop(name) for name in ("spans", "tokens") if name in asked}
    return save({**tensors, **extra}, metadata={"question": json.dumps({"want": "hidden", **asked})})


def error(response: httpx.Response) -> str:
    return str(response.json()["error"])


def test_health_needs_no_token_and_all_else_does(server: ServeProcess) -> None:
    with asking(server.address, {}) as stranger:
        assert stranger.get("/health").json() == {"status": "ok"}
        for method, path in (
            ("GET", "/models"),
            ("GET", "/metrics"),
            ("POST", SCORE),
            ("GET", "/docs"),
            ("GET", "/openapi.json"),
        ):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": f"Basic {TOKEN}"},
                {"Authorization": "Bearer"},
            ):
                found = stranger.request(method, path, headers=headers)
                assert (found.status_code, "token" in error(found)) == (401, True)
                assert found.headers["www-authenticate"] == "Bearer"
    assert not any(TOKEN in line for line in server.lines)


def test_a_stranger_cannot_hold_a_connection_with_a_body_that_never_ends(server: ServeProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=600) as raw:
        raw.sendall(f"POST {SCORE} HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n".encode())
        found = b"".join(iter(lambda: raw.recv(1000), b""))  # until it is closed
    assert found.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in found.lower()


def test_facts_head_and_several_names(client: httpx.Client) -> None:
    from opd.models import load_model
    from opd.models.tokenizers import fingerprint

    first, other, spelling = client.get("/models").json()["models"]
    assert [first["name"], other["name"], spelling["name"]] == ["arithmetic", "other", "spelling"]
    assert first["weights"] == other["weights"] != spelling["weights"]
    model = load_model("tiny/arithmetic")
    assert (first["tokenizer"], tuple(first["stop_ids"])) == (fingerprint(model.tokenizer), model.stop_ids)
    assert first["limits"] == {"bytes": 20000, "tokens": 600, "sequences": 8}
    found = client.get(f"/models/arithmetic/head/{first['head']}")
    assert found.headers["x-opd-weights"] == first["weights"]
    assert np.array_equal(load(found.content)["weight"], model.head.weight.detach().numpy())
    assert client.get(f"/models/arithmetic/head/{'0' * 64}").status_code == 404


def test_answers_of_every_kind_and_both_ways_to_ask(client: httpx.Client) -> None:
    ids = [[3, 4, 5, 6], [7, 8, 9]]
    hidden = load(client.post(SCORE, content=question(ids)).content)["hidden"]
    plain = client.post(SCORE, json={"want": "hidden", "ids": ids})
    assert hidden.shape[0] == 5
    assert np.array_equal(hidden, load(plain.content)["hidden"])
    stop = client.get("/models/arithmetic").json()["stop_ids"]
    logprobs = load(client.post(SCORE, content=question(ids, want="logprobs", stop_ids=stop)).content)["logprobs"]
    given = np.array([[4, 9], [5, 9], [6, 9], [8, 4], [9, 4]], dtype=np.int32)
    more = load(client.post(SCORE, content=question(ids, want="logprobs", stop_ids=stop, tokens=given)).content)[
        "logprobs"
    ]
    np.testing.assert_allclose(more[:, 0], logprobs, atol=1e-5)
    top = load(client.post(SCORE, content=question(ids, want="topk", k=5, stop_ids=stop)).content)
    mass = np.exp(top["logprobs"].astype(np.float64)).sum(-1) + np.exp(top["tail"])
    np.testing.assert_allclose(mass, 1, atol=1e-4)
    assert np.isfinite(top["stop"]).all()
    spans = np.array([[0, 2, 4]], dtype=np.int32)
    assert np.array_equal(
        load(client.post(SCORE, content=question(ids, spans=spans, exact=True)).content)["hidden"].shape,
        [2, hidden.shape[1]],
    )


def broken_frames() -> dict[str, bytes]:
    whole = question([[3, 4, 5]])
    header = json.dumps({"ids": {"dtype": "I32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    return {
        "nothing": b"",
        "noise": bytes(range(256)),
        "truncated": whole[:-2],
        "half a header": whole[:20],
        "a header longer than the body": struct.pack("<Q", 2**60) + whole[8:],
        "offsets past the end": struct.pack("<Q", len(header)) + header + b"\0" * 4,
        "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    }


@pytest.mark.parametrize("name", broken_frames())
def test_broken_frames(client: httpx.Client, name: str) -> None:
    found = client.post(SCORE, content=broken_frames()[name])
    assert (found.status_code, "safetensors" in error(found)) == (400, True)


IMPOSSIBLE: list[tuple[str, Any, int, str]] = [
    ("an id outside", {"ids": [[3, 10**6]]}, 422, "outside the vocabulary"),
    ("a negative id", {"ids": [[3, -1]]}, 422, "greater than or equal to 0"),
    ("a huge id", {"ids": [[3, 2**40]]}, 422, "less than or equal"),
    ("text for ids", {"ids": "abc"}, 422, "list"),
    ("a path", {"ids": [[3]], "path": "/etc/passwd"}, 422, "path"),
    ("another want", {"ids": [[3]], "want": "weights"}, 422, "want"),
    ("no texts", {"ids": []}, 422, "no text"),
    ("an empty text", {"ids": [[]]}, 422, "tokens"),
    ("a span before the first token", {"ids": [[3, 4]], "spans": [[[0, 2]]]}, 422, "spans"),
    ("a span past the end", {"ids": [[3, 4]], "spans": [[[1, 9]]]}, 422, "spans"),
    ("spans that overlap", {"ids": [[3, 4, 5]], "spans": [[[1, 3], [2, 3]]]}, 422, "spans"),
    ("topk without k", {"ids": [[3, 4]], "want": "topk"}, 422, "`k`"),
    ("too many ids", {"ids": [[3, 4]], "want": "topk", "k": 10**6}, 422, "at most"),
    ("a temperature of none", {"ids": [[3, 4]], "want": "logprobs", "temperature": 0}, 422, "temperature"),
    ("an id that is padding here", {"ids": [[3, 9]], "want": "logprobs", "size": 5}, 422, "vocabulary of 5 ids"),
    ("a stop id that is padding", {"ids": [[3, 4]], "want": "logprobs", "size": 5, "stop_ids": [9]}, 422, "vocabulary of 5"),
    ("no tokens at all", {"ids": [[3, 4]], "want": "logprobs", "tokens": []}, 422, "`tokens` has the shape"),
    ("a text that is too long", {"ids": [[3] * 513]}, 422, "the model reads 1 to"),
    ("too many tokens", {"ids": [[3] * 90] * 7}, 413, "at most 600"),
    ("too many texts", {"ids": [[3, 4]] * 9}, 413, "at most 8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "status", "says"), [case[1:] for case in IMPOSSIBLE], ids=[case[0] for case in IMPOSSIBLE]
)
def test_questions_that_cannot_be_answered(client: httpx.Client, body: Any, status: int, says: str) -> None:
    found = client.post(SCORE, json={"want": "hidden", **body})
    assert (found.status_code, says in error(found)) == (status, True)


@pytest.mark.parametrize("content", [b"{", b"[" * 900, b'{"ids": NaN', b"\xff\xfe", b"1" * 5000])
def test_broken_json(client: httpx.Client, content: bytes) -> None:
    found = client.post(SCORE, content=content, headers={"Content-Type": "application/json"})
    assert found.status_code in (400, 422)
    assert error(found)


LIMITS = RequestLimits()  # as a server has them unless told otherwise


def json_of(ids: bytes, *more: bytes) -> bytes:
    return b'{"want": "hidden", "ids": [%s]%s}' % (ids, b"".join(more))


def frame_of(**tensors: np.ndarray) -> bytes:
    return save(tensors, metadata={"question": '{"want": "hidden"}'})


OVERSIZED: dict[str, tuple[str, Callable[[], bytes]]] = {  # a list takes three bytes here
    "empty lists": ("application/json", lambda: json_of(b",".join([b"[]"] * 600_000))),
    "lists in lists": ("application/json", lambda: json_of(b",".join([b"[[]]"] * 400_000))),
    "numbers": ("application/json", lambda: json_of(b"[" + b"7," * 800_000 + b"7]")),
    "empty spans": ("application/json", lambda: json_of(b"[3]", b', "spans": [[', b",".join([b"[]"] * 600_000), b"]]")),
    "keys": ("application/json", lambda: json_of(b"[3]", *(b', "%d": 1' % number for number in range(100_000)))),
    "objects": ("application/json", lambda: json_of(b",".join([b"{}"] * 600_000))),
    "empty texts": (FRAME, lambda: frame_of(ids=np.zeros(0, np.int32), lengths=np.zeros(600_000, np.int32))),
    "ids": (FRAME, lambda: frame_of(ids=np.zeros(600_000, np.int32), lengths=np.array([600_000]))),
    "rows of spans": (
        FRAME,
        lambda: frame_of(
            ids=np.zeros(3, np.int32), lengths=np.array([3]), spans=np.full((300_000, 3), [0, 1, 1], np.int32)
        ),
    ),
    "tensors": (FRAME, lambda: frame_of(**{f"t{number}": np.zeros(0, np.int32) for number in range(2_000)})),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERSIZED)
def test_what_would_be_costly_to_parse_is_counted_first(name: str) -> None:
    """Parsing 15 MB of empty lists took 44 CPU-seconds and 3.4 GB, so that much smaller bodies show it."""
    kind, make = OVERSIZED[name]
    body = make()
    began = time.process_time()
    with pytest.raises(WireError) as refused:
        read_question(body, kind, LIMITS, rows=100, size=100, context=512)
    assert (refused.value.status, "at most" in str(refused.value)) == (413, True)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    "body",
    [
        json_of(b"[" + b'"a",' * 600_000 + b"1]"),
        json_of(b"[3]", b', "spans": [[', b",".join([b"[]"] * 250_000), b"]]"),
        json_of(b"[3]", b', "tokens": [', b",".join([b'"a"'] * 250_000), b"]"),
        json_of(b"[3]", b', "stop_ids": [', b",".join([b"-1"] * 250_000), b"]"),
    ],
    ids=["ids", "spans", "tokens", "stop ids"],
)
def test_the_first_of_many_mistakes_is_enough(body: bytes) -> None:
    """A list of half a million mistakes took two CPU-seconds and half a gigabyte."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as refused:
            read_question(body, "application/json", LIMITS, rows=100, size=100, context=512)
        assert refused.value.status == 422
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_question_as_large_as_the_limits_is_read() -> None:
    """With every token in a span of its own, and asked about by id."""
    limits, length = RequestLimits(tokens=4096, sequences=128), 32
    tokens, texts = limits.tokens, limits.sequences
    assert texts * length == tokens
    spans = [[[at, at + 1] for at in range(1, length)]] * texts
    asked = {"want": "logprobs", "ids": [[3] * length] * texts, "spans": spans, "stop_ids": [1] * 1024}
    asked["tokens"] = [[4]] * (texts * (length - 1))
    found = read_question(json.dumps(asked).encode(), "application/json", limits, 100, 100, 512)
    assert (found.length, found.count) == (tokens, texts * (length - 1))


def crafted(lengths: list[int], **shapes: list[int]) -> bytes:
    """A frame whose tensors have other shapes than a library would write."""
    numbers = np.array(lengths, dtype="<i8").tobytes()
    header: dict[str, Any] = {"__metadata__": {"question": '{"want": "logprobs"}'}}
    header["lengths"] = {"dtype": "I64", "shape": [len(lengths)], "data_offsets": [0, len(numbers)]}
    for name, shape in shapes.items():
        header[name] = {"dtype": "I32", "shape": shape, "data_offsets": [len(numbers)] * 2}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


def test_crafted_frames_are_rejected(client: httpx.Client) -> None:
    """Shapes that hold nothing and have no end, more dimensions than an array may have, lengths whose sum overflows."""
    for body, status in (
        (crafted([], ids=[0, 2**62]), 400),
        (crafted([], ids=[2**62, 0]), 400),
        (crafted([], ids=[0], tokens=[0, 2**62]), 400),
        (crafted([], ids=[0], spans=[0, 2**62]), 400),
        (crafted([], ids=[0] * 70), 400),
        (crafted([], ids=[0, 2]), 422),
        (crafted([2**62] * 4, ids=[0]), 422),
        (crafted([0] * 9, ids=[0]), 413),
    ):
        found = client.post(SCORE, content=body)
        assert (found.status_code, len(error(found)) > 0) == (status, True), body


def test_frames_with_wrong_tensors(client: httpx.Client) -> None:
    floats = save(
        {"ids": np.zeros(3, dtype=np.float32), "lengths": np.array([3], dtype=np.int32)},
        metadata={"question": '{"want": "hidden"}'},
    )
    short = save(
        {"ids": np.zeros(3, dtype=np.int32), "lengths": np.array([2], dtype=np.int32)},
        metadata={"question": '{"want": "hidden"}'},
    )
    alone = save({"ids": np.zeros(3, dtype=np.int32)}, metadata={"question": '{"want": "hidden"}'})
    wrapped = save(
        {"ids": np.zeros(3, dtype=np.int32), "lengths": np.array([5, -2], dtype=np.int32)},
        metadata={"question": '{"want": "hidden"}'},
    )
    nothing = save({"ids": np.zeros(3, dtype=np.int32), "lengths": np.array([3], dtype=np.int32)})
    for content in (
        floats,
        short,
        alone,
        wrapped,
        nothing,
        question([[3, 4]], spans=np.array([[5, 1, 2]], dtype=np.int32)),
    ):
        found = client.post(SCORE, content=content)
        assert (found.status_code, len(error(found)) > 0) == (422, True)


def test_unknown_models_paths_methods_and_types(client: httpx.Client) -> None:
    assert "arithmetic, other, spelling" in error(client.post("/models/nobody/score", content=b"x"))
    assert client.get("/models/nobody").status_code == 404
    assert client.get("/models/..%2f..%2fetc%2fpasswd").status_code == 404
    assert client.get("/nowhere").status_code == 404
    assert client.get(SCORE).status_code == 405
    assert client.post(SCORE, content=b"x", headers={"Content-Type": "application/x-python-pickle"}).status_code == 415


def test_bodies_that_are_too_large_whatever_their_headers_say(client: httpx.Client, server: ServeProcess) -> None:
    assert client.post(SCORE, content=b"x" * 20001).status_code == 413
    chunked = client.post(SCORE, content=(b"x" * 4000 for _ in range(8)))
    assert (chunked.status_code, "20000" in error(chunked)) == (413, True)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            f"POST {SCORE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 99999999999\r\n\r\n".encode()
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.slow
def test_slow_requests_are_ended(server: ServeProcess, client: httpx.Client) -> None:
    body = f"POST {SCORE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 50\r\n\r\nabc"
    with contextlib.ExitStack() as stack:  # all wait at once
        connections = []
        for sent in ("", "POST /models HTTP/1.1\r\nHost: x\r\nX: ", body):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=600))
            raw.sendall(sent.encode())
            connections.append(raw)
        for raw in connections:
            found = b"".join(iter(functools.partial(raw.recv, 1000), b""))
            assert found.startswith(b"HTTP/1.1 408")
            assert b'{"error"' in found
    assert client.get("/health").status_code == 200


def test_what_is_no_http_gets_400(server: ServeProcess) -> None:
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 3 + b"\r\n\r\n",
        b"GET / HTTP/1.1 X\r\n\r\n",
    ):
        assert b'{"error": "Invalid HTTP' in _told(server, sent, 400)


def test_heads_are_bounded_however_they_come(server: ServeProcess) -> None:
    """By size and by the number of headers: at once, unfinished, or after another request."""
    first, few = b"GET /health HTTP/1.1\r\nHost: x\r\n", b"".join(b"a%d: 1\r\n" % number for number in range(99))
    many = few + b"a: 1\r\n"
    long = b"X: " + b"y" * 17_000
    assert b"HTTP/1.1 200" in _told(server, first + few + b"\r\n", 200)
    for sent in (first + many + b"a", first + many + b"\r\n", first + long, first + long + b"\r\n\r\n"):
        assert b'{"error": "the request has too many headers, or too long ones; at most 100' in _told(server, sent, 431)
    with socket.create_connection(("127.0.0.1", server.port), timeout=600) as raw:
        raw.sendall(first + b"\r\n" + first + many + b"\r\n")
        found = b"".join(iter(functools.partial(raw.recv, 1000), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", found) == [b"200", b"431"]


def _told(server: ServeProcess, sent: bytes, status: int) -> bytes:
    """What a client reads that has sent all it will send."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=600) as raw:
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        found = b"".join(iter(functools.partial(raw.recv, 1000), b""))
    assert found.startswith(b"HTTP/1.1 %d" % status), found
    return found


def test_half_a_request_is_an_error_and_a_complete_one_is_answered(server: ServeProcess) -> None:
    head = f"POST {SCORE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    body = json.dumps({"want": "logprobs", "ids": [[3, 4, 5]]}).encode()
    for rest in (
        b"",
        b"Content-Length: %d\r\n\r\n" % (len(body) + 1) + body,
        b"Transfer-Encoding: chunked\r\n\r\n9\r\nab",
    ):
        assert b'{"error": "the request ended early' in _told(server, head.encode() + rest, 400)
    assert b"logprobs" in _told(server, head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body, 200)


def test_metrics_and_shared_forward_passes(client: httpx.Client, server: ServeProcess) -> None:
    def metric(name: str) -> float:
        return sum(
            float(line.split()[-1]) for line in client.get("/metrics").text.splitlines() if line.startswith(name)
        )

    asked, passes = metric("opd_questions_total"), metric("opd_forward_passes_total")
    found: list[np.ndarray] = []

    def ask(number: int) -> None:
        with asking(server.address) as own:
            found.append(load(own.post(SCORE, content=question([[3 + number % 4, 4, 5]])).content)["hidden"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24
    assert metric("opd_questions_total") == asked + 24
    assert 0 < metric("opd_forward_passes_total") - passes <= 24
    assert httpx.get(server.address + "/models", trust_env=False, timeout=600).status_code == 401
    assert metric('opd_requests_total{code="401"}') > 0
    assert metric("opd_tokens_total") > 0


@pytest.mark.safety
def test_sigterm_answers_accepted_requests_and_rejects_later_ones() -> None:
    body = question([[3, 4, 5]])
    head = f"POST {SCORE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    with (
        ServeProcess("tiny/arithmetic", options=("--request-seconds", "600", "--drain-seconds", "600")) as server,
        asking(server.address) as client,
        socket.create_connection(("127.0.0.1", server.port), timeout=600) as raw,
    ):
        raw.sendall(head.encode() + body[:10])
        while "opd_open_requests 2" not in client.get("/metrics").text:
            time.sleep(0.02)
        server.process.terminate()
        while client.get("/health").json() != {"status": "draining"}:
            time.sleep(0.02)
        refused = client.get("/models")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        raw.sendall(body[10:])
        assert raw.recv(100).startswith(b"HTTP/1.1 200")
        assert server.ended() == 0


@pytest.mark.safety
def test_a_token_is_made_if_none_is_given_and_listening_beyond_loopback_warns() -> None:
    with ServeProcess("tiny/arithmetic", token_env=None, options=("--host", "0.0.0.0")) as server:
        token = next(line.split()[-1] for line in server.lines if "token: " in line)
        assert len(token) >= 40
        assert any("WARNING" in line and "encryption" in line for line in server.lines)
        with asking(server.address, {"Authorization": f"Bearer {token}"}) as client:
            assert client.get("/models").status_code == 200


@pytest.mark.safety
def test_a_thousand_at_once_are_answered() -> None:
    import asyncio

    async def ask_all(address: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=1000, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=address, headers=SEEN, timeout=1800, limits=limits, trust_env=False
        ) as client:
            bodies = [question([[3 + number % 5, 4, 5, 6]]) for number in range(1000)]
            return await asyncio.gather(*(client.post(SCORE, content=body) for body in bodies))

    allow_open_files(CONNECTIONS + 1024)  # this process has as many
    with ServeProcess("tiny/arithmetic", options=("--request-seconds", "600")) as server:
        found = asyncio.run(ask_all(server.address))
        assert {response.status_code for response in found} == {200}
        first = [load(response.content)["hidden"] for response in found[:5]]
        for number, response in enumerate(found):
            np.testing.assert_allclose(load(response.content)["hidden"], first[number % 5], atol=1e-4)
        with asking(server.address) as client:
            metrics = client.get("/metrics").text
        passes = int(re.findall(r'opd_forward_passes_total\{model="arithmetic"\} (\d+)', metrics)[0])
        assert passes < 1000  # those that waited together shared them
        assert server.terminate() == 0


def test_names() -> None:
    assert served_names(["tiny/arithmetic", "maths=a/b=c"], ["x=dir"]) == {
        "arithmetic": "tiny/arithmetic",
        "maths": "a/b=c",
        "x": "dir",
    }
    for models, adapters, says in (
        (["a/b", "c/b"], [], "two models are called 'b'"),
        (["ma ths=x"], [], "letters, digits"),
        ([], [], "nothing to serve"),
        ([], ["dir"], "NAME=DIRECTORY"),
    ):
        with pytest.raises(UserError, match=says):
            served_names(models, adapters)
