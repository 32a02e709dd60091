"""Samplers in processes of their own (`sampler.processes`), beside the trainer: neither its cores nor its interpreter are theirs.

Each has a copy of the student, and answers its share of every batch's requests into a log of its own (`store.samplers`). Draws are keyed
by the request, so how many there are changes no token. One that dies is started again, with another log, and goes on behind the tokens in
the one before.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from opd.errors import TrainingError
from opd.models.language_model import LanguageModel
from opd.sampling.ahead import KeepsTokens
from opd.sampling.shared_weights import SharedWeights, layout_of
from opd.store import RolloutStore
from opd.text import plain
from opd.trainer.interpreters import taken
from opd.trainer.messages import read_message, write_message
from opd.trainer.sampler_process import DRAWN, FAILED, READY, WEIGHTS, part_of
from opd.trainer.shared_sampler import dealt
from opd.types import Author, SampleRequest, WeightsRef

DEATHS = 3  # of one process, without an answer that it finished between them, before the run ends
POLL = 0.2  # seconds between two looks at whether the run is to stop
LEAVE = 10.0  # seconds for processes that have hung up, or are to end, to be gone
TAIL = 2000  # characters of what it printed that an error quotes


class SamplerProcess:
    """One of them, what it was asked for and has not finished, and the log that it writes. `facts`: what it samples with."""

    def __init__(
        self,
        number: int,
        facts: Mapping[str, Any],
        weights: SharedWeights,
        store: RolloutStore,
        say: Callable[[str], None],
    ) -> None:
        self.number, self._facts, self._weights = number, dict(facts), weights
        self._store, self._say = store, say
        self.open: list[SampleRequest] = []
        self._log: int | None = None
        self._part: tuple[Any, ...] = ()  # what it was asked for last
        self._author = Author.STUDENT
        self._deaths, self._words = 0, ""
        self._start()

    def _start(self) -> None:
        begun = taken(self._facts["threads"])
        self.process, self._printed = begun.process, begun.printed
        with contextlib.suppress(ConnectionError):
            socket.send_fds(begun.line, [WEIGHTS], [self._weights.descriptor])
        self.connection, self.ready = Connection(begun.line.detach()), False
        self._tell(self._facts)

    def _tell(self, value: Any) -> None:
        with contextlib.suppress(ConnectionError):  # it is gone, as reading from it will show
            self.connection.send_bytes(write_message(value))

    def ask(self, requests: Sequence[SampleRequest], author: Author) -> None:
        """Rollouts that the store has begun and nobody else is asked for."""
        if self.connection.closed:
            self._start()
        self.open, self._author = list(requests), author
        if self.open:
            self._log = self._store.open_sampler_log(self._log)
            self._part = part_of(self.open, self._store, self._log, author)
            if self.ready:
                self._tell(self._part)

    def hear(self) -> int:
        """The next message: how many tokens it tells of. If the process is gone, another one goes on behind what it has left."""
        try:
            kind, told = read_message(self.connection.recv_bytes())
        except (EOFError, OSError):  # also in the middle of a message
            self._again()
            return 0
        if kind == FAILED:
            raise TrainingError(f"sampler process {self.number}: {told}")
        if kind == READY:
            self.ready = True
            self._tell(self._part)
            return 0
        if kind == DRAWN:
            return int(told)
        self._deaths = 0
        for row, facts in told:
            self._store.link(row, facts)
        self.open = []
        return 0

    def _again(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE)
        self.hang_up()
        self.end()
        left = self._left()
        # a token is not enough: one that dies of a certain request draws others first
        finished = len(left) < len(self.open)
        self._deaths = 1 if finished else self._deaths + 1
        if self._deaths > DEATHS:
            raise TrainingError(
                f"sampler process {self.number} has ended {self._deaths} times without an answer between (exit code "
                f"{self.process.returncode}): {self._words or 'it said nothing'}. What was sampled is kept. Mend it, set "
                "sampler.processes to less, or to 0, and `opd resume`."
            )
        last = self._words.rsplit("\\n", 1)[-1] or "it said nothing"
        self._say(
            f"sampler process {self.number} has ended (exit code {self.process.returncode}: {last}); it is started again"
        )
        self.ask(left, self._author)

    def _left(self) -> list[SampleRequest]:
        """What is not finished, once the store has taken what the log holds."""
        self.settle()
        unfinished = set(self._store.unfinished())
        return [request for request in self.open if request.id in unfinished]

    def settle(self) -> None:
        """The process is gone, and the store takes what it has left. One that failed leaves that to whoever opens it next."""
        if self._log is not None and not self._store.failed:
            self._store.settle(self._log)
        self._log = None

    def hang_up(self) -> None:
        """It makes durable what it has drawn, and ends."""
        self.ready = self.ready or self.connection.poll()
        with socket.socket(fileno=os.dup(self.connection.fileno())) as line, contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)  # also where a fork of somebody else's holds it
        self.connection.close()

    def end(self, patience: float = 0.0) -> None:
        """Behind `hang_up`. `ask` starts another. One that is not ready yet has drawn nothing."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience if self.ready else 0.0)
        self.process.kill()
        self.process.wait()
        with self._printed:
            self._printed.seek(0)
            self._words = plain(self._printed.read().decode(errors="replace")[-TAIL:].strip(), TAIL)


class SamplerProcesses(KeepsTokens):
    """`load` is called by the thread that trains, `keep` by another.

    `check`: called while they are waited for; may raise to end that. `say`: told of processes that die.
    """

    def __init__(
        self,
        student: LanguageModel,
        count: int,
        store: RolloutStore,
        facts: Mapping[str, Any],
        check: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`facts`: revision, sampler, max_length, stop_ids, threads, in_flight, commit_ms and fsync; the rest is the student's."""
        moving = student.moving()
        published = {name: tensor for name, tensor in student.weights(0).tensors.items() if name in moving}
        self._weights, self._check = SharedWeights(layout_of(published)), check
        own = {
            "model": student.name,
            "dtype": str(student.dtype).removeprefix("torch."),
            "device": str(student.device),
            "layout": self._weights.layout,
        }
        self.processes = [
            SamplerProcess(number, {**own, **facts}, self._weights, store, say) for number in range(count)
        ]

    @property
    def version(self) -> int:
        return self._weights.version

    def load(self, weights: WeightsRef) -> None:
        self._weights.put(weights)

    def keep(self, requests: Sequence[SampleRequest], author: Author) -> Iterator[int]:
        for process in self.processes:
            process.ask(dealt(requests, process.number, len(self.processes)), author)
        try:
            while busy := [process for process in self.processes if process.open]:
                ready = wait([process.connection for process in busy], POLL)
                for process in busy:
                    if process.connection in ready:
                        yield process.hear()
                self._check()
        finally:  # whoever is not done has no more to do
            self._end([process for process in self.processes if process.open])

    def close(self) -> None:
        self._end(self.processes)
        self._weights.close()

    def _end(self, processes: Sequence[SamplerProcess]) -> None:
        """All together: what they have drawn becomes durable while they end, and then the store's."""
        living = [process for process in processes if not process.connection.closed]
        for process in living:
            process.hang_up()
        until = time.monotonic() + LEAVE
        for process in living:
            process.end(max(0.0, until - time.monotonic()))
        for process in processes:
            process.settle()
