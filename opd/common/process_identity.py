"""The process that writes to a run directory. `run.lock` names it; its lock ends with the process. `opd.runner.lock` takes the lock."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "run.lock"


def holder(directory: Path) -> dict[str, Any] | None:
    """The process that wrote `run.lock` and did not release it. It may be dead."""
    try:
        found = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # missing, not readable, or being written
        return None
    return found if isinstance(found, dict) else None


def describe(directory: Path) -> str:
    """The holder in words.

    >>> describe(Path("runs/quickstart"))        # doctest: +SKIP
    'process 4711 on host7, since 2026-05-01 12:00:00'
    """
    found = holder(directory)
    if found is None:
        return "an unknown process"
    who = f"process {found.get('pid')} on {found.get('host')}, since {found.get('since')}"
    return f"a child of {who}, which has died" if _seen_from_here(found) and not _alive(found) else who


def is_running(directory: Path) -> bool:
    """Whether a process is running a run. On this machine the lock tells, also from other containers. A process of another machine
    is assumed to be alive, because its locks may not be visible here."""
    found = holder(directory)
    return _locked(directory / NAME) or (found is not None and (not _this_kernel(found) or _alive(found)))


def elsewhere(directory: Path) -> bool:
    """Whether the holder was a process of another machine, or of this machine before its last boot."""
    found = holder(directory)
    return found is not None and not _this_kernel(found)


def _locked(path: Path) -> bool:
    """Whether a process has the kernel's lock.

    A shared lock is tried for a moment, which does not disturb other readers. A writer that comes at this moment tries again.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # missing, or not readable
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return False
    finally:
        os.close(handle)
    return False


def _this_kernel(found: Mapping[str, Any]) -> bool:
    """The boot of this machine, which all its containers share."""
    mine = this_process()
    return found.get("boot") == mine["boot"] and (mine["boot"] is not None or found.get("host") == mine["host"])


def _seen_from_here(found: Mapping[str, Any]) -> bool:
    """The namespace of process ids. Only its processes can be looked up."""
    return _this_kernel(found) and found.get("namespace") == this_process()["namespace"]


def _alive(found: Mapping[str, Any]) -> bool:
    return _seen_from_here(found) and _started(found.get("pid")) == found.get("started")


def this_process() -> dict[str, Any]:
    """Start time in clock ticks since boot. With the boot it tells two processes with one pid apart."""
    return {
        "pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "started": _started(os.getpid()), "boot": _first_line(Path("/proc/sys/kernel/random/boot_id")),
        "namespace": _link(Path("/proc/self/ns/pid")),
    }  # fmt: skip


def _started(pid: Any) -> str | None:
    line = _first_line(Path(f"/proc/{pid}/stat"))
    return line.rpartition(")")[2].split()[19] if line else None


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # not Linux
        return None


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:  # not Linux, or no such process
        return None
