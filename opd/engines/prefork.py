"""Interpreters for sampler processes, begun before anybody knows what they will sample with: importing takes them seconds.

They wait here until a stage takes them, on sockets: when the trainer is gone, however that happened, they end. Nothing in this module
imports torch, since a run begins them before it imports that itself.
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
    """`line`: to it. `printed`: what it says on stdout and stderr."""

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
                start_new_session=True,  # Ctrl-C is for the trainer
            )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.line.close()
        self.printed.close()


_waiting: list[Interpreter] = []


def start_interpreters(count: int, threads: int) -> None:
    """As many as the stage that is opened next will take, each with so many threads."""
    while len(_waiting) < count:
        _waiting.append(Interpreter(threads))


def taken(threads: int) -> Interpreter:
    """One that waits; else another."""
    try:
        return _waiting.pop()
    except IndexError:
        return Interpreter(threads)


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """Behind this nobody waits any more, also where the stage that would have taken them could not be opened."""
    try:
        yield
    finally:
        while _waiting:
            _waiting.pop().end()
