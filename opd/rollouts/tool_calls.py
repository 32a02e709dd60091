"""Tool calls: read from what the model wrote, and checked against the tools' schemas.

    reader = tool_format("auto", tokenizer, stop_ids)          # learned from the chat template
    reader.parse('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [ADD])
    -> [Call("add", {"a": 1}, "call00000")], or Malformed("…") with a message for the model

Chat templates show how their model writes calls: an assistant turn with two known calls is rendered, and the text around the
names and arguments gives the format. Templates without tool calls need `json` or `xml`, and `describe` tells the model about it.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from opd.common.errors import DataError, ModelError
from opd.common.text import shortened
from opd.data.prompts import prompt_text
from opd.records import Message, Prompt

FormatName = Literal["auto", "json", "xml"]
CALL_CHARACTERS = 1_000_000  # a longer turn is not searched for calls
MOST_CALLS = 100  # in one turn


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call. `parameters`: a JSON schema of type object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def schema(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }


@dataclass(frozen=True)
class Call:
    """One call. `id` has nine letters and digits, which every chat template accepts.

    >>> Call("add", {"a": 1}).message()["function"]
    {'name': 'add', 'arguments': {'a': 1}}
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = "call00000"

    def message(self) -> dict[str, Any]:
        """As an entry of a message's `tool_calls`."""
        return {
            "type": "function",
            "id": self.id,
            "function": {"name": self.name, "arguments": dict(self.arguments)},
        }


@dataclass(frozen=True)
class Malformed:
    """A turn with a call that cannot be carried out. No call of the turn is carried out. `problem`: shown to the model."""

    problem: str


class CallError(ValueError):
    """What is wrong with a call, as shown to the model."""


# --- Formats ---


class ToolFormat(ABC):
    """How calls are written. Subclasses read names and arguments; `parse` checks them."""

    def parse(self, text: str, tools: Sequence[Tool], first: int = 0) -> list[Call] | Malformed:
        """The calls in a turn, none if it is a plain answer.

        `text`: decoded with special tokens (`turn_text`), since calls are often marked by them. `first`: number of the first
        call, counted over the episode; ids are made of it.
        """
        if len(text) > CALL_CHARACTERS:
            return Malformed(f"The answer is longer than {CALL_CHARACTERS:,} characters. Calls in it were not read.")
        try:
            found = list(itertools.islice(self.read(_without_thinking(text), tools), MOST_CALLS + 1))
            if len(found) > MOST_CALLS:
                raise CallError(f"More than {MOST_CALLS} calls in one turn.")
            for name, arguments in found:
                check_call(name, arguments, tools)
        except CallError as error:
            return Malformed(f"{error} No tool was called.")
        except RecursionError:
            return Malformed("The arguments of a call are nested too deep. No tool was called.")
        return [Call(name, arguments, f"call{number:05d}") for number, (name, arguments) in enumerate(found, first)]

    @abstractmethod
    def read(self, text: str, tools: Sequence[Tool]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Names and arguments. Raises `CallError` for a call that is begun but not well-formed."""

    @abstractmethod
    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the model writes it."""

    def describe(self, tools: Sequence[Tool]) -> str:
        """A system message about the tools, for chat templates that do not render them."""
        listed = "\n".join(json.dumps(tool.schema()["function"], ensure_ascii=False) for tool in tools)
        return (
            f"You can call these tools:\n{listed}\n\nTo call one, write its name and arguments exactly like this:\n"
            f"{self.write('NAME', {'ARGUMENT': 'VALUE'})}\nThe result comes with the next message."
        )


@dataclass(frozen=True)
class JsonFormat(ToolFormat):
    """`<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`. Without markers, a call is the whole answer."""

    open: str = "<tool_call>"
    close: str = "</tool_call>"
    name_key: str = "name"
    arguments_key: str = "arguments"

    def read(self, text: str, tools: Sequence[Tool]) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self.open and not re.match(rf'\s*\{{\s*"{re.escape(self.name_key)}"', text):
            return
        at = 0
        while (begin := text.find(self.open, at)) >= 0 and _skip_space(text, at) < len(text):
            value, at = _json_at(text, begin + len(self.open))
            at = _expect(text, at, self.close)
            yield self._call(value)

    def _call(self, value: Any) -> tuple[str, dict[str, Any]]:
        if not isinstance(value, dict) or not isinstance(value.get(self.name_key), str):
            raise CallError(
                f'A call must be {{"{self.name_key}": …, "{self.arguments_key}": {{…}}}}, got {shortened(value)}.'
            )
        arguments = value.get(self.arguments_key, {})
        if isinstance(arguments, str):  # some models write the arguments as JSON within JSON
            arguments, _ = _json_at(arguments, 0)
        return value[self.name_key], _mapping(arguments, value[self.name_key])

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        body = json.dumps({self.name_key: name, self.arguments_key: dict(arguments)}, ensure_ascii=False)
        return f"{self.open}\n{body}\n{self.close}" if self.open else body


@dataclass(frozen=True)
class NamedJsonFormat(ToolFormat):
    """The name, then its arguments as JSON: `[TOOL_CALLS]add[ARGS]{"a": 1}`."""

    open: str
    middle: str
    close: str = ""

    def read(self, text: str, tools: Sequence[Tool]) -> Iterator[tuple[str, dict[str, Any]]]:
        at = 0
        while (begin := text.find(self.open, at)) >= 0:
            named = re.compile(r"\s*([\w.-]+)").match(text, begin + len(self.open))
            if named is None:
                raise CallError(f"The name of a tool must follow {self.open!r}.")
            brace = text.find("{", named.end(), named.end() + len(self.middle) + 100)
            if brace < 0:
                raise CallError(f"The call of {named[1]} has no arguments. Write them as a JSON object.")
            value, at = _json_at(text, brace)
            at = _expect(text, at, self.close)
            yield named[1], _mapping(value, named[1])

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.open}{name}{self.middle}{json.dumps(dict(arguments), ensure_ascii=False)}{self.close}"


@dataclass(frozen=True)
class TaggedFormat(ToolFormat):
    """Arguments between tags: `<function=add><parameter=a>1</parameter></function>`. Text stays text; the rest is JSON."""

    open: str = "<tool_call>\n<function="
    name_end: str = ">"
    key: str = "<parameter="
    value: str = ">\n"
    value_end: str = "\n</parameter>"
    close: str = "</function>\n</tool_call>"

    def read(self, text: str, tools: Sequence[Tool]) -> Iterator[tuple[str, dict[str, Any]]]:
        at = 0
        opening = _spaced(self.open)
        while (begin := opening.search(text, at)) is not None:
            name, at = self._name(text, begin.end())
            schema = next((tool.parameters for tool in tools if tool.name == name), {})
            arguments: dict[str, Any] = {}
            while (key_begins := _spaced(self.key).match(text, _skip_space(text, at))) is not None:
                key, at = _up_to(text, key_begins.end(), self.value.rstrip(), f"a call of {name}")
                raw, at = _up_to(text, at, self.value_end.lstrip(), f"argument {key.strip()} of {name}")
                raw = raw.removeprefix(_space_after(self.value)).removesuffix(_space_before(self.value_end))
                if key.strip() in arguments:
                    raise CallError(f"The call of {name} gives {key.strip()} twice.")
                arguments[key.strip()] = _from_text(raw, _property(schema, key.strip()), f"{name}: {key.strip()}")
            at = _expect(text, at, self.close)
            yield name, arguments

    def _name(self, text: str, at: int) -> tuple[str, int]:
        ends = [self.name_end] if self.name_end else [self.key.strip(), self.close.strip()]
        found = [position for end in ends if end and (position := text.find(end, at)) >= 0]
        if not found:
            raise CallError(f"The name of a tool must be followed by {' or '.join(ends)}.")
        return text[at : min(found)].strip(), min(found) + len(self.name_end)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        said = "".join(
            f"\n{self.key}{key}{self.value}{_as_text(value)}{self.value_end}" for key, value in arguments.items()
        )
        return f"{self.open}{name}{self.name_end}{said}\n{self.close}"


@dataclass(frozen=True)
class PythonFormat(ToolFormat):
    """A list of Python calls: `[add(a=1, b=2), add(a=3, b=4)]`."""

    open: str
    close: str

    def read(self, text: str, tools: Sequence[Tool]) -> Iterator[tuple[str, dict[str, Any]]]:
        at = 0
        while (begin := text.find(self.open, at)) >= 0:
            body, at = _up_to(text, begin + len(self.open), self.close, "a list of calls")
            listed = _expression(body.strip()) or _expression(body.strip().replace("\n", "\\n"))
            if listed is None:
                raise CallError(f"Not a list of calls: {shortened(body)}. Write [NAME(ARGUMENT=VALUE)].")
            for call in listed.elts if isinstance(listed, ast.List) else [listed]:
                yield self._call(call)

    def _call(self, call: ast.expr) -> tuple[str, dict[str, Any]]:
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            raise CallError("Every call must be NAME(ARGUMENT=VALUE), with the arguments by name.")
        name = ast.unparse(call.func)
        try:
            return name, {str(one.arg): _literal(one.value) for one in call.keywords}
        except (ValueError, TypeError):
            raise CallError(f"The arguments of {name} must be plain values, not expressions.") from None

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        said = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return f"{self.open}[{name}({said})]{self.close}"


@dataclass(frozen=True)
class BracedFormat(ToolFormat):
    """Like JSON, with plain keys and a special token as the quotation mark: `call:add{a:1,unit:<|"|>m<|"|>}`."""

    open: str
    close: str
    quote: str

    def read(self, text: str, tools: Sequence[Tool]) -> Iterator[tuple[str, dict[str, Any]]]:
        at = 0
        while (begin := text.find(self.open, at)) >= 0:
            named = re.compile(r"\s*([\w.-]+)\{").match(text, begin + len(self.open))
            if named is None:
                raise CallError(f"The name of a tool and {{ must follow {self.open!r}.")
            value, at = self._value(text, named.end() - 1)
            at = _expect(text, at, self.close)
            yield named[1], _mapping(value, named[1])

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        if text.startswith(self.quote, at):
            return _up_to(text, at + len(self.quote), self.quote, "a text")
        if text.startswith(("{", "["), at):
            end, items, keyed = "}" if text[at] == "{" else "]", [], text[at] == "{"
            at += 1
            while not text.startswith(end, at):
                key = ""
                if keyed:
                    key, at = _up_to(text, at, ":", "an argument")
                value, at = self._value(text, at)
                items.append((key.strip().removeprefix(self.quote).removesuffix(self.quote), value))
                if text.startswith(",", at):
                    at += 1
                elif not text.startswith(end, at):
                    raise CallError(f"Expected , or {end} at {shortened(text[at:])}.")
            return (dict(items) if keyed else [value for _, value in items]), at + 1
        return _json_at(text, at)

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._written(inner)}" for key, inner in value.items()) + "}"
        if isinstance(value, (list, tuple)):
            return "[" + ",".join(map(self._written, value)) + "]"
        return json.dumps(value)

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.open}{name}{self._written(arguments)}{self.close}"


# --- Learning the format from a chat template ---

ASK, ANSWER = "qprobe", "zprobe"
NAMES = ("tool_probe", "other_probe")
VALUES = {"first_key": "VALUEONE", "second_key": "VALUETWO"}
PROBES = [
    Tool(
        name,
        "A probe.",
        {"type": "object", "properties": {key: {"type": "string"} for key in VALUES}, "required": list(VALUES)},
    )
    for name in NAMES
]
TYPED = Tool(
    "tool_probe",
    "A probe.",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "flag": {"type": "boolean"},
            "items": {"type": "array", "items": {"type": "string"}},
        },
    },
)
TYPED_VALUES = {"text": 'two words,\n"quoted" {text}', "count": 7, "flag": True, "items": ["x", "y"]}


def tool_format(
    name: FormatName, tokenizer: Any, stop_ids: Sequence[int] = (), template_kwargs: Mapping[str, Any] | None = None
) -> ToolFormat:
    """The format of a recipe's `tool_calls`. `auto`: learned from the chat template."""
    if name == "json":
        return JsonFormat()
    if name == "xml":
        return TaggedFormat()
    template = _Template(tokenizer, template_kwargs or {}, [tokenizer.decode([index]) for index in stop_ids])
    learned = template.format()
    if learned is None:
        raise ModelError(
            "the chat template does not show how this model writes tool calls: it leaves them out, or writes them in a way "
            "that is not known. Set tool_calls to json or xml, and the tools are described in the system message."
        )
    return learned


def turn_text(ids: Any, tokenizer: Any, stop_ids: Sequence[int]) -> str:
    """A turn as text with its special tokens, without the stop token at its end: what `ToolFormat.parse` reads."""
    end = len(ids) - 1 if len(ids) and int(ids[-1]) in stop_ids else len(ids)
    return str(tokenizer.decode([int(index) for index in ids[:end]], skip_special_tokens=False))


class _Template:
    """A chat template, asked how it writes calls."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], stops: Sequence[str]) -> None:
        self._tokenizer, self._kwargs, self._stops = tokenizer, kwargs, stops

    def format(self) -> ToolFormat | None:
        """The format whose reading of a rendered turn gives the calls that were put in."""
        both = [Call(name, VALUES, f"call0000{number}") for number, name in enumerate(NAMES)]
        one = self._calls(both[:1], PROBES)
        if one is None or not all(value in one for value in (NAMES[0], *VALUES.values())):
            return None
        two = self._calls(both, PROBES)
        if two is not None and NAMES[1] not in two:
            two = None
        candidates = (_json_format, _named_json_format, _python_format, _braced_format, _tagged_format)
        for candidate in candidates:
            found = candidate(one, two)
            if found is not None and self._reads(found):
                return found
        return None

    def _reads(self, found: ToolFormat) -> bool:
        """Whether a call with arguments of several types is read as it was given."""
        call = Call(TYPED.name, TYPED_VALUES)
        text = self._calls([call], [TYPED])
        return text is not None and found.parse(text, [TYPED]) == [call]

    def _calls(self, calls: Sequence[Call], tools: Sequence[Tool]) -> str | None:
        """The calls as the model writes them: without the header and the end of the turn. None: the template rejects them."""
        for as_text in (False, True):  # some templates expect the arguments as JSON text
            messages = [call.message() for call in calls]
            for message in messages if as_text else ():
                message["function"]["arguments"] = json.dumps(message["function"]["arguments"])
            try:
                plain = self._turn({"role": "assistant", "content": ANSWER}, tools)
                text = self._turn({"role": "assistant", "content": "", "tool_calls": messages}, tools)
            except DataError:
                continue
            before = _common_prefix(plain, text)
            after = plain[plain.rfind(ANSWER) + len(ANSWER) :]
            return self._without_stop(text[len(before) :].removesuffix(after))
        return None

    def _without_stop(self, text: str) -> str:
        for stop in self._stops:
            if stop and text.rstrip().endswith(stop):
                return text.rstrip().removesuffix(stop)
        return text

    def _turn(self, answer: Message, tools: Sequence[Tool]) -> str:
        prompt = Prompt("tool calls of the chat template", "", messages=({"role": "user", "content": ASK}, answer))
        given = {**self._kwargs, "tools": [tool.schema() for tool in tools]}
        return prompt_text(prompt, self._tokenizer, given, open_turn=False)


def _json_format(one: str, two: str | None) -> ToolFormat | None:
    """One JSON object with the name and the arguments."""
    for brace in [found.start() for found in re.finditer(r"\{", one[: one.find(NAMES[0])])]:
        try:
            value, end = json.JSONDecoder().raw_decode(one, brace)
        except ValueError:
            continue
        keys = {_plain_json(inner): key for key, inner in value.items()} if isinstance(value, dict) else {}
        if NAMES[0] in keys and _plain_json(VALUES) in keys:
            name_key, arguments_key = keys[NAMES[0]], keys[_plain_json(VALUES)]
            opening, closing = one[:brace], one[end:]
            if two is not None:
                second = two.rfind("{", 0, two.find(NAMES[1]))
                opening = _common_suffix(opening, two[:second])
                closing = _common_prefix(closing, two[end:])
            return JsonFormat(opening.strip(), closing.strip(), name_key, arguments_key)
    return None


def _plain_json(value: Any) -> str:
    """Text as it is, objects as JSON; equal for arguments given as an object and as JSON text."""
    return value if isinstance(value, str) else json.dumps(value)


def _named_json_format(one: str, two: str | None) -> ToolFormat | None:
    named = one.rfind(NAMES[0]) + len(NAMES[0])
    brace = one.find("{", named)
    if brace < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(one, brace)
    except ValueError:
        return None
    if value != VALUES:
        return None
    opening, closing = one[: named - len(NAMES[0])], one[end:]
    if two is not None:
        opening = _common_suffix(opening, two[: two.rfind(NAMES[1])])
        closing = _common_prefix(closing, two[end:])
    return NamedJsonFormat(opening.strip(), one[named:brace], closing.strip()) if opening.strip() else None


def _python_format(one: str, two: str | None) -> ToolFormat | None:
    begin = one.find(f"[{NAMES[0]}(")
    end = one.rfind(")]") + 2
    if begin < 0 or end < begin:
        return None
    opening, closing = one[:begin].strip(), one[end:].strip()
    return PythonFormat(opening, closing) if opening and closing else None


def _braced_format(one: str, two: str | None) -> ToolFormat | None:
    begin, brace = one.rfind(NAMES[0]), one.rfind(NAMES[0]) + len(NAMES[0])
    key = f"{{{next(iter(VALUES))}:"
    if not one.startswith(key, brace):
        return None
    quote = one[brace + len(key) : one.find("VALUEONE")]
    end = one.find("}", one.rfind("VALUETWO")) + 1
    return BracedFormat(one[:begin].strip(), one[end:].strip(), quote) if quote and one[:begin].strip() else None


def _tagged_format(one: str, two: str | None) -> ToolFormat | None:
    first, second = VALUES
    named = one.rfind(NAMES[0], 0, one.find(first)) + len(NAMES[0])
    places = [one.find(part) for part in (first, "VALUEONE", second, "VALUETWO")]
    if named < len(NAMES[0]) or sorted(places) != places or one.count(first) != 1:
        return None
    opening, to_key = one[: named - len(NAMES[0])], one[named : places[0]]
    to_value = one[places[0] + len(first) : places[1]]
    between, after = one[places[1] + 8 : places[2]], one[places[3] + 8 :]
    key = _common_suffix(to_key, between)
    value_end = between.removesuffix(key)
    if not key.strip() or not value_end.strip() or not after.startswith(value_end):
        return None
    close = after.removeprefix(value_end)
    if two is not None:
        opening = _common_suffix(opening, two[: two.rfind(NAMES[1], 0, two.rfind(first))])
        close = _common_prefix(close, two[two.find("VALUETWO") + 8 :].removeprefix(value_end))
    return TaggedFormat(
        opening.strip(), to_key.removesuffix(key).strip(), key.strip(), to_value, value_end, close.strip()
    )


_PIECES = re.compile(r"<[^<>\s]*>|<[^<>\s]*|\s+|[^<\s]+")  # tags stay whole


def _common_prefix(one: str, other: str) -> str:
    pieces, others = _PIECES.findall(one), _PIECES.findall(other)
    same = next(
        (n for n, (a, b) in enumerate(zip(pieces, others, strict=False)) if a != b), min(len(pieces), len(others))
    )
    return "".join(pieces[:same])


def _common_suffix(one: str, other: str) -> str:
    pieces, others = _PIECES.findall(one)[::-1], _PIECES.findall(other)[::-1]
    same = next(
        (n for n, (a, b) in enumerate(zip(pieces, others, strict=False)) if a != b), min(len(pieces), len(others))
    )
    return "".join(pieces[:same][::-1])


# --- Reading text ---


def _without_thinking(text: str) -> str:
    """The answer after the thinking. A turn that ends while thinking has no calls."""
    _, thought, answer = text.rpartition("</think>")
    text = answer if thought else text
    return text.split("<think>", 1)[0]


def _json_at(text: str, at: int) -> tuple[Any, int]:
    at = _skip_space(text, at)
    try:
        return _DECODER.raw_decode(text, at)
    except CallError:
        raise
    except ValueError as error:
        said = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise CallError(f"Not valid JSON ({said}): {shortened(text[at:])}.") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise CallError("An object has the same key twice.")
    return found


def _no_constant(name: str) -> Any:
    raise CallError(f"{name} is not valid JSON.")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CallError(f"The arguments of {name} must be an object, got {shortened(value)}.")
    return value


def _expression(text: str) -> ast.expr | None:
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    """A Python literal; true, false and null as JSON writes them are accepted."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    value = ast.literal_eval(node)
    return json.loads(json.dumps(value, allow_nan=False))  # tuples as lists; sets and bytes are a TypeError


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _expect(text: str, at: int, marker: str) -> int:
    """The position after a marker. Space within the marker and before it does not matter."""
    found = _spaced(marker).match(text, _skip_space(text, at))
    if found is None:
        raise CallError(f"Expected {marker!r} after a call, got {shortened(text[at:])}.")
    return found.end()


def _up_to(text: str, at: int, marker: str, what: str) -> tuple[str, int]:
    end = text.find(marker, at)
    if end < 0:
        raise CallError(f"{marker!r} is missing after {what}.")
    return text[at:end], end + len(marker)


def _spaced(marker: str) -> re.Pattern[str]:
    pieces = [re.escape(piece) for piece in _PIECES.findall(marker) if piece.strip()]
    return re.compile(r"\s*".join(pieces))


def _space_after(text: str) -> str:
    return text[len(text.rstrip()) :]


def _space_before(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _property(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return _resolved((schema.get("properties") or {}).get(key, {}), schema)


def _from_text(text: str, schema: Mapping[str, Any], what: str) -> Any:
    """An argument that is written as plain text: text where the schema accepts text, else JSON."""
    types = _types(schema)
    if "string" in types or not types:
        return None if text.strip() == "null" and "null" in types else text
    if text.strip() in ("True", "False", "None"):  # some models write Python
        return {"True": True, "False": False, "None": None}[text.strip()]
    try:
        value, end = _json_at(text, 0)
    except CallError:
        raise CallError(f"{what} must be of type {' or '.join(sorted(types))}, got {shortened(text)}.") from None
    if text[end:].strip():
        raise CallError(f"{what}: text follows the value: {shortened(text)}.")
    return value


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- Checking calls against schemas ---

_CHECKS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: (
        (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and value.is_integer())
    ),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def check_call(name: str, arguments: Mapping[str, Any], tools: Sequence[Tool]) -> None:
    """Check a call against the schema of its tool: type, enum, const, properties, required, items, anyOf, oneOf, allOf, $ref.

    Other keywords, such as `minimum`, are left to the tool.
    """
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise CallError(f"There is no tool {shortened(name)}; there is: {known}.")
    schema = {"additionalProperties": False, **tool.parameters, "type": "object"}
    problem = _problem(dict(arguments), schema, tool.parameters, "")
    if problem:
        raise CallError(f"The call of {name}: {problem}.")


def _problem(value: Any, schema: Any, root: Mapping[str, Any], place: str) -> str:
    """What is wrong with a value; "": nothing."""
    if not isinstance(schema, Mapping):
        return "" if schema is not False else f"{place or 'the arguments'} must not be given"
    schema = _resolved(schema, root)
    here = place or "the arguments"
    types = schema.get("type")
    allowed = [types] if isinstance(types, str) else list(types or ())
    if allowed and not any(_CHECKS.get(kind, lambda _: True)(value) for kind in allowed):
        return f"{here} must be of type {' or '.join(allowed)}, got {shortened(value)}"
    choices = schema.get("enum") if "const" not in schema else [schema["const"]]
    if choices is not None and value not in choices:
        return f"{here} must be one of {', '.join(map(repr, choices))}, got {shortened(value)}"
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        problems = [_problem(value, inner, root, place) for inner in alternatives or ()]
        if problems and all(problems):
            return problems[0] if len(problems) == 1 else f"{here} fits no alternative: {'; or '.join(problems)}"
    inner = [_problem(value, part, root, place) for part in schema.get("allOf") or ()]
    if isinstance(value, dict):
        inner += _object_problems(value, schema, root, place)
    if isinstance(value, list) and "items" in schema:
        inner += [_problem(one, schema["items"], root, f"{here}[{number}]") for number, one in enumerate(value)]
    return next(filter(None, inner), "")


def _object_problems(
    value: Mapping[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], place: str
) -> Iterator[str] | list[str]:
    properties = schema.get("properties") or {}
    dot = f"{place}." if place else ""
    found = [f"argument {dot}{key} is missing" for key in schema.get("required") or () if key not in value]
    for key, inner in value.items():
        other = schema.get("additionalProperties", True)
        if key not in properties and other is False:
            known = ", ".join(properties) or "none"
            found.append(f"there is no argument {dot}{shortened(key)}; there is: {known}")
        else:
            found.append(_problem(inner, properties.get(key, other), root, f"{dot}{key}"))
    return found


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow `$ref: #/$defs/NAME`."""
    for _ in range(20):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema if isinstance(schema, Mapping) else {}
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part, {}) if isinstance(found, Mapping) else {}
        schema = found
    return {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema accepts; empty: any."""
    found = schema.get("type")
    types = {found} if isinstance(found, str) else set(found or ())
    for inner in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        types |= _types(inner) if isinstance(inner, Mapping) else set()
    return types
