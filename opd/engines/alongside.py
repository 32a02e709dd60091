"""Samplers that work beside training, with weights of their own, while the student that they come from learns."""

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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import torch

from opd.common.errors import OpdError, TrainingError
from opd.common.messages import read_message, write_message
from opd.common.text import plain
from opd.engines import builtin  # noqa: F401  (a sampler opens with it: everything is imported before there are facts)
from opd.engines.kinds import SAMPLERS, InFlight, SamplerKind
from opd.engines.prefork import taken
from opd.engines.shared_sampler import dealt
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.records import Author, Finished, Rollout, SampledToken, SampleRequest, TokenSampler, WeightsRef
from opd.registry import by_hand
from opd.store import RolloutStore
from opd.store.reading import SamplerLog, folder_of
from opd.store.records import COLUMNS


class NewestWeights(Protocol):
    """Where a sampler that works beside training finds them."""

    @property
    def version(self) -> int: ...

    def load(self, sampler: TokenSampler) -> int:
        """Into a sampler; says which version it got."""
        ...


class LoggingSampler(ABC):
    """Samples while another thread trains, in processes that write what they draw into logs of their own."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Of the newest weights that it was given."""

    @abstractmethod
    def load(self, weights: WeightsRef) -> None: ...

    @abstractmethod
    def keep(self, requests: Sequence[SampleRequest], author: Author) -> Iterator[int]:
        """Answer requests whose rollouts are begun in the store, until it has all of them; numbers of tokens, as they are drawn."""


class Handover:
    """The newest weights on their way from one thread to another. What training changes is copied, so nothing is shared."""

    def __init__(self, model: LanguageModel) -> None:
        self._moving, self._device = model.moving(), model.device
        self._lock = threading.Lock()
        self._held: dict[str, torch.Tensor] = {}
        self._adapter: dict[str, torch.Tensor] = {}
        self.version = -1

    def put(self, weights: WeightsRef) -> None:
        """By the thread that trains. It waits for a sampler that is taking the ones before, and for nothing else."""
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
        """By the thread that samples; says which version it took."""
        with self._lock:
            sampler.load(WeightsRef(self.version, self._held, self._adapter))
            self._settle()
            return self.version

    def _settle(self) -> None:
        """The two threads have streams of their own on a GPU: the copy is over before the other one may look."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class AheadSampler:
    """Samples with the newest weights of a place where others put them: another thread, or another process.

    They are taken over before anything is admitted. When newer ones come while rollouts are under way, `in_flight` says:

    recompute   they go on with the new weights, which read what is written so far again
    keep        they go on with the new weights, over keys and values that the old ones computed
    wait        they are finished with the old ones
    """

    def __init__(self, sampler: TokenSampler, newest: NewestWeights, in_flight: InFlight) -> None:
        """`sampler` was opened with a copy of the student that has weights of its own."""
        self._sampler, self._newest, self._in_flight = sampler, newest, in_flight
        self.version = -1  # that it samples with

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        self.take_over()
        if self._in_flight == "recompute":
            yield from self._recomputing({request.id: request for request in requests})
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

    def _recomputing(self, waiting: dict[str, SampleRequest]) -> Iterator[SampledToken | Finished]:
        """Every time newer weights come, what is unfinished is asked for again, with its tokens so far as a prefix."""
        while waiting:
            self.take_over()
            written: dict[str, list[int]] = {name: [] for name in waiting}
            events = self._sampler.sample(list(waiting.values()))
            for event in events:
                yield event
                if isinstance(event, Finished):
                    del waiting[event.request_id]
                else:
                    written[event.request_id].append(event.token)
                if self._outdated and waiting:
                    break
            if isinstance(events, Generator):  # what was drawn and not handed out yet is drawn again
                events.close()
            waiting = {name: _going_on(request, written[name]) for name, request in waiting.items()}


class ThreadSampler(AheadSampler):
    """`load` is called by the thread that trains, `sample` by another. `sampler` has an `inference_copy(own=True)`."""

    def __init__(self, sampler: TokenSampler, student: LanguageModel, in_flight: InFlight) -> None:
        self._handover = Handover(student)
        super().__init__(sampler, self._handover, in_flight)

    def load(self, weights: WeightsRef) -> None:
        self._handover.put(weights)


def _going_on(request: SampleRequest, tokens: list[int]) -> SampleRequest:
    """The same, to go on after these."""
    if not tokens:
        return request
    prefix = np.zeros(0, dtype=np.int32) if request.prefix_ids is None else request.prefix_ids
    return replace(request, prefix_ids=np.concatenate([prefix, np.array(tokens, dtype=np.int32)]))


# Samplers in processes of their own (`sampler.processes`), beside the trainer: neither its cores nor its interpreter are theirs.
#
# Each has a copy of the student, and answers its share of every batch's requests into a log of its own (`store.samplers`). Draws are keyed
# by the request, so how many there are changes no token. One that dies is started again, with another log, and goes on behind the tokens in
# the one before.


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


class SamplerProcesses(LoggingSampler):
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


# What a process that samples beside the trainer does: it is told once what to sample with, then asked again and again.
#
# here                                 imports, which is most of the time that it needs until it is ready
# trainer   weights, facts             the memory that has the newest ones; the model and the sampler's settings
# here      ready                      the model is loaded; parts are sent to those that will read them at once
# trainer   requests                   part of a batch, what there is of each rollout, and the log to write into
# here      drawn, drawn, …            how many tokens a step of the sampler has given; they are in the log
# here      kept                       all of them are finished and durable: where. The next part comes behind this
# here      failed                     why it cannot go on; a process that ends without a word is started again
#
# All is bytes that hold no code (`trainer.messages`). It ends when the trainer does, however that ended: nobody reads any more. What it has
# drawn by then is made durable first.


WEIGHTS = b"w"  # comes with their descriptor
READY, DRAWN, KEPT, FAILED = "ready", "drawn", "kept", "failed"
COMMIT_TOKENS = 512  # group commit: tokens buffered before they are written


def main(descriptor: int) -> None:
    """`descriptor`: of the socket on which the trainer is."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler's is for all; the trainer ends this one when it is done
    trainer = Connection(descriptor)  # closed by the end of the process, behind its last words
    try:
        with socket.socket(fileno=os.dup(descriptor)) as line:
            told, weights, _, _ = socket.recv_fds(line, len(WEIGHTS), 1)
        if told:  # else nobody needed this one
            _serve(trainer, weights[0])
    except (EOFError, ConnectionError):
        return  # nobody is there any more
    except OpdError as error:
        trainer.send_bytes(write_message((FAILED, str(error))))


def _serve(trainer: Connection, weights: int) -> None:
    facts: Mapping[str, Any] = read_message(trainer.recv_bytes())
    sampler = _opened(facts, weights)
    trainer.send_bytes(write_message((READY, None)))
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
    kind = by_hand("sampler", Annotated[SamplerKind, SAMPLERS], facts["sampler"])
    copy = model.inference_copy(getattr(torch, kind.dtype) if kind.dtype else None)
    sampler = kind.open(copy, facts["max_length"], merge_stop=tuple(facts["stop_ids"]))
    layout: Mapping[str, Any] = facts["layout"]
    still = {name: tensor.detach() for name, tensor in copy.module.named_parameters() if name not in layout}
    return AheadSampler(sampler, SharedWeights(layout, weights, still), facts["in_flight"])


def part_of(requests: Sequence[SampleRequest], store: RolloutStore, log: int, author: Author) -> tuple[Any, ...]:
    """What the trainer asks for: everything that there is of these rollouts is durable by then, and so is the log's number."""
    begun: list[Rollout] = store.partial([request.id for request in requests])
    parts = []
    for request, rollout in zip(requests, begun, strict=True):
        columns = [getattr(rollout, name) for name, _ in COLUMNS] if rollout.response_ids.size else None
        names = store.names(rollout.id)
        parts.append((request, store.entries.number(rollout.id), names, rollout.prompt_ids, columns))
    directory = str(folder_of(store.directory, log).absolute())
    return (directory, log, store.sampler_log_id(log).hex(), store.segment_bytes), int(author), parts


def _begun(log: SamplerLog, parts: Sequence[tuple[Any, ...]]) -> list[SampleRequest]:
    """In this log, with all that is written of them; each request goes on behind that."""
    wanted = []
    for request, number, names, prompt_ids, columns in parts:
        log.begin(number, names, prompt_ids, columns)
        wanted.append(request if columns is None else replace(request, prefix_ids=columns[0]))
    return wanted


def _draw(
    log: SamplerLog, events: Iterable[SampledToken | Finished], names: Mapping[str, int], author: Author
) -> Iterator[int]:
    """Into the log, the tokens of one step together, at most one of each request; how many these were."""
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


# The newest weights in memory that several processes share: one writes them, and those that sample read.
#
# counts (4) | one place | another          which version was begun, which is whole; the version of each place
#
# The two places are used in turn, so nobody waits for anybody, and whoever is killed leaves no lock behind: a reader that was
# overtaken within one copy reads again. The memory has no name, and goes with the last process that holds it.


Layout = Mapping[str, tuple[str, Sequence[int]]]  # dtype and shape of each tensor, by name
ALIGN = 64
BEGUN, WHOLE, VERSIONS = 0, 1, 2  # where the counts stand
_ORDER = threading.Lock()


class SharedWeights:
    """`descriptor`: of memory that another process has made for the same layout. `still`: weights that nobody publishes."""

    def __init__(
        self, layout: Layout, descriptor: int | None = None, still: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self.layout, self._still = layout, dict(still or {})
        size = sum(_padded(_bytes(*one)) for one in layout.values())
        whole = ALIGN + 2 * size
        self.descriptor = _made(whole) if descriptor is None else descriptor
        memory = mmap.mmap(self.descriptor, whole)
        self._counts = np.frombuffer(memory, dtype=np.int64, count=4)
        self._places = [_tensors(memory, layout, ALIGN + place * size) for place in range(2)]
        if descriptor is None:
            self._counts[VERSIONS:] = -1

    @property
    def version(self) -> int:
        """The newest; -1: none yet."""
        return int(self._counts[VERSIONS + self._counts[WHOLE] % 2])

    def put(self, weights: WeightsRef) -> None:
        count = int(self._counts[WHOLE]) + 1
        place = count % 2
        self._counts[BEGUN] = count
        _in_order()
        with torch.no_grad():
            for name, tensor in self._places[place].items():
                tensor.copy_(weights.tensors[name])
        self._counts[VERSIONS + place] = weights.version
        _in_order()
        self._counts[WHOLE] = count

    def load(self, sampler: TokenSampler) -> int:
        """By a process that samples; says which version it took."""
        while True:
            count = int(self._counts[WHOLE])
            _in_order()
            version = int(self._counts[VERSIONS + count % 2])
            sampler.load(WeightsRef(version, {**self._still, **self._places[count % 2]}))
            _in_order()
            if self._counts[BEGUN] < count + 2:
                return version

    def close(self) -> None:
        os.close(self.descriptor)


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()}


def _made(size: int) -> int:
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


def _in_order() -> None:
    """What was written or read before is so for other processors, too, before what follows: ARM keeps no order by itself.

    A lock that is let go and one that is taken behind it are never exchanged, nor what lies before and behind them.
    """
    for _ in range(2):
        with _ORDER:
            pass


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
