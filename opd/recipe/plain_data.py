"""Read YAML text as plain data: words, numbers, true, false, null, lists and mappings, with unique keys and a limited size.

The surprises of YAML 1.1 are disabled: `on`, `off`, `yes` and `no` are words, 010 and 1:30 are no numbers, dates are text, 1e-5 is a
number, and tags are errors.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import PurePath
from typing import Any

import yaml

from opd.common.errors import RecipeError

LONGEST = 1 << 18  # characters of a recipe
LARGEST = 20_000  # values in it, with aliases expanded
DEEPEST = 40  # levels
SHOWN = 200  # characters of a value in a message

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,39})$")
_FLOAT = re.compile(
    r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,6})?$|[-+]?\.inf$|\.nan$", re.IGNORECASE
)
_BOOL = re.compile(r"true$|True$|TRUE$|false$|False$|FALSE$")
_NULL = re.compile(r"~$|null$|Null$|NULL$|$")


class _Loader(yaml.SafeLoader):
    """Plain data only. Mistakes raise a `yaml.YAMLError` with the line."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if not isinstance(event, yaml.AliasEvent) and event.tag is not None:
            raise _wrong(
                f"the tag {shown(event.tag)}: a recipe holds plain values; put text in quotes", event.start_mark
            )
        self._depth += 1
        if self._depth > DEEPEST:
            raise _wrong(f"more than {DEEPEST} levels", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith((":str", ":merge")):
                what = shown(key.value) if isinstance(key, yaml.ScalarNode) else "a list or a mapping"
                raise _wrong(f"the key {what}: keys are words; put it in quotes", key.start_mark)
            if key.value in lines:
                where = f"first in line {lines[key.value]}, again"
                raise _wrong(f"the key {shown(key.value)} is given twice: {where}", key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        return node

    def get_single_node(self) -> Any:
        self.get_event()  # the stream begins
        node = None if self.check_event(yaml.StreamEndEvent) else self.compose_document()
        if not self.check_event(yaml.StreamEndEvent):
            second = "a second document begins (`---`), but a recipe is a single document. Put it into a separate file, or use `stages`"
            raise _wrong(second, self.peek_event().start_mark)
        self.get_event()
        if node is not None:
            _weigh(node, {})
        return node


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", _BOOL, "tTfF"), ("int", _INT, "-+0123456789"), ("float", _FLOAT, "-+0123456789."), ("null", _NULL, ["~", "n", "N", ""]),
    ("merge", re.compile("<<$"), "<"),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))


def _weigh(node: Any, known: dict[int, int]) -> int:
    """The number of values in a node with its aliases expanded."""
    if known.get(id(node)) == 0:
        raise _wrong("a value that contains itself", node.start_mark)
    if id(node) not in known:
        known[id(node)] = 0
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        total = 1 + sum(_weigh(child, known) for child in children)
        if total > LARGEST:
            raise _wrong(f"more than {LARGEST} values with its aliases expanded", node.start_mark)
        known[id(node)] = total
    return known[id(node)]


def _wrong(what: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, mark)


def parse_value(text: str) -> Any:
    """A YAML value; raises `yaml.YAMLError`."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """A recipe's text as a mapping."""
    if len(text) > LONGEST:
        raise RecipeError(f"{where}: {len(text)} characters; a recipe has at most {LONGEST}.")
    try:
        raw = parse_value(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where} is not valid YAML: {explain(error)}.") from None
    if not isinstance(raw, dict):
        got = "nothing" if raw is None else shown(raw)
        raise RecipeError(f"{where}: a recipe is a mapping of keys, got {got}. See `opd recipes show quickstart`.")
    return raw


def explain(error: yaml.YAMLError) -> str:
    """The parser's error, with line and column."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    what = (error.problem if isinstance(error, yaml.MarkedYAMLError) else None) or " ".join(str(error).split())
    return cut(what, 400) + (f", in line {mark.line + 1}, column {mark.column + 1}" if mark else "")


def plain_data(value: Any, where: str = "", left: list[int] | None = None, depth: int = 0) -> Any:
    """A checked copy of plain values. Everything from a file, a mapping or an override passes through here."""
    left = [LARGEST] if left is None else left
    left[0] -= 1
    if left[0] < 0 or depth > DEEPEST:
        raise RecipeError(f"the recipe holds more than {LARGEST} values or {DEEPEST} levels.")
    here = cut(where, SHOWN) or "the recipe"
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RecipeError(
                    f"{here}: the key {shown(key)} is a {type(key).__name__}; keys are words. Put it in quotes."
                )
            _text(key, here)
        return {key: plain_data(item, f"{where}.{key}".lstrip("."), left, depth + 1) for key, item in value.items()}
    if isinstance(value, str):
        return _text(value, here)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [plain_data(item, f"{where}.{index}".lstrip("."), left, depth + 1) for index, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{here}: {value} is not finite. Write a finite number, or null for no limit.")
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, Integral):
        if abs(int(value)) >= 1 << 64:
            raise RecipeError(f"{here}: {shown(int(value))} has more than 64 bits.")
        return int(value)
    raise RecipeError(f"{here}: expected text, a number, true, false, null, a list or a mapping, got {shown(value)}.")


def _text(value: str, where: str) -> str:
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise RecipeError(
            f"{where}: {shown(value)} has a character that is not text (NUL, or half of a surrogate pair)."
        )
    return value


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = SHOWN
_short.maxlevel = 4


def shown(value: Any) -> str:
    """A value for a message, cut to at most two lines."""
    return cut(_short.repr(value), SHOWN)


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
