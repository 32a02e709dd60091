"""What the tests of samplers share: requests, an engine, and what it answered, by request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.engines.builtin import Engine
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key
from opd.models.language_model import LanguageModel
from opd.records import Finished, SampledToken, SampleRequest, Sampling
from tests.support.helpers import CHARACTERS, EOS

SIZE = len(CHARACTERS) + 2
SPEC = BuiltInSampler(slots=4, prefill_rows=3, prefill_chunk=5)
STOPS = (EOS, 7, 9)


@dataclass
class Response:
    events: list[SampledToken] = field(default_factory=list)
    stop: str | None = None

    @property
    def ids(self) -> list[int]:
        return [event.token for event in self.events]

    @property
    def numbers(self) -> list[tuple[Any, ...]]:
        return [event[1:6] for event in self.events]


def collect(engine: Engine, requests: Iterable[SampleRequest]) -> dict[str, Response]:
    responses: dict[str, Response] = {}
    for event in engine.sample(requests):
        response = responses.setdefault(event.request_id, Response())
        assert response.stop is None, "an event after Finished"
        if isinstance(event, Finished):
            response.stop = event.stop
        else:
            response.events.append(event)
    assert all(response.stop is not None for response in responses.values())
    return responses


def make_requests(lengths: Sequence[int], sampling: Sampling, seed: int = 0) -> list[SampleRequest]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, SIZE, length).astype(np.int32) for length in lengths]
    return [
        SampleRequest(f"r{i}", prompt, request_key(seed, f"p{i}", 0, 0), sampling) for i, prompt in enumerate(prompts)
    ]


def make_engine(
    model: LanguageModel, spec: BuiltInSampler = SPEC, max_length: int = 80, stop: tuple[int, ...] = STOPS
) -> Engine:
    return Engine(model.inference_copy(), spec, max_length, merge_stop=stop)


def by_id(responses: dict[str, Response], requests: Sequence[SampleRequest]) -> list[Response]:
    return [responses[request.id] for request in requests]
