"""Controls: a fixed advantage, and a teacher whose signal stands at other tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from opd.common.errors import RecipeError
from opd.divergences.kinds import reverse_kl
from opd.divergences.projection import log_probs
from opd.models.language_model import Pack
from opd.objective.batch import Batch, FirstPass
from opd.objective.gates import shuffled_order
from opd.objective.objective import Objective, PreparedTerm, prepare_term
from opd.records import Rollout, Signal
from tests.support.helpers import term as read_term
from tests.support.helpers import tiny_model
from tests.support.rollouts import STOPS, rollout, sampled_by
from tests.support.steps import gradients

SIZE = 6


def answers(count: int = 4) -> list[Rollout]:
    generator = np.random.default_rng(0)
    return [
        replace(
            rollout(f"r{index}", [1], [5] * SIZE, group=f"g{index // 2}"),
            logprob=-generator.exponential(size=SIZE).astype(np.float32),
        )
        for index in range(count)
    ]


def batch(rollouts: list[Rollout]) -> Batch:
    generator = np.random.default_rng(1)
    scored = {
        item.id: Signal("t", 0, "teacher", "same", (), -generator.exponential(size=SIZE), np.ones(SIZE, bool))
        for item in rollouts
    }
    entropies = {item.id: generator.random(SIZE) for item in rollouts}
    return Batch(rollouts, {("teacher", "logprobs_at"): scored}, {}, FirstPass(entropy=entropies))


def advantages(settings: dict[str, Any], data: Batch, seed: int = 0) -> tuple[PreparedTerm, dict[str, np.ndarray]]:
    from opd.objective.advantages import SampledTokens

    found = prepare_term(read_term(form="policy_gradient", **settings), "0", 1.0, data, 8, seed)
    term: Any = found.term
    students = [item.logprob.astype(np.float64) for item in data.rollouts]
    values = term.advantage.values(SampledTokens(term, found, data.rollouts, students), found.state)
    return found, {item.id: value for item, value in zip(data.rollouts, values, strict=True)}


def test_opsa_pushes_down_the_unlikely_tokens_and_more_where_the_student_is_unsure() -> None:
    data = batch(answers())
    settings = {
        "advantage": {"teacher_weight": 0, "also": {"kind": "fixed", "entropy_weight": -0.5}},
        "gate": {"kind": "unlikely", "share": 0.25},
    }
    found, values = advantages(settings, data)
    names = [item.id for item in data.rollouts]
    logprobs = np.concatenate([item.logprob for item in data.rollouts])
    open_ = np.concatenate([found.factor[name] for name in names]) > 0
    assert set(np.flatnonzero(open_)) == set(np.argsort(logprobs)[:6])
    entropy = np.concatenate([data.first_pass.entropy[name] for name in names])
    low, high = entropy[open_].min(), entropy[open_].max()
    wanted = -0.5 - (entropy - low) / (2 * (high - low))
    np.testing.assert_allclose(np.concatenate([values[name] for name in names])[open_], wanted[open_])


def test_a_share_of_every_rollout() -> None:
    settings = {"advantage": {}, "gate": {"kind": "unlikely", "share": 0.5, "per": "rollout"}}
    data = batch(answers())
    found, _ = advantages(settings, data)
    for item in data.rollouts:
        assert set(np.flatnonzero(found.factor[item.id])) == set(np.argsort(item.logprob)[:3])


def test_a_fixed_advantage_of_nothing_is_rejected() -> None:
    with pytest.raises(RecipeError, match=r"value and entropy_weight are 0"):
        Objective(
            {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "also": {"kind": "fixed", "value": 0}}}
        )


@pytest.mark.parametrize("over", ["rollout", "batch"])
def test_shuffled_advantages_are_the_same_numbers_at_other_tokens(over: str) -> None:
    data = batch(answers())
    gate = {"kind": "unlikely", "share": 0.5}
    plain_term, plain = advantages({"gate": gate}, data)
    _, found = advantages({"gate": gate, "advantage": {"shuffle": over}}, data)
    open_ = {name: factor > 0 for name, factor in plain_term.factor.items()}
    groups = [[name] for name in open_] if over == "rollout" else [list(open_)]
    for names in groups:
        before, after = (np.concatenate([side[name][open_[name]] for name in names]) for side in (plain, found))
        np.testing.assert_allclose(np.sort(before), np.sort(after))
        assert (before != after).all() or before.size == 1
    again = advantages({"gate": gate, "advantage": {"shuffle": over}}, data)[1]
    other = advantages({"gate": gate, "advantage": {"shuffle": over}}, data, seed=1)[1]
    assert all((found[name] == again[name]).all() for name in found)
    assert any((found[name] != other[name]).any() for name in found)


def test_the_direct_loss_of_a_shuffled_teacher() -> None:
    """Against the divergence written out, with the teacher's rows put in another order."""
    student, teacher = tiny_model(seed=0), tiny_model(seed=1)
    items = sampled_by(student, [rollout("a", [3, 4], [5, 6, 7, 8, 1]), rollout("b", [9], [11, 12, 1])])
    loss, slopes, _ = gradients(student, {"t": teacher}, [read_term(shuffle="rollout")], items)
    student.module.zero_grad()
    total = torch.zeros(())
    for item in items:
        pack = Pack.of([item])
        rows = [model.project(model.hidden(pack.ids_T, pack.layout)[pack.predicting_N]) for model in (student, teacher)]
        log_s, log_t = (log_probs(side, side.vocabulary, (STOPS,)) for side in rows)
        order = shuffled_order(f"0/shuffle/{item.id}", np.ones(item.response_ids.size, bool))
        total = total + reverse_kl(log_s, log_t.detach()[torch.from_numpy(order)]).sum() / 8
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in student.module.named_parameters():
        torch.testing.assert_close(slopes[name], parameter.grad, rtol=1e-3, atol=1e-6)
