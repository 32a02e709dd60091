"""Prompts that come again by what earlier passes have shown of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import DataError, RecipeError
from opd.data.sources import open_sources, prompt_source
from opd.data.stream import Curriculum, PassRate, PromptStream, TeacherDistance, TopOverlap
from opd.recipe import load_recipe
from opd.runner.plan import make_plan
from tests.support.crash import same_run
from tests.support.helpers import save_tiny
from tests.support.interrupted import SCORED, Crash, small, strike
from tests.support.ranks import Job, differences, together


def stream(curriculum: Curriculum, limit: int = 20) -> PromptStream:
    found = PromptStream(open_sources([prompt_source("task:addition", limit=limit)]), [1], 0)
    found.follow(curriculum)
    return found


def test_chances_are_largest_at_the_frontier_and_follow_the_formula() -> None:
    rule = PassRate(a=2, b=1)
    values = np.linspace(0, 1, 101)
    wanted = values**2 * (1 - values)
    assert [rule.chance(value, {}) for value in values] == pytest.approx((wanted / (4 / 27)).tolist())
    assert PassRate().chance(0.5, {}) == 1
    known = {str(number): float(number) for number in range(10)}
    far, near = TeacherDistance(share=0.3), TeacherDistance(share=0.3, prefer="near")
    assert [name for name, value in known.items() if far.chance(value, known)] == ["7", "8", "9"]
    assert [name for name, value in known.items() if near.chance(value, known)] == ["0", "1", "2"]
    apart, alike = TopOverlap(share=0.3), TopOverlap(share=0.3, prefer="near")  # a small overlap is far
    assert [name for name, value in known.items() if apart.chance(value, known)] == ["0", "1", "2"]
    assert [name for name, value in known.items() if alike.chance(value, known)] == ["7", "8", "9"]


def test_every_prompt_comes_once_and_then_by_its_chance() -> None:
    found = stream(PassRate(least=0.05))
    first = [visit.prompt.id for visit in found.take(20)]
    assert len(set(first)) == 20
    rates = {name: (0.5 if number < 10 else 1.0) for number, name in enumerate(sorted(first))}
    found.study(rates)
    again = Counter(visit.prompt.id for visit in found.take(200))
    frontier = sum(count for name, count in again.items() if rates[name] == 0.5)
    assert frontier / 200 == pytest.approx(1 / 1.05, abs=0.05)  # the others come with one chance in twenty
    assert found.skipped == 0
    resumed = stream(PassRate(least=0.05))
    resumed.restore(found.state())
    assert [visit.prompt.id for visit in resumed.take(30)] == [visit.prompt.id for visit in found.take(30)]


@pytest.mark.parametrize(
    "curriculum", [{"kind": "kl", "share": 0.4}, {"kind": "pass_rate", "least": 0.2}, {"kind": "overlap", "k": 4}]
)
def test_an_interrupted_run_takes_the_same_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curriculum: dict[str, Any]
) -> None:
    models = {name: save_tiny(tmp_path / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}
    prompts = [{"source": "task:addition", "domain": "a", "limit": 8}]
    spec = small(
        models, prompts=prompts, curriculum=curriculum, rollout={"prompts": 4, "samples": 2, "max_new_tokens": 4},
        train={"steps": 5, "lr": 1e-2}, eval={"prompts": 0}, rewards={"kind": "format", "pattern": "[0-9a-m].*"},
    )  # fmt: skip
    reference = opd.run(spec, out=tmp_path / "reference")
    assert reference.metrics[-1]["curriculum/passed_over"] > 0
    assert reference.metrics[-1]["curriculum/known"] == 8
    strike(monkeypatch, SCORED, 4, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    same_run(opd.resume(tmp_path / "run"), reference)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"curriculum": "pass_rate"}, "needs several samples"),
        ({"curriculum": "kl", "teachers": {}, "objective": "cross_entropy", "rollout": {"data_share": 1}}, "there is none"),
        ({"curriculum": "kl", "rollout": {"staleness": 1}}, "before earlier answers are known"),
        ({"curriculum": "kl", "rollout": {"data_share": 1}}, "kl goes by the student's own answers"),
        ({"curriculum": "overlap", "objective": {"form": "policy_gradient"}}, "curriculum overlap compares distributions"),
        ({"curriculum": "overlap", "log": {"overlap": 4}}, "one number is measured"),
        ({"log": {"overlap": 4}, "teachers": {"a": {"model": "y", "view": "bytes"}}, "objective": "uld"}, "tokenizer of teachers.a differs"),
        ({"log": {"overlap": 4}, "teachers": {"a": {"kind": "openai", "address": "http://x", "model": "y"}},
          "objective": {"support": "topk", "k": 3, "side": "teacher"}}, "the 3 likeliest ids"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_rejected(changes: dict[str, Any], why: str) -> None:
    base = {"student": "x", "teachers": {"a": "y"}, "prompts": [{"source": "task:addition", "domain": "a", "limit": 9}]}
    with pytest.raises(RecipeError, match=why):
        load_recipe({**base, **changes})


def test_endless_sources_are_rejected() -> None:
    with pytest.raises(DataError, match="have no end"):
        stream(PassRate(), None)  # type: ignore[arg-type]
    recipe = {
        "student": "tiny/generalist",
        "teachers": {"a": "tiny/arithmetic"},
        "prompts": ["task:addition"],
        "curriculum": "kl",
    }
    with pytest.raises(DataError, match="have no end"):
        make_plan(load_recipe(recipe))


@pytest.mark.scale
def test_two_ranks_take_the_prompts_of_one(tmp_path: Path) -> None:
    changes = ["train.steps=4", "eval.prompts=0", "rollout.prompts=6", "prompts.0.limit=12", "curriculum=overlap"]
    for size in (1, 2):
        together(size, tmp_path / f"log-{size}", Job(tmp_path / f"run-{size}", "methods/curriculum", changes))
    assert differences(tmp_path / "run-1", tmp_path / "run-2") == []
