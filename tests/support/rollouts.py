"""Rollouts made up, and with the log-probs that a model would have reported while sampling them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from opd.divergences import token_logprobs
from opd.models.language_model import LanguageModel, Pack
from opd.records import Author, Rollout
from tests.support.helpers import EOS

STOPS = (EOS,)


def rollout(name: str, prompt: list[int], response: list[int], domain: str = "d", group: str = "") -> Rollout:
    size = len(response)
    zeros = np.zeros(size, dtype=np.float32)
    return Rollout(
        id=name, prompt_id=name, visit=0, sample=0, domain=domain, source="student", group=group or name, prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32), author=np.full(size, Author.STUDENT, dtype=np.uint8), logprob=zeros,
        logprob_sampled=zeros, logprob_stop=zeros, version=np.zeros(size, dtype=np.int32), stop="stop",
    )  # fmt: skip


def sampled_by(
    model: LanguageModel, rollouts: list[Rollout], stops: tuple[int, ...] = STOPS, temperature: float = 1.0
) -> list[Rollout]:
    """The same rollouts with the log-probs this model would have reported while sampling them."""
    found = []
    for item in rollouts:
        batch = Pack.of([item])
        with torch.no_grad():
            projection = model.project(model.hidden(batch.ids_T, batch.layout)[batch.predicting_N])
            ids = torch.from_numpy(item.response_ids.astype(np.int64))
            plain = token_logprobs(projection, ids, merge=(stops,)).numpy()
            tempered = token_logprobs(projection, ids, temperature=temperature).numpy()
        found.append(replace(item, logprob=plain, logprob_sampled=tempered))
    return found


def some_rollouts(seed: int = 0, count: int = 7) -> list[Rollout]:
    generator = np.random.default_rng(seed)
    items = []
    for index in range(count):
        prompt = generator.integers(2, 70, size=generator.integers(1, 12)).tolist()
        response = [*generator.integers(2, 70, size=generator.integers(0, 9)).tolist(), EOS]
        items.append(rollout(f"r{index}", prompt, response, domain="ab"[index % 2], group=f"g{index // 2}"))
    return items
