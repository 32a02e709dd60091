"""Samplers that work beside training, with weights of their own, while the student that they come from learns."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from opd.models.language_model import LanguageModel
from opd.sampling.rollouts import InFlight
from opd.types import Author, Finished, SampledToken, SampleRequest, TokenSampler, WeightsRef


class NewestWeights(Protocol):
    """Where a sampler that works beside training finds them."""

    @property
    def version(self) -> int: ...

    def load(self, sampler: TokenSampler) -> int:
        """Into a sampler; says which version it got."""
        ...


class KeepsTokens(ABC):
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
