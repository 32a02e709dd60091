"""Starts the processes rewards run in. They find their packages where this process found them, wherever that is."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

from opd import sandbox
from opd.rewards.callables import RewardFunction
from opd.rewards.worker import serve_fork

PACKAGE = "/opd-package"  # where confined workers find opd, and packages that no entry of sys.path holds
ROOTS = (
    "numpy",
    "pydantic",
    "yaml",
    "sympy",
    "math_verify",
    "reasoning_gym",
)  # what confined workers import themselves
MEMORY = 4 << 30  # bytes of a confined worker, all its processes together
PROCESSES = 6
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]) or sys.path; sys.path += json.loads(sys.argv[2]); "
    "from opd.rewards.worker import main; main(int(sys.argv[3]))"
)


def unconfined() -> subprocess.Popen[bytes]:
    """A worker with all rights of this user."""
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
    """A worker that is a fork of this process, and so has its functions; else it is what `Popen` would give."""

    stderr = None

    def __init__(self, functions: Mapping[str, RewardFunction]) -> None:
        asked, questions = os.pipe()
        replies, answers = os.pipe()
        owner = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the child needs none of them
            self.pid = os.fork()
        if not self.pid:
            try:
                serve_fork(asked, answers, functions, owner)
            finally:  # whatever happens, the fork must not go on as the process it came from
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
    """A worker behind walls, and the descriptor its fate is read from. It sees packages, read-only, and no other file."""
    path, binds = packages()
    cell = sandbox.Cell(binds, {"MPLCONFIGDIR": "/tmp"})
    limits = sandbox.Limits(seconds=math.inf, memory=MEMORY, processes=PROCESSES, disk=sandbox.MEGABYTE)
    command = [sandbox.python(), "-I", "-S", "-B", "-c", BOOT, "[]", json.dumps(path), "0"]
    return sandbox.start(command, kind=kind, limits=limits, cell=cell)


def packages() -> tuple[list[str], dict[str, str]]:
    """sys.path of a confined worker behind the standard library's, and what is mounted for it: source -> place.

    Folders on sys.path that hold no packages stay outside: the one a run was started in is full of other things.
    """
    source = Path(__file__).resolve().parents[1]
    entries = [os.path.realpath(entry) for entry in sys.path if entry and os.path.exists(entry)]
    held = [entry for entry in dict.fromkeys(entries) if _holds_packages(Path(entry), source.parent)]
    binds = {str(source): f"{PACKAGE}/opd", **{entry: entry for entry in held}}
    for entry in held:  # packages may be links to where they really are
        links = [item for item in os.scandir(entry) if item.is_symlink()] if os.path.isdir(entry) else []
        targets = {os.path.realpath(item.path) for item in links}
        binds |= {target: target for target in targets if os.path.exists(target) and not _inside(target, held)}
    for name in ROOTS:  # installed for editing: found by a hook, not on sys.path
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
