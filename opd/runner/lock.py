"""One owner per run directory: `run.lock` names the process that writes there.

The lock is the kernel's (`flock`), so it ends with its holder, however that dies, and the next one takes over. The text
in the file only names the holder. Readers of a run directory ask for a moment whether it is held (`opd.common.process_identity.at_work`).

A new run is `claim`ed: the directory is made, locked, and only then looked into and written to. Whoever comes second finds
it locked or used, and takes the next name.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from opd.common.errors import RunDirectoryError, RunLocked
from opd.common.process_identity import NAME, describe, elsewhere, holder, myself

LEASE, AGAIN = 180.0, 2.0  # seconds for a lock of another machine, which NFS keeps for 90, and between two tries
ATTEMPTS = 100  # at a directory that others make and take away meanwhile
LOOKS, BETWEEN = 25, 0.02  # at a lock that is held, maybe by a reader that asks about it; seconds
_held: set[int] = set()


class Gone(RunDirectoryError):
    """The directory was there a moment ago; the process that had made it has taken it away again."""


def _let_go() -> None:
    """A forked process shares the lock for as long as it lives; it is the parent's alone."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


class RunLock:
    """Use as a context manager, or `take` and `release`. `previous` is a holder that died without giving it back, if any."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self.previous: dict[str, Any] | None = None
        self._handle: int | None = None

    @property
    def directory(self) -> Path:
        return self.path.parent

    def take(self, looks: int = LOOKS) -> RunLock:
        handle = self._open(looks)
        while not self._is(handle):  # its holder withdrew the directory, lock and all, while we waited
            os.close(handle)
            handle = self._open(looks)
        self._handle, self.previous = handle, holder(self.directory)
        _held.add(handle)
        self._write(json.dumps(myself()))
        return self

    def take_patiently(self) -> RunLock:
        """For a job that is started again: a file server keeps the lock of a machine that is gone for a while."""
        until, told = time.monotonic() + LEASE, False
        while True:
            try:
                return self.take()
            except RunLocked:
                if not elsewhere(self.directory) or time.monotonic() >= until:
                    raise
            if not told:
                who = describe(self.directory)
                from opd.common.http import to_stderr  # `opd --help` stays instant

                to_stderr(
                    f"{self.directory} is in use by {who}. If that machine is gone, its lock ends: waiting {LEASE:g} s"
                )
            told = True
            time.sleep(AGAIN)

    def _open(self, looks: int) -> int:
        """The lock's file, locked."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            raise Gone(f"{self.directory}: no such directory.") from None
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be opened: {error.strerror}. A process that writes to a run directory must be able to "
                "open this file: check its permissions, or choose another directory."
            ) from None
        try:
            _lock(handle, looks)
        except BlockingIOError:
            os.close(handle)
            raise RunLocked(
                f"{self.directory} is in use by {describe(self.directory)}. Only one process may write there: "
                "wait for it to finish, or stop it."
            ) from None
        except OSError as error:
            os.close(handle)
            raise RunDirectoryError(
                f"{self.path}: this file system does not support locks ({error.strerror}), so a second process could write to "
                "the run. Put the run directory on another file system."
            ) from None
        return handle

    def _is(self, handle: int) -> bool:
        """Whether the path still names the file that is locked."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._handle in _held:  # not in a process forked off since
            assert self._handle is not None
            self._write("")
            os.close(self._handle)
            _held.discard(self._handle)
        self._handle = None

    def __enter__(self) -> RunLock:
        return self.take()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _write(self, text: str) -> None:
        assert self._handle is not None
        os.ftruncate(self._handle, 0)
        try:
            os.pwrite(self._handle, text.encode(), 0)
        except OSError as error:  # a full disk: the kernel's lock holds all the same, it is only unnamed
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


def _lock(handle: int, looks: int) -> None:
    for _ in range(looks - 1):
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(BETWEEN)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


# A directory of one's own


def claim(wanted: Path) -> tuple[RunLock, bool]:
    """The wanted directory, or the first free `NAME-2`, `NAME-3`, …, locked; and whether it had to be made.

    A directory that was there may be used if it is empty, which counts only once it is locked.
    """
    candidate, number = wanted, 2
    while True:
        made = make(candidate)
        if made or _free(candidate):
            lock = RunLock(candidate)
            try:
                lock.take(looks=1)
            except Gone:
                continue
            except RunLocked:
                pass
            else:
                if _free(candidate):
                    return lock, made
                lock.release()
        candidate, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1


def make(directory: Path) -> bool:
    """True for the one process that made it; False where something of this name is there."""
    for _ in range(ATTEMPTS):
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir()
            return True
        except (
            FileNotFoundError
        ) as error:  # the parent was taken away in between; or nothing can be made here, as in /proc
            why = error.strerror
        except FileExistsError:
            if directory.parent.is_dir():
                return False
            raise RunDirectoryError(
                f"run directory {str(directory)!r}: {directory.parent} is not a directory."
            ) from None
        except OSError as error:
            raise RunDirectoryError(f"run directory {str(directory)!r} cannot be created: {error.strerror}.") from None
    raise RunDirectoryError(f"run directory {str(directory)!r} cannot be created: {why}.")


def _free(directory: Path) -> bool:
    """Whether nothing but a lock is in it. A file of this name, or a directory closed to us, is not free."""
    try:
        return set(os.listdir(directory)) <= {NAME}
    except (NotADirectoryError, FileNotFoundError, PermissionError):
        return False
