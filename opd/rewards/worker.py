"""A worker: reads samples, writes rewards, imports no torch.

An answer whose reward may run it is rewarded in a fork of its own, and whatever it does to its process ends with it: the worker
itself loads libraries and never touches such an answer. The fork has neither the worker's pipes nor access to its memory; it can only reply
for itself, and what it replies must be a number in range. For each sample two lines go back: that what it needs is loaded, then
the result. A worker ends with its parent: on the end of its input, and by the kernel's hand if it happens to hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping

from opd.rewards.callables import RewardFunction, known
from opd.rewards.protocol import READY, Reply, Request, failure, read_reply, read_request, write_reply
from opd.rewards.reward import RewardKind, give
from opd.types import RewardResult, Sample

MEMORY = 4 << 30
LONGEST_REPLY = 1 << 16
TRIES = 2  # forks for one answer, if the first one is killed
SET_PDEATHSIG, SET_DUMPABLE = 1, 4
LAST_STANDARD = 2  # descriptor that programs expect to be open


def main(parent: int) -> None:
    """`parent` 0: behind walls, where there is no other process to hurt."""
    if not _tied_to(parent):
        return
    _limit_memory(MEMORY)
    answers = os.dup(1)  # what rewards print must not mix with what is answered
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    asked = os.dup(0)
    os.dup2(nowhere, 0)
    os.write(answers, READY)
    os.dup2(nowhere, 2)
    _serve(asked, answers, confined=not parent)


def serve_fork(asked: int, answers: int, functions: Mapping[str, RewardFunction], owner: int) -> None:
    """The same in a fork of the process that the functions were made in. Nothing that is open there stays so, but the pipes."""
    gc.freeze()  # what the process leaves behind is not for the fork to tidy up
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _limit_memory(_address_space() + MEMORY)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/dev/fd")):
        if descriptor not in (asked, answers, nowhere):
            os.dup2(nowhere, descriptor, inheritable=descriptor <= LAST_STANDARD)
    sys.stdin, sys.stdout, sys.stderr = open(os.devnull), open(os.devnull, "w"), open(os.devnull, "w")  # noqa: SIM115
    if not _tied_to(owner):
        return
    known.update(functions)
    os.write(answers, READY)
    _serve(asked, answers, confined=False)


def _serve(asked: int, answers: int, *, confined: bool) -> None:
    with os.fdopen(asked, "rb") as lines:
        for line in lines:
            os.write(answers, write_reply(_answer(line, confined=confined, answers=answers, asked=asked)))


def _limit_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > size:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _address_space() -> int:
    """Bytes that this process has mapped already."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 1 << 40


def _answer(line: bytes, *, confined: bool, answers: int, asked: int) -> Reply:
    try:
        request = read_request(line)
        kind = request.chosen()
        kind.load()
    except Exception as error:  # the border to foreign code: a library or a function that cannot be loaded
        return Reply(RewardResult(None, error=story(error)))
    os.write(answers, READY)
    if not kind.forks:
        return Reply(_reward(kind, request.sample))
    found = Reply(RewardResult(None))
    gc.freeze()  # the fork shares what is loaded
    for _ in range(TRIES):
        found, killed = _fork(kind, request, (answers, asked))
        _clear(confined)
        if not killed:
            break
    return found


def _fork(kind: RewardKind, request: Request, private: tuple[int, ...]) -> tuple[Reply, bool]:
    """The reply of a fork, and whether it ended without one."""
    reading, writing = os.pipe()
    worker = os.getpid()
    child = os.fork()
    if child == 0:
        if not _tied_to(worker):
            os._exit(1)
        os.setsid()
        for descriptor in (reading, *private):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.write(writing, write_reply(Reply(_reward(kind, request.sample))))
        os._exit(0)
    os.close(writing)
    said, late = _listen(reading, time.monotonic() + request.limit)
    os.close(reading)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if late:
        return failure(f"took longer than {request.limit:g} seconds", timed_out=True), False
    found = read_reply(said, kind.bounds)
    if found is not None:
        return Reply(found.result), False
    if said:
        return failure("the reply is no reward in range"), False
    return failure(f"its process died ({os.waitstatus_to_exitcode(status)})"), True


def _tied_to(parent: int) -> bool:
    """It dies with its parent (False: that died before the tie was made), and no process of the same user reads or writes its memory."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    return not parent or os.getppid() == parent


def _listen(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """Everything up to the end, and whether it was late."""
    said = b""
    while len(said) <= LONGEST_REPLY and b"\n" not in said:
        left = max(0.0, deadline - time.monotonic())  # what is there already is read, however late it is looked at
        if not select.select([descriptor], [], [], left)[0]:
            return said, True
        chunk = os.read(descriptor, LONGEST_REPLY)
        if not chunk:
            break
        said += chunk
    return said, False


def _clear(confined: bool) -> None:
    """Nothing an answer started or wrote outlives it, where all there is belongs to this worker."""
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
        return give(kind, sample)
    except (Exception, SystemExit) as error:  # the border to foreign code: there is no reward for the sample
        return RewardResult(None, error=story(error), by_answer=True)


def story(error: BaseException) -> str:
    """What was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"
