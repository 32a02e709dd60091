"""Prompts from a program's memory: `opd.run(recipe, prompts=rows)`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import opd
from opd.common.errors import DataError, RecipeError, RunDirectoryError
from opd.data.rows import by_domain, jsonl
from opd.records import Prompt

RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {"sums": "tiny/arithmetic", "words": "tiny/spelling"},
    "rollout": {"prompts": 4, "max_new_tokens": 4},
    "train": {"steps": 2},
    "eval": {"prompts": 0},
    "checkpoint": {"every": 1},
    "sampler": {"slots": 4},
    "device": "cpu",
}
SUMS = [{"prompt": f"add {number}+1"} for number in range(10, 16)]
WORDS = [f"reverse {word}" for word in ("apple", "bread", "cloud", "dream")]


def test_rows_go_into_the_run_which_needs_no_more(tmp_path: Path) -> None:
    rows = {"sums": SUMS, "words": WORDS}
    run = opd.run(RECIPE, prompts=rows, out=tmp_path / "run", overrides=["prompts.0.share=3"])
    assert {entry.domain for entry in run.rollouts.entries.values()} == {"sums", "words"}
    prompts = yaml.safe_load((run.directory / "resolved.yaml").read_text())["stages"][0]["prompts"]
    assert [(prompt["source"], prompt["domain"], prompt["share"]) for prompt in prompts] == [
        ("inputs/sums.jsonl", "sums", 3.0),
        ("inputs/words.jsonl", "words", 1.0),
    ]
    lines = (run.directory / "inputs" / "words.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"prompt": word} for word in WORDS]
    moved = run.directory.rename(tmp_path / "elsewhere")
    (moved / "summary.json").unlink()
    (moved / "checkpoints" / "main" / "result.json").unlink()
    assert [line["loss"] for line in opd.resume(moved).metrics] == [
        line["loss"] for line in run.__class__(moved).metrics
    ]
    again = {"prompts": rows, "out": moved, "overrides": ["prompts.0.share=3"], "resume": True}
    opd.run(RECIPE, **again)
    with pytest.raises(RunDirectoryError, match="other prompts"):
        opd.run(RECIPE, **(again | {"prompts": {"sums": SUMS[1:], "words": WORDS}}))
    (moved / "summary.json").unlink()
    (moved / "checkpoints" / "main" / "result.json").unlink()
    (moved / "inputs" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS[1:]))
    with pytest.raises(RunDirectoryError, match=r"inputs/sums\.jsonl \(prompts\) has changed"):
        opd.resume(moved)


def test_a_run_resumes_under_another_spelling_of_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = RECIPE | {"train": {"steps": 1}, "teachers": "tiny/spelling"}
    run = opd.run(recipe, prompts=WORDS, out="../run")
    for spelling in ("../run", str(tmp_path / "run"), "../here/../run"):
        (run.directory / "summary.json").unlink()
        (run.directory / "checkpoints" / "main" / "result.json").unlink()
        assert opd.resume(spelling).summary["status"] == "done"
        assert opd.run(recipe, prompts=WORDS, out=spelling, resume=True).summary["status"] == "done"


def test_a_start_that_fails_takes_them_away_again(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: no `prompt`; it has text"):
        opd.run(RECIPE, prompts=[{"prompt": "a"}, {"text": "b"}], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(RecipeError, match="prompts= is for recipes that are read"):
        opd.run(opd.load_recipe("quickstart"), prompts=WORDS)
    stages = [{"name": "one", "prompts": "task:addition"}, {"name": "two", "prompts": ["task:reverse"]}]
    with pytest.raises(RecipeError, match="is not used: one, two have their own prompts"):
        opd.run(RECIPE | {"stages": stages}, prompts=WORDS, out=tmp_path / "run")
    with pytest.raises(RecipeError, match="prompts: missing"):
        opd.run(RECIPE, out=tmp_path / "run")


def test_what_rows_may_be() -> None:
    import datasets

    fields = {"answer": "ho", "prompt": "not this", "domain": "nor this"}
    prompt = Prompt(id="x", domain="d", messages=({"role": "user", "content": "hi"},), fields=fields)
    rows = ["plain", {"prompt": "p", "n": np.int64(3), "v": np.arange(2), "nothing": float("nan")}, prompt]
    assert [json.loads(line) for line in jsonl(rows).splitlines()] == [
        {"prompt": "plain"},
        {"prompt": "p", "n": 3, "v": [0, 1], "nothing": None},
        {"prompt": [{"role": "user", "content": "hi"}], "domain": "d", "answer": "ho"},
    ]
    dataset = datasets.Dataset.from_list(SUMS)
    assert jsonl(dataset) == jsonl(SUMS) == jsonl(iter(SUMS))
    with pytest.raises(DataError, match=r"a dataset with splits \(train\)"):
        list(by_domain(datasets.DatasetDict(train=dataset)))
    assert "datasets" in sys.modules


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("task:addition", "expected a list of rows, got str"),
        ([], "no rows"),
        ({}, "no rows"),
        ({"maths": []}, "prompts of 'maths': it has no rows"),
        ({"prompt": "one row"}, "'prompt' looks like a column"),
        ({3: ["x"]}, "domains are words"),
        ([{"prompt": "x"}, 3], "row 2: expected a mapping"),
        ([{"prompt": "x", "image": object()}], r"row 1: .*\(a value of type object"),
        ([{"prompt": "x", "scores": [float("nan")]}], "row 1: .*JSON"),
    ],
)
def test_what_they_may_not_be(given: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        list(by_domain(given))


def test_domains_that_no_file_can_be_named_after_are_numbered() -> None:
    from opd.runner.run_files import GivenPrompts

    given = GivenPrompts.of({"a/b": ["x"], "a:b": ["y"], "A-B": ["z"], "../up": ["w"]})
    assert list(given.files) == ["a-b.jsonl", "a-b-2.jsonl", "A-B-3.jsonl", "up.jsonl"]
    assert [source["domain"] for source in given.sources] == ["a/b", "a:b", "A-B", "../up"]
