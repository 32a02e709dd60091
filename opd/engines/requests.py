"""Handling of requests and weights that all samplers share, and drawing tokens from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from opd.common.errors import DataError, ModelError
from opd.divergences.projection import even_logsumexp, evenly
from opd.engines.draws import uniforms_at
from opd.models.language_model import LanguageModel
from opd.records import SampleRequest, Sampling, StopReason, WeightsRef


def check_context(model: LanguageModel, max_length: int) -> None:
    if max_length > model.context:
        raise DataError(
            f"sampler: {max_length} tokens per sequence, but the context of {model.name} is {model.context}. "
            "Lower rollout.max_new_tokens or rollout.max_prompt_tokens."
        )


def sequence_ids(request: SampleRequest, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and prefix as one sequence, and the prefix, after checking that the request fits."""
    prefix = np.zeros(0, dtype=np.int64) if request.prefix_ids is None else request.prefix_ids
    ids = np.concatenate([request.prompt_ids, prefix]).astype(np.int64)
    if request.prompt_ids.size + request.start + request.sampling.max_new_tokens > max_length or ids.size == 0:
        raise DataError(
            f"request {request.id!r}: {request.prompt_ids.size} prompt tokens and {request.sampling.max_new_tokens} "
            f"new ones; a sequence here has at least 1 and at most {max_length}. Shorten the prompt or lower "
            "max_new_tokens."
        )
    return ids, prefix


def why_over(ids: list[int], request: SampleRequest, tokenizer: Any) -> StopReason | None:
    """Why the response is over after its last token, or None. Tokens of earlier turns do not count."""
    sampling, count = request.sampling, len(ids) - request.start
    if count <= 0:
        return None
    if ids[-1] in sampling.stop_ids:
        return "stop"
    if sampling.stop_strings and stop_string_at_end(ids[-count:], sampling.stop_strings, tokenizer):
        return "stop"
    return "length" if count >= sampling.max_new_tokens else None


def stop_string_at_end(ids: list[int], strings: tuple[str, ...], tokenizer: Any) -> bool:
    """Whether a stop string is in the tail. A string of n characters is in the last n tokens; 16 more allow for empty ones."""
    tail = ids[-max(map(len, strings)) - 16 :]
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return any(string in text for string in strings)


def weights_of(model: LanguageModel, version: int, swaps: bool) -> WeightsRef:
    """The weights for a sampler. `swaps`: it loads adapters separately. A collective: all ranks must call it."""
    weights = model.weights(version)
    return replace(weights, adapter=model.factors()) if swaps else weights


def copy_weights(model: LanguageModel, weights: WeightsRef) -> None:
    """Copy weights in place: same storage, so CUDA graphs stay valid. Tensors that are already shared are skipped."""
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            tensor = weights.tensors.get(name)
            if tensor is None or tensor.shape != parameter.shape:
                found = "missing" if tensor is None else f"{tuple(tensor.shape)}, not {tuple(parameter.shape)}"
                raise ModelError(
                    f"sampler: weights of version {weights.version} do not fit {model.name}: {name} is {found}."
                )
            if tensor.data_ptr() != parameter.data_ptr():
                parameter.copy_(tensor)


# --- From logits to tokens: one function for all rows, each with its own temperature, top-p, top-k and key ---
#
# Axis legend: N = rows, V = real ids of the vocabulary.


BLOCK = 256  # ids per block sum


@dataclass(frozen=True, eq=False)
class RowSettings:
    """How each row draws. Temperature 0 is greedy, top_p 1 and top_k 0 are off."""

    temperature: Tensor  # (N,) float32
    top_p: Tensor  # (N,) float32
    top_k: Tensor  # (N,) int64
    key: Tensor  # (N,) int64
    position: Tensor  # (N,) int64, in the response


@dataclass(frozen=True, eq=False)
class Drawn:
    """See `SampledToken`."""

    token: Tensor  # (N,) int64
    logprob: Tensor  # (N,) float32
    logprob_sampled: Tensor  # (N,) float32
    logprob_stop: Tensor  # (N,) float32


def draw(
    logits: Tensor, settings: RowSettings, stop: Tensor, filtered: bool, other: Tensor | None = None, share: float = 0.0
) -> Drawn:
    """Draw one token per row of logits (N, V). `stop` (E,) are the ids that form one event.

    With `other` (N, V), another model's logits, tokens are drawn from (1 - share) * own + share * other, without
    temperature or filter. `logprob_sampled` is then that of the merged stop event, as `logprob` always is.

    `filtered`: whether any row uses top-p or top-k; if not, nothing is sorted. A row that uses neither gives the same
    bits either way. Nothing here waits for the device or copies to it (`where` with a Python number would), so a CUDA
    graph can record it.
    """
    greedy = settings.temperature == 0
    plain = other is None and not filtered and logits.device.type == "cpu" and bool((settings.temperature == 1).all())
    if plain:  # the same numbers in half the passes
        peak, best = logits.amax(-1, keepdim=True), None
    else:
        peak, best = logits.max(-1, keepdim=True)
    centred = logits - peak  # the largest is 0, so dividing by any temperature is safe
    weights = evenly(torch.exp, centred)
    log_total = evenly(torch.log, weights.sum(-1, dtype=torch.float64)).float()  # (N,) of the policy itself
    tempered = centred if plain else centred / settings.temperature.masked_fill(greedy, 1.0)[:, None]
    if other is not None:
        own = centred - log_total[:, None] + math.log1p(-share)
        tempered = evenly(torch.logaddexp, own, other.log_softmax(-1) + math.log(share))
    elif filtered:
        tempered = _filter(tempered, settings.top_p, settings.top_k)
    uniform = uniforms_at(settings.key, settings.position)
    drawn, log_drawn = _inverse_cdf(tempered, uniform, weights if plain else evenly(torch.exp, tempered))
    token = drawn if best is None else torch.where(greedy, best[:, 0], drawn)
    logprob = centred.gather(-1, token[:, None])[:, 0] - log_total
    if stop.numel():
        logprob_stop = even_logsumexp(centred[:, stop]) - log_total
        stopped = (token[:, None] == stop).any(-1)
        logprob = torch.where(stopped, logprob_stop, logprob)
        if other is not None:
            log_drawn = torch.where(stopped, even_logsumexp(tempered[:, stop]), log_drawn)
    else:
        logprob_stop = torch.full_like(logprob, float("nan"))
    return Drawn(token, logprob, log_drawn.masked_fill(greedy, 0.0), logprob_stop)


def _inverse_cdf(logits: Tensor, uniform: Tensor, probability: Tensor) -> tuple[Tensor, Tensor]:
    """The first id whose cumulative probability exceeds the uniform number, and its log-probability.

    `probability` is exp(logits), which need not sum to 1.

    Two levels (blocks of ids, then ids) in fp64: a running fp32 sum over 100k ids would lose the rare ones, and a
    full-width scan is slow. An id of probability 0 is never returned: comparisons are strict, and if rounding makes the
    two levels disagree, the block's likeliest id is taken.
    """
    size = min(BLOCK, logits.shape[1])
    missing = -logits.shape[1] % size
    blocks = (pad(probability, (0, missing)) if missing else probability).unflatten(
        -1, (-1, size)
    )  # (N, V / size, size)
    before = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = before[:, -1:]
    target = uniform.double()[:, None] * total  # < total, as uniform <= 1 - 2^-24
    block = (before <= target).sum(-1, keepdim=True).clamp(max=before.shape[1] - 1)
    rest = target - before.gather(-1, (block - 1).clamp(min=0)).masked_fill(block == 0, 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, size))[:, 0]  # (N, size)
    index = (inside.cumsum(-1, dtype=torch.float64) <= rest).sum(-1, keepdim=True).clamp(max=size - 1)
    index = torch.where(inside.gather(-1, index) > 0, index, inside.argmax(-1, keepdim=True))
    token = block * size + index
    return token[:, 0], (logits.gather(-1, token) - evenly(torch.log, total).float())[:, 0]


def kept(logits: Tensor, settings: RowSettings) -> Tensor:
    """(N, V): a mask of the ids that pass top-k and top-p."""
    greedy = settings.temperature == 0
    tempered = logits / settings.temperature.masked_fill(greedy, 1.0)[:, None]
    return _filter(tempered, settings.top_p, settings.top_k) > float("-inf")


def _filter(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """-inf outside the top k and, among those, outside the smallest set of mass top_p. At least one id stays.

    Ties are broken by id, so that exactly k remain.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    outside = (top_k[:, None] > 0) & (rank >= top_k[:, None])
    probability = ordered.masked_fill(outside, float("-inf")).double().softmax(-1)
    mass_before = probability.cumsum(-1) - probability
    outside = outside | ((top_p[:, None] < 1) & (rank > 0) & (mass_before >= top_p[:, None]))
    return torch.empty_like(logits).scatter(-1, order, ordered.masked_fill(outside, float("-inf")))


def filters(sampling: Sampling) -> bool:
    """Whether drawing needs the sorted vocabulary."""
    return sampling.top_k > 0 or sampling.top_p < 1
