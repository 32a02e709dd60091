"""A worker: reads samples, writes rewards, imports no torch.

If a reward may execute the answer, it runs in a fork per answer, so the answer can only damage that fork: the worker itself loads
libraries and never touches such an answer. A fork has neither the worker's pipes nor access to its memory. It can only reply for
itself, and the reply must be a number in range. Each sample gets two lines back: that its libraries are loaded, then the result.
A worker ends with its parent: at the end of its input, or killed by the kernel if it hangs.
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
TRIES = 2  # forks tried for one answer if they are killed
SET_PDEATHSIG, SET_DUMPABLE = 1, 4
LAST_STANDARD = 2  # last descriptor that programs expect to be open


def main(parent: int) -> None:
    """Runs a worker. `parent` is 0 in a sandbox, which contains no other processes."""
    if not _tied_to(parent):
        return
    _limit_memory(MEMORY)
    answers = os.dup(1)  # output printed by rewards must not mix with replies
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    asked = os.dup(0)
    os.dup2(nowhere, 0)
    os.write(answers, READY)
    os.dup2(nowhere, 2)
    _serve(asked, answers, confined=not parent)


def serve_fork(asked: int, answers: int, functions: Mapping[str, RewardFunction], owner: int) -> None:
    """Runs a worker in a fork of the process that made the functions. Closes all descriptors except for the pipes."""
    gc.freeze()  # the fork must not collect the parent's objects
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
    """Bytes of address space already mapped."""
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
    except Exception as error:  # foreign code: a library or a function that cannot be loaded
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
    """The reply of a fork, and whether it died without one."""
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
    """Makes the process die with its parent (False: already dead), and protects its memory from other processes of the user."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    return not parent or os.getppid() == parent


def _listen(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """The output up to the end of the line or file, and whether it was late."""
    said = b""
    while len(said) <= LONGEST_REPLY and b"\n" not in said:
        left = max(0.0, deadline - time.monotonic())  # output already in the pipe is read even after the deadline
        if not select.select([descriptor], [], [], left)[0]:
            return said, True
        chunk = os.read(descriptor, LONGEST_REPLY)
        if not chunk:
            break
        said += chunk
    return said, False


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
        return give(kind, sample)
    except (Exception, SystemExit) as error:  # foreign code: no reward for the sample
        return RewardResult(None, error=story(error), by_answer=True)


def story(error: BaseException) -> str:
    """The error's message and location."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:300]}{where}"


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
