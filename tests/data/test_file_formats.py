"""Files as people have them, and files as nobody should: each is read as meant, or rejected with the line and the reason."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from opd.common.errors import DataError
from opd.data import rows as folders
from opd.data.rows import open_rows
from opd.data.sources import open_source, open_sources, prompt_source

ROWS = [{"prompt": "2+2=", "answer": "4"}, {"prompt": 'two\nlines, a comma and "quotes"', "answer": "5"}]


def texts(path: Path, **spec: Any) -> list[tuple[str | None, Any]]:
    source = open_source(prompt_source(str(path), **spec))
    return [(prompt.text, prompt.fields.get("answer")) for prompt in source.prompts("all", None)]


WANTED = [(row["prompt"], row["answer"]) for row in ROWS]


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "bom"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_text_formats(tmp_path: Path, mark: str, end: str) -> None:
    quoted = [f'"{row["prompt"]}"'.replace('"quotes"', '""quotes""') for row in ROWS]
    files = {
        "rows.jsonl": end.join(json.dumps(row) for row in ROWS) + end * 2,
        "lines.json": end.join(json.dumps(row) for row in ROWS),
        "array.json": json.dumps(ROWS, indent=1).replace("\n", end),
        "rows.csv": end.join(["prompt,answer", f"{quoted[0]},4", f"{quoted[1]},5", ""]),
        "rows.TSV": end.join(["prompt\tanswer", f"{quoted[0]}\t4", "", f"{quoted[1]}\t5"]),
    }
    for name, text in files.items():
        data = (mark + text).encode()
        (tmp_path / name).write_bytes(data)
        assert texts(tmp_path / name) == WANTED, name
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(data))
        assert texts(tmp_path / f"{name}.gz") == WANTED, name


def test_empty_cells_are_missing_and_columns_are_renamed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,question,solution\n1,a,\n2,b,7\n")
    source = open_source(prompt_source(str(path), columns={"prompt": "question", "answer": "solution"}, domain="d"))
    first, second = source.prompts("all", None)
    assert (first.text, dict(first.fields)) == ("a", {"id": "1"})
    assert (second.text, second.fields["answer"], second.fields["verifier"]) == ("b", "7", "exact")
    for columns, words in (({}, r"no `prompt` column; it has id, question, solution.*columns: \{prompt: id\}"),
                           ({"prompt": "questoin"}, "no column 'questoin'; there are id, question, solution")):  # fmt: skip
        with pytest.raises(DataError, match=words):
            open_source(prompt_source(str(path), columns=columns))


def test_conversations_and_system_prompts(tmp_path: Path) -> None:
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}
    rows: list[Any] = [
        {"messages": [system, user, {"role": "assistant", "content": "hello"}]},
        {"messages": [user]},
        {"prompt": "hi", "system": "be brief"},
        {"prompt": [user], "system": "be brief"},
        {"prompt": "hi", "system": ""},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
        {"prompt": "hi", "messages": [user]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = open_source(prompt_source(str(path))).prompts("all", None)
    assert [prompt.messages for prompt in found] == [
        (system, user), (user,), (system, user), (system, user), (user,), (user,), None
    ]  # fmt: skip
    assert [prompt.fields.get("completion") for prompt in found] == ["hello", *[None] * 6]
    assert "messages" not in found[0].fields
    assert found[6].text == "hi"


def test_folders(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    hub = tmp_path / "hub"
    (hub / "data").mkdir(parents=True)
    for number in range(2):
        table = pyarrow.table({"prompt": [f"{number}a", f"{number}b"], "score": [1.0, float("nan")]})
        parquet.write_table(table, hub / "data" / f"train-0000{number}-of-00002.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["t"]}), hub / "data" / "test-00000-of-00001.parquet")
    (hub / "README.md").write_text("# rows")
    (hub / "dataset_infos.json").write_text("{}")
    source = open_source(prompt_source(str(hub)))
    found = source.prompts("all", None)
    assert [prompt.text for prompt in found] == ["0a", "0b", "1a", "1b"]
    assert [dict(prompt.fields) for prompt in found[:2]] == [{"score": 1.0}, {}]
    assert [path.name for path in open_rows(str(hub), "train").files] == [
        f"train-0000{number}-of-00002.parquet" for number in range(2)
    ]
    assert [prompt.text for prompt in open_source(prompt_source(str(hub), split="test")).prompts("all", None)] == ["t"]
    with pytest.raises(DataError, match="no files of the split 'dev'; there are test, train"):
        open_source(prompt_source(str(hub), split="dev"))
    (hub / "more.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(DataError, match="several kinds"):
        open_source(prompt_source(str(hub)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no files with rows"):
        open_source(prompt_source(str(tmp_path / "empty")))


def test_a_disk_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / f"{number}.jsonl").write_text('{"prompt": "x"}\n')
    monkeypatch.setattr(folders, "MANY_FILES", 3)
    with pytest.raises(DataError, match="more than 3 files in this folder"):
        open_source(prompt_source(str(tmp_path)))
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"cannot be read \(No such file"):  # gone in the middle, or not ours to read
        folders._visible_files(tmp_path / "gone")


def test_saved_datasets_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    datasets.DatasetDict({"train": rows, "test": rows.select([2, 0])}).save_to_disk(str(tmp_path / "set"))
    source = open_source(prompt_source(str(tmp_path / "set"), split="test"))
    assert [prompt.text for prompt in source.prompts("all", None)] == ["c", "a"]
    files = open_rows(str(tmp_path / "set"), "test").files
    assert files
    assert all(path.is_file() and "test" in path.parts for path in files)
    with pytest.raises(DataError, match="no split 'dev'; there are train, test"):
        open_source(prompt_source(str(tmp_path / "set"), split="dev"))
    (tmp_path / "set" / "test" / "state.json").write_text("[")
    with pytest.raises(DataError, match="not a saved dataset"):
        open_source(prompt_source(str(tmp_path / "set"), split="test"))


GOOD = b'{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "caf\xe9"}', "line 2: not UTF-8 .byte 0xe9"),
        (rb'{"prompt": "\ud800"}', r"line 2: holds \\ud800, half of a surrogate pair"),
        (rb'{"prompt": "a", "deep": [{"x": "\uDC00\ud83d"}]}', "half of a surrogate pair"),
        (b'{"prompt": "a", "completion": 4}', "`completion` must be text"),
        (b'{"prompt": "a", "completion": {"a": 1}}', "`completion` must be text"),
        (b'{"prompt": "a", "completion": [1]}', "`completion` must be a list of"),
        (b'{"prompt": "a", "completion": [{"role": "assistant", "content": 3}]}', "content of a message must be text"),
        (b'{"prompt": "a", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested more than 100"),
        (b'{"prompt": "a", "x": ' + b"[" * 200 + b"]" * 200 + b"}", "nested more than 100"),
        (b'{"prompt": "a", "x": ' + b"7" * 5000 + b"}", "more than 4,300 digits"),
        (b'{"prompt": "a", "x": NaN}', "NaN is not JSON"),
        (b'{"prompt": "a", "x": 1e999}', "too large"),
        (b'{"prompt": "a", "prompt": "b"}', "duplicate key 'prompt'"),
        (b"\x00\x01\x02", "NUL bytes"),
        (b'{"prompt": "a"', "not valid JSON"),
        (b'{"prompt": 7}', "must be text or a list"),
        (b'{"prompt": {"role": "user"}}', "must be text or a list"),
        (b'{"prompt": [{"role": "user"}]}', "must be a list of"),
        (b'{"prompt": null}', "no `prompt`; it has nothing"),
        (b'{"question": "a"}', "no `prompt`; it has question"),
        (b'{"prompt": "a", "domain": ["x"]}', "`domain` must be text"),
        (b'{"prompt": "a", "system": 3}', "`system` must be text"),
        (b'{"messages": []}', "must be text or a list"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "nothing before it"),
        (b'{"prompt": [{"role": "system", "content": "x"}], "system": "y"}', "keep one"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=f"rows.jsonl': 1 of 3 rows cannot be used(?s:.*){words}"):
        open_source(prompt_source(str(path)))
    (source,) = open_sources([prompt_source(str(path))], bad_rows="skip")
    assert [prompt.id.rpartition("/")[2] for prompt in source.prompts("all", None)] == ["0", "2"]
    with pytest.raises(DataError, match="line 2"):
        source.train(1)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("rows.jsonl", "\ufeff{}".encode("utf-16"), "UTF-16"),
        ("rows.json", b'[{"prompt": "a"}, {"prompt": ]', "not valid JSON"),
        ("rows.json", b'[{"prompt": "a"}, 7]', "row 2: expected an object"),
        ("rows.csv", b'prompt\n"a\nb\n', "line 2: a quote is opened and never closed"),
        ("rows.csv", b"prompt,answer\na\n", "line 2: has 1 cells, and the header has 2"),
        ("rows.csv", b"prompt,prompt\na,b\n", "duplicate column name in the header"),
        ("rows.csv", b"prompt\ncaf\xe9\nb\n", "line 2: not UTF-8"),
        ("rows.csv", b"prompt\n", "no rows"),
        ("rows.csv", b"", "no rows"),
        ("rows.jsonl.gz", b"not gzip", "not a gzip file"),
        ("rows.parquet", b"PAR1 not", "not a Parquet file"),
        ("rows.txt", b"a\n", "files of this kind cannot be read"),
        ("rows.jsonl", b"\xff\x00" * 500, "0 of|cannot be used"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=words):
        open_source(prompt_source(str(tmp_path / name)))


def test_a_file_that_changes_in_use_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD * 3)
    source = open_source(prompt_source(str(path)))
    assert source.train(2).text == "a"
    path.write_bytes(GOOD)
    with pytest.raises(DataError, match="changed while it was in use"):
        source.train(0)


def mutated(data: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(5):
            case 0:
                out[at : at + draw.randint(1, 9)] = b""
            case 1:
                out[at:at] = draw.choice(
                    [
                        b'"',
                        b"\\",
                        b"\n",
                        b"\r",
                        b"\xff",
                        b"\0",
                        b"{",
                        b"[" * 3000,
                        b",",
                        b"\\ud800",
                        b"9" * 5000,
                        b"NaN",
                    ]
                )
            case 2:
                out[at:at] = draw.randbytes(3)
            case 3:
                out = out[:at]
            case _:
                out[at:at] = out[draw.randrange(len(out) + 1) :][:40]
        out = out or bytearray(b"\n")
    return bytes(out)


def test_mutated_files_are_read_or_rejected(tmp_path: Path) -> None:
    """Whatever stands in a file: prompts, or a `DataError`."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"] * 8, "answer": ["1", "2"] * 8}), tmp_path / "seed.parquet")
    row = {"messages": [{"role": "user", "content": "hi \u00e9"}], "answer": ["x", 1.5], "domain": "d"}
    seeds = {
        "jsonl": (json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n").encode() * 3,
        "json": json.dumps([*ROWS, row]).encode(),
        "csv": b'prompt,answer\n"a, ""b""\nc",4\nd,5\n' * 2,
        "parquet": (tmp_path / "seed.parquet").read_bytes(),
        "jsonl.gz": gzip.compress(GOOD * 4, mtime=0),
    }
    draw = random.Random(0)
    read = 0
    for number in range(600):
        kind = draw.choice(list(seeds))
        path = tmp_path / f"rows.{kind}"
        path.write_bytes(mutated(seeds[kind], draw))
        try:
            (source,) = open_sources([prompt_source(str(path))], bad_rows="skip" if number % 2 else "stop")
        except DataError:
            continue
        assert source.prompts("all", None)
        read += 1
    assert 50 < read < 550
