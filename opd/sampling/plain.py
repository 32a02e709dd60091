"""The sampler for models whose state does not fit into slots: one request at a time, through the model's own cache.

Slower than the engine, and as right: the draws are the engine's (see `draws` and `sampling`), so a rollout depends on
its request and the weights only. Used for recurrent and hybrid models, for attention that does not come through
transformers' interface, and for sequences beyond a rotary limit.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opd.errors import TrainingError
from opd.models.language_model import LanguageModel
from opd.models.probe import FOREIGN, far, switch_attention
from opd.sampling.requests import check_context, copy_weights, sequence_ids, why_over
from opd.sampling.sampling import Drawn, RowSettings, draw, filters
from opd.types import Finished, SampledToken, SampleRequest, WeightsRef

PROBED = 64  # tokens of the sequence that a cache is tried with
DRIFT = 2e-3  # nats; rounding gives 1e-4 in fp32
STEP, SMALL = "dt_bias", -9.2  # softplus(-9.2) = 0.0001, a tenth of what Nemotron-H bounds steps by
CACHES = ("past_key_values", "cache_params", "state")  # what stock classes call their cache, in and out


class PlainSampler:
    """Implements `types.TokenSampler`. It takes the model over: give it an `inference_copy`."""

    def __init__(self, model: LanguageModel, max_length: int, *, merge_stop: tuple[int, ...], why: str = "") -> None:
        check_context(model, max_length)
        self.model, self.max_length, self.version = model, max_length, 0
        switch_attention(model.module, model.own_attention)
        stop = [index for index in merge_stop if index < model.size]
        self.stop = torch.tensor(stop, dtype=torch.int64, device=model.device)
        self.cached = self._cache_is_right()
        self.why = why  # not through slots

    @property
    def manner(self) -> str:
        how = "through its own cache" if self.cached else "reading the whole sequence for every token"
        return f"samples one request at a time, {how}, which is slower: {self.why}"

    def load(self, weights: WeightsRef) -> None:
        copy_weights(self.model, weights)
        self.version = weights.version

    def sample(self, requests: Iterable[SampleRequest]) -> Iterator[SampledToken | Finished]:
        """Events of one request after the other: its tokens, then its `Finished`."""
        for request in requests:
            yield from self._answer(request)

    def _answer(self, request: SampleRequest) -> Iterator[SampledToken | Finished]:
        sequence, prefix = sequence_ids(request, self.max_length)
        ids, response = sequence.tolist(), prefix.tolist()
        reader = Reader(self)
        over = why_over(response, request.sampling, self.model.tokenizer)
        while over is None:
            drawn = self._draw(reader.read(ids), request, len(response))
            token, logprob = int(drawn.token), float(drawn.logprob)
            if math.isnan(logprob):
                raise TrainingError(
                    f"request {request.id!r}: the policy's logits (version {self.version}) are not finite."
                )
            ids.append(token)
            response.append(token)
            sampled, stop = float(drawn.logprob_sampled), float(drawn.logprob_stop)
            yield SampledToken(request.id, token, logprob, sampled, stop, self.version)
            over = why_over(response, request.sampling, self.model.tokenizer)
        yield Finished(request.id, over)

    @torch.inference_mode()
    def _draw(self, logits_V: Tensor, request: SampleRequest, position: int) -> Drawn:
        sampling, device = request.sampling, self.model.device

        def row(value: float, dtype: torch.dtype) -> Tensor:
            return torch.tensor([value], dtype=dtype, device=device)

        settings = RowSettings(
            temperature=row(sampling.temperature, torch.float32),
            top_p=row(sampling.top_p, torch.float32),
            top_k=row(sampling.top_k, torch.int64),
            key=row(request.key, torch.int64),
            position=row(position, torch.int64),
        )
        return draw(logits_V[None], settings, self.stop, filters(sampling))

    def _cache_is_right(self) -> bool:
        """Token by token through the cache against the whole sequence at once; a cache that fails is not used.

        A recurrence may drift by a little with every token, so there are many; and its steps are made as small as training
        may make them, because some classes bound them in the one pass and not in the other.
        """
        if self.model.dtype != torch.float32 and bounded_steps(self.model.module):
            return False  # the drift would be lost in the rounding of a comparison
        longest = min(PROBED, self.model.context, self.model.route.limit or PROBED)
        ids = torch.linspace(1, self.model.size - 1, longest).long().tolist()
        stepwise, begun = Reader(self, cached=True), min(5, longest - 1)
        try:
            with small_steps(self.model.module):
                whole = Reader(self, cached=False).read_all(ids)
                stepwise.read(ids[:begun])
                ours = torch.stack([stepwise.read(ids[:length]) for length in range(begun + 1, longest + 1)])
        except torch.OutOfMemoryError:
            raise
        except FOREIGN:
            return False
        return not drifted(ours, whole[begun:], self.model.dtype)


def drifted(ours: Tensor, stock: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits (N, V) through a cache give other log-probs than those of the whole sequence."""
    if dtype != torch.float32:
        return far(ours, stock, dtype)
    return not bool((ours.log_softmax(-1) - stock.log_softmax(-1)).abs().max() <= DRIFT)


def bounded_steps(module: Any) -> bool:
    """Whether layers bound the steps of their recurrence (Nemotron-H, Zamba 2), which their cached form may leave out."""
    limits = [vars(part).get("time_step_limit") for part in module.modules()]
    return any(limit is not None and tuple(limit) != (0.0, math.inf) for limit in limits)


@contextmanager
def small_steps(module: Any) -> Iterator[None]:
    """Every other head of a Mamba 2 layer takes steps of 0.0001 in here; the tensors themselves stay as they are."""
    before = [(part, part._parameters[STEP]) for part in module.modules() if part._parameters.get(STEP) is not None]
    try:
        for part, bias in before:
            small = bias.detach().clone()
            small[::2] = SMALL
            part._parameters[STEP] = torch.nn.Parameter(small, requires_grad=False)
        yield
    finally:
        for part, bias in before:
            part._parameters[STEP] = bias


class Reader:
    """Reads one growing sequence.

    Without a cache the whole of it is read again for every token: slow, and always right.
    """

    def __init__(self, sampler: PlainSampler, cached: bool | None = None) -> None:
        self.model = sampler.model
        self.cached = sampler.cached if cached is None else cached
        self._cache: dict[str, Any] = {}
        self._known = 0  # tokens the cache holds
        self._positions = "position_ids" in inspect.signature(self.model.backbone.forward).parameters

    def read(self, ids: list[int]) -> Tensor:
        """Logits (V,) of the token after `ids`, which extend those of the call before."""
        return self.read_all(ids, last=1)[0]

    @torch.inference_mode()
    def read_all(self, ids: list[int], last: int = 0) -> Tensor:
        """Logits (N, V) after each of the tokens that are new, or after the `last` of them."""
        if self._frequencies_change(len(ids)):
            self._cache, self._known = {}, 0
        device = self.model.device
        given = {"position_ids": torch.arange(self._known, len(ids), device=device)[None]} if self._positions else {}
        fresh = torch.tensor([ids[self._known :]], device=device)
        out = self.model.backbone(input_ids=fresh, use_cache=self.cached, **given, **self._cache)
        if self.cached:
            self._cache = {name: out[name] for name in CACHES if name in out}
            self._known = len(ids) if self._cache else 0
        return self.model.project(out.last_hidden_state[0, -last:]).logits()

    def _frequencies_change(self, length: int) -> bool:
        """Beyond its limit longrope turns all positions by other frequencies: what the cache holds is read again."""
        limit = self.model.route.limit
        return limit is not None and self._known <= limit < length
