"""Samples and log-probs of prompts, from a base model or from weights that a training client saved.

One `BaseSampler` serves all samplers over one base model. The base's own weights are shared with it; trained ones are loaded into
a second copy when a request needs others than the last one did.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from opd.divergences import Projection, likeliest_ids, token_logprobs
from opd.divergences.projection import log_probs, upload
from opd.engines.kinds import BuiltInSampler
from opd.engines.requests import request_key
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel
from opd.records import Finished, SampledToken, SampleRequest, Sampling, WeightsRef
from opd.serve.tinker.wire import SampleAnswer, SampledSequence

UNKNOWN = -99999.0  # the log-prob that stands for none in a table of likeliest tokens
ROOM = 256  # tokens of the shortest sequences that a sampler is opened for
ROWS = 1024  # rows of log-probs at once


@dataclass(frozen=True, eq=False)
class SampleQuestion:
    """`last`: score only so many prompt tokens; None: all. `targets` (P − 1, K): ids to score, −1 for none."""

    ids: np.ndarray
    count: int
    sampling: Sampling
    seed: int | None
    prompt_logprobs: bool = False
    last: int | None = None
    top_prompt: int = 0
    top_sampled: int = 0
    targets: np.ndarray | None = None

    @property
    def longest(self) -> int:
        return int(self.ids.size) + self.sampling.max_new_tokens


class Placed:
    """A model that samples and scores. Its sampler is opened for sequences of a length, and again for longer ones."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self._room = model, 0

    def load(self, weights: WeightsRef) -> None:
        self._open(ROOM)
        self._sampler.load(weights)

    def _open(self, longest: int) -> None:
        if longest <= self._room:
            return
        room = min(max(1 << (longest - 1).bit_length(), ROOM), self.model.context)
        # the sampler's weights are this model's, so what is loaded there is scored here
        self._sampler = BuiltInSampler().open(self.model.inference_copy(), room, merge_stop=())
        self._room = room

    def answers(self, questions: Sequence[SampleQuestion]) -> list[SampleAnswer]:
        """All samples of all questions are drawn together."""
        self._open(max(question.longest for question in questions))
        requests: dict[str, SampleRequest] = {}
        for number, question in enumerate(questions):
            seed = secrets.randbits(62) if question.seed is None else question.seed
            for sample in range(question.count):
                name = f"{number}/{sample}"
                key = request_key(seed, "tinker", 0, sample)
                requests[name] = SampleRequest(name, question.ids.astype(np.int32), key, question.sampling)
        drawn: dict[str, list[SampledToken]] = {name: [] for name in requests}
        stopped: dict[str, bool] = {}
        for event in self._sampler.sample(iter(requests.values())):
            if isinstance(event, Finished):
                stopped[event.request_id] = event.stop == "stop"
            elif isinstance(event, SampledToken):
                drawn[event.request_id].append(event)
        return [
            self._answer(question, [(drawn[f"{number}/{i}"], stopped[f"{number}/{i}"]) for i in range(question.count)])
            for number, question in enumerate(questions)
        ]

    def _answer(self, question: SampleQuestion, drawn: Iterable[tuple[list[SampledToken], bool]]) -> SampleAnswer:
        sequences = []
        for tokens, stopped in drawn:
            ids = np.array([token.token for token in tokens], dtype=np.int64)
            likeliest = self._top(np.concatenate([question.ids, ids]), ids.size, question.top_sampled)
            sequences.append(SampledSequence(ids, np.array([token.logprob for token in tokens]), stopped, likeliest))
        scored = question.last or question.ids.size - 1
        logprobs = self._scored(question.ids, scored) if question.prompt_logprobs else None
        top = self._top(question.ids, scored, question.top_prompt)
        if top is not None:
            top = _padded(top, question.ids.size)
        targets = None if question.targets is None else self._targets(question.ids, question.targets)
        return SampleAnswer(sequences, logprobs, top, targets)

    # Scores of given tokens

    def _projection(self, ids: np.ndarray, last: int) -> Projection:
        """What predicts the last tokens of a text."""
        there = upload(ids[:-1].astype(np.int64), self.model.device)
        hidden = self.model.hidden(there, Packed.of([ids.size - 1], self.model.device))
        return self.model.project(hidden[ids.size - 1 - last :])

    @torch.no_grad()
    def _scored(self, ids: np.ndarray, last: int) -> np.ndarray:
        found = np.full(ids.size, np.nan, dtype=np.float32)
        if last:
            tokens = upload(ids[ids.size - last :].astype(np.int64), self.model.device)
            found[ids.size - last :] = token_logprobs(self._projection(ids, last), tokens).cpu().numpy()
        return found

    @torch.no_grad()
    def _top(self, ids: np.ndarray, last: int, k: int) -> tuple[np.ndarray, np.ndarray] | None:
        if not k or not last:
            return None
        found, logprobs, _, _ = likeliest_ids(self._projection(ids, last), min(k, self.model.size))
        return found.cpu().numpy(), logprobs.cpu().numpy()

    @torch.no_grad()
    def _targets(self, ids: np.ndarray, targets: np.ndarray) -> np.ndarray:
        projection = self._projection(ids, ids.size - 1)
        wanted = upload(np.maximum(targets, 0).astype(np.int64), self.model.device)
        parts = [
            log_probs(projection.rows(slice(at, at + ROWS)), projection.vocabulary).gather(-1, wanted[at : at + ROWS])
            for at in range(0, len(wanted), ROWS)
        ]
        found = torch.cat(parts).float().cpu().numpy()
        return np.where(targets < 0, np.float32(0), found)


class BaseSampler:
    """All samplers over one base model."""

    def __init__(self, base: LanguageModel) -> None:
        self._base, self._own = base, Placed(base.inference_copy())
        self._trained: Placed | None = None
        self._loaded: str | None = None
        self._version = 0

    def of_base(self) -> Placed:
        return self._own

    def of(self, key: str, weights: Callable[[], Mapping[str, Tensor]]) -> Placed:
        """The model with trained weights. `key` names them; `weights` is called if others were used last."""
        if self._trained is None:
            self._trained = Placed(self._base.inference_copy(own=True))
        if key != self._loaded:
            self._loaded, self._version = None, self._version + 1
            self._trained.load(WeightsRef(self._version, weights()))
            self._loaded = key
        return self._trained


def _padded(top: tuple[np.ndarray, np.ndarray], length: int) -> tuple[np.ndarray, np.ndarray]:
    """One row per prompt token; tokens that were not scored have the rows that mean nothing."""
    ids, logprobs = top
    empty = np.full((length - len(ids), ids.shape[1]), UNKNOWN, dtype=np.float32)
    return np.concatenate([np.zeros_like(empty, dtype=ids.dtype), ids]), np.concatenate([empty, logprobs])
