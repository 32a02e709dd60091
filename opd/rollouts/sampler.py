"""Sampling in Python: answers to prompts, as rollouts in memory.

sampler = opd.Sampler(student, max_new_tokens=64)
rollouts = sampler.sample(opd.prompts("task:addition", 8), samples=4)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch

from opd.common.errors import UserError
from opd.common.text import shortened
from opd.data.render import render_prompt, response_text
from opd.engines.draws import request_key
from opd.engines.kinds import SAMPLERS, SamplerKind
from opd.engines.requests import weights_of
from opd.models.language_model import LanguageModel
from opd.records import Prompt, Rollout, SampledToken, SampleRequest, Sampling, TokenSampler
from opd.registry import by_hand
from opd.rollouts.rollouter import answers
from opd.rollouts.settings import Rollouts

ROOM = 256  # the least sequence length that is allocated


class Sampler:
    """Samples from a model with its current weights: shared with it or, if that is not possible, copied before every call.

    Draws are keyed by (seed, prompt, visit, sample). Asking the same prompt again is another visit. `settings`: a recipe's
    `sampler` keys. `stop_ids`: in addition to the model's own, for example its teacher's.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Iterable[str] = (),
        stop_ids: Iterable[int] = (),
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        drawing = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        by_hand("sampler", Rollouts, drawing)  # the same checks as for a recipe
        self.model, self.version = model, 0
        self.max_new_tokens, self.temperature, self.teacher_mix = max_new_tokens, temperature, 0.0
        self.top_p, self.top_k = top_p, top_k
        self._stop, self._stop_ids, self._seed = tuple(stop), tuple(stop_ids), seed
        self._kind: SamplerKind = by_hand("sampler", Annotated[SamplerKind, SAMPLERS], settings or {})
        self._visits: Counter[str] = Counter()
        self._opened: TokenSampler | None = None
        self._room, self._swaps = 0, False
        self._ends: tuple[tuple[int, ...], int] = (), 0  # stop ids, and how many ids it was opened with

    def __repr__(self) -> str:
        drawing = f"max_new_tokens={self.max_new_tokens}, temperature={self.temperature}"
        cut = f", top_p={self.top_p}" * (self.top_p < 1) + f", top_k={self.top_k}" * (self.top_k > 0)
        return f"Sampler({self.model.name!r}, {drawing}{cut}, seed={self._seed})"

    @property
    def sampling(self) -> Sampling:
        """Uses the model's current stop ids, since a teacher opened later may have added some."""
        stops = tuple(dict.fromkeys((*self.model.stop_ids, *self._stop_ids)))
        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.top_k, stops, self._stop)

    def sample(
        self,
        prompts: Prompt | str | Iterable[Prompt | str],
        samples: int = 1,
        on_token: Callable[[SampledToken], None] = lambda token: None,
    ) -> list[Rollout]:
        """`samples` answers to every prompt, or to a single prompt. One group per prompt, in order.

        `on_token`: called for each token as it is drawn.
        """
        if samples < 1:
            raise UserError(f"samples: expected at least 1 for each prompt, got {samples}.")
        planned: dict[str, tuple[Prompt, int, int]] = {}
        requests, sampling = [], self.sampling
        for prompt in map(_prompt, [prompts] if isinstance(prompts, (Prompt, str, Mapping)) else prompts):
            visit = self._visits[prompt.id]
            self._visits[prompt.id] += 1
            ids = render_prompt(prompt, self.model.tokenizer)
            for number in range(samples):
                name = f"{prompt.id}/{visit}/{number}"
                planned[name] = prompt, visit, number
                key = request_key(self._seed, prompt.id, visit, number)
                requests.append(SampleRequest(name, ids, key, sampling))
        if not requests:
            return []
        sampler = self._with_room(max(request.prompt_ids.size for request in requests))
        self.version += 1
        sampler.load(weights_of(self.model, self.version, self._swaps))
        return [_told(rollout, *planned[rollout.id]) for rollout in answers(sampler, requests, on_token=on_token)]

    def text(self, rollout: Rollout) -> str:
        """The response, decoded, without its stop token."""
        return response_text(rollout.response_ids, self.model.tokenizer, self.sampling.stop_ids)

    def _with_room(self, prompt_tokens: int) -> TokenSampler:
        """Open a sampler for the longest prompt so far. Room doubles for longer ones; other stop ids open a new sampler."""
        needed = prompt_tokens + self.max_new_tokens
        ends = self.sampling.stop_ids, self.model.size
        if self._opened is None or needed > self._room or ends != self._ends:
            roomy = min(max(ROOM, 1 << (needed - 1).bit_length()), max(self.model.context, needed))
            self._room, self._ends = max(self._room, roomy), ends
            dtype = getattr(torch, self._kind.dtype) if self._kind.dtype else None
            copy, lora = self.model.inference_copy(dtype), self.model.lora
            self._swaps = lora is not None and self._kind.takes_adapters(self.model.module.config, lora)
            if self._opened is not None:
                self._kind.close(self._opened)
            self._opened = self._kind.open(copy, self._room, merge_stop=ends[0])
        return self._opened


def _prompt(given: object) -> Prompt:
    if isinstance(given, str):
        return Prompt(id=given, domain="", text=given)
    if not isinstance(given, Prompt):
        raise UserError(
            f"prompts: expected texts or opd.Prompts, got {type(given).__name__}: {shortened(given)}. "
            'Messages are given as opd.Prompt(id="…", domain="…", messages=({"role": "user", "content": "…"},)).'
        )
    return given


def _told(rollout: Rollout, prompt: Prompt, visit: int, sample: int) -> Rollout:
    group = f"{prompt.id}/{visit}"
    return replace(rollout, prompt_id=prompt.id, visit=visit, sample=sample, domain=prompt.domain, group=group)
