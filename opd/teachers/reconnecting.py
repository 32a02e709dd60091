"""Whether a server still is what it was: when it is first asked, behind every batch, and when a run is taken up."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from opd.errors import RemoteError, RunDirectoryError, ServerAway
from opd.remote import OneServer, Remote
from opd.teachers.probe import Probe
from opd.types import TeacherLike

PROBE = "probe"
STARTED = re.compile(rb"^process_start_time_seconds (\S+)$", re.MULTILINE)  # among Prometheus metrics
ROUNDS = 3  # in which a server may be another process each time
T = TypeVar("T")


class Constancy:
    """A probe that a remote teacher scores. What it said goes into checkpoints, so that a resume finds the same teacher."""

    def __init__(self, teacher: TeacherLike, remote: Remote, size: int, tolerance: float) -> None:
        self._teacher, self._remote, self._size, self._tolerance = teacher, remote, size, tolerance
        self._probe: Probe | None = None
        self._processes: dict[OneServer | None, str | None] = {}  # that were seen last; None: it does not say
        self._changed: set[OneServer | None] = set()  # since the last batch began

    def open(self, avoid: tuple[int, ...]) -> None:
        """Ask twice: a server that answers one text in two ways is told at once, as are two that serve different models."""
        probe = Probe(self._teacher, self._size, avoid=avoid, tolerance=self._tolerance)
        for place in self._remote.places:
            place.used = True
        self._remote.check_used(partial(self._look, probe))
        self._probe = probe

    def map(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Answers in order. They count if who gave them still is the same server: it may have been restarted with nobody looking.

        What one of several answered that is away when it is looked at, the others are asked again. So is what was answered while
        a server was restarted: it may have been another in between.
        """
        probe, self._probe = self._probe, None  # while it is scored itself
        if probe is None:
            return self._remote.map(calls)
        look, found, missing, rounds = partial(self._look, probe), dict[int, T](), list(range(len(calls))), 0
        try:
            self._remote.take_back(look)
            while missing:
                self._changed.clear()
                answers = self._remote.map([partial(self._signed, calls[number]) for number in missing])
                away, rounds = self._remote.check_used(look), rounds + 1
                doubted = {*away, *(self._changed if rounds <= ROUNDS else self._give_up_telling())}
                found |= {
                    n: answer for n, (answer, place) in zip(missing, answers, strict=True) if place not in doubted
                }
                missing = [number for number in missing if number not in found]
        finally:
            self._probe = probe
        return [found[number] for number in range(len(calls))]

    def _look(self, probe: Probe) -> None:
        """Whether it says what it said, and whether it is the process that it was when it was looked at last."""
        probe.check(self._teacher)
        place = self._remote.looked_at
        before = self._processes.get(place, "")
        if before is not None:
            self._processes[place] = now = self._process()
            if before not in ("", now):
                self._changed.add(place)

    def _process(self) -> str | None:
        """When the server was started, as vLLM's metrics tell."""
        try:
            metrics, _ = self._remote.bytes("GET", "/metrics", accept="text/plain")
        except ServerAway:
            raise
        except RemoteError:  # it has none
            return None
        found = STARTED.search(metrics)
        return None if found is None else found[1].decode()

    def _give_up_telling(self) -> list[OneServer | None]:
        """Several processes stand behind one address: nobody can tell from here when one of them is restarted."""
        for place in self._changed:
            self._processes[place] = None
            where = self._remote.address if place is None else place.address
            self._remote.say(
                f"{where} is another process whenever it is looked at; that one is restarted goes unnoticed"
            )
        return []

    def _signed(self, call: Callable[[], T]) -> tuple[T, OneServer | None]:
        return call(), self._remote.answered_by

    def state(self) -> Mapping[str, Any]:
        import torch

        assert self._probe is not None
        return {PROBE: torch.from_numpy(self._probe.logprobs)}

    def restore(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Refuse another teacher than the one that the run began with."""
        assert self._probe is not None
        teacher, now = self._teacher, self._probe.logprobs
        if version != teacher.version:
            raise RunDirectoryError(
                f"teacher {teacher.name!r}: the run began with version {version} of what is read here of it, and this is "
                f"{teacher.version}. Restore its files, or start a new run."
            )
        then = np.asarray(tensors[PROBE])
        gap = float(np.abs(now - then).max()) if then.shape == now.shape else np.inf
        if not gap <= self._tolerance:
            raise RunDirectoryError(
                f"teacher {teacher.name!r}: {self._remote.address} serves another model than the run began with: log-probs of a fixed "
                f"probe differ by {gap:.3g} nats (tolerance {self._tolerance:g}). Serve the same one, or start a new run."
            )
