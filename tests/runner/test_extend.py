"""Runs that are changed after they have begun: extended when finished, changed on the way, and killed while that is written down."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import opd
from opd.common.errors import RecipeError, RunDirectoryError
from opd.common.files import read_sealed
from opd.evaluation import Measures
from opd.loop.learner import learning_rate
from opd.recipe import load_recipe
from opd.recipe.run_changes import changed_keys, changed_text, changes_of, recipe_file
from opd.recipe.stage import Stage, Train
from opd.report.facts import run_facts
from opd.runner.extend import CHANGEABLE, EVERY_KEY, WHY, as_overrides
from opd.runner.results import StageResult
from opd.runner.run import verified_recipe
from tests.support.crash import RECIPE, killed, same_rollouts, same_run, same_weights, settled, written
from tests.support.helpers import save_tiny
from tests.support.interrupted import Crash, small, strike


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}


def trained(steps: int, **more: Any) -> dict[str, Any]:
    return {"steps": steps, "lr": 1e-2, **more}


@pytest.fixture(scope="module")
def ten(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of ten steps, to be copied."""
    return opd.run(small(models, train=trained(10)), out=tmp_path_factory.mktemp("ten") / "run").directory


@pytest.fixture(scope="module")
def twenty(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> opd.Run:
    """The same of twenty steps, begun at once."""
    return opd.run(small(models, train=trained(20)), out=tmp_path_factory.mktemp("twenty") / "run")


def copied(run: Path, where: Path) -> Path:
    shutil.copytree(run, where, symlinks=True)
    return where


def as_begun_at_once(run: opd.Run, reference: opd.Run) -> None:
    """Bit for bit. Only `best` knows of the evaluation at the end of the first part, which the reference did not have."""
    assert run.summary["status"] == "done"
    for ours, theirs in zip(run.summary["stages"], reference.summary["stages"], strict=True):
        assert {**ours, "seconds": 0, "best": None} == {**theirs, "seconds": 0, "best": None}
    same_rollouts(run, reference)
    assert settled(run.metrics) == settled(reference.metrics)
    assert settled(run.samples) == settled(reference.samples)
    same_weights(run, reference)


def test_a_finished_run_is_extended_as_if_begun_at_once(ten: Path, twenty: opd.Run, tmp_path: Path) -> None:
    directory = copied(ten, tmp_path / "run")
    began = (directory / "resolved.yaml").read_bytes()
    run = opd.resume(directory, overrides=["train.steps=20"])
    as_begun_at_once(run, twenty)
    assert (directory / "resolved.yaml").read_bytes() == began
    assert verified_recipe(directory).stages == load_recipe(twenty.directory / "resolved.yaml").stages
    assert verified_recipe(directory, begun=True).stages[0].train.steps == 10
    (change,) = changes_of(directory)
    part = change["stages"]["main"]
    assert (change["recipe"], part["after"], part["keys"]) == ("resolved-2.yaml", 10, {"train.steps": [10, 20]})
    assert part["result"]["after"]  # what the first part had ended with
    assert {line["step"] for line in run.answers} == {0, 10, 20}
    assert run.summary["changes"] == [
        {
            "stage": "main",
            "after": 10,
            "keys": {"train.steps": [10, 20]},
            "lr": [0.01, 0.01],
            "schedule": "constant over 20 steps",
        }
    ]
    assert "Changed during the run: after step 10: train.steps 10 → 20;" in run_facts(directory)["words"]
    assert run_facts(directory)["stages"][0]["planned"] == 20
    before = (directory / "run.json").read_bytes()
    assert opd.resume(directory, overrides=["train.steps=20"]).metrics == run.metrics  # it is so already
    assert (directory / "run.json").read_bytes() == before
    opd.resume(directory, overrides=["stages.main.train.steps=21", "log.samples=1"])
    assert [one["recipe"] for one in changes_of(directory)] == ["resolved-2.yaml", "resolved-3.yaml"]
    assert len(opd.Run(directory).metrics) == 21


def test_an_evaluation_that_was_due_counts_for_what_comes(models: dict[str, str], tmp_path: Path) -> None:
    """Of a run that evaluates every two steps, the one at its end is the one on the way of a longer run."""
    waits = {"coefficient": {"value": 1.0, "until": "plateau"}}
    spec = small(models, eval={"prompts": 2, "every": 2, "plateau": 1}, objective=[{"form": "direct"}, waits])
    reference = opd.run(spec | {"train": trained(8)}, out=tmp_path / "reference")
    opd.run(spec | {"train": trained(4)}, out=tmp_path / "run")
    run = opd.resume(tmp_path / "run", overrides=["train.steps=8"])
    ours, theirs = (one.summary["stages"][0] for one in (run, reference))
    assert {**ours, "seconds": 0, "best": None} == {**theirs, "seconds": 0, "best": None}
    results = [read_sealed(one.directory / "checkpoints/main/result.json")["result"] for one in (run, reference)]
    assert results[0]["history"] == results[1]["history"]
    assert results[0]["plateau"] == results[1]["plateau"] is not None
    same_weights(run, reference)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_schedule_is_computed_for_the_new_number_of_steps(
    models: dict[str, str], tmp_path: Path, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = small(models, eval={"prompts": 0}, train=trained(3, warmup=2, schedule=schedule))
    opd.run(spec, out=tmp_path / "run")
    run = opd.resume(tmp_path / "run", overrides=["train.steps=6"], quiet=False)
    short, long = (Train(steps=steps, lr=1e-2, warmup=2, schedule=schedule) for steps in (3, 6))
    wanted = [learning_rate(step, short if step <= 3 else long) for step in range(1, 7)]
    assert [line["lr"] for line in run.metrics] == pytest.approx(wanted, rel=1e-12)
    said = "".join(capsys.readouterr().out.split())  # however lines are broken
    rates = f"learningrate{wanted[2]:.6g}atstep3,{wanted[3]:.6g}atstep4({schedule}over6steps)"
    assert f"changedafterstep3:train.steps3→6;{rates}" in said
    assert rates in "".join((tmp_path / "run/log.txt").read_text().split())


def test_an_interrupted_run_changes_from_its_checkpoint_on(
    models: dict[str, str], ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, "opd.runner.pipeline:run_step", 8, Crash)
    with pytest.raises(Crash):
        opd.run(small(models, train=trained(10)), out=tmp_path / "run")
    monkeypatch.undo()
    for override, what in (("train.steps=6", r"train\.steps 6: 7 steps are done"),):
        with pytest.raises(RecipeError, match=what):
            opd.resume(tmp_path / "run", overrides=[override])
    run = opd.resume(tmp_path / "run", overrides=["train.lr=1e-3", "train.steps=9", "checkpoint.keep=5"])
    assert [line["lr"] for line in run.metrics] == [1e-2] * 7 + [1e-3] * 2
    assert settled(run.metrics)[:7] == settled(opd.Run(ten).metrics)[:7]
    (change,) = changes_of(run.directory)
    assert change["stages"]["main"]["after"] == 7
    assert len(run.checkpoints) >= 3  # 2 were kept before


def test_a_damaged_checkpoint_takes_the_record_back_with_it(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike(monkeypatch, "opd.runner.pipeline:run_step", 5, Crash)
    with pytest.raises(Crash):
        opd.run(small(models, train=trained(6)), out=tmp_path / "run")
    monkeypatch.undo()
    strike(monkeypatch, "opd.runner.pipeline:run_step", 1, Crash)
    with pytest.raises(Crash):
        opd.resume(tmp_path / "run", overrides=["train.lr=1e-3"])
    monkeypatch.undo()
    assert changes_of(tmp_path / "run")[0]["stages"]["main"]["after"] == 4
    (tmp_path / "run/checkpoints/main/step-000004/model.safetensors").write_bytes(b"gone")
    run = opd.resume(tmp_path / "run")
    assert [line["lr"] for line in run.metrics] == [1e-2] * 3 + [1e-3] * 3
    assert changes_of(run.directory)[0]["stages"]["main"]["after"] == 3


MOMENTS = {  # where a process that extends a run may die; whether it is extended then
    ("opd.runner.extend:find_resume_points", 1): False,
    ("opd.runner.extend:write_atomic", 1): False,
    ("opd.runner.extend:changed_text", 1): False,
    ("opd.runner.extend:sync", 1): False,
    ("opd.runner.extend:write_sealed", 1): False,
    ("opd.runner.run:_continue_run", 1): True,
    ("opd.runner.pipeline:find_resume_points", 1): True,
    ("opd.runner.pipeline:cut_lines", 2): True,
    ("opd.runner.pipeline:restore", 1): True,
    ("opd.runner.pipeline:run_step", 1): True,
    ("opd.runner.pipeline:run_step", 4): True,
    ("opd.runner.pipeline:write_result", 1): True,
}


@pytest.mark.parametrize(("moment", "extended"), MOMENTS.items(), ids=str)
def test_a_kill_leaves_the_run_as_it_was_or_extended(
    ten: Path, twenty: opd.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: tuple[str, int], extended: bool
) -> None:
    directory = copied(ten, tmp_path / "run")
    strike(monkeypatch, *moment, Crash)
    with pytest.raises(Crash):
        opd.resume(directory, overrides=["train.steps=20"])
    monkeypatch.undo()
    run = opd.resume(directory)  # without a word of what was asked for
    if extended:
        as_begun_at_once(run, twenty)
        return
    same_run(run, opd.Run(ten))
    as_begun_at_once(opd.resume(directory, overrides=["train.steps=20"]), twenty)


def test_what_a_killed_extension_left_is_replaced(ten: Path, tmp_path: Path) -> None:
    directory = copied(ten, tmp_path / "run")
    (directory / "resolved-2.yaml").write_text("name: cut")
    partial = directory / ".resolved-2.yaml.0123456789abcdef.partial"
    partial.write_text("na")
    opd.resume(directory, overrides=["train.steps=11"])
    assert verified_recipe(directory).stages[0].train.steps == 11
    assert not partial.exists()


def test_a_checkpoint_holds_what_was_known_when_it_was_saved() -> None:
    """It is written in the background, while the last evaluation is noted."""
    result = StageResult("main")
    state = result.state()
    result.note_evaluation(10, {"a": Measures(1, greedy=0.5)}, 0.5)
    assert (len(result.history), state["history"]) == (1, [])


@pytest.mark.slow
def test_kill_9_while_a_run_is_extended(tmp_path: Path) -> None:
    draw = random.Random(str(tmp_path))
    recipe = RECIPE | {"train": {**RECIPE["train"], "schedule": "constant"}, "eval": {"prompts": 0}}
    reference = opd.run(recipe, out=tmp_path / "reference")
    opd.run(recipe, overrides=["train.steps=3"], out=tmp_path / "run")
    total = written(reference.directory)
    for _ in range(3):
        killed(tmp_path / "out.txt", tmp_path / "run", total, draw, "resume", tmp_path / "run", "train.steps=6")
    as_begun_at_once(opd.resume(tmp_path / "run", overrides=["train.steps=6"]), reference)


FIXED = [
    ("student=other", "student.model"),
    ("student.gradient_checkpointing=true", "student.gradient_checkpointing"),
    ("teachers.a.kind=self", "teachers.a"),
    ("prompts.0.share=2", "prompts"),
    ("rollout.samples=3", "rollout.samples 1 → 3"),
    ("objective.0.form=policy_gradient", "objective"),
    ("sampler.slots=9", "sampler.slots 4 → 9"),
    ("seed=7", "seed 0 → 7"),
    ("train.epochs=2", "train.epochs 1 → 2"),
    ("train.betas=[0.5, 0.5]", "train.betas"),
    ("eval.k=2", "eval.k 0 → 2"),
    ("eval.further=task:reverse", "eval.further"),
    ("store.hidden=true", "store.hidden"),
    ("log.start_table=false", "log.start_table"),
    ("threads=2", "threads null → 2"),
]


def test_what_the_steps_so_far_depend_on_is_rejected_by_name(ten: Path, tmp_path: Path) -> None:
    directory = copied(ten, tmp_path / "run")
    before = {path: path.read_bytes() for path in directory.glob("*.*")}
    for override, named in FIXED:
        with pytest.raises(RecipeError, match="a run that has begun cannot change") as refused:
            opd.resume(directory, overrides=["train.steps=20", override])
        told = str(refused.value)
        assert named in told
        assert f"opd run {directory / 'resolved.yaml'} " in told
        assert ("checkpoints/main/step-000010" in told) == (not override.startswith("student"))
    for override, what in {
        "name=other": "name cannot change",
        "stages.main.name=other": "keep their names",
        "train.steps": "expected KEY=VALUE",
        "train.stepz=3": "Did you mean 'steps'",
        "train.lr=0": "train.lr",
        "train.steps=9": "10 steps are done, and steps cannot be undone",
        "train.lr=1e-3": "finished after step 10, so this changes nothing. Raise train.steps above 10",
    }.items():
        with pytest.raises(RecipeError, match=re.escape(what)):
            opd.resume(directory, overrides=[override])
    assert {path: path.read_bytes() for path in directory.glob("*.*")} == before


def test_every_key_of_a_stage_may_change_or_says_why_not() -> None:
    sections = set(Stage.model_fields)
    assert set(WHY) | EVERY_KEY == sections
    assert not set(WHY) & EVERY_KEY
    for section, keys in CHANGEABLE.items():
        assert keys <= set(Stage.model_fields[section].annotation.model_fields)  # type: ignore[union-attr]


def test_the_command_that_is_advised_works(ten: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Start a new run, for example") as refused:
        opd.resume(copied(ten, tmp_path / "run"), overrides=["rollout.samples=2"])
    _, _, recipe, *overrides = str(refused.value).rpartition(": ")[2].split()
    run = opd.run(recipe, overrides=[*overrides, "stages.main.train.steps=1"], out=tmp_path / "new")
    assert run.summary["status"] == "done"
    assert verified_recipe(run.directory).stages[0].rollout.samples == 2


def test_evaluation_cannot_begin_halfway(models: dict[str, str], tmp_path: Path) -> None:
    opd.run(small(models, train=trained(1), eval={"prompts": 0}), out=tmp_path / "run")
    with pytest.raises(RecipeError, match="the student before training was not measured"):
        opd.resume(tmp_path / "run", overrides=["eval.prompts=2", "train.steps=2"])
    run = opd.resume(tmp_path / "run", overrides=["log.samples=1", "train.steps=2"])
    assert len(run.metrics) == 2


def test_a_stage_that_ended_early_continues_if_the_reason_is_removed(models: dict[str, str], tmp_path: Path) -> None:
    opd.run(small(models, train=trained(9, tokens=30)), out=tmp_path / "run")
    done = len(opd.Run(tmp_path / "run").metrics)
    assert 0 < done < 4
    with pytest.raises(RecipeError, match="token budget is used up"):
        opd.resume(tmp_path / "run", overrides=["train.steps=20"])
    run = opd.resume(tmp_path / "run", overrides=["train.tokens=null", "train.steps=4"])
    assert len(run.metrics) == 4


def test_a_job_script_names_what_differs(ten: Path, models: dict[str, str], tmp_path: Path) -> None:
    """`--resume` with another recipe says which keys, and how to change them where that is possible."""
    directory, spec = copied(ten, tmp_path / "run"), small(models, train=trained(10))
    with pytest.raises(RunDirectoryError, match=r"different recipe.*: seed 0 → 7\. To continue that one") as refused:
        opd.run(spec | {"seed": 7}, out=directory, resume=True)
    assert "To change it" not in str(refused.value)
    with pytest.raises(RunDirectoryError, match=r"train\.steps 10 → 11; train\.lr 0\.01 → 0\.02\.") as refused:
        opd.run(spec | {"train": {"steps": 11, "lr": 2e-2}}, out=directory, resume=True)
    assert f"To change it: opd resume {directory} train.steps=11 train.lr=0.02." in str(refused.value)
    with pytest.raises(RunDirectoryError, match=r"stages \[\"main\"\] → \[\"one\"\]"):
        opd.run({**spec, "stages": [{"name": "one"}]}, out=directory, resume=True)
    opd.resume(directory, overrides=["train.steps=11"])
    for steps in (10, 11):  # the script that began the run, and one that was changed with it
        assert len(opd.run(spec | {"train": trained(steps)}, out=directory, resume=True).metrics) == 11
    with pytest.raises(RunDirectoryError, match=r"train\.steps 11 → 12"):
        opd.run(spec | {"train": trained(12)}, out=directory, resume=True)


@pytest.mark.slow
def test_a_pipeline_names_the_stage_and_rebuilds_nothing(models: dict[str, str], tmp_path: Path) -> None:
    stages = [{"name": "one"}, {"name": "side", "student": models["student"]}, {"name": "two", "student": "stage:one"}]
    spec = {**small(models, train=trained(2), checkpoint={"every": 0}), "stages": stages}
    first = opd.run(spec, out=tmp_path / "first", until="side")
    with pytest.raises(RecipeError, match=r"stages one, side, two\. Name one: stages\.one\.train\.steps=3"):
        opd.resume(first.directory, overrides=["train.steps=3"])
    opd.resume(first.directory, overrides=["log.project=mine"], until="side")  # of all stages
    assert {stage.log.project for stage in verified_recipe(first.directory).stages} == {"mine"}
    opd.resume(first.directory, overrides=["stages.one.train.steps=3"], until="side")  # nothing was built on it yet
    assert [stage["steps"] for stage in opd.Run(first.directory).summary["stages"]] == [3, 2]
    run = opd.resume(first.directory, overrides=["stages.two.train.lr=1e-3"])
    assert [line["lr"] for line in run.metrics if line["stage"] == "two"] == [1e-3] * 2
    longer = {
        **spec,
        "log": {"project": "mine"},
        "stages": [{**stages[0], "train": {"steps": 3}}, stages[1], {**stages[2], "train": {"lr": 1e-3}}],
    }
    same_weights_by_stage(run, opd.run(longer, out=tmp_path / "at-once"))

    before = (run.directory / "run.json").read_bytes()
    with pytest.raises(RecipeError, match=r"'one'.*two began with the model that one ended with") as refused:
        opd.resume(run.directory, overrides=["stages.one.train.steps=4"])
    assert (run.directory / "run.json").read_bytes() == before
    assert "stages.one.train.steps=4 --reuse" in str(refused.value)
    again = opd.run(
        recipe_file(run.directory), overrides=["stages.one.train.steps=4"], reuse=[run.directory], out=tmp_path / "new"
    )
    reused = [(again.directory / f"checkpoints/{name}/reused.json").exists() for name in ("one", "side", "two")]
    assert reused == [False, True, False]
    with pytest.raises(RecipeError, match=r"was taken from .*first.*Extend it there"):
        opd.resume(again.directory, overrides=["stages.side.train.steps=4"])
    opd.resume(run.directory, overrides=["stages.side.train.steps=3"])  # two has nothing of it


def same_weights_by_stage(run: opd.Run, reference: opd.Run) -> None:
    for stage in ("one", "side", "two"):
        ours, theirs = (one.directory / "checkpoints" / stage for one in (run, reference))
        (last,) = (sorted(path.name for path in theirs.glob("step-*"))[-1:],)
        (name,) = last
        assert (ours / name / "model.safetensors").read_bytes() == (theirs / name / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_changed_stage_is_reused_where_it_came_to_the_same(
    ten: Path, models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer, slower = copied(ten, tmp_path / "longer"), copied(ten, tmp_path / "slower")
    opd.resume(longer, overrides=["train.steps=12"])
    opd.resume(slower, overrides=["train.steps=12", "train.lr=1e-3"])
    opd.run(small(models, train=trained(12)), out=tmp_path / "a", reuse=[longer])
    assert (tmp_path / "a/checkpoints/main/reused.json").exists()
    changed = small(models, train=trained(12, lr=1e-3))
    opd.run(changed, out=tmp_path / "b", reuse=[slower], quiet=False)
    assert not (tmp_path / "b/checkpoints/main/reused.json").exists()
    assert "itssettingswerechangedwhileitran" in "".join(capsys.readouterr().out.split())


def test_a_changed_recipe_is_sealed_and_written_again_where_it_was_cut(ten: Path, tmp_path: Path) -> None:
    directory = copied(ten, tmp_path / "run")
    opd.resume(directory, overrides=["train.steps=11"])
    whole = (directory / "resolved-2.yaml").read_bytes()
    (directory / "resolved-2.yaml").write_bytes(whole[:100])
    assert verified_recipe(directory).stages[0].train.steps == 11
    assert (directory / "resolved-2.yaml").read_bytes() == whole
    (directory / "resolved-2.yaml").write_bytes(whole.replace(b"steps: 11", b"steps: 12"))
    with pytest.raises(RunDirectoryError, match=r"resolved-2\.yaml has been altered"):
        opd.resume(directory)


PLUGIN = """
import numpy as np
import opd
from opd.objective.gates import Gate


@opd.register
class Odd(Gate):
    name = "odd_tokens"

    def factors(self, view):
        return [np.arange(rollout.response_ids.size) % 2.0 for rollout in view.rollouts]
"""


def test_a_run_with_plugins_and_given_prompts_is_extended_and_may_move(models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(40)]
    spec = small(models, train=trained(1), teachers=models["teacher"], rewards="exact")
    del spec["prompts"]
    spec |= {"plugins": [str(tmp_path / "mine.py")], "objective": {"form": "direct", "gate": "odd_tokens"}}
    opd.run(spec, prompts=rows, out=tmp_path / "run")
    opd.resume(tmp_path / "run", overrides=["train.steps=2"])
    text = (tmp_path / "run/resolved-2.yaml").read_text()
    assert "plugins/mine.py" in text
    assert f"{tmp_path}/run" not in text
    (tmp_path / "run").rename(tmp_path / "moved")
    assert len(opd.resume(tmp_path / "moved", overrides=["train.steps=3"]).metrics) == 3


def test_the_command_line_extends(ten: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from opd.cli import app

    directory = copied(ten, tmp_path / "run")
    done = CliRunner().invoke(app, ["resume", str(directory), "train.steps=11"])
    assert done.exit_code == 0, done.output
    assert len(opd.Run(directory).metrics) == 11
    refused = CliRunner().invoke(app, ["resume", str(directory), "seed=1"])
    assert isinstance(refused.exception, RecipeError)


def test_mappings_with_other_keys_are_replaced_as_one_value() -> None:
    before, after = {"stop": {"kind": "a", "x": 1}}, {"stop": {"kind": "b", "y": None}}
    assert [one.key for one in changed_keys(before, after, whole=True)] == ["stop"]
    assert [one.key for one in changed_keys(before, after)] == ["stop.kind", "stop.x", "stop.y"]
    text = json.dumps({"stages": [{"name": "m", "eval": before}]})
    changed = changed_text(text, {"m": {"eval.stop": [before["stop"], after["stop"]], "train.steps": [1, 2]}})
    assert changed.split() == [
        "stages:",
        "-",
        "name:",
        "m",
        "eval:",
        "stop:",
        "kind:",
        "b",
        "y:",
        "null",
        "train:",
        "steps:",
        "2",
    ]
    one = load_recipe({"student": "tiny/generalist", "teachers": "tiny/arithmetic", "prompts": "task:addition"})
    assert as_overrides(one, one) == []
