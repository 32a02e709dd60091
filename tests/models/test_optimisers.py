"""Kinds of optimiser: what each updates, in checkpoints, in plans, and that another one is not resumed with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opd
from opd.common.errors import RecipeError, RunDirectoryError, UserError
from opd.loop.learner import Optimiser, learning_rate
from opd.models.optimisers import AdamW, AdamW8bit, OptimisedWeights
from opd.recipe import Lora, Train, load_recipe
from opd.runner.checkpoint import require_optimiser
from opd.runner.plan import make_plan
from tests.support.helpers import save_tiny, tiny_model
from tests.support.interrupted import Crash, strike

CALM = {"initializer_range": 0.1}
TORCHAO = pytest.param(
    "adamw8bit",
    marks=pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed"),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    wide = {**CALM, "hidden_size": 64, "intermediate_size": 256}  # of which a row is a block of 8-bit moments
    return {name: save_tiny(root / name, seed=seed, **wide) for seed, name in enumerate(("student", "teacher"))}


def small(models: dict[str, str], optimiser: Any, student: Any = None, **train: Any) -> dict[str, Any]:
    return {
        "student": {"model": models["student"], **(student or {})},
        "teachers": {"a": models["teacher"]},
        "prompts": [{"source": "task:addition", "domain": "a"}],
        "rollout": {"prompts": 4, "max_new_tokens": 4},
        "sampler": {"slots": 4},
        "train": {"steps": 4, "lr": 3e-3, "warmup": 2, "weight_decay": 0.1, "optimiser": optimiser, **train},
        "eval": {"prompts": 0},
        "checkpoint": {"every": 1, "keep": 9, "resume": "exact"},
        "log": {"start_table": False},
        "device": "cpu",
    }


def filled(parameters: dict[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2"])
def test_embeddings_and_the_head_are_no_hidden_matrices(kind: str) -> None:
    model = tiny_model(kind)
    named = {
        "llama": {"model.embed_tokens.weight", "lm_head.weight"},
        "llama_tied": {"model.embed_tokens.weight"},
        "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    }
    assert model.outer() == named[kind]


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_is_torchs_for_hidden_matrices_and_adamw_for_the_rest(adjust: Any) -> None:
    torch.manual_seed(0)
    own, plain = tiny_model(**CALM), tiny_model(**CALM)
    spec = Train.model_validate(
        {"lr": 1e-2, "weight_decay": 0.1, "steps": 3, "warmup": 2, "optimiser": {"kind": "muon", "adjust": adjust}}
    )
    optimiser, weights = Optimiser(own.trainable(), spec, own.outer()), plain.trainable()
    hidden = [weight for name, weight in weights.items() if weight.ndim == 2 and name not in plain.outer()]
    embedded = [weights[name] for name in weights if name in plain.outer()]
    norms = [weight for weight in weights.values() if weight.ndim == 1]
    assert len(hidden) == 14
    references = [
        torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust),
        torch.optim.AdamW(embedded, lr=1e-2, betas=spec.betas, eps=spec.eps, weight_decay=0.1, fused=True),
        torch.optim.AdamW(norms, lr=1e-2, betas=spec.betas, eps=spec.eps, weight_decay=0.0, fused=True),
    ]
    for step in (1, 2, 3):
        filled(own.trainable())
        for name, weight in weights.items():
            weight.grad = own.trainable()[name].grad.clone()  # type: ignore[union-attr]
        optimiser.step(step)
        for reference in references:
            for group in reference.param_groups:
                group["lr"] = learning_rate(step, spec)
            reference.step()
    for name, weight in own.trainable().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("optimiser", ["muon", TORCHAO])
@pytest.mark.parametrize("how", ["float32", "mixed", "lora"])
def test_a_run_that_died_ends_with_the_same_bits(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimiser: str, how: str
) -> None:
    student = {"lora": {"rank": 64}} if how == "lora" else {}
    recipe = small(models, optimiser, student, precision="float32" if how == "lora" else how)
    whole = opd.run(recipe, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        strike(patch, "opd.loop.learner:Optimiser.step", 3, Crash)
        with pytest.raises(Crash):
            opd.run(recipe, out=tmp_path / "cut")
    again = opd.resume(tmp_path / "cut")
    assert [line["loss"] for line in again.metrics] == [line["loss"] for line in whole.metrics]
    for name in ("model.safetensors", "optimiser.safetensors"):
        assert (again.model / name).read_bytes() == (whole.model / name).read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_moments_of_8_bits_follow_adamw(models: dict[str, str]) -> None:
    """Not to the bit; matrices with short rows keep 32 bits and are AdamW's to the bit."""
    torch.manual_seed(0)
    shapes = {"wide": (32, 256), "narrow": (64, 100), "vector": (256,)}
    own, plain = ({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()} for _ in range(2))
    small_moments = Optimiser(own, Train.model_validate({"lr": 1e-2, "optimiser": "adamw8bit"}))
    usual = Optimiser(plain, Train(lr=1e-2))
    for step in range(1, 6):
        filled(own)
        for name, weight in plain.items():
            weight.grad = own[name].grad.clone()  # type: ignore[union-attr]
        small_moments.step(step)
        usual.step(step)
    tensors = small_moments.tensors()
    assert (tensors["wide.exp_avg.codes"].dtype, tensors["wide.exp_avg.scale"].shape) == (torch.uint8, (32, 1))
    assert torch.equal(own["narrow"], plain["narrow"])
    assert torch.equal(own["vector"], plain["vector"])
    assert 0 < float((own["wide"] - plain["wide"]).norm() / plain["wide"].norm()) < 0.1


def test_8_bit_moments_name_the_package_that_is_missing(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("opd.models.optimisers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install torchao"):
        AdamW8bit().require()
    with pytest.raises(RecipeError, match=r"train\.optimiser adamw8bit needs the torchao package"):
        opd.run(small(models, "adamw8bit"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_optimiser_is_not_resumed_with(models: dict[str, str], tmp_path: Path) -> None:
    opd.run(small(models, "muon", steps=1), out=tmp_path / "run")
    for other in ("adamw", {"kind": "muon", "momentum": 0.9}):
        with pytest.raises(RunDirectoryError, match=r"different recipe .*train\.optimiser"):
            opd.run(small(models, other, steps=1), out=tmp_path / "run", resume=True)
    student = tiny_model()
    adamw, muon = (
        Optimiser(student.trainable(), Train.model_validate({"optimiser": kind})) for kind in ("adamw", "muon")
    )
    require_optimiser(adamw, None, "checkpoint x", "train.optimiser")
    require_optimiser(muon, "muon", "checkpoint x", "train.optimiser")
    for optimiser, saved, words in ((adamw, "muon", "muon, and the recipe has adamw"), (muon, None, "adamw, and the")):
        with pytest.raises(RunDirectoryError, match=words):
            require_optimiser(optimiser, saved, "checkpoint x", "train.optimiser")


def test_plans_count_the_moments_of_each(models: dict[str, str]) -> None:
    found = {}
    for kind, title in (("adamw", "AdamW"), ("muon", "Muon"), ("adamw8bit", "8-bit AdamW")):
        raw = small(models, kind, precision="float32")
        (plan,) = make_plan(load_recipe(raw)) if importlib.util.find_spec("torchao") or kind != "adamw8bit" else (None,)
        found[kind] = plan and plan.memory[f"gradients and {title}"]
    model = opd.load_model(models["student"])
    weights = model.trainable()
    hidden = sum(weight.numel() for name, weight in weights.items() if name not in model.outer())
    every = sum(weight.numel() for weight in weights.values())
    assert found["adamw"] == 12 * every
    assert found["muon"] == 12 * every - 4 * hidden  # of which a few are norms
    assert found["adamw8bit"] in (None, 6 * every + 8 * every // 256)


def test_lora_factors_are_hidden_matrices(models: dict[str, str]) -> None:
    pytest.importorskip("peft")
    model = opd.load_model(models["student"], lora=Lora(rank=4))
    assert model.outer() == set()
    optimiser = Optimiser(model.trainable(), Train.model_validate({"optimiser": "muon"}), model.outer())
    filled(model.trainable())
    optimiser.step(1)
    assert {name.rpartition(".")[2] for name in optimiser.tensors()} == {"momentum_buffer"}


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_a_rank_without_rows_has_moments_without_rows() -> None:
    """So that all ranks gather the same tensors, in the same order."""
    spec = Train.model_validate({"lr": 1e-2, "optimiser": "adamw8bit"})
    kind = spec.optimiser
    found = []
    for rows in (32, 0):
        weight = nn.Parameter(torch.zeros(rows, 256))
        whole = {"w": (32, 256)}
        settings = OptimisedWeights(
            {"w": weight},
            whole,
            frozenset(),
            1e-2,
            spec.betas,
            spec.eps,
            0.0,
            True,
            lambda name, part: part,
            lambda name, part: part,
        )
        (rule,) = kind.open(settings)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            rule.step()
        plain = dict(kind.to_plain(rule.state[weight]))
        again = dict(kind.to_plain(kind.from_plain(plain, weight)))
        assert list(again) == list(plain)
        assert all(torch.equal(again[key], plain[key]) for key in plain)
        found.append({key: value.shape[1:] if value.ndim else None for key, value in plain.items()})
    assert list(found[0].items()) == list(found[1].items())


def test_an_optimiser_that_leaves_weights_out_is_named() -> None:
    class Half(AdamW):
        name = "half"

        def open(self, weights: OptimisedWeights) -> list[torch.optim.Optimizer]:
            return weights.adamw(list(weights.masters)[::2])

    weights = {name: nn.Parameter(torch.ones(2, 2)) for name in "abcd"}
    with pytest.raises(UserError, match="optimiser half updates 2 of 4 weights"):
        Optimiser(weights, Train(optimiser=Half()))
