"""One owner per run directory: `run.lock` names the process that writes there.

The lock is the kernel's (`flock`), so it ends with its holder, however that dies, and the next one takes over. The text
in the file only names the holder. Readers of a run directory never ask for it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from opd.errors import RunDirectoryError, RunLocked

NAME = "run.lock"
_held: set[int] = set()


def _let_go() -> None:
    """A forked process shares the lock for as long as it lives; it is the parent's alone."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


class RunLock:
    """Use as a context manager. `previous` is a holder that died without giving the lock back, if there was one."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self.previous: dict[str, Any] | None = None
        self._handle: int | None = None

    def __enter__(self) -> RunLock:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise RunLocked(f"{self.path.parent} is in use by {describe(self.path.parent)}. One process at a time writes there; "
                            "wait for it or end it.") from None  # fmt: skip
        except OSError as error:
            os.close(handle)
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            raise RunDirectoryError(f"{self.path}: this file system has no locks ({error.strerror}), so a second process could "
                                    "write into the run. Put the run directory on another one.") from None  # fmt: skip
        self._handle, self.previous = handle, holder(self.path.parent)
        _held.add(handle)
        self._write(json.dumps(_myself()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle in _held:  # not in a process forked off since
            self._write("")
            os.close(self._handle)
            _held.discard(self._handle)
        self._handle = None

    def _write(self, text: str) -> None:
        assert self._handle is not None
        os.ftruncate(self._handle, 0)
        try:
            os.pwrite(self._handle, text.encode(), 0)
        except OSError as error:  # a full disk: the kernel's lock holds all the same, it is only unnamed
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


def holder(directory: Path) -> dict[str, Any] | None:
    """Who wrote `run.lock` last and did not give it back. That process may be dead."""
    try:
        found = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def describe(directory: Path) -> str:
    """The holder in words.

    >>> describe(Path("runs/quickstart"))        # doctest: +SKIP
    'process 4711 on host7, since 2026-05-01 12:00:00'
    """
    found = holder(directory)
    if found is None:
        return "a process that has not named itself"
    who = f"process {found.get('pid')} on {found.get('host')}, since {found.get('since')}"
    mine = _myself()
    here = found.get("host") == mine["host"] and found.get("boot") == mine["boot"]
    if here and _started(found.get("pid")) != found.get("started"):
        return f"a child of {who}, which is dead itself"
    return who


def _myself() -> dict[str, Any]:
    """Pids are used again: the start time (in clock ticks since boot) and the boot tell two processes apart."""
    return {
        "pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "started": _started(os.getpid()), "boot": _first_line(Path("/proc/sys/kernel/random/boot_id")),
    }  # fmt: skip


def _started(pid: Any) -> str | None:
    line = _first_line(Path(f"/proc/{pid}/stat"))
    return line.rpartition(")")[2].split()[19] if line else None


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux, or no such process
        return None
