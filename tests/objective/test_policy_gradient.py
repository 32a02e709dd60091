"""Exact enumeration in fp64: over every sequence a small policy can produce, each estimator has the gradient it claims."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opd.objective.advantages import extrapolated, moments, outcome_advantages, returns, whitened_by
from opd.objective.corrections import correction_weight, prefix_weight, veto_weight
from opd.objective.policy_gradient import cispo, gspo, importance_sampling, ppo
from opd.objective.term import k2

V, T = 3, 3  # three symbols, three positions: 27 sequences
SEQUENCES = list(itertools.product(range(V), repeat=T))


class Policy:
    """A table of logits per prefix: fully general, and every gradient can be summed exactly."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.prefixes = [prefix for size in range(T) for prefix in itertools.product(range(V), repeat=size)]
        self.row = {prefix: index for index, prefix in enumerate(self.prefixes)}
        shape = (len(self.prefixes), V)
        self.logits = (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_(True)

    def log_rows(self) -> Tensor:
        return self.logits.log_softmax(-1)

    def token_logprobs(self, sequence: tuple[int, ...]) -> Tensor:
        rows = self.log_rows()
        return torch.stack([rows[self.row[sequence[:t]], sequence[t]] for t in range(T)])

    def probability(self, sequence: tuple[int, ...]) -> float:
        return float(self.token_logprobs(sequence).sum().exp().detach())


def gradient(policy: Policy, loss: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, policy.logits)
    return found


def expected_gradient(
    student: Policy, sampler: Policy, losses: Callable[[tuple[int, ...], Tensor, Tensor], Tensor]
) -> Tensor:
    """Sum over all sequences of sampler probability times the gradient of the summed token losses."""
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        behaviour = sampler.token_logprobs(sequence).detach()
        total = (
            total + sampler.probability(sequence) * losses(sequence, student.token_logprobs(sequence), behaviour).sum()
        )
    return gradient(student, total)


def sequence_kl(student: Policy, teacher: Policy) -> Tensor:
    """KL of whole sequences, differentiable."""
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        own, other = student.token_logprobs(sequence).sum(), teacher.token_logprobs(sequence).sum().detach()
        total = total + own.exp() * (own - other)
    return total


def position_kl(student: Policy, target_rows: Tensor, prefixes: Policy) -> Tensor:
    """Sum over positions of KL(student || target) at prefixes drawn from `prefixes`, which are held fixed."""
    own = student.log_rows()
    per_row = (own.exp() * (own - target_rows.detach())).sum(-1)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in SEQUENCES:
        for t in range(T):
            total = total + prefixes.probability(sequence) * per_row[student.row[sequence[:t]]]
    return total


def expected_reward(student: Policy, reward: dict[tuple[int, ...], float]) -> Tensor:
    return torch.stack([student.token_logprobs(s).sum().exp() * reward[s] for s in SEQUENCES]).sum()


def log_ratio_advantage(teacher: Policy, student: Policy) -> Callable[[tuple[int, ...]], Tensor]:
    return lambda sequence: (teacher.token_logprobs(sequence) - student.token_logprobs(sequence)).detach()


REWARD = {sequence: float(sum(sequence) % 4 == 1) + 0.25 * sequence[0] for sequence in SEQUENCES}


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-9)


# Surrogates: on policy they all have the same gradient, and it is reverse KL's


SURROGATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "importance_sampling": importance_sampling,
    "ppo": lambda current, old, a: ppo(current, old, a, 0.2, 0.2),
    "ppo-dual": lambda current, old, a: ppo(current, old, a, 0.2, 0.28, 3.0),
    "cispo": lambda current, old, a: cispo(current, old, a, 1.0, 3.0),
    "gspo": lambda current, old, a: gspo(current, old, a, torch.zeros(T, dtype=torch.long), 3e-4, 4e-4),
}


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("seed", [0, 1])
def test_on_policy_every_surrogate_has_the_gradient_of_reverse_kl(name: str, seed: int) -> None:
    student, teacher = Policy(seed), Policy(seed + 10)
    advantage = log_ratio_advantage(teacher, student)
    found = expected_gradient(student, student, lambda s, current, old: SURROGATES[name](current, old, advantage(s)))
    close(found, gradient(student, position_kl(student, teacher.log_rows(), student)))


@pytest.mark.parametrize("name", SURROGATES)
def test_student_equal_to_teacher_is_zero_token_by_token(name: str) -> None:
    student, teacher = Policy(0), Policy(0)
    advantage = log_ratio_advantage(teacher, student)
    for sequence in SEQUENCES:
        current = student.token_logprobs(sequence)
        loss = SURROGATES[name](current, current.detach(), advantage(sequence)).sum()
        assert float(loss.detach()) == 0
        assert float(gradient(student, loss).abs().max()) == 0


def test_k2_has_the_gradient_of_reverse_kl_and_vanishes_at_equality() -> None:
    student, teacher = Policy(2), Policy(3)
    found = expected_gradient(student, student, lambda s, current, _: k2(current, teacher.token_logprobs(s)))
    close(found, gradient(student, position_kl(student, teacher.log_rows(), student)))
    same = expected_gradient(student, student, lambda s, current, _: k2(current, student.token_logprobs(s)))
    assert float(same.abs().max()) == 0


@given(seed=st.integers(0, 50), low=st.floats(0.05, 0.5), high=st.floats(0.05, 0.5))
@settings(max_examples=25, deadline=None)
def test_ppo_is_importance_sampling_inside_its_clip_and_flat_outside(seed: int, low: float, high: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    current = torch.randn(64, generator=generator, dtype=torch.float64).requires_grad_(True)
    old = torch.randn(64, generator=generator, dtype=torch.float64)
    advantage = torch.randn(64, generator=generator, dtype=torch.float64)
    ratio = (current.detach() - old).exp()
    (found,) = torch.autograd.grad(ppo(current, old, advantage, low, high).sum(), current)
    flat = ((ratio > 1 + high) & (advantage > 0)) | ((ratio < 1 - low) & (advantage < 0))
    close(found, torch.where(flat, 0.0, -ratio * advantage))
    (dual,) = torch.autograd.grad(ppo(current, old, advantage, low, high, 3.0).sum(), current)
    close(dual, torch.where(flat | ((advantage < 0) & (ratio > 3)), 0.0, -ratio * advantage))
    (soft,) = torch.autograd.grad(cispo(current, old, advantage, low, high).sum(), current)
    close(soft, -ratio.clamp(1 - low, 1 + high) * advantage)


def test_importance_sampling_is_right_off_policy_for_one_token() -> None:
    """Per token the ratio is exact; over several tokens it leaves out the ratio of the prefix, by construction."""
    student, sampler, teacher = Policy(4), Policy(5), Policy(6)
    advantage = log_ratio_advantage(teacher, student)
    found = expected_gradient(student, sampler, lambda s, now, old: importance_sampling(now, old, advantage(s)))
    close(found, gradient(student, position_kl(student, teacher.log_rows(), sampler)))


def test_gspo_shares_one_ratio_and_clips_whole_sequences() -> None:
    current = torch.tensor([-1.0, -1.2, -0.4, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.1, -1.0, -0.5, -1.5], dtype=torch.float64)
    segment, advantage = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64)
    (found,) = torch.autograd.grad(gspo(current, old, advantage, segment, 0.2, 0.2).sum(), current)
    first = float(np.exp((0.1 - 0.2) / 2))
    close(found, torch.tensor([-first, -first, 0.0, 0.0], dtype=torch.float64))  # exp(0.55) is above 1.2: clipped


# Advantages


@pytest.mark.parametrize(("baseline", "share"), [("group", 0.5), ("leave_one_out", 1.0), ("none", 1.0), ("batch", 0.5)])
def test_outcome_advantages_have_the_gradient_of_the_expected_reward(baseline: str, share: float) -> None:
    """Groups of two, every pair enumerated. Subtracting a mean that contains the sample itself shrinks it by 1 - 1/n."""
    student = Policy(7)
    total = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(SEQUENCES, repeat=2):
        values = outcome_advantages([REWARD[s] for s in pair], ["g", "g"], baseline)  # type: ignore[arg-type]
        weight = student.probability(pair[0]) * student.probability(pair[1])
        for sequence, value in zip(pair, values, strict=True):
            current = student.token_logprobs(sequence)
            losses = importance_sampling(current, current.detach(), torch.full((T,), float(value), dtype=torch.float64))
            total = total + weight * losses.sum() / 2
    close(gradient(student, total), -share * gradient(student, expected_reward(student, REWARD)))


def test_mimo_is_the_sum_of_both_gradients() -> None:
    student, teacher, alpha = Policy(8), Policy(9), 0.7
    advantage = log_ratio_advantage(teacher, student)
    found = expected_gradient(
        student, student, lambda s, current, old: importance_sampling(current, old, advantage(s) + alpha * REWARD[s])
    )
    kl = gradient(student, position_kl(student, teacher.log_rows(), student))
    close(found, kl - alpha * gradient(student, expected_reward(student, REWARD)))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 2.0])
def test_extrapolation_is_reverse_kl_to_a_target_past_the_teacher(factor: float) -> None:
    student, teacher, reference = Policy(10), Policy(11), Policy(12)
    target = (factor * teacher.log_rows() + (1 - factor) * reference.log_rows()).log_softmax(-1)

    def advantage(sequence: tuple[int, ...]) -> Tensor:
        columns = [policy.token_logprobs(sequence).detach().numpy() for policy in (teacher, student, reference)]
        return torch.from_numpy(extrapolated(*columns, factor))

    found = expected_gradient(student, student, lambda s, now, old: importance_sampling(now, old, advantage(s)))
    close(found, gradient(student, position_kl(student, target, student)))


def test_undiscounted_returns_have_the_gradient_of_the_sequence_kl() -> None:
    student, teacher = Policy(13), Policy(14)
    advantage = log_ratio_advantage(teacher, student)

    def losses(sequence: tuple[int, ...], current: Tensor, old: Tensor) -> Tensor:
        return importance_sampling(current, old, torch.from_numpy(returns(advantage(sequence).numpy(), 1.0)))

    close(expected_gradient(student, student, losses), gradient(student, sequence_kl(student, teacher)))


def test_minillm_single_step_part_and_future_returns_make_the_sequence_kl() -> None:
    student, teacher = Policy(15), Policy(16)
    advantage = log_ratio_advantage(teacher, student)

    def losses(sequence: tuple[int, ...], current: Tensor, old: Tensor) -> Tensor:
        future = returns(advantage(sequence).numpy(), 1.0, future_only=True)
        return importance_sampling(current, old, torch.from_numpy(future))

    single = gradient(student, position_kl(student, teacher.log_rows(), student))
    close(expected_gradient(student, student, losses) + single, gradient(student, sequence_kl(student, teacher)))


def test_the_exact_kl_baseline_keeps_the_expected_gradient() -> None:
    student, teacher = Policy(17), Policy(18)
    own, other = student.log_rows().detach(), teacher.log_rows().detach()
    kl = (own.exp() * (own - other)).sum(-1)
    advantage = log_ratio_advantage(teacher, student)

    def losses(sequence: tuple[int, ...], current: Tensor, old: Tensor) -> Tensor:
        baseline = torch.stack([kl[student.row[sequence[:t]]] for t in range(T)])
        return importance_sampling(current, old, advantage(sequence) + baseline)

    close(
        expected_gradient(student, student, losses),
        gradient(student, position_kl(student, teacher.log_rows(), student)),
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_kl_baseline_lowers_the_variance(seed: int) -> None:
    """Of the one-sample gradient at one position, for a teacher that grew from the student. Not so for every pair."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(100, generator=generator, dtype=torch.float64)
    own = logits.log_softmax(-1)
    other = (logits + torch.randn(100, generator=generator, dtype=torch.float64)).log_softmax(-1)
    scores = torch.eye(100, dtype=torch.float64) - own.exp()  # row y: the gradient of log S(y)

    def variance(advantage: Tensor) -> float:
        samples = advantage[:, None] * scores
        mean = (own.exp()[:, None] * samples).sum(0)
        return float((own.exp() * ((samples - mean) ** 2).sum(-1)).sum())

    kl = (own.exp() * (own - other)).sum()
    assert variance(other - own + kl) < variance(other - own)


def test_a_reference_penalty_is_the_kl_to_the_reference() -> None:
    student, reference = Policy(19), Policy(20)
    penalty = log_ratio_advantage(reference, student)
    found = expected_gradient(student, student, lambda s, now, old: importance_sampling(now, old, 0.3 * penalty(s)))
    close(found, 0.3 * gradient(student, position_kl(student, reference.log_rows(), student)))


@given(
    scores=st.lists(st.one_of(st.none(), st.floats(-2, 2)), min_size=1, max_size=12),
    size=st.integers(1, 4),
    std=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_failed_rewards_enter_no_baseline(scores: list[float | None], size: int, std: bool) -> None:
    groups = [str(index // size) for index in range(len(scores))]
    found = outcome_advantages(scores, groups, "group", std)
    for index, score in enumerate(scores):
        assert np.isnan(found[index]) == (score is None)
    kept = [index for index, score in enumerate(scores) if score is not None]
    alone = outcome_advantages([scores[index] for index in kept], [groups[index] for index in kept], "group", std)
    np.testing.assert_allclose(found[kept], alone, atol=1e-12)


@pytest.mark.parametrize("discount", [0.3, 0.95, 1.0])
def test_future_returns_are_returns_without_the_tokens_own_part(discount: float) -> None:
    values = np.random.default_rng(0).normal(size=7)
    np.testing.assert_allclose(returns(values, discount, future_only=True), returns(values, discount) - values)


def test_whitening_ignores_what_is_masked() -> None:
    values, masks = [np.array([1.0, 900.0]), np.array([3.0])], [np.array([True, False]), np.array([True])]
    found = whitened_by(values, moments(values, masks))
    np.testing.assert_allclose([found[0][0], found[1][0]], [-1, 1], atol=1e-6)


# Corrections: the sampler is not the trainer


def corrected(student: Policy, sampler: Policy, teacher: Policy, weight: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Expected gradient of -w(rho) A log current: what a decoupled, or a fully included, correction comes to."""
    advantage = log_ratio_advantage(teacher, student)
    segment = torch.zeros(T, dtype=torch.long)

    def losses(sequence: tuple[int, ...], current: Tensor, behaviour: Tensor) -> Tensor:
        return -weight((current - behaviour).detach(), segment) * advantage(sequence) * current

    return expected_gradient(student, sampler, losses)


def by_hand(student: Policy, sampler: Policy, teacher: Policy, weight: Callable[[np.ndarray], np.ndarray]) -> Tensor:
    """The method's card, written out: sum over sequences and tokens of mu * w * A * grad log pi."""
    total = torch.zeros_like(student.logits)
    for sequence in SEQUENCES:
        ratio = (student.token_logprobs(sequence) - sampler.token_logprobs(sequence)).detach().exp().numpy()
        advantage = (teacher.token_logprobs(sequence) - student.token_logprobs(sequence)).detach().numpy()
        for t, factor in enumerate(weight(ratio) * advantage):
            score = gradient(student, student.token_logprobs(sequence)[t])
            total = total - sampler.probability(sequence) * float(factor) * score
    return total


CORRECTIONS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[np.ndarray], np.ndarray]]] = {
    "tis": (lambda r, s: correction_weight("tis", r, s, high=1.3), lambda r: np.minimum(r, 1.3)),
    "icepop": (
        lambda r, s: correction_weight("icepop", r, s, low=0.6, high=1.4), lambda r: r * ((r >= 0.6) & (r <= 1.4))
    ),
    "mis": (lambda r, s: correction_weight("mis", r, s, low=0.6, high=1.4), lambda r: r * ((r >= 0.6) & (r <= 1.4))),
    "tis-sequence": (
        lambda r, s: correction_weight("tis", r, s, high=1.3, level="sequence"),
        lambda r: np.full(T, min(r.prod(), 1.3)),
    ),
    "mis-sequence": (
        lambda r, s: correction_weight("mis", r, s, low=0.5, high=1.5, level="sequence"),
        lambda r: np.full(T, r.prod() * (0.5 <= r.prod() <= 1.5)),
    ),
    "mis-geometric": (
        lambda r, s: correction_weight("mis", r, s, low=0.8, high=1.2, level="geometric"),
        lambda r: r * (0.8 <= r.prod() ** (1 / T) <= 1.2),
    ),
    "veto": (lambda r, s: veto_weight(r, s, 0.4), lambda r: np.full(T, float((r >= 0.4).all()))),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_have_the_gradient_their_card_states(name: str) -> None:
    student, sampler, teacher = Policy(21), Policy(22, 0.7), Policy(23)
    fast, card = CORRECTIONS[name]
    found = corrected(student, sampler, teacher, fast)
    close(found, by_hand(student, sampler, teacher, card))
    uncorrected = corrected(student, sampler, teacher, lambda r, s: torch.ones_like(r))
    assert float((found - uncorrected).abs().max()) > 1e-3  # it altered


def test_sequence_weights_undo_the_sampler_exactly_when_nothing_is_cut_off() -> None:
    student, sampler, teacher = Policy(24), Policy(25), Policy(26)
    found = corrected(
        student, sampler, teacher, lambda r, s: correction_weight("tis", r, s, high=1e9, level="sequence")
    )
    close(found, gradient(student, position_kl(student, teacher.log_rows(), student)))


def test_a_direct_loss_is_corrected_by_its_prefix_and_not_by_its_own_token() -> None:
    student, sampler, teacher = Policy(27), Policy(28), Policy(29)
    own, other = student.log_rows(), teacher.log_rows().detach()
    per_row = (own.exp() * (own - other)).sum(-1)
    segment = torch.zeros(T, dtype=torch.long)

    def direct(weight: Callable[[Tensor], Tensor]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for sequence in SEQUENCES:
            ratio = (student.token_logprobs(sequence) - sampler.token_logprobs(sequence)).detach()
            rows = torch.stack([per_row[student.row[sequence[:t]]] for t in range(T)])
            total = total + sampler.probability(sequence) * (weight(ratio) * rows).sum()
        (found,) = torch.autograd.grad(total, student.logits, retain_graph=True)
        return found

    wanted = gradient(student, position_kl(student, teacher.log_rows(), student))
    close(direct(lambda r: prefix_weight(r, segment, 1e9)), wanted)
    own_token = direct(lambda r: correction_weight("tis", r, segment, high=1e9))
    close(own_token, direct(torch.ones_like))  # the token's own ratio averages to 1 and corrects nothing
    assert float((own_token - wanted).abs().max()) > 1e-3


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_prefix_products_start_anew_with_every_rollout(lengths: list[int], seed: int) -> None:
    log_ratio = torch.from_numpy(np.random.default_rng(seed).normal(size=sum(lengths)))
    segment = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    found = prefix_weight(log_ratio, segment, 5.0)
    wanted = []
    for part in log_ratio.split(lengths):
        wanted += [min(float(part[:t].sum().exp()), 5.0) for t in range(part.numel())]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
