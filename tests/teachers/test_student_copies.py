"""Teachers made of the student: what they are after some steps, what a checkpoint holds of them, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import opd
from opd.common.errors import RecipeError
from opd.models.language_model import LanguageModel
from opd.models.settings import Lora
from opd.recipe import load_recipe
from opd.records import SignalNeed, TeacherLike
from opd.registry import Family
from opd.runner.plan import make_plan
from opd.teachers.kinds import TeacherInputs
from tests.support.crash import same_run
from tests.support.helpers import save_tiny, tiny_model
from tests.support.interrupted import SCORED, Crash, small, strike
from tests.support.rollouts import rollout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"student": save_tiny(tmp_path_factory.mktemp("models") / "student"), "teacher": ""}


ROLLOUTS = [rollout("1", [5, 6, 7], [8, 9, 1]), rollout("2", [10], [11, 12])]
INSTRUCTED = {"kind": "instruction", "instruction": "Be concise."}


def opened(student: LanguageModel, **settings: Any) -> TeacherLike:
    kind: Any = Family("teacher").read(settings)
    return kind.open("t", TeacherInputs(student, (1,), lambda ref: pytest.fail(f"{ref} is loaded")))


def trained(student: LanguageModel, amount: float) -> None:
    """Every weight that trains moves."""
    with torch.no_grad():
        for parameter in student.trainable().values():
            parameter.add_(amount * torch.randn_like(parameter))


def logprobs(teacher: TeacherLike) -> torch.Tensor:
    signals = teacher.score(ROLLOUTS, SignalNeed("logprobs_at"))
    assert {signal.teacher_version for signal in signals} == {teacher.version}
    return torch.cat([torch.from_numpy(signal.values) for signal in signals])


def own(student: LanguageModel) -> torch.Tensor:
    """What the student says itself."""
    from opd.teachers.scoring import LocalTeacher

    copy = student.inference_copy()
    for name, parameter in copy.module.named_parameters():
        parameter.data = student.weights(0).tensors[name]
    return logprobs(LocalTeacher("t", "teacher", copy, 99, (1,)))


def student(lora: bool) -> LanguageModel:
    model = tiny_model("llama")
    if lora:
        model.add_lora(Lora(rank=2))
    return model


@pytest.mark.parametrize("lora", [False, True])
def test_self_and_base_stay_what_the_stage_began_with(lora: bool) -> None:
    model = student(lora)
    before = own(model)
    teachers = [opened(model, kind=kind) for kind in ("self", *(["base"] if lora else []))]
    trained(model, 0.1)
    for teacher in teachers:
        teacher.observe(1, model.weights(1))
        assert torch.allclose(logprobs(teacher), before, atol=1e-5)
        assert not torch.allclose(own(model), before, atol=1e-2)
        assert (teacher.version, dict(teacher.state())) == (0, {})
    if lora:  # no second copy
        theirs = dict(teachers[-1].model.module.named_parameters())
        assert all(theirs[name].data_ptr() == p.data_ptr() for name, p in model._plain.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_ema_is_the_running_mean_of_the_policy(lora: bool, dtype: torch.dtype) -> None:
    model = student(lora)
    model.module.to(dtype)
    if lora:
        model._plain.to(dtype)
    teacher = opened(model, kind="ema", rate=0.01)
    expected = {name: tensor.float().clone() for name, tensor in model.weights(0).tensors.items()}
    for step in range(1, 4):
        trained(model, 0.05)
        weights = model.weights(step)
        teacher.observe(step, weights)
        expected = {name: 0.99 * mean + 0.01 * weights.tensors[name].float() for name, mean in expected.items()}
    for name, parameter in teacher.model.module.named_parameters():
        assert torch.allclose(parameter.float(), expected[name], atol=1e-6 if dtype == torch.float32 else 2e-2)
    state = teacher.state()
    assert all(torch.allclose(mean, expected[name], atol=1e-5) for name, mean in state.items())
    assert (teacher.version, set(state)) == (3, model.moving())
    again = opened(student(lora), kind="ema", rate=0.01)
    if dtype == torch.float32:
        again.restore(teacher.version, {name: tensor.clone() for name, tensor in state.items()})
        assert torch.equal(logprobs(again), logprobs(teacher))


def test_refresh_copies_every_so_many_steps() -> None:
    model = student(lora=False)
    teacher, last = opened(model, kind="refresh", every=2), own(model)
    for step in range(1, 5):
        trained(model, 0.05)
        teacher.observe(step, model.weights(step))
        last = own(model) if step % 2 == 0 else last
        assert torch.equal(logprobs(teacher), last)
        assert teacher.version == step // 2


@pytest.mark.parametrize("lora", [False, True])
def test_live_is_the_student_as_the_step_begins(lora: bool) -> None:
    model = student(lora)
    trained(model, 0.05)
    teacher = opened(model, kind="live", view=INSTRUCTED)
    teacher.observe(7, model.weights(7))
    assert torch.allclose(logprobs(teacher), own(model), atol=1e-5)
    (hidden,) = teacher.score(ROLLOUTS[:1], SignalNeed("hidden"))
    before = teacher.project(hidden.values).logits()
    trained(model, 0.1)  # the first of several updates
    assert torch.equal(teacher.project(hidden.values).logits(), before)
    assert not teacher.project(hidden.values).weight.requires_grad
    assert all(parameter.requires_grad for parameter in model.trainable().values())
    assert teacher.version == 7
    teacher.observe(8, model.weights(8))
    assert torch.allclose(logprobs(teacher), own(model), atol=1e-5)


@pytest.mark.parametrize(
    "teacher",
    [
        {"kind": "ema", "rate": 0.3},
        pytest.param({"kind": "refresh", "every": 2}, marks=pytest.mark.slow),
        pytest.param({"kind": "live"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_resumed_run_restores_its_teachers(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: dict[str, Any]
) -> None:
    teacher["view"] = {"kind": "template", "template": "{answer}{prompt}"}
    settings = {"teachers": {"t": teacher}, "checkpoint": {"resume": "exact", "every": 1}, "store": {"hidden": True}}
    spec = small(models, **settings, eval={"prompts": 0}, train={"steps": 4, "lr": 1e-2})
    reference = opd.run(spec, out=tmp_path / "reference")
    assert reference.metrics[0]["reverse_kl"] > 0
    strike(monkeypatch, SCORED, 4, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    run = opd.resume(tmp_path / "run")
    same_run(run, reference)
    kept = run.rollouts.signals(list(run.rollouts.entries), "teacher", "hidden")
    versions = {"ema": {0, 1, 2, 3}, "refresh": {0, 1}, "live": {0, 1, 2, 3}}[teacher["kind"]]
    assert {signal.teacher_version for signal in kept.values()} == versions


RECIPE = {"student": "tiny/generalist", "prompts": {"source": "task:addition", "domain": "t"}, "device": "cpu"}
FORWARD, PG = {"divergence": "forward_kl"}, {"form": "policy_gradient"}


@pytest.mark.parametrize(
    ("teacher", "changes", "words"),
    [
        ({"kind": "refresh", "every": 1, "view": INSTRUCTED}, {}, "every 1 steps: published runs collapsed"),
        ({"kind": "refresh", "every": 19, "view": INSTRUCTED}, {"objective": PG}, "force: true"),
        ({"kind": "live", "view": INSTRUCTED}, {"objective": {"form": "k2"}}, "every 1 steps"),
        ({"kind": "refresh", "every": 1, "view": {"kind": "template", "template": "Be brief. {prompt}"}}, {}, "every 1 steps"),
        ({"kind": "live", "view": INSTRUCTED}, {"objective": {"divergence": "jsd", "beta": 1}}, "every 1 steps"),
        ({"kind": "live", "view": INSTRUCTED}, {"objective": {"divergence": "alpha", "alpha": 0}}, "every 1 steps"),
        ({"kind": "live", "view": INSTRUCTED}, {"objective": {"divergence": "skew_reverse_kl", "alpha": 0}}, "every 1 steps"),
        ({"kind": "live"}, {}, "Give it another `view`"),
        ({"kind": "base"}, {}, "Set student.lora"),
        ({"kind": "live", "view": INSTRUCTED, "force": True}, {"rollout": {"teacher_share": 0.5}}, "of kind live, has none"),
        ({"kind": "ema", "every": 3}, {}, "every belongs to teacher refresh"),
    ],
)  # fmt: skip
def test_teachers_that_cannot_work_are_rejected(teacher: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe({**RECIPE, "teachers": {"t": teacher}, **changes})


def test_what_is_published_is_taken_and_what_is_risky_is_said() -> None:
    for teacher in (
        {"kind": "refresh", "every": 50, "view": INSTRUCTED},
        {"kind": "refresh", "every": 1, "view": INSTRUCTED, "force": True},
        {"kind": "refresh", "every": 10, "view": {"kind": "template", "template": "{prompt} {answer}"}},  # RLSD
        {"kind": "live", "view": {"kind": "template", "template": "{prompt} {answer}"}},  # HDPO
    ):
        load_recipe({**RECIPE, "teachers": {"t": teacher}})
    risky = {"kind": "refresh", "view": INSTRUCTED}
    (plan,) = make_plan(load_recipe({**RECIPE, "teachers": {"t": risky}, "objective": FORWARD}))
    assert any("collapsed at every refresh" in note for note in plan.notes)
    for rate, told in ((0.5, True), (0.05, False)):
        mean = {"kind": "ema", "rate": rate, "view": INSTRUCTED}
        (plan,) = make_plan(load_recipe({**RECIPE, "teachers": {"t": mean}}))
        assert any("follows the student within 2 steps" in note for note in plan.notes) == told
