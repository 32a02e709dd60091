"""Rollouts found, filtered and sorted, for `opd rollouts` and for the live page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from opd import cli
from opd.common.errors import OpdError
from opd.common.text import split_pieces, whole_pieces
from opd.models.load import TINY_ROOT
from opd.records import Author, TokenColumns
from opd.report.browse import find_rollouts
from opd.store import RolloutStore
from tests.support.reports import fill_store, make_run

WORDS = Tokenizer.from_file(str(TINY_ROOT / "generalist" / "tokenizer.json"))
Command = Callable[..., tuple[int, str, str]]


def write(
    store: RolloutStore, number: int, text: str, *, domain: str, reward: float, version: int, author: Author
) -> str:
    """A finished rollout of stage `two` for odd numbers, and of `main` for others."""
    id = f"{'two' if number % 2 else 'main'}/p{number // 2}/{number}/0"
    store.begin(
        id=id,
        prompt_id=f"p{number // 2}",
        visit=number,
        sample=0,
        domain=domain,
        source="student",
        prompt_ids=np.array([5, 6]),
    )
    ids = np.array(WORDS.encode(text, add_special_tokens=False).ids, dtype=np.int32)
    store.append_many(TokenColumns(id, ids, -0.5, -0.5, -3.0, version), author)
    store.finish(id, "stop")
    store.note(id, reward=reward)
    return id


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_run(tmp_path_factory.mktemp("browse") / "run")
    resolved = (root / "resolved.yaml").read_text(encoding="utf-8")
    (root / "resolved.yaml").write_text(
        resolved.replace("stages:\n", "stages:\n- {name: two, student: {model: tiny/generalist}}\n"), encoding="utf-8"
    )
    store = RolloutStore(root / "rollouts", commit_ms=0, fsync="never")
    for number in range(8):
        domain, author = ("maths", "words")[number // 4], Author.TEACHER if number == 3 else Author.STUDENT
        id = write(
            store,
            number,
            "12+34=" + "7" * (number + 1),
            domain=domain,
            reward=float(number == 6),
            version=number,
            author=author,
        )
        if number in (0, 2, 3):
            facts = {"log_ratio": 0.1 * number, "largest": (-1.0) ** number * number, "at": 3}
            store.note_disagreement(id, {"teacher": facts if number == 0 else {"kl": 1 / number, **facts}})
    store.close()
    return root


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["opd", "rollouts", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        said = capsys.readouterr()
        return int(leaving.value.code or 0), said.out, said.err

    return call


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ("", [7, 6, 5, 4, 3, 2, 1, 0]),
        ("--domain maths --sort oldest", [0, 1, 2, 3]),
        ("--domain maths --wrong --min-length 9 --sort kl", [2, 3]),
        ("--sort kl --show 3", [2, 3, 0]),  # unknown values last, oldest first
        ("--sort largest_ratio --show 2", [3, 2]),  # by size
        ("--sort log_ratio --show 3", [3, 2, 0]),
        ("--right", [6]),
        ("--stage two", [7, 5, 3, 1]),
        ("--stage two --prompt p1", [3]),
        ("--prompt p1", [3, 2]),
        ("--steps 3:4", [3, 2]),
        ("--steps 8", [7]),
        ("--steps :1", [0]),
        ("--author teacher", [3]),
        ("--text =77777777", [7]),
        ("--text =77777 --show 2 --sort oldest", [4, 5]),
        ("--max-length 0", []),
    ],
)
def test_filters_and_sorts(run: Path, command: Command, options: str, numbers: list[int]) -> None:
    code, out, _ = command(run, "--json", *options.split())
    found = json.loads(out)
    assert code == 0
    assert [int(row["id"].split("/")[2]) for row in found["rows"]] == numbers
    assert found["all"] == 8


def test_what_is_shown(run: Path, command: Command) -> None:
    code, out, err = command(run, "--sort", "kl", "--show", "1")
    assert code == 0
    first, id, strip = out.splitlines()
    assert (
        first
        == "1. maths · main step 3 · reward 0 · 9 tokens (stop) · kl 0.500 · log_ratio 0.200 · largest +2.00 at token 3"
    )
    assert id.strip() == "main/p1/2/0"
    before, _, rest = strip.strip().partition("»")
    token, _, after = rest.partition("«")
    assert before + token + after == "12+34=777"
    assert token == "3"
    assert err.strip() == "1 shown; 8 match, of 8 rollouts"
    _, _, err = command(run, "--text", "34", "--show", "2")
    assert err.strip() == "2 shown; more match, of 8 rollouts"
    _, _, err = command(run, "--domain", "maths", "--max-length", "7", "--sort", "kl")
    assert "none of these rollouts has a kl" in err
    assert "--sort log_ratio" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--domain math", "domain 'math': no rollout of this run has it; known: maths, words."),
        ("--stage three", "known: two, main"),
        ("--right --wrong", "Give one of them"),
        ("--steps 3-4", "FROM:TO"),
        ("--author me", "expected one of student, teacher"),
        ("--sort sideways", "sideways"),
        ("--show 0", "show"),
    ],
)
def test_mistakes(run: Path, command: Command, options: str, words: str) -> None:
    code, out, err = command(run, *options.split())
    assert (code, out) == (2, "")
    assert words in err


def test_places_without_rollouts(tmp_path: Path, command: Command) -> None:
    for given, words in ((tmp_path / "no", "no such directory"), (tmp_path, "not the directory of a run")):
        assert command(given)[0] == 2
        with pytest.raises(OpdError, match=words):
            find_rollouts(given, {})
    with pytest.raises(OpdError, match="no rollout is finished yet"):
        find_rollouts(make_run(tmp_path / "empty", ended=False), {})
    damaged = make_run(tmp_path / "damaged", rollouts=40)
    log = damaged / "rollouts" / "segment-000000.log"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    with pytest.raises(OpdError, match=r"segment-000000\.log"):
        find_rollouts(damaged, {})


def test_only_rows_that_are_shown_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, read = make_run(tmp_path / "run"), list[int]()
    fill_store(root / "rollouts", 2000)
    whole = RolloutStore.load_rows

    def counted(store: RolloutStore, rows: Any) -> Any:
        read.extend(rows)
        return whole(store, rows)

    monkeypatch.setattr(RolloutStore, "load_rows", counted)
    asked = {
        "domain": "a",
        "reward": "wrong",
        "length_from": "3",
        "sort": "length",
        "prompt": "",
        "stage": "main",
        "limit": "5",
    }
    assert len(find_rollouts(root, asked)["rows"]) == len(read) == 5
    read.clear()
    assert find_rollouts(root, {"author": "student", "limit": "5"})["more"]
    assert len(read) == 6 + 5  # until it is known that there are more, and what is shown


def test_a_character_of_several_tokens_is_whole() -> None:
    letters = "a🙂é漢".encode()
    decode = lambda ids: bytes(ids).decode(errors="replace")  # noqa: E731
    assert whole_pieces(letters, decode) == ["a", "", "", "", "🙂", "", "é", "", "", "漢"]
    assert whole_pieces(letters[:3], decode) == ["a", "", "�"]
    assert "".join(whole_pieces(b"\xff\xff\xff\xff\xffa", decode)) == "�" * 5 + "a"
    texts = {str(one): decode([one]) for one in letters}
    assert split_pieces(letters, texts, decode) == {
        "1": "",
        "2": "",
        "3": "",
        "4": "🙂",
        "5": "",
        "6": "é",
        "7": "",
        "8": "",
        "9": "漢",
    }
    assert split_pieces(b"ab", texts | {str(ord("b")): "b"}, decode) == {}
