"""Chat templates are programs that come with a model: they are rendered by a process that has no more time and memory than they need."""

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
from collections.abc import Mapping, Sequence
from typing import Any

from opd.data import template_worker as worker
from opd.errors import DataError, ModelError

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
