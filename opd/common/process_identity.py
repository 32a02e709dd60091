"""Who writes to a run directory: `run.lock` names the process, which may have died since, and its lock ends with it. It is taken in `opd.runner.lock`."""

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
    """Who wrote `run.lock` last and did not give it back. That process may be dead."""
    try:
        found = json.loads((directory / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, not readable for us, or being written
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
    return f"a child of {who}, which has died" if _seen_from_here(found) and not _alive(found) else who


def at_work(directory: Path) -> bool:
    """Whether a process has a run in hand. On this machine its lock tells, whatever container it is in; one on another machine,
    whose locks need not reach here, is believed."""
    found = holder(directory)
    return _locked(directory / NAME) or (found is not None and (not _this_kernel(found) or _alive(found)))


def elsewhere(directory: Path) -> bool:
    """Whether the holder was a process of another machine, or of this one before it was started anew."""
    found = holder(directory)
    return found is not None and not _this_kernel(found)


def _locked(path: Path) -> bool:
    """Whether some process has the kernel's lock.

    It is asked for a moment with a shared one, which no other reader minds; a writer that comes just then tries again.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # not there, or not readable for us
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
    """Containers of one machine have names of their own, and one boot."""
    mine = myself()
    return found.get("boot") == mine["boot"] and (mine["boot"] is not None or found.get("host") == mine["host"])


def _seen_from_here(found: Mapping[str, Any]) -> bool:
    """Only processes of the same namespace can be looked up."""
    return _this_kernel(found) and found.get("namespace") == myself()["namespace"]


def _alive(found: Mapping[str, Any]) -> bool:
    return _seen_from_here(found) and _started(found.get("pid")) == found.get("started")


def myself() -> dict[str, Any]:
    """Pids are used again: the start time (in clock ticks since boot) and the boot tell two processes apart."""
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
