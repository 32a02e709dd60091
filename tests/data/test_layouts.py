"""Rows in the layouts of ShareGPT, Alpaca and verl, CSV files with other delimiters, and roles that no template reads."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from opd.common.errors import DataError
from opd.data.prompts import render_prompt
from opd.data.sources import open_source, open_sources, prompt_source, scan
from opd.recipe import load_recipe
from opd.records import Prompt
from opd.runner.plan import make_plan
from tests.support.helpers import tiny_tokenizer

# As most chat templates: each known role has its branch, and other roles are passed over.
CHAT = (
    "{% for m in messages %}{% if m.role == 'system' %}S {{ m.content }}\n{% elif m.role == 'user' %}U {{ m.content | trim }}\n"
    "{% elif m.role == 'assistant' %}A {{ m.content.split('</think>')[-1] }}\n{% endif %}{% endfor %}A"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, **settings: Any) -> list[Prompt]:
    return open_source(prompt_source(str(path), **settings)).prompts("all", None)


def chat_tokenizer(template: str = CHAT) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def look(path: Path, bad_rows: Any = "stop") -> Any:
    spec = prompt_source(str(path))
    sources = open_sources([spec], bad_rows=bad_rows)
    return scan(sources, [spec], chat_tokenizer(), limit=100, why="", bad_rows=bad_rows)


def said(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def test_a_role_that_the_template_skips_is_rejected(tmp_path: Path) -> None:
    """The model would be trained on the bare generation prompt."""
    rows: list[Any] = [{"prompt": said(("user", "1+1"))}] * 2 + [{"prompt": said(("human", "2+2"))}]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        DataError, match=r"1 of 3 rows(?s:.*)line 3: .*nothing of message 1, whose role is 'human'.*'user'"
    ):
        look(path)
    skipped = look(path, "skip")
    assert skipped.unusable[0].tolist() == [False, False, True]
    assert "whose role is 'human'" in skipped.notes[0]
    jsonl(path, [{"prompt": said(("system", "be brief"), ("user", "hi"), ("critic", "A"), ("user", "hi"))}])
    with pytest.raises(DataError, match="message 3, whose role is 'critic'"):  # its text stands elsewhere in the prompt
        look(path)


def test_messages_that_a_template_changes_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": said(("user", "  2+2 "), ("assistant", "<think>well</think>4"), ("user", "and 3+3"))}]
    assert look(jsonl(tmp_path / "rows.jsonl", rows)).longest > 10
    (prompt,) = read(tmp_path / "rows.jsonl")
    strict = chat_tokenizer("{% for m in messages %}{{ m.content | int }}{% endfor %}")
    number = Prompt(id="n", domain="d", messages=tuple(said(("user", "7"))))
    assert render_prompt(number, strict, whole=True).size == 1
    assert render_prompt(prompt, chat_tokenizer(), whole=True).size == render_prompt(prompt, chat_tokenizer()).size


def test_sharegpt(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "2+2?"},
        {"from": "gpt", "value": "4", "weight": None},
    ]
    for key in ("conversations", "messages"):
        rows = [{"id": "a", key: turns}, {key: turns[1:2], "system": "be kind"}]
        first, second = read(jsonl(tmp_path / f"{key}.jsonl", rows))
        assert first.messages == tuple(said(("system", "be brief"), ("user", "2+2?")))
        assert dict(first.fields) == {"id": "a", "completion": "4"}
        assert second.messages == tuple(said(("system", "be kind"), ("user", "2+2?")))
    (tmp_path / "array.json").write_text(json.dumps([{"conversations": turns}]))
    assert read(tmp_path / "array.json")[0].fields["completion"] == "4"
    path = jsonl(tmp_path / "odd.jsonl", [{"conversations": [{"from": "crowd", "value": "x"}]}])
    with pytest.raises(DataError, match="line 1: a message is from 'crowd'; known are human"):
        read(path)


def test_alpaca(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"instruction": "Add.", "input": "2+2", "output": "4"},
        {"instruction": "Say hi.", "input": "", "output": "hi", "system": "be kind"},
        {"instruction": "And now?", "input": "", "output": "5", "history": [["2+2?", "4"]]},
        {"prompt": "as it is", "instruction": "x", "input": "y", "output": "z"},
    ]
    one, two, three, four = read(jsonl(tmp_path / "rows.jsonl", rows))
    assert (one.messages, one.fields["completion"]) == (tuple(said(("user", "Add.\n\n2+2"))), "4")
    assert two.messages == tuple(said(("system", "be kind"), ("user", "Say hi.")))
    assert three.messages == tuple(said(("user", "2+2?"), ("assistant", "4"), ("user", "And now?")))
    assert (four.text, "completion" in four.fields) == ("as it is", False)
    (tmp_path / "rows.csv").write_text("instruction,input,output\nAdd.,2+2,4\nSay hi.,,hi\n")
    assert [prompt.messages for prompt in read(tmp_path / "rows.csv")] == [
        one.messages,
        tuple(said(("user", "Say hi."))),
    ]
    assert read(tmp_path / "rows.csv", columns={"prompt": "instruction"})[0].text == "Add."
    with pytest.raises(DataError, match="`history` must be a list of"):
        read(jsonl(tmp_path / "odd.jsonl", [{"instruction": "x", "input": "", "history": "y"}]))


def test_preferred_and_rejected_answers(tmp_path: Path) -> None:
    asked = said(("system", "be brief"), ("user", "2+2?"))
    right, wrong = said(("assistant", "4")), said(("assistant", "5"))
    rows: list[Any] = [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": asked, "chosen": right, "rejected": wrong},
        {"chosen": [*asked, *right], "rejected": [*asked, *wrong]},
        {
            "prompt": "2+2?",
            "chosen": [*asked[1:], *right],
            "rejected": [*asked[1:], *wrong],
            "messages": [*asked[1:], *right],
        },
        {"prompt": "2+2=", "completion": "four", "chosen": "4", "rejected": "5"},
        {"prompt": "2+2=", "chosen": True, "rejected": None},  # columns of another meaning
    ]
    found = read(jsonl(tmp_path / "rows.jsonl", rows))
    assert [prompt.messages or prompt.text for prompt in found] == [
        "2+2=",
        tuple(asked),
        tuple(asked),
        "2+2?",
        "2+2=",
        "2+2=",
    ]
    assert [prompt.fields.get("completion") for prompt in found] == ["4", "4", "4", "4", "four", None]
    assert [prompt.fields.get("rejected") for prompt in found] == ["5"] * 5 + [None]
    for row, words in (
        (
            {"prompt": "2+2=", "chosen": 4, "rejected": "5"},
            "`chosen` must be text, or messages that end with the assistant",
        ),
        ({"prompt": "2+2=", "chosen": "4", "rejected": asked}, "`rejected` must be text, or messages"),
        ({"chosen": [*asked, *right], "rejected": wrong + right}, "answer different prompts"),
        ({"prompt": "3+3?", "chosen": [*asked, *right], "rejected": wrong}, "another question than `prompt`"),
        ({"chosen": "4", "rejected": "5"}, "no `prompt`"),
    ):
        with pytest.raises(DataError, match=words):
            read(jsonl(tmp_path / "odd.jsonl", [row]))


def test_verl_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "data_source": f"openai/{name}",
            "prompt": said(("user", f"{number}+1? {name}")),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number, "split": "train"},
        }
        for number, name in enumerate(["gsm8k"] * 10 + ["other"] * 4)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    source = open_source(prompt_source(str(tmp_path / "train.parquet")))
    found = source.prompts("all", None)
    assert [prompt.messages for prompt in found] == [tuple(row["prompt"]) for row in rows]
    assert [prompt.fields["answer"] for prompt in found] == [str(number + 1) for number in range(14)]
    assert (found[0].domain, found[-1].domain) == ("openai/gsm8k", "openai/other")
    assert found[3].fields["extra_info"] == {"index": 3, "split": "train"}
    assert sorted(prompt.domain for prompt in source.held_out(9)) == ["openai/gsm8k", "openai/other"]
    assert {prompt.domain for prompt in read(tmp_path / "train.parquet", domain="maths")} == {"maths"}


def test_delimiters_are_recognised(tmp_path: Path) -> None:
    """An export of a spreadsheet in half of Europe; the first line decides."""
    wanted = [("two, or 2;", "4"), ("b", "5")]
    for name, mark in (
        ("a.csv", ";"),
        ("b.csv", "\t"),
        ("c.csv", "|"),
        ("d.csv", ","),
        ("e.tsv", "\t"),
        ("f.tsv", ";"),
    ):
        text = f'prompt{mark}answer\n"two, or 2;"{mark}4\nb{mark}5\n'
        (tmp_path / name).write_text(text)
        assert [(prompt.text, prompt.fields["answer"]) for prompt in read(tmp_path / name)] == wanted, name
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
        assert [(prompt.text, prompt.fields["answer"]) for prompt in read(tmp_path / f"{name}.gz")] == wanted, name
    (tmp_path / "named.csv").write_text("note, if any;prompt;answer\nx;a;1\n")
    assert read(tmp_path / "named.csv")[0].text == "a"
    (tmp_path / "one.csv").write_text("prompt\na;b|c\n")
    assert read(tmp_path / "one.csv")[0].text == "a;b|c"
    (tmp_path / "other.csv").write_text("frage;antwort\na;1\n")
    with pytest.raises(DataError, match=r"it has frage, antwort\. .*say which"):
        read(tmp_path / "other.csv")
    (tmp_path / "short.csv").write_text("prompt;answer\na\n")
    with pytest.raises(DataError, match="line 2: has 1 cells, and the header has 2"):
        read(tmp_path / "short.csv")


def test_hints_for_files_without_a_header_and_with_one_row(tmp_path: Path) -> None:
    """Advice that would have trained on a question's own text, or asked for an answer that is there."""
    recipe = {"student": "tiny/generalist", "teachers": "tiny/arithmetic", "device": "cpu"}
    for text, words in (
        ("What is 2+2?,4\n", "below its first line, which names the columns. If that line is a row, add a header"),
        ("What is 2+2?,4\nWhat is 3+3?,6\n", r"If its first line is a row and not a header, add a header line such as"),
    ):
        path = tmp_path / "rows.csv"
        path.write_text(text)
        with pytest.raises(DataError, match=re.escape(words)):
            make_plan(load_recipe(recipe | {"prompts": str(path)}))
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2=", "answer": "4"}\n')
    (plan,) = make_plan(load_recipe(recipe | {"prompts": str(path)}))
    assert any("no prompt is held out" in line for line in plan.lines())
