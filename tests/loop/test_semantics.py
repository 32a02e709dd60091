"""Semantics that are easy to get silently wrong; numbers follow the list in docs/semantics.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from opd.divergences import Projection, divergence
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel, pack
from opd.recipe import Rollouts
from opd.records import Author, SignalNeed
from opd.teachers.scoring import LocalTeacher
from tests.support.helpers import EOS, refusals, term, tiny_model, tiny_module, tiny_tokenizer
from tests.support.rollouts import STOPS, rollout, sampled_by, some_rollouts
from tests.support.steps import gradients

TERMS = [
    term(form="direct", divergence="reverse_kl"), term(form="direct", divergence="forward_kl"), term(form="direct", divergence="jsd", beta=0.3),
    term(form="direct", divergence="reverse_kl", temperature=2.0), term(form="policy_gradient"), term(form="policy_gradient", aggregate="constant"),
]  # fmt: skip


@pytest.mark.parametrize("objective", TERMS, ids=lambda found: found.model_dump_json(exclude_defaults=True))
def test_1_student_equal_to_teacher_means_zero(objective: Any) -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama")
    loss, grads, _ = gradients(student, {"t": teacher}, [objective], sampled_by(student, some_rollouts()))
    assert abs(loss) < 1e-5
    assert max(float(grad.abs().max()) for grad in grads.values()) < 2e-5


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
@pytest.mark.parametrize("form", ["direct", "policy_gradient", "cross_entropy"])
def test_2_the_loss_does_not_depend_on_how_a_batch_is_cut(form: Any, aggregate: Any) -> None:
    student, teachers = tiny_model("llama"), {"a": tiny_model("llama", 1), "b": tiny_model("llama", 2)}
    rollouts = sampled_by(student, some_rollouts())
    objective = term(form=form, aggregate=aggregate, on=["student"])
    whole_loss, whole, _ = gradients(student, teachers, [objective], rollouts)
    for budget, order in ((1, rollouts), (40, rollouts), (40, rollouts[::-1]), (10**6, rollouts[::-1])):
        loss, grads, _ = gradients(student, teachers, [objective], order, budget)
        assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-6)
        for name, grad in grads.items():
            atol = 2e-6 + 1e-5 * float(whole[name].abs().max())
            torch.testing.assert_close(grad, whole[name], rtol=1e-4, atol=atol)


def test_2_groups_are_never_split() -> None:
    rollouts = some_rollouts(count=12)
    for budget in (1, 20, 50, 1000):
        batches = pack(rollouts, budget, unit=lambda item: item.group)
        assert sorted(item.id for batch in batches for item in batch) == sorted(item.id for item in rollouts)
        owners: dict[str, int] = {}
        for index, batch in enumerate(batches):
            for item in batch:
                assert owners.setdefault(item.group, index) == index


def planted(successor: dict[int, int], strength: float) -> LanguageModel:
    """A model without memory: after token a it predicts successor[a], and nothing else matters."""
    module = tiny_module("llama", num_hidden_layers=1, hidden_size=128, num_attention_heads=4, head_dim=32)
    with torch.no_grad():
        layer = module.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        module.model.embed_tokens.weight.zero_()
        module.lm_head.weight.zero_()
        for token, follower in successor.items():
            module.model.embed_tokens.weight[token, token] = 1.0
            module.lm_head.weight[follower, token] = strength
    return LanguageModel(module, tiny_tokenizer(), "planted")


def test_3_position_t_minus_1_predicts_token_t() -> None:
    chain = {5: 6, 6: 7, 7: 8, 8: EOS}
    teacher, student = planted(chain, 5.0), planted(chain, 0.0)
    right, wrong = rollout("right", [5], [6, 7, 8, EOS]), rollout("wrong", [5], [7, 7, 8, EOS])
    judge = LocalTeacher("t", "teacher", teacher, 100, STOPS)
    scores = [signal.values for signal in judge.score([right, wrong], SignalNeed("logprobs_at"))]
    assert (scores[0] > -0.01).all()
    assert scores[1][0] < -10
    assert (scores[1][2:] > -0.01).all()
    _, grads, statistics = gradients(student, {"t": teacher}, [term(form="direct", divergence="forward_kl")], [right])
    assert int(grads["lm_head.weight"].sum(1).argmin()) in chain.values()
    head = -grads["lm_head.weight"]  # the direction of descent links each token to its successor, and to no other
    for token, follower in chain.items():
        assert int(head[:, token].argmax()) == follower
    assert len(statistics[0].reverse_kl) == 4


def test_3_a_direct_loss_at_t_depends_only_on_the_prefix() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    values = []
    for last in (10, 11):
        _, _, found = gradients(student, {"t": teacher}, [term()], [rollout("r", [5, 6], [7, 8, last])])
        values.append(found[0].reverse_kl)
    np.testing.assert_allclose(values[0], values[1], atol=1e-6)


def swapped_stop(module_seed: int, one: int, other: int) -> LanguageModel:
    """The same model, but it stops with another id."""
    module = tiny_module("llama", module_seed)
    with torch.no_grad():
        rows = module.lm_head.weight[[one, other]].clone()
        module.lm_head.weight[[other, one]] = rows
    return LanguageModel(module, tiny_tokenizer(), "swapped")


def test_4_all_stop_ids_are_one_event() -> None:
    """A teacher that only names its stop differently has nothing to correct; unmerged, stopping would be trained away."""
    student, teacher = tiny_model("llama"), swapped_stop(0, EOS, 3)
    for form in ("direct", "policy_gradient"):
        rollouts = sampled_by(student, [rollout("r", [5, 6], [7, EOS]), rollout("q", [9], [3])], (EOS, 3))
        loss, grads, _ = gradients(student, {"t": teacher}, [term(form=form)], rollouts, stops=(EOS, 3))
        assert abs(loss) < 1e-5
        assert max(float(grad.abs().max()) for grad in grads.values()) < 2e-5
        unmerged, _, _ = gradients(
            student, {"t": teacher}, [term(form=form)], sampled_by(student, rollouts, ()), stops=()
        )
        assert abs(unmerged) > 0.01


def test_4_merging_keeps_stopping_alive_under_exact_reverse_kl() -> None:
    """The toy of the stop-token problem: the student stops with one id, the teacher with another."""
    from opd.divergences import Projection, divergence

    for merge, alive in (((0, 1),), True), ((), False):
        logits = torch.tensor(
            [[2.0, -12.0, 0.0, 0.0]], requires_grad=True
        )  # id 0: the student's stop; id 1: the teacher's
        teacher = torch.tensor([[-20.0, 4.0, 0.0, -1.0]])
        identity = torch.eye(4)
        optimiser = torch.optim.SGD([logits], lr=1.0)  # Adam would blow up gradients of 1e-7
        for _ in range(200):
            optimiser.zero_grad()
            divergence(
                "reverse_kl", Projection(logits, identity), Projection(teacher, identity), merge=merge
            ).loss.backward()
            optimiser.step()
        mass = float(logits.detach().softmax(-1)[0, :2].sum())
        assert (mass > 0.9) == alive


def test_6_k1_and_k3_are_not_what_they_seem_and_names_say_direction() -> None:
    """Expected gradients over the student's own samples: k1's is 0, k3's is that of forward KL."""
    torch.manual_seed(0)
    hidden, other = torch.randn(1, 6, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64)
    hidden.requires_grad_()
    head = torch.eye(6, dtype=torch.float64)
    own, teacher = hidden.log_softmax(-1), other.log_softmax(-1)
    drawn, ratio = own.exp().detach(), teacher - own
    k1, k3 = (drawn * -ratio).sum(), (drawn * (ratio.exp() - 1 - ratio)).sum()
    (gradient,) = torch.autograd.grad(k1, hidden, retain_graph=True)
    assert gradient.abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(k3, hidden, retain_graph=True)
    forward = divergence("forward_kl", Projection(hidden, head), Projection(other, head))
    torch.testing.assert_close(gradient, torch.autograd.grad(forward.loss, hidden)[0])
    torch.testing.assert_close(forward.value[0], (teacher.exp() * (teacher - own)).sum())
    reverse = divergence("reverse_kl", Projection(hidden, head), Projection(other, head))
    torch.testing.assert_close(reverse.value[0], (own.exp() * (own - teacher)).sum())


def test_8_ratios_compare_both_sides_under_one_transform() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    for temperature in (1.0, 0.7, 1.5):
        rollouts = sampled_by(student, some_rollouts(), STOPS, temperature)
        _, _, found = gradients(
            student, {"t": teacher}, [term(form="policy_gradient")], rollouts, spec=Rollouts(temperature=temperature)
        )
        assert np.nanmax(found[0].mismatch) < 1e-4  # log current - log behaviour: nothing has moved yet
        expected = np.concatenate([item.logprob for item in rollouts]) - np.concatenate(
            [
                signal.values
                for signal in LocalTeacher("t", "teacher", teacher, 999, STOPS).score(
                    rollouts, SignalNeed("logprobs_at")
                )
            ]
        )
        np.testing.assert_allclose(found[0].reverse_kl, expected, atol=1e-4)  # advantages use untempered log-probs


@pytest.mark.parametrize("spec", [Rollouts(top_p=0.9), Rollouts(top_k=5), Rollouts(temperature=0)])
def test_8_truncated_sampling_has_no_importance_ratio(spec: Rollouts) -> None:
    assert "policy_gradient" in refusals(spec, term(form="policy_gradient"))
    assert not refusals(spec, term(form="direct"))


def test_11_the_divergence_has_its_own_temperature() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = sampled_by(student, some_rollouts())

    def value(objective: Any, spec: Rollouts) -> float:
        return gradients(student, {"t": teacher}, [objective], rollouts, spec=spec)[0]

    plain = value(term(), Rollouts(temperature=1.0))
    assert value(term(), Rollouts(temperature=0.5)) == plain
    assert value(term(temperature=3.0), Rollouts(temperature=1.0)) < 0.5 * plain


def test_terms_add_up_and_train_only_their_authors_tokens() -> None:
    from dataclasses import replace

    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = sampled_by(student, some_rollouts())
    data = [replace(item, id=f"d{item.id}", author=np.full_like(item.author, Author.DATA)) for item in some_rollouts(1)]
    direct, entropy = term(coefficient=0.5, on=["student"]), term(form="cross_entropy")
    both, grads, _ = gradients(student, {"t": teacher}, [direct, entropy], [*rollouts, *data])
    one, first, _ = gradients(student, {"t": teacher}, [direct], rollouts)
    two, second, _ = gradients(student, {"t": teacher}, [entropy], data)
    assert both == pytest.approx(one + two, rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, first[name] + second[name], rtol=1e-4, atol=1e-6)
    assert gradients(student, {"t": teacher}, [entropy], rollouts)[0] == 0.0


def test_packing_is_block_diagonal() -> None:
    """What stands next to a sequence in a pack does not reach it."""
    model = tiny_model("llama")
    ids = torch.arange(2, 22)
    with torch.no_grad():
        one = model.hidden(torch.cat([ids, ids + 5]), Packed.of([20, 20]))[:20]
        two = model.hidden(torch.cat([ids, ids + 30]), Packed.of([20, 20]))[:20]
    assert torch.equal(one, two)
