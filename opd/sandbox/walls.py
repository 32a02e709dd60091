"""Runs untrusted code: no network, no home, no environment, a read-only system, and limits on everything else.

Two ways to isolate it, both without root: bubblewrap, or Linux namespaces created here (`jail`). Root uses only the second,
because it can switch to an unprivileged user; the process limit does not apply to root. A system-call filter (`filter_program`)
blocks what namespaces leave open. If neither works, nothing runs, unless the recipe sets `sandbox: none`.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import re
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from opd.common.errors import RecipeError

JAIL = Path(__file__).with_name("jail.py")
UID = 65533  # of the program inside the sandbox; when started as root, also outside
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64")
MEGABYTE = 1 << 20
START = 30.0  # seconds for the sandbox to start; the program's own time begins after that
GRACE = 5.0  # seconds for the kernel to clean up a killed sandbox


@dataclass(frozen=True)
class Limits:
    """`seconds` of wall-clock time. All limits apply to the whole program."""

    seconds: float = 10.0
    memory: int = 512 * MEGABYTE
    processes: int = 8
    disk: int = 16 * MEGABYTE
    output: int = MEGABYTE

    def resources(self) -> dict[str, int]:
        # CPU time per process, a backstop in case the watcher does not check the clock
        cpu = {"RLIMIT_CPU": int(self.seconds + START)} if math.isfinite(self.seconds) else {}
        return {
            **cpu, "RLIMIT_AS": self.memory, "RLIMIT_NPROC": self.processes + 2, "RLIMIT_FSIZE": self.disk,
            "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0, "RLIMIT_MSGQUEUE": 0, "RLIMIT_MEMLOCK": 0,
        }  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """`code`: exit code, negative for a signal; None if it was killed from outside. `error`: why it never ran."""

    stdout: bytes
    stderr: bytes
    code: int | None
    timed_out: bool = False
    flooded: bool = False  # more output than allowed
    swollen: bool = False  # more memory than allowed, all processes together
    error: str = ""


@dataclass(frozen=True)
class Cell:
    """What the program sees in addition to the system: read-only folders (source -> place) and its environment."""

    binds: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def run_program(
    argv: Sequence[str], *, kind: str, limits: Limits, files: Mapping[str, str] | None = None, stdin: bytes = b""
) -> Outcome:
    """Run a program in a sandbox until it ends or reaches a limit. `files` are written into its working folder."""
    if kind != "none":
        return _Watch(*start(argv, kind=kind, limits=limits, files=files), limits, stdin).outcome()
    with tempfile.TemporaryDirectory(prefix="opd-unsandboxed-") as folder:
        return _Watch(*start(argv, kind=kind, limits=limits, files=files, directory=folder), limits, stdin).outcome()


def start(
    argv: Sequence[str], *, kind: str, limits: Limits, files: Mapping[str, str] | None = None, cell: Cell | None = None,
    directory: str | None = None,
) -> tuple[subprocess.Popen[bytes], int]:  # fmt: skip
    """Start a sandboxed process. Returns it, with pipes on 0, 1 and 2, and the descriptor of its status. Does not wait for it."""
    cell = cell or Cell()
    links, binds = _system(cell)
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", **cell.environment}  # fmt: skip
    architecture = machine()
    config = {
        "parent": None if kind == "bubblewrap" else os.getpid(),
        "isolate": kind == "namespaces",
        "uid": UID,
        "links": links,
        "binds": binds,
        "disk": limits.disk,
        "directory": directory or "/tmp",
        "files": dict(files or {}),
        "limits": {key: value for key, value in limits.resources().items() if kind != "none" or key != "RLIMIT_NPROC"},
        "filter": base64.b64encode(filter_program(architecture)).decode() if architecture and kind != "none" else "",
        "argv": list(argv),
        "environment": environment,
    }
    reading, writing = os.pipe()
    try:
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(config).encode())
            file.flush()
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            command = [python(), "-I", "-S", str(JAIL), str(file.fileno()), str(writing)]
            if kind == "bubblewrap":
                command = [*_bubblewrap(links, {**binds, str(JAIL): "/jail.py"}, limits), python(), "-I", "-S", "/jail.py", *command[-2:]]  # fmt: skip
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}, cwd="/",
                pass_fds=(file.fileno(), writing), start_new_session=True,
            )  # fmt: skip
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return process, reading


def python() -> str:
    """The real interpreter, not a virtual environment's link: only its own installation exists inside the sandbox."""
    return os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]


def _system(cell: Cell) -> tuple[dict[str, str], dict[str, str]]:
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    folders = [path for path in SYSTEM if path not in links and os.path.isdir(path)]
    home = os.path.realpath(sys.base_prefix)
    if not any(Path(home).is_relative_to(folder) for folder in folders):
        folders.append(home)
    return links, {**{folder: folder for folder in folders}, **cell.binds}


def _bubblewrap(links: Mapping[str, str], binds: Mapping[str, str], limits: Limits) -> list[str]:
    command = [
        shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox", "--clearenv",
    ]  # fmt: skip
    command += ["--size", str(limits.disk), "--perms", "1777", "--tmpfs", "/tmp"]  # before binds that may be below it
    for path, target in links.items():
        command += ["--symlink", target, path]
    for source, target in binds.items():
        command += ["--ro-bind", source, target]
    command += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    return [*command, "--chdir", "/tmp", "--remount-ro", "/", "--"]


class _Watch:
    """Feeds and reads a sandboxed process until it ends or exceeds its time, output or memory."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, limits: Limits, stdin: bytes) -> None:
        self.process, self.status, self.limits = process, status, limits
        self.pending = memoryview(stdin)
        self.found: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "status": bytearray()}
        self.timed_out = self.flooded = self.swollen = False

    def outcome(self) -> Outcome:
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout.fileno(), selectors.EVENT_READ, "stdout")
            selector.register(process.stderr.fileno(), selectors.EVENT_READ, "stderr")
            selector.register(self.status, selectors.EVENT_READ, "status")
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin.fileno(), selectors.EVENT_WRITE, "stdin")
            self._loop(selector)
        kill(process)
        with process:
            pass
        os.close(self.status)
        return self._read()

    def _loop(self, selector: selectors.BaseSelector) -> None:
        deadline, look = time.monotonic() + START, 0.0
        started = killed = False
        while any(key.data != "stdin" for key in selector.get_map().values()):
            now = time.monotonic()
            if started and not killed and now >= look:
                self.swollen, look = resident(self.process.pid) > self.limits.memory + WALLS, now + TICK
            left = deadline - now
            if (left <= 0 or self.flooded or self.swollen) and not killed:
                self.timed_out = not (self.flooded or self.swollen)
                kill(self.process)
                killed, deadline = True, time.monotonic() + GRACE
            elif left <= 0:
                return
            for key, _ in selector.select(max(0.0, min(left, TICK) if started else left)):
                if key.data == "stdin":
                    self._feed(selector, key.fd)
                else:
                    self._take(selector, key.fd, key.data)
            if not started and self.found["status"] and not killed:
                started, deadline = True, time.monotonic() + self.limits.seconds

    def _feed(self, selector: selectors.BaseSelector, descriptor: int) -> None:
        try:
            self.pending = self.pending[os.write(descriptor, self.pending[:65536]) :] if self.pending else self.pending
        except BrokenPipeError:
            self.pending = memoryview(b"")
        if not self.pending:
            selector.unregister(descriptor)
            assert self.process.stdin is not None
            self.process.stdin.close()

    def _take(self, selector: selectors.BaseSelector, descriptor: int, name: str) -> None:
        chunk = os.read(descriptor, 65536)
        if not chunk:
            selector.unregister(descriptor)
            return
        kept = self.found[name]
        room = self.limits.output - len(kept)
        kept += chunk[: max(0, room)]
        self.flooded = self.flooded or (name != "status" and len(chunk) > room)

    def _read(self) -> Outcome:
        facts: dict[str, Any] = {}
        for line in bytes(self.found["status"]).splitlines():
            facts.update(json.loads(line))
        error, code = facts.get("error", ""), facts.get("code")
        if not facts.get("started") and not error:
            said = bytes(self.found["stderr"]).decode(errors="replace").strip()
            error = "the sandbox did not start in time" if self.timed_out else said or "the sandbox did not start"
        if code is None and facts.get("started") and not (self.timed_out or self.flooded or self.swollen):
            code = self.process.returncode
        out, wailed = bytes(self.found["stdout"]), bytes(self.found["stderr"])
        return Outcome(out, wailed, code, self.timed_out, self.flooded, self.swollen, error)


class Killable(Protocol):
    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...


def kill(process: Killable) -> None:
    """Kill the process and everything it started. The sandbox's pid namespace ends with its first process."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


# --- Choosing a sandbox that works on this machine ---


OLDEST_KERNEL = (5, 14)  # the first that counts a user's processes per namespace
log = logging.getLogger("opd.sandbox")


def choose(wanted: str) -> str:
    """`auto`, `bubblewrap`, `namespaces` or `none` -> the sandbox to use. Raises RecipeError with the reasons if none works here."""
    if wanted == "none" and sys.platform == "linux":
        log.warning("sandbox: none. Code written by the model runs WITHOUT A SANDBOX, with all rights of this user.")
        return "none"
    reasons = []
    for kind in ("bubblewrap", "namespaces") if wanted == "auto" else (wanted,):
        problem = why_unusable(kind)
        if not problem:
            return kind
        reasons.append(f"{kind}: {problem}")
    raise RecipeError(
        f"sandbox {wanted!r}: no sandbox for model-written code works here ({'; '.join(reasons)}). Install bubblewrap or allow "
        "user namespaces; or, if this machine holds nothing of value, write `rewards: {sandbox: none}`."
    )


@cache
def why_unusable(kind: str) -> str:
    """Why this kind of sandbox cannot be used here; empty if it can. Runs a test program once."""
    if sys.platform != "linux" or machine() is None:
        return "needs Linux on x86_64 or aarch64"
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if version is None or (int(version[1]), int(version[2])) < OLDEST_KERNEL:
        return f"needs Linux 5.14 or newer, this is {os.uname().release}"
    if kind == "bubblewrap":
        if shutil.which("bwrap") is None:
            return "bwrap is not installed"
        if os.geteuid() == 0:
            return "its process limit does not apply to root"
    try:
        outcome = run_program([python(), "-I", "-S", "-c", "print(1)"], kind=kind, limits=Limits(seconds=60.0))
    except OSError as error:
        return str(error)
    return "" if outcome.stdout == b"1\n" else (outcome.error or outcome.stderr.decode(errors="replace").strip())


# --- Memory of a sandbox: the sum over its processes, polled many times a second ---
#
# Cgroups would be exact, but few users may write to them. Growth between two polls is bounded by the limit per process. Pages
# that forked processes share are counted in each.


TICK = 0.05  # seconds between two polls
WALLS = (
    64 << 20
)  # bytes for the processes around a program, so that at its own limit its allocations fail and it is not killed
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(root: int) -> int:
    """Resident memory of a process and all its descendants, in bytes."""
    total, waiting = 0, [root]
    while waiting:
        place = Path("/proc", str(waiting.pop()))
        try:
            total += int((place / "statm").read_text().split()[1]) * PAGE
            for thread in os.listdir(place / "task"):
                waiting += [int(child) for child in (place / "task" / thread / "children").read_text().split()]
        except (OSError, ValueError, IndexError):
            continue  # the process has just ended
    return total


# --- The system-call filter, as the bytes that the kernel expects (classic BPF). Needs no library ---
#
# Namespaces hide files, processes and networks. The filter blocks what they leave open: socket families that ignore network
# namespaces (vsock reaches a virtual machine's host), memory outside the size limits (memfd, System V segments), nested
# namespaces, tracing, and kernel features that no test program needs. Blocked calls fail with EPERM.


# names -> (x86_64, aarch64); None: the call does not exist there
BLOCKED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "personality": (135, 92),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "vmsplice": (278, 75), "fanotify_init": (300, 262),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "uselib": (134, None),
}  # fmt: skip
CLONE, CLONE3 = (56, 220), (435, 435)
NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW… flag
AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32 = 0x40000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data


def machine() -> str | None:
    """This machine's architecture; None if the filter does not support it."""
    name = os.uname().machine
    return name if name in AUDIT_ARCHITECTURE else None


def filter_program(architecture: str) -> bytes:
    column = list(AUDIT_ARCHITECTURE).index(architecture)
    blocked = [numbers[column] for numbers in BLOCKED.values()]
    lines = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(EQUAL, AUDIT_ARCHITECTURE[architecture], 1, 0),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER),
        _instruction(AT_LEAST, X32, 0, 1),
        _instruction(RETURN, KILL),
        _instruction(EQUAL, CLONE3[column], 0, 1),
        _instruction(RETURN, ENOSYS),  # the C library falls back to clone, whose flags the filter can read
    ]
    for number in blocked:
        if number is not None:
            lines += [_instruction(EQUAL, number, 0, 1), _instruction(RETURN, EPERM)]
    lines += [
        _instruction(EQUAL, CLONE[column], 0, 3),
        _instruction(LOAD, FIRST_ARGUMENT),
        _instruction(ANY_BIT, NEW_NAMESPACES, 0, 1),
        _instruction(RETURN, EPERM),
        _instruction(RETURN, ALLOW),
    ]
    return b"".join(lines)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
