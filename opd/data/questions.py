"""The question of a prompt, and templates that are filled with texts. What is filled in is never read as a template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from opd.types import Message, Prompt


def question(prompt: Prompt) -> str:
    """The last thing that is asked."""
    if prompt.messages is None:
        return prompt.text or ""
    return str(prompt.messages[_last_question(prompt.messages)]["content"])


def asking(prompt: Prompt, text: str) -> Prompt:
    """The same prompt with another question."""
    if prompt.messages is None:
        return replace(prompt, text=text)
    messages, at = list(prompt.messages), _last_question(prompt.messages)
    messages[at] = {**messages[at], "content": text}
    return replace(prompt, messages=tuple(messages))


def replaced(prompt: Prompt, text: str, other: str) -> Prompt | None:
    """The same prompt with another text in place of one that stands in it; None: it does not."""
    if prompt.messages is None:
        found = prompt.text or ""
        return replace(prompt, text=found.replace(text, other)) if text in found else None
    held = [isinstance(message["content"], str) and text in message["content"] for message in prompt.messages]
    messages = tuple(
        {**message, "content": message["content"].replace(text, other)} if holds else message
        for holds, message in zip(held, prompt.messages, strict=True)
    )
    return replace(prompt, messages=messages) if any(held) else None


def _last_question(messages: Sequence[Message]) -> int:
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    return asked[-1] if asked else len(messages) - 1


def with_system(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """In front of what the system message says already."""
    if messages and messages[0]["role"] == "system":
        return ({**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:])
    return ({"role": "system", "content": text}, *messages)


def well_formed(template: str) -> str:
    stray = re.search(r"[{}]", _FIELD.sub("", template))
    if stray:
        raise ValueError(f"a template has {{FIELD}}, or {{{{ for a brace; this has a single {stray[0]!r}")
    return template


def fields_of(template: str) -> list[str]:
    return [name for name in _FIELD.findall(template) if name]


def filled(template: str, values: Mapping[str, str]) -> str:
    """What is filled in is text and never read as a template."""
    return _FIELD.sub(lambda found: values[found[1]] if found[1] else found[0][0], template)


_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def field_texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """Fields that hold something that can be written."""
    return {name: str(value) for name, value in fields.items() if value is not None and value != ""}
