"""Pipelines as graphs: the order of stages, which of them run, what is used again, what is selected, and what is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import opd
from opd import cli
from opd.common.errors import RecipeError, UserError
from opd.common.files import line_of, read_sealed, source_hash, this_version, write_sealed
from opd.data.stream import Flattened, ScoreBetween
from opd.evaluation import Measures
from opd.recipe import load_recipe, shipped_recipes
from opd.recipe.graph import ChosenStages, edges, mermaid, require_reachable
from opd.runner.plan import make_plan
from opd.runner.reports import story_lines, story_of
from opd.runner.results import Selected, StageResult, narrowed, selected
from opd.runner.reuse import EarlierStages, _copy_stage, reuse_stages, stage_keys
from opd.runner.run_files import with_rewards
from tests.support.helpers import save_tiny

LABS = [name for name in shipped_recipes() if name.startswith("labs/")]


def recipe(*stages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "student": "tiny/generalist", "teachers": {"t": "tiny/arithmetic"}, "prompts": {"source": "task:addition", "domain": "a"},
        "stages": list(stages), "device": "cpu", "rollout": {"prompts": 2, "max_new_tokens": 3}, "train": {"steps": 1},
        "eval": {"prompts": 2, "teachers": False}, "sampler": {"slots": 2}, "log": {"start_table": False, "samples": 0}, **more,
    }  # fmt: skip


def order(*stages: dict[str, Any]) -> list[str]:
    return [stage.name for stage in load_recipe(recipe(*stages)).stages]


def test_stages_run_after_those_they_need_and_otherwise_as_listed() -> None:
    assert order({"name": "a"}, {"name": "b"}, {"name": "c"}) == ["a", "b", "c"]
    own = {"student": "tiny/generalist"}
    merged = {"name": "m", "student": {"merge": {"models": ["stage:c", "stage:b"]}}}
    assert order(merged, {"name": "b", **own}, {"name": "c", **own}) == ["b", "c", "m"]
    taught = {"name": "a", "teachers": {"t": "stage:c"}}
    assert order(taught, {"name": "b", **own}, {"name": "c", **own}, {"name": "d"}) == ["b", "c", "a", "d"]
    chosen = {"name": "a", "select": {"stage": "b"}}
    assert order(chosen, {"name": "b", **own}) == ["b", "a"]


def test_a_stage_replaces_what_it_names_another_kind_of() -> None:
    prompts = [{"source": "task:addition", "domain": "a"}, {"source": "task:sort", "domain": "b"}]
    eval_ = {"every": 1, "prompts": 2, "early_stop": {"kind": "patience", "patience": 7}}
    teachers = {"a": {"model": "tiny/arithmetic", "domains": ["a"]}, "b": {"kind": "frozen", "model": "tiny/sorting"}}
    changes = {
        "shares": {"kind": "length"}, "eval": {"early_stop": {"kind": "target", "of_teacher": 0.9}}, "teachers": {"b": {"kind": "self"}},
    }  # fmt: skip
    given = recipe(
        {"name": "one"}, {"name": "two", **changes}, {"name": "three", "shares": {"power": 2}, "teachers": {"a": "tiny/pairs"}},
        prompts=prompts, eval=eval_, teachers=teachers, shares={"kind": "gap", "power": 0.5},
    )  # fmt: skip
    one, two, three = load_recipe(given).stages
    assert two.shares.model_dump()["power"] == -1.0
    assert [stage.eval.early_stop and stage.eval.early_stop.name for stage in (one, two)] == ["patience", "target"]
    assert [two.teachers[name].name for name in ("a", "b")] == ["frozen", "self"]
    assert three.shares.model_dump()["power"] == 2.0  # of the same kind: laid over
    assert three.teachers["a"].domains == ["a"]


@pytest.mark.parametrize(
    ("stages", "what"),
    [
        ([{"name": "a", "teachers": {"t": "stage:b"}}, {"name": "b"}], r"a -> b -> a: each needs the next"),
        ([{"name": "a", "student": "stage:a"}], r"stages.a.student: no other stage.*there are none"),
        ([{"name": "a"}, {"name": "b", "student": "stage:z"}], r"no other stage is called 'z'; known: a"),
        ([{"name": "a"}, {"name": "b", "prompts": {"source": "stage:z"}}], r"stages.b.prompts.0.source"),
        ([{"name": "a", "eval": {"further": "stage:z"}}], r"stages.a.eval.further.0.source"),
        ([{"name": "a"}, {"name": "b", "select": {"stage": "z"}}], r"stages.b.select.stage: .*'z'"),
        ([{"name": "two"}, {"name": "b", "select": {"stage": "stage:tow"}}], r"called 'tow'; did you mean 'two'\?$"),
        ([{"name": "a"}, {"name": "b", "select": {"stage": "a"}, "prompts": "task:sort"}], "give every source"),
        ([{"name": "a", "eval": {"prompts": 0}}, {"name": "b", "select": {"stage": "a"}}], "is not evaluated"),
        ([{"name": "a"}, {"name": "b", "select": {"stage": "a", "kind": "score", "least": 1, "most": 0}}], "no domain"),
    ],
)
def test_bad_graphs_are_rejected_when_read(stages: list[dict[str, Any]], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        load_recipe(recipe(*stages))


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_selection_by_what_is_not_evaluated_is_rejected_before_anything_trains(by_rows: bool, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1), "domain": "sums"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    further = str(tmp_path / "rows.jsonl") if by_rows else {"source": "task:words", "domain": "sums"}
    stages = [{"name": "start"}, {"name": "a", "eval": {"prompts": 2, "further": further}}]
    for domain in ("sums", "a"):
        chosen = {"name": "b", "select": {"stage": "a"}, "prompts": {"source": "task:addition", "domain": domain}}
        make_plan(load_recipe(recipe(*stages, chosen)))
    other = {"name": "b", "select": {"stage": "a"}, "prompts": {"source": "task:sort", "domain": "sorts"}}
    read = load_recipe(recipe(*stages[by_rows:], other))
    for refused in (lambda: make_plan(read), lambda: opd.run(read, out=tmp_path / "run")):
        with pytest.raises(
            RecipeError, match=r"stages.b.select: stage 'a' does not evaluate sorts. Give it such prompts"
        ):
            refused()
    assert not (tmp_path / "run").exists()
    if by_rows:  # what was asked for can be done
        assert opd.run(read, out=tmp_path / "run", until="a").summary["status"] == "partial"


def test_which_stages_are_asked_for() -> None:
    read = load_recipe(recipe({"name": "a"}, {"name": "b"}, {"name": "c"}))
    assert ChosenStages().names(read) == ["a", "b", "c"]
    assert ChosenStages(only="b").names(read) == ["b"]
    assert ChosenStages(start="b").names(read) == ["b", "c"]
    assert ChosenStages(until="b").names(read) == ["a", "b"]
    assert ChosenStages(start="b", until="b").names(read) == ["b"]
    for selection, what in (
        (ChosenStages(only="d"), "--only 'd': there is no such stage"),
        (ChosenStages(only="a", until="b"), "drop --from and --until"),
        (ChosenStages(start="c", until="a"), "The order is a, b, c"),
    ):
        with pytest.raises(RecipeError, match=what):
            selection.names(read)
    with pytest.raises(RecipeError, match=r"stage 'b' needs stage 'a' \(student\), which is left out"):
        ChosenStages(start="b").require(read, elsewhere=False)
    require_reachable(read, ["b", "c"], ["a"])
    with pytest.raises(UserError, match="which is left out"):
        opd.run(recipe({"name": "a"}, {"name": "b"}), only="b")
    assert not Path("runs/run").exists()


def test_a_drawing_names_every_stage_and_what_passes_between_them() -> None:
    text = mermaid(load_recipe("labs/mimo-v2-flash"))
    assert text.startswith("flowchart LR\n")
    for stage in load_recipe("labs/mimo-v2-flash").stages:
        assert f'["{stage.name}: ' in text
    assert re.search(r's1 -->\|"teaches arithmetic"\| s4', text)
    odd = mermaid(load_recipe(recipe({"name": "a"}, {"name": "b"}, student="some/mod'el")))
    assert "some/mod#39;el" in odd


def test_a_drawing_tells_a_merge_from_its_base() -> None:
    merges = [
        {"kind": "ties", "base": "tiny/generalist", "models": ["stage:a", "tiny/arithmetic"]},
        {"kind": "ties", "base": "stage:a", "models": ["stage:b"]},
    ]
    stages = [{"name": name, "student": {"merge": merge}} for name, merge in zip("bc", merges, strict=True)]
    text = mermaid(load_recipe(recipe({"name": "a"}, *stages, teachers={"t": "tiny/sorting"})))
    into = {stage: re.findall(rf'(\w+) -\.?->\|"([a-z]+)"\| {stage}', text) for stage in ("s0", "s1", "s2")}
    assert into["s0"] == [("m0", "starts")]
    assert into["s1"] == [("s0", "merged"), ("m0", "base"), ("m2", "merged")]
    assert into["s2"] == [("s0", "base"), ("s1", "merged")]


def test_a_drawing_says_when_a_stage_ends() -> None:
    rules = [
        {"kind": "patience", "patience": 2},
        {"kind": "target", "of_teacher": 0.98},
        {"kind": "target", "value": 0.5},
    ]
    stages = [
        {"name": f"s{number}", "eval": {"every": 1, "prompts": 2, "teachers": True, "early_stop": rule}}
        for number, rule in enumerate(rules)
    ]
    tokens = {"name": "s3", "train": {"steps": 50, "tokens": 200}}
    text = mermaid(load_recipe(recipe(*stages, tokens)))
    ends = re.findall(r'"s[0-9]: direct, (.*)"]', text)
    assert ends == [
        "1 steps or 2 evaluations without a better one",
        "1 steps or 0.98 of the teachers",
        "1 steps or a score of 0.5",
        "50 steps or 200 tokens",
    ]


def test_the_command_line_draws_and_rejects() -> None:
    found = CliRunner().invoke(cli.app, ["graph", "labs/two-rounds", "stages.merged-1.train.steps=7"])
    assert found.exit_code == 0
    assert 's3["merged-1: direct, 7 steps"]' in found.stdout
    refused = CliRunner().invoke(cli.app, ["run", "labs/two-rounds", "--from", "merged-1"])
    assert isinstance(refused.exception, RecipeError)
    assert "needs stage 'arithmetic-1'" in str(refused.exception)


@pytest.mark.parametrize("name", LABS)
def test_a_lab_says_what_is_known_and_reads(name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    for word in ("# Reported: ", "# Public: ", "chose"):
        assert word in text.partition("\nstudent:")[0]
    read = load_recipe(name)
    assert len(read.stages) > 2
    assert all(stage.device == "cpu" for stage in read.stages)
    assert any(
        edge.label != "starts" or stage.student.model != "stage:" for stage in read.stages for edge in edges(stage)
    )


def measures(value: float) -> Measures:
    return Measures(n=100, greedy=value, greedy_stderr=0.02)


def result(name: str, before: dict[str, float], *later: dict[str, float]) -> StageResult:
    found = StageResult(name, before={domain: measures(value) for domain, value in before.items()})
    found.history = [{"step": number, **values} for number, values in enumerate(later, start=1)]
    found.after = {domain: measures(value) for domain, value in later[-1].items()}
    return found


def test_domains_are_selected_by_what_an_earlier_stage_came_to() -> None:
    assert Flattened(stage="x").chooses([0.5, 0.8, 0.805])
    assert not Flattened(stage="x").chooses([0.5, 0.8, 0.9])
    assert Flattened(stage="x", evaluations=2, gain=0.2).chooses([0.5, 0.6, 0.7])
    assert not ScoreBetween(stage="x", least=0.2, most=0.9).chooses([0.5, 0.95])
    prompts = [{"source": "task:addition", "domain": "a"}, {"source": "task:sort", "domain": "b"}]
    teachers = {"t": None, "a": "x", "b": "y"}
    second = {"name": "two", "select": {"stage": "one"}, "teachers": teachers}
    stage = load_recipe(
        recipe({"name": "one"}, second, prompts=prompts, teachers={"t": {"model": "z", "domains": ["a", "b"]}})
    ).stages[1]
    chosen = selected(stage, [result("one", {"a": 0.1, "b": 0.1}, {"a": 0.6, "b": 0.6}, {"a": 0.6, "b": 0.9})])
    assert chosen == Selected("one", ["a"], ["b"])
    assert chosen.in_words() == "trains on a; b is left out, according to the evaluations of one"
    assert (
        Selected("one", ["a", "b"], []).in_words()
        == "trains on a, b; nothing is left out, according to the evaluations of one"
    )
    left = narrowed(stage, chosen)
    assert left is not None
    assert [source.domain for source in left.prompts] == ["a"]
    assert list(left.teachers) == ["a"]
    assert [source.domain for source in left.eval.further] == ["b"]
    none = selected(stage, [result("one", {"a": 0.1, "b": 0.1}, {"a": 0.6, "b": 0.9})])
    assert none == Selected("one", [], ["a", "b"])
    assert narrowed(stage, none) is None
    first = load_recipe(recipe({"name": "one"})).stages[0]
    assert narrowed(first, selected(first, [])) is first
    with pytest.raises(RecipeError, match="does not evaluate b"):
        selected(stage, [result("one", {"a": 0.1}, {"a": 0.6})])


def test_the_story_tells_what_was_gained_lost_and_kept() -> None:
    read = load_recipe(recipe({"name": "one"}, {"name": "two"}))
    one = result("one", {"a": 0.2, "b": 0.9, "c": 0.5}, {"a": 0.8, "b": 0.4, "c": 0.53})
    story = story_of(read, [one])
    assert story[0]["from"] == ["tiny/generalist"]
    assert {domain: found["what"] for domain, found in story[0]["domains"].items()} == {
        "a": "gained",
        "c": "kept",
        "b": "lost",
    }
    assert story_lines(story)[1:] == [
        "one, from tiny/generalist",
        "  gained a 20.0% to 80.0% (+60.0%)",
        "  lost   b 90.0% to 40.0% (-50.0%)",
        "  kept   c 50.0% to 53.0% (+3.0%)",
    ]
    assert story_of(load_recipe(recipe({"name": "one"})), [one]) == []


def test_a_key_tells_which_file_is_which_and_callables_have_none(tmp_path: Path) -> None:
    read = load_recipe(recipe({"name": "one"}))
    facts = [{"for": "prompts", "sha256": digest} for digest in ("aa", "bb")]
    inputs = [{"one": dict(zip(names, facts, strict=True))} for names in (("x", "y"), ("y", "x"))]
    keys = [stage_keys(read, found, version) for found in inputs for version in ("1.0", "2.0")]
    assert len({key["one"] for key in keys}) == 4
    rewarded = with_rewards(read, lambda sample: 1.0)
    with pytest.raises(UserError, match="Python callables, whose code no key covers"):
        reuse_stages(rewarded, {"one": {}}, tmp_path, [tmp_path], [], print)


def test_the_version_changes_with_what_a_run_computes_by_and_with_nothing_else(tmp_path: Path) -> None:
    package = Path(opd.__file__).parent
    assert this_version() == f"{opd.__version__}+{source_hash(package)}"
    for path in ("loop/step.py", "report/page.py", "cli.py", "recipes/quickstart.yaml"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes((package / path).read_bytes())
    before = source_hash(tmp_path)
    for path in ("report/page.py", "cli.py", "recipes/quickstart.yaml"):
        (tmp_path / path).write_text("another")
    (tmp_path / "loop" / "step.pyc").write_text("compiled")
    assert source_hash(tmp_path) == before
    (tmp_path / "loop" / "step.py").rename(tmp_path / "loop" / "leap.py")
    renamed = source_hash(tmp_path)
    (tmp_path / "loop" / "leap.py").write_text("another")
    assert len({before, renamed, source_hash(tmp_path)}) == 3


@pytest.mark.slow
def test_parts_of_a_pipeline_and_stages_of_another_run(tmp_path: Path) -> None:
    """Two stages, then the third; then another run that takes over what has not changed."""
    student = save_tiny(tmp_path / "student")
    teacher = save_tiny(tmp_path / "teacher", seed=1)
    stages = [
        {"name": "one"},
        {"name": "side", "student": student, "train": {"steps": 5, "tokens": 7}},
        {"name": "last", "student": "stage:one"},
    ]
    changes = recipe(*stages, student=student, teachers={"t": teacher})
    first = opd.run(changes, out=tmp_path / "first", until="side")
    assert first.summary["status"] == "partial"
    with pytest.raises(RecipeError, match="'last' is not finished"):
        load_recipe(recipe({"name": "x"}, teachers={"t": f"run:{tmp_path}/first"}))
    assert [stage["name"] for stage in first.summary["stages"]] == ["one", "side"]
    assert 7 <= first.summary["stages"][1]["tokens"] < 7 + 6  # two answers of three tokens at most
    first = opd.resume(tmp_path / "first")
    assert first.summary["status"] == "done"
    assert [chapter["stage"] for chapter in first.summary["story"]] == ["one", "side", "last"]
    assert (tmp_path / "first/graph.mmd").read_text().startswith("flowchart")
    for name, stage in ((f"run:{tmp_path}/first", "last"), (f"run:{tmp_path}/first#one", "one")):
        read = load_recipe(recipe({"name": "x"}, student=name)).stages[0].student.model
        assert read == str(tmp_path / f"first/checkpoints/{stage}/step-000001")
    for name, what in (("first#three", "has no stage 'three'; it has one"), ("student", "not a run directory")):
        with pytest.raises(RecipeError, match=what):
            load_recipe(recipe({"name": "x"}, student=f"run:{tmp_path}/{name}"))

    alarm = {
        "step": 1,
        "stage": "one",
        "monitor": "kl",
        "words": "far",
        "remedy": "less",
        "recipe": "r.yaml",
        "changes": [],
        "command": "x",
    }
    with (tmp_path / "first/monitors.jsonl").open("a", encoding="utf-8") as file:
        file.write(line_of(alarm))
    changes["stages"][1]["train"]["tokens"] = 1  # of one stage, on which nothing depends
    lines: list[int] = []
    second = opd.run(
        changes, out=tmp_path / "second", reuse=[tmp_path / "first"], on_step=lambda run, line: lines.append(run.step)
    )
    assert second.summary["status"] == "done"
    assert lines == [1]
    reused = [(tmp_path / f"second/checkpoints/{name}/reused.json").exists() for name in ("one", "side", "last")]
    assert reused == [True, False, True]
    weights = "checkpoints/last/step-000001/model.safetensors"
    assert (tmp_path / "second" / weights).samefile(tmp_path / "first" / weights)
    assert {line["stage"] for line in second.metrics} == {"one", "side", "last"}
    taken = [line for line in second.monitors if line["words"] == "far"]  # whose recipe is not taken with it
    assert [(line["recipe"], line["changes"], line["command"]) for line in taken] == [(None, None, None)]
    assert opd.resume(tmp_path / "second").summary["status"] == "done"
    (tmp_path / "broken/metrics.jsonl").mkdir(parents=True)  # so that taking a stage ends half-way
    with pytest.raises(IsADirectoryError):
        _copy_stage(EarlierStages(tmp_path / "first"), "one", "one", tmp_path / "broken")
    assert not (tmp_path / "broken/checkpoints/one").exists()

    third = opd.run(changes, out=tmp_path / "third", reuse=[tmp_path / "second"], only="last")
    assert third.summary["status"] == "done"  # with what the second had
    assert not (tmp_path / "third/checkpoints/last/reused.json").exists()
    assert (tmp_path / "third/checkpoints/one/reused.json").exists()
    told = json.dumps(third.summary["stages"][-1]["evals"])
    assert told == json.dumps(second.summary["stages"][-1]["evals"])
    (tmp_path / "teacher/config.json").write_text((tmp_path / "teacher/config.json").read_text() + "\n")
    with pytest.raises(RecipeError, match=r"'one'.*left out and not finished here"):
        opd.run(changes, out=tmp_path / "fourth", reuse=[tmp_path / "second"], only="last")
    assert not (tmp_path / "fourth").exists()


def test_why_a_finished_stage_of_another_run_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student, teacher = save_tiny(tmp_path / "student"), save_tiny(tmp_path / "teacher", seed=1)
    wanted = recipe({"name": "one"}, {"name": "two"}, student=student, teachers={"t": teacher})
    opd.run(wanted, out=tmp_path / "first")
    (tmp_path / "teacher/config.json").write_text((tmp_path / "teacher/config.json").read_text() + "\n")
    wanted["stages"][0]["train"] = {"lr": 0.5}
    capsys.readouterr()
    with pytest.raises(RecipeError, match=r"'one'.*with the same settings and inputs"):
        opd.run(wanted, out=tmp_path / "second", reuse=[tmp_path / "first"], only="two", quiet=False)
    said = "".join(capsys.readouterr().out.split())  # however lines are broken
    assert f"one:finishedin{tmp_path}/first,butdifferenthere:train.lr,{tmp_path}/teacher/config.json" in said
    one, two = load_recipe(tmp_path / "first/resolved.yaml").stages
    run = EarlierStages(tmp_path / "first")
    assert run.difference(two, run._inputs["two"]) == "a stage that it depends on differs"
    assert run.difference(one.model_copy(update={"name": "new"}), run._inputs["one"]) == ""


@pytest.mark.slow
def test_a_stage_that_is_passed_over_is_finished(tmp_path: Path) -> None:
    """Nothing is chosen for `polish`, alone or merged: what it starts from comes out of it, here, later and elsewhere."""
    student = save_tiny(tmp_path / "student")
    none = {"select": {"stage": "one", "kind": "score", "least": 1, "most": 1}}
    stages = [
        {"name": "one"},
        {"name": "polish", **none},
        {"name": "merged", **none, "student": {"merge": {"models": [student, "stage:polish"]}}},
        {"name": "last", "student": "stage:polish"},
        {"name": "end", "student": "stage:merged"},
    ]
    changes = recipe(*stages, student=student, teachers={"t": save_tiny(tmp_path / "teacher", seed=1)})
    where = tmp_path / "first"
    assert opd.run(changes, out=where, until="merged").summary["status"] == "partial"
    one = str(where / "checkpoints/one/step-000001")
    for stage, model in (("polish", one), ("merged", str(where / "merged/merged"))):
        assert load_recipe(recipe({"name": "x"}, student=f"run:{where}#{stage}")).stages[0].student.model == model
    assert opd.resume(where, only="end").summary["status"] == "partial"
    done = opd.resume(where)
    assert done.summary["status"] == "done"
    assert [chapter["stage"] for chapter in done.summary["story"]] == ["one", "polish", "merged", "last", "end"]
    log = (where / "log.txt").read_text(encoding="utf-8")
    assert "polish, from stage:one" in log
    for model in ("stage:one", "merged/merged"):
        assert f"passed over: no domain is chosen, according to the evaluations of one; its output is {model}" in log
    steps: list[int] = []
    opd.resume(where, on_step=lambda run, line: steps.append(run.step))
    assert steps == []
    second = opd.run(changes, out=tmp_path / "second", reuse=[where], start="last")
    assert second.summary["status"] == "done"
    assert (tmp_path / "second/checkpoints/merged/reused.json").exists()
    assert opd.resume(tmp_path / "second").summary["status"] == "done"
    assert [chapter["stage"] for chapter in second.summary["story"]] == ["one", "polish", "merged", "last", "end"]
    (where / "summary.json").unlink()
    for name in ("polish", "merged"):  # as runs wrote it that did not note why
        ended = read_sealed(where / f"checkpoints/{name}/result.json")
        for key in ("selected", "passed_over"):
            del ended["result"][key]
        write_sealed(where / f"checkpoints/{name}/result.json", ended)
    told = story_lines(opd.resume(where).summary["story"])
    assert told[told.index("polish, from stage:one") + 1] == "  passed over; its output is stage:one"


def test_what_is_finished_is_run_again_and_kept_by_another_run_alone(tmp_path: Path) -> None:
    """`resume` says so of a stage that is named, and of inputs that have changed; what it advises works."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1=", "answer": "1"}) + "\n" for number in range(40)))
    stages = [{"name": "one"}, {"name": "two", "prompts": str(rows)}]
    models = {"student": save_tiny(tmp_path / "student"), "teachers": {"t": save_tiny(tmp_path / "teacher", seed=1)}}
    where = tmp_path / "run"
    opd.run(recipe(*stages, **models), out=where, until="one")
    with pytest.raises(UserError, match=r"--only 'one': finished in .*run: one. To run it again"):
        opd.resume(where, only="one")
    text = rows.read_text()
    rows.write_text(text.replace("1+1", "1+2"))
    again = f"opd run {where}/resolved.yaml --reuse {where}"
    with pytest.raises(UserError, match=rf"rows.jsonl .prompts. has changed.* start a new run: {again}$"):
        opd.resume(where)
    told = CliRunner().invoke(cli.app, [*again.split()[1:], "--out", str(tmp_path / "other")], catch_exceptions=False)
    assert told.exit_code == 0
    reused = [(tmp_path / f"other/checkpoints/{name}/reused.json").exists() for name in ("one", "two")]
    assert reused == [True, False]
    rows.write_text(text)
    assert opd.resume(where, start="two").summary["status"] == "done"
    for asked in ({"only": "two"}, {"start": "two"}):
        with pytest.raises(UserError, match=rf"finished in .*run: two. .*{again} --from two$"):
            opd.resume(where, **asked)
    assert opd.resume(where).summary["status"] == opd.resume(where, until="one").summary["status"] == "done"
    kept = opd.run(
        recipe(*stages, **models), out=where, resume=True, only="two"
    )  # as a job script calls it, again and again
    assert kept.summary["status"] == "done"


def test_the_selection_is_reported(tmp_path: Path) -> None:
    """When the stage begins, and in the story; by a run that was resumed, too."""
    prompts = [{"source": "task:addition", "domain": "a"}, {"source": "task:sort", "domain": "b"}]
    stages = [{"name": "one"}, {"name": "polish", "select": {"stage": "one", "kind": "score", "most": 0.5}}]
    models = {"student": save_tiny(tmp_path / "student"), "teachers": {"t": save_tiny(tmp_path / "teacher", seed=1)}}
    rewards = {"a": lambda sample: 0.0, "b": lambda sample: 1.0}
    where, words = tmp_path / "run", "trains on a; b is left out, according to the evaluations of one"
    run = opd.run(recipe(*stages, prompts=prompts, **models), out=where, rewards=rewards)
    assert run.summary["story"][1]["selected"] == {"by": "one", "chosen": ["a"], "left_out": ["b"]}
    log = (where / "log.txt").read_text(encoding="utf-8")
    assert f"polish: {words}\n" in log
    assert "polish, from stage:one\n" in log
    assert log.count(words) == 2
    assert list(run.summary["stages"][1]["evals"]) == ["a", "b"]
    (where / "summary.json").unlink()
    assert opd.resume(where, rewards=rewards).summary["story"] == run.summary["story"]
