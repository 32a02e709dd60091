"""Prompts become token ids here, once; from then on only ids travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from opd.data.template import render
from opd.errors import DataError
from opd.types import Prompt


def render_prompt(prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> np.ndarray:
    """(P,) int32. Messages go through the chat template, text is encoded as it is (with the tokenizer's BOS, if any)."""
    ids = _encode(_text(prompt, tokenizer, template_kwargs), prompt, tokenizer)
    if not ids:
        raise DataError(f"prompt {prompt.id!r} has no tokens: {prompt.text or prompt.messages!r}.")
    return np.asarray(ids, dtype=np.int32)


def render_completion(
    prompt: Prompt,
    tokenizer: Any,
    max_tokens: int,
    stop_ids: tuple[int, ...],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, bool]:
    """The dataset's own answer as ids ending in a stop id, cut at `max_tokens`; and whether it was cut.

    The ids are those that the answer has behind its prompt: encoded alone it may begin with another token, such as one
    that stands for the space before a first word.
    """
    completion = prompt.fields.get("completion")
    if not completion:
        raise DataError(
            f"prompt {prompt.id!r} has no completion, which rollout.data_share needs. Add a `completion` column or set data_share: 0."
        )
    before = _text(prompt, tokenizer, template_kwargs)
    ids = _behind(before, completion, lambda text: _encode(text, prompt, tokenizer))
    if ids is None:  # prompt and answer share a token: the prompt keeps its ids, and the answer begins a line
        ids = _behind("\n", completion, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    if ids is None:
        ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    stop = tokenizer.eos_token_id if tokenizer.eos_token_id in stop_ids else stop_ids[0]
    return np.asarray([*ids, stop][:max_tokens], dtype=np.int32), len(ids) >= max_tokens


def _behind(before: str, after: str, encode: Callable[[str], list[int]]) -> list[int] | None:
    """The ids of `after` in the joint text, if they begin where those of `before` end."""
    first, both = encode(before), encode(before + after)
    return both[len(first) :] if both[: len(first)] == first else None


def _text(prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> str:
    if prompt.messages is None:
        return prompt.text or ""
    if not tokenizer.chat_template:
        raise DataError(
            f"prompt {prompt.id!r} is a list of messages, but the tokenizer has no chat template. Give text prompts, or a tokenizer with a template."
        )
    return render(prompt.id, prompt.messages, tokenizer, template_kwargs or {})


def _encode(text: str, prompt: Prompt, tokenizer: Any) -> list[int]:
    if prompt.messages is not None:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = list(tokenizer(text)["input_ids"])
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]  # some tokenizers close the text; a prompt is to be continued
    return ids


def decode(ids: np.ndarray, tokenizer: Any, stop_ids: tuple[int, ...]) -> str:
    """The response as text, without a stop token at its end."""
    end = len(ids) - 1 if len(ids) and int(ids[-1]) in stop_ids else len(ids)
    return str(tokenizer.decode(ids[:end].tolist(), skip_special_tokens=True))
