"""Answers to held-out questions, from `answers.jsonl`: what changed between two evaluations, and which ones a page shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from opd.common.files import lines_checked, read_lines

STUDENT = "student"  # author of answers in answers.jsonl; for a teacher: teacher:NAME
Marks = dict[tuple[str, str], bool | None]  # (prompt id, question) -> whether the answer was right


class Flips(NamedTuple):
    """How many prompts were answered right both times, only the second time, only the first time, and never."""

    kept: int
    gained: int
    lost: int
    missed: int

    @property
    def p(self) -> float:
        return mcnemar(self.gained, self.lost)

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "p": self.p}


def flips_between(first: Mapping[Any, bool | None], second: Mapping[Any, bool | None]) -> Flips:
    """`first` and `second`: prompt -> whether its answer was right; None: it could not be rewarded. Only prompts that both know count."""
    pairs = [(first[key], second[key]) for key in first if first[key] is not None and second.get(key) is not None]
    return Flips(*(pairs.count(kind) for kind in ((True, True), (False, True), (True, False), (False, False))))


def mcnemar(gained: int, lost: int) -> float:
    """McNemar's exact test, two-sided: how likely a change this lopsided is if each flip goes either way with probability 1/2.

    p = min(1, 2 P(X <= min(gained, lost))) with X binomial over all flips. Computed in whole numbers, so it is exact.

    >>> mcnemar(6, 0)
    0.03125
    """
    count, term, below = gained + lost, 1, 0
    for flips in range(min(gained, lost) + 1):  # term: the number of ways to choose so many of all flips
        below += term
        term = term * (count - flips) // (flips + 1)
    return min(1.0, 2 * below / 2**count)


def evaluation_answers(directory: Path) -> list[dict[str, Any]]:
    return read_lines(directory / "answers.jsonl", checked=lines_checked(directory)).whole


def student_marks(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[int, Marks]]:
    """The student's marks: (stage, domain) -> step of the evaluation -> marks. Step 0 is before training."""
    found: dict[tuple[str, str], dict[int, Marks]] = {}
    for line in lines:
        if line.get("who") == STUDENT:
            marks = found.setdefault((line["stage"], line["domain"]), {}).setdefault(line["step"], {})
            marks[line["prompt_id"], line.get("question") or line["prompt"]] = line.get("right")
    return found


def flips_of_stages(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Flips]]:
    """Stage -> domain -> what changed from its first evaluation to its newest. Without two evaluations there is nothing."""
    found: dict[str, dict[str, Flips]] = {}
    for (stage, domain), by_step in student_marks(lines).items():
        first, newest = min(by_step), max(by_step)
        if first < newest:
            found.setdefault(stage, {})[domain] = flips_between(by_step[first], by_step[newest])
    return found


def first_answers(lines: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """All answers to as many questions as fit into about so many bytes, of every domain in turn."""
    by_domain: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for line in lines:
        if not line.get("left_out"):
            by_domain.setdefault(line["domain"], {}).setdefault(line["prompt_id"], []).append(line)
    kept, size = set[int](), 0
    for question in _in_turn([list(questions.values()) for questions in by_domain.values()]):
        size += sum(200 + len(line["prompt"]) + len(line["response"]) for line in question)
        if size > limit and kept:
            break
        kept.update(id(line) for line in question)
    return [line for line in lines if id(line) in kept]


def _in_turn(lists: Sequence[Sequence[Any]]) -> Iterator[Any]:
    for row in zip_longest(*lists):
        yield from (item for item in row if item is not None)
