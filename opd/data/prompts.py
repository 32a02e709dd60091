"""Rows to prompts, in TRL's convention: `prompt` or `messages`, plus completion, answer, system and domain.

>>> row_prompt({"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
...            "rows/train/0", "sums").fields
{'completion': '4'}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from opd.data.rows import BadRow, as_message
from opd.records import Message, Prompt

TAKEN = ("prompt", "domain", "completion", "system")  # columns with a special meaning; others are kept in `fields`
DOMAIN = "domain"  # the column that selects a prompt's teacher, unless `route` names another
CHECKABLE = ("answer", "verifier", "cases", "tests", "schema")  # columns that rewards use


def row_prompt(row: Mapping[str, Any], identity: str, domain: str) -> Prompt:
    """The prompt of a row. Text stays text; the chat template renders messages. A row with neither is a `BadRow`."""
    own = {key: value for key, value in row.items() if value is not None}
    content, completion = own.get("prompt"), own.get("completion")
    spoken = content is None and "messages" in own
    if spoken:
        content, last = _conversation(own["messages"])
        completion = last if completion is None else completion
    if content is None:
        raise BadRow(f"no `prompt`; it has {', '.join(map(str, own)) or 'nothing'}")
    fields = {key: value for key, value in own.items() if key not in TAKEN and not (spoken and key == "messages")}
    if completion is not None:
        fields["completion"] = _completion(completion)
    if "answer" in fields:
        fields.setdefault("verifier", "exact")
    label = _label(own.get("domain"), domain)
    system = _system(own.get("system"))
    if isinstance(content, str) and content.strip():
        if "system" not in row:
            return Prompt(id=identity, domain=label, text=content, fields=fields)
        content = [{"role": "user", "content": content}]
    messages = _messages(content, "prompt")
    if system is not None:
        messages = _with_system(system, messages)
    return Prompt(id=identity, domain=label, messages=messages, fields=fields)


def route_value(prompt: Prompt, column: str) -> str:
    """The value that a teacher must list, or have as its name, to score this prompt."""
    if column == DOMAIN:
        return prompt.domain
    value = prompt.fields.get(column)
    if value is None or value == "":
        raise BadRow(f"no `{column}`, which `route` reads; it has {', '.join(map(str, prompt.fields)) or 'nothing'}")
    if not isinstance(value, (str, int)):
        raise BadRow(f"`{column}`, which `route` reads, must be text, got {_short(value)}")
    return str(value)


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Rename a row's columns. `columns`: our name -> the file's name, such as {"prompt": "question"}."""
    if not columns:
        return row
    rest = {key: value for key, value in row.items() if key not in columns.values()}
    return rest | {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}


def _messages(content: Any, column: str) -> tuple[Message, ...]:
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes)) or not content:
        raise BadRow(
            f"`{column}` must be text or a list of {{role, content}} messages and not empty, got {_short(content)}"
        )
    return tuple(_message(as_message(message), column) for message in content)


def _message(message: Any, column: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise BadRow(f"`{column}` must be a list of {{role, content}} messages, got {_short(message)}")
    found = {key: value for key, value in message.items() if value is not None}  # tables fill missing values with null
    return found | {"content": _content(found, column)}


def _content(message: Message, column: str) -> str | None:
    """The content as text; text parts are joined. Only tool calls may have none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return None
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise BadRow(f"`{column}`: the content of a message must be text, got {_short(content)}")


def _conversation(messages: Any) -> tuple[Sequence[Any], str | None]:
    """The messages before a final answer, and that answer if the conversation ends with one."""
    found = _messages(messages, "messages")
    if found[-1]["role"] != "assistant" or found[-1]["content"] is None:
        return found, None
    if len(found) == 1:
        raise BadRow("`messages` holds an answer and nothing before it")
    return found[:-1], found[-1]["content"]


def _system(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadRow(f"`system` must be text, got {_short(value)}")
    return value if value and value.strip() else None


def _with_system(system: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if any(message["role"] == "system" for message in messages):
        raise BadRow("it has a `system` column and a system message; keep one")
    return ({"role": "system", "content": system}, *messages)


def _completion(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise BadRow(f"`completion` must be text or a list of {{role, content}} messages, got {_short(value)}")
    return "".join(message["content"] or "" for message in _messages(value, "completion"))


def _label(value: Any, domain: str) -> str:
    if value is None or value == "":
        return domain
    if not isinstance(value, (str, int)):
        raise BadRow(f"`domain` must be text, got {_short(value)}")
    return str(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


# --- The question of a prompt, and filling templates with text ---


def question(prompt: Prompt) -> str:
    """The last question of a prompt."""
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
    """The same prompt with `text` replaced by `other`; None: the prompt does not contain `text`."""
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
    """Messages with `text` as the system message, or before the existing one."""
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
    """Fill in a template. The values are never read as templates."""
    return _FIELD.sub(lambda found: values[found[1]] if found[1] else found[0][0], template)


_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")


def field_texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """Nonempty fields as text."""
    return {name: str(value) for name, value in fields.items() if value is not None and value != ""}
