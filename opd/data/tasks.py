"""Built-in tasks: endless questions, an exact verifier, and held-out questions that no training prompt repeats.

A prompt is a pure function of (task, options, split, index): nothing is stored, indices can be used in any order, and
every machine and Python version gives the same text. A hash of the question determines its split, so splits are
disjoint; a question of the wrong split is drawn again.

>>> get_task("addition").prompt("train", 7).id
'task:addition/train/7'
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Literal, TypeVar

from pydantic import Field

from opd.common.errors import DataError
from opd.common.text import first_line, plain
from opd.data.prompts import as_plain
from opd.data.sources import Opening, PromptSource, Scan, ScannedSource, Source, Split, Wanted, anything, scan_endless
from opd.records import Prompt
from opd.registry import Positive, StageView

TaskSplit = Literal["train", "heldout"]
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
TASK, GYM = "task:", "reasoning_gym:"  # prefixes of their sources' and verifiers' names
HELDOUT_SHARE = 3  # one question in this many is held out


class Dice:
    """Integers from a hash, the same everywhere; the helpers of `random` change between Python versions."""

    def __init__(self, key: str) -> None:
        self.state = int.from_bytes(hashlib.blake2b(key.encode()).digest(), "big")

    def below(self, n: int) -> int:
        self.state, value = divmod(self.state, n)
        return value

    def letters(self, n: int) -> str:
        return "".join(LETTERS[self.below(26)] for _ in range(n))


Fields = Mapping[str, str]
Drawn = tuple[str, str] | tuple[str, str, Fields]  # question, answer, and optional fields for views
Draw = Callable[[Dice, Mapping[str, int]], Drawn]
Opened = Callable[[Prompt], Prompt]  # adds the first messages of an environment


def _sum(dice: Dice, options: Mapping[str, int]) -> tuple[str, str]:
    low, high = 10 ** (options["digits"] - 1), 10 ** options["digits"]
    a, b = low + dice.below(high - low), low + dice.below(high - low)
    return f"add {a}+{b}", str(a + b)


def _addition(dice: Dice, options: Mapping[str, int]) -> tuple[str, str, Fields]:
    """A sum; `rejected` is an answer with one wrong digit."""
    question, answer = _sum(dice, options)
    place, shift = dice.below(len(answer)), 1 + dice.below(9)
    wrong = str((int(answer[place]) + shift) % 10)
    return question, answer, {"rejected": answer[:place] + wrong + answer[place + 1 :]}


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


def _haystack(dice: Dice, options: Mapping[str, int]) -> tuple[str, str, Fields]:
    """A sum among other sums; `relevant` is the corresponding question of the task addition."""
    sums = [_sum(dice, options) for _ in range(options["sums"])]
    asked = dice.below(len(sums))
    question, answer = sums[asked]
    facts = " ".join(f"{LETTERS[number]} {text.removeprefix('add ')}" for number, (text, _) in enumerate(sums))
    document = f"{facts} add {LETTERS[asked]}"
    return document, answer, {"document": document, "relevant": question}


def _dialogue(dice: Dice, options: Mapping[str, int]) -> tuple[str, str, Fields]:
    """A sum, and others that the user asks for afterwards: for the environment `dialogue`."""
    (question, answer), *later = (_sum(dice, options) for _ in range(options["turns"]))
    script = [{"say": text, "answer": value} for text, value in later]
    return question, answer, {"script": json.dumps(script)}


def _grid(dice: Dice, options: Mapping[str, int]) -> tuple[str, str]:
    """A world for the environment `grid`; the answer is a shortest path."""
    size = options["size"]
    cells = [f"{LETTERS[column]}{row}" for column in range(size) for row in range(1, size + 1)]
    while True:
        places = [cells.pop(dice.below(len(cells))) for _ in range(3 + options["walls"])]
        start, key, door, *walls = places
        world = World(size, start, key, door, frozenset(walls))
        path = world.path(world.start, has_key=False)
        if path:
            return str(world), path
        cells += places


MOVES = {"n": (0, 1), "e": (1, 0), "s": (0, -1), "w": (-1, 0)}  # column, row


@dataclass(frozen=True)
class World:
    """A grid with a key to fetch and a door to carry it to.

    >>> World.read("4: at b2, key c1, door d4, walls a3 b4").path("b2", has_key=False)
    'esnnen'
    """

    size: int
    start: str  # a column's letter and a row's number
    key: str
    door: str
    walls: frozenset[str]

    def __str__(self) -> str:
        return f"{self.size}: at {self.start}, key {self.key}, door {self.door}, walls {' '.join(sorted(self.walls))}"

    @classmethod
    def read(cls, text: str) -> World:
        found = re.search(r"(\d+): at (\w\d+), key (\w\d+), door (\w\d+), walls((?: \w\d+)*)", text)
        if found is None:
            raise DataError(
                f"not a world of task:grid, such as '4: at b2, key c1, door d4, walls a3 b4': {text[:200]!r}."
            )
        size, start, key, door, walls = found.groups()
        return cls(int(size), start, key, door, frozenset(walls.split()))

    def moved(self, place: str, move: str) -> str:
        """The place after a move; the same one before a wall or the edge."""
        column, row = (
            old + more for old, more in zip((LETTERS.index(place[0]), int(place[1:])), MOVES[move], strict=True)
        )
        there = f"{LETTERS[column % len(LETTERS)]}{row}"
        inside = 0 <= column < self.size and 1 <= row <= self.size
        return there if inside and there not in self.walls else place

    def path(self, place: str, has_key: bool) -> str:
        """A shortest path to the door, by way of the key; "" if there is none or nothing to do."""
        state = (place, has_key or place == self.key)
        paths, ahead = {state: ""}, deque([state])
        while ahead:
            place, has_key = state = ahead.popleft()
            if has_key and place == self.door:
                return paths[state]
            for move in MOVES:
                there = self.moved(place, move)
                following = (there, has_key or there == self.key)
                if following not in paths:
                    paths[following] = paths[state] + move
                    ahead.append(following)
        return ""


@dataclass(frozen=True)
class Task:
    """A family of questions with `options`, such as `digits` of addition."""

    name: str
    domain: str
    description: str
    draw: Draw
    options: Mapping[str, int]
    limits: Mapping[str, tuple[int, int]]  # smallest and largest value of each option

    def prompt(self, split: TaskSplit, index: int, domain: str | None = None, label: str | None = None) -> Prompt:
        """Question `index` of a split. Questions may repeat within a split, but never across splits. `label`: a source's prefix of the id."""
        if split not in ("train", "heldout"):
            raise DataError(f"task {self.name}: split is 'train' or 'heldout', got {split!r}.")
        dials = ",".join(f"{key}={value}" for key, value in sorted(self.options.items()))
        for attempt in range(1000):
            question, answer, *more = self.draw(Dice(f"{self.name}/{dials}/{split}/{index}/{attempt}"), self.options)
            if split_of(question) == split:
                break
        verifier = {} if label is None else {"verifier": TASK + self.name}
        return Prompt(
            id=f"{label or TASK + self.name}/{split}/{index}",
            domain=domain or self.domain,
            messages=({"role": "user", "content": question},),
            fields={"answer": answer, "completion": answer, **(more[0] if more else {}), **verifier},
        )

    def verify(self, prompt: Prompt, text: str) -> bool:
        """Whether the text is exactly the answer, ignoring surrounding whitespace."""
        return text.strip() == prompt.fields.get("answer")


def split_of(question: str) -> TaskSplit:
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
        Task(
            "haystack",
            "long",
            "add the two numbers that are asked for, among others",
            _haystack,
            {"digits": 2, "sums": 4},
            {"digits": (2, 6), "sums": (2, 26)},
        ),
        Task(
            "dialogue",
            "arithmetic",
            "add numbers, several times in a dialogue",
            _dialogue,
            {"digits": 2, "turns": 3},
            {"digits": (2, 12), "turns": (2, 20)},
        ),
        Task(
            "grid",
            "grid",
            "carry a key to a door on a grid",
            _grid,
            {"size": 4, "walls": 2},
            {"size": (3, 9), "walls": (0, 6)},
        ),
    )
}


@cache
def get_task(name: str, **options: int) -> Task:
    """The task of that name, optionally with other options: `get_task("addition", digits=4)`."""
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


# --- Endless sources: built-in tasks and reasoning-gym ---
#
# Prompts are pure functions of their index, and each source has its own held-out set. Ids begin with a label that seeds
# the draws: `task:sort`, or `task:sort#2` if a recipe lists the task twice.


GYM_HELD_OUT, GYM_TRAIN_SEED, GYM_HELD_OUT_SEED = 1000, 0, 1_000_003
# Errors that reasoning-gym's generators raise for invalid options.
GYM_ERRORS = (TypeError, ValueError, AssertionError, LookupError, ArithmeticError, AttributeError, RecursionError)


S = TypeVar("S", bound="Generator")


class GeneratedPrompts(PromptSource):
    """Endless prompts that depend only on the options."""

    options: dict[str, Any] = Field(default_factory=dict, description="arguments of a task or reasoning_gym generator")
    limit: Positive | None = Field(
        None, description="only so many different questions, which come again; default: endless"
    )
    plain_text: bool = Field(False, description="a question and its answer are one plain text, trained on as it is")

    @property
    def gives_plain_text(self) -> bool:
        return self.plain_text

    def limited(self, source: S) -> S:
        source.size = self.limit
        return source

    def opened_by(self, opening: Opening) -> Opened | None:
        """What is done to each prompt."""
        return as_plain if self.plain_text else opening.opened


class TaskPrompts(GeneratedPrompts):
    """A built-in task: `task:addition`."""

    name = "task"

    def check(self, view: StageView) -> Iterable[str]:
        try:
            get_task(self.address, **self.options)
        except DataError as error:
            yield str(error)

    @property
    def only_domain(self) -> str | None:
        return self.domain or get_task(self.address, **self.options).domain

    def open(self, opening: Opening) -> TaskSource:
        return self.limited(
            TaskSource(get_task(self.address, **self.options), self.domain, opening.label, self.opened_by(opening))
        )


class GymPrompts(GeneratedPrompts):
    """A reasoning-gym task, rewarded by its own scorer: `reasoning_gym:NAME`."""

    name = "reasoning_gym"

    @property
    def only_domain(self) -> str | None:
        return self.domain or self.address

    def open(self, opening: Opening) -> GymSource:
        return self.limited(GymSource(self.address, self.options, self.domain, opening.label, self.opened_by(opening)))


class EpisodePrompts(PromptSource):
    """Numbered prompts whose messages come from the environment: `episodes:NAME`. The number is the episode's seed."""

    name = "episodes"
    system: str | None = Field(None, description="text before the environment's first message")

    @property
    def only_domain(self) -> str | None:
        return self.domain or self.address

    def open(self, opening: Opening) -> EpisodeSource:
        if opening.opened is None:
            raise DataError(
                f"prompts {self.source!r} begin with what an environment says, and there is none. Set rollout.environment."
            )
        return EpisodeSource(self, opening.label, opening.opened)


class Generator:
    """Base of endless sources: nothing is on disk, and all prompts have the same kind of fields."""

    name: str
    size: int | None = None

    def train(self, index: int) -> Prompt:
        raise NotImplementedError

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        raise NotImplementedError

    def prompts(self, split: Split, count: int | None, wanted: Wanted = anything) -> list[Prompt]:
        if split == "all" or count is None:
            raise DataError(f"prompts {self.name!r}: they are endless. Choose heldout or train, and a count.")
        if split == "heldout":
            return self.held_out(count, wanted)
        return [prompt for index in range(count) if wanted(prompt := self.train(index))]

    def examples(self) -> list[Prompt]:
        return [self.train(index) for index in range(8)]

    def scan(self, scan: Scan) -> ScannedSource:
        return scan_endless(self, scan)

    def keep_apart(self, others: list[Source]) -> None:
        pass


class TaskSource(Generator):
    """The questions of a task, with disjoint splits."""

    def __init__(self, task: Task, domain: str | None, label: str, opened: Opened | None = None) -> None:
        self.name, self._task, self._domain, self._label = TASK + task.name, task, domain, label
        self._opened = opened

    def train(self, index: int) -> Prompt:
        prompt = self._task.prompt("train", index, self._domain, self._label)
        return prompt if self._opened is None else self._opened(prompt)

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        prompts: dict[Any, Prompt] = {}
        for index in range(20 * count + 1000):  # questions may repeat; each held-out prompt counts once
            prompt = self._task.prompt("heldout", index, self._domain, self._label)
            prompt = prompt if self._opened is None else self._opened(prompt)
            question = json.dumps(prompt.messages)
            if question not in prompts and wanted(prompt):
                prompts[question] = prompt
            if len(prompts) == count:
                break
        return list(prompts.values())


class EpisodeSource(Generator):
    """Episodes by number. Held-out episodes have numbers of their own."""

    def __init__(self, settings: EpisodePrompts, label: str, opened: Opened) -> None:
        self.name, self._settings, self._label, self._opened = settings.source, settings, label, opened

    def train(self, index: int) -> Prompt:
        return self._prompt(f"train/{index}")

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        prompts = (self._prompt(f"heldout/{index}") for index in range(20 * count + 1000))
        return list(islice(filter(wanted, prompts), count))

    def _prompt(self, where: str) -> Prompt:
        system = self._settings.system
        messages = ({"role": "system", "content": system},) if system else ()
        domain = self._settings.domain or self._settings.address
        prompt = self._opened(Prompt(id=f"{self._label}/{where}", domain=domain, messages=messages))
        if not prompt.messages or prompt.messages[-1]["role"] != "user":
            raise DataError(
                f"prompts {self.name!r}: environment {prompt.environment.name} says nothing first. Use prompts with a question."
            )
        return prompt


class GymSource(Generator):
    """Training prompts are generated by index; those that also appear in the held-out set are skipped."""

    def __init__(
        self, task: str, options: Mapping[str, Any], domain: str | None, label: str, opened: Opened | None = None
    ) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise DataError(f"prompts 'reasoning_gym:{task}' need the reasoning-gym package: pip install 'opd[gym]'.")
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if task not in DATASETS:
            raise DataError(
                f"prompts 'reasoning_gym:{task}': no such task. reasoning-gym has {len(DATASETS)} tasks, such as "
                f"{', '.join(sorted(DATASETS)[:8])}, …"
            )
        self.name, self._domain, self._label, self._opened = GYM + task, domain or task, label, opened
        try:
            self._train = reasoning_gym.create_dataset(task, size=2**31 - 1, seed=GYM_TRAIN_SEED, **options)
            self._held = reasoning_gym.create_dataset(task, size=GYM_HELD_OUT, seed=GYM_HELD_OUT_SEED, **options)
            # Generators check some options only on use.
            self.held_questions = {self._held[index]["question"] for index in range(GYM_HELD_OUT)}
        except GYM_ERRORS as error:
            given = f"options {plain(str(dict(options)))} are invalid"
            raise DataError(f"prompts 'reasoning_gym:{task}': {given} ({first_line(error)}).") from None
        self._skip: list[int] = []  # raw index of each training prompt returned so far

    def keep_apart(self, others: list[Source]) -> None:
        """The same generator with other options may produce the same question, so also skip what those hold out."""
        same = [other for other in others if isinstance(other, GymSource) and other.name == self.name]
        self.held_questions = set().union(self.held_questions, *(other.held_questions for other in same))

    def train(self, index: int) -> Prompt:
        while len(self._skip) <= index:
            raw = self._skip[-1] + 1 if self._skip else 0
            for _ in range(10_000):
                if self._train[raw]["question"] not in self.held_questions:
                    break
                raw += 1
            else:
                raise DataError(
                    f"prompts {self.name!r}: the generator makes too few different questions to hold any out; use "
                    "larger options."
                )
            self._skip.append(raw)
        return self._prompt(self._train[self._skip[index]], f"train/{index}")

    def held_out(self, count: int, wanted: Wanted = anything) -> list[Prompt]:
        unique = {self._held[index]["question"]: index for index in reversed(range(GYM_HELD_OUT))}
        prompts = (self._prompt(self._held[index], f"heldout/{index}") for index in sorted(unique.values()))
        return list(islice(filter(wanted, prompts), count))

    def _prompt(self, entry: Mapping[str, Any], where: str) -> Prompt:
        fields = {"answer": entry["answer"], "completion": entry["answer"], "entry": dict(entry), "verifier": self.name}
        message = {"role": "user", "content": entry["question"]}
        prompt = Prompt(id=f"{self._label}/{where}", domain=self._domain, messages=(message,), fields=fields)
        return prompt if self._opened is None else self._opened(prompt)
