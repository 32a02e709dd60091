"""Every divergence against its textbook sum, its analytic slope and its policy-gradient twin, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opd.divergences import Projection, divergence, divergence_advantage, statistics
from opd.divergences.kinds import KINDS, Formula, entropy
from opd.objective.policy_gradient import importance_sampling
from tests.support.divergence_cases import CASES, SMOOTH, draw, textbook

SEEDS = st.integers(0, 10**6)


def pair(seed: int, n: int = 4, size: int = 7, spread: float = 1.5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, n, size, generator=generator, dtype=torch.float64) * spread
    return logits[0].requires_grad_(), logits[1]


@pytest.mark.parametrize(("kind", "params"), CASES)
@given(seed=SEEDS, spread=st.sampled_from([0.1, 1.5, 8.0]))
def test_value_is_the_textbook_sum_and_nonnegative(kind: str, params: dict, seed: int, spread: float) -> None:
    student, teacher = pair(seed, spread=spread)
    value = Formula.of(kind, params)(student.log_softmax(-1), teacher.log_softmax(-1)).detach().numpy()
    expected = textbook(kind, params, student.softmax(-1).detach().numpy(), teacher.softmax(-1).numpy())
    np.testing.assert_allclose(value, expected, rtol=1e-8, atol=1e-10)
    assert (value >= -1e-12).all()


@pytest.mark.parametrize(("kind", "params"), CASES)
@given(seed=SEEDS)
def test_gradient_against_finite_differences(kind: str, params: dict, seed: int) -> None:
    student, teacher = pair(seed, n=2, size=5)
    formula = Formula.of(kind, params)
    assert torch.autograd.gradcheck(lambda z: formula(z.log_softmax(-1), teacher.log_softmax(-1)).sum(), student)


@pytest.mark.parametrize(("kind", "params"), CASES)
@given(seed=SEEDS, spread=st.sampled_from([0.1, 1.5, 8.0]))
def test_terms_are_the_value_and_its_gradient(kind: str, params: dict, seed: int, spread: float) -> None:
    student, teacher = pair(seed, spread=spread)
    formula = Formula.of(kind, params)
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    expected = torch.autograd.grad(formula(log_s, log_t).sum(), student)[0]
    phi, slope = formula.terms(log_s.detach(), log_t, log_s.detach().exp(), log_t.exp())
    value, factor = formula.outer(phi.sum(-1))
    found = factor[:, None] * (slope - log_s.detach().exp() * slope.sum(-1, keepdim=True))
    torch.testing.assert_close(value, formula(log_s, log_t).detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(("kind", "params"), CASES)
@given(seed=SEEDS)
def test_zero_at_equality(kind: str, params: dict, seed: int) -> None:
    student, _ = pair(seed)
    formula, log_s = Formula.of(kind, params), student.log_softmax(-1)
    value = formula(log_s, log_s.detach())
    assert value.abs().max() < 1e-12
    phi, _ = formula.terms(log_s.detach(), log_s.detach(), log_s.detach().exp(), log_s.detach().exp())
    assert formula.outer(phi.sum(-1))[0].abs().max() < 1e-12
    if kind in SMOOTH:
        assert torch.autograd.grad(value.sum(), student)[0].abs().max() < 1e-12


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_an_id_that_neither_side_can_say_adds_nothing(kind: str, params: dict) -> None:
    formula, out = Formula.of(kind, params), torch.full((4, 1), -torch.inf, dtype=torch.float64)
    student, teacher = pair(0)
    expected = formula(student.log_softmax(-1), teacher.log_softmax(-1))
    log_s, log_t = (torch.cat([side, out], -1).log_softmax(-1) for side in (student, teacher))
    found = formula(log_s, log_t)
    torch.testing.assert_close(found, expected)
    slopes = [torch.autograd.grad(value.sum(), student, retain_graph=True)[0] for value in (found, expected)]
    torch.testing.assert_close(*slopes)
    torch.testing.assert_close(entropy(log_s), entropy(student.log_softmax(-1)))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("kind", "params"), CASES)
def test_a_head_may_rule_ids_out(kind: str, params: dict, backend: Any) -> None:
    """By a bias of -inf on both sides: as if the id were not there. On one side: nothing becomes NaN."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs = (draw(generator, *shape) for shape in ((5, 4), (8, 4), (8, 4)))
    ruled_out = torch.zeros(8, dtype=torch.float64)
    ruled_out[7] = -torch.inf

    def outcome(count: int, ours: Tensor, others: Tensor) -> list[Tensor]:
        leaf = hidden.clone().requires_grad_()
        student, teacher = (
            Projection(leaf, weight[:count], ours[:count]),
            Projection(hidden, theirs[:count], others[:count]),
        )
        found = divergence(kind, student, teacher, backend=backend, **params)
        plain = statistics(student, teacher)
        assert plain.reverse_kl is not None
        found.loss.backward()
        assert leaf.grad is not None
        return [found.value, leaf.grad, found.entropy, found.teacher_entropy, found.reverse_kl, plain.reverse_kl]

    for left, right in zip(outcome(8, ruled_out, ruled_out), outcome(7, ruled_out, ruled_out), strict=True):
        torch.testing.assert_close(left, right)
    for one_sided in ((ruled_out, torch.zeros_like(ruled_out)), (torch.zeros_like(ruled_out), ruled_out)):
        if params.get("alpha", 0) <= 1:  # above, the divergence is infinite
            assert not any(value.isnan().any() for value in outcome(8, *one_sided))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_of_half_precision_may_rule_ids_out(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs = (draw(generator, *shape).to(dtype) for shape in ((5, 4), (8, 4), (8, 4)))
    bias = torch.zeros(8, dtype=dtype)
    bias[7] = -torch.inf
    values = [
        divergence("jsd", *(Projection(hidden, side[:count], bias[:count]) for side in (weight, theirs))).value
        for count in (7, 8)
    ]
    torch.testing.assert_close(*values)


@pytest.mark.parametrize(("kind", "params"), CASES)
@given(seed=SEEDS)
def test_expected_policy_gradient_is_the_direct_gradient(kind: str, params: dict, seed: int) -> None:
    """Exact enumeration: sum over tokens of S(y) times the gradient of the loss at y."""
    student, teacher = pair(seed, n=3, size=6)
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    value = Formula.of(kind, params)(log_s, log_t)
    advantage = divergence_advantage(kind, log_s, log_t, value=value[:, None], **params)
    assert not advantage.requires_grad
    behaviour = log_s.detach()
    expected = (behaviour.exp() * importance_sampling(log_s, behaviour, advantage)).sum()
    torch.testing.assert_close(
        torch.autograd.grad(expected, student, retain_graph=True)[0],
        torch.autograd.grad(value.sum(), student)[0],
        rtol=1e-8,
        atol=1e-11,
    )


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_advantage_is_zero_at_equality(kind: str, params: dict) -> None:
    logprob = torch.tensor([-0.1, -3.0, -40.0], dtype=torch.float64)
    assert divergence_advantage(kind, logprob, logprob, value=torch.zeros(3), **params).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["jsd", "skew_kl", "tvd", "acceptance"])
def test_bounded_advantages_stay_bounded(kind: str) -> None:
    student, teacher = torch.tensor([-1.0, -60.0]), torch.tensor([-60.0, -1.0])
    assert divergence_advantage(kind, student, teacher, value=torch.zeros(2)).abs().max() < 30


def test_acceptance_advantage_needs_the_value() -> None:
    with pytest.raises(ValueError, match="pass value="):
        divergence_advantage("acceptance", torch.zeros(1), torch.zeros(1))


def test_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown divergence"):
        Formula.of("kl", {})
    with pytest.raises(ValueError, match="takes no parameter"):
        Formula.of("reverse_kl", {"beta": 0.5})
    with pytest.raises(ValueError, match="takes only beta"):
        Formula.of("jsd", {"alpha": 0.5})
    with pytest.raises(ValueError, match="outside"):
        Formula.of("skew_kl", {"alpha": 1.5})
    assert {Formula.of(kind, {}).kind for kind in KINDS} == set(KINDS)
