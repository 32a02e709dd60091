"""Make text from data safe to show: a prompt, a domain or a file name may hold any character.

    plain("[/x]\x1b[2J\n")       one line for a terminal, a log, a table's cell or a tracker's tag
    printable("first\nsecond")   the same with line breaks kept: messages and files
    cell("[/x]")                 a cell of a table or panel: rich reads no markup in it
    inline_code("a `b`")         inline code of a Markdown page

Escape sequences, other control characters, bidirectional overrides, invisible characters and lone surrogates are shown as
escapes, as Python writes them. Long text is cut.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


LINE, CELL, PAGE = 2000, 60, 100_000  # limits in characters: of a line, a cell, a text of several lines
HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # categories: control, format, surrogate, line and paragraph separator
BLANKS = "\u115f\u1160\u2800\u3164\uffa0"  # letters and symbols that are invisible


def plain(text: object, limit: int = LINE) -> str:
    """One line without control characters for a terminal.

    >>> plain("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\nb'
    """
    return _cut("".join(map(_shown, str(text)[: limit + 1])), limit)


def shortened(value: object, limit: int = CELL) -> str:
    """A value as Python writes it, on one line and not long: for the repr of what holds it.

    >>> shortened("a" * 100, 9)
    "'aaaaaaa…"
    """
    if isinstance(value, str):  # which may be long
        value = value[: limit + 1]
    return plain(repr(value), limit)


def printable(text: object, limit: int = PAGE) -> str:
    """Several lines without control characters for a terminal. Ordinary text is unchanged, so files can be copied."""
    return _cut("".join(letter if letter in "\n\t" else _shown(letter) for letter in str(text)[: limit + 1]), limit)


def cell(text: object, style: str = "") -> Text:
    from rich.text import Text

    return Text(plain(text, CELL), style=style)


def inline_code(text: object) -> str:
    """Inline code. The fence is longer than any run of backticks inside."""
    shown = plain(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return f"{fence}{shown}{fence}" if len(fence) == 1 and shown.strip() else f"{fence} {shown} {fence}"


def whole_pieces(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token. Where a character is made of several tokens, the last one has it, and the others are empty."""
    found, part = [], list[int]()
    for number in ids:
        part.append(number)
        text = decode(part)
        if text.endswith("\ufffd") and len(part) < 4:  # UTF-8 has at most four bytes a character
            found.append("")
            continue
        found.append(text)
        part = []
    if part:
        found[-1] = decode(part)
    return found


def split_pieces(ids: Sequence[int], texts: Mapping[str, str], decode: Callable[[list[int]], str]) -> dict[str, str]:
    """Place -> piece, for tokens that are only a part of a character. `texts`: id -> its text alone."""
    parts = [at for at, number in enumerate(ids) if "\ufffd" in texts[str(number)]]
    whole = whole_pieces(ids, decode) if parts else []
    return {str(at): whole[at] for at in parts}


class PlainFormatter(logging.Formatter):
    """A log formatter that makes messages safe, since they quote data."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _shown(letter: str) -> str:
    if letter == " " or not (unicodedata.category(letter) in HIDDEN or letter in BLANKS):
        return letter
    return letter.encode("unicode_escape").decode("ascii")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def message_of(error: BaseException) -> str:
    """What an error says. Empty: nothing, or saying it fails."""
    try:
        return str(error)
    except Exception:  # errors of other packages may raise anything
        return ""


def first_line(error: BaseException) -> str:
    """The first line of an error, with the next line if the first ends with a colon."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:300]


def bytes_in_words(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
