"""Recipe text, names, paths and the JSON schema: what a file may say, and how what is wrong is told in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from opd.common.errors import RecipeError, RunDirectoryError
from opd.recipe import load_recipe, recipe_schema, recipe_text, shipped_recipes
from opd.recipe.paths import check_output
from opd.recipe.plain_data import parse_yaml

MINIMAL = {"student": "tiny/generalist", "prompts": "task:addition", "objective": {"form": "cross_entropy"}, "rollout": {"data_share": 1.0}}  # fmt: skip
TEXT = "student: tiny/generalist\nteachers: tiny/arithmetic\nprompts: task:addition\n"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{','.join([f'*{old}'] * 10)}]}}\n" for old, new in zip("abcdefg", "bcdefgh", strict=True)
)


def read(tmp_path: Path, text: str | bytes) -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_recipe(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TEXT + "seed: 1\nseed: 2\n", ["seed", "twice", "line 4", "line 5"]),
        (TEXT + "train: {lr: 1, lr: 2}\n", ["lr", "twice"]),
        (BOMB, ["aliases"]),
        (MERGE_BOMB, ["aliases"]),
        ("a: &a [*a]\n", ["contains itself"]),
        ("a: " + "[" * 5000, ["levels"]),
        ("[" * 100_000, ["levels"]),
        ("a: " + "x" * 300_000, ["characters"]),
        (b"student: caf\xe9\n", ["UTF-8"]),
        ("a: !!python/object:os.system x\n", ["tag"]),
        ("a: !!int x\n", ["tag"]),
        ("a: !!binary aGk=\n", ["tag"]),
        ("1: x\n", ["quotes"]),
        ("[1, 2]: x\n", ["quotes"]),
        ("? {a: 1}\n: x\n", ["quotes"]),
        (TEXT + f"seed: {'9' * 31}\n", ["seed"]),
        (TEXT + f"seed: {'9' * 5000}\n", ["seed"]),
        (TEXT + "seed: -1\n", ["seed"]),
        (TEXT + "seed: true\n", ["seed", "number"]),
        (TEXT + "seed: 1:30\n", ["seed"]),
        (TEXT + "seed: 2024-01-01\n", ["seed"]),
        (TEXT + "train: {lr: .nan}\n", ["train.lr"]),
        (TEXT + "train: {lr: .inf}\n", ["train.lr"]),
        (TEXT + "train: {lr: 1e999}\n", ["train.lr"]),
        (TEXT + "train: {betas: [2, 3]}\n", ["betas"]),
        (TEXT + "train: {steps: true}\n", ["train.steps", "number"]),
        (TEXT + "objective: {coefficient: {value: false}}\n", ["value", "number"]),
        (TEXT + "store: {commit_ms: 9223372036854775808}\n", ["store.commit_ms"]),
        (TEXT + "store: {commit_ms: 70000}\n", ["store.commit_ms"]),
        (TEXT + "eval: {prompts: 200000600}\n", ["eval.prompts"]),
        (TEXT + "rollout: {samples: 70000}\n", ["rollout.samples"]),
        (TEXT + "rollout: {max_new_tokens: 2000000000}\n", ["rollout.max_new_tokens"]),
        (TEXT + "sampler: {slots: 70000}\n", ["sampler.slots"]),
        (TEXT + "device: mps\n", ["device: expected auto | cpu | cuda | cuda:N; got 'mps'"]),
        (TEXT + "hub: {repo: a b}\n", ["hub.repo: expected NAME or OWNER/NAME; got 'a b'"]),
        (TEXT + "eval: {k: 99999999999}\n", ["eval.k"]),
        ("student: {model: a, lora: {targets: ''}}\nprompts: task:addition\n", ["student.lora.targets: string should"]),
        (TEXT + "threads: 1000000000\n", ["threads"]),
        (TEXT + "rollout: {stop: ['']}\n", ["rollout.stop"]),
        (TEXT + "rollout: {temperature: 1.0e-30}\n", ["temperature"]),
        (TEXT + 'student: "a"\n', ["twice"]),
        ('student: "\\ud800"\nprompts: task:addition\n', ["student"]),
        ('student: "\\0"\nprompts: task:addition\n', ["student"]),
        ("", ["mapping"]),
        ("a\n", ["mapping"]),
        ("stages: []\n" + TEXT, ["stages"]),
        ("a: 1\n---\nb: 2\n", ["YAML"]),
        (TEXT + "".join(f"key{index}: 1\n" for index in range(1000)), ["unknown key", "more"]),
        (TEXT + f"{'k' * 900}: 1\n", ["unknown key"]),
    ],
)
def test_mistakes_are_reported_in_a_few_words(tmp_path: Path, text: str | bytes, words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        read(tmp_path, text)
    assert len(str(error.value)) < 3000
    for word in words:
        assert word in str(error.value)


def test_what_yaml_reads_differently_elsewhere(tmp_path: Path) -> None:
    stage = read(
        tmp_path, b"\xef\xbb\xbf" + TEXT.encode() + b"train: {lr: 1e-5}\nseed: 10\nlog: {project: 2024-01-01}\n"
    ).stages[0]
    assert (stage.train.lr, stage.seed, stage.log.project) == (1e-5, 10, "2024-01-01")
    assert stage.teachers["teacher"].model == "tiny/arithmetic"


def test_a_recipe_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "directory.yaml").mkdir()
    for name, words in (
        (str(tmp_path / "directory.yaml"), "a directory"), ("x" * 5000 + ".yaml", "no such file"), ("nul\0.yaml", "no such file"), ("", "neither"),
    ):  # fmt: skip
        with pytest.raises(RecipeError, match=words):
            load_recipe(name)


@pytest.mark.parametrize(
    "name",
    [
        "a/b",
        "",
        ".",
        "..",
        "/etc",
        "latest",
        "LATEST",
        "a\0b",
        "x" * 65,
        "é" * 64 + "é",
        "a\nb",
        "-x",
        ".hidden",
        "a.",
        "a ",
        "a\\b",
        "~",
        "\u202ex",
        3,
        None,
    ],
)
def test_names_of_stages_and_runs_have_one_rule(name: Any) -> None:
    with pytest.raises(RecipeError, match="name"):
        load_recipe({**MINIMAL, "stages": [{"name": name}]})
    if name is not None:  # a run without a name has a default
        with pytest.raises(RecipeError, match="name"):
            load_recipe({**MINIMAL, "name": name})


@pytest.mark.parametrize("name", ["a", "main", "on-policy", "stage 2", "v1.5", "größe", "x" * 64, "_x"[1:], "a+b@c"])
def test_names_that_are_fine(name: str) -> None:
    recipe = load_recipe({**MINIMAL, "name": name, "stages": [{"name": name}]})
    assert (recipe.name, recipe.stages[0].name) == (name, name)


def test_a_run_is_named_after_its_file_whatever_that_is_called(tmp_path: Path) -> None:
    for stem, name in (("mine", "mine"), ("latest", "run"), ("-[x]-", "x"), ("a" * 100, "a" * 40), ("…", "run")):
        path = tmp_path / f"{stem}.yaml"
        path.write_text(TEXT)
        assert load_recipe(path).name == name


def test_stages_that_a_file_system_takes_for_one() -> None:
    with pytest.raises(RecipeError, match="differ"):
        load_recipe({**MINIMAL, "stages": [{"name": "Warm"}, {"name": "warm"}]})


@pytest.mark.parametrize("path", ["", ".", "/", "a\0b", "a\nb", "x" * 300, "runs/..", "a/\u202eb", "~nobody-here/x"])
def test_where_no_run_is_written(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirectoryError):
        check_output(path)


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunDirectoryError, match=r"notes.txt'?: a file with this name exists"):
        check_output(tmp_path / "notes.txt")
    assert check_output(tmp_path) == tmp_path


def test_a_home_is_a_home() -> None:
    assert check_output("~/runs/first") == Path.home() / "runs" / "first"


def test_paths_are_relative_to_the_recipe_and_overrides_to_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, shell = tmp_path / "mine", tmp_path / "shell"
    for directory in (mine / "model", shell / "other", mine / "org" / "here"):
        directory.mkdir(parents=True)
    (mine / "scores.py").write_text("")
    (mine / "recipe.yaml").write_text(
        "student: {model: model}\n"
        "teachers: {a: ./absent, b: org/here, c: org/elsewhere, d: weights.gguf, e: ~/models/e, f: tiny/arithmetic, g: /abs/x}\n"
        "prompts: [{source: rows.jsonl, eval_source: ../held.csv}, 'task:addition', {source: org/dataset}]\n"
        "rewards: {a: 'scores.py:brevity', b: [{kind: custom, function: 'scores:brevity'}, 'elsewhere:brevity', numeric]}\n"
        "stages: [{name: one}, {name: two, student: ../model, teachers: {a: other/../again.gguf}}]\n"
    )
    monkeypatch.chdir(shell)
    first, second = load_recipe("../mine/recipe.yaml", ["stages.one.student=other", "teachers.c=./c", "prompts.2.source=late.parquet"]).stages  # fmt: skip
    assert first.student.model == str(shell / "other")
    assert second.student.model == str(tmp_path / "model")
    assert {name: teacher.model for name, teacher in first.teachers.items()} == {
        "a": str(mine / "absent"), "b": str(mine / "org" / "here"), "c": str(shell / "c"), "d": str(mine / "weights.gguf"),
        "e": str(Path.home() / "models" / "e"), "f": "tiny/arithmetic", "g": "/abs/x",
    }  # fmt: skip
    assert second.teachers["a"].model == str(mine / "again.gguf")
    assert [source.source for source in first.prompts] == [str(mine / "rows.jsonl"), "task:addition", str(shell / "late.parquet")]  # fmt: skip
    assert first.prompts[0].eval_source == str(tmp_path / "held.csv")
    assert first.rewards.domains["a"][0].function == f"{mine / 'scores.py'}:brevity"
    assert [spec.model_dump().get("function") for spec in first.rewards.domains["b"]] == [
        f"{mine / 'scores.py'}:brevity",
        "elsewhere:brevity",
        None,
    ]


def test_a_mapping_and_a_resolved_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "student").mkdir()
    recipe = load_recipe({**MINIMAL, "student": "student", "prompts": Path("rows.jsonl")})
    assert recipe.stages[0].student.model == str(tmp_path / "student")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.yaml").write_text(recipe.to_yaml())
    monkeypatch.chdir("/")
    assert load_recipe(tmp_path / "run" / "resolved.yaml").stages == recipe.stages


def test_a_stage_clears_what_it_does_not_want() -> None:
    base = {
        **MINIMAL,
        "teachers": {"a": {"model": "tiny/arithmetic", "domains": ["arithmetic"]}},
        "rewards": "numeric",
        "seed": 3,
    }
    base = {**base, "objective": {"form": "direct"}}
    sft = {"objective": {"form": "cross_entropy"}}

    def teachers(stage: dict[str, Any]) -> dict[str, str]:
        found = load_recipe({**base, "stages": [{"name": "x", **stage}]}).stages[0]
        return {name: f"{spec.model} {spec.dtype or 'usual'}" for name, spec in found.teachers.items()}

    assert teachers({}) == {"a": "tiny/arithmetic usual"}
    assert teachers({"teachers": {"a": {"dtype": "bfloat16"}}}) == {"a": "tiny/arithmetic bfloat16"}
    assert teachers({"teachers": {}, **sft}) == teachers({"teachers": None, **sft}) == {}
    assert teachers({"teachers": {"a": None, "b": "tiny/sorting"}}) == {"b": "tiny/sorting usual"}
    cleared = load_recipe({**base, "stages": [{"name": "x", "rewards": {}, "seed": None, "rollout": None}]}).stages[0]
    assert (cleared.rewards.domains, cleared.seed, cleared.rollout.data_share) == ({}, 0, 0)


def test_a_stage_lays_keys_over_a_short_form() -> None:
    stages = load_recipe({**MINIMAL, "stages": [{"name": "a", "student": {"revision": "x"}}, {"name": "b", "student": {"revision": "x"}}]}).stages  # fmt: skip
    assert [(stage.student.model, stage.student.revision) for stage in stages] == [("tiny/generalist", "x"), ("stage:a", "x")]  # fmt: skip


def test_overrides_write_out_short_forms() -> None:
    raw = {
        "student": "tiny/generalist",
        "teachers": {"t": "tiny/arithmetic"},
        "prompts": ["task:addition"],
        "objective": {"coefficient": 2},
    }
    stage = load_recipe(
        raw, ["objective.coefficient.until=5", "prompts.0.share=2", "teachers.t.dtype=bfloat16"]
    ).stages[0]
    assert (stage.objective[0].coefficient.value, stage.objective[0].coefficient.until) == (2, 5)
    assert (stage.prompts[0].source, stage.prompts[0].share) == ("task:addition", 2)


@pytest.mark.parametrize(
    "override",
    [
        "..=1",
        "a..b=1",
        "prompts.²=x",
        "prompts.-1=x",
        f"prompts.{'9' * 5000}=x",
        "seed=!!int x",
        "name=\ud800",
        "seed=\0",
        "x" * 10_000,
        ".".join("a" * 100) + "=1",
        "student=&a [*a]",
        f"name={'x' * 10_000}",
    ],
)
def test_odd_overrides_are_rejected_in_a_line(override: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe({**MINIMAL, "prompts": ["task:addition"]}, [override])
    assert len(str(error.value)) < 1000


def test_what_was_written_includes_overrides(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(TEXT + "# mine")
    text = recipe_text(path, ["train.steps=2", "name=a\nb: 1"])
    assert text.startswith(TEXT + "# mine\n")
    assert "#   train.steps=2\n" in text
    assert yaml.safe_load(text) == yaml.safe_load(TEXT)
    assert yaml.safe_load(recipe_text({**MINIMAL, "prompts": (Path("x.jsonl"),)}))["prompts"] == ["x.jsonl"]
    recipe = load_recipe(path)
    assert recipe_text(recipe) == recipe.to_yaml()
    with pytest.raises(RecipeError, match="overrides"):
        load_recipe(recipe, ["train.steps=2"])


# The JSON schema


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = recipe_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(json.loads(json.dumps(schema)))


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_fits_the_schema(name: str, validator: jsonschema.Draft202012Validator) -> None:
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    ours, theirs = parse_yaml(text, name), yaml.safe_load(text)
    validator.validate(ours)
    if theirs != ours:  # as other tools read YAML
        validator.validate(theirs)
    validator.validate(yaml.safe_load(load_recipe(name).to_yaml()))


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"student": {"model": "smol", "lora": {"rank": 4}}}, True),
        ({"teachers": "smol"}, True),
        ({"teachers": {"a": "smol", "b": {"model": "x", "domains": ["c"]}}}, True),
        ({"teachers": {"a": {"modl": "smol"}}}, False),
        ({"prompts": ["task:addition", {"source": "rows.jsonl", "share": 2}]}, True),
        ({"prompts": [{"share": 2}]}, False),
        ({"prompts": [{"source": "task:addition", "options": {"digits": 3}}, {"source": "sort", "kind": "task"}]}, True),
        ({"prompts": [{"source": "task:addition", "split": "test"}]}, False),
        ({"prompts": [{"source": "owner/name", "split": "test"}, {"source": "owner/name", "kind": "dataset"}]}, True),
        ({"prompts": [{"source": "rows.jsonl", "options": {"digits": 3}}]}, False),
        ({"sampler": "builtin"}, True),
        ({"sampler": {"slots": 4}, "eval": {"every": 1, "early_stop": "target"}}, True),
        ({"sampler": {"slot": 4}}, False),
        ({"eval": {"early_stop": {"kind": "target", "patience": 3}}}, False),
        ({"objective": [{"form": "direct", "coefficient": 0.5}, {"form": "k2", "gate": ["correct", {"kind": "random"}]}]}, True),
        ({"objective": {"form": "policy_gradient", "surrogate": "ppo", "correction": "icepop", "gate": "wrong"}}, True),
        ({"objective": {"gate": "nothing"}}, False),
        ({"objective": {"surrogate": "pppo"}}, False),
        ({"objective": {"coefficient": "much"}}, False),
        ({"rewards": "numeric"}, True),
        ({"rewards": {"maths": ["numeric", {"kind": "format", "pattern": "x"}, "mine:score"]}}, True),
        ({"rewards": "numerik"}, False),
        ({"log": ["tensorboard"]}, True),
        ({"train": {"steps": "many"}}, False),
        ({"trian": {}}, False),
        ({"stages": [{"name": "a", "train": {"steps": 3}}, {"name": "b", "teachers": {}, "student": {"revision": "x"}}]}, True),
        ({"stages": [{"train": {"steps": 3}}]}, False),
        ({"name": "a/b"}, False),
        ({"device": "mps"}, False),
        ({"rollout": None}, True),
    ],
)  # fmt: skip
def test_the_schema_takes_short_forms_and_rejects_mistakes(change: dict[str, Any], fits: bool, validator: Any) -> None:
    assert validator.is_valid({**MINIMAL, **change}) == fits
