"""Prompts become token ids here, once; from then on only ids travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from opd.errors import DataError
from opd.types import Prompt


def render_prompt(prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> np.ndarray:
    """(P,) int32. Messages go through the chat template, text is encoded as it is (with the tokenizer's BOS, if any)."""
    (found,) = render_prompts([prompt], tokenizer, template_kwargs)
    if isinstance(found, DataError):
        raise found
    return found


def render_prompts(
    prompts: Sequence[Prompt], tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
) -> list[np.ndarray | DataError]:
    """Many at once, as `render_prompt` would one by one; what cannot be rendered is its error, for the caller to judge."""
    found: dict[int, np.ndarray | DataError] = {}
    texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # from messages? -> number -> text
    for number, prompt in enumerate(prompts):
        try:
            texts[prompt.messages is not None][number] = _text(prompt, tokenizer, template_kwargs or {})
        except DataError as error:
            found[number] = error
    for templated, some in texts.items():
        if some:
            encoded = tokenizer(list(some.values()), add_special_tokens=not templated)["input_ids"]
            found |= {number: _ids(prompts[number], ids, tokenizer) for number, ids in zip(some, encoded, strict=True)}
    return [found[number] for number in range(len(prompts))]


def _text(prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> str:
    if prompt.messages is None:
        return prompt.text or ""
    if not tokenizer.chat_template:
        raise DataError(
            f"prompt {prompt.id!r} is a list of messages, but the tokenizer has no chat template. Give text prompts, or a tokenizer with a template."
        )
    return str(
        tokenizer.apply_chat_template(
            list(prompt.messages), tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    )


def _ids(prompt: Prompt, ids: list[int], tokenizer: Any) -> np.ndarray | DataError:
    if prompt.messages is None and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]  # some tokenizers close the text; a prompt is to be continued
    if not ids:
        return DataError(f"prompt {prompt.id!r} has no tokens: {prompt.text or prompt.messages!r}.")
    return np.asarray(ids, dtype=np.int32)


def render_completion(prompt: Prompt, tokenizer: Any, max_tokens: int) -> tuple[np.ndarray, bool]:
    """The dataset's own answer as ids ending in the stop token, cut at `max_tokens`; and whether it was cut."""
    completion = prompt.fields.get("completion")
    if not completion:
        raise DataError(
            f"prompt {prompt.id!r} has no completion, which rollout.data_share needs. Add a `completion` column or set data_share: 0."
        )
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return np.asarray(ids[:max_tokens], dtype=np.int32), len(ids) > max_tokens


def decode(ids: np.ndarray, tokenizer: Any, stop_ids: tuple[int, ...]) -> str:
    """The response as text, without a stop token at its end."""
    end = len(ids) - 1 if len(ids) and int(ids[-1]) in stop_ids else len(ids)
    return str(tokenizer.decode(ids[:end].tolist(), skip_special_tokens=True))
