"""Prompts: made of rows, changed by views, and rendered to token ids.

Rows follow TRL's convention: `prompt` or `messages`, plus completion, answer, system and domain.

>>> row_prompt({"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]},
...            "rows/train/0", "sums").fields
{'completion': '4'}
"""

from __future__ import annotations

import atexit
import contextlib
import json
import marshal
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from opd.common.errors import DataError, ModelError
from opd.data import template_worker as worker
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


def plain_prompt(text: Any, identity: str, domain: str) -> Prompt:
    """Plain text that is trained on as it is."""
    if not isinstance(text, str) or not text.strip():
        raise BadRow(f"`text` must be text and not empty, as plain_text asks, got {_short(text)}")
    return Prompt(id=identity, domain=domain, text=text, plain=True)


def as_plain(prompt: Prompt) -> Prompt:
    """A question and its answer as one plain text."""
    return plain_prompt(f"{question(prompt)} {prompt.fields.get('completion', '')}".strip(), prompt.id, prompt.domain)


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


# --- Rendering: prompts to token ids, once; later code uses only ids ---


PROBE_TEXT = "opd looks whether this is read"  # appended to a message to test whether the template renders it
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "developer": "system"}


def render_prompt(
    prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None, *, whole: bool = False
) -> np.ndarray:
    """(P,) int32 ids. Messages go through the chat template; text is encoded as it is (with the tokenizer's BOS, if any)."""
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
    """Like `render_prompt`, for many prompts. A prompt that cannot be rendered yields its error.

    `whole`: reject prompts with a message that the chat template leaves out.
    """
    found: dict[int, np.ndarray | DataError] = {}
    read: set[str] = set()  # roles that the template renders
    texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # from messages? -> number -> text
    for number, prompt in enumerate(prompts):
        try:
            text = prompt_text(prompt, tokenizer, template_kwargs or {})
            if whole:
                _require_rendered(prompt, text, tokenizer, template_kwargs or {}, read)
            texts[prompt.messages is not None][number] = text
        except DataError as error:
            found[number] = error
    for templated, some in texts.items():
        if some:
            # lengths are checked elsewhere, so the tokenizer need not warn about them
            encoded = tokenizer(list(some.values()), add_special_tokens=not templated, verbose=False)["input_ids"]
            for number, row in zip(some, encoded, strict=True):
                prompt, ids = prompts[number], row if templated else _without_end(row, tokenizer)
                ids = ids[:1] if prompt.plain else ids  # BOS, or else the first token; the rest is its answer
                found[number] = np.asarray(ids, dtype=np.int32)
                if not ids:
                    found[number] = DataError(
                        f"prompt {prompt.id!r} has no tokens: {prompt.text or prompt.messages!r}."
                    )
    return [found[number] for number in range(len(prompts))]


def _require_rendered(
    prompt: Prompt, text: str, tokenizer: Any, template_kwargs: Mapping[str, Any], read: set[str]
) -> None:
    """Reject a prompt with a message that the chat template leaves out, as most do for unknown roles.

    The check changes the first message of each role and tests whether the text changes. Other messages get this check
    only if their content does not appear in the text verbatim.
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
    """Whether changing the content of a message changes the text."""
    messages = list(prompt.messages or ())
    messages[number] = {**messages[number], "content": f"{messages[number]['content']} {PROBE_TEXT}"}
    try:
        return prompt_text(replace(prompt, messages=tuple(messages)), tokenizer, template_kwargs) != text
    except DataError:  # the template reads the message, but rejects this content
        return True


def _without_end(ids: list[int], tokenizer: Any) -> list[int]:
    """Remove the end-of-sequence id that some tokenizers append to text: a prompt must stay open."""
    return ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids


def render_completion(
    prompt: Prompt,
    tokenizer: Any,
    max_tokens: int,
    stop_ids: tuple[int, ...],
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, bool]:
    """The dataset's answer as ids that end with a stop id, cut at `max_tokens`; and whether it was cut.

    The answer is encoded after its prompt: encoded alone, it may begin with a different token, such as one that includes
    a leading space.
    """
    completion = prompt.fields.get("completion")
    if not completion and not prompt.plain:
        raise DataError(
            f"prompt {prompt.id!r} has no completion, which rollout.data_share needs. Add a `completion` column or set "
            "data_share: 0."
        )
    ids = (
        _plain_rest(prompt, tokenizer)
        if prompt.plain
        else ids_after(prompt, completion or "", tokenizer, template_kwargs)
    )
    stop = tokenizer.eos_token_id if tokenizer.eos_token_id in stop_ids else stop_ids[0]
    return np.asarray([*ids, stop][:max_tokens], dtype=np.int32), len(ids) >= max_tokens


def _plain_rest(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The ids of a plain text after the first."""
    return list(_without_end(tokenizer(prompt.text)["input_ids"], tokenizer))[1:]


def ids_after(
    prompt: Prompt, answer: str, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """An answer's ids after its prompt, without a stop id."""

    def encode(text: str) -> list[int]:
        if prompt.messages is not None:
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        return _without_end(tokenizer(text)["input_ids"], tokenizer)

    ids = _ids_after(prompt_text(prompt, tokenizer, template_kwargs or {}), answer, encode)
    if ids is None:  # prompt and answer share a token: keep the prompt's ids, and encode the answer as after a newline
        ids = _ids_after("\n", answer, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    if ids is None:
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return ids


def _ids_after(before: str, after: str, encode: Callable[[str], list[int]]) -> list[int] | None:
    """The ids of `after` in the joint text; None if no token boundary separates it from `before`."""
    first, both = encode(before), encode(before + after)
    return both[len(first) :] if both[: len(first)] == first else None


def response_text(ids: np.ndarray, tokenizer: Any, stop_ids: tuple[int, ...]) -> str:
    """The response as text, without a stop token at its end."""
    end = len(ids) - 1 if len(ids) and int(ids[-1]) in stop_ids else len(ids)
    return str(tokenizer.decode(ids[:end].tolist(), skip_special_tokens=True))


# --- Rendering chat templates in a process with limited time and memory ---
#
# Templates are programs that come with a model.


TRIES = 2  # processes per rendering, in case the first one is ended from outside
PATIENCE = 1.0  # seconds for a process to end by itself

# Template arguments that opd sets, or that apply to the encoding of the text.
RESERVED_KWARGS = frozenset(
    [
        "conversation",
        "messages",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)


def prompt_text(prompt: Prompt, tokenizer: Any, arguments: Mapping[str, Any], *, open_turn: bool = True) -> str:
    """A prompt as text. Messages go through the tokenizer's chat template, up to where the answer begins.

    `open_turn`: whether the text ends with the beginning of the assistant's next turn.
    """
    if prompt.messages is None:
        return prompt.text or ""
    if not tokenizer.chat_template:
        raise DataError(
            f"prompt {prompt.id!r} is a list of messages, but the tokenizer has no chat template. Give text prompts, "
            "or a tokenizer with a template."
        )
    clash = sorted(RESERVED_KWARGS & arguments.keys())
    if clash:
        raise DataError(f"chat_template_kwargs: {clash[0]!r} is set by opd and cannot be given. Remove it.")
    if not prompt.messages:
        raise DataError(f"prompt {prompt.id!r} has no messages. Give at least one.")
    arguments = {**arguments, **prompt.template_kwargs}
    for name in ("tools", "documents"):
        entries = arguments.get(name) or []
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in entries):
            raise DataError(f"chat_template_kwargs: {name} must be a list of mappings, got {entries!r:.200}.")
    try:
        source = tokenizer.get_chat_template(tools=arguments.get("tools"))
    except ValueError as error:  # several templates without a default
        raise ModelError(f"the tokenizer's chat template cannot be chosen: {str(error).splitlines()[0]}") from None
    given = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **arguments}
    try:
        variables = _plain({**given, "messages": prompt.messages, "add_generation_prompt": open_turn})
    except TypeError as error:
        raise DataError(
            f"prompt {prompt.id!r}: its messages or chat_template_kwargs hold {error}, which a chat template cannot be given. "
            "Write it as text."
        ) from None
    process = _processes.get(os.getpid()) or _start_process()
    status, text = process.render(source, variables)
    if status == worker.TEMPLATE:  # not specific to this row: other rows would fail too
        raise ModelError(f"prompt {prompt.id!r}: the tokenizer's chat template {text}. Fix it, or give text prompts.")
    if status == worker.ROW:
        raise DataError(
            f"prompt {prompt.id!r}: the tokenizer's chat template rejected it: {text}. Change the messages or "
            "chat_template_kwargs, or give text prompts."
        )
    return text


def _plain(value: Any) -> Any:
    """Convert to values that can be sent to another process: JSON's values, and tuples."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        inner = [_plain(entry) for entry in value]
        return inner if isinstance(value, list) else tuple(inner)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a value of type {type(value).__name__}")


class _Process:
    """A rendering process, started on first use. It ends with this process, or when a template exceeds a limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def render(self, source: str, variables: Any) -> tuple[bytes, str]:
        """A status, and the text or error that belongs to it, as defined in `template_worker`."""
        request = marshal.dumps((source, variables))
        with self._lock:
            for _ in range(TRIES):
                if self._running is None:
                    self._running = _begin()
                answer = self._ask(self._running, request)
                if answer is not None:
                    if answer[0] == worker.TEMPLATE:
                        self._end()
                    return answer
                code = self._end()
                if code in (-signal.SIGPROF, -signal.SIGSEGV):
                    break
        if code == -signal.SIGPROF:
            return worker.TEMPLATE, f"did not end within {worker.SECONDS:g} s"
        return worker.TEMPLATE, f"ended the process that renders it ({code})"

    def _ask(self, process: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, str] | None:
        """The reply; None: the process ended without one."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(len(request).to_bytes(worker.SIZE, "little") + request)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        head = process.stdout.read(1 + worker.SIZE)
        size = int.from_bytes(head[1:], "little")
        if len(head) <= worker.SIZE or size > 4 * (worker.CHARACTERS + worker.REPEATS * len(request)):
            return None
        said = process.stdout.read(size)
        return (head[:1], said.decode()) if len(said) == size else None

    def _end(self) -> int:
        """End the process; return its exit status."""
        process, self._running = self._running, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # the request was not read
                pipe.close()
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def close(self) -> None:
        with self._lock:
            if self._running is not None:
                self._end()


def _begin() -> subprocess.Popen[bytes]:
    path = [os.path.abspath(entry) for entry in sys.path]
    return subprocess.Popen(
        [sys.executable, "-I", worker.__file__, json.dumps(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C goes only to the parent
    )


_processes: dict[int, _Process] = {}  # by the pid that started it: a fork starts its own


def _start_process() -> _Process:
    process = _processes.setdefault(os.getpid(), _Process())
    atexit.register(process.close)
    return process
