"""Samplers in other threads, processes and ranks.

`ThreadSampler` and `SamplerProcesses` run alongside training, with their own copy of the student's weights. `SharedSampler` shares
requests among ranks.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from opd.common.context import Peers
from opd.common.errors import OpdError, Stopped, TrainingError
from opd.common.messages import read_message, write_message
from opd.common.text import plain
from opd.engines import builtin  # noqa: F401  (imported early, so that a sampler process is ready before it gets its facts)
from opd.engines.kinds import SAMPLERS, InFlight, SamplerKind
from opd.engines.prefork import taken
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.records import Author, Finished, Rollout, SampledToken, SampleRequest, TokenSampler, WeightsRef
from opd.registry import validate_settings
from opd.store import RolloutStore
from opd.store.log import TOKEN_COLUMNS
from opd.store.rollouts import SamplerLog, folder_of

T = TypeVar("T")


class NewestWeights(Protocol):
    """The source of new weights for a sampler that runs alongside training."""

    @property
    def version(self) -> int: ...

    def load(self, sampler: TokenSampler) -> int:
        """Load the newest weights into a sampler; returns their version."""
        ...


class LoggingSampler(ABC):
    """Samples while another thread trains, in processes that write tokens to their own logs."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the newest weights it has received."""

    @abstractmethod
    def load(self, weights: WeightsRef) -> None: ...

    @abstractmethod
    def keep(self, requests: Sequence[SampleRequest], author: Author) -> Iterator[int]:
        """Answer requests whose rollouts the store has begun, until it has them all. Yields counts of new tokens."""


class Handover:
    """Passes the newest weights from the training thread to the sampling thread. Weights that train are copied."""

    def __init__(self, model: LanguageModel) -> None:
        self._moving, self._device = model.moving(), model.device
        self._lock = threading.Lock()
        self._held: dict[str, torch.Tensor] = {}
        self._adapter: dict[str, torch.Tensor] = {}
        self.version = -1

    def put(self, weights: WeightsRef) -> None:
        """Called by the training thread. It only waits while a sampler is loading the previous weights."""
        with self._lock, torch.no_grad():
            for name, tensor in weights.tensors.items():
                if name not in self._moving:
                    self._held[name] = tensor
                elif name in self._held:
                    self._held[name].copy_(tensor)
                else:
                    self._held[name] = tensor.detach().clone()
            self._adapter = {name: tensor.detach().clone() for name, tensor in weights.adapter.items()}
            self._settle()
            self.version = weights.version

    def load(self, sampler: TokenSampler) -> int:
        """Called by the sampling thread; returns the version that was loaded."""
        with self._lock:
            sampler.load(WeightsRef(self.version, self._held, self._adapter))
            self._settle()
            return self.version

    def _settle(self) -> None:
        """Wait for the copy: the two threads use different CUDA streams."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class AheadSampler:
    """Samples with the newest weights that another thread or process provides.

    New weights are loaded before requests are taken. If newer ones arrive during rollouts, `in_flight` decides:

    recompute   rollouts resume with the new weights, which prefill the tokens so far again
    keep        rollouts continue with the new weights, on keys and values computed with the old ones
    wait        rollouts finish with the old weights
    """

    def __init__(self, sampler: TokenSampler, newest: NewestWeights, in_flight: InFlight) -> None:
        """`sampler` must be opened with a copy of the student that has its own weights."""
        self._sampler, self._newest, self._in_flight = sampler, newest, in_flight
        self.version = -1  # of the weights in use

    def sample(self, requests: Iterable[Any]) -> Iterator[SampledToken | Finished]:
        """`requests`: `SampleRequest`, or None while there is no other yet."""
        self.take_over()
        if self._in_flight == "recompute":
            yield from self._recomputing(UnfinishedRequests(requests))
            return
        for event in self._sampler.sample(requests):
            yield event
            if self._in_flight == "keep" and self._outdated:
                self.take_over()

    def take_over(self) -> None:
        if self._outdated:
            self.version = self._newest.load(self._sampler)

    @property
    def _outdated(self) -> bool:
        return self.version != self._newest.version

    def _recomputing(self, requests: UnfinishedRequests) -> Iterator[SampledToken | Finished]:
        """Whenever newer weights arrive, request unfinished rollouts again, with their tokens so far as a prefix."""
        while True:
            self.take_over()
            events = self._sampler.sample(requests)
            for event in events:
                requests.unfinished.note(event)
                yield event
                if self._outdated and requests.unfinished:
                    break
            else:
                return
            if isinstance(events, Generator):  # drawn tokens that were not yielded are drawn again
                events.close()
            requests.again()


class UnfinishedRequests:
    """Requests that a sampler takes one by one. `again` lets it take those that have not finished once more, after their tokens so far."""

    def __init__(self, requests: Iterable[SampleRequest | None]) -> None:
        self._requests, self._before = iter(requests), deque[SampleRequest]()
        self.unfinished = OpenRequests()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> SampleRequest | None:
        request = self._before.popleft() if self._before else next(self._requests)
        if request is not None:
            self.unfinished.add(request)
        return request

    def again(self) -> None:
        self._before.extendleft(reversed(self.unfinished.after_tokens()))  # before those that the sampler had not taken
        self.unfinished = OpenRequests()


class ThreadSampler(AheadSampler):
    """Samples in a second thread. The training thread calls `load`, the other one `sample`.

    `sampler` must be opened with an `inference_copy(own=True)`.
    """

    def __init__(self, sampler: TokenSampler, student: LanguageModel, in_flight: InFlight) -> None:
        self._handover = Handover(student)
        super().__init__(sampler, self._handover, in_flight)

    def load(self, weights: WeightsRef) -> None:
        self._handover.put(weights)


def continued(request: SampleRequest, tokens: list[int]) -> SampleRequest:
    """The same request, resumed after these tokens."""
    if not tokens:
        return request
    prefix = np.zeros(0, dtype=np.int32) if request.prefix_ids is None else request.prefix_ids
    return replace(request, prefix_ids=np.concatenate([prefix, np.array(tokens, dtype=np.int32)]))


# --- Sampler processes (`sampler.processes`): they use neither the trainer's cores nor its interpreter ---
#
# Each has a copy of the student and writes its share of every batch to its own log (`SamplerLog`). Draws are keyed by
# the request, so the number of processes changes no token. One that dies is restarted with a new log, and resumes.


DEATHS = 3  # the run ends when one process dies more often than this in a row without finishing an answer
POLL = 0.2  # seconds between two checks whether the run should stop
NOTHING_YET = 0.002  # seconds before a source that had no request is asked again
LEAVE = 10.0  # seconds for processes to exit
TAIL = 2000  # characters of a process's output that an error quotes


class SamplerProcess:
    """One process and its unfinished requests. `facts`: the model and the sampler's settings."""

    def __init__(
        self, number: int, facts: Mapping[str, Any], weights: SharedWeights, report: Callable[[str], None]
    ) -> None:
        self.number, self._facts, self._weights, self._report = number, dict(facts), weights, report
        self._deaths, self._output = 0, ""
        self._start()

    def _start(self) -> None:
        begun = taken(self._facts["threads"])
        self.process, self._printed = begun.process, begun.printed
        with contextlib.suppress(ConnectionError):
            socket.send_fds(begun.line, [WEIGHTS], [self._weights.descriptor])
        self.connection, self.ready = Connection(begun.line.detach()), False
        self._send(self._facts)

    def _send(self, value: Any) -> None:
        with contextlib.suppress(ConnectionError):  # if the process has exited, the next read shows it
            self.connection.send_bytes(write_message(value))

    def _received(self) -> tuple[str, Any] | None:
        """The next message; None: the process is gone."""
        try:
            kind, content = read_message(self.connection.recv_bytes())
        except (EOFError, OSError):  # possibly in the middle of a message
            return None
        if kind == FAILED:
            raise TrainingError(f"sampler process {self.number}: {content}")
        return kind, content

    def _buried(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE)
        self.close_connection()
        self.end()

    def _died(self, finished: bool) -> None:
        """Count a death and report it, or end the run. `finished`: whether it had finished an answer since the last one."""
        # tokens do not count: a process that dies of a certain request draws others first
        self._deaths = 1 if finished else self._deaths + 1
        if self._deaths > DEATHS:
            raise TrainingError(
                f"sampler process {self.number} has ended {self._deaths} times without finishing an answer in between (exit code "
                f"{self.process.returncode}): {self._output or 'no output'}. What was sampled is kept. Fix the cause, set "
                "sampler.processes to a lower number, or to 0, and `opd resume`."
            )
        last = self._output.rsplit("\n", 1)[-1] or "no output"
        self._report(
            f"sampler process {self.number} has ended (exit code {self.process.returncode}: {last}); restarting it"
        )

    def close_connection(self) -> None:
        """Close the connection. The process then makes its tokens durable, and exits."""
        self.ready = self.ready or self.connection.poll()
        with socket.socket(fileno=os.dup(self.connection.fileno())) as line, contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)  # works even if a forked process also holds the socket
        self.connection.close()

    def end(self, patience: float = 0.0) -> None:
        """Wait for the exit after `close_connection`, then kill. One that is not ready has drawn nothing. `send` starts another."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience if self.ready else 0.0)
        self.process.kill()
        self.process.wait()
        with self._printed:
            self._printed.seek(0)
            self._output = plain(self._printed.read().decode(errors="replace")[-TAIL:].strip(), TAIL)


class LoggingProcess(SamplerProcess):
    """A process that writes its part of a batch to its own log."""

    def __init__(
        self,
        number: int,
        facts: Mapping[str, Any],
        weights: SharedWeights,
        report: Callable[[str], None],
        store: RolloutStore,
    ) -> None:
        self._store = store
        self.open: list[SampleRequest] = []
        self._log: int | None = None
        self._part: tuple[Any, ...] = ()  # the last message with requests
        self._author = Author.STUDENT
        super().__init__(number, facts, weights, report)

    def send(self, requests: Sequence[SampleRequest], author: Author) -> None:
        """Send requests whose rollouts the store has begun. No other process may have them."""
        if self.connection.closed:
            self._start()
        self.open, self._author = list(requests), author
        if self.open:
            self._log = self._store.open_sampler_log(self._log)
            self._part = part_of(self.open, self._store, self._log, author)
            if self.ready:
                self._send(self._part)

    def receive(self) -> int:
        """Read the next message; returns its count of new tokens. If the process is gone, a new one resumes its work."""
        message = self._received()
        if message is None:
            self._restart()
            return 0
        kind, content = message
        if kind == READY:
            self.ready = True
            self._send(self._part)
            return 0
        if kind == DRAWN:
            return int(content)
        self._deaths = 0
        for row, facts in content:
            self._store.link(row, facts)
        self.open = []
        return 0

    def _restart(self) -> None:
        self._buried()
        left = self._unfinished()
        self._died(finished=len(left) < len(self.open))
        self.send(left, self._author)

    def _unfinished(self) -> list[SampleRequest]:
        """The unfinished requests, after the store has taken the contents of the log."""
        self.settle()
        unfinished = set(self._store.unfinished())
        return [request for request in self.open if request.id in unfinished]

    def settle(self) -> None:
        """After the process has ended: let the store take its log. If the store has failed, the next run does this."""
        if self._log is not None and not self._store.failed:
            self._store.settle(self._log)
        self._log = None


class SamplerProcesses(LoggingSampler):
    """Samples in several processes. The training thread calls `load`, another one `keep`.

    `check`: called during waits; it may raise to end them. `report`: called with a message when a process dies.
    """

    def __init__(
        self,
        student: LanguageModel,
        count: int,
        store: RolloutStore,
        facts: Mapping[str, Any],
        check: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`facts`: revision, sampler, max_length, stop_ids, threads, in_flight, commit_ms, fsync; others come from `student`."""
        self._weights, own = shared_weights(student)
        self._check = check
        self.processes = [
            LoggingProcess(number, {**own, **facts}, self._weights, report, store) for number in range(count)
        ]

    @property
    def version(self) -> int:
        return self._weights.version

    def load(self, weights: WeightsRef) -> None:
        self._weights.put(weights)

    def keep(self, requests: Sequence[SampleRequest], author: Author) -> Iterator[int]:
        for process in self.processes:
            process.send(share_of(requests, process.number, len(self.processes)), author)
        try:
            while busy := [process for process in self.processes if process.open]:
                ready = wait([process.connection for process in busy], POLL)
                for process in busy:
                    if process.connection in ready:
                        yield process.receive()
                self._check()
        finally:  # after an error, stop the processes that are still busy
            self._end([process for process in self.processes if process.open])

    def close(self) -> None:
        self._end(self.processes)
        self._weights.close()

    def _end(self, processes: Sequence[LoggingProcess]) -> None:
        """Stop processes in parallel. Each makes its tokens durable, then the store takes its log."""
        end_processes(processes)
        for process in processes:
            process.settle()


def shared_weights(student: LanguageModel) -> tuple[SharedWeights, dict[str, Any]]:
    """Shared memory for the student's weights, and what a process has to know about the student."""
    moving = student.moving()
    published = {name: tensor for name, tensor in student.weights(0).tensors.items() if name in moving}
    weights = SharedWeights(layout_of(published))
    return weights, {
        "model": student.name,
        "dtype": str(student.dtype).removeprefix("torch."),
        "device": str(student.device),
        "layout": weights.layout,
    }


def end_processes(processes: Sequence[SamplerProcess]) -> None:
    living = [process for process in processes if not process.connection.closed]
    for process in living:
        process.close_connection()
    until = time.monotonic() + LEAVE
    for process in living:
        process.end(max(0.0, until - time.monotonic()))


# --- Sampler processes for episodes: the next turn is requested when the environment has answered ---
#
# The thread that plays the episodes writes all tokens to the store, the environment's among the student's. So these processes send theirs back.


class TurnWorker(Protocol):
    """A sampler elsewhere that takes requests at any time."""

    open: dict[str, SampleRequest]  # its unfinished requests

    def send(self, request: SampleRequest) -> None: ...

    def end_batch(self) -> None:
        """No more requests of the batch will come."""

    def receive(self) -> list[SampledToken | Finished]:
        """The events of the next message. If the worker is gone, a new one continues its requests."""
        ...


W = TypeVar("W", bound=TurnWorker)


class TurnWorkers(ABC, Generic[W]):
    """Samples with several workers, and takes requests that come later.

    `each`: the most unfinished requests of a worker.
    """

    def __init__(self, workers: Sequence[W], each: int, check: Callable[[], None]) -> None:
        self.workers, self._each, self._check = workers, each, check

    @abstractmethod
    def _wait(self, busy: Sequence[W], seconds: float) -> Iterable[W]:
        """Wait for messages. Returns the workers that have one."""

    @abstractmethod
    def _stop(self, busy: Sequence[W]) -> None:
        """After an error: stop workers that are busy, and forget their requests."""

    def sample(self, requests: Iterable[Any]) -> Iterator[SampledToken | Finished]:
        """`requests`: `SampleRequest`, or None while there is no other yet."""
        source, more = iter(requests), True
        try:
            while more or any(worker.open for worker in self.workers):
                more = more and self._distribute(source)
                busy = [worker for worker in self.workers if worker.open]
                if more and not busy:
                    time.sleep(NOTHING_YET)
                for worker in self._wait(busy, NOTHING_YET if more else POLL) if busy else ():
                    yield from worker.receive()
                self._check()
        finally:
            self._stop([worker for worker in self.workers if worker.open])

    def _distribute(self, source: Iterator[SampleRequest | None]) -> bool:
        """Send requests to the workers that have the fewest. Returns whether more may come."""
        while True:
            worker = min(self.workers, key=lambda one: len(one.open))
            if len(worker.open) >= self._each:
                return True
            try:
                request = next(source)
            except StopIteration:
                for one in self.workers:
                    one.end_batch()
                return False
            if request is None:
                return True
            worker.send(request)


class OpenRequests(dict[str, SampleRequest]):
    """The unfinished requests of a worker, by id, with the tokens that have arrived."""

    def __init__(self) -> None:
        self._drawn: dict[str, list[int]] = {}

    def add(self, request: SampleRequest) -> None:
        self[request.id], self._drawn[request.id] = request, []

    def note(self, event: SampledToken | Finished) -> None:
        if isinstance(event, Finished):
            del self[event.request_id], self._drawn[event.request_id]
        else:
            self._drawn[event.request_id].append(event.token)

    def after_tokens(self) -> list[SampleRequest]:
        """The requests for what follows the tokens that have arrived."""
        for name, request in self.items():
            self.add(continued(request, self._drawn[name]))
        return list(self.values())


class TurnProcess(SamplerProcess):
    """A process that takes requests at any time, and sends back what it draws."""

    def __init__(
        self, number: int, facts: Mapping[str, Any], weights: SharedWeights, report: Callable[[str], None]
    ) -> None:
        self.open = OpenRequests()
        self._ended = True  # whether the process knows that no more requests of the batch will come
        super().__init__(number, facts, weights, report)

    def send(self, request: SampleRequest) -> None:
        if self.connection.closed:
            self._start()
        self.open.add(request)
        self._ended = False
        if self.ready:
            self._send([request])

    def end_batch(self) -> None:
        if not self._ended and self.ready and not self.connection.closed:
            self._send(None)
        self._ended = True

    def receive(self) -> list[SampledToken | Finished]:
        message = self._received()
        if message is None:
            self._restart()
            return []
        kind, content = message
        if kind == READY:
            self.ready = True
            self._send(list(self.open.values()))
            if self._ended:
                self._send(None)
            return []
        events = from_columns(content)
        for event in events:
            self.open.note(event)
            if isinstance(event, Finished):
                self._deaths = 0
        return events

    def _restart(self) -> None:
        self._buried()
        self._died(finished=False)  # answers that it finished have set the count to 0
        if self.open.after_tokens():
            self._start()

    def forget(self) -> None:
        """After it has been ended: nobody waits for its answers any more."""
        self.open, self._ended = OpenRequests(), True


class TurnProcesses(TurnWorkers[TurnProcess]):
    """Samples in several processes. The training thread calls `load`, another one `sample`."""

    def __init__(
        self,
        student: LanguageModel,
        count: int,
        each: int,
        facts: Mapping[str, Any],
        check: Callable[[], None] = lambda: None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`facts`: as of `SamplerProcesses`."""
        self._weights, own = shared_weights(student)
        facts = {**own, **facts, "sends": True}
        super().__init__([TurnProcess(number, facts, self._weights, report) for number in range(count)], each, check)

    @property
    def version(self) -> int:
        return self._weights.version

    def load(self, weights: WeightsRef) -> None:
        self._weights.put(weights)

    def _wait(self, busy: Sequence[TurnProcess], seconds: float) -> Iterable[TurnProcess]:
        connections = {process.connection: process for process in busy}
        return [connections[ready] for ready in wait(list(connections), seconds)]  # type: ignore[index]

    def _stop(self, busy: Sequence[TurnProcess]) -> None:
        end_processes(busy)
        for process in busy:
            process.forget()

    def close(self) -> None:
        end_processes(self.workers)
        self._weights.close()


# --- The main function of a sampler process ---
#
# here                                 imports, most of the startup time
# trainer   weights, facts             the shared memory of the newest weights; the model and the sampler's settings
# here      ready                      the model is loaded; requests are only sent after this
# trainer   requests                   part of a batch, the existing tokens of each rollout, and the log to write to
# here      drawn, drawn, …            the number of tokens of each sampler step, after they are in the log
# here      kept                       all requests are finished and durable, with their places. The next part follows
# here      failed                     an error message; a process that exits without one is restarted
#
# With `sends` among the facts, there are no logs:
#
# trainer   requests, requests, …, none   as they come, and then that the batch has no more
# here      drawn, drawn, …               tokens and ends of answers
#
# Messages are bytes that hold no code (`common.messages`). When the trainer ends, the process saves its tokens and exits.


WEIGHTS = b"w"  # sent along with the file descriptor
READY, DRAWN, KEPT, FAILED = "ready", "drawn", "kept", "failed"
COMMIT_TOKENS = 512  # group commit: tokens buffered before they are written


def main(descriptor: int) -> None:
    """Run a sampler process. `descriptor`: of the socket to the trainer."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler sends it to all; the trainer stops this process itself
    trainer = Connection(descriptor)  # closed when the process exits, after its last message
    try:
        with socket.socket(fileno=os.dup(descriptor)) as line:
            greeting, weights, _, _ = socket.recv_fds(line, len(WEIGHTS), 1)
        if greeting:  # else this process was not needed
            _serve(trainer, weights[0])
    except (EOFError, ConnectionError):
        return  # the trainer has exited
    except OpdError as error:
        trainer.send_bytes(write_message((FAILED, str(error))))


def _serve(trainer: Connection, weights: int) -> None:
    facts: Mapping[str, Any] = read_message(trainer.recv_bytes())
    sampler = _opened(facts, weights)
    trainer.send_bytes(write_message((READY, None)))
    while facts.get("sends"):
        _send_answers(trainer, sampler)
    log: SamplerLog | None = None
    try:
        while True:
            (directory, number, id, segment_bytes), author, parts = read_message(trainer.recv_bytes())
            if log is None or log.number != number:
                if log is not None:
                    log.close()
                log = SamplerLog(
                    Path(directory),
                    number,
                    bytes.fromhex(id),
                    commit_ms=facts["commit_ms"],
                    sync=facts["fsync"] == "commit",
                    segment_bytes=segment_bytes,
                )
            names = {part[0].id: part[1] for part in parts}
            for count in _draw(log, sampler.sample(_begun(log, parts)), names, Author(author)):
                trainer.send_bytes(write_message((DRAWN, count)))
            log.commit(sync=True)
            trainer.send_bytes(write_message((KEPT, log.links(names.values()))))
    finally:
        if log is not None:
            log.close()


def _opened(facts: Mapping[str, Any], weights: int) -> Any:
    torch.set_num_threads(facts["threads"])
    model = load_model(facts["model"], revision=facts["revision"], dtype=facts["dtype"], device=facts["device"])
    kind = validate_settings("sampler", Annotated[SamplerKind, SAMPLERS], facts["sampler"])
    copy = model.inference_copy(getattr(torch, kind.dtype) if kind.dtype else None)
    sampler = kind.open(copy, facts["max_length"], merge_stop=tuple(facts["stop_ids"]))
    layout: Mapping[str, Any] = facts["layout"]
    frozen = {name: tensor.detach() for name, tensor in copy.module.named_parameters() if name not in layout}
    return AheadSampler(sampler, SharedWeights(layout, weights, frozen), facts["in_flight"])


class RequestsOf:
    """The requests of a batch as the trainer sends them. None: there is no other yet."""

    def __init__(self, trainer: Connection) -> None:
        """Waits for the first."""
        self._trainer, self._taken, self._more = trainer, deque[SampleRequest](), True
        self.unfinished = 0
        self._receive()

    def _receive(self) -> None:
        sent = read_message(self._trainer.recv_bytes())
        self._more = sent is not None
        self._taken.extend(sent or ())

    def __iter__(self) -> Iterator[SampleRequest | None]:
        return self

    def __next__(self) -> SampleRequest | None:
        if not self._taken and self._more and self._trainer.poll(0.0 if self.unfinished else POLL):
            self._receive()
        if self._taken:
            self.unfinished += 1
            return self._taken.popleft()
        if not self._more:
            raise StopIteration
        return None


def _send_answers(trainer: Connection, sampler: AheadSampler) -> None:
    """Answer the requests of one batch. The tokens of a step are sent together, as soon as another step or an end follows."""
    requests, drawn = RequestsOf(trainer), dict[str, SampledToken | Finished]()

    def send() -> None:
        if drawn:
            trainer.send_bytes(write_message((DRAWN, to_columns(list(drawn.values())))))
            drawn.clear()

    for event in sampler.sample(requests):
        if event.request_id in drawn:
            send()
        drawn[event.request_id] = event
        if isinstance(event, Finished):
            requests.unfinished -= 1
            send()


def part_of(requests: Sequence[SampleRequest], store: RolloutStore, log: int, author: Author) -> tuple[Any, ...]:
    """The trainer's message with requests. `partial` first makes these rollouts and the log's number durable."""
    begun: list[Rollout] = store.partial([request.id for request in requests])
    parts = []
    for request, rollout in zip(requests, begun, strict=True):
        columns = [getattr(rollout, name) for name, _ in TOKEN_COLUMNS] if rollout.response_ids.size else None
        names = store.names(rollout.id)
        parts.append((request, store.entries.number(rollout.id), names, rollout.prompt_ids, columns))
    directory = str(folder_of(store.directory, log).absolute())
    return (directory, log, store.sampler_log_id(log).hex(), store.segment_bytes), int(author), parts


def _begun(log: SamplerLog, parts: Sequence[tuple[Any, ...]]) -> list[SampleRequest]:
    """Begin the rollouts in this log, with their existing tokens; returns requests that resume after them."""
    wanted = []
    for request, number, names, prompt_ids, columns in parts:
        log.begin(number, names, prompt_ids, columns)
        wanted.append(request if columns is None else replace(request, prefix_ids=columns[0]))
    return wanted


def _draw(
    log: SamplerLog, events: Iterable[SampledToken | Finished], names: Mapping[str, int], author: Author
) -> Iterator[int]:
    """Write tokens to the log, one step at a time (at most one token per request). Yields their counts."""
    drawn: dict[str, SampledToken] = {}
    waiting = 0

    def keep() -> int:
        nonlocal waiting
        count = len(drawn)
        if drawn:
            ids, *columns, authors = zip(*drawn.values(), strict=True)
            by = np.array([int(author if one is None else one) for one in authors])
            log.append([names[id] for id in ids], [*map(np.array, columns), by])
            drawn.clear()
        waiting += count
        if waiting >= COMMIT_TOKENS:
            log.commit()
            waiting = 0
        return count

    try:
        for event in events:
            count = keep() if event.request_id in drawn else 0
            if isinstance(event, Finished):
                log.finish(names[event.request_id], event.stop)
            else:
                drawn[event.request_id] = event
            if count:
                yield count
    finally:
        last = keep()
    yield last


# --- The newest weights in shared memory: the trainer writes, sampler processes read ---
#
# counts (4) | buffer | buffer          the last write begun, the last one completed; the version in each buffer
#
# Writes alternate between the buffers, so there are no locks; a reader that was overtaken during a copy reads again.
# The memory is anonymous, and is freed with the last process that holds it.


Layout = Mapping[str, tuple[str, Sequence[int]]]  # dtype and shape of each tensor, by name
ALIGN = 64
BEGUN, COMPLETE, VERSIONS = 0, 1, 2  # indices into the counts
_ORDER = threading.Lock()


class SharedWeights:
    """Weights in shared memory.

    `descriptor`: of memory that another process created with the same layout. `frozen`: weights that do not change.
    """

    def __init__(
        self, layout: Layout, descriptor: int | None = None, frozen: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.layout, self._frozen = layout, dict(frozen or {})
        size = sum(_padded(_bytes(*one)) for one in layout.values())
        whole = ALIGN + 2 * size
        self.descriptor = _allocated(whole) if descriptor is None else descriptor
        memory = mmap.mmap(self.descriptor, whole)
        self._counts = np.frombuffer(memory, dtype=np.int64, count=4)
        self._places = [_tensors(memory, layout, ALIGN + place * size) for place in range(2)]
        if descriptor is None:
            self._counts[VERSIONS:] = -1

    @property
    def version(self) -> int:
        """The newest; -1: none yet."""
        return int(self._counts[VERSIONS + self._counts[COMPLETE] % 2])

    def put(self, weights: WeightsRef) -> None:
        count = int(self._counts[COMPLETE]) + 1
        place = count % 2
        self._counts[BEGUN] = count
        _memory_barrier()
        with torch.no_grad():
            for name, tensor in self._places[place].items():
                tensor.copy_(weights.tensors[name])
        self._counts[VERSIONS + place] = weights.version
        _memory_barrier()
        self._counts[COMPLETE] = count

    def load(self, sampler: TokenSampler) -> int:
        """Called by a sampler process; returns the version that was loaded."""
        while True:
            count = int(self._counts[COMPLETE])
            _memory_barrier()
            version = int(self._counts[VERSIONS + count % 2])
            sampler.load(WeightsRef(version, {**self._frozen, **self._places[count % 2]}))
            _memory_barrier()
            if self._counts[BEGUN] < count + 2:
                return version

    def close(self) -> None:
        os.close(self.descriptor)


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}


def _allocated(size: int) -> int:
    if sys.platform == "linux":
        descriptor = os.memfd_create("opd-weights")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def _tensors(memory: mmap.mmap, layout: Layout, start: int) -> dict[str, torch.Tensor]:
    found = {}
    for name, (dtype, shape) in layout.items():
        flat = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=math.prod(shape), offset=start)
        found[name] = flat.view(*shape) if shape else flat[0]
        start += _padded(_bytes(dtype, shape))
    return found


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _memory_barrier() -> None:
    """A memory barrier: ARM may otherwise reorder reads and writes.

    Releasing a lock and then taking one is never reordered, nor are the accesses before and after.
    """
    for _ in range(2):
        with _ORDER:
            pass


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


# --- A sampler on several ranks: all of them, or the first ones, each answer a share of the requests; every rank sees all tokens ---
#
# Draws are keyed by the request, so the rank that answers it does not matter. Tokens are exchanged in rounds, so that the
# leader can make them durable while sampling continues.


ROUND = 512  # events per rank and exchange
BEAT = 0.25  # seconds between two messages of a leader that works alone
NO_AUTHOR = -1


class SharedSampler:
    """Distributes requests over ranks. `sharers`: the number of ranks, from the first, that have a sampler; default: all."""

    def __init__(self, sampler: TokenSampler | None, ranks: Peers, sharers: int | None = None) -> None:
        self.own, self._ranks = sampler, ranks
        self._sharers = ranks.size if sharers is None else sharers

    def load(self, weights: WeightsRef) -> None:
        if self.own is not None:
            self.own.load(weights)
            return
        for name in weights.tensors:  # access gathers from all ranks, for ranks with a sampler
            weights.tensors[name]

    def lead(self, work: Callable[[TokenSampler, Callable[[], None]], T]) -> T:
        """Do work on the leader alone, such as playing in environments; all ranks get its result.

        `work` gets the leader's sampler, and a check to call often: it lets all ranks know of a stop.
        """
        ranks, last = self._ranks, time.monotonic()
        if not ranks.leads:
            while ranks.gather(False)[0]:
                pass
            ranks.poll_stop()
            return ranks.share(_nothing)

        def check() -> None:
            nonlocal last
            if time.monotonic() >= last + BEAT:
                ranks.gather(True)
                last = time.monotonic()
            ranks.poll_stop()

        result, stop = list[T](), None
        assert self.own is not None
        try:
            result.append(work(self.own, check))
        except Stopped as found:
            stop = found
        ranks.gather(False)
        if stop is not None:
            raise stop
        ranks.poll_stop()
        return ranks.share(result.pop)

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        mine = share_of(list(requests), self._ranks.rank, self._sharers)
        events = iter(self.own.sample(mine) if mine and self.own is not None else ())
        while True:
            part, stop = self._next(events)
            everyone = self._exchanged(part)
            with self._ranks.holding():  # a stop waits until drawn tokens are kept
                for found in everyone:
                    yield from found
            if stop is not None:
                raise stop
            self._ranks.poll_stop()
            if all(len(found) < ROUND for found in everyone):
                return

    def _next(self, events: Iterator[SampledToken | Finished]) -> tuple[list[SampledToken | Finished], Stopped | None]:
        """Some events, and a stop if one came. The events are still exchanged before this rank raises the stop."""
        part: list[SampledToken | Finished] = []
        try:
            with self._ranks.answering():
                part.extend(islice(events, ROUND))
        except Stopped as stop:
            return part, stop
        return part, None

    def _exchanged(self, part: list[SampledToken | Finished]) -> list[list[SampledToken | Finished]]:
        if self._ranks.size == 1:
            self._ranks.barrier()  # a stop is received here
            return [part]
        gathered = self._ranks.gather(to_columns(part))
        return [part if rank == self._ranks.rank else from_columns(found) for rank, found in enumerate(gathered)]


def _nothing() -> Any:
    """In place of a value that only the leader makes."""
    raise AssertionError("only the leader makes this value")


def to_columns(events: Sequence[SampledToken | Finished]) -> tuple[Any, ...]:
    """Events as arrays for a message: request names, index of each event's name, token, log-probs, version, author; and stop
    reasons by the position of the `Finished` event.
    """
    places = {name: place for place, name in enumerate(dict.fromkeys(event.request_id for event in events))}
    tokens = [event for event in events if isinstance(event, SampledToken)]
    _, token, *numbers, version, author = zip(*tokens, strict=True) if tokens else [()] * len(SampledToken._fields)
    who = np.array([places[event.request_id] for event in events], dtype=np.int32)
    ends = {place: event.stop for place, event in enumerate(events) if isinstance(event, Finished)}
    return (
        list(places),
        who,
        np.array(token, np.int64),
        np.array(numbers, np.float64),
        np.array(version, np.int64),
        np.array([NO_AUTHOR if one is None else one for one in author], np.int64),
        ends,
    )


def from_columns(columns: tuple[Any, ...]) -> list[SampledToken | Finished]:
    names, who, token, numbers, version, author, ends = columns
    authors = [None if one == NO_AUTHOR else Author(one) for one in author.tolist()]
    rows = iter(zip(token.tolist(), *numbers.tolist(), version.tolist(), authors, strict=True))
    return [
        Finished(names[one], ends[place]) if place in ends else SampledToken(names[one], *next(rows))
        for place, one in enumerate(who.tolist())
    ]


def share_of(requests: Sequence[SampleRequest], rank: int, size: int) -> list[SampleRequest]:
    """A rank's share: prompts are dealt in turn. Samples of one prompt stay together and share its prefill."""
    unit, found = -1, []
    for before, request in zip([None, *requests[:-1]], requests, strict=True):
        if before is None or not np.array_equal(before.prompt_ids, request.prompt_ids):
            unit += 1
        if unit % size == rank:
            found.append(request)
    return found
