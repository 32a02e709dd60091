"""Recipes: what is accepted, what is rejected and with which words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.common.errors import RecipeError
from opd.common.peer_keys import GLOSSARY, table
from opd.recipe import Stage, find_recipe, load_recipe, recipe_schema, shipped_recipes
from opd.recipe.overrides import merge
from opd.recipe.places import below, family_at
from opd.registry import Family, keys_of

MINIMAL = {"student": "tiny/generalist", "prompts": "task:addition"}


def test_short_forms_are_filled_in() -> None:
    stage = load_recipe(
        {
            **MINIMAL,
            "teachers": {"arithmetic": "tiny/arithmetic"},
            "objective": {"form": "direct"},
            "log": "tensorboard",
        }
    ).stages[0]
    assert stage.name == "main"
    assert stage.student.model == "tiny/generalist"
    assert stage.teachers["arithmetic"].model == "tiny/arithmetic"
    assert stage.prompts[0].source == "task:addition"
    assert stage.objective[0].divergence.name == "reverse_kl"
    assert [tracker.name for tracker in stage.log.to] == ["tensorboard"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trian": {}}, ["trian", "'train'"]),
        ({"train": {"step": 3}}, ["train.step", "'steps'"]),
        ({"prompts": [{"source": "x", "shar": 2}]}, ["prompts.0.shar", "'share'"]),
        ({"teachers": {"a": {"model": "x", "domain": "y"}}}, ["teachers.a.domain", "'domains'"]),
        ({"objective": {"temprature": 2}}, ["temprature", "'temperature'"]),
        ({"train": {"steps": "many"}}, ["train.steps", "'many'"]),
        ({"train": {"lr": -1}}, ["train.lr", "-1"]),
        ({"rollout": {"data_share": 0.8, "teacher_share": 0.5}}, ["rollout", "above 1"]),
        ({"objective": {"divergence": "kl"}}, ["divergence", "'kl'", "reverse_kl"]),
        ({"student": {"model": "x", "dtype": "float32"}, "train": [1]}, ["train: ", "[1]"]),
        ({"stages": [{"train": {}}]}, ["name"]),
        ({"stages": [{"name": "a"}, {"name": "a"}]}, ["differ"]),
    ],
)
def test_mistakes_are_named(change: dict, words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe({**MINIMAL, **change})
    for word in words:
        assert word in str(error.value)


def test_missing_keys_are_named() -> None:
    with pytest.raises(RecipeError, match="student: missing"):
        load_recipe({"prompts": "task:addition"})


def test_overrides() -> None:
    raw = {**MINIMAL, "teachers": {"t": "tiny/arithmetic"}}
    stage = load_recipe(
        raw,
        [
            "train.steps=7",
            "train.lr=1e-5",
            "student.gradient_checkpointing=true",
            "teachers.t.dtype=bfloat16",
            "rollout.top_p=0.5",
            "log=[tensorboard]",
            "train.clip=null",
        ],
    ).stages[0]
    assert (stage.train.steps, stage.train.lr, stage.rollout.top_p, stage.train.clip) == (7, 1e-5, 0.5, None)
    assert stage.student.model == "tiny/generalist"
    assert (stage.student.gradient_checkpointing, stage.teachers["t"].dtype) == (True, "bfloat16")


def test_overrides_reach_lists_and_stages() -> None:
    raw = {
        "student": "tiny/generalist",
        "prompts": [{"source": "task:addition"}],
        "stages": [{"name": "a"}, {"name": "b"}],
    }
    recipe = load_recipe(raw, ["prompts.0.share=2", "stages.b.train.steps=3"])
    assert [stage.train.steps for stage in recipe.stages] == [100, 3]
    assert recipe.stages[0].prompts[0].share == 2


def test_null_in_a_stage_takes_a_key_back_to_its_default_unless_it_is_a_value() -> None:
    defaults = {"train": {"lr": 0.5, "clip": 0.5, "steps": 7}, "eval": {"every": 3}, "seed": 4}
    stage = {"name": "a", "train": {"lr": None, "clip": None}, "eval": {"every": None}, "seed": None}
    found = load_recipe({**MINIMAL, **defaults, "stages": [stage]}).stages[0]
    usual = load_recipe({**MINIMAL, "train": {"steps": 7}}).stages[0]
    assert (found.train.lr, found.train.clip, found.train.steps) == (usual.train.lr, None, 7)
    assert (found.eval.every, found.seed) == (usual.eval.every, 0)


def test_null_takes_away_a_teacher_that_is_there() -> None:
    raw = {**MINIMAL, "teachers": {"t": "tiny/arithmetic"}}
    assert load_recipe({**raw, "stages": [{"name": "a", "teachers": {"t": None}}]}).stages[0].teachers == {}
    for defaults, name, hint in ((raw, "tt", "did you mean 't'?"), (MINIMAL, "t", "they have none")):
        with pytest.raises(RecipeError) as error:
            load_recipe({**defaults, "stages": [{"name": "a", "teachers": {name: None}}]})
        assert f"stages.a.teachers.{name}" in str(error.value)
        assert hint in str(error.value)


@pytest.mark.parametrize(
    "override", ["train.steps", "=3", "prompts.5.share=1", "stages.c.seed=1", "seed.x=1", "train.steps=[1"]
)
def test_bad_overrides(override: str) -> None:
    raw = {**MINIMAL, "prompts": [{"source": "task:addition"}], "seed": 1, "stages": [{"name": "a"}]}
    with pytest.raises(RecipeError):
        load_recipe(raw, [override])


def test_a_later_stage_continues_the_one_before() -> None:
    recipe = load_recipe(
        {**MINIMAL, "stages": [{"name": "warm"}, {"name": "distil"}, {"name": "fresh", "student": "smol"}]}
    )
    assert [stage.student.model for stage in recipe.stages] == ["tiny/generalist", "stage:warm", "smol"]


def staged_teacher(default: object, laid_over: object) -> dict[str, object]:
    stages = [{"name": "first"}, {"name": "second", "teachers": {"math": laid_over}}]
    found = load_recipe({**MINIMAL, "teachers": {"math": default}, "stages": stages}).stages[1].teachers["math"]
    return found.model_dump(exclude_unset=True)


def test_a_teacher_of_another_kind_keeps_what_all_kinds_have() -> None:
    common = {"role": "guide", "domains": ["addition"], "view": {"kind": "same", "skip": 2}}
    frozen = {"kind": "frozen", "model": "tiny/arithmetic", "batch_tokens": 64, **common}
    objective = {"objective": [{"role": "guide"}]}
    stages = [{"name": "a"}, {"name": "b", "teachers": {"math": {"kind": "ema", "view": {"skip": 3}}}}]
    later = load_recipe({**MINIMAL, **objective, "teachers": {"math": frozen}, "stages": stages}).stages[1]
    kept = later.teachers["math"]
    assert (kept.name, kept.role, kept.domains, kept.view.skip) == ("ema", "guide", ["addition"], 3)
    assert kept.batch_tokens is None  # of the old kind, whatever the new one calls the same


def test_a_kind_that_was_not_written_leaves_what_the_new_one_has() -> None:
    assert staged_teacher("tiny/arithmetic", {"kind": "ema"}) == {"kind": "ema"}
    later = staged_teacher({"model": "tiny/arithmetic", "dtype": "bfloat16"}, {"kind": "cached", "run": "stage:first"})
    assert later == {"kind": "cached", "model": "tiny/arithmetic", "run": "stage:first"}
    with pytest.raises(RecipeError, match="modle"):  # a mistake of the default stays one
        staged_teacher({"modle": "tiny/arithmetic"}, {"kind": "ema"})


@pytest.mark.parametrize(
    "spelt", [lambda one: {"maths": one}, lambda one: {"domains": {"maths": one}}, lambda one: one]
)
def test_a_reward_of_another_kind_keeps_its_weight(spelt: Callable[[object], object]) -> None:
    default = spelt({"kind": "custom", "path": "module:function", "weight": 2})
    kept = merge({"rewards": default}, {"rewards": spelt({"kind": "exact"})})
    assert kept == {"rewards": spelt({"kind": "exact", "weight": 2})}


def test_resolved_recipe_reads_back_the_same() -> None:
    recipe = load_recipe("methods/gkd")
    again = load_recipe(yaml.safe_load(recipe.to_yaml()))
    assert again.stages == recipe.stages


@settings(max_examples=10)
@given(
    st.dictionaries(
        st.text(max_size=4),
        st.recursive(
            st.integers(), lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6
        ),
        max_size=4,
    )
)
def test_merge_with_itself_changes_nothing(mapping: dict) -> None:
    assert merge(mapping, mapping) == mapping
    assert merge(mapping, {}) == mapping


@given(st.text(max_size=40))
def test_any_override_text_is_a_recipe_error_or_fine(text: str) -> None:
    with contextlib.suppress(RecipeError):
        load_recipe({**MINIMAL, "train": {"steps": 3}}, [text])


def test_shipped_names_and_suggestions() -> None:
    assert "quickstart" in shipped_recipes()
    with pytest.raises(RecipeError, match="quickstart"):
        find_recipe("quickstrat")
    with pytest.raises(RecipeError, match="no such file"):
        find_recipe("nowhere.yaml")


def test_broken_yaml(tmp_path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("student: [")
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(path)
    path.write_text("- a\n- b\n")
    with pytest.raises(RecipeError, match="mapping"):
        load_recipe(path)
    path.write_text("---\nstudent: a\n---\nstudent: b\n")
    with pytest.raises(
        RecipeError, match=r"a second document begins \(`---`\), but a recipe is a single document\. .*in line 3"
    ):
        load_recipe(path)


def test_keys_that_hold_anchors_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "anchors.yaml"
    path.write_text(
        "x-short: &short {steps: 7, lr: 1e-5}\nx-models: [&base tiny/generalist]\n"
        "student: *base\nprompts: task:addition\ntrain: {<<: *short, warmup: 2}\n"
    )
    loaded = load_recipe(path)
    stage = loaded.stages[0]
    assert (stage.student.model, stage.train.steps, stage.train.lr, stage.train.warmup) == (
        "tiny/generalist",
        7,
        1e-5,
        2,
    )
    assert "x-" not in loaded.to_yaml()
    assert [re.search(pattern, "x-short") is not None for pattern in recipe_schema()["patternProperties"]] == [True]
    with pytest.raises(RecipeError, match="keys that begin with x- are ignored"):
        load_recipe(path, ["x-short.steps=9"])
    with pytest.raises(RecipeError, match=r"train\.x-short: unknown key"):
        load_recipe({**MINIMAL, "train": {"x-short": 1}})


def test_schema_knows_every_key_of_a_recipe() -> None:
    schema = recipe_schema()
    assert set(Stage.model_fields) <= set(schema["properties"])
    assert {"name", "stages"} <= set(schema["properties"])


@pytest.mark.parametrize(("change", "words"), [
    ({"teachers": ["tiny/arithmetic"]}, "teachers: expected a mapping of keys; got"),
    ({"eval": 5}, "eval: expected a mapping of keys; got 5"),
    ({"objective": "reverse_kl"}, "objective: unknown form 'reverse_kl'; known: direct, policy_gradient"),
    ({"train": {"steps": "ten"}}, "train.steps: expected a whole number; got 'ten'"),
    ({"train": {"steps": 1.5}}, "train.steps: expected a whole number; got 1.5"),
    ({"train": {"lr": "fast"}}, "train.lr: expected a number; got 'fast'"),
    ({"eval": {"greedy": "maybe"}}, "eval.greedy: expected true or false; got 'maybe'"),
])  # fmt: skip
def test_wrong_types_are_reported_in_plain_words(change: dict, words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)):
        load_recipe({**MINIMAL, **change})


def test_an_empty_recipe_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(RecipeError, match="a recipe is a mapping of keys, got nothing"):
        load_recipe(tmp_path / "empty.yaml")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learning_rate=1e-5", r"learning_rate: unknown key\. .*TRL.*`train\.lr` here\.$"),
        ("rollout.num_generations=4", r"rollout\.num_generations: .*`rollout\.samples` here\.$"),
        ("train.num_train_epochs=3", r"`train\.steps` here: .*`train\.epochs` are passes over one batch"),
        ("actor_rollout_ref.rollout.n=8", r"verl's `actor_rollout_ref\.rollout\.n` is `rollout\.samples` here"),
        ("+trainer.total_epochs=3", r"verl's `trainer\.total_epochs` is `train\.steps` here"),
        ("data.train_batch_size=64", r"data\.train_batch_size: .*`rollout\.prompts` here"),
        ("trainer={project_name: x, logger: y}", r"`log\.project` here; .*`log\.to` here"),
        ("objective.0.lmbda=0.5", r"objective\.0\.lmbda: .*`rollout\.data_share` here, which is 1 - lmbda"),
        ("teachers.arithmetic.teacher_model_revision=x", r"`teachers\.NAME\.revision` here"),
        ("sampler.vllm_gpu_memory_utilization=0.5", r"`sampler\.memory` here"),
        (
            "objective.0={form: policy_gradient, advantage: {kl_penalty_coef: 1}}",
            r"`objective\.advantage\.teacher_weight` here",
        ),
        ("packing=true", r"has no counterpart here: sequences are always packed"),
        ("lr=1e-5", r"Did you mean 'train\.lr'\?$"),
        ("rank=8", r"Did you mean 'student\.lora\.rank'\?$"),
        ("rollout.lr=1e-5", r"Did you mean 'train\.lr'\?$"),
        ("trian.steps=3", r"Did you mean 'train'\?$"),
    ],
)
def test_keys_of_other_frameworks_are_translated(override: str, words: str) -> None:
    raw = {**MINIMAL, "teachers": {"arithmetic": "tiny/arithmetic"}, "objective": [{"form": "direct"}]}
    with pytest.raises(RecipeError, match=words):
        load_recipe(raw, [override])


def resolves(key: str) -> bool:
    """Whether a recipe has such a key."""
    place: tuple = (Stage,)
    *parents, last = key.split(".")
    for part in parents:
        place = below(place, part)
    family = Family("advantage") if parents[-1:] == ["advantage"] else family_at(place)
    if family is not None and any(last in keys_of(choice) for choice in family.classes().values()):
        return True
    return bool(below(place, last)) or (family is not None and family.key == last)


def test_the_glossary_names_keys_that_a_recipe_has() -> None:
    known = {
        row: re.findall(r"`([a-z_]+(?:\.\w+)*)(?:: \w+)?`", row.here) for rows in GLOSSARY.values() for row in rows
    }
    for row, keys in known.items():
        assert bool(row.here) != bool(row.why), row
        assert row.keys(), row
        assert not row.here or keys or row.here.startswith("`opd "), row
        assert [key for key in keys if not resolves(key)] == [], row
    named = [(framework, key) for row in known for framework, keys in row.keys().items() for key in keys]
    assert len(set(named)) == len(named), "a key has two translations"


def test_the_page_for_those_who_come_from_elsewhere_is_the_glossary() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text(encoding="utf-8")
    assert page.endswith(table()), "write it again: python -m opd.common.peer_keys"
