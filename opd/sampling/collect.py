"""Rollouts in memory, for loops of one's own and for evaluation. Training goes through the store instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from opd.data.render import render_prompt
from opd.sampling.draws import request_key
from opd.types import Author, Finished, Prompt, Rollout, SampledToken, SampleRequest, Sampling, TokenSampler


def make_requests(
    prompts: Iterable[Prompt], tokenizer: Any, sampling: Sampling, *, seed: int, visit: int = 0
) -> list[SampleRequest]:
    """One request per prompt, with the random key of (seed, prompt, visit, sample 0)."""
    return [
        SampleRequest(prompt.id, render_prompt(prompt, tokenizer), request_key(seed, prompt.id, visit, 0), sampling)
        for prompt in prompts
    ]


def collect(
    sampler: TokenSampler,
    requests: Sequence[SampleRequest],
    check_stop: Callable[[], None] = lambda: None,
    on_token: Callable[[SampledToken], None] = lambda token: None,
) -> list[Rollout]:
    """Sample every request to its end; rollouts come back in the order of the requests. `on_token`: as it is drawn."""
    tokens: dict[str, list[SampledToken]] = {request.id: [] for request in requests}
    stops: dict[str, Any] = {}
    for event in sampler.sample(requests):
        if isinstance(event, Finished):
            stops[event.request_id] = event.stop
            check_stop()
        else:
            tokens[event.request_id].append(event)
            on_token(event)
    return [rollout_of(request, tokens[request.id], stops[request.id]) for request in requests]


def rollout_of(request: SampleRequest, tokens: Sequence[SampledToken], stop: Any) -> Rollout:
    prefix = np.zeros(0, dtype=np.int32) if request.prefix_ids is None else request.prefix_ids
    unknown = np.full(prefix.size, np.nan, dtype=np.float32)

    def column(name: str) -> np.ndarray:
        values = np.array([getattr(token, name) for token in tokens], dtype=np.float32)
        return np.concatenate([unknown, values])

    sampled = np.array([token.token for token in tokens], dtype=np.int32)
    size = prefix.size + sampled.size
    versions = np.array([token.version for token in tokens], dtype=np.int32)
    return Rollout(
        id=request.id,
        prompt_id=request.id,
        visit=0,
        sample=0,
        domain="",
        source="student",
        group=request.id,
        prompt_ids=request.prompt_ids,
        response_ids=np.concatenate([prefix, sampled]).astype(np.int32),
        author=np.full(size, Author.STUDENT, dtype=np.uint8),
        logprob=column("logprob"),
        logprob_sampled=column("logprob_sampled"),
        logprob_stop=column("logprob_stop"),
        version=np.concatenate([np.full(prefix.size, -1, dtype=np.int32), versions]),
        stop=stop,
    )
