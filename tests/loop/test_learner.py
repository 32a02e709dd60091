"""The learner: the student and modules as one, each with its own optimiser, and nothing updated by what is no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opd
from opd.common.errors import TrainingError
from opd.loop.learner import Learner, ModuleUpdates, Optimiser, learning_rate
from opd.loop.ranks import Ranks
from opd.models.modules import Module, ModuleInputs, ValueHead, open_modules
from opd.recipe import Train
from tests.support.helpers import tiny_model
from tests.support.rollouts import sampled_by, some_rollouts

PPO: list[dict[str, Any]] = [
    {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "also": {"kind": "gae"}}},
    {"form": "value", "coefficient": 0.1},
]
TRAIN = Train(lr=1e-3, steps=10, warmup=4)


def trainer(**head: Any) -> opd.Trainer:
    modules = {"value": {"kind": "head", "lr": 0.5, **head}}
    return opd.Trainer(tiny_model(), opd.Objective(PPO), {"lr": 1e-3, "micro_tokens": 64}, modules=modules)


def batch(of: opd.Trainer) -> Any:
    rollouts = sampled_by(of.student, some_rollouts())
    return of.batch(rollouts, {item.id: float(number % 2) for number, item in enumerate(rollouts)})


def copies(weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def same(weights: dict[str, nn.Parameter], before: dict[str, Tensor]) -> bool:
    return all(torch.equal(weight, before[name]) for name, weight in weights.items())


def module(name: str = "value", **settings: Any) -> ModuleUpdates:
    inputs = ModuleInputs(4, 10, torch.device("cpu"), torch.float32, 0)
    kind = ValueHead(**settings)
    return ModuleUpdates(kind.open(name, inputs), kind, TRAIN, Ranks())


def with_gradient(updates: ModuleUpdates, value: float) -> dict[str, nn.Parameter]:
    weights = updates.module.parameters()
    for weight in weights.values():
        weight.grad = torch.full_like(weight, value)
    return weights


def test_a_loop_of_ones_own_trains_a_head() -> None:
    own = trainer()
    head, student = copies(own.modules["value"].parameters()), copies(own.student.trainable())
    result = own.step(batch(own))
    assert result.metrics["grad_norm/value"] > 0
    assert not same(own.modules["value"].parameters(), head)
    assert not same(own.student.trainable(), student)
    assert all(weight.grad is None for weight in own.modules["value"].parameters().values())


def test_each_part_has_its_own_rate_and_clip() -> None:
    updates = module(lr=0.5, clip=1.0)
    learner = Learner(Optimiser({"x": nn.Parameter(torch.ones(3))}, TRAIN), {"value": updates})
    weights = with_gradient(updates, 3.0)
    learner.clip()
    assert updates.norm == pytest.approx(3 * 5**0.5)  # four weights and a bias
    assert float(torch.stack([weight.grad.norm() for weight in weights.values()]).norm()) == pytest.approx(1.0)  # type: ignore[union-attr]
    assert learner.step(2) == learning_rate(2, TRAIN) == 5e-4
    for weight in weights.values():  # AdamW's first step is the rate, which follows the warm-up
        torch.testing.assert_close(weight, torch.full_like(weight, -0.25))
    assert (learner.updates, updates.optimiser.updates) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {"warmup": 4, "schedule": "constant", "weight_decay": 0.0}),
        ({"warmup": 0}, {"warmup": 0, "schedule": "constant", "weight_decay": 0.0}),
        ({"schedule": "linear", "weight_decay": 0.5}, {"warmup": 4, "schedule": "linear", "weight_decay": 0.5}),
    ],
)
def test_a_module_has_the_schedule_of_the_stage_or_its_own(settings: dict[str, Any], wanted: dict[str, Any]) -> None:
    updates, spec = module(lr=0.5, **settings), Train(lr=0.5, steps=10, **wanted)
    reference = Optimiser(
        {"linear.weight": nn.Parameter(torch.zeros(1, 4)), "linear.bias": nn.Parameter(torch.zeros(1))}, spec
    )
    for step in range(1, 9):
        with_gradient(updates, 1.0)
        for weight in reference.masters:
            weight.grad = torch.full_like(weight, 1.0)
        updates.clip()
        reference.clip()
        assert updates.step(step) == reference.step(step) == learning_rate(step, spec)
    for one, two in zip(updates.optimiser.masters, reference.masters, strict=True):
        assert torch.equal(one, two)


def test_a_module_that_is_updated_now_and_then_keeps_no_gradient_between() -> None:
    updates = module(every=3)
    for step in range(1, 7):
        before = copies(with_gradient(updates, 1.0))
        updates.clip()
        updates.step(step)
        assert same(updates.module.parameters(), before) == bool(step % 3)
        assert all(weight.grad is None for weight in updates.module.parameters().values())
    assert updates.optimiser.updates == 2


def test_a_gradient_that_is_no_number_updates_nothing_and_is_named() -> None:
    updates, weight = module(), nn.Parameter(torch.ones(3))
    learner = Learner(Optimiser({"x": weight}, TRAIN), {"value": updates})
    weight.grad, before = torch.ones(3), copies(with_gradient(updates, float("nan")))
    assert learner.clip() > 0
    with pytest.raises(TrainingError, match=r"the gradient of module 'value' is not finite.*modules\.value\.lr"):
        learner.step(7)
    assert torch.equal(weight, torch.ones(3))
    assert same(updates.module.parameters(), before)
    assert weight.grad is None
    assert learner.updates == 0
    with torch.no_grad():
        next(iter(updates.module.parameters().values())).fill_(float("inf"))
    assert not learner.finite()


def test_weights_that_are_no_numbers_are_a_loss_that_is_none() -> None:
    own = trainer()
    ready, student = batch(own), copies(own.student.trainable())
    with torch.no_grad():
        own.modules["value"].parameters()["linear.bias"].fill_(float("nan"))
    with pytest.raises(TrainingError, match="the loss or its gradient is not finite"):
        own.step(ready)
    assert same(own.student.trainable(), student)


def test_first_weights_depend_on_the_seed_and_the_name_alone() -> None:
    class Drawn(ValueHead):
        name = "drawn"

        def open(self, name: str, inputs: ModuleInputs) -> Module:
            linear = nn.Linear(inputs.width, 1)
            nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(inputs.seed))
            nn.init.zeros_(linear.bias)
            return Module(name, linear)

    def weights(name: str, seed: int) -> list[float]:
        torch.rand(3)
        opened = open_modules({name: Drawn()}, tiny_model(), seed)[name]
        return opened.parameters()["weight"].flatten().tolist()

    assert weights("a", 0) == weights("a", 0)
    assert weights("a", 0) != weights("b", 0)
    assert weights("a", 0) != weights("a", 1)


def test_a_module_of_another_shape_is_not_restored() -> None:
    head = module().module
    with pytest.raises(opd.ModelError, match=r"module 'value': linear\.weight of the checkpoint"):
        head.restore({**head.state(), "linear.weight": torch.zeros(1, 5)})
    with pytest.raises(opd.ModelError, match=r"module 'value': other of the checkpoint"):
        head.restore({**head.state(), "other": torch.zeros(1)})
