"""One owner per run directory: `run.lock` names the process that writes there.

The kernel holds the lock (`flock`), so it ends with its process, however that ends, and the next process can take it. The text in the
file only names the holder. Readers of a run directory briefly check whether it is held (`opd.common.process_identity.is_running`).

A new run uses `claim`: it creates the directory and locks it before it reads or writes anything there. A second process finds the
directory locked or in use, and takes the next name.
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
from opd.common.process_identity import NAME, describe, elsewhere, holder, this_process

LEASE, AGAIN = 180.0, 2.0  # seconds to wait for another machine's lock, which NFS keeps for 90, and between attempts
ATTEMPTS = 100  # at a directory that other processes create and remove in the meantime
LOOKS, BETWEEN = 25, 0.02  # attempts at a held lock, which a reader may hold briefly; seconds between them
_held: set[int] = set()


class DirectoryRemoved(RunDirectoryError):
    """The directory was removed by the process that had created it."""


def _close_inherited() -> None:
    """Close the parent's lock in a forked process, which would otherwise share it."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_inherited)


class RunLock:
    """Use as a context manager, or `take` and `release`. `previous`: a holder that died without releasing the lock, if any."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self.previous: dict[str, Any] | None = None
        self._handle: int | None = None

    @property
    def directory(self) -> Path:
        return self.path.parent

    def take(self, looks: int = LOOKS) -> RunLock:
        handle = self._open(looks)
        while not self._is(handle):  # its holder removed the directory with the lock meanwhile
            os.close(handle)
            handle = self._open(looks)
        self._handle, self.previous = handle, holder(self.directory)
        _held.add(handle)
        self._write(json.dumps(this_process()))
        return self

    def take_with_wait(self) -> RunLock:
        """For a restarted job: a file server keeps the lock of a lost machine for a while."""
        until, announced = time.monotonic() + LEASE, False
        while True:
            try:
                return self.take()
            except RunLocked:
                if not elsewhere(self.directory) or time.monotonic() >= until:
                    raise
            if not announced:
                who = describe(self.directory)
                from opd.common.http import to_stderr  # keeps `opd --help` fast

                to_stderr(
                    f"{self.directory} is in use by {who}. If that machine is down, its lock expires: waiting {LEASE:g} s"
                )
            announced = True
            time.sleep(AGAIN)

    def _open(self, looks: int) -> int:
        """Open and lock the lock file."""
        try:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            raise DirectoryRemoved(f"{self.directory}: no such directory.") from None
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
        """Whether the path still names the locked file."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if self._handle in _held:  # false in a process forked since
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
        except OSError as error:  # for example a full disk: the lock holds, and only its text is missing
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


def _lock(handle: int, looks: int) -> None:
    for _ in range(looks - 1):
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(BETWEEN)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- Claiming a directory ---


def claim(wanted: Path) -> tuple[RunLock, bool]:
    """Lock the wanted directory, or the first free `NAME-2`, `NAME-3`, …. Also returns whether it was created.

    An existing directory may be used if it is empty. This is checked after locking it.
    """
    candidate, number = wanted, 2
    while True:
        made = make(candidate)
        if made or _free(candidate):
            lock = RunLock(candidate)
            try:
                lock.take(looks=1)
            except DirectoryRemoved:
                continue
            except RunLocked:
                pass
            else:
                if _free(candidate):
                    return lock, made
                lock.release()
        candidate, number = wanted.with_name(f"{wanted.name}-{number}"), number + 1


def make(directory: Path) -> bool:
    """Create the directory. True for the one process that created it, False if the name exists."""
    for _ in range(ATTEMPTS):
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.mkdir()
            return True
        except (
            FileNotFoundError
        ) as error:  # the parent was removed meanwhile, or nothing can be created here, as in /proc
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
    """Whether the directory holds nothing but a lock. A file of this name or an unreadable directory is not free."""
    try:
        return set(os.listdir(directory)) <= {NAME}
    except (NotADirectoryError, FileNotFoundError, PermissionError):
        return False
