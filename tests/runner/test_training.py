"""Whole runs on tiny random models: what a run directory holds, how runs end, and what stops them."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import opd
from opd import cli
from opd.common.errors import (
    DataError,
    ModelError,
    RecipeError,
    RunDirectoryError,
    Stopped,
    TokenizerMismatch,
    TrainingError,
)
from opd.objective.stopping import STOP_RULES, EvaluationHistory
from opd.recipe import load_recipe
from opd.records import Author
from opd.runner import pipeline
from opd.runner.checkpoint import verify_checkpoint
from opd.runner.directory import model_named
from opd.runner.plan import make_plan
from opd.store import iterate
from tests.support.crash import ended, start
from tests.support.helpers import save_tiny


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "one", "two"))}


def recipe(models: dict[str, str], **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "student": models["student"],
        "teachers": {"a": models["one"], "b": models["two"]},
        "prompts": [{"source": "task:addition", "domain": "a"}, {"source": "task:reverse", "domain": "b"}],
        "rollout": {"prompts": 8, "max_new_tokens": 6},
        "sampler": {"slots": 8},
        "train": {"steps": 3, "lr": 3e-3},
        "eval": {"prompts": 4},
        "device": "cpu",
    }
    return base | changes


def test_a_run_leaves_what_it_promises(models: dict[str, str], tmp_path: Path) -> None:
    run = opd.run(
        recipe(
            models,
            train={"steps": 12, "lr": 2e-2, "warmup": 2, "schedule": "cosine"},
            eval={"prompts": 4, "k": 2, "weight_average": True},
        ),
        out=tmp_path / "run",
    )
    names = {path.name for path in run.directory.iterdir()}
    assert {
        "recipe.yaml",
        "resolved.yaml",
        "metrics.jsonl",
        "summary.json",
        "log.txt",
        "samples.jsonl",
        "rollouts",
        "checkpoints",
    } <= names
    assert [line["step"] for line in run.metrics] == list(range(1, 13))
    wanted = {
        "step",
        "stage",
        "loss",
        "reverse_kl",
        "entropy",
        "tokens",
        "response_length",
        "truncated",
        "kl/a",
        "kl/b",
        "time/sample",
        "time/score",
        "time/update",
    }
    assert wanted <= run.metrics[0].keys()
    assert run.metrics[-1]["reverse_kl"] < 0.7 * run.metrics[0]["reverse_kl"]
    (stage,) = run.summary["stages"]
    assert stage["name"] == "main"
    assert {"before", "after", "teacher", "n", "stderr", "weight_average"} <= stage["evals"]["a"].keys()
    assert stage["tokens"] == sum(line["tokens"] for line in run.metrics)
    verify_checkpoint(run.model)
    AutoModelForCausalLM.from_pretrained(run.model)
    assert (run.model / "README.md").read_text().count(models["one"])
    assert len(list(iterate(run.rollouts))) == 12 * 8
    resolved = opd.run(run.directory / "resolved.yaml", overrides=["stages.main.train.steps=1"], out=tmp_path / "again")
    assert resolved.metrics[0]["loss"] == pytest.approx(run.metrics[0]["loss"], rel=1e-5)


def test_the_same_seed_gives_the_same_run(models: dict[str, str], tmp_path: Path) -> None:
    runs = [opd.run(recipe(models, seed=seed), out=tmp_path / str(index)) for index, seed in enumerate((1, 1, 2))]
    losses = [[line["loss"] for line in run.metrics] for run in runs]
    assert losses[0] == losses[1] != losses[2]
    tokens = [[rollout.response_ids.tolist() for rollout in iterate(run.rollouts)] for run in runs]
    assert tokens[0] == tokens[1] != tokens[2]


def test_micro_batches_do_not_change_the_run(models: dict[str, str], tmp_path: Path) -> None:
    losses = []
    for index, budget in enumerate((10, 100000)):
        run = opd.run(recipe(models, train={"steps": 3, "lr": 3e-3, "micro_tokens": budget}), out=tmp_path / str(index))
        losses.append([line["loss"] for line in run.metrics])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_an_existing_directory_is_never_overwritten(
    models: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = [Console(file=io.StringIO(), width=500) for _ in range(2)]
    spec = recipe(models, train={"steps": 1})
    first, second = (opd.run(spec, out=tmp_path / "run", quiet=False, console=console) for console in told)
    assert (first.directory.name, second.directory.name) == ("run", "run-2")
    lines = [console.file.getvalue().splitlines() for console in told]  # type: ignore[attr-defined]
    assert "is taken" not in "".join(lines[0])
    assert lines[1][0].startswith(f"{tmp_path / 'run'} is taken, so this run goes into {tmp_path / 'run-2'}.")
    assert lines[1][-1] == f"run directory: {tmp_path / 'run-2'} ({tmp_path / 'run'} is taken)"

    for command in (["eval", "--prompts", "task:addition", "--n", "2", "--max-new-tokens", "2"], ["chat"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        monkeypatch.setattr(sys, "argv", ["opd", command[0], str(first.directory), *command[1:], "--device", "cpu"])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        assert not leaving.value.code
        assert f"is a run: its last checkpoint is {first.model}" in capsys.readouterr().err
    shutil.rmtree(first.directory / "checkpoints")
    with pytest.raises(RunDirectoryError, match="no checkpoint has been saved"):
        model_named(str(first.directory))
    assert model_named("tiny/generalist") == "tiny/generalist"


@pytest.mark.parametrize(
    ("rollout", "objective", "authors"),
    [
        ({"data_share": 1.0}, {"form": "cross_entropy"}, {Author.DATA}),
        ({"teacher_share": 1.0}, {"form": "cross_entropy"}, {Author.TEACHER}),
        ({"data_share": 0.5}, {"form": "direct", "divergence": "jsd"}, {Author.DATA, Author.STUDENT}),
        ({"data_share": 0.3, "teacher_share": 0.3}, [{"form": "direct"}, {"form": "cross_entropy", "coefficient": 0.1}], {Author.DATA, Author.STUDENT, Author.TEACHER}),
        ({"samples": 3}, {"form": "policy_gradient"}, {Author.STUDENT}),
    ],
)  # fmt: skip
def test_every_trajectory_source(
    models: dict[str, str], tmp_path: Path, rollout: dict, objective: Any, authors: set
) -> None:
    run = opd.run(
        recipe(
            models, rollout={"prompts": 16, "max_new_tokens": 6} | rollout, objective=objective, eval={"prompts": 0}
        ),
        out=tmp_path / "run",
    )
    rollouts = list(iterate(run.rollouts))
    assert {int(author) for item in rollouts for author in item.author} == {int(author) for author in authors}
    for item in rollouts:
        kinds = {"student": Author.STUDENT, "data": Author.DATA, "teacher": Author.TEACHER}
        assert set(item.author.tolist()) == {kinds[item.source.split(":")[0]]}
        if item.source.startswith("teacher:"):
            assert item.source == f"teacher:{item.domain}"
        assert np.isnan(item.logprob).all() == (item.source == "data")
    assert run.metrics[-1]["loss"] != run.metrics[0]["loss"]
    assert "evals" in run.summary["stages"][0]


def test_sft_learns_the_data(models: dict[str, str], tmp_path: Path) -> None:
    changes = {
        "rollout": {"prompts": 32, "max_new_tokens": 12, "data_share": 1.0},
        "objective": {"form": "cross_entropy"},
        "train": {"steps": 30, "lr": 1e-2},
    }
    run = opd.run(recipe(models, teachers={}, eval={"prompts": 0}, **changes), out=tmp_path / "run")
    assert run.metrics[-1]["loss"] < 0.6 * run.metrics[0]["loss"]
    assert run.metrics[0]["reverse_kl"] is None


@pytest.mark.parametrize(
    "objective", [{"form": "policy_gradient"}, pytest.param({"form": "direct"}, marks=pytest.mark.slow)]
)
def test_both_forms_approach_the_teacher(models: dict[str, str], tmp_path: Path, objective: dict) -> None:
    changes = {
        "rollout": {"prompts": 32, "max_new_tokens": 8},
        "objective": objective,
        "train": {"steps": 22, "lr": 2e-2},
    }
    run = opd.run(recipe(models, eval={"prompts": 0}, sampler={"slots": 32}, **changes), out=tmp_path / "run")
    kl = [line["reverse_kl"] for line in run.metrics]
    assert np.mean(kl[-4:]) < 0.7 * np.mean(kl[:3])
    line, exact = run.metrics[0], objective["form"] == "direct"
    assert (line["entropy"] is not None, "entropy_sampled" in line) == (exact, not exact)
    if not exact:
        first = [run.rollouts.load([one.id])[0] for one in run.rollouts.entries.values() if one.versions == (0, 0)]
        assert line["entropy_sampled"] == pytest.approx(
            -np.concatenate([one.logprob for one in first]).mean(), rel=1e-5
        )


@pytest.mark.slow
def test_lora_and_gradient_checkpointing_and_autocast(models: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    student = {"model": models["student"], "lora": {"rank": 4}, "gradient_checkpointing": True}
    run = opd.run(
        recipe(models, student=student, train={"steps": 8, "lr": 2e-2, "precision": "autocast"}), out=tmp_path / "run"
    )
    assert run.metrics[-1]["reverse_kl"] < run.metrics[0]["reverse_kl"]
    assert (run.model / "adapter" / "adapter_model.safetensors").is_file()
    AutoModelForCausalLM.from_pretrained(run.model)


def test_a_bf16_sampler_shows_as_mismatch(models: dict[str, str], tmp_path: Path) -> None:
    gaps = []
    for index, dtype in enumerate(("float32", "bfloat16")):
        sampler = {"slots": 8, "prefill_rows": 1, "prefill_chunk": 8, "dtype": dtype}
        changes = {"objective": {"form": "policy_gradient"}, "train": {"steps": 1}, "eval": {"prompts": 0}}
        run = opd.run(recipe(models, sampler=sampler, **changes), out=tmp_path / str(index))
        gaps.append(run.metrics[0]["mismatch"])
    assert gaps[0] < 1e-5
    assert gaps[1] > 1e-4


def test_stages_hand_their_models_on(models: dict[str, str], tmp_path: Path) -> None:
    stages = [
        {"name": "warm", "rollout": {"data_share": 1.0}, "objective": {"form": "cross_entropy"}, "teachers": {}},
        {"name": "distil"},
        {"name": "back", "student": models["student"], "teachers": {"a": "stage:warm", "b": "stage:distil"}},
    ]
    run = opd.run(
        recipe(
            models,
            stages=stages,
            train={"steps": 2},
            teachers={"a": models["one"], "b": models["two"]},
            eval={"prompts": 0},
        )
        | {"teachers": {"a": models["one"], "b": models["two"]}},
        out=tmp_path / "run",
    )
    assert [stage["name"] for stage in run.summary["stages"]] == ["warm", "distil", "back"]
    assert [line["stage"] for line in run.metrics] == ["warm"] * 2 + ["distil"] * 2 + ["back"] * 2
    assert run.model.parent.name == "back"


def test_best_checkpoint_early_stopping_and_retention(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opd.evaluation import Measures
    from opd.runner.evaluate import Evaluator

    values = iter([0.5, 0.1, 0.9, 0.2, 0.2, 0.2, 0.2, 0.2])
    monkeypatch.setattr(
        Evaluator,
        "_measure",
        lambda self, sampler, who: {"a": Measures(n=4, greedy=next(values), greedy_stderr=0.0)},
    )
    spec = {"prompts": 4, "every": 1, "teachers": False, "early_stop": {"patience": 3}}
    run = opd.run(
        recipe(models, eval=spec, train={"steps": 20}, checkpoint={"every": 1, "keep": 1}), out=tmp_path / "run"
    )
    (stage,) = run.summary["stages"]
    assert stage["best"]["step"] == 2  # before 0.5, step 1: 0.1, step 2: 0.9
    assert stage["steps"] == 5
    assert [path.name for path in run.checkpoints] == ["step-000002", "step-000005"]


def test_a_stage_stops_once_it_is_good_enough(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opd.evaluation import Measures
    from opd.runner.evaluate import Evaluator

    values = iter([0.5, 0.8, 0.1, 0.6, 0.7, 0.2])  # before, both teachers, after every step
    monkeypatch.setattr(
        Evaluator,
        "_measure",
        lambda self, sampler, who: {"a": Measures(n=4, greedy=next(values), greedy_stderr=0.0)},
    )
    spec = {"prompts": 4, "every": 1, "early_stop": {"kind": "target", "of_teacher": 0.85}}
    run = opd.run(recipe(models, eval=spec, train={"steps": 20}), out=tmp_path / "run")
    assert run.summary["stages"][0]["steps"] == 2
    assert "early stop after step 2" in (run.directory / "log.txt").read_text()


def test_a_stage_that_has_had_its_tokens_says_so(models: dict[str, str], tmp_path: Path) -> None:
    run = opd.run(recipe(models, eval={"prompts": 0}, train={"steps": 50, "tokens": 30}), out=tmp_path / "run")
    (stage,) = run.summary["stages"]
    assert stage["steps"] < 50
    told = f"main: early stop after step {stage['steps']}; {stage['tokens']:,} response tokens, of train.tokens 30\n"
    assert told in (run.directory / "log.txt").read_text()
    whole = opd.run(recipe(models, eval={"prompts": 0}, train={"steps": 1, "tokens": 1}), out=tmp_path / "whole")
    assert "early stop" not in (whole.directory / "log.txt").read_text()


@pytest.mark.parametrize(
    ("settings", "history", "stops"),
    [
        ({}, [0.1, 0.1, 0.1], False),
        ({}, [0.1, 0.1, 0.1, 0.1], True),
        ({"patience": 2}, [None, None], True),
        ({"patience": 2}, [0.1, None, 0.2, None], False),
        ({"patience": 1}, [0.1, 0.2, 0.2], True),
        ({"kind": "target", "value": 0.5}, [0.4, 0.5, 0.3], True),
        ({"kind": "target", "value": 0.5}, [0.4, None], False),
        ("target", [0.79], False),
        ("target", [0.8], True),
        ({"kind": "target", "of_teacher": 0.5}, [0.4], True),
    ],
    ids=str,
)
def test_stop_rules(settings: Any, history: list[float | None], stops: bool) -> None:
    rule: Any = STOP_RULES.read(settings)
    assert rule.should_stop(EvaluationHistory(history, teacher=0.8)) is stops
    assert rule.should_stop(EvaluationHistory(history)) is (
        stops and (rule.name == "patience" or rule.value is not None)
    )


def test_trackers(models: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = opd.run(recipe(models, log="tensorboard", train={"steps": 1}), out=tmp_path / "run")
    assert list((run.directory / "tensorboard").glob("events*"))
    with pytest.raises(RecipeError, match=r"opd\[wandb\]"):
        opd.run(recipe(models, log={"to": ["wandb"]}), out=tmp_path / "other")


def test_trackers_count_on_through_stages(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[int] = []
    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = module.finish = lambda **settings: None
    module.log = lambda values, step: logged.append(step)
    monkeypatch.setitem(sys.modules, "wandb", module)
    spec = recipe(models, log={"to": ["wandb"]}, train={"steps": 2}, eval={"prompts": 0}, checkpoint={"every": 1})

    def stop(run: Any, metrics: Any) -> None:
        if metrics["stage"] == "two":
            run.stop()

    run = opd.run(spec | {"stages": [{"name": "one"}, {"name": "two"}]}, out=tmp_path / "run", on_step=stop)
    assert logged == [1, 2, 3]
    assert [line["step"] for line in opd.resume(run.directory).metrics] == [1, 2, 1, 2]
    assert logged == [1, 2, 3, 4]


def test_nan_stops_the_run_and_keeps_good_weights(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opd.objective.objective import Objective

    original, calls = Objective.__call__, []

    def poisoned(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        loss, statistics = original(self, *arguments)
        if len(calls) == 3:
            statistics.loss["0:direct"] = float("nan")
            loss = loss * float("nan")
        return loss, statistics

    monkeypatch.setattr(Objective, "__call__", poisoned)
    with pytest.raises(TrainingError, match=r"step 3.*not finite.*step-000002"):
        opd.run(recipe(models, train={"steps": 9}, eval={"prompts": 0}), out=tmp_path / "run")
    run = opd.Run(tmp_path / "run")
    assert run.summary["status"] == "failed"
    verify_checkpoint(run.model)
    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert len(run.metrics) == 2


def test_a_learning_rate_that_explodes_is_reported(models: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="not finite"):
        opd.run(
            recipe(models, train={"steps": 9, "lr": 1e9, "clip": None}, checkpoint={"every": 1}, eval={"prompts": 0}),
            out=tmp_path / "run",
        )


@pytest.mark.parametrize(
    ("phase", "target", "knob"),
    [
        ("update", "opd.objective.objective.Objective.__call__", "micro_tokens"),
        ("score", "opd.teachers.scoring.LocalTeacher.score", "batch_tokens"),
        ("compare teachers", "opd.teachers.scoring.LocalTeacher.score", "batch_tokens"),
    ],
)
def test_out_of_memory_names_the_knob(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, target: str, knob: str
) -> None:
    def explode(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(target, explode)
    table = {"start_table": phase == "compare teachers"}
    with pytest.raises(TrainingError, match=rf"out of memory in phase '{phase}'.*{knob}"):
        opd.run(recipe(models, eval={"prompts": 0}, log=table), out=tmp_path / "run")
    if phase == "compare teachers":  # before the first step: nothing is left behind
        assert not (tmp_path / "run").exists()
        return
    run = opd.Run(tmp_path / "run")
    assert (run.summary["status"], run.checkpoints) == ("failed", [])  # in step 1 the student is what it was


def test_mistakes_are_found_before_the_first_step(models: dict[str, str], tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other")
    table = Path(other) / "tokenizer.json"
    table.write_text(table.read_text().replace('"a": ', '"@": '))
    wider = save_tiny(tmp_path / "wider", intermediate_size=64)
    lacking = save_tiny(tmp_path / "lacking")
    tensors = load_file(tmp_path / "lacking" / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "lacking" / "model.safetensors", {"format": "pt"})
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "1" * 300}) + "\n")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"teachers": {"a": models["one"], "b": other}}, TokenizerMismatch, "'a' vs '@'"),
        (
            {"teachers": {"a": models["one"], "b": models["two"]}, "prompts": ["task:addition", "task:reverse"]},
            RecipeError,
            "no teacher|judges no domain",
        ),
        (
            {"teachers": {"a": models["one"], "b": models["two"], "c": models["two"]}},
            RecipeError,
            "'c' scores no domain",
        ),
        (
            {"prompts": [{"source": str(long), "domain": "a"}], "teachers": {"a": models["one"]}},
            DataError,
            "300 tokens",
        ),
        ({"objective": {"form": "cross_entropy"}}, RecipeError, "the rollouts have none"),
        ({"objective": {"form": "policy_gradient"}, "rollout": {"top_p": 0.9}}, RecipeError, "top_p"),
        (
            {"teachers": {}, "rollout": {"teacher_share": 0.5}, "objective": {"form": "cross_entropy"}},
            RecipeError,
            "no teacher to sample from",
        ),
        ({"device": "cuda:77"}, RecipeError, "device"),
        ({"eval": {"prompts": 4, "metric": "pass@9"}}, RecipeError, "eval.metric"),
        (
            {"teachers": {"a": models["one"], "b": wider}, "eval": {"prompts": 4, "weight_average": True}},
            RecipeError,
            "eval.weight_average: .* same shapes",
        ),
        ({"teachers": {"a": models["one"], "b": lacking}}, ModelError, "lacks .*up_proj|its weight files hold"),
    ]
    for index, (change, kind, words) in enumerate(cases):
        with pytest.raises(kind, match=words):
            make_plan(load_recipe(recipe(models, **change)))
        with pytest.raises(kind, match=words):
            opd.run(recipe(models, **change), out=tmp_path / f"run{index}")
        assert not (tmp_path / f"run{index}").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(RecipeError, match="device"):
        opd.run(recipe(models, device="cuda:77"), out=empty)
    assert list(empty.iterdir()) == []


def test_a_long_prompt_later_on_has_room(models: dict[str, str], tmp_path: Path) -> None:
    """The sampler's slots follow the longest prompt of all, wherever it stands."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": "1+1="}) + "\n" for _ in range(80)) + json.dumps({"prompt": "1" * 200}) + "\n"
    )
    changes = {
        "prompts": [{"source": str(path), "domain": "a"}],
        "teachers": {"a": models["one"]},
        "rollout": {"prompts": 27, "max_new_tokens": 4},
        "train": {"steps": 3},
        "eval": {"prompts": 0},
    }
    run = opd.run(recipe(models, **changes), out=tmp_path / "run")
    assert run.summary["status"] == "done"
    rollouts = run.rollouts.load(list(run.rollouts.entries))
    assert max(rollout.prompt_ids.size for rollout in rollouts) == 200


def test_stopping_between_steps_saves_and_reports(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pipeline.run_step

    def step(run: Any, number: int) -> Any:
        if number == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(run, number)

    monkeypatch.setattr(pipeline, "run_step", step)
    with pytest.raises(Stopped):
        opd.run(recipe(models, train={"steps": 50}), out=tmp_path / "run")
    run = opd.Run(tmp_path / "run")
    assert run.summary["status"] == "stopped"
    assert run.model.name == f"step-{len(run.metrics):06d}"
    verify_checkpoint(run.model)


def test_ctrl_c_on_a_real_process(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe(models, train={"steps": 100000}, eval={"prompts": 0})))
    process = start(tmp_path / "out.txt", "run", path, "--out", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.is_alive() and not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    code, output = ended(process), (tmp_path / "out.txt").read_text()
    assert code == 130, output
    assert "Traceback" not in output
    run = opd.Run(tmp_path / "run")
    assert run.summary["status"] == "stopped"
    verify_checkpoint(run.model)
    AutoModelForCausalLM.from_pretrained(run.model)


def test_domains_that_a_stage_does_not_train_are_measured_too(models: dict[str, str], tmp_path: Path) -> None:
    """`eval.further`: their held-out prompts are asked; what a stage trains on is asked once, whether it is listed or not."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n}", "answer": "{n}", "domain": "count"}}\n' for n in range(40)))
    recipe = {
        "student": models["student"], "teachers": models["one"], "device": "cpu",
        "prompts": {"source": "task:addition", "domain": "sums", "share": 2},
        "eval": {"prompts": 4, "teachers": True, "further": [{"source": "task:addition", "domain": "sums"}, str(rows)]},
        "rollout": {"prompts": 2, "max_new_tokens": 3}, "train": {"steps": 1}, "sampler": {"slots": 2}, "log": {"start_table": False},
    }  # fmt: skip
    run = opd.run(recipe, out=tmp_path / "run")
    evals = run.summary["stages"][0]["evals"]
    assert {domain: line["n"] for domain, line in evals.items()} == {"sums": 4, "count": 4}
    assert evals["count"]["teacher"] is None
    assert set(run.summary["stages"][0]["teachers"]["teacher"]) == {"sums", "count"}
    assert str(rows) in str((tmp_path / "run/run.json").read_text())
    with pytest.raises(RecipeError, match=r"eval.prompts is 0"):
        load_recipe(recipe | {"eval": {"prompts": 0, "further": "task:sort"}})
