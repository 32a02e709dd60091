"""Runs inside the sandbox: a program in one process, the tests in another. Writes one JSON line per test.

    examiner      reads the tests from stdin, evaluates them, writes {"value"}, {"passed"}, {"error"} or {"unsupported"}
    └── program   runs the sources, and answers the examiner's requests about its names

The program is forked before the tests are read. It inherits only two pipes from the examiner and cannot access its memory.
Only data comes back over the pipe: numbers, strings and containers of them, rebuilt as Python's own types. So an object that
equals everything, a shadowed builtin or an early exit can change only the program's own answers. Objects that are not data stay
in the program; the examiner holds a handle that can be called, indexed and read, but never compared.
stdin: {"sources", "setup", "prepare", "own", "work": [{"call"} | {"run"}]}.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import datetime
import decimal
import fractions
import importlib
import io
import itertools
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

DEEPEST, MOST = 60, 100_000  # levels of nesting; entries of an iterator
LONGEST = 1 << 24  # bytes of a message
LONGEST_VALUE = 1 << 18
SMALL = 1 << 53
SET_DUMPABLE = 4
PLAIN: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {  # tag -> type, to JSON, from JSON
    "int": (int, hex, lambda digits: int(digits, 16)),
    "float": (float, lambda value: repr(float(value)), float),
    "bytes": (bytes, lambda value: bytes(value).hex(), bytes.fromhex),
    "complex": (complex, lambda value: repr(complex(value)), complex),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (
        fractions.Fraction,
        lambda value: list(map(hex, value.as_integer_ratio())),
        lambda two: fractions.Fraction(*(int(part, 16) for part in two)),
    ),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda three: range(*three)),
}
GROUPS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}


class Unsupported(Exception):
    """The tests need something that does not work across two processes."""


class Ended(Exception):
    """The program has ended."""


def encode(value: Any, other: Callable[[Any], Any], depth: int = 0) -> Any:
    """A value as JSON. `other` encodes anything that is not data."""
    if depth > DEEPEST:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value if value is None else bool(value) if isinstance(value, bool) else str(value)
    if isinstance(value, int) and -SMALL < value < SMALL:
        return int(value)
    if isinstance(value, list):
        return [encode(entry, other, depth + 1) for entry in value]
    if isinstance(value, dict):
        return {"dict": [[encode(part, other, depth + 1) for part in pair] for pair in value.items()]}
    for tag, group in GROUPS.items():
        if isinstance(value, group):
            return {tag: [encode(entry, other, depth + 1) for entry in value]}
    known = next(((tag, write) for tag, (kind, write, _) in PLAIN.items() if isinstance(value, kind)), None)
    return other(value) if known is None else {known[0]: known[1](value)}


def decode(data: Any, other: Callable[[str, Any], Any]) -> Any:
    """A value from JSON, built from Python's own types only. `other` decodes the remaining tags."""
    if not isinstance(data, (list, dict)):
        return data
    if isinstance(data, list):
        return [decode(entry, other) for entry in data]
    ((tag, inner),) = data.items()
    if tag == "dict":
        return {decode(key, other): decode(entry, other) for key, entry in inner}
    if tag in GROUPS:
        return GROUPS[tag](decode(entry, other) for entry in inner)
    return PLAIN[tag][2](inner) if tag in PLAIN else other(tag, inner)


class Line:
    """Messages over two pipes."""

    def __init__(self, reading: int, writing: int) -> None:
        self._lines, self._writing = os.fdopen(reading, "rb"), writing

    def send(self, message: Any) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._writing, data) :]
        except OSError:
            raise Ended("the program has ended") from None

    def receive(self) -> Any:
        line = self._lines.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise Ended("the program has ended")
        return json.loads(line)


# The program's side


class Program:
    def __init__(self, line: Line) -> None:
        self.line = line
        self.objects: list[Any] = []
        self.space: dict[str, Any] = {"__name__": "solution"}

    def serve(self) -> None:
        while True:
            self.answer(self.line.receive())

    def answer(self, request: dict[str, Any]) -> None:
        try:
            self.line.send(self.do(**request))
        except Exception as error:  # any exception of the program is its answer
            names = [kind.__name__ for kind in type(error).__mro__]
            self.line.send({"error": names, "text": str(error)[:300]})

    def do(self, op: str, target: Any = None, args: Any = (), options: Any = None) -> dict[str, Any]:
        if op == "load":
            for source in args:
                exec(compile(source, "program", "exec", dont_inherit=True), self.space)
            return {"names": {name: self.describe(value) for name, value in self.space.items() if name[:2] != "__"}}
        given = [decode(argument, self.found) for argument in args]
        before = [json.dumps(argument) for argument in args]
        whole = self.objects[target]
        named = {key: decode(value, self.found) for key, value in (options or {}).items()}
        value = whole(*given, **named) if op == "call" else OPERATIONS[op](whole, *given)
        result: dict[str, Any] = {"value": self.pack(value)}
        changed = {}
        for number, argument in enumerate(given):
            if isinstance(argument, (list, dict, set)):
                after = self.pack(argument)
                if json.dumps(after) != before[number]:
                    changed[number] = after
        return result | {"changed": changed}

    def pack(self, value: Any) -> Any:
        of_numpy = not isinstance(value, type) and hasattr(value, "tolist")
        return encode(value.tolist() if of_numpy else value, self.keep)

    def keep(self, value: Any) -> Any:
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def found(self, tag: str, inner: Any) -> Any:
        if tag == "builtin":
            return getattr(builtins, inner)
        return self.objects[inner] if tag == "object" else self.callback(inner)

    def callback(self, number: int) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.line.send({"callback": number, "args": [self.pack(argument) for argument in args]})
            while "op" in (reply := self.line.receive()):
                self.answer(reply)
            if "error" in reply:
                raise RuntimeError(reply["error"])
            return decode(reply["value"], self.found)

        return call

    def describe(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"raises": [kind.__name__ for kind in value.__mro__]}
        try:
            return {"value": self.pack(value)}
        except Exception:  # nested too deeply, or inspecting it raises: keep it here and send a handle
            return {"value": self.keep(value)}


OPERATIONS: dict[str, Callable[..., Any]] = {
    "get": getattr,
    "set": setattr,
    "item": lambda whole, key: whole[key],
    "put": lambda whole, key, value: whole.__setitem__(key, value),
    "length": len,
    "entries": lambda whole: list(itertools.islice(iter(whole), MOST)),
    "next": next,
    "text": str,
    "truth": bool,
}


# The examiner's side


def _refuse(self: Any, other: Any) -> bool:
    raise TypeError("objects of the program cannot be compared, only plain values")


class Handle:
    """The examiner's proxy for an object of the program that is not data."""

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_handle", (ask, number))

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _ask(self, "call", *args, **options)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "put", key, value)

    def __len__(self) -> int:
        return int(_ask(self, "length"))

    def __iter__(self) -> Any:
        return iter(_ask(self, "entries"))

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __contains__(self, item: Any) -> bool:
        return item in list(self)  # compared here: the program's own __contains__ could accept anything

    def __str__(self) -> str:
        return str(_ask(self, "text"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "truth"))

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _ask(handle: Handle, op: str, *args: Any, **options: Any) -> Any:
    ask, number = object.__getattribute__(handle, "_handle")
    return ask(op, number, args, options)


class Examiner:
    def __init__(self, line: Line) -> None:
        self.line = line
        self.callbacks: list[Callable[..., Any]] = []
        self.raised: dict[str, type[Exception]] = {}

    def ask(self, op: str, target: Any, args: Any, options: Any) -> Any:
        given = [encode(argument, self.hand_over) for argument in args]
        named = {key: encode(value, self.hand_over) for key, value in options.items()}
        self.line.send({"op": op, "target": target, "args": given, "options": named})
        reply = self.reply(ends=op == "next")
        for number, data in reply["changed"].items():
            _update(args[int(number)], decode(data, self.found))
        return decode(reply["value"], self.found)

    def reply(self, ends: bool = False) -> dict[str, Any]:
        """`ends`: the reply may raise StopIteration. Otherwise that would end a loop in the tests, so it becomes a RuntimeError."""
        while "callback" in (reply := self.line.receive()):
            try:
                args = [decode(argument, self.found) for argument in reply["args"]]
                value = encode(self.callbacks[reply["callback"]](*args), self.hand_over)
                self.line.send({"value": value})
            except Ended:
                raise
            except Exception as error:  # from the tests' own function: the program may handle it
                self.line.send({"error": f"{type(error).__name__}: {error}"})
        if "error" in reply:
            kind = self.exception(reply["error"])
            raise (kind if ends or not issubclass(kind, StopIteration) else RuntimeError)(reply["text"])
        return dict(reply)

    def exception(self, names: list[str]) -> type[Exception]:
        for name in names:
            found = self.raised.get(name) or vars(builtins).get(name)
            if isinstance(found, type) and issubclass(found, Exception):
                return found
        return RuntimeError

    def hand_over(self, value: Any) -> Any:
        if isinstance(value, Handle):
            return {"object": object.__getattribute__(value, "_handle")[1]}
        name = value.__name__ if isinstance(value, (type, types.BuiltinFunctionType)) else ""
        if name and vars(builtins).get(name) is value:
            return {"builtin": name}
        if isinstance(value, type) or not callable(value):
            raise Unsupported(f"the tests hand the program a {type(value).__name__}, which cannot leave their process")
        self.callbacks.append(value)
        return {"callback": len(self.callbacks) - 1}

    def found(self, tag: str, inner: Any) -> Any:
        if tag == "object" and type(inner) is int:
            return Handle(self.ask, inner)
        raise ValueError("the program's reply cannot be read")

    def space(self, task: dict[str, Any]) -> dict[str, Any]:
        """The names tests see: functions and modules of their own set-up, then the program's. Only `own` may shadow builtins."""
        self.line.send({"op": "load", "args": task["sources"]})
        names = self.reply()["names"]
        space: dict[str, Any] = {"__name__": "tests"}
        exec(compile(task["setup"], "setup", "exec", dont_inherit=True), space)
        for name, entry in names.items():
            if name in space and not isinstance(space[name], type):
                continue
            if name in vars(builtins) and name not in task["own"]:
                continue
            if "module" in entry:
                if entry["module"].partition(".")[0] in sys.stdlib_module_names:
                    space[name] = importlib.import_module(entry["module"])
            elif "raises" in entry:
                base = self.exception(entry["raises"])
                space[name] = self.raised[name] = type(name, (base,), {})
            else:
                space[name] = decode(entry["value"], self.found)
        exec(compile(task["prepare"], "tests", "exec", dont_inherit=True), space)
        return space

    def examine(self, space: dict[str, Any], piece: dict[str, Any]) -> dict[str, Any]:
        try:
            if "call" in piece:
                value = eval(compile(piece["call"], "test", "eval", dont_inherit=True), space)
                return {"value": encode(value, _no_data)}
            exec(compile(piece["run"], "test", "exec", dont_inherit=True), space)
        except Unsupported as error:
            return {"unsupported": str(error)}
        except Exception as error:  # the test or the program failed
            return {"error": f"{type(error).__name__}: {error}"[:300]}
        return {"passed": True}


def _no_data(value: Any) -> Any:
    raise ValueError(f"{type(value).__name__} is not a plain value")


def _update(old: Any, new: Any) -> None:
    """Apply the program's in-place changes of an argument to the tests' own object."""
    if isinstance(old, list):
        old[:] = new
    else:
        old.clear()
        old.update(new)


def main() -> None:
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)  # the fork cannot read or write the examiner's memory
    to_program, to_examiner = os.pipe(), os.pipe()
    child = os.fork()
    devnull = os.open("/dev/null", os.O_RDWR)
    if child == 0:
        os.close(to_program[1])
        os.close(to_examiner[0])
        os.dup2(devnull, 0)
        os.dup2(devnull, 1)
        sys.stdin, sys.stdout = io.StringIO(), open(devnull, "w")  # noqa: SIM115
        try:
            Program(Line(to_program[0], to_examiner[1])).serve()
        finally:
            os._exit(1)
    os.close(to_program[0])
    os.close(to_examiner[1])
    task, results = json.loads(sys.stdin.buffer.read()), os.dup(1)
    os.dup2(devnull, 0)
    os.dup2(devnull, 1)  # tests' prints must not mix with the results
    examiner = Examiner(Line(to_examiner[0], to_program[1]))
    space: dict[str, Any] = {}
    problem: dict[str, Any] = {}
    try:
        space = examiner.space(task)
    except Exception as error:  # the program does not run
        problem = {"error": f"{type(error).__name__}: {error}"[:300]}
    for piece in task["work"]:
        line = json.dumps(problem or examiner.examine(space, piece))
        if len(line) > LONGEST_VALUE:
            line = json.dumps({"error": "the value is too long"})
        os.write(results, line.encode() + b"\n")
    os.kill(child, 9)


if __name__ == "__main__":
    main()
