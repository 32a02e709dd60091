"""Interpreters for sampler processes, started early because their imports take seconds.

They wait on sockets until a stage takes them, and exit when the trainer ends, even if it is killed. This module does not
import torch, since a run starts the interpreters before it imports torch itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

BOOT = (
    "import json, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.path[:] = json.loads(sys.argv[1]); "
    "from opd.engines.alongside import main; main(int(sys.argv[2]))"
)


class Interpreter:
    """A waiting process. `line`: the socket to it. `printed`: its stdout and stderr."""

    def __init__(self, threads: int) -> None:
        path = [os.path.abspath(entry) for entry in sys.path] + [str(Path(__file__).resolve().parents[2])]
        self.line, theirs = socket.socketpair()
        self.printed: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, json.dumps(path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self.printed,
                stderr=self.printed,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
                start_new_session=True,  # so that only the trainer gets Ctrl-C
            )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.line.close()
        self.printed.close()


_waiting: list[Interpreter] = []


def start_interpreters(count: int, threads: int) -> None:
    """Start as many as the next stage will take, with `threads` threads each."""
    while len(_waiting) < count:
        _waiting.append(Interpreter(threads))


def taken(threads: int) -> Interpreter:
    """Take a waiting interpreter, or start a new one."""
    try:
        return _waiting.pop()
    except IndexError:
        return Interpreter(threads)


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """End all interpreters that still wait after the block, for example because the stage could not be opened."""
    try:
        yield
    finally:
        while _waiting:
            _waiting.pop().end()
