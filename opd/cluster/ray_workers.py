"""Workers of a Ray cluster: the trainer's ranks, as under torchrun, and separate samplers.

A rank sends weights and requests to its sampler, and gets tokens back. Draws are keyed by the request, so they are the same as in
the trainer's process. A worker that dies is restarted by Ray, gets the newest weights again, and continues after the tokens that
have arrived.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from opd.cluster.on_ray import LOST, RunArguments, TeacherPlaces, free_port, node_address, served_stage
from opd.common.errors import ServerAway
from opd.common.messages import read_message, write_message
from opd.engines.alongside import OpenRequests, SharedSampler, TurnWorkers, from_columns, to_columns
from opd.loop.distributed import DistributedRanks, joined_ranks
from opd.models.language_model import LanguageModel
from opd.recipe import Stage
from opd.records import Finished, SampledToken, SampleRequest, TokenSampler, WeightsRef

if TYPE_CHECKING:
    import torch

LEASE = 20.0  # seconds between attempts to take a lock that may belong to a lost machine
ROUND = 256  # events per message
MOMENT = 0.02  # seconds that a call samples turns
CALLS = 2  # at once, so that the worker has the next one when it has answered one
AWAY = 600.0  # seconds that a worker may be unreachable
OTHER_WEIGHTS = ("other weights",)  # sent in place of events


class RayRanks(DistributedRanks):
    def __init__(
        self, store: Any, rank: int, size: int, local: int, samplers: Sequence[Any], teachers: TeacherPlaces
    ) -> None:
        super().__init__(store, rank, size, local)
        self._samplers, self._places = samplers, teachers

    def placed(self, spec: Stage) -> Stage:
        return served_stage(spec, self._places)

    def opens_sampler(self, leader_only: bool) -> bool:
        return not self._samplers and super().opens_sampler(leader_only)

    def samples_everywhere(self, leader_only: bool) -> bool:
        return not self._samplers and super().samples_everywhere(leader_only)

    def student_sampler(
        self,
        sampler: TokenSampler | None,
        leader_only: bool,
        spec: Stage,
        model: LanguageModel,
        max_length: int,
        stop_ids: tuple[int, ...],
    ) -> TokenSampler:
        """The first ranks have one sampling worker each, and the others wait for its rollouts. If the leader samples for all, such as the turns of
        episodes, it has all workers.
        """
        if not self._samplers:
            return super().student_sampler(sampler, leader_only, spec, model, max_length, stop_ids)
        facts: Mapping[str, Any] = {
            "model": model.name,
            "revision": spec.student.revision,
            "dtype": spec.sampler.dtype or str(model.dtype).removeprefix("torch."),
            "cuda": model.device.type == "cuda",
            "sampler": spec.sampler.model_dump(mode="json"),
            "threads": spec.threads,
            "max_length": max_length,
            "stop_ids": list(stop_ids),
        }
        if leader_only:
            return SharedSampler(
                RemoteTurns(self._samplers, facts, spec.sampler.sequences()) if self.leads else None, self, 1
            )
        own = RemoteSampler(self._samplers[self.rank], facts) if self.rank < len(self._samplers) else None
        return SharedSampler(own, self, len(self._samplers))


class TrainerWorker:
    """One rank, in a process that Ray has started."""

    def pid(self) -> int:
        return os.getpid()

    def rendezvous_address(self, host: str | None) -> tuple[str, int]:
        """The address where the other ranks find the first one."""
        host = host or node_address()
        return host, free_port(host)

    def carry_out(
        self,
        environment: Mapping[str, str],
        arguments: RunArguments,
        samplers: Sequence[Any],
        teachers: TeacherPlaces,
        restarted: bool = False,
    ) -> tuple[int, str]:
        """The exit code and message of `opd run X --resume --out DIR`. `restarted`: after lost ranks."""
        os.environ.update(environment)
        os.chdir(arguments.folder)
        from opd.common.errors import RESUME_ME, AnotherRank, OpdError, RanksLost, RunLocked, Stopped
        from opd.runner.run import run

        recipe, overrides, out, _ = arguments

        def make(store: Any, rank: int, size: int, local: int) -> RayRanks:
            return RayRanks(store, rank, size, local, samplers, teachers)

        try:
            run(recipe, overrides=overrides, out=out, resume=True, join=lambda: joined_ranks(make))
        except RanksLost as error:
            return LOST, str(error)  # all ranks are restarted
        except AnotherRank as error:
            return error.exit_code, ""  # the other rank reports it
        except RunLocked as error:
            time.sleep(LEASE if restarted else 0)  # a file server releases the lock of a lost machine after a while
            return LOST if restarted else error.exit_code, str(error)
        except Stopped:
            return RESUME_ME, "stopped; a checkpoint is saved"
        except OpdError as error:
            return error.exit_code, str(error)
        return 0, ""


class SamplerWorker:
    """Runs in a process that Ray has started."""

    def __init__(self) -> None:
        self._sampler: TokenSampler | None = None
        self._version: int | None = None
        self._facts: Mapping[str, Any] = {}
        self._batch: OpenBatch | None = None

    def pid(self) -> int:
        return os.getpid()

    def load(self, facts: Mapping[str, Any], weights: tuple[int, Mapping[str, tuple[str, np.ndarray]]]) -> None:
        """`facts`: the model of these weights, and how it samples. A later stage has other facts."""
        self._close_batch()
        if self._sampler is None or facts != self._facts:
            self._sampler = None  # frees its memory before the next one is loaded
            self._sampler, self._facts = _opened(facts), facts
        version, arrays = weights
        self._sampler.load(WeightsRef(version, {name: _tensor(*array) for name, array in arrays.items()}))
        self._version = version

    def sample(self, message: bytes, version: int) -> Iterator[bytes]:
        """The end of an answer arrives with its last token, so that sampling never resumes after an end.
        A restarted worker has other weights, or none.
        """
        if self._sampler is None or self._version != version:
            yield write_message([OTHER_WEIGHTS])
            return
        self._close_batch()
        part: list[tuple[Any, ...]] = []
        for event in self._sampler.sample(read_message(message)):
            if len(part) >= ROUND and not isinstance(event, Finished):
                yield write_message(part)
                part = []
            part.append(tuple(event))
        yield write_message(part)

    def turns(self, message: bytes, version: int, batch: str) -> bytes:
        """Take more requests of a batch, sample for a moment, and return the events. None: this worker has other weights, or none."""
        if self._sampler is None or self._version != version:
            return write_message(None)
        if self._batch is None or self._batch.name != batch:
            self._close_batch()
            self._batch = OpenBatch(batch, self._sampler)
        return write_message(to_columns(self._batch.take(read_message(message))))

    def _close_batch(self) -> None:
        """The trainer may have left it unfinished."""
        if self._batch is not None:
            self._batch.close()
        self._batch = None


class OpenBatch:
    """Requests that arrive while others are being answered."""

    def __init__(self, name: str, sampler: TokenSampler) -> None:
        self.name, self._unfinished = name, 0
        self._arrived = deque[SampleRequest]()
        self._events = iter(sampler.sample(self._requests()))  # type: ignore[arg-type]

    def _requests(self) -> Iterator[SampleRequest | None]:
        while True:
            yield self._arrived.popleft() if self._arrived else None

    def take(self, requests: Sequence[SampleRequest]) -> list[SampledToken | Finished]:
        """Add requests, and sample for a moment. Without unfinished requests the sampler would wait for ever."""
        self._arrived.extend(requests)
        self._unfinished += len(requests)
        until, events = time.monotonic() + MOMENT, list[SampledToken | Finished]()
        while self._unfinished and time.monotonic() < until:
            events.append(next(self._events))
            self._unfinished -= isinstance(events[-1], Finished)
        return events

    def close(self) -> None:
        if isinstance(self._events, Generator):
            self._events.close()


def _opened(facts: Mapping[str, Any]) -> TokenSampler:
    import torch

    from opd.engines.kinds import SAMPLERS, SamplerKind
    from opd.models import load_model
    from opd.registry import validate_settings

    if facts["threads"] is not None:
        torch.set_num_threads(facts["threads"])
    spec = validate_settings("sampler", Annotated[SamplerKind, SAMPLERS], facts["sampler"])
    device = "cuda" if torch.cuda.is_available() and facts["cuda"] else "cpu"
    model = load_model(facts["model"], revision=facts["revision"], dtype=facts["dtype"], device=device)
    return spec.open(model.inference_copy(None), facts["max_length"], merge_stop=tuple(facts["stop_ids"]))


class WorkerRestarted(Exception):
    """The worker does not have the requested weights."""


class Weights:
    """The student's newest weights, for any number of workers."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts, self.version = dict(facts), -1
        self._stored: Any = None  # in Ray's store, while they are the newest

    def take(self, weights: WeightsRef) -> None:
        import ray

        self.version = weights.version
        self._stored = ray.put((weights.version, {name: _array(tensor) for name, tensor in weights.tensors.items()}))

    def send(self, workers: Sequence[Any]) -> None:
        """Send them to workers, also to restarted ones."""
        import ray
        from ray.exceptions import RayActorError

        until, left = time.monotonic() + AWAY, list(workers)
        while left:
            sent = [(worker, worker.load.remote(self._facts, self._stored)) for worker in left]
            left = []
            for worker, loaded in sent:
                try:
                    ray.get(loaded)
                except RayActorError as error:
                    if time.monotonic() > until:
                        raise ServerAway(f"a sampler's worker has been unreachable for {AWAY:.0f} seconds.") from error
                    left.append(worker)
            time.sleep(0.5 if left else 0)


class RemoteSampler:
    """A rank's view of a worker."""

    def __init__(self, worker: Any, facts: Mapping[str, Any]) -> None:
        self._worker, self._weights = worker, Weights(facts)

    def load(self, weights: WeightsRef) -> None:
        self._weights.take(weights)
        self._weights.send([self._worker])

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        from ray.exceptions import RayActorError

        waiting = OpenRequests()
        for request in requests:
            waiting.add(request)
        while waiting:
            try:
                for event in self._events(waiting.after_tokens()):
                    waiting.note(event)
                    yield event
            except (RayActorError, WorkerRestarted):
                self._weights.send([self._worker])

    def _events(self, requests: list[SampleRequest]) -> Iterator[SampledToken | Finished]:
        import ray

        stream = self._worker.sample.options(num_returns="streaming").remote(
            write_message(requests), self._weights.version
        )
        for reference in stream:
            for event in read_message(ray.get(reference)):
                if tuple(event) == OTHER_WEIGHTS:
                    raise WorkerRestarted
                yield Finished(*event) if len(event) == len(Finished._fields) else SampledToken(*event)


class RemoteTurnWorker:
    """The leader's view of a worker that takes requests at any time."""

    def __init__(self, worker: Any, weights: Weights) -> None:
        self.worker, self._weights, self._batch = worker, weights, ""
        self.open, self._new, self.calls = OpenRequests(), list[SampleRequest](), deque[Any]()

    def send(self, request: SampleRequest) -> None:
        self.open.add(request)
        self._new.append(request)

    def end_batch(self) -> None:
        """The worker does not wait for requests."""

    def call(self) -> Any:
        """Keep the worker busy. Returns the call that ends next."""
        self._batch = self._batch or secrets.token_hex(8)
        while len(self.calls) < CALLS:
            new, self._new = self._new, []
            self.calls.append(self.worker.turns.remote(write_message(new), self._weights.version, self._batch))
        return self.calls[0]

    def receive(self) -> list[SampledToken | Finished]:
        import ray
        from ray.exceptions import RayActorError

        try:
            columns = read_message(ray.get(self.calls.popleft()))
        except RayActorError:
            columns = None
        if columns is None:
            self._restart()
            return []
        events = from_columns(columns)
        for event in events:
            self.open.note(event)
        if not self.open:
            self.leave()
        return events

    def _restart(self) -> None:
        import ray

        if self.calls:  # so that none of them reaches the worker after its weights
            ray.wait(list(self.calls), num_returns=len(self.calls))
        self._weights.send([self.worker])
        self.leave()
        self._new = self.open.after_tokens()

    def leave(self) -> None:
        """The next call begins another batch."""
        self._batch = ""
        self.calls.clear()

    def forget(self) -> None:
        self.leave()
        self.open, self._new = OpenRequests(), []


class RemoteTurns(TurnWorkers[RemoteTurnWorker]):
    """Samples the turns of episodes with all workers. The leader has it."""

    def __init__(self, workers: Sequence[Any], facts: Mapping[str, Any], each: int) -> None:
        self._weights = Weights(facts)
        super().__init__([RemoteTurnWorker(worker, self._weights) for worker in workers], each, lambda: None)

    def load(self, weights: WeightsRef) -> None:
        self._weights.take(weights)
        self._weights.send([one.worker for one in self.workers])

    def _wait(self, busy: Sequence[RemoteTurnWorker], seconds: float) -> Iterable[RemoteTurnWorker]:
        import ray

        calls = {one.call(): one for one in busy}
        ended, _ = ray.wait(list(calls), timeout=seconds)
        return [calls[call] for call in ended]

    def _stop(self, busy: Sequence[RemoteTurnWorker]) -> None:
        for one in busy:
            one.forget()


def _array(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    """A tensor as bytes with its type and shape, because numpy has no bfloat16."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    found = plain.reshape(-1).view(torch.uint8).numpy().reshape(*plain.shape, plain.element_size())
    return str(plain.dtype).removeprefix("torch."), found


def _tensor(dtype: str, array: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(array.copy()).view(getattr(torch, dtype)).squeeze(-1)
