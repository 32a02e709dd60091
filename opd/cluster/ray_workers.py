"""Workers of a Ray cluster: the trainer's ranks, as under torchrun, and separate samplers.

A rank sends weights and requests to its sampler, and gets tokens back. Draws are keyed by the request, so they are the same as in
the trainer's process. A worker that dies is restarted by Ray, gets the newest weights again, and continues after the tokens that
have arrived.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from opd.cluster.on_ray import LOST, RunArguments, TeacherPlaces, free_port, node_address, served_stage
from opd.common.errors import ServerAway
from opd.common.messages import read_message, write_message
from opd.engines.alongside import SharedSampler
from opd.loop.distributed import DistributedRanks, joined_ranks
from opd.models.language_model import LanguageModel
from opd.recipe import Stage
from opd.records import Finished, SampledToken, SampleRequest, TokenSampler, WeightsRef

if TYPE_CHECKING:
    import torch

LEASE = 20.0  # seconds between attempts to take a lock that may belong to a lost machine
ROUND = 256  # events per message
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
        """The first ranks have one sampling worker each, and the others wait for its rollouts."""
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

    def pid(self) -> int:
        return os.getpid()

    def load(self, facts: Mapping[str, Any], weights: tuple[int, Mapping[str, tuple[str, np.ndarray]]]) -> None:
        """`facts`: the model of these weights, and how it samples. A later stage has other facts."""
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
        part: list[tuple[Any, ...]] = []
        for event in self._sampler.sample(read_message(message)):
            if len(part) >= ROUND and not isinstance(event, Finished):
                yield write_message(part)
                part = []
            part.append(tuple(event))
        yield write_message(part)


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


class RemoteSampler:
    """A rank's view of a worker."""

    def __init__(self, worker: Any, facts: Mapping[str, Any]) -> None:
        self._worker, self._facts = worker, dict(facts)
        self._weights: Any = None  # in Ray's store, while they are the newest
        self._version = -1

    def load(self, weights: WeightsRef) -> None:
        import ray

        self._version = weights.version
        self._weights = ray.put((weights.version, {name: _array(tensor) for name, tensor in weights.tensors.items()}))
        self._publish()

    def _publish(self) -> None:
        """Send the newest weights, also to a restarted worker."""
        import ray
        from ray.exceptions import RayActorError

        until = time.monotonic() + AWAY
        while True:
            try:
                ray.get(self._worker.load.remote(self._facts, self._weights))
                return
            except RayActorError as error:
                if time.monotonic() > until:
                    raise ServerAway(f"the sampler's worker has been unreachable for {AWAY:.0f} seconds.") from error
                time.sleep(0.5)

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        from ray.exceptions import RayActorError

        waiting = {request.id: request for request in requests}
        while waiting:
            drawn: dict[str, list[int]] = {name: [] for name in waiting}
            try:
                for event in self._events(list(waiting.values())):
                    if isinstance(event, Finished):
                        waiting.pop(event.request_id)
                    else:
                        drawn[event.request_id].append(event.token)
                    yield event
            except (RayActorError, WorkerRestarted):
                waiting = {name: _after(request, drawn[name]) for name, request in waiting.items()}
                self._publish()

    def _events(self, requests: list[SampleRequest]) -> Iterator[SampledToken | Finished]:
        import ray

        stream = self._worker.sample.options(num_returns="streaming").remote(write_message(requests), self._version)
        for reference in stream:
            for event in read_message(ray.get(reference)):
                if tuple(event) == OTHER_WEIGHTS:
                    raise WorkerRestarted
                yield Finished(*event) if len(event) == len(Finished._fields) else SampledToken(*event)


def _after(request: SampleRequest, ids: list[int]) -> SampleRequest:
    """The request for what comes after the ids that have already arrived."""
    if not ids:
        return request
    before = np.zeros(0, dtype=np.int32) if request.prefix_ids is None else request.prefix_ids
    return replace(request, prefix_ids=np.concatenate([before, np.asarray(ids, dtype=np.int32)]))


def _array(tensor: torch.Tensor) -> tuple[str, np.ndarray]:
    """A tensor as bytes with its type and shape, because numpy has no bfloat16."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    found = plain.reshape(-1).view(torch.uint8).numpy().reshape(*plain.shape, plain.element_size())
    return str(plain.dtype).removeprefix("torch."), found


def _tensor(dtype: str, array: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(array.copy()).view(getattr(torch, dtype)).squeeze(-1)
