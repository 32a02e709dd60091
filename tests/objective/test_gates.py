"""Gates, rewards and denominators: what each lets through, what it weighs, and what it reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import opd
from opd.common.errors import RecipeError
from opd.divergences import Projection
from opd.divergences.projection import log_probs
from opd.models.language_model import Pack
from opd.objective.advantages import SampledTokens
from opd.objective.batch import CALLS, FAILED_CALLS, Batch, FirstPass
from opd.objective.gates import further_draws, random_share, speculative, tool_penalty, top_share
from opd.objective.objective import Objective, PreparedTerm, prepare_term, proposal_accepted
from opd.recipe import load_recipe
from opd.records import Author, Rollout, Signal, SignalNeed
from opd.teachers.scoring import LocalTeacher
from tests.support.helpers import term as read_term
from tests.support.helpers import tiny_model
from tests.support.rollouts import STOPS, rollout, sampled_by

LENGTH = 4


def answers(count: int = 6, per_group: int = 2) -> list[Rollout]:
    generator = np.random.default_rng(0)
    return [
        replace(
            rollout(f"r{index}", [1], [5] * LENGTH, group=f"g{index // per_group}"),
            logprob=-generator.exponential(size=LENGTH).astype(np.float32),
        )
        for index in range(count)
    ]


def rewarded(rollouts: list[Rollout], rewards: dict[str, float | None] | None = None, **first: Any) -> Batch:
    generator = np.random.default_rng(1)
    signals = {
        (role, "logprobs_at"): {
            item.id: Signal("t", 0, role, "same", (), -generator.exponential(size=LENGTH), np.ones(LENGTH, bool))
            for item in rollouts
        }
        for role in ("teacher", "reference")
    }
    return Batch(rollouts, signals, rewards or {}, FirstPass(**first))  # type: ignore[arg-type]


def plan(term: dict[str, Any], batch: Batch, seed: int = 0) -> PreparedTerm:
    return prepare_term(read_term(**term), "0", 1.0, batch, 8, seed)


def advantages(
    found: PreparedTerm, rollouts: list[Rollout], students: list[np.ndarray] | None = None
) -> dict[str, Any]:
    """By rollout; compared with the sampler's log-probs unless others are given."""
    logprobs = students or [item.logprob.astype(np.float64) for item in rollouts]
    term: Any = found.term
    values = term.advantage.values(SampledTokens(term, found, rollouts, logprobs), found.state)
    return {item.id: value for item, value in zip(rollouts, values, strict=True)}


def outcomes(found: PreparedTerm) -> dict[str, float]:
    return next(state for state in found.state if isinstance(state, dict))


def opened(found: PreparedTerm) -> list[str]:
    return [name for name, factor in found.factor.items() if factor.any()]


REWARDS: dict[str, float | None] = {"r0": 1.0, "r1": 0.0, "r2": 0.0, "r3": 0.0, "r4": 1.0, "r5": None}


@pytest.mark.parametrize(
    ("gate", "wanted"),
    [
        ("correct", ["r0", "r4"]),
        ("wrong", ["r1", "r2", "r3"]),
        ("all_wrong", ["r2", "r3"]),
        ("all_correct", ["r4"]),
        ("contrast", ["r0", "r1"]),
    ],
)
def test_correctness_gates_of_either_polarity(gate: str, wanted: list[str]) -> None:
    found = plan({"gate": gate}, rewarded(answers(), REWARDS))
    assert opened(found) == wanted
    assert found.metrics[f"gate/0/{gate}"] == pytest.approx(1 - len(wanted) / 5)  # r5 was out before: not rewarded
    assert found.metrics["unrewarded/0"] == pytest.approx(1 / 6)


def test_a_failed_reward_is_masked_and_never_a_zero() -> None:
    rollouts = answers()
    advantage = {"teacher_weight": 0, "outcome_weight": 1, "baseline": "group"}
    found = plan({"form": "policy_gradient", "advantage": advantage}, rewarded(rollouts, REWARDS))
    assert "r5" not in opened(found)
    assert not found.counted["r5"].any()  # and it is in no denominator
    assert outcomes(found)["r4"] == 0  # alone in its group: nothing to be compared with, as if r5 did not exist
    zero = plan({"form": "policy_gradient", "advantage": advantage}, rewarded(rollouts, REWARDS | {"r5": 0.0}))
    assert outcomes(zero)["r4"] == 0.5


def test_a_prompt_without_a_reward_keeps_its_teacher() -> None:
    rollouts, known = answers(), {"r0": 1.0, "r1": 0.0}
    term = {"form": "policy_gradient", "advantage": {"outcome_weight": 2.0, "baseline": "group"}}
    found = plan(term, rewarded(rollouts, known))  # type: ignore[arg-type]
    assert len(opened(found)) == 6
    batch = rewarded(rollouts)
    gaps = batch.logprobs("teacher", rollouts)[3] - rollouts[3].logprob
    np.testing.assert_allclose(advantages(found, rollouts)["r3"], gaps)
    np.testing.assert_allclose(
        advantages(found, rollouts)["r0"], batch.logprobs("teacher", rollouts)[0] - rollouts[0].logprob + 2.0 * 0.5
    )


def test_top_shares_are_of_the_whole_batch_and_of_what_is_open() -> None:
    rollouts = answers()
    entropy = {item.id: np.arange(LENGTH) + 10.0 * index for index, item in enumerate(rollouts)}
    found = plan({"gate": {"kind": "entropy", "share": 0.5}}, rewarded(rollouts, entropy=entropy))
    assert opened(found) == ["r3", "r4", "r5"]
    assert found.metrics["gate/0/entropy"] == 0.5
    both = plan({"gate": ["correct", {"kind": "entropy", "share": 0.5}]}, rewarded(rollouts, REWARDS, entropy=entropy))
    assert opened(both) == ["r4"]  # half of what `correct` left: four of eight tokens


def test_soft_or_keeps_the_unsure_and_the_disagreeing() -> None:
    rollouts = answers(2)
    entropy = {"r0": np.array([1.0, 0, 0, 0]), "r1": np.zeros(4)}
    divergence = {"r0": np.array([0.0, 0, 0, 2.0]), "r1": np.zeros(4)}
    known = {"entropy": entropy, "reverse_kl": {"teacher": divergence}}
    found = plan({"gate": {"kind": "soft_or", "share": 0.25}}, rewarded(rollouts, **known))
    assert found.factor["r0"].tolist() == [1, 0, 0, 1]
    assert not found.factor["r1"].any()


@given(share=st.floats(0, 1), seed=st.integers(0, 9), lengths=st.lists(st.integers(0, 7), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_top_share_keeps_exactly_its_budget(share: float, seed: int, lengths: list[int]) -> None:
    generator = np.random.default_rng(seed)
    values, masks = [generator.normal(size=n) for n in lengths], [generator.random(n) < 0.7 for n in lengths]
    kept = top_share(values, masks, share)
    assert sum(gate.sum() for gate in kept) == round(share * sum(mask.sum() for mask in masks))
    assert all(not gate[~mask].any() for gate, mask in zip(kept, masks, strict=True))


def test_the_random_gate_has_the_same_budget_and_is_the_same_again() -> None:
    names, lengths = [f"n{index}" for index in range(200)], [50] * 200
    once, again = random_share(names, lengths, 0.3, 7), random_share(names, lengths, 0.3, 7)
    assert all((a == b).all() for a, b in zip(once, again, strict=True))
    assert np.mean(once) == pytest.approx(0.3, abs=0.02)
    assert not np.array_equal(once, random_share(names, lengths, 0.3, 8))


def test_teacher_confidence() -> None:
    rollouts = answers(1)
    known = {"teacher_entropy": {"teacher": {"r0": np.array([0.1, 0.5, 0.9, 2.0])}}}
    sure = plan({"gate": {"kind": "teacher_entropy", "below": 0.8}}, rewarded(rollouts, **known))
    unsure = plan({"gate": {"kind": "teacher_entropy", "above": 0.8}}, rewarded(rollouts, **known))
    assert sure.factor["r0"].tolist() == [1, 1, 0, 0]
    assert unsure.factor["r0"].tolist() == [0, 0, 1, 1]


def test_selectkd_weighs_what_the_teacher_rejects() -> None:
    rollouts = answers(1)
    known = {"accepted": {("teacher", 5): {"r0": np.array([1.0, 0, 1, 0])}}}
    found = plan({"gate": {"kind": "selectkd", "rejected": 0.01}}, rewarded(rollouts, **known))
    assert found.factor["r0"].tolist() == [1, 0.01, 1, 0.01]
    assert found.metrics["gate/0/selectkd"] == 0.5


def test_proposals_are_accepted_by_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(40, 12, generator=generator), torch.randn(40, 12, generator=generator)
    identity = torch.eye(12)
    for k in (1, 3, 12):
        found = proposal_accepted(Projection(student, identity), Projection(teacher, identity), k)
        wanted = [int(student[row].argmax()) in teacher[row].topk(k).indices.tolist() for row in range(40)]
        assert found.tolist() == wanted


def test_speculative_acceptance_has_the_right_rate() -> None:
    names = [f"n{index}" for index in range(4000)]
    students, teachers = [np.log([0.5])] * 4000, [np.log([0.2])] * 4000
    found = speculative(names, students, teachers, 3)
    assert np.mean(found) == pytest.approx(0.4, abs=0.03)
    assert np.mean(speculative(names, teachers, students, 3)) == 1  # the teacher finds it likelier: always


def test_osd_trains_on_what_selectkd_leaves_out() -> None:
    batch = rewarded(answers(40))
    kept = plan({"gate": {"kind": "selectkd", "accept": "speculative"}}, batch)
    rejected = plan({"gate": {"kind": "selectkd", "accept": "speculative", "accepted": 0, "rejected": 1}}, batch)
    for name, factor in kept.factor.items():
        np.testing.assert_array_equal(factor + rejected.factor[name], np.ones(LENGTH))
    with pytest.raises(ValueError, match="verdict does nothing"):
        term_of({"kind": "selectkd", "rejected": 1.0})


def term_of(gate: dict[str, Any]) -> Any:
    return read_term(gate=gate)


def test_one_of_several_draws_is_accepted_at_the_right_rate() -> None:
    student, teacher = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.3, 0.6])
    rate = np.minimum(student, teacher).sum()
    names = [f"n{index}" for index in range(6000)]
    drawn = np.random.default_rng(0).choice(3, size=6000, p=student)
    first = speculative(names, [np.log(student[[y]]) for y in drawn], [np.log(teacher[[y]]) for y in drawn], 0)
    more = further_draws(names, [np.array([rate])] * 6000, 2, 0)
    found = np.mean([bool(one[0] | other[0]) for one, other in zip(first, more, strict=True)])
    assert found == pytest.approx(1 - (1 - rate) ** 3, abs=0.02)


def test_the_acceptance_rate_is_measured_in_the_first_pass() -> None:
    student, teacher = tiny_model(seed=0), tiny_model(seed=1)
    items = sampled_by(student, [rollout("a", [3, 4], [5, 6, 1]), rollout("b", [9], [11, 1])])
    term = read_term(on=["student"], gate={"kind": "selectkd", "accept": "speculative", "draws": 4})
    judge = LocalTeacher("t", "teacher", teacher, 64, STOPS)
    objective = Objective([term], judge, stop_ids=STOPS)
    signals: Any = {}
    for need in objective.needs(1):
        signals[need] = {item.id: judge.score([item], SignalNeed(need[1]))[0] for item in items}
    batch = Batch(items, signals)
    objective.prepare(student, batch, 1, lambda rollouts: [Pack.of(list(rollouts))])
    for item in items:
        pack = Pack.of([item])
        rows = [model.project(model.hidden(pack.ids_T, pack.layout)[pack.predicting_N]) for model in (student, teacher)]
        s, t = (log_probs(side, side.vocabulary, (STOPS,)).exp() for side in rows)
        wanted = torch.minimum(s, t).sum(-1).detach().numpy()
        np.testing.assert_allclose(batch.first_pass.acceptance["teacher"][item.id], wanted, atol=1e-5)


@pytest.mark.parametrize(("settings", "shape"), [({}, lambda u: np.minimum(u, 1)), ({"power": 2.0}, lambda u: np.minimum(u, 1) ** 2), ({"bound": 0.5}, lambda u: (u >= 0.5).astype(float))])  # fmt: skip
def test_trust_in_the_ratio(settings: dict[str, Any], shape: Any) -> None:
    batch = rewarded(answers(4))
    found = plan({"gate": {"kind": "trust", **settings}, "on": ["student"]}, batch)
    for item, teacher in zip(batch.rollouts, batch.logprobs("teacher", batch.rollouts), strict=True):
        np.testing.assert_allclose(found.factor[item.id], shape(np.exp(teacher - item.logprob)), rtol=1e-6)
        assert found.counted[item.id].all()


def test_trust_in_a_teacher_that_is_sure() -> None:
    known = {"teacher_entropy": {"teacher": {"r0": np.array([0.0, 0.5, 1.0, 2.0])}}}
    found = plan({"gate": {"kind": "trust", "by": "entropy"}}, rewarded(answers(1), **known))
    np.testing.assert_allclose(found.factor["r0"], np.exp([0, -0.5, -1, -2]))


def test_drift_lowers_the_weight_of_what_follows_a_disagreement() -> None:
    batch = rewarded(answers(4))
    found = plan({"form": "policy_gradient", "gate": {"kind": "drift", "gamma": 0.5}}, batch)
    cut = plan({"form": "policy_gradient", "gate": {"kind": "drift", "gamma": 0, "most": 1.0}}, batch)
    for item, teacher in zip(batch.rollouts, batch.logprobs("teacher", batch.rollouts), strict=True):
        gap = np.abs(item.logprob - teacher)
        before = np.array([gap[:t].sum() for t in range(LENGTH)])
        np.testing.assert_allclose(found.factor[item.id], 1 + 0.5 * (1 - before / gap.sum()))
        np.testing.assert_array_equal(cut.factor[item.id], before <= 1.0)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [1, 0, 1, 0, 0, 1]),
        ({"occurrence": "first"}, [1, 0, 1, 1, 0, 1]),
        ({"keep": True}, [0, 1, 0, 1, 1, 0]),
        ({"keep": True, "occurrence": "first"}, [0, 1, 0, 0, 1, 0]),
    ],
)
def test_tokens_by_id(settings: dict[str, Any], wanted: list[int]) -> None:
    item = rollout("a", [1], [5, 7, 6, 7, 8, 5])
    found = plan({"form": "cross_entropy", "on": ["student"], "gate": {"kind": "tokens", "ids": [7, 8], **settings}}, Batch([item]))  # fmt: skip
    assert found.factor["a"].tolist() == wanted


def test_token_ids_beyond_the_vocabulary_are_rejected_before_anything_is_loaded(tmp_path: Path) -> None:
    recipe = {
        "student": "tiny/generalist", "teachers": {"arithmetic": "tiny/arithmetic"}, "device": "cpu",
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "objective": {"gate": {"kind": "tokens", "ids": [3, 99]}},
    }  # fmt: skip
    message = r"objective: gate tokens names id 99, and the student's vocabulary has 99 ids, 0 to 98"
    with pytest.raises(RecipeError, match=message):
        opd.run(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    student = tiny_model()
    judge = LocalTeacher("judge", "teacher", tiny_model(), 64, STOPS)
    with pytest.raises(RecipeError, match="gate tokens names id 99"):
        opd.Trainer(student, opd.Objective(recipe["objective"], judge))  # type: ignore[arg-type]
    opd.Trainer(student, opd.Objective({"gate": {"kind": "tokens", "ids": [student.size - 1]}}, judge))


def test_turns_of_one_answer_count_once() -> None:
    """Three turns of a right answer and one wrong answer: half of the answers are right."""
    turns = [replace(rollout(f"a/turn{n}", [1], [5] * LENGTH, group="g"), extras={"turn_of": "a"}) for n in range(3)]
    items = [*turns, rollout("b", [1], [5] * LENGTH, group="g")]
    batch = Batch(items, {}, {item.id: float(item.id != "b") for item in items})
    found = plan({"form": "cross_entropy", "on": ["student"], "gate": "paced"}, batch)
    assert {name: values[0] for name, values in found.factor.items()} == dict.fromkeys(batch.rewards, 0.25)
    for baseline in ("group", "batch", "leave_one_out"):
        term = {
            "form": "policy_gradient",
            "advantage": {"teacher_weight": 0, "outcome_weight": 1, "baseline": baseline},
        }
        values = advantages(plan(term, batch), items)
        size = 1.0 if baseline == "leave_one_out" else 0.5
        assert [values[item.id][0] for item in items] == [size, size, size, -size]


def test_the_shortest_and_longest_answers_are_closed() -> None:
    items = [rollout(f"r{size}", [1], [5] * size) for size in (4, 1, 3, 2, 5)]
    gate = {"kind": "length", "shortest": 0.2, "longest": 0.4}
    found = plan({"form": "cross_entropy", "on": ["student"], "gate": gate}, Batch(items))
    assert opened(found) == ["r3", "r2"]


def test_roc_keeps_right_and_wrong_answers_in_proportion() -> None:
    items = [rollout(f"r{n}", [1], [5] * (8 - n), group="g") for n in range(8)]
    items += [rollout(f"s{n}", [1], [5], group="h") for n in range(4)]
    rewards: dict[str, float | None] = {
        item.id: float(item.id in ("r0", "r1", "r2", "r3", "r4", "r5")) for item in items
    }
    batch = Batch(items, {}, rewards)
    found = plan({"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}, "gate": {"kind": "keep", "minimum": 1}}, batch)  # fmt: skip
    kept = opened(found)
    assert {name for name in kept if rewards[name]} == {"r3", "r4", "r5"}  # the shortest right ones
    assert len(kept) == 4  # one of the two wrong ones; none of the group without contrast


@pytest.mark.parametrize("right", range(1, 7))
def test_half_of_a_group_stays_in_the_recipe_with_tools(right: int) -> None:
    (stage,) = load_recipe("methods/rstar2-tools").stages
    (keep,) = stage.objective[0].gate
    items = [rollout(f"r{number}", [1], [5], group="g") for number in range(stage.rollout.samples)]
    batch = Batch(items, {}, {item.id: float(number < right) for number, item in enumerate(items)})
    found = plan({"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}, "gate": {"kind": "keep", **keep.model_dump()}}, batch)  # fmt: skip
    kept = opened(found)
    assert len(kept) == 4
    of_right = sum(batch.rewards[name] == 1.0 for name in kept)
    assert 1 <= of_right <= 3
    assert abs(of_right - right / 2) <= 0.5


def test_the_cleanest_right_answers_had_the_fewest_failed_calls() -> None:
    calls = [
        (4, 1),
        (2, 0),
        (0, 0),
        (3, 3),
        (1, 1),
    ]  # calls and failed ones: penalties 0.25, 0, 0.5, 1, and of a wrong answer
    items = [
        replace(rollout(f"r{number}", [1], [5], group="g"), extras={CALLS: called, FAILED_CALLS: failed})
        for number, (called, failed) in enumerate(calls)
    ]
    assert [tool_penalty(item) for item in items] == [0.25, 0.0, 0.5, 1.0, 1.0]
    batch = Batch(items, {}, {item.id: float(item.id != "r4") for item in items})
    found = plan({"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}, "gate": {"kind": "keep", "prefer": "clean", "minimum": 1, "share": 0.6}}, batch)  # fmt: skip
    assert sorted(opened(found)) == ["r0", "r1", "r4"]


def test_the_cleanest_answers_need_tools() -> None:
    recipe = {
        "student": "tiny/generalist", "prompts": "task:dialogue", "rollout": {"samples": 4, "environment": "dialogue"},
        "objective": {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}, "gate": {"kind": "keep", "prefer": "clean"}},
    }  # fmt: skip
    with pytest.raises(RecipeError, match="no environment of this recipe has tools"):
        load_recipe(recipe)
    tools = {"kind": "calculator", "tool_calls": "json"}
    load_recipe(recipe | {"prompts": "task:addition", "rollout": {"samples": 4, "environment": tools}})


def test_the_likeliest_right_answers_are_by_the_students_tokens() -> None:
    """Tokens of an environment have no log-probs."""
    said, logprobs = np.array([0, 0, Author.ENV, 0], dtype=np.uint8), [-3.0, -1.0, -4.0, -2.0]
    items = [
        replace(
            rollout(f"r{number}", [1], [5] * 4, group="g"),
            author=said,
            logprob=np.where(said == Author.ENV, np.nan, value).astype(np.float32),
        )
        for number, value in enumerate([*logprobs, -1.0])
    ]
    batch = Batch(items, {}, {item.id: float(item.id != "r4") for item in items})
    found = plan({"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}, "gate": {"kind": "keep", "prefer": "likely", "minimum": 1, "share": 0.6}}, batch)  # fmt: skip
    assert sorted(opened(found)) == ["r1", "r3", "r4"]


def test_paced_weighs_the_frontier() -> None:
    found = plan({"gate": "paced", "aggregate": "sequence_mean"}, rewarded(answers(), REWARDS))
    assert found.factor["r0"].tolist() == [0.25] * LENGTH
    assert not found.factor["r2"].any()
    assert found.counted["r2"].all()  # a weight of 0 is a weight: it stays in the mean
    weights = found.term.weights(found, answers())
    assert sum(value.sum() for value in weights.values()) == pytest.approx(2 / 5 * 0.25)


@pytest.mark.parametrize(("of", "power", "sign"), [("student", 1.0, 1), ("teacher", -1.0, -1)])
def test_scope_weighs_by_perplexity_in_the_direction_of_the_formula(of: str, power: float, sign: int) -> None:
    rollouts = answers(6, per_group=6)
    batch = rewarded(rollouts)
    found = plan({"gate": {"kind": "perplexity", "of": of, "power": power}}, batch)
    source = [item.logprob for item in rollouts] if of == "student" else batch.logprobs("teacher", rollouts)
    perplexity = np.array([np.exp(-values.mean()) for values in source])
    weights = np.array([found.factor[item.id][0] for item in rollouts])
    np.testing.assert_allclose(weights, perplexity**power / np.mean(perplexity**power), rtol=1e-5)
    assert np.sign(np.corrcoef(weights, perplexity)[0, 1]) == sign


def test_turn_weights_fall_where_the_student_left_the_teacher() -> None:
    item = replace(answers(1)[0], author=np.array([0, 3, 0, 0], dtype=np.uint8))  # two turns, the environment between
    batch = rewarded([item])
    found = plan({"form": "policy_gradient", "gate": "turns"}, batch)
    gap = np.abs(item.logprob - batch.logprobs("teacher", [item])[0])
    first, second = gap[0], gap[2:].mean()
    np.testing.assert_allclose(found.factor["r0"], [1, 0, *([min((first + 1e-6) / (second + 1e-6), 1.2)] * 2)])


def test_finished_drops_what_the_limit_cut_off() -> None:
    rollouts = answers(2)
    rollouts[1] = replace(rollouts[1], stop="length")
    assert opened(plan({"gate": "finished"}, rewarded(rollouts))) == ["r0"]


def test_closed_tokens_leave_the_denominator_or_stay() -> None:
    entropy = {item.id: np.arange(LENGTH, dtype=float) for item in answers()}
    for gated, mass in (("drop", 1.0), ("zero", 0.25)):
        gate = {"kind": "entropy", "share": 0.25}
        found = plan({"gate": gate, "gated": gated}, rewarded(answers(), entropy=entropy))
        assert sum(value.sum() for value in found.term.weights(found, answers()).values()) == pytest.approx(mass)


def test_overlong_answers_are_masked_or_penalised() -> None:
    rollouts = [replace(answers()[0], stop="length"), answers()[1]]
    scores: dict[str, float | None] = {"r0": 1.0, "r1": 0.0}
    base = {"teacher_weight": 0, "outcome_weight": 1, "baseline": "none"}
    masked = plan({"form": "policy_gradient", "advantage": base | {"overlong": "mask"}}, rewarded(rollouts, scores))
    assert opened(masked) == ["r1"]
    advantage = base | {"overlong": "penalise", "overlong_buffer": 8}
    found = plan({"form": "policy_gradient", "advantage": advantage}, rewarded(rollouts, scores))
    assert outcomes(found)["r0"] == pytest.approx(1.0 - 0.5)  # four of eight tokens, and the buffer is all eight


def test_advantages_add_up() -> None:
    """Extrapolation, clipping, reference penalty and outcome, against the formula written out."""
    rollouts = answers(2)
    scores: dict[str, float | None] = {"r0": 1.0, "r1": 0.0}
    advantage = {
        "extrapolation": 1.25, "clip": 0.7, "reference_weight": 0.1, "outcome_weight": 0.5, "baseline": "leave_one_out",
    }  # fmt: skip
    batch = rewarded(rollouts, scores)
    found = plan({"form": "policy_gradient", "advantage": advantage}, batch)
    students = [item.logprob.astype(np.float64) for item in rollouts]
    teachers, references = batch.logprobs("teacher", rollouts), batch.logprobs("reference", rollouts)
    for index, outcome in enumerate((1.0, -1.0)):
        s, t, r = students[index], teachers[index], references[index]
        wanted = np.clip((t - s) + 0.25 * (t - r), -0.7, 0.7) + 0.5 * outcome - 0.1 * (s - r)
        np.testing.assert_allclose(advantages(found, rollouts)[f"r{index}"], wanted)
        np.testing.assert_allclose(advantages(found, rollouts, students)[f"r{index}"], wanted)


def test_data_tokens_are_left_alone() -> None:
    item = replace(answers(1)[0], author=np.full(LENGTH, Author.DATA, dtype=np.uint8))
    assert not opened(plan({"form": "policy_gradient"}, rewarded([item])))
