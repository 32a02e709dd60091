"""`import opd`: everything a person needs, flat, and loaded only when used."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import opd
from opd.recipe import Lora
from opd.records import SignalNeed
from tests.support.helpers import tiny_model


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys, opd; opd.RecipeError, opd.Rollout; assert not {'torch', 'transformers', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_what_its_module_holds() -> None:
    for module in pkgutil.walk_packages(opd.__path__, "opd."):
        if module.name.count(".") == 1:
            importlib.import_module(module.name)  # a module of the same name would hide what is flat
    assert set(opd.__all__) == {*opd.LAZY, "Run", "__version__", "resume", "run"}
    for name, place in opd.LAZY.items():
        assert getattr(opd, name) is getattr(importlib.import_module(place), name)
    assert not [name for name in opd.__all__ if isinstance(getattr(opd, name), ModuleType)]
    assert set(dir(opd)) == set(opd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = opd.nothing


@pytest.mark.parametrize("lora", [False, True])
def test_a_sampler_draws_from_the_model_as_it_is_now(lora: bool) -> None:
    model = tiny_model()
    if lora:
        model.add_lora(Lora(rank=2))
    sampler = opd.Sampler(model, max_new_tokens=8)
    rows = []
    for round_ in range(2):
        rollouts = sampler.sample(["1+2", "3+4", "1+2"], samples=2)
        ids = torch.from_numpy(np.concatenate([rollout.response_ids for rollout in rollouts]).astype(np.int64))
        with torch.no_grad():
            logprobs = opd.token_logprobs(model.predict(opd.Pack.of(rollouts)), ids, merge=(model.stop_ids,))
        sampled = np.concatenate([rollout.logprob for rollout in rollouts])
        assert np.allclose(sampled, logprobs.numpy(), atol=1e-4)
        assert {int(version) for rollout in rollouts for version in rollout.version} == {round_ + 1}
        rows.append(rollouts)
        with torch.no_grad():
            for parameter in model.trainable().values():
                parameter.add_(0.05 * torch.randn_like(parameter))
    assert [rollout.visit for rollout in rows[0]] == [0, 0, 0, 0, 1, 1]  # asked twice in one call
    assert [rollout.visit for rollout in rows[1]] == [2, 2, 1, 1, 3, 3]
    assert len({rollout.id for some in rows for rollout in some}) == 12
    assert len({rollout.group for rollout in rows[0]}) == 3


def test_a_sampler_repeats_itself_and_makes_room() -> None:
    model = tiny_model()
    prompts = ["1+2", "9" * 200]
    first, second = (opd.Sampler(model, max_new_tokens=40, seed=7) for _ in range(2))
    short, long = (
        first.sample(prompts[:1]),
        first.sample(prompts[1:]),
    )  # the second is too long for the room of the first
    both = second.sample(prompts)
    for one, other in zip([*short, *long], both, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
    assert (
        opd.Sampler(model, max_new_tokens=40, seed=8).sample(prompts)[1].response_ids.tolist()
        != long[0].response_ids.tolist()
    )
    assert first.sample([]) == []
    with pytest.raises(opd.DataError, match="context"):
        first.sample(["9" * 300])


def test_a_sampler_takes_one_prompt_or_many_and_nothing_else() -> None:
    sampler = opd.Sampler(tiny_model(), max_new_tokens=4)
    prompt = opd.Prompt(id="p", domain="d", text="3+4")
    assert [rollout.prompt_id for rollout in sampler.sample("1+2", samples=2)] == ["1+2", "1+2"]
    assert [rollout.domain for rollout in sampler.sample(prompt)] == ["d"]
    assert [rollout.prompt_id for rollout in sampler.sample(["1+2", prompt])] == ["1+2", "p"]
    for given in ([{"role": "user", "content": "1+2"}], {"role": "user"}, [7]):
        with pytest.raises(opd.UserError, match=r"expected texts or opd\.Prompts, got"):
            sampler.sample(given)  # type: ignore[arg-type]
    with pytest.raises(opd.UserError, match="samples: expected at least 1"):
        sampler.sample("1+2", samples=0)
    for drawing in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}):
        (name,) = drawing
        with pytest.raises(opd.RecipeError, match=rf"sampler\.{name}: .*got"):
            opd.Sampler(tiny_model(), **drawing)  # type: ignore[arg-type]


def test_what_a_step_did_is_found_by_the_names_of_metrics(tmp_path: Path) -> None:
    student = opd.load_model("tiny/generalist")
    teacher, sampler = opd.Teacher("tiny/arithmetic", student), opd.Sampler(student, max_new_tokens=8)
    trainer = opd.Trainer(student, opd.Objective([{"divergence": "jsd"}, {"form": "k2"}], teacher, sampler))
    batch = trainer.batch(sampler.sample(opd.prompts("task:addition", 8)))
    result = trainer.step(batch)
    losses = [statistics.loss for _, statistics in result.statistics]
    assert result.loss == result.metrics["loss"] == pytest.approx(sum(sum(loss.values()) for loss in losses))
    assert result.metrics["grad_norm"] == result.norms[0] > 0
    assert result.metrics["lr"] == result.rate > 0
    assert result.metrics["step"] == trainer.steps == 1
    (sole,) = opd.run(
        {"student": "tiny/generalist", "teachers": {"arithmetic": "tiny/arithmetic"}, "prompts": "task:addition",
         "rollout": {"prompts": 4, "max_new_tokens": 8}, "train": {"steps": 1}, "eval": {"prompts": 0}},
        out=tmp_path / "run",
    ).metrics  # fmt: skip
    assert set(result.metrics) <= set(sole)
    assert {"loss", "reverse_kl", "entropy", "tokens", "kl/arithmetic"} <= set(result.metrics)
    with pytest.raises(opd.UserError, match=r"expected trainer\.batch\(rollouts\)"):
        trainer.step(list(batch.rollouts))  # type: ignore[arg-type]


def test_what_people_hold_is_shown_in_one_line(tmp_path: Path) -> None:
    student = opd.load_model("tiny/generalist")
    teacher, sampler = opd.Teacher("tiny/arithmetic", student), opd.Sampler(student, max_new_tokens=8)
    objective = opd.Objective([{"divergence": "jsd"}, {"form": "k2", "coefficient": 0.5}], teacher, sampler)
    trainer = opd.Trainer(student, objective)
    flood = opd.Prompt(id="i" * 999, domain="d", text="t" * 99_999, fields={name: "f\n" * 999 for name in "abcdef"})
    rollouts = sampler.sample(opd.prompts("task:addition", 4))
    batch = trainer.batch(rollouts)
    pack = opd.Pack.of(rollouts)
    found = opd.divergence("jsd", student.predict(pack), teacher.predict(pack))
    signal = next(iter(batch.signals.values()))[rollouts[0].id]
    shown = {
        "LanguageModel('tiny/generalist', LlamaForCausalLM, 455,936 parameters, float32 on cpu)": student,
        "Teacher('teacher', role='teacher', model='tiny/arithmetic', gives": teacher,
        "Sampler('tiny/generalist', max_new_tokens=8, temperature=1.0, seed=0)": sampler,
        "Objective(1 direct + 0.5 k2, teachers: teacher)": objective,
        "Trainer('tiny/generalist', Objective(1 direct + 0.5 k2": trainer,
        "Prompt(id='iiii": flood,
        "Prompt(id='task:addition/train/0', domain='arithmetic', messages=1, last='add": opd.prompts("task:addition", 1)[0],
        "Rollout(id='task:addition/train/0/0/0', domain='arithmetic', source='student', 10 +": rollouts[0],
        "Batch(4 rollouts": batch,
        "StepResult(step=1, loss=": trainer.step(batch),
        f"Pack(4 rollouts, {sum(rollout.length for rollout in rollouts)} tokens": pack,
        "Projection(": teacher.predict(pack),
        "Divergence(loss=": found,
        "Signal('teacher'": signal,
    }  # fmt: skip
    for start, item in shown.items():
        assert repr(item).startswith(start)
        assert len(repr(item)) < 400
        assert "\n" not in repr(item)


def test_rollouts_of_a_run_iterate(tmp_path: Path) -> None:
    recipe = {
        "student": "tiny/generalist", "teachers": {"arithmetic": "tiny/arithmetic"}, "prompts": "task:addition",
        "rollout": {"prompts": 3, "samples": 2, "max_new_tokens": 8}, "train": {"steps": 2}, "eval": {"prompts": 0},
    }  # fmt: skip
    rollouts = opd.run(recipe, out=tmp_path / "run").rollouts
    ids = [rollout.id for rollout in rollouts]
    assert ids == [rollout.id for rollout in rollouts.where().load()]
    assert len(ids) == len(set(ids)) == len(rollouts) == 12
    assert (rollouts[0].id, rollouts[-1].id) == (ids[0], ids[-1])
    assert [rollout.id for rollout in rollouts[2:5]] == ids[2:5]
    assert rollouts.where(sample=1)[1].id == rollouts.where(sample=1).ids[1]
    with pytest.raises(IndexError):
        _ = rollouts[12]
    assert repr(rollouts).endswith("12 of 12 rollouts finished and kept)")


def test_mistakes_in_settings_from_python_are_reported() -> None:
    with pytest.raises(opd.RecipeError, match=r"objective\.0.*jsdd"):
        opd.Objective({"divergence": "jsdd"})
    with pytest.raises(opd.RecipeError, match=r"objective\.1\.temprature.*did you mean 'temperature'"):
        opd.Objective([{"divergence": "jsd"}, {"divergence": "jsd", "temprature": 2}])
    with pytest.raises(opd.RecipeError, match=r"train\.lr.*greater than 0.*-1"):
        opd.Trainer(tiny_model(), opd.Objective({"form": "cross_entropy"}), {"lr": -1})
    with pytest.raises(opd.RecipeError, match=r"train\.rate: unknown key"):
        opd.Trainer(tiny_model(), opd.Objective({"form": "cross_entropy"}), {"rate": 1})
    with pytest.raises(opd.RecipeError, match=r"train\.learning_rate: unknown key; .*`train\.lr` here"):
        opd.Trainer(tiny_model(), opd.Objective({"form": "cross_entropy"}), {"learning_rate": 1})
    with pytest.raises(opd.RecipeError, match=r"loss_top_k: unknown key; TRL's `loss_top_k` is `objective\.k` here"):
        opd.Objective({"divergence": "jsd", "loss_top_k": 8})
    with pytest.raises(opd.RecipeError, match=r"sampler\.slots"):
        opd.Sampler(tiny_model(), settings={"slots": 0})


def test_a_loop_of_ones_own_learns_by_the_same_step() -> None:
    student = opd.load_model("tiny/generalist")
    teacher = opd.Teacher("tiny/arithmetic", student)
    sampler = opd.Sampler(student, max_new_tokens=12)
    prompts = opd.prompts("task:addition", 24)
    objective = opd.Objective(
        [{"divergence": "reverse_kl"}, {"form": "policy_gradient", "coefficient": 0.1}], teacher, sampler
    )
    trainer = opd.Trainer(student, objective, {"lr": 2e-4})
    losses = []
    for _ in range(3):
        rollouts = sampler.sample(prompts)
        batch = opd.Pack.of(rollouts)
        with torch.no_grad():
            exact = opd.divergence(
                "reverse_kl", student.predict(batch), teacher.predict(batch), merge=[student.stop_ids]
            )
        result = trainer.step(trainer.batch(rollouts))
        loss = sum(statistics.loss["0:direct"] for _, statistics in result.statistics)
        assert loss == pytest.approx(float(exact.value.mean()), rel=1e-4)
        losses.append(loss)
    assert len(set(losses)) == trainer.steps == 3


def test_a_teacher_predicts_as_its_model_does_and_is_asked_by_domain() -> None:
    student = opd.load_model("tiny/generalist")
    teachers = {name: opd.Teacher(f"tiny/{name}", student, name=name) for name in ("arithmetic", "spelling")}
    rollouts = opd.Sampler(student, max_new_tokens=8).sample(
        opd.prompts("task:addition", 3) + opd.prompts("task:reverse", 2)
    )
    batch, teacher = opd.Pack.of(rollouts), teachers["spelling"]
    with torch.no_grad():
        assert torch.equal(teacher.predict(batch).hidden, teacher.model.predict(batch).hidden)
    assert not teacher.predict(batch).hidden.requires_grad
    trainer = opd.Trainer(student, opd.Objective({"divergence": "tvd"}, teachers))
    (signals,) = trainer.batch(rollouts).signals.values()
    assert [signals[rollout.id].teacher for rollout in rollouts] == ["arithmetic"] * 3 + ["spelling"] * 2
    with pytest.raises(
        opd.UserError, match="domain '' has no teacher of the role 'teacher'; there are: arithmetic, spelling"
    ):
        trainer.batch(opd.Sampler(student, max_new_tokens=2).sample(["1+1"]))
    with pytest.raises(opd.UserError, match="uses rewards"):
        opd.Trainer(student, opd.Objective({"divergence": "tvd", "gate": "wrong"}, teachers)).batch(rollouts)
    with pytest.raises(opd.RecipeError, match="modle"):
        opd.Teacher({"modle": "tiny/spelling"})
    with pytest.raises(opd.TokenizerMismatch):
        opd.Teacher("tiny/spelling", tiny_model())


def test_a_batch_used_twice_by_hand_is_compared_with_the_student_before_it() -> None:
    """A ratio against the policy as it is now would be 1 for ever, and nothing would be clipped."""
    student = opd.load_model("tiny/generalist")
    teacher, sampler = opd.Teacher("tiny/arithmetic", student), opd.Sampler(student, max_new_tokens=8)
    surrogate = {"kind": "ppo", "against": "proximal", "low": 1e-6, "high": 1e-6}
    objective = opd.Objective({"form": "policy_gradient", "surrogate": surrogate}, teacher, sampler)
    trainer = opd.Trainer(student, objective, {"lr": 1e-3, "epochs": 2})
    result = trainer.step(trainer.batch(sampler.sample(opd.prompts("task:addition", 8))))
    clipped = [statistics.counts["clipped/0:policy_gradient"][0] for _, statistics in result.statistics]
    assert len(result.norms) == 2
    assert clipped[0] == 0 < clipped[-1]


def test_what_a_recipe_would_reject_is_rejected_from_python() -> None:
    student = tiny_model()

    def trainer(terms: object, **drawing: float) -> opd.Trainer:
        sampler = opd.Sampler(student, **drawing)  # type: ignore[arg-type]
        return opd.Trainer(student, opd.Objective(terms, None, sampler))  # type: ignore[arg-type]

    for drawing in ({"top_p": 0.5}, {"top_k": 3}):
        with pytest.raises(opd.RecipeError, match="Importance ratios are undefined"):
            trainer({"form": "policy_gradient"}, **drawing)
        trainer({"form": "direct"}, **drawing)
    with pytest.raises(opd.RecipeError, match=r"temperature 0\.5 with form: k2"):
        trainer([{"form": "direct"}, {"form": "k2"}], temperature=0.5)
    with pytest.raises(opd.RecipeError, match=r"sampler\.temperature"):
        trainer({"form": "direct"}, temperature=-1.0)
    for form in ("cross_entropy", "pairwise"):  # whose tokens, and how many answers, the batch says
        trainer({"form": form})
    trainer({"gate": {"kind": "perplexity", "of": "student"}})
    with pytest.raises(opd.RecipeError, match="teacher: kind base is the model under the student's adapters"):
        opd.Teacher({"kind": "base"}, student)
    with pytest.raises(opd.RecipeError, match="kind live reads what the student reads"):
        opd.Teacher({"kind": "live"}, student)
    student.add_lora(Lora(rank=2))
    assert opd.Teacher({"kind": "base"}, student).model is not None


def test_a_teachers_settings_count_by_hand() -> None:
    student = tiny_model()
    rollouts = opd.Sampler(student, max_new_tokens=4).sample(["1+2", "3+4"])
    teacher = opd.Teacher({"kind": "self", "view": {"kind": "same", "skip": 2}}, student, name="a")
    objective = opd.Objective({"form": "k2"}, {"a": teacher, "b": teacher})  # of both domains
    (signals,) = (
        opd.Trainer(student, objective)
        .batch([replace(rollouts[0], domain="b"), replace(rollouts[1], domain="a")])
        .signals.values()
    )
    for rollout in rollouts:
        assert np.flatnonzero(signals[rollout.id].mask).tolist() == list(range(2, rollout.response_ids.size))
    assert torch.isfinite(teacher.predict(opd.Pack.of(rollouts)).hidden).all()
    with pytest.raises(opd.UserError, match="domains x, y: the domains of an `opd"):
        opd.Teacher({"kind": "self", "domains": ["x", "y"]}, student)


def test_stop_ids_of_all_teachers_are_one_event(tmp_path: Path) -> None:
    """Whichever was opened first, and for a sampler that was there before them."""
    student = tiny_model()
    sampler = opd.Sampler(student, max_new_tokens=16)
    before = sampler.sample(["1+2"])
    for number, stops in enumerate(((7,), (8, 79))):  # 79: beyond the student's own ids
        tiny_model(seed=number).save(tmp_path / str(number), stops)
    teachers = {str(number): opd.Teacher(str(tmp_path / str(number)), student, name=str(number)) for number in range(2)}
    rollouts = sampler.sample(["1+2"] * 8)
    assert len(before) == 1
    assert set(sampler.sampling.stop_ids) == set(student.stop_ids) == {1, 7, 8, 79}
    assert all({1, 7, 8, 79}.isdisjoint(rollout.response_ids[:-1].tolist()) for rollout in rollouts)
    ids = torch.from_numpy(np.concatenate([rollout.response_ids for rollout in rollouts]).astype(np.int64))
    for teacher in teachers.values():
        found = teacher.score(rollouts, SignalNeed("logprobs_at"))
        with torch.no_grad():
            wanted = opd.token_logprobs(teacher.model.predict(opd.Pack.of(rollouts)), ids, merge=(student.stop_ids,))
        assert teacher.model.size == student.size == 80
        np.testing.assert_allclose(np.concatenate([signal.values for signal in found]), wanted.numpy(), atol=1e-5)
