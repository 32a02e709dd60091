"""Tasks: the same text everywhere, splits that share no question, a verifier that takes anything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.common.errors import DataError
from opd.data.tasks import TASKS, get_task, split_of
from opd.records import Prompt

PINNED = {
    "addition": {("train", 0): ("add 98+42", "140"), ("heldout", 7): ("add 51+98", "149")},
    "reverse": {("train", 0): ("reverse wvxldv", "vdlxvw"), ("heldout", 7): ("reverse ifoyqd", "dqyofi")},
    "sort": {("train", 0): ("sort zeem", "eemz"), ("heldout", 7): ("sort kxns", "knsx")},
    "caesar": {("train", 0): ("shift 3 dtsi", "gwvl"), ("heldout", 7): ("shift 5 aqhj", "fvmo")},
    "words": {
        ("train", 0): ("Reverse the order of these words: farm, pilot, paper, shoe", "shoe, paper, pilot, farm"),
        ("heldout", 0): ("Reverse the order of these words: spoon, fish, stone, pilot", "pilot, stone, fish, spoon"),
    },
    "haystack": {
        ("train", 0): ("a 73+61 b 38+93 c 83+82 d 38+44 add a", "134"),
        ("heldout", 0): ("a 15+61 b 13+45 c 72+19 d 46+52 add a", "76"),
    },
    "dialogue": {("train", 0): ("add 78+80", "158"), ("heldout", 7): ("add 44+73", "117")},
    "grid": {
        ("train", 0): ("4: at c4, key c2, door b1, walls a4 b3", "sssw"),
        ("heldout", 7): ("4: at a3, key d1, door c1, walls a2 c3", "eseesw"),
    },
}
SHOWN = {
    "addition": {"rejected"},
    "haystack": {"document", "relevant"},
    "dialogue": {"script"},
}  # further fields of a prompt, for views


def question(prompt: Prompt) -> str:
    assert prompt.messages is not None
    return str(prompt.messages[0]["content"])


@pytest.mark.parametrize("name", TASKS)
def test_prompts_never_change(name: str) -> None:
    for (split, index), (text, answer) in PINNED[name].items():
        prompt = get_task(name).prompt(split, index)
        assert prompt.messages == ({"role": "user", "content": text},)
        assert {key: prompt.fields[key] for key in ("answer", "completion")} == {"answer": answer, "completion": answer}
        assert prompt.fields.keys() - {"answer", "completion"} == SHOWN.get(name, set())
        assert prompt.id == f"task:{name}/{split}/{index}"
        assert prompt.domain == TASKS[name].domain


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_question_and_heldout_is_large(name: str) -> None:
    task = get_task(name)
    train = {question(task.prompt("train", index)) for index in range(5000)}
    heldout = {question(task.prompt("heldout", index)) for index in range(5000)}
    assert not train & heldout
    assert len(heldout) >= 2000
    assert {split_of(text) for text in train} == {"train"}
    assert {split_of(text) for text in heldout} == {"heldout"}


def test_answers_are_right() -> None:
    for index in range(200):
        a, b = question(get_task("addition", digits=5).prompt("train", index)).removeprefix("add ").split("+")
        assert get_task("addition", digits=5).prompt("train", index).fields["answer"] == str(int(a) + int(b))
        word = question(get_task("sort").prompt("train", index)).split()[1]
        assert get_task("sort").prompt("train", index).fields["answer"] == "".join(sorted(word))
        _, shift, word = question(get_task("caesar").prompt("train", index)).split()
        moved = [chr((ord(letter) - 97 + int(shift)) % 26 + 97) for letter in word]
        assert get_task("caesar").prompt("train", index).fields["answer"] == "".join(moved)


def test_the_relevant_part_of_a_haystack_has_the_answer() -> None:
    for index in range(200):
        prompt = get_task("haystack", digits=3, sums=5).prompt("train", index)
        a, b = prompt.fields["relevant"].removeprefix("add ").split("+")
        assert prompt.fields["answer"] == str(int(a) + int(b))
        letter = question(prompt).split()[-1]
        assert f"{letter} {a}+{b}" in question(prompt)
        assert prompt.fields["document"] == question(prompt)


def test_domain_can_be_renamed() -> None:
    assert get_task("sort").prompt("train", 3, domain="order").domain == "order"


@pytest.mark.parametrize("name", TASKS)
def test_verify_wants_exactly_the_answer(name: str) -> None:
    task, prompt = get_task(name), get_task(name).prompt("heldout", 1)
    answer = prompt.fields["answer"]
    assert task.verify(prompt, f" {answer}\n")
    assert not task.verify(prompt, f"{answer}!")
    assert not task.verify(prompt, "")
    assert not task.verify(Prompt(id="x", domain="y"), "")


@settings(max_examples=200, deadline=None)
@given(st.text(), st.sampled_from(sorted(TASKS)), st.integers(0, 10**9))
def test_verify_never_raises(text: str, name: str, index: int) -> None:
    prompt = get_task(name).prompt("train", index)
    assert get_task(name).verify(prompt, text) == (text.strip() == prompt.fields["answer"])


def test_options_change_the_questions() -> None:
    assert len(question(get_task("reverse", length=9).prompt("train", 0)).split()[1]) == 9
    assert get_task("caesar", shifts=1).prompt("train", 0).messages[0]["content"].startswith("shift 1 ")  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("adition", {}, "Did you mean 'addition'"),
        ("addition", {"digit": 3}, "unknown option 'digit'"),
        ("addition", {"digits": 0}, "from 2 to 12, got 0"),
        ("sort", {"length": "long"}, "got 'long'"),
        ("sort", {"length": True}, "got True"),
    ],
)
def test_mistakes_are_explained(name: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        get_task(name, **options)


def test_unknown_split_is_explained() -> None:
    with pytest.raises(DataError, match="'train' or 'heldout', got 'test'"):
        get_task("sort").prompt("test", 0)  # type: ignore[arg-type]
