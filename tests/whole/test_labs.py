"""The labs' pipelines: planned by default, and run with every stage cut down to a step or two."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import opd
from opd.recipe import load_recipe, shipped_recipes
from opd.runner.plan import make_plan

LABS = [name for name in shipped_recipes() if name.startswith("labs/")]


@pytest.mark.slow
def test_a_lab_can_be_planned() -> None:
    recipe = load_recipe("labs/default", ["eval.prompts=2"])
    assert [plan.stage for plan in make_plan(recipe)] == [stage.name for stage in recipe.stages]


def cut_down(name: str) -> list[str]:
    """One step of a few prompts each; groups stay groups."""
    raw = yaml.safe_load(shipped_recipes()[name].read_text(encoding="utf-8"))
    changes = [
        "eval.prompts=2",
        "eval.teachers=false",
        "sampler.slots=8",
        "rollout.prompts=12",
        "log={start_table: false, samples: 0}",
    ]
    changes += ["eval.k=2"] if raw["eval"].get("k") else []
    for stage in [{"rollout": raw["rollout"]}, *raw["stages"]]:
        place = f"stages.{stage['name']}." if "name" in stage else ""
        rollout = stage.get("rollout", {})
        changes += [f"{place}rollout.prompts=12"] if "prompts" in rollout else []
        changes += [f"{place}rollout.samples=2"] if rollout.get("samples", 1) > 1 else []
        changes += [f"{place}train.steps=1"] if place else []
        changes += [f"{place}eval.every=1"] if "every" in stage.get("eval", {}) else []
    return changes


@pytest.mark.slow
@pytest.mark.parametrize("name", LABS)
def test_a_lab_runs_and_tells_its_story(name: str, tmp_path: Path) -> None:
    run = opd.run(name, overrides=cut_down(name), out=tmp_path / "run")
    assert run.summary["status"] == "done"
    stages = [stage.name for stage in load_recipe(name).stages]
    passed_over = [chapter["stage"] for chapter in run.summary["story"] if "passed_over" in chapter]
    assert [chapter["stage"] for chapter in run.summary["story"]] == [
        stage for stage in stages if any(line["stage"] == stage for line in run.metrics) or stage in passed_over
    ]
    assert "the story: pass@1" in (run.directory / "log.txt").read_text(encoding="utf-8")
    assert (run.directory / "graph.mmd").read_text(encoding="utf-8").count("-->") >= len(stages) - 1
