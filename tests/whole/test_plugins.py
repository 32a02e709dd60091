"""Choices from outside: the examples of docs/extending.md, run and resumed as a user would."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import marshal
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import opd
from opd import plugins, registry
from opd.cli import app
from opd.common.errors import DataError, RecipeError, RunDirectoryError, TrainingError
from opd.common.files import read_sealed
from opd.recipe import load_recipe, recipe_schema
from opd.records import Prompt, Sample
from opd.rewards import Rewarder
from opd.runner.evaluate import evaluate_model
from opd.runner.plan import make_plan
from opd.runner.run_files import write_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
OWN = (
    "gate.late",
    "divergence.pearson",
    "advantage.brevity",
    "form.unlikelihood",
    "form.foresee",
    "module.lookahead",
    "module.outcome",
    "optimiser.signs",
    "writer.echo",
    "teacher.blend",
    "view.told",
    "tracker.table",
    "monitor.wordy",
    "reward.brief",
    "source.doubles",
)
SMALL = ["train.steps=1", "rollout.prompts=12", "eval.prompts=0", "device=cpu", "sampler.slots=8"]


@pytest.fixture(autouse=True)
def forgotten() -> object:
    """What a test has loaded is not there for the next one."""
    known = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(known)
    for known_of in (plugins._loaded, plugins._files, plugins._sources):
        known_of.clear()
    for name in [name for name in sys.modules if name.startswith(plugins.NAMES)]:
        del sys.modules[name]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "mine.py").write_text("\n\n".join(code), encoding="utf-8")
    (folder / "recipe.yaml").write_text(settings, encoding="utf-8")
    return folder / "recipe.yaml"


@pytest.mark.slow
def test_the_examples_run_and_their_run_resumes_without_the_file(recipe: Path, tmp_path: Path) -> None:
    run = opd.run(str(recipe), overrides=SMALL, out=tmp_path / "run")
    assert {entry for entry in OWN if entry in registry._registered} == set(OWN)
    line = run.metrics[0]
    assert line["loss"] != 0
    assert 0 < line["gate/0:direct/late"] < 1
    assert 0 <= line["unshown/arithmetic"] < 1
    assert line["reverse_kl"] > 0
    assert (run.directory / "table.txt").read_text() == f"1;{line['loss']}\n"
    (alarm,) = run.monitors
    assert (alarm["monitor"], alarm["threshold"]) == ("wordy", 2)
    remedied = load_recipe(run.directory / alarm["recipe"])
    assert remedied.stages[0].rollout.max_new_tokens == 2
    assert remedied.plugins == [str(run.directory / "plugins" / "mine.py")]
    sources = {entry.source for entry in run.rollouts.entries.values()}
    assert sources == {"echo", "student"}
    resolved = yaml.safe_load((run.directory / "resolved.yaml").read_text())
    assert resolved["plugins"] == ["plugins/mine.py"]
    assert resolved["stages"][0]["objective"][0]["scale"] == 0.5
    assert resolved["stages"][0]["teachers"]["arithmetic"]["view"] == {
        "kind": "told",
        "skip": 0,
        "chat_template": "student",
        "share": 0.5,
    }
    (rollout,) = run.rollouts.load([next(iter(run.rollouts.entries))])
    (signal,) = run.rollouts.signals([rollout.id], "teacher", "logprobs_at").values()
    assert (signal.view, signal.spans[0][2] > rollout.prompt_ids.size) == ("told", True)
    assert resolved["stages"][0]["rewards"]["domains"]["default"][1]["longest"] == 20
    assert line["rewards/given"] == 24
    assert plugins.origin(registry.find("reward", "brief")) == str(run.directory / "plugins" / "mine.py")
    assert resolved["stages"][0]["prompts"][1]["by"] == 2
    assert len(read_sealed(run.directory / "run.json")["inputs"]["main"]["doubles:60"]["fingerprint"]) == 64
    assert {entry.prompt_id.split("/")[0] for entry in run.rollouts.entries.values()} == {"task:addition", "doubles:60"}
    assert "plugins/mine.py" in read_sealed(run.directory / "run.json")["files"]
    loaded = load_recipe(run.directory / "resolved.yaml")
    assert loaded.stages == load_recipe(str(recipe), SMALL).stages
    shutil.rmtree(recipe.parent)
    moved = run.directory.rename(tmp_path / "elsewhere")
    (moved / "summary.json").unlink()
    opd.resume(moved)
    (moved / "plugins" / "mine.py").write_text("print('other')")
    with pytest.raises(RunDirectoryError, match=r"mine\.py has been altered"):
        opd.resume(moved)


HEADS = """
import numpy as np
import torch
from pydantic import Field

import opd
from opd.objective.term import Term
"""


def test_a_second_module_is_one_file(tmp_path: Path) -> None:
    """The module and the term of the page, alone in a file: trained, saved, and resumed with the same bits."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "class Lookahead" in block)
    (tmp_path / "heads.py").write_text(HEADS + code, encoding="utf-8")
    raw = {
        "plugins": [str(tmp_path / "heads.py")],
        "student": "tiny/generalist",
        "teachers": "tiny/arithmetic",
        "prompts": "task:addition",
        "rollout": {"prompts": 4, "max_new_tokens": 8},
        "modules": {"guess": {"kind": "lookahead", "hidden": 8, "lr": 1e-2}},
        "objective": [{}, {"form": "foresee", "coefficient": 0.1}],
        "train": {"steps": 4, "micro_tokens": 96},
        "eval": {"prompts": 0},
        "checkpoint": {"every": 1, "resume": "exact"},
        "log": {"start_table": False},
        "device": "cpu",
    }
    whole = opd.run(raw, out=tmp_path / "whole")
    cut = opd.run(raw, out=tmp_path / "cut", on_step=lambda run, found: run.stop() if found["step"] == 2 else None)
    assert len(cut.metrics) == 2
    (tmp_path / "heads.py").unlink()
    again = opd.resume(tmp_path / "cut")
    assert [line["loss"] for line in again.metrics] == [line["loss"] for line in whole.metrics]
    folder = Path("modules") / "guess"
    for name in (folder / "weights.safetensors", folder / "optimiser.safetensors", Path("model.safetensors")):
        assert (again.model / name).read_bytes() == (whole.model / name).read_bytes()
    norms = [line["grad_norm/guess"] for line in whole.metrics]
    assert min(norms) > 0
    with pytest.raises(RecipeError, match="uses the module 'guess', but the recipe's modules are: none"):
        load_recipe(raw | {"modules": {}, "plugins": [str(whole.directory / "plugins" / "heads.py")]})


@pytest.mark.slow
def test_a_module_with_its_own_passes_is_one_file(tmp_path: Path) -> None:
    """The module of the page, alone in a file: the student's reward, trained, saved, and resumed with the same bits."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "class TokenWorth" in block)
    (tmp_path / "worth.py").write_text("import torch\n\nimport opd\n" + code, encoding="utf-8")
    raw = {
        "plugins": [str(tmp_path / "worth.py")],
        "student": "tiny/generalist",
        "prompts": "task:addition",
        "rollout": {"prompts": 4, "samples": 3, "max_new_tokens": 8},
        "modules": {"judge": {"kind": "outcome", "lr": 1e-1}},
        "objective": {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "also": {"kind": "score"}}},
        "train": {"steps": 4, "micro_tokens": 96},
        "eval": {"prompts": 0},
        "checkpoint": {"every": 1, "resume": "exact"},
        "log": {"start_table": False},
        "device": "cpu",
    }
    whole = opd.run(raw, out=tmp_path / "whole")
    opd.run(raw, out=tmp_path / "cut", on_step=lambda run, found: run.stop() if found["step"] == 2 else None)
    again = opd.resume(tmp_path / "cut")
    assert [line["loss/judge"] for line in again.metrics] == [line["loss/judge"] for line in whole.metrics]
    folder = Path("modules") / "judge"
    for name in (folder / "weights.safetensors", folder / "optimiser.safetensors", Path("model.safetensors")):
        assert (again.model / name).read_bytes() == (whole.model / name).read_bytes()
    assert whole.metrics[0]["loss/judge"] == pytest.approx(math.log(2))
    assert whole.metrics[0]["grad_norm"] == 0  # all scores are equal at first
    assert whole.metrics[-1]["grad_norm"] > 0


def test_the_schema_and_the_refusals_know_them(recipe: Path) -> None:
    shown = CliRunner().invoke(app, ["schema", str(recipe)])
    assert shown.exit_code == 0, shown.output
    assert {"Late", "Brevity", "Unlikelihood", "Doubles", "Blend", "Told", "Brief"} <= set(
        json.loads(shown.output)["$defs"]
    )
    assert {"Late", "Brevity", "Unlikelihood", "Brief"} <= set(recipe_schema()["$defs"])
    stop = ["eval={every: 1, early_stop: {kind: drop, by: 0.1}}"]
    assert load_recipe(str(recipe), stop).stages[0].eval.early_stop == registry.find("stop_rule", "drop")(by=0.1)
    for change, words in (
        ("objective.0.gate.0.after=-1", r"gate\.0\.after"),
        ("objective.0.gate.0.aftr=1", "did you mean 'after'"),
        ("objective.0.gate.0.after=8", "leaves nothing of 8 tokens"),
        ("objective.0.scale=0", r"objective\.0\.scale"),
        ("teachers.arithmetic.models=[tiny/arithmetic]", r"teachers\.arithmetic\.models"),
        ("teachers.arithmetic.view.shar=1", "did you mean 'share'"),
        ("rollout.teacher_share=0.1", "teacher_share needs a model.*of kind blend, has none"),
        ("rewards.1.longest=0", r"rewards\.1\.longest: .*greater than or equal to 1"),
        ("rewards.1.tolerance=1", "tolerance belongs to reward numeric, not to brief"),
        ("rollout.writers.0.share=0", "no share"),
        ("rollout.data_share=0.8", "more than 1"),
        ("prompts.1.by=0", r"prompts\.1\.by: .*greater than or equal to 1"),
        ("prompts.1.split=test", "split belongs to source file and dataset, not to doubles"),
        ("prompts.1.source=doubles:few", r"prompts\.1: source 'doubles:few': expected a number"),
        ("prompts.1.source=dobles:60", "unknown source; did you mean 'doubles'"),
        ("objective.1.divergence=pearson", "advantage of the sampled token"),
    ):
        with pytest.raises(RecipeError, match=words):
            load_recipe(str(recipe), [change])


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import opd\nraise KeyError('x')\n", r"KeyError: 'x' \(line 2\)"),
        ("def broken(:\n", "SyntaxError"),
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
        (
            "import opd\nfrom opd.objective.gates import Gate\n@opd.register\nclass Mine(Gate):\n    name = 'entropy'\n",
            "'entropy' exists already",
        ),
        (
            "import opd\nfrom opd.objective.gates import Gate\n@opd.register\nclass Mine(Gate):\n    family, name = 'nothing', 'mine'\n",
            "unknown family",
        ),
    ],
)
def test_files_that_cannot_be_imported_are_reported(recipe: Path, code: str, words: str) -> None:
    (recipe.parent / "mine.py").write_text(code, encoding="utf-8")
    with pytest.raises(RecipeError, match=words) as error:
        load_recipe(str(recipe))
    assert "mine.py" in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere.py", "cannot be read"),
        ("[1]", "expected Python files"),
        ("[no.such.module]", "no.such.module.*installed"),
        ("[mine.py, other/mine.py]", "same name"),
        ("{a: b}", "expected Python files"),
    ],
)
def test_plugins_that_are_not_there(recipe: Path, given: str, words: str) -> None:
    text = recipe.read_text().replace("plugins: [mine.py]", f"plugins: {given}")
    recipe.write_text(text)
    with pytest.raises(RecipeError, match=words):
        load_recipe(str(recipe))


def test_an_edited_file_is_read_again(recipe: Path) -> None:
    load_recipe(str(recipe))
    before = registry.find("gate", "late")
    load_recipe(str(recipe))
    assert registry.find("gate", "late") is before
    path = recipe.parent / "mine.py"
    path.write_text(path.read_text().replace("Field(3, ge=0", "Field(4, ge=0"))
    load_recipe(str(recipe))
    assert registry.find("gate", "late").model_fields["after"].default == 4


EDITED = """
import opd

@opd.register
class Edited(opd.Reward):
    name = "edited"
    level: int = {level}

    def reward(self, sample):
        return self.level
"""


def _plant(file: Path, source: str) -> None:
    """Bytecode of other source in the `__pycache__` of a file, which Python would take for the file's own."""
    facts, cached = file.stat(), Path(importlib.util.cache_from_source(str(file)))
    cached.parent.mkdir(exist_ok=True)
    header = importlib.util.MAGIC_NUMBER + bytes(4) + int(facts.st_mtime).to_bytes(4, "little")
    code = marshal.dumps(compile(source, str(file), "exec"))
    cached.write_bytes(header + facts.st_size.to_bytes(4, "little") + code)


def test_what_is_read_is_what_runs(tmp_path: Path) -> None:
    """Neither bytecode of the edit before, of the same size and second, nor planted bytecode stands in for a plugin's source."""
    file = tmp_path / "edited.py"
    for level in range(3):
        file.write_text(EDITED.format(level=level))
        os.utime(file, (1e9, 1e9))
        plugins.load_plugins([str(file)])
        assert registry.find("reward", "edited").model_fields["level"].default == level
    assert not list(tmp_path.rglob("*.pyc"))
    file.write_text(EDITED.format(level=3))
    os.utime(file, (1e9, 1e9))
    _plant(file, EDITED.format(level=9))
    plugins.load_plugins([str(file)])
    assert registry.find("reward", "edited").model_fields["level"].default == 3


def test_a_run_copies_the_code_that_ran(tmp_path: Path) -> None:
    """An edit between reading the recipe and the first step changes neither the copy, nor its seal, nor what workers run."""
    file, run = tmp_path / "edited.py", tmp_path / "run"
    first = EDITED.format(level=1)
    file.write_text(first)
    recipe = load_recipe({"student": "s", "prompts": "p", "rewards": {"kind": "edited"}, "plugins": [str(file)]})
    file.write_text(first.replace("return self.level", "return 0"))
    run.mkdir()
    write_recipe(run, "", recipe, {})
    assert (run / "plugins" / "edited.py").read_text() == first
    digest = hashlib.sha256(first.encode()).hexdigest()
    assert read_sealed(run / "run.json")["files"]["plugins/edited.py"] == digest
    (run / "plugins" / "edited.py").write_text("raise RuntimeError('not what ran')")
    (found,) = Rewarder(recipe.stages[0].rewards)([Sample(Prompt("p", "d"), "x")])
    assert found.reward == 1.0, found


def test_altered_copies_are_rejected_before_they_run(tmp_path: Path) -> None:
    file, ran = tmp_path / "edited.py", tmp_path / "ran"
    file.write_text(f"open({str(ran)!r}, 'w')")
    with pytest.raises(RunDirectoryError, match=r"edited\.py has been altered"), plugins.sealed_files({file: "0" * 64}):
        plugins.load_plugins([str(file)])
    with pytest.raises(RunDirectoryError, match="It was not run"), plugins.sealed_files({}):
        plugins.load_plugins([str(file)])
    assert not ran.exists()
    with plugins.sealed_files({file: hashlib.sha256(file.read_bytes()).hexdigest()}):
        plugins.load_plugins([str(file)])
    assert ran.exists()


def test_packages_announce_theirs_and_are_recorded_by_version(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    package, facts = site / "my_opd", site / "my_opd-1.2.dist-info"
    package.mkdir(parents=True)
    facts.mkdir()
    shutil.copy(recipe.parent / "mine.py", package / "__init__.py")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-opd\nVersion: 1.2\n")
    (facts / "entry_points.txt").write_text("[opd.plugins]\nmine = my_opd\n")
    (facts / "top_level.txt").write_text("my_opd\n")
    (facts / "RECORD").write_text("my_opd/__init__.py,,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(plugins, "_announced", False)
    recipe.write_text(recipe.read_text().replace("plugins: [mine.py]", ""))
    assert load_recipe(str(recipe)).stages[0].objective[0].gate[0].name == "late"
    assert importlib.metadata.version("my-opd") == "1.2"
    assert plugins.versions(["my_opd"]) == {"my_opd": "1.2"}
    del sys.modules["my_opd"]


HOSTILE = """
import os, time, opd

@opd.register
class Moody(opd.Reward):
    name = "moody"
    calm: float = 1.0

    def check(self, view):
        if self.calm > 1:
            yield f"calm {self.calm} is no mood. Lower it."

    def reward(self, sample):
        if sample.text == "hang": time.sleep(3600)
        if sample.text == "die": os._exit(1)
        return {"nan": float("nan"), "huge": 1e300, "none": None}.get(sample.text, self.calm)
"""


def test_a_reward_runs_in_workers_that_import_the_runs_copy(tmp_path: Path) -> None:
    """Workers go by the file that was last named: the one in the run directory, which the recipe's own may differ from later."""
    for name, text in (("recipe", HOSTILE), ("run", HOSTILE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(text)
    moody = {"kind": "moody", "calm": 0.5}
    limits = {"endless": {**moody, "time_limit": 1}, "default": {**moody, "time_limit": 100}}
    recipe = {"student": "s", "prompts": "p", "rewards": limits}
    rewards = load_recipe({**recipe, "plugins": [str(tmp_path / "recipe" / "mine.py")]}).stages[0].rewards
    with pytest.raises(RecipeError, match=r"rewards\.default\.0: calm 2\.0 is no mood"):
        load_recipe({**recipe, "plugins": [str(tmp_path / "recipe" / "mine.py")]}, ["rewards.default.calm=2"])
    plugins.moved(str(tmp_path / "recipe" / "mine.py"), tmp_path / "run" / "mine.py")
    (tmp_path / "recipe" / "mine.py").write_text("raise RuntimeError('not the copy')")
    texts = ("fine", "hang", "die", "nan", "huge", "none", "well")
    asked = [Sample(Prompt("p", "endless" if text == "hang" else "d"), text) for text in texts]
    found = Rewarder(rewards)(asked)
    assert [result.reward for result in found] == [0.5, None, None, None, None, None, 0.5], found


def test_evaluation_knows_them_too(tmp_path: Path) -> None:
    (tmp_path / "moody.py").write_text(HOSTILE.replace('"moody"', '"calm"'))
    settings: dict[str, Any] = {"k": 0, "count": 2, "max_new_tokens": 2, "device": "cpu", "seed": 0}
    found = evaluate_model(
        "tiny/generalist", ["task:addition"], rewards="calm", plugins=[str(tmp_path / "moody.py")], **settings
    )
    assert found.domains["arithmetic"].value == 1.0
    with pytest.raises(RecipeError, match=r"nowhere\.py cannot be read"):
        evaluate_model("tiny/generalist", ["task:addition"], plugins=["nowhere.py"], **settings)


@pytest.mark.slow
def test_a_sampler_of_ones_own_draws_the_same_tokens(recipe: Path, tmp_path: Path) -> None:
    small = ["train.steps=1", "rollout={prompts: 3, max_new_tokens: 6}", "eval.prompts=0", "device=cpu", "log={}"]
    runs = [
        opd.run(str(recipe), overrides=[*small, f"sampler={{engine: {engine}}}"], out=tmp_path / engine)
        for engine in ("builtin", "one_by_one")
    ]
    one, other = ([rollout.response_ids.tolist() for rollout in run.rollouts.where().load()] for run in runs)
    assert sorted(one) == sorted(other)
    with pytest.raises(RecipeError, match="the sampler one_by_one cannot draw from two models"):
        load_recipe(str(recipe), ["rollout={teacher_mix: 0.2}", "sampler={engine: one_by_one}"])
    with pytest.raises(RecipeError, match="slots belongs to sampler builtin and vllm, not to one_by_one"):
        load_recipe(str(recipe), ["sampler={engine: one_by_one, slots: 4}"])


def test_rows_of_a_source_that_change_are_rejected(recipe: Path, tmp_path: Path) -> None:
    """Files behind a prefix are found beside the recipe, and hashed; rows that a program makes are known by their content."""
    (recipe.parent / "rows.txt").write_text("add 11+11\nadd 12+12\n")
    (recipe.parent / "mine.py").write_text(LINES)
    text = "plugins: [mine.py]\nstudent: tiny/generalist\nteachers: tiny/arithmetic\nprompts: 'lines:rows.txt'\ntrain: {steps: 1}\n"
    recipe.write_text(text)
    run = opd.run(str(recipe), overrides=SMALL, out=tmp_path / "run")
    (source,) = load_recipe(run.directory / "resolved.yaml").stages[0].prompts
    assert source.source == f"lines:{recipe.parent / 'rows.txt'}"
    assert {entry.prompt_id for entry in run.rollouts.entries.values()} == {
        "lines:rows.txt/train/0",
        "lines:rows.txt/train/1",
    }
    assert str(recipe.parent / "rows.txt") in read_sealed(run.directory / "run.json")["inputs"]["main"]
    shutil.rmtree(run.directory / "checkpoints")
    (run.directory / "summary.json").unlink()
    (recipe.parent / "rows.txt").write_text("add 11+11\nadd 12+13\n")
    with pytest.raises(RunDirectoryError, match=r"rows\.txt \(prompts\) has changed"):
        opd.resume(run.directory)


LINES = """
from pathlib import Path
import opd
from opd.data.sources import RowPrompts

@opd.register
class Lines(RowPrompts):
    name = "lines"

    def files(self):
        return [Path(self.address)]

    def rows(self):
        return [{"prompt": line} for line in Path(self.address).read_text().splitlines()]
"""


ONE_STEP = {
    "name": "one",
    "student": "tiny/generalist",
    "teachers": {"arithmetic": "tiny/arithmetic"},
    "prompts": {"source": "task:addition", "domain": "arithmetic"},
    "rollout": {"prompts": 2, "max_new_tokens": 4},
    "train": {"steps": 1},
    "eval": {"prompts": 0},
    "sampler": {"slots": 2},
    "device": "cpu",
}
GATE = "import opd\nfrom opd.objective.gates import Gate\n@opd.register\nclass Mine(Gate):\n    name = 'mine'\n"
ADVANTAGE = "import opd\nimport numpy as np\nfrom opd.objective.advantages import AdvantagePart\n@opd.register\nclass Short(AdvantagePart):\n    name = 'short'\n"
SLOPE = "import opd\nfrom opd.divergences.kinds import CustomDivergence\n@opd.register\nclass Slope(CustomDivergence):\n    name = 'slope'\n    {field}: float = 3.0\n    def value(self, student, teacher):\n        return (student - teacher).sum(-1)\n"


@pytest.mark.parametrize(
    ("source", "objective", "words"),
    [
        (GATE, {"gate": "mine"}, "gate 'mine' needs a method `factors`"),
        (GATE.replace("gates import Gate", "surrogates import Surrogate").replace("(Gate)", "(Surrogate)"), {"form": "policy_gradient", "surrogate": "mine"}, "needs a method `losses`"),
        (GATE + "    kind: str = 'x'\n    def factors(self, view): ...\n", {"gate": "mine"}, "'kind' names the choice"),
        ("import opd\n@opd.register\nclass Mine: ...\n", {}, "Mine has no `family`"),
        (SLOPE.format(field="coefficient"), {"divergence": "slope"}, "its setting 'coefficient' is also one of form direct"),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_used_or_read_again_is_rejected(
    tmp_path: Path, source: str, objective: dict[str, Any], words: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(RecipeError, match=words):
        load_recipe({**ONE_STEP, "plugins": [str(tmp_path / "mine.py")], "objective": objective})


def test_errors_of_a_plugin_are_reported_with_their_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        GATE + "    def factors(self, view):\n        return [1 / 0 for _ in view.rollouts]\n"
    )
    recipe = {**ONE_STEP, "plugins": [str(tmp_path / "mine.py")], "objective": {"gate": "mine"}}
    with pytest.raises(
        TrainingError, match=r"mine\.py, line 7, in Mine\.factors.*: ZeroDivisionError: division by zero"
    ) as told:
        opd.run(recipe, out=tmp_path / "run")
    assert "Afterwards:" in str(told.value)


def test_a_source_that_raises_is_reported_before_a_run_begins(tmp_path: Path) -> None:
    (tmp_path / "lines.py").write_text(LINES.replace("Path(self.address).read_text()", "self.adress"))
    recipe = {
        **ONE_STEP,
        "plugins": [str(tmp_path / "lines.py")],
        "prompts": {"source": "lines:a", "domain": "arithmetic"},
    }
    with pytest.raises(DataError, match="lines:a: a is not a file"):
        opd.run(recipe, out=tmp_path / "run")
    (tmp_path / "a").write_text("add 1+1\n")
    recipe["prompts"] = {"source": f"lines:{tmp_path / 'a'}", "domain": "arithmetic"}
    for start in (lambda: make_plan(load_recipe(recipe)), lambda: opd.run(recipe, out=tmp_path / "run")):
        with pytest.raises(TrainingError, match=r"lines\.py, line \d+, in Lines\.\w+: "):
            start()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("source", "objective", "words"),
    [
        (GATE + "    def factors(self, view):\n        return 0.5\n", {"gate": "mine"}, "gate mine has to give one array per rollout"),
        (ADVANTAGE + "    def values(self, tokens, prepared):\n        return [np.ones(1) for _ in tokens.rollouts]\n",
         {"form": "policy_gradient", "advantage": {"also": "short"}}, "advantage short has to give one array per rollout"),
        (SLOPE.format(field="weight"), {"divergence": "slope"}, None),  # a gradient that is one number everywhere
    ],
)  # fmt: skip
def test_what_a_plugin_gives_is_looked_at(
    tmp_path: Path, source: str, objective: dict[str, Any], words: str | None
) -> None:
    (tmp_path / "mine.py").write_text(source)
    recipe = {**ONE_STEP, "plugins": [str(tmp_path / "mine.py")], "objective": objective}
    if words is None:
        assert opd.run(recipe, out=tmp_path / "run").summary["status"] == "done"
    else:
        with pytest.raises(TrainingError, match=words):
            opd.run(recipe, out=tmp_path / "run")
