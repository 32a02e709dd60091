"""Group commit: what callers hand in is written together, at most every interval, by a thread that also syncs it.

The thread writes one frame and waits until it is durable before it takes the next, so a crash can tear one frame at
most. Sampling never waits for the disk; only `wait` does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class GroupCommit:
    """`write` makes a list of items durable.

    With an interval of 0 there is no thread: `wait` writes, and so does `nudge`.
    """

    def __init__(self, write: Callable[[list[Any]], None], interval_s: float) -> None:
        self._write, self.interval_s = write, interval_s
        self._items: list[Any] = []
        self._changed = threading.Condition()
        self._accepted = self._durable = 0
        self._urgent = self._closing = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.writing = threading.Lock()  # who holds it sees no frame being written

    def add(self, item: Any) -> None:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._items.append(item)
            self._accepted += 1
            if self.interval_s and (self._thread is None or len(self._items) == 1):
                self._start()
                self._changed.notify_all()

    def nudge(self) -> None:
        """Write soon; returns at once. Without a thread, write now."""
        if not self.interval_s:
            self.wait()
        elif self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Return once everything added so far is durable."""
        if self._thread is None:
            self._write_here()
            return
        with self._changed:
            wanted = self._accepted
            self._urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._durable >= wanted or self._failure is not None)
            if self._durable < wanted and self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Write what is left and end the thread."""
        try:
            self.wait()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join()
                self._thread = None

    def _write_here(self) -> None:
        with self.writing:  # before items are taken: those of two threads are written in the order they came in
            if self._failure is not None:
                raise self._failure
            with self._changed:
                batch, self._items = self._items, []
            if not batch:
                return
            try:
                self._write(batch)
            except BaseException as error:  # nothing may be written behind a frame that failed
                self._failure = error
                raise
            with self._changed:
                self._durable += len(batch)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="opd-store", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closing)
                if not self._items:
                    return
                self._changed.wait_for(lambda: self._urgent or self._closing, timeout=self.interval_s)
                batch, self._items, self._urgent = self._items, [], False
            try:
                with self.writing:
                    self._write(batch)
            except BaseException as error:  # raised again in the caller's thread
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._durable += len(batch)
                self._changed.notify_all()
