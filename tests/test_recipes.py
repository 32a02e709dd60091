"""Every shipped recipe is parsed; every method is at most 30 lines and really runs a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import opd
from opd.config import load_recipe, shipped_recipes

METHODS = [name for name in shipped_recipes() if name.startswith("methods/")]


@pytest.mark.parametrize("name", shipped_recipes())
def test_parses_and_opens_with_a_comment(name: str) -> None:
    assert load_recipe(name).stages
    assert shipped_recipes()[name].read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_short_file_and_runs(name: str, tmp_path: Path) -> None:
    assert len(shipped_recipes()[name].read_text(encoding="utf-8").splitlines()) <= 30
    small = ["train.steps=2", "rollout.prompts=8", "eval.prompts=8", "sampler.slots=8", "device=cpu"]
    if name == "methods/hard-switch":  # both halves
        small += ["objective.0.coefficient.until=1", "objective.1.coefficient.after=1"]
    if name == "methods/icepop":  # a bfloat16 sampler is slow on a CPU
        small += [
            "rollout.prompts=1",
            "rollout.max_new_tokens=3",
            "eval.prompts=1",
            "eval.teachers=false",
            "sampler.slots=4",
        ]
        small += ["sampler.prefill_rows=1", "sampler.prefill_chunk=8"]
    run = opd.run(name, overrides=small, out=tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert run.summary["status"] == "done"
    assert run.summary["stages"][0]["evals"]
    assert (run.model / "model.safetensors").is_file()


@pytest.mark.slow
def test_grpo_alone_lifts_a_tiny_model_past_nine_in_ten(tmp_path: Path) -> None:
    changes = ["prompts.0.source=task:caesar", "prompts.0.domain=ciphers", "train.steps=60", "eval.prompts=200", "device=cpu", "threads=1"]  # fmt: skip
    run = opd.run("methods/grpo", overrides=changes, out=tmp_path / "run")
    scores = run.summary["stages"][0]["evals"]["ciphers"]
    assert scores["before"] < 0.8
    assert scores["after"] >= 0.9
