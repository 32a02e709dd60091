"""Built-in tasks: questions without end, an exact verifier, and held-out questions no training prompt repeats.

A prompt is a pure function of (task, options, split, index): nothing is stored, any index can be asked for in any
order, and every machine and Python version gives the same text. Disjoint splits come from the question itself: a
hash of its content says which split it belongs to, and a draw that falls into the other one is drawn again.

>>> get_task("addition").prompt("train", 7).id
'task:addition/train/7'
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from opd.errors import DataError
from opd.types import Prompt

Split = Literal["train", "heldout"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = """
apple arm autumn bag ball bank bear bell bird boat book bottle box bread bridge brush cake camp card castle cat
chair cheese church circle clock cloud coat coffee corn cow cup dance desk doctor dog door dream dress duck ear
egg engine eye farm father field finger fire fish flag floor flower forest fox friend game garden gate gift
glass gold grass hammer hand hat head hill horse hotel house ice island jacket key king kitchen knife lake lamp
leaf letter lion map market milk mirror moon mother mountain mouse music needle nose ocean orange paper park
pencil phone piano picture pig pilot plane plant plate pocket queen radio rain ring river road rock roof room
rope rose salt sand school sea sheep ship shirt shoe silver sister snow soap spoon spring star stone street
sugar summer sun table tea tent ticket tiger tower toy train tree truck uncle valley village wall water wheel
wind window winter wolf wood yard
""".split()  # noqa: SIM905  a list of one word per line says no more
HELDOUT_SHARE = 3  # one question in three is held out


class Dice:
    """Whole numbers out of one hash: the same everywhere, unlike `random`, whose helpers change between versions."""

    def __init__(self, key: str) -> None:
        self.state = int.from_bytes(hashlib.blake2b(key.encode()).digest(), "big")

    def below(self, n: int) -> int:
        self.state, value = divmod(self.state, n)
        return value

    def letters(self, n: int) -> str:
        return "".join(LETTERS[self.below(26)] for _ in range(n))


Draw = Callable[[Dice, Mapping[str, int]], tuple[str, str]]  # -> question, answer


def _addition(dice: Dice, options: Mapping[str, int]) -> tuple[str, str]:
    low, high = 10 ** (options["digits"] - 1), 10 ** options["digits"]
    a, b = low + dice.below(high - low), low + dice.below(high - low)
    return f"add {a}+{b}", str(a + b)


def _reverse(dice: Dice, options: Mapping[str, int]) -> tuple[str, str]:
    word = dice.letters(options["length"])
    return f"reverse {word}", word[::-1]


def _sort(dice: Dice, options: Mapping[str, int]) -> tuple[str, str]:
    word = dice.letters(options["length"])
    return f"sort {word}", "".join(sorted(word))


def _caesar(dice: Dice, options: Mapping[str, int]) -> tuple[str, str]:
    shift, word = 1 + dice.below(options["shifts"]), dice.letters(options["length"])
    return f"shift {shift} {word}", "".join(LETTERS[(LETTERS.index(letter) + shift) % 26] for letter in word)


def _words(dice: Dice, options: Mapping[str, int]) -> tuple[str, str]:
    count = 3 + dice.below(options["words"] - 2)
    words = [WORDS[dice.below(len(WORDS))] for _ in range(count)]
    return f"Reverse the order of these words: {', '.join(words)}", ", ".join(reversed(words))


@dataclass(frozen=True)
class Task:
    """A family of questions. `options` are its dials, such as `digits` of addition."""

    name: str
    domain: str
    description: str
    draw: Draw
    options: Mapping[str, int]
    limits: Mapping[str, tuple[int, int]]  # smallest and largest value of each option

    def prompt(self, split: Split, index: int, domain: str | None = None) -> Prompt:
        """Question `index` of a split: an endless sequence, in which one may come again but never in the other
        split.
        """
        if split not in ("train", "heldout"):
            raise DataError(f"task {self.name}: split is 'train' or 'heldout', got {split!r}.")
        dials = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        for attempt in range(1000):
            question, answer = self.draw(Dice(f"{self.name}/{dials}/{split}/{index}/{attempt}"), self.options)
            if split_of(question) == split:
                break
        return Prompt(
            id=f"task:{self.name}/{split}/{index}",
            domain=domain or self.domain,
            messages=({"role": "user", "content": question},),
            fields={"answer": answer, "completion": answer},
        )

    def verify(self, prompt: Prompt, text: str) -> bool:
        """Exactly the answer, up to white space around it."""
        return text.strip() == prompt.fields.get("answer")


def split_of(question: str) -> Split:
    return "heldout" if Dice(f"split/{question}").below(HELDOUT_SHARE) == 0 else "train"


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("addition", "arithmetic", "add two whole numbers", _addition, {"digits": 2}, {"digits": (2, 12)}),
        Task("reverse", "spelling", "spell a word backwards", _reverse, {"length": 6}, {"length": (3, 32)}),
        Task("sort", "sorting", "put letters in alphabetical order", _sort, {"length": 4}, {"length": (3, 32)}),
        Task(
            "caesar",
            "ciphers",
            "shift every letter along the alphabet",
            _caesar,
            {"length": 4, "shifts": 5},
            {"length": (3, 32), "shifts": (1, 9)},
        ),
        Task("words", "words", "say words in the opposite order", _words, {"words": 5}, {"words": (3, 12)}),
    )
}


def get_task(name: str, **options: int) -> Task:
    """The task of that name, with other dials: `get_task("addition", digits=4)`."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0)[0]
        raise DataError(f"task {name!r}: no such task. Did you mean {near!r}? Known: {', '.join(TASKS)}.")
    task = TASKS[name]
    for key, value in options.items():
        if key not in task.limits:
            raise DataError(f"task {name}: unknown option {key!r}. It has {', '.join(task.limits)}.")
        low, high = task.limits[key]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise DataError(f"task {name}: {key} is a whole number from {low} to {high}, got {value!r}.")
    return Task(task.name, task.domain, task.description, task.draw, {**task.options, **options}, task.limits)
