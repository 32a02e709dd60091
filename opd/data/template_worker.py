"""A process that renders chat templates and nothing else: they are programs that come with a model.

It is run as a script by `opd.data.render` and imports jinja2 alone, so that it starts fast and has little to lose. Templates run in
jinja's sandbox, as transformers runs them. Time and memory are bounded by the kernel, since one expression can keep the interpreter busy
for ever (`a * a` of large numbers, lists that hold one another) or ask for any amount of memory. What breaks a bound ends the process.

A request is a length of eight bytes and a marshalled (source, variables); a reply is a status, a length and text.
"""

from __future__ import annotations

import json
import marshal
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

SECONDS = 1.0  # of processor time for one rendering: a thousand times what real templates take
MEMORY = 96 << 20  # bytes for one rendering
CHARACTERS = 1_000_000  # that a template may add to what it was given
PER_BYTE = 16  # bytes of memory for each byte of the request, and
REPEATS = 8  # times that it may repeat it
BYTES_PER_SECOND = 10_000_000  # of long conversations: they have more time
TEXT, ROW, TEMPLATE = (
    b"t",
    b"r",
    b"m",
)  # a reply holds the text; what is wrong with this row; what is wrong with the template
SIZE = 8  # bytes of a length


def jinja_environment() -> Any:
    """As in transformers' `apply_chat_template`: a test compares them."""
    from datetime import datetime

    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Blocks that mark what an assistant said; nothing is done with the marks here."""

        tags = {"generation"}  # noqa: RUF012 — as its base declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Any) -> Any:
            return caller()

    def refuse(message: Any) -> None:
        raise TemplateError(message)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = strftime_now
    return made


def main() -> None:
    """Renders until its input ends, which it does with the process that asked."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the one who asks decides when it ends
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel ends the process, whatever the interpreter is busy with
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled = lru_cache(maxsize=64)(jinja_environment().from_string)
    own, hard = address_space(), resource.getrlimit(resource.RLIMIT_AS)[1]
    asked, replies = sys.stdin.buffer, sys.stdout.buffer
    while size := int.from_bytes(asked.read(SIZE), "little"):
        source, variables = marshal.loads(asked.read(size))
        if own:
            bound = own + MEMORY + PER_BYTE * size
            resource.setrlimit(
                resource.RLIMIT_AS, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard)
            )
        signal.setitimer(signal.ITIMER_PROF, SECONDS + size / BYTES_PER_SECOND)
        status, text = rendered(compiled, source, variables, CHARACTERS + REPEATS * size)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(status + len(text).to_bytes(SIZE, "little"))
        replies.write(text)
        replies.flush()
        if status == TEMPLATE:  # what it left behind goes with the process
            return


def rendered(
    compiled: Callable[[str], Any], source: str, variables: dict[str, Any], longest: int
) -> tuple[bytes, bytes]:
    """A status and what goes with it."""
    from jinja2.exceptions import TemplateSyntaxError

    try:
        text = compiled(source).render(**variables)
        if len(text) <= longest:
            return TEXT, text.encode()
        fault = f"made more than {longest:,} characters of it"
    except TemplateSyntaxError as error:
        fault = f"is no template: {error.message}, line {error.lineno}"
    except SyntaxError as error:  # of the Python that jinja made of it
        fault = f"is no template: {error.msg}"
    except MemoryError:
        fault = "needs too much memory"
    except RecursionError:
        fault = "calls itself without end, or is nested too deep"
    except UnicodeEncodeError:
        fault = "made half of a surrogate pair, which is not text"
    except Exception as error:  # the border to foreign code: whatever else a template can raise, for this row
        said = str(error).strip().splitlines() or [type(error).__name__]
        return ROW, said[0][:300].encode(errors="replace")
    return TEMPLATE, fault.encode(errors="replace")


def address_space() -> int:
    """Bytes that this process has mapped; 0 where the kernel does not say, and would not hold it to a bound."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    main()
