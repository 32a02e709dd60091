"""What every sampler does with a request and with weights, however it draws its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from opd.errors import DataError, ModelError
from opd.models.language_model import LanguageModel
from opd.types import SampleRequest, Sampling, StopReason, WeightsRef


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
    if request.prompt_ids.size + request.sampling.max_new_tokens > max_length or ids.size == 0:
        raise DataError(
            f"request {request.id!r}: {request.prompt_ids.size} prompt tokens and {request.sampling.max_new_tokens} "
            f"new ones; a sequence here has at least 1 and at most {max_length}. Shorten the prompt or lower "
            "max_new_tokens."
        )
    return ids, prefix


def why_over(ids: list[int], sampling: Sampling, tokenizer: Any) -> StopReason | None:
    """Why the response is over after its last token, if it is."""
    if ids and ids[-1] in sampling.stop_ids:
        return "stop"
    if ids and sampling.stop_strings and stop_string_at_end(ids, sampling.stop_strings, tokenizer):
        return "stop"
    return "length" if len(ids) >= sampling.max_new_tokens else None


def stop_string_at_end(ids: list[int], strings: tuple[str, ...], tokenizer: Any) -> bool:
    """A string of n characters lies in the last n tokens, save for tokens that show nothing: some to spare."""
    tail = ids[-max(map(len, strings)) - 16 :]
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return any(string in text for string in strings)


def weights_of(model: LanguageModel, version: int, swaps: bool) -> WeightsRef:
    """As a sampler loads them; `swaps`: one that takes adapters by themselves. All ranks have to ask."""
    weights = model.weights(version)
    return replace(weights, adapter=model.factors()) if swaps else weights


def copy_weights(model: LanguageModel, weights: WeightsRef) -> None:
    """Into place: same storage, so CUDA graphs stay valid. What is shared already is left alone."""
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
