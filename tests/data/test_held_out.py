"""Which rows of a file are held out: by question, of every domain, duplicates together; and by which rule older runs go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import opd
from opd.common.errors import DataError, RecipeError
from opd.common.files import SEALS, read_sealed, sha256, write_sealed
from opd.data.sources import held_out_rows, open_source, open_sources, prompt_source, question_key, scan
from opd.models import load_tokenizer
from opd.recipe import load_recipe
from opd.records import Prompt
from opd.runner.evaluate import evaluate_model
from opd.runner.plan import make_plan
from opd.runner.run import verified_recipe
from tests.support.helpers import save_tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "one"))}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sums(count: int, domain: str, first: int = 0) -> list[dict[str, str]]:
    return [
        {"prompt": f"{number}+1=", "answer": str(number + 1), "domain": domain}
        for number in range(first, first + count)
    ]


def sides(path: str, **settings: Any) -> tuple[list[str | None], list[str | None]]:
    source = open_source(prompt_source(path, **settings))
    return tuple([prompt.text for prompt in source.prompts(split, None)] for split in ("train", "heldout"))  # type: ignore[return-value, arg-type]


def recipe(models: dict[str, str], path: str, **changes: Any) -> dict[str, Any]:
    return {
        "student": models["student"], "teachers": models["one"], "prompts": path, "device": "cpu",
        "rollout": {"prompts": 2, "max_new_tokens": 4}, "train": {"steps": 3}, "eval": {"prompts": 50},
        "checkpoint": {"every": 1},
    } | changes  # fmt: skip


def test_a_sorted_file_is_evaluated_on_every_domain(models: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", sums(60, "early") + sums(20, "late", 60) + sums(1, "alone", 90))
    run = opd.run(recipe(models, path), out=tmp_path / "run")
    assert {name: found["n"] for name, found in run.summary["stages"][0]["evals"].items()} == {"early": 6, "late": 2}
    log = (run.directory / "log.txt").read_text()
    assert "questions held out: 6 of 60 (early), 2 of 20 (late), 0 of 1 (alone)" in log
    assert "evaluation: held-out prompts: 6 of early, 2 of late" in log
    assert "no held-out prompts of alone, which is trained on" in log
    assert log.index("held-out prompts: 6") < log.index("step")
    (plan,) = make_plan(load_recipe(recipe(models, path)))
    assert any("6 of early, 2 of late" in line for line in plan.lines())
    asked = {line["prompt_id"].rpartition("/")[0] for line in run.answers}
    assert asked == {"rows.jsonl/heldout"}


def test_duplicates_are_on_one_side(tmp_path: Path) -> None:
    rows: list[Any] = [row | {"extra": number} for number in range(3) for row in (*sums(40, "a"), *sums(40, "b", 20))]
    rows += [
        {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": f" {n}+1= \n"}]} for n in range(60)
    ]
    source = open_source(prompt_source(write(tmp_path / "rows.jsonl", rows)))

    def asked(split: Any) -> set[str]:
        texts = (p.text if p.messages is None else p.messages[-1]["content"] for p in source.prompts(split, None))
        return {str(text).strip() for text in texts}

    assert not asked("train") & asked("heldout")
    assert asked("train") | asked("heldout") == {f"{number}+1=" for number in range(60)}
    assert len({prompt.id for prompt in source.prompts("all", None)}) == len(rows)


def test_the_choice_follows_from_the_questions_alone(tmp_path: Path) -> None:
    rows = sums(50, "a") + sums(30, "b", 50)
    _, held = sides(write(tmp_path / "rows.jsonl", rows))
    assert len(held) == 8
    train, same = sides(write(tmp_path / "other.jsonl", [row | {"answer": "0"} for row in reversed(rows)]))
    assert same == held  # in the same order: the first few stand for all
    assert len(train) == 72
    assert held != sorted(held, key=lambda text: int(str(text).partition("+")[0]))
    # on every machine and in every version
    assert question_key(Prompt(id="", domain="", text="2+2=")) == 0x7FBA61E2A251B93F
    assert question_key(Prompt(id="", domain="", text="2+2=")) == question_key(
        Prompt(id="x", domain="y", messages=({"role": "user", "content": "2+2= "},))
    )


@pytest.mark.parametrize(("rows", "train", "held"), [
    (sums(1, "a"), 1, 0),
    (sums(2, "a"), 1, 1),
    (sums(1, "a") * 5, 5, 0),
    (sums(1, "a") * 3 + sums(1, "b", 3), 4, 0),
    (sums(9, "a"), 8, 1),
    (sums(2, "a") + sums(2, "b"), 2, 2),
])  # fmt: skip
def test_small_files(tmp_path: Path, rows: list[Any], train: int, held: int) -> None:
    assert tuple(map(len, sides(write(tmp_path / "rows.jsonl", rows)))) == (train, held)


def test_many_rows() -> None:
    """Shares by domain are exact, a question of two domains counts in both, and unusable rows are on no side."""
    draw = np.random.default_rng(0)
    keys = draw.integers(0, 2**63, 200_000, dtype=np.uint64)
    domains = np.sort(draw.integers(-1, 40, len(keys))).astype(np.int32)
    keys[100_000:100_500] = keys[:500]
    held = held_out_rows(keys, domains)
    for domain in range(40):
        of, some = np.unique(keys[domains == domain]), np.unique(keys[(domains == domain) & held])
        assert len(of) // 10 <= len(some) <= len(of) // 10 + 60
    assert not held[domains < 0].any()
    known = domains >= 0
    assert not np.intersect1d(keys[held], keys[known & ~held]).size


def test_what_one_file_holds_out_no_other_trains_on(tmp_path: Path) -> None:
    names = [write(tmp_path / "a.jsonl", sums(40, "a")), write(tmp_path / "b.jsonl", sums(60, "b", 20))]
    sources = open_sources([prompt_source(name) for name in names])
    held = {prompt.text for source in sources for prompt in source.held_out(99)}
    trained = {source.train(index).text for source in sources for index in range(source.size or 0)}
    assert not held & trained
    assert held | trained == {f"{number}+1=" for number in range(80)}
    (tmp_path / "few.jsonl").write_text(json.dumps({"prompt": sources[0].held_out(1)[0].text}) + "\n")
    with pytest.raises(DataError, match="hold out every question that it trains on"):
        open_sources([prompt_source(names[0]), prompt_source(str(tmp_path / "few.jsonl"))])


def test_held_out_rows_of_another_file_that_are_trained_on_are_reported(models: dict[str, str], tmp_path: Path) -> None:
    path, other = write(tmp_path / "rows.jsonl", sums(9, "a")), write(tmp_path / "exam.jsonl", sums(4, "a", 7))
    (plan,) = make_plan(load_recipe(recipe(models, "", prompts={"source": path, "eval_source": other})))
    assert any("2 of 4 prompts of" in note and "are also trained on" in note for note in plan.notes)
    with pytest.raises(RecipeError, match="eval_source names other rows"):
        load_recipe(recipe(models, "", prompts={"source": path, "eval_source": other, "held_out": "last"}))


def test_the_last_rows_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", sums(20, "a"))
    train, held = sides(path, held_out="last")
    assert (train, held) == ([f"{number}+1=" for number in range(18)], ["18+1=", "19+1="])
    source = open_source(prompt_source(path, held_out="last"))
    assert [prompt.id for prompt in source.held_out(9)] == ["rows.jsonl/heldout/0", "rows.jsonl/heldout/1"]


def as_of_before(directory: Path) -> None:
    """What an earlier version would have written: `resolved.yaml` without the key."""
    resolved = yaml.safe_load((directory / "resolved.yaml").read_text())
    for stage in resolved["stages"]:
        for source in (*stage["prompts"], *stage["eval"]["further"]):
            del source["held_out"]
    (directory / "resolved.yaml").write_text(yaml.safe_dump(resolved, sort_keys=False))
    facts = {key: value for key, value in read_sealed(directory / SEALS).items() if key != "sha256"}
    facts["files"]["resolved.yaml"] = sha256(directory / "resolved.yaml")
    write_sealed(directory / SEALS, facts)


@pytest.mark.parametrize("way", ["resume", "run"])
def test_a_run_of_an_earlier_version_keeps_its_split(models: dict[str, str], tmp_path: Path, way: str) -> None:
    path = write(tmp_path / "rows.jsonl", sums(30, "a"))
    last = recipe(models, path, prompts={"source": path, "held_out": "last"})
    whole = opd.run(last, out=tmp_path / "whole")
    cut = opd.run(last, out=tmp_path / "cut", on_step=lambda live, _: live.stop())
    assert len(cut.metrics) == 1
    as_of_before(tmp_path / "cut")
    if way == "resume":
        run = opd.resume(tmp_path / "cut")
    else:
        run = opd.run(recipe(models, path), out=tmp_path / "cut", resume=True)
    assert [line["loss"] for line in run.metrics] == [line["loss"] for line in whole.metrics]
    assert [line["prompt_id"] for line in run.answers] == [line["prompt_id"] for line in whole.answers]
    assert {line["prompt_id"] for line in run.answers} == {f"rows.jsonl/heldout/{number}" for number in range(3)}
    asked = {"k": 0, "max_new_tokens": 4, "device": "cpu", "seed": 0}
    for directory, rule in ((run.directory, "last"), (tmp_path / "whole", "last")):
        found = evaluate_model(str(opd.Run(directory).model), [path], split="heldout", **asked)  # type: ignore[arg-type]
        assert found.notes[0] == f"prompts {path}: held out as in {directory} (held_out: {rule})"
        assert found.domains["a"].n == 3


def test_a_run_of_an_earlier_version_keeps_its_rows(models: dict[str, str], tmp_path: Path) -> None:
    """It read verl's columns as any others, and trained on messages that the template leaves out."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{number}+1="}], "data_source": "x", "answer": "1",
         "reward_model": {"ground_truth": "2"}} for number in range(20)
    ]  # fmt: skip
    student = Path(save_tiny(tmp_path / "student", seed=0))
    template = student / "chat_template.jinja"
    template.write_text(template.read_text().replace("in messages", "in messages if message.role == 'user'"))
    last = {"source": write(tmp_path / "rows.jsonl", rows), "held_out": "last", "domain": "rows"}
    chat = recipe(models | {"student": str(student)}, "", prompts=last)
    opd.run(chat, out=tmp_path / "run", on_step=lambda live, _: live.stop())
    as_of_before(tmp_path / "run")
    (loaded,) = verified_recipe(tmp_path / "run").stages[0].prompts
    assert loaded.older
    plain = loaded.model_copy(update={"domain": None})
    assert {(prompt.domain, prompt.fields["answer"]) for prompt in open_source(plain).prompts("all", None)} == {
        ("rows", "1")
    }
    rows[0]["prompt"].append({"role": "critic", "content": "no"})  # type: ignore[attr-defined]
    write(tmp_path / "rows.jsonl", rows)
    tokenizer = load_tokenizer(str(student))
    assert scan([open_source(plain)], [plain], tokenizer, limit=99, why="").longest
    spec = prompt_source(plain.source)
    with pytest.raises(DataError, match="critic"):
        scan([open_source(spec)], [spec], tokenizer, limit=99, why="")


def test_eval_holds_out_what_the_run_did(models: dict[str, str], tmp_path: Path) -> None:
    """Its settings of the file count: the same columns, the same limit."""
    rows = [{"q": row["prompt"], "answer": row["answer"]} for row in sums(40, "a")]
    path = write(tmp_path / "rows.jsonl", rows)
    run = opd.run(
        recipe(models, path, prompts={"source": path, "limit": 20, "columns": {"prompt": "q"}}, train={"steps": 1}),
        out=tmp_path / "run",
    )
    found = evaluate_model(str(run.model), [path], split="heldout", k=0, max_new_tokens=4, device="cpu", seed=0)
    assert found.domains["rows"].n == 2 == run.summary["stages"][0]["evals"]["rows"]["n"]
    assert "held_out: questions" in found.notes[0]
    with pytest.raises(DataError, match="no `prompt` column"):
        evaluate_model(models["one"], [path], split="heldout", k=0, max_new_tokens=4, device="cpu", seed=0)


def test_rows_replayed_from_an_earlier_run_are_found(models: dict[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", sums(30, "a"))
    first = opd.run(recipe(models, path), out=tmp_path / "first")
    again = opd.run(recipe(models, f"run:{first.directory}"), out=tmp_path / "again")
    assert {line["prompt_id"].rpartition("/")[0] for line in again.answers} == {"rows.jsonl/heldout"}
    names = [{entry.prompt_id for entry in run.rollouts.entries.values()} for run in (first, again)]
    assert names[0] == names[1]


def test_messages_of_held_out_rows_are_looked_at(models: dict[str, str], tmp_path: Path) -> None:
    rows: list[Any] = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": "1"} for row in sums(20, "a")]
    path = write(tmp_path / "rows.jsonl", rows)
    first, _ = open_source(prompt_source(path)).held_out(9)
    student = Path(save_tiny(tmp_path / "student", seed=0))
    template = student / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("message in messages", "message in messages if message.role == 'user'")
    )
    chat = recipe(models | {"student": str(student)}, path)
    assert make_plan(load_recipe(chat))
    rows[int(first.id.rpartition("/")[2])]["prompt"].append(
        {"role": "system", "content": "no"}
    )  # no part of the question
    write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=rf"{first.id}.*whose role is 'system'"):
        make_plan(load_recipe(chat))
    (plan,) = make_plan(load_recipe(chat | {"data": {"bad_rows": "skip"}}))
    assert any("1 prompts of" in note and "cannot be rendered by the chat template" in note for note in plan.notes)
