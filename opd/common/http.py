"""A small HTTP client for teachers and judges on other machines.

    remote = Remote("http://127.0.0.1:8200", token_env="OPD_TOKEN")
    remote.json("POST", "/v1/score", {"text": "…"})                     # an answer in JSON
    remote.bytes("POST", "/score", body, accept="application/octet-stream")   # an answer in bytes, and its headers
    remote.map([lambda: remote.json("GET", "/a"), …])                   # several at once, answers in order

Requests to a server that is unreachable, busy or restarting are retried with growing pauses, until the patience runs out. With
several servers of the same models, a request goes to the least busy one, and unanswered requests go to the others. The token comes
from an environment variable and is never written anywhere. httpx is imported when the first question is asked.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from opd.common.errors import OpdError, RecipeError, RemoteError, ServerAway
from opd.common.short_forms import SHORT_FORMS
from opd.common.text import first_line, plain
from opd.registry import Address

if TYPE_CHECKING:
    import httpx


T = TypeVar("T")
Body = bytes  # because the class has a method `bytes`
AWAY = {408, 425, 429, 502, 503, 504}  # try again later: the server is busy, ending or starting
BUSY = {408, 425, 429}  # the part of these that shows that the server is running
FIRST, LONGEST = 0.25, 15.0  # seconds between two tries
SLICE = 0.5  # seconds between checks whether a wait should end
QUOTED = 600  # characters of an answer that an error quotes
UNSAFE = re.compile(r"//[^\s'\"]*@")  # name and password in an address
LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")


def to_stderr(line: str) -> None:
    print(f"opd: {plain(line)}", file=sys.stderr, flush=True)


def nothing() -> None:
    """Never ends a wait."""


def address_of(text: str) -> str:
    """A valid address: http or https, a host, no user name or password."""
    shown = plain(UNSAFE.sub("//…@", text))
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise RecipeError(f"address {shown!r}: its port is not valid. Example: http://127.0.0.1:8200.") from None
    wrong = [
        port == 0 and "port 0 is not valid",
        parts.scheme not in ("http", "https") and "it has to begin with http:// or https://",
        not parts.hostname and "it names no host",
        (parts.username or parts.password) is not None and "it has a password: use `token_env` instead",
        bool(parts.query or parts.fragment) and "it has to end with a path",
        bool(re.search(r"[\s\x00-\x1f]", text)) and "it contains whitespace",
    ]
    for reason in filter(None, wrong):
        raise RecipeError(f"address {shown!r}: {reason}. Example: http://127.0.0.1:8200.")
    return text.rstrip("/")


def _is_a_variable(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,199}", value):
        raise ValueError("expected the name of an environment variable that holds the token, never the token itself")
    return value


def _apart(values: list[str]) -> list[str]:
    if len(set(values)) < len(values):
        raise ValueError("an address is listed twice")
    return values


HttpAddress = Annotated[Address, AfterValidator(address_of)]
Addresses = Annotated[
    list[HttpAddress], Field(min_length=1, max_length=64), AfterValidator(_apart), SHORT_FORMS["teachers.NAME.address"]
]
Variable = Annotated[str, AfterValidator(_is_a_variable)]


def token_of(variable: str | None, address: str) -> str | None:
    """The token that an environment variable holds."""
    if variable is None:
        return None
    try:
        token = os.environ.get(_is_a_variable(variable), "").strip()
    except ValueError as error:
        raise RemoteError(f"token_env: {error}.") from None
    if not token:
        raise RemoteError(f"token_env {variable!r}: this variable is not set. Put the token of {address} into it.")
    if not (token.isascii() and token.isprintable()):
        raise RemoteError(
            f"token_env {variable!r}: its value is not a token: tokens have only visible ASCII characters."
        )
    return token


@dataclass(eq=False)
class OneServer:
    """One of several servers that serve the same models."""

    address: str
    client: httpx.Client | None = None
    load: int = 0  # of requests in progress
    done: int = 0  # of all requests
    away: bool = False
    again: float = 0.0  # when to try it again
    used: bool = False  # since it was last checked
    rejected: bool = False  # it came back with other models


class Remote:
    """`patience`: seconds to wait for an unreachable server; `retries`: retries of a request that fails with status 500.

    `say` gets a message when a wait begins and ends; `check` is called during waits and may raise to end them. With several
    addresses each gets `concurrency` requests at once.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        token_env: str | None = None,
        *,
        timeout: float = 120.0,
        retries: int = 4,
        patience: float = 600.0,
        concurrency: int = 8,
        say: Callable[[str], None] = to_stderr,
        check: Callable[[], None] = nothing,
    ) -> None:
        addresses = [address_of(one) for one in ([address] if isinstance(address, str) else address)]
        self.places = [OneServer(one) for one in addresses]
        self._only: OneServer | None = None
        if importlib.util.find_spec("httpx") is None:
            raise RemoteError(
                f"requests to {self.address} need httpx, which is not installed: pip install 'opd[remote]'."
            )
        self._token = token_of(token_env, self.address)
        self._timeout, self._retries, self._patience = timeout, retries, patience
        self.concurrency, self._say, self._check = concurrency * len(self.places), say, check
        self._lock, self._here = threading.Lock(), threading.local()
        self._waiting = False
        self.returns = 0  # how often the server came back

    @property
    def address(self) -> str:
        places = self.places if self._only is None else [self._only]
        return ", ".join(place.address for place in places)

    def json(self, method: str, path: str, body: Any = None, load: int = 1) -> Any:
        found, _ = self.bytes(method, path, body, accept="application/json", load=load)
        try:
            return json.loads(found)
        except ValueError:
            raise self._error(
                method, path, f"something other than JSON: {self._quoted(found)}", "Is it the right server?"
            ) from None

    def bytes(
        self, method: str, path: str, body: Any = None, accept: str = "application/octet-stream", load: int = 1
    ) -> tuple[bytes, Mapping[str, str]]:
        """The body and headers of the answer. Bytes are sent as they are, everything else as JSON.

        `load`: the amount of work, for balancing between servers.
        """
        headers = {"Accept": accept}
        content = body
        if body is not None:
            binary = isinstance(body, (bytes, bytearray, memoryview))
            headers["Content-Type"] = "application/octet-stream" if binary else "application/json"
            content = bytes(body) if binary else json.dumps(body).encode()
        response = self._ask(method, path, content, headers, load)
        if not response.is_success:
            hint = {401: "Set the variable that `token_env` names to its token.", 404: "Is the name right?"}
            raise self._error(
                method,
                path,
                f"{response.status_code}: {self._quoted(response.content)}",
                hint.get(response.status_code, "Fix the request or the server."),
            )
        return response.content, response.headers

    def map(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Results in order, with at most `concurrency` calls at once. The first error ends all calls."""
        if len(calls) <= 1 or self.concurrency == 1:
            return [call() for call in calls]
        errors: list[BaseException] = []

        def guarded(call: Callable[[], T]) -> T:
            self._here.errors = errors
            try:
                _stop_after(errors)
                return call()
            except BaseException as error:
                errors.append(error)
                raise

        with ThreadPoolExecutor(min(self.concurrency, len(calls)), thread_name_prefix="remote") as pool:
            futures = [pool.submit(guarded, call) for call in calls]
            try:
                return [future.result() for future in futures]
            except BaseException as error:
                errors.append(error)  # Ctrl-C: waiting calls give up
                raise errors[0] from None

    def close(self) -> None:
        with self._lock:
            for place in self.places:
                if place.client is not None:
                    place.client.close()
                place.client = None

    # Several servers

    @contextmanager
    def only(self, place: OneServer) -> Iterator[None]:
        """Ask only this server, without waiting for it if there are others."""
        self._only = place
        try:
            yield
        finally:
            self._only = None

    @property
    def only_place(self) -> OneServer | None:
        """The only server that is asked now."""
        return self._only

    def check_used(self, check: Callable[[], None]) -> list[OneServer]:
        """Check each server that has answered since the last check. Returns those that are away, which cannot be checked."""
        away = []
        for place in [place for place in self.places if place.used]:
            try:
                with self.only(place):
                    check()
            except ServerAway:
                if len(self.places) == 1:
                    raise
                away.append(place)
            place.used = False
        return away

    @property
    def answered_by(self) -> OneServer | None:
        """The server that answered the last request of this thread."""
        return vars(self._here).get("place")

    def readmit(self, check: Callable[[], None]) -> None:
        """Check the servers that were away. A server that passes is used again."""
        if len(self.places) == 1 or self._only is not None:
            return
        for place in self.places:
            if not place.away or place.rejected or time.monotonic() < place.again:
                continue
            try:
                with self.only(place):
                    check()
            except ServerAway:
                continue
            except (OpdError, ValueError) as error:
                place.rejected, place.used = True, False
                self._say(f"{place.address} is back with other models and is no longer used: {first_line(error)}")

    def _pick(self, load: int) -> OneServer:
        """The server with the least work. If all are away, they are tried in turn."""
        with self._lock:
            place = self._only
            if place is None:
                known = [place for place in self.places if not place.rejected] or self.places
                here = [place for place in known if not place.away]
                place = min(here or known, key=lambda place: (place.load, place.again if place.away else place.done))
            place.load, place.done = place.load + load, place.done + load
            return place

    # Retries of one request

    def _ask(
        self, method: str, path: str, content: Body | None, headers: Mapping[str, str], load: int
    ) -> httpx.Response:
        import httpx

        wait, failures = FIRST, 0
        since: float | None = None  # when it was first found to be away
        while True:
            later, gone, place = 0.0, True, self._pick(load)
            try:
                response = self._client(place).request(method, place.address + path, content=content, headers=headers)
            except httpx.InvalidURL as error:
                raise RemoteError(f"{place.address} is not a valid address: {first_line(error)}. Correct it.") from None
            except httpx.TransportError as error:
                reason = first_line(error) or type(error).__name__
            else:
                if response.status_code < 500 and response.status_code not in AWAY:
                    self._is_back(place)
                    self._here.place = place
                    return response
                failures += response.status_code not in AWAY
                gone = response.status_code in AWAY - BUSY
                reason = f"{response.status_code}: {self._quoted(response.content)}"
                later = _retry_after(response.headers)
            finally:
                with self._lock:
                    place.load -= load
            if gone and self._is_away(place, reason):
                continue
            since = since or time.monotonic()
            waited = time.monotonic() - since
            if failures > self._retries:
                raise self._error(method, path, reason, "The server fails to answer this request: see its log.")
            if waited >= self._patience or (self._only is not None and len(self.places) > 1):
                advice = f"Retried for {waited:.0f} s. Is it running? Raise the patience if it is slow."
                raise ServerAway(str(self._error(method, path, reason, advice)))
            self._wait_begins(reason)
            self._sleep(min(max(wait, later), max(self._patience - waited, FIRST)))
            wait = min(wait * 2, LONGEST)

    def _client(self, place: OneServer) -> httpx.Client:
        import httpx

        with self._lock:
            if place.client is None:
                host, most = urlsplit(place.address).hostname or "", self.concurrency
                place.client = httpx.Client(
                    headers={} if self._token is None else {"Authorization": f"Bearer {self._token}"},
                    timeout=httpx.Timeout(self._timeout, connect=min(self._timeout, 10.0), pool=None),
                    limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
                    trust_env=not LOOPBACK.fullmatch(host),  # a proxy cannot reach what listens here
                    follow_redirects=False,  # the token is only for this address
                )
            return place.client

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._check()
            _stop_after(vars(self._here).get("errors", ()))
            time.sleep(min(left, SLICE))

    def _is_away(self, place: OneServer, reason: str) -> bool:
        """Whether other servers can take its work."""
        with self._lock:
            first, place.away = not place.away, True
            place.again = time.monotonic() + LONGEST
            others = not all(other.away or other.rejected for other in self.places)
        if first and others:
            self._say(f"{place.address} is unreachable ({reason}); using the others")
        return others and self._only is None

    def _wait_begins(self, reason: str) -> None:
        with self._lock:
            first, self._waiting = not self._waiting, True
        if first:
            self._say(
                f"waiting for {self.address} ({reason}); continuing when it is back, for up to {self._patience:g} s"
            )

    def _is_back(self, place: OneServer) -> None:
        place.used = True
        if not place.away and not self._waiting:
            return
        with self._lock:
            first = place.away or self._waiting
            if place.away:
                place.done = max(other.done for other in self.places)  # it has been checked
            place.away = self._waiting = False
            self.returns += first
        if first:
            self._say(f"{place.address} is back")

    def say(self, line: str) -> None:
        self._say(line)

    def _error(self, method: str, path: str, found: str, advice: str) -> RemoteError:
        return RemoteError(f"{self.address}: {method} {plain(path, 200)} was answered with {found}. {advice}")

    def _quoted(self, body: Body) -> str:
        """The message of a server, without the token in case it repeats it."""
        text = body[: 4 * QUOTED].decode("utf-8", "replace")
        return plain(text if self._token is None else text.replace(self._token, "…"), QUOTED) or "nothing"


def _stop_after(errors: Sequence[BaseException]) -> None:
    if errors:
        raise RemoteError("cancelled, because another request failed")


def _retry_after(headers: Mapping[str, str]) -> float:
    found = headers.get("retry-after", "")
    return min(float(found), LONGEST) if found.isdigit() else 0.0


# --- The Hugging Face hub: whether it answers, and what its client raises if it does not ---
#
# The client tries for half a minute per file before it says that there is no network. Asking once, briefly, says so at once.


HUB_PATIENCE = 5.0  # seconds for one small answer


def hub_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """The errors that the client raises: its own are of the first two kinds; those of its HTTP library have another base class."""
    from huggingface_hub.errors import HfHubHTTPError

    return OSError, ValueError, HfHubHTTPError.__bases__[0], *others


def hub_unreachable() -> str | None:
    """Why the hub does not answer, or None if it does."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _no_answer(constants.ENDPOINT)


@cache
def _no_answer(endpoint: str) -> str | None:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=HUB_PATIENCE)
    except hub_errors() as error:
        return f"no answer from {endpoint}: {first_line(error)}"
    return None
