"""Worker processes that can be killed: a reward that hangs costs one sample, never the run. No threads, no signals, no torch.

`kind` is the sandbox of a pool's workers, `none`, or `fork` for forks of this process. Workers start when first needed and end
with this process. Each sample gets two lines back: that its libraries are loaded, then the result.

If a reward may execute the answer, it runs in a fork per answer, so the answer can only damage that fork: the worker itself loads
libraries and never touches such an answer. A fork has neither the worker's pipes nor access to its memory. It can only reply for
itself, and the reply must be a number in range. A worker ends with its parent: at the end of its input, or killed by the kernel if
it hangs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import json
import logging
import math
import os
import resource
import select
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from opd import plugins, sandbox
from opd.records import Prompt, RewardResult, Sample
from opd.rewards.custom import RewardFunction, known
from opd.rewards.reward import FAMILY, RewardKind, reward_of
from opd.sandbox.walls import resident

MEMORY = 4 << 30  # bytes of a worker; of a confined one, all its processes together
LONGEST_REPLY = 1 << 16
TRIES = 2  # workers tried for one sample if they die, and forks tried for one answer if they are killed
SET_PDEATHSIG, SET_DUMPABLE = 1, 4
LAST_STANDARD = 2  # last descriptor that programs expect to be open


# --- Messages to workers: JSON lines; nothing is unpickled ---


SHORT = 1 << 63  # longer integers are sent in hexadecimal, since Python limits decimal digits
BYTES = "latin-1"  # code is sent as text, one character per byte: workers run what this process has read
READY = b"ready\n"  # a worker has started, or has loaded the libraries for the current sample


def tagged(value: Any) -> Any:
    """Tags tuples, sets, bytes and dicts with non-text keys, so that they survive JSON. NumPy numbers become Python's."""
    if value is None or type(value) in (bool, int, float, str):
        return value if type(value) is not int or -SHORT <= value < SHORT else {"$int": hex(value)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): tagged(entry) for key, entry in value.items()}
        return {"$dict": [[tagged(key), tagged(entry)] for key, entry in value.items()]}
    if isinstance(value, list):
        return [tagged(entry) for entry in value]
    if isinstance(value, tuple):
        return {"$tuple": [tagged(entry) for entry in value]}
    return _tagged_rare(value)


def _tagged_rare(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return {"$set": [tagged(entry) for entry in sorted(value, key=repr)]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    for kind in (str, bool, int, float):  # np.str_, np.float64, enums
        if isinstance(value, kind):
            return tagged(kind(value))
    return tagged(value.tolist()) if hasattr(value, "tolist") else str(value)  # NumPy arrays; else dates and the like


def untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [untagged(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, inner), *_ = value.items()
        if tag in TAGS:
            return TAGS[tag](inner)
    return {key: untagged(entry) for key, entry in value.items()}


TAGS: dict[str, Callable[[Any], Any]] = {
    "$dict": lambda inner: {untagged(key): untagged(entry) for key, entry in inner},
    "$tuple": lambda inner: tuple(untagged(entry) for entry in inner),
    "$set": lambda inner: {untagged(entry) for entry in inner},
    "$bytes": bytes.fromhex,
    "$int": lambda inner: int(inner, 16),
}


class Request(NamedTuple):
    """A message to a worker: a sample, its reward as in the recipe, and the time limit in seconds."""

    kind: RewardKind
    sandbox: str  # `rewards.sandbox` of the recipe
    sample: Sample
    limit: float

    def chosen(self) -> RewardKind:
        """The reward used for the sample. Raises ValueError if there is none."""
        found = self.kind.chosen(self.sample.prompt.fields)
        if isinstance(found, str):
            raise ValueError(found)
        return found.within(self.sandbox)


class Reply(NamedTuple):
    """A worker's reply. `lasting`: the same answer would fail again at the same cost, so the failure is cached."""

    result: RewardResult
    lasting: bool = False
    timed_out: bool = False


def failure(error: str, *, timed_out: bool = False) -> Reply:
    """A reply for an answer that made its reward fail."""
    return Reply(RewardResult(None, error=error, by_answer=True), lasting=True, timed_out=timed_out)


def write_request(request: Request) -> bytes:
    """Raises ValueError, TypeError or RecursionError for fields that cannot be sent."""
    kind, sandbox, sample, limit = request
    prompt, plugin, code = sample.prompt, plugins.origin(type(kind)), kind.code
    file = plugin is not None and plugin.endswith(".py")
    body = {
        "kind": kind.model_dump(mode="json"),
        "code": None if code is None else code.decode(BYTES),
        "plugin": plugin,
        "plugin_code": plugins.source_of(plugin).decode(BYTES) if file and plugin is not None else None,
        "sandbox": sandbox,
        "limit": limit,
        "prompt": {"id": prompt.id, "domain": prompt.domain, "text": prompt.text, "messages": tagged(prompt.messages)},
        "fields": tagged(prompt.fields),
        "text": sample.text,
    }
    return json.dumps(body).encode() + b"\n"


def read_request(line: bytes) -> Request:
    body = json.loads(line)
    if body["plugin_code"] is not None:
        plugins.load_source(body["plugin"], body["plugin_code"].encode(BYTES))
    elif body["plugin"] is not None:
        plugins.load_plugins([body["plugin"]])
    prompt = Prompt(
        **{**body["prompt"], "messages": untagged(body["prompt"]["messages"])}, fields=untagged(body["fields"])
    )
    kind = FAMILY.read(body["kind"])
    assert isinstance(kind, RewardKind)
    if body["code"] is not None:
        kind.take_code(body["code"].encode(BYTES))
    return Request(kind, body["sandbox"], Sample(prompt, body["text"]), body["limit"])


def content(kind: RewardKind, sample: Sample) -> bytes:
    """The cache key: all that a result depends on. Only rewards with `sees_prompt` see more of the prompt than its fields."""
    prompt = sample.prompt
    facts = [prompt.id, prompt.domain, prompt.text, tagged(prompt.messages)] if kind.sees_prompt else []
    whole = [kind.model_dump(mode="json"), facts, tagged(prompt.fields), sample.text]
    return hashlib.blake2b(json.dumps(whole).encode(), digest_size=16).digest()


def write_reply(reply: Reply) -> bytes:
    result = reply.result
    body = {
        "reward": result.reward,
        "per_turn": result.per_turn[:10_000],
        "feedback": result.feedback[:2000],
        "error": result.error[:500],
        "by_answer": result.by_answer,
        "lasting": reply.lasting,
        "timed_out": reply.timed_out,
    }
    return json.dumps(body, default=str).encode() + b"\n"


def read_reply(line: bytes, bounds: tuple[float, float]) -> Reply | None:
    """Parses a reply; None if invalid. A process that ran a hostile answer may send anything."""
    low, high = bounds
    try:
        body = json.loads(line)
        reward, turns = body["reward"], tuple(body["per_turn"])
        for value in (reward, *turns):
            if value is not None and not (type(value) in (int, float) and low <= value <= high):
                return None
        whole = RewardResult(
            None if reward is None else float(reward),
            tuple(float(turn) for turn in turns),
            str(body["feedback"])[:2000],
            str(body["error"])[:500],
            by_answer=reward is None and body["by_answer"] is True,
        )
        return Reply(whole, body["lasting"] is True, body["timed_out"] is True)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


# --- This process's side: a pool of workers ---


START = 120.0  # seconds for a worker to start or to load a reward
LONGEST_OUTPUT = 1 << 20  # bytes of a worker's two lines
SLACK = 10.0  # seconds beyond twice its limit after which a worker that keeps its own time is killed
TICK = 0.2  # seconds between two memory checks of sandboxed workers
log = logging.getLogger("opd.rewards")


@dataclass
class RewardJob:
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
        self.job: RewardJob | None = None
        self.ready = False
        self.pending = memoryview(b"")
        self.received = b""
        self.deadline = time.monotonic() + START

    def give(self, job: RewardJob) -> None:
        self.job, job.begun = job, False
        self.deadline = time.monotonic() + START
        self.pending = memoryview(job.message)
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
        output = b""
        if not self.ready and self.process.stderr is not None:
            os.set_blocking(self.process.stderr.fileno(), False)
            output = self.process.stderr.read() or b""
        if self.status is not None:
            os.set_blocking(self.status, False)
            with contextlib.suppress(BlockingIOError):
                output = os.read(self.status, 500) + output
            os.close(self.status)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()
        return output.decode(errors="replace").strip()[-300:]


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

    def run(self, jobs: Sequence[RewardJob]) -> None:
        """Rewards every sample within its limit. Replies are stored on the jobs."""
        with self._lock, selectors.DefaultSelector() as selector:
            if self._path != sys.path and self.kind != "fork":  # workers may not find a new module
                self.close()
                self._path = list(sys.path)
            if not self.workers:
                atexit.register(self.close)
            waiting = deque(jobs)
            while waiting or any(worker.job for worker in self.workers):
                self._assign(waiting)
                self._listen(selector, waiting)

    def _assign(self, waiting: deque[RewardJob]) -> None:
        idle = [worker for worker in self.workers if worker.ready and worker.job is None]
        starting = sum(not worker.ready for worker in self.workers)
        for worker in idle[: len(waiting)]:
            worker.give(waiting.popleft())
        missing = self.size - len(self.workers)  # start all forks at once, before this process grows
        for _ in range(missing if self.kind == "fork" else min(len(waiting) - starting, missing)):
            try:
                self.workers.append(Worker(self.kind, self.functions))
            except OSError as error:  # no memory or descriptors for another process
                if not self.workers:
                    self._failed_to_start(waiting, str(error))
                return

    def _listen(self, selector: selectors.BaseSelector, waiting: deque[RewardJob]) -> None:
        busy = [worker for worker in self.workers if worker.job or not worker.ready]
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
            if worker.deadline <= now and (worker.job or not worker.ready):  # else it has just answered
                self._late(worker, waiting)
            elif self.confined and worker.job and resident(worker.process.pid) > MEMORY:
                worker.job.tries = TRIES
                self._lost(worker, waiting, "ran out of memory")

    def _read(self, worker: Worker) -> bool:
        """Reads a worker's output. False: it has died, or its output is invalid."""
        try:
            chunk = os.read(worker.output, 65536)
        except BlockingIOError:
            return True
        worker.received += chunk
        if not chunk or len(worker.received) > LONGEST_OUTPUT:
            return False
        if not worker.ready:
            worker.ready = worker.received.startswith(READY)
            self.failures = 0 if worker.ready else self.failures
            return worker.ready or READY.startswith(worker.received)
        if worker.job is None:
            return False
        loaded, _, rest = worker.received.partition(b"\n")
        if loaded == READY.strip() and not worker.job.begun:
            worker.job.begun = True
            own = worker.job.own_time
            worker.deadline = time.monotonic() + (2 * worker.job.limit + SLACK if own else worker.job.limit)
        last = rest if loaded == READY.strip() else worker.received
        if last.endswith(b"\n"):
            worker.job.reply = read_reply(last, worker.job.bounds)
            if worker.job.reply is None:
                return False
            worker.job = None
        return True

    def _lost(self, worker: Worker, waiting: deque[RewardJob], how: str = "died") -> None:
        """Handles a dead worker. Another one gets its sample; if that dies too, the answer is to blame."""
        job, self.workers = worker.job, [other for other in self.workers if other is not worker]
        output = worker.end()
        if job is None:
            self._failed_to_start(waiting, output)
        elif job.tries < TRIES - 1:
            job.tries += 1
            waiting.appendleft(job)
        elif job.begun:
            job.reply = failure(f"its worker {how}")
        else:
            job.reply = Reply(RewardResult(None, error=f"its worker {how} before it began. {output}"))

    def _late(self, worker: Worker, waiting: deque[RewardJob]) -> None:
        job, self.workers = worker.job, [other for other in self.workers if other is not worker]
        output = worker.end()
        if job is None:
            self._failed_to_start(waiting, output or f"it did not start within {START:.0f} seconds")
        elif job.begun:
            job.reply = failure(f"took longer than {job.limit:g} seconds", timed_out=True)
        else:
            job.reply = Reply(
                RewardResult(None, error=f"its reward did not load in {START:.0f} seconds"), timed_out=True
            )

    def _failed_to_start(self, waiting: deque[RewardJob], output: str) -> None:
        """Handles a worker that could not start. After repeated failures the waiting samples fail, not the run."""
        self.failures += 1
        if self.failures < TRIES:
            return
        log.warning("rewards: their workers cannot start. %s", output)
        while waiting:
            waiting.popleft().reply = Reply(RewardResult(None, error=f"its worker could not start. {output}"))

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
PROCESSES = 6
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]) or sys.path; sys.path += json.loads(sys.argv[2]); "
    "from opd.rewards.workers import main; main(int(sys.argv[3]))"
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
        requests, questions = os.pipe()
        replies, answers = os.pipe()
        owner = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forks with threads: the child needs no threads
            self.pid = os.fork()
        if not self.pid:
            try:
                serve_fork(requests, answers, functions, owner)
            finally:  # the fork must never continue as a copy of its parent
                os._exit(0)
        os.close(requests)
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


# --- The worker's side ---


def main(parent: int) -> None:
    """Runs a worker. `parent` is 0 in a sandbox, which contains no other processes."""
    if not _die_with(parent):
        return
    _limit_memory(MEMORY)
    answers = os.dup(1)  # output printed by rewards must not mix with replies
    devnull = os.open(os.devnull, os.O_RDWR)
    os.dup2(devnull, 1)
    requests = os.dup(0)
    os.dup2(devnull, 0)
    os.write(answers, READY)
    os.dup2(devnull, 2)
    _serve(requests, answers, confined=not parent)


def serve_fork(requests: int, answers: int, functions: Mapping[str, RewardFunction], owner: int) -> None:
    """Runs a worker in a fork of the process that made the functions. Closes all descriptors except for the pipes."""
    gc.freeze()  # the fork must not collect the parent's objects
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _limit_memory(_address_space() + MEMORY)
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor not in (requests, answers, devnull):
            os.dup2(devnull, descriptor, inheritable=descriptor <= LAST_STANDARD)
    sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(os.devnull, "w"), open(os.devnull, "w")  # noqa: SIM115
    if not _die_with(owner):
        return
    known.update(functions)
    os.write(answers, READY)
    _serve(requests, answers, confined=False)


def _serve(requests: int, answers: int, *, confined: bool) -> None:
    with os.fdopen(requests, "rb") as lines:
        for line in lines:
            os.write(answers, write_reply(_answer(line, confined=confined, answers=answers, requests=requests)))


def _limit_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > size:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _address_space() -> int:
    """Bytes of address space already mapped."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 1 << 40


def _answer(line: bytes, *, confined: bool, answers: int, requests: int) -> Reply:
    try:
        request = read_request(line)
        kind = request.chosen()
        kind.load()
    except Exception as error:  # foreign code: a library or a function that cannot be loaded
        return Reply(RewardResult(None, error=error_text(error)))
    os.write(answers, READY)
    if not kind.forks:
        return Reply(_reward(kind, request.sample))
    found = Reply(RewardResult(None))
    gc.freeze()  # the fork shares what is loaded
    for _ in range(TRIES):
        found, killed = _fork(kind, request, (answers, requests))
        _clear(confined)
        if not killed:
            break
    return found


def _fork(kind: RewardKind, request: Request, private: tuple[int, ...]) -> tuple[Reply, bool]:
    """The reply of a fork, and whether it died without one."""
    reading, writing = os.pipe()
    worker = os.getpid()
    child = os.fork()
    if child == 0:
        if not _die_with(worker):
            os._exit(1)
        os.setsid()
        for descriptor in (reading, *private):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.write(writing, write_reply(Reply(_reward(kind, request.sample))))
        os._exit(0)
    os.close(writing)
    output, late = _listen(reading, time.monotonic() + request.limit)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if late:
        return failure(f"took longer than {request.limit:g} seconds", timed_out=True), False
    found = read_reply(output, kind.bounds)
    if found is not None:
        return Reply(found.result), False
    if output:
        return failure("the reply is not a reward in range"), False
    return failure(f"its process died ({os.waitstatus_to_exitcode(status)})"), True


def _die_with(parent: int) -> bool:
    """Makes the process die with its parent (False: already dead), and protects its memory from other processes of the user."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    return not parent or os.getppid() == parent


def _listen(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """The output up to the end of the line or file, and whether it was late."""
    output = b""
    while len(output) <= LONGEST_REPLY and b"\n" not in output:
        left = max(0.0, deadline - time.monotonic())  # output already in the pipe is read even after the deadline
        if not select.select([descriptor], [], [], left)[0]:
            return output, True
        chunk = os.read(descriptor, LONGEST_REPLY)
        if not chunk:
            break
        output += chunk
    return output, False


def _clear(confined: bool) -> None:
    """In a sandbox, kills all processes and deletes all files that an answer left."""
    if not confined:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    for entry in os.scandir("/tmp"):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def _reward(kind: RewardKind, sample: Sample) -> RewardResult:
    try:
        return reward_of(kind, sample)
    except (Exception, SystemExit) as error:  # foreign code: no reward for the sample
        return RewardResult(None, error=error_text(error), by_answer=True)


def error_text(error: BaseException) -> str:
    """The error's message and location."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"
