"""Preferences between two answers to a prompt: their formulas, which answers make a pair, and that no pair is ever split."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from opd.objective.batch import Batch
from opd.objective.objective import PreparedTerm, prepare_term
from opd.objective.term import Answers, Preference
from opd.recipe import Rollouts
from opd.records import Author, Rollout
from tests.support.helpers import CHARACTERS, refusals, term, tiny_model, tiny_module
from tests.support.rollouts import sampled_by, some_rollouts
from tests.support.steps import gradients

REWARDS = {"r0": 1.0, "r1": 0.0, "r2": 0.25, "r3": 0.5, "r4": 1.0, "r5": 1.0}  # groups of two; r4 and r5 are equal
SIZE = len(CHARACTERS) + 2  # ids of the tokenizer; the rest of the head is padding
PREFERENCES: list[dict[str, Any]] = [
    {"preference": "dpo"},
    {"preference": "dpo", "reference_weight": 0.7, "length_normalised": True},
    {"preference": "ipo", "reference_weight": 0.5},
    {"preference": "ipo", "length_normalised": True},
    {"preference": "orpo"},
]


def by_hand(settings: dict[str, Any], preferred: list[float], rejected: list[float], references: Any) -> float:
    """The loss of one pair from its tokens' log-probs, in Python's own floats."""
    weight, mean = settings.get("reference_weight", 0.1), settings.get("length_normalised", False)
    if settings["preference"] == "orpo":
        odds = []
        for tokens in (preferred, rejected):
            p = math.exp(math.fsum(tokens) / len(tokens))
            odds.append(p / (1 - p))
        return math.log(1 + odds[1] / odds[0])
    ratios = []
    for tokens, reference in zip((preferred, rejected), references, strict=True):
        ratio = math.fsum(tokens) - math.fsum(reference)
        ratios.append(ratio / len(tokens) if mean else ratio)
    d = ratios[0] - ratios[1]
    if settings["preference"] == "ipo":
        return (d - 1 / (2 * weight)) ** 2
    return math.log(1 + math.exp(-weight * d))


@pytest.mark.parametrize("settings", PREFERENCES, ids=str)
def test_losses_are_the_formulas_in_fp64(settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [(3, 5), (1, 1), (7, 2)]
    tokens = [[-torch.rand(n, generator=generator, dtype=torch.float64) * 3 for n in pair] for pair in lengths]
    references = [[-torch.rand(n, generator=generator, dtype=torch.float64) * 3 for n in pair] for pair in lengths]
    wanted = [
        by_hand(settings, one.tolist(), other.tolist(), [reference.tolist() for reference in two])
        for (one, other), two in zip(tokens, references, strict=True)
    ]
    preference: Preference = term(form="pairwise", **settings).preference
    sums = torch.stack([torch.stack([part.sum() for part in pair]) for pair in tokens]).requires_grad_()  # (P, 2)
    known = torch.stack([torch.stack([part.sum() for part in pair]) for pair in references])

    def losses(sums: torch.Tensor) -> torch.Tensor:
        sides = [Answers(sums[:, k], known[:, k], torch.tensor([float(n[k]) for n in lengths])) for k in (0, 1)]
        return preference.losses(*sides)

    torch.testing.assert_close(losses(sums), torch.tensor(wanted, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(losses, sums)


def token_logprobs(module: Any, rollout: Rollout) -> torch.Tensor:
    """From the stock module's logits; there is one stop id, so nothing is merged."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64))
    logits = module(ids[None]).logits[0, rollout.prompt_ids.size - 1 : -1, :SIZE]
    return logits.log_softmax(-1).gather(-1, ids[rollout.prompt_ids.size :, None])[:, 0]


@pytest.mark.parametrize("settings", [PREFERENCES[0], PREFERENCES[3], PREFERENCES[4]], ids=str)
@pytest.mark.parametrize("pairs", ["best_worst", "all"])
def test_loss_and_gradient_through_the_step(settings: dict[str, Any], pairs: str) -> None:
    student, reference = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = [replace(item, group=f"g{index // 3}") for index, item in enumerate(some_rollouts(count=6))]
    rewards = {"r0": 0.0, "r1": 1.0, "r2": 0.5, "r3": 1.0, "r4": 1.0, "r5": 0.0}
    wanted = {
        "best_worst": [("r1", "r0"), ("r3", "r5")],
        "all": [("r1", "r0"), ("r1", "r2"), ("r2", "r0"), ("r3", "r5"), ("r4", "r5")],
    }[pairs]
    objective = term(form="pairwise", pairs=pairs, coefficient=2.0, **settings)
    loss, grads, _ = gradients(student, {"start": reference}, [objective], rollouts, scores=rewards)

    module, start = tiny_module("llama").double(), tiny_module("llama", 1).double()
    with torch.no_grad():
        known = {item.id: token_logprobs(start, item) for item in rollouts}
    lines = {item.id: token_logprobs(module, item) for item in rollouts}
    values = []
    for names in wanted:
        ours, theirs = [lines[name].sum() for name in names], [known[name].sum() for name in names]
        lengths = [len(lines[name]) for name in names]
        if settings["preference"] == "orpo":
            mean = [value / length for value, length in zip(ours, lengths, strict=True)]
            odds = [value - torch.log1p(-value.exp()) for value in mean]
            values.append(torch.nn.functional.softplus(odds[1] - odds[0]))
        elif settings["preference"] == "ipo":
            ratios = [(one - two) / n for one, two, n in zip(ours, theirs, lengths, strict=True)]
            values.append((ratios[0] - ratios[1] - 5) ** 2)
        else:
            values.append(torch.nn.functional.softplus(-0.1 * ((ours[0] - theirs[0]) - (ours[1] - theirs[1]))))
    total = 2 * torch.stack(values).mean()
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(grads[name].double(), parameter.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7)


@pytest.mark.parametrize("aggregate", ["pair_mean", "prompt_mean", "constant"])
@pytest.mark.parametrize("preference", ["dpo", "ipo", "orpo"])
def test_the_loss_does_not_depend_on_how_a_batch_is_cut(preference: str, aggregate: str) -> None:
    student, reference = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = sampled_by(
        student, [replace(item, group=f"g{index // 3}") for index, item in enumerate(some_rollouts())]
    )
    rewards = {item.id: float(index % 3 == 1) / 2 + (index == 5) for index, item in enumerate(rollouts)}
    objective = term(form="pairwise", preference=preference, pairs="all", aggregate=aggregate)
    whole_loss, whole, found = gradients(student, {"t": reference}, [objective], rollouts, scores=rewards)
    assert len(found) == 1
    for budget, order in ((1, rollouts), (40, rollouts), (40, rollouts[::-1]), (10**6, rollouts[::-1])):
        loss, grads, parts = gradients(student, {"t": reference}, [objective], order, budget, scores=rewards)
        assert len(parts) > 1 or budget > 40
        assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-6)
        for name, grad in grads.items():
            atol = 2e-6 + 1e-5 * float(whole[name].abs().max())
            torch.testing.assert_close(grad, whole[name], rtol=1e-4, atol=atol)


BY = {
    "r0": Author.DATA,
    "r1": Author.STUDENT,
    "r2": Author.STUDENT,
    "r3": Author.REJECTED,
    "r4": Author.DATA,
    "r5": Author.TEACHER,
}


def by_authors() -> list[Rollout]:
    """Two groups of three answers each."""
    return [
        replace(item, sample=index % 3, group=f"g{index // 3}", author=np.full_like(item.author, BY[item.id]))
        for index, item in enumerate(some_rollouts(count=6))
    ]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"pairs": "authors", "chosen": "data", "rejected": "student"}, [("r0", "r1"), ("r0", "r2")]),
        ({"pairs": "authors", "chosen": "data", "rejected": "rejected"}, [("r4", "r3")]),
        ({"pairs": "authors", "chosen": "rejected", "rejected": "data"}, [("r3", "r4")]),
        ({"pairs": "authors", "chosen": "teacher", "rejected": "student"}, []),  # never in one group
        ({"pairs": "all", "chosen": "data", "rejected": "student"}, [("r0", "r2")]),
        ({"pairs": "best_worst", "chosen": "student", "rejected": "data"}, [("r1", "r0")]),
        ({"pairs": "all", "on": ["data", "teacher"]}, [("r4", "r5")]),
    ],
)
def test_pairs_by_author(settings: dict[str, Any], wanted: list[tuple[str, str]]) -> None:
    rewards = {"r0": 0.5, "r1": 1.0, "r2": 0.0, "r3": 0.0, "r4": 1.0, "r5": 0.5}
    batch = Batch(by_authors(), rewards=rewards if settings["pairs"] != "authors" else {})
    assert prepare_term(term(form="pairwise", **settings), "0", 1.0, batch, 8, 0).state == wanted


def test_a_pair_of_two_authors_through_the_step() -> None:
    """The loss and its gradient; tokens of the dataset have no log-probs of a sampler."""
    student, reference = tiny_model("llama"), tiny_model("llama", 1)
    nothing = np.float32(np.nan)
    rollouts = [
        replace(item, logprob=item.logprob + nothing, logprob_sampled=item.logprob + nothing) for item in by_authors()
    ]
    objective = term(form="pairwise", pairs="authors", chosen="data", rejected="student", aggregate="prompt_mean")
    loss, grads, _ = gradients(student, {"start": reference}, [objective], rollouts)
    module, start = tiny_module("llama").double(), tiny_module("llama", 1).double()
    lines = {item.id: token_logprobs(module, item).sum() for item in rollouts}
    with torch.no_grad():
        known = {item.id: token_logprobs(start, item).sum() for item in rollouts}
    h = {name: line - known[name] for name, line in lines.items()}
    total = sum(torch.nn.functional.softplus(-0.1 * (h["r0"] - h[name])) / 2 for name in ("r1", "r2"))
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    for name, parameter in module.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(grads[name].double(), parameter.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7)


def test_only_terms_that_name_it_train_on_a_rejected_answer() -> None:
    for settings in ({}, {"form": "cross_entropy"}, {"form": "policy_gradient"}, {"form": "pairwise"}):
        assert "rejected" not in term(**settings).authors
    assert term(form="pairwise", pairs="authors", chosen="data", rejected="rejected").authors == ("data", "rejected")


def expected_loss(logits: torch.Tensor, data: torch.Tensor, opponent: torch.Tensor) -> torch.Tensor:
    """SPIN's loss over all pairs: one answer from the data, one from the opponent, which is the reference too."""
    preference: Preference = term(form="pairwise", reference_weight=1.0).preference
    ours, size = logits.log_softmax(-1), logits.numel()
    one, other = (index.flatten() for index in torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij"))
    sides = [Answers(ours[index], opponent.log()[index], torch.ones(index.numel())) for index in (one, other)]
    return (data[one] * opponent[other] * preference.losses(*sides)).sum()


def test_spin_is_stationary_if_the_student_is_the_data_and_moves_there_otherwise() -> None:
    data = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    logits = data.log().requires_grad_()
    (still,) = torch.autograd.grad(expected_loss(logits, data, data), logits)
    assert float(still.abs().max()) < 1e-12
    student = torch.full((4,), 0.25, dtype=torch.float64)
    distances = [float((data * (data / student).log()).sum())]
    for _ in range(20):  # iterations
        logits = student.log().requires_grad_()
        (moves,) = torch.autograd.grad(expected_loss(logits, data, student), logits)
        assert float(moves.abs().max()) > 1e-6
        for _ in range(20):
            (slope,) = torch.autograd.grad(expected_loss(logits, data, student), logits)
            logits = (logits - 0.5 * slope).detach().requires_grad_()
        student = logits.detach().softmax(-1)
        distances.append(float((data * (data / student).log()).sum()))
    assert all(later < before for before, later in itertools.pairwise(distances))
    assert distances[-1] < 1e-3


def prepared(rewards: dict[str, float | None], **settings: Any) -> PreparedTerm:
    batch = Batch(some_rollouts(count=6), rewards=rewards)
    return prepare_term(term(form="pairwise", **settings), "0", 1.0, batch, 8, 0)


def weights(found: PreparedTerm) -> dict[str, float]:
    return {name: float(values.max()) for name, values in found.term.weights(found, found.batch.rollouts).items()}


def test_answers_with_equal_rewards_make_no_pair() -> None:
    found = prepared(REWARDS)
    assert found.state == [("r0", "r1"), ("r3", "r2")]
    assert found.metrics["pairs/0"] == 2
    assert weights(found) == {"r0": 0.5, "r1": 0.5, "r2": 0.5, "r3": 0.5, "r4": 0, "r5": 0}
    student, reference = tiny_model("llama"), tiny_model("llama", 1)
    loss, grads, _ = gradients(
        student, {"t": reference}, [term(form="pairwise")], some_rollouts(), scores=dict.fromkeys(REWARDS, 1.0)
    )
    assert loss == 0
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("turned", [False, True])
def test_ties_go_by_the_order_of_sampling(turned: bool) -> None:
    rollouts = [replace(one, id=f"r/{n}", sample=n, group="g") for n, one in enumerate(some_rollouts(count=12))]
    rewards = {item.id: float(item.sample in (2, 10)) for item in rollouts}  # "r/10" comes before "r/2" as a word
    batch = Batch(rollouts[::-1] if turned else rollouts, rewards=rewards)
    assert prepare_term(term(form="pairwise"), "0", 1.0, batch, 8, 0).state == [("r/2", "r/11")]


def test_a_reward_that_failed_makes_no_pair() -> None:
    found = prepared({**REWARDS, "r0": None})
    assert found.state == [("r3", "r2")]
    assert found.metrics["unrewarded/0"] == pytest.approx(1 / 6)
    assert prepared({}).state == []  # nobody was asked


def test_gates_close_answers_before_or_after_they_are_paired() -> None:
    gate = {"kind": "correct", "threshold": 0.4}
    dropped, kept = prepared(REWARDS, gate=gate), prepared(REWARDS, gate=gate, gated="zero")
    assert dropped.state == []  # the other answer of every pair is gone
    assert kept.state == [("r0", "r1"), ("r3", "r2")]  # pairs stay in the mean, and nothing of them is trained
    assert weights(kept) == {"r0": 0.5, "r3": 0.5, "r1": 0, "r2": 0, "r4": 0, "r5": 0}
    student, reference = tiny_model("llama"), tiny_model("llama", 1)
    objective = [kept.term]
    loss, grads, _ = gradients(student, {"t": reference}, objective, some_rollouts(count=6), scores=REWARDS)
    assert loss == 0
    assert not any(grad.any() for grad in grads.values())


def test_what_is_noted() -> None:
    student = tiny_model("llama")
    rollouts = sampled_by(student, some_rollouts(count=6))
    _, _, found = gradients(student, {"t": student}, [term(form="pairwise")], rollouts, scores=REWARDS)
    assert found[0].loss["0:pairwise"] == pytest.approx(math.log(2), abs=1e-5)  # the student is its reference
    assert found[0].counts["agreed/0:pairwise"][1] == 2
    paired = sum(item.response_ids.size for item in rollouts[:4])
    assert np.isfinite(found[0].mismatch).sum() == paired
    assert np.nanmax(found[0].mismatch) < 1e-5


@pytest.mark.parametrize(
    ("writers", "words"),
    [
        ([], "no sample of a group is by data. Add {kind: data, samples: 1} to rollout.writers"),
        ([{"kind": "data", "samples": 2}], "no sample of a group is by student. Leave a sample to it"),
        ([{"kind": "data", "samples": 1}, {"kind": "teacher", "share": 0.5}], "no pair has two authors"),
        ([{"kind": "data", "samples": 1}], ""),
    ],
)
def test_both_authors_have_to_write_in_a_group(writers: list[dict[str, Any]], words: str) -> None:
    objective = term(form="pairwise", pairs="authors", chosen="data", rejected="student")
    assert words in (found := refusals(Rollouts(samples=2, writers=writers), objective))
    assert bool(words) == bool(found)


def test_mistakes_of_a_recipe() -> None:
    assert "pairwise compares the samples of a prompt, but rollout.samples is 1" in refusals(
        Rollouts(samples=1), term(form="pairwise")
    )
    assert not refusals(Rollouts(samples=2), term(form="pairwise"))
    for settings, words in (
        ({"preference": "orpo", "reference_weight": 0.2}, "reference_weight belongs to preference dpo and ipo, not to orpo"),
        ({"preference": "orpo", "role": "teacher"}, "`role` does nothing"),
        ({"aggregate": "token_mean"}, "'pair_mean', 'prompt_mean' or 'constant'"),
        ({"reference_weight": 0}, "greater than 0"),
        ({"preference": "dop"}, "did you mean 'dpo'?"),
        ({"pairs": "some"}, "best_worst"),
        ({"chosen": "data"}, "chosen and rejected belong together"),
        ({"rejected": "data", "pairs": "all"}, "chosen and rejected belong together"),
        ({"pairs": "authors"}, "needs the authors of both answers"),
        ({"chosen": "data", "rejected": "data"}, r"set `on: [data]` instead"),
        ({"chosen": "data", "rejected": "student", "on": ["data"]}, "drop `on`"),
        ({"chosen": "env", "rejected": "student"}, "'student', 'teacher', 'data' or 'rejected'"),
    ):  # fmt: skip
        with pytest.raises(ValidationError) as error:
            term(form="pairwise", **settings)
        assert words in str(error.value)
    with pytest.raises(ValidationError, match="pairs belongs to form pairwise"):
        term(pairs="all")
