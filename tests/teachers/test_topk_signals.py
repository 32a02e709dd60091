"""A teacher that gives its likeliest ids alone: the same loss as the same ids chosen in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import opd
from opd.common.errors import RecipeError
from opd.divergences import Projection, divergence, likeliest_ids
from opd.loop.step import train_step
from opd.objective.batch import Batch
from opd.objective.objective import Objective
from opd.recipe import Train, load_recipe
from opd.records import Signal, SignalKind, SignalNeed, TopK
from opd.store import RolloutStore
from opd.teachers.kinds import FrozenTeacher, TeacherInputs
from opd.teachers.scoring import LocalTeacher
from opd.teachers.views import response_after
from tests.support.helpers import save_tiny, tiny_model
from tests.support.interrupted import SCORED, Crash, strike
from tests.support.rollouts import rollout
from tests.support.steps import KeepGradients

STOPS = (1, 3)
ROLLOUTS = [rollout("1", [5, 6, 7], [8, 9, 1]), rollout("2", [10], [11, 12, 13, 3]), rollout("3", [3] * 9, [4, 1])]


class Narrow(LocalTeacher):
    """It could say more, and does not."""

    offers = frozenset[SignalKind]({"logprobs_at", "topk"})


def step(teacher: LocalTeacher, **term: Any) -> tuple[float, torch.Tensor, Any]:
    """Loss, gradients and statistics of one update of the same student on the same rollouts, in fp64."""
    student = tiny_model("llama_tied", seed=2)
    student.module.double().requires_grad_(True)
    objective = Objective({"form": "direct", **term}, teacher, stop_ids=STOPS)
    signals: dict[Any, Any] = {}
    for role, kind in objective.needs(1):
        found = teacher.score(ROLLOUTS, objective.need_given(signals, role, kind))
        signals[role, kind] = {item.id: signal for item, signal in zip(ROLLOUTS, found, strict=True)}
    result = train_step(
        student, Batch(ROLLOUTS, signals, {}), objective, KeepGradients(),
        train=Train(micro_tokens=12, precision="float32"),
    )  # fmt: skip
    loss = sum(value for _, statistics in result.statistics for value in statistics.loss.values())
    grads = torch.cat([p.grad.flatten() for p in student.module.parameters() if p.grad is not None])
    return loss, grads, result.statistics


def double_teacher(kind: type[LocalTeacher]) -> LocalTeacher:
    model = tiny_model("llama", seed=1)
    model.module.double()
    return kind("t", "teacher", model, 16, STOPS)


@pytest.mark.parametrize(
    "term",
    [
        {"k": 5},
        {"k": 5, "divergence": "forward_kl", "closure": "renormalised", "temperature": 2.0},
        {"k": 3, "divergence": "jsd", "beta": 0.3, "closure": "generalised"},
        {"k": 200, "divergence": "skew_kl"},
        {"k": 1, "divergence": "tvd", "closure": "none"},
    ],
    ids=str,
)
def test_likeliest_ids_that_were_sent_train_as_those_chosen_here(term: dict[str, Any]) -> None:
    loss, grads, statistics = step(double_teacher(LocalTeacher), support="topk", **term)
    sent, sent_grads, sent_statistics = step(double_teacher(Narrow), support="topk", **term)
    assert loss == pytest.approx(sent, rel=1e-7)  # the loss is summed up in fp32
    torch.testing.assert_close(sent_grads, grads, rtol=1e-9, atol=1e-12)
    assert loss != 0
    for (_, here), (_, there) in zip(statistics, sent_statistics, strict=True):
        np.testing.assert_allclose(here.entropy, there.entropy)
        assert np.isfinite(there.reverse_kl).all()
        assert (there.reverse_kl <= here.reverse_kl + 1e-9).all()  # of the events that are known


@pytest.mark.parametrize("kind", [LocalTeacher, Narrow])
def test_the_overlap_is_that_of_both_lists(kind: type[LocalTeacher]) -> None:
    """Every stop id is one event; a teacher that gives lists alone has the same overlap."""
    student, teacher, k = tiny_model("llama_tied", seed=2), double_teacher(kind), 5
    student.module.double()
    objective = Objective({"support": "topk", "k": 8, "side": "teacher"}, teacher, stop_ids=STOPS)
    objective.overlap = k
    signals: dict[Any, Any] = {}
    for role, wanted in objective.needs(1):
        found = teacher.score(ROLLOUTS, objective.need_given(signals, role, wanted))
        signals[role, wanted] = {item.id: signal for item, signal in zip(ROLLOUTS, found, strict=True)}
    result = train_step(student, Batch(ROLLOUTS, signals, {}), objective, KeepGradients(), train=Train(precision="float32"))  # fmt: skip
    by_hand, stock = [], [tiny_model("llama_tied", seed=2), tiny_model("llama", seed=1)]
    for model in stock:
        model.module.double().set_attn_implementation("eager")
    for item in (one for pack, _ in result.statistics for one in pack.rollouts):
        ids = torch.from_numpy(np.concatenate([item.prompt_ids, item.response_ids]).astype(np.int64))[None]
        tops = []
        for model in stock:
            logits = model.module(ids).logits[0, item.prompt_ids.size - 1 : -1, : student.size].double().detach()
            logits[:, STOPS[0]] = torch.logsumexp(logits[:, list(STOPS)], -1)
            logits[:, STOPS[1]] = -torch.inf
            tops.append(logits.topk(k).indices.tolist())
        by_hand += [len({*ours} & {*theirs}) / k for ours, theirs in zip(*tops, strict=True)]
    measured = np.concatenate([statistics.overlap for _, statistics in result.statistics])
    assert measured == pytest.approx(by_hand)
    assert result.metrics["overlap"] == pytest.approx(np.mean(by_hand))
    assert 0 < np.mean(by_hand) < 1


def test_terms_may_want_different_numbers_of_ids() -> None:
    objective = Objective([{"support": "topk", "k": 2}, {"support": "topk", "k": 9}], double_teacher(Narrow))
    assert objective.needs(1) == [("teacher", "topk")]
    assert objective.need_given({}, "teacher", "topk").k == 9
    top = double_teacher(Narrow).score(ROLLOUTS[:1], SignalNeed("topk", k=9))[0].values
    student = tiny_model("llama", seed=2)
    weight = student.head.weight.detach().double()
    head = Projection(torch.randn(3, 32, dtype=torch.float64), weight, size=student.size)
    few = double_teacher(Narrow).score(ROLLOUTS[:1], SignalNeed("topk", k=2))[0].values
    one = divergence("reverse_kl", head, top, support="topk", k=2, merge=(STOPS,))
    two = divergence("reverse_kl", head, few, support="topk", k=2, merge=(STOPS,))
    torch.testing.assert_close(one.value, two.value)


def test_the_stop_event_is_known_whether_it_is_likely_or_not() -> None:
    teacher = double_teacher(LocalTeacher)
    (signal,) = teacher.score(ROLLOUTS[:1], SignalNeed("topk", k=2))
    with torch.no_grad():
        hidden = teacher.score(ROLLOUTS[:1], SignalNeed("hidden"))[0].values
        plain = teacher.project(hidden).logits().log_softmax(-1)
    np.testing.assert_allclose(signal.values.stop_logprob, plain[:, list(STOPS)].logsumexp(-1), rtol=1e-9)
    ids, logprobs, tail, _ = likeliest_ids(teacher.project(hidden), 2)
    assert torch.equal(ids, plain.topk(2).indices)
    assert (np.isin(signal.values.ids, STOPS).sum(-1) == 2).all()
    torch.testing.assert_close(tail.exp() + logprobs.exp().sum(-1), torch.ones(3, dtype=torch.float64))
    assert signal.values.fingerprint


def test_positions_that_were_not_seen_are_missing_and_masked() -> None:
    teacher = double_teacher(Narrow)
    seen = [response_after(item.prompt_ids, item, skip=1) for item in ROLLOUTS]
    for signal in teacher.score(ROLLOUTS, SignalNeed("topk", k=3), seen):
        assert not signal.mask[0]
        assert signal.mask[1:].all()
        assert (signal.values.ids[0] == -1).all()
        assert np.isnan(signal.values.logprobs[0]).all()
        assert np.isnan(signal.values.tail[0])
        assert np.isfinite(signal.values.logprobs[1:]).all()
    joined = TopK.join([signal.values.rows(np.array([1])), TopK.join([])])
    assert joined.ids.shape == (1, 5)


def test_a_teacher_that_was_asked_for_both_reads_once() -> None:
    teacher = double_teacher(LocalTeacher)
    hidden = {
        item.id: signal for item, signal in zip(ROLLOUTS, teacher.score(ROLLOUTS, SignalNeed("hidden")), strict=True)
    }
    alone = teacher.score(ROLLOUTS, SignalNeed("topk", k=4))
    for one, other in zip(alone, teacher.score(ROLLOUTS, SignalNeed("topk", k=4, hidden=hidden)), strict=True):
        np.testing.assert_array_equal(one.values.ids, other.values.ids)
        np.testing.assert_allclose(one.values.logprobs, other.values.logprobs)


@opd.register
class NarrowTeacher(FrozenTeacher):
    """Of tests: what a server with log-probs alone could say."""

    name = "test_narrow"
    by_default = False
    offers = frozenset({"logprobs_at", "topk"})
    asked: ClassVar[list[int]] = []

    def make(self, name: str, supplies: TeacherInputs) -> LocalTeacher:
        (ref,) = self.reads()
        asked = self.asked

        class Counted(Narrow):
            def score(self, rollouts: Any, need: SignalNeed, seen: Any = None) -> list[Signal]:
                asked.append(len(rollouts))
                return super().score(rollouts, need, seen)

        return Counted(name, self.role, supplies.load(ref), self.batch_tokens, supplies.stop_ids)


def recipe(tmp_path: Path, kind: str, **objective: Any) -> dict[str, Any]:
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    if not student.exists():
        save_tiny(student), save_tiny(teacher, seed=1)
    return {
        "student": str(student), "teachers": {"t": {"kind": kind, "model": str(teacher)}}, "prompts": "task:addition",
        "rollout": {"prompts": 4, "max_new_tokens": 4}, "sampler": {"slots": 4}, "train": {"steps": 3, "lr": 0.001}, "eval": {"prompts": 0},
        "objective": {"form": "direct", "support": "topk", "k": 6, **objective}, "device": "cpu", "checkpoint": {"every": 1},
    }  # fmt: skip


def test_a_run_trains_from_them_as_from_the_model_and_keeps_them(tmp_path: Path) -> None:
    here = opd.run(recipe(tmp_path, "frozen"), out=tmp_path / "here")
    sent = opd.run(recipe(tmp_path, "test_narrow"), out=tmp_path / "sent")
    for one, other in zip(here.metrics, sent.metrics, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    store = RolloutStore(sent.directory / "rollouts", read_only=True)
    kept = store.signals(list(store.entries), "teacher", "topk")
    assert len(kept) == 12
    assert all(signal.values.ids.shape[1] == 7 and signal.mask.all() for signal in kept.values())


@pytest.mark.slow
def test_a_resumed_run_does_not_ask_for_them_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = recipe(tmp_path, "test_narrow") | {"checkpoint": {"resume": "exact"}}
    reference = opd.run(spec, out=tmp_path / "reference")
    strike(monkeypatch, SCORED, 2, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    NarrowTeacher.asked.clear()
    run = opd.resume(tmp_path / "run")
    assert sum(NarrowTeacher.asked) == 4  # the third step; two were scored before
    assert [metric["loss"] for metric in run.metrics] == [metric["loss"] for metric in reference.metrics]


def test_teachers_of_one_role_say_the_same_kind_of_thing(tmp_path: Path) -> None:
    """One has hidden states and the other has not: both are asked for likeliest ids."""
    spec = recipe(tmp_path, "test_narrow")
    teacher = spec["teachers"]["t"]["model"]
    spec["teachers"] = {"sums": teacher, "words": {"kind": "test_narrow", "model": teacher}}
    spec["prompts"] = [{"source": "task:addition", "domain": "sums"}, {"source": "task:reverse", "domain": "words"}]
    run = opd.run(spec, out=tmp_path / "run")
    store = RolloutStore(run.directory / "rollouts", read_only=True)
    kept = store.signals(list(store.entries), "teacher", "topk")
    assert {signal.teacher for signal in kept.values()} == {"sums", "words"}
    assert len(kept) == 12


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"support": "full", "k": 64}, "support: topk with side: teacher"),
        ({"side": "student"}, "needs 'hidden'"),
        ({"side": "union"}, "needs 'hidden'"),
        ({"temperature": 2.0}, "closure: renormalised"),
        ({"gate": {"kind": "soft_or"}}, "needs 'hidden'"),
    ],
    ids=str,
)
def test_what_they_cannot_do_is_rejected_when_the_recipe_is_read(
    tmp_path: Path, objective: dict[str, Any], words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe(recipe(tmp_path, "test_narrow", **objective))


def test_what_they_can_do_is_not(tmp_path: Path) -> None:
    load_recipe(recipe(tmp_path, "test_narrow", temperature=2.0, closure="renormalised"))
    load_recipe(recipe(tmp_path, "test_narrow", closure="none", divergence="jsd"))
