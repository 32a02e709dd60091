"""Real `opd serve` processes on loopback, forked from one that has imported everything."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from multiprocessing.connection import Connection

import numpy as np
import torch

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
        from tests.support.crash import FORKS

        token = [] if self.token_env is None else ["--token-env", self.token_env]
        arguments = ["serve", *self.models, "--port", str(self.port), *token, "--device", "cpu", *self.options]
        self._said, says = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(target=_serve, args=(says, arguments), daemon=True)
        self.process.start()
        says.close()  # so that the text ends with the process
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(os.dup(self._said.fileno()),), daemon=True)
        self._reader.start()
        if wait:
            self.wait()

    def _read(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as text:
            for line in text:
                self.lines.append(line)
                if found := re.search(r"serving .* at http://.*:(\d+)", line):
                    self.port = int(found[1])
                    self._serving.set()
        self._serving.set()

    def wait(self) -> None:
        self._serving.wait(600)
        assert self.process.exitcode is None, "".join(self.lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def terminate(self) -> int:
        self.process.terminate()
        return self.ended()

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        self.process.join(600)
        assert self.process.exitcode is not None
        return self.process.exitcode


def _serve(says: Connection, arguments: list[str]) -> None:
    """`opd ARGUMENTS` in a fork of a process that has imported everything: a new interpreter costs four seconds."""
    from opd import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(says.fileno(), 2)
    says.close()
    os.environ |= {TOKEN_ENV: TOKEN, "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    sys.argv = ["opd", *arguments]
    cli.main()


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
