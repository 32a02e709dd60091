"""Terms at work on real (tiny) models: corrections bite, schedules switch, several updates clip, mixtures are sampled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import opd
from opd.common.errors import RecipeError
from opd.divergences.projection import log_probs
from opd.engines.builtin import Engine
from opd.engines.calls import Partner
from opd.engines.kinds import BuiltInSampler
from opd.loop.producer import contrasts
from opd.models.language_model import Pack
from opd.objective.term import Schedule
from opd.recipe import Rollouts
from opd.records import Author, Rollout, SampleRequest, Sampling
from opd.rollouts.rollouter import answers
from opd.store import RolloutStore
from tests.support.helpers import EOS, refusals, save_tiny, term, tiny_model
from tests.support.rollouts import STOPS, sampled_by, some_rollouts
from tests.support.steps import gradients


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "one"))}


def recipe(models: dict[str, str], **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "student": models["student"],
        "teachers": {"a": models["one"]},
        "prompts": [{"source": "task:addition", "domain": "a"}],
        "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 6},
        "sampler": {"slots": 8},
        "train": {"steps": 2, "lr": 1e-3},
        "eval": {"prompts": 0},
        "device": "cpu",
    }
    return base | changes


def stale(rollouts: list[Rollout], seed: int = 3, size: float = 0.6) -> list[Rollout]:
    """As if sampled by a policy that has since moved."""
    generator = np.random.default_rng(seed)
    return [
        replace(item, logprob=(item.logprob + size * generator.normal(size=item.logprob.size)).astype(np.float32))
        for item in rollouts
    ]


def without(rollouts: list[Rollout], closed: list[np.ndarray]) -> list[Rollout]:
    """The same rollouts with some tokens given to the environment, so that nothing trains on them."""
    return [
        replace(item, author=np.where(shut, Author.ENV, item.author).astype(np.uint8))
        for item, shut in zip(rollouts, closed, strict=True)
    ]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    scale = max(float(value.abs().max()) for value in one.values())
    return all(torch.allclose(one[name], two[name], atol=1e-4 * scale) for name in one)


def log_ratios(rollouts: list[Rollout], current: list[Rollout]) -> list[np.ndarray]:
    return [now.logprob - then.logprob for now, then in zip(current, rollouts, strict=True)]


def test_icepop_masks_exactly_the_tokens_outside_the_band() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    fresh = sampled_by(student, some_rollouts())
    old = stale(fresh)
    closed = [(np.exp(ratio) < 0.7) | (np.exp(ratio) > 1.4) for ratio in log_ratios(old, fresh)]
    assert 0 < np.concatenate(closed).mean() < 1
    band: Any = {"kind": "icepop", "low": 0.7, "high": 1.4}
    plain = term(form="policy_gradient", aggregate="constant")
    _, found, statistics = gradients(student, {"t": teacher}, [plain.model_copy(update={"correction": term(form="policy_gradient", correction=band).correction})], old)  # fmt: skip
    _, wanted, _ = gradients(student, {"t": teacher}, [plain], without(old, closed))
    assert same(found, wanted)
    changed, count = statistics[0].counts["corrected/0:policy_gradient"]
    assert (changed, count) == (np.concatenate(closed).sum(), sum(item.response_ids.size for item in old))


CORRECTIONS: list[Any] = [
    {"kind": "icepop", "low": 0.9, "high": 1.1}, {"kind": "tis", "high": 1.05}, {"kind": "mis", "low": 0.9, "high": 1.1},
    {"kind": "tis", "level": "sequence", "high": 1.05}, {"kind": "mis", "level": "sequence", "low": 0.9, "high": 1.1},
    {"kind": "mis", "level": "geometric", "low": 0.97, "high": 1.03}, {"kind": "none", "veto": 0.6},
]  # fmt: skip


@pytest.mark.parametrize("against", ["behaviour", "proximal"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
def test_every_correction_bites_on_stale_weights_and_not_on_fresh_ones(correction: Any, against: Any) -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    fresh = sampled_by(student, some_rollouts())
    surrogate = {"kind": "importance_sampling", "against": against}
    plain = term(form="policy_gradient", surrogate=surrogate)
    objective = term(form="policy_gradient", surrogate=surrogate, correction=correction)
    for rollouts, altered in ((fresh, False), (stale(fresh), True)):
        _, found, statistics = gradients(student, {"t": teacher}, [objective], rollouts)
        _, wanted, _ = gradients(student, {"t": teacher}, [plain], rollouts)
        assert same(found, wanted) != altered
        assert (statistics[0].counts["corrected/0:policy_gradient"][0] > 0) == altered


@pytest.mark.parametrize("correction", [{"kind": "prefix", "high": 1.05}, {"kind": "none", "veto": 0.6}], ids=str)
def test_direct_losses_are_corrected_by_prefix_or_veto(correction: Any) -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    fresh = sampled_by(student, some_rollouts())
    for rollouts, altered in ((fresh, False), (stale(fresh), True)):
        _, found, statistics = gradients(student, {"t": teacher}, [term(correction=correction)], rollouts)
        _, wanted, _ = gradients(student, {"t": teacher}, [term()], rollouts)
        assert same(found, wanted) != altered
        if altered:
            assert statistics[0].counts["corrected/0:direct"][0] > 0
        assert np.nanmean(statistics[0].mismatch) == pytest.approx(0.48 if altered else 0, abs=0.15)


def test_the_veto_drops_whole_rollouts() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    fresh = sampled_by(student, some_rollouts())
    old = stale(fresh)
    ratios = log_ratios(old, fresh)
    vetoed = [np.full(ratio.size, bool((np.exp(ratio) < 0.5).any())) for ratio in ratios]
    assert 0 < sum(shut.any() for shut in vetoed) < len(old)
    for form in ("direct", "policy_gradient"):
        objective = term(form=form, aggregate="constant", correction={"kind": "none", "veto": 0.5})
        plain = term(form=form, aggregate="constant")
        _, found, _ = gradients(student, {"t": teacher}, [objective], old)
        _, wanted, _ = gradients(student, {"t": teacher}, [plain], without(old, vetoed))
        assert same(found, wanted)


def test_a_bf16_sampler_is_caught_by_a_narrow_band(models: dict[str, str], tmp_path: Path) -> None:
    objective = {"form": "policy_gradient", "correction": {"kind": "icepop", "low": 0.9999, "high": 1.0001}}
    shares = []
    for dtype in ("float32", "bfloat16"):
        run = opd.run(
            recipe(models, sampler={"slots": 8, "dtype": dtype}, objective=objective, train={"steps": 1}),
            out=tmp_path / dtype,
        )
        shares.append(run.metrics[0]["corrected/0:policy_gradient"])
    assert shares[0] == 0
    assert shares[1] > 0.3


def test_several_updates_per_batch_move_away_from_the_proximal_policy(models: dict[str, str], tmp_path: Path) -> None:
    surrogate = {"kind": "ppo", "against": "proximal", "low": 0.02, "high": 0.02}
    objective = {"form": "policy_gradient", "advantage": {"student": "proximal"}, "surrogate": surrogate}
    clipped = []
    for index, train in enumerate(({}, {"epochs": 2, "minibatches": 2})):
        run = opd.run(
            recipe(models, objective=objective, train={"steps": 2, "lr": 1e-2} | train), out=tmp_path / str(index)
        )
        clipped.append(run.metrics[-1]["clipped/0:policy_gradient"])
        assert run.metrics[-1]["mismatch"] < 1e-5  # of the proximal policy, which is the sampler's
    assert clipped[0] == 0
    assert clipped[1] > 0.05


def test_minibatches_use_every_complete_group_once(models: dict[str, str], tmp_path: Path) -> None:
    from opd.loop.step import updates
    from opd.recipe import Train

    rollouts = [replace(item, group=f"g{index // 2}") for index, item in enumerate(some_rollouts(count=10))]
    parts = list(updates(rollouts, Train(epochs=2, minibatches=3), 0, 1))
    assert len(parts) == 6
    for epoch in (parts[:3], parts[3:]):
        assert sorted(item.id for part in epoch for item in part) == sorted(item.id for item in rollouts)
        for part in epoch:
            groups = {item.group for item in part}
            assert len(part) == sum(item.group in groups for item in rollouts)


def test_schedules() -> None:
    line = Schedule(value=5e-3, to=1e-3, over=5)
    assert [round(line.at(step, None), 4) for step in (1, 3, 5, 9)] == [0.005, 0.003, 0.001, 0.001]
    assert [Schedule(until=3).at(step, None) for step in (3, 4)] == [1, 0]
    assert [Schedule(value=2, after=3).at(step, None) for step in (3, 4)] == [0, 2]
    assert [Schedule(value=1, to=3, over=3, after=5).at(step, None) for step in (5, 6, 7, 8, 9)] == [0, 1, 2, 3, 3]
    until, after = Schedule(until="plateau"), Schedule(after="plateau")
    assert [until.at(9, plateau) for plateau in (None, 9, 8)] == [1, 1, 0]
    assert [after.at(9, plateau) for plateau in (None, 9, 8)] == [0, 0, 1]


def test_the_hard_switch_stops_asking_the_teacher(models: dict[str, str], tmp_path: Path) -> None:
    outcome = {"teacher_weight": 0, "outcome_weight": 1}
    objective = [
        {"form": "policy_gradient", "coefficient": {"until": 1}},
        {"form": "policy_gradient", "coefficient": {"after": 1}, "advantage": outcome},
    ]
    run = opd.run(recipe(models, objective=objective), out=tmp_path / "run")
    assert run.metrics[0]["reverse_kl"] is not None
    assert run.metrics[1]["reverse_kl"] is None


def test_until_plateau_follows_the_evaluation(models: dict[str, str], tmp_path: Path) -> None:
    objective = [
        {"form": "policy_gradient", "coefficient": {"until": "plateau"}},
        {"form": "policy_gradient", "coefficient": {"after": "plateau"}, "advantage": {"teacher_weight": 0, "outcome_weight": 1}},
    ]  # fmt: skip
    evaluation = {
        "prompts": 4,
        "every": 1,
        "plateau": 2,
        "teachers": False,
    }  # an untrained model: 0 %, and never better
    run = opd.run(recipe(models, objective=objective, eval=evaluation, train={"steps": 6}), out=tmp_path / "run")
    asked = [line["reverse_kl"] is not None for line in run.metrics]
    assert asked == [True, True, True, False, False, False]


def test_dynamic_sampling_keeps_only_groups_with_contrast(models: dict[str, str], tmp_path: Path) -> None:
    objective = {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}}
    rollout = {"prompts": 4, "samples": 2, "max_new_tokens": 4, "contrast": 4}
    rewards = {"kind": "format", "pattern": "[a-m]"}  # some random answers have such a letter
    spec = recipe(models, objective=objective, rollout=rollout, rewards=rewards, train={"steps": 1})
    run = opd.run(spec, out=tmp_path / "run")
    line, stored = run.metrics[0], RolloutStore(run.directory / "rollouts", read_only=True)
    sampled = stored.load(list(stored.entries))
    assert len(sampled) > 8  # more than one round
    assert line["tokens/sampled"] == sum(item.response_ids.size for item in sampled) > line["tokens"]
    scores: dict[str, set[float]] = {}
    for item in sampled:
        scores.setdefault(item.group, set()).add(stored.entries[item.id].notes["reward"])
    contrasting = [group for group, found in scores.items() if len(found) > 1][:4]
    kept = sum(item.response_ids.size for item in sampled if item.group in contrasting)
    assert line["tokens"] == kept


def test_dynamic_sampling_keeps_groups_without_rewards() -> None:
    unrewarded, equal = some_rollouts(count=2), some_rollouts(count=2)
    assert contrasts(unrewarded, {})
    assert not contrasts(equal, {item.id: 1.0 for item in equal})
    assert contrasts([replace(item, source="data") for item in equal], {item.id: 1.0 for item in equal})
    assert contrasts(equal, {equal[0].id: 1.0, equal[1].id: 0.0})


def test_impossible_rewards_are_found_before_the_first_token(models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "add 1+1"}\n' * 8)
    objective = {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}}
    with pytest.raises(RecipeError, match="no prompt's answers can be rewarded"):
        opd.run(
            recipe(models, prompts=[{"source": str(path), "domain": "a"}], objective=objective), out=tmp_path / "run"
        )


def test_gates_do_not_hide_tokens_from_losses_of_whole_rollouts() -> None:
    """A veto, or GSPO's ratio, is of the rollout; an entropy gate only says which of its tokens are trained on."""
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    old = stale(sampled_by(student, some_rollouts()))
    gate: Any = {"kind": "entropy", "share": 0.3}
    for extra in (
        {"correction": {"kind": "none", "veto": 0.5}},
        {"surrogate": {"kind": "gspo", "low": 0.1, "high": 0.1}},
    ):
        found = [
            gradients(student, {"t": teacher}, [term(form="policy_gradient", aggregate="constant", gate=gate, gated=gated, **extra)], old)[1]
            for gated in ("drop", "zero")
        ]  # fmt: skip
        assert same(*found)


def test_corrections_measure_the_sampler_and_not_the_policys_updates(models: dict[str, str], tmp_path: Path) -> None:
    correction = {"kind": "icepop", "low": 0.999, "high": 1.001}
    for index, objective in enumerate(({"form": "policy_gradient"}, {"form": "k2"}, {"form": "direct"})):
        chosen = {"kind": "prefix", "high": 1.001} if objective["form"] == "direct" else correction
        spec = recipe(models, objective=objective | {"correction": chosen}, train={"steps": 1, "lr": 1e-2, "epochs": 3})
        line = opd.run(spec, out=tmp_path / str(index)).metrics[0]
        assert line[f"corrected/0:{objective['form']}"] == 0
        assert line["mismatch"] < 1e-4


def test_tokens_of_others_have_no_ratio() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    written = [
        replace(item, author=np.full_like(item.author, Author.TEACHER), logprob=item.logprob - 3)
        for item in sampled_by(student, some_rollouts())
    ]
    objective = term(correction={"kind": "prefix", "high": 1.05})
    _, found, statistics = gradients(student, {"t": teacher}, [objective], written)
    _, wanted, _ = gradients(student, {"t": teacher}, [term()], written)
    assert same(found, wanted)
    assert np.isnan(statistics[0].mismatch).all()


def test_an_estimate_never_replaces_an_exact_divergence() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = sampled_by(student, some_rollouts())
    terms = [term(), term(form="policy_gradient")]
    values = [
        np.nanmean(gradients(student, {"t": teacher}, order, rollouts)[2][0].reverse_kl)
        for order in (terms, terms[::-1])
    ]
    assert values[0] == pytest.approx(values[1])


def test_the_score_is_the_students_own(models: dict[str, str], tmp_path: Path) -> None:
    rollout = {"prompts": 16, "max_new_tokens": 6, "data_share": 0.8}
    run = opd.run(recipe(models, rollout=rollout, train={"steps": 1}), out=tmp_path / "run")
    assert run.metrics[0]["reward"] == 0  # the dataset's answers are right, an untrained student's are not


def test_the_first_pass_sees_what_the_update_sees(models: dict[str, str], tmp_path: Path) -> None:
    """Under autocast too: before the first update, proximal and current are the same."""
    surrogate = {"kind": "ppo", "against": "proximal", "low": 1e-6, "high": 1e-6}
    spec = recipe(
        models, objective={"form": "policy_gradient", "surrogate": surrogate},
        train={"steps": 1, "lr": 1e-12, "epochs": 2, "autocast": True},
    )  # fmt: skip
    assert opd.run(spec, out=tmp_path / "run").metrics[0]["clipped/0:policy_gradient"] == 0


def test_mixed_sampling_draws_from_both_and_says_so() -> None:
    student, teacher, share = tiny_model("llama"), tiny_model("llama", 1), 0.3
    engine = Engine(
        student.inference_copy(), BuiltInSampler(slots=4), 64, merge_stop=STOPS, partner=Partner(teacher.inference_copy(), share)
    )  # fmt: skip
    sampling = Sampling(12, stop_ids=STOPS)
    prompts = [np.arange(3 + index, 9 + 2 * index, dtype=np.int32) for index in range(6)]
    requests = [SampleRequest(f"r{index}", prompt, 77 + index, sampling) for index, prompt in enumerate(prompts)]
    for item in answers(engine, requests):
        batch = Pack.of([item])
        with torch.no_grad():
            s, t = (
                log_probs(model.project(model.hidden(batch.ids_T, batch.layout)[batch.predicting_N]), student.size, (STOPS,))
                for model in (student, teacher)
            )  # fmt: skip
        ids = torch.from_numpy(item.response_ids.astype(np.int64))[:, None]
        mixed = torch.logaddexp(s + np.log(1 - share), t + np.log(share)).gather(-1, ids)[:, 0]
        np.testing.assert_allclose(item.logprob, s.gather(-1, ids)[:, 0], atol=1e-4)
        np.testing.assert_allclose(item.logprob_sampled, mixed, atol=1e-4)
    alone = answers(Engine(student.inference_copy(), BuiltInSampler(slots=4), 64, merge_stop=STOPS), requests)
    both = answers(engine, requests)
    assert any(not np.array_equal(one.response_ids, two.response_ids) for one, two in zip(alone, both, strict=True))
    assert all(item.response_ids[-1] == EOS or item.response_ids.size == 12 for item in both)


def test_ratios_of_mixed_rollouts_are_against_the_mixture(models: dict[str, str], tmp_path: Path) -> None:
    rollout = {"prompts": 8, "max_new_tokens": 8, "teacher_mix": 0.5}
    objective = {"form": "policy_gradient", "surrogate": {"kind": "cispo", "low": 0.01, "high": 0.01}}
    run = opd.run(recipe(models, rollout=rollout, objective=objective, train={"steps": 1}), out=tmp_path / "run")
    assert run.metrics[0]["clipped/0:policy_gradient"] > 0.2  # the student is not the mixture,
    assert run.metrics[0]["mismatch"] < 1e-5  # and trainer and sampler still agree about the student
    stored = RolloutStore(run.directory / "rollouts", read_only=True)
    assert {entry.source for entry in stored.entries.values()} == {"mixed:a"}


@pytest.mark.parametrize("support", ["teacher", "student", "union"])
def test_recipes_reach_truncated_supports(models: dict[str, str], tmp_path: Path, support: str) -> None:
    objective = {"form": "direct", "support": "topk", "k": 8, "side": support, "closure": "tail"}
    run = opd.run(recipe(models, objective=objective, train={"steps": 1}), out=tmp_path / "run")
    assert run.metrics[0]["loss"] > 0


def test_settings_without_a_meaning_are_rejected() -> None:
    grpo = term(form="policy_gradient", advantage={"teacher_weight": 0, "outcome_weight": 1})
    assert "baseline: batch" in refusals(Rollouts(samples=1), grpo)
    assert "ratios" in refusals(Rollouts(top_p=0.9), term(correction={"kind": "prefix"}))
    assert "samples" in refusals(Rollouts(samples=1), term(gate="paced"))
    for spec in (Rollouts(temperature=0.7), Rollouts(teacher_mix=0.2)):
        assert "k2" in refusals(spec, term(form="k2"))
    for wrong in (
        {"correction": "icepop"}, {"form": "cross_entropy", "correction": "tis"}, {"form": "k2", "surrogate": "ppo"},
        {"form": "policy_gradient", "correction": "prefix"}, {"form": "policy_gradient", "on": ["data"]},
        {"form": "policy_gradient", "divergence": "acceptance"}, {"k": 5}, {"coefficient": {"to": 1.0}},
        {"form": "policy_gradient", "advantage": {"length_normalised": True}},
        {"form": "policy_gradient", "advantage": {"teacher_weight": 0}},
        {"form": "policy_gradient", "surrogate": {"kind": "cispo", "dual": 3}}, {"gate": {"kind": "teacher_entropy"}},
        {"form": "policy_gradient", "advantage": {"student": "current", "whiten": True}}, {"beta": 0.3}, {"denominator": 2.0},
        {"form": "policy_gradient", "advantage": {"baseline": "batch"}}, {"gated": "zero"}, {"on": []},
        {"form": "policy_gradient", "surrogate": "cispo", "correction": {"kind": "tis"}}, {"coefficient": {"until": 4, "after": 6}},
        {"form": "policy_gradient", "correction": {"kind": "tis", "low": 0.1}}, {"gate": {"kind": "entropy", "share": 0}},
        {"gate": {"kind": "teacher_entropy", "above": 2, "below": 1}}, {"gate": {"kind": "selectkd", "accept": "speculative", "k": 3}},
        {"form": "cross_entropy", "role": "other"},
    ):  # fmt: skip
        with pytest.raises(ValidationError):
            term(**wrong)


def test_outcome_alone_needs_no_teacher(models: dict[str, str], tmp_path: Path) -> None:
    objective = {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}}
    run = opd.run(recipe(models, teachers={}, objective=objective), out=tmp_path / "run")
    assert run.metrics[-1]["reward"] == 0
    assert run.metrics[-1]["loss"] == 0  # nothing was right, so there is nothing to compare
