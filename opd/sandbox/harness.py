"""Inside the sandbox: runs a program, then evaluates expressions on it. One line of output per piece of work.

stdin: {"sources", "work": [{"call"} | {"run", "token"}]}. An expression's value is written as a plain literal and
judged outside; a run of asserts writes its token if none failed. The program's own output goes nowhere.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any


def plain(value: Any, depth: int = 0) -> Any:
    """Built from literals alone, so that what it equals is not its own choice."""
    if depth > 50:
        raise ValueError("nested too deeply")
    if value is None:
        return None
    leaf: Any
    for leaf in (bool, int, float, complex, str, bytes):
        if isinstance(value, leaf):
            return leaf(value)
    if isinstance(value, dict):
        return {plain(key, depth + 1): plain(entry, depth + 1) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        entries = [plain(entry, depth + 1) for entry in value]
        return tuple(entries) if isinstance(value, tuple) else entries if isinstance(value, list) else set(entries)
    if hasattr(value, "tolist"):  # numpy
        return plain(value.tolist(), depth + 1)
    raise ValueError(f"{type(value).__name__} is not a plain value")


def main() -> None:
    task = json.loads(sys.stdin.buffer.read())
    results = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    sys.stdin, sys.stdout = io.StringIO(), open(nowhere, "w")  # noqa: SIM115
    space: dict[str, Any] = {"__name__": "solution"}
    for source in task["sources"]:
        exec(compile(source, "program", "exec", dont_inherit=True), space)
    for piece in task["work"]:
        try:
            if "call" in piece:
                line = repr(plain(eval(compile(piece["call"], "test", "eval", dont_inherit=True), space)))
            else:
                exec(compile(piece["run"], "test", "exec", dont_inherit=True), space)
                line = repr(piece["token"])
        except Exception as error:  # whatever the program raises is its answer
            line = f"{type(error).__name__}: {error}"
        os.write(results, line.replace("\n", " ")[:100_000].encode(errors="replace") + b"\n")


if __name__ == "__main__":
    main()
