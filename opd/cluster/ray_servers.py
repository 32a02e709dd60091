"""`opd serve` below a process that Ray has started: it goes with it, and is there again at the same address."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from urllib.parse import urlsplit

from opd.cluster.ray_nodes import free_port, node_address
from opd.cluster.served_stage import TOKEN, served_name

SET_PDEATHSIG = 1
STARTS = 2  # of a server that ends by itself: the port may still be that of one which was killed
PAUSE = 1.0  # seconds between them
WORDS = 4000  # bytes of what it said last
MOVED = -2  # in place of an exit code: this process was started again on another machine


class ServerWorker:
    """Two calls at once: `wait` lasts as long as the server. `host`: where it listens; None: on its machine's own address.
    `commits`: of models on the hub.
    """

    def __init__(
        self,
        models: Sequence[str],
        token: str,
        device: str,
        dtype: str,
        host: str | None = None,
        commits: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._host = host
        names = [f"{served_name(model)}={model}" for model in models]
        self._command = [sys.executable, "-m", "opd", "serve", *names, "--token-env", TOKEN]
        self._command += ["--device", device, "--dtype", dtype]
        for model in models:
            if model in commits:
                self._command += ["--revision", f"{served_name(model)}={commits[model]}"]
        self._environment = {**os.environ, TOKEN: token}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 — for as long as this process lives
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def pid(self) -> int:
        return os.getpid()

    def address(self) -> str:
        """Where it could listen."""
        host = self._host or node_address()
        return f"http://{f'[{host}]' if ':' in host else host}:{free_port(host)}"

    def wait(self, address: str) -> tuple[int, str]:
        """Listen there until the server ends by itself: its exit code, and what it said last. One that is killed takes this process
        along, and Ray starts both again, with the same address.
        """
        place = urlsplit(address)
        if place.hostname != (here := self._host or node_address()):
            return MOVED, f"a server of teachers has moved from {place.hostname} to {here}"
        command, code = [*self._command, "--host", str(place.hostname), "--port", str(place.port)], 0
        for start in range(STARTS):
            if start:
                time.sleep(PAUSE)
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                stderr=self._said,
                preexec_fn=partial(_die_with, os.getpid()),  # noqa: PLW1509 — it takes no lock
            )
            code = self._process.wait()
            if self._over:
                return 0, ""
            if code < 0:
                os._exit(1)
        self._said.seek(max(self._said.seek(0, os.SEEK_END) - WORDS, 0))
        return code, self._said.read().decode(errors="replace").strip()

    def stop(self) -> None:
        """Nobody needs it any more."""
        self._over = True
        if self._process is not None:
            self._process.kill()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        os._exit(1)
