"""Modules with their own passes, discriminators and reward models: loss, gradients and scores, its place in a step, and what survives."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import opd
from opd.common.errors import ModelError, RecipeError, TrainingError
from opd.common.files import read_sealed
from opd.loop.learner import OwnUpdates
from opd.loop.oom_retry import micro_batches
from opd.loop.ranks import Ranks
from opd.models.load import load_model
from opd.models.modules import Discriminator, OwnModule, RewardModel, answer_pairs, open_modules, reward_pairs
from opd.objective.batch import Batch
from opd.recipe import Train, load_recipe
from opd.records import Author, Rollout
from opd.runner.plan import make_plan
from tests.support.crash import ended, killed, same_run, start, written
from tests.support.helpers import save_tiny, tiny_model
from tests.support.rollouts import sampled_by, some_rollouts

SCORE = {
    "form": "policy_gradient",
    "advantage": {"teacher_weight": 0, "also": {"kind": "score", "module": "judge", "std": True}},
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("models") / "other", seed=3)


def answers() -> list[Rollout]:
    """Groups g0 to g3: in g0 and g1 the first answer is the dataset's, g2 has only the student's, and g3 only the dataset's."""
    found = []
    for item in sampled_by(tiny_model(), some_rollouts(count=8)):
        theirs = item.id in ("r0", "r2", "r6", "r7")
        found.append(replace(item, author=np.full(item.author.size, Author.DATA if theirs else Author.STUDENT)))
    extra = [replace(found[1], id="r1b", response_ids=found[3].response_ids, author=found[3].author,
                     logprob=found[3].logprob, logprob_sampled=found[3].logprob_sampled, version=found[3].version)]  # fmt: skip
    return found + extra


def judge_of(other: str, **settings: Any) -> OwnUpdates:
    student = tiny_model()
    student.module.double()
    kind = Discriminator(model=other, **settings)
    module = open_modules({"judge": kind}, student, 0)["judge"]
    assert isinstance(module, OwnModule)
    return OwnUpdates(module, kind, Train(lr=1e-3), Ranks())


def looked(updates: OwnUpdates, budget: int) -> tuple[Batch, dict[str, float], dict[str, Tensor]]:
    batch = Batch(answers())

    def cut() -> Any:
        return micro_batches(batch.rollouts, budget, torch.device("cpu"), {})

    metrics = updates.backward(batch, 1, cut, lambda: None)
    names = list(updates.module.parameters())
    return batch, metrics, dict(zip(names, updates.optimiser.gradients(names), strict=True))


def by_definition(updates: OwnUpdates, other: str) -> tuple[dict[str, float], float, dict[str, Tensor]]:
    """Scores, loss and gradients from the stock module: each answer alone, every pair of a group."""
    linear = copy.deepcopy(updates.module.network.score)
    backbone = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float64).model
    rollouts, scores = answers(), {}
    for item in rollouts:
        ids = torch.tensor([*item.prompt_ids.tolist(), *item.response_ids.tolist()])
        last = backbone(input_ids=ids[None]).last_hidden_state[0, -1]
        scores[item.id] = last @ linear.weight[0]
    pairs = [("r0", "r1"), ("r0", "r1b"), ("r2", "r3")]
    loss = -torch.stack([(scores[theirs] - scores[own]).sigmoid().log() for theirs, own in pairs]).mean()
    loss.backward()
    weights = {f"backbone.{name}": weight for name, weight in backbone.named_parameters()}
    weights |= {f"score.{name}": weight for name, weight in linear.named_parameters()}
    gradients = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
    return {name: score.item() for name, score in scores.items()}, loss.item(), gradients


@pytest.mark.parametrize("budget", [10**6, 8])
def test_scores_loss_and_gradients_are_those_of_the_definition(budget: int, other: str) -> None:
    wanted_scores, wanted_loss, wanted = by_definition(judge_of(other, clip=None), other)
    batch, metrics, found = looked(judge_of(other, clip=None), budget)
    assert batch.first_pass.scores["judge"] == pytest.approx(wanted_scores, rel=1e-9)
    assert metrics["loss/judge"] == pytest.approx(wanted_loss, rel=1e-9)
    own = [wanted_scores[name] for name in ("r1", "r1b", "r3", "r4", "r5")]
    assert metrics["score/judge"] == pytest.approx(sum(own) / 5)
    right = [wanted_scores["r0"] > wanted_scores["r1"], wanted_scores["r0"] > wanted_scores["r1b"],
             wanted_scores["r2"] > wanted_scores["r3"]]  # fmt: skip
    assert metrics["accuracy/judge"] == pytest.approx(sum(right) / 3)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():  # masters are float32
        assert float((found[name] - gradient).norm()) <= 1e-6 * float(gradient.norm()), name


def test_pairs_are_of_one_group() -> None:
    rollouts = answers()
    theirs, own = answer_pairs(rollouts)
    pairs = {(rollouts[one].id, rollouts[two].id) for one, two in zip(theirs, own, strict=True)}
    assert pairs == {("r0", "r1"), ("r0", "r1b"), ("r2", "r3")}
    assert answer_pairs([item for item in rollouts if item.group == "g2"]) == ([], [])


def trainer(other: str, **judge: Any) -> opd.Trainer:
    modules = {"judge": {"kind": "discriminator", "model": other, "lr": 1e-2, **judge}}
    return opd.Trainer(tiny_model(), opd.Objective(SCORE), {"lr": 1e-3, "micro_tokens": 64}, modules=modules)


def copies(weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def moved(weights: dict[str, nn.Parameter], before: dict[str, Tensor]) -> bool:
    return any(not torch.equal(weight, before[name]) for name, weight in weights.items())


def test_a_step_trains_both_and_uses_the_scores_from_before(other: str) -> None:
    own = trainer(other)
    judge, student = (copies(weights) for weights in (own.modules["judge"].parameters(), own.student.trainable()))
    batch = own.batch(answers())
    first = own.step(batch)
    assert moved(own.modules["judge"].parameters(), judge)
    assert moved(own.student.trainable(), student)
    assert first.metrics["grad_norm/judge"] > 0
    scores = dict(batch.first_pass.scores["judge"])
    again = trainer(other)
    looked_at = again.batch(answers())
    again._score(looked_at)
    assert looked_at.first_pass.scores["judge"] == scores
    own.step(batch)  # a second step on the same batch scores it runs_named
    assert batch.first_pass.scores["judge"] != scores


def test_a_discriminator_learns_to_tell_answers_apart(other: str) -> None:
    own = trainer(other, clip=None)
    batch = own.batch(answers())
    accuracy = [own.step(batch).metrics["accuracy/judge"] for _ in range(12)]
    assert accuracy[-1] == 1.0


def test_nothing_is_updated_if_a_gradient_of_any_part_is_not_finite(other: str) -> None:
    own = trainer(other)
    judge, student = own.modules["judge"].parameters(), own.student.trainable()
    batch, before, ours = own.batch(answers()), copies(judge), copies(student)
    with torch.no_grad():
        kept = student["model.norm.weight"].clone()
        student["model.norm.weight"].fill_(float("nan"))
    with pytest.raises(TrainingError, match="loss or its gradient is not finite"):
        own.step(batch)
    assert not moved(judge, before)
    with torch.no_grad():
        student["model.norm.weight"].copy_(kept)
        judge["score.weight"].fill_(float("inf"))
    with pytest.raises(TrainingError, match=r"gradient of module 'judge' is not finite.*modules\.judge\.lr"):
        own.step(batch)
    assert not moved(student, ours)


def test_a_batch_without_pairs_teaches_the_discriminator_nothing(other: str) -> None:
    own = trainer(other)
    before = copies(own.modules["judge"].parameters())
    result = own.step(own.batch([item for item in answers() if item.group == "g2"]))
    assert "loss/judge" not in result.metrics
    assert not moved(own.modules["judge"].parameters(), before)
    assert own.learner.own["judge"].optimiser.updates == 0


class Flat(OwnModule):
    """Scores of a wrong shape."""

    def scores(self, pack: Any) -> Tensor:
        return torch.zeros(len(pack.rollouts), 1)

    def loss(self, scores: Tensor, rollouts: Any, rewards: Any) -> None:
        return None


def test_scores_are_one_number_per_answer() -> None:
    updates = OwnUpdates(Flat("flat", nn.Linear(1, 1)), Discriminator(), Train(), Ranks())
    with pytest.raises(TrainingError, match=r"gave scores of shape \(\d+, 1\) for \d+ answers"):
        looked(updates, 10**6)


# In a recipe

RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
    "rollout": {"prompts": 4, "samples": 3, "max_new_tokens": 8, "writers": [{"kind": "data", "samples": 1}]},
    "modules": {"judge": {"kind": "discriminator", "lr": 1e-3}},
    "objective": SCORE,
    "train": {"steps": 5, "lr": 1e-4, "micro_tokens": 200},
    "eval": {"prompts": 0},
    "checkpoint": {"every": 2, "keep": 9, "resume": "exact"},
    "store": {"commit_ms": 5},
    "log": {"samples": 1, "start_table": False},
    "device": "cpu",
    "threads": 1,
}
WARM = {"name": "warm", "objective": {"form": "cross_entropy", "on": ["data"]}, "train": {"steps": 2, "lr": 1e-4}}
THEN = {"name": "then", "student": "stage:warm", "train": {"steps": 1, "lr": 1e-4}}


def in_two(source: str, **judge: Any) -> dict[str, Any]:
    return RECIPE | {"stages": [WARM, THEN | {"modules": {"judge": {"weights": source, **judge}}}]}


@pytest.mark.slow
def test_two_kills_leave_no_trace_in_student_or_discriminator(tmp_path: Path) -> None:
    recipe, directory = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(json.dumps(RECIPE))
    reference = opd.run(str(recipe), out=tmp_path / "reference")
    draw, total = random.Random("judge"), written(reference.directory)
    for _ in range(2):
        killed(tmp_path / "out.txt", directory, total, draw, "run", recipe, "--out", directory, "--resume")
    assert ended(start(tmp_path / "out.txt", "run", recipe, "--out", directory, "--resume")) == 0
    run = opd.resume(directory)
    same_run(run, reference)  # weights and moments of the discriminator are among its files
    names = {f"modules/judge/{name}.safetensors" for name in ("weights", "optimiser")}
    assert names <= read_sealed(run.model / "manifest.json")["files"].keys()
    assert run.metrics[-1]["grad_norm/judge"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [["train.precision=mixed"], ["student.lora={rank: 4}", "modules.judge.optimiser=muon", "train.precision=autocast"]],
    ids=["mixed", "lora"],
)
def test_other_precisions_and_optimisers_resume_with_the_same_bits(changes: list[str], tmp_path: Path) -> None:
    changes = [*changes, "train.steps=3", "checkpoint.every=1"]
    whole = opd.run(RECIPE, overrides=changes, out=tmp_path / "whole")
    opd.run(
        RECIPE,
        overrides=changes,
        out=tmp_path / "cut",
        on_step=lambda run, found: run.stop() if found["step"] == 2 else None,
    )
    again = opd.resume(tmp_path / "cut")
    first, last = (
        load_file(path / "modules" / "judge" / "weights.safetensors") for path in (whole.checkpoints[0], whole.model)
    )
    assert first["backbone.layers.0.mlp.up_proj.weight"].dtype == (
        torch.bfloat16 if "mixed" in changes[0] else torch.float32
    )
    assert any(not torch.equal(first[name], tensor) for name, tensor in last.items())
    for name in ("weights", "optimiser"):
        file = Path("modules") / "judge" / f"{name}.safetensors"
        assert (again.model / file).read_bytes() == (whole.model / file).read_bytes()


def test_a_later_stage_starts_from_a_stages_module(tmp_path: Path) -> None:
    run = opd.run(in_two("stage:warm#judge"), out=tmp_path / "run", overrides=["stages.1.modules.judge.lr=1e-30"])
    saved = [load_file(path / "modules" / "judge" / "weights.safetensors") for path in
             (run.directory / "checkpoints" / name / step for name, step in (("warm", "step-000002"), ("then", "step-000001")))]  # fmt: skip
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=0, atol=1e-7)
    start = load_file(run.directory / "checkpoints" / "warm" / "step-000002" / "model.safetensors")
    assert not torch.equal(saved[0]["backbone.norm.weight"], start["model.norm.weight"])
    folder = run.directory / "checkpoints" / "warm" / "step-000002" / "modules" / "judge"
    again = opd.run(RECIPE | {"modules": {"judge": {"kind": "discriminator", "weights": str(folder)}}},
                    overrides=["train.steps=1"], out=tmp_path / "again")  # fmt: skip
    assert again.metrics[0]["step"] == 1


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (in_two("stage:warm#critic"), r"stages\.then\.modules\.judge\.weights stage:warm#critic: stage 'warm' has no module 'critic'.*judge"),
        (in_two("stage:wam#judge"), r"stages\.then\.modules\.judge\.weights: no other stage is called 'wam'; did you mean 'warm'"),
        (in_two("stage:warm"), r"write stage:NAME#MODULE"),
        (RECIPE | {"modules": {}, "stages": [WARM | {"modules": RECIPE["modules"]}, THEN | {"rollout": {"writers": []}, "modules": {"value": {"kind": "head", "weights": "stage:warm#judge"}}, "objective": [
            {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "also": {"kind": "gae"}}}, {"form": "value"}]}]},
         "of kind discriminator there, and of kind head here"),
        (RECIPE | {"rollout": {"prompts": 4, "samples": 3}}, r"modules\.judge: a discriminator compares the student's answers.*samples: 1"),
        (RECIPE | {"modules": {}}, "uses the module 'judge', but the recipe's modules are: none"),
        (RECIPE | {"modules": {"judge": "head"}}, "reads the score that the module 'judge' gives an answer, and a head gives numbers"),
        (RECIPE | {"objective": [{"form": "policy_gradient", "advantage": {"teacher_weight": 0, "also": {"kind": "gae", "module": "judge"}}},
                                 {"form": "value", "module": "judge"}]}, "a discriminator gives one score per answer"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_when_the_recipe_is_read(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(raw)


def test_weights_of_other_shapes_are_named(other: str, tmp_path: Path) -> None:
    judge_of(other)
    folder = tmp_path / "judge"
    with pytest.raises(ModelError, match=r"modules\.judge\.weights: .* does not exist"):
        judge_of(other, weights=str(folder))
    opd.run(RECIPE, overrides=["train.steps=1"], out=tmp_path / "run")
    (found,) = (tmp_path / "run" / "checkpoints" / "main").glob("step-*/modules/judge")
    with pytest.raises(ModelError, match=r"module 'judge': backbone\.\S+ of .* is missing or of another shape"):
        judge_of(other, weights=str(found))


def test_the_plan_counts_the_discriminators_model() -> None:
    (plan,) = make_plan(load_recipe(RECIPE))
    without = RECIPE | {"modules": {}, "objective": {"form": "cross_entropy", "on": ["data"]}}
    (plain,) = make_plan(load_recipe(without))
    every = plan.parameters  # tied: the embedding is used, and the output head is the same matrix
    assert "modules" not in plain.memory
    assert 16 * every <= plan.memory["modules"] <= 16 * (every + 200)


# Reward models


def test_pairs_are_those_whose_rewards_differ() -> None:
    rewards = {"r0": 1.0, "r1": 0.0, "r1b": 0.5, "r2": 1.0, "r3": None, "r4": 1.0, "r5": 1.0}
    names = [item.id for item in answers()]
    found = {(names[one], names[other]) for one, other in zip(*reward_pairs(answers(), rewards), strict=True)}
    assert found == {("r0", "r1"), ("r0", "r1b"), ("r1b", "r1")}


def test_the_loss_of_a_reward_model_is_bradley_terrys(other: str) -> None:
    student, kind = tiny_model(), RewardModel(model=other)
    module = open_modules({"judge": kind}, student, 0)["judge"]
    assert isinstance(module, OwnModule)
    scores = torch.arange(9, dtype=torch.float64)
    places = {item.id: place for place, item in enumerate(answers())}
    loss = module.loss(scores, answers(), {"r0": 0.0, "r1": 1.0, "r2": 3.0, "r3": 2.0})
    assert loss is not None
    gaps = [scores[places[one]] - scores[places[other]] for one, other in (("r1", "r0"), ("r2", "r3"))]
    assert float(loss) == pytest.approx(float(sum((1 + (-gap).exp()).log() for gap in gaps) / 2))
    assert module.measure(scores, answers()) == {"accuracy/judge": 0.5}
    assert module.loss(scores, answers(), {}) is None
    frozen = open_modules({"judge": kind.model_copy(update={"frozen": True})}, student, 0)["judge"]
    assert isinstance(frozen, OwnModule)
    assert frozen.loss(scores, answers(), {"r0": 0.0, "r1": 1.0}) is None


LEARNT: dict[str, Any] = {
    **RECIPE,
    "rollout": {"prompts": 4, "samples": 4, "max_new_tokens": 8},
    "stages": [
        {"name": "learn", "objective": [], "modules": {"judge": {"kind": "reward_model", "lr": 1e-3}}, "train": {"steps": 2}},
        {"name": "use", "student": "stage:learn", "train": {"steps": 2, "lr": 1e-4},
         "modules": {"judge": {"kind": "reward_model", "weights": "stage:learn#judge", "frozen": True}}},
    ],
}  # fmt: skip


def test_a_stage_trains_a_reward_model_and_a_later_one_reads_it(tmp_path: Path) -> None:
    run = opd.run(LEARNT, out=tmp_path / "run")
    cut = opd.run(
        LEARNT,
        out=tmp_path / "cut",
        on_step=lambda run, found: run.stop() if (found["stage"], found["step"]) == ("learn", 1) else None,
    )
    assert cut.summary["status"] == "stopped"
    again = opd.resume(tmp_path / "cut")
    learn, use = (run.directory / "checkpoints" / name / "step-000002" for name in ("learn", "use"))
    judge = Path("modules") / "judge" / "weights.safetensors"
    assert (again.model / judge).read_bytes() == (learn / judge).read_bytes() == (use / judge).read_bytes()
    start = load_model("tiny/generalist", device="cpu").module.state_dict()
    for name, tensor in load_file(learn / "model.safetensors").items():
        assert torch.equal(tensor, start[name]), name  # the student stood still
    assert [line["loss"] for line in run.metrics if line["stage"] == "learn"] == [None, None]
    assert all(line["grad_norm/judge"] == 0 for line in run.metrics if line["stage"] == "use")
    assert all("score/judge" in line for line in run.metrics)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": {}}, "it has no term, and no module learns by itself"),
        ({"modules": {"judge": {"kind": "reward_model", "frozen": True}}}, "frozen: true without `weights`"),
        ({"modules": {"judge": {"kind": "reward_model", "frozen": True, "weights": "x"}}}, "no term reads its score"),
        ({"rollout": {"samples": 1}}, r"rollout\.samples is 1"),
    ],
)
def test_what_a_reward_model_cannot_learn_from_is_said(changes: dict[str, Any], message: str) -> None:
    stage = {**LEARNT["stages"][0], **changes}
    with pytest.raises(RecipeError, match=message):
        load_recipe({**LEARNT, "stages": [stage]})
