"""Every shipped recipe is parsed; every method is at most 30 lines and really runs a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import opd
from opd.recipe import load_recipe, shipped_recipes
from tests.chat_endpoint import Served, serving

METHODS = [name for name in shipped_recipes() if name.startswith("methods/")]


@pytest.mark.parametrize("name", shipped_recipes())
def test_parses_and_opens_with_a_comment(name: str) -> None:
    assert load_recipe(name).stages
    assert shipped_recipes()[name].read_text(encoding="utf-8").startswith("# ")


@pytest.fixture
def adding() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_a_short_file_and_runs(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert len(shipped_recipes()[name].read_text(encoding="utf-8").splitlines()) <= 30
    small = [
        "train.steps=2",
        "rollout.prompts=4",
        "eval.prompts=2",
        "sampler.slots=8",
        "device=cpu",
        "log.start_table=false",
    ]
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
    if name == "methods/ovd":  # the endpoint adds
        address = request.getfixturevalue("adding").address
        places = ("demonstrations", "demonstrations.by")
        small += ["rollout.samples=2", *(f"rollout.{place}.endpoint.address={address}" for place in places)]
    if name == "methods/lightning":  # scores in one stage, trains in the other
        small = (
            small[1:2] + small[3:] + [f"stages.{stage}.train.steps=1" for stage in (0, 1)] + ["stages.1.eval.prompts=2"]
        )
    run = opd.run(name, overrides=small, out=tmp_path / "run")
    assert sum(line["step"] for line in run.metrics) == (2 if name == "methods/lightning" else 3)
    assert run.summary["status"] == "done"
    assert run.summary["stages"][-1]["evals"]
    assert (run.model / "model.safetensors").is_file()


@pytest.mark.slow
def test_grpo_alone_lifts_a_tiny_model_past_nine_in_ten(tmp_path: Path) -> None:
    changes = ["prompts.0.source=task:caesar", "prompts.0.domain=ciphers", "train.steps=30", "eval.prompts=200", "device=cpu", "threads=1"]  # fmt: skip
    run = opd.run("methods/grpo", overrides=changes, out=tmp_path / "run")
    scores = run.summary["stages"][0]["evals"]["ciphers"]
    assert scores["before"] < 0.8
    assert scores["after"] >= 0.9
