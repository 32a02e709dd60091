"""Requests as all samplers handle them: random keys, ids, why an answer is over, and the weights that answer them. No torch here.

Draws depend only on the request (seed, prompt, visit, sample) and the response position: one uniform number per position, so a
rollout is the same alone, in any batch, and after an interruption.

    key = request_key(seed=0, prompt_id="task:addition/train/7", visit=0, sample=3)
    uniforms(key, start=0, count=128)                     # the numbers that draw the first 128 tokens
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.common.errors import DataError, ModelError
from opd.records import SampleRequest, StopReason, WeightsRef

if TYPE_CHECKING:
    from opd.models.language_model import LanguageModel


# splitmix64 (Steele, Lea, Flood 2014): a counter goes in, 64 well-mixed bits come out.
GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
BITS = 24  # of the float32 significand: every multiple of 2^-24 in [0, 1) is exact


def request_key(seed: int, prompt_id: str, visit: int, sample: int) -> int:
    """A 63-bit key, which fits into a signed 64-bit tensor."""
    digest = hashlib.blake2b(f"{seed}\0{prompt_id}\0{visit}\0{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(key: int, start: int, count: int) -> np.ndarray:
    """(count,) float32 in [0, 1): the draws of response positions start, start + 1, …"""
    counter = np.arange(start, start + count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = counter + np.uint64((key + GAMMA) % 2**64)
        for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(multiplier)
    return (mixed >> np.uint64(64 - BITS)).astype(np.float32) * np.float32(2.0**-BITS)


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
    import torch

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
