"""Converts prompts to token ids, once; later code uses only ids."""

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

OTHER = "opd looks whether this is read"  # appended to a message to test whether the template renders it
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
    messages[number] = {**messages[number], "content": f"{messages[number]['content']} {OTHER}"}
    try:
        return _text(replace(prompt, messages=tuple(messages)), tokenizer, template_kwargs) != text
    except DataError:  # the template reads the message, but rejects this content
        return True


def _ids(prompt: Prompt, ids: list[int], tokenizer: Any) -> np.ndarray | DataError:
    ids = _open(prompt, ids, tokenizer)
    if not ids:
        return DataError(f"prompt {prompt.id!r} has no tokens: {prompt.text or prompt.messages!r}.")
    return np.asarray(ids, dtype=np.int32)


def _open(prompt: Prompt, ids: list[int], tokenizer: Any) -> list[int]:
    """Remove the end-of-sequence id that some tokenizers append: a prompt must stay open."""
    closed = prompt.messages is None and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if closed else ids


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
    """An answer's ids after its prompt, without a stop id."""

    def encode(text: str) -> list[int]:
        ids = tokenizer(text, add_special_tokens=prompt.messages is None)["input_ids"]
        return _open(prompt, ids, tokenizer)

    ids = _behind(_text(prompt, tokenizer, template_kwargs or {}), answer, encode)
    if ids is None:  # prompt and answer share a token: keep the prompt's ids, and encode the answer as after a newline
        ids = _behind("\n", answer, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
    if ids is None:
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    return ids


def _behind(before: str, after: str, encode: Callable[[str], list[int]]) -> list[int] | None:
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


def render(prompt: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """The conversation as text, ready for the answer. `prompt`: its id, for error messages."""
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
    except ValueError as error:  # several templates without a default
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
    if status == worker.TEMPLATE:  # not specific to this row: other rows would fail too
        raise ModelError(f"prompt {prompt!r}: the tokenizer's chat template {said}. Repair it, or give text prompts.")
    if status == worker.ROW:
        raise DataError(
            f"prompt {prompt!r}: the tokenizer's chat template refused it: {said}. Change the messages or "
            "chat_template_kwargs, or give text prompts."
        )
    return said


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


def _process() -> _Process:
    found = _processes.get(os.getpid())
    if found is None:
        found = _processes.setdefault(os.getpid(), _Process())
        atexit.register(found.close)
    return found
