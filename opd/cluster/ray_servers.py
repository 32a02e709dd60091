"""`opd serve` below a process that Ray has started: it goes with it, and is there again at the same port."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from opd.cluster.served_stage import TOKEN, served_name

SET_PDEATHSIG = 1
STARTS = 2  # of a server that ends by itself: the port may still be that of one which was killed
PAUSE = 1.0  # seconds between them
WORDS = 4000  # bytes of what it said last


class ServerWorker:
    def __init__(self, models: Sequence[str], port: int, token: str, device: str, dtype: str) -> None:
        names = [f"{served_name(model)}={model}" for model in models]
        command = [sys.executable, "-m", "opd", "serve", *names, "--port", str(port), "--token-env", TOKEN]
        self._command = [*command, "--device", device, "--dtype", dtype]
        self._environment = {**os.environ, TOKEN: token}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 — for as long as this process lives
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=self._environment,
            stderr=self._said,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 — it takes no lock
        )

    def pid(self) -> int:
        return os.getpid()

    def wait(self) -> tuple[int, str]:
        """Until the server ends by itself: its exit code, and what it said last. One that is killed takes this process along,
        and Ray starts both again.
        """
        code = 0
        for start in range(STARTS):
            if start:
                time.sleep(PAUSE)
                self._process = self._started()
            code = self._process.wait()
            if code < 0:
                os._exit(1)
        self._said.seek(max(self._said.seek(0, os.SEEK_END) - WORDS, 0))
        return code, self._said.read().decode(errors="replace").strip()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
