"""Real `opd serve` processes on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from opd.cluster import on_ray
from opd.records import Author, Rollout

TOKEN_ENV = "OPD_TEST_TOKEN"
TOKEN = "a-token-for-tests"


def free_port() -> int:
    return on_ray.free_port("127.0.0.1")


class ServeProcess:
    """`ServeProcess("tiny/arithmetic")`; `.kill()` is kill -9, `.start()` begins again at the same port."""

    def __init__(self, *models: str, options: tuple[str, ...] = (), token_env: str | None = TOKEN_ENV) -> None:
        self.models, self.options, self.token_env = models, options, token_env
        self.port = free_port()  # nobody else's while it is down
        self.lines: list[str] = []
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, wait: bool = True) -> None:
        token = [] if self.token_env is None else ["--token-env", self.token_env]
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "opd.cli",
                "serve",
                *self.models,
                "--port",
                str(self.port),
                *token,
                "--device",
                "cpu",
                *self.options,
            ],
            env={**os.environ, TOKEN_ENV: TOKEN, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        if wait:
            self.wait()

    def _read(self, process: Any) -> None:
        for line in process.stderr:
            self.lines.append(line)
            if found := re.search(r"serving .* at http://.*:(\d+)", line):
                self.port = int(found[1])
                self._serving.set()
        self._serving.set()

    def wait(self) -> None:
        self._serving.wait(600)
        assert self.process.poll() is None, "".join(self.lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def terminate(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(600)


def rollouts(size: int, lengths: list[tuple[int, int]], seed: int = 0) -> list[Rollout]:
    """Rollouts of random ids, with prompts and responses of these lengths."""
    rng = np.random.default_rng(seed)
    made = []
    for number, (prompt, response) in enumerate(lengths):
        ids = rng.integers(0, size, prompt + response).astype(np.int32)
        zeros = np.zeros(response, dtype=np.float32)
        made.append(
            Rollout(
                f"r{number}", f"p{number}", 0, 0, "arithmetic", "student", ids[:prompt], ids[prompt:],
                np.full(response, Author.STUDENT, dtype=np.uint8), zeros, zeros, zeros, np.zeros(response, dtype=np.int32), "length",
            )
        )  # fmt: skip
    return made
