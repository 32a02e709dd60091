"""Ctrl-C and SIGTERM, turned into a request that the run follows at its next token.

    Ctrl-C    `Stopped`: a checkpoint is saved; a second Ctrl-C exits at once
    SIGTERM   `Preempted`: flush and exit within the grace time, with an exit code that means "resume me"

Python runs signal handlers between bytecodes, so a long call into torch delays them. A watchdog thread sees SIGTERM at once and
ends the process when the grace time is over. The files on disk are consistent at every moment.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from opd.common.errors import RESUME_ME, Preempted, Stopped

MARGIN = 0.9  # usable fraction of the grace time; the rest is for the interpreter's exit


class Interrupts:
    """Use as a context manager. Outside the main thread it does nothing, and the caller keeps its own handlers."""

    def __init__(self, announce: Callable[[str], None], grace: float) -> None:
        self.grace, self._announce = grace, announce
        self._asked: int | None = None  # the first signal
        self._since, self._said = 0.0, False
        self._previous: dict[int, object] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._previous_wakeup = -1

    def check(self) -> None:
        if self._asked == signal.SIGTERM:
            if not self._said:
                self._said = True
                self._announce(
                    f"SIGTERM: saving, and exiting within {self.grace:g} s; `opd resume` continues from here"
                )
            raise Preempted
        if self._asked is not None:
            raise Stopped

    def ask(self) -> None:
        """Request a stop from the program, as Ctrl-C would. A Ctrl-C after it exits at once."""
        if self._asked is None:
            self._asked, self._since = signal.SIGINT, time.monotonic()

    @property
    def asked(self) -> int:
        """The signal that requested a stop; 0 if none did."""
        return self._asked or 0

    def obey(self, number: int) -> None:
        """Follow a signal that another rank received."""
        if self._asked is None or number == signal.SIGTERM:
            self._asked, self._since = number, self._since or time.monotonic()

    @property
    def left(self) -> float:
        """Remaining seconds of the grace time."""
        return self.grace * MARGIN - (time.monotonic() - self._since)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
            reader, writer = self._wakeup = socket.socketpair()
            writer.setblocking(False)
            self._previous_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reader,), name="preemption", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._wakeup is None:
            return
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._wakeup[1].close()  # the watchdog reads the end of the stream and returns
        self._wakeup = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked, self._since = number, time.monotonic()
            if number == signal.SIGINT:
                self._announce("stopping: saving a checkpoint (press Ctrl-C again to quit at once)")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def _watch(self, reader: socket.socket) -> None:
        with reader:
            while signal.SIGTERM not in (heard := reader.recv(64)):
                if not heard:
                    return
            deadline = time.monotonic() + self.grace * MARGIN
            try:
                while heard:
                    reader.settimeout(max(deadline - time.monotonic(), 0.001))
                    heard = reader.recv(64)
            except TimeoutError:
                print("opd: the grace time is over; exiting now", file=sys.stderr, flush=True)
                os._exit(RESUME_ME)
