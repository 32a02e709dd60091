"""`opd chat`: what the teacher says of an answer as it is written."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from opd.common.errors import UserError
from opd.records import SampledToken
from opd.runner.chat import Conversation, StreamedAnswer, chosen_environment, converse, questions
from tests.support.helpers import save_tiny


def said(model: str, against: str | None, *lines: str) -> str:
    asked = iter(lines)

    def ask() -> str:
        try:
            return next(asked)
        except StopIteration:
            raise EOFError from None

    out = StringIO()
    console = Console(file=out, width=200, color_system="truecolor", force_terminal=True)
    converse(Conversation(model, against, console=console, max_new_tokens=8, temperature=0.0), questions(ask))
    return out.getvalue()


def test_both_answer_and_the_teacher_looks_on() -> None:
    text = said("tiny/generalist", "tiny/spelling", "sort kqzv", "")
    assert text.count("student>") == text.count("teacher>") == 1
    assert "\x1b[30;48" in text  # what a teacher of spelling would not have written
    alike = said("tiny/generalist", "tiny/generalist", "sort kqzv")
    assert "log-ratio 0.00 nats" in alike.replace("-0.00", "0.00")
    assert "teacher>" not in said("tiny/generalist", None, "sort kqzv")


ADDS = """
import opd
from opd.rollouts.environments import Environment, Episode, Step

@opd.register
class Adds(Environment):
    name = "adds"
    word: str = "more"

    def open(self, prompt, key):
        return Adding(self.word)

class Adding(Episode):
    def __init__(self, word):
        self.word = word

    def step(self, turn):
        if turn.number == 1:
            raise RuntimeError("no answer")
        return Step(messages=[{"role": "user", "content": self.word}])
"""


def test_an_environment_answers_between_the_turns(tmp_path: Path) -> None:
    (tmp_path / "adds.py").write_text(ADDS)
    environment = chosen_environment("{kind: adds, word: sort ba, turn_tokens: 6}", [str(tmp_path / "adds.py")])
    out = StringIO()
    talk = Conversation(
        "tiny/generalist", "tiny/spelling", console=Console(file=out, width=200), max_new_tokens=60, temperature=0.0,
        environment=environment,
    )  # fmt: skip
    converse(talk, ["sort kqzv"])
    lines = [line.partition("> ")[0] for line in out.getvalue().splitlines()]
    turns = ["student", "environment", "student", "The environment failed: RuntimeError: no answer"]
    assert lines == [*turns, *(line.replace("student", "teacher") for line in turns)]
    assert "environment> sort ba" in out.getvalue()


@pytest.mark.parametrize(
    ("given", "words"),
    [("{kind: add", "not YAML"), ("calculatr", "calculator"), ("{kind: calculator, turn: 2}", "turn")],
)
def test_environments_that_are_not_there_are_named(given: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        chosen_environment(given, ())


def test_a_line_that_is_no_text_is_asked_all_the_same() -> None:
    assert said("tiny/generalist", None, b"sort \xff kq".decode("utf-8", "surrogateescape")).count("student>") == 1


def test_another_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokenizer"):
        said("tiny/generalist", save_tiny(tmp_path / "other"), "sort kqzv")


def test_characters_of_several_tokens_are_shown_complete() -> None:
    pieces = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"<eos>"}
    shown: list[tuple[str, float | None]] = []
    answer = StreamedAnswer(
        lambda text, ratio: shown.append((text, ratio)),
        lambda tokens: np.array([-1.0, -2.0, -3.0, -1.0][: len(tokens)]),
        lambda ids: b"".join(pieces[index] for index in ids).decode(errors="replace"),
        frozenset({4}),
    )
    for token in (1, 2, 3, 4):
        answer.take(SampledToken("x", token, -0.5, -0.5, -9.0, 0))
    answer.flush()
    assert shown == [("a", 0.5), ("é", 2.5)]


def test_characters_stay_complete_between_two_scores_of_the_teacher() -> None:
    """A letter of three tokens lies across the place where the teacher looks; and one that never becomes whole is shown at the end."""
    text = "abcdef€gé".encode() + b"\xe2\x82"
    shown: list[str] = []
    answer = StreamedAnswer(
        lambda piece, ratio: shown.append(piece),
        lambda tokens: np.full(len(tokens), -1.0),
        lambda ids: bytes(ids).decode(errors="replace"),
        frozenset(),
    )
    for byte in text:
        answer.take(SampledToken("x", byte, -0.5, -0.5, -9.0, 0))
    answer.flush(last=True)
    assert shown == ["a", "b", "c", "d", "e", "f", "€", "g", "é", "\ufffd"]
