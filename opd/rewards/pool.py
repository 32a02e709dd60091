"""Worker processes that can be killed: a reward that hangs costs one sample, never the run. No threads, no signals.

`kind` is the sandbox of a pool's workers, `none`, or `fork` for forks of this process. Workers start when first needed and end
with this process. Answers that may do harm are rewarded in a fork of their worker (`worker`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from opd import sandbox
from opd.records import RewardResult
from opd.rewards.custom import RewardFunction
from opd.rewards.worker import READY, Reply, failure, read_reply, serve_fork
from opd.sandbox.walls import resident

START = 120.0  # seconds for a worker to start or to load a reward
LONGEST_REPLY = 1 << 20
TRIES = 2  # workers tried for one sample if they die
SLACK = 10.0  # seconds beyond twice its limit after which a worker that keeps its own time is killed
TICK = 0.2  # seconds between two memory checks of sandboxed workers
log = logging.getLogger("opd.rewards")


@dataclass
class Errand:
    """One sample to reward. `own_time`: the worker forks and enforces the limit itself."""

    message: bytes
    bounds: tuple[float, float]
    limit: float
    own_time: bool = True
    tries: int = 0
    begun: bool = False
    reply: Reply | None = None


class Worker:
    """One process and its pipes. States: starting, idle, loading, rewarding."""

    def __init__(self, kind: str, functions: Mapping[str, RewardFunction]) -> None:
        self.status: int | None = None
        self.process: subprocess.Popen[bytes] | Fork
        if kind == "none":
            self.process = unconfined()
        elif kind == "fork":
            self.process = Fork(functions)
        else:
            self.process, self.status = confined(kind)
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
            self.pending = memoryview(b"")  # the end of its output is handled by the reader

    def end(self) -> str:
        """Kills it and everything it started. Returns its last output, for workers that could not start."""
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
        self.failures = 0  # consecutive failed starts
        self._lock = threading.Lock()
        self._path = list(sys.path)  # when its workers started

    def run(self, errands: Sequence[Errand]) -> None:
        """Rewards every sample within its limit. Replies are stored on the errands."""
        with self._lock, selectors.DefaultSelector() as selector:
            if self._path != sys.path and self.kind != "fork":  # workers may not find a new module
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
        missing = self.size - len(self.workers)  # start all forks at once, before this process grows
        for _ in range(missing if self.kind == "fork" else min(len(waiting) - starting, missing)):
            try:
                self.workers.append(Worker(self.kind, self.functions))
            except OSError as error:  # no memory or descriptors for another process
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
            elif self.confined and worker.errand and resident(worker.process.pid) > MEMORY:
                worker.errand.tries = TRIES
                self._lost(worker, waiting, "ran out of memory")

    def _read(self, worker: Worker) -> bool:
        """Reads a worker's output. False: it has died, or its output is invalid."""
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
        """Handles a dead worker. Another one gets its sample; if that dies too, the answer is to blame."""
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
        """Handles a worker that could not start. After repeated failures the waiting samples fail, not the run."""
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
    """The pool shared by the rewards of this process."""
    return Pool(kind)


# --- Starting worker processes; they find packages where this process found them ---


PACKAGE = "/opd-package"  # where confined workers find opd, and packages outside of sys.path
ROOTS = (
    "numpy",
    "pydantic",
    "yaml",
    "sympy",
    "math_verify",
    "reasoning_gym",
)  # imported by confined workers
MEMORY = 4 << 30  # bytes of a confined worker, including all its processes
PROCESSES = 6
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]) or sys.path; sys.path += json.loads(sys.argv[2]); "
    "from opd.rewards.worker import main; main(int(sys.argv[3]))"
)


def unconfined() -> subprocess.Popen[bytes]:
    """Starts a worker with all rights of this user."""
    path = [os.path.abspath(entry) for entry in sys.path]
    source = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-P", "-c", BOOT, json.dumps(path), json.dumps([source]), str(os.getpid())]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


class Fork:
    """A worker that is a fork of this process, and so has its functions. Otherwise it behaves like `Popen`."""

    stderr = None

    def __init__(self, functions: Mapping[str, RewardFunction]) -> None:
        asked, questions = os.pipe()
        replies, answers = os.pipe()
        owner = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forks with threads: the child needs no threads
            self.pid = os.fork()
        if not self.pid:
            try:
                serve_fork(asked, answers, functions, owner)
            finally:  # the fork must never continue as a copy of its parent
                os._exit(0)
        os.close(asked)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(questions, "wb", buffering=0), os.fdopen(replies, "rb", buffering=0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def confined(kind: str) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a sandboxed worker; returns its status descriptor too. It sees only packages, read-only, and no other files."""
    path, binds = packages()
    cell = sandbox.Cell(binds, {"MPLCONFIGDIR": "/tmp"})
    limits = sandbox.Limits(seconds=math.inf, memory=MEMORY, processes=PROCESSES, disk=sandbox.MEGABYTE)
    command = [sandbox.python(), "-I", "-S", "-B", "-c", BOOT, "[]", json.dumps(path), "0"]
    return sandbox.start(command, kind=kind, limits=limits, cell=cell)


def packages() -> tuple[list[str], dict[str, str]]:
    """sys.path of a confined worker after the standard library's entries, and its mounts: source -> place.

    Folders on sys.path without packages are left out: the run's working directory may contain other things.
    """
    source = Path(__file__).resolve().parents[1]
    entries = [os.path.realpath(entry) for entry in sys.path if entry and os.path.exists(entry)]
    held = [entry for entry in dict.fromkeys(entries) if _holds_packages(Path(entry), source.parent)]
    binds = {str(source): f"{PACKAGE}/opd", **{entry: entry for entry in held}}
    for entry in held:  # packages may be symbolic links
        links = [item for item in os.scandir(entry) if item.is_symlink()] if os.path.isdir(entry) else []
        targets = {os.path.realpath(item.path) for item in links}
        binds |= {target: target for target in targets if os.path.exists(target) and not _inside(target, held)}
    for name in ROOTS:  # editable installs: found by a hook, not on sys.path
        found = importlib.util.find_spec(name)
        where = os.path.realpath(os.path.dirname(found.origin)) if found is not None and found.origin else ""
        if where and os.path.isdir(where) and not _inside(where, [*binds]):
            binds[where] = f"{PACKAGE}/{name}"
    return [PACKAGE, *held], binds


def _holds_packages(entry: Path, source: Path) -> bool:
    if entry.is_file() or entry.name in ("site-packages", "dist-packages"):
        return True
    if any((entry / name).is_dir() for name in ROOTS):
        return True
    installed = [*entry.glob("*.dist-info"), *entry.glob("*.egg-info")]
    return entry != source and bool(installed)


def _inside(path: str, folders: list[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)
