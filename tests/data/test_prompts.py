"""Prompt sources, their order, and how prompts become ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opd.common.errors import DataError, RecipeError
from opd.data.prompts import render_completion, render_prompt, response_text
from opd.data.sources import SOURCES, open_source, open_sources, prompt_source, prompts
from opd.data.stream import PromptStream
from opd.models.load import load_tokenizer
from opd.recipe import load_recipe
from opd.records import Prompt, Sample
from opd.rewards import verify
from tests.support.helpers import EOS, tiny_tokenizer


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_with_text_and_messages(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt": "2+2=", "completion": "4", "answer": "4", "domain": "maths"},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "hello"}]},
    ]  # fmt: skip
    more = [{"prompt": f"{number}+2=", "answer": "4", "domain": "maths"} for number in range(18)]
    source = open_source(prompt_source(str(write(tmp_path / "rows.jsonl", rows + more)), domain="other"))
    assert source.size == 19  # a tenth of maths is held out
    first, second = source.train(0), source.train(1)
    assert (first.text, first.domain, first.fields["completion"], first.fields["verifier"]) == (
        "2+2=",
        "maths",
        "4",
        "exact",
    )
    assert (second.messages, second.domain, second.fields["completion"]) == (
        ({"role": "user", "content": "hi"},),
        "other",
        "hello",
    )
    assert len(source.held_out(100)) == 1
    assert {prompt.id for prompt in source.held_out(100)}.isdisjoint({source.train(index).id for index in range(19)})


def test_parquet_and_limit(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"]}), tmp_path / "rows.parquet")
    source = open_source(prompt_source(str(tmp_path / "rows.parquet"), limit=2))
    assert source.size == 2
    assert source.train(1).text == "b"
    assert source.train(0).domain == "rows"
    assert source.held_out(5) == []


def test_saved_hugging_face_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]}).save_to_disk(str(tmp_path / "set"))
    source = open_source(prompt_source(str(tmp_path / "set"), eval_source=None))
    assert source.size == 1
    assert {source.train(0).fields["answer"], source.held_out(5)[0].fields["answer"]} == {"1", "2"}


def test_eval_source(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "x"}] * 4)
    held = write(tmp_path / "held.jsonl", [{"prompt": "b", "answer": "y"}])
    source = open_source(prompt_source(str(train), eval_source=str(held)))
    assert source.size == 4
    assert [prompt.text for prompt in source.held_out(9)] == ["b"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([{"question": "x"}], "no `prompt` column"),
        ([{"prompt": "   "}], "not empty"),
        ([{"prompt": []}], "not empty"),
        ([{"prompt": [{"text": "x"}]}], "messages"),
        ([3], "expected an object"),
    ],
)
def test_bad_rows(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        open_source(prompt_source(str(write(tmp_path / "rows.jsonl", rows)))).train(0)


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": ')
    with pytest.raises(DataError, match="line 2"):
        open_source(prompt_source(str(tmp_path / "broken.jsonl")))
    with pytest.raises(DataError, match="no such file"):
        open_source(prompt_source("nowhere.jsonl"))
    with pytest.raises(DataError, match=r"addition"):
        open_source(prompt_source("task:additon"))
    with pytest.raises(DataError, match="not a task"):
        open_source(prompt_source("no-such/dataset"))


def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym")
    source = open_source(prompt_source("reasoning_gym:basic_arithmetic", domain="maths"))
    prompt, held = source.train(3), source.held_out(50)
    assert prompt.domain == "maths"
    assert source.train(3) == prompt
    assert {p.messages[0]["content"] for p in held}.isdisjoint(
        {source.train(i).messages[0]["content"] for i in range(100)}
    )
    right, wrong = verify([Sample(prompt, prompt.fields["answer"]), Sample(prompt, "no idea")])
    assert right.reward == 1.0
    assert wrong.reward is not None
    assert wrong.reward < 1
    with pytest.raises(DataError, match="no such task"):
        open_source(prompt_source("reasoning_gym:nothing"))
    with pytest.raises(DataError, match=r"options .* are invalid"):
        open_source(prompt_source("reasoning_gym:basic_arithmetic", options={"nonsense": 1}))
    with pytest.raises(DataError, match=r"options .* are invalid"):  # seen only when a question is made
        open_source(prompt_source("reasoning_gym:chain_sum", options={"min_terms": 2.5}))


class Finite:
    def __init__(self, name: str, size: int | None) -> None:
        self.name, self.size = name, size
        self.fingerprint: str | None = None

    def files(self) -> list[Path]:
        return []

    def train(self, index: int) -> Prompt:
        return Prompt(id=f"{self.name}/{index}", domain=self.name, text="x")

    def held_out(self, count: int, wanted: Any = None) -> list[Prompt]:
        return []

    def prompts(self, split: Any, count: int | None, wanted: Any = None) -> list[Prompt]:
        return []

    def examples(self) -> list[Prompt]:
        return [self.train(0)]


def test_stream_keeps_shares_and_passes() -> None:
    stream = PromptStream([Finite("a", 5), Finite("b", None)], [3, 1], seed=0)
    visits = stream.take(40)
    a = [visit for visit in visits if visit.prompt.domain == "a"]
    assert len(a) == 30
    for number in range(6):  # every pass sees every prompt once, in an order of its own
        part = a[5 * number : 5 * number + 5]
        assert {visit.prompt.id for visit in part} == {f"a/{index}" for index in range(5)}
        assert {visit.visit for visit in part} == {number}
    assert len({tuple(visit.prompt.id for visit in a[5 * n : 5 * n + 5]) for n in range(6)}) > 1
    b = [visit.prompt.id for visit in visits if visit.prompt.domain == "b"]
    assert b == [f"b/{index}" for index in range(10)]


def test_stream_resumes() -> None:
    whole = PromptStream([Finite("a", 5), Finite("b", None)], [2, 1], seed=3)
    expected = whole.take(30)
    first = PromptStream([Finite("a", 5), Finite("b", None)], [2, 1], seed=3)
    first.take(11)
    second = PromptStream([Finite("a", 5), Finite("b", None)], [2, 1], seed=3)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.take(19) == expected[11:]


def test_rendering() -> None:
    tokenizer = tiny_tokenizer()
    text = Prompt(id="t", domain="d", text="1+1=")
    assert tokenizer.decode(render_prompt(text, tokenizer)) == "1+1="
    chat = Prompt(id="c", domain="d", messages=({"role": "user", "content": "hi"},))
    with pytest.raises(DataError, match="no chat template"):
        render_prompt(chat, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if shout %}!!{% endif %}{% if add_generation_prompt %}={% endif %}"
    assert tokenizer.decode(render_prompt(chat, tokenizer)) == "hi="
    assert tokenizer.decode(render_prompt(chat, tokenizer, {"shout": True})) == "hi!!="
    with pytest.raises(DataError, match="no tokens"):
        render_prompt(Prompt(id="e", domain="d", text=""), tokenizer)


def test_completions_end_in_the_stop_token_and_decode_without_it() -> None:
    tokenizer = tiny_tokenizer()
    prompt = Prompt(id="t", domain="d", text="x", fields={"completion": "42"})
    ids, cut = render_completion(prompt, tokenizer, 10, (EOS,))
    assert ids[-1] == EOS
    assert not cut
    assert response_text(ids, tokenizer, (EOS,)) == "42"
    ids, cut = render_completion(prompt, tokenizer, 2, (EOS,))
    assert cut
    assert ids.size == 2
    assert response_text(np.array([], dtype=np.int32), tokenizer, (EOS,)) == ""
    with pytest.raises(DataError, match="no completion"):
        render_completion(Prompt(id="t", domain="d", text="x"), tokenizer, 10, (EOS,))


def test_what_cannot_be_rewarded_is_not_a_zero() -> None:
    (result,) = verify([Sample(Prompt(id="t", domain="d", text="x"), "y")])
    assert result.reward is None
    assert result.error


def test_sources_name_the_files_they_read(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"prompt": "a"}])
    held = write(tmp_path / "held.jsonl", [{"prompt": "b", "answer": "1"}])
    assert prompt_source(str(rows), eval_source=str(held)).files() == [rows, held]
    assert prompt_source("task:addition").files() == []


def test_one_task_with_different_options() -> None:
    """Ids tell them apart; the first keeps its own, which key its draws."""
    specs = [prompt_source("task:addition", options={"digits": digits}) for digits in (2, 3)]
    plain, two, three = open_source(specs[0]), *open_sources(specs)
    assert plain.train(7) == two.train(7)
    assert two.train(7).id == "task:addition/train/7"
    assert three.train(7).id == "task:addition#2/train/7"
    assert three.held_out(1)[0].id == "task:addition#2/heldout/0"
    assert three.train(7).fields["verifier"] == "task:addition"
    with pytest.raises(DataError, match="is listed twice"):
        open_sources([specs[0], specs[1], specs[0].model_copy(update={"share": 2.0})])


def test_ids_do_not_depend_on_the_place_of_a_file(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        names.append(str(write(tmp_path / folder / "rows.jsonl", [{"prompt": folder}])))
    assert [open_source(prompt_source(name)).train(0).id for name in names] == ["rows.jsonl/train/0"] * 2
    both = open_sources([prompt_source(name) for name in names])
    assert [source.train(0).id for source in both] == ["rows.jsonl/train/0", "rows.jsonl#2/train/0"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"split": "test"}, "split belongs to source file and dataset, not to"),
        ({"columns": {"prompt": "q"}}, "columns belongs to source file and dataset, not to"),
        ({"eval_source": "x.jsonl"}, "eval_source belongs to source file and dataset, not to"),
    ],
)
def test_keys_that_would_do_nothing_are_rejected(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    for source in ("task:addition", "reasoning_gym:basic_arithmetic"):
        with pytest.raises(DataError, match=words):
            open_source(prompt_source(source, **change))
    rows = str(write(tmp_path / "rows.jsonl", [{"prompt": "a"}]))
    with pytest.raises(DataError, match="options belongs to source task and reasoning_gym, not to file"):
        open_source(prompt_source(rows, options={"digits": 3}))
    with pytest.raises(DataError, match="a file has no split 'test'"):
        open_source(prompt_source(rows, split="test"))


def test_held_out_prompts_are_counted_by_domain(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}", "answer": "1", "domain": "a" if number < 95 else "b"} for number in range(100)]
    path = str(write(tmp_path / "rows.jsonl", rows))
    source = open_source(prompt_source(path, held_out="last"))
    assert [prompt.domain for prompt in source.held_out(2)] == ["a", "a", "b", "b"]
    assert {prompt.domain for prompt in source.examples()} == {"a"}  # what is held out needs no teacher
    source = open_source(prompt_source(path))
    assert sorted(prompt.domain for prompt in source.held_out(2)) == ["a", "a", "b"]
    assert {prompt.domain for prompt in source.examples()} == {"a", "b"}


def test_the_address_says_which_source_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    write(tmp_path / "odd:name.jsonl", [{"prompt": "a"}])
    for address, kind in (
        ("task:sort", "task"),
        ("reasoning_gym:chain_sum", "reasoning_gym"),
        ("rows.jsonl", "file"),
        ("/somewhere/else", "file"),
        ("~nobody-of-this-name/rows.jsonl", "file"),
        ("owner/name", "file"),
        ("odd:name.jsonl", "file"),
        ("owner/other", "dataset"),
        ("squad", "dataset"),
    ):
        found = prompt_source(address)
        assert found.name == kind, address
        assert "kind" not in found.model_dump()
        assert SOURCES.read(found.model_dump()) == found
    forced = prompt_source("sort", kind="task")
    assert forced.model_dump()["kind"] == "task"
    assert SOURCES.read(forced.model_dump()) == forced
    assert open_source(forced).train(0).messages == open_source(prompt_source("task:sort")).train(0).messages
    with pytest.raises(DataError, match="'tsk:sort': unknown source; did you mean 'task'"):
        prompt_source("tsk:sort")
    with pytest.raises(DataError, match="no such file"):
        open_source(prompt_source("owner/other", kind="file"))
    with pytest.raises(RecipeError, match=r"prompts\.1: task 'srt': no such task. Did you mean 'sort'"):
        load_recipe({"student": "tiny/generalist", "teachers": "tiny/sorting", "prompts": ["task:sort", "task:srt"]})


def test_prompts_for_a_loop_of_ones_own(tmp_path: Path) -> None:
    rows = str(write(tmp_path / "rows.jsonl", [{"question": str(number), "answer": "1"} for number in range(20)]))
    columns = {"prompt": "question"}
    last = {"columns": columns, "held_out": "last"}
    assert [prompt.text for prompt in prompts(rows, 3, start=16, **last)] == ["16", "17"]
    assert [prompt.text for prompt in prompts(rows, split="heldout", **last)] == ["18", "19"]
    assert [prompt.text for prompt in prompts(rows, split="all", columns=columns)] == [str(n) for n in range(20)]
    first, second = prompts("task:addition", 2, start=1, domain="sums")
    assert (first.id, second.domain) == ("task:addition/train/1", "sums")
    assert [prompt.id for prompt in prompts("task:addition", 1, split="heldout")] == ["task:addition/heldout/0"]
    with pytest.raises(DataError, match="they are endless"):
        prompts("task:addition")
    with pytest.raises(DataError, match="share"):
        prompts(rows, share=0)


def test_an_empty_system_prompt_still_goes_through_the_chat_template(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,system\nhello,be brief\nhi,\n")
    (tmp_path / "plain.csv").write_text("prompt\nhi\n")
    asked = prompts(str(tmp_path / "rows.csv"))
    assert [[message["role"] for message in prompt.messages or ()] for prompt in asked] == [
        ["system", "user"],
        ["user"],
    ]
    assert prompts(str(tmp_path / "plain.csv"))[0].text == "hi"


@pytest.mark.parametrize("indent", [None, 1])
def test_rows_under_a_key_of_one_object_are_reported(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": [{"question": "a"}, {"question": "b"}]}, indent=indent))
    with pytest.raises(DataError, match="one object, with rows under 'data'; save that list alone"):
        prompts(str(path))
    path.write_text(json.dumps({"prompt": "a", "data": [{"x": 1}]}))
    assert len(prompts(str(path))) == 1


def test_long_texts_are_rendered_without_a_warning_of_the_tokenizer() -> None:
    tokenizer = load_tokenizer("tiny/generalist")
    prompt = Prompt("p", "d", text="1" * (tokenizer.model_max_length + 1))
    assert render_prompt(prompt, tokenizer).size > tokenizer.model_max_length
    assert not tokenizer.deprecation_warnings  # it remembers there what it has warned about
