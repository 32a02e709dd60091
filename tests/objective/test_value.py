"""Values and PPO: advantages, returns, losses and gradients against their definitions in fp64, however a batch is cut up."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import opd
from opd.common.errors import RecipeError, TrainingError
from opd.common.files import read_sealed
from opd.loop.oom_retry import micro_batches
from opd.models.language_model import LanguageModel
from opd.models.modules import Module, ModuleKind, open_modules
from opd.objective.batch import Batch
from opd.objective.objective import Objective
from opd.objective.policy_gradient import gae, value_losses
from opd.recipe import Rollouts, load_recipe
from opd.records import Author, Rollout, SignalNeed
from opd.registry import validate_settings
from opd.teachers.scoring import LocalTeacher
from tests.support.crash import ended, killed, same_run, start, written
from tests.support.helpers import CHARACTERS, save_tiny, tiny_model, tiny_module
from tests.support.rollouts import STOPS, sampled_by, some_rollouts

GAMMA, LAM, CLIP, LOW, HIGH, KL, COEFFICIENT = 0.9, 0.8, 0.2, 0.2, 0.3, 0.1, 0.7
SIZE = len(CHARACTERS) + 2  # ids of the tokenizer, of which the models have a few more
TERMS: list[dict[str, Any]] = [
    {"form": "policy_gradient", "surrogate": {"kind": "ppo", "against": "proximal", "low": LOW, "high": HIGH},
     "advantage": {"teacher_weight": 0, "also": {"kind": "gae", "gamma": GAMMA, "lam": LAM, "reference_weight": KL}}},
    {"form": "value", "clip": CLIP, "coefficient": COEFFICIENT},
]  # fmt: skip


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum over i >= t of (gamma lam)^(i - t) (r_i + gamma V_{i+1} - V_i), term by term."""
    after = [*values[1:], 0.0][: len(values)]
    errors = [reward + gamma * later - value for reward, later, value in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (i - t) * errors[i] for i in range(t, len(errors))) for t in range(len(errors))]


numbers = st.floats(-2, 2)
unit = st.floats(0, 1)


@given(st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=9), unit, unit)
@settings(deadline=None)
def test_advantages_are_those_of_the_definition_over_the_students_tokens(
    tokens: list[tuple[float, float, bool]], gamma: float, lam: float
) -> None:
    rewards, values, own = (np.array(column) for column in zip(*tokens, strict=True))
    found = gae(rewards, values, own.astype(bool), gamma, lam)
    assert not found[~own.astype(bool)].any()
    wanted = by_definition(rewards[own].tolist(), values[own].tolist(), gamma, lam)
    np.testing.assert_allclose(found[own], wanted, rtol=1e-9, atol=1e-12)


def test_a_discount_of_one_sums_up_rewards_to_the_end() -> None:
    rewards, values, own = np.array([0.5, 0.25, 1.0]), np.array([3.0, 2.0, 1.0]), np.ones(3, dtype=bool)
    assert (gae(rewards, values, own, 1.0, 1.0) + values).tolist() == [1.75, 1.25, 1.0]
    assert gae(rewards, values, own, 1.0, 0.0).tolist() == [-0.5, -0.75, 0.0]  # one step's error each


def test_clipped_values_stop_learning() -> None:
    now = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    losses, clipped = value_losses(now, torch.zeros(3), torch.tensor([1.0, 2.0, -1.0]), 0.2)
    assert losses.tolist() == pytest.approx([0.5 * 1.0, 0.5 * 1.8**2, 0.5 * 4.0])
    assert clipped.tolist() == [False, True, False]
    losses.sum().backward()
    assert now.grad is not None
    assert now.grad.tolist() == [-1.0, 0.0, 2.0]
    assert value_losses(now, torch.zeros(3), torch.ones(3), None)[1] is None


# The whole of PPO on a tiny model


def players() -> tuple[LanguageModel, LanguageModel]:
    student, reference = tiny_model(initializer_range=0.1), tiny_model(seed=1, initializer_range=0.1)
    for model in (student, reference):
        model.module.double()
    student.module.requires_grad_(True)
    return student, reference


def played(student: LanguageModel) -> tuple[list[Rollout], dict[str, float | None]]:
    """Answers with tokens of another author in the middle and at the end, and one that could not be rewarded."""
    rollouts = [replace(item, author=item.author.copy()) for item in sampled_by(student, some_rollouts())]
    for number in (1, 4):
        rollouts[number].author[rollouts[number].author.size // 2 :][:1] = Author.DATA
    rollouts[2].author[-1] = Author.DATA
    rewards: dict[str, float | None] = {item.id: float(number % 3) for number, item in enumerate(rollouts)}
    rewards["r5"] = None
    return rollouts, rewards


def plain_pass(module: Any, item: Rollout) -> tuple[Tensor, Tensor]:
    """(T,) log-probs of the response and (T, D) the states that predict its tokens, by the stock module alone."""
    ids = torch.tensor([*item.prompt_ids.tolist(), *item.response_ids.tolist()])
    found = module.model(input_ids=ids[None]).last_hidden_state[0]
    states = found[item.prompt_ids.size - 1 : -1]
    logprobs = (states @ module.lm_head.weight.T)[:, :SIZE].log_softmax(-1)
    return logprobs.gather(1, ids[item.prompt_ids.size :, None])[:, 0], states


def batch_of(rollouts: list[Rollout], rewards: Any, reference: LanguageModel) -> tuple[Batch, dict[str, Any]]:
    teacher = LocalTeacher("start", "reference", reference, 64, STOPS)
    scored = teacher.score(rollouts, SignalNeed("logprobs_at"))
    signals: Any = {("reference", "logprobs_at"): {item.id: one for item, one in zip(rollouts, scored, strict=True)}}
    return Batch(rollouts, signals, rewards), {"start": teacher}


def through_the_objective(budget: int) -> tuple[float, dict[str, Tensor], dict[str, Any]]:
    """Loss and gradients after student and head have moved since the first pass, as in a second update."""
    student, reference = players()
    rollouts, rewards = played(student)
    batch, teachers = batch_of(rollouts, rewards, reference)
    kinds = validate_settings("modules", dict[str, opd.models.modules.AnyModule], {"value": {"kind": "head"}})  # type: ignore[attr-defined]
    modules = open_modules(kinds, student, 0)
    moved(modules["value"], student.trainable(), 0)
    objective = Objective(TERMS, teachers, Rollouts(), STOPS)
    objective.modules = modules

    def cut(some: Any) -> Any:
        return micro_batches(some, budget, student.device, {})

    prepared = objective.prepare(student, batch, 1, cut, updates=2)
    moved(modules["value"], student.trainable(), 1)
    total, weights = 0.0, prepared.weights(rollouts)
    for pack in cut(rollouts):
        loss, _ = objective(student, pack, prepared, weights)
        if loss.requires_grad:
            loss.backward()
        total += float(loss.detach())
    parameters = {**student.trainable(), **modules["value"].parameters()}
    state = {"returns": prepared.terms[1].state.returns, "advantages": prepared.terms[0].state[0]}
    return total, {name: weight.grad for name, weight in parameters.items() if weight.grad is not None}, state


def moved(head: Module, student: dict[str, nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters().values():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.2)
        if seed:
            for weight in student.values():
                weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 0.02)


def by_hand_in_full() -> tuple[float, dict[str, Tensor], dict[str, Any]]:
    """The same from the stock module and the formulas alone."""
    rollouts, rewards = played(players()[0])
    student, reference = (tiny_module(seed=seed, initializer_range=0.1).double() for seed in (0, 1))
    linear = nn.Linear(32, 1, dtype=torch.float64)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    head = Module("value", nn.ModuleDict({"linear": linear}))
    moved(head, dict(student.named_parameters()), 0)
    old, returns, advantages = {}, {}, {}
    for item in rollouts:
        own, reward = np.flatnonzero(item.author == Author.STUDENT), rewards[item.id]
        with torch.no_grad():
            logprobs, states = plain_pass(student, item)
            others, _ = plain_pass(reference, item)
            old[item.id] = (logprobs, linear(states)[:, 0])
        penalties = (-KL * (logprobs - others))[own].tolist()
        if penalties:
            penalties[-1] += reward or 0.0
        values = old[item.id][1][own].tolist()
        found = by_definition(penalties, values, GAMMA, LAM)
        advantages[item.id] = found
        returns[item.id] = [one + value for one, value in zip(found, values, strict=True)]
    known = [item for item in rollouts if rewards[item.id] is not None]
    every = np.concatenate([advantages[item.id] for item in known])
    mean, std = every.mean(), every.std() + 1e-8
    moved(head, dict(student.named_parameters()), 1)
    total = torch.zeros((), dtype=torch.float64)
    for item in known:
        own = np.flatnonzero(item.author == Author.STUDENT)
        logprobs, states = plain_pass(student, item)
        before, value_before = old[item.id]
        weight = torch.tensor([(one - mean) / std for one in advantages[item.id]], dtype=torch.float64)
        ratio = (logprobs - before)[own].exp()
        policy = torch.maximum(-ratio * weight, -ratio.clamp(1 - LOW, 1 + HIGH) * weight).sum() / every.size
        value, wanted = linear(states)[own, 0], torch.tensor(returns[item.id], dtype=torch.float64)
        near = value_before[own] + (value - value_before[own]).clamp(-CLIP, CLIP)
        distance = 0.5 * torch.maximum((value - wanted) ** 2, (near - wanted) ** 2).sum() / every.size
        total = total + policy + COEFFICIENT * distance
    total.backward()
    parameters = {**dict(student.named_parameters()), "linear.weight": linear.weight, "linear.bias": linear.bias}
    grads = {name: weight.grad for name, weight in parameters.items() if weight.grad is not None}
    return float(total.detach()), grads, {"returns": returns, "advantages": (mean, std, advantages)}


def test_losses_and_gradients_are_those_of_the_definition() -> None:
    loss, found, state = through_the_objective(10**6)
    wanted_loss, wanted, reference = by_hand_in_full()
    mean, std, advantages = reference["advantages"]
    for item in played(players()[0])[0]:
        own = item.author == Author.STUDENT
        np.testing.assert_allclose(state["returns"][item.id][own], reference["returns"][item.id], rtol=1e-5, atol=1e-6)
        white = (np.array(advantages[item.id]) - mean) / std
        np.testing.assert_allclose(state["advantages"][item.id][own], white, rtol=1e-4, atol=1e-5)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():  # weights of tokens and returns are float32
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-5, name


def test_micro_batches_change_nothing() -> None:
    loss, found, state = through_the_objective(10**6)
    loss_in_parts, in_parts, state_in_parts = through_the_objective(8)
    for name, values in state["advantages"].items():
        np.testing.assert_allclose(state_in_parts["advantages"][name], values, rtol=1e-9, atol=1e-12)
    assert loss_in_parts == pytest.approx(loss, rel=1e-6)
    for name, gradient in found.items():
        torch.testing.assert_close(in_parts[name], gradient, rtol=1e-5, atol=1e-9)


# In a recipe


RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
    "rollout": {"prompts": 6, "samples": 2, "max_new_tokens": 12},
    "sampler": {"slots": 5, "prefill_rows": 1, "prefill_chunk": 7},
    "modules": {"value": {"kind": "head", "lr": 1e-2}},
    "objective": [
        {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "also": {"kind": "gae"}}, "surrogate": {"kind": "ppo", "against": "proximal"}},
        {"form": "value", "clip": 0.2, "coefficient": 0.1},
    ],
    "train": {"steps": 5, "lr": 1e-3, "warmup": 2, "epochs": 2, "micro_tokens": 200},
    "eval": {"prompts": 0},
    "checkpoint": {"every": 2, "keep": 9, "resume": "exact"},
    "store": {"commit_ms": 5},
    "log": {"samples": 1, "start_table": False},
    "device": "cpu",
    "threads": 1,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
def test_two_kills_leave_no_trace_in_student_or_head(lora: Any, tmp_path: Path) -> None:
    recipe, directory = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(json.dumps(RECIPE | {"student": {"model": "tiny/generalist", "lora": lora}}))
    reference = opd.run(str(recipe), out=tmp_path / "reference")
    draw, total = random.Random(str(lora)), written(reference.directory)
    for _ in range(2):
        killed(tmp_path / "out.txt", directory, total, draw, "run", recipe, "--out", directory, "--resume")
    assert ended(start(tmp_path / "out.txt", "run", recipe, "--out", directory, "--resume")) == 0
    run = opd.resume(directory)
    same_run(run, reference)  # weights and moments of the head are among its files
    names = {path.name for path in (run.model / "modules" / "value").iterdir()}
    assert names == {"weights.safetensors", "optimiser.safetensors"}
    assert {f"modules/value/{name}" for name in names} <= read_sealed(run.model / "manifest.json")["files"].keys()
    assert run.metrics[-1]["grad_norm/value"] > 0
    assert run.metrics[-1]["explained/1:value"] != 0


@pytest.mark.slow
def test_a_head_learns_the_returns_of_a_policy_that_is_held_still() -> None:
    student = tiny_model()
    train = {"lr": 1e-9, "micro_tokens": 64}
    modules = {"value": {"kind": "head", "lr": 1e-2, "clip": None}}
    trainer = opd.Trainer(
        student,
        opd.Objective([TERMS[0] | {"advantage": RECIPE["objective"][0]["advantage"]}, {"form": "value", "clip": None}]),
        train,
        modules=modules,
    )
    rollouts = sampled_by(student, some_rollouts())
    batch = trainer.batch(rollouts, {item.id: float(number % 3) for number, item in enumerate(rollouts)})
    explained = [trainer.step(batch).metrics["explained/1:value"] for _ in range(60)]
    assert explained[0] == 0
    assert explained[-1] > 0.8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": {}}, "uses the module 'value', but the recipe's modules are: none"),
        ({"modules": {"value": "head", "critic": "head"}}, r"modules\.critic: no term of the objective uses it"),
        ({"objective": {"form": "value"}, "modules": {"value": "head"}}, "no term has one for the module 'value'"),
        ({"modules": {"value": "heads"}}, "unknown module 'heads'; did you mean 'head'"),
        ({"modules": {"../value": "head"}}, "not a name that a directory can have"),
    ],
)
def test_modules_and_terms_belong_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(RECIPE | changes)


def test_a_reference_penalises_token_by_token(tmp_path: Path) -> None:
    """The student is its own reference at first, so the penalty is 0 then, and not later."""
    teachers = {"start": {"model": "tiny/generalist", "role": "reference"}}
    runs = []
    for weight in (0.0, 5.0):
        raw = RECIPE | {"teachers": teachers} if weight else RECIPE
        overrides = ["train.steps=2", f"objective.0.advantage.also.reference_weight={weight}"]
        runs.append(opd.run(raw, overrides=overrides, out=tmp_path / f"{weight}").metrics)
    assert runs[0][0]["loss"] == pytest.approx(runs[1][0]["loss"], abs=2e-3)
    assert runs[0][1]["loss"] != pytest.approx(runs[1][1]["loss"], abs=2e-3)


class Pairs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.linear(hidden)
        return found


def test_a_value_is_one_number() -> None:
    class TwoNumbers(ModuleKind):
        name = "two"

        def open(self, name: str, inputs: Any) -> Module:
            return Module(name, Pairs(inputs.width))

    student = tiny_model()
    objective = opd.Objective(RECIPE["objective"])
    trainer = opd.Trainer(student, objective, {"micro_tokens": 64}, modules={"value": TwoNumbers()})
    rollouts = sampled_by(student, some_rollouts())
    with pytest.raises(TrainingError, match=r"gave numbers of shape \(\d+, 2\) for \d+ tokens"):
        trainer.step(trainer.batch(rollouts, {item.id: 1.0 for item in rollouts}))


def test_a_run_without_modules_has_the_files_it_had(tmp_path: Path) -> None:
    models = {"student": save_tiny(tmp_path / "student"), "teachers": {"a": save_tiny(tmp_path / "teacher", seed=1)}}
    raw = {**models, "prompts": "task:addition", "rollout": {"prompts": 2, "max_new_tokens": 4}, "device": "cpu",
           "train": {"steps": 1}, "eval": {"prompts": 0}, "log": {"start_table": False}}  # fmt: skip
    model = opd.run(raw, out=tmp_path / "run").model
    assert not (model / "modules").exists()
    assert list(json.loads((model / "trainer.json").read_text())) == [
        "step", "stage", "seed", "stream", "updates", "version", "rollouts", "random", "store", "unreported", "lines",
        "newest", "result", "teachers",
    ]  # fmt: skip
