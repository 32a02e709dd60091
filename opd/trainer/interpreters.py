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
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from opd.config import Stage

BOOT = (
    "import json, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.path[:] = json.loads(sys.argv[1]); "
    "from opd.trainer.sampler_process import main; main(int(sys.argv[2]))"
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


def wanted(stage: Stage) -> tuple[int, int]:
    """How many processes sample beside the trainer, and the threads of each."""
    count = stage.sampler.beside_trainer if stage.rollout.staleness else 0
    return count, stage.threads or max(1, (os.cpu_count() or 1) // 2 // max(1, count))


def begin_for(stage: Stage) -> None:
    """As many as this stage, which is the next one to be opened, will take."""
    count, threads = wanted(stage)
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
