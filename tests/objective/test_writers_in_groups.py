"""Methods with several writers in a group: their formulas on the same tokens, loss and gradient, and what they move towards."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import opd
from opd.divergences.kinds import SkewKL, SkewReverseKL
from opd.objective.batch import Batch
from opd.objective.objective import prepare_term
from opd.objective.policy_gradient import shaped
from opd.recipe import Rollouts
from opd.records import Author, Rollout
from tests.support.helpers import CHARACTERS, refusals, term, tiny_model, tiny_module
from tests.support.rollouts import sampled_by, some_rollouts
from tests.support.steps import gradients

SIZE = len(CHARACTERS) + 2  # ids of the tokenizer; the rest of the head is padding
UNION = {"teacher_weight": 0, "outcome_weight": 1, "baseline_of": "all"}


def by(authors: list[Author], per_group: int = 3) -> list[Rollout]:
    """Rollouts in groups. Tokens of others than the student have no log-probs of a sampler."""
    found = []
    rollouts = sampled_by(tiny_model("llama"), some_rollouts(count=len(authors)))
    for number, (item, author) in enumerate(zip(rollouts, authors, strict=True)):
        known = (
            {}
            if author == Author.STUDENT
            else dict.fromkeys(("logprob", "logprob_sampled"), np.full_like(item.logprob, np.nan))
        )
        changes: dict[str, Any] = {"sample": number % per_group, "group": f"g{number // per_group}", **known}
        found.append(replace(item, author=np.full_like(item.author, author), **changes))
    return found


def log_distributions(module: Any, rollout: Rollout) -> torch.Tensor:
    """(T, SIZE) from the stock module's logits; there is one stop id, so nothing is merged."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64))
    return module(ids[None]).logits[0, rollout.prompt_ids.size - 1 : -1, :SIZE].log_softmax(-1)


def token_logprobs(module: Any, rollout: Rollout) -> torch.Tensor:
    ids = torch.from_numpy(rollout.response_ids.astype(np.int64))
    return log_distributions(module, rollout).gather(-1, ids[:, None])[:, 0]


def same(loss: float, grads: dict[str, torch.Tensor], wanted: torch.Tensor, module: Any) -> None:
    """Compare with a loss in fp64 and its gradients."""
    wanted.backward()
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-4, abs=1e-6)
    for name, parameter in module.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(grads[name].double(), parameter.grad, rtol=1e-3, atol=2e-4 * scale + 1e-7)


# LUFFY


def test_luffy_is_its_formula() -> None:
    rollouts = by([Author.STUDENT, Author.STUDENT, Author.DATA] * 2)
    rewards = {"r0": 1.0, "r1": 0.0, "r2": 1.0, "r3": 0.0, "r4": 0.0, "r5": 1.0}
    constant = {"form": "policy_gradient", "advantage": UNION, "aggregate": "constant", "denominator": 8.0}
    terms = [term(**constant), term(on=["data"], surrogate="shaped", **constant)]
    loss, grads, _ = gradients(tiny_model("llama"), {}, terms, rollouts, scores=rewards)
    module = tiny_module("llama").double()
    total = torch.zeros((), dtype=torch.float64)
    for item in rollouts:
        mean = sum(rewards[other.id] for other in rollouts if other.group == item.group) / 3
        logprobs, p = token_logprobs(module, item), token_logprobs(module, item).exp()
        weight = p / (p + 0.1) if item.author[0] == Author.DATA else (logprobs - logprobs.detach()).exp()
        total = total - (weight * (rewards[item.id] - mean)).sum() / 8
    same(loss, grads, total, module)


def test_shaping_moves_tokens_at_gamma_most() -> None:
    for gamma in (0.1, 0.3):
        logprobs = torch.linspace(-6, -1e-3, 2000, dtype=torch.float64).requires_grad_()
        (slope,) = torch.autograd.grad(shaped(logprobs, -torch.ones(2000), gamma).sum(), logprobs)
        p = logprobs.detach().exp()
        torch.testing.assert_close(slope, gamma * p / (p + gamma) ** 2)
        assert float(p[slope.argmax()]) == pytest.approx(gamma, rel=2e-3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"on": ["data"]}, r"`on` must be \[student\]"),
        ({"on": ["data"], "surrogate": "shaped"}, "tokens are not known: set advantage.student: proximal"),
        ({"surrogate": {"kind": "shaped", "against": "proximal"}}, "`against` does nothing"),
        ({"surrogate": "shaped", "advantage": UNION, "correction": "tis"}, "no ratio that could be corrected"),
        (
            {"advantage": {"teacher_weight": 0, "outcome_weight": 1, "baseline": "none", "baseline_of": "all"}},
            "baseline is none",
        ),
    ],
)
def test_settings_without_a_meaning(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        term(form="policy_gradient", **settings)


def test_baselines_over_authors_that_do_not_write() -> None:
    data = {"writers": [{"kind": "data", "samples": 1}]}
    own = {"teacher_weight": 0, "outcome_weight": 1}
    trained = term(form="policy_gradient", on=["data"], surrogate="shaped", advantage=own)
    assert "of which there is one" in refusals(Rollouts(samples=4, **data), trained)
    union = term(form="policy_gradient", advantage=UNION)
    assert not refusals(Rollouts(samples=4, **data), union)
    all_data = Rollouts(samples=4, writers=[{"kind": "data", "samples": 4}])
    assert "only data writes in a group" in refusals(
        all_data, term(form="policy_gradient", on=["data"], surrogate="shaped", advantage=UNION)
    )


# BOND


def anchored(answers: list[int], anchors: list[int], rewards: list[float], settings: dict[str, Any]) -> np.ndarray:
    """Advantages of the student's answers next to anchors; answers are numbers of rewards."""
    rollouts, given = [], {}
    for number, (answer, author) in enumerate(
        [*((one, Author.STUDENT) for one in answers), *((one, Author.TEACHER) for one in anchors)]
    ):
        (item,) = some_rollouts(count=1)
        rollouts.append(
            replace(item, id=f"r{number}", group="g", sample=number, author=np.full_like(item.author, author))
        )
        given[f"r{number}"] = rewards[answer]
    advantage = {"teacher_weight": 0, "also": {"kind": "anchor_rank", "baseline": "none", **settings}}
    chosen = term(form="policy_gradient", advantage=advantage)
    prepared = prepare_term(chosen, "0", 1.0, Batch(rollouts, rewards=given), 8, 0)
    found = prepared.state[0]
    return np.array([found[f"r{number}"] for number in range(len(answers))])


REWARDS = [0.0, 0.25, 0.75, 1.0]
ANCHOR = np.array([0.4, 0.3, 0.2, 0.1])  # probabilities of the answers


def test_the_rank_is_the_rate_at_which_the_anchor_is_no_better() -> None:
    anchors = np.repeat(np.arange(4), (ANCHOR * 10).round().astype(int)).tolist()
    found = anchored([0, 1, 2, 3], anchors, REWARDS, {"n": 5, "floor": 1e-9})
    np.testing.assert_allclose(found, 4 * np.log(ANCHOR.cumsum()), atol=1e-9)
    two = [[3, 3], [1, 3], [0, 0]]
    assert [anchored([1], anchors, REWARDS, {"rule": "worst"})[0] for anchors in two] == pytest.approx(
        [-np.log(16), 0, 0]
    )


def flow(rank: np.ndarray, steps: int = 400) -> list[np.ndarray]:
    """Policies on the way up of the expected policy gradient with the reward rank - (log student - log anchor)."""
    logits, found = np.log(ANCHOR), [ANCHOR]
    for _ in range(steps):
        policy = found[-1]
        worth = rank - (np.log(policy) - np.log(ANCHOR))
        logits = logits + 0.1 * policy * (worth - policy @ worth)
        found.append(np.exp(logits) / np.exp(logits).sum())
    return found


def test_bond_goes_to_the_best_of_n() -> None:
    n, anchors = 5, np.repeat(np.arange(4), (ANCHOR * 10).round().astype(int)).tolist()
    rank = anchored([0, 1, 2, 3], anchors, REWARDS, {"n": n, "floor": 1e-9})
    best = ANCHOR * ANCHOR.cumsum() ** (n - 1)
    best /= best.sum()
    policies = flow(rank)
    away = [float(policy @ (np.log(policy) - np.log(best))) for policy in policies]
    assert all(later < before + 1e-15 for before, later in itertools.pairwise(away))
    assert away[-1] < 0.02 * away[0]
    means = [float(policy @ REWARDS) for policy in policies]
    assert means[0] < means[-1] == pytest.approx(best @ REWARDS, abs=0.05)


def test_j_bond_raises_ordered_rewards() -> None:
    rank = np.zeros(4)
    for (one, other), chance in np.ndenumerate(np.outer(ANCHOR, ANCHOR)):
        rank += chance * anchored([0, 1, 2, 3], [one, other], REWARDS, {"rule": "worst"})
    means = [float(policy @ REWARDS) for policy in flow(rank)]
    assert all(before < later + 1e-12 for before, later in itertools.pairwise(means))
    assert means[-1] > means[0] + 0.1


def test_the_best_answer_of_a_group_stays() -> None:
    rollouts = by([Author.TEACHER, Author.TEACHER, Author.STUDENT] * 2)
    rewards = {"r0": 0.5, "r1": 0.5, "r2": 1.0, "r3": 0.0, "r4": 0.25, "r5": 0.0}
    chosen = term(form="cross_entropy", on=["teacher"], gate="best_of_group")
    prepared = prepare_term(chosen, "0", 1.0, Batch(rollouts, rewards=rewards), 8, 0)
    assert [bool(prepared.factor[item.id].any()) for item in rollouts] == [True, False, False, False, True, False]


def test_j_bond_is_its_formula() -> None:
    """Likelihood of the better anchor answer, and the policy gradient over whole answers."""
    rollouts = by([Author.STUDENT, Author.TEACHER, Author.TEACHER] * 2)
    rewards = {"r0": 0.0, "r1": 1.0, "r2": 0.5, "r3": 1.0, "r4": 0.0, "r5": 0.25}
    terms = [
        term(form="cross_entropy", on=["teacher"], gate="best_of_group", aggregate="constant"),
        term(
            form="policy_gradient",
            aggregate="constant",
            advantage={"discount": 1, "also": {"kind": "anchor_rank", "rule": "worst"}},
        ),
    ]
    loss, grads, _ = gradients(tiny_model("llama"), {"anchor": tiny_model("llama", 1)}, terms, rollouts, scores=rewards)
    module, anchor = tiny_module("llama").double(), tiny_module("llama", 1).double()
    ranks = {"r0": -np.log(16) / 2, "r3": np.log(16) / 2}  # after the batch's mean
    total = torch.zeros((), dtype=torch.float64)
    for item in rollouts:
        logprobs = token_logprobs(module, item)
        if item.id in ("r1", "r5"):
            total = total - logprobs.sum()
        if item.id in ranks:
            with torch.no_grad():
                gap = token_logprobs(anchor, item) - logprobs
            worth = ranks[item.id] + gap.flip(0).cumsum(0).flip(0)
            total = total - ((logprobs - logprobs.detach()).exp() * worth).sum()
    same(loss, grads, total, module)


def test_a_rank_needs_an_anchor() -> None:
    chosen = term(form="policy_gradient", advantage={"also": {"kind": "anchor_rank"}})
    assert "none of a group is the teacher's" in refusals(Rollouts(samples=3), chosen)
    assert "none of a group is the teacher's" in refusals(Rollouts(samples=3, teacher_share=0.5), chosen)
    assert not refusals(Rollouts(samples=3, writers=[{"kind": "teacher", "samples": 2}]), chosen)
    opd.Trainer(tiny_model(), opd.Objective([chosen]))  # a program may give such groups
    with pytest.raises(ValidationError, match="against themselves"):
        term(form="policy_gradient", advantage={"also": {"kind": "anchor_rank", "baseline_of": "all"}})


# DistiLLM-2


@pytest.mark.parametrize("adapt", [False, True])
def test_distillm_2_is_its_formula(adapt: bool) -> None:
    rollouts = by([Author.TEACHER, Author.STUDENT] * 3, per_group=2)
    common = {"alpha": 0.1, "adapt": adapt, "aggregate": "sequence_mean"}
    terms = [
        term(divergence="skew_kl", on=["teacher"], **common),
        term(divergence="skew_reverse_kl", detached=True, on=["student"], **common),
    ]
    loss, grads, _ = gradients(tiny_model("llama"), {"t": tiny_model("llama", 1)}, terms, rollouts, budget=40)
    module, teacher = tiny_module("llama").double(), tiny_module("llama", 1).double()
    total = torch.zeros((), dtype=torch.float64)
    found = {}
    for item in rollouts:
        with torch.no_grad():
            theirs = log_distributions(teacher, item)
            sure = [float(token_logprobs(model, item).mean().exp()) for model in (teacher, module)]
        found[item.id] = log_distributions(module, item), theirs, sure[0] - sure[1]
    alphas = {}
    for author, sign in ((Author.TEACHER, 1), (Author.STUDENT, -1)):
        gaps = {item.id: sign * found[item.id][2] for item in rollouts if item.author[0] == author}
        mean = sum(gaps.values()) / len(gaps)
        alphas |= {
            name: min(max(1 - 0.9 * mean / (gap + 1e-5), 0.01), 0.1) if adapt else 0.1 for name, gap in gaps.items()
        }
    assert not adapt or len(set(alphas.values())) > 1
    for item in rollouts:
        ours, theirs, _ = found[item.id]
        a = alphas[item.id]
        if item.author[0] == Author.TEACHER:
            mixture = (a * theirs.exp() + (1 - a) * ours.exp()).log()
            each = (theirs.exp() * (theirs - mixture)).sum(-1)
        else:
            mixture = ((1 - a) * theirs.exp() + a * ours.exp().detach()).log()
            each = (ours.exp() * (ours - mixture)).sum(-1)
        total = total + each.mean() / 3
    same(loss, grads, total, module)


def test_alphas_follow_the_gap() -> None:
    """A larger gap gets a larger alpha, and the sides are mirrored."""
    sure = np.linspace(0.3, 0.9, 13)
    alphas = SkewKL(alpha=0.1).own_alphas(sure, np.full(13, 0.2))
    assert (np.diff(alphas) >= 0).all()
    assert (alphas[0], alphas[-1]) == pytest.approx((0.01, 0.1))
    mirrored = SkewReverseKL(alpha=0.1).own_alphas(np.full(13, 0.2), sure)
    assert mirrored.tolist() == alphas.tolist()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"divergence": "skew_kl", "alpha": 0.01, "adapt": True}, "raise alpha, or drop adapt"),
        ({"divergence": "skew_reverse_kl", "alpha": 0, "detached": True}, "detached does nothing"),
        ({"divergence": "reverse_kl", "adapt": True}, "adapt belongs to divergence skew_kl and skew_reverse_kl"),
        ({"divergence": "skew_kl", "detached": True}, "detached belongs to divergence skew_reverse_kl"),
        (
            {"divergence": "skew_reverse_kl", "detached": True, "support": "topk", "closure": "generalised"},
            "closure generalised",
        ),
        ({"form": "policy_gradient", "divergence": "skew_kl", "adapt": True}, "needs form: direct"),
    ],
)
def test_skewing_without_a_meaning(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        term(**settings)
