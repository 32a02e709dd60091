"""Prompts become token ids here, once; from then on only ids travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from opd.data.template import render
from opd.errors import DataError
from opd.types import Prompt

OTHER = "opd looks whether this is read"  # added to a message, to see whether the template renders it
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}


def render_prompt(
    prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, *, whole: bool = False
) -> np.ndarray:
    """(P,) int32. Messages go through the chat template, text is encoded as it is (with the tokenizer's BOS, if
    any).
    """
    (found,) = render_prompts([prompt], tokenizer, template_kwargs, whole=whole)
    if isinstance(found, DataError):
        raise found
    return found


def render_prompts(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    whole: bool = False,
) -> list[np.ndarray | DataError]:
    """Many at once, as `render_prompt` would one by one; what cannot be rendered is its error, left to the caller.

    `whole`: a prompt of which the chat template leaves a message out cannot be used.
    """
    found: dict[int, np.ndarray | DataError] = {}
    read: set[str] = set()  # roles of which the template has rendered a message
    texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # from messages? -> number -> text
    for number, prompt in enumerate(prompts):
        try:
            text = _text(prompt, tokenizer, template_kwargs or {})
            if whole:
                _require_whole(prompt, text, tokenizer, template_kwargs or {}, read)
            texts[prompt.messages is not None][number] = text
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
            f"prompt {prompt.id!r} is a list of messages, but the tokenizer has no chat template. Give text prompts, "
            "or a tokenizer with a template."
        )
    return render(prompt.id, prompt.messages, tokenizer, template_kwargs)


def _require_whole(
    prompt: Prompt, text: str, tokenizer: Any, template_kwargs: Mapping[str, Any], read: set[str]
) -> None:
    """Refuse a prompt of which the chat template leaves a message out, as most do with roles that they do not know.

    The first message of each role is changed, to see whether the text changes. Of the others that is asked only where
    their content is not found in the text as it is.
    """
    for number, message in enumerate(prompt.messages or ()):
        content, role = message["content"], message["role"]
        if not content or not content.strip() or (role in read and content.strip() in text):
            continue
        if _changes(prompt, number, text, tokenizer, template_kwargs):
            read.add(role)
            continue
        known = ROLES.get(role.lower())
        rename = f"Rename the role to {known!r}" if known else "Templates know the roles system, user and assistant"
        raise DataError(
            f"prompt {prompt.id!r}: the chat template renders nothing of message {number + 1}, whose role is {role!r}, so "
            f"no model would read it. {rename}, or give a template that reads it, or text prompts."
        )


def _changes(prompt: Prompt, number: int, text: str, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> bool:
    """Whether another content of a message makes another text."""
    messages = list(prompt.messages or ())
    messages[number] = {**messages[number], "content": f"{messages[number]['content']} {OTHER}"}
    try:
        return _text(replace(prompt, messages=tuple(messages)), tokenizer, template_kwargs) != text
    except DataError:  # the template reads it, and asks for something else
        return True


def _ids(prompt: Prompt, ids: list[int], tokenizer: Any) -> np.ndarray | DataError:
    ids = _open(prompt, ids, tokenizer)
    if not ids:
        return DataError(f"prompt {prompt.id!r} has no tokens: {prompt.text or prompt.messages!r}.")
    return np.asarray(ids, dtype=np.int32)


def _open(prompt: Prompt, ids: list[int], tokenizer: Any) -> list[int]:
    """Some tokenizers close a text; a prompt is to be continued."""
    closed = prompt.messages is None and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if closed else ids


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
            f"prompt {prompt.id!r} has no completion, which rollout.data_share needs. Add a `completion` column or set "
            "data_share: 0."
        )
    ids = ids_behind(prompt, completion, tokenizer, template_kwargs)
    stop = tokenizer.eos_token_id if tokenizer.eos_token_id in stop_ids else stop_ids[0]
    return np.asarray([*ids, stop][:max_tokens], dtype=np.int32), len(ids) >= max_tokens


def ids_behind(
    prompt: Prompt, answer: str, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """An answer's ids behind its prompt, without a stop id."""

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=prompt.messages is None)["input_ids"]
        return _open(prompt, ids, tokenizer)

    ids = _behind(_text(prompt, tokenizer, template_kwargs or {}), answer, encode)
    if ids is None:  # prompt and answer share a token: the prompt keeps its ids, and the answer begins a line
        ids = _behind("\n", answer, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    if ids is None:
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return ids


def _behind(before: str, after: str, encode: Callable[[str], list[int]]) -> list[int] | None:
    """The ids of `after` in the joint text, if they begin where those of `before` end."""
    first, both = encode(before), encode(before + after)
    return both[len(first) :] if both[: len(first)] == first else None


def response_text(ids: np.ndarray, tokenizer: Any, stop_ids: tuple[int, ...]) -> str:
    """The response as text, without a stop token at its end."""
    end = len(ids) - 1 if len(ids) and int(ids[-1]) in stop_ids else len(ids)
    return str(tokenizer.decode(ids[:end].tolist(), skip_special_tokens=True))
