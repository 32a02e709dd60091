"""One row of text, read strictly: what cannot be read as it was meant is a `BadRow` that says why."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from opd.errors import DataError

DEPTH = 100  # levels of nesting; what reads rows later on recurses


class BadRow(DataError):
    """A row that cannot be used. Its text is the reason alone; whoever knows the place adds it."""


def text_of(data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8") from None
    if "\0" in text:
        raise BadRow("holds NUL bytes, so it is not text")
    return text


def json_row(data: bytes) -> Mapping[str, Any]:
    return object_of(json_value(text_of(data)))


def object_of(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BadRow(f"expected an object with a `prompt`, got {type(value).__name__}")
    return value


def json_value(text: str) -> Any:
    """JSON without what other readers take differently: keys that come twice, NaN, numbers and nesting without end."""
    try:
        value = _DECODER.decode(text)
    except BadRow:
        raise
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}" if "\n" in text else f"column {error.colno}"
        raise BadRow(f"not valid JSON ({error.msg}, {where})") from None
    except ValueError:  # int() takes 4,300 digits
        raise BadRow("holds a whole number of more than 4,300 digits; write it as text") from None
    except RecursionError:
        raise BadRow(f"nested more than {DEPTH} levels deep") from None
    if text.count("[") + text.count("{") > DEPTH and _depth(value) > DEPTH:
        raise BadRow(f"nested more than {DEPTH} levels deep")
    if "\\u" in text:
        require_text(value)
    return value


def require_text(value: Any) -> None:
    """JSON can spell half of a surrogate pair, which no tokenizer and no file takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise BadRow(f"holds \\u{half:04x}, half of a surrogate pair, which is not text") from None


def _depth(value: Any) -> int:
    """Levels of nesting, counted without recursion."""
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        node, level = waiting.pop()
        deepest = max(deepest, level)
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting += [(entry, level + 1) for entry in inner if isinstance(entry, (dict, list))]
    return deepest


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow(f"the key {twice!r} comes twice")
    return found


def _no_constant(name: str) -> Any:
    raise BadRow(f"{name} is not JSON; leave the key out, or write null")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRow(f"the number {text[:20]} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_no_twice, parse_constant=_no_constant, parse_float=_finite)


def csv_cells(data: bytes, delimiter: str) -> list[str]:
    csv.field_size_limit(1 << 30)  # the default, 131,072 characters, is less than a long document
    try:
        return next(csv.reader(io.StringIO(text_of(data), newline=""), delimiter=delimiter, strict=True), [])
    except csv.Error as error:
        raise BadRow(f"not valid CSV ({error})") from None


def csv_row(data: bytes, delimiter: str, header: Sequence[str]) -> Mapping[str, Any]:
    """Cells by column; an empty cell is a value that is not there."""
    cells = csv_cells(data, delimiter)
    if len(cells) != len(header):
        raise BadRow(f"has {len(cells)} cells, and the header has {len(header)}")
    return {name: cell or None for name, cell in zip(header, cells, strict=True) if name}
