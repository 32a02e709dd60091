"""A calculator: the student calls it as often as it likes, and answers when it is done.

rollout: {environment: calculator}
prompts: [{source: "task:addition", options: {digits: 6}}]
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from opd.records import Prompt
from opd.rollouts.environments import ToolEnvironment

BITS = 4096  # of the largest integer
CHARACTERS = 1000  # of an expression
Number = int | float
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


class Calculator(ToolEnvironment):
    """One tool: `compute`, for arithmetic."""

    name = "calculator"
    inline = True

    def functions(self, prompt: Prompt | None) -> Sequence[Callable[..., Any]]:
        return [compute]


def compute(expression: str) -> str:
    """The value of an arithmetic expression with + - * / // % ** and parentheses."""
    if len(expression) > CHARACTERS:
        raise ValueError(f"an expression has at most {CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError):
        raise ValueError(f"not an arithmetic expression: {expression[:100]}") from None
    return str(_value(tree.body))


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _small(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return _small(UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and left.bit_length() * abs(right) > BITS:
            raise OverflowError("the result is too large")
        return _small(BINARY[type(node.op)](left, right))
    raise ValueError(f"only numbers and + - * / // % ** are allowed, not {ast.unparse(node)[:100]}")


def _small(value: Any) -> Number:
    if isinstance(value, int) and value.bit_length() > BITS:
        raise OverflowError("the result is too large")
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the result is not a real number")
    return value
