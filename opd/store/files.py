"""The file layer: everything the store asks of a disk. Tests put one in its place that loses what was not synced."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class AppendFile:
    """A file that only grows at its end, or is cut back to an earlier one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # a link would lead to another's file
        self._descriptor = os.open(path, flags, 0o644)
        self.size = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """All of it, or an error; after an error the end of the file is unknown and has to be cut."""
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            self.size += written
            view = view[written:]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        self.size = size

    def close(self) -> None:
        os.close(self._descriptor)


class Files:
    def append(self, path: Path) -> AppendFile:
        return AppendFile(path)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sync_directory(self, directory: Path) -> None:
        """A file's name is durable only once its directory is."""
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        """A directory whose name, and the names of all that had to be made above it, are durable."""
        missing = [part for part in (path, *path.parents) if not part.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for part in reversed(missing):
            self.sync_directory(part.parent)

    def create(self, path: Path, chunks: Iterable[bytes]) -> None:
        """A whole file or none: temporary name, sync, rename, sync of the directory."""
        partial = path.with_name(path.name + ".partial")
        self.remove(partial)
        file = self.append(partial)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.sync()
        except OSError:
            self.remove(partial)
            raise
        finally:
            file.close()
        self.rename(partial, path)
        self.sync_directory(path.parent)
