"""Libraries that evaluate an answer get arithmetic to evaluate, and nothing else.

Some of reasoning-gym's scorers call `eval(answer)`, others sympy's `parse_expr`, which does the same behind a few
transformations. In a worker both are replaced: an answer must be numbers, names, operators, a known function, or a list of
those; anything else is refused before it runs, as a text that cannot be read.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

FUNCTIONS = frozenset(
    [
        "Abs",
        "Ei",
        "Float",
        "Integer",
        "Rational",
        "Si",
        "Ci",
        "abs",
        "acos",
        "acosh",
        "acot",
        "acoth",
        "acsc",
        "asec",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "binomial",
        "cbrt",
        "ceiling",
        "cos",
        "cosh",
        "cot",
        "coth",
        "csc",
        "erf",
        "erfc",
        "exp",
        "factorial",
        "floor",
        "gamma",
        "li",
        "ln",
        "log",
        "root",
        "sec",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    ]
)
ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load, ast.Call, ast.List,
    ast.Tuple, ast.Set, ast.Dict,
)  # fmt: skip
LONGEST = 100_000  # characters


def checked(text: Any, functions: frozenset[str] = frozenset(), *, words: bool = False) -> ast.Expression:
    """The tree of an expression that cannot do anything but calculate. ValueError: it could."""
    if not isinstance(text, str) or len(text) > LONGEST:
        raise ValueError("not an expression")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not an expression: {type(error).__name__}") from None
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED):
            raise ValueError(f"{type(node).__name__} is not arithmetic")
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and not words:
            raise ValueError("text is not arithmetic")
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise ValueError(f"{node.id} is not arithmetic")
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in functions):
            raise ValueError("this call is not arithmetic")
        if isinstance(node, ast.Call) and node.keywords:
            raise ValueError("this call is not arithmetic")
    return tree


def calculate(text: Any, *_: Any) -> Any:
    """Instead of `eval`: literals and what operators make of them.

    >>> calculate("[[0, 1], [1 + 1, 'x']]")
    [[0, 1], [2, 'x']]
    """
    return eval(compile(checked(text, words=True), "answer", "eval"), {"__builtins__": {}})


def guard_reasoning_gym() -> None:
    """Once per worker, before it sees an answer."""
    import reasoning_gym
    import sympy
    from sympy.parsing import sympy_parser

    if vars(reasoning_gym).get("guarded"):
        return
    parse = sympy_parser.parse_expr

    def parse_checked(text: Any, *arguments: Any, **options: Any) -> Any:
        checked(text, FUNCTIONS)
        return parse(text, *arguments, **options)

    vars(sympy)["parse_expr"] = vars(sympy_parser)["parse_expr"] = parse_checked
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym":
            vars(module)["eval"] = calculate
            if vars(module).get("parse_expr") is parse:
                vars(module)["parse_expr"] = parse_checked
    vars(reasoning_gym)["guarded"] = True
