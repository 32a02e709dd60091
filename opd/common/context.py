"""What every part of a run is given: where it may keep files, the ranks it runs on, whom it tells, and what ends a wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from opd.common.http import nothing, to_stderr

T = TypeVar("T")


class Peers(Protocol):
    """The ranks of a run, as far as a part may ask them something. All of them have to make each call."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this process owns the run directory: lock, store, rewards, metrics, what is shown."""

    @property
    def sharded(self) -> bool:
        """Whether the student's weights are spread over the ranks."""

    def share(self, make: Callable[[], T]) -> T:
        """What the leader makes, on every rank."""

    def gather(self, part: T) -> list[T]:
        """Every rank's part, in their order, on every rank."""

    def barrier(self) -> None:
        """Return once every rank is here."""

    def deal(self, rollouts: Sequence[Any]) -> list[Any]:
        """This rank's rollouts of a batch. Groups and pairs stay whole."""

    def answering(self) -> AbstractContextManager[None]:
        """While the others wait for what this rank samples."""

    def holding(self) -> AbstractContextManager[None]:
        """No rank leaves in here."""

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
    """Where signals to stop arrive."""

    @property
    def asked(self) -> int:
        """The signal that asks to stop; 0: none."""

    def check(self) -> None:
        """Raise if one has arrived."""

    def obey(self, number: int) -> None:
        """Take over a signal that another rank was sent."""


def say_nothing(line: str) -> None:
    pass


@dataclass(frozen=True)
class RunContext:
    """Passed down to every part; no part knows the run that made it.

    >>> RunContext(say=print).say("main: 200 steps")
    main: 200 steps
    """

    directory: Path | None = None  # None: nothing is kept
    stage: str = ""
    ranks: Peers = field(default_factory=OneProcess)
    say: Callable[[str], None] = to_stderr
    on_phase: Callable[[str], None] = say_nothing  # is told what the run is doing now
    check_stop: Callable[[], None] = nothing  # raises if the run is to stop

    def say_of_stage(self, line: str) -> None:
        self.say(f"{self.stage}: {line}")
