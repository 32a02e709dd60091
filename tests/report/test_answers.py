"""What changed between two evaluations of the same questions."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from opd.report.answers import Flips, evaluation_answers, first_answers, flips_between, flips_of_stages, mcnemar
from opd.report.facts import run_facts
from tests.support.reports import make_run


def tail(gained: int, lost: int) -> Fraction:
    """By its definition: twice the share of all ways in which so few flips go one way."""
    flips = gained + lost
    return min(Fraction(1), 2 * sum(Fraction(math.comb(flips, one), 2**flips) for one in range(min(gained, lost) + 1)))


def test_the_test_is_exact() -> None:
    for gained in range(30):
        for lost in range(30):
            assert mcnemar(gained, lost) == mcnemar(lost, gained) == float(tail(gained, lost))
    assert mcnemar(0, 0) == mcnemar(1, 0) == mcnemar(7, 7) == 1.0
    assert mcnemar(6, 0) == 1 / 32
    assert mcnemar(1100, 900) == pytest.approx(float(tail(1100, 900)), rel=1e-15)
    assert 0 <= mcnemar(20_000, 0) < 1e-300  # as small as a double can be, not an error


def test_only_questions_that_both_know_count() -> None:
    first = {"a": True, "b": True, "c": False, "d": False, "e": None, "f": True}
    second = {"a": True, "b": False, "c": True, "d": False, "e": True, "g": True}
    assert flips_between(first, second) == Flips(kept=1, gained=1, lost=1, missed=1)
    assert flips_between(first, {}) == Flips(0, 0, 0, 0)


def line(step: int, prompt: str, right: bool | None, **more: Any) -> dict[str, Any]:
    facts = {
        "step": step,
        "stage": "main",
        "who": "student",
        "domain": "a",
        "prompt_id": prompt,
        "question": f"#{prompt}",
    }
    return {**facts, "prompt": "ask", "response": "42", "right": right, **more}


def test_from_the_first_evaluation_to_the_newest() -> None:
    lines = [
        line(0, "1", False),
        line(0, "2", True),
        line(5, "1", False),
        line(5, "2", False),
        line(9, "1", True),
        line(9, "2", False),
    ]
    others = [line(9, "1", False, who="teacher:a"), line(0, "1", True, domain="b"), line(0, "2", False, stage="next")]
    assert flips_of_stages([*others, *lines]) == {"main": {"a": Flips(0, 1, 1, 0)}}
    altered = [line(0, "1", False, question="another"), line(9, "1", True)]  # the same name in a changed file
    assert flips_of_stages(altered) == {"main": {"a": Flips(0, 0, 0, 0)}}


def test_a_page_has_whole_questions_of_every_domain() -> None:
    lines = [
        line(step, str(number), True, domain=domain, response="x" * 1000)
        for step in (0, 9)
        for domain in ("a", "b")
        for number in range(50)
    ]
    kept = first_answers([*lines, line(9, "0", True, left_out=True)], 10_000)
    assert {(one["domain"], one["prompt_id"]) for one in kept} == {
        (domain, number) for domain in "ab" for number in "01"
    }
    assert len(kept) == 8
    assert first_answers(lines, 1 << 20) == lines
    assert len(first_answers(lines, 1)) == 2


def test_a_report_has_them(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    assert len(evaluation_answers(root)) == 3
    found = run_facts(root)["stages"][0]["evals"]["a"]["flips"]
    assert found == {"kept": 0, "gained": 1, "lost": 0, "missed": 0, "p": 1.0}
