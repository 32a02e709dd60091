"""Starts that are merged from several models: against references written out in numpy's float64, and in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

import opd
from opd.common.errors import RecipeError, UserError
from opd.models import load_model
from opd.models.merging import Average, Merge, Stack, TaskArithmetic, Ties
from opd.models.settings import Lora
from opd.recipe import load_recipe
from opd.registry import Family
from opd.runner.inputs import inputs_of
from opd.runner.plan import make_plan
from tests.support.helpers import save_tiny

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("base", "one", "two", "three"))}


def named(name: str) -> tuple[str, str | None]:
    return name, None


def arrays(directory: str | Path) -> Arrays:
    return {name: tensor.double().numpy() for name, tensor in load_file(Path(directory) / "model.safetensors").items()}


def made(merge: Merge) -> Arrays:
    return {name: tensor.detach().double().numpy() for name, tensor in merge.make(named).module.named_parameters()}


def same(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=2e-7, atol=1e-9, err_msg=name)


def test_an_average_is_the_mean_of_every_weight(models: dict[str, str]) -> None:
    one, two, three = (arrays(models[name]) for name in ("one", "two", "three"))
    parts = [models["one"], models["two"], models["three"]]
    same(made(Average(models=parts)), {name: (one[name] + two[name] + three[name]) / 3 for name in one})
    weighted = made(Average(models=parts, weights=[1, 2, 1]))
    same(weighted, {name: 0.25 * one[name] + 0.5 * two[name] + 0.25 * three[name] for name in one})


def test_task_arithmetic_adds_differences_to_the_base(models: dict[str, str]) -> None:
    base, one, two = (arrays(models[name]) for name in ("base", "one", "two"))
    found = made(TaskArithmetic(base=models["base"], models=[models["one"], models["two"]], weights=[0.5, -0.25]))
    same(found, {name: base[name] + 0.5 * (one[name] - base[name]) - 0.25 * (two[name] - base[name]) for name in base})
    both = made(TaskArithmetic(base=models["base"], models=[models["one"], models["two"]], weights=0.3))
    same(both, {name: 0.4 * base[name] + 0.3 * (one[name] + two[name]) for name in base})


def reference_ties(base: Arrays, parts: list[Arrays], density: float, scale: float) -> Arrays:
    """As the paper has it: every task vector flat, trimmed as a whole; then entry by entry."""
    flat = [np.concatenate([(part[name] - base[name]).ravel() for name in base]) for part in parts]
    kept = []
    for vector in flat:
        largest = np.argsort(-np.abs(vector), kind="stable")[: round(density * vector.size)]
        trimmed = np.zeros_like(vector)
        trimmed[largest] = vector[largest]
        kept.append(trimmed)
    together = np.stack(kept)
    sign = np.sign(together.sum(0))
    agreed = (np.sign(together) == sign) & (together != 0)
    counts = agreed.sum(0)
    merged = np.where(counts > 0, np.where(agreed, together, 0).sum(0) / np.maximum(counts, 1), 0.0)
    found, place = {}, 0
    for name, values in base.items():
        found[name] = values + scale * merged[place : place + values.size].reshape(values.shape)
        place += values.size
    return found


@pytest.mark.parametrize(("density", "scale"), [(0.2, 1.0), (1.0, 0.7), (0.01, 2.0)])
def test_ties_trims_elects_and_merges(models: dict[str, str], density: float, scale: float) -> None:
    parts = ["one", "two", "three"]
    found = made(Ties(base=models["base"], models=[models[name] for name in parts], density=density, scale=scale))
    wanted = reference_ties(arrays(models["base"]), [arrays(models[name]) for name in parts], density, scale)
    same(found, wanted)


def test_weights_that_no_model_has_changed_stay_as_they_are(models: dict[str, str]) -> None:
    same(made(Ties(base=models["base"], models=[models["base"], models["base"]], density=1)), arrays(models["base"]))


@pytest.fixture(scope="module")
def adapters(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = []
    for number, (rank, alpha) in enumerate(((2, 8), (4, 4))):
        model = load_model(models["base"], lora=Lora(rank=rank, alpha=alpha))
        torch.manual_seed(number)
        for name, parameter in model.module.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn_like(parameter) / 10
        directory = tmp_path_factory.mktemp("adapted")
        model.save(directory)
        found.append(str(directory))
    return found


def test_stacked_adapters_add_their_products(models: dict[str, str], adapters: list[str]) -> None:
    wanted = arrays(models["base"])
    for directory, coefficient, scale in zip(adapters, (1.0, 0.5), (4.0, 1.0), strict=True):
        factors = load_file(Path(directory) / "adapter" / "adapter_model.safetensors")
        for key in [key for key in factors if "lora_A" in key]:
            down, up = (factors[name].double().numpy() for name in (key, key.replace("lora_A", "lora_B")))
            name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            wanted[name] = wanted[name] + coefficient * scale * up @ down
    for parts in (adapters, [f"{directory}/adapter" for directory in adapters]):  # either directory names it
        stack = Stack(models=parts, weights=[1.0, 0.5])
        stack.require(named)
        found = made(stack)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_adapter_next_to_a_model_is_sealed_too(models: dict[str, str], adapters: list[str]) -> None:
    start = {"merge": {"kind": "stack", "models": adapters}}
    read = load_recipe(recipe(start, models["one"]))
    (before,) = inputs_of(read.stages, print).values()
    factors = Path(adapters[0]) / "adapter" / "adapter_model.safetensors"
    assert str(factors) in before
    assert str(Path(models["base"]) / "model.safetensors") in before  # what they are added to
    assert list(Average(models=adapters).extra_directories()) == []
    kept = factors.read_bytes()
    factors.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        assert [name for name, facts in inputs_of(read.stages, print)["main"].items() if facts != before[name]] == [
            str(factors)
        ]
    finally:
        factors.write_bytes(kept)


def recipe(start: dict[str, Any], teacher: str, **more: Any) -> dict[str, Any]:
    return {
        "student": start, "teachers": {"t": teacher}, "prompts": {"source": "task:addition"}, "device": "cpu",
        "rollout": {"prompts": 2, "max_new_tokens": 3}, "train": {"steps": 1}, "eval": {"prompts": 0},
        "sampler": {"slots": 2}, "log": {"start_table": False}, **more,
    }  # fmt: skip


def test_a_run_starts_from_a_merge_and_a_later_stage_from_a_merge_of_stages(
    models: dict[str, str], tmp_path: Path
) -> None:
    merge = {"kind": "task_arithmetic", "base": models["base"], "models": ["stage:one", models["two"]], "weights": 0.5}
    stages = [
        {"name": "one", "student": {"merge": {"models": [models["one"], models["two"]]}}},
        {"name": "both", "student": {"merge": merge}},
    ]
    run = opd.run(
        recipe({"merge": {"models": ["stage:nowhere"]}}, models["three"], stages=stages), out=tmp_path / "run"
    )
    one, two = arrays(models["one"]), arrays(models["two"])
    same(arrays(tmp_path / "run/merged/one"), {name: (one[name] + two[name]) / 2 for name in one})
    end = arrays(tmp_path / "run/checkpoints/one/step-000001")
    same(arrays(tmp_path / "run/merged/both"), {name: (end[name] + two[name]) / 2 for name in one})
    assert run.summary["status"] == "done"
    again = opd.run(tmp_path / "run/resolved.yaml", out=tmp_path / "again", reuse=[tmp_path / "run"])
    assert again.summary["status"] == "done"
    for name in ("one", "both"):
        there, here = (tmp_path / where / f"merged/{name}/model.safetensors" for where in ("run", "again"))
        assert here.samefile(there)
    assert sorted(path.name for path in (tmp_path / "again/merged").iterdir()) == ["both", "one"]
    resolved = load_recipe(tmp_path / "run/resolved.yaml").stages
    assert [stage.student.model for stage in resolved] == ["merge:one", "merge:both"]
    further = load_recipe(recipe({"merge": {"models": ["a"]}}, "t", stages=[{"name": "one"}, {"name": "two"}])).stages[
        1
    ]
    assert (further.student.model, further.student.merge) == ("stage:one", None)


def test_parts_that_do_not_fit_are_rejected_before_anything_is_loaded(models: dict[str, str], tmp_path: Path) -> None:
    wider = save_tiny(tmp_path / "wider", hidden_size=64)
    with pytest.raises(RecipeError, match=r"do not have the same shapes: model.embed_tokens.weight is .*64.*32"):
        make_plan(load_recipe(recipe({"merge": {"models": [models["one"], wider]}}, models["one"])))
    foreign = save_tiny(tmp_path / "foreign")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(foreign)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(foreign)
    start = {"merge": {"kind": "ties", "base": models["one"], "models": [foreign]}}
    with pytest.raises(RecipeError, match="do not share a tokenizer: 1 ids differ"):
        make_plan(load_recipe(recipe(start, models["one"])))
    with pytest.raises(UserError, match="is not one and has none in its directory"):
        make_plan(load_recipe(recipe({"merge": {"kind": "stack", "models": [models["one"]]}}, models["one"])))


LORA = {"rank": 2, "alpha": 4}


@pytest.mark.parametrize(
    ("kind", "one", "two", "what"),
    [
        ("average", {}, {"model": "wider"}, r"'stage:two' and 'stage:one' do not have the same shapes: .*64.*32"),
        ("stack", {}, {"model": "base", "lora": LORA}, r"stack adds LoRA adapters, and 'stage:one' is trained without"),
        ("stack", {"lora": LORA}, {"lora": LORA}, r"'stage:one' has '.*base'; 'stage:two' has 'stage:one'"),
        ("stack", {"lora": LORA}, {"model": "other", "lora": LORA}, r"one base, and these have several"),
    ],
)
def test_merges_of_stages_that_cannot_be_made_are_rejected_before_any_of_them_trains(
    kind: str, one: dict[str, Any], two: dict[str, Any], what: str, models: dict[str, str], tmp_path: Path
) -> None:
    known = {"wider": save_tiny(tmp_path / "wider", hidden_size=64), "base": models["base"], "other": models["one"]}
    if "model" in two:
        two = {**two, "model": known[two["model"]]}
    stages = [
        {"name": "one", "student": one},
        {"name": "two", "student": two, "teachers": {"t": two.get("model", models["two"])}},
        {"name": "both", "student": {"merge": {"kind": kind, "models": ["stage:one", "stage:two"]}}},
    ]
    given = recipe({"model": models["base"]}, models["two"], stages=stages)
    for refused in (lambda: make_plan(load_recipe(given)), lambda: opd.run(given, out=tmp_path / "run")):
        with pytest.raises(RecipeError, match=what):
            refused()
    assert not (tmp_path / "run").exists()


def test_adapters_of_stages_with_one_base_are_stacked(models: dict[str, str], tmp_path: Path) -> None:
    start = {"model": models["base"], "lora": LORA}
    stages = [
        {"name": "one"},
        {"name": "two", "student": start},
        {"name": "both", "student": {"merge": {"kind": "stack", "models": ["stage:one", "stage:two"]}}},
    ]
    given = recipe(start, models["two"], stages=stages)
    assert [plan.stage for plan in make_plan(load_recipe(given))] == ["one", "two", "both"]
    assert opd.run(given, out=tmp_path / "run").summary["status"] == "done"


@pytest.mark.parametrize(
    ("start", "what"),
    [
        ({"model": "smol", "merge": {"models": ["a", "b"]}}, "two starts: keep one"),
        ({"model": "merge:main"}, "write what is merged"),
        ({"merge": {"models": ["a", "b"]}, "revision": "x"}, "student.revision applies to one model"),
        ({"merge": {"models": ["a", "b"], "weights": [1]}}, "1 for 2 models"),
        ({"merge": {"kind": "task_arithmetic", "models": ["a"]}}, "base"),
        ({"merge": {"kind": "averge", "models": ["a"]}}, "did you mean 'average'"),
        ({"merge": {"models": ["a"], "density": 0.5}}, "density belongs to merge ties"),
        ({"merge": {"models": ["stage:b"]}}, "no other stage is called 'b'"),
        ({"merge": {"models": []}}, "at least 1"),
    ],
)
def test_merges_that_mean_nothing_are_rejected_when_read(start: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        load_recipe(recipe(start, "tiny/generalist"))


def test_paths_of_parts_are_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "student: {merge: {kind: ties, base: ./b, models: [./c, tiny/generalist, 'stage:s']}}\nprompts: task:addition\n"
        "stages: [{name: s, student: smol}, {name: t, teachers: {t: smol}}]\nteachers: smol\n"
    )
    recipe = load_recipe(tmp_path / "x.yaml", ["stages.1.student={merge: {models: [./c, tiny/pairs]}}"])
    assert recipe.stages[0].student.merge is None
    assert recipe.stages[1].starts == [str(Path.cwd() / "c"), "tiny/pairs"]
    assert sorted(Family("merge").names()) == ["average", "stack", "task_arithmetic", "ties"]
