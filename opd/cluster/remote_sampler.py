"""A sampler in its own Ray worker: the trainer sends weights and requests, and gets tokens back.

Draws are keyed by the request, so they are the same as in the trainer's process. A worker that dies is restarted by Ray, gets the
newest weights again, and continues after the tokens that have arrived.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.common.errors import ServerAway
from opd.common.messages import read_message, write_message
from opd.records import Finished, SampledToken, SampleRequest, TokenSampler, WeightsRef

if TYPE_CHECKING:
    import torch


ROUND = 256  # events per message
AWAY = 600.0  # seconds that a worker may be away
OTHER_WEIGHTS = ("other weights",)  # sent in place of events


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

    from opd.engines.kinds import SAMPLERS
    from opd.models import load_model
    from opd.registry import by_hand

    if facts["threads"] is not None:
        torch.set_num_threads(facts["threads"])
    spec = by_hand("sampler", _annotated(SAMPLERS), facts["sampler"])
    device = "cuda" if torch.cuda.is_available() and facts["cuda"] else "cpu"
    model = load_model(facts["model"], revision=facts["revision"], dtype=facts["dtype"], device=device)
    return spec.open(model.inference_copy(None), facts["max_length"], merge_stop=tuple(facts["stop_ids"]))


def _annotated(family: Any) -> Any:
    from typing import Annotated

    from opd.engines.kinds import SamplerKind

    return Annotated[SamplerKind, family]


class WorkerStartedAgain(Exception):
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
                    raise ServerAway(f"the sampler's worker has been away for {AWAY:.0f} seconds.") from error
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
            except (RayActorError, WorkerStartedAgain):
                waiting = {name: _behind(request, drawn[name]) for name, request in waiting.items()}
                self._publish()

    def _events(self, requests: list[SampleRequest]) -> Iterator[SampledToken | Finished]:
        import ray

        stream = self._worker.sample.options(num_returns="streaming").remote(write_message(requests), self._version)
        for reference in stream:
            for event in read_message(ray.get(reference)):
                if tuple(event) == OTHER_WEIGHTS:
                    raise WorkerStartedAgain
                yield Finished(*event) if len(event) == len(Finished._fields) else SampledToken(*event)


def _behind(request: SampleRequest, ids: list[int]) -> SampleRequest:
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
