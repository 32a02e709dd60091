"""Whole runs on a CUDA device, as a recipe names it: sampled, scored, updated, measured and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import opd
from tests.support.helpers import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RECIPES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "another name of the device": {"device": "cuda:0"},
    "lora": {"student": {"lora": {"rank": 4}}},
    "policy gradient": {"objective": {"form": "policy_gradient"}},
    "one version behind": {"rollout": {"prompts": 4, "max_new_tokens": 6, "staleness": 1}},
    "float32": {"train": {"steps": 4, "lr": 1e-2, "precision": "float32"}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}


def recipe_of(models: dict[str, str], changed: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "teachers": {"a": models["teacher"]},
        "prompts": [{"source": "task:addition", "domain": "a"}],
        "rollout": {"prompts": 4, "max_new_tokens": 6},
        "train": {"steps": 4, "lr": 1e-2},
        "eval": {"prompts": 2},
        "checkpoint": {"every": 2},
        "device": "cuda",
    }
    recipe = base | changed
    return recipe | {"student": {"model": models["student"]} | recipe.get("student", {})}


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_ends(name: str, models: dict[str, str], tmp_path: Path) -> None:
    run = opd.run(recipe_of(models, RECIPES[name]), out=tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert all(line["reverse_kl"] >= 0 for line in run.metrics if "reverse_kl" in line)
    assert opd.resume(tmp_path / "run").metrics == run.metrics  # it knows that it is done


def test_a_repeated_run_is_the_same(models: dict[str, str], tmp_path: Path) -> None:
    """Tokens, losses and gradients, to the bit, with passes that are recorded on the way."""
    recipe = recipe_of(models, {"rollout": {"prompts": 16, "max_new_tokens": 40}, "train": {"steps": 8, "lr": 1e-2}})
    first, second = (opd.run(recipe, out=tmp_path / name) for name in ("first", "second"))
    for name in ("tokens", "loss", "grad_norm", "entropy", "mismatch"):
        assert [line.get(name) for line in first.metrics] == [line.get(name) for line in second.metrics], name
