"""Worker processes that can be killed: a scorer that hangs costs one sample, never the run. No threads, no signals.

`confined` workers stand behind the sandbox's walls, because scorers such as sympy's evaluate what the model wrote; where no
sandbox works they run as they are, and the log says so. Workers start when first needed, stay, and end with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from opd.rewards import sandbox
from opd.rewards.travel import READY, read_reply
from opd.types import Judgement

START = 120.0  # seconds for a worker to start or to load a scorer
LONGEST_REPLY = 1 << 20
TRIES = 2  # starts of a worker for one sample, if it dies before it began to judge
PACKAGE = "/opd-package"  # where confined workers find opd
log = logging.getLogger("opd.rewards")


@dataclass
class Task:
    message: bytes
    limit: float
    tries: int = 0
    judgement: Judgement | None = None
    timed_out: bool = False


class Worker:
    """One process, and what passes through its pipes. States: starting, idle, loading, judging."""

    def __init__(self, confined: bool) -> None:
        self.status: int | None = None
        if confined:
            self.process, self.status = self._confined()
        else:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}  # fmt: skip
            command = [sys.executable, "-m", "opd.rewards.worker", str(os.getpid())]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
                start_new_session=True,
            )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)
        self.task: Task | None = None
        self.ready = False
        self.pending = memoryview(b"")
        self.received = b""
        self.deadline = time.monotonic() + START

    @staticmethod
    def _confined() -> tuple[subprocess.Popen[bytes], int]:
        packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages") and Path(path).is_dir()]  # fmt: skip
        source = str(Path(__file__).resolve().parents[1])
        environment = {"PYTHONPATH": os.pathsep.join([PACKAGE, *packages]), "MPLCONFIGDIR": "/tmp"}
        cell = sandbox.Cell({source: f"{PACKAGE}/opd", **{path: path for path in packages}}, environment)
        limits = sandbox.Limits(seconds=math.inf, memory=4 << 30, processes=16, disk=64 << 20)
        command = [sandbox.python(), "-B", "-m", "opd.rewards.worker", "0"]
        return sandbox.start(command, kind=sandbox.choose("auto"), limits=limits, cell=cell)

    def give(self, task: Task) -> None:
        self.task = task
        self.deadline = time.monotonic() + START
        self.pending = memoryview(task.message)
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
    def __init__(self, *, confined: bool, size: int | None = None) -> None:
        self.confined = confined
        self.size = size or max(1, min(8, os.cpu_count() or 1))
        self.workers: list[Worker] = []
        self.failures = 0  # starts that failed, in a row
        self._lock = threading.Lock()
        atexit.register(self.close)

    def run(self, tasks: Sequence[Task]) -> None:
        """Judge every task, each within its limit. Judgements are left on the tasks."""
        with self._lock, selectors.DefaultSelector() as selector:
            waiting = deque(tasks)
            while waiting or any(worker.task for worker in self.workers):
                self._assign(waiting)
                self._listen(selector, waiting)

    def _assign(self, waiting: deque[Task]) -> None:
        idle = [worker for worker in self.workers if worker.ready and worker.task is None]
        starting = sum(not worker.ready for worker in self.workers)
        for worker in idle[: len(waiting)]:
            worker.give(waiting.popleft())
        for _ in range(min(len(waiting) - starting, self.size - len(self.workers))):
            try:
                self.workers.append(Worker(self.confined))
            except OSError as error:  # no memory or no descriptors left for another process
                if not self.workers:
                    self._unstarted(waiting, str(error))
                return

    def _listen(self, selector: selectors.BaseSelector, waiting: deque[Task]) -> None:
        busy = [worker for worker in self.workers if worker.task or not worker.ready]
        for worker in busy:
            selector.register(worker.output, selectors.EVENT_READ, (worker, False))
            if worker.pending:
                selector.register(worker.input, selectors.EVENT_WRITE, (worker, True))
        left = min((worker.deadline for worker in busy), default=0.0) - time.monotonic()
        events = selector.select(max(0.0, left))
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
        for worker in [worker for worker in busy if worker in self.workers and worker.deadline <= now]:
            self._late(worker, waiting)

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
        if worker.task is None:
            return False
        loaded, _, rest = worker.received.partition(b"\n")
        if loaded == READY.strip() and worker.task.tries >= 0:
            worker.task.tries = -1  # it has begun: no second try
            worker.deadline = time.monotonic() + worker.task.limit
        last = rest if loaded == READY.strip() else worker.received
        if last.endswith(b"\n"):
            judgement = read_reply(last)
            if judgement is None:
                return False
            worker.task.judgement, worker.task = judgement, None
        return True

    def _lost(self, worker: Worker, waiting: deque[Task]) -> None:
        """A worker died: while judging, the sample is lost; before, another worker gets it."""
        task, self.workers = worker.task, [other for other in self.workers if other is not worker]
        said = worker.end()
        if task is None:
            self._unstarted(waiting, said)
        elif 0 <= task.tries < TRIES - 1:
            task.tries += 1
            waiting.appendleft(task)
        else:
            task.judgement = Judgement(None, error="the verification's worker died")
            log.warning("a verification failed: its worker died; its sample is masked.")

    def _late(self, worker: Worker, waiting: deque[Task]) -> None:
        task, self.workers = worker.task, [other for other in self.workers if other is not worker]
        said = worker.end()
        if task is None:
            self._unstarted(waiting, said or f"nothing heard for {START:.0f} seconds")
            return
        task.timed_out = True
        task.judgement = Judgement(None, error=f"the verification took longer than {task.limit:g} seconds")
        log.warning("a verification took longer than %g seconds and was stopped; its sample is masked.", task.limit)

    def _unstarted(self, waiting: deque[Task], said: str) -> None:
        """A worker could not start. Once may be bad luck; after that what waits is given up, not the run."""
        self.failures += 1
        if self.failures < TRIES:
            return
        log.warning("verifications failed: their workers cannot start. %s", said)
        while waiting:
            waiting.popleft().judgement = Judgement(None, error=f"the verification's worker could not start. {said}")

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []


@cache
def pool(confined: bool) -> Pool:
    """The pool every reward of this process shares."""
    if confined and (reasons := [sandbox.trouble(kind) for kind in ("bubblewrap", "namespaces")]) and all(reasons):
        log.warning("no sandbox works here (%s): scorers that evaluate answers run outside of one.", "; ".join(reasons))
        return pool(False)
    return Pool(confined=confined)
