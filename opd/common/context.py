"""The context of a run, which every part gets: its directory, its ranks, where messages go, and how waits end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from opd.common.http import nothing, to_stderr

T = TypeVar("T")


class Peers(Protocol):
    """The ranks of a run, as a part sees them. All ranks have to make each call."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this process owns the run directory: lock, store, rewards, metrics, progress."""

    @property
    def sharded(self) -> bool:
        """Whether the student's weights are spread over the ranks."""

    def share(self, make: Callable[[], T]) -> T:
        """Return the leader's value on every rank."""

    def gather(self, part: T) -> list[T]:
        """Return the parts of all ranks, in order, on every rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def deal(self, rollouts: Sequence[Any]) -> list[Any]:
        """This rank's rollouts of a batch. Groups and pairs stay whole."""

    def answering(self) -> AbstractContextManager[None]:
        """A context in which the other ranks wait for this one to sample."""

    def holding(self) -> AbstractContextManager[None]:
        """A context in which no rank stops."""

    def poll_stop(self) -> None:
        """Raise if a stop has been asked for."""


class OneProcess:
    """A run in one process."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        return False

    def share(self, make: Callable[[], T]) -> T:
        return make()

    def gather(self, part: T) -> list[T]:
        return [part]

    def barrier(self) -> None:
        pass

    def deal(self, rollouts: Sequence[Any]) -> list[Any]:
        return list(rollouts)

    @contextmanager
    def answering(self) -> Iterator[None]:
        yield

    @contextmanager
    def holding(self) -> Iterator[None]:
        yield

    def poll_stop(self) -> None:
        pass


class StopRequests(Protocol):
    """Receives signals to stop."""

    @property
    def asked(self) -> int:
        """The signal that asks to stop; 0: none."""

    def check(self) -> None:
        """Raise if one has arrived."""

    def obey(self, number: int) -> None:
        """Take a signal that was sent to another rank."""


def say_nothing(line: str) -> None:
    pass


@dataclass(frozen=True)
class RunContext:
    """Passed to every part. No part knows the run that made it.

    >>> RunContext(say=print).say("main: 200 steps")
    main: 200 steps
    """

    directory: Path | None = None  # None: nothing is kept
    stage: str = ""
    ranks: Peers = field(default_factory=OneProcess)
    say: Callable[[str], None] = to_stderr
    on_phase: Callable[[str], None] = say_nothing  # gets a line about what the run is doing
    check_stop: Callable[[], None] = nothing  # raises if the run is to stop

    def say_of_stage(self, line: str) -> None:
        self.say(f"{self.stage}: {line}")
