"""Every shipped recipe is parsed; every method is at most 30 lines and really runs a few steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import opd
from opd.recipe import FAMILIES, load_recipe, parse_yaml, recipe_facts, shipped_recipes
from tests.support import methods_page
from tests.support.chat_endpoint import Served, serving

METHODS = [name for name in shipped_recipes() if name.startswith("methods/")]
SHOWN = (
    "opd gkd thinking-machines mopd mimo-objective opsd gold grpo sft multi-turn-opd ppo spin"  # run by `make test` too
)
QUICK = [f"methods/{name}" for name in SHOWN.split()]


@pytest.mark.parametrize("name", shipped_recipes())
def test_parses_and_opens_with_a_comment(name: str) -> None:
    assert load_recipe(name).stages
    assert shipped_recipes()[name].read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", METHODS)
def test_a_method_says_where_it_comes_from(name: str) -> None:
    facts = recipe_facts(shipped_recipes()[name].read_text(encoding="utf-8"))
    assert facts.get("family") in FAMILIES, f"{name}: add a comment line `# family: … | source: … | evidence: …`"
    assert facts["source"]
    assert facts["evidence"]


def test_the_page_of_methods_is_up_to_date() -> None:
    written = methods_page.PAGE.read_text(encoding="utf-8")
    assert written == methods_page.page(), "run `python -m tests.support.methods_page`"


@pytest.fixture
def adding() -> Iterator[Served]:
    with serving() as found:
        yield found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_a_method_is_a_short_file_and_runs(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert len(shipped_recipes()[name].read_text(encoding="utf-8").splitlines()) <= 30
    small = [
        "train.steps=2",
        "rollout.prompts=4",
        "eval.prompts=2",
        "eval.teachers=false",
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
            "sampler.slots=4",
        ]
        small += ["sampler.prefill_rows=1", "sampler.prefill_chunk=8"]
    if name in ("methods/ovd", "methods/ovd-cut"):  # the endpoint adds
        address = request.getfixturevalue("adding").address
        places = ("demonstrations", "demonstrations.by")
        small += ["rollout.samples=2", *(f"rollout.{place}.endpoint.address={address}" for place in places)]
    if name == "methods/lightning":  # scores in one stage, trains in the other
        small = [*small[1:2], *small[3:], "stages.1.eval.prompts=2"]
    if name == "methods/gad":  # two stages
        small += ["stages.0.objective.coefficient.after=1", "rollout.samples=3"]
    stages = parse_yaml(shipped_recipes()[name].read_text(encoding="utf-8"), name).get("stages", [])
    small += [f"stages.{n}.train.steps=2" for n, stage in enumerate(stages) if "steps" in stage.get("train", {})]
    run = opd.run(name, overrides=small, out=tmp_path / "run")
    assert sum(line["step"] for line in run.metrics) == 3 * max(1, len(stages))
    steps = [stage.train.steps for stage in load_recipe(run.directory / "resolved.yaml").stages]
    assert sum(line["step"] for line in run.metrics) == sum(last * (last + 1) // 2 for last in steps)
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


@pytest.mark.slow
def test_gad_lifts_a_tiny_model_by_the_score_of_its_discriminator(tmp_path: Path) -> None:
    changes = ["eval.prompts=0", "stages.1.train.steps=20", "device=cpu", "threads=1"]
    run = opd.run("methods/gad", overrides=changes, out=tmp_path / "run")
    warm, gad = ([line for line in run.metrics if line["stage"] == name] for name in ("warm-up", "gad"))

    def mean(lines: list[dict[str, float]], key: str) -> float:
        return sum(line[key] for line in lines) / len(lines)

    assert mean(warm[:2], "accuracy/judge") < 0.75
    assert mean(warm[-5:], "accuracy/judge") > 0.8  # it tells right answers from wrong ones
    assert mean(gad[-5:], "reward") > mean(gad[:2], "reward") + 0.1
