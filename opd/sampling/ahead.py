"""A sampler that works in a thread of its own, with weights of its own, while the student that they come from learns."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch

from opd.models.language_model import LanguageModel
from opd.sampling.rollouts import InFlight
from opd.types import Finished, SampledToken, SampleRequest, TokenSampler, WeightsRef


class Handover:
    """The newest weights on their way from one thread to another. What training changes is copied, so nothing is shared."""

    def __init__(self, model: LanguageModel) -> None:
        self._moving, self._device = model.moving(), model.device
        self._lock = threading.Lock()
        self._held: dict[str, torch.Tensor] = {}
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
            self._settle()
            self.version = weights.version

    def load(self, sampler: TokenSampler) -> int:
        """By the thread that samples; says which version it took."""
        with self._lock:
            sampler.load(WeightsRef(self.version, self._held))
            self._settle()
            return self.version

    def _settle(self) -> None:
        """The two threads have streams of their own on a GPU: the copy is over before the other one may look."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


class AheadSampler:
    """Implements `types.TokenSampler`. `load` is called by the thread that trains, `sample` by another.

    Weights are taken over before anything is admitted. When newer ones come while rollouts are under way, `in_flight` says:

    recompute   they go on with the new weights, which read what is written so far again
    keep        they go on with the new weights, over keys and values that the old ones computed
    wait        they are finished with the old ones
    """

    def __init__(self, sampler: TokenSampler, model: LanguageModel, in_flight: InFlight) -> None:
        """`model`: the student. `sampler` was opened with an `inference_copy(own=True)` of it."""
        self._sampler, self._in_flight = sampler, in_flight
        self._handover = Handover(model)
        self.version = -1  # that it samples with

    def load(self, weights: WeightsRef) -> None:
        self._handover.put(weights)

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
            self.version = self._handover.load(self._sampler)

    @property
    def _outdated(self) -> bool:
        return self.version != self._handover.version

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
            waiting = {name: _behind(request, written[name]) for name, request in waiting.items()}


def _behind(request: SampleRequest, tokens: list[int]) -> SampleRequest:
    if not tokens:
        return request
    prefix = np.zeros(0, dtype=np.int32) if request.prefix_ids is None else request.prefix_ids
    return replace(request, prefix_ids=np.concatenate([prefix, np.array(tokens, dtype=np.int32)]))
