"""Whether a server still is what it was: when it is first asked, behind every batch, and when a run is taken up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from opd.errors import RunDirectoryError
from opd.remote import OneServer, Remote
from opd.teachers.probe import Probe
from opd.types import TeacherLike

PROBE = "probe"
T = TypeVar("T")


class Constancy:
    """A probe that a remote teacher scores. What it said goes into checkpoints, so that a resume finds the same teacher."""

    def __init__(self, teacher: TeacherLike, remote: Remote, size: int, tolerance: float) -> None:
        self._teacher, self._remote, self._size, self._tolerance = teacher, remote, size, tolerance
        self._probe: Probe | None = None

    def open(self, avoid: tuple[int, ...]) -> None:
        """Ask twice: a server that answers one text in two ways is told at once, as are two that serve different models."""
        probe = Probe(self._teacher, self._size, avoid=avoid, tolerance=self._tolerance)
        for place in self._remote.places:
            place.used = True
        self._remote.check_used(lambda: probe.check(self._teacher))
        self._probe = probe

    def map(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Answers in order. They count if who gave them still is the same server: it may have been restarted with nobody looking.

        What one of several answered that is away when it is looked at, the others are asked again.
        """
        probe, self._probe = self._probe, None  # while it is scored itself
        if probe is None:
            return self._remote.map(calls)
        check, found, missing = partial(probe.check, self._teacher), dict[int, T](), list(range(len(calls)))
        try:
            self._remote.take_back(check)
            while missing:
                answers = self._remote.map([partial(self._signed, calls[number]) for number in missing])
                away = self._remote.check_used(check)
                found |= {n: answer for n, (answer, place) in zip(missing, answers, strict=True) if place not in away}
                missing = [number for number in missing if number not in found]
        finally:
            self._probe = probe
        return [found[number] for number in range(len(calls))]

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
