"""One vLLM engine behind `vllm_server.py`: its process, if it is ours, and what is asked of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from opd.errors import RemoteError, ServerAway
from opd.remote import token_of
from opd.text import plain

SERVER = Path(__file__).with_name("vllm_server.py")
BEGIN = 60.0  # seconds for a process to say where it listens
CONNECT = 10.0  # seconds for a connection
GLANCE = 10.0  # seconds for an answer where one only looks whether an engine is there
ANSWER = 1800.0  # seconds for an answer: an engine that starts compiles, large weights take time
SILENCE = 60.0  # seconds without a line of a stream that sends one at least every five
TAIL = 2000  # characters of a log that an error quotes
TOKEN = "OPD_SAMPLER_TOKEN"
HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


class Replica:
    """An engine at an address. All errors that a restart could mend are `ServerAway`."""

    def __init__(self, address: str, token: str) -> None:
        self.address, self._token = address, token
        self.fresh = False  # whether it has the newest weights, and was seen to use them
        self.noise: float | None = None  # nats by which it differed from the trainer when it first had weights
        self.lock = threading.Lock()  # of whoever gives it weights

    def start(self) -> None:
        """Have it run; one at an address does, or not."""

    def close(self) -> None:
        """End what was started."""

    def why_gone(self) -> str:
        return ""

    def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = ANSWER
    ) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        return self._read(method, path, content, timeout=timeout)

    def put(self, version: int, file: Path, what: str = "weights") -> None:
        with file.open("rb") as content:
            self._read("PUT", f"/{what}?version={version}", content, file.stat().st_size)

    def _read(
        self,
        method: str,
        path: str,
        content: bytes | IO[bytes] | None,
        size: int | None = None,
        timeout: float = ANSWER,
    ) -> Any:
        try:
            with contextlib.closing(self._connection(timeout)) as connection:
                headers = {} if size is None else {"Content-Length": str(size)}
                with contextlib.suppress(
                    BrokenPipeError, ConnectionResetError
                ):  # it may have said why before it hung up
                    connection.request(method, path, content, {**self._headers, **headers})
                response = connection.getresponse()
                found = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._away(method, path, error) from None
        try:
            answer = json.loads(found)
        except ValueError:
            raise RemoteError(
                f"{self.address}: {method} {path} was answered with no JSON. Is it vllm_server.py?"
            ) from None
        if response.status != 200:
            reason = plain(answer.get("error", answer), 600) if isinstance(answer, dict) else plain(answer, 600)
            raise RemoteError(f"{self.address}: {method} {path} was answered with {response.status}: {reason}.")
        return answer

    def lines(self, session: str) -> Iterator[dict[str, Any]]:
        """Of a stream, until it breaks: then `ServerAway`."""
        path = f"/events?session={session}"
        try:
            with contextlib.closing(self._connection(SILENCE)) as connection:
                connection.request("GET", path, headers=self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise RemoteError(f"{self.address}: GET {path} was answered with {response.status}.")
                while line := response.readline():
                    yield json.loads(line)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._away("GET", path, error) from None
        raise self._away("GET", path, EOFError("the stream ended"))

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"}

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=CONNECT)
        connection.connect()
        connection.sock.settimeout(timeout)
        return connection

    def _away(self, method: str, path: str, error: BaseException) -> ServerAway:
        said = plain(error, 300) or type(error).__name__
        return ServerAway(f"vLLM at {self.address}: {method} {path}: {said}.{self.why_gone()}")


class OwnReplica(Replica):
    """An engine in a process that this one starts, and that ends with it, however it ends."""

    def __init__(self, python: str, devices: str | None, log: Path) -> None:
        super().__init__("", secrets.token_urlsafe(32))
        self._python, self._devices, self._log = python, devices, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        environment = engine_environment() | {TOKEN: self._token}
        environment |= {} if self._devices is None else {"CUDA_VISIBLE_DEVICES": self._devices}
        command = [self._python, str(SERVER), "--port", "0", "--token-env", TOKEN, "--child"]
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
                )  # fmt: skip
        except OSError as error:
            raise no_python(self._python, error) from None
        assert self._process.stdout is not None
        timer = threading.Timer(BEGIN, self._process.kill)
        timer.start()
        said = self._process.stdout.readline()
        timer.cancel()
        if not said:
            raise RemoteError(f"sampler: vLLM did not start.{self.why_gone()}")
        self.address = f"http://127.0.0.1:{json.loads(said)['port']}"

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the workers of its engine
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def why_gone(self) -> str:
        ended = self._process is None or self._process.poll() is not None
        tail = self._log.read_text(errors="replace")[-TAIL:] if self._log.exists() else ""
        return f" Its process has ended; the end of its log:\n{plain(tail, TAIL)}" if ended and tail else ""


def no_python(python: str, error: OSError) -> RemoteError:
    return RemoteError(f"sampler.python {python!r} cannot be started: {error.strerror}. Name the Python that has vLLM.")


def require_vllm(python: str) -> None:
    """Refuse a Python that could not start an engine. vLLM itself is not imported."""
    try:
        found = subprocess.run(
            [python, "-c", HAS_VLLM], env=engine_environment(), capture_output=True, timeout=BEGIN, check=False
        )
    except OSError as error:
        raise no_python(python, error) from None
    except subprocess.TimeoutExpired:
        raise RemoteError(f"sampler.python {python!r} has not answered within {BEGIN:g} s. Is it a Python?") from None
    if found.returncode:
        raise RemoteError(
            f"sampler.engine vllm: {python} has no vLLM. Install it there, name a Python that has it (sampler.python), or set "
            "sampler.engine: builtin."
        )


def look_at(address: list[str], token_env: str) -> list[str]:
    """Refuse engines that run already and do not take our token; found: those that are away, in words."""
    away = []
    for replica in replicas_of(address, token_env, "", [], Path()):
        try:
            replica.ask("GET", "/state", timeout=GLANCE)
        except ServerAway as error:
            away.append(f"sampler: not reachable now ({plain(error, 300)}). A run waits for it")
    return away


def engine_environment() -> dict[str, str]:
    """Ours without what a launcher of ranks has put there: an engine is none of them, and would wait for their store for ever."""
    launched = ("TORCHELASTIC_", "TORCH_ELASTIC_")
    return {name: value for name, value in os.environ.items() if name not in RANKS and not name.startswith(launched)}


def replicas_of(
    address: list[str], token_env: str, python: str, devices: list[str | None], logs: Path
) -> list[Replica]:
    """Those at addresses, or else one process for each of `devices`."""
    if address:
        return [Replica(one, token_of(token_env, one) or "") for one in address]
    return [OwnReplica(python, device, logs / f"vllm-{number}.log") for number, device in enumerate(devices)]
