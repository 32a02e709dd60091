"""Every benchmark runs at its smallest size, so that none falls behind the code it measures."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

import opd
from opd.recipe import load_recipe
from tests.support.crash import FORKS, ended

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
SMALLEST = {
    "beyond_teacher": "--steps 1 --seeds 1 --weights 0 1 --prompts 8 --workers 0",
    "opd_vs_rl": "--steps 1 --seeds 1 --rates 1e-4 --prompts 8 --workers 0 --methods GRPO sum",
    "integrate": "--directory {run} --smallest --arms opd-exact sft-gold merge-average --steps 1 --rollouts 8 --prompts 4 --seeds 0 --workers 0",
    "headline": "--directory {run} --steps 1 --rl-steps 1 --rollouts 8 --rates 1e-3 --rl-rates 1e-4 --groups 4 --other-sizes 1 --points 1 --prompts 4 --train-rows 50 --seeds 1 --workers 0",
    "disputes": "--directory {run} --steps 2 --rollouts 8 --prompts 4 --rates 1e-3 --seeds 1 --workers 0 --arms sum hard-switch",
    "defects": "--directory {run} --steps 1 --rollouts 8 --prompts 4 --rates 1e-3 --teacher-steps 1 --seeds 1 --workers 0",
    "horizon": "--directory {run} --steps 1 --rollouts 8 --prompts 4 --rates 1e-3 --teacher-steps 1 --lengths 4 8 --methods on-policy off-policy --tokens 32 --seeds 1 --workers 0",
    "added_teachers": "--directory {run} --steps 1 --rollouts 8 --prompts 4 --rates 1e-3 --seeds 1 --workers 0",
    "gradient_variance": "--teachers 1 5 --rollouts 10 --batches 2",
    "quickstart": "--directory {run} --seeds 0 --set train.steps=1 rollout.prompts=8 eval.prompts=2",
    "quoted": "",
    "zoo": "--directory {run} --methods opd,gad --steps 6 --rollouts 9 --prompts 4 --seeds 1 --evaluations 1",
    "recovery": "--directory {run} --steps 1 --rollouts 8 --prompts 4 --rates 1e-3 --seeds 1 --workers 0",
    "labs": "--directory {run} --name smallest --workers 1 --labs labs/qwen3 --set train.steps=1 stages.off-policy.train.steps=1 rollout.prompts=8 eval.prompts=2 eval.k=2",
    "monitors": "--directory {run} --name smallest --workers 1 --recipes quickstart --set train.steps=1 rollout.prompts=8 eval.prompts=2 eval.teachers=false eval.weight_average=false",
    "diagnose_ranking": "--steps 1 --prompts 4 --domains 1 --asked 4",
    "self_distillation": "--tiny --steps 2 --seeds 1 --prompts 8 --workers 0",
    "smol": "--run {run}",
    "length_bias": "--rollouts 40 --seeds 1",
    "plot_divergences": "",
    "divergence": "--device cpu --tokens 16 --vocabulary 64",
    "episodes": "--episodes 4 --slots 2 --turn-tokens 4 --seconds 0.01 --repeats 1",
    "sampler": "--device cpu --layers 1 --requests 4 --new-tokens 4 --slots 2",
    "decode": "--device cpu --shapes tiny --slots 4 --columns 24 --steps 4",
    "step_gpu": "--device cpu --cases tiny --steps 1 --warm 1 --profile",
    "tails": "--only arithmetic --rollouts 4",
    "topk": "--device cpu --tokens 16 --vocabulary 64 --width 8 --repeats 1",
    "step_curves": "--device cpu --smallest --warm 0",
    "ranks_gpu": "--device cpu --case tiny --steps 1 --warm 1 --models {run}",
    "step": "--alone --model random --layers 1 --prompts 3 --new-tokens 4 --steps 1",
    "step_profile": "--layers 1 --prompts 3 --new-tokens 4 --steps 1",
    "teacher_pool": "--student tiny --teacher tiny --teachers 3 --prompts 3 --new-tokens 3 --steps 2 --arms one two all",
    "served_teacher": "--model tiny/arithmetic --name smallest --rollouts 4 --response 8 --pairs 1",
    "store_index": "--rows 2000",
    "store_writer": "--tokens 4000 --slots 8 --mean 20 --repeats 1",
    "async": "--staleness 1 --seeds 1 --steps 2 --prompts 4 --questions 4 --processes 0",
    "agents": "--directory {run} --seeds 1 --arms one-turn score --tokens 60 --steps 4 --rollouts 8 --start-steps 6 1 --teacher-steps 1 1 --prompts 3",
    "store_overhead": "--model tiny/arithmetic --pairs 2 --requests 2 --new-tokens 4",
}
UNTRIED = ("step_trl",)  # TRL is no dependency
DRAWN = ("length_bias", "plot_divergences", "self_distillation", "integrate", "async")  # in a way of their own
RECIPE = {
    "student": "tiny/generalist", "prompts": "task:addition", "eval": {"prompts": 4}, "train": {"steps": 1},
    "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 4},
    "objective": {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}},
}  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The benchmarks in a tree of their own: results and figures are written beside the scripts."""
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    return tmp_path


def run(copy: Path, name: str, arguments: str) -> None:
    process = FORKS.Process(target=script, args=(str(copy), name, arguments.split()))
    process.start()
    assert ended(process) == 0, (copy / "out.txt").read_text(encoding="utf-8")[-6000:]


def run_text(copy: Path, name: str, arguments: str) -> str:
    run(copy, name, arguments)
    return (copy / "out.txt").read_text(encoding="utf-8")


def script(root: str, name: str, arguments: list[str]) -> None:
    """What `python benchmarks/NAME.py ARGUMENTS` does, in a process that has imported torch already."""
    with open(f"{root}/out.txt", "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    os.environ |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    torch.set_num_threads(1)
    sys.argv = [f"{root}/benchmarks/{name}.py", *arguments]
    sys.path.insert(0, f"{root}/benchmarks")
    runpy.run_path(sys.argv[0], run_name="__main__")


def test_each_benchmark_has_a_smallest_size() -> None:
    assert set(SMALLEST) == {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"runs", *UNTRIED}


@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs(name: str, copy: Path) -> None:
    if "save_figure" in (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8") or name in DRAWN:
        pytest.importorskip("matplotlib")
    directory = copy / "run"
    if "--run {run}" in SMALLEST[name]:
        opd.run(RECIPE, out=directory)
    run(copy, name, SMALLEST[name].format(run=directory))


def test_the_zoo_reads_every_method_that_it_does_not_leave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    zoo = importlib.import_module("zoo")
    known, left_out = zoo.methods()
    assert {"opd", "gkd", "sft", "grpo", "rlhf"} <= set(known)
    assert left_out["uld"] == "its teacher has another tokenizer"
    args = argparse.Namespace(steps=6, rollouts=64, evaluations=3, prompts=5)
    for name in known:
        stages = load_recipe(zoo.adapted(name, 0, 1.0, args)).stages
        assert sum(stage.train.steps for stage in stages) == pytest.approx(6, abs=1), name
        for stage in stages:
            assert 48 <= stage.rollout.prompts * stage.rollout.samples <= 64, name


def test_the_edition_for_a_gpu_goes_through(copy: Path) -> None:
    """On a CPU, with a tiny model: the start, specialists of both origins, arms that ask them, imitate them and add them up."""
    where = copy / "run"
    size = "--steps 1 --start-steps 1 --specialist-steps 1 --rollouts 8 --prompts 4 --seeds 0 --workers 0 --smallest"
    shared = f"--edition smol --directory {where} --domains words {size}"
    arms = "--arms opd-exact sft-teacher sft-teacher-opd merge-stack --chosen sft-teacher-opd=1e-3"
    run(copy, "integrate", f"{shared} {arms}")
    run(copy, "integrate", f"specialists tune arms {shared} --origin foreign --arms opd-exact")
    made = [path.name for path in (where / "entries").iterdir()]
    for arm in ("opd-exact", "sft-teacher", "opd-exact-foreign"):  # tuned at one rate, then carried out with it
        assert sum(re.fullmatch(rf"{arm}-[\d.e-]+-1-seed\d+\.json", name) is not None for name in made) == 2
    untuned = [name for name in made if name.startswith("sft-teacher-opd")]
    assert untuned == ["sft-teacher-opd-0.001-1-seed0.json"]
    assert "nothing to integrate" in run_text(copy, "integrate", f"report {shared}")


def test_the_step_is_compared_with_trl(copy: Path) -> None:
    pytest.importorskip("trl")
    run(copy, "step", SMALLEST["step"].replace("--alone ", ""))
    results = json.loads((copy / "benchmarks" / "results" / "step-cpu.json").read_text(encoding="utf-8"))
    check = results["comparisons"][0]["check"]
    for name in ("loss", "grad_norm"):  # on the same tokens
        assert check["opd"][name] == pytest.approx(check["trl"][name], rel=1e-3)


def test_the_step_of_shapes_is_compared_with_trl(copy: Path) -> None:
    pytest.importorskip("trl")
    run(copy, "step_gpu", "--device cpu --cases tiny --steps 1 --warm 1 --trl")
    results = json.loads((copy / "benchmarks" / "results" / "step-shapes-cpu.json").read_text(encoding="utf-8"))
    found = results["cases"]["tiny"]["trl"]
    assert found["batch"]
    assert all(value < 1e-3 for value in found["check"]["apart"].values())
