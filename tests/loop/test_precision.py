"""Mixed precision on the CPU: bf16 weights to compute with, fp32 masters to train, against float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import opd
from opd.common.errors import RecipeError, UserError
from opd.loop.learner import Optimiser, learning_rate
from opd.loop.parts import StageParts
from opd.recipe import Train, load_recipe
from opd.runner.checkpoint import SAVE_RATE, Saver, StageCheckpoints
from opd.runner.plan import make_plan
from opd.runner.results import StageResult
from opd.runner.stage import open_stage as open_parts
from opd.store import RolloutStore
from tests.support.helpers import save_tiny, term, tiny_model
from tests.support.interrupted import Crash, strike
from tests.support.rollouts import sampled_by, some_rollouts
from tests.support.steps import gradients

CALM = {"initializer_range": 0.1}  # weights as large as those of trained models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed, **CALM) for seed, name in enumerate(("student", "teacher"))}


def small(models: dict[str, str], precision: str, **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "student": models["student"],
        "teachers": {"a": models["teacher"]},
        "prompts": [{"source": "task:addition", "domain": "a"}],
        "rollout": {"prompts": 4, "max_new_tokens": 4},  # bfloat16 is slow on a CPU
        "sampler": {"slots": 4, "prefill_rows": 1, "prefill_chunk": 8},
        "train": {"steps": 6, "lr": 3e-3, "precision": precision, "micro_tokens": 24},
        "eval": {"prompts": 0},
        "checkpoint": {"every": 2, "keep": 9, "resume": "exact"},
        "device": "cpu",
    }
    return base | changes


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen3"])
def test_gradients_are_within_three_per_cent_of_float32(kind: str) -> None:
    """Of each matrix, relative to its norm, and five of the norms' few weights; bf16 itself resolves 0.4 % of a number. Micro-batches add up in fp32."""
    student, teacher = tiny_model(kind, **CALM), tiny_model(kind, 1, **CALM)
    rollouts = sampled_by(student, some_rollouts())
    _, exact, _ = gradients(student, {"t": teacher}, [term()], rollouts)
    student.module.to(torch.bfloat16)
    optimiser = Optimiser(student.trainable(), Train())
    gradients(student, {"t": teacher}, [term()], rollouts, budget=16)
    assert all(parameter.grad is None for parameter in student.module.parameters())
    for name, master in optimiser._masters.items():
        assert (master.dtype, master.grad.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]
        bound = 0.03 if master.ndim > 1 else 0.05
        assert float((master.grad - exact[name]).norm() / exact[name].norm()) < bound, name


SAME_TOKENS = {"prompts": 6, "max_new_tokens": 6, "data_share": 1.0}  # else a rounding draws others


def test_a_run_follows_float32_and_keeps_its_masters(models: dict[str, str], tmp_path: Path) -> None:
    found = {
        precision: opd.run(small(models, precision, rollout=SAME_TOKENS), out=tmp_path / precision)
        for precision in ("float32", "mixed")
    }
    curves = {name: np.array([line["reverse_kl"] for line in run.metrics]) for name, run in found.items()}
    assert curves["float32"][-1] < 0.9 * curves["float32"][0]
    np.testing.assert_allclose(curves["mixed"], curves["float32"], rtol=0.03)
    model, state = (load_file(found["mixed"].model / name) for name in ("model.safetensors", "optimiser.safetensors"))
    assert {tensor.dtype for tensor in model.values()} == {torch.bfloat16}
    for name, tensor in model.items():
        assert state[f"{name}.master"].dtype == torch.float32
        assert torch.equal(state[f"{name}.master"].bfloat16(), tensor)
    exact = load_file(found["float32"].model / "model.safetensors")
    start = load_file(Path(models["student"]) / "model.safetensors")
    for name, tensor in exact.items():  # where training went, not only where it began
        assert float((state[f"{name}.master"] - tensor).norm() / (tensor - start[name]).norm()) < 0.5, name


@pytest.fixture(scope="module")
def whole(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> opd.Run:
    return opd.run(small(models, "mixed"), out=tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.slow
def test_a_mixed_precision_run_resumes_bit_for_bit(
    models: dict[str, str], whole: opd.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        strike(patch, "opd.loop.learner:Optimiser.step", 4, Crash)
        with pytest.raises(Crash):
            opd.run(small(models, "mixed"), out=tmp_path / "cut")
    again = opd.resume(tmp_path / "cut")
    assert [line["loss"] for line in again.metrics] == [line["loss"] for line in whole.metrics]
    for name in ("model.safetensors", "optimiser.safetensors"):
        assert (again.model / name).read_bytes() == (whole.model / name).read_bytes()


def test_updates_are_those_of_adamw_written_out() -> None:
    """The fused kernel's, in one pass; one matrix is decayed, a vector is not, and lengths end within vectors."""
    torch.manual_seed(0)
    spec, shapes = Train(lr=1e-2, weight_decay=0.1), {"matrix": (7, 5), "vector": (3,)}
    own, plain = ({name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()} for _ in range(2))
    groups = [
        {"params": [plain["matrix"]], "weight_decay": spec.weight_decay},
        {"params": [plain["vector"]], "weight_decay": 0.0},
    ]
    optimiser = Optimiser(own, spec)
    reference = torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, foreach=False)
    for step in range(1, 4):
        for name, parameter in own.items():
            parameter.grad = torch.randn_like(parameter)
            plain[name].grad = parameter.grad.clone()
        optimiser.step(step)
        for group in reference.param_groups:
            group["lr"] = learning_rate(step, spec)
        reference.step()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter, plain[name])


@pytest.mark.parametrize("limit", [None, 1e-3, 3.0, 1e3])
def test_clipping_is_that_of_torch_to_the_bit(limit: float | None) -> None:
    """Whether gradients of norm 6 or so are longer than the limit or not; one weight has none."""
    torch.manual_seed(0)
    own, plain = ({name: nn.Parameter(torch.ones(7, 5)) for name in "abc"} for _ in range(2))
    for name in "ab":
        plain[name].grad = torch.randn(7, 5)
        own[name].grad = plain[name].grad.clone()
    norm = Optimiser(own, Train(clip=limit)).clip()
    expected = nn.utils.clip_grad_norm_(plain.values(), float("inf") if limit is None else limit)
    assert norm == float(expected) > 3
    for name in "ab":
        assert torch.equal(own[name].grad, plain[name].grad)


def test_updates_too_small_for_bf16_add_up() -> None:
    model = tiny_model("llama", **CALM)
    model.module.to(torch.bfloat16)
    parameters = model.trainable()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimiser = Optimiser(parameters, Train(lr=1e-5, clip=None))
    for step in range(1, 101):
        for parameter in parameters.values():
            parameter.backward(torch.ones_like(parameter))
        optimiser.step(step)
    name = "model.norm.weight"
    assert float((optimiser._masters[name] - before[name].float()).mean()) == pytest.approx(-1e-3, rel=0.01)
    assert not torch.equal(parameters["lm_head.weight"], before["lm_head.weight"])
    assert torch.equal(parameters[name], before[name])  # 1 - 1e-3 is 1 in bf16, still


def open_stage(recipe: dict[str, Any], directory: Path) -> StageParts:
    store = RolloutStore(directory / "rollouts")
    return open_parts(load_recipe(recipe).stages[0], store)


def test_means_of_the_student_count_as_memory_and_as_something_to_save(models: dict[str, str], tmp_path: Path) -> None:
    """In mixed precision a mean is bf16 to score with and fp32 to keep."""
    spec = small(models, "mixed", teachers={"a": {"kind": "ema"}})
    (plan,) = make_plan(load_recipe(spec))
    assert plan.memory["teachers"] == plan.parameters * (2 + 4)
    run = open_stage(spec, tmp_path)
    unused: Any = None
    saving = StageCheckpoints(run, StageResult("main"), tmp_path, Saver(), unused, 0.0, load_recipe(spec))
    beside = (*run.optimiser.tensors().values(), *run.teachers["a"].state().values())
    size = sum(tensor.nbytes for tensor in (*run.student.module.parameters(), *beside))
    assert saving._save_seconds() == size / SAVE_RATE


def test_the_sampler_shares_the_weights_it_computes_with(models: dict[str, str], tmp_path: Path) -> None:
    run = open_stage(small(models, "mixed"), tmp_path)
    own, theirs = (dict(model.module.named_parameters()) for model in (run.student, run.engine.model))  # type: ignore[attr-defined]
    for parameter in own.values():
        parameter.backward(torch.ones_like(parameter))
    run.optimiser.step(1)
    assert all(parameter.data_ptr() == theirs[name].data_ptr() for name, parameter in own.items())
    assert run.student.dtype == run.teachers["a"].model.dtype == torch.bfloat16


@pytest.mark.slow
def test_adapters_are_fp32_over_a_bf16_base(models: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    curves = []
    for precision in ("float32", "mixed"):
        student = {"model": models["student"], "lora": {"rank": 4}}
        train = {"steps": 4, "lr": 2e-2, "precision": precision}
        changes = {"student": student, "train": train, "rollout": SAME_TOKENS}
        run = opd.run(small(models, precision, **changes), out=tmp_path / precision)
        curves.append([line["reverse_kl"] for line in run.metrics])
    np.testing.assert_allclose(curves[1], curves[0], rtol=0.05)
    adapter = load_file(run.model / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in adapter.values()} == {torch.float32}
    assert not [name for name in load_file(run.model / "optimiser.safetensors") if name.endswith(".master")]


def test_a_run_resumes_in_the_precision_of_its_device(whole: opd.Run) -> None:
    """What was mixed on a GPU takes its masters for weights where everything is float32."""
    state = load_file(whole.model / "optimiser.safetensors")
    model = tiny_model("llama", **CALM)
    optimiser = Optimiser(model.trainable(), Train())
    optimiser.restore(state, 6)
    for name, parameter in model.trainable().items():
        assert torch.equal(parameter, state[f"{name}.master"])


def test_by_hand_a_student_is_as_it_was_loaded() -> None:
    objective = opd.Objective({"form": "cross_entropy"})
    for precision, dtype in (("mixed", torch.float32), ("float32", torch.bfloat16)):
        student = tiny_model("llama")
        student.module.to(dtype)
        with pytest.raises(UserError, match=f"train.precision {precision} computes with"):
            opd.Trainer(student, objective, {"precision": precision})
        opd.Trainer(student, objective)


def test_the_newest_optimiser_trains_and_an_earlier_one_rejects() -> None:
    student = tiny_model("llama", **CALM)
    student.module.to(torch.bfloat16)
    earlier = Optimiser(student.trainable(), Train())
    newest = Optimiser(student.trainable(), Train(lr=0.1))
    parameters = student.trainable()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.backward(torch.ones_like(parameter))
    assert newest.clip() > 0
    newest.step(1)
    assert not any(torch.equal(parameter, before[name]) for name, parameter in parameters.items())
    with pytest.raises(UserError, match="another optimiser"):
        earlier.clip()


MINIMAL = {"student": "tiny/generalist", "teachers": "tiny/arithmetic", "prompts": "task:addition"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "auto"),
        (["train.autocast=true"], "autocast"),
        (["student.dtype=float32", "train.autocast=true"], "autocast"),
        (["student.dtype=bfloat16"], "bfloat16"),
        (["student.dtype=float32", "train.autocast=false"], "float32"),
        (["train.autocast=false"], "float32"),
        (["train.precision=mixed"], "mixed"),
    ],
)
def test_older_keys_mean_what_they_meant(overrides: list[str], expected: str) -> None:
    assert load_recipe(MINIMAL, overrides).stages[0].train.precision == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.autocast=true", "train.precision=mixed"], "train.precision replaces student.dtype and train.autocast"),
        (["student.dtype=bfloat16", "train.autocast=true"], "one of mixed and autocast"),
        (["student.dtype=int8"], "are now train.precision"),
        (["train.precision=half"], "train.precision"),
    ],
)
def test_older_keys_next_to_new_ones_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(MINIMAL, overrides)


def test_the_plan_says_the_precision() -> None:
    train = load_recipe(MINIMAL).stages[0].train
    assert (train.precision_on("cpu"), train.precision_on("cuda:1")) == ("float32", "mixed")
    raw = {**MINIMAL, "device": "cpu", "eval": {"prompts": 0}}
    assert "precision float32" in make_plan(load_recipe(raw))[0].lines()[0]
    plans = [make_plan(load_recipe(raw, [f"train.precision={name}"]))[0] for name in ("float32", "mixed")]
    assert plans[1].memory["weights"] * 2 == plans[0].memory["weights"]
    assert plans[1].memory["gradients and AdamW"] > plans[0].memory["gradients and AdamW"]
