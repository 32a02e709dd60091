"""Finding the answer in a text, and reading numbers. Pure Python, linear in the text, never raises on garbage."""

from __future__ import annotations

import ast
import re
import sys
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

LONGEST = 20_000  # characters at the end that are searched for a number
DIGITS = 400  # a longer number, or a larger exponent, is not an answer
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
FRACTION = re.compile(r"\\[dt]?frac\{([-+]?[\d.,]+)\}\{([\d.,]+)\}")
NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+])?\$?"
    r"(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<part>\.\d+)?(?(whole)|(?(part)|(?!)))"
    r"(?:[eE](?P<exponent>[-+]?\d+)| ?(?:\\times|\\cdot|×|·|\*) ?10(?:\^|\*\*)\{?(?P<power>[-+]?\d+)\}?)?"
    r"(?: ?/ ?(?P<divisor>\d+(?:\.\d+)?))?"
    r"(?P<percent> ?\\?%)?",
    re.ASCII,
)
ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
PLAIN = {"\u2212": "-", "{,}": ",", "\\,": ",", "\\!": "", "\\$": "$"}


class Number(NamedTuple):
    value: Fraction
    percent: bool = False


def written(reference: Any) -> str:
    """A reference as text, including integers of any length."""
    return str(Decimal(reference)) if type(reference) is int else str(reference)


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} with closed braces.

    >>> boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for brace in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[begin : begin + brace.start()]
    return None


def solution_end(text: str) -> str | None:
    r"""The final answer of a worked solution: after `####`, as in GSM8K, or in \boxed{…}. None: not a worked solution.

    >>> solution_end("3 * 4 = <<3*4=12>>12\n#### 12")
    '12'
    """
    marked = text.rpartition("####")
    return marked[2].strip() if marked[1] else boxed(text)


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block."""
    return [(match.group(1).lower(), match.group(2)) for match in FENCE.finditer(text)]


def extract(text: str, how: str) -> str | None:
    """Extracts the answer: `all`, `last_line` or `boxed`. None: not found."""
    if how == "boxed":
        return boxed(text)
    return last_line(text) if how == "last_line" else text.strip()


def last_number(text: str, *, alone: bool = False) -> Number | None:
    r"""Reads 1,234.5 · −3 · 2/3 · \frac{2}{3} · 1.5e3 · 1.5 \times 10^{3} · 50% · $20. None: no number, or far too long.

    `alone`: the text must be the number and nothing else.

    >>> last_number("from 1,200 to 50%")
    Number(value=Fraction(50, 1), percent=True)
    """
    text = text[-LONGEST:]
    for old, new in PLAIN.items():
        text = text.replace(old, new)
    text = FRACTION.sub(r"\1/\2", text)
    match = NUMBER.fullmatch(text.strip()) if alone else None
    if not alone:
        for match in NUMBER.finditer(text):  # noqa: B007
            pass
    return None if match is None else _number(match)


def _number(match: re.Match[str]) -> Number | None:
    whole, part = (match["whole"] or "").replace(",", ""), match["part"] or ""
    exponent = match["exponent"] or match["power"] or "0"
    if max(len(whole) + len(part), len(match["divisor"] or "")) > DIGITS:
        return None
    if len(exponent) > 5 or abs(int(exponent)) > DIGITS:
        return None
    value = Fraction((match["sign"] or "") + (whole or "0") + part) * Fraction(10) ** int(exponent)
    if match["divisor"]:
        divisor = Fraction(match["divisor"])
        if not divisor:
            return None
        value /= divisor
    return Number(value, match["percent"] is not None)


def close(answer: Number, reference: Number, relative: float, absolute: float) -> bool:
    """Whether both are equal within the larger tolerance. A percentage is read both ways: 50% is 50 and 0.5."""
    scales = [Fraction(1)]
    if answer.percent != reference.percent:
        scales.append(Fraction(1, 100) if answer.percent else Fraction(100))
    room = max(Fraction(absolute), Fraction(relative) * abs(reference.value))
    return any(abs(answer.value * scale - reference.value) <= room for scale in scales)


def normalise(text: str, ignore: Sequence[str]) -> str:
    """Removes differences that do not count.

    >>> normalise(" The Cat. ", ["case", "punctuation", "articles", "space"])
    'cat'
    """
    if "case" in ignore:
        text = text.casefold()
    if "punctuation" in ignore:
        text = "".join(letter for letter in text if not unicodedata.category(letter).startswith("P"))
    if "articles" in ignore:
        text = ARTICLES.sub("", text)
    return "".join(text.split()) if "space" in ignore else text.strip()


# --- Safe evaluation: libraries that evaluate an answer may only do arithmetic ---
# Some of reasoning-gym's scorers call `eval(answer)` or sympy's `parse_expr`, which evals after a few transformations. In a worker
# both are replaced: anything but numbers, names, operators, known functions and lists of these is rejected before it runs.


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
LONGEST_EXPRESSION = 100_000  # characters


def checked(text: Any, functions: frozenset[str] = frozenset(), *, words: bool = False) -> ast.Expression:
    """Parses an expression that can only calculate. Raises ValueError for any other."""
    if not isinstance(text, str) or len(text) > LONGEST_EXPRESSION:
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
    """Replaces `eval`: evaluates literals and operators.

    >>> calculate("[[0, 1], [1 + 1, 'x']]")
    [[0, 1], [2, 'x']]
    """
    return eval(compile(checked(text, words=True), "answer", "eval"), {"__builtins__": {}})


def guard_reasoning_gym() -> None:
    """Called once per worker, before it sees an answer."""
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
