"""The context of a run, which every part gets: its directory, its ranks, where messages go, and how waits end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from opd.common.http import nothing, to_stderr

T = TypeVar("T")


class Peers:
    """The ranks of a run, as a part sees them. All ranks have to make each call. By itself this is a run in one process."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this process owns the run directory: lock, store, rewards, metrics, progress."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether the student's weights are sharded over the ranks."""
        return False

    def share(self, make: Callable[[], T]) -> T:
        """Return the leader's value on every rank."""
        return make()

    def gather(self, part: T) -> list[T]:
        """Return the parts of all ranks, in order, on every rank."""
        return [part]

    def barrier(self) -> None:
        """Wait for all ranks."""

    def deal(self, rollouts: Sequence[Any]) -> list[Any]:
        """This rank's rollouts of a batch. Groups and pairs stay whole."""
        return list(rollouts)

    def exchange(self, signals: Mapping[str, Any], hidden: bool) -> dict[str, Any]:
        """Signals of all ranks, by rollout. Hidden states stay on the rank that uses them."""
        return dict(signals)

    def complete(self, batch: Any) -> None:
        """Complete the first pass over a batch, of which every rank computed a part."""

    def collect(self, seen: list[Any]) -> list[Any]:
        """Statistics of all ranks' micro-batches."""
        return seen

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A context in which the other ranks wait for this one to sample."""
        yield

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A context in which no rank stops."""
        yield

    def poll_stop(self) -> None:
        """Raise if a stop has been asked for."""


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
    ranks: Peers = field(default_factory=Peers)
    say: Callable[[str], None] = to_stderr
    on_phase: Callable[[str], None] = say_nothing  # gets a line about what the run is doing
    check_stop: Callable[[], None] = nothing  # raises if the run is to stop

    def say_of_stage(self, line: str) -> None:
        self.say(f"{self.stage}: {line}")
