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
import hashlib
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from opd import plugins
from opd.records import Prompt, RewardResult, Sample
from opd.rewards.custom import RewardFunction, known
from opd.rewards.reward import FAMILY, RewardKind, give

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


# How samples reach a worker: JSON lines. Nothing is unpickled, and nothing in a text can be anything but text.


SHORT = 1 << 63  # longer integers travel in hexadecimal: decimal digits of one are limited
BYTES = "latin-1"  # code travels as text, a character for each byte: workers run what this process has read
READY = b"ready\n"  # a worker has started, or has loaded what the sample at hand needs


def tagged(value: Any) -> Any:
    """Tuples, sets, bytes and dicts with other keys than text survive, tagged; a number of numpy's becomes Python's."""
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
    return tagged(value.tolist()) if hasattr(value, "tolist") else str(value)  # numpy; dates and the like


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
    """A sample on its way to a worker, the reward as the recipe has it, and the seconds it may take."""

    kind: RewardKind
    sandbox: str  # `rewards.sandbox` of the recipe
    sample: Sample
    limit: float

    def chosen(self) -> RewardKind:
        """The reward that the sample gets. ValueError: there is none."""
        found = self.kind.chosen(self.sample.prompt.fields)
        if isinstance(found, str):
            raise ValueError(found)
        return found.within(self.sandbox)


class Reply(NamedTuple):
    """A result on its way back. `lasting`: the same answer would cost as much again, so the failure is remembered."""

    result: RewardResult
    lasting: bool = False
    timed_out: bool = False


def failure(error: str, *, timed_out: bool = False) -> Reply:
    """An answer that brought its reward down."""
    return Reply(RewardResult(None, error=error, by_answer=True), lasting=True, timed_out=timed_out)


def write_request(request: Request) -> bytes:
    """Raises ValueError, TypeError or RecursionError for fields that cannot travel."""
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
    """What a reward depends on. Only rewards of one's own can see which prompt it is, beyond its fields."""
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
    """None: no result, whatever it is. A process that ran a hostile answer may say anything."""
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
