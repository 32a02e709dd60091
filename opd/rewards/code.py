"""Unit-tested code: the last Python block of an answer, run in the sandbox against the prompt's tests.

`cases` in the prompt's fields are dicts: {input, output} feeds stdin and compares stdout; {call, output} evaluates an
expression. `tests` is Python: assert statements, or a `check(candidate)` with `entry_point`. The program never sees any of
them: output is compared in this process, and expressions and asserts are evaluated in a separate process (`harness`).
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from opd import sandbox
from opd.records import RewardResult, Sample
from opd.registry import Positive
from opd.rewards.reward import RewardKind, Sandbox, sandbox_here
from opd.rewards.texts import blocks
from opd.sandbox.harness import decode

HARNESS = Path(sandbox.__file__).with_name("harness.py")
MISTAKES = (ValueError, SyntaxError, KeyError, TypeError, IndexError, RecursionError, MemoryError)  # errors in tests
PYTHON = ("python", "py", "python3", "")


class Code(RewardKind):
    """Runs the last Python block against the prompt's tests in the sandbox."""

    name = "code"
    partial: bool = Field(False, description="reward the share of passed tests instead of all or nothing")
    sandbox: Sandbox = Field("auto", description="of this reward's programs; auto: as `rewards.sandbox` says")
    memory: Positive = Field(512, le=1 << 20, description="megabytes of a program, all its processes together")
    processes: Positive = Field(8, le=4096, description="processes and threads of a program")
    disk: Positive = Field(16, le=1 << 20, description="megabytes a program can write")

    def within(self, sandbox: str) -> RewardKind:
        return self.model_copy(update={"sandbox": sandbox}) if self.sandbox == "auto" else self

    def require(self, sandbox: str) -> None:
        sandbox_here(sandbox if self.sandbox == "auto" else self.sandbox)

    def limit(self, sample: Sample) -> float:
        """A second limit: programs have their own in the sandbox."""
        return self.time_limit * test_count(sample.prompt.fields) + sandbox.START

    def reward(self, sample: Sample) -> RewardResult:
        try:
            checks, prepare = _checks(sample.prompt.fields)
        except MISTAKES as error:
            return RewardResult(None, error=f"the prompt's tests cannot be read: {type(error).__name__}: {error}")
        if not checks:
            return RewardResult(None, error="the prompt has neither `cases` nor `tests`")
        program = last_program(sample.text)
        if program is None:
            return RewardResult(0.0, feedback="no Python block")
        setup, entry = (str(sample.prompt.fields.get(key) or "") for key in ("setup", "entry_point"))
        return _Run(self, program, {"setup": setup, "prepare": prepare, "own": [entry]}).reward(checks)


def last_program(text: str) -> str | None:
    """The last fenced Python block."""
    return next((content for language, content in reversed(blocks(text)) if language in PYTHON), None)


def test_count(fields: Mapping[str, Any]) -> int:
    """The most runs that a program may need; multiplies its time limit."""
    cases = fields.get("cases")
    return 1 + (len(cases) if isinstance(cases, (list, tuple)) else str(cases).count("input"))


def _checks(fields: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Every check as {input, output}, {call, output} or {run} (only if there is no value to compare here), and the code that
    must run between the program and its checks.
    """
    found: list[dict[str, Any]] = []
    prepare: list[str] = []
    cases = fields.get("cases") or []
    for case in json.loads(cases) if isinstance(cases, str) else cases:
        kind = "input" if "input" in case else "call"
        found.append({kind: str(case[kind]), "output": case["output"]})
    tests = fields.get("tests") or []
    for test in [tests] if isinstance(tests, str) else tests:
        body = ast.parse(str(test)).body
        checker = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
        if checker is not None:
            entry = str(fields["entry_point"])
            around = [node for node in body if node is not checker]
            if all(isinstance(node, ast.Assert) for node in checker.body) and not any(map(_defines, around)):
                prepare += [*map(ast.unparse, around), f"{checker.args.args[0].arg} = {entry}"]
                body = checker.body
            else:
                found.append({"run": f"{test}\ncheck({entry})"})
                continue
        if all(isinstance(node, ast.Assert) for node in body):
            found += [_assertion(node) for node in body if isinstance(node, ast.Assert)]
        else:
            found.append({"run": str(test)})
    return found, "\n".join(prepare)


def _defines(node: ast.stmt) -> bool:
    return not isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr))


def _assertion(statement: ast.Assert) -> dict[str, Any]:
    """Turns `assert CALL == LITERAL` into a call with a value to compare here. Any other assert runs as it is."""
    condition = statement.test
    if isinstance(condition, ast.Compare) and len(condition.ops) == 1 and isinstance(condition.ops[0], ast.Eq):
        try:
            value = ast.literal_eval(condition.comparators[0])
        except ValueError:
            return {"run": ast.unparse(statement)}
        return {"call": ast.unparse(condition.left), "output": value}
    return {"run": ast.unparse(statement)}


class _Run:
    def __init__(self, spec: Code, program: str, around: Mapping[str, Any]) -> None:
        self.spec, self.program = spec, program
        self.task = {"sources": [around["setup"], program], **around}
        size = sandbox.MEGABYTE
        self.kind = sandbox.choose(spec.sandbox)
        self.limits = sandbox.Limits(spec.time_limit, spec.memory * size, spec.processes, spec.disk * size)

    def reward(self, checks: list[dict[str, Any]]) -> RewardResult:
        passed, feedback = 0, ""
        inputs = [check for check in checks if "input" in check]
        for check in inputs:
            outcome = self._start(["main.py"], {"main.py": self.program}, check["input"].encode(errors="replace"))
            if outcome.error:
                return RewardResult(None, error=f"sandbox: {outcome.error}")
            output = outcome.stdout.decode(errors="replace")
            if outcome.code == 0 and _same_text(output, str(check["output"])):
                passed += 1
                continue
            feedback = (
                feedback or _failure_text(outcome) or f"expected {str(check['output'])[:100]!r}, got {output[:100]!r}"
            )
            if not self.spec.partial:
                return RewardResult(0.0, feedback=feedback)
        others = [check for check in checks if "input" not in check]
        if others:
            rest = self._harness(others)
            if rest.reward is None:
                return rest
            passed += round(rest.reward * len(others))
            feedback = feedback or rest.feedback
        share = passed / len(checks)
        return RewardResult(share if self.spec.partial else float(share == 1.0), feedback=feedback)

    def _harness(self, checks: list[dict[str, Any]]) -> RewardResult:
        """Runs all expressions and asserts at once. Reward: the share that passed."""
        work = [{key: check[key]} for check in checks for key in ("call", "run") if key in check]
        files = {"harness.py": HARNESS.read_text(encoding="utf-8")}
        outcome = self._start(["harness.py"], files, json.dumps({**self.task, "work": work}).encode(), processes=1)
        if outcome.error:
            return RewardResult(None, error=f"sandbox: {outcome.error}")
        feedback, passed = "", 0
        lines = [json.loads(line) for line in outcome.stdout.splitlines(keepends=True) if line.endswith(b"\n")]
        for check, line in zip(checks, lines, strict=False):
            if "unsupported" in line:
                return RewardResult(None, error=f"the prompt's tests cannot be used: {line['unsupported']}")
            if _same_value(line.get("value"), check["output"]) if "value" in line else line.get("passed", False):
                passed += 1
            elif not feedback:
                feedback = f"{(check.get('call') or 'tests')[:100]}: {str(line.get('error', line.get('value')))[:100]}"
        if not feedback and passed < len(checks):
            feedback = _failure_text(outcome) or "it ended before its tests did"
        return RewardResult(passed / len(checks), feedback=feedback)

    def _start(
        self, arguments: list[str], files: Mapping[str, str], stdin: bytes, processes: int = 0
    ) -> sandbox.Outcome:
        """`processes`: allowed in addition to the program's own."""
        command = [sandbox.python(), "-I", "-B", *arguments]
        limits = replace(self.limits, processes=self.limits.processes + processes)
        return sandbox.run_program(command, kind=self.kind, limits=limits, files=files, stdin=stdin)


def _failure_text(outcome: sandbox.Outcome) -> str:
    if outcome.timed_out:
        return "time limit"
    if outcome.swollen:
        return "memory limit"
    if outcome.flooded:
        return "too much output"
    output = outcome.stderr.decode(errors="replace").strip().splitlines()
    return "" if outcome.code == 0 else (output[-1][:200] if output else f"exit code {outcome.code}")


def _same_text(output: str, wanted: str) -> bool:
    """Compares line by line, ignoring white space at line ends and around the whole text."""
    ours, theirs = ([line.rstrip() for line in text.strip().splitlines()] for text in (output, wanted))
    return ours == theirs


def _same_value(sent: Any, wanted: Any) -> bool:
    try:
        found = decode(sent, _reject)
        if isinstance(wanted, float) and isinstance(found, (int, float)):
            return math.isclose(found, wanted)
        return bool(found == wanted)
    except (ValueError, TypeError, OverflowError, RecursionError, KeyError):
        return False


def _reject(tag: str, inner: Any) -> Any:
    raise ValueError(f"{tag} is not a plain value")
