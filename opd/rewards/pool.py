"""Worker processes that can be killed: a reward that hangs costs one sample, never the run. No threads, no signals.

`kind` says what a pool's workers stand behind: the walls of a sandbox, or none; `fork`: they are forks of this process. Workers start when first needed, stay, and
end with this process; answers that may do harm are rewarded in a fork of their worker (`worker`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from opd import sandbox
from opd.rewards import launch
from opd.rewards.callables import RewardFunction
from opd.rewards.protocol import READY, Reply, failure, read_reply
from opd.sandbox.memory import resident
from opd.types import RewardResult

START = 120.0  # seconds for a worker to start or to load a reward
LONGEST_REPLY = 1 << 20
TRIES = 2  # workers for one sample, if the first one dies with it
SLACK = 10.0  # seconds beyond twice its limit after which a worker that keeps the time itself is given up
TICK = 0.2  # seconds between two looks at the memory of workers behind walls
log = logging.getLogger("opd.rewards")


@dataclass
class Errand:
    """One sample to reward. `own_time`: the worker forks and keeps the limit itself."""

    message: bytes
    bounds: tuple[float, float]
    limit: float
    own_time: bool = True
    tries: int = 0
    begun: bool = False
    reply: Reply | None = None


class Worker:
    """One process, and what passes through its pipes. States: starting, idle, loading, rewarding."""

    def __init__(self, kind: str, functions: Mapping[str, RewardFunction]) -> None:
        self.status: int | None = None
        self.process: subprocess.Popen[bytes] | launch.Fork
        if kind == "none":
            self.process = launch.unconfined()
        elif kind == "fork":
            self.process = launch.Fork(functions)
        else:
            self.process, self.status = launch.confined(kind)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.errand: Errand | None = None
        self.ready = False
        self.pending = memoryview(b"")
        self.received = b""
        self.deadline = time.monotonic() + START

    def give(self, errand: Errand) -> None:
        self.errand, errand.begun = errand, False
        self.deadline = time.monotonic() + START
        self.pending = memoryview(errand.message)
        self.received = b""

    def write(self) -> None:
        try:
            self.pending = self.pending[os.write(self.input, self.pending[:65536]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.pending = memoryview(b"")  # the end of its output tells the rest

    def end(self) -> str:
        """Kill it and all it started. Gives what it last said, for a worker that could not start."""
        sandbox.kill(self.process)
        said = b""
        if not self.ready and self.process.stderr is not None:
            os.set_blocking(self.process.stderr.fileno(), False)
            said = self.process.stderr.read() or b""
        if self.status is not None:
            os.set_blocking(self.status, False)
            with contextlib.suppress(BlockingIOError):
                said = os.read(self.status, 500) + said
            os.close(self.status)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()
        return said.decode(errors="replace").strip()[-300:]


class Pool:
    def __init__(
        self, kind: str, size: int | None = None, *, functions: Mapping[str, RewardFunction] | None = None
    ) -> None:
        self.kind, self.functions = kind, functions or {}
        self.confined = kind not in ("none", "fork")
        self.size = size or max(1, min(8, os.cpu_count() or 1))
        self.workers: list[Worker] = []
        self.failures = 0  # starts that failed, in a row
        self._lock = threading.Lock()
        self._path = list(sys.path)  # that its workers began with

    def run(self, errands: Sequence[Errand]) -> None:
        """Reward every sample, each within its limit. Replies are left on the errands."""
        with self._lock, selectors.DefaultSelector() as selector:
            if self._path != sys.path and self.kind != "fork":  # a module may lie where they do not look
                self.close()
                self._path = list(sys.path)
            if not self.workers:
                atexit.register(self.close)
            waiting = deque(errands)
            while waiting or any(worker.errand for worker in self.workers):
                self._assign(waiting)
                self._listen(selector, waiting)

    def _assign(self, waiting: deque[Errand]) -> None:
        idle = [worker for worker in self.workers if worker.ready and worker.errand is None]
        starting = sum(not worker.ready for worker in self.workers)
        for worker in idle[: len(waiting)]:
            worker.give(waiting.popleft())
        missing = self.size - len(self.workers)  # forks all begin at once, before this process grows
        for _ in range(missing if self.kind == "fork" else min(len(waiting) - starting, missing)):
            try:
                self.workers.append(Worker(self.kind, self.functions))
            except OSError as error:  # no memory or no descriptors left for another process
                if not self.workers:
                    self._unstarted(waiting, str(error))
                return

    def _listen(self, selector: selectors.BaseSelector, waiting: deque[Errand]) -> None:
        busy = [worker for worker in self.workers if worker.errand or not worker.ready]
        for worker in busy:
            selector.register(worker.output, selectors.EVENT_READ, (worker, False))
            if worker.pending:
                selector.register(worker.input, selectors.EVENT_WRITE, (worker, True))
        left = min((worker.deadline for worker in busy), default=0.0) - time.monotonic()
        events = selector.select(max(0.0, min(left, TICK) if self.confined else left))
        for key in list(selector.get_map().values()):
            selector.unregister(key.fd)
        for key, _ in events:
            worker, writes = key.data
            if worker not in self.workers:
                continue
            if writes:
                worker.write()
            elif not self._read(worker):
                self._lost(worker, waiting)
        now = time.monotonic()
        for worker in [worker for worker in busy if worker in self.workers]:
            if worker.deadline <= now and (worker.errand or not worker.ready):  # else it has just answered
                self._late(worker, waiting)
            elif self.confined and worker.errand and resident(worker.process.pid) > launch.MEMORY:
                worker.errand.tries = TRIES
                self._lost(worker, waiting, "ran out of memory")

    def _read(self, worker: Worker) -> bool:
        """Take what a worker wrote. False: it is gone, or talks nonsense."""
        try:
            chunk = os.read(worker.output, 65536)
        except BlockingIOError:
            return True
        worker.received += chunk
        if not chunk or len(worker.received) > LONGEST_REPLY:
            return False
        if not worker.ready:
            worker.ready = worker.received.startswith(READY)
            self.failures = 0 if worker.ready else self.failures
            return worker.ready or READY.startswith(worker.received)
        if worker.errand is None:
            return False
        loaded, _, rest = worker.received.partition(b"\n")
        if loaded == READY.strip() and not worker.errand.begun:
            worker.errand.begun = True
            own = worker.errand.own_time
            worker.deadline = time.monotonic() + (2 * worker.errand.limit + SLACK if own else worker.errand.limit)
        last = rest if loaded == READY.strip() else worker.received
        if last.endswith(b"\n"):
            worker.errand.reply = read_reply(last, worker.errand.bounds)
            if worker.errand.reply is None:
                return False
            worker.errand = None
        return True

    def _lost(self, worker: Worker, waiting: deque[Errand], how: str = "died") -> None:
        """A worker died. Another one gets its sample; if that dies too, it is the answer's doing."""
        errand, self.workers = worker.errand, [other for other in self.workers if other is not worker]
        said = worker.end()
        if errand is None:
            self._unstarted(waiting, said)
        elif errand.tries < TRIES - 1:
            errand.tries += 1
            waiting.appendleft(errand)
        elif errand.begun:
            errand.reply = failure(f"its worker {how}")
        else:
            errand.reply = Reply(RewardResult(None, error=f"its worker {how} before it began. {said}"))

    def _late(self, worker: Worker, waiting: deque[Errand]) -> None:
        errand, self.workers = worker.errand, [other for other in self.workers if other is not worker]
        said = worker.end()
        if errand is None:
            self._unstarted(waiting, said or f"nothing heard for {START:.0f} seconds")
        elif errand.begun:
            errand.reply = failure(f"took longer than {errand.limit:g} seconds", timed_out=True)
        else:
            errand.reply = Reply(
                RewardResult(None, error=f"its reward did not load in {START:.0f} seconds"), timed_out=True
            )

    def _unstarted(self, waiting: deque[Errand], said: str) -> None:
        """A worker could not start. Once may be bad luck; after that what waits is given up, not the run."""
        self.failures += 1
        if self.failures < TRIES:
            return
        log.warning("rewards: their workers cannot start. %s", said)
        while waiting:
            waiting.popleft().reply = Reply(RewardResult(None, error=f"its worker could not start. {said}"))

    def close(self) -> None:
        atexit.unregister(self.close)
        for worker in self.workers:
            worker.end()
        self.workers = []


@cache
def pool(kind: str) -> Pool:
    """The pool that rewards of this process share."""
    return Pool(kind)
