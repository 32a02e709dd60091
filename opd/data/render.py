"""Prompts become token ids here, once; from then on only ids travel."""

from __future__ import annotations

import atexit
import contextlib
import json
import marshal
import os
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
from opd.records import Prompt

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


# Chat templates are programs that come with a model: they are rendered by a process that has no more time and memory than they need.


TRIES = 2  # processes for one rendering, if something else ends the first one
PATIENCE = 1.0  # seconds for a process to end by itself

# What rendering a chat template is given by us, or would do with text that is still to be encoded.
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


def render(prompt: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """The conversation as text, ready for the answer. `prompt` is the name that errors give."""
    clash = sorted(RESERVED_KWARGS & arguments.keys())
    if clash:
        raise DataError(f"chat_template_kwargs: {clash[0]!r} is set by opd and cannot be given. Remove it.")
    if not messages:
        raise DataError(f"prompt {prompt!r} has no messages. Give at least one.")
    for name in ("tools", "documents"):
        entries = arguments.get(name) or []
        if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, Mapping) for entry in entries):
            raise DataError(f"chat_template_kwargs: {name} must be a list of mappings, got {entries!r:.200}.")
    try:
        source = tokenizer.get_chat_template(tools=arguments.get("tools"))
    except ValueError as error:  # several, and none of them is the default
        raise ModelError(f"the tokenizer's chat template cannot be chosen: {str(error).splitlines()[0]}") from None
    given = {"tools": None, "documents": None, **tokenizer.special_tokens_map, **arguments}
    try:
        variables = _plain({**given, "messages": messages, "add_generation_prompt": True})
    except TypeError as error:
        raise DataError(
            f"prompt {prompt!r}: its messages or chat_template_kwargs hold {error}, which a chat template cannot be given. "
            "Write it as text."
        ) from None
    status, said = _process().render(source, variables)
    if status == worker.TEMPLATE:  # no error of this row alone: the next ones would end alike
        raise ModelError(f"prompt {prompt!r}: the tokenizer's chat template {said}. Repair it, or give text prompts.")
    if status == worker.ROW:
        raise DataError(
            f"prompt {prompt!r}: the tokenizer's chat template refused it: {said}. Change the messages or "
            "chat_template_kwargs, or give text prompts."
        )
    return said


def _plain(value: Any) -> Any:
    """What can be sent to another process as it is: JSON's values, and tuples."""
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
    """One that renders, begun when it is first needed. It ends with this process, or when a template breaks a bound."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def render(self, source: str, variables: Any) -> tuple[bytes, str]:
        """A status and what goes with it, as `template_worker` defines them."""
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
        """None: it ended without a reply."""
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
        """How it ended."""
        process, self._running = self._running, None
        assert process is not None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # of a request that it did not read
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
        start_new_session=True,  # Ctrl-C is for this process
    )


_processes: dict[int, _Process] = {}  # by the process that began it: a fork begins its own


def _process() -> _Process:
    found = _processes.get(os.getpid())
    if found is None:
        found = _processes.setdefault(os.getpid(), _Process())
        atexit.register(found.close)
    return found
