"""Questions of eight domains, four of them with worked answers of 17 to 115 tokens, and those of the tiny models.

    python benchmarks/integrate.py data --edition smol --directory DIR

A row is {prompt, completion, answer, domain}; the last line of a right answer is the reference, up to white space and
case. The kinds of questions are reasoning-gym's (word_sequence_reversal, number_sorting, number_filtering,
spiral_matrix, chain_sum, leg_counting, basic_arithmetic, caesar_cipher) with short wordings and worked answers of our own; they are
drawn here so that nothing has to be installed and no version changes a text. A hash of the question decides its split,
so that no question of one split is ever in another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opd.data.tasks import LETTERS, WORDS, Dice, get_task, split_of

Split = Literal["train", "screen", "tune", "report"]
SPLITS: tuple[Split, ...] = ("train", "screen", "tune", "report")
PARTS: tuple[Split, ...] = ("train",) * 6 + ("screen", "tune", "report", "report")  # of ten questions
LEGS = {
    "hen": 2, "duck": 2, "crow": 2, "cat": 4, "dog": 4, "cow": 4, "horse": 4, "sheep": 4, "pig": 4, "fox": 4,
    "ant": 6, "bee": 6, "wasp": 6, "beetle": 6, "moth": 6, "spider": 8, "scorpion": 8, "tick": 8, "crab": 10, "shrimp": 10,
}  # fmt: skip
Drawn = tuple[str, str, str]  # question, worked answer, reference


def right(text: str, reference: str) -> bool:
    """What counts: the last line is the reference, whatever white space and case. No partial credit."""
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and "".join(lines[-1].split()).casefold() == "".join(reference.split()).casefold()


def _some(dice: Dice, low: int, high: int) -> int:
    return low + dice.below(high - low + 1)


def words(dice: Dice) -> Drawn:
    chosen = [WORDS[dice.below(len(WORDS))] for _ in range(_some(dice, 3, 6))]
    answer = ", ".join(reversed(chosen))
    return f"Reverse this list of words: {', '.join(chosen)}", answer, answer


def sorting(dice: Dice) -> Drawn:
    numbers = [_some(dice, -99, 99) for _ in range(_some(dice, 3, 5))]
    down = dice.below(2) == 1
    answer = ", ".join(map(str, sorted(numbers, reverse=down)))
    order = "descending" if down else "ascending"
    return f"Sort these numbers in {order} order: {', '.join(map(str, numbers))}", answer, answer


def filtering(dice: Dice) -> Drawn:
    numbers = [_some(dice, -99, 99) for _ in range(_some(dice, 3, 6))]
    between = [number for number in range(min(numbers), max(numbers) + 1) if number not in numbers] or [100]
    bound, keep, smaller = between[dice.below(len(between))], dice.below(2) == 1, dice.below(2) == 1
    left = [number for number in numbers if ((number < bound) == smaller) == keep]
    answer = ", ".join(map(str, left)) or "none"
    what = f"{'Keep' if keep else 'Remove'} all numbers {'smaller' if smaller else 'larger'} than {bound}"
    return f"{what} in this list: {', '.join(map(str, numbers))}", answer, answer


def spiral(dice: Dice) -> Drawn:
    size = _some(dice, 2, 3)
    rows = [[dice.below(10) for _ in range(size)] for _ in range(size)]
    text, order = "\n".join(" ".join(map(str, row)) for row in rows), []
    while rows:
        order += rows.pop(0)
        rows = [list(row) for row in zip(*rows, strict=True)][::-1]
    answer = " ".join(map(str, order))
    return f"List the numbers of this matrix in spiral order, clockwise from the top left:\n{text}", answer, answer


def sums(dice: Dice) -> Drawn:
    """Running totals."""
    total = _some(dice, 1, 99)
    expression, lines = str(total), []
    for _ in range(_some(dice, 2, 4)):
        sign, number = ("+", "-")[dice.below(2)], _some(dice, 1, 99)
        after = total + number if sign == "+" else total - number
        lines.append(f"{total} {sign} {number} = {after}")
        expression, total = f"{expression} {sign} {number}", after
    return f"Calculate step by step: {expression}", "\n".join([*lines, str(total)]), str(total)


def legs(dice: Dice) -> Drawn:
    """Legs of each kind, then the running total."""
    kinds: dict[str, int] = {}
    for _ in range(_some(dice, 2, 4)):
        kinds[list(LEGS)[dice.below(len(LEGS))]] = _some(dice, 2, 12)
    total, lines = 0, []
    for kind, count in kinds.items():
        here = count * LEGS[kind]
        lines.append(f"{kind}: {count} x {LEGS[kind]} = {here}, {total} + {here} = {total + here}")
        total += here
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"How many legs do these animals have together? {listed}", "\n".join([*lines, str(total)]), str(total)


def columns(dice: Dice) -> Drawn:
    """Addition digit by digit, from the right, with what is carried."""
    a, b = (_some(dice, 100, 9999) for _ in range(2))
    lines, carried, upper, lower = [], 0, a, b
    while upper or lower or carried:
        here = upper % 10 + lower % 10 + carried
        lines.append(f"{upper % 10} + {lower % 10} + {carried} = {here}")
        upper, lower, carried = upper // 10, lower // 10, here // 10
    return f"Add column by column: {a} + {b}", "\n".join([*lines, str(a + b)]), str(a + b)


def cipher(dice: Dice) -> Drawn:
    """Letter by letter, then the word."""
    shift, word = _some(dice, 1, 2), dice.letters(_some(dice, 4, 7))
    moved = [LETTERS[(LETTERS.index(letter) + shift) % 26] for letter in word]
    lines = [f"{letter} -> {after}" for letter, after in zip(word, moved, strict=True)]
    answer = "".join(moved)
    spelled = " ".join(word)
    return f"Shift every letter by {shift} along the alphabet: {spelled}", "\n".join([*lines, answer]), answer


@dataclass(frozen=True)
class Domain:
    """Where questions come from, and which split a question belongs to. `worked`: answers show their steps."""

    name: str
    draw: Callable[[int], Drawn]
    split_of: Callable[[str], Split]
    worked: bool = False

    def rows(self, split: Split, count: int) -> list[dict[str, Any]]:
        """The first `count` different questions of a split, the same on every machine."""
        found: dict[str, dict[str, Any]] = {}
        for question, completion, answer in map(self.draw, range(100 * count)):
            if self.split_of(question) == split and question not in found:
                messages = [{"role": "user", "content": question}]
                found[question] = {"prompt": messages, "completion": completion, "answer": answer, "domain": self.name}
            if len(found) == count:
                break
        else:
            raise ValueError(f"{self.name} has only {len(found)} different questions of the split {split}")
        return list(found.values())


def _part(question: str, parts: tuple[Split, ...]) -> Split:
    return parts[Dice(f"integration/split/{question}").below(len(parts))]


def _own(name: str, draw: Callable[[Dice], Drawn], worked: bool = False) -> Domain:
    return Domain(
        name, lambda index: draw(Dice(f"integration/{name}/{index}")), lambda text: _part(text, PARTS), worked
    )


def _built_in(name: str, task: str) -> Domain:
    """A task of the tiny models, which were trained on its training split: the other three come out of the held-out one."""

    def draw(index: int) -> Drawn:
        prompt = get_task(task).prompt("heldout" if index % 2 == 0 else "train", index)
        assert prompt.messages is not None
        return prompt.messages[0]["content"], prompt.fields["answer"], prompt.fields["answer"]

    def split(question: str) -> Split:
        return "train" if split_of(question) == "train" else _part(question, PARTS[6:])

    return Domain(name, draw, split)


SMOL = {
    domain.name: domain
    for domain in (
        _own("words", words),
        _own("sorting", sorting),
        _own("filtering", filtering),
        _own("spiral", spiral),
        _own("sums", sums, worked=True),
        _own("legs", legs, worked=True),
        _own("columns", columns, worked=True),
        _own("cipher", cipher, worked=True),
    )
}
TINY = {
    name: _built_in(name, task)
    for name, task in {
        "arithmetic": "addition", "spelling": "reverse", "sorting": "sort", "ciphers": "caesar",
    }.items()
}  # fmt: skip
EDITIONS = {"smol": SMOL, "tiny": TINY}


def write(edition: str, directory: Path, counts: dict[Split, int]) -> None:
    """DIRECTORY/DOMAIN-SPLIT.jsonl, unless it is there with as many rows."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, domain in EDITIONS[edition].items():
        for split, count in counts.items():
            path = directory / f"{name}-{split}.jsonl"
            if not path.is_file() or len(path.read_text(encoding="utf-8").splitlines()) != count:
                lines = [json.dumps(row) + "\n" for row in domain.rows(split, count)]
                path.write_text("".join(lines), encoding="utf-8")


def read(directory: Path, domain: str, split: Split) -> list[dict[str, Any]]:
    lines = (directory / f"{domain}-{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
