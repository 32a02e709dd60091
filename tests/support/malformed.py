"""Texts no reward should trip over: what models write when they go wrong, and what would be written to break a verifier."""

from __future__ import annotations

import random
from collections.abc import Callable

LATEX = [
    "\\frac{",
    "\\sqrt{",
    "\\boxed{",
    "\\left(",
    "\\begin{matrix}",
    "$",
    "^{",
    "_{",
    "\\sum_{",
    "\\int ",
    "}",
    "&",
    "\\\\",
]
NUMBERS = ["nan", "inf", "-inf", "1e999999", "-1e-999999", "9**9**9", "9^9^9^9", "0x" + "f" * 50, "1/0", "0/0", "1_000", "1,00,0.",
           "--3", "+-+4", ".", "1e", "e5", "1.2.3.4", "∞", "½", "٣", "10^{10^{10}}", "factorial(99999)", "100!!!!", "1%%", "$$$"]  # fmt: skip
CODE = [
    "import os",
    "def f(:",
    "while True",
    "\x00",
    "eval('1')",
    "```",
    "print(",
    "lambda: (yield)",
    "\u202e",
    "return",
    "async await",
]
HOSTILE = [
    "__import__('os').system('true')",
    "{0.__class__}",
    "%s%n%x",
    "${jndi:x}",
    "'; --",
    "\x1b[2J",
    "</answer>",
    "<think>",
    "\ufeff",
]


def malformed(count: int, seed: int = 0, longest: int = 50_000) -> list[str]:
    dice = random.Random(seed)
    makers: list[Callable[[random.Random, int], str]] = [
        _bytes, _unicode, _surrogates, _nested, _latex, _numbers, _repeated, _json, _mixed, _fences, _digits, _blank,
    ]  # fmt: skip
    texts = []
    for number in range(count):
        size = dice.choice([0, 1, 3, 10, 30, 100, 300]) if number % 50 else dice.randrange(1000, longest)
        texts.append(dice.choice(makers)(dice, size))
    return texts


def _bytes(dice: random.Random, size: int) -> str:
    return dice.randbytes(size).decode(dice.choice(["latin-1", "utf-8", "utf-16", "ascii"]), errors="replace")


def _unicode(dice: random.Random, size: int) -> str:
    return "".join(
        chr(dice.choice([dice.randrange(32, 0xD800), dice.randrange(0xE000, 0x110000)])) for _ in range(size)
    )


def _surrogates(dice: random.Random, size: int) -> str:
    return "".join(chr(dice.randrange(0xD800, 0xE000)) if dice.random() < 0.3 else "7" for _ in range(size))


def _nested(dice: random.Random, size: int) -> str:
    opening, closing = dice.choice(
        ["()", "[]", "{}", ("\\boxed{", "}"), ("\\frac{1}{", "}"), ("<a>", "</a>"), ("-", ""), ("f(", ")")]
    )
    return opening * size + "1" + closing * dice.choice([0, size, size // 2])


def _latex(dice: random.Random, size: int) -> str:
    return "".join(dice.choice([*LATEX, "1", "x", "+", "="]) for _ in range(size))


def _numbers(dice: random.Random, size: int) -> str:
    return dice.choice([" ", "", "+", "*", "**", "/", "\n"]).join(dice.choice(NUMBERS) for _ in range(1 + size // 10))


def _repeated(dice: random.Random, size: int) -> str:
    return dice.choice(
        ["a", "1,111", "a b ", "\\", "x^", "\n", "\t ", "```\n", "0.", "🙂", "a\u0301"]
    ) * size + dice.choice(["", "!", "b"])


def _json(dice: random.Random, size: int) -> str:
    pieces = [
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        '"a"',
        '"',
        "1e400",
        "NaN",
        "null",
        "\\u00",
        "true",
        "-",
        '{"a":1}',
        "\\ud800",
    ]
    return "".join(dice.choice(pieces) for _ in range(size))


def _mixed(dice: random.Random, size: int) -> str:
    return " ".join(dice.choice([*NUMBERS, *LATEX, *CODE, *HOSTILE]) for _ in range(1 + size // 5))


def _fences(dice: random.Random, size: int) -> str:
    language = dice.choice(["json", "js", "text", "Python 4"])
    return (
        f"```{language}\n"
        + "\n".join(dice.choice([*CODE, *HOSTILE]) for _ in range(size // 5))
        + dice.choice(["\n```", "", "``"])
    )


def _digits(dice: random.Random, size: int) -> str:
    return dice.choice(["", "-", "$"]) + "".join(dice.choice("0123456789.,eE/%") for _ in range(size * 10))


def _blank(dice: random.Random, size: int) -> str:
    return "".join(dice.choice(" \t\n\r\x00\x0b\u2028\u00a0\u200b") for _ in range(size))
