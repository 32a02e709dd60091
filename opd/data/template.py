"""Chat templates are programs that come with a model. They run in jinja's sandbox, and here within bounds as well."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from opd.errors import DataError, ModelError

STEPS = 2_000_000  # lines and calls that one rendering may take, a hundred times what real templates need
SECONDS = 5.0  # of this thread's processor time, for lines that are long
CHARACTERS = 20_000_000

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


class _OutOfSteps(Exception):
    pass


def render(prompt: str, messages: Sequence[Mapping[str, Any]], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """The conversation as text, ready for the answer. `prompt` is the name that errors give."""
    from jinja2 import TemplateError

    clash = sorted(RESERVED_KWARGS & arguments.keys())
    if clash:
        raise DataError(f"chat_template_kwargs: {clash[0]!r} is set by opd and cannot be given. Remove it.")
    for source in _sources(tokenizer):
        _check(source)
    try:
        with _Memory(), _Steps():
            text = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **arguments
            )
    except _OutOfSteps:  # no error of this row alone: the next ones would take as long
        raise ModelError(
            f"prompt {prompt!r}: the tokenizer's chat template did not end within bounds. Repair its loops, or give "
            "text prompts."
        ) from None
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        RecursionError,
        MemoryError,
    ) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"prompt {prompt!r}: the tokenizer's chat template refused it: {said[0][:300]}. Change the messages or "
            "chat_template_kwargs, or give text prompts."
        ) from None
    if not isinstance(text, str) or len(text) > CHARACTERS:
        raise DataError(f"prompt {prompt!r}: the chat template made more than {CHARACTERS:,} characters of it.")
    return text


def _sources(tokenizer: Any) -> list[str]:
    found = tokenizer.chat_template
    return list(found.values()) if isinstance(found, dict) else [found]


@lru_cache(maxsize=64)
def _check(source: str) -> None:
    """No powers: one of them can keep a single instruction busy for ever, and counting steps would not notice."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        power = next(
            (line for line, kind, value in Environment().lex(source) if (kind, value) == ("operator", "**")), None
        )
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the tokenizer's chat template is no template: {error.message}, line {error.lineno}."
        ) from None
    if power is not None:
        raise ModelError(f"the tokenizer's chat template has a power (**) in line {power}, which opd does not run.")


class _Steps:
    """Counts a template's lines and the calls it causes, and stops it when there were too many or they took too long.

    An exception from the tracing function comes up in the traced code, so that no loop written in a template escapes.
    """

    def __init__(self) -> None:
        self._taken, self._start = 0, time.thread_time()
        self._before = sys.gettrace()

    def __enter__(self) -> None:
        sys.settrace(self._count)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _count(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._taken += 1
        if self._taken > STEPS or (self._taken % 64 == 0 and time.thread_time() - self._start > SECONDS):
            raise _OutOfSteps
        return self._count if frame.f_code.co_filename == "<template>" else None  # elsewhere calls are enough


class _Memory:
    """One expression can ask for more memory than there is, and the kernel then kills the process: here it is refused.

    The bound is half of what is available now, beyond what this process has already.
    """

    def __init__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_AS)

    def __enter__(self) -> None:
        if sys.platform == "linux":
            soft, hard = self._before
            bounds = [
                _room(int(time.monotonic())),
                *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY),
            ]
            resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)


@lru_cache(maxsize=1)
def _room(second: int) -> int:
    """Bytes of address space that this process may reach; looked up once a second."""
    own = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    facts = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return own + next(int(line.split()[1]) * 1024 for line in facts if line.startswith("MemAvailable")) // 2
