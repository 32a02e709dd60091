"""`route: COLUMN`: which teacher scores a prompt, by any column of its row; checked over every row before the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import opd
from opd.common.errors import DataError, RecipeError
from opd.data.sources import open_sources, routed
from opd.loop.oom_retry import micro_batches
from opd.objective.batch import Batch
from opd.recipe import load_recipe
from opd.runner.plan import make_plan
from opd.teachers.kinds import one_per_domain

RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {"adder": "tiny/arithmetic", "speller": {"model": "tiny/spelling", "domains": ["7", "back"]}},
    "route": "teacher_id",
    "rollout": {"prompts": 4, "max_new_tokens": 4},
    "train": {"steps": 2, "micro_tokens": 24},
    "eval": {"prompts": 0},
    "checkpoint": {"every": 1},
    "sampler": {"slots": 4},
    "device": "cpu",
}
ROWS = [{"prompt": f"add {number}+1", "teacher_id": "adder"} for number in range(10, 14)]
ROWS += [{"prompt": "reverse apple", "teacher_id": "back"}, {"prompt": "reverse bread", "teacher_id": 7}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def recipe(tmp_path: Path, rows: list[Any], **changes: Any) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {**RECIPE, "prompts": [{"source": str(path), "domain": "mixed"}], **changes}


def test_a_column_routes_and_metrics_stay_by_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Batch] = []
    train = opd.Trainer.step
    monkeypatch.setattr(
        opd.Trainer, "step", lambda self, batch, step: (seen.append(batch), train(self, batch, step))[1]
    )
    run = opd.run(RECIPE, prompts={"mixed": ROWS}, out=tmp_path / "run")
    assert "kl/mixed" in run.metrics[0]
    asked = {"adder": "add", "speller": "reverse"}
    words = {f"mixed.jsonl/train/{number}": row["prompt"].split()[0] for number, row in enumerate(ROWS)}
    for batch in seen:
        signals = batch.signals["teacher", "hidden"]
        for rollout in batch.rollouts:
            assert asked[signals[rollout.id].teacher] == words[rollout.prompt_id]
            assert batch.owners[rollout.id] == signals[rollout.id].teacher
    packs = micro_batches(seen[0].rollouts, 24, "cpu", seen[0].owners)  # type: ignore[arg-type]
    order = [seen[0].owners[rollout.id] for pack in packs for rollout in pack.rollouts]
    assert order == sorted(order)
    # A resumed run routes as the first did.
    (run.directory / "summary.json").unlink()
    (run.directory / "checkpoints" / "main" / "result.json").unlink()
    assert [line["loss"] for line in opd.resume(run.directory).metrics] == [line["loss"] for line in run.metrics]


def test_the_plan_names_the_column(tmp_path: Path) -> None:
    (plan,) = make_plan(load_recipe(recipe(tmp_path, ROWS)))
    assert "  route      teacher: teacher_id 7 -> speller" in plan.lines()


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (
            {"teacher_id": "nobody"},
            r"teacher_id 'nobody' .prompts .*line 101. has no teacher: there are adder, speller",
        ),
        ({}, r"1 of 101 rows(?s:.*)line 101: no `teacher_id`, which `route` reads"),
        ({"teacher_id": ["adder"]}, r"line 101: `teacher_id`, which `route` reads, must be text"),
    ],
)
def test_the_last_row_is_looked_at(tmp_path: Path, late: dict[str, Any], words: str) -> None:
    rows = [ROWS[number % 6] for number in range(100)] + [{"prompt": "add 1+1", **late}]
    with pytest.raises((RecipeError, DataError), match=words):
        make_plan(load_recipe(recipe(tmp_path, rows)))


def test_rows_without_the_column_can_be_skipped(tmp_path: Path) -> None:
    """Also where lengths are remembered of a run without the column."""
    rows = [*ROWS, {"prompt": "add 1+1"}]
    alone = {"teachers": "tiny/arithmetic", "route": "domain"}
    make_plan(load_recipe(recipe(tmp_path, rows, **alone)))
    (plan,) = make_plan(load_recipe(recipe(tmp_path, rows, data={"bad_rows": "skip"})))
    assert "1 of 7 rows are skipped" in plan.notes[0]
    assert not make_plan(load_recipe(recipe(tmp_path, rows, **alone)))[0].notes


def test_an_idle_teacher_and_a_column_without_teachers_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match="teacher 'speller' scores no teacher_id: the values of that column are adder"
    ):
        make_plan(load_recipe(recipe(tmp_path, ROWS[:4])))
    with pytest.raises(RecipeError, match="route 'teacher_id' says which teacher"):
        load_recipe(
            {"student": "tiny/generalist", "route": "teacher_id", "prompts": "task:addition", "objective": {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}}}
        )  # fmt: skip


def test_fields_of_generated_prompts_route_too() -> None:
    tasks = {**RECIPE, "route": "verifier", "prompts": ["task:addition", "task:reverse"]}
    tasks["teachers"] = {
        "task:addition": "tiny/arithmetic",
        "words": {"model": "tiny/spelling", "domains": ["task:reverse"]},
    }
    (plan,) = make_plan(load_recipe(tasks))
    assert plan.routes == {"teacher": {"task:addition": "task:addition", "task:reverse": "words"}}
    with pytest.raises(DataError, match="prompt 0: no `agent`, which `route` reads; it has answer"):
        make_plan(load_recipe({**tasks, "route": "agent"}))


def test_held_out_rows_need_no_route(tmp_path: Path) -> None:
    """They are evaluated, and scored by no teacher."""
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "add 1+2", "answer": "3"}) + "\n")
    spec = recipe(tmp_path, ROWS, eval={"prompts": 4})
    spec["prompts"][0]["eval_source"] = str(held)
    stage = load_recipe(spec).stages[0]
    sources = open_sources(stage.prompts, route="teacher_id")
    assert {value for _, value in routed(sources, "teacher_id")} == {"adder", "back", "7"}


def test_a_domain_with_several_teachers_has_no_single_one() -> None:
    table = {"a": "x", "b": "y"}
    assert one_per_domain(table, [("sums", "a"), ("both", "a"), ("both", "b")]) == {"sums": "x"}
